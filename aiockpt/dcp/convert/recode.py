"""Converts a checkpoint of tensors to another format, in bounded memory: file by file, a chunk at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import torch
from isal.isal_zlib import crc32

from aiockpt.core.strides import row_strides
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError, CorruptCheckpointError, SaveError
from aiockpt.format.index import ChunkEntry, TensorEntry
from aiockpt.format.manifest.manifest import Manifest
from aiockpt.planning.planner import StateSummary
from aiockpt.planning.ranges import Selection, boxes
from aiockpt.planning.snapshot import Snapshot, Structure
from aiockpt.planning.specs import TensorSpec
from aiockpt.reading.executor import ReadExecutor, run_each
from aiockpt.reading.load import chosen_entries
from aiockpt.reading.open import open_checkpoint
from aiockpt.reading.read_plan import TensorRead, reads_of, value_key
from aiockpt.reading.targets import cast
from aiockpt.staging.pool import MappedMemory
from aiockpt.writing.commit import CommitDocuments, now, writer_name
from aiockpt.writing.file_writer import CommitInputs, FileWriter, FilledChunk, WriterThreads
from aiockpt.writing.process.error_transport import unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.dcp.adapter import AnyCheckpointer, Path
    from aiockpt.format.index import Index
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.options import LoadOptions
    from aiockpt.planning.layout import FileImage, Piece
    from aiockpt.planning.planner import FileFormat, SavePlan
    from aiockpt.reading.decoded import DecodedSource
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Transaction

_CHUNK_BYTES = 16 << 20
_CHUNKS = 4
_PART_BYTES = 8 << 20
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Recoding:
    """A conversion: from where, to where, and in which format."""

    path: Path
    target: Path
    form: FileFormat
    options: LoadOptions  # which tensors, as which dtype
    metadata: dict[str, JsonValue]
    overwrite: bool

    async def run(self, checkpointer: AnyCheckpointer, tools: LoadTools) -> None:
        """Convert, on the checkpointer's loop; if that fails or is cancelled, leave what was there before."""
        engine, run = EngineAccess(checkpointer), tools.workers.run
        storage, path = engine.locate(self.path)
        _, target = engine.locate(self.target)
        opened = await open_checkpoint(storage, path, self.options, tools)
        try:
            entries = _tensors_of(path, opened.index, self.options)
            plan = await run(_plan, opened.index, entries, self.form, self.options.dtype)
            filler = _Filler(opened.source, path, entries, plan, self.options, tools)
            transaction = await storage.begin(target, overwrite=self.overwrite, workers=tools.workers)
            try:
                await self._write(plan, filler, transaction, tools)
            except BaseException as exc:
                with anyio.CancelScope(shield=True):
                    await _abort(transaction, unwrapped(exc))
                raise unwrapped(exc) from unwrapped(exc).__cause__
        finally:
            with anyio.CancelScope(shield=True):
                await run(opened.source.close)

    async def _write(self, plan: SavePlan, filler: _Filler, transaction: Transaction, tools: LoadTools) -> None:
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
                for start in range(0, max(image.nbytes, 1), _CHUNK_BYTES):
                    await room.acquire()
                    chunk = free.pop()

                    def release(chunk: MappedMemory = chunk) -> None:
                        free.append(chunk)
                        room.release()

                    stop = min(start + _CHUNK_BYTES, image.nbytes)
                    await filler.fill(image, start, stop, chunk.tensor)
                    await writer.put(number, FilledChunk(chunk.view, start, stop, release))
                writer.end(number)
        documents = None if plan.is_single_file else await tools.workers.run(_documents, plan, self.metadata)
        await writer.hand_over(CommitInputs(documents, {}, started))
        with anyio.CancelScope(shield=True):  # from here on it is done or undone, not half
            await writer.write_documents()
            await writer.commit()


async def _abort(transaction: Transaction, error: BaseException) -> None:
    """Remove what was written; if that fails too, add a note to the error that led here."""
    try:
        await transaction.abort()
    except AiockptError as exc:
        error.add_note(str(exc))


class _Filler:
    """Reads what belongs into the chunks of the new files."""

    def __init__(
        self,
        source: DecodedSource,
        path: str,
        entries: Mapping[str, TensorEntry],
        plan: SavePlan,
        options: LoadOptions,
        tools: LoadTools,
    ) -> None:
        self._source = source
        self._path = path
        self._entries = entries
        self._plan = plan
        self._verify = options.verify
        self._run = tools.workers.run
        self._reader = ReadExecutor(source, path, options, tools)

    async def fill(self, image: FileImage, start: int, stop: int, memory: torch.Tensor) -> None:
        """Read the bytes ``start`` to ``stop`` of a new file into ``memory``, as far as they are of tensors."""
        reads: list[TensorRead] = []
        for piece in image.pieces(start, stop):
            name, spec = self._plan.layout.structure.names[piece.leaf], self._plan.layout.specs[piece.leaf]
            if spec is None:
                raise TypeError(f"{name} is no tensor")
            entry = self._entries[name]
            reads += _reads_of_piece(name, entry, piece, spec.dtype, memory)
            is_cut = piece.stop - piece.start < entry.nbytes // entry.dtype.itemsize * spec.dtype.itemsize
            if self._verify and is_cut and piece.start == 0:  # reads of parts can't check the CRC of the whole
                await self._check(name, entry)
        await self._reader.read(reads)

    async def _check(self, name: str, entry: TensorEntry) -> None:
        """Check the CRCs of a tensor that is too large to be read at once."""

        async def check(chunk: ChunkEntry) -> None:
            read = TensorRead(name, entry.dtype, chunk, None)
            await self._reader.prepare([read])
            item = await self._reader.locate(read)
            crc, view = 0, memoryview(bytearray(_PART_BYTES))
            for at in range(0, item.nbytes if item.crc is not None else 0, _PART_BYTES):
                part = view[: item.nbytes - at]
                await self._run(
                    self._source.read, chunk.place.file, chunk.place.offset + item.payload_offset + at, part
                )
                crc = await self._run(crc32, part, crc)
            if item.crc is not None and crc != item.crc:
                raise CorruptCheckpointError(
                    f"{self._path}/{chunk.place.file}: the bytes of {name} do not match their CRC: they changed since "
                    "they were written. Use an older checkpoint."
                )

        await run_each(check, [chunk for chunk in entry.chunks if 0 not in chunk.sizes], _CHUNKS)


def _reads_of_piece(
    name: str, entry: TensorEntry, piece: Piece, dtype: torch.dtype, memory: torch.Tensor
) -> list[TensorRead]:
    """Return the reads of a part of a tensor, which is to be stored row by row, into ``memory``."""
    size = dtype.itemsize
    values = memory[piece.at : piece.at + piece.stop - piece.start].view(dtype)
    reads: list[TensorRead] = []
    at = 0
    for box in boxes(entry.shape, piece.start // size, piece.stop // size):
        index = [*box.index, *(slice(0, n) for n in entry.shape[len(box.index) :])]
        wanted = [Selection(i.start, i.stop - i.start) if isinstance(i, slice) else Selection(i, 1) for i in index]
        target = values[at : at + box.count].view([selection.count for selection in wanted])
        is_whole = box.count * entry.dtype.itemsize == entry.nbytes
        reads += reads_of(name, entry, target, None if is_whole else wanted)
        at += box.count
    return reads


def _tensors_of(path: str, index: Index, options: LoadOptions) -> dict[str, TensorEntry]:
    """Return the tensors to convert; raise SaveError for anything else."""
    entries, _ = chosen_entries(path, index, options)
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorEntry)}
    other = next((name for name in entries if name not in tensors), None)
    if other is not None:
        raise SaveError(
            f"{other} of {path} is not a plain tensor, and a safetensors file holds nothing else: choose the tensors "
            "with keys="
        )
    return tensors


def _plan(index: Index, entries: Mapping[str, TensorEntry], form: FileFormat, dtype: torch.dtype | None) -> SavePlan:
    """Lay out the new files, with every tensor row by row."""
    first: dict[object, int] = {}
    tied: dict[int, int] = {}
    specs: list[TensorSpec | None] = []
    for leaf, (name, entry) in enumerate(entries.items()):
        strides = row_strides(entry.shape)
        specs.append(
            TensorSpec(torch.Size(entry.shape), cast(entry.dtype, dtype), strides, strides, is_raw=True, device=_CPU)
        )
        earlier = first.setdefault(value_key(name, entry), leaf)
        if earlier != leaf:
            tied[leaf] = earlier
    structure = Structure(list(entries), [index.paths[name] for name in entries], frozenset())
    form.check(structure.names, specs)
    summary = StateSummary(structure, specs, frozenset(), tied, len(first))
    return form.lay_out(summary, Snapshot(structure, [], [], []))


def _documents(plan: SavePlan, metadata: dict[str, JsonValue]) -> CommitDocuments:
    """Encode the metadata and the manifest."""
    layout = plan.layout
    totals = {
        "tensors": len(layout.specs),
        "objects": 0,
        "tensor_bytes": layout.tensor_bytes,
        "file_bytes": layout.nbytes,
    }
    manifest = Manifest(writer=writer_name(), created=now(), metadata=metadata, totals=totals)
    return CommitDocuments([image.name for image in layout.images], plan.documents(), manifest, plan.index())
