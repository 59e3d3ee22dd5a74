"""Saves by several ranks: each rank writes a share of one checkpoint."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as OwnedShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.planning.collective.messages import RankAssignment
from tests.ranks.layouts import LAYOUTS, distributed, full_tensors
from tests.ranks.world import World, mesh_of
from tests.stock import ALONE


@pytest.fixture(scope="module")
def worlds(world2: World, world4: World, world8: World) -> dict[int, World]:
    return {2: world2, 4: world4, 8: world8}


def loaded(path: Path) -> Any:
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(path).ok
        return ckpt.load(path)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected
    )


def save_layout(rank: int, world_size: int, path: Path, layout: str) -> aiockpt.SaveResult:
    with aiockpt.SyncCheckpointer() as ckpt:
        return ckpt.save({"model": distributed(layout, world_size), "step": 7}, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *((2, layout) for layout in LAYOUTS[:4]),
        *((4, layout) for layout in LAYOUTS),
        *((8, layout) for layout in ("shard1", "grid", "fsdp_tp")),
    ],
)
def test_every_layout_loads_here_and_in_stock_torch(
    worlds: dict[int, World], tmp_path: Path, ranks: int, layout: str
) -> None:
    path = tmp_path / "c"
    results = worlds[ranks].results(save_layout, path, layout)
    expected = full_tensors()
    if layout == "fsdp_tp":
        expected = {name: tensor for name, tensor in expected.items() if tensor.numel() and tensor.dim()}
    state = loaded(path)
    assert state["step"] == 7
    assert same(state["model"], expected)
    target = {"model": {name: torch.full_like(tensor, 1) for name, tensor in expected.items()}, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is one process
        dcp.load(target, checkpoint_id=path, **ALONE)
    assert same(target["model"], expected)
    assert target["step"] == 7
    assert {result.nbytes for result in results} == {sum(f.stat().st_size for f in path.glob("*.distcp"))}
    assert {result.tensors for result in results} == {len(expected)}
    for rank, result in enumerate(results):
        known = {name for name in result.files if rank == 0 or name.startswith(f"__{rank}_")}
        assert result.files == {name: (path / name).stat().st_size for name in known}
    assert {result.tensor_bytes for result in results} == {sum(tensor.nbytes for tensor in expected.values())}
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        places = [(chunk.file, chunk.offset) for name in expected for chunk in reader[f"model.{name}"].chunks]
    assert len(set(places)) == len(places)


def save_replicated(rank: int, world_size: int, path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    mesh = mesh_of(world_size)
    state: dict[str, Any] = {}
    for number in range(60):
        tensor = torch.randn(1000 + 731 * number, generator=generator)
        state[f"w{number}"] = distribute_tensor(tensor, mesh, [Replicate()]) if number % 2 else tensor
    state["own"] = distribute_tensor(torch.randn(world_size * 3001, generator=generator), mesh, [Shard(0)])
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicated_tensors_are_written_once_and_spread_evenly(
    worlds: dict[int, World], tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "c"
    worlds[ranks].results(save_replicated, path)
    shares = [sum(f.stat().st_size for f in path.glob(f"__{rank}_*.distcp")) for rank in range(ranks)]
    total = 4 * (sum(1000 + 731 * number for number in range(60)) + ranks * 3001)
    assert total < sum(shares) < total + 100 * 2048
    mean = sum(shares) / ranks
    assert all(abs(share - mean) < 0.1 * mean for share in shares)
    generator = torch.Generator().manual_seed(1)
    state = loaded(path)
    for number in range(60):
        assert torch.equal(state[f"w{number}"], torch.randn(1000 + 731 * number, generator=generator))
    assert torch.equal(state["own"], torch.randn(ranks * 3001, generator=generator))


def save_arrays(rank: int, world_size: int, path: Path) -> None:
    state: dict[str, Any] = {
        "both": np.arange(50_000.0).reshape(100, 500).T,
        "own": {f"of {rank}": np.full(3, rank), "text": np.array(["a"])},
        "pair": (np.ones(2, np.float16), torch.ones(2)),
        "tensor on rank 0": np.ones(3, np.float32) if rank else torch.ones(3),
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)
        target = {"both": np.zeros((500, 100)), "own": {}}
        ckpt.load(path, target)
    assert np.array_equal(target["both"], state["both"])
    assert sorted(target["own"]) == ["of 0", "of 1", "text"]
    assert {type(value) for value in target["own"].values()} == {np.ndarray}


def test_arrays_are_written_once_and_loaded_as_arrays(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "c"
    world2.results(save_arrays, path)
    with aiockpt.SyncCheckpointer() as ckpt:
        state = ckpt.load(path)
        with ckpt.open(path) as reader:
            assert len(reader["both"].chunks) == 1
    assert np.array_equal(state["both"], np.arange(50_000.0).reshape(100, 500).T)
    assert state["both"].flags.f_contiguous
    assert [(value.tolist(), type(value)) for value in state["own"].values()] == [
        ([0, 0, 0], np.ndarray),
        (["a"], np.ndarray),
        ([1, 1, 1], np.ndarray),
    ]
    assert (type(state["pair"]), *map(type, state["pair"])) == (tuple, np.ndarray, torch.Tensor)
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) < 1.1 * state["both"].nbytes


def save_stages(rank: int, world_size: int, path: Path) -> None:
    """Save pipeline stages: ranks 1 and 3 have layers of their own, ranks 0 and 2 have nothing."""
    torch.manual_seed(100 + rank)
    state: dict[Any, Any] = {}
    if rank % 2:
        state["stages"] = OrderedDict({f"layer{rank}": torch.randn(5, rank + 1)})
        state["optim"] = {"state": {rank: {"exp_avg": torch.randn(3), "step": rank}}}
        state["only"] = {"rank": (rank, "text")}
        state["odd"] = {rank / 2: torch.ones(rank), (rank, None): rank, bool(rank): "text"}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)


def test_ranks_may_have_different_keys_or_none(world4: World, tmp_path: Path) -> None:
    world4.results(save_stages, tmp_path / "c")
    state = loaded(tmp_path / "c")
    assert type(state["stages"]) is OrderedDict
    assert list(state["stages"]) == ["layer1", "layer3"]
    assert state["only"] == {"rank": (1, "text")}  # if several ranks have a key, the lowest rank's value is saved
    assert list(map(repr, state["odd"])) == ["0.5", "(1, None)", "True", "1.5", "(3, None)"]
    for rank in (1, 3):
        assert state["odd"][rank / 2].numel() == state["odd"][rank, None] == rank
        torch.manual_seed(100 + rank)
        assert torch.equal(state["stages"][f"layer{rank}"], torch.randn(5, rank + 1))
        assert torch.equal(state["optim"]["state"][rank]["exp_avg"], torch.randn(3))
        assert state["optim"]["state"][rank]["step"] == rank
    assert not list((tmp_path / "c").glob("__0_*"))


def save_owned(rank: int, world_size: int, path: Path) -> None:
    """Save a ShardedTensor with two pieces on each rank, and one that is all on rank 1."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))

    def owned(rows: list[int]) -> ShardedTensor:
        shards = [
            OwnedShard(
                whole[row : row + 2].clone(),
                ShardMetadata(shard_offsets=[row, 0], shard_sizes=[2, 6], placement=f"rank:{rank}/cpu"),
            )
            for row in rows
        ]
        return ShardedTensor._init_from_local_shards(shards, 8, 6)

    state = {"both": owned([0, 4] if rank else [2, 6]), "one": owned([0, 2, 4, 6] if rank else [])}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)


def test_sharded_tensors_of_several_pieces(world2: World, tmp_path: Path) -> None:
    world2.results(save_owned, tmp_path / "c")
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    assert same(loaded(tmp_path / "c"), {"both": whole, "one": whole})


def save_tied(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    generator = torch.Generator().manual_seed(4)
    shared = distribute_tensor(torch.randn(90_001, generator=generator), mesh, [Shard(0)])
    plain = torch.randn(70_001, generator=generator)
    other = torch.randn(50_001, generator=generator)
    mixed = plain if rank else plain.clone()  # tied on one rank only
    state = {"a": shared, "b": shared, "c": plain, "d": plain, "mixed": mixed, "e": other, "f": other}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)


def test_tied_tensors_are_written_once(world2: World, tmp_path: Path) -> None:
    world2.results(save_tied, tmp_path / "c")
    generator = torch.Generator().manual_seed(4)
    a, c, e = (torch.randn(n, generator=generator) for n in (90_001, 70_001, 50_001))
    state = loaded(tmp_path / "c")
    assert same(state, {"a": a, "b": a, "c": c, "d": c, "mixed": c, "e": e, "f": e})
    size = sum(f.stat().st_size for f in (tmp_path / "c").glob("*.distcp"))
    assert size < 4 * (90_001 + 2 * 70_001 + 50_001) + 20_000


def save_again(rank: int, world_size: int, path: Path) -> list[tuple[int, int]]:
    """Save a changing state six times; return for each the size of the planning message and the plan's token."""
    mesh = mesh_of(world_size)
    generator = torch.Generator().manual_seed(5)
    whole = {f"w{number}": torch.randn(40 + number, 9, generator=generator) for number in range(30)}
    state: dict[str, Any] = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    seen: list[tuple[int, int]] = []
    with aiockpt.SyncCheckpointer() as ckpt:
        coordinator = ckpt._engine.coordinator()
        assert coordinator is not None
        inner = coordinator.round

        async def counted(call: Any, what: str, mine: Any, *rest: Any) -> Any:
            reply = await inner(call, what, mine, *rest)
            if isinstance(reply, RankAssignment):
                seen.append((len(pickle.dumps(mine)), reply.token))
            return reply

        coordinator.round = counted  # type: ignore[method-assign]
        for step in range(6):
            state["step"] = 10 ** (step + 1)
            if step == 3 and rank == 1:
                state["late"] = torch.arange(float(rank + 3))
            for number, tensor in enumerate(whole.values()):
                state[f"w{number}"].to_local().copy_(
                    distribute_tensor(tensor * (step + 1), mesh, [Shard(0)]).to_local()
                )
            ckpt.save(state, path / str(step))
    return seen


@pytest.mark.slow
def test_a_plan_is_reused_until_something_changes(world4: World, tmp_path: Path) -> None:
    seen = world4.results(save_again, tmp_path)
    for rank, rounds in enumerate(seen):
        sizes, tokens = zip(*rounds, strict=True)
        assert tokens == (1, 1, 1, 2, 2, 2)
        assert sizes[0] > 1000
        assert max(sizes[1], sizes[2]) < 300  # only the token of the plan
        assert max(sizes[4], sizes[5]) < 300 + 4 * 32 * (rank == 1)  # and digests, where there is a plain tensor
        assert (sizes[3] > 1000) == (rank == 1)  # a rank without changes sends only the token
    generator = torch.Generator().manual_seed(5)
    whole = {f"w{number}": torch.randn(40 + number, 9, generator=generator) for number in range(30)}
    for step in range(6):
        state = loaded(tmp_path / str(step))
        assert state.pop("step") == 10 ** (step + 1)
        assert ("late" in state) == (step >= 3)
        state.pop("late", None)
        assert same(state, {name: tensor * (step + 1) for name, tensor in whole.items()})


def save_separately(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    generator = torch.Generator().manual_seed(6)
    state = {
        "optim.m": distribute_tensor(torch.randn(64, 3, generator=generator), mesh, [Shard(0)]),
        "optim.v": torch.randn(17, generator=generator),
        "model.w": distribute_tensor(torch.randn(32, 5, generator=generator), mesh, [Shard(0)]),
        "step": 3,
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path, separation_hint="optim.")


def test_a_separation_hint_puts_keys_into_separate_files(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "c"
    world2.results(save_separately, path)
    names = {file.name for file in path.glob("*.distcp")}
    assert {name for name in names if name.startswith("optim.__")} == {"optim.__0_1.distcp", "optim.__1_1.distcp"}
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        for name in reader:
            files = {chunk.file for chunk in reader[name].chunks} if hasattr(reader[name], "chunks") else set()
            assert all(file.startswith("optim.__") == name.startswith("optim.") for file in files)
    generator = torch.Generator().manual_seed(6)
    m, v, w = (torch.randn(shape, generator=generator) for shape in ((64, 3), (17,), (32, 5)))
    assert loaded(path)["step"] == 3
    state = loaded(path)
    assert same({n: t for n, t in state.items() if n != "step"}, {"optim.m": m, "optim.v": v, "model.w": w})


def save_partial(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    from torch.distributed.tensor import DTensor

    state = {"layer": {"w": DTensor.from_local(torch.randn(4), mesh, [Partial()])}}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)


def test_partial_sums_are_refused(world2: World, tmp_path: Path) -> None:
    for failure in world2.run(save_partial, tmp_path / "c"):
        assert failure.kind == "SaveError"
        assert "layer.w is a DTensor of partial values" in failure.text
        assert "redistribute()" in failure.text
    assert not list(tmp_path.iterdir())


def save_by_some(rank: int, world_size: int, path: Path) -> Any:
    """Save with a group of two ranks, and on another rank alone."""
    group = dist.new_group([1, 3])
    if rank == 2:
        with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
            return ckpt.save({"alone": torch.arange(5.0)}, path / "alone").tensors
    if rank not in (1, 3):
        with pytest.raises(ValueError, match="not in the process group"):
            aiockpt.SyncCheckpointer(process_group=group)
        return None
    with aiockpt.SyncCheckpointer(process_group=group) as ckpt:
        return ckpt.save({f"of{rank}": torch.full((3,), float(rank))}, path / "pair").tensors


def test_a_group_of_some_ranks(world4: World, tmp_path: Path) -> None:
    assert world4.results(save_by_some, tmp_path) == [None, 2, 1, 2]
    assert same(loaded(tmp_path / "alone"), {"alone": torch.arange(5.0)})
    assert same(loaded(tmp_path / "pair"), {"of1": torch.full((3,), 1.0), "of3": torch.full((3,), 3.0)})
    assert {file.name for file in (tmp_path / "pair").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


async def save_awaiting(rank: int, world_size: int, path: Path) -> list[str]:
    """Save from a running loop, several at once, with hooks."""
    torch.manual_seed(rank)
    order: list[str] = []

    async def before(where: str) -> None:
        order.append(f"before {Path(where).name} {Path(where).exists()}")

    async with aiockpt.AsyncCheckpointer() as ckpt:
        saves = []
        for number in range(3):
            state = {f"w{rank}": torch.full((1000,), float(rank * 10 + number))}
            saves.append(
                ckpt.save(
                    state,
                    path / str(number),
                    pre_commit=before,
                    post_commit=lambda where: order.append(f"after {Path(where).name} {Path(where).exists()}"),
                )
            )
            await saves[-1].staged
            state[f"w{rank}"].zero_()
        results = [await save for save in reversed(saves)]
        assert [result.post_commit_error for result in results] == [None] * 3
    return order


def test_saves_in_flight_are_committed_in_order(world4: World, tmp_path: Path) -> None:
    orders = world4.results(save_awaiting, tmp_path)
    expected = [line for number in range(3) for line in (f"before {number} False", f"after {number} True")]
    assert orders == [expected] * 4
    for number in range(3):
        found = loaded(tmp_path / str(number))
        assert same(found, {f"w{rank}": torch.full((1000,), float(rank * 10 + number)) for rank in range(4)})


def test_hints_and_hooks_of_one_process(tmp_path: Path) -> None:
    seen: list[str] = []
    state = {"optim.m": torch.arange(9.0), "w": torch.randn(4), "n": {"optim.x": torch.randn(2)}}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", separation_hint=["optim.", "n."], pre_commit=seen.append)
    assert seen == [str(tmp_path / "c")]
    assert {f.name for f in (tmp_path / "c").glob("*.distcp")} == {
        "__0_0.distcp",
        "optim.__0_1.distcp",
        "n.__0_2.distcp",
    }
    found = loaded(tmp_path / "c")
    assert torch.equal(found["n"]["optim.x"], state["n"]["optim.x"])
    assert torch.equal(found["optim.m"], state["optim.m"])
    assert torch.equal(found["w"], state["w"])
