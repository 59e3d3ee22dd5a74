"""Writer processes of several ranks agree without their trainers, by files beside the unfinished checkpoint.

Each says in a file of its own what it has written, once that is durable, or that it has failed. When all have written
their parts, the one of rank 0 publishes; if one has failed, or nothing goes on for a while, all is removed. Who
publishes and who removes does so by one rename, so that exactly one of them succeeds.
"""

from __future__ import annotations

import logging
import pickle
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import AiockptError, CommitError, WriteError, printable
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.writing.collective_commit import publish_together
from aiockpt.writing.process.recovery_record import Leadership, RecoveryRecord, part_name, sealed, unsealed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiockpt.core.threads import Workers
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.collective.messages import Written
    from aiockpt.storage.base import Storage, Transaction
    from aiockpt.writing.process.messages import Begin

_LOOK_S = 0.05
logger = logging.getLogger("aiockpt")


class Agreement:
    """One rank's part in it.

    Args:
        begin: the save.
        parting: what this rank knows, pickled.
        storage: where the checkpoint is.
        transaction: what the rank has joined.
        patience_s: how long nothing may go on before it is given up.
        workers: for what takes long.
    """

    def __init__(
        self,
        begin: Begin,
        parting: bytes,
        storage: Storage,
        transaction: Transaction,
        patience_s: float,
        workers: Workers,
    ) -> None:
        self._begin = begin
        self._parting: RecoveryRecord = pickle.loads(parting)
        self._storage = storage
        self._transaction = transaction
        self._patience_s = patience_s
        self._workers = workers
        self._deadline = time.monotonic() + patience_s
        self._seen: object = None

    async def settle(self, files: dict[str, FileFacts]) -> None:
        """Agree. When it returns, the checkpoint is published.

        Args:
            files: what this rank has written.

        Raises:
            CommitError: it was given up, and removed.
        """
        lead, transaction = self._parting.leadership, self._transaction
        try:
            if await transaction.status() == "open":  # else the trainer of rank 0 has got as far as that
                await self._say(files)
                await (self._follow() if lead is None else self._lead(lead))
        except AiockptError as exc:
            if await transaction.status() != "published":
                await transaction.discard_all()
                raise self._given_up(exc) from exc
        finally:
            await self._take_back(range(self._parting.ranks) if lead is not None else (self._parting.rank,))
        if await transaction.status() != "published":
            raise self._given_up("another rank's writer has given it up")
        await transaction.finalize()

    async def _take_back(self, ranks: Iterable[int]) -> None:
        """Remove words. What has become of the checkpoint doesn't hang on it: somebody else's may not be removed."""
        for rank in ranks:
            try:
                await self._transaction.delete_sidecar(part_name(rank))
            except AiockptError as exc:
                logger.warning("beside %s: %s", self._begin.path, printable(str(exc)))

    def _given_up(self, reason: object) -> CommitError:
        return CommitError(f"{self._begin.path} was not finished without the trainers: {reason}")

    async def _say(self, files: dict[str, FileFacts]) -> None:
        """Tell the others what this rank has."""
        parting = self._parting
        data = sealed(parting.secret, parting.rank, replace(parting.written, files=files))
        await self._transaction.put_sidecar(part_name(parting.rank), data)

    async def _lead(self, lead: Leadership) -> None:
        """Publish when all have written their parts."""
        begin, parting = self._begin, self._parting
        written: dict[int, Written] = {}
        while len(written) < parting.ranks:
            for rank in range(parting.ranks):
                if rank not in written:
                    await self._hear(rank, written)
            if len(written) < parting.ranks:
                await self._pause()
        adopted = await self._storage.take_over(
            begin.path,
            begin.ticket or "",
            overwrite=lead.overwrite,
            workers=self._workers,
            identity=self._transaction.identity,
        )
        for name in (MANIFEST_NAME, METADATA_NAME):
            await adopted.delete_file(name)  # the trainer may have got so far
        results = [written[rank] for rank in range(parting.ranks)]
        book = None if lead.book is None else pickle.loads(lead.book)
        await publish_together(adopted, book, lead.facts, results, self._workers)

    async def _hear(self, rank: int, written: dict[int, Written]) -> None:
        data = await self._transaction.get_sidecar(part_name(rank))
        if data is None:
            return
        found = await self._workers.run(unsealed, self._parting.secret, rank, data)
        if found is not None:  # else it is not yet all there, or not from that rank
            written[rank] = found

    async def _follow(self) -> None:
        """Wait until the writer of rank 0 has published."""
        while await self._transaction.status() == "open":
            await self._pause()

    async def _pause(self) -> None:
        """Wait for a moment.

        Raises:
            WriteError: nothing has gone on for too long.
        """
        await anyio.sleep(_LOOK_S)
        sizes = await self._transaction.sizes()
        now = time.monotonic()
        if sizes != self._seen:
            self._seen, self._deadline = sizes, now + self._patience_s
        # Rank 0 gives up first, for it knows more.
        if now > self._deadline + (0 if self._parting.leadership is not None else self._patience_s):
            raise WriteError(f"the parts of some ranks did not come within {self._patience_s:g} s")
