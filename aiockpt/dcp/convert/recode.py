"""Converts a checkpoint to files of DCP or safetensors, in bounded memory: file by file, a chunk at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.core.strides import row_strides
from aiockpt.dcp.convert.parts import PartReader, check_expansion, reads_of_part, sizes_of
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError, CorruptCheckpointError, SaveError, unwrapped
from aiockpt.format.index import Entry, Index, InlineEntry, ObjectEntry, TensorEntry
from aiockpt.format.item.arrays import ARRAY_RECORD
from aiockpt.format.item.objects import encode_object
from aiockpt.format.item.ziparchive import FramingError, read_archive
from aiockpt.format.keys import containers_within
from aiockpt.format.manifest.manifest import JsonValue, Manifest, check_user_metadata
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.planner import FileFormat, SavePlan, StateSummary
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.planning.specs import TensorSpec
from aiockpt.reading.load import chosen_entries
from aiockpt.reading.open import OpenCheckpoint, open_checkpoint
from aiockpt.reading.read_plan import TensorRead, value_key
from aiockpt.reading.targets import cast
from aiockpt.staging.pool import MappedMemory
from aiockpt.writing.commit import CommitDocuments, now, writer_name
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk, WriterThreads

if TYPE_CHECKING:
    from aiockpt.dcp.adapter import AnyCheckpointer
    from aiockpt.options import LoadOptions, Path
    from aiockpt.planning.layout import FileImage
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Transaction
    from aiockpt.telemetry.loads import ReadReport

_CHUNK_BYTES = 16 << 20
_CHUNKS = 4
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Recoding:
    """A conversion: from where, to where, and in which format."""

    path: Path
    target: Path
    make_form: Callable[[dict[str, JsonValue]], FileFormat]  # of the metadata
    options: LoadOptions  # which keys, as which dtype
    metadata: dict[str, JsonValue] | None  # None: that of the checkpoint
    overwrite: bool

    async def run(self, checkpointer: AnyCheckpointer, tools: LoadTools, report: ReadReport) -> None:
        """Convert, on the checkpointer's loop; if that fails or is cancelled, leave what was there before."""
        engine, run = EngineAccess(checkpointer), tools.workers.run
        storage, path = engine.locate(self.path)
        _, target = engine.locate(self.target)
        opened = await open_checkpoint(storage, path, self.options, tools)
        try:
            index = opened.index
            metadata = self.metadata
            if metadata is None:  # without what the header of a safetensors file says of its framework
                metadata = check_user_metadata({key: value for key, value in index.metadata.items() if key != "format"})
            form = self.make_form(metadata)
            entries, _ = chosen_entries(path, index, self.options)
            check_expansion(path, sizes_of(entries))
            if not isinstance(form, DcpFormat):
                _check_tensors(path, entries)
            blobs = await run(_object_bytes, opened, entries)
            containers = _containers_of(index, entries, self.options.dtype)
            plan = await run(_plan, index, entries, blobs, form, self.options.dtype)
            report.expect(plan.layout.nbytes)
            filler = _Filler(PartReader(opened, self.options, tools), entries, plan)
            transaction = await storage.begin(target, overwrite=self.overwrite, workers=tools.workers)
            try:
                documents = None
                if not plan.is_single_file:
                    documents = await run(_documents, plan, metadata, containers)
                await self._write(plan, filler, documents, transaction, tools, report)
            except BaseException as exc:
                error = unwrapped(exc)
                with anyio.CancelScope(shield=True):
                    try:
                        await transaction.abort()
                    except AiockptError as worse:
                        error.add_note(str(worse))
                raise error from error.__cause__
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
                    await filler.fill(image, start, stop, chunk.tensor)
                    await writer.put(number, FilledChunk(chunk.view, start, stop, release))
                    report.add(stop - start)
                writer.end(number)
        await writer.hand_over(CommitInputs(documents, {}, started))
        with anyio.CancelScope(shield=True):  # from here on it is done or undone, not half
            await writer.write_documents()
            await writer.commit()


class _Filler:
    """Reads what belongs into the chunks of the new files."""

    def __init__(self, reader: PartReader, entries: Mapping[str, Entry], plan: SavePlan) -> None:
        self._reader = reader
        self._entries = entries
        self._plan = plan

    async def fill(self, image: FileImage, start: int, stop: int, memory: torch.Tensor) -> None:
        """Read the bytes ``start`` to ``stop`` of a new file into ``memory``, as far as they are of tensors."""
        reads: list[TensorRead] = []
        for piece in image.pieces(start, stop):
            name, spec = self._plan.layout.structure.names[piece.leaf], self._plan.layout.specs[piece.leaf]
            entry = self._entries[name]
            if spec is None or not isinstance(entry, TensorEntry):
                raise TypeError(f"{name} is no tensor")
            nbytes = piece.stop - piece.start
            values = memory[piece.at : piece.at + nbytes].view(spec.dtype)
            reads += reads_of_part(name, entry, piece.start // spec.dtype.itemsize, values)
            is_cut = nbytes < entry.nbytes // entry.dtype.itemsize * spec.dtype.itemsize
            if is_cut and piece.start == 0:  # reads of parts can't check the CRC of the whole
                await self._reader.check(name, entry)
        await self._reader.executor.read(reads)


def _check_tensors(path: str, entries: Mapping[str, Entry]) -> None:
    """Raise SaveError for what is no tensor."""
    other = next((name for name, entry in entries.items() if not isinstance(entry, TensorEntry)), None)
    if other is not None:
        raise SaveError(
            f"{other} of {path} is not a plain tensor, and a safetensors file holds nothing else: choose the tensors "
            "with keys="
        )


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


def _containers_of(index: Index, entries: Mapping[str, Entry], dtype: torch.dtype | None) -> list[dict[str, JsonValue]]:
    """Return the records of the containers of what is converted; a cast array comes back as a tensor."""
    containers: Any = index.containers
    if len(entries) < len(index.paths):
        names, paths = list(index.paths), list(index.paths.values())
        containers = containers_within(containers, names, paths, entries.keys())
    changed = {
        tuple(index.paths[name])
        for name, entry in entries.items()
        if isinstance(entry, TensorEntry) and cast(entry.dtype, dtype) is not entry.dtype
    }
    return [dict(each) for each in containers if each["type"] != ARRAY_RECORD or tuple(each["path"]) not in changed]


def _plan(
    index: Index,
    entries: Mapping[str, Entry],
    blobs: Mapping[str, bytes],
    form: FileFormat,
    dtype: torch.dtype | None,
) -> SavePlan:
    """Lay out the new files, with every tensor row by row."""
    first: dict[object, int] = {}
    tied: dict[int, int] = {}
    specs: list[TensorSpec | None] = []
    for leaf, (name, entry) in enumerate(entries.items()):
        if not isinstance(entry, TensorEntry):
            specs.append(None)
            continue
        strides = row_strides(entry.shape)
        specs.append(
            TensorSpec(torch.Size(entry.shape), cast(entry.dtype, dtype), strides, strides, is_raw=True, device=_CPU)
        )
        earlier = first.setdefault(value_key(name, entry), leaf)
        if earlier != leaf:
            tied[leaf] = earlier
    names = list(entries)
    objects = {leaf: blobs[name] for leaf, name in enumerate(names) if specs[leaf] is None}
    structure = Structure(names, [index.paths[name] for name in names], frozenset(objects))
    form.check(structure.names, specs)
    summary = StateSummary(structure, specs, frozenset(), tied, len(first))
    return form.lay_out(summary, Snapshot(structure, [], [], [], blobs=objects))


def _documents(
    plan: SavePlan, metadata: dict[str, JsonValue], containers: list[dict[str, JsonValue]]
) -> CommitDocuments:
    """Encode the metadata and the manifest."""
    layout = plan.layout
    totals = {
        "tensors": len(layout.specs) - len(layout.structure.objects),
        "objects": len(layout.structure.objects),
        "tensor_bytes": layout.tensor_bytes,
        "file_bytes": layout.nbytes,
    }
    manifest = Manifest(writer=writer_name(), created=now(), metadata=metadata, totals=totals, containers=containers)
    return CommitDocuments([image.name for image in layout.images], plan.documents(), manifest, plan.index())
