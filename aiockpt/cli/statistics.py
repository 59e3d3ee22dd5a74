"""Figures of stored tensors, read in parts, so that none has to fit into memory."""

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


class Sums:
    """Figures of a tensor that grow part by part; the tensor repeats ``times`` times what is added."""

    def __init__(self, times: int = 1) -> None:
        self._times = times
        self._minimum, self._maximum = math.inf, -math.inf
        self._total = 0.0
        self._count = self._nan = 0

    def add(self, part: torch.Tensor) -> None:
        """Add a part; raise RuntimeError or NotImplementedError if torch can't compute with its dtype."""
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

    def result(self) -> Statistics:
        """Return the figures of all parts."""
        nan = self._nan * self._times
        if not self._count:
            return Statistics(None, None, None, nan)
        return Statistics(self._minimum, self._maximum, self._total / self._count, nan)


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


async def measure(
    reader: CheckpointReader, infos: Sequence[TensorInfo]
) -> AsyncIterator[tuple[TensorInfo, Statistics | None]]:
    """Yield each tensor with its figures; None where torch can't compute with its dtype.

    Small tensors are read ahead, in memory that is bounded; large ones part by part.
    """
    small = {info.key: info for info in infos if info.nbytes <= PART_BYTES}
    if small:
        async for key, tensor in reader.stream(list(small), buffer_bytes=4 * PART_BYTES):
            yield small[key], measured([tensor])
    for info in infos:
        if info.key not in small:
            sums: Sums | None = Sums(times_of(info))
            async for part in read_parts(reader, info, PART_BYTES):
                try:
                    if sums is not None:
                        sums.add(part)
                except (RuntimeError, NotImplementedError):
                    sums = None
            yield info, None if sums is None else sums.result()


def measured(parts: Sequence[torch.Tensor]) -> Statistics | None:
    """Return the figures of a tensor's parts; None where torch can't compute with its dtype."""
    sums = Sums()
    try:
        for part in parts:
            sums.add(part)
    except (RuntimeError, NotImplementedError):
        return None
    return sums.result()


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
