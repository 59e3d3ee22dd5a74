"""The accelerator stager's logic, on host memory through the same interfaces, with recorded events."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.core import pages
from aiockpt.core.threads import Workers
from aiockpt.engine.resources import PoolSizer
from aiockpt.errors import StageError
from aiockpt.format.item.objects import decode_object
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.layout import Sealer
from aiockpt.planning.planner import Planner
from aiockpt.planning.specs import TensorSpec
from aiockpt.saving.staging_session import _JoinedCopies
from aiockpt.snapshot.capture import capture_state
from aiockpt.staging import runtime as device_runtime
from aiockpt.staging.base import Fill, LayoutMismatchError
from aiockpt.staging.cuda import AcceleratorStager
from aiockpt.staging.pool import ChunkPool, Lease, SharedMemory
from aiockpt.staging.runtime import ALREADY_LOCKED, Copy, is_capturing, reading_behind, ready_event, runtime_of
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
    """A device that records the calls, and whose stream completes at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.locked: set[int] = set()
        self.used: list[torch.Tensor] = []
        self.threads: set[str] = set()
        self.waiters: set[str] = set()
        self.error: RuntimeError | None = None
        self.lock_error = 0
        self.closed = 0

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

    def order_behind(self, event) -> None:
        self.log.append(f"order behind {event.name}")

    def sleep_until(self, event) -> None:
        self.waiters.add(threading.current_thread().name)
        event.synchronize()

    def drain(self) -> None:
        self.sleep_until(self.record())

    def use(self, tensor: torch.Tensor) -> None:
        self.used.append(tensor)

    def copy(self, copies: list[Copy]) -> None:
        """Copy by address, as a driver does."""
        for chunk, at, nbytes, _, _, address in copies:
            ctypes.memmove(chunk.address + at, address, nbytes)

    def node(self) -> int | None:
        return None

    def lock(self, address: int, nbytes: int) -> int:
        self.log.append("lock")
        if not self.lock_error:
            assert address not in self.locked
            self.locked.add(address)
        return self.lock_error

    def unlock(self, address: int) -> None:
        self.locked.remove(address)

    def close(self) -> None:
        self.closed += 1


def _captured(state, runtime: FakeRuntime):
    capture = capture_state(state)
    capture.events[CPU] = FakeEvent(runtime.log, "caller")
    return capture, Planner(DcpFormat(1)).plan(capture)


async def _check_all(state, capture, plan, stager: AcceleratorStager, chunk_bytes: int) -> None:
    """Stage a whole state, compare the result with it, and close the stager."""
    pool = ChunkPool(chunk_bytes, 1)
    (image,) = plan.layout.images
    sealer = Sealer(image, plan.heads[0])
    file = b""
    try:
        for start in range(0, image.nbytes, chunk_bytes):
            stop = min(start + chunk_bytes, image.nbytes)
            lease = await pool.acquire()
            lease.chunk.tensor.fill_(0xAA)
            try:
                (pending,) = await stager.issue([Fill(lease.chunk, image.pieces(start, stop))], capture, plan.layout)
                await pending.wait()
                sealer.seal(lease.chunk.view, start, stop)
                file += bytes(lease.chunk.view[: stop - start])
            finally:
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


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 16, 1 << 22])
async def test_every_kind_of_piece_arrives(chunk_bytes: int) -> None:
    """Large, small and packed, strided, conjugated, and copied at the call."""
    state = {
        "large": random_tensor(torch.int32, (300, 500), 1),
        **{f"small{i}": random_tensor(torch.int16, (i, 7), i) for i in range(1, 30)},
        "middle": random_tensor(torch.uint8, (100_000,), 3),
        "strided": random_tensor(torch.float64, (200, 300), 4)[::2, 5:77],
        "transposed": random_tensor(torch.int64, (120, 130), 5).t(),
        "view": random_tensor(torch.int32, (300, 500), 7)[17:290],
        "conj": random_tensor(torch.complex64, (100, 130), 6).conj(),
        "o": "object",
    }
    runtime = FakeRuntime()
    capture, plan = _captured(state, runtime)
    assert len(capture.eager) == 29
    await _check_all(state, capture, plan, AcceleratorStager(CPU, runtime), chunk_bytes)
    assert runtime.log[:6] == ["enter", "lock", "stream", "wait for caller", "record", "synchronized copies"]
    assert runtime.threads == {"aiockpt-stage-cpu"}
    assert runtime.waiters <= {"aiockpt-wait-cpu_0", "aiockpt-wait-cpu_1"}
    assert not runtime.locked


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
            await stager.issue([Fill(lease.chunk, image.pieces(0, image.nbytes))], capture, plan.layout)
        state["w"].resize_(50_000)
        capture.eager[1] = (0, 4)
        with pytest.raises(LayoutMismatchError, match="s"):
            await stager.issue([Fill(lease.chunk, image.pieces(0, image.nbytes))], capture, plan.layout)
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
        (pending,) = await stager.issue(
            [Fill(lease.chunk, plan.layout.images[0].pieces(0, 4096))], capture, plan.layout
        )
        with pytest.raises(StageError, match="illegal memory access"):
            await pending.wait()
        stager.fence()
        assert runtime.log[-2:] == ["record", "order behind copies"]
    finally:
        lease.release()
        stager.close()


async def test_a_full_device_can_still_be_copied_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory to pack or densify, small pieces are copied one by one, strided ones in parts."""
    state = {
        **{f"small{i}": random_tensor(torch.int16, (i, 7), i) for i in range(1, 30)},
        "strided": random_tensor(torch.float64, (800, 300), 4)[::2, 5:77],
        "middle": random_tensor(torch.uint8, (100_000,), 3),
    }
    capture, plan = _captured(state, FakeRuntime())
    sizes: list[int] = []
    empty = torch.empty

    def no_cat(*_args, **_options):
        raise torch.OutOfMemoryError("none left")

    def little(nbytes, **options):
        if "device" in options:
            sizes.append(nbytes)
            if nbytes > 100_000:
                raise torch.OutOfMemoryError("none left")
        return empty(nbytes, **options)

    stager = AcceleratorStager(CPU, FakeRuntime())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", no_cat)
        patch.setattr(torch, "empty", little)
        await _check_all(state, capture, plan, stager, 1 << 20)
    assert max(sizes) == 400 * 72 * 8
    assert sum(size for size in sizes if size <= 100_000) == max(sizes)


async def test_a_small_tensor_without_room_for_its_copy_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"s": random_tensor(torch.int32, (30, 50), 1)[:, ::2]}

    def no_clone(*_args, **_options):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", no_clone)
        capture, plan = _captured(state, FakeRuntime())
    await _check_all(state, capture, plan, AcceleratorStager(CPU, FakeRuntime()), 4096)
    state["s"].add_(1)
    assert capture.changed() == ["s"]


async def test_tensors_pickled_for_the_plan_are_read_after_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = torch.eye(500).to_sparse()
    capture = capture_state({"sparse": sparse, "w": torch.ones(50_000)})

    class Device(FakeRuntime):
        def wait_for(self, event) -> None:
            super().wait_for(event)
            sparse._values().fill_(7)  # the caller's stream has computed it by now

    runtime = Device()
    capture.events[CPU] = FakeEvent(runtime.log, "caller")
    assert capture.behind is reading_behind
    monkeypatch.setattr(device_runtime, "runtime_of", lambda device: runtime)
    plan = Planner(DcpFormat(1)).plan(capture)
    assert runtime.log == ["enter", "stream", "wait for caller"]
    assert runtime.closed == 1
    ((name, place),) = plan.objects
    blob = plan.heads[0][place.offset : place.offset + place.length]
    assert torch.equal(decode_object(name, bytes(blob)).to_dense(), torch.eye(500) * 7)


async def test_the_bytes_of_other_devices_pieces_are_left_alone() -> None:
    """Packed pieces are copied with the gaps between them, which must hold only framing."""
    state = {f"w{i}": random_tensor(torch.int16, (i, 7), i) for i in range(1, 9)}
    runtime = FakeRuntime()
    capture, plan = _captured(state, runtime)
    (image,) = plan.layout.images
    specs = plan.layout.summary.specs
    others = [slot for slot in image.slots if slot.leaf % 3 == 1]
    for slot in others:
        specs[slot.leaf] = specs[slot.leaf]._replace(device=torch.device("meta"))
    stager = AcceleratorStager(CPU, runtime)
    lease = await ChunkPool(1 << 20, 1).acquire()
    try:
        lease.chunk.tensor.fill_(0xAA)
        (pending,) = await stager.issue([Fill(lease.chunk, image.pieces(0, image.nbytes))], capture, plan.layout)
        await pending.wait()
        for slot in image.slots:
            found = bytes(lease.chunk.view[slot.payload_offset : slot.payload_end])
            expected = raw_bytes(state[capture.structure.names[slot.leaf]])
            assert found == (b"\xaa" * len(expected) if slot in others else expected)
    finally:
        lease.release()
        stager.close()


async def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready_event(CPU) is None
    assert not is_capturing(CPU)
    with pytest.raises(aiockpt.AiockptError, match="no streams and events for cpu"):
        runtime_of(CPU)
    monkeypatch.setattr(device_runtime, "HOST_KINDS", frozenset())
    with pytest.raises(aiockpt.SaveError, match=r"^w can't be saved: torch has no streams and events"):
        capture_state({"w": torch.zeros(3)})


@pytest.mark.parametrize("error", [2, 801])
async def test_locking_is_tried_once_if_it_fails(error: int, caplog: pytest.LogCaptureFixture) -> None:
    state = {"large": random_tensor(torch.int32, (300, 500), 1)}
    runtime = FakeRuntime()
    runtime.lock_error = error
    capture, plan = _captured(state, runtime)
    await _check_all(state, capture, plan, AcceleratorStager(CPU, runtime), 1 << 16)
    assert runtime.log.count("lock") == 1
    assert runtime.log.count("record") > 5
    assert f"the driver's error {error} for 65536 bytes" in caplog.text


async def test_memory_that_another_stager_has_locked_is_locked(caplog: pytest.LogCaptureFixture) -> None:
    state = {"large": random_tensor(torch.int32, (300, 500), 1)}
    runtime = FakeRuntime()
    runtime.lock_error = ALREADY_LOCKED
    runtime.unlock = lambda address: None
    capture, plan = _captured(state, runtime)
    pool, stager = ChunkPool(4096, 4), AcceleratorStager(CPU, runtime)
    leases = [await pool.acquire(), await pool.acquire()]
    for lease in leases:
        await stager.issue([Fill(lease.chunk, plan.layout.images[0].pieces(0, 4096))], capture, plan.layout)
    assert runtime.log.count("lock") == 2
    assert not caplog.text
    for lease in leases:
        lease.release()
    stager.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_chunk_that_was_replaced_is_used_again_and_locked_once(shared: bool) -> None:
    memory = SharedMemory(8 * 4096) if shared else None
    runtime, pool = FakeRuntime(), ChunkPool(4096, 2, memory)
    capture, plan = _captured({"large": random_tensor(torch.int32, (300, 500), 1)}, runtime)
    stager = AcceleratorStager(CPU, runtime)

    async def fill(lease: Lease) -> None:
        fills = [Fill(lease.chunk, plan.layout.images[0].pieces(0, 4096))]
        (pending,) = await stager.issue(fills, capture, plan.layout)
        await pending.wait()

    for _ in range(3):
        stuck, other = await pool.acquire(), await pool.acquire()
        await fill(stuck)
        await fill(other)
        stuck.quarantine()
        third = await pool.acquire()
        await fill(third)
        for lease in (stuck, other, third):
            lease.release()
    assert runtime.log.count("lock") == len(runtime.locked) == 3
    stager.close()
    assert not runtime.locked
    pool.drop()
    del stuck, other, third, lease
    if memory is not None:
        memory.close()


async def test_arenas_are_locked_at_once() -> None:
    runtime, pool = FakeRuntime(), ChunkPool(4096, 10)
    stager = AcceleratorStager(CPU, runtime)
    leases = pool.lease_new(10, arena_bytes=4 * 4096)
    for lease in leases:
        await stager.pin(lease.chunk)
        lease.release()
    assert [len(lease.chunk.view) for lease in leases] == [4096] * 10
    assert len({lease.chunk.address for lease in leases}) == 10
    assert runtime.log.count("lock") == 3
    stager.close()


async def test_tensors_live_until_the_copies_are_done() -> None:
    runtime = FakeRuntime()
    capture, plan = _captured({"w": torch.zeros(50_000)}, runtime)
    stager = AcceleratorStager(CPU, runtime)
    lease = await ChunkPool(1 << 20, 1).acquire()
    try:
        (pending,) = await stager.issue(
            [Fill(lease.chunk, plan.layout.images[0].pieces(0, 4096))], capture, plan.layout
        )
        capture.release()
        assert len(pending._sources) == len(runtime.used) == 1
        await pending.wait()
        assert not pending._sources
    finally:
        lease.release()
        stager.close()


async def test_all_devices_are_waited_for_when_one_fails() -> None:
    done = []

    class Copying:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        async def wait(self) -> None:
            done.append(self)
            if self.error:
                raise self.error

    pending = [Copying(StageError("the first")), Copying(StageError("the second")), Copying(None)]
    with pytest.raises(StageError, match="the first"):
        await _JoinedCopies(pending).wait()
    assert done == pending


async def test_no_device_is_ever_synchronised() -> None:
    package = Path(aiockpt.__file__).parent
    calls = re.compile(r"\b(?:cuda|accelerator|xpu|mps|stream)\.synchronize\(")
    assert not [str(file) for file in package.rglob("*.py") if calls.search(file.read_text())]


async def test_host_tensors_between_those_of_a_device_do_not_part_them() -> None:
    """As Adam's `step` between the averages: small tensors of a device are packed, and copied together."""
    state = {}
    for number in range(50):
        state[f"{number}.exp_avg"] = torch.full((number + 1,), float(number))
        state[f"{number}.step"] = torch.tensor(float(number))
        state[f"{number}.exp_avg_sq"] = torch.full((number + 2,), -float(number))

    class Format(DcpFormat):
        def describe(self, tensor: torch.Tensor) -> TensorSpec | None:
            spec = super().describe(tensor)
            return spec if spec is None or tensor.dim() else spec._replace(device=torch.device("meta"))

    runtime = FakeRuntime()
    capture = capture_state(state)
    plan = Planner(Format(1)).plan(capture)
    (image,) = plan.layout.images
    assert [slot.leaf for slot in image.slots] == sorted(range(150), key=lambda leaf: (leaf % 3 == 1, leaf))
    copied: list[Copy] = []
    copy = runtime.copy

    def counted(copies: list[Copy]) -> None:
        copied.extend(copies)
        copy(copies)

    runtime.copy = counted
    stager, pool = AcceleratorStager(CPU, runtime), ChunkPool(1 << 20, 1)
    lease = await pool.acquire()
    try:
        fills = [Fill(lease.chunk, image.pieces(0, image.nbytes))]
        (pending,) = await stager.issue(fills, capture, plan.layout)
        await pending.wait()
    finally:
        lease.release()
        stager.close()
    assert len(copied) == 1


async def test_chunks_lie_near_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before their pages exist: when they are touched ahead of the first save, or else before they are locked."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "prefer_node", lambda *arguments: asked.append(arguments))
    runtime, pool = FakeRuntime(), ChunkPool(4096, 2)
    runtime.node = lambda: 1
    stager = AcceleratorStager(CPU, runtime)
    capture, plan = _captured({"large": random_tensor(torch.int32, (300, 500), 1)}, runtime)
    workers = Workers(1, "aiockpt-touching")
    try:
        sizer = PoolSizer(pool, workers, files=0, bounded=True, is_unwanted=lambda: False)
        await sizer.prewarm(4096, [stager])
        (first,) = {address for address, _, _ in asked}
        assert set(asked) == {(first, 4096, 1)}
        leases = [await pool.acquire(), await pool.acquire()]
        fills = [Fill(lease.chunk, plan.layout.images[0].pieces(0, 4096)) for lease in leases]
        await stager.issue(fills, capture, plan.layout)
        assert {address for address, _, _ in asked} == {lease.chunk.address for lease in leases}
        for lease in leases:
            lease.release()
    finally:
        stager.close()
        workers.close()
