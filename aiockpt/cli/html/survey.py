"""Figures and histograms of stored tensors, read in parts."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aiockpt.cli.statistics import PART_BYTES, Statistics, Sums, numbers, read_parts, times_of
from aiockpt.reading.info import TensorInfo
from aiockpt.reading.reader import CheckpointReader

_BINS = 32
_BLOCK = 1 << 20  # elements that are sorted into bins at once, in double precision


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
        """Return what the page shows: texts of the figures, the bounds, and the counts."""
        if self.figures is None:
            return [None, 0, 0, []]
        bounds = (self.figures.minimum, self.figures.maximum, self.figures.mean)
        texts = ["" if value is None else _text(value) for value in bounds]
        return [[*texts, f"{self.figures.nan:,}"], _short(self.low), _short(self.high), self.counts]


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _short(value: float) -> float:
    return float(f"{value:.6g}")


async def survey(reader: CheckpointReader, infos: Sequence[TensorInfo]) -> AsyncIterator[tuple[TensorInfo, Survey]]:
    """Yield each tensor with its figures and histogram; large ones are read twice, part by part."""
    small = {info.key: info for info in infos if info.nbytes <= PART_BYTES}
    if small:
        async for key, tensor in reader.stream(dict.fromkeys(small), buffer_bytes=4 * PART_BYTES):
            bounds = _Bounds()
            bounds.add(tensor)
            if bins := bounds.bins():
                bins.add(tensor)
            yield small[key], _result(bounds, bins)
    for info in infos:
        if info.key in small:
            continue
        times = times_of(info)
        bounds = _Bounds(times)
        async for part in read_parts(reader, info, PART_BYTES):
            bounds.add(part)
        if bins := bounds.bins():
            async for part in read_parts(reader, info, PART_BYTES):
                bins.add(part)
        yield info, _result(bounds, bins, times)


class _Bounds:
    """Figures of all elements, and the bounds of the finite ones; ``times`` as in `Sums`."""

    def __init__(self, times: int = 1) -> None:
        self._sums: Sums | None = Sums(times)
        self._low, self._high = math.inf, -math.inf

    def add(self, part: torch.Tensor) -> None:
        if self._sums is None:
            return
        try:
            self._sums.add(part)
            for block in _finite(part):
                low, high = (bound.item() for bound in torch.aminmax(block))
                self._low, self._high = min(self._low, low), max(self._high, high)
        except (RuntimeError, NotImplementedError):
            self._sums = None

    @property
    def figures(self) -> Statistics | None:
        return None if self._sums is None else self._sums.result()

    def bins(self) -> _Bins | None:
        """Return empty bins for the finite elements; None if there are none, or if their range is too large."""
        low, high = self._low, self._high
        if low == high:
            half = max(abs(low) * 0.01, 0.5)
            low, high = low - half, high + half
        return _Bins(low, high) if self._sums is not None and math.isfinite(high - low) and low < high else None


class _Bins:
    """A histogram that grows part by part."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.counts = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, part: torch.Tensor) -> None:
        for block in _finite(part):
            # torch.histc would start threads for each tensor, which takes much longer on a busy machine.
            bins = ((block - self.low) / (self.high - self.low) * _BINS).to(torch.int64)
            self.counts += torch.bincount(bins.clamp_(max=_BINS - 1), minlength=_BINS)


def _finite(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the finite elements in double precision, in blocks that are not empty."""
    blocks = (block.to(torch.float64) for block in torch.split(numbers(part).reshape(-1), _BLOCK))
    return [kept for block in blocks if (kept := block[block.isfinite()]).numel()]


def _result(bounds: _Bounds, bins: _Bins | None, times: int = 1) -> Survey:
    if bins is None:
        return Survey(bounds.figures)
    return Survey(bounds.figures, bins.low, bins.high, tuple(n * times for n in bins.counts.tolist()))
