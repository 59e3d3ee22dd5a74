"""Run a function in its own process, and record its calls on the file system, kill at them, refuse or shorten them.

::

    tracer = Tracer(folder)                              # records calls below this directory only

    def child() -> None:                                 # in a new process; its threads and children are followed
        with SyncCheckpointer() as ckpt:
            ckpt.save(state, folder / "step-1")
        tracer.mark("written step-1")                    # recorded as a call named "mark"

    trace = tracer.run(child)                            # record only
    print(trace.exit, trace.error, *trace.marks, len(trace.calls))

    tracer.run(child, lambda number, call: Kill("before") if number == 7 else None)
    tracer.run(child, lambda number, call: Kill("after", nbytes=100) if call.name == "write" else None)  # torn
    tracer.run(child, lambda number, call: Fail(errno.ENOSPC) if call.name == "allocate" else None)
    tracer.run(child, lambda number, call: Short(4096) if call.name == "write" and call.nbytes > 4096 else None)

The tracer stops each call at the kernel (ptrace and a seccomp filter, on Linux on x86-64 where tracing is permitted;
see `why_not`), whether Python, torch or a child process makes it. Calls of concurrent threads are carried out one at a
time. So the record has their true order, and when a process is killed, exactly the recorded calls have been carried
out. Between calls the threads run in parallel, so two runs may differ in the order of their calls.

`Tracer.run` forks and reaps all children of its process. Call it in a process with one thread and no other children.

Not recorded: writes to memory-mapped files, and changes of attributes (modes, times). io_uring calls fail with ENOSYS,
as in kernels without it, because requests in a ring bypass the tracer.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.crash.lab import ptrace
from tests.crash.lab.tracer_actions import Action, Decide, Fail, Kill, Short
from tests.crash.lab.tracer_calls import MARKS, install_filter
from tests.crash.lab.tracer_loop import TraceLoop, TracerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.crash.lab.calls import FileCall

__all__ = ["Action", "Decide", "Fail", "Kill", "Short", "Trace", "Tracer", "TracerTimeoutError", "why_not"]

_ERROR_BYTES = 60_000  # less than the capacity of a pipe, so that the dying process never waits for a reader


@dataclass(frozen=True, slots=True)
class Trace:
    """The record of a traced function.

    Attributes:
        calls: every call that returned, failed ones too, in their order.
        stopped: the call that was prevented by a kill before it, if any.
        process: the process that ran the function.
        exits: the exit code of each process; a negative signal number if it was killed.
        error: the traceback of the exception that the function raised; empty if there was none.
    """

    calls: tuple[FileCall, ...] = field(repr=False)
    stopped: FileCall | None
    process: int
    exits: Mapping[int, int]
    error: str = ""

    @property
    def exit(self) -> int:
        """The exit code of the process that ran the function; see ``exits``."""
        return self.exits[self.process]

    @property
    def marks(self) -> list[str]:
        """The texts of all marks, in their order."""
        return [call.data.decode() for call in self.calls if call.name == "mark"]


class Tracer:
    """A tracer that runs functions, each in its own process, and records their calls on the file system.

    Args:
        root: the directory below which calls are recorded.
        with_data: record the bytes of writes.
        deadline_s: the time limit for a function and everything that it has started.
    """

    def __init__(self, root: str | os.PathLike[str], *, with_data: bool = False, deadline_s: float = 60.0) -> None:
        self.root = os.path.realpath(root)
        self._with_data = with_data
        self._deadline_s = deadline_s
        self._marks = -1

    def mark(self, text: str) -> None:
        """Add a mark to the record. Call it in the traced function, or in a process forked from it."""
        os.write(self._marks, text.encode())

    def run(self, function: Callable[[], object], decide: Decide | None = None) -> Trace:
        """Run a function in a new process, until this process and all its descendants have ended. Blocks.

        Args:
            function: the function; its process ends with exit code 0 if it returns, 1 if it raises.
            decide: called before each call with its number, from 0, and the call. Returns an action, or None to leave
                the call alone. Meanwhile every thread that comes to a call waits.

        Raises:
            TracerTimeoutError: a process did not end in time; all were killed.
            OSError: tracing is not permitted.
        """
        reading, writing = os.pipe()
        self._marks = os.memfd_create(MARKS)
        adopting = ptrace.adopt_orphans(True)
        try:
            loop = self._followed(function, decide, reading, writing)
            error = os.read(reading, _ERROR_BYTES).decode(errors="replace")
        finally:
            ptrace.adopt_orphans(adopting)
            os.close(reading)
            os.close(self._marks)
        return Trace(tuple(loop.calls), loop.stopped, loop.first, loop.exits, error)

    def _followed(self, function: Callable[[], object], decide: Decide | None, reading: int, writing: int) -> TraceLoop:
        start, go = os.pipe()
        try:
            process = os.fork()
            if process == 0:
                os.close(go)
                os.close(reading)
                _run(function, start, writing)
            loop = TraceLoop(process, self.root, decide, with_data=self._with_data)
            try:
                ptrace.seize(process)
            except BaseException:
                loop.kill("all")
                os.waitpid(process, 0)
                raise
            os.write(go, b"!")
        finally:
            for fd in (start, go, writing):
                os.close(fd)
        loop.follow(self._deadline_s)
        return loop


def _run(function: Callable[[], object], start: int, errors: int) -> None:
    """Wait until the tracer has attached, run the function, and exit. Runs in the new process."""
    code = 1
    try:
        if os.read(start, 1):
            os.close(start)
            install_filter()
            function()
            code = 0
    except BaseException:
        os.write(errors, traceback.format_exc().encode()[-_ERROR_BYTES:])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def why_not() -> str:
    """Return why processes can't be traced here; empty if they can. Forks, like `Tracer.run`."""
    if reason := ptrace.unsupported():
        return reason
    with tempfile.TemporaryDirectory() as folder:
        try:
            trace = Tracer(folder, deadline_s=10).run((Path(folder) / "file").touch)
        except OSError as exc:
            return f"tracing is not permitted here: {exc}"
    if [call.name for call in trace.calls] != ["create"]:
        return f"tracing does not work here: it has recorded {trace.calls}, error: {trace.error}"
    return ""
