"""Saves that the real Megatron-Core plans and loads, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp import megatron
from tests.ranks.world import World
from tests.states import assert_same

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")

QUEUES = {
    "mcore": "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
}


@pytest.fixture
def ranks() -> Iterator[World]:
    """Yield a world of two ranks, each with writer processes of its own."""
    with World(2, store="file", may_start=True) as world:
        yield world


def shard_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(40, 300, generator=torch.Generator().manual_seed(100 * step + rank))


def state_of(rank: int, size: int, step: int) -> dict[str, Any]:
    core = importlib.import_module("megatron.core.dist_checkpointing")
    sharded, shard = core.ShardedTensor.from_rank_offsets, shard_of(rank, step)
    return {
        "w": sharded("model.w", shard, (0, rank, size)),
        "m": sharded("optim.m", shard.bfloat16(), (1, rank, size)),
        "b": sharded("model.b", torch.arange(7.0) + step, replica_id=rank),
        "facts": core.ShardedObject("facts", {"rank": rank, "step": step}, (size,), (rank,)),
        "step": step,
    }


def strategies_of(save: Any) -> dict[str, dict[str, str]]:
    """Return the arguments that choose each strategy of the installed version."""
    if "async_strategy" not in inspect.signature(save).parameters:  # before Megatron-Core 0.17
        return {"mcore": {}}
    installed = ("mcore", "nvrx") if importlib.util.find_spec("nvidia_resiliency_ext") else ("mcore",)
    return {strategy: {"async_strategy": strategy} for strategy in installed}


def save_and_load(rank: int, size: int, folder: Path) -> list[str]:
    """Save two steps, both in flight, with each strategy, and load them; return the strategies."""
    warnings.simplefilter("ignore")
    megatron.install()
    core = importlib.import_module("megatron.core.dist_checkpointing")
    with mock.patch.multiple(torch.cuda, synchronize=lambda: None, current_device=lambda: "cpu"):
        for strategy, chosen in strategies_of(core.save).items():
            queue = importlib.import_module(QUEUES[strategy]).AsyncCallsQueue(persistent=False)
            for step in (1, 2):
                path = folder / strategy / f"{step}"
                path.mkdir(parents=True, exist_ok=True)
                dist.barrier()
                state = state_of(rank, size, step)
                request = core.save(state, path, async_sharded_save=True, **chosen)
                assert request.async_fn.func is megatron.FileSystemWriterAsync.write_preloaded_data_multithread
                queue.schedule_async_request(request)
                for name in "wmb":
                    state[name].data.zero_()
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()
            for step in (1, 2):
                wanted = state_of(rank, size, step)
                loaded = core.load(state_of(rank, size, 0), folder / strategy / f"{step}")
                assert_same({name: wanted[name].data for name in "wmb"}, {name: loaded[name] for name in "wmb"})
                assert (loaded["facts"], loaded["step"]) == ({"rank": rank, "step": step}, step)
    return list(strategies_of(core.save))


def test_megatron_torch_and_aiockpt_load_the_saves(ranks: World, tmp_path: Path) -> None:
    strategies, others = ranks.results(save_and_load, tmp_path)
    assert strategies == others
    for strategy in strategies:
        for step in (1, 2):
            shards = [shard_of(rank, step) for rank in range(2)]
            wanted = {
                "model.w": torch.cat(shards),
                "optim.m": torch.cat(shards, dim=1).bfloat16(),
                "model.b": torch.arange(7.0) + step,
            }
            path = tmp_path / strategy / f"{step}"
            target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            dcp.load(target, storage_reader=dcp.FileSystemReader(path))
            assert_same(wanted, target)
            target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            with aiockpt.SyncCheckpointer() as checkpointer:
                checkpointer.load(path, target)
            assert_same(wanted, target)
