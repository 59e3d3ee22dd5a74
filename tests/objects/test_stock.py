"""Programs of others and aiockpt read one another's checkpoints in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks.harness.object_server import ObjectServer
from benchmarks.harness.states import State, empty_like, same_bits
from benchmarks.peers.object_peers import BUCKET, Fsspec, ObjectPeer, OursOnObjects, S3Connector
from tests.objects.buckets import Bucket

_PEERS = {Fsspec: "s3fs", S3Connector: "s3torchconnector"}


@pytest.fixture
def no_leaks() -> None:
    """Allow all: the others keep threads and connections."""


@pytest.fixture
def bucket(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    server.clear()
    given = server.options("s3")
    for name in ("access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", given[name])
    return Bucket(f"s3://{BUCKET}", given)


def a_state() -> State:
    return {f"layer.{at}": torch.arange(at, 40_000.0 * (at + 1)) for at in range(3)} | {"few": torch.arange(7)}


def copy_down(bucket: Bucket, name: str, folder: Path) -> None:
    """Copy all objects below a key, as `aws s3 cp --recursive` does."""
    objects = bucket.storage().objects
    for key in objects.below(f"{name}/"):
        file = folder / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(objects.get(f"{name}/{key}")[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_copy_on_the_disk_is_a_checkpoint(bucket: Bucket, tmp_path: Path) -> None:
    state, target = a_state(), empty_like(a_state())
    with bucket.checkpointer() as ckpt:
        ckpt.save({name: value + 1 for name, value in state.items()}, bucket / "c")
        ckpt.save(state, bucket / "c", overwrite=True)
    copy_down(bucket, "c", tmp_path / "c")
    with aiockpt.SyncCheckpointer() as ckpt:
        assert same_bits(ckpt.load(tmp_path / "c"), state)
        assert ckpt.verify(tmp_path / "c").ok
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert same_bits(target, state)


@pytest.mark.asyncio
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", _PEERS, ids=_PEERS.values())
async def test_others_read_ours_in_place(kind: type[ObjectPeer], bucket: Bucket, server: ObjectServer) -> None:
    pytest.importorskip(_PEERS[kind])
    state, ours = a_state(), OursOnObjects(server)
    await ours.save(state, "c")
    assert same_bits(await kind(server).load(state, "c"), state)
    await ours.close()


@pytest.mark.asyncio
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", _PEERS, ids=_PEERS.values())
async def test_ours_reads_those_of_others(kind: type[ObjectPeer], bucket: Bucket, server: ObjectServer) -> None:
    pytest.importorskip(_PEERS[kind])
    state, ours = a_state(), OursOnObjects(server)
    await kind(server).save(state, "c")
    assert same_bits(await ours.load(state, "c"), state)
    await ours.close()
    with bucket.checkpointer() as ckpt:
        report = ckpt.verify(bucket / "c")
        assert report.ok, report
        with ckpt.open(bucket / "c") as reader:
            assert torch.equal(reader.read("layer.1", slice(30_000, 30_010)), state["layer.1"][30_000:30_010])
