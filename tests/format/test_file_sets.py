"""Joining the files of a set; the tests of whole sets are in ``tests/golden/test_foreign.py``."""

from __future__ import annotations

import json
import struct

import pytest

from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.file_sets import check_alone, join_files
from aiockpt.format.index import Index
from aiockpt.format.layouts import SHARD_ALONE
from aiockpt.format.recognise import recognise
from aiockpt.format.safetensors.reader import decode_header

PARTS = tuple(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
SHARDS = tuple(f"shard-{rank:05}-model-{part:05}-of-00002.safetensors" for rank in (1, 2) for part in (1, 2))


def header(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str = "U8") -> Index:
    """Return the index of a file of one shard of the tensor ``w``."""
    nbytes = 1
    for size in sizes:
        nbytes *= size
    places = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})}
    document = {"__metadata__": places, "w": {"dtype": dtype, "shape": sizes, "data_offsets": (0, nbytes)}}
    text = json.dumps(document).encode()
    return decode_header(name, struct.pack("<Q", len(text)) + text, 8 + len(text) + nbytes)


def test_shards_join_in_any_layout() -> None:
    corners = {(0, 0): (2, 3), (0, 3): (2, 1), (2, 0): (1, 4), (3, 0): (0, 4)}
    headers = {}
    for rank, (offsets, sizes) in enumerate(corners.items(), 1):
        name = f"shard-{rank:05}-model-00001-of-00001.safetensors"
        headers[name] = header(name, offsets, sizes)
    index = join_files(headers)
    assert index.entries["w"].shape == (3, 4)
    assert [(chunk.offsets, chunk.sizes) for chunk in index.entries["w"].chunks] == list(corners.items())[:3]
    assert index.metadata == {}
    last = "shard-00005-model-00001-of-00001.safetensors"
    for offsets, sizes, wrong in (((5, 0), (1, 4), "lacks 8 elements of w"), ((3,), (1,), "shards of w differ")):
        with pytest.raises(CorruptCheckpointError, match=wrong):
            join_files({**headers, last: header(last, offsets, sizes)})
    with pytest.raises(CorruptCheckpointError, match="shards of w differ"):
        join_files({**headers, last: header(last, (3, 0), (1, 4), "I8")})


def test_shards_of_no_elements_join() -> None:
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    entry = join_files({name: header(name, (0, 0), (0, 4)) for name in names}).entries["w"]
    assert (entry.shape, [chunk.sizes for chunk in entry.chunks]) == ((0, 4), [(0, 4)])


def test_a_rank_without_tensors_may_have_an_empty_file() -> None:
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)]
    headers = {names[0]: header(names[0], (0,), (4,)), names[2]: header(names[2], (4,), (4,))}
    empty = decode_header(names[1], struct.pack("<Q", 2) + b"{}", 10)  # as safetensors.torch.save_file({}, name) makes
    assert join_files({**headers, names[1]: empty}).entries["w"].shape == (8,)


def test_a_shard_alone_is_refused_by_its_name_and_by_its_offsets() -> None:
    whole = header("x", (0,), (4,))
    assert check_alone("model.safetensors", whole, "d") is None
    assert check_alone("model-00001-of-00001.safetensors", whole, "d") is None
    assert "part 2 of 3" in (check_alone(PARTS[1], whole, "d") or "")
    assert recognise({SHARDS[0]: 8}, lambda *_: bytes(8), alone=True).problem == SHARD_ALONE
    with pytest.raises(CorruptCheckpointError, match=r"shards of one rank alone.* d$"):
        check_alone("model.safetensors", header("x", (4,), (4,)), "d")
