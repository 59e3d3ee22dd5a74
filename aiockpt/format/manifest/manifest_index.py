"""The index in the manifest: what a checkpoint holds and where, as columns of JSON.

It says what `.metadata` and the framing of the items say together, so that a reader needs neither of them, and
without an object for each tensor: 100,000 tensors are a few arrays, checked all at once.

The columns ``names``, ``parent``, ``form``, ``file``, ``offset`` and ``crc32`` have a row for each leaf, in the order
of the state dict. ``form`` is a position in ``forms``, which lists the distinct (dtype, shape, stride, bytes of the
item, offset of the payload in it, bytes of the payload); or -1 for an object, whose length is in ``objects``. The path
of a leaf is ``parents[parent]`` and what is left of its name after the parent's; the leaves of the parents listed
in ``sequences`` are at positions of a list. Offsets and lengths are in bytes; the CRC-32 is the payload's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.index import Index
from aiockpt.format.manifest.columnar_index import Form, IndexedEntries, IndexedPaths
from aiockpt.format.manifest.index_writer import head_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_MAX_BYTES = 1 << 60
_DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}" and not name.startswith("q")
}


def decode_index(document: Mapping[str, Any]) -> Index:
    """Read the index of a manifest, believing nothing.

    Args:
        document: the whole manifest, as JSON objects.

    Raises:
        ValueError, KeyError, TypeError: it is damaged; see
            `aiockpt.format.manifest.manifest.decode_manifest`, which makes them one of ours.
    """
    raw = document["index"]
    names, files = _texts(raw, "names"), _texts(raw, "files")
    numbers = dict(zip(names, range(len(names)), strict=True))
    if len(numbers) != len(names) or len(set(files)) != len(files):
        raise ValueError("a name stands twice in the index")
    forms = [_form(*form) for form in raw["forms"]]
    form_of = _numbers(raw, "form", len(names), -1, len(forms) - 1)
    offset_of = _numbers(raw, "offset", len(names), 0, _MAX_BYTES)
    # One more at the end, for objects, which have the form -1.
    length_of = np.array([*(form.item_bytes for form in forms), 0], dtype=np.int64)[form_of]
    _place_objects(raw["objects"], form_of, offset_of, length_of)
    entries = IndexedEntries(
        names=names,
        numbers=numbers,
        files=files,
        forms=forms,
        form_of=form_of,
        file_of=_numbers(raw, "file", len(names), 0, len(files) - 1),
        offset_of=offset_of,
        length_of=length_of,
        crc_of=_numbers(raw, "crc32", len(names), 0, 0xFFFF_FFFF),
    )
    return Index(entries, _paths(raw, names, numbers), document["containers"], document["metadata"], "aiockpt")


def _texts(raw: Any, column: str) -> list[str]:
    values = raw[column]
    if type(values) is not list or not set(map(type, values)) <= {str}:
        raise TypeError(f"the column {column} of the index is no list of names")
    return values


def _numbers(raw: Any, column: str, count: int, low: int, high: int) -> NDArray[np.int64]:
    values = raw[column]
    if type(values) is not list or len(values) != count:
        raise ValueError(f"the column {column} of the index does not have {count} rows")
    array = np.asarray(values) if values else np.zeros(0, dtype=np.int64)
    if array.dtype != np.int64 or array.ndim != 1:
        raise TypeError(f"the column {column} of the index holds other things than whole numbers")
    if count and not (low <= array.min() and array.max() <= high):
        raise ValueError(f"the column {column} of the index holds numbers beyond {low} to {high}")
    return array


def _form(dtype: Any, shape: list[int], stride: list[int], item_bytes: int, payload_offset: int, nbytes: int) -> Form:
    if type(dtype) is not str or dtype not in _DTYPES:
        raise ValueError(f"{dtype!r:.100} is no dtype of a tensor")
    if len(shape) > MAX_DIMS or len(stride) > MAX_DIMS:
        raise ValueError(f"a tensor has more than {MAX_DIMS} dimensions")
    counts = (*shape, *stride, item_bytes, payload_offset, nbytes)
    if not all(type(count) is int and 0 <= count <= _MAX_BYTES for count in counts):
        raise ValueError(f"{counts} are no sizes")
    form = Form(_DTYPES[dtype], tuple(shape), tuple(stride), item_bytes, payload_offset, nbytes)
    if not form.fits():
        raise ValueError(f"a tensor of the form {form} does not fit into its item")
    return form


def _place_objects(
    objects: Any, form_of: NDArray[np.int64], offset_of: NDArray[np.int64], length_of: NDArray[np.int64]
) -> None:
    """Fill in offsets and lengths of the objects."""
    leaves = np.flatnonzero(form_of == -1)
    if len(objects) != len(leaves):
        raise ValueError("the objects of the index are not the leaves without a form")
    if not len(leaves):
        return
    columns = dict(zip(("leaf", "offset", "length"), map(list, zip(*objects, strict=True)), strict=True))
    mine = _numbers(columns, "leaf", len(leaves), 0, len(form_of) - 1)
    if not np.array_equal(np.sort(mine), leaves):
        raise ValueError("the objects of the index are not the leaves without a form")
    offset_of[mine] = _numbers(columns, "offset", len(leaves), 0, _MAX_BYTES)
    length_of[mine] = _numbers(columns, "length", len(leaves), 0, _MAX_BYTES)


def _paths(raw: Any, names: list[str], numbers: dict[str, int]) -> IndexedPaths:
    parents = [tuple(parent) for parent in raw["parents"]]
    if not all(type(part) is str or (type(part) is int and part >= 0) for parent in parents for part in parent):
        raise TypeError("a parent in the index is no path")
    heads = [head_of(parent) for parent in parents]
    parent_of = _numbers(raw, "parent", len(names), 0, len(parents) - 1)
    sequences = frozenset(raw["sequences"])
    if not set(map(type, sequences)) <= {int}:
        raise TypeError("the column sequences of the index holds other things than whole numbers")
    rows = parent_of.tolist()
    if not all(map(str.startswith, names, map(heads.__getitem__, rows))):
        raise ValueError("a name in the index is not within its parent")
    paths = IndexedPaths(names, numbers, parents, heads, rows, sequences)
    for row in np.flatnonzero(np.isin(parent_of, list(sequences))).tolist() if sequences else ():
        position = names[row][len(heads[rows[row]]) :]
        if str(int(position)) != position or position.startswith("-"):
            raise ValueError(f"{names[row]} is at no position of a list")
    return paths
