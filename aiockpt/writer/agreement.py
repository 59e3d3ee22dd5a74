"""Writer processes of several ranks agree without their trainers, by files in the unfinished checkpoint.

Each says in a file of its own what it has written, once that is durable, or that it has failed. When all have written
their parts, the one of rank 0 publishes; if one has failed, or nothing goes on for a while, all is removed. Who
publishes and who removes does so by one rename, so that exactly one of them succeeds.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import AiockptError, CommitError, WriteError
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.world_publishing import publish_together
from aiockpt.writer.parting import Leadership, Parting, part_name, sealed, unsealed

if TYPE_CHECKING:
    from aiockpt.format.manifest import FileFacts
    from aiockpt.planning.world_book import Written
    from aiockpt.storage.base import Storage, Transaction
    from aiockpt.threads import Workers
    from aiockpt.writer.messages import Begin

_LOOK_S = 0.05


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
        self._parting: Parting = pickle.loads(parting)
        self._storage = storage
        self._transaction = transaction
        self._patience_s = patience_s
        self._workers = workers
        self._deadline = time.monotonic() + patience_s
        self._seen: object = None

    async def settle(self, files: dict[str, FileFacts] | None) -> None:
        """Agree. When it returns, the checkpoint is published.

        Args:
            files: what this rank has written; None: it has failed.

        Raises:
            CommitError: it was given up, and removed.
        """
        lead = self._parting.leadership
        try:
            if files is None and lead is not None:
                raise CommitError("rank 0 had not staged all of its part")
            await self._say(files)
            await (self._follow() if lead is None else self._lead(lead))
        except AiockptError as exc:
            if await self._transaction.fate() == "published":
                return
            await self._transaction.sweep()
            raise CommitError(f"{self._begin.path} was not finished without the trainers: {exc}") from exc

    async def _say(self, files: dict[str, FileFacts] | None) -> None:
        """Tell the others what this rank has."""
        parting = self._parting
        written = None if files is None else replace(parting.written, files=files)
        data = sealed(parting.secret, written)
        sink = await self._transaction.create(part_name(parting.rank), len(data))
        await sink.write(memoryview(data))
        await sink.finish()

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
        adopted = await self._storage.adopt(
            begin.path, begin.ticket or "", overwrite=lead.overwrite, workers=self._workers
        )
        for name in (*map(part_name, range(parting.ranks)), MANIFEST_NAME, METADATA_NAME):
            await adopted.discard(name)  # the trainer may have got so far
        results = [written[rank] for rank in range(parting.ranks)]
        book = None if lead.book is None else pickle.loads(lead.book)
        await publish_together(adopted, book, lead.facts, results, self._workers)

    async def _hear(self, rank: int, written: dict[int, Written]) -> None:
        data = await self._transaction.read(part_name(rank))
        found = None if data is None else unsealed(self._parting.secret, data)
        if found is None:  # not there, or not yet all of it
            return
        (said,) = found
        if said is None:
            raise CommitError(f"rank {rank} had not staged all of its part")
        written[rank] = said

    async def _follow(self) -> None:
        """Wait until the writer of rank 0 has published."""
        while (fate := await self._transaction.fate()) == "open":
            await self._pause()
        if fate == "gone":
            raise CommitError("the writer of another rank has given it up")

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
