"""The accelerator stager's logic, on host memory through the same interfaces: events are recorded and obeyed."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from aiockpt.capture import capture_state
from aiockpt.errors import StageError
from aiockpt.planning.layout import Sealer
from aiockpt.planning.planner import Planner
from aiockpt.staging.base import LayoutMismatchError
from aiockpt.staging.cuda import AcceleratorStager
from aiockpt.staging.pool import ChunkPool
from tests.states import random_tensor, raw_bytes

CPU = torch.device("cpu")
pytestmark = pytest.mark.asyncio


class FakeEvent:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.error: RuntimeError | None = None

    def synchronize(self) -> None:
        self.log.append(f"synchronized {self.name}")
        if self.error:
            raise self.error


class FakeRuntime:
    """A device whose stream is done at once, and which writes down what it was asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: set[int] = set()
        self.threads: set[str] = set()
        self.error: RuntimeError | None = None

    def enter(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.log.append("enter")

    def stream(self):
        self.log.append("stream")
        return contextlib.nullcontext()

    def wait_for(self, event) -> None:
        self.log.append(f"wait for {event.name}")

    def record(self):
        event = FakeEvent(self.log, "copies")
        event.error = self.error
        self.log.append("record")
        return event

    def pin(self, address: int, nbytes: int) -> bool:
        assert address not in self.pinned
        self.pinned.add(address)
        return True

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


def _captured(state, runtime: FakeRuntime):
    capture = capture_state(state)
    capture.events[CPU] = FakeEvent(runtime.log, "caller")
    return capture, Planner(1).plan(capture)


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 16, 1 << 22])
async def test_every_kind_of_piece_arrives(chunk_bytes: int) -> None:
    """Large, small and packed, strided, conjugated, and copied at the call."""
    state = {
        "large": random_tensor(torch.int32, (300, 500), 1),
        **{f"small{i}": random_tensor(torch.int16, (i, 7), i) for i in range(1, 30)},
        "middle": random_tensor(torch.uint8, (100_000,), 3),
        "strided": random_tensor(torch.float64, (200, 300), 4)[::2, 5:77],
        "transposed": random_tensor(torch.int64, (120, 130), 5).t(),
        "conj": random_tensor(torch.complex64, (100, 130), 6).conj(),
        "o": "object",
    }
    runtime = FakeRuntime()
    capture, plan = _captured(state, runtime)
    assert len(capture.eager) == 29
    stager = AcceleratorStager(CPU, runtime)
    pool = ChunkPool(chunk_bytes, 1)
    (image,) = plan.layout.images
    sealer = Sealer(image, plan.heads[0])
    file = b""
    try:
        for start in range(0, image.nbytes, chunk_bytes):
            stop = min(start + chunk_bytes, image.nbytes)
            lease = await pool.acquire()
            lease.chunk.tensor.fill_(0xAA)
            pending = await stager.issue(image.pieces(start, stop), lease.chunk, capture, plan.layout)
            await pending.wait()
            sealer.seal(lease.chunk.view, start, stop)
            file += bytes(lease.chunk.view[: stop - start])
            lease.release()
    finally:
        stager.close()
    names = capture.structure.names
    for slot in image.slots:
        tensor = state[names[slot.leaf]]
        spec = plan.layout.specs[slot.leaf]
        payload = torch.frombuffer(bytearray(file[slot.payload_offset : slot.payload_end]), dtype=torch.uint8)
        seen = payload.view(tensor.dtype).as_strided(spec.shape, spec.saved_stride)
        assert raw_bytes(seen) == raw_bytes(tensor), names[slot.leaf]
    assert runtime.log[:5] == ["enter", "stream", "wait for caller", "record", "synchronized copies"]
    assert runtime.threads == {"aiockpt-stage-cpu_0"}
    assert not runtime.pinned


async def test_a_changed_tensor_is_not_copied() -> None:
    runtime = FakeRuntime()
    state = {"w": torch.zeros(50_000), "s": torch.zeros(3)}
    capture, plan = _captured(state, runtime)
    image = plan.layout.images[0]
    stager = AcceleratorStager(CPU, runtime)
    pool = ChunkPool(1 << 20, 1)
    lease = await pool.acquire()
    try:
        state["w"].resize_(25_000, 2)
        with pytest.raises(LayoutMismatchError, match="w"):
            await stager.issue(image.pieces(0, image.nbytes), lease.chunk, capture, plan.layout)
        state["w"].resize_(50_000)
        capture.eager[1] = (0, 4)
        with pytest.raises(LayoutMismatchError, match="s"):
            await stager.issue(image.pieces(0, image.nbytes), lease.chunk, capture, plan.layout)
    finally:
        lease.release()
        stager.close()


async def test_an_error_of_the_device_is_a_stage_error() -> None:
    runtime = FakeRuntime()
    runtime.error = RuntimeError("an illegal memory access was encountered")
    capture, plan = _captured({"w": torch.zeros(50_000)}, runtime)
    stager = AcceleratorStager(CPU, runtime)
    lease = await ChunkPool(1 << 20, 1).acquire()
    try:
        pending = await stager.issue(plan.layout.images[0].pieces(0, 4096), lease.chunk, capture, plan.layout)
        with pytest.raises(StageError, match="illegal memory access"):
            await pending.wait()
        assert stager.fence()[0][0] == CPU
    finally:
        lease.release()
        stager.close()
