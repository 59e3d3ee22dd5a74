"""Reading of the manifest, `.aiockpt.json`, without trusting it.

The index in the manifest duplicates `.metadata` and the framing of the items as columns of JSON, so that a reader
needs neither, and no object per tensor: 100,000 tensors are a few arrays, checked all at once.

The columns ``names`` and ``parent`` have a row for each leaf, in the order of the state dict, and so have ``form``,
``file``, ``offset`` and ``crc32``. ``form`` is a position in ``forms``, which lists the distinct (dtype, shape, stride,
bytes of the item, offset of the payload in it, bytes of the payload); or -1 for an object, whose row, offset and length
are in ``objects``. The path of a leaf is ``parents[parent]`` and the rest of its name after the parent's; the leaves of
the parents listed in ``sequences`` are elements of a list. Offsets and lengths are in bytes; the CRC-32 is the
payload's. A column ``xxh3_128``, if there is one, has the hash of each payload in hexadecimal digits, or null: see
`aiockpt.planning.delta`.

Where several ranks have stored tensors in parts, the section has another name, as versions before knew no parts: they
read `.metadata`. There ``division`` has for each leaf a position in ``divisions``, which
lists the distinct (shape of the whole tensor, offsets of each part), or -1; and ``form``, ``file``, ``offset`` and
``crc32`` have a row for each part, leaf by leaf.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.checks import MAX_DIMS, check_paths, cover_of
from aiockpt.format.dtypes import DTYPES
from aiockpt.format.hashes import ALGORITHM, DIGITS
from aiockpt.format.index import Division, Index
from aiockpt.format.item.arrays import ARRAY_RECORD, check_arrays
from aiockpt.format.keys import FACTORIES, decode_key
from aiockpt.format.manifest.columnar_index import IndexedEntries, IndexedPaths, ItemForm, PartColumns
from aiockpt.format.manifest.index_writer import head_of
from aiockpt.format.manifest.manifest import (
    DIVIDED_KEY,
    FORMAT_VERSION,
    INDEX_KEY,
    SEAL,
    JsonValue,
    Manifest,
    disks_in,
    facts_in,
    read_user_metadata,
)
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.format.transforms.base import decode_transformed

if TYPE_CHECKING:
    from numpy.typing import NDArray


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest."""
    try:
        body, _, seal = data.rpartition(SEAL.encode())
        document = json.loads(data.decode())
        if int(seal[:8], 16) != crc32(body):
            raise ValueError("its text does not match its CRC")
        if document["format_version"] > FORMAT_VERSION:
            raise LoadError(
                f"{MANIFEST_NAME} has the format version {document['format_version']}, which a later version of "
                "aiockpt has written: update aiockpt to read it"
            )
        document["containers"] = containers(document["containers"])
        document["metadata"] = read_user_metadata(mapping(document["metadata"]))
        section = document.get(INDEX_KEY, document.get(DIVIDED_KEY))
        index = None if section is None else decode_index(document, section)
        check_paths({} if index is None else index.paths, document["containers"])
        if index is not None:
            check_arrays(index.entries, index.paths, document["containers"])
        if (facts := facts_in(document)) is None:
            raise ValueError("it does not list its files")
        return Manifest(
            writer=text(document["writer"]),
            created=text(document["created"]),
            metadata=mapping(document["metadata"]),
            files=facts,
            totals=mapping(document["totals"]),
            times_s=mapping(document["times_s"]),
            containers=document["containers"],
            index=index,
            transformed=decode_transformed(document["transformed"]) if "transformed" in document else {},
            disks=disks_in(document),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as exc:
        raise CorruptCheckpointError(
            f"{MANIFEST_NAME} is damaged or was edited ({exc}); restore it, or remove it to read the "
            "checkpoint as a plain DCP one"
        ) from exc


# --- sections other than the index ------------------------------------------------------------------


_MAX_FILE_BYTES = 1 << 62
_CONTAINER_TYPES = ("dict", "OrderedDict", "Counter", "defaultdict", "list", "tuple", ARRAY_RECORD)


def mapping(value: Any) -> dict[str, Any]:
    """Return a value that must be a mapping."""
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} stands where a mapping belongs")
    return value


def text(value: Any) -> str:
    """Return a value that must be text."""
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} stands where a text belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_FILE_BYTES:
        raise ValueError("something else stands where a number of bytes belongs")
    return value


def containers(records: Any) -> list[dict[str, JsonValue]]:
    """Return the container records of the state dict."""
    if type(records) is not list:
        raise TypeError(f"a {type(records).__name__} stands where the containers belong")
    return [_container(mapping(record)) for record in records]


def _container(record: dict[str, Any]) -> dict[str, JsonValue]:
    path, kind = record["path"], record["type"]
    if type(path) is not list or not set(map(type, path)) <= {str, int} or any(type(n) is int and n < 0 for n in path):
        raise TypeError("a container has something else for its path")
    if kind not in _CONTAINER_TYPES:
        raise ValueError("a container is of a type that is not known")
    read: dict[str, JsonValue] = {"path": path, "type": kind, "at": _count(record["at"])}
    integers = record.get("int_keys")
    if integers is not None:
        # A mapping, so that a key is found in it as fast in a long one.
        read["int_keys"] = integers if integers is True else dict.fromkeys(map(text, integers))
    if "factory" in record:
        if text(record["factory"]) not in FACTORIES:
            raise ValueError("a defaultdict makes its values with something that is not known")
        read["factory"] = record["factory"]
    if "keys" in record:
        read["keys"] = {each: _key(each, key) for each, key in mapping(record["keys"]).items()}
    if "module_metadata" in record:
        read["module_metadata"] = {name: mapping(facts) for name, facts in mapping(record["module_metadata"]).items()}
    return read


def _key(name: str, value: Any) -> JsonValue:
    if str(decode_key(value)) != name:
        raise ValueError("a container has a key that is not the one of its name")
    return value  # type: ignore[no-any-return]


# --- the index --------------------------------------------------------------------------------------


_MAX_BYTES = 1 << 60
_DTYPES = {  # without aliases and quantized ones
    name: value for name, value in DTYPES.items() if str(value) == f"torch.{name}" and not name.startswith("q")
}


def decode_index(document: Mapping[str, Any], raw: Any) -> Index:
    """Return the index; `decode_manifest` translates the ValueError, KeyError or TypeError of a damaged one."""
    names, files = _texts(raw, "names"), _texts(raw, "files")
    numbers = dict(zip(names, range(len(names)), strict=True))
    if len(numbers) != len(names) or len(set(files)) != len(files):
        raise ValueError("a name stands twice in the index")
    forms = [_form(*form) for form in raw["forms"]]
    parts, rows = _parts(raw, len(names))
    form_of = _numbers(raw, "form", rows, -1, len(forms) - 1)
    if parts is not None:
        _check_parts(parts, forms, form_of)
    offset_of = _numbers(raw, "offset", rows, 0, _MAX_BYTES)
    # One more at the end, for objects, which have the form -1.
    length_of = np.array([*(form.item_bytes for form in forms), 0], dtype=np.int64)[form_of]
    _place_objects(raw["objects"], form_of, offset_of, length_of)
    entries = IndexedEntries(
        names=names,
        numbers=numbers,
        files=files,
        forms=forms,
        form_of=form_of,
        file_of=_numbers(raw, "file", rows, 0, len(files) - 1),
        offset_of=offset_of,
        length_of=length_of,
        crc_of=_numbers(raw, "crc32", rows, 0, 0xFFFF_FFFF),
        parts=parts,
        hash_of=_hashes(raw, rows),
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
    # NumPy chooses int64 only if every value is a whole number of that size: one check for the whole column.
    array = np.asarray(values) if values else np.zeros(0, dtype=np.int64)
    if array.dtype != np.int64 or array.ndim != 1:
        raise TypeError(f"the column {column} of the index holds other things than whole numbers")
    if count and not (low <= array.min() and array.max() <= high):
        raise ValueError(f"the column {column} of the index holds numbers beyond {low} to {high}")
    return array


def _hashes(raw: Any, count: int) -> list[str | None] | None:
    values = raw.get(ALGORITHM)
    if values is None:
        return None
    if type(values) is not list or len(values) != count or not set(map(type, values)) <= {str, type(None)}:
        raise ValueError(f"the column {ALGORITHM} of the index does not have {count} hashes")
    if any(value is not None and len(value) != DIGITS for value in values):
        raise ValueError(f"the column {ALGORITHM} of the index holds other things than hashes")
    return values


def _form(
    dtype: Any, shape: list[int], stride: list[int], item_bytes: int, payload_offset: int, nbytes: int
) -> ItemForm:
    if type(dtype) is not str or dtype not in _DTYPES:
        raise ValueError(f"{dtype!r:.100} is no dtype of a tensor")
    if len(shape) > MAX_DIMS or len(stride) > MAX_DIMS:
        raise ValueError(f"a tensor has more than {MAX_DIMS} dimensions")
    counts = (*shape, *stride, item_bytes, payload_offset, nbytes)
    if not all(type(count) is int and 0 <= count <= _MAX_BYTES for count in counts):
        raise ValueError(f"{counts} are no sizes")
    form = ItemForm(_DTYPES[dtype], tuple(shape), tuple(stride), item_bytes, payload_offset, nbytes)
    if not form.fits():
        raise ValueError(f"a tensor of the form {form} does not fit into its item")
    return form


def _parts(raw: Any, names: int) -> tuple[PartColumns | None, int]:
    """Return the rows of each name, and the number of all; None if each name has one."""
    if "divisions" not in raw:
        return None, names
    divisions = [Division(tuple(shape), [tuple(each) for each in offsets]) for shape, offsets in raw["divisions"]]
    for division in divisions:
        numbers = [*division.shape, *chain.from_iterable(division.offsets)]
        is_sound = len(division.shape) <= MAX_DIMS and all(type(n) is int and 0 <= n <= _MAX_BYTES for n in numbers)
        # torch computes the strides of an empty tensor as if its zeros were ones, and fails if that overflows 63 bits.
        if not is_sound or math.prod([n or 1 for n in division.shape]) > _MAX_BYTES:
            raise ValueError("a tensor of the index is divided in a way that is not possible")
    division_of = _numbers(raw, "division", names, -1, len(divisions) - 1)
    # One more at the end, for what is stored whole, which has the division -1.
    ends = np.cumsum(np.array([*(len(division.offsets) for division in divisions), 1], dtype=np.int64)[division_of])
    begin_of = np.concatenate([np.zeros(1, np.int64), ends])
    return PartColumns(divisions, division_of, begin_of[:-1]), int(begin_of[-1])


def _check_parts(parts: PartColumns, forms: Sequence[ItemForm], form_of: NDArray[np.int64]) -> None:
    """Check that the parts of each tensor are all of it, each element once."""
    known: set[tuple[int, bytes]] = set()
    for number in np.flatnonzero(parts.division_of >= 0).tolist():
        division, begin = int(parts.division_of[number]), int(parts.begin_of[number])
        shape, offsets = parts.divisions[division]
        rows = form_of[begin : begin + len(offsets)]
        if (division, rows.tobytes()) in known:
            continue
        known.add((division, rows.tobytes()))
        mine = [forms[row] for row in rows.tolist()]
        if rows.min(initial=0) < 0 or len({form.dtype for form in mine}) != 1:
            raise ValueError("the parts of a tensor in the index are not of one dtype")
        if wrong := cover_of(shape, [(at, form.shape) for at, form in zip(offsets, mine, strict=True)]).error:
            raise ValueError(f"the parts of a tensor in the index {wrong} {shape}")


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
