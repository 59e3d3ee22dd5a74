"""Reads tensors in parts, row by row, as conversions write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import TensorEntry
from aiockpt.planning.ranges import boxes, select
from aiockpt.reading.executor import LoadTools, ReadExecutor, run_each
from aiockpt.reading.read_plan import TensorRead, reads_of

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ChunkEntry, Entry, TensorItem
    from aiockpt.options import LoadOptions
    from aiockpt.reading.open import OpenCheckpoint
    from aiockpt.telemetry.loads import ReadReport

    StoredChunk = tuple[ChunkEntry, TensorItem]

PART_BYTES = 8 << 20
_AT_ONCE = 4
_MOST_EXPANDED_BYTES = 1 << 30


def check_expansion(path: str, sizes: Iterable[tuple[str, int, int]]) -> None:
    """Raise LoadError if a small file would become a huge one: elements that share memory are written one by one.

    ``sizes`` are the names of tensors, their bytes, and the bytes that are stored for them.
    """
    more_bytes = 0
    for name, nbytes, stored in sizes:
        more_bytes += max(0, nbytes - stored)
        if more_bytes > _MOST_EXPANDED_BYTES:
            raise LoadError(
                f"{name} of {path} would take {nbytes} bytes where {stored} are stored, for its elements share memory; "
                "leave it out with keys=, or load it and save the part of it that does not repeat itself"
            )


def sizes_of(entries: Mapping[str, Entry]) -> Iterator[tuple[str, int, int]]:
    """Yield the sizes of tensors for `check_expansion`."""
    for name, entry in entries.items():
        if isinstance(entry, TensorEntry) and any(chunk.item is not None for chunk in entry.chunks):
            yield name, entry.nbytes, sum(chunk.place.length for chunk in entry.chunks)


class PartReader:
    """Reads parts of a checkpoint's tensors, and checks the CRCs that reads of parts can't check."""

    def __init__(self, opened: OpenCheckpoint, options: LoadOptions, tools: LoadTools) -> None:
        self.executor = ReadExecutor(opened.source, opened.path, options, tools)
        self._source = opened.source
        self._path = opened.path
        self._verify = options.verify
        self._run = tools.workers.run

    async def stored(self, name: str, entry: TensorEntry) -> list[StoredChunk]:
        """Return the chunks of a tensor that have any bytes, with their items."""
        reads = [TensorRead(name, entry.dtype, chunk, None) for chunk in entry.chunks if 0 not in chunk.sizes]
        await self.executor.prepare(reads)
        return [(read.chunk, await self.executor.locate(read)) for read in reads]

    async def check(self, name: str, entry: TensorEntry) -> None:
        """Check the CRCs of a tensor that is too large to be read at once, unless the caller wants no checks."""
        if self._verify:
            chunks = [stored for stored in await self.stored(name, entry) if stored[1].crc is not None]
            await self.stream(name, chunks, lambda *_: None)

    async def stream(
        self,
        name: str,
        chunks: Sequence[StoredChunk],
        write: Callable[[ChunkEntry, int, memoryview], None],
        report: ReadReport | None = None,
    ) -> list[int]:
        """Read chunks of a tensor part by part, check them, and return their CRCs.

        Several chunks are read at once; ``write`` is called in threads, with a chunk, an offset in it and the bytes.
        """
        crcs: list[int] = []

        async def stream(stored: StoredChunk) -> None:
            chunk, item = stored
            place, view, crc = chunk.place, memoryview(bytearray(min(PART_BYTES, item.nbytes))), 0

            def copy(at: int, part: memoryview) -> int:
                self._source.read(place.file, place.offset + item.payload_offset + at, part)
                write(chunk, at, part)
                return crc32(part, crc)

            for at in range(0, item.nbytes, PART_BYTES):
                part = view[: item.nbytes - at]
                crc = await self._run(copy, at, part)
                if report is not None:
                    report.add(len(part))
            if self._verify and item.crc not in (None, crc):
                raise CorruptCheckpointError(
                    f"{self._path}/{place.file}: the bytes of {name} do not match their CRC: they changed since they "
                    "were written. Use an older checkpoint."
                )
            crcs.append(crc)

        await run_each(stream, chunks, _AT_ONCE)
        return crcs


def reads_of_part(name: str, entry: TensorEntry, start: int, values: torch.Tensor) -> list[TensorRead]:
    """Return the reads of the elements from ``start`` on, row by row, that fill ``values``, which may cast them."""
    reads: list[TensorRead] = []
    at = 0
    for box in boxes(entry.shape, start, start + values.numel()):
        wanted = select(entry.shape, box.index).selections
        target = values[at : at + box.count].view([selection.count for selection in wanted])
        is_whole = box.count * entry.dtype.itemsize == entry.nbytes
        reads += reads_of(name, entry, target, None if is_whole else wanted)
        at += box.count
    return reads
