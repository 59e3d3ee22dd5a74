"""Groups of faults, and the expected outcome of each; see `tests.faults.sweep`."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiockpt
from tests.crash.lab.calls import FileCall
from tests.crash.lab.tracer import Action, Fail, Short
from tests.faults.sweep import QUICK_RETRIES, Outcome, Sweep

Expected = Literal["reported", "saved", "saved but for syncs"]


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of fault.

    Attributes:
        action: returns the action on a call, or None to leave the call alone.
        number: the error number of the kernel, or of the save's error if the kernel reports none.
        calls: the names of the calls that it can strike; empty for all.
        expected: the outcome of the save. "reported": it fails with this error, unless the call is harmless. "saved":
            it succeeds. "saved but for syncs": it succeeds, unless the call is a sync.
        stays: True if the fault also strikes all later calls.
        retries: the retries of the checkpointer.
    """

    action: Callable[[FileCall], Action | None]
    number: int
    calls: tuple[str, ...] = ()
    expected: Expected = "reported"
    stays: bool = False
    retries: aiockpt.Retries | None = None

    def concerns(self, call: FileCall) -> bool:
        """Return whether the fault can strike such a call."""
        return not self.calls or call.name in self.calls


def _fails(name: str, expected: Expected = "reported", *, stays: bool = False, tried: bool = False) -> Group:
    number = getattr(errno, name)
    retries = QUICK_RETRIES if tried else None
    return Group(lambda call: Fail(number), number, expected=expected, stays=stays, retries=retries)


def _short(nbytes: int, expected: Expected = "saved") -> Group:
    return Group(lambda call: Short(nbytes) if call.nbytes > nbytes else None, errno.EIO, ("write",), expected)


def _is_direct(call: FileCall) -> bool:
    """Return whether a call opens a file for direct I/O, or writes to such a file."""
    if call.name == "create":
        return bool(call.flags & os.O_DIRECT)
    for fd in Path(f"/proc/{call.process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(fd) == call.path:
                lines = Path(f"/proc/{call.process}/fdinfo/{fd.name}").read_text().splitlines()
                if int(dict(line.split(":", 1) for line in lines)["flags"], 8) & os.O_DIRECT:
                    return True
    return False


def _refuses_direct(*, stays: bool = False) -> Group:
    def action(call: FileCall) -> Action | None:
        return Fail(errno.EINVAL) if _is_direct(call) else None

    return Group(action, errno.EINVAL, ("create", "write"), "saved", stays)


_PASSING = ("EAGAIN", "EBUSY", "EMFILE", "ENOMEM", "ESTALE", "ETIMEDOUT", "EINTR")

GROUPS = {
    **{name: _fails(name) for name in ("ENOSPC", "EIO", "EACCES", "EDQUOT", "EROFS", "ENOENT")},
    **{f"{name} for good": _fails(name, stays=True) for name in ("ENOSPC", "EIO", "EROFS")},
    **{f"{name} once": _fails(name, "saved but for syncs", tried=True) for name in _PASSING},
    "ESTALE for good": _fails("ESTALE", stays=True, tried=True),
    "direct I/O refused": _refuses_direct(),
    "direct I/O refused for good": _refuses_direct(stays=True),
    **{f"{nbytes} bytes at once": _short(nbytes) for nbytes in (1, 777, 4096, 8192)},
    "nothing written": _short(0, "reported"),
}


@dataclass(slots=True)
class Counts:
    """The results of many faults.

    Attributes:
        faults: the number of injected faults, each in its own run.
        kinds: the number of faults for each kind of call and group.
        failed: the number of saves that failed as expected.
        saved: the number of saves that succeeded in spite of the fault.
        wrong: a description of each fault with an unexpected outcome.
        seconds: the total time.
    """

    faults: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: int = 0
    saved: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Add other counts."""
        self.faults += other.faults
        self.kinds += other.kinds
        self.failed += other.failed
        self.saved += other.saved
        self.wrong += other.wrong
        self.seconds += other.seconds

    def count(self, what: str, group: str, outcome: Outcome) -> None:
        """Count one run."""
        self.faults += 1
        self.kinds[outcome.kind, group] += 1
        self.saved += outcome.saved
        objection = outcome.wrong or _objection(GROUPS[group], outcome)
        if objection:
            self.wrong.append(f"{what}, {group} at {outcome.kind}: {objection}")
        else:
            self.failed += not outcome.saved


def _is_harmless(group: Group, call: FileCall) -> bool:
    """Return whether a save may succeed although this call has failed."""
    if group.expected == "saved but for syncs":
        return call.name != "sync" or group.number == errno.EINTR  # Python itself retries after EINTR
    was_deleted = group.number == errno.ENOENT and call.name == "exchange"  # the old checkpoint is gone: plain rename
    # A directory that can't be renamed while it is open is let go of, and its rename is tried once more.
    may_be_open = group.number in (errno.EACCES, errno.EBUSY, errno.EPERM) and call.name in (
        "rename",
        "exchange",
        "move",
    )
    return call.name in ("unlink", "rmdir") or was_deleted or may_be_open


def _objection(group: Group, outcome: Outcome) -> str:
    """Return why an outcome is not the expected one; empty if it is."""
    if outcome.struck is None:
        return ""
    if outcome.saved:
        is_lost = group.expected != "saved" and not _is_harmless(group, outcome.struck)
        return "the save succeeded although a necessary call failed" if is_lost else ""
    error = outcome.error
    if group.expected == "saved":
        return f"the save failed: {error}"
    if group.expected == "saved but for syncs" and outcome.struck.name != "sync":
        return f"the save failed after a transient error: {error}"
    if outcome.number != group.number:
        return f"the cause of the error is {errno.errorcode.get(outcome.number, 'unknown')}: {error}"
    if os.strerror(group.number) in error or "wrote nothing" in error:
        return ""
    return f"the error does not say {os.strerror(group.number)!r}: {error}"


def sweep(
    folder: Path, scenario: str, groups: Iterable[str], *, step: int = 1, first: int = 0, cleaned: bool = True
) -> Counts:
    """Run a save once for each call and group, with a fault at this call. Call it in a zygote.

    Args:
        folder: an empty directory.
        scenario: the save.
        groups: the groups of faults; with several groups and a ``step`` above 1, each call meets some of them.
        step: 1 to run all pairs of group and call, n to run every nth.
        first: the offset of the first pair to run.
        cleaned: see `Sweep`.
    """
    begin = time.monotonic()
    counts, at = Counts(), 0
    for group_name in groups:
        group = GROUPS[group_name]
        runs = Sweep(folder / str(at), scenario, group.retries, cleaned=cleaned)
        for target, call in enumerate(runs.calls()):
            if not group.concerns(call):
                continue
            at += 1
            if (at - first) % step:
                continue
            outcome = runs.run(_at_call(group, target))
            if outcome.struck is not None:
                counts.count(scenario, group_name, outcome)
    counts.seconds = time.monotonic() - begin
    return counts


def _at_call(group: Group, target: int) -> Callable[[int, FileCall], Action | None]:
    """Return a decision that strikes the call of this number, which thread order may make another one in each run."""

    def strikes(number: int, call: FileCall) -> Action | None:
        is_aimed = number == target or (group.stays and number > target)
        return group.action(call) if is_aimed and group.concerns(call) else None

    return strikes
