"""Planners that store items of another dtype than the metadata says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import aiockpt
from aiockpt.dcp import FileSystemReader, FileSystemWriter
from aiockpt.dcp.format_utils import dcp_to_torch_save
from tests.states import assert_same, random_tensor

WRITERS = [dcp.FileSystemWriter, FileSystemWriter]
STORED = {"w": torch.float16, "large": torch.float16, "wide": torch.float64, "n": torch.int16, "scalar": torch.float16}


def state_of() -> dict[str, torch.Tensor]:
    """Return values that each of the dtypes represents exactly."""
    return {
        "w": torch.arange(35.0).view(5, 7),
        "large": torch.arange(1_800_000).remainder(2039).float().view(1800, 1000),
        "wide": torch.arange(12.0).view(3, 4) / 3,
        "n": torch.arange(-4, 5),
        "scalar": torch.tensor(-2.5),
        "plain": random_tensor(torch.float32, (6,), 1),
    }


class InTransform(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value if write_item.type == WriteItemType.BYTE_IO else value.to(STORED.get(write_item.index.fqn))


class InResolve(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value.to(STORED.get(write_item.index.fqn)) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("planner", [InTransform, InResolve])
def test_dcp_load_casts_to_its_targets(tmp_path: Path, writer: Any, planner: Any) -> None:
    state = state_of()
    dcp.save(state | {"step": 3}, storage_writer=writer(tmp_path / "c"), planner=planner())
    for reader in (FileSystemReader, dcp.FileSystemReader):
        target: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state.items()} | {"step": 0}
        dcp.load(target, storage_reader=reader(tmp_path / "c"))
        assert_same(state | {"step": 3}, target)
    halves = {"large": torch.zeros(1800, 1000, dtype=torch.float16), "w": torch.zeros(5, 7, dtype=torch.float64)}
    dcp.load(halves, storage_reader=FileSystemReader(tmp_path / "c"))
    assert_same({"large": state["large"].half(), "w": state["w"].double()}, halves)


class Committing(DefaultLoadPlanner):
    """Planner that is called in order, so the reader reads tensors before it asks for their targets."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


def test_a_planner_that_is_called_in_order_gets_cast_values(tmp_path: Path) -> None:
    dcp.save(state_of(), storage_writer=FileSystemWriter(tmp_path / "c"), planner=InResolve())
    target = {name: torch.zeros_like(value) for name, value in state_of().items()}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"), planner=Committing())
    assert_same(state_of(), target)


@pytest.mark.parametrize("writer", WRITERS)
def test_loads_of_aiockpt_cast_to_the_dtype_of_the_metadata(tmp_path: Path, writer: Any) -> None:
    state = state_of()
    dcp.save(state, storage_writer=writer(tmp_path / "c"), planner=InTransform())
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(state, ckpt.load(tmp_path / "c"))
        assert_same(state, ckpt.load(tmp_path / "c", mmap=True))
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        ckpt.load(tmp_path / "c", target)
        assert_same(state, target)
        doubled = ckpt.load(tmp_path / "c", dtype=torch.float64, keys=["w", "large"])
        assert_same({name: state[name].double() for name in ("w", "large")}, doubled)
        with ckpt.open(tmp_path / "c") as reader:
            assert reader["large"].dtype is torch.float32
            assert_same(state["large"][300:600, ::3], reader.read("large", (slice(300, 600), slice(None, None, 3))))
            assert_same(state["w"][2], reader.read("w", 2))
            assert_same(state, dict(reader.stream()))
        report = ckpt.verify(tmp_path / "c")
    assert report.ok
    assert {problem.key: problem.severity for problem in report.problems} == dict.fromkeys(STORED, "warning")
    assert any("float16" in problem.message and "cast" in problem.message for problem in report.problems)


def test_the_values_of_one_shard_are_cast(tmp_path: Path) -> None:
    dcp.save(state_of(), storage_writer=dcp.FileSystemWriter(tmp_path / "c"), planner=InTransform())
    reader = FileSystemReader(tmp_path / "c")
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner = DefaultLoadPlanner()
    target = {"large": torch.zeros(1800, 1000)}
    planner.set_up_planner(target, metadata, True)
    (item,) = planner.create_local_plan().items
    part = dataclasses.replace(
        item, storage_offsets=torch.Size((700, 1)), dest_offsets=torch.Size((7, 2)), lengths=torch.Size((900, 998))
    )
    reader.read_data(dcp.LoadPlan([part]), planner).wait()
    assert_same(state_of()["large"][700:1600, 1:999], target["large"][7:907, 2:1000])
    assert not target["large"][907:].any()


@pytest.mark.parametrize("chunk", [16 << 20, 1 << 20])
def test_conversions_cast_to_the_dtype_of_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("aiockpt.dcp.convert._CHUNK_BYTES", chunk)
    dcp.save(state_of(), storage_writer=FileSystemWriter(tmp_path / "c"), planner=InTransform())
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    assert_same(state_of(), torch.load(tmp_path / "c.pt"))


def test_an_item_of_another_shape_is_damage(tmp_path: Path) -> None:
    class Cutting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)[:-1].clone()

    dcp.save({"w": torch.rand(5, 7)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), planner=Cutting())
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.CorruptCheckpointError, match=r"w has the shape \(4, 7\) in its item but \(5, 7\) in"),
    ):
        ckpt.load(tmp_path / "c")
