"""Child processes of the demo: run to the end, or killed on the way."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from aiockpt.cli.demo.events import Event, decode

_LINE_BYTES = 1 << 16
_SHOWN_BYTES = 1 << 14
_DRAIN_S = 5.0


class ChildError(Exception):
    """A child process failed, or hung."""


async def run_child(
    module: str, arguments: Sequence[str], on_event: Callable[[Event], bool], *, timeout_s: float = 120.0
) -> bool:
    """Run a module as a process until it ends, and pass each of its events to ``on_event``.

    If ``on_event`` returns True, the process is killed with SIGKILL; so it is if the caller is cancelled or anything
    fails. Return whether ``on_event`` had it killed; False if the process had already ended by then.

    Raises:
        ChildError: the process failed by itself, or sent nothing for ``timeout_s``; with its standard error.
    """
    with tempfile.TemporaryFile() as errors:
        process = await _start(module, arguments, errors)
        try:
            killed = await _listen(process, on_event, timeout_s)
            with anyio.fail_after(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise ChildError(f"{module} was silent for {timeout_s:g} s\n{_tail(errors)}") from None
        finally:
            with anyio.CancelScope(shield=True):
                _kill(process)
                await _drain(process)
                await process.aclose()
        if code != 0 and not killed:
            raise ChildError(f"{module} ended with exit code {code}\n{_tail(errors)}")
        return code != 0


async def _start(module: str, arguments: Sequence[str], errors: IO[bytes]) -> Process:
    # CUDA's matrix products are reproducible only with a workspace of fixed size. A new session keeps Ctrl-C away
    # from the child: its parent ends it.
    return await anyio.open_process(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stderr=errors,
        env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        start_new_session=True,
    )


async def _listen(process: Process, on_event: Callable[[Event], bool], timeout_s: float) -> bool:
    """Pass on events until the process closes its standard output; return whether it was killed."""
    assert process.stdout is not None
    stream = BufferedByteReceiveStream(process.stdout)
    killed = False
    while True:
        try:
            with anyio.fail_after(timeout_s):
                line = await stream.receive_until(b"\n", _LINE_BYTES)
        except anyio.IncompleteRead:
            return killed
        event = decode(line)
        if event is not None and on_event(event) and not killed:
            _kill(process)
            killed = True


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _drain(process: Process) -> None:
    """Read and drop the rest of the output of a killed process."""
    # anyio 4.4 feeds the end of the stream in `aclose`, and bytes that asyncio receives after that fail an assertion.
    assert process.stdout is not None
    with anyio.move_on_after(_DRAIN_S):  # a child of the process may still hold the pipe
        async for _ in process.stdout:
            pass


def _tail(errors: IO[bytes]) -> str:
    """Return the end of the standard error."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _SHOWN_BYTES))
    return errors.read().decode(errors="replace").rstrip()
