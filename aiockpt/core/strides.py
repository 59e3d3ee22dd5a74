"""Arithmetic of strided views; sizes, strides and offsets are in elements."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that is stored row by row, without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last of a view, both included; zero for an empty one."""
    return 0 if 0 in shape else sum(map(mul, shape, stride)) - sum(stride) + 1


def view_fits(offset: int, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, nbytes: int) -> bool:
    """Return whether a view lies within ``nbytes`` bytes; sizes and strides may be of any origin."""
    if len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        return False
    return 0 in shape or (offset + reach(shape, stride)) * itemsize <= nbytes


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether strides reach every element of a storage once, in some order of the dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
