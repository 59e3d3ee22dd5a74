"""Reading items: from byte ranges of files, through their framing and CRC, to where they belong."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch
from isal.isal_zlib import crc32, crc32_combine

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.metadata import METADATA_NAME
from aiockpt.format.objects import decode_object
from aiockpt.format.tensor_item import HEAD_BYTES, TAIL_BYTES, ItemParser, parse_tensor_item
from aiockpt.format.ziparchive import FramingError
from aiockpt.planning.planner import is_dense
from aiockpt.staging.pool import Mapping as MappedMemory

if TYPE_CHECKING:
    from aiockpt.format.index import ItemPlace, TensorEntry, TensorItem
    from aiockpt.storage.base import Source
    from aiockpt.threads import Workers

MapLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | torch.device | str | dict[str, str]

LARGE_BYTES = 1 << 20
"""Items of this size and more are read on their own, straight to where they belong."""
RANGE_BYTES = 32 << 20
"""The most that one thread reads at a time."""
_STEP_BYTES = 1 << 20  # read and checked at a time, so that the CRC finds it in the processor's cache
_BATCH_BYTES = 8 << 20
_MAX_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `aiockpt.AsyncCheckpointer.load`."""

    map_location: MapLocation | None = None
    strict: bool = True
    verify: bool = True
    safe_globals: Sequence[Any] = ()
    trust: bool = False


@dataclass(eq=False)
class ReadItem:
    """One item to read: an object, or one stored chunk of a tensor.

    Attributes:
        name: the key it belongs to.
        place: where its bytes are.
        chunk: for tensors, offsets and sizes of the chunk in the whole tensor.
        target: for tensors, what it goes to; made when its strides are known if None.
        entry: for tensors, the whole tensor.
        value: for objects, what was read; for tensors without a target, the tensor that was made.
    """

    name: str
    place: ItemPlace
    entry: TensorEntry | None = None
    chunk: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    target: torch.Tensor | None = None
    value: Any = None


@dataclass(eq=False)
class _LargeRead:
    """A large tensor item whose framing is known: its payload is read in ranges."""

    item: ReadItem
    parsed: TensorItem
    memory: memoryview
    scratch: bool
    crcs: list[int] = field(default_factory=list)

    def ranges(self) -> list[tuple[int, int]]:
        return [(a, min(a + RANGE_BYTES, self.parsed.nbytes)) for a in range(0, self.parsed.nbytes, RANGE_BYTES)]


class ItemReader:
    """Reads items of one checkpoint in a few threads.

    Args:
        source: the checkpoint's files.
        path: where it is, for messages.
        options: how to load.
        workers: the threads.
    """

    def __init__(self, source: Source, path: str, options: LoadOptions, workers: Workers) -> None:
        self._source = source
        self._path = path
        self._options = options
        self._workers = workers
        self._parser = ItemParser()

    async def read(self, items: list[ReadItem]) -> None:
        """Read all items, in a few threads."""
        small = [item for item in items if item.place.length < LARGE_BYTES or item.entry is None]
        large = [item for item in items if not (item.place.length < LARGE_BYTES or item.entry is None)]
        jobs: list[Callable[[], None]] = [functools.partial(self._read_batch, batch) for batch in _batches(small)]
        reads: list[_LargeRead] = []
        jobs += [functools.partial(self._prepare, item, reads) for item in large]
        await self._run(jobs)
        jobs = []
        for read in reads:
            read.crcs = [0] * len(read.ranges())
            jobs += [functools.partial(self._read_range, read, n) for n in range(len(read.crcs))]
        await self._run(jobs)
        await self._run([functools.partial(self._complete, read) for read in reads])

    async def _run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run blocking jobs in all threads, each taking the next."""
        pending = iter(jobs)

        async def work() -> None:
            for job in pending:
                await self._workers.run(job)

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._workers.count, len(jobs))):
                    tasks.start_soon(work)
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, LoadError) or not isinstance(error, Exception):
                raise error from error.__cause__
            raise LoadError(f"loading {self._path} failed: {type(error).__name__}: {error}") from error

    def _read_batch(self, batch: list[ReadItem]) -> None:
        """Read neighbouring small items at once, and place them."""
        begin = batch[0].place.offset
        end = max(item.place.offset + item.place.length for item in batch)
        buffer = memoryview(bytearray(end - begin))
        self._source.read(batch[0].place.file, begin, buffer)
        for item in batch:
            at = item.place.offset - begin
            view = buffer[at : at + item.place.length]
            if item.entry is None:
                item.value = self._decode(item, bytes(view))
                continue
            parsed = self._parsed(item, self._parser.parse, view)
            payload = view[parsed.payload_offset : parsed.payload_offset + parsed.nbytes]
            if self._options.verify and parsed.crc is not None:
                self._check_crc(item, parsed, crc32(payload))
            self._place(item, parsed, payload)

    def _decode(self, item: ReadItem, blob: bytes) -> Any:
        options = self._options
        try:
            return decode_object(
                item.name,
                blob,
                safe_globals=options.safe_globals,
                trust=options.trust,
                map_location=options.map_location,
            )
        except LoadError as exc:
            raise type(exc)(f"{self._path}/{item.place.file}: {exc}") from exc

    def _prepare(self, item: ReadItem, reads: list[_LargeRead]) -> None:
        """Read the framing of a large item, and decide where its payload goes."""
        place = item.place
        head = self._bytes(place, 0, min(HEAD_BYTES, place.length))
        tail_at = max(0, place.length - TAIL_BYTES)
        tail = self._bytes(place, tail_at, place.length - tail_at)

        def fetch(offset: int, size: int) -> bytes:
            if offset + size <= len(head):
                return head[offset : offset + size]
            if offset >= tail_at:
                return tail[offset - tail_at :][:size]
            return self._bytes(place, offset, max(0, min(size, place.length - offset, 1 << 20)))

        parsed = self._parsed(item, parse_tensor_item, place.length, fetch)
        target = item.target
        if target is None:
            memory = MappedMemory(parsed.nbytes)
            item.value = _seen_as(memory.tensor, parsed)
            reads.append(_LargeRead(item, parsed, memory.view, scratch=False))
        elif _is_image(target, item, parsed):
            reads.append(_LargeRead(item, parsed, _memory_of(target), scratch=False))
        else:
            reads.append(_LargeRead(item, parsed, MappedMemory(parsed.nbytes).view, scratch=True))

    def _read_range(self, read: _LargeRead, number: int) -> None:
        start, stop = read.ranges()[number]
        view = read.memory[start:stop]
        place = read.item.place
        check = self._options.verify and read.parsed.crc is not None
        begin = place.offset + read.parsed.payload_offset + start
        crc = 0
        for at in range(0, stop - start, _STEP_BYTES):
            part = view[at : at + _STEP_BYTES]
            self._source.read(place.file, begin + at, part)
            if check:
                crc = crc32(part, crc)
        read.crcs[number] = crc

    def _complete(self, read: _LargeRead) -> None:
        if self._options.verify and read.parsed.crc is not None:
            crc = 0
            for part, (start, stop) in zip(read.crcs, read.ranges(), strict=True):
                crc = crc32_combine(crc, part, stop - start)
            self._check_crc(read.item, read.parsed, crc)
        if read.scratch:
            self._place(read.item, read.parsed, read.memory)
        elif read.item.target is None:
            _resolve(read.item.value, read.parsed)

    def _bytes(self, place: ItemPlace, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._source.read(place.file, place.offset + offset, memoryview(data))
        return bytes(data)

    def _parsed(self, item: ReadItem, parse: Callable[..., TensorItem], *args: Any) -> TensorItem:
        try:
            parsed = parse(*args)
        except FramingError as exc:
            raise CorruptCheckpointError(
                f"{self._path}/{item.place.file}: the item of {item.name} is damaged: {exc}"
            ) from exc
        dtype, sizes = item.entry.dtype if item.entry is not None else None, _chunk_of(item)[1]
        if parsed.dtype != dtype or parsed.shape != sizes:
            raise CorruptCheckpointError(
                f"{self._path}/{item.place.file}: {item.name} is {parsed.dtype} {parsed.shape} in its item but "
                f"{dtype} {sizes} in {METADATA_NAME}"
            )
        return parsed

    def _check_crc(self, item: ReadItem, parsed: TensorItem, crc: int) -> None:
        if crc != parsed.crc:
            raise CorruptCheckpointError(
                f"{self._path}/{item.place.file}: the bytes of {item.name} (at offset "
                f"{item.place.offset + parsed.payload_offset}, {parsed.nbytes} bytes) do not match their CRC: "
                "they changed since they were written. Use an older checkpoint."
            )

    def _place(self, item: ReadItem, parsed: TensorItem, payload: memoryview) -> None:
        """Put a payload where the item belongs."""
        target = item.target
        if target is None and _is_dense_item(parsed):
            target = item.value = torch.empty_strided(parsed.shape, parsed.stride, dtype=parsed.dtype, device="cpu")
        if target is not None and _is_image(target, item, parsed):
            if parsed.nbytes:
                ctypes.memmove(target.data_ptr(), _address_of(payload), parsed.nbytes)
            if target is item.value:
                _resolve(target, parsed)
            return
        if 0 in parsed.shape:
            stored = torch.empty_strided(parsed.shape, parsed.stride, dtype=parsed.dtype, device="cpu")
        else:
            stored = _seen_as(torch.frombuffer(payload, dtype=torch.uint8), parsed).clone()
        _resolve(stored, parsed)
        if target is None:
            item.value = stored
            return
        region = target
        for dim, (offset, size) in enumerate(zip(*_chunk_of(item), strict=True)):
            region = region.narrow(dim, offset, size)
        with torch.no_grad():
            region.copy_(stored)


def _chunk_of(item: ReadItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return item.chunk if item.chunk is not None else ((), ())


def _batches(items: Sequence[ReadItem]) -> list[list[ReadItem]]:
    """Group items that lie close together in a file, so that each group is one read."""
    batches: list[list[ReadItem]] = []
    end = begin = 0
    for item in sorted(items, key=lambda item: (item.place.file, item.place.offset)):
        place = item.place
        if (
            not batches
            or batches[-1][0].place.file != place.file
            or place.offset > end + _MAX_GAP_BYTES
            or place.offset + place.length > begin + _BATCH_BYTES
        ):
            batches.append([])
            begin = place.offset
            end = 0
        batches[-1].append(item)
        end = max(end, place.offset + place.length)
    return batches


def _is_dense_item(parsed: TensorItem) -> bool:
    """Tell whether the payload is exactly the memory of the tensor."""
    return (
        parsed.storage_offset == 0
        and parsed.nbytes == math.prod(parsed.shape) * parsed.dtype.itemsize
        and is_dense(parsed.shape, parsed.stride)
    )


def _is_image(target: torch.Tensor, item: ReadItem, parsed: TensorItem) -> bool:
    """Tell whether the payload, byte for byte, is what the memory of the target should be."""
    return (
        target.device.type == "cpu"
        and type(target) is torch.Tensor
        and tuple(target.shape) == parsed.shape == _chunk_of(item)[1]
        and _is_dense_item(parsed)
        and all(a == b for a, b, n in zip(target.stride(), parsed.stride, parsed.shape, strict=True) if n > 1)
        and (target is item.value or not (parsed.conj or parsed.neg))
        and not (target.is_conj() or target.is_neg())
    )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Give the memory of a dense host tensor."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _seen_as(payload: torch.Tensor, parsed: TensorItem) -> torch.Tensor:
    """See bytes as the tensor that they store."""
    whole = len(payload) // parsed.dtype.itemsize * parsed.dtype.itemsize
    return payload[:whole].view(parsed.dtype).as_strided(parsed.shape, parsed.stride, parsed.storage_offset)


def _resolve(tensor: torch.Tensor, parsed: TensorItem) -> None:
    """Apply what the item says of its values: stored conjugated, or negated."""
    if parsed.conj:
        tensor.conj_physical_()
    if parsed.neg:
        tensor.neg_()
