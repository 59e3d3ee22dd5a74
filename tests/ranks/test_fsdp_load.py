"""FSDP2 and tensor parallelism end to end: train, save, load on other ranks, train on."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aiockpt
from tests.ranks.world import World, mesh_of

WRITERS = ["dcp", "aiockpt"] if "process_group" in inspect.signature(aiockpt.SyncCheckpointer).parameters else ["dcp"]
Full = dict[str, np.ndarray]
KINDS = ["fsdp", "hsdp", "tp", "fsdp_tp"]
WIDTH = 18  # not divisible by 4 ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(29, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 29)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # FSDP2 warns if the output is a view


def build(kind: str, world_size: int, seed: int) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Model()
    if kind in ("tp", "fsdp_tp"):
        tp = world_size if kind == "tp" else 2
        mesh = mesh_of(world_size // tp, tp, names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind == "fsdp_tp":
            shard(model, mesh["dp"])
    elif kind == "hsdp":
        shard(model, mesh_of(2, world_size // 2, names=("replicas", "shards")))
    else:
        shard(model, mesh_of(world_size))
    # foreach would mix plain and distributed parameters where only some are parallel
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def shard(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: Model, optimizer: torch.optim.AdamW, steps: range, share: int) -> list[float]:
    """Train on one share of the data, which must be the same on all ranks of a tensor-parallel group."""
    losses: list[float] = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + share)
        tokens = torch.randint(29, (2, 7), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def share_of(kind: str, rank: int) -> int:
    return {"tp": 0, "fsdp_tp": rank // 2}.get(kind, rank)


def state_of(model: Model, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    states = get_state_dict(model, optimizer)
    return {"model": states[0], "optim": states[1]}


def full_state(model: Model, optimizer: torch.optim.AdamW) -> Full:
    """Return the whole tensors of a state by name."""
    state = state_of(model, optimizer)
    leaves = {f"model.{name}": value for name, value in state["model"].items()}
    for name, slots in state["optim"]["state"].items():
        leaves |= {f"optim.{name}.{slot}": value for slot, value in slots.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().numpy().copy()
        for name, value in leaves.items()
    }


def save_trained(rank: int, world_size: int, writer: str, path: Path, kind: str) -> tuple[list[float], Full]:
    """Train two steps, save, and train two more; return the losses of these and the saved state."""
    model, optimizer = build(kind, world_size, seed=1)
    train(model, optimizer, range(2), share_of(kind, rank))
    state = state_of(model, optimizer)
    if writer == "dcp":
        dcp.save(state, checkpoint_id=path)
    else:
        with aiockpt.SyncCheckpointer(process_group=dist.group.WORLD) as ckpt:
            ckpt.save(state, path)
    saved = full_state(model, optimizer)
    return train(model, optimizer, range(2, 4), share_of(kind, rank)), saved


def load_trained(rank: int, world_size: int, path: Path, kind: str) -> tuple[list[float], Full]:
    """Load into a new model and optimizer, and train two steps; return their losses and the loaded state."""
    model, optimizer = build(kind, world_size, seed=2)
    state = state_of(model, optimizer)
    assert any(isinstance(value, DTensor) for value in state["model"].values())
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    loaded = full_state(model, optimizer)
    return train(model, optimizer, range(2, 4), share_of(kind, rank)), loaded


class Trained(NamedTuple):
    """A checkpoint and, for each rank that saved it, the losses afterwards and the saved state."""

    path: Path
    outcomes: list[tuple[list[float], Full]]


@pytest.fixture(scope="module")
def trained(world2: World, world4: World, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that trains and saves with a writer, number of ranks and kind; cached."""
    worlds = {2: world2, 4: world4}

    @functools.cache
    def train_and_save(writer: str, ranks: int, kind: str) -> Trained:
        path = tmp_path_factory.mktemp("trained") / "c"
        return Trained(path, worlds[ranks].results(save_trained, writer, path, kind))

    return train_and_save


def same(left: Full, right: Full) -> bool:
    assert left.keys() == right.keys()
    unlike = [name for name in left if not np.array_equal(left[name], right[name])]
    assert not unlike
    return True


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_equals_uninterrupted(trained, world4: World, writer: str, kind: str) -> None:
    path, before = trained(writer, 4, kind)
    after = world4.results(load_trained, path, kind)
    for (losses, saved), (losses_after, loaded) in zip(before, after, strict=True):
        assert len(saved) > 60
        assert same(saved, loaded)
        assert losses == losses_after
        assert losses[0] != losses[1]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp_tp"])
def test_more_ranks_load_into_other_layouts(trained, world4: World, writer: str, kind: str) -> None:
    path, before = trained(writer, 2, "fsdp")
    saved = before[0][1]
    for losses, loaded in world4.results(load_trained, path, kind):
        assert same(saved, loaded)
        assert losses[0] != losses[1]


def load_into_plain(path: Path) -> Full:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = state_of(model, optimizer)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return full_state(model, optimizer)


@pytest.mark.parametrize("writer", WRITERS)
def test_one_process_loads_whole_tensors(trained, writer: str) -> None:
    path, before = trained(writer, 4, "fsdp_tp")
    assert same(before[0][1], load_into_plain(path))


def load_full(rank: int, world_size: int, path: Path) -> Full:
    """Load whole tensors on rank 0 alone, and have torch broadcast them."""
    model, _ = build("fsdp", world_size, seed=2)
    state: dict[str, Any] = {}
    if rank == 0:
        with aiockpt.SyncCheckpointer() as ckpt:
            state = ckpt.load(path, keys="model")["model"]
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    loaded = model.state_dict().items()
    return {
        f"model.{name}": (value.full_tensor() if isinstance(value, DTensor) else value).numpy().copy()
        for name, value in loaded
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_rank_0_loads_for_all(trained, world4: World, writer: str) -> None:
    path, before = trained(writer, 4, "fsdp")
    saved = before[0][1]
    for loaded in world4.results(load_full, path):
        assert same({name: value for name, value in saved.items() if name.startswith("model.")}, loaded)
