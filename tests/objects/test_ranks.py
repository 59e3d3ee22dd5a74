"""Several ranks, and writer processes, in an object store: one checkpoint, or none."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiockpt
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects.buckets import Bucket
from tests.ranks.world import _context

pytestmark = pytest.mark.usefixtures("forks")

SIZE = 2


def state_of(rank: int, version: int) -> dict[str, Any]:
    """Return what is of one rank, in several parts of a file, and what all have."""
    own = torch.arange(3_000_000.0) * (rank + 1) + version
    return {"own": {str(rank): own}, "same": torch.full((5000,), version), "version": version}


def version_in(bucket: Bucket, path: str) -> int:
    """Return what is at a path; 0 if nothing. It is whole."""
    with bucket.checkpointer() as ckpt:
        try:
            state = ckpt.load(path)
        except aiockpt.CheckpointNotFoundError:
            return 0
        assert ckpt.verify(path).ok
    version = int(state["version"])
    for rank in range(SIZE):
        assert torch.equal(state["own"][str(rank)], state_of(rank, version)["own"][str(rank)])
    assert state["same"].unique().tolist() == [version]
    return version


def _save(rank: int, store: str, bucket: Bucket, version: int, options: dict[str, Any], pipe: Any) -> None:
    pipe.recv()
    ranks = aiockpt.Ranks(rank, SIZE, dist.FileStore(store, SIZE), address="127.0.0.1")
    compress = options.pop("compress", None)
    with bucket.checkpointer(process_group=ranks, coordination_timeout=10, **options) as ckpt:
        result = ckpt.save(state_of(rank, version), bucket / "run/c", overwrite=True, compress=compress)
        pipe.send(result.tensors)


def saved_by_all(
    bucket: Bucket, folder: Path, version: int, *, rule: Any = None, server: ObjectServer | None = None, **options: Any
) -> tuple[list[int], list[int]]:
    """Save with all ranks, each in a process of its own; return their exit codes, and what those that ended said."""
    processes, pipes = [], []
    for rank in range(SIZE):
        ours, theirs = _context.Pipe()
        given = (rank, str(folder / f"store-{version}"), bucket, version, options, theirs)
        processes.append(_context.Process(target=_save, args=given))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    if server is not None:
        server.rules(*([rule(processes)] if rule else []))
    heard = []
    for pipe in pipes:
        pipe.send("go")
    for pipe in pipes:
        with contextlib.suppress(EOFError, ConnectionResetError), pipe:
            heard.append(pipe.recv())
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes], heard


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"writer": "process"}, marks=pytest.mark.full), {"compress": "zstd"}], ids=str
)
def test_ranks_save_one_checkpoint(options: dict[str, Any], bucket: Bucket, tmp_path: Path) -> None:
    for version in (1, 2):
        assert saved_by_all(bucket, tmp_path, version, **options) == ([0] * SIZE, [SIZE + 1] * SIZE)
        assert version_in(bucket, bucket / "run/c") == version
    assert bucket.dead() == []


@pytest.mark.full
@pytest.mark.parametrize("killed", range(SIZE))
def test_rank_that_is_killed_leaves_all_or_nothing(
    killed: int, bucket: Bucket, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    path, number = bucket / "run/c", 0
    while True:
        number += 1
        (folder := tmp_path / str(number)).mkdir()
        saved_by_all(bucket, folder, 1)
        at_number = lambda processes: Rule(".", first=number, does=bool(number % 2), kill=processes[killed].pid)  # noqa: B023, E731
        codes, heard = saved_by_all(bucket, folder, 2, rule=at_number, server=server)
        server.rules()
        version = version_in(bucket, path)
        assert version in (1, 2)
        assert version == 2 or not heard
        assert codes[killed] in (0, -signal.SIGKILL)
        with bucket.checkpointer() as ckpt:
            ckpt.clean(bucket / "run", older_than_s=0.0)
        assert bucket.dead() == []
        server.clear()
        if codes == [0] * SIZE:
            break
    assert number > 10


def _load(rank: int, store: str, bucket: Bucket, pipe: Any) -> None:
    ranks = aiockpt.Ranks(rank, SIZE, dist.FileStore(store, SIZE), address="127.0.0.1")
    target = {"large": torch.zeros(4_000_000), "small": [torch.zeros(1000) for _ in range(50)], "state": None}
    with bucket.checkpointer(process_group=ranks, coordination_timeout=30) as ckpt:
        ckpt.load(bucket / "c", target)
    pipe.send([target["large"].sum().item(), target["small"][49][0].item(), target["state"]["b"].sum().item()])


def test_ranks_read_once_what_all_need(bucket: Bucket, server: ObjectServer, tmp_path: Path) -> None:
    state = {
        "large": torch.ones(4_000_000),
        "small": [torch.full((1000,), float(n)) for n in range(50)],
        "state": {"a": {1, 2}, "b": torch.ones(3_000_000)},
    }
    with bucket.checkpointer() as ckpt:
        nbytes = ckpt.save(state, bucket / "c").nbytes
    server.rules()
    processes, pipes = [], []
    for rank in range(SIZE):
        ours, theirs = _context.Pipe()
        processes.append(_context.Process(target=_load, args=(rank, str(tmp_path / "store"), bucket, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        with pipe:
            assert pipe.recv() == [4_000_000.0, 49.0, 3_000_000.0]
    for process in processes:
        process.join(60)
    assert nbytes <= server.sent <= 1.1 * nbytes


@pytest.mark.parametrize("options", [{"writer": "process"}, {"compress": "zstd"}, {"chunk_bytes": 1 << 20}], ids=str)
def test_options_of_one_process(options: dict[str, Any], bucket: Bucket) -> None:
    options = dict(options)
    state = {"own": {str(rank): state_of(rank, 5)["own"][str(rank)] for rank in range(SIZE)}} | {
        "same": torch.full((5000,), 5),
        "version": 5,
    }
    compress = options.pop("compress", None)
    with bucket.checkpointer(**options) as ckpt:
        ckpt.save(state, bucket / "c", compress=compress)
        with ckpt.open(bucket / "c") as reader:
            rows = reader.read("own.1", slice(2_999_990, 3_000_000))
    assert version_in(bucket, bucket / "c") == 5
    assert torch.equal(rows, state["own"]["1"][-10:])
