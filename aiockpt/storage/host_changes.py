"""Deletions and renamings on the disks of several hosts: rank 0 decides on them, and each host does its own.

They ride on the rounds that all ranks have anyway. Each rank sends what it has done, and receives what is to do; what
rank 0 has no report of is sent again. A part is changed only if its manifest is the one that rank 0 has seen. So a
message that comes twice, or late, harms nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.core.threads import DaemonThreads, Workers
from aiockpt.errors import AiockptError, DeleteError

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger("aiockpt")


class HostChange(NamedTuple):
    """A deletion or renaming that one host has to do."""

    disk: str  # the id of its disk
    path: str
    mark: str  # of the part that is meant
    to: str = ""  # its name from then on; empty: it is deleted


class HostReport(NamedTuple):
    """The outcome of a change: it is done, or there is a problem."""

    change: HostChange
    problem: str = ""


@dataclass
class _PendingChange:
    """A change of a checkpoint that not all disks have made."""

    marks: dict[str, str]  # of those that have not, by the ids of their disks
    first: Collection[str]  # the ids of disks that come before the others
    to: str
    is_ordered: bool
    total: int  # disks that have to make it
    problem: str = field(default="")

    @property
    def turn(self) -> set[str]:
        """The ids of the disks whose turn it is."""
        return (self.marks.keys() & set(self.first)) or set(self.marks)

    @property
    def has_begun(self) -> bool:
        """Whether those have made it that come first, so that the checkpoint does not count any more."""
        return self.marks.keys().isdisjoint(self.first)


class HostChanges:
    """The changes of a run. Rank 0 knows all of them; each rank that does what is to do on a disk does so in a thread.

    Args:
        change_own: makes a change on the own disk. Blocks; raises OSError or AiockptError.
    """

    def __init__(self, change_own: Callable[[HostChange, Workers], None]) -> None:
        self._change_own = change_own
        self._lock = threading.Lock()
        self._pending: dict[str, _PendingChange] = {}  # by path, in their order; of rank 0
        self._reports: list[HostReport] = []  # of this rank, since the last round
        self._turn = threading.Lock()  # to change the own disk
        self._thread = DaemonThreads(1, "aiockpt-disk-changes")
        self._workers = Workers(1, "aiockpt-disk-changes")
        self._unclosed = weakref.finalize(self, _end, self._thread, self._workers, 0.0)
        self._unclosed.atexit = False
        self._is_ordered = False  # what is decided on now
        self._own: str | None = None
        self._last: Future[None] | None = None  # that was begun

    def serve(self, own: str | None) -> None:
        """Do from now on what is to do on the disk with this id; None: another rank does."""
        self._own = own

    # --- on rank 0 ----------------------------------------------------------------------------------------

    def add(self, path: str, marks: Mapping[str, str], *, first: Collection[str] = (), to: str = "") -> None:
        """Decide on a change of all parts of a checkpoint.

        Args:
            path: the checkpoint.
            marks: that of each part, by the id of its disk.
            first: the ids of disks that make it before the others.
            to: see `HostChange`.
        """
        with self._lock:
            self._pending[path] = _PendingChange(dict(marks), first, to, self._is_ordered, len(marks))

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Delete what is decided on within this context in this order, whatever is interrupted."""
        self._is_ordered = True
        try:
            yield
        finally:
            self._is_ordered = False

    def due(self) -> list[HostChange]:
        """Return what is to do now.

        Where the order counts, other disks wait with the next checkpoint until a disk has made one no longer count.
        """
        found: list[HostChange] = []
        ahead: set[str] = set()
        with self._lock:
            for path, pending in self._pending.items():
                turn = pending.turn
                if not pending.is_ordered or pending.has_begun or ahead in (set(), turn):
                    found += [HostChange(disk, path, pending.marks[disk], pending.to) for disk in sorted(turn)]
                if pending.is_ordered and not (pending.has_begun or pending.problem):
                    ahead = ahead or turn
        return found

    def note(self, reports: Iterable[HostReport]) -> None:
        """Take note of what hosts have done. A renaming that has failed is given up."""
        with self._lock:
            for (disk, path, mark, _), problem in reports:
                pending = self._pending.get(path)
                if pending is None or pending.marks.get(disk) != mark:
                    continue
                pending.problem = problem
                if not problem or pending.to:
                    del pending.marks[disk]
                if not pending.marks:
                    del self._pending[path]

    def left(self, *, renames: bool) -> int:
        """Return how many checkpoints are being renamed, or deleted; raise DeleteError if one can't be."""
        with self._lock:
            left = [pending for pending in self._pending.values() if bool(pending.to) == renames]
        problem = next((pending.problem for pending in left if pending.problem), "")
        if problem:
            raise DeleteError(problem)
        return len(left)

    def raise_problem(self, path: str) -> None:
        """Raise DeleteError if the deletion of a checkpoint has failed on a disk before any other has made it."""
        with self._lock:
            pending = self._pending.get(path)
            if pending is not None and pending.problem and len(pending.marks) == pending.total:
                del self._pending[path]
                raise DeleteError(pending.problem)

    # --- on the ranks that change disks -------------------------------------------------------------------

    def reports(self) -> list[HostReport]:
        """Take what this rank has done since the last round, to send it to rank 0."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def accept(self, changes: Sequence[HostChange]) -> Future[None] | None:
        """Begin to do what is to do on the own disk; return a future of the end, or None if there is nothing."""
        mine = [change for change in changes if change.disk == self._own]
        if not mine:
            return None
        try:
            self._last = self._thread.submit(self._make, mine)
        except RuntimeError as exc:  # rank 0 sends it again
            logger.warning("no thread could be started to change the disk of this host: %s", exc)
            return None
        return self._last

    def _make(self, changes: Sequence[HostChange]) -> None:
        for change in changes:
            problem = ""
            try:
                with self._turn:
                    self._change_own(change, self._workers)
            except (OSError, AiockptError) as exc:
                problem = str(exc)
                done = "renamed" if change.to else "deleted"
                logger.warning("the part of %s on the disk of this host is not %s: %s", change.path, done, exc)
            report = HostReport(change, problem)
            self.note([report])  # on rank 0
            with self._lock:
                self._reports.append(report)

    def wait(self) -> None:
        """Wait until what was accepted is done. Blocks."""
        if self._last is not None:
            self._last.result()

    @contextlib.asynccontextmanager
    async def held_off(self, workers: Workers) -> AsyncIterator[None]:
        """Change nothing within the context, in which a part is published. Not to be cancelled."""
        await workers.run(self._turn.acquire)
        try:
            yield
        finally:
            self._turn.release()

    def close(self, timeout_s: float) -> None:
        """Do what was accepted, for so long at most. Blocks; idempotent."""
        if not _end(self._thread, self._workers, timeout_s):
            logger.warning("what is to do on the disk of this host is left behind as it does not end")


def _end(thread: DaemonThreads, workers: Workers, timeout_s: float) -> bool:
    return thread.end(timeout_s) and workers.end(timeout_s)
