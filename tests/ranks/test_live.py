"""Live objects of several ranks: sharded models and optimizers, and objects that fail on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import aiockpt
from tests.ranks.test_fsdp_load import Full, Model, build, full_state, same, share_of, state_of, train
from tests.ranks.world import RankFailure, World, mesh_of


class Counter:
    """Live object; ``fails`` names the method that raises, or is ``Ctrl-C``."""

    def __init__(self, count: int, fails: str = "") -> None:
        self.count = count
        self._fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self._fails == "state_dict":
            raise ValueError("no state")
        if self._fails == "Ctrl-C":
            raise KeyboardInterrupt
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._fails == "load_state_dict":
            raise ValueError("it does not fit")
        self.count = state["count"]


def save_trained(rank: int, world_size: int, path: Path, kind: str, whole: bool) -> tuple[list[float], Full]:
    model, optimizer = build(kind, world_size, seed=1)
    train(model, optimizer, range(2), share_of(kind, rank))
    state = {"model": model, "optim": optimizer} if not whole else state_of(model, optimizer)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state | {"step": 2}, path)
    saved = full_state(model, optimizer)
    return train(model, optimizer, range(2, 4), share_of(kind, rank)), saved


def load_trained(rank: int, world_size: int, path: Path, kind: str, stepped: bool) -> tuple[list[float], Full]:
    model, optimizer = build(kind, world_size, seed=2)
    if stepped:
        train(model, optimizer, range(5, 6), share_of(kind, rank))
    state = {"model": model, "optim": optimizer, "step": 0}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, state)
    assert state["step"] == 2
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    assert any(isinstance(each, DTensor) for each in moments)
    loaded = full_state(model, optimizer)
    return train(model, optimizer, range(2, 4), share_of(kind, rank)), loaded


@pytest.mark.parametrize(
    ("kind", "stepped"),
    [
        pytest.param(kind, stepped, marks=() if stepped == (kind in ("fsdp", "fsdp_tp")) else pytest.mark.full)
        for kind in ("fsdp", "hsdp", "tp", "fsdp_tp")
        for stepped in (False, True)
    ],
)
def test_resumed_training_equals_uninterrupted(world4: World, tmp_path: Path, kind: str, stepped: bool) -> None:
    before = world4.results(save_trained, tmp_path / "c", kind, False)
    after = world4.results(load_trained, tmp_path / "c", kind, stepped)
    for (losses, saved), (losses_after, loaded) in zip(before, after, strict=True):
        assert same(saved, loaded)
        assert losses == losses_after


@pytest.mark.main
def test_other_numbers_of_ranks_load_it(world2: World, world4: World, tmp_path: Path) -> None:
    """One process loads it as well; its optimizer gets whole tensors."""
    before = world2.results(save_trained, tmp_path / "c", "fsdp", False)
    for _, loaded in world4.results(load_trained, tmp_path / "c", "fsdp_tp", False):
        assert same(before[0][1], loaded)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(tmp_path / "c", {"model": model, "optim": optimizer})
    assert same(before[0][1], full_state(model, optimizer))


# --- objects that change a later one ---------------------------------------------------------------------


class Doubling(Counter):
    """Changes a model when it is loaded, on some ranks."""

    model: Any = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for each in [] if self.model is None else self.model.parameters():
            each.data.mul_(2)


def load_around_it(rank: int, world_size: int, path: Path, is_sharded: bool, first: bool) -> list[torch.Tensor]:
    model = build("fsdp", world_size, seed=2)[0] if is_sharded else Model()
    doubling = Doubling(0)
    doubling.model = model if rank == 0 or is_sharded else None
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"a": doubling, "model": model} if first else {"model": model, "a": doubling})
    parameters = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_an_object_that_changes_a_later_one(world2: World, tmp_path: Path, is_sharded: bool) -> None:
    """It does so on all ranks, or on the first one alone."""
    model = Model()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"model": model, "a": Counter(7)}, tmp_path / "c")
    for first in (True, False):
        for rank, loaded in enumerate(world2.results(load_around_it, tmp_path / "c", is_sharded, first)):
            factor = 1 if first or (rank and not is_sharded) else 2
            assert all(torch.equal(one, each * factor) for one, each in zip(loaded, model.parameters(), strict=True))


# --- failures -------------------------------------------------------------------------------------------


def save_counter(rank: int, world_size: int, path: Path, failing: int) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            ckpt.save({"a": Counter(rank, "state_dict" if rank == failing else "")}, path)
        finally:
            ckpt.save({"a": Counter(7)}, path.with_name("next"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_dict_that_fails_on_one_rank(world2: World, tmp_path: Path, failing: int) -> None:
    outcomes = world2.run(save_counter, tmp_path / "c", failing)
    text = "state_dict() of a (Counter) failed: ValueError: no state"
    assert [outcome.kind for outcome in outcomes] == ["SaveError", "SaveError"]
    assert outcomes[failing].text == text
    assert outcomes[failing].cause == "ValueError: no state"
    assert outcomes[1 - failing].text == f"rank {failing}: {text}"
    assert {path.name for path in tmp_path.iterdir()} == {"next"}


def load_with(rank: int, world_size: int, path: Path, failing: int) -> None:
    """Load with a wrong option on one rank, then without."""
    state = {"a": Counter(0)}
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            ckpt.load(path, state, keys=[5] if rank == failing else None)  # type: ignore[list-item]
        finally:
            ckpt.load(path, state)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_option_that_is_wrong_on_one_rank(world2: World, tmp_path: Path, failing: int) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": Counter(7)}, tmp_path / "c")
    outcomes = world2.run(load_with, tmp_path / "c", failing)
    assert outcomes[failing].kind == "TypeError"
    assert outcomes[failing].text.startswith("keys must be names and patterns")
    assert outcomes[1 - failing].kind == "LoadError"
    assert outcomes[1 - failing].text == f"rank {failing}: TypeError: {outcomes[failing].text}"


def load_counter(rank: int, world_size: int, path: Path, failing: int, fails: str) -> int:
    counter = Counter(0, fails if rank == failing else "")
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            ckpt.load(path, {"a": counter, "w": torch.zeros(3)})
        finally:  # the next load works, also with a live object on one rank alone
            again: Any = Counter(0) if rank else {"count": 0}
            target = {"a": again}
            ckpt.load(path, target)
            assert target == {"a": again}
            assert (again.count if rank else again["count"]) == 7
    return counter.count


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("fails", ["state_dict", "load_state_dict"])
def test_an_object_that_fails_to_load_on_one_rank(world2: World, tmp_path: Path, failing: int, fails: str) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": Counter(7), "w": torch.ones(3)}, tmp_path / "c")
    outcomes = world2.run(load_counter, tmp_path / "c", failing, fails)
    assert [outcome.kind for outcome in outcomes] == ["LoadError", "LoadError"]
    assert outcomes[1 - failing].text.startswith(f"rank {failing}: ")
    for outcome in outcomes:
        assert f"{fails}() of a (Counter) failed: ValueError: " in outcome.text
    assert world2.results(load_counter, tmp_path / "c", -1, fails) == [7, 7]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_interrupt_on_one_rank_fails_the_load_on_all(world2: World, tmp_path: Path, failing: int) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": Counter(7), "w": torch.ones(3)}, tmp_path / "c")
    outcomes = world2.run(load_counter, tmp_path / "c", failing, "Ctrl-C")
    assert outcomes[failing].kind == "KeyboardInterrupt"
    assert outcomes[1 - failing].kind == "LoadError"
    assert "was interrupted: KeyboardInterrupt()" in outcomes[1 - failing].text


class Loader(Counter):
    """Object whose `load_state_dict` loads, which would deadlock with several ranks."""

    def __init__(self, ckpt: aiockpt.SyncCheckpointer, path: Path) -> None:
        super().__init__(0)
        self._ckpt, self._path = ckpt, path

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ckpt.load(self._path, {"a": {"count": 0}})


def load_within(rank: int, world_size: int, path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"a": Loader(ckpt, path)})


def test_a_load_within_a_load(world2: World, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": Counter(7)}, tmp_path / "c")
        ckpt.load(tmp_path / "c", {"a": Loader(ckpt, tmp_path / "c")})  # allowed in one process
    for outcome in world2.run(load_within, tmp_path / "c"):
        assert isinstance(outcome, RankFailure)
        assert "can't be loaded within a load_state_dict()" in outcome.text


# --- optimizers whose keys mean different parameters on each rank ---------------------------------------


def save_half(rank: int, world_size: int, path: Path) -> None:
    """Save the optimizer of a pipeline stage: each rank gives the same numbers to parameters of its own."""
    alone = mesh_of(world_size, 1, names=("stages", "shards"))["shards"]
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(2 + rank, 2), alone, [Shard(0)]))
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"optim": torch.optim.Adam([weight])}, path)


def save_flat(rank: int, world_size: int, path: Path) -> None:
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=rank < 0)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"optim": torch.optim.Adam(model.parameters())}, path)


@pytest.mark.parametrize(
    ("save", "why"), [(save_half, "sharded over 1 of 2 ranks"), (save_flat, "flattened by FullyShardedDataParallel")]
)
def test_optimizers_that_need_names(world2: World, tmp_path: Path, save: Any, why: str) -> None:
    for outcome in world2.run(save, tmp_path / "c"):
        assert outcome.kind == "SaveError", outcome.trace
        assert why in outcome.text
        assert "Use get_state_dict(model, optim)" in outcome.text


def save_and_load_ddp(rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with aiockpt.SyncCheckpointer(process_group=dist.group.WORLD) as ckpt:
        ckpt.save({"model": model, "optim": optimizer}, path)
        torch.manual_seed(1)
        other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        fresh = torch.optim.Adam(other.parameters())
        ckpt.load(path, {"model": other, "optim": fresh})
        assert torch.equal(model.module.weight, other.module.weight)
        assert torch.equal(*(o.state_dict()["state"][0]["exp_avg"] for o in (optimizer, fresh)))
        with pytest.raises(aiockpt.MissingKeysError, match=r"lacks 2") as caught:
            ckpt.load(path, {"model": other.module})
        assert caught.value.keys == ("model.weight", "model.bias")


def test_data_parallel(world2: World, tmp_path: Path) -> None:
    world2.results(save_and_load_ddp, tmp_path / "c")
