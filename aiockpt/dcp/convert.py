"""Converts a checkpoint to another format in bounded memory: file by file, a chunk at a time.

A file of ``torch.save`` that only torch can read is loaded by it, and saved.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.core.strides import row_strides
from aiockpt.core.threads import off_duty
from aiockpt.engine.facade import EngineAccess
from aiockpt.engine.submit import format_for
from aiockpt.errors import (
    AiockptError,
    CheckpointExistsError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
    UnsafeCheckpointError,
    unwrapped,
)
from aiockpt.format.index import Entry, Index, InlineEntry, ObjectEntry, TensorEntry
from aiockpt.format.item.arrays import ARRAY_RECORD
from aiockpt.format.item.objects import checked_sparse, encode_object, extended_allow_list
from aiockpt.format.item.ziparchive import ZIP_MAGIC, FramingError, read_archive
from aiockpt.format.keys import containers_within
from aiockpt.format.manifest.manifest import JsonValue, check_user_metadata
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.flatten import TENSOR_TYPES, StructureError, flatten
from aiockpt.planning.planner import FileFormat, SavePlan, StateSummary
from aiockpt.planning.ranges import boxes, select
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.planning.specs import TensorSpec
from aiockpt.planning.torch_plan import TorchFormat
from aiockpt.reading.executor import LoadTools, ReadExecutor
from aiockpt.reading.load import CheckpointLoad, chosen_entries
from aiockpt.reading.open import OpenCheckpoint, open_checkpoint
from aiockpt.reading.read_plan import ObjectRead, ReadPlan, TensorRead, reads_of, value_key
from aiockpt.reading.targets import loaded_dtype
from aiockpt.reading.verify.verify import verify_checkpoint
from aiockpt.saving.strategy import documents_of
from aiockpt.staging.pool import MappedMemory
from aiockpt.storage.local import beside
from aiockpt.storage.local.belonging import look_into
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.syscalls import open_directory
from aiockpt.sync_checkpointer import SyncCheckpointer
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk, WriterThreads

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.dcp.adapter import AnyCheckpointer
    from aiockpt.options import DType, LoadOptions, Path
    from aiockpt.planning.layout import FileImage
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage, Transaction
    from aiockpt.telemetry.progress import OnProgress, ReadReport
    from aiockpt.writing.commit import CommitDocuments

_CHUNK_BYTES = 16 << 20
_CHUNKS = 4
_MOST_EXPANDED_BYTES = 1 << 30
_CPU = torch.device("cpu")


@contextlib.asynccontextmanager
async def _aborted_by_an_error(transaction: Transaction) -> AsyncIterator[None]:
    try:
        yield
    except BaseException as exc:
        error = unwrapped(exc)
        with anyio.CancelScope(shield=True):
            try:
                await transaction.abort()
            except AiockptError as worse:
                error.add_note(str(worse))
        raise error from error.__cause__


@dataclass(frozen=True, slots=True)
class Recoding:
    """A conversion: from where, to where, and in which format."""

    path: Path
    target: Path
    make_file_format: Callable[[dict[str, JsonValue]], FileFormat]  # of the metadata
    options: LoadOptions  # which keys, as which dtype
    metadata: dict[str, JsonValue] | None  # None: that of the checkpoint
    overwrite: bool
    staging_bytes: int | None = None
    progress: OnProgress | None = None
    is_torch_save: bool = False  # a file of torch.save, maybe one that only torch can read; see `write_checkpoint`

    def start(self, checkpointer: AnyCheckpointer) -> Call[None]:
        """Start to convert; if that fails or is cancelled, what was there before is left."""
        engine = EngineAccess(checkpointer)

        async def run(tools: LoadTools) -> None:
            with engine.reports.read("convert", os.fspath(self.path), self.progress) as report:
                if self.is_torch_save:
                    await write_checkpoint(self, checkpointer, tools, report)
                    return
                storage, path = engine.locate(self.path)
                place = engine.locate(self.target)
                opened = await open_checkpoint(storage, path, self.options, tools)
                await self.convert(opened, *place, tools, report)

        return engine.call(run, f"convert {self.path}")

    async def convert(
        self, opened: OpenCheckpoint, storage: Storage, target: str, tools: LoadTools, report: ReadReport
    ) -> None:
        """Convert an open checkpoint, and close it."""
        path, run = opened.path, tools.workers.run
        try:
            index = opened.index
            metadata = self.metadata
            if metadata is None:  # without what the header of a safetensors file says of its framework
                metadata = check_user_metadata({key: value for key, value in index.metadata.items() if key != "format"})
            file_format = self.make_file_format(metadata)
            entries, _ = chosen_entries(path, index, self.options)
            check_expansion(path, sizes_of(entries))
            containers = _containers_of(index, entries, self.options.dtype)
            filler = _Filler(opened, entries, self.options, tools)
            blobs: dict[str, bytes] = {}
            values: dict[str, Any] = {}
            if isinstance(file_format, TorchFormat):
                if await run(os.path.isdir, target):
                    raise CheckpointExistsError(f"{target} is a directory; name the file to write")
                storage = storage.within_checkpoints()  # stock's conversion writes beside what it reads
                file_format = TorchFormat(index.wrapped)
                values = await filler.objects()
            elif isinstance(file_format, DcpFormat):
                blobs = await run(_object_bytes, opened, entries)
            else:
                _check_tensors(path, entries)
            plan = await run(_plan, index, entries, blobs, values, containers, file_format, self.options.dtype, target)
            report.expect(plan.layout.nbytes)
            transaction = await storage.begin(target, overwrite=self.overwrite, workers=tools.workers)
            async with _aborted_by_an_error(transaction):
                documents = await run(documents_of, plan, metadata, containers)
                await self._write(plan, filler, documents, transaction, tools, report)
        finally:
            await run(opened.source.close)

    async def _write(
        self,
        plan: SavePlan,
        filler: _Filler,
        documents: CommitDocuments | None,
        transaction: Transaction,
        tools: LoadTools,
        report: ReadReport,
    ) -> None:
        started = time.perf_counter()
        images = plan.layout.images
        names = [""] if plan.is_single_file else [image.name for image in images]
        writer = FileWriter(images, plan.heads, names, WriterThreads(tools.workers, tools.workers))
        free = [MappedMemory(_CHUNK_BYTES) for _ in range(_CHUNKS)]
        room = anyio.Semaphore(_CHUNKS)
        async with anyio.create_task_group() as tasks:
            writer.start(tasks)
            writer.begin(transaction)
            for number, image in enumerate(images):
                for start in range(0, max(image.nbytes, 1), _CHUNK_BYTES):  # an empty file has one empty chunk
                    await room.acquire()
                    chunk = free.pop()

                    def release(chunk: MappedMemory = chunk) -> None:
                        free.append(chunk)
                        room.release()

                    stop = min(start + _CHUNK_BYTES, image.nbytes)
                    await filler.fill(plan, image, start, stop, chunk.tensor)
                    await writer.put(number, FilledChunk(chunk.view, start, stop, release))
                    report.add(stop - start)
                writer.end(number)
        await writer.hand_over(CommitInputs(documents, {}, started))
        with anyio.CancelScope(shield=True):  # from here on it is done or undone, not half
            await writer.encode_documents()
            await writer.commit()


@dataclass(eq=False)
class _Filler:
    """Reads what belongs into the chunks of the new files, and checks the CRCs that reads of parts can't check."""

    _opened: OpenCheckpoint
    _entries: Mapping[str, Entry]
    _options: LoadOptions
    _tools: LoadTools

    def __post_init__(self) -> None:
        self._executor = ReadExecutor(self._opened.source, self._opened.path, self._options, self._tools)

    async def objects(self) -> dict[str, Any]:
        """Return the values of all objects; stored ones are unpickled as far as the caller allows."""
        entries = self._entries.items()
        reads = [ObjectRead(name, entry.place) for name, entry in entries if isinstance(entry, ObjectEntry)]
        await self._executor.fill(ReadPlan(objects=reads))
        inline = {name: entry.value for name, entry in entries if isinstance(entry, InlineEntry)}
        return inline | {read.name: read.value for read in reads}

    async def fill(self, plan: SavePlan, image: FileImage, start: int, stop: int, memory: torch.Tensor) -> None:
        """Read the bytes ``start`` to ``stop`` of a new file into ``memory``, as far as they are of tensors."""
        reads: list[TensorRead] = []
        for piece in image.pieces(start, stop):
            name, spec = plan.layout.structure.names[piece.leaf], plan.layout.specs[piece.leaf]
            entry = self._entries[name]
            if spec is None or not isinstance(entry, TensorEntry):
                raise TypeError(f"{name} is no tensor")
            nbytes = piece.stop - piece.start
            values = memory[piece.at : piece.at + nbytes].view(spec.dtype)
            reads += reads_of_part(name, entry, piece.start // spec.dtype.itemsize, values)
            is_cut = nbytes < entry.nbytes // entry.dtype.itemsize * spec.dtype.itemsize
            if is_cut and piece.start == 0:  # reads of parts can't check the CRC of the whole
                reads += await self._checks(name, entry)
        await self._executor.fill(ReadPlan(fills=reads))

    async def _checks(self, name: str, entry: TensorEntry) -> list[TensorRead]:
        """Return reads that check the CRCs of a tensor, unless the caller wants no checks."""
        if not self._options.verify:
            return []
        chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
        reads = [TensorRead(name, entry.dtype, chunk, only_checked=True) for chunk in chunks]
        await self._executor.prepare(reads)
        return [read for read in reads if (await self._executor.locate(read)).crc is not None]


def reads_of_part(name: str, entry: TensorEntry, start: int, values: torch.Tensor) -> list[TensorRead]:
    """Return the reads of the elements from ``start`` on, row by row, that fill ``values``, which may cast them."""
    reads: list[TensorRead] = []
    at = 0
    for box in boxes(entry.shape, start, start + values.numel()):
        wanted = select(entry.shape, box.index).selections
        target = values[at : at + box.count].view([selection.count for selection in wanted])
        is_whole = box.count * entry.dtype.itemsize == entry.nbytes
        reads += reads_of(name, entry, target, None if is_whole else wanted)
        at += box.count
    return reads


def _check_tensors(path: str, entries: Mapping[str, Entry]) -> None:
    """Raise SaveError for what is no tensor."""
    other = next((name for name, entry in entries.items() if not isinstance(entry, TensorEntry)), None)
    if other is not None:
        raise SaveError(
            f"{other} of {path} is not a plain tensor, and a safetensors file holds nothing else: choose the tensors "
            "with keys="
        )


def check_expansion(path: str, sizes: Iterable[tuple[str, int, int]]) -> None:
    """Raise LoadError if a small file would become a huge one: elements that share memory are written one by one.

    ``sizes`` are the names of tensors, their bytes, and the bytes that are stored for them.
    """
    more_bytes = 0
    for name, nbytes, stored in sizes:
        more_bytes += max(0, nbytes - stored)
        if more_bytes > _MOST_EXPANDED_BYTES:
            raise LoadError(
                f"{name} of {path} would take {nbytes} bytes where {stored} are stored, for its elements share memory; "
                "leave it out with keys=, or load it and save the part of it that does not repeat itself"
            )


def sizes_of(entries: Mapping[str, Entry]) -> Iterator[tuple[str, int, int]]:
    """Yield the sizes of tensors for `check_expansion`."""
    for name, entry in entries.items():
        if isinstance(entry, TensorEntry) and any(chunk.item is not None for chunk in entry.chunks):
            yield name, entry.nbytes, sum(chunk.place.length for chunk in entry.chunks)


def _object_bytes(opened: OpenCheckpoint, entries: Mapping[str, Entry]) -> dict[str, bytes]:
    """Return the bytes of each object as a file of torch.save; stored ones are copied, not unpickled. Blocks."""
    blobs: dict[str, bytes] = {}
    for name, entry in entries.items():
        if isinstance(entry, InlineEntry):
            blobs[name] = encode_object(name, entry.value)
        elif isinstance(entry, ObjectEntry):
            place = opened.source.exact_range(entry.place)
            blobs[name] = opened.source.read_bytes(place.file, place.offset, place.length)
            try:
                read_archive(blobs[name])  # checks its CRCs
            except FramingError as exc:
                raise CorruptCheckpointError(
                    f"{opened.path}/{place.file}: the object {name} is damaged: {exc}. Use an older checkpoint."
                ) from exc
    return blobs


def _containers_of(index: Index, entries: Mapping[str, Entry], dtype: DType) -> list[dict[str, JsonValue]]:
    """Return the records of the containers of what is converted; a cast array comes back as a tensor."""
    containers: Any = index.containers
    if len(entries) < len(index.paths):
        names, paths = list(index.paths), list(index.paths.values())
        containers = containers_within(containers, names, paths, entries.keys())
    changed = {
        tuple(index.paths[name])
        for name, entry in entries.items()
        if isinstance(entry, TensorEntry) and loaded_dtype(entry, dtype) is not entry.dtype
    }
    return [dict(each) for each in containers if each["type"] != ARRAY_RECORD or tuple(each["path"]) not in changed]


def _plan(
    index: Index,
    entries: Mapping[str, Entry],
    blobs: Mapping[str, bytes],
    values: Mapping[str, Any],
    containers: list[dict[str, JsonValue]],
    file_format: FileFormat,
    dtype: DType,
    target: str,
) -> SavePlan:
    """Lay out the new files, with every tensor row by row; objects are ``blobs`` or ``values``."""
    first: dict[object, int] = {}
    tied: dict[int, int] = {}
    specs: list[TensorSpec | None] = []
    for leaf, (name, entry) in enumerate(entries.items()):
        if not isinstance(entry, TensorEntry):
            specs.append(None)
            continue
        strides = row_strides(entry.shape)
        specs.append(
            TensorSpec(torch.Size(entry.shape), loaded_dtype(entry, dtype), strides, strides, is_raw=True, device=_CPU)
        )
        earlier = first.setdefault(value_key(name, entry), leaf)
        if earlier != leaf:
            tied[leaf] = earlier
    names = list(entries)
    objects = {leaf: name for leaf, name in enumerate(names) if specs[leaf] is None}
    structure = Structure(names, [index.paths[name] for name in names], frozenset(objects))
    file_format.check(structure.names, specs)
    snapshot = Snapshot(structure, containers, [None] * len(names), [None] * len(names))
    snapshot.blobs = {leaf: blobs[name] for leaf, name in objects.items() if name in blobs}
    snapshot.values = {leaf: values[name] for leaf, name in objects.items() if name in values}
    try:
        return file_format.lay_out(StateSummary(structure, specs, frozenset(), tied, len(first)), snapshot)
    except SaveError as exc:
        if not isinstance(exc.__cause__, RecursionError):
            raise
        raise LoadError(
            f"the state is nested too deeply for a file of torch.save, {target}: convert to dcp, or some keys"
        ) from exc


# --- from files of torch.save ---------------------------------------------------------------------------


_FINAL = (CorruptCheckpointError, UnsafeCheckpointError, FileNotFoundError)
"""Errors of a file that torch is not asked to read either."""


async def map_torch_file(storage: Storage, path: str, options: LoadOptions, tools: LoadTools) -> Any:
    """Return the contents of a file, its tensors backed by it; ``options.verify`` reads it once to check its CRCs."""
    try:
        loaded = await CheckpointLoad(storage, path, replace(options, mmap=True)).run(tools)
        if options.verify:
            (await verify_checkpoint(storage, path, tools.workers)).raise_if_bad()
    except _FINAL:
        raise
    except LoadError as exc:  # a format, or a kind of tensor, that only torch itself can read
        return await tools.workers.run(_loaded_by_torch, path, options, exc)
    return loaded.value


def _loaded_by_torch(path: str, options: LoadOptions, why: LoadError) -> Any:
    """Load a file with torch, under the same restrictions."""
    with open(path, "rb") as file:
        mappable = file.read(4) == ZIP_MAGIC
    try:
        with (
            extended_allow_list(options.safe_globals),
            contextlib.nullcontext() if options.trust else checked_sparse(),
        ):
            return torch.load(path, map_location="cpu", mmap=mappable, weights_only=not options.trust)
    except Warning:  # an error only because the program turns warnings into errors
        raise
    except Exception as exc:  # a damaged pickle raises nearly anything
        raise type(why)(f"{why} (torch.load says: {type(exc).__name__}: {str(exc).partition('. ')[0]})") from exc


async def write_checkpoint(
    recoding: Recoding, checkpointer: AnyCheckpointer, tools: LoadTools, report: ReadReport
) -> None:
    """Convert, on the checkpointer's loop; see `aiockpt.dcp.format_utils.torch_save_to_dcp`."""
    engine, run = EngineAccess(checkpointer), tools.workers.run
    storage, path = engine.locate(recoding.path)
    place, target = engine.locate(recoding.target)
    format_for("dcp", target)
    shared = await run(_must_move_in, target, overwrite=recoding.overwrite)
    inner = os.path.join(target, new_ticket()) if shared else target
    try:
        try:
            opened = await open_checkpoint(storage, path, recoding.options, tools)
        except _FINAL:
            raise
        except LoadError as exc:  # what only torch itself can read
            value = await run(_loaded_by_torch, path, recoding.options, exc)
            await _save(value, path, inner, recoding.overwrite, checkpointer, tools)
        else:
            if opened.index.wrapped is not None:
                await run(opened.source.close)
                raise _no_state_dict(path)
            await recoding.convert(opened, place, inner, tools, report)
        if shared:
            names = {name: name for name in await run(os.listdir, inner) if name != METADATA_NAME}
            await run(beside.publish, inner, target, names, METADATA_NAME)
    finally:
        if shared:
            with anyio.CancelScope(shield=True):
                await run(beside.discard, inner)


def _no_state_dict(path: str) -> LoadError:
    return LoadError(f"{path} holds no state dict; load it with torch.load, and save it within a dict")


async def _save(
    value: Any, path: str, target: str, overwrite: bool, checkpointer: AnyCheckpointer, tools: LoadTools
) -> None:
    """Save what torch has loaded; cancel the save if this task is cancelled."""
    if not isinstance(value, Mapping):
        raise _no_state_dict(path)
    with contextlib.suppress(StructureError):  # raised by the save
        flat = flatten(value)
        tensors = zip(flat.names, flat.leaves, strict=True)
        strided = ((n, t) for n, t in tensors if type(t) in TENSOR_TYPES and t.layout is torch.strided)
        check_expansion(path, ((name, each.nbytes, each.untyped_storage().nbytes()) for name, each in strided))
    submit = checkpointer.submit if isinstance(checkpointer, SyncCheckpointer) else checkpointer.save

    # Off duty: the engine refuses waits in its own threads and tasks as deadlocks, but no save waits for this task.
    def begin() -> SaveHandle:
        with off_duty():
            return submit(value, target, overwrite=overwrite, format="dcp")

    handle = await tools.workers.run(begin)
    try:
        with off_duty():
            await handle.written
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await handle.cancel()
        raise


def _must_move_in(target: str, *, overwrite: bool) -> bool:
    """Return whether the target holds other files, so that the checkpoint must be moved in beside them.

    Raises CheckpointExistsError if it holds a checkpoint as well, which then can't be replaced atomically.
    """
    if not os.path.isdir(target) or os.path.islink(target):
        return False
    with open_directory(target) as directory:
        found = look_into(directory)
    if found.others and overwrite and (found.files or found.problem):
        raise CheckpointExistsError(
            f"{target} holds other things than one checkpoint ({found.others[0]}), so that it can't be replaced at once"
            f"{found.problem and ': '}{found.problem}; move one of them away, or convert to another directory"
        )
    return bool(found.others) and not found.files
