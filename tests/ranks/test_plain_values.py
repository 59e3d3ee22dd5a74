"""Values that need no `safe_globals`, and values that do, saved by several ranks."""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter, deque
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

import aiockpt
from tests.ranks.world import World


class Settings:
    """Class that a load has to allow with `safe_globals`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def plain_state(rank: int) -> dict[str, Any]:
    """Return values of which some are the same on all ranks and some are the rank's own."""
    generator = np.random.default_rng(rank)
    return {
        "shared": np.arange(12, dtype=np.int16).reshape(3, 4),
        "path": PurePosixPath("runs/a"),
        f"own{rank}": {
            "array": generator.normal(size=(4, rank + 2)),
            "scalar": np.float32(rank + 0.5),
            "state": generator.bit_generator.state,
            "python": random.Random(rank).getstate(),
            "torch": torch.Generator().manual_seed(rank).get_state(),
            "queue": deque([rank, 2, 3], maxlen=5),
            "count": Counter({"a": rank}),
            "price": Decimal(f"{rank}.25"),
            "args": argparse.Namespace(rank=rank),
        },
    }


def save_plain(rank: int, world_size: int, path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(plain_state(rank), path)


def load_plain(rank: int, world_size: int, path: Path) -> None:
    """Load, and compare with the values that the other rank saved."""
    expected = plain_state((rank + 1) % world_size)
    name = next(key for key in expected if key.startswith("own"))
    with aiockpt.SyncCheckpointer() as ckpt:
        loaded = ckpt.load(path)
    own, theirs = expected.pop(name), loaded[name]
    assert loaded["path"] == expected["path"]
    assert (loaded["shared"].dtype, loaded["shared"].tolist()) == (np.int16, expected["shared"].tolist())
    assert (theirs["array"].dtype, theirs["array"].tobytes()) == (np.float64, own["array"].tobytes())
    assert torch.equal(own.pop("torch"), theirs.pop("torch"))
    assert own.pop("array").shape == theirs.pop("array").shape
    assert own == theirs
    assert {key: type(value) for key, value in own.items()} == {key: type(value) for key, value in theirs.items()}
    assert theirs["queue"].maxlen == 5


def test_plain_values_come_back_on_every_rank(world2: World, tmp_path: Path) -> None:
    world2.results(save_plain, tmp_path / "c")
    world2.results(load_plain, tmp_path / "c")
    with aiockpt.SyncCheckpointer() as ckpt:  # one process as well
        assert ckpt.load(tmp_path / "c")["own1"]["count"] == Counter({"a": 1})


def save_settings(rank: int, world_size: int, path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as seen, aiockpt.SyncCheckpointer() as ckpt:
        warnings.simplefilter("always")
        for step in range(2):
            ckpt.save({"all": Settings(5), f"own{rank}": Settings(rank)}, path.with_name(f"{path.name}{step}"))
    return [str(each.message) for each in seen if each.category is aiockpt.SafeGlobalsWarning]


def load_settings(rank: int, world_size: int, path: Path) -> tuple[int, int]:
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            ckpt.load(path)
        except aiockpt.UnsafeCheckpointError:
            loaded = ckpt.load(path, safe_globals=[Settings])
            return loaded["all"].rank, loaded[f"own{1 - rank}"].rank
    raise AssertionError("it was loaded without safe_globals")


def test_ranks_warn_of_values_that_will_need_safe_globals(world2: World, tmp_path: Path) -> None:
    seen = world2.results(save_settings, tmp_path / "c")
    for rank, messages in enumerate(seen):
        assert len(messages) == 1, messages
        assert f"safe_globals=[{Settings.__module__}.Settings]" in messages[0], rank
    assert world2.results(load_settings, tmp_path / "c1") == [(5, 1), (5, 0)]
