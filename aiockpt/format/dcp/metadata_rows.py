"""Rows of `.metadata` that are alike but for a few numbers: where the parts of tensors are that many ranks have cut.

All tensors whose parts begin at the same places have the same opcodes but for the tensor's name, the file, and two
numbers. So their rows are one array, whose columns are filled in at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

_MOST_ROWS = 1 << 18
_REFERENCE_BYTES = 5


class CutEntry(NamedTuple):
    """A tensor that was cut into parts, one row for each; where they are says a `PlaceTable`.

    Attributes:
        dtype: the dtype of the tensor.
        shape: its sizes.
        cut: offsets and sizes of the parts; the same object for tensors that are cut alike.
        ranks: who has written each.
        leaves: as what.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    ranks: tuple[int, ...]
    leaves: tuple[int, ...]


class PlaceTable(NamedTuple):
    """Where everything is that ranks have written.

    Attributes:
        files: the names of all files.
        begin_of: for each rank the row of its first leaf.
        file_of: for each row the position of its file in ``files``.
        offsets: where it starts there, in bytes.
        lengths: its length in bytes.
    """

    files: list[str]
    begin_of: NDArray[np.int64]
    file_of: NDArray[np.int32]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


class RowParts(NamedTuple):
    """The opcodes of a row, but for what differs from row to row.

    Attributes:
        head: those before the reference to the name.
        tails: for each part those between name and file.
        info: those before the reference to the file.
        offset: those before the offset in the file.
        length: those before the length.
        files: references to the files; each of as many bytes.
    """

    head: bytes
    tails: Sequence[bytes]
    info: bytes
    offset: bytes
    length: bytes
    files: Sequence[bytes]


def cut_rows(
    names: Sequence[bytes], tensors: Sequence[CutEntry], table: PlaceTable, parts: RowParts
) -> Iterator[bytes]:
    """Give the rows of tensors whose parts begin at the same places, a good many at a time.

    Args:
        names: for each tensor a reference to its name.
        tensors: the tensors.
        table: where their parts are.
        parts: the opcodes.
    """
    far = max(int(column.max(initial=0)) for column in (table.offsets, table.lengths)) >= 1 << 31
    number, value = (b"\x8a\x08", "<i8") if far else (b"J", "<i4")
    blank = bytes(_REFERENCE_BYTES)
    zero = bytes(np.dtype(value).itemsize)
    between = (number + zero).join((parts.offset, parts.length, b"ub"))
    template = [parts.head + blank + tail + parts.info + blank + between for tail in parts.tails]
    begin = len(parts.head) + _REFERENCE_BYTES
    file = begin + len(parts.tails[0]) + len(parts.info)
    offset = file + _REFERENCE_BYTES + len(parts.offset) + len(number)
    length = offset + len(zero) + len(parts.length) + len(number)
    row = np.dtype(
        {
            "names": ["name", "file", "offset", "length"],
            "formats": [f"V{_REFERENCE_BYTES}", f"V{_REFERENCE_BYTES}", value, value],
            "offsets": [len(parts.head), file, offset, length],
            "itemsize": len(template[0]),
        }
    )
    one = np.frombuffer(b"".join(template), row)
    files = np.frombuffer(b"".join(parts.files), f"V{_REFERENCE_BYTES}")
    step = max(1, _MOST_ROWS // len(one))
    for at in range(0, len(tensors), step):
        some = tensors[at : at + step]
        where = table.begin_of[[tensor.ranks for tensor in some]] + np.array([tensor.leaves for tensor in some])
        rows = np.empty((len(some), len(one)), row)
        rows.view(f"V{row.itemsize}")[:] = one.view(f"V{row.itemsize}")
        rows["name"] = np.frombuffer(b"".join(names[at : at + step]), f"V{_REFERENCE_BYTES}")[:, None]
        rows["file"] = files[table.file_of[where]]
        rows["offset"] = table.offsets[where]
        rows["length"] = table.lengths[where]
        yield rows.tobytes()
