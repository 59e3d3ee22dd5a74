"""Joined metadata of ranks that saved without coordination."""

from __future__ import annotations

import pytest
import torch

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.file_sets import join_ranks
from aiockpt.format.index import Index, ItemRange, ObjectEntry, StoredChunk, TensorEntry
from aiockpt.format.recognise import rank_metadata


def part(rank: int, *chunks: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...] = (8, 2)) -> Index:
    """Return the index of a rank with some chunks of the tensor w, and with the object n."""
    placed = [StoredChunk(*chunk, ItemRange(f"__{rank}_0.distcp", 100 * at, 64)) for at, chunk in enumerate(chunks)]
    entries = {"w": TensorEntry(torch.float32, shape, tuple(placed)), "n": ObjectEntry(ItemRange(f"{rank}", 0, 9))}
    return Index(entries, {"w": ("w",), "n": ("n",)})


def test_metadata_of_ranks_is_found_by_its_name() -> None:
    others = [".metadata", "__01.metadata", "__x.metadata", "a/__3.metadata", "__2_0.distcp"]
    names = ["__10.metadata", "__2.metadata", *others]
    assert list(rank_metadata(names).items()) == [(2, "__2.metadata"), (10, "__10.metadata")]


def test_parts_are_joined_and_the_lowest_rank_wins() -> None:
    joined = join_ranks(
        {1: part(1, ((4, 0), (4, 2)), ((0, 0), (2, 2))), 0: part(0, ((0, 0), (2, 2)), ((2, 0), (2, 2)))}, []
    )
    entry = joined.entries["w"]
    assert isinstance(entry, TensorEntry)
    assert [(chunk.offsets, chunk.place.file) for chunk in entry.chunks] == [
        ((0, 0), "__0_0.distcp"),
        ((2, 0), "__0_0.distcp"),
        ((4, 0), "__1_0.distcp"),
    ]
    assert joined.entries["n"] == ObjectEntry(ItemRange("0", 0, 9))
    assert dict(joined.paths) == {"w": ("w",), "n": ("n",)}


@pytest.mark.parametrize(
    ("parts", "files", "message"),
    [
        ({1: part(1, ((0, 0), (8, 2)))}, [], r"lacks the part of rank 0\. Each rank"),
        ({0: part(0, ((0, 0), (8, 2)))}, ["__2_0.distcp"], r"lacks the part of rank 1, 2\. "),
        ({0: part(0, ((0, 0), (3, 2)))}, [], r"lacks the part of rank 1, 2 at least: 10 of the 16 elements of w"),
        ({0: part(0)}, ["__0_0.distcp"], r"lacks the part of rank 1 at least: 16 of the 16"),
        ({0: part(0, ((0, 0), (8, 2))), 1: part(1, ((0, 0), (4, 2)))}, [], "w overlap"),
    ],
)
def test_missing_parts_are_reported(parts: dict[int, Index], files: list[str], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        join_ranks(parts, files)


def test_parts_of_different_tensors_are_not_joined() -> None:
    for other in (
        part(1, ((0, 0), (8, 3)), shape=(8, 3)),
        Index({"w": ObjectEntry(ItemRange("1", 0, 9))}, {"w": ("w",)}),
    ):
        with pytest.raises(LoadError, match="rank 1, which saved alone, has a w of another dtype or shape"):
            join_ranks({0: part(0, ((0, 0), (8, 2))), 1: other}, [])
        with pytest.raises(LoadError, match="rank 2, which saved alone, has a w of another dtype or shape"):
            join_ranks({1: other, 2: part(0, ((0, 0), (8, 2)))}, [])


def test_a_huge_rank_number_costs_nothing() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"rank 0, 1, 2, .* and 999999988 more"):
        join_ranks({999_999_998: part(0, ((0, 0), (8, 2)))}, [])
    with pytest.raises(CorruptCheckpointError, match="at least"):
        join_ranks({0: part(0, ((0, 0), (1, 1)), shape=(1 << 40, 2))}, [])
