"""Loads into distributed models with tied tensors, of which the checkpoint has one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aiockpt
from tests.ranks.world import World, mesh_of

ROWS = 3  # fewer than ranks


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(ROWS, 2)
        self.head = torch.nn.Linear(2, ROWS, bias=False)
        self.head.weight = self.embed.weight


def load(rank: int, world_size: int, path: Path) -> list[Any]:
    model = Tied()
    fully_shard(model, mesh=mesh_of(world_size))
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"model": model})
        state = dict(model.state_dict())
        assert isinstance(state["head.weight"], DTensor)
        found = [each.full_tensor().tolist() for each in state.values()]
        ckpt.load(path, {"model": state})
        apart = {
            **state,
            "head.weight": DTensor.from_local(state["head.weight"].to_local().clone(), mesh_of(world_size)),
        }
        try:
            ckpt.load(path, {"model": apart})
        except aiockpt.MissingKeysError as exc:
            return [*found, [each.full_tensor().tolist() for each in state.values()], exc.keys]
    raise AssertionError("a tensor that is not tied was not missing")


def test_a_tied_name_is_not_missing(world4: World, tmp_path: Path) -> None:
    weight = torch.arange(2.0 * ROWS).reshape(ROWS, 2)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"model": {"embed.weight": weight}}, tmp_path / "c")
    both = [weight.tolist(), weight.tolist()]
    assert world4.results(load, tmp_path / "c") == [[*both, both, ("model.head.weight",)]] * 4
