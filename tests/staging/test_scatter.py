"""The logic of loading to accelerators, on host memory through the same interfaces."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import torch

import aiockpt
from aiockpt.engine import engine
from aiockpt.engine.resources import EngineResources
from aiockpt.errors import LoadError
from aiockpt.options import LoadOptions
from aiockpt.reading import executor, jobs
from aiockpt.staging import scatter
from aiockpt.staging.cuda import AcceleratorStager
from aiockpt.staging.pool import ChunkPool
from aiockpt.staging.scatter import AcceleratorPlacer, Placement
from tests.staging.test_cuda_logic import FakeEvent, FakeRuntime
from tests.states import assert_same, large_state, random_tensor

CPU = torch.device("cpu")


class Runtime(FakeRuntime):
    def record_current(self):
        self.log.append("record current")
        return FakeEvent(self.log, "allocation")


@pytest.fixture
def through_chunks(monkeypatch: pytest.MonkeyPatch):
    """Fill host tensors as if they were on an accelerator: through chunks, by a placer."""
    runtimes = [Runtime(), Runtime()]
    made: list[AcceleratorPlacer] = []

    def placer_for(tools: EngineResources, device: torch.device) -> AcceleratorPlacer:
        if not made:
            stager = tools.stagers[torch.device("meta")] = AcceleratorStager(CPU, runtimes[0])
            made.append(AcceleratorPlacer(stager, runtimes[1]))
            tools.placers[CPU] = made[0]
        return made[0]

    monkeypatch.setattr(EngineResources, "_placer_for", placer_for)
    monkeypatch.setattr(executor, "CPU", torch.device("meta"))
    monkeypatch.setattr(jobs.ChunkRead, "_target_memory", lambda self: None)
    return runtimes


@pytest.mark.slow
@pytest.mark.parametrize("staging_bytes", [65_536, 1 << 20, None])
def test_every_kind_of_target_is_filled(staging_bytes, through_chunks, tmp_path: Path) -> None:
    state = large_state(5, kib=3000) | {
        "t": random_tensor(torch.float32, (600, 500), 3).t(),
        "small": random_tensor(torch.int16, (30, 7), 4),
        "z": torch.randn(700, 300, dtype=torch.complex64),
        "scalar": torch.tensor(5.0),
        "empty": torch.zeros(0, 3),
        "o": "object",
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
    with aiockpt.SyncCheckpointer(staging_bytes=staging_bytes) as ckpt:
        target = {name: torch.zeros_like(value) for name, value in state.items() if name != "o"} | {"o": None}
        target["t"] = torch.zeros(600, 1000)[:, ::2].t()
        target["w3"] = torch.zeros(3 * len(state["w3"]), dtype=torch.int32)[::3]
        ckpt.load(tmp_path / "c", target)
        assert_same(state, target)
        wide = {"z": torch.zeros(300, 700, dtype=torch.complex64).t().conj(), "t": torch.zeros(500, 600).double()}
        ckpt.load(tmp_path / "c", {"z": wide["z"]})
        assert torch.equal(wide["z"].resolve_conj(), state["z"])
        ckpt.load(tmp_path / "c", {"t": wide["t"]}, dtype=torch.float64)
        assert torch.equal(wide["t"].nan_to_num(), state["t"].double().nan_to_num())
        with ckpt.open(tmp_path / "c") as reader:
            out = torch.zeros(40, 100)
            reader.read("t", (slice(5, 45), slice(100, 200)), out=out)
            assert torch.equal(out.view(torch.int32), state["t"][5:45, 100:200].view(torch.int32))
        assert ckpt._engine.tools.pool.leased == 0
        log = through_chunks[1].log
        assert log.count("record") == log.count("synchronized copies") > 10
    assert not through_chunks[0].locked
    assert through_chunks[1].threads == {"aiockpt-place-cpu"}


def test_a_damaged_tensor_is_detected_on_its_way_to_a_device(through_chunks, tmp_path: Path) -> None:
    state = large_state(3, kib=5000)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        with ckpt.open(tmp_path / "c") as reader:
            chunk = reader["w1"].chunks[0]
        with open(tmp_path / "c" / chunk.file, "r+b") as file:
            file.seek(chunk.offset + 2_000_000)
            file.write(b"\x11\x12\x13")
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        with pytest.raises(aiockpt.CorruptCheckpointError, match="the bytes of w1"):
            ckpt.load(tmp_path / "c", target)
        ckpt.load(tmp_path / "c", {"w2": target["w2"]})
        assert torch.equal(target["w2"], state["w2"])


@pytest.mark.asyncio
async def test_copies_wait_for_the_callers_stream_and_for_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()

    @contextlib.contextmanager
    def running_in(stream):
        runtime.log.append(f"make in {stream}")
        yield
        runtime.log.append("made")

    monkeypatch.setattr(scatter, "running_in", running_in)
    stager = AcceleratorStager(CPU, FakeRuntime())
    placer = AcceleratorPlacer(stager, runtime)
    pool = ChunkPool(4096, 1)
    try:
        await placer.begin(FakeEvent(runtime.log, "caller"))  # type: ignore[arg-type]
        (target,) = await placer.new([((3,), torch.float32)], "side stream")
        lease = await pool.acquire()
        data = lease.chunk.tensor[:12].view(torch.float32)
        data.copy_(torch.tensor([1.0, 2.0, 3.0]))
        copies = await placer.issue([Placement(target, data)], lease.chunk)
        await copies.wait()
        lease.release()
        assert target.tolist() == [1, 2, 3]
    finally:
        placer.close()
        stager.close()
    steps = [step for step in runtime.log if step != "enter"]
    assert steps == [
        "wait for caller",
        "make in side stream",
        "record current",
        "wait for allocation",
        "made",
        "stream",
        "record",
        "synchronized copies",
    ]
    assert runtime.closed == 1


@pytest.mark.asyncio
async def test_new_tensors_belong_to_the_stream_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Placer:
        async def new(self, forms, stream):
            asked.append((forms, stream))
            return ["made"]

    device, filled = torch.device("cuda", 0), []
    wanted = SimpleNamespace(reads=[], tensor=None, device=device, read_into=filled.append)
    wanted.shape, wanted.dtype = (2,), torch.float32
    monkeypatch.setattr(engine, "current_streams", lambda: {device: threading.get_ident()})
    async with aiockpt.AsyncCheckpointer() as ckpt:

        async def make(tools):
            assert threading.get_ident() != tools.streams[device]
            tools = dataclasses.replace(tools, placer_for=lambda _: Placer())
            plan = SimpleNamespace(new=[wanted])
            await executor.ReadExecutor(None, "", LoadOptions(), tools).allocate(plan)

        await ckpt._engine.call(make, "make").wait()
    assert asked == [([((2,), torch.float32)], threading.get_ident())]
    assert filled == ["made"]


@pytest.mark.asyncio
async def test_a_failing_device_fails_the_load(through_chunks, tmp_path: Path) -> None:
    state = large_state(2, kib=3000)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(state, tmp_path / "c")
        through_chunks[1].error = RuntimeError("device-side failure")
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        with anyio.fail_after(60), pytest.raises(LoadError, match="device-side failure"):
            await ckpt.load(tmp_path / "c", target)
