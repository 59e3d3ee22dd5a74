"""Bytes that several ranks need are read once: all kinds of targets, failures, and ranks that can't be reached."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import aiockpt
from aiockpt.coordination.wires import Arena, MemoryWire, Wire, Wires
from aiockpt.core.threads import Workers
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import LoadError
from aiockpt.planning.collective.sharing import CELL_BYTES, Cell, Share
from aiockpt.reading import sharing
from aiockpt.reading.decoded import DecodedSource, Held
from aiockpt.reading.jobs import ReadJob
from aiockpt.reading.sharing import SharedReads
from aiockpt.storage import LocalStorage, WrapperStorage
from tests.ranks.world import RankFailure, World, mesh_of

WIDTH = 1500


class Counting(WrapperStorage):
    """Counts the bytes that are read from files of data, by their suffix."""

    def __init__(self, suffix: str = ".distcp") -> None:
        super().__init__(LocalStorage())
        self.nbytes = 0
        self._suffix = suffix

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        if name.endswith(self._suffix):
            self.nbytes += nbytes


def state_of(factor: float) -> dict[str, Any]:
    """Return what all ranks have: large and small tensors, arrays, and objects."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=generator) * factor  # noqa: E731
    return {
        "large": {str(n): make(WIDTH, WIDTH) for n in range(3)},
        "transposed": make(WIDTH, 700).t(),
        "small": {str(n): make(17, n) for n in range(300)},
        "array": make(400_000).numpy(),
        "step": int(factor),
        "set": {int(factor), 2},
    }


def nbytes_of(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(nbytes_of, state.values()))
    return int(getattr(state, "nbytes", 0))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state_of(3.0), path)
    return path


def load_replicated(rank: int, world_size: int, path: Path, kind: str, options: dict[str, Any]) -> int:
    """Load what all ranks have; return how many bytes this rank has read."""
    storage, expected = Counting(), state_of(3.0)
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt:
        if kind == "new":
            assert equal(ckpt.load(path, **options), expected)
            return storage.nbytes
        state = state_of(0.0)
        if kind == "fresh":
            state["large"] = state["small"] = None
        if kind == "converted":
            state["large"] = {key: value.double().t().contiguous().t() for key, value in state["large"].items()}
            state["transposed"] = state["transposed"].contiguous()
            state["array"] = None
            options = {"dtype": torch.float64, "keys": ["large", "step"]} | options
        ckpt.load(path, state, **options)
        if kind == "converted":
            assert equal(state["large"], {key: value.double() for key, value in expected["large"].items()})
            assert state["step"] == 3
        else:
            assert equal(state, expected)
    return storage.nbytes


@pytest.mark.parametrize("kind", ["filled", "fresh", "new", "converted"])
def test_replicated_state_is_read_once(kind: str, saved: Path, world4: World) -> None:
    nbytes = nbytes_of(state_of(3.0))
    read = world4.results(load_replicated, saved, kind, {"share": True})
    if kind == "converted":
        nbytes = 3 * WIDTH * WIDTH * 4
    assert nbytes * 0.99 <= sum(read) <= 1.1 * nbytes
    assert max(read) <= 0.25 * nbytes + (8 << 20)


@pytest.mark.main
@pytest.mark.parametrize("near", [True, False])
def test_compressed_items_are_read_and_decoded_by_one_rank(near: bool, tmp_path: Path, world3: World) -> None:
    path = tmp_path / "c"
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"large": state_of(3.0)["large"]}, path, compress="zstd")
    stored = sum(file.stat().st_size for file in path.glob("*.distcp"))
    read = world3.results(load_compressed, path, near)
    assert 0.99 * stored <= sum(read) <= 1.1 * stored
    assert max(read) < 0.5 * stored


def load_compressed(rank: int, world_size: int, path: Path, near: bool) -> int:
    storage, expected = Counting(), state_of(3.0)["large"]
    state = {"large": {key: torch.zeros_like(value) for key, value in expected.items()}}
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt, pytest.MonkeyPatch.context() as patch:
        if not near:
            patch.delattr(os, "memfd_create")
        ckpt.load(path, state, share=True)
    assert equal(state["large"], expected)
    return storage.nbytes


def test_local_file_system_is_not_shared_unless_asked(saved: Path, world2: World) -> None:
    nbytes = nbytes_of(state_of(3.0))
    assert all(read >= nbytes for read in world2.results(load_replicated, saved, "filled", {}))


def load_over_tcp(rank: int, world_size: int, path: Path, kind: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "memfd_create", raising=False)
        return load_replicated(rank, world_size, path, kind, {"share": True})


@pytest.mark.parametrize("kind", ["filled", "converted"])
def test_ranks_of_different_hosts_share(kind: str, saved: Path, world4: World) -> None:
    nbytes = 3 * WIDTH * WIDTH * 4 if kind == "converted" else nbytes_of(state_of(3.0))
    assert sum(world4.results(load_over_tcp, saved, kind)) <= 1.1 * nbytes


def load_with_wrong_crcs(rank: int, world_size: int, path: Path) -> tuple[int, str]:
    """Load where rank 1 sends CRCs that its bytes do not have."""
    with pytest.MonkeyPatch.context() as patch, logged() as text:
        patch.delattr(os, "memfd_create", raising=False)
        if rank == 1:
            send = Wire.send
            patch.setattr(Wire, "send", lambda wire, number, crc, view: send(wire, number, crc ^ 1, view))
        return load_replicated(rank, world_size, path, "filled", {"share": True}), text.getvalue()


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """Collect what is logged."""
    text, logger = io.StringIO(), logging.getLogger("aiockpt")
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)


def test_what_was_changed_on_the_way_is_read_alone(saved: Path, world2: World) -> None:
    (_, first), (read, second) = world2.results(load_with_wrong_crcs, saved)
    assert "rank 0 reads itself what rank 1 does not send any more: its bytes were changed on the way" in first
    assert read < 0.6 * nbytes_of(state_of(3.0))
    assert "reads itself" not in second


def load_mixed(rank: int, world_size: int, path: Path) -> int:
    """Load where one rank does not share."""
    return load_replicated(rank, world_size, path, "fresh", {"share": rank != 1})


def test_ranks_that_do_not_share_load_with_those_that_do(saved: Path, world4: World) -> None:
    nbytes = nbytes_of(state_of(3.0))
    read = world4.results(load_mixed, saved)
    assert read[1] >= nbytes
    assert sum(read) <= 2.1 * nbytes


def load_sharded(rank: int, world_size: int, path: Path, kind: str, share: bool) -> int:
    """Load matrices as DTensors; return how many bytes this rank has read."""
    storage, expected = Counting(), state_of(3.0)
    meshes = {"hsdp": (2, world_size // 2), "columns": (world_size,), "rows": (world_size,)}
    mesh = mesh_of(*meshes[kind])
    placements = {
        "hsdp": [Replicate(), Shard(0)],
        "columns": [Shard(1)],
        "rows": [Shard(0)],
    }[kind]
    state: dict[str, Any] = {"large": {}, "step": 0}
    for key, value in expected["large"].items():
        state["large"][key] = distribute_tensor(torch.zeros_like(value), mesh, placements)
    with aiockpt.SyncCheckpointer(storage=storage) as ckpt:
        ckpt.load(path, state, share=share)
    for key, value in state["large"].items():
        assert torch.equal(value.full_tensor(), expected["large"][key])
    return storage.nbytes


@pytest.mark.parametrize("kind", ["hsdp", "columns", "rows"])
def test_parts_of_tensors_are_read_once(kind: str, saved: Path, world4: World) -> None:
    nbytes = 3 * WIDTH * WIDTH * 4
    shared, alone = (sum(world4.results(load_sharded, saved, kind, share)) for share in (True, False))
    assert 0.99 * nbytes <= shared <= 1.1 * nbytes
    assert alone >= {"hsdp": 2, "columns": 0.99, "rows": 0.99}[kind] * nbytes


# --- failures -------------------------------------------------------------------------------------------


class Failing(Counting):
    """Does something before the first read of data on one rank."""

    def __init__(self, happens: Callable[[], None] | None) -> None:
        super().__init__()
        self._happens = happens

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        super().before_read(name, offset, nbytes)
        if name.endswith(".distcp") and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()


def raise_error() -> None:
    raise LoadError("the disk is gone")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load_failing(rank: int, world_size: int, path: Path, victim: int, what: str) -> None:
    happens = {"raise": raise_error, "kill": kill}[what]
    storage = Failing(happens if rank == victim else None)
    state = state_of(0.0)
    with aiockpt.SyncCheckpointer(storage=storage, coordination_timeout=20) as ckpt:
        try:
            ckpt.load(path, state, share=True)
        except aiockpt.AiockptError:
            if what == "raise":  # the next one works
                ckpt.load(path, state, share=True)
                assert equal(state, state_of(3.0))
            raise


def load_stopped(rank: int, world_size: int, path: Path, note: Path) -> None:
    """Stop rank 2 while it reads, until the load has failed on rank 0."""

    def stop() -> None:
        note.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    storage = Failing(stop if rank == 2 else None)
    with aiockpt.SyncCheckpointer(storage=storage, coordination_timeout=3) as ckpt:
        try:
            ckpt.load(path, state_of(0.0), share=True)
        finally:
            if rank == 0:
                os.kill(int(note.read_text()), signal.SIGCONT)


@pytest.mark.parametrize("victim", [0, 2])
def test_error_of_one_rank_is_that_of_all(victim: int, saved: Path, world3: World) -> None:
    outcomes = world3.run(load_failing, saved, victim, "raise")
    for outcome in outcomes:
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == "LoadError"
        assert "the disk is gone" in outcome.text
        assert outcome.rank == victim or f"rank {victim}: " in outcome.text


@pytest.mark.parametrize("victim", [0, 2])
def test_death_of_one_rank_is_the_error_of_all(victim: int, saved: Path) -> None:
    with World(3) as world:
        outcomes = world.run(load_failing, saved, victim, "kill")
    assert outcomes.pop(victim).killed
    for outcome in outcomes:
        assert outcome.kind == "CoordinationError"
        assert f"rank {victim} on host" in outcome.text


def test_rank_that_stops_fails_all_in_time(saved: Path, tmp_path: Path) -> None:
    with World(3) as world:
        outcomes = world.run(load_stopped, saved, tmp_path / "pid")
    for outcome in outcomes:
        assert isinstance(outcome, RankFailure)
        assert outcome.rank == 2 or (outcome.kind == "CoordinationError" and "rank 2" in outcome.text)


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_damage_is_found_by_all_ranks(compress: str | None, world3: World, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(state_of(3.0), path, compress=compress)
    for file in path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 8, len(data), len(data) // 8):
            data[at] ^= 1
        file.write_bytes(data)
    for outcome in world3.run(load_failing, path, -1, "raise"):
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == "CorruptCheckpointError"
        assert "not match their CRC" in outcome.text


async def load_cancelled(rank: int, world_size: int, path: Path) -> tuple[str, int]:
    """Cancel the load of rank 1 while it reads; return the error, and how many bytes this rank has read until then."""
    reached, go = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go.wait(30)

    async def nothing(_: Any) -> None:
        pass

    storage = Failing(wait if rank == 1 else None)
    async with aiockpt.AsyncCheckpointer(storage=storage, coordination_timeout=30) as ckpt:
        state = state_of(0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharing, "_MOST_READ_NEAR", 1)
            loading = asyncio.ensure_future(ckpt.load(path, state, share=True))
            if rank == 1:
                await asyncio.to_thread(reached.wait, 30)
                loading.cancel()
                await asyncio.sleep(0)
                await EngineAccess(ckpt).call(nothing, "nothing").wait()  # by then the engine has cancelled it
                go.set()
            try:
                await loading
            except (asyncio.CancelledError, aiockpt.AiockptError) as exc:
                text = f"{type(exc).__name__} {exc}"
        nbytes = storage.nbytes
        await ckpt.load(path, state, share=True)
        assert equal(state, state_of(3.0))
        return text, nbytes


def test_cancelled_rank_fails_all(saved: Path, world3: World) -> None:
    texts, nbytes = zip(*world3.results(load_cancelled, saved), strict=True)
    assert texts[1].startswith("CancelledError")
    assert all("LoadError rank 1: the load of" in text and "was cancelled" in text for text in (texts[0], texts[2]))
    assert nbytes[1] <= CELL_BYTES  # it ends with what was being read


class OnDevice:
    """A placer for a device, which is done when the rank that has sent the bytes has left."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.placed: list[bytes] = []

    def place(self, held: Held, jobs: Sequence[ReadJob]) -> list[ReadJob]:
        return list(jobs)

    async def place_on_devices(self, held: Held, jobs: Sequence[ReadJob]) -> None:
        self.placed.append(bytes(held.view))
        self._leave()

    def finish(self, job: Any) -> None:
        raise AssertionError("no job is for host memory")


@pytest.mark.asyncio
async def test_rank_that_leaves_while_a_device_copies_fails_nothing(saved: Path) -> None:
    """Its messages are there; it need not be told that they are no longer used."""
    ours, theirs = socket.socketpair()
    wire, sender = MemoryWire(ours, 5.0), MemoryWire(theirs, 5.0)
    wires, arena = Wires(1, 5.0), Arena(4096, is_shared=True)
    workers = Workers(2, "aiockpt-test")
    wires.inbound[0] = wire
    arena.view[:5] = b"bytes"
    cell = Cell(0, "__0_0.distcp", 0, 0)
    share = Share(7, (cell,), 0, 5, 0, ((1, 0, 5),))
    source = DecodedSource(await LocalStorage().open(str(saved), workers=workers), str(saved))
    reads = SharedReads(1, {cell: share}, wires, source, workers)
    placer = OnDevice(sender.close)
    try:
        sender.announce(7, 5, arena, 0)
        jobs: Any = {cell: [None]}
        await reads.run(0, jobs, placer)
        assert (placer.placed, jobs) == ([b"bytes"], {})
    finally:
        reads.close()
        wire.close()
        arena.close()
        source.close()
        workers.close()
