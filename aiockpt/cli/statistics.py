"""Figures and histograms of stored tensors, read in parts, so that none has to fit into memory."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.reading.info import ObjectInfo, TensorInfo, has_value
from aiockpt.reading.reader import CheckpointReader

PART_BYTES = 32 << 20
_BINS = 32
_BLOCK = 1 << 20  # elements that are sorted into bins at once, in double precision
_VALUES = 200  # that are shown


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of a tensor.

    Attributes:
        minimum, maximum, mean: of the elements that are numbers; None if there are none. Of complex numbers, those of
            their absolute values.
        nan: the number of elements that are not numbers.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    nan: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Figures of a tensor, and a histogram of its finite elements.

    Attributes:
        figures: None where torch can't compute with the dtype.
        low: the lower edge of the first bin.
        high: the upper edge of the last one.
        counts: the elements in each bin; of complex numbers the absolute values are counted. Empty if there are none.
    """

    figures: Statistics | None
    low: float = 0.0
    high: float = 0.0
    counts: tuple[int, ...] = ()

    def as_json(self) -> list[Any]:
        """Return what a page shows: texts of the figures, the bounds, and the counts."""
        if self.figures is None:
            return [None, 0, 0, []]
        bounds = (self.figures.minimum, self.figures.maximum, self.figures.mean)
        texts = ["" if each is None else f"{each:,}" if isinstance(each, int) else f"{each:.6g}" for each in bounds]
        low, high = (float(f"{value:.6g}") for value in (self.low, self.high))
        return [[*texts, f"{self.figures.nan:,}"], low, high, self.counts]


async def survey(
    reader: CheckpointReader, infos: Sequence[TensorInfo], *, histograms: bool = False
) -> AsyncIterator[tuple[TensorInfo, Survey]]:
    """Yield each tensor with its figures, and its histogram if wanted.

    Small tensors are read ahead, in memory that is bounded; large ones part by part, and twice for a histogram.
    """
    small = {info.key: info for info in infos if info.nbytes <= PART_BYTES}
    if small:
        async for key, tensor in reader.stream(dict.fromkeys(small), buffer_bytes=4 * PART_BYTES):
            sums = _Sums(histograms=histograms)
            sums.add(tensor)
            if bins := sums.bins():
                bins.add(tensor)
            yield small[key], _survey_of(sums, bins)
    for info in infos:
        if info.key in small:
            continue
        times = times_of(info)
        sums = _Sums(times, histograms=histograms)
        async for part in read_parts(reader, info, PART_BYTES):
            sums.add(part)
        if bins := sums.bins():
            async for part in read_parts(reader, info, PART_BYTES):
                bins.add(part)
        yield info, _survey_of(sums, bins, times)


def _survey_of(sums: _Sums, bins: _Bins | None, times: int = 1) -> Survey:
    if bins is None:
        return Survey(sums.result())
    return Survey(sums.result(), bins.low, bins.high, tuple(n * times for n in bins.counts.tolist()))


class _Sums:
    """Figures of a tensor that grow part by part; the tensor repeats ``times`` times what is added."""

    def __init__(self, times: int = 1, *, histograms: bool = False) -> None:
        self._times = times
        self._histograms = histograms
        self._can_compute = True
        self._minimum, self._maximum = math.inf, -math.inf
        self._low, self._high = math.inf, -math.inf  # of the finite elements, for the histogram
        self._total = 0.0
        self._count = self._nan = 0

    def add(self, part: torch.Tensor) -> None:
        """Add a part."""
        try:
            if self._can_compute:
                self._add(part)
        except (RuntimeError, NotImplementedError):
            self._can_compute = False

    def _add(self, part: torch.Tensor) -> None:
        values = numbers(part)
        if values.is_floating_point():
            is_nan = values.isnan()
            nan = int(is_nan.sum())
            if nan:
                self._nan += nan
                values = values[~is_nan]
        if not values.numel():
            return
        low, high = (bound.item() for bound in torch.aminmax(values))
        self._minimum, self._maximum = min(self._minimum, low), max(self._maximum, high)
        self._total += values.sum(dtype=torch.float64).item()
        self._count += values.numel()
        for block in _finite(values) if self._histograms else ():
            low, high = (bound.item() for bound in torch.aminmax(block))
            self._low, self._high = min(self._low, low), max(self._high, high)

    def result(self) -> Statistics | None:
        """Return the figures of all parts; None if torch can't compute with the dtype."""
        if not self._can_compute:
            return None
        nan = self._nan * self._times
        if not self._count:
            return Statistics(None, None, None, nan)
        return Statistics(self._minimum, self._maximum, self._total / self._count, nan)

    def bins(self) -> _Bins | None:
        """Return empty bins for the finite elements; None if there are none, or if their range is too large."""
        low, high = self._low, self._high
        if low == high:
            half = max(abs(low) * 0.01, 0.5)
            low, high = low - half, high + half
        return _Bins(low, high) if self._can_compute and math.isfinite(high - low) and low < high else None


class _Bins:
    """A histogram that grows part by part."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.counts = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, part: torch.Tensor) -> None:
        for block in _finite(numbers(part)):
            # torch.histc would start threads for each tensor, which takes much longer on a busy machine.
            bins = ((block - self.low) / (self.high - self.low) * _BINS).to(torch.int64)
            self.counts += torch.bincount(bins.clamp_(max=_BINS - 1), minlength=_BINS)


def _finite(values: torch.Tensor) -> list[torch.Tensor]:
    """Return the finite elements in double precision, in blocks that are not empty."""
    blocks = (block.to(torch.float64) for block in torch.split(values.reshape(-1), _BLOCK))
    return [kept for block in blocks if (kept := block[block.isfinite()]).numel()]


def numbers(part: torch.Tensor) -> torch.Tensor:
    """Return the elements in a dtype that torch can compare and add."""
    if part.is_quantized:
        part = part.dequantize()
    if part.layout is not torch.strided:
        part = part.to_dense()
    if part.is_complex():
        return part.to(torch.complex64 if part.dtype == torch.complex32 else part.dtype).abs()
    # aminmax has no kernels for float8, nor for uint64 below.
    if part.is_floating_point():
        return part if part.dtype in (torch.float32, torch.float64) else part.to(torch.float32)
    return part.to(torch.float64 if part.dtype == torch.uint64 else torch.int64)


async def read_parts(reader: CheckpointReader, info: TensorInfo, most: int) -> AsyncIterator[torch.Tensor]:
    """Yield the distinct elements of a tensor in parts of so many bytes at most, or row by row if a row has more."""
    if info.nbytes <= most or not info.shape:
        yield await reader.read(info.key)
        return
    for index in part_indices(info.distinct_shape, max(1, most // info.dtype.itemsize)):
        yield await reader.read(info.key, index)


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
