"""Several live objects whose tensors share memory load as by hand, one after the other, in the order of the dict."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import aiockpt
from tests.states import assert_same

SIZE = 6
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda memory: memory,
    "first": lambda memory: memory[:4],
    "last": lambda memory: memory[2:],
    "square": lambda memory: memory[:4].view(2, 2),
    "transposed": lambda memory: memory[:4].view(2, 2).t(),
    "every second": lambda memory: memory[::2],
    "between": lambda memory: memory[1::2],
    "bits": lambda memory: memory.view(torch.int32),
    "own": lambda memory: torch.zeros(3),
}


class Plain(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("t", tensor)
        self.register_buffer("u", torch.zeros(2))


class Adding(Plain):
    """Adds what it is given to what it has."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "t"] = state[prefix + "t"] + self.t
        super()._load_from_state_dict(state, prefix, *rest)


class Holder:
    """A class that is no module."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.t, self.loads = tensor, 0

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "loads": self.loads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.t.copy_(state["t"])
        self.loads += 1


def with_momentum(tensor: torch.Tensor) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(SIZE))
    made = torch.optim.SGD([parameter], momentum=0.9)
    made.state[parameter]["momentum_buffer"] = tensor
    return made


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": Plain,
    "inner": lambda tensor: nn.Sequential(Plain(tensor), Plain(torch.zeros(1))),
    "tied": lambda tensor: nn.Sequential(Plain(tensor), Plain(tensor)),
    "adding": Adding,
    "holder": Holder,
    "optimizer": with_momentum,
}
DESCRIBED = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(VIEWS))), min_size=2, max_size=4)


def made(described: Any, memories: Any, *, repeats: bool) -> dict[str, Any]:
    """Make objects, each a view of its memory; ``repeats``: the first one is there once more, at the end."""
    objects = {
        f"o{number}": KINDS[kind](VIEWS[view](memory))
        for number, ((kind, view), memory) in enumerate(zip(described, memories, strict=False))
    }
    return objects | ({"again": objects["o0"]} if repeats else {})


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as opened:
        yield opened


@hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(DESCRIBED, st.booleans(), st.booleans())
@hypothesis.example([("plain", "all"), ("plain", "all")], False, False)
@hypothesis.example([("plain", "first"), ("plain", "last")], False, True)
@hypothesis.example([("tied", "all"), ("plain", "all"), ("plain", "all")], True, False)
@hypothesis.example([("holder", "all"), ("plain", "square")], False, False)
@hypothesis.example([("plain", "first"), ("adding", "last"), ("optimizer", "bits")], False, True)
def test_objects_that_share_memory_load_one_after_the_other(ckpt, described: Any, stored_tied: bool, repeats: bool):
    tied = [torch.randn(SIZE)] * len(described)
    saved = made(described, tied if stored_tied else [torch.randn(SIZE) for _ in described], repeats=repeats)
    if repeats:  # so that it has other values by its second name
        saved["again"] = made(described, [torch.randn(SIZE)], repeats=False)["o0"]
    by_hand, loaded = (made(described, [torch.zeros(SIZE)] * len(described), repeats=repeats) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        ckpt.save(saved, Path(folder) / "c")
        state = ckpt.load(Path(folder) / "c")
        for name, each in by_hand.items():
            each.load_state_dict(state[name])
        ckpt.load(Path(folder) / "c", loaded)
    for name, each in by_hand.items():
        assert_same(each.state_dict(), loaded[name].state_dict(), name)


def test_tensors_of_several_objects_that_are_stored_once_are_filled_in_place(ckpt, tmp_path: Path) -> None:
    tied, target = torch.randn(SIZE), torch.zeros(SIZE)
    ckpt.save({"a": Plain(tied), "b": Plain(tied)}, tmp_path / "c")
    one, other = Plain(target), Plain(target)
    ckpt.load(tmp_path / "c", {"a": one, "b": other})
    assert one.t is other.t is target
    assert torch.equal(target, tied)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_plain_tensor_with_another_value_than_that_of_an_object_is_refused(is_first: bool, ckpt, tmp_path: Path):
    """Nothing says which one is to be the last."""
    ckpt.save({"a": Plain(torch.ones(SIZE)), "t": torch.zeros(SIZE)}, tmp_path / "c")
    memory = torch.full((SIZE,), 7.0)
    target = {"a": Plain(memory), "t": memory}
    with pytest.raises(aiockpt.ShapeMismatchError, match="are the same memory in the target, but differ"):
        ckpt.load(tmp_path / "c", target if is_first else dict(reversed(target.items())))
    assert memory.eq(7).all()
