"""Every access to a device's memory has an order: saves, fences, guards and loads on a device of numbered streams."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.cuda import _gpu_trace

import aiockpt
from aiockpt.core.extent import plain_memory
from aiockpt.reading import executor
from aiockpt.staging.runtime import Runtime, current_streams, reading_behind, running_in
from tests.ordering import PosingDevice, PosingEvent, PosingStream, watch_cuda
from tests.states import assert_same


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor, "CPU", torch.device("meta"))
    with PosingDevice().installed(monkeypatch) as posing:
        yield posing


def _state() -> dict[str, torch.Tensor]:
    """Return tensors that are copied one by one, packed, made dense, and at the call."""
    return {
        "large": torch.arange(200_000.0),
        "strided": torch.arange(90_000).view(-1, 3)[:, ::2],
        "transposed": torch.arange(60_000.0).view(300, 200).t(),
        "conjugated": torch.full((20_000,), 1 + 2j).conj(),
        "negated": torch.full((20_000,), 1 + 2j).conj().imag,
        **{f"middle{i}": torch.full((20_000,), float(i)) for i in range(3)},
        **{f"small{i}": torch.full((20,), float(i)) for i in range(3)},
    }


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_steps_behind_a_fence(validate, device: PosingDevice, tmp_path: Path) -> None:
    state = _state()
    expected = _copied(state)
    with aiockpt.SyncCheckpointer(validate=validate) as ckpt:
        device.hold()
        save = ckpt.submit(state, tmp_path / "c")
        ckpt.fence()
        for tensor in state.values():
            tensor.add_(1)
        device.proceed()
        save.written.result(60)
        assert_same(expected, ckpt.load(tmp_path / "c"))
    device.check()


def test_an_error_of_an_earlier_kernel_fails_the_save(
    device: PosingDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices report it at whatever call comes next, here while the state is captured."""

    def record(event: PosingEvent, stream: PosingStream) -> None:
        raise RuntimeError("device-side assert triggered")

    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(_state(), tmp_path / "before")
        with monkeypatch.context() as patch:
            patch.setattr(PosingEvent, "record", record)
            with pytest.raises(aiockpt.StageError, match="device-side assert triggered"):
                ckpt.submit(_state(), tmp_path / "c")
        assert [path.name for path in tmp_path.iterdir()] == ["before"]


def test_steps_with_a_guard_and_samples(device: PosingDevice, tmp_path: Path) -> None:
    """Tensors beside the optimizer's are compared with samples that the device has made before."""
    weight = torch.nn.Parameter(torch.ones(300, 300))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    state = {"weight": weight, "frozen": torch.ones(300, 300)}
    with aiockpt.SyncCheckpointer(validate="hash") as ckpt, ckpt.guard(optimizer):
        device.hold()
        save = ckpt.submit(state, tmp_path / "c")
        optimizer.step()
        device.proceed()
        save.written.result(60)
    device.check()


@pytest.mark.parametrize("regrown", [False, True])
def test_memory_freed_before_it_is_copied(regrown: bool, device: PosingDevice, tmp_path: Path) -> None:
    """The allocator reuses the memory behind the copies, and what was copied of it is no checkpoint."""
    freed = torch.ones(100_000)
    nbytes = freed.nbytes
    with aiockpt.SyncCheckpointer() as ckpt:
        device.hold()
        save = ckpt.submit({"freed": freed, "kept": torch.ones(100_000)}, tmp_path / "c")
        assert device.waited_for.wait(60)
        freed.untyped_storage().resize_(0)
        others = torch.zeros(100_000)  # may get the old memory
        if regrown:
            freed.untyped_storage().resize_(nbytes)
        device.proceed()
        error = save.written.exception(60)
    del others
    device.check()
    assert isinstance(error, aiockpt.TornSnapshotError)
    assert str(error).startswith("freed changed")


@pytest.mark.parametrize("strided", [False, True])
def test_small_tensors_freed_after_a_call_in_another_stream(
    strided: bool, device: PosingDevice, tmp_path: Path
) -> None:
    """They are copied at the call, in its stream; their memory goes to kernels of the stream that they belong to."""
    memory = torch.ones(100)
    small = memory[::2] if strided else memory
    with aiockpt.SyncCheckpointer() as ckpt:
        with device.stream():
            save = ckpt.submit({"small": small}, tmp_path / "c")
            memory.untyped_storage().resize_(0)
        save.written.result(60)
        assert torch.equal(ckpt.load(tmp_path / "c")["small"], torch.ones(50 if strided else 100))
    device.check()


class _EndOfAnOperator(threading.Event):
    """An operator ends when it is waited for."""

    def __init__(self, changed: torch.Tensor) -> None:
        super().__init__()
        self._changed = changed

    def wait(self, timeout: float | None = None) -> bool:
        self._changed.add_(0)
        return True


def test_an_operator_that_runs_has_time_to_end(device: PosingDevice, tmp_path: Path) -> None:
    """Operators on lists of tensors launch their kernels first, and advance the version counters at their end."""
    average = torch.ones(100_000)
    with aiockpt.SyncCheckpointer() as ckpt:
        device.hold()
        save = ckpt.submit({"average": average}, tmp_path / "c")
        save._job.consistency.awaited = _EndOfAnOperator(average)
        device.proceed()
        assert isinstance(save.written.exception(60), aiockpt.TornSnapshotError)


def test_loaded_tensors_belong_to_the_callers_stream(device: PosingDevice, tmp_path: Path) -> None:
    """Kernels of the caller's may still read what it drops: the next load must not write there."""
    state = _state()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        with device.stream():
            for _ in range(3):
                loaded = ckpt.load(tmp_path / "c")
                copies = [tensor.clone() for tensor in loaded.values()]
                del loaded
    assert len(copies) == len(state)
    device.check()


def test_targets_are_filled_behind_the_callers_work(device: PosingDevice, tmp_path: Path) -> None:
    state = _state()
    with aiockpt.SyncCheckpointer() as ckpt, device.stream():
        ckpt.save(state, tmp_path / "c")
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        sums = [value.sum() for value in target.values()]
        ckpt.load(tmp_path / "c", target)
        assert_same(state, target)
    assert len(sums) == len(state)
    device.check()


@pytest.mark.parametrize("fails", [False, True])
def test_a_guard_in_another_stream_than_the_saves(fails: bool, device: PosingDevice, tmp_path: Path) -> None:
    """The samples of `save()` are in memory of its stream, and may be freed before the guard has read them."""
    weight = torch.nn.Parameter(torch.ones(300, 300))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with aiockpt.SyncCheckpointer(validate="hash") as ckpt, ckpt.guard(optimizer):
        device.hold()
        save = ckpt.submit({"weight": weight, "frozen": torch.ones(300, 300)}, tmp_path / "c")
        with device.stream():
            optimizer.step()
            if fails:
                save._job.give_up("of the test")
            device.proceed()
            assert (save.written.exception(60) is not None) == fails
    device.check()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "hash", "load", "new", "read"])
def test_nothing_is_done_while_a_graph_is_captured(how: str, device: PosingDevice, tmp_path: Path) -> None:
    """A kernel or an event in the captured stream would become a part of the graph."""
    state = _state()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        with device.stream() as stream, ckpt.open(tmp_path / "c") as reader:
            target = torch.zeros_like(state["large"])
            device.capturing.add(stream.number)
            before = dict(device.trace.syncs.current_sync_states[stream.number])
            if how == "load":
                with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                    ckpt.load(tmp_path / "c", {"large": target})
            elif how == "new":
                with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                    ckpt.load(tmp_path / "c")
            elif how == "read":
                with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                    reader.read("large", out=target)
            else:
                with pytest.raises(aiockpt.SaveError, match="captures a graph"):
                    ckpt.save(state, tmp_path / "d", validate="hash" if how == "hash" else "versions")
            assert device.trace.syncs.current_sync_states[stream.number] == before
            device.capturing.clear()
        ckpt.save(state, tmp_path / "d")
    device.check()


def test_a_stream_is_restored(device: PosingDevice) -> None:
    """Of accelerators that are known by ``torch.accelerator`` only."""
    here, event = torch.device("cpu"), device.current_stream().record_event()
    with device.stream() as stream:
        with reading_behind(here, event):
            assert device.current_stream() is not stream
        assert device.current_stream() is stream
        assert current_streams() == {here: stream}
        with running_in(None):
            assert device.current_stream() is stream


@pytest.mark.slow
def test_prewarm_locks_arenas_and_a_save_none(device: PosingDevice, tmp_path: Path, monkeypatch) -> None:
    """Locking takes milliseconds however little it is, and a fence would wait for it."""
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr(Runtime, "lock", lambda self, address, nbytes: locked.append((address, nbytes)) or 0)
    state = {f"w{number}": torch.ones(100_000) for number in range(20)}
    with aiockpt.SyncCheckpointer(chunk_bytes=64 << 10) as ckpt:
        ckpt.prewarm(state)
        chunks = ckpt._engine.tools.pool.made
        assert chunks > 100
        assert [nbytes for _, nbytes in locked] == [chunks * (64 << 10)]
        ckpt.save(state, tmp_path / "c")
        assert len(locked) == 1
        assert_same(state, ckpt.load(tmp_path / "c"))
    device.check()


def test_the_trace_of_a_real_device_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls these functions on a machine that has one; here its stream is a number."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=1))
    memory, one, other, event = 0x1000, 1, 2, 7
    for is_ordered in (True, False):
        with watch_cuda() as checker:
            _gpu_trace.StreamCreationCallbacks.fire_callbacks(other)
            _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(memory)
            checker.launch(one, set(), {memory}, "a kernel")
            _gpu_trace.EventCreationCallbacks.fire_callbacks(event)
            _gpu_trace.EventRecordCallbacks.fire_callbacks(event, one)
            if is_ordered:
                _gpu_trace.EventWaitCallbacks.fire_callbacks(event, other)
            checker.launch(other, {memory}, set(), "a copy")
            if is_ordered:
                _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(other)
            _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(memory)
        assert len(checker.errors) == (0 if is_ordered else 2)
    _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(memory)  # nobody listens any more
    assert len(checker.errors) == 2


class _Program:
    """Does random things with a state, in random streams that wait for each other, and never for the host."""

    def __init__(self, seed: int, device: PosingDevice, ckpt: aiockpt.SyncCheckpointer, folder: Path) -> None:
        self._random = random.Random(seed)
        self._device = device
        self._ckpt = ckpt
        self._folder = folder
        self._weight = torch.nn.Parameter(torch.ones(300, 300))
        self._optimizer = torch.optim.SGD([self._weight], lr=1.0, momentum=0.9)
        self._weight.grad = torch.ones_like(self._weight)
        self._state = _state()
        self.saves: list[tuple[aiockpt.SaveHandle, dict[str, torch.Tensor]]] = []

    def run(self, actions: int) -> None:
        with self._ckpt.guard(self._optimizer):
            for _ in range(actions):
                action = self._random.choice(
                    [self.save, self.save, self.step, self.change, self.free, self.load, self.fill]
                )
                if self._random.random() < 0.5:
                    self._do(action)
                    continue
                with self._device.stream() as stream:
                    self._do(action)
                self._device.current_stream().wait_event(stream.record_event())

    def _do(self, action: Callable[[], None]) -> None:
        used = [*self._state.values(), self._weight, *(each for _, copy in self.saves[-1:] for each in copy.values())]
        action()
        for tensor in used:  # as a program has to that uses tensors in several streams
            plain_memory(tensor).record_stream(self._device.current_stream())

    def save(self) -> None:
        self._device.proceed()
        for save, _ in self.saves[-1:]:  # the next one is staged behind it, and a fence would wait for both
            save.staged.exception(60)
        if self._random.random() < 0.5:
            self._device.hold()
        state = self._state | {"weight": self._weight.detach()}
        validate = self._random.choice(["versions", "hash"])
        path = self._folder / str(len(self.saves))
        try:
            self.saves.append((self._ckpt.submit(state, path, validate=validate), _copied(state)))
        except aiockpt.TornSnapshotError:  # of an earlier one
            self.save()

    def step(self) -> None:
        self._optimizer.step()

    def change(self) -> None:
        self._ckpt.fence()
        for tensor in self._state.values():
            tensor.data.mul_(2)

    def free(self) -> None:
        """Drop all tensors while they may be read, and take their memory."""
        self._state = {name: tensor + 1 for name, tensor in self._state.items()}

    def load(self) -> None:
        self._device.proceed()
        for save, _ in self.saves[-1:]:
            if save.written.exception(60) is None:
                loaded = self._ckpt.load(save.path)
                self._state["large"] = self._state["large"] + loaded["large"]

    def fill(self) -> None:
        self._device.proceed()
        for save, _ in self.saves[-1:]:
            if save.written.exception(60) is None:
                self._ckpt.fence()
                self._ckpt.load(save.path, self._state)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 8))])
def test_random_programs(seed: int, device: PosingDevice, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:  # all in one chunk, which is enqueued while the device is held
        program = _Program(seed, device, ckpt, tmp_path)
        program.run(20)
        device.proceed()
        for save, expected in program.saves:
            if save.written.exception(60) is None:
                assert_same(expected, ckpt.load(save.path))
    device.check()
