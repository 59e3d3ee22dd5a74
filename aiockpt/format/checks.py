"""Checks of an index that may be damaged or hostile: every item in its file, every tensor whole, no byte claimed twice.

Whatever its format, a checkpoint that passes takes at most a small multiple of its files' bytes in memory when it is
loaded: an item of another dtype than the metadata says grows when it is cast, from one byte to 16 at most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from aiockpt.core.strides import view_fits
from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import (
    Index,
    ItemRange,
    ObjectEntry,
    ObjPath,
    StoredChunk,
    TensorEntry,
    TensorItem,
    lacking_of,
)

MAX_DIMS = 64  # the most dimensions that torch gives a tensor
_LIMIT = 2**63
_LEAST_GAPS = 1 << 20
_GAPS_PER_NAME = 64
_LEAST_COMPARISONS = 1 << 24
_COMPARISONS_PER_CHUNK = 8192
_INCOMPLETE = "are not all of"  # see `Cover`

Box = tuple[tuple[int, ...], tuple[int, ...]]  # a hyper-rectangle of a tensor: offsets and sizes


# An item of a file: begin, end, key, entry, and whether other items may have the same bytes.
_Claim = tuple[int, int, str, TensorEntry | ObjectEntry, bool]


def check_index(path: str, index: Index, files: Mapping[str, int], *, is_part: bool = False) -> None:
    """Check an index against the sizes of the files it refers to; one rank's part of it may lack chunks of tensors."""
    claims: defaultdict[str, list[_Claim]] = defaultdict(list)
    for name, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            _check_tensor(path, name, entry, is_part=is_part)
            for chunk in entry.chunks:
                _claim(path, name, entry, chunk.place, files, claims, shared=chunk.item is not None)
                _check_chunk(path, name, entry, chunk)
        elif isinstance(entry, ObjectEntry):
            _claim(path, name, entry, entry.place, files, claims, shared=False)
    for file, claimed in claims.items():
        _check_disjoint(path, file, claimed)


def _claim(
    path: str,
    name: str,
    entry: TensorEntry | ObjectEntry,
    place: ItemRange,
    files: Mapping[str, int],
    claims: defaultdict[str, list[_Claim]],
    *,
    shared: bool,
) -> None:
    end = place.offset + place.length
    if not 0 <= place.offset <= end <= files.get(place.file, -1):
        raise misplaced(path, name, place, files.get(place.file))
    if place.length:
        claims[place.file].append((place.offset, end, name, entry, shared))


def misplaced(path: str, name: str, place: ItemRange, size: int | None) -> LoadError:
    """Return the error for an item that does not lie within its file, which has ``size`` bytes; None: it is missing."""
    if size is not None:
        return CorruptCheckpointError(
            f"{path}/{place.file} ends at byte {size}, but {name} is at bytes {place.offset} to "
            f"{place.offset + place.length}: it was truncated. Use an older checkpoint."
        )
    if is_outside(place.file):
        return UnsafeCheckpointError(f"{path}: {name} refers to {place.file}, outside the checkpoint; it was not read")
    return CorruptCheckpointError(f"{path} lacks the file {place.file}, which holds {name}; use an older checkpoint")


def wrong_crc(path: str, name: str, place: ItemRange, item: TensorItem) -> CorruptCheckpointError:
    """Return the error for a payload that does not match its CRC."""
    return CorruptCheckpointError(
        f"{path}/{place.file}: the bytes of {name} (at offset {place.offset + item.payload_offset}, {item.nbytes} "
        "bytes) do not match their CRC: they changed since they were written. Use an older checkpoint."
    )


def is_outside(name: str) -> bool:
    """Return whether a file name leaves the checkpoint; symlinks are found when the file is opened."""
    return name.startswith("/") or ".." in name.split("/")


def _check_tensor(path: str, name: str, entry: TensorEntry, *, is_part: bool) -> None:
    """Check that the shape is possible and covered by the chunks."""
    shape, chunks = entry.shape, entry.chunks
    # torch computes the strides of an empty tensor as if its zeros were ones, and fails if that overflows 63 bits.
    if len(shape) > MAX_DIMS or math.prod([n or 1 for n in shape]) * entry.dtype.itemsize >= _LIMIT:
        raise CorruptCheckpointError(f"{path}: {name} can't have the shape {shape}; its metadata is damaged")
    if len(chunks) == 1 and chunks[0].sizes == shape and not any(chunks[0].offsets):
        return
    wrong = cover_of(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks], is_part=is_part).error
    if wrong:
        hint = ", or one rank saved it alone: then load its part with dcp.load" if wrong == _INCOMPLETE else ""
        raise CorruptCheckpointError(f"{path}: the chunks of {name} {wrong} {shape}; its metadata is damaged{hint}")


def _check_chunk(path: str, name: str, entry: TensorEntry, chunk: StoredChunk) -> None:
    if chunk.place.transforms:
        return  # its decoded length is known only after decoding
    if chunk.item is None:
        if math.prod(chunk.sizes) > chunk.place.length:  # its dtype may be smaller than the metadata's
            raise CorruptCheckpointError(
                f"{path}/{chunk.place.file}: the item of {name} at offset {chunk.place.offset} has "
                f"{chunk.place.length} bytes, too few for the elements of {chunk.sizes}; its metadata is damaged"
            )
    elif not _item_fits(chunk.item, chunk.place.length) or chunk.item.shape != chunk.sizes:
        raise CorruptCheckpointError(
            f"{path}/{chunk.place.file}: {name} reaches beyond its {chunk.place.length} bytes at offset "
            f"{chunk.place.offset}; the file is damaged"
        )


def _item_fits(item: TensorItem, length: int) -> bool:
    """Return whether the payload lies within the item, and the tensor within the payload."""
    if min(item.payload_offset, item.nbytes) < 0 or item.payload_offset + item.nbytes > length:
        return False
    return view_fits(item.storage_offset, item.shape, item.stride, item.dtype.itemsize, item.nbytes)


def _check_disjoint(path: str, file: str, claimed: Sequence[_Claim]) -> None:
    """Check that the items of a file are disjoint, except items that are the same tensor under several keys."""
    begins, ends = (np.array([claim[n] for claim in claimed], np.int64) for n in (0, 1))
    order = np.lexsort((ends, begins))
    begins, ends = begins[order], ends[order]
    same = (begins[1:] == begins[:-1]) & (ends[1:] == ends[:-1])
    wrong = (begins[1:] < np.maximum.accumulate(ends)[:-1]) & ~same
    if wrong.any():
        at = int(wrong.argmax())
        one, other = (claimed[order[n]][2] for n in (at, at + 1))
        raise CorruptCheckpointError(
            f"{path}/{file}: the items of {one} and {other} overlap at byte {begins[at + 1]}; the metadata is damaged"
        )
    tied: set[tuple[int, int]] = set()
    for at in np.flatnonzero(same).tolist():
        _, _, one, first, first_shared = claimed[order[at]]
        _, _, other, second, second_shared = claimed[order[at + 1]]
        if (first_shared and second_shared) or (id(first), id(second)) in tied:
            continue
        if one == other or not isinstance(first, TensorEntry) or first != second:
            raise CorruptCheckpointError(
                f"{path}/{file}: {one} and {other} share the same bytes at offset {begins[at]}, but are "
                "not the same tensor; the metadata is damaged"
            )
        tied.add((id(first), id(second)))


def check_paths(paths: Mapping[str, ObjPath], containers: Sequence[Mapping[str, Any]] = ()) -> None:
    """Check that lists are not much longer than the number of their recorded elements."""
    lengths: dict[str, int] = {}
    nodes: dict[str, int] = {}
    # Columnar paths report at once that they lead through no list.
    leaves = paths.values() if getattr(paths, "has_positions", True) else ()
    for steps in chain(leaves, [record["path"] for record in containers]):
        if int not in map(type, steps):
            continue
        node = "0"
        for step in steps:
            if type(step) is int:
                lengths[node] = max(lengths.get(node, 0), step)
            # A text as the key: its hash is salted, so that a file can't choose keys that collide.
            node = str(nodes.setdefault(f"{node} {step!r}", len(nodes) + 1))
    if sum(lengths.values()) > _LEAST_GAPS + _GAPS_PER_NAME * (len(paths) + len(containers)):
        raise ValueError("it has lists that are far longer than what is in them")


# --- boxes: which of them overlap, and whether together they cover a tensor -----------------------------


def overlap_in(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the numbers of two boxes of one number of dimensions that overlap, the later one first; None if none do.

    Raise CorruptCheckpointError if very many are neighbours in every dimension.
    """
    first: dict[Box, int] = {}
    for number, box in enumerate(boxes):
        if 0 not in box[1] and (one := first.setdefault(box, number)) != number:
            return number, one
    if len(first) < 2 or not boxes[0][0]:
        return None
    # Each box is compared with those that begin before it ends, along the dimension where these are the fewest.
    begins, counts = (np.array([box[part] for box in first], np.int64).T for part in (0, 1))
    ends = begins + counts
    orders = np.argsort(begins, axis=1, kind="stable")
    reaches = [np.searchsorted(a[order], z[order]) for a, z, order in zip(begins, ends, orders, strict=True)]
    along = min(range(len(begins)), key=lambda dim: int(reaches[dim].sum()))
    order, reach = orders[along], reaches[along]
    comparisons = (int(reach.sum()) - len(first) * (len(first) + 1) // 2) * len(begins)
    if comparisons > _LEAST_COMPARISONS + _COMPARISONS_PER_CHUNK * len(first):
        raise CorruptCheckpointError(
            f"its {len(first)} chunks are neighbours in so many dimensions that comparing them would take too long; "
            "its metadata is damaged, or hostile"
        )
    numbers, begins, ends = [*first.values()], begins[:, order], ends[:, order]
    for at in np.flatnonzero(reach > np.arange(1, len(first) + 1)).tolist():
        beside = slice(at + 1, int(reach[at]))
        meet = ((begins[:, beside] < ends[:, at, None]) & (ends[:, beside] > begins[:, at, None])).all(0)
        if meet.any():
            pair = numbers[order[at]], numbers[order[at + 1 + int(meet.argmax())]]
            return max(pair), min(pair)
    return None


class Cover(NamedTuple):
    """How boxes cover a tensor."""

    error: str = ""  # how they fail to cover each element once
    wrong: tuple[int, ...] = ()  # the number of a box that lies outside, or of two that overlap, if they are known
    lacking: int = 0  # elements


def cover_of(shape: tuple[int, ...], boxes: Sequence[Box], *, is_part: bool = False) -> Cover:
    """Check that boxes cover each element of a shape once; those of a part may lack elements."""
    for number, (offsets, sizes) in enumerate(boxes):
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return Cover("have another number of dimensions than", (number,))
        if any(at < 0 or n < 0 or at + n > total for at, n, total in zip(offsets, sizes, shape, strict=True)):
            return Cover("lie outside", (number,))
    lacking = lacking_of(shape, [sizes for _, sizes in boxes])
    if lacking > 0 and not is_part:
        return Cover(_INCOMPLETE, lacking=lacking)
    if len(boxes) < 2:
        return Cover()
    # From here on, boxes that do not overlap cover everything, for they have as many elements.
    split = [dim for dim, total in enumerate(shape) if any(sizes[dim] != total for _, sizes in boxes)]
    if len(split) == 1 and lacking >= 0:  # the most frequent case, and many times as fast without arrays
        cuts = sorted((offsets[split[0]], sizes[split[0]]) for offsets, sizes in boxes)
        if all(begin + size <= after for (begin, size), (after, _) in pairwise(cuts)):
            return Cover()
    try:
        overlap = overlap_in(boxes)
    except CorruptCheckpointError:
        return Cover("are cut in too many ways to be those of")
    return Cover("overlap in", overlap) if overlap else Cover()
