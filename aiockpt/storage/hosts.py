"""One checkpoint on the disks of several hosts: each has the files of its own ranks, and all documents.

The lowest rank of each host begins, publishes and deletes on the disk of its host, as the rounds of all ranks say; see
`aiockpt.saving.hosts`. What is published is read from all disks together, each file from the nearest one that has it.
The manifest says which disk has which files, and which one was published last:

==========================================  ==========================================================================
if files are missing                        the checkpoint
==========================================  ==========================================================================
and the disk that is published last, and    was never announced, or is being deleted: nothing shows it, and it is
deleted first, is here and lacks it         removed when the run is opened
and those have them that are not here       can't be read now: LoadError, which names the hosts
otherwise                                   is damaged
==========================================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import anyio

from aiockpt.core.threads import DaemonThreads, Workers, in_thread
from aiockpt.core.wording import some_of
from aiockpt.errors import (
    AiockptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeleteError,
    LoadError,
    MissingHostError,
    NoThreadError,
)
from aiockpt.format.manifest.manifest import DiskFacts, decode_head, disks_in, facts_in
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.storage.base import (
    Listing,
    LookBudget,
    SharedStorage,
    SharedTransaction,
    Source,
    Storage,
    Traits,
    shared_storage,
)
from aiockpt.storage.faults import errors
from aiockpt.storage.wrapper import WrapperSource, WrapperStorage

T = TypeVar("T")
At = TypeVar("At", bound=Listing | Source)

logger = logging.getLogger("aiockpt")

_AT_ONCE = 16
_SEAL_BYTES = 64  # at the end of a manifest: enough for its CRC
_MOST_HEADS = 4096
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a job."""

    id: str
    host: str
    storage: Storage = field(repr=False)  # of another host, only for reading

    def __str__(self) -> str:
        return f"host {self.host} (disk {self.id[:8]})"


@dataclass(frozen=True, slots=True)
class _ManifestFacts:
    """The beginning of a manifest."""

    created: str
    files: Mapping[str, int]
    disks: Sequence[DiskFacts]


@dataclass(slots=True, eq=False)
class _DiskPart(Generic[At]):
    """The part of a checkpoint on one disk."""

    disk: Disk
    at: At
    mark: str  # the same for copies of one manifest; empty without one


def _fetched(at: At, offset: int, nbytes: int) -> bytes:
    """Return bytes of a manifest. Blocks."""
    return (at.fetch if isinstance(at, Listing) else at.read_bytes)(MANIFEST_NAME, offset, nbytes)


def _part_on(disk: Disk, at: At) -> _DiskPart[At]:
    """Return what a disk has of a checkpoint. Blocks."""
    nbytes = at.files.get(MANIFEST_NAME, 0)
    begin = max(0, nbytes - _SEAL_BYTES)
    return _DiskPart(disk, at, f"{nbytes}:{_fetched(at, begin, nbytes - begin).hex()}" if nbytes else "")


@dataclass(frozen=True, slots=True)
class _Union(Generic[At]):
    """A checkpoint as all disks have it together."""

    parts: Sequence[_DiskPart[At]] = ()  # those of this very checkpoint, the nearest first
    head: _ManifestFacts | None = None
    missing: Collection[str] = ()  # files
    is_torn: bool = False  # it was never announced, or is being deleted

    def holders(self) -> dict[str, At]:
        """Return the nearest place of each file."""
        known = {} if self.head is None else self.head.files
        return {
            name: part.at
            for part in reversed(self.parts)
            for name, nbytes in part.at.files.items()
            if known.get(name, nbytes) == nbytes
        }

    @property
    def disks(self) -> Sequence[DiskFacts]:
        """Those that it was saved to."""
        return () if self.head is None else self.head.disks

    @property
    def last(self) -> str:
        """The id of the disk that is published last, and deleted first; empty if it is not known."""
        return self.disks[0].id if self.disks else ""


class HostChange(NamedTuple):
    """A deletion or renaming, which each host does on its own disk.

    A part is changed only if its manifest is one that rank 0 has seen: a message that comes late harms nothing.
    """

    path: str
    marks: Collection[str]  # of the parts that are meant
    first: str = ""  # the id of the disk that is changed before the others
    to: str = ""  # the name from then on; empty: it is deleted


class HostDisks(WrapperStorage):
    """Checkpoints on the disks of the hosts of a job, as one. What it writes, it writes to the own disk alone.

    Attributes:
        own: the disk of this host.
        disks: those of all hosts, the own one first.
        ranks: the id of the disk of each rank.
        serves: this rank is the lowest one of its host: what is done on the own disk, it does.
    """

    def __init__(self, disks: Sequence[Disk], own: str, ranks: Sequence[str] = (), rank: int = 0) -> None:
        self._is_partial = False
        self._heads: dict[str, _ManifestFacts] = {}  # by mark
        self._decided: deque[HostChange] = deque()
        self._undone: list[HostChange] = []
        self._turn = threading.Lock()
        self._behind: Future[None] | None = None
        self.meet(disks, own, ranks, rank)

    def meet(self, disks: Sequence[Disk], own: str, ranks: Sequence[str] = (), rank: int = 0) -> None:
        """Use these disks from now on; the own one must be the same storage as before."""
        (self.own,) = (disk for disk in disks if disk.id == own)
        self.inner = self.own.storage
        self.disks = (self.own, *(disk for disk in disks if disk is not self.own))
        self.ranks = ranks or [own]
        self.serves = self.ranks.index(own) == rank

    def __reduce__(self) -> tuple[Any, ...]:
        return HostDisks, ([self.own], self.own.id)  # a writer process writes to this disk only

    @property
    def traits(self) -> Traits:  # type: ignore[override] # as of a wrapper
        return self.inner.traits if len(self.disks) == 1 else Traits(single_files=False, is_divided=True)

    def partial(self) -> HostDisks:
        """Return a storage that also opens what lacks files, for those that have these from elsewhere."""
        other = HostDisks(self.disks, self.own.id)
        other._is_partial = True
        return other

    def missing(self, path: str) -> tuple[str, ...]:
        """Return the files of a checkpoint that no disk of this job has. Blocks; raises OSError."""
        return tuple(self._seen(path)[1].missing)

    stamp, stamps = SharedStorage.stamp, SharedStorage.stamps

    def check(self, path: str, *, overwrite: bool) -> None:
        if len(self.disks) == 1:  # else rank 0 looks at all of them when the save is planned
            super().check(path, overwrite=overwrite)

    async def begin(self, *args: Any, **options: Any) -> SharedTransaction:
        return await shared_storage(self.inner).begin(*args, **options)

    async def take_over(self, *args: Any, **options: Any) -> SharedTransaction:
        return await shared_storage(self.inner).take_over(*args, **options)

    # --- looking ----------------------------------------------------------------------------------------

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        parts, whole = self._look(path, budget or LookBudget())
        if not whole.parts or whole.is_torn:
            for part in parts:
                part.at.close()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return _WholeListing(path, parts, whole)

    def _look(self, path: str, budget: LookBudget) -> tuple[list[_DiskPart[Listing]], _Union[Listing]]:
        """Return all parts, and those that are one checkpoint. Blocks."""

        def look(disk: Disk) -> None:
            # Nothing is there either if it is deleted between the two.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), contextlib.ExitStack() as stack:
                listing = stack.enter_context(disk.storage.look(path, budget))
                parts.append(_part_on(disk, listing))
                stack.pop_all()

        parts: list[_DiskPart[Listing]] = []
        try:
            self._of_each(look)
            return parts, self._whole(parts)
        except BaseException:
            for part in parts:
                part.at.close()
            raise

    def _seen(self, path: str) -> tuple[dict[str, str], _Union[Listing]]:
        """Return the mark of the part on each disk, by its id, and what all together are. Blocks; raises OSError."""
        parts, whole = self._look(path, LookBudget())
        for part in parts:
            part.at.close()
        return {part.disk.id: part.mark for part in parts}, whole

    def _of_each(self, function: Callable[[Disk], T]) -> list[T]:
        """Call a function that blocks for each disk, several at once; raise the first error when all have ended."""
        if len(self.disks) < 2:
            return [function(self.own)]
        with DaemonThreads(min(len(self.disks), _AT_ONCE), "aiockpt-disks") as threads:
            return list(threads.map(function, self.disks))

    def _whole(self, parts: Sequence[_DiskPart[At]]) -> _Union[At]:
        """Choose the parts that are one checkpoint: another save may have left some of its own. Blocks."""
        ordered = sorted(parts, key=lambda part: self.disks.index(part.disk))
        marks = dict.fromkeys(part.mark for part in ordered if part.mark)
        if not marks:
            return _Union(ordered)
        found = [self._whole_of([part for part in ordered if part.mark == mark]) for mark in marks]
        return max(found, key=lambda whole: (not whole.is_torn, whole.head.created if whole.head else ""))

    def _whole_of(self, parts: Sequence[_DiskPart[At]]) -> _Union[At]:
        head = self._head_of(parts)
        if head is None:
            return _Union(parts)
        there = {item for part in parts for item in part.at.files.items()}
        whole = _Union(parts, head, [item[0] for item in head.files.items() if item not in there])
        lacks_it = {disk.id for disk in self.disks} - {part.disk.id for part in parts}
        return replace(whole, is_torn=bool(whole.missing) and whole.last in lacks_it)

    def _head_of(self, parts: Sequence[_DiskPart[At]]) -> _ManifestFacts | None:
        """Read a manifest; None if it is damaged."""
        for part in () if parts[0].mark in self._heads else parts:
            decoded = decode_head(_fetched(part.at, 0, part.at.files[MANIFEST_NAME]))
            facts = None if decoded is None else facts_in(decoded)
            if decoded is not None and facts is not None:
                if len(self._heads) >= _MOST_HEADS:
                    self._heads.clear()
                files = {name: each.nbytes for name, each in facts.items()}
                self._heads[part.mark] = _ManifestFacts(str(decoded.get("created")), files, disks_in(decoded))
                break
        return self._heads.get(parts[0].mark)

    def folders_in(self, directory: str) -> list[set[str]]:
        """Return the names of the directories in one, on each disk. Blocks; raises OSError."""

        def folders(disk: Disk) -> set[str]:
            try:
                with disk.storage.look(directory) as listing:
                    return set(listing.folders)
            except FileNotFoundError:
                return set()

        return self._of_each(folders)

    # --- deleting and renaming ----------------------------------------------------------------------------

    async def delete(self, path: str, *, workers: Workers) -> None:
        """Delete it on the disk that makes it count, if that is the own one; on the others with the next rounds."""
        if len(self.disks) == 1:
            await super().delete(path, workers=workers)
            return
        with errors(DeleteError, f"delete {path}"):
            marks, whole = await workers.run(self._seen, path)
            if not marks:
                raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete")
            first = whole.last if whole.last in marks.keys() - {self.own.id} else ""
            if not first and self.own.id in marks:
                await self.own.storage.delete(path, workers=workers)
        self._decided.append(HostChange(path, set(marks.values()), first))

    def delete_torn(self, paths: Sequence[str]) -> list[str]:
        """Delete what was never announced, or is being deleted, of these on all disks; return that. Blocks."""
        torn = [(path, marks) for path in paths for marks, whole in [self._seen(path)] if whole.is_torn]
        self._decided += [HostChange(path, set(marks.values())) for path, marks in torn]
        return [path for path, _ in torn]

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        """Rename it on all disks with the next rounds."""
        if len(self.disks) == 1:
            return self.inner.set_aside(path, names)
        above = self.split(path)[0]
        taken = set().union(*self.folders_in(above))
        name = next((name for name in names if name not in taken), None)
        marks, _ = self._seen(path)
        if name is None:
            raise FileExistsError(errno.EEXIST, "each name for it is taken", path)
        if not marks:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._decided.append(HostChange(path, set(marks.values()), to=name))
        return self.inner.below(above, name)

    def decided(self) -> list[HostChange]:
        """Take what this rank has decided on since the last time, to send it to all ranks."""
        return [self._decided.popleft() for _ in range(len(self._decided))]

    def accept(self, changes: Sequence[HostChange]) -> Future[None] | None:
        """Begin to make changes on the own disk, in a thread; return a future of the end, or None if there are none."""
        self._undone += changes if self.serves else ()  # before the thread starts: each one makes all that are known
        if not self._undone:
            return None
        try:
            self._behind = in_thread(self.change)
        except NoThreadError as exc:
            logger.warning("the disk of this host is not changed: %s", exc)
            return None
        return self._behind

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of what was accepted. Blocks."""
        if self._behind is not None:
            wait([self._behind], timeout_s)

    def change(self, changes: Sequence[HostChange] = ()) -> None:
        """Make changes on the own disk, and those that had to wait, or have failed. Blocks; raises DeleteError."""
        self._undone += changes
        problem = ""
        with self._turn:
            for change in list(self._undone):
                try:
                    if self._change(change):
                        self._undone.remove(change)
                except (OSError, AiockptError) as exc:
                    problem = problem or str(exc)
                    logger.warning("%s on the disk of this host is not changed, but will be: %s", change.path, exc)
        if problem:
            raise DeleteError(problem)

    def _change(self, change: HostChange) -> bool:
        """Delete or rename the part on the own disk if it is one that was meant; return False if others come first."""
        try:
            with self.own.storage.look(change.path) as listing:
                if _part_on(self.own, listing).mark not in change.marks:
                    return True
        except FileNotFoundError:
            return True
        if change.to:
            self.own.storage.set_aside(change.path, [change.to])
        elif change.first in ("", self.own.id) or self._seen(change.path)[0].get(change.first) not in change.marks:
            workers = Workers(1, "aiockpt-disk-changes")
            try:
                asyncio.run(self.own.storage.delete(change.path, workers=workers))
            finally:
                workers.close()
        else:
            return False
        return True

    # --- reading ----------------------------------------------------------------------------------------

    async def open(self, path: str, *, workers: Workers) -> Source:
        parts: list[_DiskPart[Source]] = []
        failed: dict[str, Exception] = {}

        async def open_on(disk: Disk) -> None:
            try:
                opened.append(source := await disk.storage.open(path, workers=workers))
                parts.append(await workers.run(_part_on, disk, source))
            except (CheckpointNotFoundError, CorruptCheckpointError):
                pass
            except LoadError as exc:  # of a host that can't be reached
                failed[disk.id] = exc

        opened: list[Source] = []
        used: Sequence[Source] = ()
        try:
            async with anyio.create_task_group() as group:
                for disk in self.disks:
                    group.start_soon(open_on, disk)
            whole = await workers.run(self._whole, parts)
            self._check(path, whole, failed)
            used = [part.at for part in whole.parts]
            return _WholeSource(whole)
        finally:
            with anyio.CancelScope(shield=True):
                for source in opened:
                    if source not in used:
                        await workers.run(source.close)

    def _check(self, path: str, whole: _Union[Source], failed: Mapping[str, Exception]) -> None:
        """Raise an error if a checkpoint is not there, or lacks files."""
        if not whole.parts or whole.is_torn:
            for error in failed.values():
                raise LoadError(f"can't look for {path} on every disk: {error}") from error
            raise CheckpointNotFoundError(f"there is no checkpoint at {path} on any disk of this job")
        if not whole.missing or self._is_partial:
            return
        for error in failed.values():
            raise LoadError(f"{path} lacks {some_of(list(whole.missing), _MOST_NAMED)}: {error}") from error
        here = {disk.id for disk in self.disks}
        lacking = [facts for facts in whole.disks if facts.files & set(whole.missing)]
        away = [facts for facts in lacking if facts.id not in here]
        if away:
            total = sum(len(facts.files) for facts in whole.disks)
            named = [f"{facts} has {len(facts.files)}" for facts in away]
            raise MissingHostError(
                f"{path} can't be read now: {some_of(named, _MOST_NAMED)} of its {total} files, and is not in this "
                "job: start a rank there, or pass mirror= with a copy of the run"
            )
        held = some_of(list(map(str, lacking)), _MOST_NAMED)
        missing = some_of(list(whole.missing), _MOST_NAMED) + (f", which {held} had" if held else "")
        raise CorruptCheckpointError(f"{path} lacks its file {missing}; use another checkpoint")


class _WholeListing(Listing):
    def __init__(self, path: str, parts: Sequence[_DiskPart[Listing]], whole: _Union[Listing]) -> None:
        self._parts = parts
        self._whole = whole
        listings = [part.at for part in whole.parts]
        self.path, self.is_file = path, listings[0].is_file
        self.folders = list(dict.fromkeys(name for listing in listings for name in listing.folders))
        self.others = list(dict.fromkeys(name for listing in listings for name in listing.others))
        self.changed_s = max(listing.changed_s for listing in listings)
        self.stamp = repr([(part.disk.id, part.at.stamp) for part in whole.parts])
        self._merge()

    def _merge(self) -> None:
        self._holders = self._whole.holders()
        self.files = {name: listing.files[name] for name, listing in self._holders.items()}

    def list_below(self) -> None:
        for part in self._whole.parts:
            part.at.list_below()
        self._merge()

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        if name not in self._holders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._holders[name].fetch(name, offset, length)

    def close(self) -> None:
        for part in self._parts:
            part.at.close()


class _WholeSource(WrapperSource):
    def __init__(self, whole: _Union[Source]) -> None:
        self._sources = [part.at for part in whole.parts]
        super().__init__(self._sources[0])
        self._holders = whole.holders()
        used = set(self._holders.values()) or set(self._sources)
        self.gap_bytes = max(source.gap_bytes for source in used)
        self.most_reads = max(source.most_reads for source in used)
        self.is_remote = any(source.is_remote for source in used)

    @property
    def files(self) -> Mapping[str, int]:
        return {name: source.files[name] for name, source in self._holders.items()}

    def _place(self, name: str, runs: Sequence[tuple[int, int]] | None) -> tuple[Source, str]:
        return self._holders.get(name, self._inner), name  # which says what is wrong with the name

    def share(self) -> None:
        for source in self._sources:
            source.share()

    def close(self) -> None:
        for source in self._sources:
            source.close()
