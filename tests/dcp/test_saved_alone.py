"""Checkpoints whose ranks saved without coordination: in one directory, or each in its own."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.dcp import EmptyStateDictLoadPlanner, FileSystemReader, FileSystemWriter
from aiockpt.dcp.format_utils import dcp_to_torch_save
from tests.dcp.test_reader import needs_saves_alone
from tests.ranks.world import World, mesh_of
from tests.states import assert_same, random_tensor

pytestmark = needs_saves_alone
WRITERS = {"torch": dcp.FileSystemWriter, "aiockpt": FileSystemWriter}


def whole_state() -> dict[str, Any]:
    return {
        "model": {
            "rows": random_tensor(torch.float32, (10, 4), 1),
            "columns": random_tensor(torch.int32, (6, 9), 2),
            "one": random_tensor(torch.float64, (1, 3), 3),  # only one rank has a part of it
            "same": random_tensor(torch.float32, (7,), 4),
        },
        "plain": random_tensor(torch.int32, (5,), 5),
        "step": 17,
        "facts": {"name": "run"},
    }


def sharded(world_size: int, *, zero: bool = False) -> dict[str, Any]:
    state = whole_state()
    mesh = mesh_of(world_size)
    how = {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "same": Replicate()}
    for name, value in state["model"].items():
        value = torch.zeros_like(value) if zero else value
        state["model"][name] = distribute_tensor(value, mesh, [how[name]])
    if zero:
        state |= {"plain": torch.zeros(5, dtype=torch.int32), "step": 0, "facts": {"name": ""}}
    return state


def locals_of(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"model": {name: value.to_local() for name, value in state["model"].items()}}


def _quietly(save: Any, *args: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of other ranks' files and of no_dist
        save(*args, **options)


def _save_alone(rank: int, world_size: int, path: Path, writer: str) -> None:
    state = sharded(world_size) | {f"of rank {rank}": torch.full((2,), rank)}
    _quietly(dcp.save, state, storage_writer=WRITERS[writer](path), use_collectives=False)


def _save_and_load(rank: int, world_size: int, path: Path, writer: str) -> None:
    _save_alone(rank, world_size, path, writer)
    dist.barrier()
    target = sharded(world_size, zero=True) | {f"of rank {rank}": torch.zeros(2, dtype=torch.int64)}
    dcp.load(target, storage_reader=FileSystemReader(path))
    expected = sharded(world_size) | {f"of rank {rank}": torch.full((2,), rank)}
    assert_same(locals_of(expected), locals_of(target))


@pytest.mark.parametrize("writer", WRITERS)
def test_each_rank_loads_what_it_saved(world2: World, tmp_path: Path, writer: str) -> None:
    world2.results(_save_and_load, tmp_path / "c", writer, timeout_s=100)
    assert {"__0.metadata", "__1.metadata"} <= set(os.listdir(tmp_path / "c"))


def _save_and_load_apart(rank: int, world_size: int, path: Path, writer: str) -> None:
    own = path / f"rank{rank}"
    _quietly(dcp.save, sharded(world_size), storage_writer=WRITERS[writer](own), no_dist=True)
    target = sharded(world_size, zero=True)
    _quietly(dcp.load, target, storage_reader=FileSystemReader(own), no_dist=True)
    assert_same(locals_of(sharded(world_size)), locals_of(target))


@pytest.mark.parametrize("writer", WRITERS)
def test_each_rank_loads_from_its_own_directory(world2: World, tmp_path: Path, writer: str) -> None:
    world2.results(_save_and_load_apart, tmp_path, writer, timeout_s=100)
    dcp.load(
        target := {"plain": torch.zeros(5, dtype=torch.int32)}, storage_reader=FileSystemReader(tmp_path / "rank1")
    )
    assert_same({"plain": whole_state()["plain"]}, target)
    # The parts of other ranks are missing: the load raises and fills nothing.
    target = {"model": {"rows": torch.zeros(10, 4)}}
    with pytest.raises(CheckpointException, match=r"holds 20 of the 40 elements of model\.rows"):
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / "rank1"))
    assert not target["model"]["rows"].any()
    reader = FileSystemReader(tmp_path / "rank0")
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"has 20 of the 40 elements of model\.rows"):
        EmptyStateDictLoadPlanner().set_up_planner({}, reader.read_metadata())
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.CorruptCheckpointError, match=r"chunks of model\..* not all.* saved it alone"),
    ):
        ckpt.load(tmp_path / "rank0")


def _save_apart(rank: int, world_size: int, path: Path, writer: str) -> None:
    state = sharded(world_size) | {f"of rank {rank}": torch.full((2,), rank)}
    _quietly(dcp.save, state, storage_writer=WRITERS[writer](path / f"rank{rank}"), no_dist=True)


@pytest.mark.parametrize("writer", WRITERS)
def test_aiockpt_joins_the_directories_of_ranks(world2: World, tmp_path: Path, writer: str) -> None:
    world2.results(_save_apart, tmp_path / "c", writer, timeout_s=100)
    expected = whole_state() | {f"of rank {rank}": torch.full((2,), rank) for rank in range(2)}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(expected, ckpt.load(tmp_path / "c"))
        with ckpt.open(tmp_path / "c") as reader:
            assert_same(expected["model"]["rows"][3:7], reader.read("model.rows", slice(3, 7)))
        report = ckpt.verify(tmp_path / "c")
        assert report.ok, report
        assert not report.problems
        metadata = tmp_path / "c" / "rank0" / ".metadata"
        stored = metadata.read_bytes()
        metadata.write_bytes(b"")
        with pytest.raises(aiockpt.CorruptCheckpointError, match="rank0"):
            ckpt.load(tmp_path / "c")
        assert not ckpt.verify(tmp_path / "c").ok
        metadata.write_bytes(stored)
        (tmp_path / "c" / "rank0").rename(tmp_path / "c" / "rank2")
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"it lacks the part of rank 0\. Each rank"):
            ckpt.load(tmp_path / "c")
        shutil.rmtree(tmp_path / "c" / "rank2")
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"it lacks the part of rank 0: \d+ of the"):
            ckpt.load(tmp_path / "c")
        assert not ckpt.verify(tmp_path / "c").ok


def test_numbered_checkpoints_are_not_mistaken_for_parts(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.rand(3)}, checkpoint_id=tmp_path / f"step-{step}")
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.CheckpointNotFoundError, match="several: step-2, step-1"),
    ):
        ckpt.load(tmp_path)
    (tmp_path / "step-1" / ".metadata").write_bytes(b"damaged")
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.CheckpointNotFoundError, match="several: step-2, step-1"),
    ):
        ckpt.load(tmp_path)


def _save_steps(rank: int, world_size: int, path: Path, writer: str) -> None:
    """Save two steps with different sharded tensors, and with an object of each rank under one name."""
    for step in (1, 2):
        rows = distribute_tensor(torch.full((8,), float(step)), mesh_of(world_size), [Shard(0)])
        state = {
            "w": rows,
            "same": torch.tensor([7.0, step if "t" in path.name else 0]),
            "step": step if "s" in path.name else 0,
            "name": f"run {step}" if "n" in path.name else "",
            "rng": {"state": [rank, step]},
        }
        _quietly(dcp.save, state, storage_writer=WRITERS[writer](path / str(step)), use_collectives=False)


@pytest.mark.parametrize("writer", WRITERS)
def test_parts_of_different_saves_are_refused(
    world2: World, tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After a crash, rank 0's part may be newer than rank 1's; values that both ranks saved reveal it."""
    for name, key in (("t", "same"), ("s", "step"), ("n", "name"), ("-", None)):
        world2.results(_save_steps, tmp_path / name, writer, timeout_s=100)
        mixed, newer = tmp_path / name / "mixed", tmp_path / name / "2"
        shutil.copytree(tmp_path / name / "1", mixed)
        for file in newer.glob("__0*"):
            shutil.copy(file, mixed / file.name)
        with aiockpt.SyncCheckpointer() as ckpt:
            caplog.clear()
            expected = {"w": torch.full((8,), 2.0), "step": 2 * (name == "s")}
            found = ckpt.load(newer)
            assert_same(expected, {key: found[key] for key in expected})
            assert "different values of rng" in caplog.text  # ranks may differ in it
            assert found["rng"] == {"state": [0, 2]}
            report = ckpt.verify(newer)
            assert report.ok
            assert [(each.severity, each.key) for each in report.problems] == [("warning", "rng.state")]
            if key is None:  # nothing reveals the mix
                continue
            message = rf"ranks 0 and 1, .* have different values of {key}: .* a directory of its own"
            with pytest.raises(aiockpt.CorruptCheckpointError, match=message):
                ckpt.load(mixed)
            with pytest.raises(aiockpt.CorruptCheckpointError, match=message), ckpt.open(mixed):
                pass
            report = ckpt.verify(mixed)
            assert not report.ok
            assert [each.key for each in report.problems if each.severity == "error"] == [key]


def _save_epochs(rank: int, world_size: int, path: Path) -> None:
    """Save a rank's part to a directory that is named like an epoch."""
    _quietly(dcp.save, sharded(world_size), storage_writer=FileSystemWriter(path / f"Epoch_{rank}"), no_dist=True)


def test_directories_of_epochs_are_not_joined(world2: World, tmp_path: Path) -> None:
    world2.results(_save_epochs, tmp_path)
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.CheckpointNotFoundError, match="several: Epoch_1, Epoch_0"),
    ):
        ckpt.load(tmp_path)


@pytest.mark.parametrize("writer", WRITERS)
def test_aiockpt_joins_the_parts(world4: World, tmp_path: Path, writer: str) -> None:
    world4.results(_save_alone, tmp_path / "c", writer, timeout_s=100)
    expected = whole_state() | {f"of rank {rank}": torch.full((2,), rank) for rank in range(4)}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(expected, ckpt.load(tmp_path / "c"))
        target = {"model": {"rows": torch.zeros(10, 4)}, "of rank 3": torch.zeros(2, dtype=torch.int64)}
        ckpt.load(tmp_path / "c", target)
        assert_same({"rows": expected["model"]["rows"]}, target["model"])
        assert_same(expected["of rank 3"], target["of rank 3"])
        with ckpt.open(tmp_path / "c") as reader:
            assert_same(
                expected["model"]["columns"][2:5, 1:8], reader.read("model.columns", (slice(2, 5), slice(1, 8)))
            )
        report = ckpt.verify(tmp_path / "c")
        assert report.ok, report
        assert not report.problems
        ckpt.delete(tmp_path / "c")
    assert not os.listdir(tmp_path)


def _save_contradicting(rank: int, world_size: int, path: Path) -> None:
    state = sharded(world_size) | {"odd": 1 if rank == 0 else {"within": 2}}
    _quietly(dcp.save, state, storage_writer=FileSystemWriter(path), use_collectives=False)


def test_parts_of_contradicting_structure_are_found(world2: World, tmp_path: Path) -> None:
    world2.results(_save_contradicting, tmp_path / "c", timeout_s=100)
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(
            aiockpt.CorruptCheckpointError, match="the structure of the state dict is damaged: 'within'"
        ):
            ckpt.load(tmp_path / "c")
        (problem,) = ckpt.verify(tmp_path / "c").problems
    assert (problem.kind, problem.severity, problem.file) == ("structure", "error", ".metadata")
    assert "'within'" in problem.message


def _metadata_of(path: Path, rank: int) -> Metadata:
    metadata = pickle.loads((path / f"__{rank}.metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def test_missing_and_contradicting_parts_are_reported(world4: World, tmp_path: Path) -> None:
    world4.results(_save_alone, tmp_path / "all", "torch", timeout_s=100)

    def without(*names: str) -> Path:
        path = tmp_path / "-".join(names)
        shutil.copytree(tmp_path / "all", path)
        for pattern in names:
            for file in path.glob(pattern):
                file.unlink()
        return path

    with aiockpt.SyncCheckpointer() as ckpt:
        for names, message in {
            ("__1*",): r"it lacks the part of rank 1: \d+ of the \d+ elements of model\..* are not there",
            ("__1.metadata", "__3.metadata"): r"it lacks the part of rank 1, 3: .* add that of these ranks",
            ("__2*", "__3*"): r"it lacks the part of rank 2, 3 at least: \d+ of",
            ("__0*", "__2*"): r"it lacks the part of rank 0, 2",
        }.items():
            path = without(*names)
            with pytest.raises(aiockpt.CorruptCheckpointError, match=message):
                ckpt.load(path)
            with pytest.raises(aiockpt.CorruptCheckpointError, match=message), ckpt.open(path):
                pass
            report = ckpt.verify(path)
            assert not report.ok
            assert any("it lacks the part of rank" in problem.message for problem in report.problems)

        with pytest.raises(CheckpointException, match=r"no checkpoint of rank 2 alone.* has those of ranks 0, 1, 3"):
            dcp.load({"step": 0}, storage_reader=_OfRank(without("__2.metadata"), 2))

        short = without("none")
        data = (short / "__2_0.distcp").read_bytes()
        (short / "__2_0.distcp").write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointException, match=r"__2_0\.distcp"):
            dcp.load({"step": 0}, storage_reader=_OfRank(short, 2))

        contradicting = without("nothing")
        metadata = _metadata_of(contradicting, 3)
        metadata.state_dict_metadata["plain"].properties.dtype = torch.float32
        (contradicting / "__3.metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(aiockpt.LoadError, match=r"rank 3, .* has a plain of another dtype"):
            ckpt.load(contradicting)

        overlapping = without("neither")
        metadata = _metadata_of(overlapping, 0)
        metadata.state_dict_metadata["model.rows"].chunks[0].sizes = torch.Size((2, 4))
        (overlapping / "__7.metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"alone of model\.rows overlap"):
            ckpt.load(overlapping)

        damaged = without("never")
        data = bytearray((damaged / "__2_0.distcp").read_bytes())
        plain = whole_state()["plain"].numpy().tobytes()
        data[data.index(plain) + 3] ^= 1
        (damaged / "__2_0.distcp").write_bytes(bytes(data))
        assert [(problem.file, problem.key) for problem in ckpt.verify(damaged).problems] == [("__2_0.distcp", "plain")]
        assert_same(whole_state()["plain"], ckpt.load(damaged)["plain"])  # rank 0's copy


class _OfRank(FileSystemReader):
    """Reader that reads as the given rank."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._of = rank

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return super().read_metadata(*args, **kwargs | {"rank": self._of})


def test_another_layout_is_refused_by_the_reader_and_converted(world2: World, tmp_path: Path) -> None:
    world2.results(_save_alone, tmp_path / "c", "aiockpt", timeout_s=100)
    errors = (CheckpointException, aiockpt.CorruptCheckpointError)  # it depends on the version of torch
    with pytest.raises(errors, match=r"holds 20 of the 40 elements .*own load joins"):
        dcp.load({"model": {"rows": torch.zeros(10, 4)}}, storage_reader=FileSystemReader(tmp_path / "c"))
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"only that of ranks 0, 1, which saved alone"):
        FileSystemReader(tmp_path / "c").read_metadata()
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    expected = whole_state() | {f"of rank {rank}": torch.full((2,), rank) for rank in range(2)}
    assert_same(expected, torch.load(tmp_path / "c.pt"))
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.CheckpointNotFoundError, match="holds one: c; add"),
    ):
        (tmp_path / "c.pt").unlink()
        ckpt.load(tmp_path)


def test_a_hole_in_a_plain_checkpoint_is_found_before_anything_is_filled(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(6, 2), "v": torch.rand(3)}, checkpoint_id=tmp_path / "c")
    reader = FileSystemReader(tmp_path / "c")
    data = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    data.state_dict_metadata["w"].chunks[0].sizes = torch.Size((5, 2))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(data))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner, target = DefaultLoadPlanner(), {"w": torch.zeros(6, 2), "v": torch.zeros(3)}
    planner.set_up_planner(target, metadata, True)
    with pytest.raises(aiockpt.CorruptCheckpointError, match="holds 10 of the 12 elements of w"):
        reader.read_data(planner.create_local_plan(), planner)
    assert not target["v"].any()
    data.state_dict_metadata["w"].size = torch.Size((1 << 40, 2))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(data))
    with pytest.raises(aiockpt.CorruptCheckpointError, match="has 10 of the 2199023255552 elements of w"):
        EmptyStateDictLoadPlanner().set_up_planner({}, reader.read_metadata())


def test_a_custom_planner_may_load_an_incomplete_tensor(tmp_path: Path) -> None:
    class Own(DefaultLoadPlanner):
        """Planner that keeps its state dict in another attribute."""

        def finish_plan(self, central_plan: Any) -> Any:
            self.mine, self.state_dict = self.state_dict, None  # type: ignore[assignment]
            return super().finish_plan(central_plan)

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            value: torch.Tensor = self.mine[index.fqn]
            return value

    dcp.save({"w": torch.full((6, 2), 5.0)}, checkpoint_id=tmp_path / "c")
    data = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    data.state_dict_metadata["w"].size = torch.Size((8, 2))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(data))
    target = {"w": torch.zeros(8, 2)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"), planner=Own())
    assert target["w"].sum() == 60
