"""Trainers in processes of their own, to be interrupted and terminated; forked from the server of tests.ranks."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self

import torch

import aiockpt
from tests.cancellation.moments import MOMENTS, Held, hold, options_of
from tests.cancellation.stops import WAIT_S, Writer
from tests.ranks.world import LOOPS, Loop, _context

Program = Callable[["Line", dict[str, Any]], None]


class Line:
    """The child's end of its connection to the test."""

    def __init__(self, pipe: connection.Connection, folder: Path, moment: str, loop: Loop, writer: Writer) -> None:
        self._pipe = pipe
        self.folder = folder
        self.moment = moment
        self.loop = loop
        self.writer = writer

    @property
    def options(self) -> dict[str, Any]:
        """Options of the child's checkpointer."""
        return options_of(MOMENTS[self.moment], self.writer)

    def send(self, *words: object) -> None:
        """Send words to the test."""
        self._pipe.send(words)

    def run(self, main: Callable[[], Any]) -> Any:
        """Run a coroutine function as `asyncio.run` does."""
        with asyncio.Runner(loop_factory=LOOPS[self.loop]) as runner:
            _tick(runner.get_loop())
            return runner.run(main())

    async def hold(self, submit: Callable[..., aiockpt.SaveHandle]) -> Held:
        """Start a save and wait until it is held at the moment; the test releases it."""
        held = await hold(submit, self.moment, self.folder, self.writer)
        threading.Thread(target=self._listen, args=(held,), daemon=True).start()
        return held

    def _listen(self, held: Held) -> None:
        try:
            self._pipe.recv()
        except EOFError:  # the test is over
            return
        held.stop.open()


class Child:
    """The test's end of the connection, and the child process.

    Args:
        program: function that the child runs.
        folder: directory of its checkpoints.
        moment: moment at which its save is held.
        loop: kind of its event loop.
        writer: kind of writer of its checkpointer.
        options: options for the program.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        moment: str,
        loop: Loop = "asyncio",
        writer: Writer = "thread",
        **options: Any,
    ) -> None:
        self._pipe, theirs = _context.Pipe()
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="stacks-")  # noqa: SIM115
        make = partial(Line, theirs, folder, moment, loop, writer)
        args = (program, make, options, self._stacks.name)
        # A daemonic process of multiprocessing may not start a writer process.
        self._process = _context.Process(target=_serve, args=args, daemon=writer == "thread")
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(WAIT_S)
        self._process.close()
        self._pipe.close()
        self._stacks.close()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        assert self._process.pid is not None
        return self._process.pid

    def expect(self, *words: object) -> None:
        """Wait for the child's next words, and check them."""
        if not self._pipe.poll(WAIT_S):
            self._abort(f"the child did not send {words}")
        assert self._pipe.recv() == words

    def signal(self, number: signal.Signals) -> None:
        """Send the child a signal."""
        os.kill(self.pid, number)

    def release(self) -> None:
        """Release the child's save."""
        self._pipe.send("go")

    def exit_code(self) -> int | None:
        """Wait until the child ends; return its exit code."""
        self._process.join(WAIT_S)
        if self._process.exitcode is None:
            self._abort("the child did not end")
        return self._process.exitcode

    def _abort(self, why: str) -> None:
        """End a child that hangs, and fail with the stacks of its threads."""
        self.signal(signal.SIGABRT)
        self._process.join(WAIT_S)
        raise AssertionError(f"{why}; its stacks:\n{self._stacks.read()}")


def _serve(program: Program, make: Callable[[], Line], options: dict[str, Any], stacks: str) -> None:
    faulthandler.enable(os.open(stacks, os.O_WRONLY))  # open to the end of the process: a child may hang at its exit
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    line = make()
    try:
        program(line, options)
    except (KeyboardInterrupt, asyncio.CancelledError) as exc:
        # A program that catches nothing ends with this exception.
        line.send(type(exc).__name__, *getattr(exc, "__notes__", ()))
        sys.exit(1)


def _tick(loop: asyncio.AbstractEventLoop) -> None:
    """Wake the loop periodically: asyncio handles a signal that arrives right before it waits only when it wakes."""
    loop.call_later(0.2, _tick, loop)


# --- programs ---------------------------------------------------------------------------------------


def awaits(line: Line, options: dict[str, Any]) -> None:
    """Await a save within ``async with``."""

    async def main() -> None:
        async with aiockpt.AsyncCheckpointer(**{**line.options, **options}) as ckpt:
            await _awaits(line, await line.hold(ckpt.save))

    line.run(main)


async def _awaits(line: Line, held: Held) -> None:
    line.send("held")
    try:
        await held.save
    except asyncio.CancelledError:
        # Runs when this task waits for the checkpointer to close: the next signal then arrives in the loop.
        asyncio.get_running_loop().call_soon(line.send, "cancelled")
        raise


def blocks(line: Line, options: dict[str, Any]) -> None:
    """Wait for a save within ``with``; a SIGTERM ends the program as sys.exit does."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with aiockpt.SyncCheckpointer(**{**line.options, **options}) as ckpt:
        held = asyncio.run(line.hold(ckpt.submit))
        threading.Thread(target=_report_closing, args=(line, ckpt), daemon=True).start()
        line.send("held")
        held.save.written.result()


def _report_closing(line: Line, ckpt: aiockpt.SyncCheckpointer) -> None:
    """Report when the program waits for its checkpointer to close."""
    while ckpt._engine._closed is None or not ckpt._engine._closed.expected:
        os.sched_yield()
    line.send("closing")


def is_terminated(line: Line, options: dict[str, Any]) -> None:
    """Cancel the main task at SIGTERM, as asyncio does at SIGINT."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with aiockpt.AsyncCheckpointer(**{**line.options, **options}) as ckpt:
            await _awaits(line, await line.hold(ckpt.save))

    line.run(main)


def closes(line: Line, options: dict[str, Any]) -> None:
    """Close the checkpointer at SIGTERM, and end."""

    async def main() -> None:
        asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
        ckpt = aiockpt.AsyncCheckpointer(**{**line.options, **options})
        await line.hold(ckpt.save)
        line.send("held")
        await asked.wait()
        line.send("closing")
        try:
            await ckpt.aclose()
        except aiockpt.SaveCancelledError as exc:
            line.send("gave up", "drain_timeout" in str(exc), "nothing of it is left" in str(exc))
            sys.exit(3)

    line.run(main)
