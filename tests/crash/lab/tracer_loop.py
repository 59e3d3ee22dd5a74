"""The loop of a tracer: it follows processes, and carries out one call at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.crash.lab import ptrace
from tests.crash.lab.tracer_actions import Action, Fail, Kill, Short
from tests.crash.lab.tracer_calls import describe, outcome, shortened

if TYPE_CHECKING:
    from tests.crash.lab.calls import FileCall
    from tests.crash.lab.ptrace import Registers
    from tests.crash.lab.tracer_actions import Decide

_STOPPING = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_RESTARTED = range(-516, -511)  # ERESTART*: a signal came first, and the kernel restarts the call


class TracerTimeoutError(Exception):
    """A traced process did not end in time; all were killed."""


@dataclass(slots=True)
class _Current:
    """The call that is being carried out."""

    thread: int
    call: FileCall
    registers: Registers
    action: Action | None


class TraceLoop:
    """One run: the threads that are followed, and their calls.

    Attributes:
        first: the process that runs the function.
        calls: every call that returned.
        stopped: the call that was prevented by a kill before it.
        exits: the exit code of each process.

    Args:
        first: the process that runs the function.
        root: calls on paths below this directory, and marks, are recorded.
        decide: see `Tracer.run`.
        with_data: record the bytes of writes.
    """

    def __init__(self, first: int, root: str, decide: Decide | None, *, with_data: bool) -> None:
        self.calls: list[FileCall] = []
        self.stopped: FileCall | None = None
        self.exits: dict[int, int] = {}
        self.first = first
        self._root = root
        self._decide = decide
        self._with_data = with_data
        self._processes = {first: first}  # the process of each thread
        self._over: set[int] = set()  # threads that have ended
        self._current: _Current | None = None
        self._waiting: deque[int] = deque()
        self._ending = False
        self._late = False

    def follow(self, deadline_s: float) -> None:
        """Follow all processes until they have ended.

        Raises:
            TracerTimeoutError: a process did not end in time; all were killed.
        """
        timer = threading.Timer(deadline_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            self._until_all_have_ended()
        except BaseException:
            self.kill("all")
            self._decide = None
            self._until_all_have_ended()
            raise
        finally:
            timer.cancel()
            timer.join()
        if self._late:
            last = "\n".join(map(str, self.calls[-5:])) or "none"
            raise TracerTimeoutError(f"the traced program did not end within {deadline_s:g} s; its last calls:\n{last}")

    def kill(self, whom: str, caller: int = 0) -> set[int]:
        """Kill processes, and return them."""
        found = {*self._processes.values()}
        if whom == "all":
            self._ending = True
        elif whom == "others":
            found.discard(self.first)
        else:
            found = {self.first} if whom == "first" else {caller}
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return found

    def _expire(self) -> None:
        self._late = True
        self.kill("all")

    def _until_all_have_ended(self) -> None:
        while True:
            try:
                thread, status = os.waitpid(-1, ptrace.WAIT_ALL)
            except ChildProcessError:
                return
            if os.WIFSTOPPED(status):
                with contextlib.suppress(ProcessLookupError):  # killed meanwhile: a later waitpid reports its end
                    self._stopped(thread, os.WSTOPSIG(status), status >> 16)
            else:
                self._ended(thread, os.waitstatus_to_exitcode(status))

    def _ended(self, thread: int, code: int) -> None:
        self._over.add(thread)
        process = self._processes.pop(thread, thread)
        if thread == process:
            self.exits[process] = code
        if thread in self._waiting:
            self._waiting.remove(thread)
        if self._current is not None and self._current.thread == thread:
            self._next()

    def _stopped(self, thread: int, number: int, event: int) -> None:
        self._meet(thread)
        if event in ptrace.EVENTS_STARTED:  # the new thread's own stop may come later than further calls of this one
            new = ptrace.event_message(thread)
            if new not in self._over:  # or it came earlier
                self._meet(new)
        if self._ending:
            os.kill(self._processes[thread], signal.SIGKILL)
        elif event == ptrace.EVENT_SECCOMP:
            self._at_call(thread)
        elif event == ptrace.EVENT_STOP and number in _STOPPING:
            ptrace.leave_stopped(thread)
        elif event == ptrace.EVENT_EXEC:
            self._forget_threads(thread)
            ptrace.resume(thread)
        elif number == ptrace.SYSCALL_STOP:
            self._answered(thread)
        else:
            ptrace.resume(thread, 0 if event else number)

    def _meet(self, thread: int) -> None:
        """Note the process of a thread."""
        if thread not in self._processes:
            self._processes[thread] = _process_of(thread)

    def _forget_threads(self, thread: int) -> None:
        """Forget the other threads of a process that has called exec: the kernel has ended them."""
        before = ptrace.event_message(thread)
        gone = [each for each, process in self._processes.items() if process == thread != each]
        for each in gone:
            del self._processes[each]
        if self._current is not None and self._current.thread in {before, *gone}:
            self._next()

    # --- calls --------------------------------------------------------------------------------------------

    def _at_call(self, thread: int) -> None:
        call = describe(thread, ptrace.registers(thread))
        if call is None or not self._concerns(call):
            ptrace.resume(thread)
        elif self._current is not None:
            self._waiting.append(thread)
        else:
            self._begin(thread)

    def _concerns(self, call: FileCall) -> bool:
        below = f"{self._root}/"
        return call.name == "mark" or any(f"{path}/".startswith(below) for path in (call.path, call.to))

    def _begin(self, thread: int) -> None:
        registers = ptrace.registers(thread)
        call = describe(thread, registers)
        if call is None:
            ptrace.resume(thread)
            return
        call = replace(call, process=self._processes[thread], thread=thread)
        action = self._decide(len(self.calls), call) if self._decide else None
        self._current = _Current(thread, call, registers, action)
        if isinstance(action, Kill) and action.moment == "before":
            self._kill(action, call)
        elif isinstance(action, Fail):
            changed = registers.copy()
            changed.orig_rax, changed.rax = 2**64 - 1, 2**64 - action.errno
            ptrace.set_registers(thread, changed)
        elif isinstance(action, Short | Kill) and action.nbytes is not None:
            ptrace.set_registers(thread, shortened(thread, registers, action.nbytes))
        if not self._ending:
            ptrace.resume_until_answer(thread)

    def _kill(self, action: Kill, call: FileCall) -> None:
        if call.process in self.kill(action.whom, call.process) and action.moment == "before":
            self.stopped = call

    def _answered(self, thread: int) -> None:
        current = self._current
        if current is None or current.thread != thread:
            ptrace.resume(thread)
            return
        found = ptrace.registers(thread)
        if isinstance(current.action, Short | Kill) and current.action.nbytes is not None:
            # A call preserves these registers, and the program relies on it: undo the shortening.
            found.rsi, found.rdx = current.registers.rsi, current.registers.rdx
            ptrace.set_registers(thread, found)
        if found.answer not in _RESTARTED:
            self._record(current, found)
        if isinstance(current.action, Kill) and current.action.moment == "after":
            self._kill(current.action, current.call)
        ptrace.resume(thread)
        self._next()

    def _record(self, current: _Current, found: Registers) -> None:
        inode, data = outcome(current.thread, current.call, found, with_data=self._with_data)
        self.calls.append(replace(current.call, result=found.answer, inode=inode, data=data))

    def _next(self) -> None:
        """Begin the call of the next waiting thread."""
        self._current = None
        while self._waiting and self._current is None and not self._ending:
            with contextlib.suppress(ProcessLookupError):
                self._begin(self._waiting.popleft())


def _process_of(thread: int) -> int:
    """Return the process of a thread."""
    with contextlib.suppress(OSError), open(f"/proc/{thread}/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))
    return thread
