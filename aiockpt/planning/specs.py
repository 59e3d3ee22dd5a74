"""Tensor specs: the form of a tensor that a plan assumes, and the strides that it is stored with."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from aiockpt.core.strides import is_dense, row_strides
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.dtypes import QUANTIZED_DTYPES

_KEYS: Any = getattr(torch._C, "_dispatch_keys", None)
_KEY: Any = getattr(torch._C, "DispatchKey", None)
_CONJUGATE, _NEGATIVE = getattr(_KEY, "Conjugate", None), getattr(_KEY, "Negative", None)


def unstorable(dtype: torch.dtype, dims: int) -> str | None:
    """Return why a strided tensor of this form could be stored but not loaded; None if it could."""
    if dims > MAX_DIMS:
        return f"has {dims} dimensions, and torch can't copy one of more than {MAX_DIMS}; reshape it"
    if dtype in QUANTIZED_DTYPES:
        return f"has the dtype {dtype} but no scale, as only a view of whole numbers has; save these"
    return None


class TensorSpec(NamedTuple):
    """The form of a tensor that a plan assumes; staging checks it."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]  # in elements
    saved_stride: tuple[int, ...]  # as stored, without gaps
    is_raw: bool  # its memory is, byte for byte, what is stored
    device: torch.device
    is_conj: bool = False  # lazily conjugated
    is_neg: bool = False  # lazily negated

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor still has this form."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and tensor.device == self.device
            and lazy_bits(tensor) == (self.is_conj, self.is_neg)
        )


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether values are lazily conjugated, and negated.

    `is_conj` and `is_neg` release the GIL, and taking it back costs milliseconds while other threads want it; the
    dispatch keys of a tensor are read without that.
    """
    if _KEYS is None or _CONJUGATE is None or _NEGATIVE is None:
        return tensor.is_conj(), tensor.is_neg()
    keys = _KEYS(tensor)
    return keys.has(_CONJUGATE), keys.has(_NEGATIVE)


def is_plain_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, in host memory, and nothing else: not quantized, not lazily conjugated."""
    if _KEYS is None:
        is_strided = not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized
        return tensor.is_cpu and is_strided and not any(lazy_bits(tensor))
    return _KEYS(tensor).raw_repr() in _plain_keys()  # one call instead of six


@cache
def _plain_keys() -> frozenset[int]:
    """Return the dispatch keys of plain tensors, with and without autograd."""
    plain = torch.empty(1, device="cpu")
    with torch.inference_mode():
        inference = torch.empty(1, device="cpu")
    return frozenset(_KEYS(each).raw_repr() for each in (plain, inference))


def describe(tensor: torch.Tensor, *, by_rows: bool = False) -> TensorSpec | None:
    """Return the spec of a tensor; None if it is not plain: sparse, quantized, or of another layout.

    ``by_rows``: it is stored row by row, whatever its strides; else dense strides are kept.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    shape, dtype, stride, device = tensor.shape, tensor.dtype, tensor.stride(), tensor.device
    conj, neg = lazy_bits(tensor)
    if (tensor.is_contiguous() or (not by_rows and is_dense(shape, stride))) and not (conj or neg):
        return TensorSpec(shape, dtype, stride, stride, True, device)
    if by_rows:
        saved = row_strides(shape)
    else:  # the strides of Tensor.clone(), with which DCP stores a view
        saved = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta")).stride()
    return TensorSpec(shape, dtype, stride, saved, False, device, conj, neg)
