from __future__ import annotations

import dataclasses
import gc
import io
import os
import pickle
import threading
import warnings
import weakref
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor, Shard

import aiockpt
from aiockpt.dcp import FileSystemReader, FileSystemWriter
from tests.dcp.test_format_utils import sharded_whole
from tests.dcp.test_reader import blank, needs_saves_alone, state_of
from tests.ranks.test_described import described
from tests.ranks.world import RankFailure, World, mesh_of
from tests.states import assert_same, random_tensor, raw_bytes

HIDDEN = ".aiockpt-*"


def stock_loaded(state: Any, path: Path) -> Any:
    target = blank(state)
    dcp.load(target, storage_reader=dcp.FileSystemReader(path))
    return target


# --- side by side with torch's writer -------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 2}, {"sync_files": False}])
def test_a_save_equals_that_of_torchs_writer(tmp_path: Path, options: dict[str, Any]) -> None:
    state = state_of()
    ours = dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "ours", **options))
    theirs = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs", **options))
    assert_same(state, stock_loaded(state, tmp_path / "ours"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert set(ours.storage_data) == set(theirs.storage_data)
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    ours_again = dcp.FileSystemReader(tmp_path / "ours").read_metadata()
    assert ours_again.storage_data == ours.storage_data
    assert ours_again.storage_meta.checkpoint_id == tmp_path / "ours"
    if not options.get("single_file_per_rank", True) or "thread_count" not in options:
        assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_every_item_is_a_sound_zip_file(tmp_path: Path) -> None:
    dcp.save(state_of(), storage_writer=FileSystemWriter(tmp_path / "c"))
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    for info in metadata.storage_data.values():
        data = (tmp_path / "c" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    with aiockpt.SyncCheckpointer() as checkpointer:
        assert checkpointer.verify(tmp_path / "c").ok
        assert_same(state_of(), checkpointer.load(tmp_path / "c"))


def test_large_states_go_to_several_files_by_several_threads(tmp_path: Path) -> None:
    state = {f"w{n}": random_tensor(torch.float32, (1024, 1500), n) for n in range(9)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "many", staging_bytes=8 << 20))
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "one", thread_count=1))
    assert len(list((tmp_path / "many").glob("__0_*.distcp"))) == 4
    assert [path.name for path in (tmp_path / "one").glob("*.distcp")] == ["__0_0.distcp"]
    for name in ("many", "one"):
        assert_same(state, stock_loaded(state, tmp_path / name))


class Casting(DefaultSavePlanner):
    """Planner that makes new tensors, and counts the elements of those that are alive."""

    alive = most = 0

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        if not isinstance(made, torch.Tensor):
            return made
        made = made.clone()
        self.alive += made.numel()
        self.most = max(self.most, self.alive)
        weakref.finalize(made.untyped_storage(), self.freed, made.numel())
        return made

    def freed(self, count: int) -> None:
        self.alive -= count


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 1}])
def test_tensors_of_a_planner_are_held_a_few_at_a_time(tmp_path: Path, options: dict[str, Any]) -> None:
    state = {f"w{n}": random_tensor(torch.int32, (1024, 10 + n), n) for n in range(40)} | {"text": "abc"}
    planner = Casting()
    for _ in range(2):
        writer = FileSystemWriter(tmp_path / "c", staging_bytes=200_000, **options)
        dcp.save(state, storage_writer=writer, planner=planner)
        assert_same(state, stock_loaded(state, tmp_path / "c"))
        gc.collect()
        assert planner.alive == 0
    assert 60_000 < planner.most < 100_000
    with aiockpt.SyncCheckpointer() as checkpointer:
        assert checkpointer.verify(tmp_path / "c").ok


def test_a_failure_in_a_later_batch_leaves_nothing(tmp_path: Path) -> None:
    state = {f"w{n}": random_tensor(torch.int32, (1024, 10 + n), n) for n in range(40)}
    writer = FileSystemWriter(tmp_path / "c", staging_bytes=200_000)
    with pytest.raises(CheckpointException, match="the planner broke"):
        dcp.save(state | {"bad": torch.rand(3)}, storage_writer=writer, planner=Breaking())
    assert [os.listdir(tmp_path / hidden) for hidden in os.listdir(tmp_path)] == [[]]  # kept for the other ranks' files
    writer.discard()
    assert os.listdir(tmp_path) == []


def test_the_writer_takes_torchs_arguments(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "c", True, True, 2, 1000, False, False, None)
    assert (writer.thread_count, writer.overwrite, writer.cache_staged_state_dict) == (2, False, False)
    assert writer.checkpoint_id == dcp.FileSystemWriter(tmp_path / "c").checkpoint_id
    meta = writer.storage_meta()
    assert meta is not None
    assert (meta.checkpoint_id, meta.save_id) == (tmp_path / "c", writer.save_id)
    for path in (tmp_path, "s3://bucket/c", "relative"):
        assert FileSystemWriter.validate_checkpoint_id(path) == dcp.FileSystemWriter.validate_checkpoint_id(path)
    with pytest.raises(ValueError, match="at least 1"):
        FileSystemWriter(tmp_path, thread_count=0)
    with pytest.raises(ValueError, match="is a URL"):
        FileSystemWriter("file:///c")


def test_adapters_are_subclasses_with_torchs_attributes(tmp_path: Path) -> None:
    for ours, theirs in (
        (FileSystemWriter(tmp_path), dcp.FileSystemWriter(tmp_path)),
        (FileSystemReader(tmp_path), dcp.FileSystemReader(tmp_path)),
    ):
        assert isinstance(ours, type(theirs))
        public = {name for name in vars(theirs) if not name.startswith("_")}
        assert public <= vars(ours).keys()
        for name in public - {"save_id", "load_id", "thread_count", "fs", "transforms"}:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert isinstance(ours.fs, filesystem.FileSystem)
    writer, reader = FileSystemWriter(tmp_path), FileSystemReader(tmp_path)
    writer.set_up_storage_writer(False, rank=3, use_collectives=False)
    reader.set_up_storage_reader(Metadata({}, storage_data={}), False, rank=3, use_collectives=False)
    assert (writer.rank, writer.use_collectives) == (reader.rank, reader.use_collectives) == (3, False)


def test_subclasses_may_override_the_documented_methods(tmp_path: Path) -> None:
    calls: list[str] = []

    class Logged:  # the mix-in fits torch's classes and aiockpt's
        def __init__(self, path: Any) -> None:
            super().__init__(path)  # type: ignore[call-arg]
            self.calls = calls

        def __getattribute__(self, name: str) -> Any:
            if name in ("prepare_local_plan", "prepare_global_plan", "write_data", "finish", "read_data", "stage"):
                calls.append(name)
            return super().__getattribute__(name)

    class Moved(Logged, FileSystemWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            metadata.planner_data = {**metadata.planner_data, "ours": ("more",)}
            super().finish(metadata, results)
            self.path.joinpath("marker").write_text("complete")

        def storage_meta(self) -> Any:
            return dataclasses.replace(super().storage_meta(), save_id="chosen")

    class Read(Logged, FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            calls.append("read_metadata")
            return super().read_metadata(*args, **kwargs)

    dcp.save(state_of(), storage_writer=Moved(tmp_path / "c"))
    assert (tmp_path / "c" / "marker").exists()
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert (metadata.planner_data["ours"], metadata.storage_meta.save_id) == (("more",), "chosen")
    target = blank(state_of())
    dcp.load(target, storage_reader=Read(tmp_path / "c"))
    assert_same(state_of(), target)
    plans = ["prepare_local_plan", "prepare_global_plan"]
    assert calls == [*plans, "write_data", "finish", "read_metadata", *plans, "read_data"]


@pytest.mark.skipif(not hasattr(filesystem, "SerializationFormat"), reason="this torch has one format")
def test_the_writer_takes_torchs_formats(tmp_path: Path) -> None:
    formats = filesystem.SerializationFormat
    for given in (None, formats.TORCH_SAVE):
        writer = FileSystemWriter(tmp_path / "c", True, True, 2, 1000, False, False, None, given)
        assert writer.serialization_format is formats.TORCH_SAVE
    with pytest.raises(ValueError, match="HuggingFaceStorageWriter"):
        FileSystemWriter(tmp_path, serialization_format=formats.SAFETENSORS)


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no such tensors")
@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter])
@pytest.mark.parametrize("reader", [FileSystemReader, dcp.FileSystemReader])
def test_tensors_that_describe_their_parts(tmp_path: Path, writer: Any, reader: Any) -> None:
    whole = random_tensor(torch.float32, (8, 5), 1)
    parts = [((0, 0), (1, 0), (3, 5)), ((3, 0), (4, 0), (5, 5))]
    saved, target = (described(torch.full((9, 5), -1.0), (8, 5), parts) for _ in range(2))
    saved[1:] = whole
    dcp.save({"w": saved, "step": 3}, storage_writer=writer(tmp_path / "c"))
    dcp.load({"w": target, "step": None}, storage_reader=reader(tmp_path / "c"))
    assert raw_bytes(target) == raw_bytes(saved)
    plain = {"w": torch.zeros(8, 5)}
    dcp.load(plain, storage_reader=reader(tmp_path / "c"))
    assert raw_bytes(plain["w"]) == raw_bytes(whole)


# --- existing targets -----------------------------------------------------------------------------


def test_a_checkpoint_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path / "c")
    for writer in (FileSystemWriter, dcp.FileSystemWriter):
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            dcp.save(state_of(2), storage_writer=writer(tmp_path / "c", overwrite=False))
    assert_same(state_of(1), stock_loaded(state_of(1), tmp_path / "c"))
    assert sorted(os.listdir(tmp_path / "c")) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter])
def test_replacing_a_checkpoint_warns(tmp_path: Path, writer: Any) -> None:
    dcp.save(state_of(1), storage_writer=writer(tmp_path / "c"))
    with pytest.warns(UserWarning, match=f"Detected an existing checkpoint in {tmp_path / 'c'}"):
        dcp.save(state_of(2), storage_writer=writer(tmp_path / "c"))
    assert_same(state_of(2), stock_loaded(state_of(2), tmp_path / "c"))


def test_a_checkpoint_is_replaced_atomically_and_other_files_stay(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state_of(1), tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text("{}")
    (tmp_path / "c" / "more").mkdir()
    writer = FileSystemWriter(tmp_path / "c")
    for seed in (2, 3):
        dcp.save(state_of(seed), storage_writer=writer)
        assert_same(state_of(seed), stock_loaded(state_of(), tmp_path / "c"))
        with aiockpt.SyncCheckpointer() as checkpointer:
            assert checkpointer.verify(tmp_path / "c").ok
        names = sorted(os.listdir(tmp_path / "c"))
        assert [name for name in names if not name.startswith("__")] == [".metadata", "config.json", "more"]
        assert len(names) == 4
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("there", ["nothing", "an empty directory", "other files", "a link", "no parent"])
def test_new_and_existing_targets(tmp_path: Path, there: str) -> None:
    path = tmp_path / "c"
    if there in ("an empty directory", "other files"):
        path.mkdir()
    if there == "other files":
        (path / "__9_9.distcp").write_text("another's")
        (path / "notes").write_text("mine")
    if there == "a link":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
    if there == "no parent":
        path = tmp_path / "a" / "b" / "c"
    dcp.save(state_of(), storage_writer=FileSystemWriter(path, overwrite=False))
    assert_same(state_of(), stock_loaded(state_of(), path))
    if there == "other files":
        assert (path / "notes").read_text() == "mine"
    assert not list(path.glob(HIDDEN))
    assert not list(path.parent.glob(HIDDEN))


@pytest.mark.parametrize("rank", [None, pytest.param(0, marks=needs_saves_alone)])
def test_only_files_of_the_old_checkpoint_are_removed(tmp_path: Path, rank: int | None) -> None:
    path = tmp_path / "c"
    alone: dict[str, Any] = {} if rank is None else {"use_collectives": False}
    dcp.save(state_of(1), storage_writer=FileSystemWriter(path), **alone)
    (old,) = path.glob("*.distcp")
    (path / "__7_7.distcp").write_text("named by another rank")
    stored = Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo("__7_7.distcp", 0, 1)})
    (path / "__7.metadata").write_bytes(pickle.dumps(stored))
    (path / "__0_9.distcp").write_text("another's")
    dcp.save(state_of(2), storage_writer=FileSystemWriter(path), **alone)
    assert not old.exists()
    assert (path / "__7_7.distcp").read_text() == "named by another rank"
    assert (path / "__0_9.distcp").read_text() == "another's"
    document = path / (".metadata" if rank is None else "__0.metadata")
    document.write_bytes(document.read_bytes()[:-9])
    before = {each: each.read_bytes() for each in path.iterdir()}
    refused = (CheckpointException, aiockpt.CheckpointExistsError)
    with pytest.raises(refused, match=r"metadata that can't be replaced: .* can't be decoded"):
        dcp.save(state_of(3), storage_writer=FileSystemWriter(path), **alone)
    assert {each: each.read_bytes() for each in path.iterdir()} == before


def test_a_file_at_the_path_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("mine")
    with pytest.raises(CheckpointException, match="is not a directory"):
        dcp.save(state_of(), storage_writer=FileSystemWriter(tmp_path / "c"))
    assert (tmp_path / "c").read_text() == "mine"


def test_a_directory_that_appears_during_a_save_is_used(tmp_path: Path) -> None:
    class Late(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            (tmp_path / "c").mkdir()
            (tmp_path / "c" / "common.pt").write_text("theirs")
            super().finish(metadata, results)

    dcp.save(state_of(), storage_writer=Late(tmp_path / "c"))
    assert_same(state_of(), stock_loaded(state_of(), tmp_path / "c"))
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == [".metadata", "__0_0.distcp", "common.pt"]


# --- failures -------------------------------------------------------------------------------------


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


class Breaking(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "bad":
            raise OSError("the planner broke")
        return super().resolve_data(write_item)


class Mistaken(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return "text" if write_item.index.fqn == "bad" else super().resolve_data(write_item)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_tensor_is_refused_as_by_torchs_writer(tmp_path: Path, convert: Any) -> None:
    state = {"w": torch.rand(3), "rare": convert(torch.eye(4))}
    # The second text is raised by torch's planner.
    told = r"rare has the layout torch\.sparse.*to_dense\(\)|Sparse CSR tensors do not have strides"
    with pytest.raises(CheckpointException, match=told):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c"))
    gc.collect()
    assert not os.listdir(tmp_path)
    with pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))


@pytest.mark.parametrize("planner", [Breaking, Mistaken])
@pytest.mark.parametrize("before", [False, True])
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, before: bool, planner: Any) -> None:
    if before:
        dcp.save(state_of(1), storage_writer=FileSystemWriter(tmp_path / "c"))
    writer = FileSystemWriter(tmp_path / "c")
    with pytest.raises(CheckpointException, match=r"the planner broke|gave a str for an item"):
        dcp.save(state_of(2) | {"bad": torch.rand(3)}, storage_writer=writer, planner=planner())
    del writer
    gc.collect()
    if before:
        assert_same(state_of(1), stock_loaded(state_of(1), tmp_path / "c"))
        assert sorted(os.listdir(tmp_path / "c")) == [".metadata", "__0_0.distcp"]
    else:
        assert os.listdir(tmp_path) == []


def test_a_save_succeeds_after_a_failed_one(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "c")
    with pytest.raises(CheckpointException):
        dcp.save(state_of(2) | {"bad": torch.rand(3)}, storage_writer=writer, planner=Breaking())
    other = FileSystemWriter(tmp_path / "c")
    with pytest.raises(CheckpointException):
        dcp.save(state_of(2) | {"bad": torch.rand(3)}, storage_writer=other, planner=Breaking())
    writer.discard()  # it must not touch the other writer's hidden directory
    assert len(list(tmp_path.glob(HIDDEN))) == 1
    dcp.save(state_of(3), storage_writer=other)
    assert_same(state_of(3), stock_loaded(state_of(), tmp_path / "c"))
    assert os.listdir(tmp_path) == ["c"]


def test_nothing_is_published_unless_all_was_written(tmp_path: Path) -> None:
    class Forgetful(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            results[0] = [result for result in results[0] if result.index != MetadataIndex("model.w", (0, 0))]
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match=r"model\.w was not written by any rank"):
        dcp.save(state_of(), storage_writer=Forgetful(tmp_path / "c"))
    assert os.listdir(tmp_path) == []


def test_a_removed_file_fails_the_save(tmp_path: Path) -> None:
    class Losing(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            next(tmp_path.glob(".*/__0_0.distcp")).unlink()
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match=r"__0_0\.distcp, .* was removed"):
        dcp.save(state_of(), storage_writer=Losing(tmp_path / "c"))
    assert os.listdir(tmp_path) == []


# --- async_save -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_a_state_may_change_during_an_async_save(tmp_path: Path, cached: bool, alone_in_a_group: None) -> None:
    writer = FileSystemWriter(tmp_path / "x", cache_staged_state_dict=cached and torch.cuda.is_available())
    for seed in range(3):
        state = state_of(seed)
        future = dcp.async_save(state, checkpoint_id=tmp_path / f"{seed}", storage_writer=writer)
        for tensor in (state["model"]["w"], state["list"][0]):
            tensor.zero_()
        future.result()
        assert_same(state_of(seed), stock_loaded(state_of(), tmp_path / f"{seed}"))
    for thread in threading.enumerate():
        assert not thread.name.startswith("aiockpt")


def test_other_stagers_work_too(tmp_path: Path, alone_in_a_group: None) -> None:
    staging = pytest.importorskip("torch.distributed.checkpoint.staging")
    if not hasattr(staging, "DefaultStager"):
        pytest.skip("this version of torch has no other stagers")
    state = state_of()
    stager = staging.DefaultStager(staging.StagingOptions(False, False, True, False))
    response = dcp.async_save(state, storage_writer=FileSystemWriter(tmp_path / "c"), async_stager=stager)
    getattr(response, "upload_completion", response).result()
    stager.close()
    assert_same(state, stock_loaded(state, tmp_path / "c"))


def test_a_writer_can_be_pickled(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as checkpointer:
        writer = FileSystemWriter(tmp_path / "c", thread_count=3, checkpointer=checkpointer)
        dcp.save(state_of(), storage_writer=writer)
        again = pickle.loads(pickle.dumps(writer))
    assert (again.path, again.thread_count, again.save_id) == (writer.path, 3, writer.save_id)
    dcp.save(state_of(1), storage_writer=again)
    assert_same(state_of(1), stock_loaded(state_of(), tmp_path / "c"))


def _save_in_processes(rank: int, world_size: int, folder: Path) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    warnings.simplefilter("ignore")
    writer = FileSystemWriter(folder / "x")
    for step in range(2):
        local = torch.arange(12.0).reshape(3, 4) * 7 + 1000 * rank + step
        state = {"w": DTensor.from_local(local, mesh_of(world_size), [Shard(0)]), "step": step}
        kind = state_dict_saver.AsyncCheckpointerType.PROCESS
        future = dcp.async_save(
            state, checkpoint_id=folder / f"c{step}", storage_writer=writer, async_checkpointer_type=kind
        )
        local.zero_()
        future.result()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="this torch saves in threads only")
def test_async_save_in_processes(tmp_path: Path) -> None:
    with World(2, store="file", may_start=True) as world:
        world.results(_save_in_processes, tmp_path)
    for step in range(2):
        target = {"w": torch.zeros(6, 4), "step": None}
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / f"c{step}"))
        base = torch.arange(12.0).reshape(3, 4) * 7 + step
        assert torch.equal(target["w"], torch.cat([base, base + 1000]))
        assert target["step"] == step


# --- ranks ----------------------------------------------------------------------------------------


def _sharded_state(world_size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (world_size,))
    whole = sharded_whole()
    return {
        "model": {
            "rows": distribute_tensor(whole["rows"], line, [Shard(0)]),
            "columns": distribute_tensor(whole["columns"], line, [Shard(1)]),
            "copies": distribute_tensor(whole["copies"], line, [Replicate()]),
            "few": distribute_tensor(whole["few"], line, [Shard(0)]),
        },
        "plain": whole["plain"],
        "step": 4,
    }


def _save_sharded(rank: int, world_size: int, path: Path, options: dict[str, Any], how: str) -> list[str]:
    state = _sharded_state(world_size)
    if how == "async":
        dcp.async_save(state, storage_writer=FileSystemWriter(path, **options)).result()
    elif how == "cached plans":
        for number in range(3):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=FileSystemWriter(path.with_name(f"{number}"), **options), planner=planner)
        dcp.save(state, storage_writer=FileSystemWriter(path, **options), planner=planner)
    else:
        dcp.save(state, storage_writer=FileSystemWriter(path, **options))
    target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    dcp.load(target, storage_reader=FileSystemReader(path))
    whole = sharded_whole()
    return [name for name, value in target["model"].items() if raw_bytes(value.full_tensor()) != raw_bytes(whole[name])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "how"),
    [({}, "sync"), ({"single_file_per_rank": False}, "sync"), ({"thread_count": 1}, "async"), ({}, "cached plans")],
)
def test_ranks_save_together(world4: World, tmp_path: Path, options: dict[str, Any], how: str) -> None:
    for wrong in world4.results(_save_sharded, tmp_path / "c", options, how, timeout_s=100):
        assert wrong == []
    whole = sharded_whole()
    plain = {"plain": whole.pop("plain"), "step": 4}
    del whole["blocks"]
    assert_same({"model": whole} | plain, stock_loaded({"model": whole} | plain, tmp_path / "c"))
    names = {path.name for path in (tmp_path / "c").glob("*.distcp")}
    assert {name.split("_")[2] for name in names} == {"0", "1", "2", "3"}
    assert not list(tmp_path.glob(HIDDEN))
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        assert checkpointer.verify(tmp_path / "c").ok


def _fail_on_one(rank: int, world_size: int, path: Path, failing: int) -> None:
    state = _sharded_state(world_size)
    if rank == failing:
        state["model"]["rows"].to_local()
        planner: Any = _BreakingRows()
    else:
        planner = DefaultSavePlanner()
    try:
        dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)
    finally:
        del state
        gc.collect()


class _BreakingRows(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "model.rows":
            raise OSError("no rows here")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_fails_all_and_leaves_nothing(world2: World, tmp_path: Path, failing: int) -> None:
    for outcome in world2.run(_fail_on_one, tmp_path / "c", failing, timeout_s=100):
        assert isinstance(outcome, RankFailure)
        assert "no rows here" in outcome.text
    world2.results(_collect, timeout_s=100)
    assert os.listdir(tmp_path) == []


def _collect(rank: int, world_size: int) -> None:
    gc.collect()


def _save_alone(rank: int, world_size: int, path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (0, 10):
            state = {"w": random_tensor(torch.float32, (11, 5), rank + seed), "rank": rank}
            dcp.save(state, storage_writer=FileSystemWriter(path), use_collectives=False)
        dist.barrier()
        target = {"w": torch.zeros(11, 5), "rank": None}
        dcp.load(target, storage_reader=dcp.FileSystemReader(path))
        return raw_bytes(target["w"]) == raw_bytes(state["w"]) and target["rank"] == rank


@needs_saves_alone
def test_ranks_save_alone_to_one_directory(world2: World, tmp_path: Path) -> None:
    assert world2.results(_save_alone, tmp_path / "c", timeout_s=100) == [True, True]
    names = sorted(os.listdir(tmp_path / "c"))
    assert [name for name in names if name.endswith(".metadata")] == ["__0.metadata", "__1.metadata"]
    assert len(names) == 4
