"""Reading items: from byte ranges of files, through their framing and CRC, to where they belong."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.lowlevel
import torch

from aiockpt.errors import AiockptError, CorruptCheckpointError, LoadError, printable, sanitize_error
from aiockpt.format.item.objects import ScalarDecoder, decode_object
from aiockpt.format.item.tensor_item import HEAD_BYTES, TAIL_BYTES, ItemParser, parse_tensor_item
from aiockpt.format.item.ziparchive import FramingError
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.layout import align_up
from aiockpt.reading.coalesced import CoalescedRead, batches
from aiockpt.reading.targets import check_memory
from aiockpt.reading.tensor_stream import ChunkRead, memory_of
from aiockpt.staging.pool import MappedMemory as MappedMemory
from aiockpt.staging.scatter import place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from aiockpt.core.threads import Workers
    from aiockpt.format.index import ItemRange, TensorItem
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import LoadOptions
    from aiockpt.reading.read_plan import ObjectRead, TensorRead
    from aiockpt.staging.host_cache import HostCache
    from aiockpt.staging.pool import Chunk, ChunkPool
    from aiockpt.staging.scatter import AcceleratorPlacer, Placement
    from aiockpt.storage.base import Source

LARGE_BYTES = 1 << 20
"""Items of this size and more are read on their own, straight to where they belong."""
SMALL_BYTES = 16 << 10
"""Items up to this size are read whole to fill a part of a state: looking for each part would take longer."""
PART_BYTES = 16 << 20
"""The most that one thread reads at a time, straight into place."""
BUFFER_BYTES = 8 << 20
"""The most that one thread reads into its buffer at a time."""
_RUN_BYTES = 1 << 20
"""The most that is read at a time of objects that are neighbours in a file."""
_RUN_GAP_BYTES = 4096
_PAGE_BYTES = 4096
_SETTLED_AT_ONCE = 16
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadTools:
    """What the engine lends to every load.

    Attributes:
        workers: the threads that read.
        memory: memory for new tensors.
        pool: chunks that the bytes for accelerators pass through.
        placer_for: gives who copies to an accelerator.
        streams: for each accelerator the stream that was the caller's at the call.
    """

    workers: Workers
    memory: HostCache
    pool: ChunkPool
    placer_for: Callable[[torch.device], AcceleratorPlacer]
    transforms: Sequence[Transform] = ()  # of the checkpointer; undone while reading
    streams: Mapping[torch.device, Any] = field(default_factory=dict)

    async def new(
        self, device: torch.device, forms: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> list[torch.Tensor]:
        """Make tensors on an accelerator, see `AcceleratorPlacer.new`."""
        return await self.placer_for(device).new(forms, self.streams.get(device))


class _Job(Protocol):
    """A piece of work: it fills a buffer, and says what is to be placed from it."""

    def __call__(self, buffer: memoryview, address: int) -> list[Placement]:
        """Read. Blocks."""


class ItemReader:
    """Reads items of one checkpoint, in a few threads.

    Args:
        source: the checkpoint's files.
        path: where it is, for messages.
        options: how to load.
        tools: what the engine lends.
        known: what stands in items that were looked into before; is added to.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        options: LoadOptions,
        tools: LoadTools,
        known: dict[ItemRange, TensorItem] | None = None,
    ) -> None:
        self._known = {} if known is None else known
        self._source = source
        self._path = path
        self._options = options
        self._tools = tools
        self._parser = ItemParser()
        self._scalars = ScalarDecoder()
        self._local = threading.local()

    async def read_objects(self, objects: Sequence[ObjectRead]) -> None:
        """Read and unpickle objects."""
        runs = _runs(objects)
        await self._each([functools.partial(self._hop, self._decode_run, run) for run in runs])

    async def prepare(self, reads: Sequence[TensorRead]) -> None:
        """Read the framing of those items that are not read as a whole, so that what is wrong there shows early."""
        made = [read for read in reads if self._source.comes_whole(read.chunk.place.file)]
        groups = [made[at : at + _SETTLED_AT_ONCE] for at in range(0, len(made), _SETTLED_AT_ONCE)]
        await self._each([functools.partial(self._hop, self._settle, group) for group in groups])
        unknown: list[TensorRead] = []
        for read in reads:
            read.item = read.item or read.chunk.item or self._known.get(read.chunk.place)
            if read.item is None and self._is_large(read):
                unknown.append(read)
        await self._each([functools.partial(self._hop, self._find_payload, read) for read in unknown])

    async def read(self, reads: Sequence[TensorRead]) -> None:
        """Read tensors to where they belong."""
        await self.prepare(reads)
        by_device: dict[torch.device, list[TensorRead]] = defaultdict(list)
        for read in reads:
            by_device[_CPU if read.target is None else read.target.device].append(read)
        jobs: list[Callable[[], Awaitable[None]]] = []
        for device, group in by_device.items():
            run = self._on_host if device == _CPU else functools.partial(self._on_device, device)
            most = BUFFER_BYTES
            if device != _CPU:
                most = min(most, max(_PAGE_BYTES, self._tools.pool.chunk_bytes - 2 * _PAGE_BYTES))
            small = [read for read in group if not self._is_large(read) and read.chunk.place.length <= most // 2]
            chosen = set(map(id, small))
            jobs += [
                functools.partial(
                    run, functools.partial(self._read_batch, batch), functools.partial(_batch_done, batch)
                )
                for batch in batches(small, most)
            ]
            for read in group:
                if id(read) not in chosen:
                    jobs += await self._stream_jobs(read, run, most)
        await self._each(jobs)
        self._known |= {read.chunk.place: read.item for read in reads if read.item and not read.chunk.item}

    async def _stream_jobs(
        self, read: TensorRead, run: Callable[..., Awaitable[None]], most: int
    ) -> list[Callable[[], Awaitable[None]]]:
        if read.item is None:
            await self._hop(self._find_payload, read)
        item = read.item
        if item is None or not item.nbytes:
            _finish_empty(read)
            return []
        memory = None
        if read.target is None:
            read.memory = self._tools.memory.take(item.nbytes)
            memory = memory_of(read.memory)
        whole = self._source.comes_whole(read.chunk.place.file)
        stream = ChunkRead(read, item, memory, align_up(item.nbytes, _PAGE_BYTES) if whole else PART_BYTES)
        if not stream.is_direct:
            stream = ChunkRead(read, item, memory, most)
        read.pending = stream.parts
        done = functools.partial(self._part_done, stream)
        if stream.is_direct:
            return [
                functools.partial(self._on_host, functools.partial(self._read_direct, stream, number), done)
                for number in range(stream.parts)
            ]
        return [
            functools.partial(run, functools.partial(self._read_part, stream, number), done)
            for number in range(stream.parts)
        ]

    # --- running ----------------------------------------------------------------------------------

    async def _each(self, jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Run jobs, several at a time, each of so many tasks taking the next."""
        pending = iter(jobs)

        async def work() -> None:
            for job in pending:
                await anyio.lowlevel.checkpoint_if_cancelled()  # a hop to a thread is never left half way
                await job()

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._tools.workers.count, len(jobs))):
                    tasks.start_soon(work)
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, LoadError):
                sanitize_error(error)
            if isinstance(error, LoadError) or not isinstance(error, Exception):
                raise error from error.__cause__
            reason = str(error) if isinstance(error, AiockptError) else f"{type(error).__name__}: {error}"
            raise LoadError(printable(f"loading {self._path} failed: {reason}")) from error

    async def _hop(self, function: Callable[..., None], *args: Any) -> None:
        await self._tools.workers.run(function, *args)

    async def _on_host(self, job: _Job, done: Callable[[], None]) -> None:
        """Run a job whose bytes stay in host memory: one thread reads and places them."""
        await self._tools.workers.run(self._read_and_place, job)
        done()

    def _read_and_place(self, job: _Job) -> None:
        mapping: MappedMemory | None = getattr(self._local, "mapping", None)
        if mapping is None:
            mapping = self._local.mapping = MappedMemory(BUFFER_BYTES + 2 * _PAGE_BYTES)
        for placement in job(mapping.view, mapping.address):
            place(placement)

    async def _on_device(self, device: torch.device, job: _Job, done: Callable[[], None]) -> None:
        """Run a job whose bytes go to an accelerator, through a chunk that its copies read."""
        placer = self._tools.placer_for(device)
        lease = await self._tools.pool.acquire()
        try:
            chunk: Chunk = lease.chunk
            placements = await self._tools.workers.run(job, chunk.view, chunk.address)
            with anyio.CancelScope(shield=True):  # the chunk goes back: nothing may still be reading it
                copies = await placer.issue(placements, chunk)
                await copies.wait()
        finally:
            lease.release()
        done()

    # --- in threads -------------------------------------------------------------------------------

    def _read_batch(self, batch: CoalescedRead, buffer: memoryview, address: int) -> list[Placement]:
        verify = self._options.verify
        return batch.read_into(self._source, buffer, address, self._parse_small, self._check_crc, verify=verify)

    def _read_direct(self, stream: ChunkRead, number: int, _buffer: memoryview, _address: int) -> list[Placement]:
        _check_target(stream.read)
        stream.read.begun = True
        stream.read_direct(self._source, number, verify=self._options.verify)
        return []

    def _read_part(self, stream: ChunkRead, number: int, buffer: memoryview, _address: int) -> list[Placement]:
        placements = stream.read_buffered(self._source, number, buffer, verify=self._options.verify)
        if stream.parts == 1 and not stream.crc_matches(verify=self._options.verify):
            raise self._damaged(stream.read)  # before anything of it is placed
        _check_target(stream.read)
        stream.read.begun = True
        return placements

    def _part_done(self, stream: ChunkRead) -> None:
        read = stream.read
        if read.pending == 1 and not stream.crc_matches(verify=self._options.verify):
            raise self._damaged(read)
        read.pending -= 1

    def _decode_run(self, run: Sequence[ObjectRead]) -> None:
        """Read objects that are neighbours in a file at once."""
        for read in run:
            read.place = self._source.settled(read.place)
        begin, end = run[0].place.offset, max(read.place.offset + read.place.length for read in run)
        data = memoryview(self._bytes(run[0].place, 0, end - begin))
        for read in run:
            start = read.place.offset - begin
            blob = data[start : start + read.place.length]
            scalar = self._scalars.decode(blob)
            if scalar is None:
                self._decode(read, bytes(blob))
            else:
                (read.value,) = scalar

    def _decode(self, read: ObjectRead, blob: bytes) -> None:
        options = self._options
        try:
            read.value = decode_object(
                read.name,
                blob,
                safe_globals=options.safe_globals,
                trust=options.trust,
                map_location=options.map_location,
                member_of=read.member_of,
            )
        except LoadError as exc:
            raise type(exc)(f"{self._path}/{read.place.file}: {exc}") from exc

    def _settle(self, reads: Sequence[TensorRead]) -> None:
        """Find out how long items are, where that shows only when they are read."""
        for read in reads:
            read.chunk = read.chunk._replace(place=self._source.settled(read.chunk.place))

    def _find_payload(self, read: TensorRead) -> None:
        """Read the framing of an item."""
        place = read.chunk.place
        head = self._bytes(place, 0, min(HEAD_BYTES, place.length))
        tail_at = max(0, place.length - TAIL_BYTES)
        tail = self._bytes(place, tail_at, place.length - tail_at)

        def fetch(offset: int, size: int) -> bytes:
            if offset + size <= len(head):
                return head[offset : offset + size]
            if offset >= tail_at:
                return tail[offset - tail_at :][:size]
            return self._bytes(place, offset, max(0, min(size, place.length - offset, 1 << 20)))

        read.item = self._parsed(read, parse_tensor_item, place.length, fetch)

    def _parse_small(self, read: TensorRead, view: memoryview) -> TensorItem:
        return self._parsed(read, self._parser.parse, view)

    def _parsed(self, read: TensorRead, parse: Callable[..., TensorItem], *args: Any) -> TensorItem:
        where = f"{self._path}/{read.chunk.place.file}"
        try:
            parsed = parse(*args)
        except FramingError as exc:
            raise CorruptCheckpointError(f"{where}: the item of {read.name} is damaged: {exc}") from exc
        if parsed.dtype != read.dtype or parsed.shape != read.chunk.sizes:
            raise CorruptCheckpointError(
                f"{where}: {read.name} is {parsed.dtype} {parsed.shape} in its item but "
                f"{read.dtype} {read.chunk.sizes} in {METADATA_NAME}"
            )
        return parsed

    def _check_crc(self, read: TensorRead, item: TensorItem, crc: int) -> None:
        if crc != item.crc:
            read.item = item
            raise self._damaged(read)

    def _damaged(self, read: TensorRead) -> CorruptCheckpointError:
        place, item = read.chunk.place, read.item
        at, nbytes = (place.offset + item.payload_offset, item.nbytes) if item else (place.offset, place.length)
        return CorruptCheckpointError(
            f"{self._path}/{place.file}: the bytes of {read.name} (at offset {at}, {nbytes} bytes) do not match "
            "their CRC: they changed since they were written. Use an older checkpoint."
        )

    def _bytes(self, place: ItemRange, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._source.read(place.file, place.offset + offset, memoryview(data))
        return bytes(data)

    @staticmethod
    def _is_large(read: TensorRead) -> bool:
        if read.selections is None:
            return read.chunk.place.length >= LARGE_BYTES
        return not read.fills or read.chunk.place.length >= SMALL_BYTES


def _check_target(read: TensorRead) -> None:
    """Check that the memory of the caller's tensor is still there; it was when the load was planned."""
    if read.fills and read.target is not None:
        check_memory(read.name, read.target)


def _runs(objects: Sequence[ObjectRead]) -> list[list[ObjectRead]]:
    """Group objects that lie close together in a file; each large one is on its own."""
    runs: list[list[ObjectRead]] = []
    file, begin, end = "", 0, 0
    for read in sorted(objects, key=lambda read: (read.place.file, read.place.offset)):
        place = read.place
        stop = place.offset + place.length
        if runs and place.file == file and place.offset <= end + _RUN_GAP_BYTES and stop - begin <= _RUN_BYTES:
            runs[-1].append(read)
            end = max(end, stop)
        else:
            runs.append([read])
            file, begin, end = place.file, place.offset, stop
    return runs


def _batch_done(batch: CoalescedRead) -> None:
    for read in batch.reads:
        read.pending = 0


def _finish_empty(read: TensorRead) -> None:
    read.pending = 0
    if read.target is None:
        read.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
