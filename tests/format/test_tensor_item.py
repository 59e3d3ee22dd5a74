"""Damaged items: the damage is found, or it is harmless."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from aiockpt.format.item.item_framing import tensor_framing
from aiockpt.format.item.tensor_item import ItemChecker, read_framing
from aiockpt.format.item.ziparchive import FramingError
from tests.stock import PAYLOAD_OFFSET


def stored(value: Any) -> bytearray:
    sink = io.BytesIO()
    torch.save(value, sink)
    return bytearray(sink.getvalue())


def is_sound(checker: ItemChecker, item: bytearray, *, is_tensor: bool) -> bool:
    try:
        _, wrong = checker.check(memoryview(item), is_tensor=is_tensor)
    except FramingError:
        return False
    return not wrong


def loads_as(item: bytearray, value: Any) -> bool:
    try:
        loaded = torch.load(io.BytesIO(bytes(item)), weights_only=False)
    except Exception:
        return False
    return torch.equal(loaded, value) if isinstance(value, torch.Tensor) else bool(loaded == value)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("value", [torch.arange(9), [1, "two"], torch.zeros(0)], ids=["tensor", "object", "empty"])
def test_a_flip_anywhere_is_found_or_harmless(value: Any, learned: bool) -> None:
    """With a new checker for each flip, and with one that has seen the item before."""
    is_tensor = isinstance(value, torch.Tensor)
    item = stored(value)
    checker = ItemChecker()
    found = 0
    for offset in range(len(item)):
        item[offset] ^= 1 << offset % 8
        checker = checker if learned else ItemChecker()
        if is_sound(checker, item, is_tensor=is_tensor):
            assert loads_as(item, value), offset
        else:
            found += 1
        item[offset] ^= 1 << offset % 8
        if learned and offset == 0:
            assert is_sound(checker, item, is_tensor=is_tensor)
    assert is_sound(checker, item, is_tensor=is_tensor)
    assert found > len(item) // 2


def test_a_damaged_record_is_named() -> None:
    item = stored(torch.arange(9))
    checker = ItemChecker()
    for _ in range(2):
        framed, wrong = checker.check(memoryview(item), is_tensor=True)
        assert framed.tensor is not None
        assert (framed.tensor.shape, framed.tensor.nbytes, framed.tensor.payload_offset) == ((9,), 72, PAYLOAD_OFFSET)
        assert wrong == []
    item[PAYLOAD_OFFSET + 6] ^= 1
    _, wrong = checker.check(memoryview(item), is_tensor=True)
    assert [(span.name, span.start, span.stop) for span in wrong] == [
        ("archive/data/0", PAYLOAD_OFFSET, PAYLOAD_OFFSET + 72)
    ]


def test_items_that_differ_in_their_payload_alone() -> None:
    checker = ItemChecker()
    crcs = set()
    for i in range(5):
        framed, wrong = checker.check(memoryview(stored(torch.arange(i, i + 9))), is_tensor=True)
        assert wrong == []
        assert framed.tensor is not None
        crcs.add(framed.tensor.crc)
        _, wrong = checker.check(memoryview(stored(torch.arange(i, i + 9).float())), is_tensor=True)
        assert wrong == []
    assert len(crcs) == 5
    assert len(checker._templates._templates) == 2


def test_our_own_framing_is_sound() -> None:
    for shape in ((), (3, 4), (0,)):
        framing = tensor_framing(torch.float32, shape, torch.empty(shape).stride())
        payload = bytes(range(framing.nbytes))
        whole = bytearray(framing.prefix + payload + framing.suffix)
        checker = ItemChecker()
        assert is_sound(checker, whole, is_tensor=True) is (framing.nbytes == 0)  # the payload's CRC is not filled in


@pytest.mark.parametrize("length", [0, 1, 21, 22, 97, 98, 99, 700])
def test_truncated_items_are_refused(length: int) -> None:
    for value in (torch.arange(9), {"a": 1}):
        item = bytes(stored(value))[:length]
        with pytest.raises(FramingError):
            read_framing(length, lambda at, size, item=item: item[at : at + size], is_tensor=type(value) is not dict)


def test_a_pickle_without_an_archive_has_no_crcs() -> None:
    sink = io.BytesIO()
    torch.save({"a": 1}, sink, _use_new_zipfile_serialization=False)
    framed, wrong = ItemChecker().check(memoryview(sink.getvalue()), is_tensor=False)
    assert (framed.checked, wrong) == ((), [])
