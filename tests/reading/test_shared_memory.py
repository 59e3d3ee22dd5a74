"""Objects whose tensors share memory, in the target or where they are stored, load as by their own load_state_dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from tests.states import assert_same

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all of it": lambda weight: weight,
    "flat": lambda weight: weight.view(16),
    "a row": lambda weight: weight[1],
    "a column": lambda weight: weight[:, 1],
    "transposed": lambda weight: weight.t(),
    "other bits": lambda weight: weight.view(torch.int32),
    "a number": lambda weight: weight[0, 0],
    "every second": lambda weight: weight.view(16)[::2],
    "conjugated": lambda weight: torch.view_as_complex(weight.view(8, 2)).conj(),
    "none of it": lambda weight: weight[:0],
}


class Viewed(nn.Module):
    """A parameter, and a buffer that is a view of it if it is shared; the buffer comes first if it is outside."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor], *, shared: bool, outside: bool = False) -> None:
        super().__init__()
        inner = nn.Module() if outside else self
        weight = nn.Parameter(torch.randn(4, 4))
        part = view(weight.detach())
        fresh = torch.empty_like(part).copy_(view(torch.randn(4, 4)))
        self.register_buffer("part", part if shared else fresh)
        inner.weight = weight
        if outside:
            self.inner = inner


class Doubling(nn.Linear):
    """Changes what it is given in place."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"].mul_(2)
        super()._load_from_state_dict(state, prefix, *rest)


class Trebling(nn.Linear):
    """Changes in place what it is given as its extra state."""

    held: Any = None

    def get_extra_state(self) -> Any:
        return self.weight.detach() if self.held is None else self.held

    def set_extra_state(self, extra: Any) -> None:
        self.held = extra.mul_(3)


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as made:
        yield made


def assert_loads_alike(ckpt: aiockpt.SyncCheckpointer, path: Path, saved: nn.Module, make: Callable[[], Any]) -> None:
    """Compare a load into an object with one by hand."""
    ckpt.save({"m": saved}, path)
    torch.manual_seed(1)
    own = make()
    torch.manual_seed(1)
    mine = make()
    own.load_state_dict(ckpt.load(path)["m"])
    ckpt.load(path, {"m": mine})
    assert_same(own.state_dict(), mine.state_dict())


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_a_buffer_that_is_a_view_of_a_parameter(view: str, stored: bool, outside: bool, ckpt, tmp_path: Path) -> None:
    """The order of the copies decides about the memory that both have."""

    def make() -> nn.Module:
        return Viewed(VIEWS[view], shared=True, outside=outside)

    assert_loads_alike(ckpt, tmp_path / "c", Viewed(VIEWS[view], shared=stored, outside=outside), make)


@pytest.mark.parametrize("step", [10, 5])
def test_parameters_of_one_storage(step: int, ckpt, tmp_path: Path) -> None:
    """They are filled in place where they don't overlap."""

    def make() -> nn.ParameterList:
        flat = torch.randn(20)
        return nn.ParameterList([flat[:10], flat[step : step + 10]])

    saved = nn.ParameterList([torch.randn(10), torch.randn(10)])
    assert_loads_alike(ckpt, tmp_path / "c", saved, make)
    saved.register_parameter("2", nn.Parameter(torch.randn(1)))
    ckpt.save({"m": saved}, tmp_path / "d")
    fresh = make()
    with pytest.warns(aiockpt.MissingKeysWarning):
        ckpt.load(tmp_path / "d", {"m": fresh}, strict=False)
    assert_same(saved[1], fresh[1])


@pytest.mark.parametrize("suffix", ["", ".pt"])
@pytest.mark.parametrize("keys", [None, "m.0", "m.2"])
@pytest.mark.parametrize(("stored", "shared"), [(False, True), (True, False), (True, True)])
def test_tied_weights(stored: bool, shared: bool, keys: Any, suffix: str, ckpt, tmp_path: Path) -> None:
    def make(*, tied: bool) -> nn.Sequential:
        made = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        if tied:
            made[1].weight = made[2].weight = made[0].weight
        return made

    path = tmp_path / f"c{suffix}"
    ckpt.save({"m": make(tied=stored)}, path)
    own, mine = make(tied=shared), make(tied=shared)
    mine.load_state_dict(own.state_dict())
    own.load_state_dict(ckpt.load(path, keys=keys)["m"], strict=keys is None)
    ckpt.load(path, {"m": mine}, keys=keys)
    assert_same(own.state_dict(), mine.state_dict())


@pytest.mark.parametrize("suffix", ["", ".pt"])
@pytest.mark.parametrize("kind", [Doubling, Trebling])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_stored_once_and_changed_in_place(
    shared: bool, is_first: bool, kind: Any, suffix: str, ckpt, tmp_path: Path
) -> None:
    """Where one name of a stored tensor is given to other code, the others see what that has changed."""

    def make(*, tied: bool) -> nn.Sequential:
        plain, odd = nn.Linear(3, 3), kind(3, 3)
        if tied:
            odd.weight = plain.weight
        return nn.Sequential(odd, plain) if is_first else nn.Sequential(plain, odd)

    assert_loads_alike(ckpt, tmp_path / f"c{suffix}", make(tied=True), lambda: make(tied=shared))
