"""Reading of the headers of safetensors files.

A file is the header's length as 8 bytes, the header as JSON, and the bytes of the tensors without gaps. The
header gives for each tensor its dtype, its shape, and the first and last byte counted from the header's end.

Sources of the layout: the README of https://github.com/huggingface/safetensors and the checks of its Rust code; for
shards of ranks ``torch/distributed/checkpoint/filesystem.py`` and ``hf_storage.py``.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.strides import row_strides
from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.checks import MAX_DIMS
from aiockpt.format.index import Index, ItemRange, ObjPath, StoredChunk, TensorEntry, TensorItem
from aiockpt.format.names import SHARDING_KEY
from aiockpt.format.safetensors.writer import (
    DTYPE_NAMES,
    LENGTH,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    PAIRED_DTYPE,
    VERSIONS_KEY,
)

HEADER_PROBE_BYTES = 256 << 10  # read first of a file; holds the header of some two thousand tensors

_INT = frozenset({int})

_DTYPES: dict[str, torch.dtype] = {
    theirs: getattr(torch, ours) for theirs, ours in DTYPE_NAMES.items() if hasattr(torch, ours)
}


class HeaderError(ValueError):
    """A header is damaged; the message goes on after "the header of FILE"."""


def header_end(name: str, head: bytes, file_bytes: int) -> int:
    """Return the offset of the first tensor in a file that starts with ``head``, at least 8 bytes."""
    if file_bytes < LENGTH.size or len(head) < LENGTH.size:
        raise CorruptCheckpointError(
            f"{name} has {min(file_bytes, len(head))} bytes, too few for a safetensors file: it was truncated"
        )
    (length,) = LENGTH.unpack_from(head)
    end: int = LENGTH.size + length
    if length > MAX_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"{name} begins with a header length of {length} bytes, more than the {MAX_HEADER_BYTES} that "
            "safetensors allows: it is damaged, or no safetensors file"
        )
    if end > file_bytes:
        raise CorruptCheckpointError(
            f"{name} ends at byte {file_bytes}, inside its header, which goes up to byte {end}: it was truncated, "
            "or is no safetensors file"
        )
    return end


def decode_header(name: str, data: bytes, file_bytes: int) -> Index:
    """Return the index of a file's tensors, in the header's order, and of ``__metadata__`` as text.

    ``data`` is the beginning of the file, at least up to `header_end`. `with_shared_names` adds the names that share a
    tensor.
    """
    end = header_end(name, data, file_bytes)
    if len(data) < end:
        raise CorruptCheckpointError(f"{name} gave {len(data)} bytes of its {end} bytes of header: it was truncated")
    try:
        with gc_pause():
            document = parse_object(data[LENGTH.size : end])
            metadata = _texts(document.pop(METADATA_KEY, None))
            entries = _place_shards(_read_tensors(name, document, end, file_bytes), metadata)
            paths: dict[str, ObjPath] = {key: (key,) for key in entries}
    except HeaderError as exc:
        raise CorruptCheckpointError(
            f"the header of {name} {exc}; the file is damaged, restore it from where it came"
        ) from exc
    versions = _versions(metadata.pop(VERSIONS_KEY, ""))
    containers = (
        [{"path": [], "type": "OrderedDict", "at": 0, "module_metadata": versions[""]}] if "" in versions else ()
    )
    return Index(entries, paths, containers, metadata, "safetensors", versions=versions)


def _versions(text: str) -> dict[str, dict[str, Any]]:
    """Return the versions of modules that aiockpt records; none if they can't be read."""
    try:
        versions = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    is_map = type(versions) is dict and all(type(each) is dict for each in versions.values())
    is_whole = is_map and all(type(facts) is dict for each in versions.values() for facts in each.values())
    return versions if is_whole else {}


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise `HeaderError` for anything else."""
    try:
        text = data.decode()
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if type(document) is not dict:
            raise HeaderError("is no JSON object")
        if "\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()  # an escape may stand for half a character
    except HeaderError:
        raise
    except (ValueError, RecursionError) as exc:
        raise HeaderError(f"is not valid JSON ({exc})") from exc
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderError(f"has the key {twice!r} twice")
    return found


def _refuse_constant(constant: str) -> Any:
    raise HeaderError(f"holds {constant}, which is no JSON")


def _texts(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise HeaderError(f"has a {METADATA_KEY} that is not a map of texts to texts")
    return metadata


def _read_tensors(name: str, document: dict[str, Any], base: int, file_bytes: int) -> dict[str, TensorEntry]:
    room = file_bytes - base
    items: dict[tuple[Any, tuple[Any, ...]], tuple[TensorItem, tuple[int, ...]]] = {}  # by dtype and shape
    entries: dict[str, TensorEntry] = {}
    begins: list[int] = []
    ends: list[int] = []
    for key, described in document.items():
        try:
            dtype, sizes, (begin, end) = described["dtype"], described["shape"], described["data_offsets"]
            if type(sizes) is not list or not set(map(type, (*sizes, begin, end))) <= _INT:
                raise TypeError("a size or an offset that is no whole number")
            shape = tuple(sizes)
            item, origin = items.get((dtype, shape)) or items.setdefault((dtype, shape), _item(name, key, dtype, shape))
        except (KeyError, TypeError, ValueError) as exc:
            if isinstance(exc, HeaderError):
                raise
            raise HeaderError(f"describes the tensor {key!r} in a way that is not known ({exc})") from exc
        if not 0 <= begin <= end <= room or end - begin != item.nbytes:
            raise HeaderError(f"puts the tensor {key!r} of {item.nbytes} bytes at the bytes {begin} to {end} of {room}")
        begins.append(begin)
        ends.append(end)
        place = ItemRange(name, base + begin, item.nbytes)
        entries[key] = TensorEntry(item.dtype, item.shape, (StoredChunk(origin, item.shape, place, item),))
    _check_cover(list(entries), begins, ends, room)
    return entries


def _place_shards(entries: dict[str, TensorEntry], metadata: dict[str, str]) -> dict[str, TensorEntry]:
    """Return the tensors with the offsets that the metadata gives them, each as large as its shard shows it to be."""
    text = metadata.pop(SHARDING_KEY, None)
    metadata.pop("DCP_VERSION", None)
    if text is None:
        return entries
    try:
        places = parse_object(text.encode())
    except HeaderError as exc:
        raise HeaderError(f"has a {SHARDING_KEY} that {exc}") from exc
    for key, (dtype, shape, (chunk,)) in entries.items():
        place = places.get(key)
        offsets = place.get("saved_offsets") if type(place) is dict else None
        if type(offsets) is not list or len(offsets) != len(shape) or not set(map(type, offsets)) <= _INT:
            raise HeaderError(f"has a {SHARDING_KEY} without offsets of the tensor {key!r}")
        if not all(0 <= offset < 1 << 63 for offset in offsets):
            raise HeaderError(f"has a {SHARDING_KEY} with impossible offsets of the tensor {key!r}")
        if any(offsets):
            whole = tuple(map(operator.add, offsets, shape))
            entries[key] = TensorEntry(dtype, whole, (chunk._replace(offsets=tuple(offsets)),))
    return entries


def _item(name: str, key: str, dtype_name: Any, shape: tuple[int, ...]) -> tuple[TensorItem, tuple[int, ...]]:
    """Return the item of all tensors of this dtype and shape, and the offsets of their chunk."""
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise LoadError(
            f"{name}: the tensor {key!r} has the dtype {dtype_name!r}, which torch {torch.__version__} has no "
            "name for; store it in another dtype, or read it with a program that knows this one"
        )
    if len(shape) > MAX_DIMS or max(shape, default=0) >= 1 << 63:
        raise HeaderError(f"gives the tensor {key!r} an impossible shape of {len(shape)} dimensions")
    if min(shape, default=0) < 0 or math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 63:
        raise HeaderError(f"gives the tensor {key!r} the impossible shape {list(shape)}")
    if dtype_name == PAIRED_DTYPE:  # the file counts halves of bytes, torch counts pairs of them
        if not shape or shape[-1] % 2:
            raise LoadError(
                f"{name}: the tensor {key!r} has {list(shape)} 4-bit values, which torch can't hold in pairs"
            )
        shape = (*shape[:-1], shape[-1] // 2)
    nbytes = math.prod(shape) * dtype.itemsize
    return TensorItem(dtype, shape, row_strides(shape), 0, 0, nbytes, None), (0,) * len(shape)


def _check_cover(names: list[str], begins: list[int], ends: list[int], room: int) -> None:
    """Check that the tensors fill the file, without a gap and without sharing a byte."""
    starts, stops = np.array(begins, dtype=np.int64), np.array(ends, dtype=np.int64)
    order = np.lexsort((stops, starts))
    before = np.concatenate(([0], stops[order]))
    after = np.concatenate((starts[order], [room]))
    wrong = np.flatnonzero(before != after)
    if not len(wrong):
        return
    at = int(wrong[0])
    if at == len(names):
        raise HeaderError(f"leaves the last {room - int(before[at])} of the {room} bytes that follow it to no tensor")
    what = "overlaps with another" if before[at] > after[at] else "lies behind bytes that belong to none"
    raise HeaderError(f"describes the tensor {names[int(order[at])]!r} at byte {int(after[at])}, where it {what}")


def shared_names(index: Index) -> dict[str, str]:
    """Return the names that the metadata gives to tensors stored under another name, with that name.

    Safetensors stores no tensor twice. ``safetensors.torch.save_model`` keeps one name of a tied tensor, and records
    each of the others in ``__metadata__``, as ``{other name: kept name}``, among the user's own entries. An entry
    counts as such a record if its value is the name of a tensor, its key is not, and its key is one word. A user's
    entry that looks the same is taken for a name: to miss a tensor would be worse than to have one more.
    """
    return {
        key: kept
        for key, kept in index.metadata.items()
        if type(kept) is str and kept in index.entries and key not in index.entries and len(key.split()) == 1
    }


def with_shared_names(index: Index) -> Index:
    """Add the names that `shared_names` finds, each with the entry of the tensor that it shares.

    They follow the stored names. Those that may be the user's own entries also stay in the metadata: a key without a
    dot, as in ``{"main_tensor": "model.embed.weight"}``, beside a kept name with dots that does not end in it.
    """
    shared = shared_names(index)
    facts = {key for key, kept in shared.items() if "." not in key and "." in kept and not kept.endswith("." + key)}
    metadata = {key: value for key, value in index.metadata.items() if key not in shared or key in facts}
    return replace(index.with_names(shared), metadata=metadata)
