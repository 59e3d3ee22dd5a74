"""NumPy arrays as tensors that share their memory, and back.

An array is stored as a tensor. A record of the type "ndarray" among the manifest's containers marks the tensors that
were arrays; without a manifest they are loaded as tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.format.index import Entry, ObjPath

ARRAY_RECORD = "ndarray"
ARRAY_TYPES = frozenset({np.ndarray, np.memmap})  # other subclasses may hold more than their elements

_DTYPES = {  # native byte order only
    np.dtype(name): getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_TORCH_DTYPES = frozenset(_DTYPES.values())


class _Writable:
    """A read-only array that claims to be writable: torch warns about others, and warnings may be errors."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's dtype for one of NumPy; None if there is none, or the byte order is not native."""
    return _DTYPES.get(dtype)


def view_array(array: NDArray[Any]) -> torch.Tensor | None:
    """Return a tensor that shares an array's memory, or None: torch lacks the dtype, or can't express the strides."""
    size = array.itemsize
    if array.dtype not in _DTYPES or not array.flags.aligned or any(s < 0 or s % size for s in array.strides):
        return None
    if array.dtype.char == "Q":  # NumPy has two types that are uint64 on most platforms; torch knows one
        array = array.view(np.uint64)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def tensor_of(array: NDArray[Any]) -> torch.Tensor | None:
    """Return a tensor of an array's elements, a copy if the memory can't be shared; None if torch lacks the dtype."""
    if array.dtype not in _DTYPES:
        return None
    tensor = view_array(array)
    return view_array(np.array(array, order="K")) if tensor is None else tensor


def array_of(value: Any) -> Any:
    """Return an array that shares a tensor's memory; the value itself if NumPy lacks the dtype, or it is no tensor."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype in _TORCH_DTYPES:
        return value.numpy()
    return value


def array_names(containers: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the tensors that were arrays."""
    return {".".join(map(str, record["path"])) for record in containers if record["type"] == ARRAY_RECORD}


def check_arrays(
    entries: Mapping[str, Entry], paths: Mapping[str, ObjPath], containers: Iterable[Mapping[str, Any]]
) -> None:
    """Raise ValueError unless each record of an array names one tensor of a dtype that NumPy has."""
    containers = list(containers)
    arrays = [tuple(record["path"]) for record in containers if record["type"] == ARRAY_RECORD]
    counts = Counter(tuple(record["path"]) for record in containers) if arrays else Counter()
    for path in arrays:
        name = ".".join(map(str, path))
        entry = entries.get(name)
        if counts[path] > 1 or paths.get(name) != path or getattr(entry, "dtype", None) not in _TORCH_DTYPES:
            raise ValueError(f"{name!r:.100} is recorded as an array, but is no tensor that can be one")
