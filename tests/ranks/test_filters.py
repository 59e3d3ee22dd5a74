"""`save(include=, exclude=)` with several ranks: each rank selects among its own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import aiockpt
from tests.ranks.world import RankFailure, World, mesh_of
from tests.states import assert_same


def whole(n: int) -> torch.Tensor:
    return torch.arange(64.0 * n, 64.0 * (n + 1)).reshape(16, 4)


def state_of(rank: int) -> dict[str, Any]:
    """Return a state with sharded tensors, a plain one that all ranks have, and a stage for each rank alone."""
    mesh = mesh_of(2)
    return {
        "model": {name: distribute_tensor(whole(n), mesh, [Shard(0)]) for n, name in enumerate("ab")},
        "optim": {"m": distribute_tensor(whole(2), mesh, [Shard(1)]), "step": 5},
        "stage": {str(rank): whole(3 + rank)},
        "plain": whole(5),
    }


def save_parts(rank: int, world_size: int, path: Path, format: Any) -> None:
    leave_out = {"step"} if format == "safetensors" else set()
    with aiockpt.SyncCheckpointer() as ckpt:
        for number in range(2):  # first with a new plan, then with the cached one
            ckpt.save(
                state_of(rank),
                path / f"{number}-no-optim",
                format=format,
                exclude=lambda name, _: name.startswith("optim"),
            )
            ckpt.save(state_of(rank), path / f"{number}-a", format=format, include=["*.a", "plain", "stage"])
            none = (lambda *_: False) if rank else "stage"
            ckpt.save(state_of(rank), path / f"{number}-own", format=format, include=none)
            ckpt.save(
                state_of(rank),
                path / f"{number}-all",
                format=format,
                exclude=lambda name, _: name.rpartition(".")[2] in leave_out,
            )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_each_rank_saves_its_part_of_the_selection(world2: World, tmp_path: Path, format: str) -> None:
    world2.results(save_parts, tmp_path, format)
    stage = {"stage.0": whole(3), "stage.1": whole(4)}
    model = {"model.a": whole(0), "model.b": whole(1)}
    step = {"optim.step": 5} if format == "dcp" else {}
    wanted = {
        "no-optim": {**model, **stage, "plain": whole(5)},
        "own": {"stage.0": whole(3)},
        "a": {"model.a": whole(0), **stage, "plain": whole(5)},
        "all": {**model, "optim.m": whole(2), **step, **stage, "plain": whole(5)},
    }
    for number in range(2):
        for name, values in wanted.items():
            with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(tmp_path / f"{number}-{name}") as reader:
                found = {key: reader.read(key) for key in reader}
            assert_same(dict(sorted(found.items())), dict(sorted(values.items())), name)


def save_half(rank: int, world_size: int, path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state_of(rank), path / "c", include=["model", "plain"] if rank else ["model.a", "stage"])


def test_a_part_of_a_sharded_tensor_cannot_be_excluded(world2: World, tmp_path: Path) -> None:
    outcomes = world2.run(save_half, tmp_path)
    text = (
        "rank 0: model.b: the ranks have 32 of its 64 elements together; every rank that has a part of it must save it"
    )
    assert [outcome.text for outcome in outcomes] == [text, text]
    assert not list(tmp_path.iterdir())


def save_refused(rank: int, world_size: int, path: Path) -> list[str]:
    """Select a key that only rank 0 has, then save again."""
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            ckpt.save(state_of(rank), path / "c", include=["model", "stage.0"])
        finally:
            ckpt.save(state_of(rank), path / "d", include=["model"])
    return []


def test_a_name_that_only_one_rank_has(world2: World, tmp_path: Path) -> None:
    outcomes = world2.run(save_refused, tmp_path)
    assert all(isinstance(outcome, RankFailure) for outcome in outcomes)
    assert outcomes[1].kind == "ValueError"
    assert "include has 'stage.0', which matches nothing" in outcomes[1].text
    assert outcomes[0].text.startswith("rank 1: ValueError: include has 'stage.0', which matches nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def save_stages(rank: int, world_size: int, path: Path, rule: Any) -> None:
    """Save pipeline stages whose optimizers give the same numbers to different parameters."""
    mesh = mesh_of(2, 1, names=("pp", "dp"))["dp"]
    model = torch.nn.Linear(4, 4 + rank, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(torch.full((4 + rank, 4), 7.0 + rank), mesh, [Shard(0)]))
    optim = torch.optim.AdamW(model.parameters())
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({f"stage{rank}": model, "optim": optim}, path, exclude=rule)


def test_an_excluded_optimizer_may_have_ambiguous_parameter_numbers(world2: World, tmp_path: Path) -> None:
    outcomes = world2.run(save_stages, tmp_path / "c", None)
    assert all("so the numbers that its state_dict() calls them by" in outcome.text for outcome in outcomes)
    world2.results(save_stages, tmp_path / "c", "optim")
    with aiockpt.SyncCheckpointer() as ckpt:
        wanted = {f"stage{rank}": {"weight": torch.full((4 + rank, 4), 7.0 + rank)} for rank in range(2)}
        loaded = {key: dict(value) for key, value in ckpt.load(tmp_path / "c").items()}
        assert_same(loaded, wanted)
