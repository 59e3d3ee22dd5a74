"""Ranks without torch.distributed: processes, or checkpointers of one process, that meet in a store."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import aiockpt
from tests.ranks.world import World

PAGE = Path(aiockpt.__file__).parent / "docs/ranks.md"
SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def opened() -> None:
    """Open what stays open in a process that has had a TCPStore, before leaks are counted."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def stores(kind: str, folder: Path) -> list[Any]:
    """Return a store of each rank."""
    if kind == "hash":
        return [dist.HashStore()] * SIZE
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), SIZE) for _ in range(SIZE)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [dist.TCPStore("127.0.0.1", first.port, is_master=False, wait_for_workers=False) for _ in range(SIZE - 1)]
    return [first, *others]


def on_all(function: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Call a function for each rank, in a thread of its own, all at once."""
    with ThreadPoolExecutor(size) as threads:
        return [call.result(120) for call in [threads.submit(function, rank) for rank in range(size)]]


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {
        "own": {str(rank): torch.arange(1000) * (rank + 1) + step},
        "same": torch.full((5000,), step),
        "rank": {f"of {rank}": rank},
    }


@pytest.mark.main
@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_they_save_one_checkpoint_and_load_their_parts(kind: str, tmp_path: Path) -> None:
    meeting = stores(kind, tmp_path)

    def rank_of(rank: int) -> list[int]:
        ranks = aiockpt.Ranks(rank, SIZE, meeting[rank], address="127.0.0.1")
        with aiockpt.SyncCheckpointer(process_group=ranks, coordination_timeout=60) as ckpt:
            results = [ckpt.save(state_of(rank, step), tmp_path / f"c{step}") for step in (1, 2)]
            target = {"own": {str(rank): torch.zeros(1000, dtype=torch.int64)}, "same": torch.zeros(5000).long()}
            ckpt.load(tmp_path / "c2", target)
            assert torch.equal(target["own"][str(rank)], state_of(rank, 2)["own"][str(rank)])  # type: ignore[index]
            assert torch.equal(target["same"], state_of(rank, 2)["same"])  # type: ignore[arg-type]
        return [result.tensors for result in results]

    assert on_all(rank_of) == [[SIZE + 1] * 2] * SIZE
    for step in (1, 2):
        assert aiockpt.verify(tmp_path / f"c{step}").ok
        state = aiockpt.load(tmp_path / f"c{step}")
        assert list(state["own"]) == ["0", "1", "2"]
        assert all(torch.equal(state["own"][str(n)], state_of(n, step)["own"][str(n)]) for n in range(SIZE))
        assert state["rank"] == {f"of {rank}": rank for rank in range(SIZE)}


def test_a_rank_that_was_restarted_joins_the_next_generation(tmp_path: Path) -> None:
    store = dist.HashStore()
    saved = threading.Barrier(2)

    def rank_of(rank: int) -> str:
        with aiockpt.SyncCheckpointer(process_group=aiockpt.Ranks(rank, 2, store), coordination_timeout=60) as ckpt:
            ckpt.save(state_of(rank, 1), tmp_path / "1")
            saved.wait(60)
            if rank == 1:  # it ends, as if it were killed
                return ""
            with pytest.raises(aiockpt.CoordinationError) as caught:
                ckpt.save(state_of(rank, 2), tmp_path / "2")
        return str(caught.value)

    assert re.match(r"rank 1 .* is gone", on_all(rank_of, 2)[0])

    def once_more(rank: int) -> int:
        ranks = aiockpt.Ranks(rank, 2, store, generation=1)
        with aiockpt.SyncCheckpointer(process_group=ranks, coordination_timeout=60) as ckpt:
            return ckpt.save(state_of(rank, 2), tmp_path / "2").tensors

    assert on_all(once_more, 2) == [3, 3]
    assert aiockpt.verify(tmp_path / "2").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("what", ["save", "load", "shared load"])
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.asyncio
async def test_a_rank_that_stops_waiting_and_closes_tells_the_others(what: str, leaver: int, tmp_path: Path) -> None:
    store, path = dist.HashStore(), tmp_path / "c"
    aiockpt.save(state_of(0, 1), path)

    def ranks_of(rank: int, **options: Any) -> aiockpt.AsyncCheckpointer:
        ranks = aiockpt.Ranks(rank, 2, store, address="127.0.0.1")
        return aiockpt.AsyncCheckpointer(process_group=ranks, coordination_timeout=600, **options)

    def called(ckpt: aiockpt.AsyncCheckpointer) -> asyncio.Future[Any]:
        if what == "save":
            return asyncio.ensure_future(ckpt.save(state_of(0, 2), tmp_path / "new").written)
        target = {"same": torch.zeros(5000).long()}
        return asyncio.ensure_future(ckpt.load(path, target, share=what == "shared load"))

    async with contextlib.AsyncExitStack() as stack:
        if what == "save":
            stack.enter_context(pytest.raises(aiockpt.SaveCancelledError))  # at closing
        call = called(await stack.enter_async_context(ranks_of(leaver, drain_timeout=0)))
        await asyncio.sleep(0)  # it begins
        call.cancel()
    async with ranks_of(1 - leaver) as ckpt:
        with pytest.raises(aiockpt.CoordinationError, match=rf"rank {leaver} has closed|rank {leaver} .* is gone"):
            await asyncio.wait_for(called(ckpt), 60)
    assert not (tmp_path / "new").exists()


def test_rank_0_is_found_where_it_listens_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first address reaches the store, but the answer comes too late, so that it listens there no more."""
    store, put, published, goes_on = dist.HashStore(), PrefixStore.set, [], threading.Event()
    again = threading.Event()

    def put_late(prefixed: PrefixStore, key: str, value: Any) -> None:
        put(prefixed, key, value)
        if key == "endpoint":
            published.append(value)
            again.set() if published[1:] else goes_on.wait(60)

    monkeypatch.setattr(PrefixStore, "set", put_late)

    def checkpointer(rank: int, timeout_s: float) -> aiockpt.SyncCheckpointer:
        ranks = aiockpt.Ranks(rank, 2, store, address="127.0.0.1")
        return aiockpt.SyncCheckpointer(process_group=ranks, coordination_timeout=timeout_s)

    with checkpointer(0, 3) as first, checkpointer(1, 60) as second:
        for ckpt in (first, second):  # rank 1 when rank 0 has given up
            with pytest.raises(aiockpt.CoordinationError):
                ckpt.save(state_of(0, 1), tmp_path / "1")
        goes_on.set()
        with ThreadPoolExecutor(1) as thread:
            saving = thread.submit(first.save, state_of(0, 2), tmp_path / "2")
            assert again.wait(60)
            assert second.save(state_of(1, 2), tmp_path / "2").tensors == saving.result(60).tensors
    assert aiockpt.verify(tmp_path / "2").ok


def test_managers_of_plain_ranks_restore_one_step(tmp_path: Path) -> None:
    store = dist.HashStore()

    def rank_of(rank: int) -> int:
        ranks = aiockpt.Ranks(rank, 2, store)
        keep = [aiockpt.KeepLatest(2)]
        with aiockpt.SyncCheckpointManager(tmp_path / "run", process_group=ranks, keep=keep) as run:
            for step in range(4):
                run.save(step, state_of(rank, step))
        with aiockpt.SyncCheckpointManager(tmp_path / "run", process_group=ranks, read_only=True) as run:
            return run.restore(state_of(rank, 9)).step

    assert on_all(rank_of, 2) == [3, 3]
    assert [info.step for info in aiockpt.SyncCheckpointManager(tmp_path / "run").infos()] == [2, 3]


def test_generators_belong_to_the_rank_of_the_checkpointer(tmp_path: Path) -> None:
    store = dist.HashStore()

    def rank_of(rank: int) -> None:
        with aiockpt.SyncCheckpointer(process_group=aiockpt.Ranks(rank, 2, store)) as ckpt:
            rng = aiockpt.RngState()
            ckpt.save({"rng": rng}, tmp_path / "c")
            ckpt.load(tmp_path / "c", {"rng": rng})

    on_all(rank_of, 2)
    assert list(aiockpt.load(tmp_path / "c")["rng"]) == ["rank0", "rank1"]
    assert list(aiockpt.RngState().state_dict()) == ["rank0"]


def test_ranks_of_different_sizes_fail(tmp_path: Path) -> None:
    store = dist.HashStore()

    def rank_of(rank: int) -> str:
        ranks = aiockpt.Ranks(rank, 2 + (rank > 0), store)
        caught = pytest.raises(aiockpt.CoordinationError)
        with aiockpt.SyncCheckpointer(process_group=ranks, coordination_timeout=3) as ckpt, caught as told:
            ckpt.save(state_of(rank, 1), tmp_path / "c")
        return str(told.value)

    for text in on_all(rank_of):
        assert re.search(r"is one of 3 ranks, but rank 0 .* one of 2: all must be given the same number", text)
    assert not list(tmp_path.iterdir())


def test_one_rank_saves_alone(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(process_group=aiockpt.Ranks(0, 1, dist.HashStore())) as ckpt:
        assert ckpt.save(state_of(0, 1), tmp_path / "c").tensors == 2


def test_the_arguments_are_checked() -> None:
    store = dist.HashStore()
    for rank, size in ((2, 2), (-1, 2), (0, 0), ("0", 2), (0, 2.0)):
        with pytest.raises(ValueError, match="ranks count from 0"):
            aiockpt.Ranks(rank, size, store)  # type: ignore[arg-type]
    for generation in ("a", -1):
        with pytest.raises(ValueError, match=f"generation {generation!r}"):
            aiockpt.Ranks(0, 2, store, generation=generation)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="address must be that of this host, as text, not 17"):
        aiockpt.Ranks(0, 2, store, address=17)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch.distributed.Store, such as a TCPStore, not \{\}"):
        aiockpt.Ranks(0, 2, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ProcessGroup, aiockpt.Ranks, 'default' or None, not 3"):
        aiockpt.AsyncCheckpointer(process_group=3)  # type: ignore[arg-type]


def test_the_program_of_the_page(python: list[str], tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n# ranks.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "ranks.py").write_text(program)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port
    del host  # the port is free again
    commands = [[*python, "-c", program, f"{rank}", "3", f"{port}", "runs/plain"] for rank in range(3)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    started = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
    for rank, process in enumerate(started):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, f"rank {rank} of 3: 6 tensors\n"), err
    state = aiockpt.load(tmp_path / "runs/plain")
    assert (list(state["parts"]), list(state["rng"])) == (["0", "1", "2"], ["rank0", "rank1", "rank2"])


def save_on_a_mesh_of_one(rank: int, world_size: int, path: Path) -> None:
    """Save a DTensor whose mesh has this rank alone, without the other ranks."""
    mesh = DeviceMesh("cpu", [rank])
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"w": distribute_tensor(torch.arange(8.0) + rank, mesh, [Shard(0)])}, path / f"{rank}")


def test_a_tensor_on_a_mesh_of_one_rank_is_saved_alone(world2: World, tmp_path: Path) -> None:
    world2.results(save_on_a_mesh_of_one, tmp_path)
    for rank in range(2):
        assert torch.equal(aiockpt.load(tmp_path / f"{rank}")["w"], torch.arange(8.0) + rank)
