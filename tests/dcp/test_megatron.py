from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from aiockpt.dcp.megatron import FileSystemWriterAsync
from tests.dcp.megatron_driver import drive, plan_alone, write_alone
from tests.ranks.world import World
from tests.states import assert_same


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Yield a world of two ranks, each with writer processes of its own."""
    with World(2, store="file", may_start=True) as world:
        yield world


def expected(step: int) -> dict[str, Any]:
    shards = [torch.randn(40, 300, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in range(2)]
    whole = torch.cat(shards)
    return {"model.w": whole, "optim.m": whole * 2, "facts": {"step": step}, "bias": torch.arange(7.0) + step}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("forked", "central"),
        ("forked", "decentralized"),
        ("forked", "cached"),
        ("persistent", "cached"),
        ("inline", "central"),
    ],
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


def test_names_with_a_hint_go_to_separate_files(ranks: World, tmp_path: Path) -> None:
    options = {"thread_count": 4, "separation_hint": "optim"}
    assert ranks.results(drive, tmp_path, "forked", "decentralized", options) == ["saved", "saved"]
    metadata = dcp.FileSystemReader(tmp_path / "0").read_metadata()
    for index, info in metadata.storage_data.items():
        assert info.relative_path.startswith("optim__" if index.fqn.startswith("optim") else "__")


def test_a_writer_process_that_dies_fails_the_save_on_all_ranks(ranks: World, tmp_path: Path) -> None:
    outcomes = ranks.results(drive, tmp_path, "forked", "central", {"breaks": True})
    assert "did its process die?" in outcomes[0]
    assert outcomes[1].startswith("failed")
    assert [path.name for path in (tmp_path / "0").iterdir() if not path.name.startswith(".aiockpt-")] == ["common.pt"]


def test_one_process_alone(tmp_path: Path) -> None:
    state = {"w": torch.rand(300, 200), "n": {"step": 3}}
    write_alone(tmp_path / "c", state)
    target = {"w": torch.zeros(300, 200), "n": {"step": None}}
    dcp.load(target, checkpoint_id=tmp_path / "c")
    assert_same(state, target)
    assert os.listdir(tmp_path) == ["c"]


def test_an_error_is_among_the_results(tmp_path: Path) -> None:
    alone = plan_alone(tmp_path / "c", {"w": torch.rand(30, 20)})
    write, preload, args = alone.writer.get_save_function_and_args()
    assert write is not None
    assert preload is not None
    ((path, name, (objects, ((item, _),))),) = preload()
    args[1] = [(path, name, (objects, [(item, torch.empty(3, device="meta"))]))]
    write(*args)
    error = alone.writer.retrieve_write_results()
    assert isinstance(error, tuple)
    assert "Worker failure: " in str(error[0])
    assert "w is on the meta device" in str(error[0])
    pickle.dumps(error)  # it is sent to another rank
    error = alone.writer.retrieve_write_results()
    assert isinstance(error, tuple)
    assert "did its process die?" in str(error[0])
    alone.writer.discard()
    assert os.listdir(tmp_path) == []


def test_a_removed_directory_does_not_end_the_writer_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = plan_alone(tmp_path / "c", {"w": torch.rand(30, 20)})
    (hidden,) = tmp_path.iterdir()
    shutil.rmtree(hidden)
    error = alone.write()
    assert isinstance(error, tuple)
    assert "left no results" in str(error[0])
    (record,) = caplog.records
    assert str(hidden) in record.getMessage()
    assert "did not write" in record.getMessage()
    alone.writer.discard()


def test_an_empty_plan_writes_nothing(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.prepare_write_data(plan, planner)
    assert writer.get_save_function_and_args() == (None, None, [])
    assert writer.retrieve_write_results() == []
    writer.discard()


def test_unsupported_options_and_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="single_file_per_rank"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    error = FileSystemWriterAsync(tmp_path).retrieve_write_results()
    assert isinstance(error, tuple)
    assert "before prepare_write_data" in str(error[0])


# --- the parameters of the writers ----------------------------------------------------------------

STATE = {f"t{n}": torch.arange(10.0 + n) * n for n in range(6)} | {
    "part": torch.arange(1000.0)[10:20],
    "turned": torch.arange(12).reshape(3, 4).t(),
    "none": torch.zeros(0, 3),
    "facts": {"step": 7},
}


def assert_loads(path: Path, state: dict[str, Any] = STATE) -> None:
    """Load with torch's own reader, and compare."""
    target = {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) else {"step": None} for n, v in state.items()}
    dcp.load(target, storage_reader=dcp.FileSystemReader(path))
    assert_same(state, target)


def data_files(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".distcp"))


@pytest.mark.parametrize(
    "options",
    [{}, {"is_multiproc_io": True, "use_msc": True}],
    ids=lambda options: next(iter(options), "threads"),
)
def test_thread_count_is_the_number_of_files(tmp_path: Path, options: dict[str, Any]) -> None:
    write_alone(tmp_path / "c", STATE, thread_count=3, **options)
    assert data_files(tmp_path / "c") == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    assert_loads(tmp_path / "c")
    few = {"a": torch.ones(2), "b": torch.zeros(3)}
    write_alone(tmp_path / "few", few, thread_count=9, **options)
    assert data_files(tmp_path / "few") == ["__0_0.distcp", "__0_1.distcp"]
    assert_loads(tmp_path / "few", few)


def fail_on_file_1(transform_list, local_proc_idx, write_bucket, results_queue, count_queue, use_fsync, **kwargs):
    """Replace the function as tests of trainers do: same signature, results through the queues."""
    results_queue.put((local_proc_idx, OSError("disk 1 is gone") if local_proc_idx == 1 else []))
    count_queue.get()
    count_queue.task_done()


def test_the_function_that_writes_a_file_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", fail_on_file_1)
    alone = plan_alone(tmp_path / "c", STATE, thread_count=2)
    assert "disk 1 is gone" in str(alone.write()[0])
    alone.writer.discard()


def test_the_function_that_writes_a_file_can_be_called_alone(tmp_path: Path) -> None:
    alone = plan_alone(tmp_path / "c", STATE, thread_count=2)
    _, preload, _ = alone.writer.get_save_function_and_args()
    assert preload is not None
    results = []
    for number, bucket in enumerate(preload()):
        at, result = FileSystemWriterAsync.write_preloaded_data([], number, bucket, None, None, True)
        assert at == number
        assert isinstance(result, list), result
        results += result
    alone.writer.finish(alone.metadata, [results])
    assert_loads(tmp_path / "c", STATE)


def exit_process(*_: Any, **__: Any) -> None:
    os._exit(5)


def die_before_the_file_is_renamed(path: Path) -> None:
    os.replace = exit_process
    write_alone(path, {"w": torch.rand(30, 20)})


def test_a_save_replaces_what_a_killed_save_to_the_same_path_has_left(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_before_the_file_is_renamed, args=(tmp_path / "c",))
    process.start()
    process.join()
    assert process.exitcode == 5
    (hidden,) = tmp_path.iterdir()
    assert any(name.endswith(".distcp") for name in os.listdir(hidden))
    state, target = {"w": torch.rand(30, 20)}, {"w": torch.zeros(30, 20)}
    write_alone(tmp_path / "c", state)
    dcp.load(target, checkpoint_id=tmp_path / "c")
    assert_same(state, target)
    assert os.listdir(tmp_path) == ["c"]
    written = dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data.values()
    assert set(os.listdir(tmp_path / "c")) == {".metadata", *(info.relative_path for info in written)}


class Elsewhere(torch.Tensor):
    """Tensor that claims to be on an accelerator."""

    device = property(lambda self: torch.device("meta"))  # type: ignore[assignment]


def test_tensors_of_accelerators_are_copied_to_shared_memory(tmp_path: Path) -> None:
    there = {name: v.as_subclass(Elsewhere) if name != "t3" and hasattr(v, "dtype") else v for name, v in STATE.items()}
    alone = plan_alone(tmp_path / "c", there, thread_count=2, use_cpu_shm_for_gpu_tensors=True)
    for value in there.values():
        if isinstance(value, Elsewhere):
            value.as_subclass(torch.Tensor).add_(1)  # training continues during the save
    _, preload, _ = alone.writer.get_save_function_and_args()
    assert preload is not None
    assert b"Elsewhere" not in pickle.dumps(preload)
    results = alone.write()
    alone.writer.finish(alone.metadata, [results])
    for value in there.values():
        if isinstance(value, Elsewhere):
            value.as_subclass(torch.Tensor).sub_(1)
    assert_loads(tmp_path / "c")


def test_shared_memory_is_used_again_when_its_save_is_over(tmp_path: Path) -> None:
    options = {"use_cpu_shm_for_gpu_tensors": True, "use_cached_data_structure": True}
    blocks: list[int] = []
    calls: list[int] = []
    running: list[Any] = []

    def save(step: int) -> None:
        state = {"w": torch.full((300,), float(step)).as_subclass(Elsewhere)}
        alone = plan_alone(tmp_path / str(step), state, **options)
        blocks.append(alone.writer._block.data_ptr())
        running.append(alone)

    def drain() -> None:
        calls.append(len(running))
        while running:
            alone = running.pop(0)
            alone.writer.finish(alone.metadata, [alone.write()])

    FileSystemWriterAsync.cleanup_tensor_caches()
    try:
        save(0)
        save(1)  # no callback is registered that waits for the first save
        drain()
        FileSystemWriterAsync.register_shm_drain_callback(drain)
        save(2)  # reuses one of the two blocks
        save(3)  # reuses the other one
        save(4)  # drains first
        assert calls == [2, 2]
        drain()
    finally:
        FileSystemWriterAsync.register_shm_drain_callback(None)
        FileSystemWriterAsync.cleanup_tensor_caches()
    assert blocks[0] != blocks[1]
    assert sorted(blocks[2:4]) == sorted(blocks[:2])
    assert blocks[4] in blocks[:2]
    for step in range(5):
        assert_loads(tmp_path / str(step), {"w": torch.full((300,), float(step))})


def test_paths_of_checkpoints() -> None:
    assert not FileSystemWriterAsync.validate_checkpoint_id("msc://profile/runs/a")
    with pytest.raises(ValueError, match="msc://profile/runs/a is a URL of multistorageclient"):
        FileSystemWriterAsync("msc://profile/runs/a", use_msc=True)
    assert FileSystemWriterAsync.validate_checkpoint_id(Path("runs/a"))
    assert not FileSystemWriterAsync.validate_checkpoint_id("s3://bucket/a")


@pytest.mark.skipif(not hasattr(filesystem, "SerializationFormat"), reason="this torch has one format")
def test_safetensors_are_refused_for_saves_in_another_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safetensors"):
        FileSystemWriterAsync(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)


def test_a_function_that_opens_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="open_file"):
        FileSystemWriterAsync(tmp_path, open_file=io.open_code)
