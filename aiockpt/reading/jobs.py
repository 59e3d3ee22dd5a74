"""Read jobs: each is the work of one thread, with `read(buffer)`, which may leave placements, and `finish()`.

If its ``device`` is no host memory, the buffer is a chunk of staging memory, from which the device copies.

| job | reads | and puts it |
| --- | --- | --- |
| `CoalescedRead` | small items; neighbours in a file with one system call | into place, or leaves placements |
| `ChunkPart` of a direct `ChunkRead` | a part of one stored chunk | straight into the target's memory |
| `ChunkPart` of another `ChunkRead` | a part of one stored chunk | into the buffer, and leaves placements |
| `ObjectRun` | objects | nowhere: it decodes them |
| `BulkRead` of `bulk` | small tensors of one form | into place |

A placement is a copy out of the buffer: it converts dtypes and strides, or goes to an accelerator. CRCs are computed
in the same pass that reads the bytes.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from isal.isal_zlib import crc32, crc32_combine

from aiockpt.core import pages
from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.strides import is_dense, reach, row_strides
from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.checks import wrong_crc
from aiockpt.format.item.tensor_item import HEAD_BYTES, TAIL_BYTES, ItemParser, parse_tensor_item
from aiockpt.format.item.ziparchive import FramingError, SubclassItemError
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.collective.sharing import Cell
from aiockpt.planning.ranges import Selection, StoredStream, as_stream, boxes
from aiockpt.planning.specs import lazy_bits
from aiockpt.reading.bulk import BulkRead
from aiockpt.reading.targets import check_memory
from aiockpt.staging.pool import Chunk, MappedMemory, copy_small
from aiockpt.staging.runtime import is_host
from aiockpt.staging.scatter import Placement

if TYPE_CHECKING:
    from aiockpt.format.index import ItemRange, TensorItem
    from aiockpt.reading.read_plan import ObjectRead, TensorRead
    from aiockpt.storage.base import Source

    Buffer = Chunk | MappedMemory  # a chunk of staging memory, or a thread's own

CPU = torch.device("cpu")

_MAX_STRETCHES = 64  # of one batch
_UNLOCKED_BYTES = 64 << 10  # from here on, payloads are copied without the GIL
_MAX_RUNS = 16_384  # of one part; bounds the list of runs in memory
_MAX_FETCH_BYTES = 1 << 20
_HEADERS_BYTES = 1024


# --- framing --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ItemWindow:
    """Reads ranges of an item; keeps its head and tail, where the framing is. Blocks."""

    _source: Source
    _place: ItemRange
    _most_bytes: int = _MAX_FETCH_BYTES  # of one range: a damaged size allocates no more
    _head: bytes = b""
    _tail: bytes = b""
    _block: bytes = b""
    _block_at: int = 0

    def __post_init__(self) -> None:
        self._tail_at = max(0, self._place.length - TAIL_BYTES)

    def fetch(self, offset: int, size: int) -> bytes:
        """Return bytes of the item; fewer where it ends."""
        if not self._tail:
            self._head = self._read(0, HEAD_BYTES)
            self._tail = self._read(self._tail_at, TAIL_BYTES)
        if offset + size <= len(self._head):
            return self._head[offset : offset + size]
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at :][:size]
        if size > _HEADERS_BYTES:
            return self._read(offset, size)
        if not self._block_at <= offset <= offset + size <= self._block_at + len(self._block):
            # The header of a record directly follows the data descriptor of the previous one: one block has both.
            self._block_at, self._block = offset, self._read(offset, _HEADERS_BYTES)
        return self._block[offset - self._block_at :][:size]

    def holds(self, start: int, stop: int) -> bool:
        """Return whether these bytes are in the head or tail, so that no further read is needed."""
        return stop <= len(self._head) or start >= self._tail_at

    def _read(self, offset: int, size: int) -> bytes:
        place, size = self._place, min(size, self._place.length - offset, self._most_bytes)
        return self._source.read_bytes(place.file, place.offset + offset, max(0, size))


@dataclass(eq=False)
class FramingReader:
    """Reads and checks the framing of items: the zip structure with dtype, shape, payload offset and CRC."""

    source: Source
    _path: str
    verify: bool
    _parser: ItemParser = field(default_factory=ItemParser)

    def locate(self, reads: Sequence[TensorRead]) -> None:
        """Read the heads and tails of items of one file together, without their payloads; set their items. Blocks."""
        runs: list[tuple[int, int]] = []
        for read in reads:
            place = read.chunk.place
            head, tail = min(HEAD_BYTES, place.length), min(TAIL_BYTES, place.length)
            runs += [(place.offset, head), (place.offset + place.length - tail, tail)]
        data = bytearray(sum(nbytes for _, nbytes in runs))
        self.source.read_runs(reads[0].chunk.place.file, runs, memoryview(data))
        at = 0
        for read, (_, head), (_, tail) in zip(reads, runs[::2], runs[1::2], strict=True):
            place, middle = read.chunk.place, at + head
            ends = bytes(data[at:middle]), bytes(data[middle : middle + tail])
            window = ItemWindow(self.source, place, _MAX_FETCH_BYTES, *ends)
            read.item = parse_checked(self._path, read, parse_tensor_item, place.length, window.fetch)
            at = middle + tail

    def parse(self, read: TensorRead, view: memoryview) -> TensorItem:
        """Parse an item that is in memory."""
        return parse_checked(self._path, read, self._parser.parse, view)

    def wrong_crc(self, read: TensorRead, item: TensorItem) -> CorruptCheckpointError:
        """Return the error for a payload that does not match its CRC."""
        return wrong_crc(self._path, read.name, read.chunk.place, item)


def parse_checked(path: str, read: TensorRead, parse: Callable[..., TensorItem], *args: Any) -> TensorItem:
    """Parse an item; raise CorruptCheckpointError if it contradicts the metadata.

    Its dtype may differ: planners of ``dcp.save`` may cast what they store. Then loading casts it back.
    """
    where = f"{path}/{read.chunk.place.file}"
    try:
        item = parse(*args)
    except SubclassItemError as exc:
        raise LoadError(
            f"{where}: {read.name} can't be loaded here: {exc}. It is not damaged: dcp.load fills a tensor of that "
            "class with it. Leave it out by keys=, or save it as a plain tensor"
        ) from exc
    except FramingError as exc:
        raise CorruptCheckpointError(f"{where}: the item of {read.name} is damaged: {exc}") from exc
    if item.shape != read.chunk.sizes:
        raise CorruptCheckpointError(
            f"{where}: {read.name} has the shape {item.shape} in its item but {read.chunk.sizes} in {METADATA_NAME}"
        )
    return item


def _check_target(read: TensorRead) -> None:
    """Raise if the memory of the caller's tensor was freed since the load was planned."""
    if read.fills and read.target is not None:
        check_memory(read.name, read.target)


# --- payloads as tensors --------------------------------------------------------------------------------


def view_of(memory: torch.Tensor, item: TensorItem, *, lazily: bool) -> torch.Tensor:
    """View a payload, dtype uint8, as its tensor; if ``lazily``, conjugation and negation leave the memory as it is."""
    if not lazily:  # each stored value once: in the tensor, elements that share memory would be conjugated twice
        values = _values(memory, item)
        if item.conj:
            values.conj_physical_()
        if item.neg:
            values.neg_()
        return values.as_strided(item.shape, item.stride, item.storage_offset)
    tensor = _strided_view(memory, item)
    tensor = tensor.conj() if item.conj else tensor
    return torch._neg_view(tensor) if item.neg else tensor


def _strided_view(memory: torch.Tensor, item: TensorItem) -> torch.Tensor:
    """View a payload, dtype uint8, as its stored values, without conjugating or negating them."""
    return _values(memory, item).as_strided(item.shape, item.stride, item.storage_offset)


def _values(memory: torch.Tensor, item: TensorItem) -> torch.Tensor:
    # A payload may be longer than its tensor, and `view` refuses a length that is no multiple of the element size.
    rest = len(memory) % item.dtype.itemsize
    return (memory[:-rest] if rest else memory).view(item.dtype)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense host tensor as bytes."""
    nbytes = math.prod(tensor.shape) * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


# --- small items ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stretch:
    """A byte range of a file that holds some items; one read."""

    file: str
    begin: int
    end: int
    reads: list[TensorRead]


@dataclass(eq=False)
class CoalescedRead:
    """Small items that lie close together."""

    _stretches: list[_Stretch]
    _framing: FramingReader
    device: torch.device

    def __post_init__(self) -> None:
        self.nbytes = sum(each.end - each.begin for each in self._stretches)
        self.file = self._stretches[0].file

    @gc_pause()
    def read(self, buffer: Buffer) -> list[Placement]:
        """Read all items, check them, and copy those that need no conversion; return the other copies. Blocks."""
        framing, view, address = self._framing, buffer.view, buffer.address
        found: list[tuple[TensorRead, TensorItem, int]] = []
        at = 0
        for each in self._stretches:
            at += (each.begin - at) % BLOCK_BYTES  # same offset in the page as in the file, as O_DIRECT requires
            framing.source.read(each.file, each.begin, view[at : at + each.end - each.begin])
            for read in each.reads:
                place = read.chunk.place
                start = at + place.offset - each.begin
                item = read.chunk.item or framing.parse(read, view[start : start + place.length])
                start += item.payload_offset
                if framing.verify and item.crc is not None and crc32(view[start : start + item.nbytes]) != item.crc:
                    raise framing.wrong_crc(read, item)
                _check_target(read)
                found.append((read, item, start))
            at += each.end - each.begin
        # No target is changed before all items of the batch were checked.
        _make_tensors([(read, item) for read, item, _ in found])
        left: list[Placement] = []
        for read, item, start in found:
            read.begun = True
            rest = _place(read, item, view, start, address + start)
            if rest is not None:
                left.append(rest)
        return left

    def finish(self) -> None:
        for each in self._stretches:
            for read in each.reads:
                read.pending = 0


@gc_pause()
def coalesce(
    reads: Sequence[TensorRead], most_bytes: int, framing: FramingReader, device: torch.device
) -> list[CoalescedRead]:
    """Group items: neighbours in a file become one stretch, and a few stretches one job.

    A job's buffer of ``most_bytes`` also holds gaps between items, and a page per stretch for alignment.
    """
    jobs: list[CoalescedRead] = []
    stretches: list[_Stretch] = []
    used, gap_bytes = 0, framing.source.gap_bytes
    for read in sorted(reads, key=lambda read: read.chunk.place[:2]):
        place = read.chunk.place
        end = place.offset + place.length
        last = stretches[-1] if stretches else None
        if last is not None and last.file == place.file and place.offset <= last.end + gap_bytes:
            growth = max(0, end - last.end)
            if used + growth <= most_bytes:
                last.reads.append(read)
                last.end += growth
                used += growth
                continue
        elif used + place.length + BLOCK_BYTES <= most_bytes and len(stretches) < _MAX_STRETCHES:
            stretches.append(_Stretch(place.file, place.offset, end, [read]))
            used += place.length + BLOCK_BYTES
            continue
        if stretches:
            jobs.append(CoalescedRead(stretches, framing, device))
        stretches = [_Stretch(place.file, place.offset, end, [read])]
        used = place.length + BLOCK_BYTES
    return [*jobs, CoalescedRead(stretches, framing, device)] if stretches else jobs


def _make_tensors(found: Sequence[tuple[TensorRead, TensorItem]]) -> None:
    """Make the new tensors that get payloads as they are, in `TensorRead.made`; those of a kind in one call.

    Each call of an operator releases the GIL, and beside a busy thread may have to wait for it.
    """
    kinds: defaultdict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], list[TensorRead]] = defaultdict(list)
    for read, item in found:
        if _is_new(read, item):
            kinds[item.dtype, item.shape, item.stride].append(read)
    for (dtype, shape, stride), reads in kinds.items():
        made = [torch.empty_strided(shape, stride, dtype=dtype, device="cpu")]
        if stride != row_strides(shape) or made[0].nbytes >= _UNLOCKED_BYTES:
            made += [torch.empty_strided(shape, stride, dtype=dtype, device="cpu") for _ in reads[1:]]
        elif reads[1:]:  # one operator makes all of them, as copies whose values are overwritten
            made += torch.unbind_copy(made[0].expand(len(reads) - 1, *shape))  # type: ignore[arg-type, func-returns-value]
        for read, tensor in zip(reads, made, strict=True):
            read.made = tensor


def _is_new(read: TensorRead, item: TensorItem) -> bool:
    """Return whether the payload, as it is, becomes the memory of a new tensor."""
    is_plain = not (read.shared or item.storage_offset or item.conj or item.neg)
    fits = item.nbytes == math.prod(item.shape) * item.dtype.itemsize and is_dense(item.shape, item.stride)
    return read.target is None and is_plain and fits


def _place(read: TensorRead, item: TensorItem, buffer: memoryview, start: int, address: int) -> Placement | None:
    """Copy a payload to its target, or into new memory; return a placement if that needs a conversion."""
    target = read.target
    read.item = item
    if target is None:
        memory = read.made
        if memory is None:
            memory = read.memory = torch.empty(item.nbytes, dtype=torch.uint8, device="cpu")
        copy = copy_small if item.nbytes < _UNLOCKED_BYTES else ctypes.memmove  # which releases the GIL
        copy(memory.data_ptr(), address, item.nbytes)
        return None
    if not item.nbytes or 0 in item.shape:
        return None
    if read.selections is not None:
        item = select_item(item, read.selections)
        size, skipped = item.dtype.itemsize, item.storage_offset * item.dtype.itemsize
        start, address = start + skipped, address + skipped
        item = item._replace(storage_offset=0, nbytes=reach(item.shape, item.stride) * size)
    if _is_image(target, item):
        copy_small(target.data_ptr(), address, item.nbytes)
        return None
    data = torch.frombuffer(buffer[start : start + item.nbytes], dtype=torch.uint8)
    if address % item.dtype.itemsize:  # vector instructions fault on values at odd addresses
        data = data.clone()
    return Placement(target, _strided_view(data, item), item.conj, item.neg)


def select_item(item: TensorItem, selections: Sequence[Selection] | None) -> TensorItem:
    """Return a part of a tensor, per dimension, as another view of the same payload."""
    if selections is None:
        return item
    shape = tuple(each.count for each in selections)
    stride = tuple(step * each.step for each, step in zip(selections, item.stride, strict=True))
    first = item.storage_offset + sum(each.start * step for each, step in zip(selections, item.stride, strict=True))
    return item._replace(shape=shape, stride=stride, storage_offset=first)


def _is_image(target: torch.Tensor, item: TensorItem) -> bool:
    """Return whether the payload equals the target's memory byte for byte."""
    return (
        type(target) is torch.Tensor
        and target.dtype is item.dtype
        and target.nbytes == item.nbytes
        and is_host(target.device)
        and (
            target.stride() == item.stride
            or all(a == b for a, b, n in zip(target.stride(), item.stride, item.shape, strict=True) if n > 1)
        )
        and (target.is_contiguous() or is_dense(item.shape, item.stride))
        and not (item.storage_offset or item.conj or item.neg or any(lazy_bits(target)))
    )


# --- large items, and parts of items --------------------------------------------------------------------


class ChunkRead:
    """The requested elements of one stored chunk in stored order, which its `parts` read, in whole pages.

    A part has up to ``direct_bytes`` if it goes straight to its place, else up to ``buffer_bytes``. Without a target
    they go to ``memory``, if there is any, which has room for the whole payload; if it ``is_fresh``, its pages are not
    faulted in yet.
    With ``grid_bytes``, the payload is divided into blocks of that size, and no part has bytes of two; unless elements
    share memory.
    """

    def __init__(
        self,
        read: TensorRead,
        item: TensorItem,
        memory: memoryview | None,
        framing: FramingReader,
        *,
        direct_bytes: int,
        buffer_bytes: int,
        is_fresh: bool = False,
        grid_bytes: int = 0,
    ) -> None:
        self.read = read
        self.item = item
        self.framing = framing
        self.file = read.chunk.place.file
        self.base = read.chunk.place.offset + item.payload_offset
        if memory is not None or read.only_checked:
            self.size = 1  # of an element of the stream
            self.stream: StoredStream = as_stream((item.nbytes,), (1,), 0)
        else:
            self.size = item.dtype.itemsize
            part = select_item(item, read.selections)
            self.stream = as_stream(part.shape, part.stride, part.storage_offset)
        self.nbytes = self.stream.count * self.size
        self.memory = memory if memory is not None else self._target_memory()  # None: it goes through a buffer
        self.device = CPU if self.memory is not None or read.target is None else read.target.device
        self.is_fresh = is_fresh
        most = min(
            buffer_bytes if self.memory is None else direct_bytes,
            max(BLOCK_BYTES, self.stream.run * self.size * _MAX_RUNS),
        )
        # The CRC covers the whole payload in stored order: a part of the payload, or one in runs, can't be checked.
        self.is_verified = framing.verify and item.crc is not None and self.is_one_run and self.nbytes == item.nbytes
        self.grid_bytes = grid_bytes if self.stream.is_increasing else 0
        edges = [*self._edges(self.grid_bytes), self.nbytes]
        step = most - most % BLOCK_BYTES
        self._bounds = [at for low, high in pairwise(edges) for at in range(low, high, step)]
        self.crcs = [0] * len(self._bounds)  # of the parts
        self._bounds.append(self.nbytes)

    @property
    def parts(self) -> list[ChunkPart]:
        return [ChunkPart(self, number, *bounds) for number, bounds in enumerate(pairwise(self._bounds))]

    @property
    def is_one_run(self) -> bool:
        return self.stream.run == self.stream.count

    def _edges(self, grid_bytes: int) -> list[int]:
        """Return where the stream, if it is not empty, enters a block of the payload."""
        if not grid_bytes or not self.nbytes:
            return [0] if self.nbytes else []
        size, stream = self.size, self.stream
        first, last = (stream.at(number) * size // grid_bytes for number in (0, stream.count - 1))
        inner = (stream.before(block * grid_bytes // size) * size for block in range(first + 1, last + 1))
        return list(dict.fromkeys([0, *inner]))

    def begin(self) -> None:
        """Note that the target changes from now on; raise if its memory was freed."""
        _check_target(self.read)
        self.read.begun = True

    def offset_of(self, start: int) -> int:
        """Return the file offset of a byte of the stream, if it is one run."""
        return self.base + self.stream.offset * self.size + start

    def check_crc(self) -> None:
        """Raise if the bytes of all parts do not match the CRC of the payload."""
        if not self.is_verified:
            return
        crc = 0
        for part, (start, stop) in zip(self.crcs, pairwise(self._bounds), strict=True):
            crc = crc32_combine(crc, part, stop - start)
        if crc != self.item.crc:
            raise self.framing.wrong_crc(self.read, self.item)

    def placements(self, start: int, data: torch.Tensor) -> list[Placement]:
        """Return the boxes of the target that the elements from ``start`` on belong to."""
        target, item, stream = self.read.target, self.item, self.stream
        if target is None:
            return []
        values = data.view(item.dtype)
        rest = [dim for dim in range(target.dim()) if dim not in stream.order]
        ordered = target.permute((*stream.order, *rest))
        found: list[Placement] = []
        at = 0
        for box in boxes(stream.shape, start, start + len(values)):
            region = ordered[box.index]
            lead = region.dim() - len(rest)
            part = values[at : at + box.count].view((*region.shape[:lead], *(1,) * len(rest)))
            found.append(Placement(region, part, item.conj, item.neg))
            at += box.count
        return found

    def _target_memory(self) -> memoryview | None:
        """Return the memory of the target if it equals the stream byte for byte."""
        target, stream, item = self.read.target, self.stream, self.item
        if (
            target is None
            or not is_host(target.device)
            or type(target) is not torch.Tensor
            or target.dtype != item.dtype
            or (item.conj or item.neg or any(lazy_bits(target)))
        ):
            return None
        expected = 1
        for dim in reversed(stream.order):
            if target.stride(dim) != expected:
                return None
            expected *= target.shape[dim]
        return memory_of(target) if target.numel() == stream.count else None


@dataclass(eq=False, slots=True)
class ChunkPart:
    """One part of a `ChunkRead`: the bytes ``start`` to ``stop`` of its stream."""

    chunk: ChunkRead
    number: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def file(self) -> str:
        return self.chunk.file

    @property
    def device(self) -> torch.device:
        return self.chunk.device

    @property
    def block(self) -> int:
        """The number of the block of the payload that has all of it; -1 if it may be in several."""
        chunk = self.chunk
        if not chunk.grid_bytes:
            return -1
        return chunk.stream.at(self.start // chunk.size) * chunk.size // chunk.grid_bytes

    def takes(self, begin: int, end: int) -> bool:
        """Return whether it is these bytes of the file, and writes them to memory as they are stored."""
        at = self.chunk.offset_of(self.start)
        return self.chunk.memory is not None and self.chunk.is_one_run and (at, at + self.nbytes) == (begin, end)

    def memory(self) -> memoryview:
        """Return where it writes its bytes if it does so without a buffer, for others to do it. Blocks for a moment."""
        self.chunk.begin()
        assert self.chunk.memory is not None
        part = self.chunk.memory[self.start : self.stop]
        if self.chunk.is_fresh:
            pages.fault_in(ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part))
        return part

    def set_crc(self, crc: int) -> None:
        """Note the CRC-32 of what was written to `memory`."""
        self.chunk.crcs[self.number] = crc

    def read(self, buffer: Buffer) -> list[Placement]:
        """Read it; return the copies out of the buffer that are left to do. Blocks."""
        chunk = self.chunk
        if chunk.memory is not None:
            self._fill(self.memory())
            return []
        # Same offset in the page as in the file, as O_DIRECT requires; unless the buffer lacks the room, or values
        # would be at odd addresses, on which vector instructions fault.
        skip = chunk.offset_of(self.start) % BLOCK_BYTES
        if skip + self.nbytes > len(buffer.view) or skip % chunk.size:
            skip = 0
        view = buffer.view[skip : skip + self.nbytes]
        self._fill(view)
        if len(chunk.crcs) == 1:
            chunk.check_crc()  # before the target is changed; with several parts `finish` can do so only afterwards
        chunk.begin()
        return chunk.placements(self.start // chunk.size, torch.frombuffer(view, dtype=torch.uint8))

    def _fill(self, view: memoryview) -> None:
        chunk, source = self.chunk, self.chunk.framing.source
        if not chunk.is_one_run:
            size = chunk.size
            runs = chunk.stream.runs(self.start // size, self.stop // size)
            source.read_runs(self.file, [(chunk.base + at * size, count * size) for at, count in runs], view)
        elif not chunk.is_verified:
            source.read(self.file, chunk.offset_of(self.start), view)
        else:
            crc = 0

            # Called after each step of the read, while its bytes are still in the CPU's cache.
            def seen(part: memoryview) -> None:
                nonlocal crc
                crc = crc32(part, crc)

            source.read(self.file, chunk.offset_of(self.start), view, seen)
            self.set_crc(crc)

    def finish(self) -> None:
        """Count the part as done; the last one checks the CRC of the chunk. Callers take turns."""
        read = self.chunk.read
        if read.pending == 1:
            self.chunk.check_crc()
        read.pending -= 1


@dataclass(eq=False, slots=True)
class ObjectRun:
    """Objects that are neighbours in a file, and are decoded where they are read."""

    device: ClassVar = CPU

    objects: Sequence[ObjectRead]
    decode: Callable[[Sequence[ObjectRead]], None]
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.nbytes = sum(each.place.length for each in self.objects)

    @property
    def file(self) -> str:
        return self.objects[0].place.file

    def read(self, buffer: Buffer) -> list[Placement]:
        self.decode(self.objects)
        return []

    def finish(self) -> None:
        pass


ReadJob = CoalescedRead | ChunkPart | ObjectRun | BulkRead
SharedJobs = dict[Cell, list[ReadJob]]
"""The jobs of shared cells."""
