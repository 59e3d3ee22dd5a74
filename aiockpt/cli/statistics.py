"""Figures and histograms of stored tensors, read in parts, so that none has to fit into memory."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.reading.info import ObjectInfo, TensorInfo, has_value
from aiockpt.reading.reader import CheckpointReader

PART_BYTES = 32 << 20
_BINS = 32
_BLOCK = 1 << 20  # elements that are computed with at once, in up to five copies of eight bytes each
_VALUES = 200  # that are shown


Figures = dict[str, float | None]
"""The minimum, maximum and mean of a tensor's elements that are numbers, None if there are none, of complex ones of the
absolute values; and as ``nan`` how many are none."""


class Survey:
    """Figures of a tensor, which repeats its parts ``times``, and a histogram of its finite elements.

    Each part is added; then, if `begin_counting`, each is counted into bins between ``low`` and ``high``.
    """

    def __init__(self, times: int = 1) -> None:
        self._times, self._can_compute = times, True
        self._minimum, self._maximum, self._total = math.inf, -math.inf, 0.0
        self._count = self._nan = 0
        self._bins = torch.zeros(0, dtype=torch.int64)
        self.low, self.high = math.inf, -math.inf  # of the finite elements

    def add(self, part: torch.Tensor) -> None:
        """Add a part to the figures."""
        try:
            for values in map(_reals, blocks(part)):
                known = values
                if values.is_floating_point() and (is_nan := values.isnan()).any():
                    known = values[~is_nan]
                self._nan += values.numel() - known.numel()
                if not known.numel():
                    continue
                self._total += known.sum(dtype=torch.float64).item()
                self._count += known.numel()
                low, high = (bound.item() for bound in torch.aminmax(known))
                self._minimum, self._maximum = min(self._minimum, low), max(self._maximum, high)
                if math.inf in (-low, high):  # which makes a copy of the finite elements worth its time
                    known = known[known.isfinite()]
                    if not known.numel():
                        continue
                    low, high = (bound.item() for bound in torch.aminmax(known))
                self.low, self.high = min(self.low, low), max(self.high, high)
        except (RuntimeError, NotImplementedError):
            self._can_compute = False

    def begin_counting(self) -> bool:
        """Return whether there is a histogram: there are finite elements, and their range is not too large."""
        if self.low == self.high:
            half = max(abs(self.low) * 0.01, 0.5)
            self.low, self.high = self.low - half, self.high + half
        if not self._can_compute or not 0 < self.high - self.low < math.inf:
            self.low = self.high = 0.0
            return False
        self._bins = torch.zeros(_BINS, dtype=torch.int64)
        return True

    def count(self, part: torch.Tensor) -> None:
        """Add a part to the histogram."""
        for values in map(_reals, blocks(part)):
            finite = values[values.isfinite()].to(torch.float64)
            # torch.histc would start threads for each tensor, which takes much longer on a busy machine.
            bins = ((finite - self.low) / (self.high - self.low) * _BINS).to(torch.int64)
            self._bins += torch.bincount(bins.clamp_(max=_BINS - 1), minlength=_BINS)

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements in each bin; empty without a histogram."""
        return tuple((self._bins * self._times).tolist())

    @property
    def figures(self) -> Figures | None:
        """Figures of all parts; None where torch can't compute with the dtype."""
        if not self._can_compute:
            return None
        known = (self._minimum, self._maximum, self._total / self._count) if self._count else (None, None, None)
        return dict(zip(("minimum", "maximum", "mean"), known, strict=True)) | {"nan": self._nan * self._times}

    def as_json(self) -> list[Any]:
        """Return what a page shows: texts of the figures, the bounds, and the counts."""
        figures = self.figures
        if figures is None:
            return [None, 0, 0, []]
        values = figures.values()
        texts = ["" if each is None else f"{each:,}" if isinstance(each, int) else f"{each:.6g}" for each in values]
        low, high = (float(f"{value:.6g}") for value in (self.low, self.high))
        return [texts, low, high, self.counts]


async def survey(
    reader: CheckpointReader, infos: Sequence[TensorInfo], *, histograms: bool = False
) -> AsyncIterator[tuple[TensorInfo, Survey]]:
    """Yield each tensor with its figures, and its histogram if wanted.

    Small tensors are read ahead, in memory that is bounded; large ones part by part, and twice for a histogram.
    """
    small = {info.key: info for info in infos if info.nbytes <= PART_BYTES}
    if small:
        async for key, tensor in reader.stream(dict.fromkeys(small), buffer_bytes=4 * PART_BYTES):
            found = Survey()
            found.add(tensor)
            if histograms and found.begin_counting():
                found.count(tensor)
            yield small[key], found
    for info in (info for info in infos if info.key not in small):
        found = Survey(times_of(info))
        async for part in _parts(reader, info):
            found.add(part)
        if histograms and found.begin_counting():
            async for part in _parts(reader, info):
                found.count(part)
        yield info, found


async def _parts(reader: CheckpointReader, info: TensorInfo) -> AsyncIterator[torch.Tensor]:
    """Yield the distinct elements of a tensor in parts, or row by row if a row is larger than that."""
    if not info.shape:
        yield await reader.read(info.key)
        return
    for index in part_indices(info.distinct_shape, max(1, PART_BYTES // info.dtype.itemsize)):
        yield await reader.read(info.key, index)


def blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the elements, so many at once as may be in memory several times, in double precision."""
    return torch.split(tensor.detach().resolve_conj().resolve_neg().reshape(-1), _BLOCK)


def numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values in a dtype in which torch computes exactly, or with double precision."""
    if values.is_complex():
        return values.to(torch.complex128)
    if values.is_floating_point():
        narrow = values.dtype.itemsize == 1  # some of which torch converts to nothing else
        return (values.to(torch.float32) if narrow else values).to(torch.float64)
    return values.to(torch.float64 if values.dtype is torch.uint64 else torch.int64)


def _reals(values: torch.Tensor) -> torch.Tensor:
    return found.abs() if (found := numbers(values)).is_complex() else found


def times_of(info: TensorInfo) -> int:
    """Return how often a tensor repeats its distinct elements; raise LoadError if these overlap each other too."""
    distinct, stored = math.prod(info.distinct_shape), sum(chunk.nbytes for chunk in info.chunks)
    if info.stride is not None and distinct * info.dtype.itemsize > stored:
        raise LoadError(
            f"{info.key} shows {info.nbytes} bytes of which {stored} are stored, as its elements "
            "overlap, and is too large to be read so; leave it out, by naming other keys"
        )
    return math.prod(info.shape) // distinct


def distinct_index(info: TensorInfo, index: Sequence[slice | int]) -> tuple[slice | int, ...]:
    """Return the index of the distinct elements in a part of a tensor."""
    return tuple(
        min(i, size - 1) if isinstance(i, int) else slice(min(i.start, size - 1), min(i.stop, size))
        for i, size in zip(index, info.distinct_shape, strict=True)
    )


def part_indices(shape: Sequence[int], most: int) -> list[tuple[slice | int, ...]]:
    """Return indices that take a tensor apart into pieces of at most so many elements."""
    row = math.prod(shape[1:])
    if row > most and len(shape) > 1:
        return [(number, *rest) for number in range(shape[0]) for rest in part_indices(shape[1:], most)]
    step = max(1, most // max(1, row))
    rows = [slice(0, size) for size in shape[1:]]
    return [(slice(start, min(start + step, shape[0])), *rows) for start in range(0, shape[0], step)]


async def small_values(
    reader: CheckpointReader, infos: Iterable[TensorInfo | ObjectInfo]
) -> tuple[dict[str, Any], set[str]]:
    """Read the first scalars and small objects; return them, and the keys of damaged ones. Unsafe ones are left out."""
    values: dict[str, Any] = {}
    damaged: set[str] = set()
    for info in islice(filter(has_value, infos), _VALUES):
        try:
            values[info.key] = await reader.read(info.key)
        except UnsafeCheckpointError:
            continue
        except CorruptCheckpointError:  # the rest can be looked at all the same
            damaged.add(info.key)
    return values, damaged
