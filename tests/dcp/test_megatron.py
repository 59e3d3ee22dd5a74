from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from aiockpt.dcp.megatron import FileSystemWriterAsync
from tests.dcp.megatron_driver import drive, write_alone
from tests.ranks.world import World
from tests.states import assert_same


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Two ranks, each with writing processes of its own."""
    with World(2, store="file", may_start=True) as world:
        yield world


def expected(step: int) -> dict[str, Any]:
    shards = [torch.randn(40, 300, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in range(2)]
    whole = torch.cat(shards)
    return {"model.w": whole, "optim.m": whole * 2, "facts": {"step": step}, "bias": torch.arange(7.0) + step}


@pytest.mark.parametrize(
    ("kind", "how"),
    [("forked", "together"), ("forked", "each"), ("forked", "kept"), ("kept", "kept"), ("at once", "together")],
)
def test_saves_are_written_by_other_processes(ranks: World, tmp_path: Path, kind: str, how: str) -> None:
    assert ranks.results(drive, tmp_path, kind, how, {"thread_count": 2}) == ["saved", "saved"]
    for step in range(3):
        target = expected(step)
        for name in ("model.w", "optim.m", "bias"):
            target[name] = torch.zeros_like(target[name])
        target["facts"] = {"step": None}
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / f"{step}"))
        assert_same(expected(step), target)
        names = set(os.listdir(tmp_path / f"{step}"))
        assert {name for name in names if not name.endswith(".distcp")} == {".metadata", "common.pt"}
        assert {name[:4] for name in names if name.endswith(".distcp")} == {"__0_", "__1_"}


def test_names_with_a_hint_go_to_files_of_their_own(ranks: World, tmp_path: Path) -> None:
    options = {"thread_count": 4, "separation_hint": "optim"}
    assert ranks.results(drive, tmp_path, "forked", "each", options) == ["saved", "saved"]
    metadata = dcp.FileSystemReader(tmp_path / "0").read_metadata()
    for index, info in metadata.storage_data.items():
        assert info.relative_path.startswith("optim__" if index.fqn.startswith("optim") else "__")


def test_a_writing_process_that_dies_fails_the_save_on_all_ranks(ranks: World, tmp_path: Path) -> None:
    outcomes = ranks.results(drive, tmp_path, "forked", "together", {"breaks": True})
    assert all("did its process die?" in outcomes[0] for _ in "1")
    assert outcomes[1].startswith("failed")
    assert [path.name for path in (tmp_path / "0").iterdir() if not path.name.startswith(".aiockpt-")] == ["common.pt"]


def test_one_process_alone(tmp_path: Path) -> None:
    state = {"w": torch.rand(300, 200), "n": {"step": 3}}
    write_alone(tmp_path / "c", state)
    target = {"w": torch.zeros(300, 200), "n": {"step": None}}
    dcp.load(target, checkpoint_id=tmp_path / "c")
    assert_same(state, target)
    assert os.listdir(tmp_path) == ["c"]


def test_what_went_wrong_is_among_the_results(tmp_path: Path) -> None:
    state = {"w": torch.rand(30, 20)}
    writer = FileSystemWriterAsync(tmp_path / "c")
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(plan, planner)
    write, _, args = writer.get_save_function_and_args()
    assert write is not None
    args[1] = [("w", torch.empty(3, device="meta"))]
    write(*args)
    error = writer.retrieve_write_results()
    assert isinstance(error, tuple)
    assert "w is on the meta device" in str(error[0])
    error = writer.retrieve_write_results()
    assert isinstance(error, tuple)
    assert "did its process die?" in str(error[0])
    writer.discard()
    assert os.listdir(tmp_path) == []


def test_an_empty_part_is_no_part(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.prepare_write_data(plan, planner)
    assert writer.get_save_function_and_args() == (None, None, [])
    assert writer.retrieve_write_results() == []
    writer.discard()


def test_what_it_can_not_do_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_msc"):
        FileSystemWriterAsync(tmp_path, use_msc=True)
    with pytest.raises(ValueError, match="single_file_per_rank"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    error = FileSystemWriterAsync(tmp_path).retrieve_write_results()
    assert isinstance(error, tuple)
    assert "before prepare_write_data" in str(error[0])
