"""The interfaces between the engine and a storage, which a user's own storage implements; public as `aiockpt.storage`.

=============================  ============================================================================
to implement                   for
=============================  ============================================================================
`Storage`, `Transaction`,      saves of one process, and all loads
`FileSink`, `Source`
`SharedStorage`,               saves of several ranks, and of a writer process: several processes write the
`SharedTransaction`            files of one checkpoint, and one may finish what another has begun
`Storage.look`, `Listing`      the manager, and the commands that look into a directory
`Storage.lease`, `RunLease`       a manager that writes, unless it has ``lock=False``
=============================  ============================================================================

`aiockpt.testing.StorageConformance` tests an implementation.

**Loops and threads.** Coroutines run on the loop of the checkpointer that uses the storage. One storage may serve
several checkpointers, and so several loops: keep nothing that belongs to a loop, such as a connection of an asyncio
client, in the storage itself. The methods of a transaction are called from one loop; several sinks of it are written at
once, each by one task. The methods that are no coroutines block, and are called in threads, several at once, unless
they say otherwise. Blocking work of a coroutine goes to a thread: ``await workers.run(function, *args)``.

**Cancellation.** Each await may be cancelled: `begin` then leaves nothing, `commit` has published everything or
nothing, and `abort` has removed everything all the same. After an abort no thread works for the transaction.

**Atomic** must be: `Transaction.commit`, `Storage.delete`, and what decides between them. *Publishing and removing have
exactly one winner*: of two transactions that publish to one path without ``overwrite``, of one that publishes and one
that discards it, one succeeds, and the other learns that it has not.

**Names** of files within a checkpoint are separated by "/" in every storage.

**What a storage may refuse**: see `Traits`; mapping into memory (`Source.map`); deletion; being looked into; leases.

**Lifetime.** A transaction ends with `commit` or `abort`, a source with `close`. A storage is never closed: it is
garbage with the last checkpointer that uses it. After a fork the child uses neither transactions nor sources of its
parent; it may use the storage anew, so a client that does not survive a fork is made once per process id. For a writer
process, and for ranks that start others, a storage must be picklable.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.wording import time_text
from aiockpt.errors import AiockptError, CommitError, DeleteError, LoadError, SaveError, printable_key

if TYPE_CHECKING:
    import mmap
    from concurrent.futures import Future

    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts


Status = Literal["open", "published", "gone"]
"""Of a transaction: it is still being written, is under its final name, or was removed."""

Stamp = str
"""An opaque text that differs between any two contents of a path, or two transactions, such as an ETag."""

Seen = Callable[[memoryview], object]
"""Called with each piece of what is read, in order, as soon as its bytes are there."""

Document = bytes | bytearray | memoryview

room_coming: ContextVar[Future[None] | None] = ContextVar("room_coming", default=None)
"""Of the save that a task writes: done once there is the room that deletions before it make. None: there are none."""

NO_DOCUMENTS: Mapping[str, Document] = MappingProxyType({})


def _nothing() -> None:
    """Free nothing: the caller keeps the bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """Abilities of a storage. What it can't do is refused at the call.

    Attributes:
        single_files: a checkpoint may be one file instead of a directory.
        shared_files: several ranks may write one file: `SharedTransaction.reserve` and ``open_part`` work.
        folders: what is written is in a directory of a file system, `Transaction.open_folder`.
        is_divided: it is the own disks of several hosts, each of which writes a part; see `aiockpt.storage.hosts`.
        adopts: a checkpoint may share files with an earlier one: `Transaction.adopt` works.
        removal_s: how long closing waits until what was cancelled is removed, in seconds. What is left after that is
            removed by the next save there, or `clean`.
    """

    single_files: bool = True
    shared_files: bool = False
    folders: bool = False
    is_divided: bool = False
    adopts: bool = False
    removal_s: float = 30.0


class FileSink(ABC):
    """A file that is being written, from its beginning to its end.

    The methods raise `WriteError`, with the cause chained.
    """

    @abstractmethod
    async def write(self, view: memoryview, free: Callable[[], object] = _nothing) -> None:
        """Take over the next bytes; return when more may come. So several parts of a file may be on their way.

        Args:
            view: the bytes, at the beginning of a page.
            free: called once, on the loop, when ``view`` is no longer in use. After a failure it need not be called:
                no view is in use any more when `Transaction.abort` returns. Without it the bytes stay until `finish`.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Make the file durable, at its announced size if it has one, and close it; no view is in use afterwards."""


class PartSink(ABC):
    """One process's part of a file that several processes write at the same time, each its own bytes.

    The methods raise `WriteError`, with the cause chained.
    """

    @abstractmethod
    async def write(self, view: memoryview, runs: Sequence[tuple[int, int, int]]) -> None:
        """Write parts of ``view``, which begins at a page boundary.

        If cancelled, it returns only when ``view`` is no longer in use.

        Args:
            view: the bytes.
            runs: for each part its offset in the file, its position in ``view``, and its length, in bytes.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Make all that this process has written to the file durable, and close it."""


class Transaction(ABC):
    """A checkpoint that is being written. It is invisible before `commit`.

    Besides what is listed, its methods raise `WriteError`, with the cause chained.
    """

    _is_revoked = False

    async def open_folder(self) -> str:
        """Return the directory of a file system that is to become the checkpoint, for others to write into.

        Raises:
            SaveError: there is none; see `Traits.folders`.
        """
        raise SaveError(f"{type(self).__name__} writes to no directory of a file system")

    async def seal_folder(self, known: Container[str] | None) -> Mapping[str, FileFacts]:
        """Make durable what others have put into the folder.

        Args:
            known: the names of files whose facts are known; None: all are known, or not of interest.

        Returns:
            The facts of each file whose name is not known.
        """
        return {}

    @abstractmethod
    async def create(self, name: str, nbytes: int | None) -> FileSink:
        """Start a file. Several files may be open at once.

        Args:
            name: its path relative to the checkpoint, with "/" where it is in a directory below. The empty name is
                the checkpoint itself, which then is this one file instead of a directory; no other file is created
                beside it.
            nbytes: its size; None if it is known only when everything is written.
        """

    async def write_files(self, files: Mapping[str, Document]) -> None:
        """Write small files, each as a whole and durably, in this order.

        If cancelled, it returns only when their bytes are no longer in use.
        """
        for name, data in files.items():
            sink = await self.create(name, len(data))
            await sink.write(memoryview(data))
            await sink.finish()

    async def adopt(self, path: str, files: Mapping[str, tuple[str, FileFacts]]) -> Collection[str]:
        """Share files with another checkpoint, each under a new name: a link, whose bytes stay if that is deleted.

        Args:
            path: the other checkpoint. It may be damaged, or deleted or replaced meanwhile.
            files: by their names there, the new names, and the facts that their bytes must have.

        Returns:
            The names there of the files that are shared. The others can't be, for whatever reason.
        """
        return ()

    async def vouch(self, files: Mapping[str, FileFacts]) -> None:
        """Note the facts of files that this process has written, so that a later `adopt` need not read them."""

    @abstractmethod
    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        """Write the last files, in this order, and publish the checkpoint, durably and atomically.

        If it fails, nothing was published, or it was taken back; `abort` removes what was written.

        Args:
            documents: the contents of files that describe the checkpoint. They may instead have been written before.

        Raises:
            CommitError: with the cause chained.
            CheckpointExistsError: something has appeared at the path meanwhile.
        """

    def revoke(self) -> None:
        """Make a hanging `commit` fail instead of publishing, if that is still possible. Does not block."""
        self._is_revoked = True

    def _refuse_if_revoked(self, path: str) -> None:
        if self._is_revoked:
            raise CommitError(f"{path} was given up before it was published")

    @abstractmethod
    async def abort(self) -> None:
        """Remove everything written so far; no view is in use afterwards. Idempotent; after `commit` it does nothing.

        Raises:
            WriteError: something could not be removed.
        """

    async def whole_files(self) -> Mapping[str, int]:
        """Return the size of each file that an earlier attempt has written to its end; see `Storage.resume`.

        What it has written of other files is removed: they are created anew.
        """
        return {}

    async def suspend(self) -> None:
        """Stop writing, and leave what is whole to `Storage.resume`; no view is in use afterwards. Idempotent."""
        await self.abort()


class SharedTransaction(Transaction):
    """A transaction of several processes: one has begun it, others join it or take it over.

    For a process that has joined it, `commit` makes its own files durable, and `abort` before that closes them; the
    owner publishes or removes all of them. For errors see `Transaction`.
    """

    @property
    @abstractmethod
    def ticket(self) -> str:
        """The name by which other processes join it; see `SharedStorage.join`."""

    @property
    def stamp(self) -> Stamp | None:
        """A text that distinguishes it from all others, whatever its name; None if that is not known."""
        return None

    @abstractmethod
    async def sizes(self) -> Mapping[str, int]:
        """Return the size in bytes of each file that this process can see, whichever process wrote it."""

    async def reserve(self, name: str, nbytes: int) -> None:
        """Create a file of its final size, for all processes to write their parts with `open_part`.

        Args:
            name: see `create`.
            nbytes: its size.

        Raises:
            SaveError: this storage has no such files.
        """
        raise SaveError(_no_parts(self))

    async def open_part(self, name: str) -> PartSink:
        """Open a file that was reserved, maybe by another process, to write a part of it.

        Raises:
            SaveError: this storage has no such files.
        """
        raise SaveError(_no_parts(self))

    @abstractmethod
    async def status(self) -> Status:
        """Return the status of a transaction that was joined or taken over."""

    @abstractmethod
    async def finalize(self) -> None:
        """Make a published checkpoint durable and remove what it replaced, though its publisher is dead."""

    @abstractmethod
    async def release(self) -> None:
        """Stop taking part: the files belong to the other processes from now on. Idempotent."""

    async def discard_all(self) -> None:
        """Remove the files of all processes; called by those that joined if the owner is dead.

        Raises:
            WriteError: something could not be removed.
        """
        await self.abort()


class Source(ABC):
    """A checkpoint that is being read.

    Attributes:
        gap_bytes: so many bytes are read and thrown away, at most, where that spares another read.
        most_reads: how many may be on their way at once; 0: one for each of the threads that load.
        is_remote: each read has to come over a network, even if another process of this host has just read the same:
            ranks that load together then read it once, and send it to each other.
    """

    gap_bytes: int = 64 << 10
    most_reads: int = 0
    is_remote: bool = False

    @property
    @abstractmethod
    def files(self) -> Mapping[str, int]:
        """The size in bytes of each file, by name relative to the checkpoint."""

    @abstractmethod
    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """Fill ``view`` with the file's bytes from ``offset`` on. Blocks; may run in several threads at once.

        Args:
            name: the file.
            offset: where to begin, in bytes.
            view: where the bytes go.
            seen: called with each piece of ``view``, in order, as soon as its bytes are there.

        Raises:
            CorruptCheckpointError: the file ends before, or is missing.
            UnsafeCheckpointError: the name leads out of the checkpoint.
            LoadError: reading failed; the cause is chained.
        """

    def read_bytes(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return bytes of a file; blocks, and raises as `read` does."""
        data = bytearray(nbytes)
        self.read(name, offset, memoryview(data))
        return bytes(data)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Fill ``view`` with many runs of bytes, one behind the other; blocks, and raises as `read` does.

        Args:
            name: the file.
            runs: offset and length of each, in bytes.
            view: as long as all of them.
        """
        at = 0
        for offset, length in runs:
            self.read(name, offset, view[at : at + length])
            at += length

    def is_cached(self, name: str, offset: int) -> bool:
        """Return whether to read a byte seems to only copy it from this host's memory. Blocks for a moment."""
        return False

    def map(self, name: str) -> mmap.mmap:
        """Map a file into memory, copy-on-write. Blocks for a moment.

        Raises:
            LoadError: it can't be mapped.
        """
        raise LoadError(f"{name} is not on a file system, so it can't be mapped; load it without mmap=True")

    def share(self) -> None:
        """Note that other processes of this host read the same bytes now, so that the disk should read them once."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open. Idempotent."""


class Listing(ABC):
    """The entries of a directory, or a file alone, to find out what it is. Every method blocks.

    Attributes:
        path: the canonical name.
        is_file: it is no directory.
        files: the size in bytes of each file at the top, by name; `list_below` adds those one level below. Of a
            checkpoint it has all files that are complete, and nothing of a save that is still being written.
        folders: the names of the directories. Some may be of saves that are still being written, where there is no
            folder to look into.
        others: the names of everything else, such as pipes.
        changed_s: when something was changed there last, in seconds as in `time.time`.
        stamp: changes whenever a file at the top does.
    """

    path: str
    is_file: bool
    files: dict[str, int]
    folders: list[str]
    others: list[str]
    changed_s: float
    stamp: Stamp

    @property
    def top(self) -> list[str]:
        """The names of the files at the top."""
        return [name for name in self.files if "/" not in name]

    @property
    def shared_bytes(self) -> int:
        """Those of its files at the top that others have too, by links: a deletion does not free them."""
        return 0

    @abstractmethod
    def list_below(self) -> None:
        """Add the files of the directories, one level below; those that can't be read are left out."""

    @abstractmethod
    def fetch(self, name: str, offset: int, length: int) -> bytes:
        """Return bytes of a file, fewer where it ends; raise OSError if that fails."""

    def close(self) -> None:
        """Close what is open. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class LookBudget:
    """How many entries of directories that are no checkpoints may still be looked at."""

    left: int = 100_000

    @property
    def is_spent(self) -> bool:
        """Whether something was left out."""
        return self.left <= 0


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseFacts:
    """The owner of a run's directory, as others see it."""

    host: str
    pid: int
    since: float  # in seconds as in `time.time`

    def __str__(self) -> str:
        return f"process {self.pid} on host {printable_key(self.host)}, since {time_text(self.since)}"


class RunLease(ABC):
    """The right of one manager to write to a run's directory. Every method blocks."""

    @abstractmethod
    def check(self) -> None:
        """Raise RunLockedError if others may have the run by now."""

    @abstractmethod
    def release(self) -> None:
        """Give it up. Idempotent; does nothing in a forked child."""


class Directories:
    """Names and directories of a storage: what is needed to look at checkpoints, and to own a run."""

    # --- names; these do not block ----------------------------------------------------------------------

    def resolve(self, path: str) -> str:
        """Return the one canonical name of a path, such as the absolute path.

        The same on every host and in every process: ranks compare it, and messages show it.

        Raises:
            AiockptError: the path does not belong here.
        """
        return path

    def below(self, path: str, name: str) -> str:
        """Return the path of something below a path."""
        return f"{path.rstrip('/')}/{name}"

    def split(self, path: str) -> tuple[str, str]:
        """Return the path of the directory above a canonical path, and the last name."""
        above, _, name = path.rstrip("/").rpartition("/")
        return above, name

    # --- directories; these block, and are called in threads ----------------------------------------------

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        """Return what is in a directory, or at the path of a file.

        Args:
            path: the directory or the file.
            budget: of entries that are no checkpoints; None: a new one.

        Raises:
            OSError: it can't be read; FileNotFoundError if nothing is there.
        """
        raise AiockptError(f"{type(self).__name__} can't list what is at {path}: it has no method `look`")

    def stamp(self, path: str) -> Stamp | None:
        """Return a text that changes if what is at a path is replaced; None if nothing is there, or can be seen."""
        try:
            with self.look(path) as listing:
                return listing.stamp
        except OSError:
            return None

    def is_unchanged(self, path: str, stamp: Stamp) -> bool:
        """Return whether the files of a directory still have the stamp of a look, if that costs less than a look."""
        return False

    def stamps(self, directory: str, count: int) -> Mapping[str, Stamp] | None:
        """Return texts that change if checkpoints in a directory are replaced or removed, by their names there.

        For storages where that costs less than to look at each, which then is done by several threads at once. Those
        that are missing are looked at; the texts need not be those of `stamp`. None: each is looked at in its turn.

        Args:
            directory: what they are in.
            count: how many there are, by an earlier look.

        Raises:
            OSError: it can't be read.
        """
        return None

    def pulse(self, directory: str) -> Stamp | None:
        """Return a text that changes soon after a name appears in a directory, or goes; None: only a look tells.

        For storages where that costs less than a look.

        Raises:
            OSError: it can't be read.
        """
        return None

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        """Give a damaged checkpoint another name beside it, so that its own is free; return its path then.

        Args:
            path: the checkpoint.
            names: to choose the first of that is free.

        Raises:
            OSError: it keeps its name.
        """
        raise OSError(f"{type(self).__name__} can't rename: it has no method `set_aside`")

    def lease(self, directory: str) -> RunLease:
        """Take the right to write to a run's directory, which need not exist.

        Raises:
            RunLockedError: another manager has it, or may have it.
            OSError: that can't be found out.
        """
        raise AiockptError(
            f"{type(self).__name__} can't tell one manager from another: it has no method `lease`. Pass lock=False if "
            f"nothing else writes to {directory}"
        )

    def owner_of(self, directory: str) -> LeaseFacts | None:
        """Return the manager that writes to a run, or may; None if it is free. Takes nothing; raises OSError."""
        return None

    def is_finishing(self, directory: str) -> bool:
        """Return whether the writer process of a dead trainer will soon publish a checkpoint; raise OSError."""
        return False

    def identify(self, directory: str, *, make: bool) -> str | None:
        """Return the id of the disk that a run's directory is on: 32 digits, the same for all who see this directory.

        Args:
            directory: the run's directory.
            make: make the directory, and choose an id, if there is none; else None is returned.

        Raises:
            OSError: it can't be read or written.
        """
        raise AiockptError(f"{type(self).__name__} can't tell one disk from another: it has no method `identify`")

    def link(self, path: str) -> str | None:
        """Return where a path leads to if it is a link."""
        return None

    def leftover(self, name: str) -> str | None:
        """Return the state of what a save or a deletion has left, by its name in a directory; None for all else."""
        return None


class Storage(Directories, ABC):
    """A place where checkpoints are kept, each written by one process."""

    traits: ClassVar[Traits] = Traits()

    # --- checkpoints ------------------------------------------------------------------------------------

    def check(self, path: str, *, overwrite: bool) -> None:
        """Refuse a path that is taken, before anything is captured; `begin` and `commit` do so again.

        Called at `save()`, in the caller's thread, which may run an event loop: leave it out if it needs a round trip.

        Raises:
            CheckpointExistsError: the path exists, and may not or can't safely be overwritten.
        """

    def check_repository(self, path: str, *, overwrite: bool) -> None:
        """Do as `check` for a directory of safetensors, which may share it with other files of a model repository."""
        self.check(path, overwrite=overwrite)

    @abstractmethod
    async def begin(self, path: str, *, overwrite: bool, workers: Workers) -> Transaction:
        """Start to write a checkpoint.

        Args:
            path: its final path.
            overwrite: replace what is there.
            workers: threads for blocking work: ``await workers.run(function, *args)``.

        Raises:
            WriteError: with the cause chained.
            CheckpointExistsError: see `check`.
        """

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> Transaction:
        """Start to write a copy of a checkpoint, or go on with one that was suspended, or whose process was killed.

        A storage that can't go on starts anew. The copy replaces what is at the path. The caller sees to it that only
        one process at a time does this.

        Args:
            path: its final path.
            save_id: 16 hexadecimal digits, the same for each attempt and for no other checkpoint.
            workers: threads for blocking work.

        Raises:
            WriteError: with the cause chained.
        """
        return await self.begin(path, overwrite=True, workers=workers)

    def within_checkpoints(self) -> Storage:
        """Return a storage that also writes into the directory of a checkpoint, as stock's conversions do."""
        return self

    @abstractmethod
    async def open(self, path: str, *, workers: Workers) -> Source:
        """Open a checkpoint for reading.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: there is something that was never finished.
        """

    async def delete(self, path: str, *, workers: Workers) -> None:
        """Remove a checkpoint: atomically from its path, then its files. An open `Source` can go on reading.

        Raises:
            CheckpointNotFoundError: there is none.
            DeleteError: it is no checkpoint, or can't be removed; the cause is chained.
        """
        raise DeleteError(f"{path}: this storage can't delete checkpoints; use its own tools")

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        """Remove what killed processes have left in a directory, and never what a live one writes.

        Args:
            directory: where checkpoints are kept.
            older_than_s: the age in seconds from which on to remove also what may belong to others; None: never.
            workers: threads for blocking work.

        Returns:
            The paths of what was removed.

        Raises:
            DeleteError: the directory can't be read.
        """
        return []


class SharedStorage(Storage):
    """A storage in which several processes can write one checkpoint together."""

    @abstractmethod
    def new_ticket(self, path: str) -> str:
        """Choose the `SharedTransaction.ticket` of a transaction to come."""

    @abstractmethod
    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        """Start to write a checkpoint; see `Storage.begin`.

        Args:
            path: its final path.
            overwrite: replace what is there.
            workers: threads for blocking work.
            ticket: what `new_ticket` has returned, maybe in another process; None: choose one.
        """

    @abstractmethod
    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        """Take part in a transaction that another process has begun.

        Args:
            path: the path that it was begun with.
            ticket: its `SharedTransaction.ticket`.
            workers: threads for blocking work.

        Raises:
            WriteError: what the other process has begun can't be seen from here.
        """

    @abstractmethod
    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        """Take over a transaction whose owner is dead, to commit or to abort it.

        Its `commit` replaces documents that the owner has written already. If another transaction has the ticket by
        now, with another stamp, that one is left as it is.

        Args:
            path: the path that it was begun with.
            ticket: its `SharedTransaction.ticket`.
            overwrite: replace what is at the path.
            workers: threads for blocking work.
            stamp: its `SharedTransaction.stamp`.
        """


def shared_storage(storage: Storage) -> SharedStorage:
    """Return a storage that several processes can write to; raise SaveError if it can't be shared."""
    if isinstance(storage, SharedStorage):
        return storage
    raise SaveError(_one_process_only(storage))


def shared_transaction(transaction: Transaction) -> SharedTransaction:
    """Return a transaction that other processes can join; raise SaveError if it can't be shared."""
    if isinstance(transaction, SharedTransaction):
        return transaction
    raise SaveError(_one_process_only(transaction))


def _no_parts(this: Transaction) -> str:
    return (
        f"{type(this).__name__} can't let several ranks write one file, as format='safetensors' does: save with "
        "format='dcp', or implement reserve and open_part of aiockpt.storage.SharedTransaction"
    )


def _one_process_only(this: Storage | Transaction) -> str:
    return (
        f"{type(this).__name__} takes the files of one process only: save with process_group=None and writer='thread', "
        "or use a storage derived from aiockpt.storage.SharedStorage"
    )
