from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils as theirs
from torch.distributed.checkpoint.api import CheckpointException

from aiockpt.dcp import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, broadcast
from tests.ranks.world import RankFailure, World
from tests.states import assert_same, random_tensor, raw_bytes


def file_state() -> dict[str, Any]:
    return {
        "model": {f"w{n}": random_tensor(torch.float32, (13 + n, 7, 3), n) for n in range(4)},
        "half": random_tensor(torch.bfloat16, (64, 33), 9),
        "scalar": random_tensor(torch.float64, (), 10),
        "none": torch.empty(0, 3),
        "long": random_tensor(torch.int64, (1, 5001), 11),
        "turned": random_tensor(torch.int32, (31, 17), 12).t(),
        "only rank 1": random_tensor(torch.int32, (5,), 13),
    }


def blank(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def _load_plain(rank: int, world_size: int, path: Path, whose: str) -> dict[str, Any]:
    target = blank(file_state())
    reader = BroadcastingTorchSaveReader if whose == "ours" else theirs.BroadcastingTorchSaveReader
    planner = DynamicMetaLoadPlanner if whose == "ours" else theirs.DynamicMetaLoadPlanner
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's reader gets the group's device in a deprecated way
        dcp.load(target, storage_reader=reader(), planner=planner(), checkpoint_id=path)
    return target


def test_all_ranks_get_the_tensors_as_with_torchs_reader(world2: World, tmp_path: Path) -> None:
    torch.save(file_state(), tmp_path / "m.pt")
    ours = world2.results(_load_plain, tmp_path / "m.pt", "ours", timeout_s=100)
    expected = world2.results(_load_plain, tmp_path / "m.pt", "theirs", timeout_s=100)
    for target, other in zip(ours, expected, strict=True):
        assert_same(other, target)
        assert_same({name: file_state()[name] for name in target}, target)


def _load_distributed(rank: int, world_size: int, path: Path, piece_bytes: int) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    broadcast._PIECE_BYTES = piece_bytes
    mesh = init_device_mesh("cpu", (world_size,))
    whole = file_state()
    target: dict[str, Any] = {
        "model": {
            name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(n) if n < 3 else Replicate()])
            for n, (name, value) in enumerate(whole["model"].items())
        },
        "half": distribute_tensor(torch.zeros_like(whole["half"]), mesh, [Shard(1)]),
        "long": distribute_tensor(torch.zeros_like(whole["long"]), mesh, [Shard(0)]),
        "turned": distribute_tensor(torch.zeros_like(whole["turned"]), mesh, [Shard(0)]),
        "scalar": torch.zeros((), dtype=torch.float64),
    }
    if rank == 1:
        target["only rank 1"] = torch.zeros(5, dtype=torch.int32)
    dcp.load(target, storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner(), checkpoint_id=path)
    same = [
        raw_bytes(target["model"][name].full_tensor()) == raw_bytes(whole["model"][name]) for name in whole["model"]
    ]
    same += [raw_bytes(target[name].full_tensor()) == raw_bytes(whole[name]) for name in ("half", "long", "turned")]
    same.append(raw_bytes(target["scalar"]) == raw_bytes(whole["scalar"]))
    if rank == 1:
        same.append(raw_bytes(target["only rank 1"]) == raw_bytes(whole["only rank 1"]))
    return same


@pytest.mark.parametrize("piece_bytes", [40, 1000, 32 << 20])
def test_each_rank_gets_its_part_of_distributed_tensors(world2: World, tmp_path: Path, piece_bytes: int) -> None:
    torch.save(file_state(), tmp_path / "m.pt")
    for same in world2.results(_load_distributed, tmp_path / "m.pt", piece_bytes, timeout_s=100):
        assert all(same), same


def test_ranks_that_have_no_part_of_a_tensor_do_not_wait(world4: World, tmp_path: Path) -> None:
    torch.save(file_state(), tmp_path / "m.pt")
    for same in world4.results(_load_distributed, tmp_path / "m.pt", 1000, timeout_s=100):
        assert all(same), same


def _load_objects(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    target: dict[str, Any] = {"w": torch.zeros(4), "step": None, "nested": {"names": None}}
    dcp.load(
        target, storage_reader=BroadcastingTorchSaveReader(path), planner=DynamicMetaLoadPlanner(), checkpoint_id=path
    )
    return target


def test_objects_are_broadcast(world2: World, tmp_path: Path) -> None:
    state = {"w": torch.rand(4), "step": 12, "nested": {"names": ["a", 1.5]}}
    torch.save(state, tmp_path / "m.pt")
    for target in world2.results(_load_objects, tmp_path / "m.pt", timeout_s=100):
        assert_same(state, target)


def test_an_error_of_the_coordinator_reaches_every_rank(world2: World, tmp_path: Path) -> None:
    torch.save({"w": torch.rand(4), "nested": {"names": []}}, tmp_path / "m.pt")
    failures = world2.run(_load_objects, tmp_path / "m.pt", timeout_s=100)
    assert all(isinstance(f, RankFailure) and "lacks step" in f.text for f in failures), failures


def _load_misshapen(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    target = {"a": torch.zeros(3 + rank), "b": torch.zeros(5)}
    try:
        dcp.load(
            target, storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner(), checkpoint_id=path
        )
    except CheckpointException as exc:
        dist.barrier()
        return {"error": str(exc)} | target
    raise AssertionError("it was loaded")


def test_an_error_of_one_rank_does_not_block_the_others(world2: World, tmp_path: Path) -> None:
    state = {"a": torch.rand(3), "b": torch.rand(5)}
    torch.save(state, tmp_path / "m.pt")
    for outcome in world2.results(_load_misshapen, tmp_path / "m.pt", timeout_s=100):
        assert "a has the shape (3,) in the file, which has no (4,) at (0,)" in outcome["error"]
        assert torch.equal(outcome["b"], state["b"])


def test_without_a_process_group_the_file_is_read(tmp_path: Path) -> None:
    torch.save(file_state(), tmp_path / "m.pt")
    target = blank(file_state())
    dcp.load(
        target,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "m.pt",
    )
    assert_same(file_state(), target)


def test_the_reader_needs_a_file(tmp_path: Path) -> None:
    reader = BroadcastingTorchSaveReader()
    assert reader.validate_checkpoint_id(__file__)
    assert not reader.validate_checkpoint_id(tmp_path)
    with pytest.raises(Exception, match="no file to read"):
        reader.set_up_storage_reader(reader.read_metadata(), True)
