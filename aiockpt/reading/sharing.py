"""Shared reads: one rank reads what several need, and sends it to the others while all put it into place.

A rank counts on nothing from another one: what it is not sent, because that one has failed or is silent, it reads
itself. Each rank checks the CRCs of the items that it gets whole, wherever the bytes come from.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio
import anyio.lowlevel
from isal.isal_zlib import crc32

from aiockpt.coordination.link import LinkBrokenError
from aiockpt.coordination.wires import Arena, MemoryWire
from aiockpt.core.dataclasses import dataclass
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.format.index import TensorEntry
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.planning.collective.sharing import CELL_BYTES, SMALL_CELL_BYTES, SMALL_ITEMS, Cell, Need, Share
from aiockpt.planning.ranges import as_stream
from aiockpt.reading.decoded import Held
from aiockpt.reading.jobs import ChunkPart, ReadJob, SharedJobs, select_item

if TYPE_CHECKING:
    from aiockpt.coordination.wires import Head, Wire, Wires
    from aiockpt.core.threads import Workers
    from aiockpt.format.index import Index, ItemRange
    from aiockpt.reading.decoded import DecodedSource, DecodedStream
    from aiockpt.reading.read_plan import TensorRead

NEW, FILLS = 0, 1
"""The phases of a load: first new values are read, then tensors of a target are filled."""

_BUFFER_BYTES = CELL_BYTES + 2 * BLOCK_BYTES  # to begin anywhere in a page, with something behind it
_MOST_READ = 16
"""Cells that are read or sent at once; each may have a buffer."""
_MOST_READ_NEAR = 8
"""The same, if other ranks of this host copy from the buffers: to fault them in takes as long as to copy them often."""
_MOST_RECEIVED = 4

logger = logging.getLogger("aiockpt")


# --- needs --------------------------------------------------------------------------------------------------


def needs_of_items(phase: int, places: Sequence[ItemRange]) -> list[Need]:
    """Return the needs of small items that are read whole, one for each cell."""
    found: dict[tuple[str, int], Need] = {}
    for file, begin, length in dict.fromkeys(place[:3] for place in places):  # tied ones are read once
        key, end = (file, begin // SMALL_CELL_BYTES), begin + length
        need = found.get(key)
        if need is not None:
            begin, end, length = min(begin, need.begin), max(end, need.end), length + need.nbytes
        found[key] = Need(phase, file, SMALL_ITEMS, begin, end, min(length, end - begin))
    return list(found.values())


def needs_of_payloads(phase: int, reads: Sequence[TensorRead], source: DecodedSource) -> list[Need]:
    """Return the need of each read of a large item whose framing is known."""
    found: list[Need] = []
    for read in reads:
        item = read.item
        if item is None or not item.nbytes or 0 in read.chunk.sizes:
            continue
        stream, size = as_stream((item.nbytes,), (1,), 0), 1
        if read.target is not None:
            part = select_item(item, read.selections)
            stream, size = as_stream(part.shape, part.stride, part.storage_offset), item.dtype.itemsize
        file = read.chunk.place.file
        # To find out how long an item is, each rank has to decode it.
        if stream.is_increasing and (not source.is_virtual(file) or source.items[file].is_exact):
            base = read.chunk.place.offset + item.payload_offset
            begin, end = (base + stream.at(number) * size for number in (0, stream.count - 1))
            found.append(Need(phase, file, base, begin, end + size, stream.count * size, source.is_virtual(file)))
    return found


def hash_of(index: Index) -> int:
    """Return a hash of the places of all items and of their CRCs."""
    entries = index.entries
    if isinstance(entries, IndexedEntries):
        found = crc32("\n".join(entries.files).encode())
        for column in (entries.file_of, entries.offset_of, entries.length_of, entries.crc_of):
            found = crc32(column.tobytes(), found)
        return found
    places = [each.chunks if isinstance(each, TensorEntry) else each for each in entries.values()]
    return crc32(repr(places).encode("utf-8", "surrogatepass"))


# --- moving bytes -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Lent:
    """Memory for a cell."""

    number: int
    offset: int  # where it begins in the arena
    view: memoryview
    is_lost: bool = False  # another process may still read it


class _CellBuffers:
    """Buffers for cells. From any thread."""

    def __init__(self, count: int, *, is_shared: bool = False) -> None:
        self.arena = Arena(count * _BUFFER_BYTES, is_shared=is_shared)
        self._free: queue.LifoQueue[int] = queue.LifoQueue()  # the last one is in the processor's cache
        for number in reversed(range(count)):
            self._free.put(number)

    def take(self, begin: int, end: int) -> _Lent:
        """Return memory for these bytes of a file, at the same offset in its page, as O_DIRECT requires. Blocks."""
        number = self._free.get()
        offset = number * _BUFFER_BYTES + begin % BLOCK_BYTES
        return _Lent(number, offset, self.arena.view[offset : offset + end - begin])

    def give_back(self, lent: _Lent | None) -> None:
        if lent is not None and not lent.is_lost:
            self._free.put(lent.number)


class _ForDevices(NamedTuple):
    """A cell whose bytes are in memory, but not yet on the devices that need them."""

    held: Held
    jobs: list[ReadJob]
    lent: _Lent | None


class CellReader(Protocol):
    """Carries out the jobs of a load whose bytes have come; see `aiockpt.reading.executor`."""

    def place(self, held: Held, jobs: Sequence[ReadJob]) -> list[ReadJob]: ...
    async def place_on_devices(self, held: Held, jobs: Sequence[ReadJob]) -> None: ...
    def finish(self, job: ReadJob) -> None: ...


@dataclass(eq=False)
class SharedReads:
    """A rank's part in the shared reads of one load."""

    rank: int
    shares: Mapping[Cell, Share]  # that it takes part in, by cell
    wires: Wires
    source: DecodedSource
    workers: Workers

    def __post_init__(self) -> None:
        near = sum(isinstance(wire, MemoryWire) for wire in self.wires.outbound.values())
        self._is_shared = near > 0  # with processes of this host
        self._most_read = min(self.source.most_reads or self.workers.count, _MOST_READ_NEAR if near else _MOST_READ)
        # Apart: if sending could wait for what is received, two ranks could wait for each other. A process that hangs
        # takes all those with it that it may still read; what is not used has no memory.
        self._to_read = _CellBuffers(self._most_read * (1 + near), is_shared=self._is_shared)
        self._to_receive = _CellBuffers(_MOST_RECEIVED)

    def has(self, cell: Cell) -> bool:
        """Return whether this rank may get a cell by `run`."""
        share = self.shares.get(cell)
        return share is not None and (share.reader == self.rank or share.reader in self.wires.inbound)

    def close(self) -> None:
        """Release what it has. Idempotent."""
        self.wires.close()
        self._to_read.arena.close()
        self._to_receive.arena.close()

    async def run(self, phase: int, jobs: SharedJobs, executor: CellReader) -> None:
        """Get all cells of a phase, and carry out their jobs.

        Removes these from ``jobs``; those that stay are of cells that did not come.
        """
        mine: list[Share] = []
        theirs: defaultdict[int, dict[int, Share]] = defaultdict(dict)
        for share in dict.fromkeys(self.shares.values()):
            if share.cells[0].phase == phase and share.reader == self.rank:
                mine.append(share)
            elif share.cells[0].phase == phase and share.reader in self.wires.inbound:
                theirs[share.reader][share.number] = share
        groups = [list(group) for _, group in itertools.groupby(mine, lambda share: self._ordered(share) or share)]
        pending, running = iter(groups), len(theirs) + min(self._most_read, len(groups))
        over = anyio.Event()
        if not running:
            return

        async def count_down(work: Callable[..., Awaitable[None]], *args: object) -> None:
            nonlocal running
            await work(*args, jobs, executor)
            running -= 1
            if not running:
                over.set()

        async def watch() -> None:
            try:
                await over.wait()
            except BaseException:  # threads that wait for a wire can't be cancelled
                self.wires.end()
                raise

        # Each rank that reads has a thread that waits for it.
        with self.workers.at_least(running + self.workers.count):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                for reader, expected in theirs.items():
                    tasks.start_soon(count_down, self._receive_all, reader, expected)
                for _ in range(min(self._most_read, len(groups))):
                    tasks.start_soon(count_down, self._read_groups, pending)

    async def _read_groups(self, pending: Iterator[list[Share]], jobs: SharedJobs, executor: CellReader) -> None:
        """Read the shares of the groups that are left."""
        for group in pending:
            stream = self.source.in_order(name) if (name := self._ordered(group[0])) else None
            for share in group:
                await anyio.lowlevel.checkpoint_if_cancelled()  # a call into a thread is not a cancellation point
                is_last = share is group[-1]
                left = await self.workers.run(self._read, share, stream, jobs, executor, is_last=is_last)
                try:
                    if left.jobs:
                        await executor.place_on_devices(left.held, left.jobs)
                finally:
                    self._to_read.give_back(left.lent)

    async def _receive_all(
        self, reader: int, expected: dict[int, Share], jobs: SharedJobs, executor: CellReader
    ) -> None:
        """Receive the shares that another rank reads."""
        while (left := await self.workers.run(self._receive, reader, expected, jobs, executor)) is not None:
            try:
                await executor.place_on_devices(left.held, left.jobs)
            finally:
                self._to_receive.give_back(left.lent)
            self._release(reader)

    # --- in threads -----------------------------------------------------------------------------------------

    def _ordered(self, share: Share) -> str:
        """Return the name of the file if it can only be read in order, else an empty one."""
        file = share.cells[0].file
        return file if self.source.is_virtual(file) else ""

    def _read(
        self, share: Share, stream: DecodedStream | None, jobs: SharedJobs, executor: CellReader, *, is_last: bool
    ) -> _ForDevices:
        """Read what is shared, send it, and put it into place."""
        file, begin, end = share.cells[0].file, share.begin, share.end
        whole = None if self._is_shared else _whole(share, jobs, begin, end)
        lent = None if whole else self._to_read.take(begin, end)
        try:
            view = whole.memory() if whole else lent.view if lent else memoryview(b"")
            if stream is None:
                self.source.read(file, begin, view)
            else:
                stream.fill(begin, view)
                if is_last:
                    stream.finish()
            tickets: list[tuple[int, MemoryWire, int]] = []
            for taker, low, high in share.takers:
                wire, part = self.wires.outbound.get(taker), view[low - begin : high - begin]
                with self._leaving_out(taker), contextlib.nullcontext() if wire is None else wire.turn:
                    if isinstance(wire, MemoryWire) and lent is not None:
                        place = lent.offset + low - begin
                        ticket = wire.announce(share.number, len(part), self._to_read.arena, place)
                        tickets.append((taker, wire, ticket))
                    elif wire is not None:  # else it reads this itself
                        wire.send(share.number, crc32(part), part)
            held = Held(file, begin, view)
            if whole:
                self._finish(whole, crc32(view), share, jobs, executor)
                return _ForDevices(held, [], None)
            left = executor.place(held, _jobs_of(share, jobs))
            for taker, memory, ticket in tickets:
                with self._leaving_out(taker, lent):
                    memory.wait(ticket)
            return _ForDevices(held, left, lent)
        except BaseException:
            if not self._is_shared:  # else another process may be copying from it
                self._to_read.give_back(lent)
            raise

    @contextlib.contextmanager
    def _leaving_out(self, taker: int, lent: _Lent | None = None) -> Iterator[None]:
        """Send no more to a rank whose wire breaks; if it may still read memory, that is lost."""
        try:
            yield
        except LinkBrokenError as exc:
            if lent is not None:
                lent.is_lost = True  # a process that hangs may read it when it goes on
            if self.wires.outbound.pop(taker, None) is not None:
                logger.warning("rank %d sends nothing more to rank %d: %s", self.rank, taker, exc)

    @staticmethod
    def _finish(whole: ChunkPart, crc: int, share: Share, jobs: SharedJobs, executor: CellReader) -> None:
        """Count the only job of a share as done, whose bytes have come into their place."""
        whole.set_crc(crc)
        jobs.pop(share.cells[-1])
        executor.finish(whole)

    def _receive(
        self, reader: int, expected: dict[int, Share], jobs: SharedJobs, executor: CellReader
    ) -> _ForDevices | None:
        """Receive what a rank reads, and put it into place; return what is for devices, None at the end."""
        wire = self.wires.inbound.get(reader)
        if wire is None:
            return None
        try:
            while expected:
                head = wire.head()
                share = expected.pop(head.number, None)
                if share is None or head.nbytes != share.takers[0][2] - share.takers[0][1]:
                    raise LinkBrokenError("it has sent something else")
                left = self._take(wire, head, share, jobs, executor)
                if left is not None:
                    return left
                self._release(reader)
        except LinkBrokenError as exc:
            logger.warning("rank %d reads itself what rank %d does not send any more: %s", self.rank, reader, exc)
            wire.end()
            del self.wires.inbound[reader]
        return None

    def _take(self, wire: Wire, head: Head, share: Share, jobs: SharedJobs, executor: CellReader) -> _ForDevices | None:
        file, (_, begin, end), lent = share.cells[0].file, share.takers[0], None
        whole = None if isinstance(wire, MemoryWire) else _whole(share, jobs, begin, end)
        if whole is not None:
            _fill(wire, head, whole.memory())
            self._finish(whole, head.check, share, jobs, executor)
            return None
        on_devices = []
        try:
            if isinstance(wire, MemoryWire):
                view = wire.view(head)
            else:
                lent = self._to_receive.take(begin, end)
                _fill(wire, head, view := lent.view)
            held = Held(file, begin, view)
            on_devices = executor.place(held, _jobs_of(share, jobs))
            return _ForDevices(held, on_devices, lent) if on_devices else None
        finally:
            if not on_devices:
                self._to_receive.give_back(lent)

    def _release(self, reader: int) -> None:
        """Allow a rank of this host to use the memory again."""
        wire = self.wires.inbound.get(reader)
        if isinstance(wire, MemoryWire):
            with contextlib.suppress(LinkBrokenError):  # it has left: no further message comes
                wire.done()


def _jobs_of(share: Share, jobs: SharedJobs) -> list[ReadJob]:
    """Return the jobs of what is shared, and remove them."""
    return [job for cell in share.cells for job in jobs.pop(cell, ())]


def _whole(share: Share, jobs: SharedJobs, begin: int, end: int) -> ChunkPart | None:
    """Return the only job of what is shared, if its bytes can be read and received into their place."""
    found = jobs.get(share.cells[0], ())
    if len(share.cells) == len(found) == 1 and isinstance(part := found[0], ChunkPart) and part.takes(begin, end):
        return part
    return None


def _fill(wire: Wire, head: Head, view: memoryview) -> None:
    """Receive bytes and check them."""
    wire.fill(view)
    if crc32(view) != head.check:
        raise LinkBrokenError("its bytes were changed on the way")
