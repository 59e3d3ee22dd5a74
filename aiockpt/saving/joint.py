"""Several saves that appear at once: each writes its part, and the last step publishes them with one manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.wording import some_of
from aiockpt.errors import AiockptError, SaveError, printable
from aiockpt.format.manifest.manifest import FileFacts, Manifest, decode_head, encode_manifest, facts_in, with_parts
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.planning.dcp_plan import DcpLayout, DcpPlan
from aiockpt.planning.planner import SavePlan, StateSummary, Summary
from aiockpt.saving.job import SaveSpec
from aiockpt.saving.strategy import LocalSave, result_of
from aiockpt.storage.base import (
    NO_DOCUMENTS,
    Document,
    FileSink,
    PartSink,
    SharedStorage,
    SharedTransaction,
    Source,
    Storage,
)
from aiockpt.storage.wrapper import WrapperStorage, WrapperTransaction
from aiockpt.writing.commit import checked, now, writer_name

if TYPE_CHECKING:
    from aiockpt.coordination.coordinator import Coordinator
    from aiockpt.coordination.protocol import RankCall
    from aiockpt.core.threads import Workers
    from aiockpt.planning.planner import Planner
    from aiockpt.saving.job import SaveJob
    from aiockpt.telemetry.saves import SaveResult
    from aiockpt.writing.file_writer import ChunkWriter

# --- the storage of a part ----------------------------------------------------------------------------
# Its manifest is kept in memory until the whole is published: the last document lists the files of all parts.


class PartStorage(WrapperStorage):
    """The storage of one part, a directory or file of this name in the whole, or its top if the name is empty."""

    check, check_repository = Storage.check, Storage.check_repository  # the path is in that of the whole

    def __init__(self, whole: SharedStorage, path_of_whole: str, ticket_of_whole: str, name: str) -> None:
        super().__init__(whole)
        self._whole, self._path, self._ticket, self._name = whole, path_of_whole, ticket_of_whole, name
        self.manifest: bytes | None = None  # that of the part, once this process has committed it

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        return await self.join(path, self._ticket, workers=workers)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        whole = await self._whole.join(self._path, self._ticket, workers=workers)
        return PartTransaction(self, whole, path, self._name)

    async def open(self, path: str, *, workers: Workers) -> Source:
        raise SaveError(f"{path} can't be read before it is published")


class PartTransaction(WrapperTransaction):
    """One part of a transaction of the whole, which this process has joined; `commit` only makes it durable."""

    revoke = SharedTransaction.revoke

    def __init__(self, storage: PartStorage, whole: SharedTransaction, path: str, name: str) -> None:
        super().__init__(storage, whole, path)
        self._part, self._whole, self._name = storage, whole, name

    def _place(self, name: str) -> str:
        return "/".join(filter(None, (self._name, name)))

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        return await self._whole.create(self._place(name), nbytes)

    async def write_files(self, files: Mapping[str, Document]) -> None:
        await self._whole.write_files({self._place(name): data for name, data in files.items()})

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await self.write_files({name: data for name, data in documents.items() if name != MANIFEST_NAME})
        await self._whole.commit()
        self._refuse_if_revoked(self._path)
        if MANIFEST_NAME in documents:
            self._part.manifest = bytes(documents[MANIFEST_NAME])
        await self._whole.release()

    async def sizes(self) -> Mapping[str, int]:
        start, sizes = f"{self._name}/" if self._name else "", await self._whole.sizes()
        return {name.removeprefix(start): size for name, size in sizes.items() if name.startswith(start)}

    async def reserve(self, name: str, nbytes: int) -> None:
        await self._whole.reserve(self._place(name), nbytes)

    async def open_part(self, name: str) -> PartSink:
        return await self._whole.open_part(self._place(name))


# --- the directory of all parts -----------------------------------------------------------------------


_SHOWN = 5


@dataclass(eq=False)
class Joint:
    """A directory that several saves write to, before it is published or removed as a whole."""

    path: str
    storage: SharedStorage
    overwrite: bool
    folder: str | None = None  # to write into, where the storage has one
    parts: dict[str, SaveJob] = field(default_factory=dict)  # of all ranks, by name; the empty one is at the top
    files: dict[str, SaveJob] = field(default_factory=dict)  # checkpoints of one file, which rank 0 alone writes
    places: dict[str, PartStorage] = field(default_factory=dict)  # of both
    added: dict[str, bytes] = field(default_factory=dict)  # files, by name
    given_up: SaveError | None = None
    refused: BaseException | None = None  # why a part was not even begun; the other ranks have failed with it
    refused_file: BaseException | None = None  # why one of the files was not; the other ranks don't know it
    _transaction: SharedTransaction | None = None

    async def begin(
        self, coordinator: Coordinator | None, call: RankCall | None, objection: BaseException | None, workers: Workers
    ) -> None:
        """Begin the transaction; of several ranks, those behind rank 0 join it. All fail with this rank's objection."""

        async def begin(ranks: Sequence[bool]) -> list[str]:
            self._transaction = await self.storage.begin(self.path, overwrite=self.overwrite, workers=workers)
            if self.storage.traits.folders:  # marked before others see it, so that all in it is removed if it fails
                self.folder = await self._transaction.open_folder()
            return [self._transaction.ticket] * len(ranks)

        try:
            if coordinator is None or call is None:
                if objection is not None:
                    raise objection
                await begin([True])
                return
            operation, hindrance = f"the transaction of {self.path}", None
            ticket = await coordinator.round(call, operation, objection or True, begin, self.abort)
            try:
                if not coordinator.leads:
                    self._transaction = await self.storage.join(self.path, ticket, workers=workers)
                    self.folder = await self._transaction.open_folder() if self.storage.traits.folders else None
            except AiockptError as exc:
                hindrance = exc
            await coordinator.round(call, operation, hindrance or True, _agree, self.abort)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.abort()
            raise

    @property
    def transaction(self) -> SharedTransaction:
        """The transaction, once it has begun."""
        if self._transaction is None:
            raise RuntimeError("the transaction has not begun, or is over")
        return self._transaction

    @property
    def jobs(self) -> dict[str, SaveJob]:
        """The saves of this process, by name."""
        return self.parts | self.files

    def storage_of(self, name: str) -> PartStorage:
        """Return the storage of the part of this name."""
        return self.places.setdefault(name, PartStorage(self.storage, self.path, self.transaction.ticket, name))

    @property
    def failure(self) -> BaseException | None:
        """Why a part was not written, on all ranks; None if all were, or are being written."""
        return self.refused or _failure_of(self.parts)

    @property
    def own_failure(self) -> BaseException | None:
        """Why this process gives it up: a file was not written, or the block was left by an error."""
        return self.given_up or self.refused_file or _failure_of(self.files)

    async def publish(self, compute: Workers) -> dict[str, int]:
        """Publish all parts; return the size of each file. On rank 0, once all parts are written."""
        transaction = self.transaction
        manifests = {name: made for name in self.parts if (made := self.places[name].manifest) is not None}
        singles = {name: job.single for name, job in self.files.items() if job.single is not None}
        if lacking := self.jobs.keys() - manifests.keys() - singles.keys():
            raise SaveError(f"the manifest of {self.jobs[min(lacking)].path} is gone")
        describe = partial(describe_joint, list(self.jobs), manifests, singles, self.added)
        known, _ = await compute.run(describe, {})
        others = await transaction.seal_folder(known.keys())
        facts, documents = await compute.run(describe, others)
        await transaction.commit(documents)
        self._transaction = None
        return {name: file.nbytes for name, file in facts.items()}

    async def abort(self) -> None:
        """Remove everything that was written, unless it is published; on ranks behind rank 0, stop taking part."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.abort()

    async def discard(self) -> None:
        """Remove what all ranks have written: rank 0 is dead."""
        if self._transaction is not None:
            await self._transaction.discard_all()

    async def release(self) -> None:
        """Stop taking part: rank 0 has published."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.release()


async def _agree(ranks: Sequence[bool]) -> Sequence[bool]:
    return ranks


def _failure_of(parts: Mapping[str, SaveJob]) -> BaseException | None:
    errors = (job.handle.written._exception for job in parts.values())
    return next((error for error in errors if error is not None), None)


def describe_joint(
    names: Sequence[str],
    manifests: Mapping[str, bytes],
    singles: Mapping[str, FileFacts],
    added: Mapping[str, bytes],
    others: Mapping[str, FileFacts],
) -> tuple[dict[str, FileFacts], dict[str, bytes]]:
    """Return the facts of all files, and the documents, in the order in which they are to be written.

    ``manifests`` are of the parts that are directories, ``singles`` the facts of those that are one file, and
    ``others`` of files that are there already. Raises SaveError if two of them have the same name.
    """
    groups = [dict(singles), {name: FileFacts(len(data), crc32(data)) for name, data in added.items()}, dict(others)]
    documents: dict[str, bytes] = {}
    for name, manifest in manifests.items():
        listed = facts_in(decode_head(manifest) or {}) or {}
        prefix = f"{name}/" if name else ""
        groups.append({f"{prefix}{file}": facts for file, facts in listed.items()})
        if name:
            documents[f"{name}/{MANIFEST_NAME}"] = manifest
            groups.append({f"{name}/{MANIFEST_NAME}": FileFacts(len(manifest), crc32(manifest))})
    files = {name: facts for group in groups for name, facts in group.items()}
    if len(files) < sum(map(len, groups)):
        seen = [name for group in groups for name in group]
        twice = sorted({name for name in seen if seen.count(name) > 1})
        raise SaveError(f"two parts of a transaction have the same file: {printable(some_of(twice, _SHOWN))}")
    bare = encode_manifest(Manifest(writer_name(), now()))
    documents |= added
    documents[MANIFEST_NAME] = with_parts(manifests.get("", bare), files, names)  # last: it makes the whole complete
    return files, checked(documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointSpec(SaveSpec):
    """The last step of a transaction, which has no state of its own."""

    copies = False

    joint: Joint

    @property
    def parts(self) -> list[SaveJob]:
        return list(self.joint.jobs.values())


class JointSave(LocalSave):
    """The last step of a transaction: it waits for its parts, and publishes them."""

    can_replan = False

    def __init__(
        self, job: SaveJob, coordinator: Coordinator | None, planner: Planner, compute: Workers, io: Workers
    ) -> None:
        super().__init__(job, planner, compute, io)
        assert isinstance(job.spec, JointSpec)
        self._joint = job.spec.joint
        self._coordinator = coordinator
        self._operation = f"the save of {job.path}"
        self._over = False  # the last round, or one that has failed

    async def plan(self) -> SavePlan:
        """Plan to write no file of its own."""
        try:
            await self._first_round()
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                error = await self.fail(exc)
            raise error from error.__cause__
        summary = StateSummary(self._job.snapshot.structure, [], frozenset(), {}, 0)
        return DcpPlan(DcpLayout(summary, [], {}), [], [])

    async def begin(self) -> SharedTransaction:
        return self._joint.transaction

    async def documents(self, plan: SavePlan) -> None:
        """Encode none before the parts are written."""

    def hook_arguments(self) -> tuple[object, ...]:
        if (failure := self._joint.failure or self._joint.own_failure) is not None:
            raise failure
        return (self._joint.folder,)

    async def commit(self, plan: SavePlan, writer: ChunkWriter, times_s: Mapping[str, float]) -> SaveResult:
        """Publish, on rank 0, when all parts are written."""
        self._job.consistency.raise_if_aborted()
        files = await self._last_round(None)
        results = [part.result for part in self._joint.jobs.values() if part.result is not None]
        summary = Summary(
            files,
            sum(files.values()),
            sum(result.tensor_bytes for result in results),
            sum(result.tensors for result in results),
            sum(result.objects for result in results),
        )
        return result_of(self._job, plan, summary, times_s)

    async def _first_round(self) -> None:
        """Meet the other ranks in the order of the calls: they may plan the next save before this one is published."""
        call = self._job.spec.call
        if self._coordinator is None or call is None:
            return
        await self._job.turn.wait_for("planned")
        if self._joint.failure is not None:
            raise self._joint.failure
        try:
            await self._coordinator.round(call, self._operation, self._joint.own_failure or True, _agree)
        except BaseException:
            self._over = call.step > 0  # then all ranks raise it
            raise

    async def _last_round(self, error: BaseException | None) -> dict[str, int]:
        """Publish, or raise why not; with several ranks, all or none. Once at most."""
        joint = self._joint
        await self._job.turn.wait_for("over")  # every part is over
        self._over = True
        failure = joint.given_up or joint.failure
        if joint.failure is not None and failure is not None:
            if self._coordinator is not None and self._job.spec.call is not None:
                # Usually it is one on all ranks: those that do not know it must not wait for this one.
                await self._coordinator.give_up(self._job.spec.call, self._operation, failure)
            raise failure
        error = error or joint.own_failure
        if self._coordinator is None or self._job.spec.call is None:
            if error is not None:
                raise error
            return await joint.publish(self._compute)

        async def publish(ranks: Sequence[bool]) -> list[dict[str, int]]:
            return [await joint.publish(self._compute)] * len(ranks)

        if error is None and not self._coordinator.leads:
            try:
                await joint.transaction.seal_folder(None)  # what this host has written there
            except AiockptError as exc:
                error = exc
        files: dict[str, int] = await self._coordinator.round(
            self._job.spec.call, self._operation, True if error is None else error, publish, joint.abort
        )
        await joint.release()
        return files

    async def fail(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            error = self._job.cancellation
        try:
            if not self._over:
                await self._last_round(error)
        except BaseException as exc:
            error = exc
        await self._job.turn.wait_for("over")
        try:
            if self._coordinator is not None and not self._coordinator.leader_lives:
                await self._joint.discard()
            await self._joint.abort()
        except AiockptError as exc:
            error.add_note(str(exc))
        return error

    async def fall_back(self, fallback: str, hindrance: str | None, *, is_planned: bool) -> str:
        raise SaveError(hindrance or "a transaction has no fallback")
