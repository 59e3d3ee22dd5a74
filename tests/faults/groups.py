"""Faults by what is injected, and what must come of each; see `tests.faults.sweep`."""

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

Expected = Literal["told", "saved", "saved but for syncs"]


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of fault.

    Attributes:
        action: what is done to a call; None for a call that it is not for.
        number: what the kernel says, or the save if it says nothing.
        calls: the names of calls that it is for; empty for all.
        expected: what must come of it. "told": the save fails, and says so with this error, or it is written.
        stays: it happens to all calls from the one that is struck on.
        retries: of the checkpointer.
    """

    action: Callable[[FileCall], Action | None]
    number: int
    calls: tuple[str, ...] = ()
    expected: Expected = "told"
    stays: bool = False
    retries: aiockpt.Retries | None = None

    def concerns(self, call: FileCall) -> bool:
        """Tell whether it can strike such a call."""
        return not self.calls or call.name in self.calls


def _fails(name: str, expected: Expected = "told", *, stays: bool = False, tried: bool = False) -> Group:
    number = getattr(errno, name)
    retries = QUICK_RETRIES if tried else None
    return Group(lambda call: Fail(number), number, expected=expected, stays=stays, retries=retries)


def _short(nbytes: int, expected: Expected = "saved") -> Group:
    return Group(lambda call: Short(nbytes) if call.nbytes > nbytes else None, errno.EIO, ("write",), expected)


def _is_direct(call: FileCall) -> bool:
    """Tell whether a file that is opened, or written to, is so past the page cache."""
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
    "nothing written": _short(0, "told"),
}


@dataclass(slots=True)
class Counts:
    """What has come of faults.

    Attributes:
        faults: how many were injected, each in a run of its own.
        kinds: which calls were struck, and by what.
        failed: saves that failed, and told so rightly.
        saved: saves that succeeded all the same.
        wrong: what was not as it must be: the fault, and what.
        seconds: how long it took.
    """

    faults: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: int = 0
    saved: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Counts) -> None:
        """Count these as well."""
        self.faults += other.faults
        self.kinds += other.kinds
        self.failed += other.failed
        self.saved += other.saved
        self.wrong += other.wrong
        self.seconds += other.seconds

    def count(self, what: str, group: str, outcome: Outcome) -> None:
        """Count a run."""
        self.faults += 1
        self.kinds[outcome.kind, group] += 1
        self.saved += outcome.saved
        objection = outcome.wrong or _objection(GROUPS[group], outcome)
        if objection:
            self.wrong.append(f"{what}, {group} at {outcome.kind}: {objection}")
        else:
            self.failed += not outcome.saved


def _is_survived(group: Group, call: FileCall) -> bool:
    """Tell whether a save may be announced though this call has failed."""
    if group.expected == "saved but for syncs":
        return call.name != "sync" or group.number == errno.EINTR  # after which Python itself goes on
    was_deleted = group.number == errno.ENOENT and call.name == "exchange"  # then there is nothing to replace
    return call.name in ("unlink", "rmdir") or was_deleted


def _objection(group: Group, outcome: Outcome) -> str:
    """Say why an outcome is not what is expected; empty if it is."""
    if outcome.struck is None:
        return ""
    if outcome.saved:
        is_lost = group.expected != "saved" and not _is_survived(group, outcome.struck)
        return "it was announced as written, though what failed matters" if is_lost else ""
    said = outcome.error
    if group.expected == "saved":
        return f"it failed: {said}"
    if group.expected == "saved but for syncs" and outcome.struck.name != "sync":
        return f"it failed, though that may pass: {said}"
    if outcome.number != group.number:
        return f"its cause is {errno.errorcode.get(outcome.number, 'unknown')}: {said}"
    if os.strerror(group.number) in said or "wrote nothing" in said:
        return ""
    return f"it does not say {os.strerror(group.number)!r}: {said}"


def sweep(
    folder: Path, scenario: str, groups: Iterable[str], *, step: int = 1, first: int = 0, cleaned: bool = True
) -> Counts:
    """Let each call of a save fail in turn, in each of these ways. To be run in a process that may fork.

    Args:
        folder: an empty directory.
        scenario: which save.
        groups: which faults; with more than one, a ``step`` beyond 1 lets each call meet some of them.
        step: of the calls and groups, counted through, every so many are tried.
        first: from which on.
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
            outcome = runs.run(_aimed(group, target))
            if outcome.struck is not None:
                counts.count(scenario, group_name, outcome)
    counts.seconds = time.monotonic() - begin
    return counts


def _aimed(group: Group, target: int) -> Callable[[int, FileCall], Action | None]:
    """Strike the call of this number, if there is one; which threads come first may differ from run to run."""

    def strikes(number: int, call: FileCall) -> Action | None:
        is_aimed = number == target or (group.stays and number > target)
        return group.action(call) if is_aimed and group.concerns(call) else None

    return strikes
