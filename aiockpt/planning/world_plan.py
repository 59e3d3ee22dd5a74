"""Who writes what: from what each rank has to a plan for all of them. Pure.

Every part of a tensor, and every object, is written by exactly one rank. What several ranks have is spread so that
all write about as many bytes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.errors import SaveError
from aiockpt.planning.coverage import overlapping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from aiockpt.format.index import ObjPath

Holder = tuple[int, int]
"""A rank, and the number of a leaf there."""


class PartForm(NamedTuple):
    """What parts of tensors that differ in their place alone have in common.

    Attributes:
        dtype: the dtype of the tensor.
        shape: the sizes of the whole tensor.
        sizes: the sizes of the part.
        nbytes: the bytes that it takes in a file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        """The bytes of the part itself."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one rank has, leaf by leaf; small enough to travel.

    Attributes:
        names: the name of each leaf.
        paths: the path of each leaf in the state dict.
        forms: the distinct forms of the parts.
        form_of: for each leaf its position in ``forms``; -1 for objects.
        offsets: for each leaf where the part begins in the whole tensor; nothing for objects.
        tied: the leaves that are the same memory as an earlier one, with that one.
        containers: records of the containers that paths can't express.
    """

    names: list[str]
    paths: list[ObjPath]
    forms: list[PartForm]
    form_of: list[int]
    offsets: list[tuple[int, ...]]
    tied: dict[int, int] = field(default_factory=dict)
    containers: list[dict[str, Any]] = field(default_factory=list)


class WorldPart(NamedTuple):
    """A part of a tensor, and who writes it.

    Attributes:
        offsets: where it begins in the tensor.
        sizes: its sizes.
        writer: rank and leaf whose item holds it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    writer: Holder


class WorldTensor(NamedTuple):
    """A tensor of the checkpoint, as the ranks write it together."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[WorldPart]


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The plan of a save by several ranks.

    Attributes:
        tensors: what is stored of each tensor.
        objects: for each object the rank and leaf that is stored.
        paths: for each name, in the order of the state dict, its path there.
        containers: records of the containers that paths can't express.
        shares: for each rank the leaves that it writes.
    """

    tensors: Mapping[str, WorldTensor]
    objects: Mapping[str, Holder]
    paths: Mapping[str, ObjPath]
    containers: list[dict[str, Any]]
    shares: list[list[int]]


@dataclass(slots=True)
class _Found:
    """A name as it was found on some ranks: the holders of each part of its tensor, or of its object."""

    form: PartForm | None
    first: int
    parts: dict[tuple[int, ...], tuple[tuple[int, ...], list[Holder]]] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)


def plan_world(ranks: Sequence[Holdings]) -> WorldPlan:
    """Decide who writes what.

    Raises:
        SaveError: the ranks contradict each other, or have not all of a tensor together; it names the key.
    """
    found = _collect(ranks)
    for name, each in found.items():
        _check_whole(name, each)
    aliases = _aliases(ranks, found)
    writers = _choose_writers(ranks, found, aliases)
    shares: list[list[int]] = [[] for _ in ranks]
    tensors: dict[str, WorldTensor] = {}
    objects: dict[str, Holder] = {}
    for name, each in found.items():
        if each.form is None:
            rank, leaf = objects[name] = each.holders[0]
            shares[rank].append(leaf)
            continue
        parts: list[WorldPart] = []
        for offsets, (sizes, _) in each.parts.items():
            alias = aliases.get(name)
            rank, leaf = writer = writers[alias or name, offsets]
            if alias is None:
                shares[rank].append(leaf)
            parts.append(WorldPart(offsets, sizes, writer))
        tensors[name] = WorldTensor(each.form.dtype, each.form.shape, parts)
    for share in shares:
        share.sort()
    paths = {name: ranks[each.first].paths[_leaf_of(each)] for name, each in found.items()}
    return WorldPlan(tensors, objects, paths, _containers(ranks, found), shares)


def _leaf_of(found: _Found) -> int:
    """Give the leaf on the first rank that has a name."""
    holders = found.holders or next(iter(found.parts.values()))[1]
    return holders[0][1]


def _collect(ranks: Sequence[Holdings]) -> dict[str, _Found]:
    """Find out who has what."""
    found: dict[str, _Found] = {}
    for rank, held in enumerate(ranks):
        forms = held.forms
        for leaf, (name, number, offsets) in enumerate(zip(held.names, held.form_of, held.offsets, strict=True)):
            form = forms[number] if number >= 0 else None
            each = found.get(name)
            if each is None:
                each = found[name] = _Found(form, rank)
            elif each.form is not form:
                _check_alike(name, each, form, rank)
            if form is None:
                each.holders.append((rank, leaf))
                continue
            part = each.parts.get(offsets)
            if part is None:
                each.parts[offsets] = (form.sizes, [(rank, leaf)])
            elif part[0] != form.sizes:
                raise SaveError(
                    f"{name} has at {offsets} a part of {part[0]} on rank {part[1][0][0]} and one of {form.sizes} on "
                    f"rank {rank}: they overlap"
                )
            else:
                part[1].append((rank, leaf))
    return found


def _check_alike(name: str, each: _Found, form: PartForm | None, rank: int) -> None:
    mine, theirs = (_kind(known) for known in (form, each.form))
    if mine != theirs:
        raise SaveError(
            f"{name} is {theirs} on rank {each.first} but {mine} on rank {rank}. What has one name on several ranks "
            "must be the same there; put the rank into the name of what is not."
        )


def _kind(form: PartForm | None) -> str:
    return "an object" if form is None else f"a {form.dtype} tensor of {form.shape}"


def _check_whole(name: str, each: _Found) -> None:
    """Check that the parts of a tensor make up all of it, each element once."""
    if each.form is None:
        return
    shape = each.form.shape
    volume = 0
    for offsets, (sizes, holders) in each.parts.items():
        volume += math.prod(sizes)
        if any(at < 0 or at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise SaveError(f"{name} has on rank {holders[0][0]} a part of {sizes} at {offsets}, outside of {shape}")
    chunks = [(offsets, sizes) for offsets, (sizes, _) in each.parts.items()]
    meet = overlapping(chunks) if len(chunks) > 1 else []
    if meet:
        one, other = (list(each.parts.items())[number] for number in meet[0])
        raise SaveError(
            f"{name}: the part of {one[1][0]} at {one[0]} on rank {one[1][1][0][0]} overlaps that of {other[1][0]} at "
            f"{other[0]} on rank {other[1][1][0][0]}"
        )
    if volume != math.prod(shape):
        raise SaveError(
            f"{name}: the ranks have {volume} of its {math.prod(shape)} elements together; every rank that has a part "
            "of it must save it"
        )


def _aliases(ranks: Sequence[Holdings], found: Mapping[str, _Found]) -> dict[str, str]:
    """Find the names whose memory is, on every rank that has them, that of one other name."""
    aliases: dict[str, str] = {}
    for name in {held.names[leaf] for held in ranks for leaf in held.tied}:
        each = found[name]
        holders = [(offsets, holder) for offsets, (_, all_) in each.parts.items() for holder in all_]
        firsts = {_first_of(ranks[rank], leaf, offsets) for offsets, (rank, leaf) in holders}
        (first,) = firsts if len(firsts) == 1 else (None,)
        if first is not None and first != name and first not in aliases:
            theirs = found[first].parts
            if all(offsets in theirs and theirs[offsets][0] == sizes for offsets, (sizes, _) in each.parts.items()):
                aliases[name] = first
    return {name: first for name, first in aliases.items() if first not in aliases}


def _first_of(held: Holdings, leaf: int, offsets: tuple[int, ...]) -> str | None:
    first = held.tied.get(leaf)
    return None if first is None or held.offsets[first] != offsets else held.names[first]


def _choose_writers(
    ranks: Sequence[Holdings], found: Mapping[str, _Found], aliases: Mapping[str, str]
) -> dict[tuple[str, tuple[int, ...]], Holder]:
    """Choose one of the holders of each part: the largest first, the rank with the least to write so far."""
    writers: dict[tuple[str, tuple[int, ...]], Holder] = {}
    loads = [0] * len(ranks)
    shared: list[tuple[int, str, tuple[int, ...], list[Holder]]] = []
    for name, each in found.items():
        if each.form is None or name in aliases:
            continue
        for offsets, (_, holders) in each.parts.items():
            rank, leaf = holders[0]
            nbytes = ranks[rank].forms[ranks[rank].form_of[leaf]].nbytes
            if len(holders) == 1:
                loads[rank] += nbytes
                writers[name, offsets] = holders[0]
            else:
                shared.append((nbytes, name, offsets, holders))
    shared.sort(key=lambda item: -item[0])
    # Parts that the same ranks have are chosen from one heap; its loads may be out of date, for they only grow.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for nbytes, name, offsets, holders in shared:
        candidates = tuple(rank for rank, _ in holders)
        heap = heaps.get(candidates)
        if heap is None:
            heap = heaps[candidates] = [(loads[rank], rank) for rank in set(candidates)]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        loads[rank] += nbytes
        writers[name, offsets] = next(holder for holder in holders if holder[0] == rank)
    return writers


def _containers(ranks: Sequence[Holdings], found: Mapping[str, _Found]) -> list[dict[str, Any]]:
    """Put the records of all ranks together, placed by the order of all names."""
    numbers = {name: number for number, name in enumerate(found)}
    merged: dict[ObjPath, dict[str, Any]] = {}
    numbered: set[ObjPath] = set()
    for held in ranks:
        for record in held.containers:
            path = tuple(record["path"])
            at = record["at"]
            place = numbers[held.names[at]] if at < len(held.names) else len(found)
            merged.setdefault(path, {**record, "at": place})
            if "int_keys" in record:
                numbered.add(path)
    for path in numbered:
        merged[path]["int_keys"] = _int_keys(ranks, path)
    return sorted(merged.values(), key=lambda record: record["at"])


def _int_keys(ranks: Sequence[Holdings], path: ObjPath) -> bool | list[str]:
    """Tell which keys of a dict are numbers: True for all, or those that are."""
    depth = len(path)
    integers: dict[str, None] = {}
    every = True
    for held in ranks:
        known: Any = next((r.get("int_keys", []) for r in held.containers if tuple(r["path"]) == path), [])
        keys = dict.fromkeys(str(other[depth]) for other in held.paths if other[:depth] == path and len(other) > depth)
        every = every and (known is True or not keys)
        integers |= keys if known is True else dict.fromkeys(known)
    return every or list(integers)
