"""What a directory is by the names of its files; `tests/test_recognition.py` compares all that ask."""

from __future__ import annotations

import json
import re

import pytest

from aiockpt.format.recognise import Recognised, recognise

PARTS = tuple(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
BINS = tuple(f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2))
SHARDS = tuple(f"shard-{rank:05}-model-{part:05}-of-00002.safetensors" for rank in (1, 2) for part in (1, 2))
INDEX = "model.safetensors.index.json"


def recognised(names: tuple[str, ...]) -> Recognised:
    """Recognise a directory in which files have the first bytes that their names promise."""

    def fetch(name: str, offset: int, length: int) -> bytes:
        if name.endswith(".json"):
            document = json.dumps({"weight_map": {"w": PARTS[0] if name == INDEX else BINS[0]}}).encode()
            return document[offset : offset + length]
        begin = bytes(8) + b"{" if name.endswith(".safetensors") else b"PK\3\4" + bytes(4 + 2 + 20) + b"x/data.pkl"
        return begin[offset : offset + length]

    return recognise(dict.fromkeys(names, 64), fetch)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((), ()),
        (("model.safetensors", "optimizer.bin", "config.json"), ("model.safetensors",)),
        (("a.safetensors", "b.safetensors"), ()),
        ((*PARTS, INDEX), (INDEX,)),
        ((*PARTS[1:], INDEX), (INDEX,)),  # it names the files that belong to it
        ((INDEX, "other.safetensors.index.json"), ()),
        (PARTS, PARTS),
        (PARTS[::-1], PARTS),
        ((*PARTS, "config.json", "training_args.bin"), PARTS),
        ((*PARTS, "other.safetensors"), ()),
        (("model-00001-of-00001.safetensors",), ("model-00001-of-00001.safetensors",)),
        (("a-1-of-1.safetensors", "b-1-of-1.safetensors"), ()),
        (("model-1-of-2.fp16.safetensors", "model-2-of-2.fp16.safetensors"),) * 2,
        (SHARDS, SHARDS),
        ((*SHARDS, "model.safetensors"), ()),
        (BINS, BINS),
        ((*BINS, "training_args.bin", "rng_state.pth"), BINS),
        ((*BINS, "pytorch_model.bin.index.json"), ("pytorch_model.bin.index.json",)),
        ((*BINS, "model.safetensors"), ("model.safetensors",)),
        (("pytorch_model.bin", "optimizer.pt"), ("pytorch_model.bin",)),
    ],
)
def test_a_set_is_found_by_its_names(names: tuple[str, ...], chosen: tuple[str, ...]) -> None:
    found = recognised(names)
    assert (found.index,) == chosen if found.index else sorted(found.files) == sorted(chosen)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (PARTS[:2], r"lacks model-00003-of-00003\.safetensors"),
        (PARTS[1:2], r"lacks model-00001-of-00003\.safetensors, model-00003-of-00003\.safetensors"),
        (BINS[1:], r"lacks pytorch_model-00001-of-00002\.bin"),
        (SHARDS[2:], r"lacks shard-00001-model-00001-of-00002\.safetensors.*\. A rank without tensors writes no file"),
        (SHARDS[:2], r"shards of rank 1 alone.*rename \S+ to model-00001-of-00002\.safetensors"),
        (SHARDS[::2], r"lacks shard-00001-model-00002-of-00002\.safetensors[^.]*$"),
        ((*PARTS, "model-00004-of-00003.safetensors"), r"model-00004-of-00003\.safetensors is not one of 3"),
        (("m-000000001-of-999999999.bin",), r"lacks m-000000002-of-999999999\.bin, .* and 1 more"),
    ],
)
def test_a_set_without_some_of_its_files_is_corrupt(names: tuple[str, ...], missing: str) -> None:
    found = recognised(names)
    assert found.state == "damaged"
    assert re.search(missing, found.problem)


def test_files_beside_a_model_that_may_hold_state() -> None:
    state = ("a.bin", "optimizer.pt", "random_states_0.pkl", "rng_state.pth", "x.ckpt")
    ranks = ("global_step5/mp_rank_00_model_states.pt", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    others = ("config.json", "below/optimizer.pt", "README.md", "a/b/c.bin")
    found = recognised(("model-00001-of-00003.safetensors", INDEX, *others, *state, *ranks))
    assert found.beside == tuple(sorted(state + ranks))
