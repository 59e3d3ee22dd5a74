"""The adapters of torch.distributed.checkpoint on URLs: one transaction of all ranks."""

from __future__ import annotations

import pickle
import threading
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Shard

import aiockpt
from aiockpt.dcp import FileSystemReader, FileSystemWriter
from aiockpt.dcp.megatron import FileSystemWriterAsync
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.dcp.conftest import alone_in_a_group
from tests.dcp.test_reader import blank, state_of
from tests.objects.buckets import Bucket
from tests.objects.test_stock import copy_down
from tests.ranks.conftest import server as _ranks
from tests.ranks.conftest import world2
from tests.ranks.world import RankFailure, World, mesh_of
from tests.states import assert_same, random_tensor

__all__ = ["alone_in_a_group", "world2"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ranks_server = _ranks


def writer_to(bucket: Bucket, name: str, **more: Any) -> FileSystemWriter:
    return FileSystemWriter(bucket / name, storage_options=bucket.options, **more)


def loaded(bucket: Bucket, name: str, state: dict[str, Any]) -> dict[str, Any]:
    target = blank(state)
    dcp.load(target, storage_reader=FileSystemReader(bucket / name, storage_options=bucket.options))
    return target


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 1}], ids=str)
def test_save_and_load(options: dict[str, Any], bucket: Bucket, tmp_path: Path) -> None:
    for seed in range(2):
        writer = pickle.loads(pickle.dumps(writer_to(bucket, "run/c", **options)))
        dcp.save(state_of(seed), storage_writer=writer)
        assert_same(state_of(seed), loaded(bucket, "run/c", state_of()))
    with bucket.checkpointer() as ckpt:
        assert ckpt.verify(bucket / "run/c").ok
        assert_same(state_of(1), ckpt.load(bucket / "run/c"))
    assert bucket.dead() == []
    copy_down(bucket, "run/c", tmp_path)
    target = blank(state_of())
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_same(state_of(1), target)


def test_large_items_are_written_in_batches_and_parts(bucket: Bucket) -> None:
    state = {f"w{n}": random_tensor(torch.float32, (1024, 3000), n) for n in range(3)}
    writer = writer_to(bucket, "c", staging_bytes=20 << 20)
    dcp.save(state, storage_writer=writer, planner=Casting())
    assert_same(state, loaded(bucket, "c", state))
    assert len({name.rpartition("/")[2] for name in bucket.listed() if "__0_1_" in name}) == 1


class Casting(DefaultSavePlanner):
    """Planner that makes each tensor anew, for which the writer asks batch by batch."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.clone() if isinstance(made, torch.Tensor) else made


def test_what_exists_is_refused_or_replaced(bucket: Bucket) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(), bucket / "c")
        with pytest.raises(CheckpointException, match="exists already"):
            dcp.save(state_of(1), storage_writer=writer_to(bucket, "c", overwrite=False))
        assert bucket.dead() == []
        assert_same(state_of(), ckpt.load(bucket / "c"))
        dcp.save(state_of(1), checkpoint_id=bucket / "c", storage_writer=writer_to(bucket, "d"))
        assert_same(state_of(1), ckpt.load(bucket / "c"))
    assert bucket.dead() == []


def test_a_state_may_change_during_an_async_save(bucket: Bucket, alone_in_a_group: None) -> None:
    writer = writer_to(bucket, "x")
    for seed in range(2):
        state = state_of(seed)
        future = dcp.async_save(state, checkpoint_id=bucket / f"{seed}", storage_writer=writer)
        state["model"]["w"].zero_()
        future.result()
        assert_same(state_of(seed), loaded(bucket, f"{seed}", state_of()))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


class Breaking(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "bad":
            raise RuntimeError("the planner broke")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("kind", ["planner", "part", "complete", "commit"])
def test_failures_leave_what_was_there(kind: str, bucket: Bucket, server: ObjectServer) -> None:
    state = {"w": random_tensor(torch.float32, (1024, 6000), 1), "bad": torch.rand(3)}
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(), bucket / "c")
        options = bucket.options | {"retry_config": {"max_retries": 0}}
        writer = FileSystemWriter(bucket / "c", storage_options=options)
        planner = Breaking() if kind == "planner" else DefaultSavePlanner()
        refused = {"part": "PUT .*partNumber=2", "complete": "POST .*uploadId", "commit": "PUT .*/.metadata$"}
        server.rules(*([Rule(refused[kind], count=100, status=400)] if kind in refused else []))
        with pytest.raises(CheckpointException, match="the planner broke" if kind == "planner" else "400"):
            dcp.save(state, storage_writer=writer, planner=planner)
        server.rules()
        if kind == "commit":  # it is not known whether one of them has arrived
            writer.discard()
            assert bucket.dead() != []
        else:
            assert bucket.dead() == []
        assert_same(state_of(), ckpt.load(bucket / "c"))
        dcp.save(state, storage_writer=writer)
        assert_same(state, ckpt.load(bucket / "c"))


def test_what_cannot_be_is_refused(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match="this writer writes to directories"):
        FileSystemWriterAsync(bucket / "c")
    formats = getattr(dcp.filesystem, "SerializationFormat", None)
    if formats is not None:
        with pytest.raises(ValueError, match="this writer writes no safetensors"):
            writer_to(bucket, "c", serialization_format=formats.SAFETENSORS)
    writer = writer_to(bucket, "c")
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(aiockpt.SaveError, match="each rank would publish alone"):
        writer.prepare_local_plan(dcp.SavePlan([]))
    with pytest.raises(aiockpt.AiockptError, match="no storage is registered for nowhere://"):
        FileSystemWriter("nowhere://bucket/c")


def test_plan_of_an_earlier_save_is_refused(bucket: Bucket) -> None:
    state = {"w": torch.rand(30)}
    kind = type(f"Planner{uuid.uuid4().hex}", (DefaultSavePlanner,), {})  # the plans are kept by this name
    for name in ("a", "b"):
        planner = kind(enable_plan_caching=True)
        if name == "a":
            dcp.save(state, storage_writer=writer_to(bucket, name), planner=planner)
            continue
        with pytest.raises(CheckpointException, match="leave out enable_plan_caching"):
            dcp.save(state, storage_writer=writer_to(bucket, name), planner=planner)
    assert_same(state, loaded(bucket, "a", state))
    assert bucket.dead() == []


# --- ranks ----------------------------------------------------------------------------------------


def _save_sharded(rank: int, world_size: int, bucket: Bucket, step: int, broken: int | None) -> bool:
    warnings.simplefilter("ignore")
    local = torch.arange(3_000_000.0).reshape(3, -1) + 1000 * rank + step
    state = {"w": DTensor.from_local(local, mesh_of(world_size), [Shard(0)]), "step": step}
    if rank == broken:
        state["bad"] = torch.rand(3)
    dcp.save(state, storage_writer=writer_to(bucket, "run/c"), planner=Breaking())
    target = {"w": DTensor.from_local(torch.zeros_like(local), mesh_of(world_size), [Shard(0)]), "step": None}
    dcp.load(target, storage_reader=FileSystemReader(bucket / "run/c", storage_options=bucket.options))
    return bool(torch.equal(target["w"].to_local(), local)) and target["step"] == step


def test_ranks_save_together(bucket: Bucket, world2: World) -> None:
    for step in range(2):
        assert world2.results(_save_sharded, bucket, step, None, timeout_s=100) == [True, True]
    with bucket.checkpointer() as ckpt:
        assert ckpt.verify(bucket / "run/c").ok
        assert ckpt.load(bucket / "run/c")["w"].shape == (6, 1_000_000)
    assert bucket.dead() == []


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_fails_leaves_nothing(broken: int, bucket: Bucket, world2: World) -> None:
    assert world2.results(_save_sharded, bucket, 0, None, timeout_s=100) == [True, True]
    for outcome in world2.run(_save_sharded, bucket, 1, broken, timeout_s=100):
        assert isinstance(outcome, RankFailure)
        assert "the planner broke" in outcome.text
    assert bucket.dead() == []
    with bucket.checkpointer() as ckpt:
        assert ckpt.load(bucket / "run/c")["step"] == 0
