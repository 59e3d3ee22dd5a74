"""What a plan assumes of a tensor, and how it is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from aiockpt.core.strides import is_dense, row_strides
from aiockpt.format.checks import MAX_DIMS

_KEYS: Any = getattr(torch._C, "_dispatch_keys", None)
_KEY: Any = getattr(torch._C, "DispatchKey", None)
_CONJUGATE, _NEGATIVE = getattr(_KEY, "Conjugate", None), getattr(_KEY, "Negative", None)


_QUANTIZED = frozenset(
    dtype for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if (dtype := getattr(torch, name, None))
)


def unstorable(dtype: torch.dtype, dims: int) -> str | None:
    """Return what is wrong with a strided tensor of this form, which could be stored but not loaded; None: nothing."""
    if dims > MAX_DIMS:
        return f"has {dims} dimensions, and torch can't copy one of more than {MAX_DIMS}; reshape it"
    if dtype in _QUANTIZED:
        return f"has the dtype {dtype} but no scale, as only a view of whole numbers has; save these"
    return None


class TensorSpec(NamedTuple):
    """What a plan assumes of a tensor; staging checks it.

    Attributes:
        shape: its sizes.
        dtype: its dtype.
        stride: its strides in elements.
        saved_stride: the strides that it is stored with; they leave no gaps.
        is_raw: its memory is, byte for byte, what is stored.
        device: where it is.
        is_conj: its values are lazily conjugated.
        is_neg: its values are lazily negated.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    saved_stride: tuple[int, ...]
    is_raw: bool
    device: torch.device
    is_conj: bool = False
    is_neg: bool = False

    def describes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor still is what was planned for."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and tensor.device == self.device
            and _lazy(tensor) == (self.is_conj, self.is_neg)
        )


def _lazy(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Tell whether values are lazily conjugated, and negated.

    `is_conj` and `is_neg` let go of the interpreter, which then takes milliseconds to come back beside threads that
    want it; the keys of a tensor can be read without that.
    """
    if _KEYS is None or _CONJUGATE is None or _NEGATIVE is None:
        return tensor.is_conj(), tensor.is_neg()
    keys = _KEYS(tensor)
    return keys.has(_CONJUGATE), keys.has(_NEGATIVE)


def describe(tensor: torch.Tensor) -> TensorSpec | None:
    """Describe a tensor, or give None if it is not plain: sparse, quantized, or of another layout."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    shape, dtype, stride, device = tensor.shape, tensor.dtype, tensor.stride(), tensor.device
    conj, neg = _lazy(tensor)
    if (tensor.is_contiguous() or is_dense(shape, stride)) and not (conj or neg):
        return TensorSpec(shape, dtype, stride, stride, True, device)
    # The strides that Tensor.clone gives, which is what DCP stores a view with.
    blueprint = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return TensorSpec(shape, dtype, stride, torch.empty_like(blueprint).stride(), False, device, conj, neg)


def describe_contiguous(tensor: torch.Tensor) -> TensorSpec | None:
    """Describe a tensor that is stored row by row, whatever its strides; None as `describe`."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    shape, stride = tensor.shape, tensor.stride()
    conj, neg = _lazy(tensor)
    if tensor.is_contiguous() and not (conj or neg):
        return TensorSpec(shape, tensor.dtype, stride, stride, True, tensor.device)
    return TensorSpec(shape, tensor.dtype, stride, row_strides(shape), False, tensor.device, conj, neg)
