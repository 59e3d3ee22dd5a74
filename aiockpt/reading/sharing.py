"""What several ranks read alike: one of them reads it, and sends it to the others while all put it into place.

A rank counts on nothing from another one: what it is not sent, because that one has failed or is silent, it reads
itself. Each rank checks the CRCs of the items that it gets whole, wherever the bytes come from.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from isal.isal_zlib import crc32

from aiockpt.coordination.link import LinkBrokenError
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.format.index import TensorEntry
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.planning.collective.sharing import CELL_BYTES, SMALL_CELL_BYTES, SMALL_ITEMS, Cell, Need, Share
from aiockpt.planning.ranges import as_stream
from aiockpt.reading.decoded import Held
from aiockpt.reading.jobs import select_item
from aiockpt.staging.pool import MappedMemory

if TYPE_CHECKING:
    from aiockpt.coordination.wires import Wire, Wires
    from aiockpt.core.threads import Workers
    from aiockpt.format.index import Index, ItemRange
    from aiockpt.reading.decoded import DecodedSource
    from aiockpt.reading.read_plan import TensorRead

J = TypeVar("J")

_MOST_READ = 16
"""Cells that are read or sent at once; each has a buffer."""
_MOST_RECEIVED = 8

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


class _Buffers:
    """A number of buffers for cells, made when they are first needed."""

    def __init__(self, count: int) -> None:
        self._free: list[MappedMemory] = []
        self._limit = anyio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def lend(self, begin: int, end: int) -> AsyncIterator[memoryview]:
        """Lend memory for these bytes of a file, at the same offset in its page, as O_DIRECT requires."""
        async with self._limit:
            buffer = self._free.pop() if self._free else MappedMemory(CELL_BYTES + BLOCK_BYTES)
            try:
                skip = begin % BLOCK_BYTES
                yield buffer.view[skip : skip + end - begin]
            finally:
                self._free.append(buffer)


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
        self._to_read, self._to_receive = _Buffers(self._most_read), _Buffers(_MOST_RECEIVED)
        self._turns: defaultdict[int, anyio.Lock] = defaultdict(anyio.Lock)  # to send to each rank

    @property
    def _most_read(self) -> int:
        return min(self.source.most_reads or self.workers.count, _MOST_READ)

    def has(self, cell: Cell) -> bool:
        """Return whether this rank may get a cell by `run`."""
        share = self.shares.get(cell)
        return share is not None and (share.reader == self.rank or share.reader in self.wires.inbound)

    def close(self) -> None:
        """Close the wires. Idempotent."""
        self.wires.close()

    async def run(
        self, phase: int, jobs: dict[Cell, list[J]], deliver: Callable[[Held, list[J]], Coroutine[Any, Any, None]]
    ) -> None:
        """Read and receive all cells of a phase; await ``deliver`` with the bytes of each, and with its jobs.

        Removes these from ``jobs``; those that stay are of cells that did not come.
        """
        mine: list[Share] = []
        theirs: defaultdict[int, dict[int, Share]] = defaultdict(dict)
        for cell, share in self.shares.items():
            if cell.phase == phase and share.reader == self.rank:
                mine.append(share)
            elif cell.phase == phase and share.reader in self.wires.inbound:
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
                async with self._to_read.lend(share.begin, share.end) as view:
                    crcs = await self.workers.run(self._read, share, view)
                    async with anyio.create_task_group() as tasks:
                        for (taker, begin, end), crc in zip(share.takers, crcs, strict=True):
                            part = view[begin - share.begin : end - share.begin]
                            tasks.start_soon(self._send, taker, share.number, crc, part)
                        held = Held(share.cell.file, share.begin, view)
                        tasks.start_soon(deliver, held, jobs.pop(share.cell, []))

        async def receive(reader: int, expected: dict[int, Share]) -> None:
            wire = self.wires.inbound[reader]
            try:
                while expected:
                    head = await self.workers.run(wire.head)
                    share = expected.pop(head.number, None)
                    ((_, begin, end),) = share.takers if share is not None else ((0, 0, 0),)
                    if share is None or head.nbytes != end - begin:
                        raise LinkBrokenError("it has sent something else")
                    async with self._to_receive.lend(begin, end) as view:
                        await self.workers.run(_fill, wire, view, head.crc)
                        await deliver(Held(share.cell.file, begin, view), jobs.pop(share.cell, []))
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

    def _read(self, share: Share, view: memoryview) -> list[int]:
        """Read a cell; return the CRC of what each taker is sent."""
        self.source.read(share.cell.file, share.begin, view)
        parts = [(begin - share.begin, end - share.begin) for _, begin, end in share.takers]
        crcs = {(begin, end): crc32(view[begin:end]) for begin, end in dict.fromkeys(parts)}
        return [crcs[part] for part in parts]

    async def _send(self, taker: int, number: int, crc: int, part: memoryview) -> None:
        async with self._turns[taker]:  # not in threads, of which there would not be enough to receive
            wire = self.wires.outbound.get(taker)
            if wire is None:  # it reads this itself
                return
            try:
                await self.workers.run(wire.send, number, crc, part)
            except LinkBrokenError as exc:
                del self.wires.outbound[taker]
                logger.warning("rank %d sends nothing more to rank %d: %s", self.rank, taker, exc)


def _fill(wire: Wire, view: memoryview, crc: int) -> None:
    """Receive bytes and check them."""
    wire.fill(view)
    if crc32(view) != crc:
        raise LinkBrokenError("its bytes were changed on the way")
