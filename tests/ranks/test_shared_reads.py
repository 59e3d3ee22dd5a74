"""What several ranks read alike is read once: all kinds of targets, failures, and ranks that can't be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.wrapper import WrapperStorage
from tests.ranks.world import World

WIDTH = 1500


class Counting(WrapperStorage):
    """Counts the bytes that are read from files of data."""

    def __init__(self) -> None:
        super().__init__(LocalStorage())
        self.nbytes = 0

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        if name.endswith(".distcp"):
            self.nbytes += nbytes


def state_of(factor: float) -> dict[str, Any]:
    """Return what all ranks have: large and small tensors, arrays, and objects."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=generator) * factor  # noqa: E731
    return {
        "large": {str(n): make(WIDTH, WIDTH) for n in range(3)},
        "transposed": make(WIDTH, 700).t(),
        "small": {str(n): make(17, n) for n in range(300)},
        "array": make(400_000).numpy(),
        "step": int(factor),
        "set": {int(factor), 2},
    }


def nbytes_of(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(nbytes_of, state.values()))
    return int(getattr(state, "nbytes", 0))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state_of(3.0), path)
    return path


def load_replicated(rank: int, world_size: int, path: Path, kind: str, options: dict[str, Any]) -> int:
    """Load what all ranks have; return how many bytes this rank has read."""
    storage, expected = Counting(), state_of(3.0)
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt:
        if kind == "new":
            assert equal(ckpt.load(path, **options), expected)
            return storage.nbytes
        state = state_of(0.0)
        if kind == "fresh":
            state["large"] = state["small"] = None
        if kind == "converted":
            state["large"] = {key: value.double().t().contiguous().t() for key, value in state["large"].items()}
            state["transposed"] = state["transposed"].contiguous()
            state["array"] = None
            options = {"dtype": torch.float64, "keys": ["large", "step"]} | options
        ckpt.load(path, state, **options)
        if kind == "converted":
            assert equal(state["large"], {key: value.double() for key, value in expected["large"].items()})
            assert state["step"] == 3
        else:
            assert equal(state, expected)
    return storage.nbytes


@pytest.mark.parametrize("kind", ["filled", "fresh", "new", "converted"])
def test_replicated_state_is_read_once(kind: str, saved: Path, world4: World) -> None:
    nbytes = nbytes_of(state_of(3.0))
    read = world4.results(load_replicated, saved, kind, {"share": True})
    if kind == "converted":
        nbytes = 3 * WIDTH * WIDTH * 4
    assert nbytes * 0.99 <= sum(read) <= 1.1 * nbytes
    assert max(read) <= 0.25 * nbytes + (8 << 20)
