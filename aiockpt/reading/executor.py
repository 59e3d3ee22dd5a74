"""The executor of loads: reads objects and tensors with the engine's threads, into new memory or into targets."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.lowlevel
import torch

from aiockpt.core import pages
from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.machine import BLOCK_BYTES, cores
from aiockpt.core.threads import run_each
from aiockpt.errors import AiockptError, LoadError, printable, sanitize_error
from aiockpt.format.item.objects import decode_object
from aiockpt.format.item.tensor_item import parse_tensor_item
from aiockpt.planning.collective.sharing import CELL_BYTES, SMALL_CELL_BYTES, SMALL_ITEMS, Cell
from aiockpt.planning.layout import align_up
from aiockpt.reading.jobs import (
    CPU,
    ChunkRead,
    FramingReader,
    ObjectRun,
    ReadJob,
    SharedJobs,
    coalesce,
    memory_of,
    parse_checked,
    view_of,
)
from aiockpt.reading.read_plan import NewTensor, ObjectRead, ReadPlan, TensorRead, annotate_partial_load
from aiockpt.reading.sharing import (
    SharedReads,
    needs_of_items,
    needs_of_payloads,
)
from aiockpt.snapshot.optimizer_hooks import count_change
from aiockpt.staging.pool import Chunk, ChunkPool, MappedMemory
from aiockpt.staging.runtime import is_host
from aiockpt.staging.scatter import AcceleratorPlacer, place
from aiockpt.telemetry.progress import ReadReport

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.format.index import ItemRange, StoredChunk, TensorEntry, TensorItem
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import LoadOptions
    from aiockpt.planning.collective.sharing import Need
    from aiockpt.reading.bulk import SmallRows
    from aiockpt.reading.decoded import DecodedSource, Held
    from aiockpt.reading.target_plan import TargetPlan
    from aiockpt.staging.host_cache import HostCache
    from aiockpt.staging.scatter import Placement
    from aiockpt.storage.base import Source

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""Items of this size and more are read on their own, straight into place."""
SMALL_BYTES = 16 << 10
"""Smaller items are read whole even to fill a part of a target: one read costs less than finding the part's bytes."""
PART_BYTES = 16 << 20
"""The most that one thread reads straight into place before it takes the next job."""
BUFFER_BYTES = 8 << 20
"""The size of a thread's buffer."""
_CHECKED_BYTES = 1 << 20  # of what is only checked, read at once: each thread has that much in memory
_RUN_BYTES = 1 << 20  # of neighbouring objects, read at once
_RUN_GAP_BYTES = 4096
_LENGTHS_AT_ONCE = 16
_FRAMINGS_AT_ONCE = 32
_LOOKS = 8  # at a file, to find out whether it is in the page cache
_TURN_S = 0.02  # of a thread with the jobs of one load; a turn for each job would cost a hop to the loop and back


@dataclass(frozen=True, slots=True)
class LoadTools:
    """The engine's resources for loads."""

    workers: Workers
    memory: HostCache  # for new tensors
    pool: ChunkPool  # staging memory, for accelerators
    placer_for: Callable[[torch.device], AcceleratorPlacer]
    transforms: Sequence[Transform] = ()  # of the checkpointer; undone while reading
    streams: Mapping[torch.device, Any] = field(default_factory=dict)  # the caller's current stream at the call
    report: ReadReport = field(default_factory=ReadReport)  # of the load

    async def begin(self, ready: Mapping[torch.device, torch.Event]) -> None:
        """Order all copies to accelerators after the caller's events."""
        for device, event in ready.items():
            await self.placer_for(device).begin(event)


@dataclass(eq=False)
class ReadExecutor:
    """Executes reads of one checkpoint with the engine's threads."""

    _source: DecodedSource
    _path: str
    _options: LoadOptions
    _tools: LoadTools
    _known: dict[ItemRange, TensorItem] = field(default_factory=dict)  # cache of parsed items
    shared: SharedReads | None = None  # with other ranks

    def __post_init__(self) -> None:
        self._framing = FramingReader(self._source, self._path, self._options.verify)
        self._local = threading.local()
        self._lock = threading.Lock()  # of the reads' counters, and the report

    async def execute(self, plan: ReadPlan, phase: int = 0) -> None:
        """Allocate the new tensors of a plan, and read all that it has into place.

        ``phase``: of the load, as in what is `shared`.
        """
        if plan.mapped:
            plan.values |= await self._tools.workers.run(map_tensors, self._source, self._path, plan.mapped)
        if self.shared is None and plan.objects:  # first: they may be refused
            await self.fill(ReadPlan(objects=plan.objects), phase)
            plan = replace(plan, objects=[])
        await self.allocate(plan)
        await self.fill(plan, phase)

    def _cell_of_item(self, phase: int, place: ItemRange) -> Cell | None:
        """Return the cell of an item that is read whole, if that is shared."""
        if self.shared is None or place.length > SMALL_CELL_BYTES:
            return None
        cell = Cell(phase, place.file, SMALL_ITEMS, place.offset // SMALL_CELL_BYTES)
        return cell if self.shared.has(cell) else None

    async def needs(self, objects: Sequence[ObjectRead], reads: Sequence[TensorRead], phase: int) -> list[Need]:
        """Return what other ranks may read for this one; the framing of the reads is known then."""
        await self.prepare(reads)
        return await self._tools.workers.run(self._needs, objects, reads, phase)

    def _needs(self, objects: Sequence[ObjectRead], reads: Sequence[TensorRead], phase: int) -> list[Need]:
        groups = [self._by_size(group, device)[:2] for device, group in _by_device(reads).items()]
        places = [*(read.chunk.place for few, _ in groups for read in few), *(each.place for each in objects)]
        is_virtual = self._source.is_virtual
        small = [each for each in places if each.length <= SMALL_CELL_BYTES and not is_virtual(each.file)]
        large = [read for _, many in groups for read in many]
        return needs_of_items(phase, small) + needs_of_payloads(phase, large, self._source)

    async def fill(self, plan: ReadPlan | TargetPlan, phase: int = 0) -> None:
        """Read objects, and tensors into place, which may be on several devices; see `execute`."""
        # The writes bypass autograd: count them in the version counters, so that autograd notices them, and so does a
        # save that is copying these tensors now. Before and after: such a save may begin or end during the load.
        count_change(plan.filled)
        reads = plan.reads
        try:
            await self._read(plan.objects, reads, plan.small, phase)
        except LoadError as exc:
            annotate_partial_load(exc, reads, plan.small)
            raise
        finally:
            count_change(plan.filled)

    async def prepare(self, reads: Sequence[TensorRead]) -> None:
        """Read the framing of items that are not read whole, so that damage there shows before a target changes."""
        virtual = [read for read in reads if self._source.is_virtual(read.chunk.place.file)]
        groups = [virtual[at : at + _LENGTHS_AT_ONCE] for at in range(0, len(virtual), _LENGTHS_AT_ONCE)]
        await self._in_threads(self._set_lengths, groups)
        unknown: list[TensorRead] = []
        for read in reads:
            read.item = read.item or read.chunk.item or self._known.get(read.chunk.place)
            if read.item is None and _is_large(read):
                unknown.append(read)
        await self._in_threads(self._framing.locate, _neighbours(unknown, self._tools.workers.count))

    async def locate(self, read: TensorRead) -> TensorItem:
        """Return the item of a read; read its framing if `prepare` left that for later."""
        if read.item is None:
            await self._tools.workers.run(self._framing.locate, [read])
        return cast("TensorItem", read.item)

    async def _read(
        self, objects: Sequence[ObjectRead], reads: Sequence[TensorRead], small: SmallRows | None, phase: int
    ) -> None:
        await self.prepare(reads)
        shared: SharedJobs = {}
        alone = self._object_jobs(objects, phase, shared)
        if small is not None:
            alone += small.jobs(self._source, self._path, verify=self._options.verify)
        alone += await self._jobs_of(reads, phase, shared)
        report = self._tools.report
        report.objects += len(objects)
        report.tensors += len(reads) + (0 if small is None else len(small))
        report.expect(sum(job.nbytes for job in itertools.chain(alone, *shared.values())))
        if self.shared is not None:
            await self._each(lambda together: together.run(phase, shared, self), [self.shared], 1)
            alone += itertools.chain(*shared.values())
        await self._run_in_turns([job for job in alone if job.device == CPU])
        on_devices = [job for job in alone if job.device != CPU]
        with self._tools.workers.at_least(min(self._source.most_reads, len(on_devices))) as count:
            await self._each(self._read_to_device, on_devices, count)
        self._known |= {read.chunk.place: read.item for read in reads if read.item and not read.chunk.item}

    def _object_jobs(self, objects: Sequence[ObjectRead], phase: int, shared: SharedJobs) -> list[ReadJob]:
        """Return the jobs of objects; add the shared ones."""
        alone: list[ReadJob] = []
        by_cell: defaultdict[Cell | None, list[ObjectRead]] = defaultdict(list)
        for read in objects:
            by_cell[self._cell_of_item(phase, read.place)].append(read)
        for cell, group in by_cell.items():
            jobs = alone if cell is None else shared.setdefault(cell, [])
            jobs += [ObjectRun(run, self._decode_run) for run in _runs(group)]
        return alone

    async def _jobs_of(self, reads: Sequence[TensorRead], phase: int, shared: SharedJobs) -> list[ReadJob]:
        """Return the jobs of tensors; add the shared ones."""
        alone: list[ReadJob] = []
        for device, group in _by_device(reads).items():
            few, large, most = self._by_size(group, device)
            by_cell: defaultdict[Cell | None, list[TensorRead]] = defaultdict(list)
            for read in few:
                by_cell[self._cell_of_item(phase, read.chunk.place)].append(read)
            for cell, each in by_cell.items():
                jobs = alone if cell is None else shared.setdefault(cell, [])
                jobs += coalesce(each, most, self._framing, device)
            for read in large:
                await self._add_chunk_jobs(read, most, phase, alone, shared)
        return alone

    def _by_size(
        self, reads: Sequence[TensorRead], device: torch.device
    ) -> tuple[list[TensorRead], list[TensorRead], int]:
        """Return the small reads for a device, the large ones, and the most bytes of a job there."""
        most = BUFFER_BYTES
        if device != CPU:  # a job has to fit into one chunk of the pool, with room to align both ends
            most = min(most, max(BLOCK_BYTES, self._tools.pool.chunk_bytes - 2 * BLOCK_BYTES))
        small: list[TensorRead] = []
        large: list[TensorRead] = []
        for read in reads:
            is_small = not _is_large(read) and read.chunk.place.length <= most // 2
            (small if is_small else large).append(read)
        return small, large, most

    async def _add_chunk_jobs(
        self, read: TensorRead, most: int, phase: int, alone: list[ReadJob], shared: SharedJobs
    ) -> None:
        """Add the jobs that read one stored chunk in parts."""
        item = await self.locate(read)
        if not item.nbytes:
            read.pending = 0
            if read.target is None:
                read.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        memory, is_fresh = None, False
        if read.target is None and not read.only_checked:
            read.memory, is_fresh = self._tools.memory.take(item.nbytes)
            memory = memory_of(read.memory)
        place, together = read.chunk.place, self.shared
        # A virtual file is read in one part: decoding always starts at its beginning.
        is_virtual = self._source.is_virtual(place.file)
        first = Cell(phase, place.file, place.offset + item.payload_offset, 0)
        cells = (first._replace(number=number) for number in range(-(-item.nbytes // CELL_BYTES)))
        grid_bytes = CELL_BYTES if together is not None and any(map(together.has, cells)) else 0
        chunk = ChunkRead(
            read,
            item,
            memory,
            self._framing,
            direct_bytes=align_up(item.nbytes, BLOCK_BYTES) if is_virtual else PART_BYTES,
            buffer_bytes=min(most, _CHECKED_BYTES) if read.only_checked else most,
            is_fresh=is_fresh,
            grid_bytes=grid_bytes,
        )
        parts = chunk.parts
        read.pending = len(parts)
        for part in parts:
            jobs = alone
            if together is not None and together.has(cell := first._replace(number=part.block)):
                jobs = shared.setdefault(cell, [])
            jobs.append(part)

    async def allocate(self, plan: ReadPlan) -> None:
        """Allocate the new tensors that are not read into memory as they are stored; once."""
        by_device: defaultdict[torch.device, list[NewTensor]] = defaultdict(list)
        for new in plan.new:
            if not new.reads and new.tensor is None:
                by_device[new.device].append(new)
        for device, wanted in by_device.items():
            forms = [(new.shape, new.dtype) for new in wanted]
            if is_host(device):
                made = [_new_tensor(self._tools, shape, dtype) for shape, dtype in forms]
            elif device.type == "meta":
                made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
            else:
                # The caching allocator frees memory in order with the stream it was allocated in: the caller's.
                made = await self._tools.placer_for(device).new(forms, self._tools.streams.get(device))
            for new, tensor in zip(wanted, made, strict=True):
                new.read_into(tensor)

    # --- running ----------------------------------------------------------------------------------

    async def _in_threads(self, function: Callable[[T], None], items: Sequence[T]) -> None:
        with self._tools.workers.at_least(min(self._source.most_reads, len(items))) as count:
            await self._each(lambda item: self._tools.workers.run(function, item), items, count)

    async def _each(self, function: Callable[[T], Awaitable[object]], items: Sequence[T], tasks: int) -> None:
        """Run `run_each`; every failure raises a LoadError."""
        try:
            await run_each(function, items, tasks)
        except LoadError as exc:
            sanitize_error(exc)
            raise
        except Warning:  # an error only because the program makes errors of warnings
            raise
        except Exception as exc:
            reason = str(exc) if isinstance(exc, AiockptError) else f"{type(exc).__name__}: {exc}"
            raise LoadError(printable(f"loading {self._path} failed: {reason}")) from exc

    async def _run_in_turns(self, jobs: Sequence[ReadJob]) -> None:
        """Run jobs for host memory; each thread takes one after the other, and regularly lets other loads have it."""
        if not jobs:
            return
        pending, ended = deque(jobs), anyio.Event()
        workers = self._tools.workers

        async def work() -> None:
            while await workers.run(self._take_turn, pending):
                await anyio.lowlevel.checkpoint_if_cancelled()
            ended.set()

        async def watch() -> None:
            try:
                await ended.wait()
            finally:  # a thread can't be cancelled; without further jobs its turn ends with the one that runs
                pending.clear()

        with workers.at_least(min(self._source.most_reads, len(jobs))) as count:
            readers = min(count, len(jobs))
            if readers > cores() and await workers.run(self._is_cached, {job.file for job in jobs}):
                readers = cores()  # none of them waits for a disk: more would only take the GIL from each other
            tasks = [watch, *[work] * readers]
            await self._each(lambda task: task(), tasks, len(tasks))

    def _is_cached(self, files: Iterable[str]) -> bool:
        """Return whether the page cache seems to have all of some files."""
        sizes = self._source.files
        places = ((name, sizes[name] * number // _LOOKS) for name in files if name in sizes for number in range(_LOOKS))
        return all(self._source.is_cached(name, offset) for name, offset in places)

    def _take_turn(self, pending: deque[ReadJob]) -> bool:
        """Run jobs for a while; return whether some may be left."""
        until = time.monotonic() + _TURN_S
        while True:
            try:
                job = pending.popleft()
            except IndexError:
                return False
            self._read_and_place(job)
            if time.monotonic() > until:
                return True

    def _read_and_place(self, job: ReadJob) -> None:
        """Run a job in one thread, with the thread's own buffer."""
        begin = time.perf_counter()
        buffer: MappedMemory | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = MappedMemory(BUFFER_BYTES + 2 * BLOCK_BYTES)
        for placement in job.read(buffer):
            place(placement)
        self.finish(job, begin)

    # --- for shared reads -----------------------------------------------------------------------------------

    def place(self, held: Held, jobs: Sequence[ReadJob]) -> list[ReadJob]:
        """Run jobs whose bytes are in memory; return those for devices. Blocks."""
        with self._source.holding(held):
            for job in jobs:
                if job.device == CPU:
                    self._read_and_place(job)
        return [job for job in jobs if job.device != CPU]

    async def place_on_devices(self, held: Held, jobs: Sequence[ReadJob]) -> None:
        """Run jobs for devices whose bytes are in memory."""
        for job in jobs:
            await self._read_to_device(job, held)

    def finish(self, job: ReadJob, begin: float | None = None) -> None:
        """Count a job as done, whose bytes are in their place. Blocks for a moment."""
        # The parts of one tensor count down the same counter, and the last one checks the CRC.
        with self._lock:
            job.finish()
            name = "objects" if isinstance(job, ObjectRun) else "read"
            self._tools.report.did_read(begin or time.perf_counter(), job.nbytes, job.file, name)

    def _read_job(self, job: ReadJob, chunk: Chunk, held: Held | None) -> list[Placement]:
        with self._source.holding(held):
            return job.read(chunk)

    async def _read_to_device(self, job: ReadJob, held: Held | None = None) -> None:
        """Run a job through a chunk of staging memory, from which the device copies."""
        placer = self._tools.placer_for(job.device)
        begin = time.perf_counter()
        lease = await self._tools.pool.acquire()
        try:
            chunk: Chunk = lease.chunk
            placements = await self._tools.workers.run(self._read_job, job, chunk, held)
            with anyio.CancelScope(shield=True):  # the chunk is reused: no copy may still be reading it
                copies = await placer.issue(placements, chunk)
                await copies.wait()
        finally:
            lease.release()
        self.finish(job, begin)

    # --- in threads -------------------------------------------------------------------------------

    def _decode_run(self, run: Sequence[ObjectRead]) -> None:
        """Read objects that are neighbours in a file at once."""
        for read in run:
            read.place = self._source.exact_range(read.place)
        begin, end = run[0].place.offset, max(read.place.offset + read.place.length for read in run)
        data = memoryview(self._source.read_bytes(run[0].place.file, begin, end - begin))
        for read in run:
            start = read.place.offset - begin
            self._decode(read, bytes(data[start : start + read.place.length]))

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

    def _set_lengths(self, reads: Sequence[TensorRead]) -> None:
        """Set the exact length of virtual files, which some have to be decoded for."""
        for read in reads:
            read.chunk = read.chunk._replace(place=self._source.exact_range(read.chunk.place))


def _by_device(reads: Sequence[TensorRead]) -> dict[torch.device, list[TensorRead]]:
    found: dict[torch.device, list[TensorRead]] = {}
    for read in reads:
        found.setdefault(CPU if read.target is None else read.target.device, []).append(read)
    return found


def _is_large(read: TensorRead) -> bool:
    """Return whether an item is read on its own instead of whole and together with its neighbours."""
    if read.selections is None:
        return read.chunk.place.length >= LARGE_BYTES
    return not read.fills or read.chunk.place.length >= SMALL_BYTES


def _neighbours(reads: Sequence[TensorRead], threads: int) -> list[list[TensorRead]]:
    """Group items of the same file for some threads."""
    most = min(_FRAMINGS_AT_ONCE, -(-len(reads) // threads))
    groups: list[list[TensorRead]] = []
    for _, found in itertools.groupby(
        sorted(reads, key=lambda read: read.chunk.place[:2]), lambda read: read.chunk.place.file
    ):
        of_file = list(found)
        groups += [of_file[at : at + most] for at in range(0, len(of_file), most)]
    return groups


def _runs(objects: Sequence[ObjectRead]) -> list[list[ObjectRead]]:
    """Group objects that lie close together in a file; each large one is on its own."""
    runs: list[list[ObjectRead]] = []
    file, begin, end = "", 0, 0
    for read in sorted(objects, key=lambda read: read.place[:2]):
        place = read.place
        stop = place.offset + place.length
        if runs and place.file == file and place.offset <= end + _RUN_GAP_BYTES and stop - begin <= _RUN_BYTES:
            runs[-1].append(read)
            end = max(end, stop)
        else:
            runs.append([read])
            file, begin, end = place.file, place.offset, stop
    return runs


def _new_tensor(tools: LoadTools, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a host tensor; a large one from the cache of memory whose pages are already mapped."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < 1 << 20:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = tools.memory.take(nbytes).tensor
    pages.advise(memory.data_ptr(), nbytes)
    return memory.view(dtype).view(shape)


# --- mapping --------------------------------------------------------------------------------------------


def map_tensors(source: Source, path: str, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Return tensors by name whose files are mapped copy-on-write, and which are read when they are first used. Blocks.

    One of several chunks, or at an odd address, is a copy.
    """
    mapped = functools.cache(source.map)

    def view(name: str, chunk: StoredChunk, dtype: torch.dtype) -> torch.Tensor:
        place = chunk.place

        def fetch(offset: int, size: int) -> bytes:
            return mapped(place.file)[place.offset + offset : place.offset + min(offset + size, place.length)]

        item = chunk.item or parse_checked(path, TensorRead(name, dtype, chunk), parse_tensor_item, place.length, fetch)
        if not item.nbytes:
            return torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="cpu")
        at = place.offset + item.payload_offset
        memory = torch.frombuffer(mapped(place.file), dtype=torch.uint8, count=item.nbytes, offset=at)
        if memory.data_ptr() % item.dtype.itemsize:  # vector instructions fault on values at odd addresses
            memory = memory.clone()
        return view_of(memory, item, lazily=True)

    tensors: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if len(entry.chunks) == 1:
            tensors[name] = view(name, entry.chunks[0], entry.dtype).to(entry.dtype)
            continue
        whole = tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for chunk in entry.chunks:
            region = whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
            region.copy_(view(name, chunk, entry.dtype))
    return tensors
