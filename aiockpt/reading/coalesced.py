"""Small items: neighbours in a file are read at once, and placed one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from isal.isal_zlib import crc32

from aiockpt.core.strides import is_dense
from aiockpt.reading.read_plan import TensorRead, seen_as
from aiockpt.reading.targets import check_memory
from aiockpt.staging.pool import copy_small
from aiockpt.staging.scatter import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiockpt.format.index import TensorItem
    from aiockpt.planning.ranges import Selection
    from aiockpt.storage.base import Source

_MAX_GAP_BYTES = 64 << 10
_MOST_READS = 64  # of one batch


@dataclass(slots=True)
class _Span:
    """A run of a file that holds some items."""

    file: str
    begin: int
    end: int
    reads: list[TensorRead]


class CoalescedRead:
    """Some small items, near each other.

    Args:
        spans: the runs of files that hold them.
    """

    def __init__(self, spans: list[_Span]) -> None:
        self._spans = spans

    @property
    def reads(self) -> list[TensorRead]:
        """All that is read."""
        return [read for span in self._spans for read in span.reads]

    def read_into(
        self,
        source: Source,
        buffer: memoryview,
        address: int,
        parse: Callable[[TensorRead, memoryview], TensorItem],
        check: Callable[[TensorRead, TensorItem, int], None],
        *,
        verify: bool,
    ) -> list[Placement]:
        """Read all items; place what can be placed at once. Blocks.

        Args:
            source: the files.
            buffer: room for all spans, each with a page more.
            address: of the buffer.
            parse: gives what stands in an item.
            check: is given the CRC of each payload that carries one; raises if it is wrong.
            verify: whether to check.

        Returns:
            What is left to be placed.
        """
        left: list[Placement] = []
        at = 0
        found: list[tuple[TensorRead, TensorItem, int]] = []
        for span in self._spans:
            at += (span.begin - at) % 4096  # where in a page it is, so that the disk may write there
            source.read(span.file, span.begin, buffer[at : at + span.end - span.begin])
            for read in span.reads:
                place = read.chunk.place
                start = at + place.offset - span.begin
                item = read.chunk.item or parse(read, buffer[start : start + place.length])
                start += item.payload_offset
                if verify and item.crc is not None:
                    check(read, item, crc32(buffer[start : start + item.nbytes]))
                if read.fills and read.target is not None:
                    check_memory(read.name, read.target)
                found.append((read, item, start))
            at += span.end - span.begin
        # Nothing is placed before all of it is known to be good.
        for read, item, start in found:
            read.begun = True
            rest = _place(read, item, buffer, start, address + start)
            if rest is not None:
                left.append(rest)
        return left


def _place(read: TensorRead, item: TensorItem, buffer: memoryview, start: int, address: int) -> Placement | None:
    target = read.target
    read.item = item
    if target is None:
        if not (read.shared or item.storage_offset or item.conj or item.neg):
            made = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="cpu")
            if made.nbytes == item.nbytes and (made.is_contiguous() or is_dense(item.shape, item.stride)):
                copy_small(made.data_ptr(), address, item.nbytes)
                read.made = made
                return None
        read.memory = torch.empty(item.nbytes, dtype=torch.uint8, device="cpu")
        copy_small(read.memory.data_ptr(), address, item.nbytes)
        return None
    if not item.nbytes or 0 in item.shape:
        return None
    if read.selections is not None:
        item, skipped = _part_of(item, read.selections)
        start, address = start + skipped, address + skipped
    if _is_image(target, item):
        copy_small(target.data_ptr(), address, item.nbytes)
        return None
    data = torch.frombuffer(buffer[start : start + item.nbytes], dtype=torch.uint8)
    if address % item.dtype.itemsize:  # values at odd addresses crash vector instructions
        data = data.clone()
    return Placement(target, seen_as(data, item), item.conj, item.neg)


def _part_of(item: TensorItem, selections: Sequence[Selection]) -> tuple[TensorItem, int]:
    """See a part of a tensor as an item of its own; give the bytes of the payload before it as well."""
    shape = tuple(each.count for each in selections)
    stride = tuple(step * each.step for each, step in zip(selections, item.stride, strict=True))
    first = item.storage_offset + sum(each.start * step for each, step in zip(selections, item.stride, strict=True))
    extent = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
    size = item.dtype.itemsize
    return item._replace(shape=shape, stride=stride, storage_offset=0, nbytes=extent * size), first * size


def _is_image(target: torch.Tensor, item: TensorItem) -> bool:
    """Tell whether the payload, byte for byte, is what the memory of the target should be."""
    return (
        type(target) is torch.Tensor
        and target.dtype is item.dtype
        and target.nbytes == item.nbytes
        and target.device.type == "cpu"
        and _same_strides(target, item)
        and (target.is_contiguous() or is_dense(item.shape, item.stride))
        and not (item.storage_offset or item.conj or item.neg or target.is_conj() or target.is_neg())
    )


def _same_strides(target: torch.Tensor, item: TensorItem) -> bool:
    return target.stride() == item.stride or all(
        a == b for a, b, n in zip(target.stride(), item.stride, item.shape, strict=True) if n > 1
    )


def batches(reads: Sequence[TensorRead], most_bytes: int) -> list[CoalescedRead]:
    """Group items: those that lie close together are one read, and a few reads are one batch.

    Args:
        reads: the items, each smaller than ``most_bytes``.
        most_bytes: the most bytes of a batch, with the gaps between its items and a page for each read.
    """
    made: list[CoalescedRead] = []
    spans: list[_Span] = []
    used = 0
    for read in sorted(reads, key=lambda read: (read.chunk.place.file, read.chunk.place.offset)):
        place = read.chunk.place
        end = place.offset + place.length
        last = spans[-1] if spans else None
        if last is not None and last.file == place.file and place.offset <= last.end + _MAX_GAP_BYTES:
            growth = max(0, end - last.end)
            if used + growth <= most_bytes:
                last.reads.append(read)
                last.end += growth
                used += growth
                continue
        elif used + place.length + 4096 <= most_bytes and len(spans) < _MOST_READS:
            spans.append(_Span(place.file, place.offset, end, [read]))
            used += place.length + 4096
            continue
        if spans:
            made.append(CoalescedRead(spans))
        spans = [_Span(place.file, place.offset, end, [read])]
        used = place.length + 4096
    return [*made, CoalescedRead(spans)] if spans else made
