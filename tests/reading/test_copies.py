"""Comparing stored items byte by byte, in pieces."""

from __future__ import annotations

import pytest

from aiockpt.format.index import ItemRange
from aiockpt.reading import open as opening


class MemorySource:
    """A source whose files are in memory."""

    def __init__(self, **files: bytes) -> None:
        self.files = files

    def read_bytes(self, file: str, offset: int, size: int) -> bytes:
        return self.files[file][offset : offset + size]


@pytest.mark.parametrize("length", [3, 4, 5, 10])
def test_comparison_stops_at_the_end_of_the_items(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PIECE_BYTES", 4)
    item = bytes(range(length))
    one, other = ItemRange("a", 2, length), ItemRange("b", 3, length)
    assert opening._is_same(MemorySource(a=b"__" + item + b"x" * 9, b=b"___" + item + b"y" * 9), one, other)
    for at in range(length):
        changed = item[:at] + b"\xff" + item[at + 1 :]
        assert not opening._is_same(MemorySource(a=b"__" + item, b=b"___" + changed), one, other)
    assert not opening._is_same(MemorySource(a=b"__" + item, b=b"___" + item), one, ItemRange("b", 3, length - 1))
