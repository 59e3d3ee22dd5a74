"""Compares values of two checkpoints: tensors part by part, and objects as far as they could be read."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aiockpt.core.extent import strided_parts

_BLOCK = 1 << 20  # elements that are compared at once, in up to five copies of eight bytes each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = float(1 << 62)  # differences of integers below it don't overflow


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences that count as none, as in `math.isclose`.

    Attributes:
        relative: to the larger of both absolute values.
        absolute: of the difference.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.relative or self.absolute)


class TensorDifference:
    """The difference of two tensors of one shape, summed up part by part.

    Attributes:
        elements: the number of elements that were compared.
        differing: the number of those that differ in a bit, and by more than is tolerated.
        max_abs: the largest difference of these; None if none is a number.
        max_rel: the largest ratio of a difference to the larger of both absolute values.
        nan: the number of differing elements that are nan in one of them or in both, with other bits.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self.elements = self.differing = self.nan = 0
        self.max_abs: float | None = None
        self.max_rel: float | None = None

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare two parts of shapes that broadcast; of different dtypes the values are compared, else the bits."""
        shape = np.broadcast_shapes(a.shape, b.shape)
        self.elements += math.prod(shape)
        for one, other in zip(_blocks(a.expand(shape)), _blocks(b.expand(shape)), strict=True):
            self._add(one, other)

    def repeat(self, times: int) -> None:
        """Count every element that was compared so often."""
        self.elements, self.differing, self.nan = (n * times for n in (self.elements, self.differing, self.nan))

    def _add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype is b.dtype:
            where = _bits(a).ne(_bits(b))
            where = where if where.dim() == 1 else where.any(1)
            if not where.any():
                return
            a, b = (_bits(each)[where].view(each.dtype).view(-1) for each in (a, b))
        try:
            one, other = _numbers(a), _numbers(b)
        except (RuntimeError, NotImplementedError):  # a dtype that torch can't compute with
            self.differing += a.numel()
            return
        gap, size = _gap(one, other), torch.maximum(_magnitude(one), _magnitude(other))
        is_nan = gap.isnan()
        apart = is_nan | (gap != 0) if a.dtype is not b.dtype else torch.ones_like(is_nan)
        if a.dtype is not b.dtype:
            both = _magnitude(one).isnan() & _magnitude(other).isnan()  # nan is nan in any dtype
            apart &= ~(both | one.eq(other))
        elif self._tolerance:
            apart &= ~(_magnitude(one).isnan() & _magnitude(other).isnan())
        if self._tolerance:
            most = (size * self._tolerance.relative).clamp(min=self._tolerance.absolute)
            apart &= ~(gap.isfinite() & (gap <= most))
        self.differing += int(apart.sum())
        self.nan += int((apart & is_nan).sum())
        known = apart & ~is_nan
        if known.any():
            gap, size = gap[known], size[known]
            ratio = torch.where(size > 0, gap / size, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
            self.max_abs = max(self.max_abs or 0.0, gap.max().item())
            self.max_rel = max(self.max_rel or 0.0, ratio.max().item())


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.detach().resolve_conj().resolve_neg().reshape(-1), _BLOCK)


def _bits(values: torch.Tensor) -> torch.Tensor:
    size = values.dtype.itemsize
    if size in _BITS:
        return values.view(_BITS[size])
    return values.contiguous().view(torch.uint8).view(-1, size)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return values in a dtype in which torch computes exactly, or with double precision."""
    if values.is_complex():
        return values.to(torch.complex128)
    if values.is_floating_point():
        narrow = values.dtype.itemsize == 1  # some of which torch converts to nothing else
        return (values.to(torch.float32) if narrow else values).to(torch.float64)
    return values.to(torch.float64 if values.dtype is torch.uint64 else torch.int64)


def _gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences as float64; equal infinities differ by 0."""
    if a.dtype is torch.int64 and b.dtype is torch.int64:
        about = (a.to(torch.float64) - b.to(torch.float64)).abs()
        return torch.where(about < _EXACT, (a - b).abs().to(torch.float64), about)
    if a.is_complex() or b.is_complex():
        return torch.where(a == b, 0.0, (a - b).abs()).to(torch.float64)
    a, b = a.to(torch.float64), b.to(torch.float64)
    return torch.where(a == b, 0.0, (a - b).abs())


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).abs() if values.dtype is torch.int64 else values.abs().to(torch.float64)


# --- objects --------------------------------------------------------------------------------------------


def same_objects(a: Any, b: Any, tolerance: Tolerance) -> bool:
    """Return whether two objects are equal: of one type, tensors and arrays as `TensorDifference` compares them."""
    waiting = [(a, b)]
    seen: set[tuple[int, int]] = set()  # objects may contain themselves
    while waiting:
        one, other = waiting.pop()
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        if type(one) is not type(other):
            return False
        if isinstance(one, Mapping):
            if one.keys() != other.keys():
                return False
            waiting += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            if len(one) != len(other):
                return False
            waiting += zip(one, other, strict=True)
        elif not _same_leaf(one, other, tolerance):
            return False
    return True


def _same_leaf(a: Any, b: Any, tolerance: Tolerance) -> bool:
    if isinstance(a, torch.Tensor):
        return _same_tensor(a, b, tolerance)
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return same_objects(a.tolist(), b.tolist(), tolerance) if a.dtype.hasobject else a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (
            a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
        )
    try:
        if bool(a == b):
            return True
    except (TypeError, ValueError, RuntimeError):
        pass
    return not isinstance(a, str | bytes | int | AbstractSet) and _pickled(a) == _pickled(b) is not None


def _same_tensor(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> bool:
    if (a.layout, a.dtype, a.shape) != (b.layout, b.dtype, b.shape):
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return same_objects(_parts(a), _parts(b), tolerance)
    difference = TensorDifference(tolerance)
    difference.add(a, b)
    return not difference.differing


def _parts(tensor: torch.Tensor) -> list[Any]:
    """Return the plain tensors and numbers that a sparse or quantized tensor consists of."""
    if tensor.layout is not torch.strided:
        return list(strided_parts(tensor))
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
    return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # what an object of a foreign class raises
        return None
