"""Transactions of local and mounted file systems: begun or taken over, joined, or adding files to a directory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.threads import SHORT_BYTES, Workers, outlast, run_each
from aiockpt.errors import CommitError, WriteError
from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import OPEN_MARK, SINGLE_NAME
from aiockpt.storage.base import NO_DOCUMENTS, Document, FileSink, PartSink, SharedTransaction, Stamp, Status
from aiockpt.storage.faults import errors
from aiockpt.storage.local.adopting import KnownFiles, adopt
from aiockpt.storage.local.belonging import OtherThingsError, remove
from aiockpt.storage.local.commit import (
    NotDurableError,
    Publication,
    check_own,
    publish_repeatedly,
    remove_own,
    sync_directory,
)
from aiockpt.storage.local.entries import open_regular
from aiockpt.storage.local.replacing import complete, is_between, remove_record
from aiockpt.storage.local.retries import Repeater, sync_fd
from aiockpt.storage.local.sink import LocalPartSink, LocalSink, NewFile, write_small
from aiockpt.storage.local.temp_dir import REPLACED, Hold, read_sidecar, sizes_in, spelled, sweep, write_new
from aiockpt.storage.syscalls import Identity, identity

if TYPE_CHECKING:
    from aiockpt.storage.local.orphans import OrphanCleaner

_STEP_BYTES = 1 << 20
_BY_HAND = "; remove it by hand"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """The settings by which a storage writes."""

    direct_io: bool  # past the page cache, where the file system allows it
    fsync: bool
    repeater: Repeater = field(repr=False)  # retries transient errors
    orphans: OrphanCleaner = field(repr=False)  # takes note of what could not be removed
    known: KnownFiles = field(repr=False, default_factory=KnownFiles)  # which other checkpoints may share


@dataclass(eq=False, repr=False)
class LocalTransaction(SharedTransaction):
    """A checkpoint that this process has begun or taken over."""

    _policy: WritePolicy
    _path: str  # the final name
    _hidden: str  # the temporary directory
    _workers: Workers
    _held: Hold | None = None  # against orphan collection; None if the directory is gone, or is no temporary one
    _identity: Identity | None = None  # of the temporary directory; None if it is not known
    _overwrite: bool = False
    _is_taken: bool = False  # taken over from a process that is dead
    _single: str = ""  # the name of the one file that is the checkpoint; empty if the directory is
    _file: Identity | None = None  # of that file; None if it is not known
    _sinks: list[LocalSink | LocalPartSink] = field(default_factory=list)
    _files: list[NewFile] = field(default_factory=list)
    _over: bool = False
    _folders: set[str] = field(default_factory=set)  # directories below that hold files of this process
    _is_open: bool = False  # others write into the folder, too

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        await self._make_folders(name)
        sink = self._sink(name, nbytes)
        self._sinks.append(sink)
        await sink.open(direct=self._policy.direct_io)
        return sink

    def _sink(self, name: str, nbytes: int | None) -> LocalSink:
        return LocalSink(self._new_file(name), nbytes)

    async def open_folder(self) -> str:
        """Mark the directory, so that all that is in it is removed with it, and return its path."""
        if not self._is_open:
            await self.write_files({OPEN_MARK: b""})
            self._is_open = True
        return self._hidden

    async def seal_folder(self, known: Container[str] | None) -> Mapping[str, FileFacts]:
        with errors(WriteError, f"make durable what was put into {self._hidden}"):
            return await self._workers.run(partial(seal, self._hidden, known, fsync=self._policy.fsync))

    async def _make_folders(self, *names: str) -> None:
        folders = {os.path.dirname(os.path.join(self._hidden, name)) for name in names if "/" in name} - self._folders
        for folder in folders:
            with errors(WriteError, f"make {folder}"):
                await self._again("make a directory for", partial(os.makedirs, folder, exist_ok=True))
            self._folders.add(folder)

    async def _sync_folders(self) -> None:
        if self._policy.fsync:
            for folder in self._folders:
                await self._workers.run(sync_directory, folder)

    async def adopt(self, path: str, files: Mapping[str, tuple[str, FileFacts]]) -> Collection[str]:
        policy, adopted = self._policy, set[str]()

        async def take(name: str) -> None:
            new, facts = files[name]
            file = self._new_file(new)
            source, fsync = os.path.join(path, name), policy.fsync
            if await self._workers.run(partial(adopt, source, file.path, facts, policy.known, fsync=fsync)):
                adopted.add(name)

        with errors(WriteError, f"share files of {path} with {self._path}"):
            await run_each(take, list(files), self._workers.count)
        return adopted

    async def vouch(self, files: Mapping[str, FileFacts]) -> None:
        def note() -> None:
            for name, facts in files.items():
                self._policy.known.vouch(os.path.join(self._hidden, name), facts)

        await self._workers.run(note)

    async def write_files(self, files: Mapping[str, Document]) -> None:
        await self._make_folders(*files)
        if any(len(data) > SHORT_BYTES for data in files.values()):
            await super().write_files(files)
            return
        left = deque((self._new_file(name), data) for name, data in files.items())

        def write() -> None:
            while left:
                write_small(*left[0])
                left.popleft()

        async def undone() -> bool:
            return not await self._workers.run(os.path.lexists, left[0][0].path)

        step = partial(self._workers.run, write)
        await self._policy.repeater.run(f"write {', '.join(files)} of {self._path}", step, undone=undone)

    async def look_for_single_file(self) -> None:
        """Find out whether the checkpoint is one file: only the process that began it was told."""
        self._file = await self._look("look for", identity, os.path.join(self._hidden, SINGLE_NAME))
        if self._file is not None:
            self._single = SINGLE_NAME

    async def reserve(self, name: str, nbytes: int) -> None:
        await self._make_folders(name)
        await self._part(name).reserve(nbytes)

    async def open_part(self, name: str) -> PartSink:
        sink = self._part(name)
        await sink.open(direct=self._policy.direct_io)
        return sink

    def _part(self, name: str) -> LocalPartSink:
        sink = LocalPartSink(self._new_file(name))
        self._sinks.append(sink)
        return sink

    def _new_file(self, name: str) -> NewFile:
        if not name:
            self._single = SINGLE_NAME
        path, final = os.path.join(self._hidden, name or SINGLE_NAME), os.path.join(self._path, name)
        final = final if name else self._path
        self._files.append(NewFile(path, final, self._policy.fsync, self._workers, self._policy.repeater))
        return self._files[-1]

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        if self._is_taken:
            await self._look("look at", check_own, self._path, self._hidden, self._identity)
            for name in documents:  # the process before may have written them
                await self._remove(os.path.join(self._hidden, name))
        await self.write_files(documents)
        with errors(CommitError, f"make the files of {self._path} durable"):
            await self._sync_folders()
            if self._is_open:
                await self._remove(os.path.join(self._hidden, OPEN_MARK))
        policy, hidden, check = self._policy, self._hidden, partial(self._refuse_if_revoked, self._path)
        publication = Publication(
            hidden, self._path, self._single, self._overwrite, policy.fsync, self._identity, check, self._held
        )
        try:
            await publish_repeatedly(publication, policy.repeater, self._workers)
        except NotDurableError as exc:
            self._over = True  # the temporary directory may hold the only good checkpoint
            await self.release()
            raise CommitError(str(exc)) from exc.__cause__
        if publication.rest is not None:
            policy.orphans.add(*publication.rest)
        self._over = True
        await self.release()

    async def abort(self) -> None:
        if not self._over:
            self._over = True
            await outlast(self._abort())

    async def _abort(self) -> None:
        for sink in self._sinks:  # before the removal: NFS renames an open file to .nfs* instead of removing it
            await sink.close()
        orphans = self._policy.orphans
        orphans.look_again(os.path.dirname(self._hidden))
        # A commit hangs between its two renames: the only good checkpoint may be here.
        if await self._workers.run(is_between, self._hidden):
            await self.release()
            raise WriteError(f"{self._path} is just being replaced, so what was written stays in {self._hidden}")
        try:
            # These belong to the save whatever their names, which `look_into` may not know.
            own_files = [os.path.basename(file.path) for file in self._files]
            await self._again("remove", remove_own, self._hidden, self._identity, own_files)
        except OtherThingsError as exc:
            raise WriteError(f"can't remove the unfinished checkpoint {self._hidden}: {exc}; move it away") from exc
        except OSError as exc:
            orphans.add(self._hidden, self._identity)
            raise WriteError(
                f"can't remove the unfinished checkpoint {self._hidden}: {exc}; the next save beside it tries again"
            ) from exc
        finally:
            await self.release()

    async def release(self) -> None:
        if self._held is not None and self._held.release.alive:
            await self._workers.run(self._held.release)

    async def _again(self, verb: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an idempotent function in a thread, and retry transient errors."""
        step = partial(self._workers.run, function, *args, **kwargs)
        return await self._policy.repeater.run(f"{verb} what was written for {self._path}", step)

    async def _look(self, verb: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do as `_again`; raise WriteError for an OSError."""
        with errors(WriteError, f"look at what was written for {self._path}"):
            return await self._again(verb, function, *args, **kwargs)

    @property
    def ticket(self) -> str:
        return os.path.relpath(self._hidden, os.path.dirname(self._path))

    async def sizes(self) -> Mapping[str, int]:
        return await self._look("look at", sizes_in, self._hidden)

    @property
    def stamp(self) -> Stamp | None:
        return None if self._identity is None else "{}:{}".format(*self._identity)

    async def _remove(self, path: str) -> None:
        with errors(WriteError, f"remove {path}", advice=_BY_HAND):
            await self._again("remove", remove, path)

    async def status(self) -> Status:
        return await self._look("look for", self._status)

    def _status(self) -> Status:
        """Return the status; completes a replacement that was interrupted between its two renames."""
        hidden, path, own = self._hidden, self._path, self._identity
        if is_between(hidden):
            complete(hidden, path, lambda: None)  # `finalize` syncs
        # Publishing one file leaves its directory, which may hold what it has replaced.
        if self._file is not None and identity(path) == self._file:
            return "published"
        found = identity(hidden)
        if own is None:
            return "gone" if found is None else "open"
        if found == own:
            return "open"
        return "published" if identity(path) == own else "gone"

    async def finalize(self) -> None:
        self._over = True
        try:
            if await self._workers.run(self._status) == "published":
                if self._policy.fsync:  # before what was replaced goes: a loss of power must leave one of the two
                    await self._workers.run(sync_directory, os.path.dirname(self._path))
                await self._workers.run(remove, self._hidden)  # what it replaced, where names were exchanged
                await self._workers.run(remove_record, self._hidden)
                await self._workers.run(remove, self._hidden + REPLACED)
        except OSError as exc:
            raise WriteError(f"{self._path} was published, but can't be made durable: {exc}") from exc
        finally:
            await self.release()


class JoinedTransaction(LocalTransaction):
    """Files of this process in a checkpoint that another process commits or aborts."""

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        """Sync the directory, from this host, for the entries of this rank's files; its owner publishes it."""
        await self.write_files(documents)
        if self._policy.fsync:
            with errors(CommitError, f"make the files of {self._path} durable"):
                await self._sync_folders()
                await self._workers.run(sync_directory, self._hidden)
        self._over = True

    async def open_folder(self) -> str:
        return self._hidden

    async def abort(self) -> None:
        """Close what this process has open, and remove its own files, unless they are committed."""
        await outlast(self._abort())

    async def _abort(self) -> None:
        await self._close()
        shared = {sink.path for sink in self._sinks if isinstance(sink, LocalPartSink)}
        for file in self._files:
            if file.path not in shared and not self._over:  # else the owner may be publishing them
                with errors(WriteError, f"remove the unfinished file {file.path}", advice=_BY_HAND):
                    await self._workers.run(remove, file.path)

    async def discard_all(self) -> None:
        await outlast(self._discard_all())

    async def _discard_all(self) -> None:
        await self._close()
        with errors(WriteError, f"remove the unfinished checkpoint {self._hidden}", advice=_BY_HAND):
            await self._workers.run(sweep, self._hidden, self._identity)

    async def _close(self) -> None:
        for sink in self._sinks:
            await sink.close()
        await self.release()


# --- a copy that the next process can go on with -------------------------------------------------------


class ResumableTransaction(LocalTransaction):
    """A copy that this process has begun, or goes on with.

    A file may have its size before it has its bytes. So a sidecar file says of each that it is whole, once durable.
    """

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        await self._forget(name)  # a document may be there of an earlier attempt
        return await super().create(name, nbytes)

    def _sink(self, name: str, nbytes: int | None) -> LocalSink:
        return _MarkingSink(self._new_file(name), nbytes, self._mark_of(name))

    def _mark_of(self, name: str) -> str:
        """Return the path of the sidecar file that says of a file that it is whole."""
        return f"{self._hidden}-{spelled(f'whole-{crc32(os.fsencode(name)):08x}')}"

    async def whole_files(self) -> Mapping[str, int]:
        whole: dict[str, int] = {}
        for name, size in (await self.sizes()).items():
            if await self._look("read", read_sidecar, self._mark_of(name)) == _text_of(size):
                whole[name] = size
            else:
                await self._forget(name)
        await self._own_all()
        return whole

    async def _forget(self, name: str) -> None:
        await self._remove(self._mark_of(name))
        await self._remove(os.path.join(self._hidden, name))

    async def _own_all(self) -> None:
        """Mark the directory, so that all in it is removed with it, by whomever: files of the user's as well."""
        await self._remove(os.path.join(self._hidden, OPEN_MARK))
        self._is_open = False
        await self.open_folder()

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        # Before: the directory may be exchanged for that of an older checkpoint, of which nothing is whole.
        for name in await self.sizes():
            await self._remove(self._mark_of(name))
        await super().commit(documents)

    async def suspend(self) -> None:
        await outlast(self._suspend())

    async def _suspend(self) -> None:
        for sink in self._sinks:
            await sink.close()
        await self.release()

    async def _abort(self) -> None:
        for name in await self.sizes():
            await self._remove(self._mark_of(name))
        await self._own_all()
        await super()._abort()


class _MarkingSink(LocalSink):
    def __init__(self, file: NewFile, nbytes: int | None, mark: str) -> None:
        super().__init__(file, nbytes)
        self._mark, self._text = mark, _text_of(nbytes or 0)

    async def finish(self) -> None:
        await super().finish()
        with errors(WriteError, f"write a sidecar file of {self.path}"):
            await self._workers.run(partial(write_new, self._mark, self._text, fsync=False))


def _text_of(nbytes: int) -> bytes:
    return f"{nbytes}.".encode()  # with an end, so that none is the beginning of another


# --- what others have put into the temporary directory, beside the files of its transaction ---------------


def seal(directory: str, known: Container[str] | None, *, fsync: bool) -> dict[str, FileFacts]:
    """Make everything below a directory durable; return the facts of the files whose names are not known. Blocks.

    ``known``: None if no facts are of interest, and nothing is read.
    """
    facts: dict[str, FileFacts] = {}
    for folder, _, names in os.walk(directory, onerror=_fail):
        for name in names:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, directory)
            if relative != OPEN_MARK and (known is None or relative not in known):
                found = _seal_file(path, reads=known is not None, fsync=fsync)
                facts |= {} if known is None else {relative: found}
        if fsync:
            sync_directory(folder)
    return facts


def _seal_file(path: str, *, reads: bool, fsync: bool) -> FileFacts:
    with open(open_regular(path, flags=os.O_NOFOLLOW), "rb", buffering=0) as file:
        nbytes = crc = 0
        while reads and (piece := file.read(_STEP_BYTES)):
            nbytes, crc = nbytes + len(piece), crc32(piece, crc)
        if fsync:
            sync_fd(file.fileno())
    return FileFacts(nbytes, crc)


def _fail(error: OSError) -> NoReturn:
    raise error
