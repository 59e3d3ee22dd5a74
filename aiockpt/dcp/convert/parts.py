"""Reads tensors in parts, row by row, as conversions write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError
from aiockpt.planning.ranges import Selection, boxes
from aiockpt.reading.executor import ReadExecutor, run_each
from aiockpt.reading.read_plan import TensorRead, reads_of

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ChunkEntry, TensorEntry
    from aiockpt.options import LoadOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.reading.open import OpenCheckpoint

PART_BYTES = 8 << 20
_AT_ONCE = 4


@dataclass(slots=True)
class ConversionProgress:
    """The progress of a conversion, which changes while it runs; a display polls it.

    Attributes:
        done_bytes: what was read and handed to the disk.
        total_bytes: what there is to write; 0 until that is known.
    """

    done_bytes: int = 0
    total_bytes: int = 0


class PartReader:
    """Reads parts of a checkpoint's tensors, and checks the CRCs that reads of parts can't check."""

    def __init__(self, opened: OpenCheckpoint, options: LoadOptions, tools: LoadTools) -> None:
        self.executor = ReadExecutor(opened.source, opened.path, options, tools)
        self._source = opened.source
        self._path = opened.path
        self._run = tools.workers.run

    async def check(self, name: str, entry: TensorEntry) -> None:
        """Check the CRCs of a tensor that is too large to be read at once; raise CorruptCheckpointError."""

        async def check(chunk: ChunkEntry) -> None:
            read = TensorRead(name, entry.dtype, chunk, None)
            await self.executor.prepare([read])
            item = await self.executor.locate(read)
            crc, view = 0, memoryview(bytearray(PART_BYTES))
            for at in range(0, item.nbytes if item.crc is not None else 0, PART_BYTES):
                part = view[: item.nbytes - at]
                place = chunk.place
                await self._run(self._source.read, place.file, place.offset + item.payload_offset + at, part)
                crc = await self._run(crc32, part, crc)
            if item.crc is not None and crc != item.crc:
                raise CorruptCheckpointError(
                    f"{self._path}/{chunk.place.file}: the bytes of {name} do not match their CRC: they changed since "
                    "they were written. Use an older checkpoint."
                )

        await run_each(check, [chunk for chunk in entry.chunks if 0 not in chunk.sizes], _AT_ONCE)


def reads_of_part(name: str, entry: TensorEntry, start: int, values: torch.Tensor) -> list[TensorRead]:
    """Return the reads of the elements from ``start`` on, row by row, that fill ``values``, which may cast them."""
    reads: list[TensorRead] = []
    at = 0
    for box in boxes(entry.shape, start, start + values.numel()):
        index = [*box.index, *(slice(0, n) for n in entry.shape[len(box.index) :])]
        wanted = [Selection(i.start, i.stop - i.start) if isinstance(i, slice) else Selection(i, 1) for i in index]
        target = values[at : at + box.count].view([selection.count for selection in wanted])
        is_whole = box.count * entry.dtype.itemsize == entry.nbytes
        reads += reads_of(name, entry, target, None if is_whole else wanted)
        at += box.count
    return reads
