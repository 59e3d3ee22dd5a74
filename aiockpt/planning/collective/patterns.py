"""How tensors are spread over ranks: found out, and checked, once for all that are spread alike. Pure.

In most programs very many tensors are cut in the same way, and very many ranks have parts of the same tensors. So
ranks with the same names are looked at together, and a tensor is known by the column of what it is on each of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aiockpt.errors import SaveError
from aiockpt.planning.coverage import overlapping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.planning.collective.inventory import RankInventory, RankLeaf, ShardForm

Cut = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Offsets and sizes of the parts of a tensor."""
_Kind = tuple["ShardForm | None", tuple[int, ...]]


class ShardingPattern(NamedTuple):
    """Which ranks have what of a tensor, or have an object.

    A holder is given as a rank, and which of the name's leaves it is there; see `NamePattern`.

    Attributes:
        form: a form of its parts; None for an object.
        cut: its parts, none for an object.
        nbytes: the bytes that each part takes in a file.
        holders: for each part who has it; for an object all that have it.
        first: the first who has it.
        alone: for each part the rank that has it, if none has several; else None.
    """

    form: ShardForm | None
    cut: Cut
    nbytes: tuple[int, ...]
    holders: tuple[tuple[RankLeaf, ...], ...]
    first: RankLeaf
    alone: tuple[int, ...] | None


class NamePattern(NamedTuple):
    """A name as it was found on some ranks.

    Attributes:
        spread: who has it.
        leaves: the leaves that it is; one for all ranks that have the same names.
    """

    spread: ShardingPattern
    leaves: tuple[int, ...]


def find(ranks: Sequence[RankInventory]) -> dict[str, NamePattern]:
    """Find out who has what, by name and in the order in which the ranks have them.

    Raises:
        SaveError: the ranks contradict each other, or have not all of a tensor together; it names the key.
    """
    crews = _rank_groups(ranks)
    kinds: dict[_Kind, int] = {}
    columns = [_columns([ranks[rank] for rank in crew], kinds) for crew in crews]
    where: dict[str, list[RankLeaf]] = {}
    for number, crew in enumerate(crews):
        for leaf, name in enumerate(ranks[crew[0]].names):
            where.setdefault(name, []).append((number, leaf))
    known = list(kinds)
    spreads: dict[tuple[tuple[int, bytes], ...], ShardingPattern] = {}
    found: dict[str, NamePattern] = {}
    for name, places in where.items():
        key = tuple((number, columns[number][leaf]) for number, leaf in places)
        spread = spreads.get(key)
        if spread is None:
            spread = spreads[key] = _spread(name, [(crews[number], column) for number, column in key], known)
        found[name] = NamePattern(spread, tuple(leaf for _, leaf in places))
    return found


def _rank_groups(ranks: Sequence[RankInventory]) -> list[list[int]]:
    """Put the ranks together that have the same names."""
    crews: list[list[int]] = []
    alike: dict[tuple[int, str, str], list[list[int]]] = {}
    for rank, held in enumerate(ranks):
        names = held.names
        similar = alike.setdefault((len(names), names[0], names[-1]) if names else (0, "", ""), [])
        crew = next((each for each in similar if (other := ranks[each[0]].names) is names or other == names), None)
        if crew is None:
            crew = []
            similar.append(crew)
            crews.append(crew)
        crew.append(rank)
    return crews


def _columns(crew: Sequence[RankInventory], kinds: dict[_Kind, int]) -> list[bytes]:
    """Give for each leaf what it is on every rank of a crew, as numbers of kinds."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    forms: dict[ShardForm, int] = {}
    rows = np.empty((len(crew), len(crew[0].names)), np.int32)
    for row, held in zip(rows, crew, strict=True):
        form_of = [forms.setdefault(form, len(forms)) for form in held.forms]
        known = list(forms)
        mine: dict[tuple[int, tuple[int, ...]], int] = {}
        kind_of = [mine.setdefault(kind, len(mine)) for kind in zip(held.form_of, held.offsets, strict=True)]
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


def _spread(name: str, columns: Sequence[tuple[Sequence[int], bytes]], kinds: Sequence[_Kind]) -> ShardingPattern:
    """Look at a name on all ranks that have it."""
    held = sorted(
        (rank, number, kind)
        for number, (crew, column) in enumerate(columns)
        for rank, kind in zip(crew, np.frombuffer(column, np.int32).tolist(), strict=True)
    )
    first, number, kind = held[0]
    form = kinds[kind][0]
    parts: dict[tuple[int, ...], tuple[ShardForm, list[RankLeaf]]] = {}
    for rank, which, kind in held:
        mine, offsets = kinds[kind]
        if mine is not form:
            _check_alike(name, form, first, mine, rank)
        if mine is None:
            continue
        part = parts.setdefault(offsets, (mine, []))
        if part[0].sizes != mine.sizes:
            raise SaveError(
                f"{name} has at {offsets} a part of {part[0].sizes} on rank {part[1][0][0]} and one of {mine.sizes} on "
                f"rank {rank}: they overlap"
            )
        part[1].append((rank, which))
    if form is None:
        return ShardingPattern(None, (), (), (tuple((rank, which) for rank, which, _ in held),), (first, number), None)
    _check_whole(name, form.shape, parts)
    holders = tuple(tuple(each) for _, each in parts.values())
    alone = tuple(each[0][0] for each in holders) if all(len(each) == 1 for each in holders) else None
    cut = tuple((offsets, part.sizes) for offsets, (part, _) in parts.items())
    return ShardingPattern(form, cut, tuple(part.nbytes for part, _ in parts.values()), holders, (first, number), alone)


def _check_alike(name: str, form: ShardForm | None, first: int, other: ShardForm | None, rank: int) -> None:
    theirs, mine = _said(form), _said(other)
    if mine != theirs:
        raise SaveError(
            f"{name} is {theirs} on rank {first} but {mine} on rank {rank}. What has one name on several ranks "
            "must be the same there; put the rank into the name of what is not."
        )


def _said(form: ShardForm | None) -> str:
    return "an object" if form is None else f"a {form.dtype} tensor of {form.shape}"


def _check_whole(
    name: str, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], tuple[ShardForm, Sequence[RankLeaf]]]
) -> None:
    """Check that the parts of a tensor make up all of it, each element once."""
    volume = 0
    for offsets, (form, holders) in parts.items():
        sizes = form.sizes
        volume += math.prod(sizes)
        if any(at < 0 or at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise SaveError(f"{name} has on rank {holders[0][0]} a part of {sizes} at {offsets}, outside of {shape}")
    meet = overlapping([(offsets, form.sizes) for offsets, (form, _) in parts.items()]) if len(parts) > 1 else []
    if meet:
        one, other = (list(parts.items())[number] for number in meet[0])
        raise SaveError(
            f"{name}: the part of {one[1][0].sizes} at {one[0]} on rank {one[1][1][0][0]} overlaps that of "
            f"{other[1][0].sizes} at {other[0]} on rank {other[1][1][0][0]}"
        )
    if volume != math.prod(shape):
        raise SaveError(
            f"{name}: the ranks have {volume} of its {math.prod(shape)} elements together; every rank that has a part "
            "of it must save it"
        )
