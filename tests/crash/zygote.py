"""A zygote: a process with one thread that has imported everything, so that it forks traced processes in milliseconds.

::

    with Zygote() as zygote:
        assert zygote.call(function, 1, 2) == 3           # a top-level function of a module, run in the zygote

Such a function may fork (`Tracer.run`, `forked`) any number of times. Its result or exception is sent back; changes
that it makes to the zygote's memory persist.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from tests.ranks.world import start_server

_END_S = 20.0
_START_S = 60.0

_context = multiprocessing.get_context("forkserver")


class Zygote:
    """The process; it lives from `__enter__` to `__exit__`."""

    def __enter__(self) -> Self:
        start_server()
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), name="zygote", daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self._process.close()

    @property
    def pipe(self) -> Any:
        """The pipe that becomes readable when `result` will not block."""
        return self._pipe

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> Any:
        """Call a function in the zygote, and return its result."""
        self.send(function, *args, timeout_s=timeout_s)
        return self.result(timeout_s)

    def send(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> None:
        """Start a call of a function in the zygote."""
        self._pipe.send((function, args, timeout_s))

    def result(self, timeout_s: float = 60.0) -> Any:
        """Wait for the call, and return its result.

        Raises:
            AssertionError: the function raised, ended the process, or did not return in time.
        """
        try:
            if not self._pipe.poll(timeout_s + _START_S):
                self._process.kill()
                raise AssertionError(f"the function did not return within {timeout_s} s")
            result, error = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_END_S)
            raise AssertionError(f"the zygote has ended with exit code {self._process.exitcode}") from None
        if error:
            raise AssertionError(error)
        return result


def _serve(pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the test run ends its children
    _warm_up()
    while True:
        try:
            function, args, timeout_s = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__)
        try:
            answer = function(*args), ""
        except BaseException:
            answer = None, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _warm_up() -> None:
    """Import and cache everything that first saves and loads need, and check that one thread is left."""
    from tests.crash.scenarios import warm_up  # imported in the new process only

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        warm_up(Path(folder))
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to, and so copy, the pages of all objects
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise RuntimeError(f"the zygote must have one thread to fork safely, and has {tasks}: {threading.enumerate()}")


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process forked from this one, and return its result, which is pickled.

    Raises:
        AssertionError: the function raised or ended the process.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(function, args, writing)
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if not data:
        raise AssertionError(f"the process has ended with exit code {os.waitstatus_to_exitcode(status)}")
    result, error = pickle.loads(data)
    if error:
        raise AssertionError(error)
    return result


def _answer(function: Callable[..., Any], args: tuple[Any, ...], writing: int) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError), open(writing, "wb") as file:
            try:
                answer = function(*args), ""
            except BaseException:
                answer = None, traceback.format_exc()
            file.write(pickle.dumps(answer))
        code = 0
    finally:
        os._exit(code)
