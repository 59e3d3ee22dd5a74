"""A save of ``dcp.save`` to a storage that is no file system: one transaction of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import _StoragePrefix

from aiockpt.core.threads import outlast
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError, CommitError, WriteError
from aiockpt.format.names import METADATA_NAME
from aiockpt.storage.base import SharedStorage, Stamp, shared_storage
from aiockpt.storage.registry import storage_for

if TYPE_CHECKING:
    from aiockpt.dcp.adapter import AnyCheckpointer
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Storage

logger = logging.getLogger("aiockpt")


@dataclass
class SharedPrefix(_StoragePrefix):
    """The data that a rank needs to write its files: how their names begin, and the ticket of the transaction."""

    ticket: str


@dataclass(eq=False, slots=True)
class SharedSave:
    """The transaction of all ranks. Between the calls of torch only its ticket is kept, so no engine has to run.

    Attributes:
        storage: where it writes to.
        path: of the checkpoint.
        ticket: of the transaction that this rank takes part in; empty if there is none.
        stamp: on the rank that has begun it, that of the transaction.
        over: the ticket of the last one, which has ended.
    """

    storage: SharedStorage
    path: str
    ticket: str = ""
    stamp: Stamp | None = None
    over: str = ""

    def begin(self, checkpointer: AnyCheckpointer, *, overwrite: bool) -> str:
        """Begin a transaction and return its ticket. Blocks."""

        async def begin(tools: LoadTools) -> tuple[str, Stamp | None]:
            begun = await self.storage.begin(self.path, overwrite=overwrite, workers=tools.workers)
            await begun.release()  # it lives as long as this process
            return begun.ticket, begun.stamp

        self.ticket, self.stamp = EngineAccess(checkpointer).call(begin, f"begin to write {self.path}").result()
        return self.ticket

    def follow(self, prefix: _StoragePrefix) -> None:
        """Take part in the transaction that a plan names; raise WriteError if the plan is of an earlier save."""
        ticket = getattr(prefix, "ticket", "")
        if not ticket or ticket == self.over or (self.ticket and self.ticket != ticket):
            raise WriteError(
                f"the plan for {self.path} is that of an earlier save: a URL needs a new plan for each save, so leave "
                "out enable_plan_caching"
            )
        self.ticket = ticket

    def leave(self) -> None:
        """Forget the transaction, whose files belong to the rank that has begun it."""
        if self.stamp is None:
            self.ticket, self.over = "", self.ticket

    def publish(self, checkpointer: AnyCheckpointer, metadata: bytes, files: Iterable[str], *, overwrite: bool) -> None:
        """Publish what all ranks have written. Blocks; if it fails, everything is removed."""

        async def publish(tools: LoadTools) -> None:
            taken = await self.storage.take_over(
                self.path, self.ticket, overwrite=overwrite, workers=tools.workers, stamp=self.stamp
            )
            try:
                missing = set(files).difference(await taken.sizes())
                if missing:
                    raise CommitError(f"{self.path}: {min(missing)}, which a rank has written, is not there")
                await taken.commit({METADATA_NAME: metadata})
            except BaseException:
                await outlast(taken.abort())
                raise

        EngineAccess(checkpointer).call(publish, f"publish {self.path}").result()
        self.ticket, self.stamp, self.over = "", None, self.ticket

    def discard(self, checkpointer: AnyCheckpointer) -> None:
        """Remove the files of all ranks, which then can't publish them any more, as far as that works. Blocks."""
        ticket, self.ticket, self.stamp, self.over = self.ticket, "", None, self.ticket

        async def discard(tools: LoadTools) -> None:
            joined = await self.storage.join(self.path, ticket, workers=tools.workers)
            await joined.discard_all()

        try:
            EngineAccess(checkpointer).call(discard, f"discard {self.path}").result()
        except AiockptError as exc:  # it may be gone; what is left goes when the processes of the save have ended
            logger.debug("an unfinished save of %s may be left: %s", self.path, exc)


def shared_save_at(
    path: str, storage: Storage | None, options: Mapping[str, Any] | None, checkpointer: AnyCheckpointer | None
) -> SharedSave:
    """Return what saves to a URL, or to a path of a storage; by the storages of the checkpointer, if there is one."""
    if checkpointer is not None:
        found, path = EngineAccess(checkpointer).locate(path, storage, options)
    elif storage is not None:
        found, path = storage, storage.resolve(path)
    else:
        found, path = storage_for(path, **(options or {}))
    return SharedSave(shared_storage(found), path)
