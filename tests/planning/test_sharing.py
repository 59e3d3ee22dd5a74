"""The plan by which ranks read together: everything is covered, once, by ranks that need it, in balance."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.planning.collective.sharing import (
    CELL_BYTES,
    SMALL_CELL_BYTES,
    SMALL_ITEMS,
    Cell,
    Need,
    Share,
    cells_of,
    plan_shares,
    shares_of,
)

MIB = 1 << 20


def large(begin: int, end: int, *, base: int = 4096, nbytes: int | None = None, phase: int = 0) -> Need:
    """Return a need within a payload, counted from its beginning."""
    return Need(phase, "f", base, base + begin, base + end, end - begin if nbytes is None else nbytes)


def small(begin: int, end: int, nbytes: int | None = None) -> Need:
    return Need(0, "f", SMALL_ITEMS, begin, end, end - begin if nbytes is None else nbytes)


def test_what_all_need_is_read_once_and_in_balance() -> None:
    shares = plan_shares({rank: [large(0, 100 * MIB), small(500 * MIB, 501 * MIB)] for rank in range(4)})
    assert sum(share.end - share.begin for share in shares) == 101 * MIB
    assert all(len(share.takers) == 3 for share in shares)
    read = Counter[int]()
    for share in shares:
        read[share.reader] += share.end - share.begin
    assert max(read.values()) - min(read.values()) <= CELL_BYTES


def test_rank_that_reads_much_alone_reads_less_for_others() -> None:
    own = Need(0, "own", 0, 0, 64 * MIB, 64 * MIB)
    shares = plan_shares({0: [large(0, 64 * MIB), own], 1: [large(0, 64 * MIB)], 2: [large(0, 64 * MIB)]})
    assert {share.reader for share in shares} == {1, 2}


@pytest.mark.parametrize(
    "needs",
    [
        {0: [large(0, MIB)]},
        {0: [large(0, MIB)], 1: [large(MIB, 2 * MIB)]},  # rows of different ranks in one cell
        {0: [large(0, MIB, phase=0)], 1: [large(0, MIB, phase=1)]},
        {0: [large(0, MIB, base=0)], 1: [large(0, MIB, base=4096)]},
        {0: [large(0, 11 * MIB // 10)], 1: [large(MIB, 2 * MIB)]},  # too little in common
        {0: [small(0, MIB, 4096)], 1: [small(0, MIB, 4096)]},  # mostly gaps
        {0: [], 1: []},
    ],
    ids=["alone", "apart", "phases", "payloads", "little", "gaps", "nothing"],
)
def test_what_spares_nothing_is_not_shared(needs: dict[int, list[Need]]) -> None:
    assert plan_shares(needs) == []


def test_ranks_are_sent_what_they_need() -> None:
    halves = {0: [large(0, MIB)], 1: [large(0, MIB)], 2: [large(MIB, 2 * MIB)], 3: [large(MIB, 2 * MIB)]}
    (share,) = plan_shares(halves)
    assert (share.begin, share.end) == (4096, 4096 + 2 * MIB)
    assert share.takers == ((1, 4096, 4096 + MIB), *((rank, 4096 + MIB, 4096 + 2 * MIB) for rank in (2, 3)))
    assert shares_of(2, [share]) == [share._replace(takers=(share.takers[1],))]
    assert shares_of(0, [share]) == [share]
    assert shares_of(4, [share]) == []


def test_neighbours_are_read_and_sent_at_once() -> None:
    items = [small(n * MIB, (n + 1) * MIB) for n in range(12)]
    shares = plan_shares({0: items, 1: items, 2: [items[1]]})
    assert [[cell.number for cell in share.cells] for share in shares] == [[0], [1], [*range(2, 10)], [10, 11]]
    assert [(share.begin // MIB, share.end // MIB) for share in shares] == [(0, 1), (1, 2), (2, 10), (10, 12)]
    apart = [small(0, MIB // 4), small(MIB, 2 * MIB)]
    assert len(plan_shares({0: apart, 1: apart})) == 2


def test_columns_of_all_ranks_are_read_once() -> None:
    columns = {rank: [large(rank * 100, 7 * MIB - (3 - rank) * 100, nbytes=7 * MIB // 4 + 1000)] for rank in range(4)}
    (share,) = plan_shares({rank: [*needs, *needs] for rank, needs in columns.items()})
    assert (share.begin, share.end) == (4096, 4096 + 7 * MIB)


def test_file_that_is_read_in_order_is_read_by_one_rank_or_by_each() -> None:
    item = large(0, 60 * MIB, base=64)._replace(is_ordered=True)
    other = large(0, 60 * MIB)._replace(file="g")
    shares = plan_shares({rank: [item, other] for rank in range(3)})
    assert [len({share.reader for share in shares if share.cells[0].file == file}) for file in "fg"] == [1, 2]
    part = large(0, 20 * MIB, base=64)._replace(is_ordered=True)
    assert plan_shares({0: [item], 1: [item], 2: [part]}) == []


def test_cells_of_a_large_payload() -> None:
    found = cells_of(large(CELL_BYTES - 1, 2 * CELL_BYTES + 1))
    assert [(cell.number, begin - 4096, end - 4096) for cell, begin, end in found] == [
        (0, CELL_BYTES - 1, CELL_BYTES),
        (1, CELL_BYTES, 2 * CELL_BYTES),
        (2, 2 * CELL_BYTES, 2 * CELL_BYTES + 1),
    ]
    assert cells_of(small(SMALL_CELL_BYTES - 1, SMALL_CELL_BYTES + 9))[0][0] == Cell(0, "f", SMALL_ITEMS, 0)


@st.composite
def some_needs(draw: st.DrawFn) -> Need:
    phase, file = draw(st.integers(0, 1)), draw(st.sampled_from("ab"))
    if draw(st.booleans()):
        begin = draw(st.integers(0, 3)) * SMALL_CELL_BYTES + draw(st.integers(0, SMALL_CELL_BYTES - 1))
        end = begin + draw(st.integers(1, MIB))
        base = SMALL_ITEMS
    else:
        base = draw(st.sampled_from([0, 4096]))
        begin = base + draw(st.integers(0, 3 * CELL_BYTES))
        end = begin + draw(st.integers(1, 3 * CELL_BYTES))
    return Need(phase, file, base, begin, end, draw(st.integers(1, end - begin)))


@given(st.dictionaries(st.integers(0, 5), st.lists(some_needs(), max_size=6), min_size=1, max_size=5))
def test_plans_are_sound(needs: dict[int, list[Need]]) -> None:
    shares = plan_shares(needs)
    assert shares == plan_shares(dict(reversed(needs.items())))  # the order in which ranks have come is no matter
    assert [share.number for share in shares] == [*range(len(shares))]
    by_cell: dict[Cell, Share] = {cell: share for share in shares for cell in share.cells}
    assert len(by_cell) == sum(len(share.cells) for share in shares)
    wanted: dict[tuple[int, Cell], list[tuple[int, int]]] = {}
    for rank, found in needs.items():
        for need in found:
            for cell, begin, end in cells_of(need):
                wanted.setdefault((rank, cell), []).append((begin, end))
    for share in shares:
        (members,) = {frozenset(rank for rank, cell in wanted if cell == each) for each in share.cells}
        assert {share.reader, *(rank for rank, _, _ in share.takers)} == members
        assert share.reader not in [rank for rank, _, _ in share.takers]
        assert len(members) > 1
        assert 0 < share.end - share.begin <= CELL_BYTES
        given_to = {rank: (begin, end) for rank, begin, end in share.takers}
        given_to[share.reader] = share.begin, share.end
        for rank, (begin, end) in given_to.items():
            assert share.begin <= begin < end <= share.end
            assert all(begin <= low and high <= end for cell in share.cells for low, high in wanted[rank, cell])
            assert share in shares_of(rank, shares) or rank != share.reader
