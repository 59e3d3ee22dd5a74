"""Commit by the writer processes of several ranks, without their trainers: they agree by sidecar files.

Each process writes a sidecar file beside the unfinished checkpoint once its rank's files are durable. When all ranks'
sidecars are there, the process of rank 0 publishes. If a process has failed, or nothing progresses for a while, all
files are removed. Both publishing and removing begin with one rename, so exactly one of them succeeds.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import AiockptError, CommitError, WriteError, printable
from aiockpt.writing.collective_commit import WorldFacts, publish_together

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.planning.collective.messages import Written
    from aiockpt.storage.base import SharedStorage, SharedTransaction
    from aiockpt.writing.file_writer import ChunkWriter
    from aiockpt.writing.process.messages import Begin

_POLL_S = 0.05  # a network file system sends no events for another host's changes
_DIGEST_BYTES = 32
logger = logging.getLogger("aiockpt")


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """Facts that one rank's writer process needs to commit without its trainer; sent once the save is staged."""

    rank: int
    ranks: int
    secret: bytes = field(repr=False)  # of this save; authenticates the sidecar files
    written: Written  # what the rank writes, still without its files
    facts: WorldFacts | None = None  # on rank 0: what it needs to publish
    plan_cache: bytes = field(repr=False, default=b"")  # there too


@dataclass(slots=True, eq=False, repr=False)
class OrphanCommit:
    """One rank's side of the commit."""

    _begin: Begin
    _record: RecoveryRecord
    _storage: SharedStorage
    _transaction: SharedTransaction
    _timeout_s: float  # without any progress
    _workers: Workers
    _deadline: float = 0.0
    _last_sizes: object = None

    async def run(self, writer: ChunkWriter) -> None:
        """Commit this rank's files, which a writer has written, together with those of the others.

        When it returns, the checkpoint is published. If it raises CommitError, the checkpoint was removed.
        """
        record, transaction = self._record, self._transaction
        self._deadline = time.monotonic() + self._timeout_s
        try:
            if await transaction.status() == "open":  # else the trainer of rank 0 has published or removed it
                written = record.written.completed(writer.files, writer.crcs, writer.encoded)
                data = sign_sidecar(record.secret, record.rank, written)
                await transaction.put_sidecar(_sidecar_name(record.rank), data)
                await (self._follow() if record.facts is None else self._lead(record.facts))
        except AiockptError as exc:
            if await transaction.status() != "published":
                await transaction.discard_all()
                raise self._not_finished(exc) from exc
        finally:
            await self._delete_sidecars((record.rank,) if record.facts is None else range(record.ranks))
        if await transaction.status() != "published":
            raise self._not_finished("another rank's writer has given it up")
        await transaction.finalize()

    def _not_finished(self, reason: object) -> CommitError:
        return CommitError(f"{self._begin.path} was not finished without the trainers: {reason}")

    async def _delete_sidecars(self, ranks: Iterable[int]) -> None:
        """Delete sidecar files. A failure changes nothing for the checkpoint: another user's can't be deleted."""
        for rank in ranks:
            try:
                await self._transaction.delete_sidecar(_sidecar_name(rank))
            except AiockptError as exc:
                logger.warning("beside %s: %s", self._begin.path, printable(str(exc)))

    async def _lead(self, facts: WorldFacts) -> None:
        """Publish when the sidecar files of all ranks are there."""
        begin, ranks, plan_cache = self._begin, self._record.ranks, self._record.plan_cache
        written: dict[int, Written] = {}
        while True:
            for rank in range(ranks):
                if rank not in written and (found := await self._read_sidecar(rank)) is not None:
                    written[rank] = found
            if len(written) == ranks:
                break
            if not await self._still_open():
                return
        adopted = await self._storage.take_over(
            begin.path,
            begin.ticket or "",
            overwrite=begin.overwrite,
            workers=self._workers,
            stamp=self._transaction.stamp,
        )
        results = [written[rank] for rank in range(ranks)]
        await publish_together(adopted, pickle.loads(plan_cache), facts, results, self._workers)

    async def _read_sidecar(self, rank: int) -> Written | None:
        """Return what a rank has written; None if its sidecar file is missing, incomplete or not by that rank."""
        data = await self._transaction.get_sidecar(_sidecar_name(rank))
        if data is None:
            return None
        return await self._workers.run(verify_sidecar, self._record.secret, rank, data)

    async def _follow(self) -> None:
        """Wait until the process of rank 0 has published or removed the checkpoint."""
        while await self._still_open():
            pass

    async def _still_open(self) -> bool:
        """Pause, then return whether it is still being written; raise WriteError if nothing has progressed in time."""
        await anyio.sleep(_POLL_S)
        try:
            sizes = await self._transaction.sizes()
        except WriteError:
            if await self._transaction.status() == "open":
                raise
            return False  # its directory has become the checkpoint, or was removed
        if await self._transaction.status() != "open":
            return False
        now = time.monotonic()
        if sizes != self._last_sizes:
            self._last_sizes, self._deadline = sizes, now + self._timeout_s
        # Rank 0 gives up first: its error says more.
        if now > self._deadline + (0 if self._record.facts is not None else self._timeout_s):
            raise WriteError(f"the parts of some ranks did not come within {self._timeout_s:g} s")
        return True


# --- sidecar files -------------------------------------------------------------------------------------


def _sidecar_name(rank: int) -> str:
    return f"part-{rank}"


def sign_sidecar(secret: bytes, rank: int, written: Written) -> bytes:
    """Return the bytes of a rank's sidecar file, which only processes of this save can make."""
    data = pickle.dumps(written, pickle.HIGHEST_PROTOCOL)
    return _digest(secret, rank, data) + data


def verify_sidecar(secret: bytes, rank: int, data: bytes) -> Written | None:
    """Return what a rank has written; None if the bytes are incomplete, or not by that rank of this save.

    Nothing is unpickled before the digest is verified.
    """
    view = memoryview(data)  # it may be long, and not worth a copy
    digest, rest = view[:_DIGEST_BYTES], view[_DIGEST_BYTES:]
    if not hmac.compare_digest(_digest(secret, rank, rest), digest):
        return None
    written: Written = pickle.loads(rest)
    return written


def _digest(secret: bytes, rank: int, data: bytes | memoryview) -> bytes:
    # With the name, so that one rank's file does not pass for another's.
    digest = hmac.new(secret, f"{_sidecar_name(rank)}\n".encode(), hashlib.sha256)
    digest.update(data)
    return digest.digest()
