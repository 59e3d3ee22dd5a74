"""One checkpoint on the disks of several hosts: each has the files of its own ranks, and all documents.

Each process writes to the disk of its own host only. Rank 0 begins a transaction on each disk and publishes them one
after the other, that of its own disk last. What is published is read from all disks together, each file from the
nearest one that has it. The manifest says which disk has which files, and which one was published last:

==========================================  ==========================================================================
if files are missing                        the checkpoint
==========================================  ==========================================================================
and the disk that is published last, and    was never announced, or is being deleted: nothing shows it, and `clean`
deleted first, is here and lacks it         removes what is left
and those have them that are not here       can't be read now: LoadError, which names the hosts
otherwise                                   is damaged
==========================================  ==========================================================================

Replicas are copies of a disk's files on other hosts. They complete a checkpoint; alone they are none.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from aiockpt.core.threads import DaemonThreads, outlast
from aiockpt.core.wording import some_of
from aiockpt.errors import (
    AiockptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    CorruptCheckpointError,
    DeleteError,
    LoadError,
    MissingHostError,
    RunLockedError,
    WriteError,
)
from aiockpt.format.manifest.manifest import DiskFacts, decode_head, disks_in, facts_in, with_disks
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.storage.base import (
    NO_DOCUMENTS,
    Document,
    Listing,
    LookBudget,
    RunLease,
    Seen,
    SharedStorage,
    SharedTransaction,
    Source,
    Stamp,
    Storage,
    Traits,
    shared_storage,
)
from aiockpt.storage.faults import errors
from aiockpt.storage.wrapper import WrapperStorage, WrapperTransaction

if TYPE_CHECKING:
    import mmap

    from aiockpt.core.threads import Workers

T = TypeVar("T")
At = TypeVar("At", bound=Listing | Source)

logger = logging.getLogger("aiockpt")

_AT_ONCE = 16
_SEAL_BYTES = 64  # at the end of a manifest: enough for its CRC
_MOST_HEADS = 4096
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk of a job, or a replica of one.

    Attributes:
        id: distinguishes the disk from all others; of a replica, that of the disk whose files it has.
        host: the name of the host that it is in.
        storage: the disk.
        directory: where a replica has its copies of checkpoints, by their last names; empty for a disk.
        is_near: it is in this host.
    """

    id: str
    host: str
    storage: Storage = field(repr=False)
    directory: str = ""
    is_near: bool = False

    def place_of(self, path: str) -> str:
        """Return where it has its part of a checkpoint."""
        return self.storage.below(self.directory, self.storage.split(path)[1]) if self.directory else path

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
    _mark: str | None = None

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        fetch = self.at.fetch if isinstance(self.at, Listing) else self.at.read_bytes
        return fetch(name, offset, length)

    @property
    def mark(self) -> str:
        """The same for copies of one manifest; empty without one. Blocks at first."""
        if self._mark is None:
            nbytes = self.at.files.get(MANIFEST_NAME, 0)
            begin = max(0, nbytes - _SEAL_BYTES)
            self._mark = f"{nbytes}:{self.fetch(MANIFEST_NAME, begin, nbytes - begin).hex()}" if nbytes else ""
        return self._mark


@dataclass(frozen=True, slots=True)
class _Union(Generic[At]):
    """A checkpoint as all disks have it together."""

    parts: Sequence[_DiskPart[At]] = ()  # those of this very checkpoint, the nearest first
    head: _ManifestFacts | None = None
    missing: Collection[str] = ()  # files
    is_torn: bool = False  # it was never announced, or is being deleted

    def holders(self) -> dict[str, list[At]]:
        """Return where each file is, the nearest place first."""
        found: dict[str, list[At]] = {}
        for part in self.parts:
            for name, nbytes in part.at.files.items():
                if self.head is None or self.head.files.get(name, nbytes) == nbytes:
                    found.setdefault(name, []).append(part.at)
        return found

    @property
    def disks(self) -> Sequence[DiskFacts]:
        """Those that it was saved to."""
        return () if self.head is None else self.head.disks

    @property
    def last(self) -> str:
        """The id of the disk that is published last, and deleted first; empty if it is not known."""
        return self.disks[0].id if self.disks else ""


class HostDisks(WrapperStorage):
    """Checkpoints on the disks of the hosts of a job, as one.

    Args:
        disks: those of all hosts; see `meet`.
        own: the id of the disk of this host.
        replicas: where copies of their files are.
    """

    def __init__(self, disks: Sequence[Disk], own: str, replicas: Sequence[Disk] = ()) -> None:
        self._is_partial = self._prefers_replicas = False
        self._heads: dict[str, _ManifestFacts] = {}  # by mark
        self.meet(disks, own, replicas)

    def meet(self, disks: Sequence[Disk], own: str, replicas: Sequence[Disk] = ()) -> None:
        """Use these disks from now on; the own one must be the same storage as before."""
        (self.own,) = (disk for disk in disks if disk.id == own)
        self.inner = self.own.storage
        self.disks = (self.own, *(disk for disk in disks if disk is not self.own))
        self.replicas = tuple(sorted(replicas, key=lambda disk: not disk.is_near))

    traits = Traits(single_files=False)

    def partial(self) -> HostDisks:
        """Return a storage that also opens what lacks files, for those that have these from elsewhere."""
        other = copy.copy(self)
        other._is_partial = True
        return other

    def replicated(self) -> HostDisks:
        """Return a storage that reads what is replicated from the replicas, as the disks have damaged it."""
        other = copy.copy(self)
        other._prefers_replicas = True
        return other

    def missing(self, path: str) -> tuple[str, ...]:
        """Return the files of a checkpoint that no disk of this job has. Blocks; raises OSError."""
        return tuple(self._seen(path).missing)

    stamp, stamps = SharedStorage.stamp, SharedStorage.stamps

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        return await self.begin(path, overwrite=True, workers=workers)

    # --- looking ----------------------------------------------------------------------------------------

    def lease(self, directory: str) -> RunLease:
        """Take the lock on this host's disk; refuse if there is one on another disk, of a job whose rank 0 is there."""
        taken = super().lease(directory)
        try:
            owners = self._of_each(lambda disk: disk.storage.owner_of(directory), self.disks[1:])
            for disk, owner in zip(self.disks[1:], owners, strict=True):
                if owner is not None:
                    text = f"the run {directory} is being written by {owner}, which has locked it on {disk}"
                    raise RunLockedError(f"{text}: end that program first", owner.host, owner.pid, owner.since)
        except BaseException:
            taken.release()
            raise
        return taken

    def is_finishing(self, directory: str) -> bool:
        return any(self._of_each(lambda disk: disk.storage.is_finishing(directory), self.disks))

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
            try:
                listing = disk.storage.look(disk.place_of(path), budget)
            except (FileNotFoundError, NotADirectoryError):
                return
            parts.append(_DiskPart(disk, listing))

        parts: list[_DiskPart[Listing]] = []
        try:
            self._of_each(look, self.disks)
            whole = self._whole(parts)
            if self.replicas and (whole.missing or self._prefers_replicas):
                self._of_each(look, self.replicas)
                whole = self._whole(parts)
        except BaseException as exc:
            for part in parts:
                part.at.close()
            if isinstance(exc, LoadError):
                raise OSError(errno.EIO, str(exc), path) from exc
            raise
        return parts, whole

    def _seen(self, path: str) -> _Union[Listing]:
        """Return what all disks together have of a checkpoint. Blocks; raises OSError."""
        parts, whole = self._look(path, LookBudget())
        for part in parts:
            part.at.close()
        return whole

    @staticmethod
    def _of_each(function: Callable[[Disk], T], disks: Sequence[Disk]) -> list[T]:
        """Call a function that blocks for each disk, several at once; raise the first error when all have ended."""
        if len(disks) < 2:
            return [function(disk) for disk in disks]
        with DaemonThreads(min(len(disks), _AT_ONCE), "aiockpt-disks") as threads:
            return list(threads.map(function, disks))

    def _whole(self, parts: Sequence[_DiskPart[At]]) -> _Union[At]:
        """Choose the parts that are one checkpoint: another save may have left some of its own. Blocks."""
        near = [each for each in self.replicas if each.is_near or self._prefers_replicas]
        order = [*(near if self._prefers_replicas else ()), self.own, *near, *self.disks[1:], *self.replicas]
        sorted_parts = sorted(parts, key=lambda part: order.index(part.disk))
        marks = dict.fromkeys(part.mark for part in sorted_parts if part.mark and not part.disk.directory)
        if not marks:
            return _Union([part for part in sorted_parts if not part.disk.directory])
        found = [self._whole_of([part for part in sorted_parts if part.mark == mark]) for mark in marks]
        return max(found, key=lambda each: (not each.is_torn, each.head.created if each.head else ""))

    def _whole_of(self, parts: Sequence[_DiskPart[At]]) -> _Union[At]:
        head = self._head_of(parts)
        if head is None:
            return _Union(parts)
        there = {item for part in parts for item in part.at.files.items()}
        missing = [item[0] for item in head.files.items() if item not in there]
        on = {part.disk.id for part in parts if not part.disk.directory}
        whole = _Union(parts, head, missing)
        is_torn = bool(missing) and whole.last not in on and any(disk.id == whole.last for disk in self.disks)
        return replace(whole, is_torn=is_torn)

    def _head_of(self, parts: Sequence[_DiskPart[At]]) -> _ManifestFacts | None:
        """Read a manifest; None if it is damaged."""
        for part in () if parts[0].mark in self._heads else parts:
            decoded = decode_head(part.fetch(MANIFEST_NAME, 0, part.at.files[MANIFEST_NAME]))
            facts = None if decoded is None else facts_in(decoded)
            if decoded is not None and facts is not None:
                if len(self._heads) >= _MOST_HEADS:
                    self._heads.clear()
                files = {name: each.nbytes for name, each in facts.items()}
                self._heads[part.mark] = _ManifestFacts(str(decoded.get("created")), files, disks_in(decoded))
                break
        return self._heads.get(parts[0].mark)

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        above = self.split(path)[0]

        def is_free(name: str) -> bool:
            place = self.below(above, name)
            return not any(self._of_each(lambda disk: disk.storage.stamp(place) is not None, self.disks))

        name = next(filter(is_free, names), None)
        if name is None:
            raise FileExistsError(errno.EEXIST, "each name for it is taken", path)
        moved = ""
        for disk in reversed(self._in_order_of_removal(path)):
            try:
                moved = disk.storage.set_aside(path, [name])
            except FileNotFoundError:
                continue
        if not moved:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return moved

    def _in_order_of_removal(self, path: str) -> list[Disk]:
        """Return the disks, that one first whose part makes the checkpoint count. Blocks; raises OSError."""
        last = self._seen(path).last
        return sorted(self.disks, key=lambda disk: disk.id != last)

    # --- writing ----------------------------------------------------------------------------------------

    def new_ticket(self, path: str) -> str:
        return json.dumps({disk.id: shared_storage(disk.storage).new_ticket(path) for disk in self.disks})

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        """Begin on each disk."""
        begun: dict[Disk, SharedTransaction] = {}
        known = {} if ticket is None else json.loads(ticket)

        async def begin(disk: Disk) -> None:
            storage = shared_storage(disk.storage)
            begun[disk] = await storage.begin(path, overwrite=overwrite, workers=workers, ticket=known.get(disk.id))

        try:
            await _on_each(begin, self.disks, f"begin {path}", WriteError)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _errors_of(lambda disk: begun[disk].abort(), list(begun))
            raise
        return _HostsTransaction(self, path, begun, workers)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        """Join on this host's disk."""
        own = json.loads(ticket).get(self.own.id)
        if own is None:
            raise WriteError(f"rank 0 has not begun {path} on {self.own}, which was not there when the disks met")
        joined = await shared_storage(self.own.storage).join(path, own, workers=workers)
        return _HostsTransaction(self, path, {self.own: joined}, workers, ticket)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        """Take over what was begun on this host's disk alone: on others, it ends with the trainer that has begun it."""
        known: dict[str, str] = json.loads(ticket)
        if known.keys() != {self.own.id}:
            raise WriteError(
                f"{path} was begun on the disks of several hosts, and can't be finished by another process"
            )
        taken = await shared_storage(self.own.storage).take_over(
            path, known[self.own.id], overwrite=overwrite, workers=workers, stamp=stamp
        )
        return _HostsTransaction(self, path, {self.own: taken}, workers, is_taken=True)

    async def delete(self, path: str, *, workers: Workers) -> None:
        """Delete it on each disk: first on the one that makes it count."""
        with errors(DeleteError, f"delete {path}"):
            first, *others = await workers.run(self._in_order_of_removal, path)
        await outlast(self._delete(path, [[first], others], workers))

    async def _delete(self, path: str, turns: Sequence[Sequence[Disk]], workers: Workers) -> None:
        gone: list[Exception] = []

        async def delete(disk: Disk) -> None:
            try:
                await disk.storage.delete(path, workers=workers)
            except CheckpointNotFoundError as exc:
                gone.append(exc)

        for turn in turns:
            await _on_each(delete, turn, f"delete {path}", DeleteError)
        if len(gone) == len(self.disks):
            raise gone[0]

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        """Clean each disk; also delete what was never announced, or was being deleted."""
        removed: dict[str, None] = {}

        async def clean(disk: Disk) -> None:
            found = await disk.storage.clean(directory, older_than_s=older_than_s, workers=workers)
            removed.update(dict.fromkeys(found))

        await _on_each(clean, self.disks, f"clean {directory}", DeleteError)
        with errors(DeleteError, f"look for what killed processes have left in {directory}"):
            torn = await workers.run(self._torn, directory)
        for path in torn:
            await outlast(self._delete(path, [self.disks], workers))
            removed[path] = None
        return list(removed)

    def _torn(self, directory: str) -> list[str]:
        """Return the checkpoints in a directory that were never announced, or are being deleted. Blocks."""

        def folders_of(disk: Disk) -> set[str]:
            try:
                with disk.storage.look(directory) as listing:
                    return {name for name in listing.folders if not name.startswith(".")}
            except FileNotFoundError:
                return set()

        names = [name for names in self._of_each(folders_of, self.disks) for name in names]
        paths = [self.below(directory, name) for name in sorted(set(names)) if names.count(name) < len(self.disks)]
        return [path for path in paths if self._seen(path).is_torn]

    # --- reading ----------------------------------------------------------------------------------------

    async def open(self, path: str, *, workers: Workers) -> Source:
        parts: list[_DiskPart[Source]] = []
        failed: dict[Disk, Exception] = {}

        async def open_on(disk: Disk) -> None:
            try:
                source = await disk.storage.open(disk.place_of(path), workers=workers)
            except (CheckpointNotFoundError, CorruptCheckpointError):
                return
            except LoadError as exc:  # of a host that can't be reached
                failed[disk] = exc
                return
            parts.append(_DiskPart(disk, source))

        used: Sequence[_DiskPart[Source]] = ()
        try:
            await _on_each(open_on, self.disks, f"open {path}", LoadError)
            whole = await workers.run(self._whole, parts)
            if self.replicas and (whole.missing or self._prefers_replicas):
                await _on_each(open_on, self.replicas, f"open {path}", LoadError)
                whole = await workers.run(self._whole, parts)
            self._check(path, whole, failed)
            used = whole.parts
            return _WholeSource(whole)
        finally:
            for part in parts:
                if part not in used:
                    with anyio.CancelScope(shield=True):
                        await workers.run(part.at.close)

    def _check(self, path: str, whole: _Union[Source], failed: Mapping[Disk, Exception]) -> None:
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
        lacking = [each for each in whole.disks if each.files & set(whole.missing)]
        away = [each for each in lacking if each.id not in here]
        if away:
            total = sum(len(each.files) for each in whole.disks)
            named = [f"{each} has {len(each.files)}" for each in away]
            raise MissingHostError(
                f"{path} can't be read now: {some_of(named, _MOST_NAMED)} of its {total} files, and is not in this "
                "job: start a rank there, or pass mirror= with a copy of the run"
            )
        held = some_of(list(map(str, lacking)), _MOST_NAMED) or "no disk"
        missing = some_of(list(whole.missing), _MOST_NAMED)
        raise CorruptCheckpointError(f"{path} lacks its file {missing}, which {held} had; use another checkpoint")


async def _errors_of(call: Callable[[Disk], Awaitable[object]], disks: Sequence[Disk]) -> dict[Disk, Exception]:
    """Call a coroutine function for each disk, all at once; return the errors when all have ended."""
    found: dict[Disk, Exception] = {}

    async def run(disk: Disk) -> None:
        try:
            await call(disk)
        except Exception as exc:
            found[disk] = exc

    async with anyio.create_task_group() as group:
        for disk in disks:
            group.start_soon(run, disk)
    return {disk: found[disk] for disk in disks if disk in found}


async def _on_each(
    call: Callable[[Disk], Awaitable[object]], disks: Sequence[Disk], what: str, kind: type[AiockptError]
) -> None:
    """Do as `_errors_of`; raise the first error, which names the host unless it is of this one."""
    for disk, error in (await _errors_of(call, disks)).items():
        if isinstance(error, CheckpointExistsError):
            raise error
        raise kind(f"can't {what} on {disk}: {error}") from error


class _WholeListing(Listing):
    def __init__(self, path: str, parts: Sequence[_DiskPart[Listing]], whole: _Union[Listing]) -> None:
        self._parts = parts
        self._whole = whole
        listings = [part.at for part in whole.parts]
        self.path, self.is_file = path, listings[0].is_file
        self.folders = list(dict.fromkeys(name for each in listings for name in each.folders))
        self.others = list(dict.fromkeys(name for each in listings for name in each.others))
        self.changed_s = max(each.changed_s for each in listings)
        self.stamp = repr([(part.disk.id, part.at.stamp) for part in whole.parts])
        self._merge()

    def _merge(self) -> None:
        self._holders = self._whole.holders()
        self.files = {name: listings[0].files[name] for name, listings in self._holders.items()}

    def list_below(self) -> None:
        for part in self._whole.parts:
            part.at.list_below()
        self._merge()

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        if name not in self._holders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._holders[name][0].fetch(name, offset, length)

    def close(self) -> None:
        for part in self._parts:
            part.at.close()


class _WholeSource(Source):
    def __init__(self, whole: _Union[Source]) -> None:
        self._sources = [part.at for part in whole.parts]
        self._holders = whole.holders()
        first = list(dict.fromkeys(each[0] for each in self._holders.values())) or self._sources
        self.gap_bytes = max(each.gap_bytes for each in first)
        self.most_reads = max(each.most_reads for each in first)
        self.is_remote = any(each.is_remote for each in first)

    @property
    def files(self) -> Mapping[str, int]:
        return {name: sources[0].files[name] for name, sources in self._holders.items()}

    def _of(self, name: str) -> Sequence[Source]:
        return self._holders.get(name, self._sources[:1])  # which says what is wrong with the name

    def _read_from_first(self, name: str, read: Callable[[Source], None]) -> None:
        """Read from the nearest source of a file; if that fails, from the next one."""
        *others, last = self._of(name)
        for source in others:
            with contextlib.suppress(LoadError):
                read(source)
                return
        read(last)

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        done = 0

        def note(piece: memoryview) -> None:
            nonlocal done
            done += len(piece)
            if seen is not None:
                seen(piece)

        def go_on(source: Source) -> None:
            """Read what the source before has not."""
            source.read(name, offset + done, view[done:], None if seen is None else note)

        self._read_from_first(name, go_on)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read_from_first(name, lambda source: source.read_runs(name, runs, view))

    def map(self, name: str) -> mmap.mmap:
        return self._of(name)[0].map(name)

    def share(self) -> None:
        for source in self._sources:
            source.share()

    def close(self) -> None:
        for source in self._sources:
            source.close()


class _HostsTransaction(WrapperTransaction):
    """A transaction on each disk: of rank 0, which has begun all, or of a rank that has joined its own disk's."""

    open_folder, suspend = SharedTransaction.open_folder, SharedTransaction.suspend
    reserve, open_part = SharedTransaction.reserve, SharedTransaction.open_part

    def __init__(
        self,
        storage: HostDisks,
        path: str,
        begun: Mapping[Disk, SharedTransaction],
        workers: Workers,
        ticket: str | None = None,
        *,
        is_taken: bool = False,
    ) -> None:
        self._own = begun[storage.own]
        super().__init__(storage, self._own, path)
        self._workers, self._begun = workers, begun
        self._disks = [disk for disk in storage.disks if disk in begun]  # the own one first
        self._is_joined, self._is_taken = ticket is not None, is_taken
        self._ticket = ticket or json.dumps({disk.id: begun[disk].ticket for disk in self._disks})

    @property
    def ticket(self) -> str:
        return self._ticket

    async def sizes(self) -> Mapping[str, int]:
        return {name: nbytes for sizes in (await self._sizes()).values() for name, nbytes in sizes.items()}

    async def _sizes(self) -> Mapping[Disk, Mapping[str, int]]:
        found: dict[Disk, Mapping[str, int]] = {}

        async def look(disk: Disk) -> None:
            found[disk] = await self._begun[disk].sizes()

        await _on_each(look, self._disks, f"look at what was written for {self._path}", WriteError)
        return found

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        """Write the documents to each disk; then publish on the other disks, and on rank 0's, which makes it count."""
        if self._is_joined:
            await self._own.commit(documents)
            return
        if MANIFEST_NAME in documents:
            sizes = await self._sizes()
            facts = [DiskFacts(disk.id, disk.host, frozenset(sizes[disk])) for disk in self._disks]
            documents = {**documents, MANIFEST_NAME: with_disks(bytes(documents[MANIFEST_NAME]), facts)}
        if not self._is_taken:  # on all disks before one publishes; else they replace those that are there
            what = f"write the documents of {self._path}"
            await _on_each(lambda disk: self._begun[disk].write_files(documents), self._disks, what, WriteError)
            documents = {}
        try:
            others, what = self._disks[1:], f"publish {self._path}"
            await _on_each(lambda disk: self._begun[disk].commit(documents), others, what, CommitError)
            await self._own.commit(documents)
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                await self._take_back(exc)
            raise

    async def _take_back(self, error: BaseException) -> None:
        """Remove what was published, unless it counts all the same; add a note of what stays to the error."""

        async def take_back(disk: Disk) -> None:
            if await self._begun[disk].status() == "published":
                await disk.storage.delete(self._path, workers=self._workers)

        try:
            counts = await self._own.status() == "published"
        except WriteError:
            counts = True  # it may
        if not counts:
            for disk, failure in (await _errors_of(take_back, self._disks[1:])).items():
                error.add_note(f"{disk} may still have its part, until the run is opened again: {failure}")

    async def abort(self) -> None:
        what = f"remove what was written for {self._path}"
        await outlast(_on_each(lambda disk: self._begun[disk].abort(), self._disks, what, WriteError))

    async def release(self) -> None:
        """Leave all disks. A host that is gone by now has lost nothing, and must not fail what was published."""
        for error in (await _errors_of(lambda disk: self._begun[disk].release(), self._disks)).values():
            logger.debug("%s was left without an answer: %s", self._path, error)
