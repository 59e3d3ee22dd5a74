"""Read plans: pure functions, so no test here needs a file."""

from __future__ import annotations

import pytest
import torch

from aiockpt.errors import LoadError
from aiockpt.format.index import InlineEntry, ItemRange, ObjectEntry, StoredChunk, TensorEntry, TensorItem
from aiockpt.options import LoadOptions
from aiockpt.planning.ranges import select
from aiockpt.reading.read_plan import ReadRequest, plan_reads

ROWS = TensorEntry(
    torch.float32,
    (4, 3),
    (
        StoredChunk((0, 0), (2, 3), ItemRange("a", 0, 24)),
        StoredChunk((2, 0), (2, 3), ItemRange("b", 0, 24)),
    ),
)


def single(offset: int, length: int = 24) -> TensorEntry:
    return TensorEntry(torch.float32, (2, 3), (StoredChunk((0, 0), (2, 3), ItemRange("a", offset, length)),))


def test_keys_of_the_same_bytes_share_memory() -> None:
    whole = {"w": single(0), "tied": single(0), "other": single(24), "o": ObjectEntry(ItemRange("a", 48, 9))}
    plan = plan_reads("c", {**whole, "n": InlineEntry(5)}, [], LoadOptions(), {})
    assert [list(new.keys) for new in plan.new] == [["w", "tied"], ["other"]]
    assert [[read.shared for read in new.reads] for new in plan.new] == [[True], [False]]
    assert ([read.name for read in plan.objects], plan.values) == (["o"], {"n": 5})


def test_part_is_read_only_from_chunks_that_overlap_it() -> None:
    selections, shape, taken = select(ROWS.shape, (3, slice(1, 3)))
    plan = plan_reads("c", {}, [ReadRequest("w", ROWS, selections, shape, taken)], LoadOptions(), {})
    (new,) = plan.new
    assert (new.shape, new.reads) == ((2,), [])
    new.read_into(torch.zeros(2))
    (read,) = new.reads
    assert (read.chunk.place.file, read.selections and [(s.start, s.count) for s in read.selections]) == (
        "b",
        [(1, 1), (1, 2)],
    )


def test_out_tensor_gets_one_read_per_chunk() -> None:
    out = torch.zeros(4, 3)
    plan = plan_reads("c", {}, [ReadRequest("w", ROWS, None, ROWS.shape, (), out)], LoadOptions(), {})
    assert [(read.chunk.place.file, read.fills) for read in plan.fills] == [("a", True), ("b", True)]
    assert plan.values["w"] is out
    assert plan.filled[0] is out


def test_expanded_tensor_is_refused_unless_loaded_as_stored() -> None:
    item = TensorItem(torch.float32, (2, 3), (0, 0), 0, 0, 4, None)
    entry = TensorEntry(torch.float32, (2, 3), (StoredChunk((0, 0), (2, 3), ItemRange("a", 0, 4), item),))
    plan_reads("c", {"w": entry}, [], LoadOptions(), {})  # as it is stored
    with pytest.raises(LoadError, match="24 bytes are wanted of w but 4 are stored, for its elements share memory"):
        plan_reads("c", {"w": entry}, [], LoadOptions(dtype=torch.float64), {})
    row = ReadRequest("w", entry, *select((2, 3), (1,)))
    with pytest.raises(LoadError, match="12 bytes are wanted of w but 4 are stored"):
        plan_reads("c", {}, [row], LoadOptions(), {})
