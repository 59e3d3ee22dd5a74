"""What several ranks read alike: one of them reads it, and sends it to the others while all put it into place.

A rank counts on nothing from another one: what it is not sent, because that one has failed or is silent, it reads
itself. Each rank checks the CRCs of the items that it gets whole, wherever the bytes come from.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from isal.isal_zlib import crc32

from aiockpt.coordination.link import LinkBrokenError
from aiockpt.coordination.wires import Arena, MemoryWire, Wire
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.format.index import TensorEntry
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.planning.collective.sharing import CELL_BYTES, SMALL_CELL_BYTES, SMALL_ITEMS, Cell, Need, Share
from aiockpt.planning.ranges import as_stream
from aiockpt.reading.decoded import Held
from aiockpt.reading.jobs import ChunkPart, select_item

if TYPE_CHECKING:
    import torch

    from aiockpt.coordination.wires import Wires
    from aiockpt.core.threads import Workers
    from aiockpt.format.index import Index, ItemRange
    from aiockpt.reading.decoded import DecodedSource
    from aiockpt.reading.jobs import ReadJob
    from aiockpt.reading.read_plan import TensorRead

SharedJobs = dict[Cell, list[tuple["torch.device", "ReadJob"]]]
"""The jobs of shared cells; each with its device, if it goes through staging memory."""

Place = Callable[[Sequence[tuple["torch.device", "ReadJob"]], Held | None], Awaitable[None]]

_BUFFER_BYTES = CELL_BYTES + BLOCK_BYTES
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


def needs_of_payloads(phase: int, reads: Sequence[TensorRead]) -> list[Need]:
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
        if stream.is_increasing:
            base = read.chunk.place.offset + item.payload_offset
            begin, end = (base + stream.at(number) * size for number in (0, stream.count - 1))
            found.append(Need(phase, read.chunk.place.file, base, begin, end + size, stream.count * size))
    return found


def cell_of_item(phase: int, place: ItemRange) -> Cell:
    """Return the cell of a small item."""
    return Cell(phase, place.file, SMALL_ITEMS, place.offset // SMALL_CELL_BYTES)


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

    arena: Arena
    at: int  # where it begins there
    view: memoryview
    is_lost: bool = False  # another process may still read it


class _Buffers:
    """A number of buffers for cells; those that are lost have ``spare`` ones."""

    def __init__(self, count: int, spare: int = 0, *, is_shared: bool = False) -> None:
        self._arena = Arena((count + spare) * _BUFFER_BYTES, is_shared=is_shared)
        self._free = [number * _BUFFER_BYTES for number in reversed(range(count + spare))]
        self._limit = anyio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def lend(self, begin: int, end: int) -> AsyncIterator[_Lent]:
        """Lend memory for these bytes of a file, at the same offset in its page, as O_DIRECT requires."""
        if end <= begin:
            yield _Lent(self._arena, 0, memoryview(b""))
            return
        async with self._limit:
            free = self._free.pop()  # the last one that was used: it is in the processor's cache
            at = free + begin % BLOCK_BYTES
            lent = _Lent(self._arena, at, self._arena.view[at : at + end - begin])
            try:
                yield lent
            finally:
                if not lent.is_lost:
                    self._free.append(free)

    def close(self) -> None:
        self._arena.close()


@dataclass(eq=False)
class SharedReads:
    """A rank's part in the shared reads of one load."""

    rank: int
    shares: Mapping[Cell, Share]  # that it takes part in, by cell
    wires: Wires
    source: DecodedSource
    workers: Workers

    def __post_init__(self) -> None:
        # Apart: if sending could wait for what is received, two ranks could wait for each other.
        near = [wire for wire in self.wires.outbound.values() if isinstance(wire, MemoryWire)]
        self._is_shared = bool(near)  # with processes of this host
        self._to_read = _Buffers(self._most_read, len(near), is_shared=self._is_shared)
        self._to_receive = _Buffers(_MOST_RECEIVED)
        self._turns: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)  # to send to each rank

    @property
    def _most_read(self) -> int:
        return min(self.source.most_reads or self.workers.count, _MOST_READ)

    def has(self, cell: Cell) -> bool:
        """Return whether this rank may get a cell by `run`."""
        share = self.shares.get(cell)
        return share is not None and (share.reader == self.rank or share.reader in self.wires.inbound)

    def close(self) -> None:
        """Close the wires, and free the memory. Idempotent."""
        self.wires.close()
        self._to_read.close()
        self._to_receive.close()

    async def run(self, phase: int, jobs: SharedJobs, place: Place) -> None:
        """Read and receive all cells of a phase; await ``place`` for each job, with its bytes.

        Jobs that are done are removed from ``jobs``; those that stay are of cells that did not come.

        Args:
            phase: of the load.
            jobs: of the cells of that phase.
            place: carries out jobs that find their bytes in memory; None: the bytes are in their place already.
        """
        mine: list[Share] = []
        theirs: defaultdict[int, dict[int, Share]] = defaultdict(dict)
        for share in dict.fromkeys(self.shares.values()):
            if share.cells[0].phase == phase and share.reader == self.rank:
                mine.append(share)
            elif share.cells[0].phase == phase and share.reader in self.wires.inbound:
                theirs[share.reader][share.number] = share
        pending, running = iter(mine), len(theirs) + min(self._most_read, len(mine))
        over = anyio.Event()
        if not running:
            return

        async def count_down(work: Callable[..., Awaitable[None]], *args: object) -> None:
            nonlocal running
            await work(*args)
            running -= 1
            if not running:
                over.set()

        async def read() -> None:
            for share in pending:
                file, begin, end = share.cells[0].file, share.begin, share.end
                whole = None if self._is_shared else _whole(share, jobs, begin, end)
                async with self._to_read.lend(begin, 0 if whole else end) as lent:
                    view, crcs = await self.workers.run(self._read, share, lent.view, whole)
                    async with anyio.create_task_group() as tasks:
                        for taker, low, high in share.takers:
                            message = share.number, crcs.get((low, high), 0), view[low - begin : high - begin]
                            tasks.start_soon(self._send, taker, message, lent, low - begin)
                        await _put(share, jobs, None if whole else Held(file, begin, view), place)

        async def receive(reader: int, expected: dict[int, Share]) -> None:
            wire = self.wires.inbound[reader]
            try:
                while expected:
                    head = await self.workers.run(wire.head)
                    share = expected.pop(head.number, None)
                    if share is None or head.nbytes != share.takers[0][2] - share.takers[0][1]:
                        raise LinkBrokenError("it has sent something else")
                    _, begin, end = share.takers[0]
                    file = share.cells[0].file
                    if isinstance(wire, MemoryWire):
                        await _put(share, jobs, Held(file, begin, wire.view(head)), place)
                        wire.done()
                        continue
                    whole = _whole(share, jobs, begin, end)
                    async with self._to_receive.lend(begin, 0 if whole else end) as lent:
                        await self.workers.run(_receive, wire, head.check, lent.view, whole)
                        await _put(share, jobs, None if whole else Held(file, begin, lent.view), place)
            except LinkBrokenError as exc:
                logger.warning("rank %d reads itself what rank %d does not send any more: %s", self.rank, reader, exc)
                wire.end()
                del self.wires.inbound[reader]

        async def watch() -> None:
            try:
                await over.wait()
            except BaseException:  # threads that wait for a wire can't be cancelled
                self.wires.end()
                raise

        # Each link has a thread that waits; those that read, check and copy come on top.
        with self.workers.at_least(len(theirs) + len(self.wires.outbound) + self._most_read + self.workers.count):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                for reader, expected in theirs.items():
                    tasks.start_soon(count_down, receive, reader, expected)
                for _ in range(min(self._most_read, len(mine))):
                    tasks.start_soon(count_down, read)

    def _read(
        self, share: Share, buffer: memoryview, whole: ChunkPart | None
    ) -> tuple[memoryview, dict[tuple[int, int], int]]:
        """Read what is shared; return it, and the CRC of each part that is sent to another host."""
        view = whole.memory() if whole else buffer
        self.source.read(share.cells[0].file, share.begin, view)
        outbound = self.wires.outbound
        parts = {(low, high) for taker, low, high in share.takers if type(outbound.get(taker)) is Wire}
        if whole:
            parts.add((share.begin, share.end))
        crcs = {(low, high): crc32(view[low - share.begin : high - share.begin]) for low, high in parts}
        if whole:
            whole.set_crc(crcs[share.begin, share.end])
        return view, crcs

    async def _send(self, taker: int, message: tuple[int, int, memoryview], lent: _Lent, skip: int) -> None:
        async with self._turns[taker]:  # not in threads, of which there would not be enough to receive
            wire = self.wires.outbound.get(taker)
            if wire is None:  # it reads this itself
                return
            try:
                await self.workers.run(wire.send, *message, lent.arena, lent.at + skip)
            except LinkBrokenError as exc:
                lent.is_lost |= isinstance(wire, MemoryWire)  # a process that hangs may read it when it goes on
                del self.wires.outbound[taker]
                logger.warning("rank %d sends nothing more to rank %d: %s", self.rank, taker, exc)


def _whole(share: Share, jobs: SharedJobs, begin: int, end: int) -> ChunkPart | None:
    """Return the only job of what is shared, if its bytes can be read and received into their place."""
    found = [job for cell in share.cells for _, job in jobs.get(cell, ())]
    if len(found) == 1 and isinstance(part := found[0], ChunkPart) and part.takes(begin, end):
        return part
    return None


def _receive(wire: Wire, crc: int, buffer: memoryview, whole: ChunkPart | None) -> None:
    """Receive bytes and check them."""
    view = whole.memory() if whole else buffer
    wire.fill(view)
    if crc32(view) != crc:
        raise LinkBrokenError("its bytes were changed on the way")
    if whole:
        whole.set_crc(crc)


async def _put(
    share: Share,
    jobs: SharedJobs,
    held: Held | None,
    place: Place,
) -> None:
    await place([job for cell in share.cells for job in jobs.pop(cell, ())], held)
