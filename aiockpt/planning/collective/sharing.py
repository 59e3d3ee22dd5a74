"""The plan by which ranks read together: of what several need, one reads it and sends it to the others. Pure.

Files are divided into *cells*, the same way on all ranks: a cell holds the small items that begin in one block of a
file, or one block of the payload of a large item. Each rank says of which bytes of which cells it needs how many. A
cell that several ranks need is *shared* if that spares bytes; of any other each rank reads its part alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CELL_BYTES = 8 << 20
"""The size of a block of a large payload, and the most that is read for a cell."""
SMALL_CELL_BYTES = 4 << 20
"""The size of a block of small items. The last one in it may extend beyond it, by as much at most."""
SMALL_ITEMS = -1
"""In place of the beginning of a payload, for cells of small items."""
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


class Share(NamedTuple):
    """A shared cell."""

    number: int  # in the plan
    cell: Cell
    begin: int  # of what is read, in the file
    end: int
    reader: int  # the rank that reads it
    takers: tuple[tuple[int, int, int], ...]  # the other ranks, with the beginning and end of what they are sent


class _Part(NamedTuple):
    """A rank's part of a cell."""

    rank: int
    begin: int
    end: int
    nbytes: int


def cells_of(need: Need) -> list[tuple[Cell, int, int]]:
    """Return the cells of a need, with the beginning and end of its bytes in each."""
    phase, file, base, begin, end, _ = need
    if base == SMALL_ITEMS:
        return [(Cell(phase, file, base, begin // SMALL_CELL_BYTES), begin, end)]
    numbers = range((begin - base) // CELL_BYTES, -(-(end - base) // CELL_BYTES))
    bounds = ((number, base + number * CELL_BYTES) for number in numbers)
    return [(Cell(phase, file, base, n), max(begin, at), min(end, at + CELL_BYTES)) for n, at in bounds]


def plan_shares(needs: Mapping[int, Sequence[Need]]) -> list[Share]:
    """Choose the shared cells and the rank that reads each, so that all ranks read about as many bytes.

    ``needs`` are those of each rank; of a rank several may be in one cell. Shares are in the order of files and bytes.
    """
    parts: defaultdict[Cell, list[_Part]] = defaultdict(list)
    for rank in sorted(needs):
        for cell, part in _parts(rank, needs[rank]).items():
            parts[cell].append(part)
    loads = dict.fromkeys(needs, 0)
    shared: list[tuple[Cell, int, int, list[_Part]]] = []
    for cell, found in parts.items():
        begin, end = min(part.begin for part in found), max(part.end for part in found)
        nbytes = sum(part.nbytes for part in found)
        if len(found) > 1 and end - begin <= CELL_BYTES and nbytes - (end - begin) > (end - begin) // _SPARED:
            shared.append((cell, begin, end, found))
            continue
        for part in found:
            loads[part.rank] += part.nbytes
    shares: list[Share] = []
    for cell, begin, end, found in sorted(shared, key=lambda each: (each[0].phase, each[0].file, *each[1:3], each[0])):
        reader = min((part.rank for part in found), key=lambda rank: (loads[rank], rank))
        loads[reader] += end - begin
        takers = tuple((part.rank, part.begin, part.end) for part in found if part.rank != reader)
        shares.append(Share(len(shares), cell, begin, end, reader, takers))
    return shares


def _parts(rank: int, needs: Sequence[Need]) -> dict[Cell, _Part]:
    """Return a rank's part of each cell."""
    found: dict[Cell, _Part] = {}
    for need in needs:
        for cell, begin, end in cells_of(need):
            nbytes = -(-need.nbytes * (end - begin) // (need.end - need.begin))
            if (part := found.get(cell)) is not None:
                # Tied tensors need the same bytes twice, and parts of a payload may overlap.
                begin, end = min(begin, part.begin), max(end, part.end)
                nbytes = min(nbytes + part.nbytes, end - begin)
            found[cell] = _Part(rank, begin, end, nbytes)
    return found


def shares_of(rank: int, shares: Sequence[Share]) -> list[Share]:
    """Return the shares that a rank takes part in; of those that it does not read, with itself as the only taker."""
    found: list[Share] = []
    for share in shares:
        if share.reader == rank:
            found.append(share)
            continue
        found += [share._replace(takers=(taker,)) for taker in share.takers if taker[0] == rank]
    return found
