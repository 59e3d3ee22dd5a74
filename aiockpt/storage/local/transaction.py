"""Transactions of local and mounted file systems: what is begun, joined, or added to a directory that is there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from aiockpt.errors import CommitError, WriteError
from aiockpt.format.names import SINGLE_NAME
from aiockpt.storage.base import FileSink, Identity, SharedTransaction, Status
from aiockpt.storage.local.belonging import OtherThingsError, remove
from aiockpt.storage.local.commit import (
    CommitUncertainError,
    Publication,
    publish_repeatedly,
    remove_own,
    sync_directory,
)
from aiockpt.storage.local.replacing import is_between, remove_record
from aiockpt.storage.local.sink import LocalSink
from aiockpt.storage.local.temp_dir import contents, fate_of, sizes_in, sweep, write_word
from aiockpt.storage.local.temp_names import REPLACED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiockpt.core.threads import Workers
    from aiockpt.storage.local.dir_lock import Hold
    from aiockpt.storage.local.orphans import OrphanCleaner
    from aiockpt.storage.local.retries import Repeater

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """How a storage writes.

    Attributes:
        direct_io: past the page cache, where the file system allows it.
        fsync: durably.
        repeater: tries again what may pass.
        leftovers: takes note of what could not be removed.
    """

    direct_io: bool
    fsync: bool
    repeater: Repeater = field(repr=False)
    leftovers: OrphanCleaner = field(repr=False)


class LocalTransaction(SharedTransaction):
    """What this process has begun, or has taken over.

    Args:
        manner: how to write.
        path: the final name.
        hidden: the hidden directory.
        overwrite: replace what is at ``path``.
        workers: for blocking work.
        held: keeps others from removing the hidden directory; None if it is not there, or not theirs to remove.
        own: the identity of the hidden directory; None if it is not known.
    """

    def __init__(
        self,
        manner: WritePolicy,
        path: str,
        hidden: str,
        *,
        overwrite: bool,
        workers: Workers,
        held: Hold | None,
        own: Identity | None,
    ) -> None:
        self._manner = manner
        self._path = path
        self._hidden = hidden
        self._overwrite = overwrite
        self._workers = workers
        self._single = ""
        self._sinks: list[LocalSink] = []
        self._over = False
        self._revoked = False
        self._held = held
        self._identity = own

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        """See `Transaction.create`."""
        if not name:
            self._single = SINGLE_NAME
        path = os.path.join(self._hidden, name or self._single)
        final = os.path.join(self._path, name) if name else self._path
        manner = self._manner
        sink = LocalSink(path, final, nbytes, fsync=manner.fsync, workers=self._workers, repeater=manner.repeater)
        self._sinks.append(sink)
        await sink.open(direct=manner.direct_io)
        return sink

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        try:
            manner = self._manner
            publication = Publication(
                self._hidden, self._path, self._single, self._overwrite, manner.fsync, self._identity, self._check
            )
            await publish_repeatedly(publication, manner.repeater, self._workers)
        except CommitUncertainError as exc:
            self._over = True  # what is in the hidden directory may be the only good checkpoint
            await self.release()
            raise CommitError(str(exc)) from exc.__cause__
        if publication.rest is not None:
            manner.leftovers.add(*publication.rest)
        self._over = True
        await self.release()

    def revoke(self) -> None:
        """See `Transaction.revoke`."""
        self._revoked = True

    def _check(self) -> None:
        if self._revoked:
            raise CommitError(f"{self._path} was given up before it was published")

    async def abort(self) -> None:
        """See `Transaction.abort`."""
        if self._over:
            return
        self._over = True
        for sink in self._sinks:
            await sink.close()
        leftovers = self._manner.leftovers
        leftovers.look_again(os.path.dirname(self._hidden))
        if is_between(self._hidden):  # a commit that hangs: the only good checkpoint may be here
            await self.release()
            raise WriteError(f"{self._path} is just being replaced, so what was written stays in {self._hidden}")
        try:
            own_files = [os.path.basename(sink.path) for sink in self._sinks]
            await self._again("remove", remove_own, self._hidden, self._identity, own_files)
        except OtherThingsError as exc:
            raise WriteError(f"can't remove the unfinished checkpoint {self._hidden}: {exc}; see what that is") from exc
        except OSError as exc:
            leftovers.add(self._hidden, self._identity)
            raise WriteError(
                f"can't remove the unfinished checkpoint {self._hidden}: {exc}; the next save beside it tries again"
            ) from exc
        finally:
            await self.release()

    async def release(self) -> None:
        """See `SharedTransaction.release`."""
        if self._held is not None:
            await self._workers.run(self._held.release)

    async def _again(self, verb: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what may be done several times, until it succeeds."""
        step = partial(self._workers.run, function, *args, **kwargs)
        return await self._manner.repeater.run(f"{verb} what was written for {self._path}", step)

    @property
    def ticket(self) -> str:
        """See `SharedTransaction.ticket`."""
        return os.path.basename(self._hidden)

    async def sizes(self) -> Mapping[str, int]:
        """See `SharedTransaction.sizes`."""
        try:
            return await self._again("look at", sizes_in, self._hidden)
        except OSError as exc:
            raise WriteError(f"can't look at what was written for {self._path}: {exc}") from exc

    @property
    def identity(self) -> Identity | None:
        """See `SharedTransaction.identity`."""
        return self._identity

    async def put_sidecar(self, name: str, data: bytes) -> None:
        """See `SharedTransaction.put_sidecar`."""
        try:
            await self._workers.run(write_word, f"{self._hidden}-{name}", data)
        except OSError as exc:
            raise WriteError(f"can't leave a word beside {self._path}: {exc}") from exc

    async def get_sidecar(self, name: str) -> bytes | None:
        """See `SharedTransaction.get_sidecar`."""
        try:
            return await self._again("read", contents, f"{self._hidden}-{name}")
        except OSError as exc:
            raise WriteError(f"can't look at what was written for {self._path}: {exc}") from exc

    async def delete_sidecar(self, name: str) -> None:
        """See `SharedTransaction.delete_sidecar`."""
        await self._remove(f"{self._hidden}-{name}")

    async def delete_file(self, name: str) -> None:
        """See `SharedTransaction.delete_file`."""
        await self._remove(os.path.join(self._hidden, name))

    async def _remove(self, path: str) -> None:
        try:
            await self._again("remove", remove, path)
        except OSError as exc:
            raise WriteError(f"can't remove {path}: {exc}; remove it by hand") from exc

    async def status(self) -> Status:
        """See `SharedTransaction.status`."""
        try:
            return await self._again("look for", fate_of, self._hidden, self._path, self._identity)
        except OSError as exc:
            raise WriteError(f"can't look at what was written for {self._path}: {exc}") from exc

    async def finalize(self) -> None:
        """See `SharedTransaction.finalize`."""
        self._over = True
        try:
            if await self._workers.run(fate_of, self._hidden, self._path, self._identity) == "published":
                if self._manner.fsync:
                    await self._workers.run(sync_directory, os.path.dirname(self._path))
                await self._workers.run(remove, self._hidden)  # what it replaced, where names were exchanged
                await self._workers.run(remove_record, self._hidden)
                await self._workers.run(remove, self._hidden + REPLACED)
        except OSError as exc:
            raise WriteError(f"{self._path} was published, but can't be made durable: {exc}") from exc
        finally:
            await self.release()


class JoinedTransaction(LocalTransaction):
    """A part in what another process has begun, and commits or aborts."""

    async def commit(self) -> None:
        """See `Transaction.commit`."""
        if self._manner.fsync:
            try:
                await self._workers.run(sync_directory, self._hidden)
            except OSError as exc:
                raise CommitError(f"can't make the files of {self._path} durable: {exc}") from exc

    async def abort(self) -> None:
        """See `Transaction.abort`."""
        for sink in self._sinks:
            await sink.close()
        await self.release()

    async def discard_all(self) -> None:
        """See `SharedTransaction.discard_all`."""
        await self.abort()
        try:
            await self._workers.run(sweep, self._hidden, self._identity)
        except OSError as exc:
            raise WriteError(
                f"can't remove the unfinished checkpoint {self._hidden}: {exc}; remove it by hand"
            ) from exc


class WithinTransaction(JoinedTransaction):
    """Files in a directory that belongs to somebody else: the own ones alone are removed."""

    async def abort(self) -> None:
        """See `Transaction.abort`."""
        await super().abort()
        for sink in self._sinks:
            try:
                await self._workers.run(remove, sink.path)
            except OSError as exc:
                raise WriteError(f"can't remove the unfinished file {sink.path}: {exc}; remove it by hand") from exc
