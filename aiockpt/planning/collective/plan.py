"""Global plan: assigns every part of a tensor and every object to one writing rank, balanced by bytes.

In most programs very many tensors are sharded alike, and very many ranks have parts of the same tensors. So ranks
with the same names are grouped, and a tensor's sharding pattern is the column of its kinds over these ranks: it is
found and checked once for all tensors with the same columns.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import SaveError
from aiockpt.format.checks import Box, cover_of

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ObjPath
    from aiockpt.planning.collective.messages import RankInventory, RankLeaf, ShardForm


# --- sharding patterns ------------------------------------------------------------------------------


Cut = tuple["Box", ...]  # offsets and sizes of the parts of a tensor
_Kind = tuple["ShardForm | None", tuple[int, ...]]
_Parts = dict[tuple[int, ...], tuple["ShardForm", "list[RankLeaf]"]]  # of a tensor, by offset, and their holders


class ShardingPattern(NamedTuple):
    """The ranks that have each part of a tensor, or an object; a holder is (rank, position in `NamePattern.leaves`)."""

    form: ShardForm | None  # of one of its parts; None for an object
    cut: Cut  # its parts; () for an object
    nbytes: tuple[int, ...]  # of each part in a file
    holders: tuple[tuple[RankLeaf, ...], ...]  # of each part; for an object all its holders
    first: RankLeaf  # the first holder
    sole_ranks: tuple[int, ...] | None  # the rank of each part if each has only one holder, else None


class NamePattern(NamedTuple):
    """A name and its sharding pattern."""

    sharding: ShardingPattern
    leaves: tuple[int, ...]  # its leaf in each group of ranks with the same names


def find_patterns(ranks: Sequence[RankInventory]) -> dict[str, NamePattern]:
    """Return the pattern of each name, in the order of the ranks' leaves."""
    groups = _rank_groups(ranks)
    kinds: dict[_Kind, int] = {}
    columns = [_columns([ranks[rank] for rank in group], kinds) for group in groups]
    where: dict[str, list[RankLeaf]] = {}
    for number, group in enumerate(groups):
        for leaf, name in enumerate(ranks[group[0]].names):
            where.setdefault(name, []).append((number, leaf))
    kind_list = list(kinds)
    shardings: dict[tuple[tuple[int, bytes], ...], ShardingPattern] = {}
    patterns: dict[str, NamePattern] = {}
    for name, places in where.items():
        key = tuple((number, columns[number][leaf]) for number, leaf in places)
        sharding = shardings.get(key)
        if sharding is None:
            sharding = shardings[key] = _sharding_of(
                name, [(groups[number], column) for number, column in key], kind_list
            )
        patterns[name] = NamePattern(sharding, tuple(leaf for _, leaf in places))
    return patterns


def _rank_groups(ranks: Sequence[RankInventory]) -> list[list[int]]:
    """Group the ranks that have the same names."""
    groups: list[list[int]] = []
    alike: dict[tuple[int, str, str], list[list[int]]] = {}
    for rank, inventory in enumerate(ranks):
        names = inventory.names
        similar = alike.setdefault((len(names), names[0], names[-1]) if names else (0, "", ""), [])
        group = next((each for each in similar if (other := ranks[each[0]].names) is names or other == names), None)
        if group is None:
            group = []
            similar.append(group)
            groups.append(group)
        group.append(rank)
    return groups


def _columns(group: Sequence[RankInventory], kinds: dict[_Kind, int]) -> list[bytes]:
    """Return for each leaf its kind on every rank of a group, as numbers."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    forms: dict[ShardForm, int] = {}
    rows = np.empty((len(group), len(group[0].names)), np.int32)
    for row, inventory in zip(rows, group, strict=True):
        form_of = [forms.setdefault(form, len(forms)) for form in inventory.forms]
        known = list(forms)
        mine: dict[tuple[int, tuple[int, ...]], int] = {}
        kind_of = [mine.setdefault(kind, len(mine)) for kind in zip(inventory.form_of, inventory.offsets, strict=True)]
        of_all = []
        for number, offsets in mine:
            form = form_of[number] if number >= 0 else -1
            kind = numbers.get((form, offsets))
            if kind is None:
                kind = kinds.setdefault((known[form] if form >= 0 else None, offsets), len(kinds))
                numbers[form, offsets] = kind
            of_all.append(kind)
        row[:] = np.array(of_all, np.int32)[kind_of] if kind_of else 0
    return [column.tobytes() for column in np.ascontiguousarray(rows.T)]


def _sharding_of(name: str, columns: Sequence[tuple[Sequence[int], bytes]], kinds: Sequence[_Kind]) -> ShardingPattern:
    """Return, after checking it, the pattern of a name from its column in each group of ranks that has it."""
    rows = sorted(
        (rank, which, kind)
        for which, (group, column) in enumerate(columns)
        for rank, kind in zip(group, np.frombuffer(column, np.int32).tolist(), strict=True)
    )
    first = rows[0][:2]
    form = kinds[rows[0][2]][0]
    parts: _Parts = {}
    for rank, which, kind in rows:
        own, offsets = kinds[kind]
        if own is not form:
            _check_alike(name, form, first[0], own, rank)
        if own is None:
            continue
        part, holders = parts.setdefault(offsets, (own, []))
        if part.sizes != own.sizes:
            raise SaveError(
                f"{name} has at {offsets} a part of {part.sizes} on rank {holders[0][0]} and one of {own.sizes} on "
                f"rank {rank}: they overlap"
            )
        holders.append((rank, which))
    if form is None:
        return ShardingPattern(None, (), (), (tuple(row[:2] for row in rows),), first, None)
    _check_whole(name, form.shape, parts)
    every = tuple(tuple(holders) for _, holders in parts.values())
    sole = tuple(holders[0][0] for holders in every) if all(len(holders) == 1 for holders in every) else None
    cut = tuple((offsets, part.sizes) for offsets, (part, _) in parts.items())
    return ShardingPattern(form, cut, tuple(part.item.item_bytes for part, _ in parts.values()), every, first, sole)


def _check_alike(name: str, form: ShardForm | None, first: int, other: ShardForm | None, rank: int) -> None:
    one, two = _describe(form), _describe(other)
    if one != two:
        raise SaveError(
            f"{name} is {one} on rank {first} but {two} on rank {rank}. A name must mean the same on all ranks that "
            "have it; put the rank into the names of values that differ."
        )


def _describe(form: ShardForm | None) -> str:
    return "an object" if form is None else f"a {form.dtype} tensor of {form.shape}"


def _check_whole(name: str, shape: tuple[int, ...], parts: _Parts) -> None:
    """Check that the parts of a tensor make up all of it, each element once."""
    boxes = [(offsets, part.sizes) for offsets, (part, _) in parts.items()]
    cover, ranks = cover_of(shape, boxes), [holders[0][0] for _, holders in parts.values()]
    if cover.lacking:
        volume = math.prod(shape)
        raise SaveError(
            f"{name}: the ranks have {volume - cover.lacking} of its {volume} elements together; every rank that has a "
            "part of it must save it"
        )
    if cover.wrong[1:]:
        one, other = (f"of {boxes[n][1]} at {boxes[n][0]} on rank {ranks[n]}" for n in cover.wrong)
        raise SaveError(f"{name}: the part {one} overlaps that {other}")
    if cover.wrong:
        (offsets, sizes), rank = boxes[cover.wrong[0]], ranks[cover.wrong[0]]
        raise SaveError(f"{name} has on rank {rank} a part of {sizes} at {offsets}, outside of {shape}")
    if cover.error:
        raise SaveError(f"{name}: the parts {cover.error} {shape}")


# --- the global plan --------------------------------------------------------------------------------


# For each part of a tensor the rank that writes it, and the leaf there.
_Writers = tuple[tuple[int, ...], tuple[int, ...]]


class GlobalTensor(NamedTuple):
    """A tensor of the checkpoint, with one row for each part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: Cut  # the parts; one object for all tensors that are cut alike
    ranks: tuple[int, ...]  # the writer of each part
    leaves: tuple[int, ...]  # the leaf there


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """The plan of a save by several ranks."""

    tensors: Mapping[str, GlobalTensor]
    objects: Mapping[str, RankLeaf]  # rank and leaf that is stored
    paths: Mapping[str, ObjPath]  # of each name, in the order of the state dict
    containers: list[dict[str, Any]]  # records of the containers that paths can't express
    assignments: list[list[int]]  # for each rank the leaves that it writes
    aliases: Mapping[str, str]  # tensors that are tied to another one on all ranks, and that one


def differing_replicas(ranks: Sequence[RankInventory], digests: Sequence[bytes]) -> list[str]:
    """Return the names of the tensors whose digests differ between ranks.

    The digests are of a rank's leaves, 4 bytes each: 0 if the leaf has none, and no bytes if none of the rank's has.
    """
    numbers = [
        np.frombuffer(data or bytes(4 * len(rank.names)), np.uint32) for rank, data in zip(ranks, digests, strict=True)
    ]
    found: dict[str, None] = {}
    seen: dict[str, int] = {}
    groups = _rank_groups(ranks)
    for group in groups:
        names, rows = ranks[group[0]].names, np.stack([numbers[rank] for rank in group])
        high = rows.max(0)
        low = np.where(rows == 0, high, rows).min(0)
        found |= dict.fromkeys(names[leaf] for leaf in np.flatnonzero(low != high))
        if len(groups) > 1:
            others = [seen.setdefault(name, digest) if digest else 0 for name, digest in zip(names, high, strict=True)]
            found |= dict.fromkeys(names[leaf] for leaf in np.flatnonzero(others != high))
    return list(found)


def plan_globally(ranks: Sequence[RankInventory], apart: Container[str] = ()) -> GlobalPlan:
    """Assign every part and object to a rank: of the tensors ``apart``, which differ, to the lowest that has it."""
    with gc_pause():
        patterns = find_patterns(ranks)
        aliases = _aliases(ranks, patterns)
        writers = _choose_writers(len(ranks), patterns, aliases, apart)
        tensors: dict[str, GlobalTensor] = {}
        for name, (sharding, _) in patterns.items():
            if (form := sharding.form) is not None:
                first = aliases.get(name, name)
                chosen = _writers_of(sharding.cut, patterns[first].sharding.cut, writers[first])
                tensors[name] = GlobalTensor(form.dtype, form.shape, sharding.cut, *chosen)
        firsts = {name: (sharding.first[0], leaves[sharding.first[1]]) for name, (sharding, leaves) in patterns.items()}
        paths = {name: ranks[rank].paths[leaf] for name, (rank, leaf) in firsts.items()}
        objects = {name: leaf for name, leaf in firsts.items() if patterns[name].sharding.form is None}
        _check_paths(ranks, patterns, paths)
        assignments = _assignments(len(ranks), writers, objects)
        return GlobalPlan(tensors, objects, paths, _containers(ranks, patterns), assignments, aliases)


def _check_paths(
    ranks: Sequence[RankInventory], patterns: Mapping[str, NamePattern], paths: Mapping[str, ObjPath]
) -> None:
    """Check that the ranks' state dicts are parts of one."""
    leaves = dict(zip(paths.values(), paths, strict=True))
    containers: dict[ObjPath, ObjPath] = {}
    for name, path in paths.items():
        for depth in range(len(path) - 1, 0, -1):
            if path[:depth] in containers:
                break
            containers[path[:depth]] = path
            if path[:depth] in leaves:
                other = leaves[path[:depth]]
                on = " and ".join(f"{one} is on rank {patterns[one].sharding.first[0]}" for one in (name, other))
                raise SaveError(
                    f"{name} is within {other}, which is a value of its own on another rank: {on}; rename one"
                )
    seen: set[int] = set()
    for rank, inventory in enumerate(ranks):
        if id(inventory.paths) in seen:
            continue  # many ranks share one list
        seen.add(id(inventory.paths))
        for name, path in zip(inventory.names, inventory.paths, strict=True):
            if path != paths[name]:
                raise SaveError(f"{name} is at {path} of the state dict on rank {rank} but at {paths[name]} on another")


def _assignments(count: int, writers: Mapping[str, _Writers], objects: Mapping[str, RankLeaf]) -> list[list[int]]:
    assignments: list[list[int]] = [[] for _ in range(count)]
    for ranks, leaves in writers.values():
        for rank, leaf in zip(ranks, leaves, strict=True):
            assignments[rank].append(leaf)
    for rank, leaf in objects.values():
        assignments[rank].append(leaf)
    for assignment in assignments:
        assignment.sort()
    return assignments


def _aliases(ranks: Sequence[RankInventory], patterns: Mapping[str, NamePattern]) -> dict[str, str]:
    """Return the names that are tied, on every rank that has them, to one other name."""
    aliases: dict[str, str] = {}
    for name in dict.fromkeys(inventory.names[leaf] for inventory in ranks for leaf in inventory.tied):
        sharding, leaves = patterns[name]
        firsts: set[str | None] = set()
        for (offsets, _), holders in zip(sharding.cut, sharding.holders, strict=False):
            for inventory, leaf in ((ranks[rank], leaves[which]) for rank, which in holders):
                one = inventory.tied.get(leaf)
                firsts.add(None if one is None or inventory.offsets[one] != offsets else inventory.names[one])
        (first,) = firsts if len(firsts) == 1 else (None,)
        if first is not None and first != name and first not in aliases:
            theirs = dict(patterns[first].sharding.cut)
            if all(theirs.get(offsets) == sizes for offsets, sizes in sharding.cut):
                aliases[name] = first
    return {name: first for name, first in aliases.items() if first not in aliases}


def _writers_of(cut: Cut, known: Cut, writers: _Writers) -> _Writers:
    """Return the writers of a tensor's parts: those of the same parts of the tensor that it is tied to."""
    if cut is known:
        return writers
    by_offsets = {part[0]: holder for part, *holder in zip(known, *writers, strict=True)}
    holders = [by_offsets[offsets] for offsets, _ in cut]
    return tuple(rank for rank, _ in holders), tuple(leaf for _, leaf in holders)


def _choose_writers(
    count: int, patterns: Mapping[str, NamePattern], aliases: Mapping[str, str], apart: Container[str]
) -> dict[str, _Writers]:
    """Choose one holder of each part: the largest part first, the rank with the least to write so far."""
    chosen: dict[str, list[RankLeaf]] = {}
    writers: dict[str, _Writers] = {}
    loads = [0] * count
    alone: dict[int, tuple[ShardingPattern, int]] = {}
    shared: list[tuple[int, str, int]] = []
    for name, (sharding, leaves) in patterns.items():
        if sharding.form is None or name in aliases:
            continue
        if sharding.sole_ranks is not None:
            if len(leaves) == 1:
                of_parts = leaves * len(sharding.cut)
            else:
                of_parts = tuple(leaves[holders[0][1]] for holders in sharding.holders)
            writers[name] = sharding.sole_ranks, of_parts
            alone[id(sharding)] = sharding, alone.get(id(sharding), (sharding, 0))[1] + 1
            continue
        chosen[name] = [holders[0] for holders in sharding.holders]
        for number, (nbytes, holders) in enumerate(zip(sharding.nbytes, sharding.holders, strict=True)):
            if len(holders) > 1 and name not in apart:
                shared.append((nbytes, name, number))
            else:
                loads[holders[0][0]] += nbytes
    for sharding, times in alone.values():
        for rank, nbytes in zip(sharding.sole_ranks or (), sharding.nbytes, strict=True):
            loads[rank] += times * nbytes
    _balance(shared, patterns, loads, chosen)
    for name, those in chosen.items():
        leaves = patterns[name].leaves
        writers[name] = tuple(rank for rank, _ in those), tuple(leaves[which] for _, which in those)
    return writers


def _balance(
    shared: list[tuple[int, str, int]],
    patterns: Mapping[str, NamePattern],
    loads: list[int],
    chosen: dict[str, list[RankLeaf]],
) -> None:
    """Choose among several holders of a part the one with the least to write so far."""
    shared.sort(key=lambda item: -item[0])
    # Parts that the same ranks have share one heap. Its loads may be out of date; as loads only grow, it is enough to
    # correct the top until it is right.
    heaps: dict[tuple[RankLeaf, ...], list[tuple[int, RankLeaf]]] = {}
    for nbytes, name, number in shared:
        holders = patterns[name].sharding.holders[number]
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(loads[holder[0]], holder) for holder in holders]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][1][0]]:
            heapq.heapreplace(heap, (loads[heap[0][1][0]], heap[0][1]))
        holder = heap[0][1]
        loads[holder[0]] += nbytes
        chosen[name][number] = holder


def _containers(ranks: Sequence[RankInventory], patterns: Mapping[str, NamePattern]) -> list[dict[str, Any]]:
    """Merge the records of all ranks, placed by the order of all names."""
    numbers = {name: number for number, name in enumerate(patterns)}
    merged: dict[ObjPath, dict[str, Any]] = {}
    numbered: set[ObjPath] = set()
    for inventory in ranks:
        for record in inventory.containers:
            path = tuple(record["path"])
            at = record["at"]
            place = numbers[inventory.names[at]] if at < len(inventory.names) else len(patterns)
            known = merged.setdefault(path, {**record, "at": place})
            if "keys" in record:
                known["keys"] = {**known.get("keys", {}), **record["keys"]}
            if "int_keys" in record:
                numbered.add(path)
    for path in numbered:
        merged[path]["int_keys"] = _int_keys(ranks, path)
    return sorted(merged.values(), key=lambda record: record["at"])


def _int_keys(ranks: Sequence[RankInventory], path: ObjPath) -> bool | list[str]:
    """Return which keys of a dict are numbers: True for all, or those that are."""
    depth = len(path)
    integers: dict[str, None] = {}
    every = True
    seen: set[tuple[int, str]] = set()
    for inventory in ranks:
        known: Any = next((r.get("int_keys", []) for r in inventory.containers if tuple(r["path"]) == path), [])
        same = (id(inventory.paths), repr(known))  # many ranks share one list of paths
        if same in seen:
            continue
        seen.add(same)
        keys = dict.fromkeys(
            str(other[depth]) for other in inventory.paths if other[:depth] == path and len(other) > depth
        )
        every = every and (known is True or not keys)
        integers |= keys if known is True else dict.fromkeys(known)
    return every or list(integers)
