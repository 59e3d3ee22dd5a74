"""The plan by which ranks read together: of what several need, one reads it and sends it to the others. Pure.

Files are divided into *cells*, the same way on all ranks: a cell holds the small items that begin in one block of a
file, or one block of the payload of a large item. Each rank says of which bytes of which cells it needs how many. A
cell that several ranks need is *shared* if that spares bytes; of any other each rank reads its part alone. Neighbours
that the same ranks share are read and sent at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CELL_BYTES = 8 << 20
"""The size of a block of a large payload, and the most that is read at once."""
SMALL_CELL_BYTES = 1 << 20
"""The size of a block of small items, of which the last one may extend beyond it. No larger item lies between them."""
SMALL_ITEMS = -1
"""In place of the beginning of a payload, for cells of small items."""
_GAP_BYTES = 64 << 10
"""Between neighbours: so many bytes are read and sent for nothing, at most."""
_SPARED = 8  # of a cell: at least an eighth of it


class Cell(NamedTuple):
    """Names a cell."""

    phase: int  # of the load: what is read in different phases is never shared
    file: str
    base: int  # where the payload begins in the file, or SMALL_ITEMS
    number: int


class Need(NamedTuple):
    """Bytes that a rank needs, in one cell of small items, or in some cells of a large payload."""

    phase: int
    file: str
    base: int
    begin: int  # in the file
    end: int
    nbytes: int  # of these, in evenly distributed pieces if it is less
    is_ordered: bool = False  # the file can only be read from its beginning to its end: by one rank, or by each


class Share(NamedTuple):
    """Bytes that one rank reads for others."""

    number: int  # in the plan
    cells: tuple[Cell, ...]
    begin: int  # of what is read, in the file
    end: int
    reader: int  # the rank that reads it
    takers: tuple[tuple[int, int, int], ...]  # the other ranks, with the beginning and end of what they are sent


class _RankPart(NamedTuple):
    """A rank's part of a cell."""

    rank: int
    begin: int
    end: int
    nbytes: int


def cells_of(need: Need) -> list[tuple[Cell, int, int]]:
    """Return the cells of a need, with the beginning and end of its bytes in each."""
    phase, file, base, begin, end, *_ = need
    if base == SMALL_ITEMS:
        return [(Cell(phase, file, base, begin // SMALL_CELL_BYTES), begin, end)]
    numbers = range((begin - base) // CELL_BYTES, -(-(end - base) // CELL_BYTES))
    bounds = ((number, base + number * CELL_BYTES) for number in numbers)
    return [(Cell(phase, file, base, n), max(begin, at), min(end, at + CELL_BYTES)) for n, at in bounds]


def plan_shares(needs: Mapping[int, Sequence[Need]]) -> list[Share]:
    """Choose the shared cells and the rank that reads each, so that all ranks read about as many bytes.

    ``needs`` are those of each rank; of a rank several may be in one cell. Shares are in the order of files and bytes.
    """
    parts: defaultdict[Cell, list[_RankPart]] = defaultdict(list)
    for rank in sorted(needs):
        for cell, part in _parts(rank, needs[rank]).items():
            parts[cell].append(part)
    together = {cell: tuple(part.rank for part in found) if _spares(found) else () for cell, found in parts.items()}
    # By file: the ranks that share it all, if that is what they do.
    ordered = {need[:2]: set[tuple[int, ...]]() for each in needs.values() for need in each if need.is_ordered}
    for cell, ranks in together.items():
        if cell[:2] in ordered:
            ordered[cell[:2]].add(ranks)
    loads = dict.fromkeys(needs, 0)
    shared: list[tuple[Cell, list[_RankPart]]] = []
    for cell, found in parts.items():
        if together[cell] and len(ordered.get(cell[:2], "1")) == 1:
            shared.append((cell, found))
            continue
        for part in found:
            loads[part.rank] += part.nbytes
    shares: list[Share] = []
    readers: dict[tuple[int, str], int] = {}
    for cells, found in _joined(sorted(shared, key=lambda each: (*each[0][:2], _extent(each[1]), each[0]))):
        begin, end = _extent(found)
        reader = min((part.rank for part in found), key=lambda rank: (loads[rank], rank))
        if cells[0][:2] in ordered:
            reader = readers.setdefault((cells[0].phase, cells[0].file), reader)
        loads[reader] += end - begin
        takers = tuple((part.rank, part.begin, part.end) for part in found if part.rank != reader)
        shares.append(Share(len(shares), tuple(cells), begin, end, reader, takers))
    return shares


def _spares(parts: Sequence[_RankPart]) -> bool:
    """Return whether ranks read less of a cell if one reads it for all."""
    begin, end = _extent(parts)
    spared = sum(part.nbytes for part in parts) - (end - begin)
    return len(parts) > 1 and end - begin <= CELL_BYTES and spared > (end - begin) // _SPARED


def _extent(parts: Sequence[_RankPart]) -> tuple[int, int]:
    return min(part.begin for part in parts), max(part.end for part in parts)


def _joined(shared: Iterable[tuple[Cell, list[_RankPart]]]) -> list[tuple[list[Cell], list[_RankPart]]]:
    """Join neighbours of small items that are shared by the same ranks."""
    found: list[tuple[list[Cell], list[_RankPart]]] = []
    for cell, parts in shared:
        if found:
            cells, before = found[-1]
            if (
                (*cells[-1][:3],) == (cell.phase, cell.file, SMALL_ITEMS)
                and cell.base == SMALL_ITEMS
                and [part.rank for part in before] == [part.rank for part in parts]
                and all(0 <= part.begin - last.end <= _GAP_BYTES for last, part in zip(before, parts, strict=True))
                and _extent(parts)[1] - _extent(before)[0] <= CELL_BYTES
            ):
                cells.append(cell)
                before[:] = [last._replace(end=part.end) for last, part in zip(before, parts, strict=True)]
                continue
        found.append(([cell], list(parts)))
    return found


def _parts(rank: int, needs: Sequence[Need]) -> dict[Cell, _RankPart]:
    """Return a rank's part of each cell."""
    found: dict[Cell, _RankPart] = {}
    for need in needs:
        for cell, begin, end in cells_of(need):
            nbytes = -(-need.nbytes * (end - begin) // (need.end - need.begin))
            if (part := found.get(cell)) is not None:
                # Tied tensors need the same bytes twice, and parts of a payload may overlap.
                begin, end = min(begin, part.begin), max(end, part.end)
                nbytes = min(nbytes + part.nbytes, end - begin)
            found[cell] = _RankPart(rank, begin, end, nbytes)
    return found


def shares_of(rank: int, shares: Sequence[Share]) -> list[Share]:
    """Return the shares that a rank takes part in; of those that it does not read, with itself as the only taker."""
    found = [share if share.reader == rank else _alone(rank, share) for share in shares]
    return [share for share in found if share.reader == rank or share.takers]


def _alone(rank: int, share: Share) -> Share:
    return share._replace(takers=tuple(taker for taker in share.takers if taker[0] == rank))
