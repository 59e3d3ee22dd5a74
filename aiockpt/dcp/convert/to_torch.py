"""Converts a checkpoint to a ``torch.save`` file, in bounded memory: its framing first, then the bytes, part by part.

Under ``torch.serialization.skip_data``, ``torch.save`` writes everything except the bytes of tensors, which need no
memory then. It reserves space for each storage, in the order in which it meets them.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from isal.isal_zlib import crc32

from aiockpt.core.strides import is_dense, row_strides
from aiockpt.dcp.adapter import AnyCheckpointer, write_errors
from aiockpt.dcp.convert.parts import (
    PART_BYTES,
    PartReader,
    check_expansion,
    reads_of_part,
    sizes_of,
)
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import CheckpointExistsError, CommitError, LoadError, WriteError
from aiockpt.format.index import ChunkEntry, InlineEntry, ObjectEntry, TensorEntry, TensorItem
from aiockpt.format.item.arrays import ARRAY_RECORD
from aiockpt.format.item.item_framing import unbacked_tensor
from aiockpt.format.item.ziparchive import CRC, FramingError, data_offset, read_directory
from aiockpt.planning.ranges import as_stream
from aiockpt.reading.assemble import build_state
from aiockpt.reading.jobs import memory_of
from aiockpt.reading.load import chosen_entries
from aiockpt.reading.open import OpenCheckpoint, open_checkpoint
from aiockpt.reading.read_plan import ObjectRead, TensorRead, reads_of, value_key
from aiockpt.reading.targets import cast
from aiockpt.staging.pool import MappedMemory
from aiockpt.storage.local.belonging import why_not_a_checkpoint
from aiockpt.storage.local.commit import look_at, make_directories, sync_directory
from aiockpt.storage.local.storage import absolute
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.syscalls import allocate, rename_noreplace

if TYPE_CHECKING:
    from typing import Self

    from aiockpt.dcp.convert.parts import StoredChunk
    from aiockpt.options import LoadOptions, Path
    from aiockpt.reading.executor import LoadTools
    from aiockpt.telemetry.loads import ReadReport


_WINDOW_BYTES = 32 << 20
"""Tensors are read together up to this size; larger ones are streamed."""
_ALIGNMENT = 64


async def write_torch_file(
    path: Path,
    target: Path,
    options: LoadOptions,
    overwrite: bool,
    checkpointer: AnyCheckpointer,
    tools: LoadTools,
    report: ReadReport,
) -> None:
    """Convert, on the checkpointer's loop; see `aiockpt.dcp.format_utils.dcp_to_torch_save`."""
    storage, path = EngineAccess(checkpointer).locate(path)
    opened = await open_checkpoint(storage, path, options, tools)
    try:
        conversion = _Conversion(opened, options, tools, report)
        await conversion.run(absolute(target), overwrite=overwrite)
    finally:
        await tools.workers.run(opened.source.close)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A tensor whose bytes are to be written."""

    name: str
    entry: TensorEntry
    tensor: torch.Tensor  # a stand-in of its shape and strides, without memory
    space: ReservedSpace

    @property
    def is_large(self) -> bool:
        return self.space.nbytes > _WINDOW_BYTES


class _Conversion:
    def __init__(self, opened: OpenCheckpoint, options: LoadOptions, tools: LoadTools, report: ReadReport) -> None:
        self._path = opened.path
        self._index = opened.index
        self._entries, _ = chosen_entries(opened.path, opened.index, options)
        check_expansion(opened.path, sizes_of(self._entries))
        self._options = options
        self._run = tools.workers.run
        self._parts = PartReader(opened, options, tools)
        self._reader = self._parts.executor
        self._report = report
        self._window: MappedMemory | None = None

    async def run(self, target: str, *, overwrite: bool) -> None:
        """Write the file; remove it if that fails or is cancelled."""
        entries = self._entries
        objects = [ObjectRead(name, entry.place) for name, entry in entries.items() if isinstance(entry, ObjectEntry)]
        file = await self._run(TorchFileWriter(target, overwrite=overwrite).open)
        try:
            await self._reader.read_objects(objects)
            pending, held = await self._run(self._frame, file, {read.name: read.value for read in objects})
            self._report.expect(sum(space.nbytes for space in (*held, *(each.space for each in pending))))
            for space in held:
                await self._run(_write_held, file, space)
                self._report.add(space.nbytes)
            for window in _windows([each for each in pending if not each.is_large]):
                await self._copy_window(file, window)
            await self._stream_all(file, [each for each in pending if each.is_large])
            await self._run(file.publish)
        finally:
            await self._run(file.discard)

    def _frame(self, file: TorchFileWriter, values: dict[str, Any]) -> tuple[list[_Pending], list[ReservedSpace]]:
        """Write the framing; return the tensors to be written, and the spaces of storages that are in memory."""
        stand_ins: dict[object, tuple[str, TensorEntry, torch.Tensor]] = {}
        for name, entry in self._entries.items():
            if isinstance(entry, TensorEntry):
                dtype = cast(entry.dtype, self._options.dtype)
                known = stand_ins.setdefault(value_key(name, entry), (name, entry, _stand_in(entry, dtype)))
                values[name] = known[2]
            elif isinstance(entry, InlineEntry):
                values[name] = entry.value
        index = self._index
        # NumPy arrays stay tensors: torch.load refuses pickled arrays unless it is allowed NumPy's functions.
        containers = [record for record in index.containers if record["type"] != ARRAY_RECORD]
        spaces = file.frame(build_state(self._path, replace(index, containers=containers), values))
        mine = {tensor.untyped_storage()._cdata: (name, entry, tensor) for name, entry, tensor in stand_ins.values()}
        pending = [_Pending(*mine[r.storage._cdata], r) for r in spaces if r.storage._cdata in mine]
        return pending, [space for space in spaces if space.storage._cdata not in mine]

    async def _copy_window(self, file: TorchFileWriter, window: Sequence[_Pending]) -> None:
        """Read tensors into memory, and write them."""
        sizes = [each.space.nbytes + -each.space.nbytes % _ALIGNMENT for each in window]
        memory = self._window_memory(sum(sizes))
        reads: list[TensorRead] = []
        parts = []
        for each, part in zip(window, torch.split(memory, sizes), strict=True):
            parts.append(part[: each.space.nbytes])
            form = each.tensor
            values = parts[-1].view(form.dtype).as_strided(form.shape, form.stride())
            reads += reads_of(each.name, each.entry, values)
        await self._reader.read(reads)

        def write() -> None:
            for each, part in zip(window, parts, strict=True):
                data = memory_of(part)
                file.write(data, each.space.offset)
                file.seal(each.space, crc32(data))
                self._report.add(len(data))

        await self._run(write)

    def _window_memory(self, nbytes: int) -> torch.Tensor:
        # Mapped once: malloc would keep several windows for each thread after they were freed.
        if self._window is None or len(self._window.view) < nbytes:
            self._window = None  # before the next one is there
            self._window = MappedMemory(max(nbytes, _WINDOW_BYTES + _ALIGNMENT))
        return self._window.tensor[:nbytes]

    # --- large tensors ----------------------------------------------------------------------------

    async def _stream_all(self, file: TorchFileWriter, large: Sequence[_Pending]) -> None:
        for each in large:
            chunks = await self._parts.stored(each.name, each.entry)
            if all(_is_stream_of(each, chunk, item) for chunk, item in chunks):
                await self._stream(file, each, chunks)
            else:
                await self._copy_parts(file, each)

    async def _copy_parts(self, file: TorchFileWriter, each: _Pending) -> None:
        """Read a tensor part by part, in its new dtype and row by row, and write it."""
        await self._parts.check(each.name, each.entry)
        size = each.tensor.dtype.itemsize
        memory = self._window_memory(PART_BYTES)
        crc = 0
        for start in range(0, each.space.nbytes, PART_BYTES):
            part = memory[: min(PART_BYTES, each.space.nbytes - start)]
            reads = reads_of_part(each.name, each.entry, start // size, part.view(each.tensor.dtype))
            await self._reader.read(reads)
            await self._run(file.write, memory_of(part), each.space.offset + start)
            crc = await self._run(crc32, memory_of(part), crc)
            self._report.add(len(part))
        await self._run(file.seal, each.space, crc)

    async def _stream(self, file: TorchFileWriter, each: _Pending, chunks: Sequence[StoredChunk]) -> None:
        """Copy the stored bytes of a tensor, part by part."""
        size, strides = each.tensor.dtype.itemsize, each.tensor.stride()

        def write(chunk: ChunkEntry, at: int, part: memoryview) -> None:
            origin = sum(o * step for o, step in zip(chunk.offsets, strides, strict=True))
            done = 0
            for first, count in as_stream(chunk.sizes, strides, origin).runs(at // size, (at + len(part)) // size):
                file.write(part[done : done + count * size], each.space.offset + first * size)
                done += count * size

        crcs = await self._parts.stream(each.name, chunks, write, self._report)
        if len(chunks) == 1:
            await self._run(file.seal, each.space, crcs[0])
            return
        crc, at = 0, 0  # read back, because the chunks were not written in the order of the file
        while at < each.space.nbytes:
            crc, at = await self._run(file.crc_of, each.space, crc, at)
        await self._run(file.seal, each.space, crc)


def _write_held(file: TorchFileWriter, space: ReservedSpace) -> None:
    """Write the bytes of a storage that is in memory: that of a tensor inside an object."""
    data = memory_of(torch.empty(0, dtype=torch.uint8).set_(space.storage))
    file.write(data, space.offset)
    file.seal(space, crc32(data))


def _windows(pending: Sequence[_Pending]) -> Iterator[list[_Pending]]:
    """Group tensors so that each group fits into the window."""
    window: list[_Pending] = []
    nbytes = 0
    for each in pending:
        if window and nbytes + each.space.nbytes > _WINDOW_BYTES:
            yield window
            window, nbytes = [], 0
        window.append(each)
        nbytes += each.space.nbytes + _ALIGNMENT
    if window:
        yield window


def _stand_in(entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory, with the strides of its bytes if these can be copied as they are."""
    item = entry.chunks[0].item if len(entry.chunks) == 1 else None
    is_copied = item is not None and item.dtype is dtype and _is_dense_item(item)
    return unbacked_tensor(dtype, entry.shape, item.stride if item and is_copied else row_strides(entry.shape))


def _is_dense_item(item: TensorItem) -> bool:
    nbytes = math.prod(item.shape) * item.dtype.itemsize
    if item.storage_offset or item.nbytes != nbytes or item.conj or item.neg or not nbytes:
        return False
    return is_dense(item.shape, item.stride)


def _is_stream_of(each: _Pending, chunk: ChunkEntry, item: TensorItem) -> bool:
    """Return whether the bytes of a chunk can be copied unchanged."""
    if item.dtype is not each.tensor.dtype or each.entry.dtype is not item.dtype or not _is_dense_item(item):
        return False
    wanted = each.tensor.stride() if len(each.entry.chunks) == 1 else row_strides(chunk.sizes)
    return all(n == 1 or a == b for n, a, b in zip(item.shape, item.stride, wanted, strict=True))


# --- the file ---------------------------------------------------------------------------------------


_PROTOCOL = 2  # that torch.save pickles with


class _StorageOrder(pickle.Pickler):
    """Pickles to nowhere, to learn the order in which ``torch.save`` meets the storages."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=_PROTOCOL)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
        if not isinstance(storage, torch.UntypedStorage):
            return None
        self.found.setdefault(storage._cdata, storage)
        return "storage"


class _PickleModule:
    """The ``pickle_module`` of ``torch.save``, for quantized and nested tensors: torch refuses to skip their bytes."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, torch.Tensor) or not (obj.is_quantized or obj.is_nested):
                return NotImplemented
            # Only their reduction refuses. Their storages are written as others are, in the order of the dry run.
            state = torch.serialization._serialization_tls
            state.skip_data = False
            try:
                return obj.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
            finally:
                state.skip_data = True


@dataclass(frozen=True, slots=True)
class ReservedSpace:
    """The space of a storage in the file."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    crc_at: tuple[int, int]  # offsets of its CRC-32: in the data descriptor and in the central directory


class TorchFileWriter:
    """Writes a ``torch.save`` file under a hidden name beside its final path, and publishes it. All methods block."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self._path = os.path.abspath(path)
        self._overwrite = overwrite
        self._hidden = os.path.join(os.path.dirname(self._path), new_ticket())
        self._fd = -1

    def open(self) -> Self:
        """Create the hidden file; raise CheckpointExistsError if the path holds a file that may not be replaced."""
        if os.path.isdir(self._path):
            raise CheckpointExistsError(f"{self._path} is a directory; name the file to write")
        if not self._overwrite and os.path.lexists(self._path):
            raise CheckpointExistsError(f"{self._path} exists already; choose another name, or pass overwrite=True")
        try:
            found = look_at(self._path, why_not_a_checkpoint)
            if found is not None:
                raise CheckpointExistsError(
                    f"{self._path} {found}; overwrite=True replaces checkpoints only. Choose another name."
                )
            make_directories(os.path.dirname(self._path), fsync=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
            self._fd = os.open(self._hidden, flags, 0o664)
        except CheckpointExistsError:
            raise
        except OSError as exc:
            raise WriteError(f"can't create {self._path}: {exc}") from exc
        return self

    def frame(self, value: Any) -> list[ReservedSpace]:
        """Write everything except the storages' bytes; return the space of each storage that has any."""
        order = _StorageOrder()
        try:
            order.dump(value)
        except RecursionError:
            raise LoadError(
                f"the state is nested too deeply for a file of torch.save, {self._path}: convert to dcp, or some keys"
            ) from None
        with write_errors(f"write {self._path}"):
            # A copy of the descriptor, which the file object closes.
            with os.fdopen(os.dup(self._fd), "r+b") as file, torch.serialization.skip_data():
                torch.save(value, file, pickle_module=_PickleModule)
            length = os.fstat(self._fd).st_size
            allocate(self._fd, length)  # the skipped bytes are holes: so a full disk fails now, before tensors are read
        return self._spaces(list(order.found.values()), length)

    def _spaces(self, storages: list[torch.UntypedStorage], length: int) -> list[ReservedSpace]:
        def fetch(offset: int, size: int) -> bytes:
            return os.pread(self._fd, size, offset)

        records = {record.name.partition("/")[2]: record for record in read_directory(length, fetch)}
        spaces = []
        for number, storage in enumerate(storages):
            record = records.get(f"data/{number}")
            if record is None or record.size != storage.nbytes():
                raise FramingError(f"torch {torch.__version__} writes storages in an unknown order")
            if record.size:
                offset = data_offset(record, fetch)
                spaces.append(ReservedSpace(storage, offset, record.size, (offset + record.size + 4, record.crc_at)))
        return spaces

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at an offset."""
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as exc:
            raise WriteError(f"can't write {self._path} at offset {offset}: {exc}") from exc

    def seal(self, space: ReservedSpace, crc: int) -> None:
        """Write the CRC-32 of a storage's bytes."""
        for at in space.crc_at:
            self.write(CRC.pack(crc), at)

    def crc_of(self, space: ReservedSpace, crc: int, start: int) -> tuple[int, int]:
        """Continue the CRC-32 of a storage from ``start``, reading back a part; return it, and the next start."""
        stop = min(space.nbytes, start + PART_BYTES)
        data = os.pread(self._fd, stop - start, space.offset + start)
        if len(data) != stop - start:
            raise WriteError(f"{self._path} was cut short while it was written")
        return crc32(data, crc), stop

    def publish(self) -> None:
        """Make the file durable, and give it its final name."""
        try:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._overwrite:
                os.replace(self._hidden, self._path)
            else:
                rename_noreplace(self._hidden, self._path)
            sync_directory(os.path.dirname(self._path))
        except FileExistsError as exc:
            raise CheckpointExistsError(f"{self._path} has appeared meanwhile; it was not replaced") from exc
        except OSError as exc:
            raise CommitError(f"can't publish {self._path}: {exc}") from exc

    def discard(self) -> None:
        """Remove what was written, unless it was published. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if os.path.lexists(self._hidden):
            os.unlink(self._hidden)
