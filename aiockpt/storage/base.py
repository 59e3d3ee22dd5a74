"""The interfaces between the engine and a storage, which a user's own storage implements.

=============================  ============================================================================
to implement                   for
=============================  ============================================================================
`Storage`, `Transaction`       saves of one process, and all loads
`SharedStorage`,               saves of several ranks, and of a writer process: several processes write the
`SharedTransaction`            files of one checkpoint, and one may finish what another has begun
=============================  ============================================================================

`aiockpt.testing.StorageConformance` tests an implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from aiockpt.errors import DeleteError, LoadError, SaveError

if TYPE_CHECKING:
    import mmap

    from aiockpt.core.threads import Workers


Status = Literal["open", "published", "gone"]
"""Of a transaction: it is still being written, is under its final name, or was removed."""

Identity = tuple[int, int]
"""Distinguishes a transaction from all others, whatever its name."""

Seen = Callable[[memoryview], object]
"""Called with each piece of what is read, in order, as soon as its bytes are there."""


class FileSink(ABC):
    """A file that is being written, from its beginning to its end.

    The methods raise `WriteError`, with the cause chained.
    """

    @abstractmethod
    async def write(self, view: memoryview) -> None:
        """Write the next bytes.

        Every write except the last one is of whole blocks of 4096 bytes. The last one may be padded with zeros to a
        whole block, beyond the announced size; without an announced size the file ends where the last write ends.
        If cancelled, it returns only when ``view`` is no longer in use.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Make the file durable at its announced size, or with all that was written, and close it."""


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

    @abstractmethod
    async def create(self, name: str, nbytes: int | None) -> FileSink:
        """Start a file. Several files may be open at once.

        Args:
            name: its path relative to the checkpoint. The empty name is the checkpoint itself, which then is
                this one file instead of a directory; no other file is created beside it.
            nbytes: its size; None if it is known only when everything is written.
        """

    async def write_files(self, files: Mapping[str, bytes | bytearray | memoryview]) -> None:
        """Write small files, each as a whole and durably, in this order.

        If cancelled, it returns only when their bytes are no longer in use.
        """
        for name, data in files.items():
            sink = await self.create(name, len(data))
            await sink.write(memoryview(data))
            await sink.finish()

    @abstractmethod
    async def commit(self) -> None:
        """Publish the checkpoint, durably and atomically.

        If it fails, nothing was published, or it was taken back.

        Raises:
            CommitError: with the cause chained.
            CheckpointExistsError: something has appeared at the path meanwhile.
        """

    def revoke(self) -> None:
        """Make a hanging `commit` fail instead of publishing, if that is still possible. Does not block."""

    @abstractmethod
    async def abort(self) -> None:
        """Remove everything written so far. Idempotent; after `commit` it does nothing.

        Raises:
            WriteError: something could not be removed.
        """


class SharedTransaction(Transaction):
    """A transaction of several processes: one has begun it, others join it or take it over.

    For a process that has joined it, `commit` makes its own files durable and `abort` closes them; the owner
    publishes or removes all of them. Sidecar files are messages between the processes; they are never part of the
    checkpoint. For errors see `Transaction`.
    """

    @property
    @abstractmethod
    def ticket(self) -> str:
        """The name by which other processes join it; see `SharedStorage.join`."""

    @property
    def identity(self) -> Identity | None:
        """A value that distinguishes it from all others, whatever its name; None if that is not known."""
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
    async def put_sidecar(self, name: str, data: bytes) -> None:
        """Write a sidecar file for the other processes."""

    @abstractmethod
    async def get_sidecar(self, name: str) -> bytes | None:
        """Return the contents of a sidecar file, which may be incomplete; None if there is none."""

    @abstractmethod
    async def delete_sidecar(self, name: str) -> None:
        """Remove a sidecar file, if it exists."""

    @abstractmethod
    async def delete_file(self, name: str) -> None:
        """Remove a file of the checkpoint that another process has written, if it exists."""

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
    """A checkpoint that is being read."""

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


class Storage(ABC):
    """A place where checkpoints are kept, each written by one process."""

    def resolve(self, path: str) -> str:
        """Return the one canonical name of a path, such as the absolute path. Does not block.

        Raises:
            AiockptError: the path does not belong here.
        """
        return path

    def check(self, path: str, *, overwrite: bool) -> None:
        """Refuse a path that is taken, before anything is captured; `begin` and `commit` do so again.

        Called at `save()`, in the caller's thread: it may block for a look at most.

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
        """Remove what killed processes have left in a directory.

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
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> SharedTransaction:
        """Take over a transaction whose owner is dead, to commit or to abort it.

        Args:
            path: the path that it was begun with.
            ticket: its `SharedTransaction.ticket`.
            overwrite: replace what is at the path.
            workers: threads for blocking work.
            identity: its `SharedTransaction.identity`.
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
        "format='dcp', or implement reserve and open_part of aiockpt.storage.base.SharedTransaction"
    )


def _one_process_only(this: Storage | Transaction) -> str:
    return (
        f"{type(this).__name__} takes the files of one process only: save with process_group=None and writer='thread', "
        "or use a storage derived from aiockpt.storage.base.SharedStorage"
    )
