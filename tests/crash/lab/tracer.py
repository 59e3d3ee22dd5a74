"""Run a function in a process of its own, and see, kill, refuse or cut short its calls to the file system.

::

    tracer = Tracer(folder)                              # calls below this directory; all others just go on

    def child() -> None:                                 # in a new process; its threads and children are followed
        with SyncCheckpointer() as ckpt:
            ckpt.save(state, folder / "step-1")
        tracer.mark("written step-1")                    # becomes a call "mark" in the record, in its place

    trace = tracer.run(child)                            # untouched
    print(trace.exit, trace.error, *trace.marks, len(trace.calls))

    tracer.run(child, lambda number, call: Kill("before") if number == 7 else None)
    tracer.run(child, lambda number, call: Kill("after", nbytes=100) if call.name == "write" else None)  # torn
    tracer.run(child, lambda number, call: Fail(errno.ENOSPC) if call.name == "allocate" else None)
    tracer.run(child, lambda number, call: Short(4096) if call.name == "write" and call.nbytes > 4096 else None)

Calls are seen at the kernel (ptrace and a seccomp filter: Linux on x86-64, where that is permitted; `why_not` tells),
whoever makes them: Python, torch, another process that was started. They are carried out one after the other, also
where threads make them at the same time, so that the record is their order, and a kill finds just the recorded ones
done. What threads do between these calls goes on in parallel, so two runs may differ in the order of their calls.

The process that calls `Tracer.run` forks. So it should have one thread, and no other children: make one for it.

Not seen: writes to memory that a file is mapped to, and changes of attributes (modes, times). io_uring is refused, as
by kernels without it.
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

_ERROR_BYTES = 60_000  # less than a pipe holds, so that who dies need not wait for a reader


@dataclass(frozen=True, slots=True)
class Trace:
    """What a traced function has done.

    Attributes:
        calls: every call that was answered, failed ones too, in their order.
        stopped: the call that a kill before it has prevented, if any.
        process: the process that ran the function.
        exits: how each process has ended: its exit code; negative: the signal.
        error: the traceback of what the function has raised; empty if it has not.
    """

    calls: tuple[FileCall, ...] = field(repr=False)
    stopped: FileCall | None
    process: int
    exits: Mapping[int, int]
    error: str = ""

    @property
    def exit(self) -> int:
        """How the process that ran the function has ended; see ``exits``."""
        return self.exits[self.process]

    @property
    def marks(self) -> list[str]:
        """What was marked, in its order."""
        return [call.data.decode() for call in self.calls if call.name == "mark"]


class Tracer:
    """Runs functions, each in a process of its own, and records their calls to the file system.

    Args:
        root: the directory below which calls are seen.
        with_data: keep what was written.
        deadline_s: how long a function may take, with all that it has started.
    """

    def __init__(self, root: str | os.PathLike[str], *, with_data: bool = False, deadline_s: float = 60.0) -> None:
        self.root = os.path.realpath(root)
        self._with_data = with_data
        self._deadline_s = deadline_s
        self._marks = -1

    def mark(self, text: str) -> None:
        """Put a mark into the record. For the traced function, and what it has forked."""
        os.write(self._marks, text.encode())

    def run(self, function: Callable[[], object], decide: Decide | None = None) -> Trace:
        """Run a function in a new process, until that and all that it has started have ended. Blocks.

        Args:
            function: what to run; its process has exit code 0 if it returns, 1 if it raises.
            decide: called with the number of each call, from 0, and the call as it is about to be made; None lets it
                be. All threads that come to a call wait meanwhile.

        Raises:
            TracerTimeoutError: it did not end in time; all was killed.
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
    """Be the new process: wait until somebody follows, run the function, end."""
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
    """Say why nothing can be traced here; empty if it can. Forks, as `Tracer.run` does."""
    if reason := ptrace.unsupported():
        return reason
    with tempfile.TemporaryDirectory() as folder:
        try:
            trace = Tracer(folder, deadline_s=10).run((Path(folder) / "file").touch)
        except OSError as exc:
            return f"tracing is not permitted here: {exc}"
    if [call.name for call in trace.calls] != ["create"]:
        return f"tracing does not work here: it has seen {trace.calls}, and {trace.error}"
    return ""
