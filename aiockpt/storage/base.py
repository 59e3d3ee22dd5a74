"""The interface between the engine and a place where checkpoints are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from aiockpt.errors import DeleteError, LoadError, SaveError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping, Sequence

    from aiockpt.core.threads import Workers
    from aiockpt.format.index import ItemRange


Status = Literal["open", "published", "gone"]
"""Of a transaction: it is still being written, is under its final name, or was removed."""


Identity = tuple[int, int]


_ONE_PROCESS = "this storage takes the files of one process only; save with process_group=None"


class FileSink(ABC):
    """A file that is being written, from its beginning to its end."""

    @abstractmethod
    async def write(self, view: memoryview) -> None:
        """Write the next bytes.

        All writes but the last are of whole blocks of 4096 bytes. The last may be longer than what is left
        of the announced size, with zeros, up to a whole block; without an announced size it ends where the file
        ends. Cancellation waits until ``view`` is no longer in use.

        Raises:
            WriteError: with the cause chained.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Make the file durable at its announced size, or with what was written, and close it.

        Raises:
            WriteError: with the cause chained.
        """


class Transaction(ABC):
    """A checkpoint that is being written. Nobody sees it before `commit`."""

    @abstractmethod
    async def create(self, name: str, nbytes: int | None) -> FileSink:
        """Start a file.

        Args:
            name: its path relative to the checkpoint. The empty name is the checkpoint itself, which then is
                this one file instead of a directory; no other file is created beside it.
            nbytes: its size; None where it is known only when all is written.

        Raises:
            WriteError: with the cause chained.
        """

    @abstractmethod
    async def commit(self) -> None:
        """Publish the checkpoint, durably and at once.

        When it fails, nothing was published, or it was taken back. Of a transaction that was joined it makes the
        own part durable, for who began it publishes all.

        Raises:
            CommitError: with the cause chained.
            CheckpointExistsError: something has come to the path meanwhile.
        """

    def revoke(self) -> None:
        """Let a `commit` that has begun, but hangs, publish nothing any more: it fails if it can. Does not block."""

    @abstractmethod
    async def abort(self) -> None:
        """Remove everything written so far. Idempotent; after `commit` it does nothing.

        Of a transaction that was joined it closes the own files, which who began it removes.

        Raises:
            WriteError: something could not be removed.
        """

    @property
    def ticket(self) -> str:
        """What other processes need to take part; see `Storage.join`."""
        raise SaveError(_ONE_PROCESS)

    async def sizes(self) -> Mapping[str, int]:
        """Give the size in bytes of each file that can be seen from here, whichever process wrote it.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    @property
    def identity(self) -> Identity | None:
        """What tells it from all others, whatever it is called; None where that is not known."""
        return None

    async def put_sidecar(self, name: str, data: bytes) -> None:
        """Leave a word for other processes that take part; it is never part of the checkpoint.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    async def get_sidecar(self, name: str) -> bytes | None:
        """Give a word that was left, as much of it as there is; None if there is none.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    async def delete_sidecar(self, name: str) -> None:
        """Remove a word, if it is there.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    async def release(self) -> None:
        """Stop taking part in a transaction that was joined, which belongs to others from now on. Idempotent."""

    async def finalize(self) -> None:
        """Complete what is under its final name, though who published it is gone: durably, and nothing beside it.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    async def delete_file(self, name: str) -> None:
        """Remove a file that another process has written, if it is there.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    async def status(self) -> Status:
        """Tell what has become of a transaction that was joined.

        Raises:
            WriteError: with the cause chained.
        """
        raise SaveError(_ONE_PROCESS)

    async def discard_all(self) -> None:
        """Remove what all processes have written: for those that joined, when who began it is gone.

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
    def read(
        self, name: str, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill ``view`` with the file's bytes from ``offset`` on. Blocks; may run in several threads at once.

        Args:
            name: the file.
            offset: where to begin, in bytes.
            view: where the bytes go.
            seen: is given each part of ``view``, in order, when its bytes have just come.

        Raises:
            CorruptCheckpointError: the file ends before, or is missing.
            UnsafeCheckpointError: the name leads out of the checkpoint.
            LoadError: reading failed; the cause is chained.
        """

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

    def settled(self, place: ItemRange) -> ItemRange:
        """Give the place of an item with its true length, where that shows only when it is read. Blocks then.

        Raises:
            LoadError: it can't be read.
        """
        return place

    def comes_whole(self, name: str) -> bool:
        """Tell whether a file is made as it is read, from its beginning on, so that it is best read at once."""
        return False

    def map(self, name: str) -> mmap.mmap:
        """Map a file into memory, copy-on-write. Blocks for a moment.

        Raises:
            LoadError: it can't be mapped.
        """
        raise LoadError(f"{name} is not on a file system, so it can't be mapped; load it without mmap=True")

    def share(self) -> None:
        """Be told that other processes of this host read the same bytes at the same time, so that they are got once."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open. Idempotent."""


class Storage(ABC):
    """A place where checkpoints are kept."""

    @abstractmethod
    def resolve(self, path: str) -> str:
        """Give the one name that a path has here, such as the absolute path. Does not block.

        Raises:
            AiockptError: the path does not belong here.
        """

    @abstractmethod
    def check(self, path: str, *, overwrite: bool) -> None:
        """Refuse a path that is taken. Called at `save()`, in the caller's thread; blocks for a look at most.

        Raises:
            CheckpointExistsError: the path exists, and may not or can't safely be overwritten.
        """

    def new_ticket(self, path: str) -> str | None:
        """Choose a `Transaction.ticket` for a transaction to come; None if there is nothing to choose."""
        return None

    @abstractmethod
    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        """Start to write a checkpoint; blocking work goes to ``workers``.

        Args:
            path: where it is to be.
            overwrite: replace what is there.
            workers: for blocking work.
            ticket: see `new_ticket`.

        Raises:
            WriteError: with the cause chained.
            CheckpointExistsError: see `check`.
        """

    async def join(self, path: str, ticket: str, *, workers: Workers) -> Transaction:
        """Take part in a transaction that another process has begun.

        Args:
            path: as there.
            ticket: its `Transaction.ticket`.
            workers: for blocking work.

        Raises:
            WriteError: what the other process has begun can't be seen from here.
        """
        raise SaveError(f"{path}: {_ONE_PROCESS}")

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, identity: Identity | None
    ) -> Transaction:
        """Take a transaction over from the process that has begun it, which is gone, to commit or to abort it.

        Args:
            path: as there.
            ticket: its `Transaction.ticket`.
            overwrite: as there.
            workers: for blocking work.
            identity: its `Transaction.identity`.
        """
        raise SaveError(f"{path}: {_ONE_PROCESS}")

    async def delete(self, path: str, *, workers: Workers) -> None:
        """Remove a checkpoint: at once from its name, then its files. Who has it open can go on reading.

        Raises:
            CheckpointNotFoundError: there is none.
            DeleteError: it is no checkpoint, or can't be removed; the cause is chained.
        """
        raise DeleteError(f"{path}: this storage can't delete checkpoints; use its own tools")

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        """Remove what killed processes have left in a directory.

        Args:
            directory: where checkpoints are kept.
            older_than_s: from what age on to remove also what may be others', in seconds; None: never.
            workers: for blocking work.

        Returns:
            The paths of what was removed.

        Raises:
            DeleteError: the directory can't be read.
        """
        return []

    @abstractmethod
    async def open(self, path: str, *, workers: Workers) -> Source:
        """Open a checkpoint for reading.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: there is something that was never finished.
        """
