"""Saves that end early, at every copy from the device: cancelled, out of time, closed, or because the device breaks."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.snapshot import sampling
from aiockpt.staging import cuda, runtime
from tests.fakecuda import device as fake
from tests.states import assert_same

CHUNK = 64 << 10
WAIT_S = 60


def _state() -> dict[str, torch.Tensor]:
    numbers = torch.arange(40_000, device="cuda")
    return {"large": numbers, "strided": numbers.view(200, 200).t(), "middle": numbers[:9000] + 1, "small": numbers[:9]}


def _copies() -> int:
    return fake.tasks("to_host")


def _cancel(ckpt: aiockpt.SyncCheckpointer, save: aiockpt.SaveHandle) -> None:
    save.cancel()


def _wait(ckpt: aiockpt.SyncCheckpointer, save: aiockpt.SaveHandle) -> None:
    save.written.exception(WAIT_S)


def _leave(ckpt: aiockpt.SyncCheckpointer, save: aiockpt.SaveHandle) -> None:
    """Closing follows at once."""


ENDS: dict[str, tuple[Callable[..., None], dict[str, float], type[BaseException]]] = {
    "cancelled": (_cancel, {}, aiockpt.SaveCancelledError),
    "out of time": (_wait, {"save_timeout": 0.02}, aiockpt.SaveTimeoutError),
    "closed": (_leave, {"drain_timeout": 0.01}, aiockpt.SaveCancelledError),
    "broken": (_wait, {}, aiockpt.StageError),
}


@pytest.mark.parametrize("writer", ["thread", pytest.param("process", marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ENDS)
def test_at_every_copy(how: str, writer, kind: str, tmp_path: Path) -> None:
    """End a save at each of its copies: what is published is whole, and memory is unlocked after its copies."""
    end, options, error = ENDS[how]
    state = _state()
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    begin = {"chunk_bytes": CHUNK, "staging_bytes": 4 * CHUNK, "fsync": False, "on_failure": "warn", "writer": writer}
    with aiockpt.SyncCheckpointer(**begin) as ckpt:
        before = _copies()
        ckpt.save(state, tmp_path / "first")
        number = _copies() - before
    outcomes = set()
    for at in range(number + 1):
        fake.delay(to_host=5000)
        before = _copies()
        drained = contextlib.suppress(aiockpt.SaveCancelledError)  # said by closing, too
        with drained, aiockpt.SyncCheckpointer(**begin, **options) as ckpt:
            if how == "broken":
                fake.fail_task("to_host", at + 1)
            save = ckpt.submit(state, tmp_path / str(at))
            while _copies() < before + at and not save.written.done():
                pass
            end(ckpt, save)
        fake.fail_task("to_host", 0)
        found = save.written.exception(WAIT_S)
        outcomes.add(type(found))
        assert found is None or isinstance(found, error)
        assert not fake.misuses()
        fake.reset()
        if found is None:
            assert_same(expected, aiockpt.load(tmp_path / str(at)))
        else:
            assert not (tmp_path / str(at)).exists()
    assert any(each is not type(None) for each in outcomes)
    assert_same(expected, {name: tensor.cpu() for name, tensor in state.items()})


@pytest.mark.parametrize("what", ["save", "load"])
def test_no_copy_is_left_behind_by_a_device_that_fails(what: str, tmp_path: Path, monkeypatch) -> None:
    """No event can be recorded any more once copies are enqueued: their memory is unlocked after them all the same."""
    state, record = {"w": torch.arange(40_000, device="cuda")}, runtime.CudaRuntime.record
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=8 * CHUNK, fsync=False) as ckpt:
        ckpt.save(state, tmp_path / "first")
    copies = {"save": "to_host", "load": "from_host"}[what]

    def failing(self: runtime.Runtime) -> torch.Event:
        if fake.tasks(copies) > before:
            with contextlib.suppress(RuntimeError):  # from the second time on
                fake.fail_task("kernel")
                fake.sleep(0, device=1)
                torch.accelerator.synchronize(1)
            if not release.is_alive():
                release.start()
        return record(self)

    with fake.held(copies), aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=8 * CHUNK, fsync=False) as ckpt:
        release = threading.Timer(0.3, fake.release, [copies])
        before = fake.tasks(copies)
        monkeypatch.setattr(runtime.CudaRuntime, "record", failing)
        with pytest.raises((aiockpt.StageError, aiockpt.LoadError), match="illegal memory access"):
            ckpt.save(state, tmp_path / "c") if what == "save" else ckpt.load(tmp_path / "first", map_location="cuda")
    assert not fake.misuses()


def test_a_fence_out_of_time(tmp_path: Path) -> None:
    """The save goes on; a guarded step gives it up instead."""
    weight = torch.nn.Parameter(torch.ones(300_000, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK, fsync=False) as ckpt:
        ckpt.save({"w": weight}, tmp_path / "first")
        with fake.held("to_host"):
            save = ckpt.submit({"w": weight}, tmp_path / "c")
            with pytest.raises(TimeoutError):
                save.fence(0.01)
        save.written.result(WAIT_S)
        with fake.held("to_host"), ckpt.guard(optimizer, timeout=0.01):
            save = ckpt.submit({"w": weight}, tmp_path / "d")
            optimizer.step()
        assert isinstance(save.written.exception(WAIT_S), aiockpt.TornSnapshotError)
        assert ckpt.load(tmp_path / "c")["w"].sum() == 300_000
    assert weight.sum().item() == 0


@pytest.mark.parametrize("error", [2, 712])
def test_memory_that_can_not_be_locked(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one warning with the driver's error, unless it is locked already."""
    fake.refuse("cuMemHostRegister_v2", error)
    fake.delay(register=20_000)
    state = _state()
    with caplog.at_level(logging.WARNING), aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, fsync=False) as ckpt:
        ckpt.prewarm(state)
        for number in range(2):
            ckpt.save(state, tmp_path / str(number))
            assert_same({name: tensor.cpu() for name, tensor in state.items()}, ckpt.load(tmp_path / str(number)))
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (error != 712)
    assert all("the driver's error 2" in text for text in warned)


FREED_BEFORE = {
    "packed": (torch, "cat", {}),
    "made dense": (cuda, "copy_strided", {}),
    "sampled": (sampling, "_rows", {"validate": "hash"}),
}
"""Functions that launch kernels with tensors of the program's, which have been looked at just before."""


@pytest.mark.parametrize("where", FREED_BEFORE)
def test_memory_is_freed_just_before_a_kernel_reads_it(where: str, tmp_path: Path, monkeypatch) -> None:
    """By the program, which has no fence: the kernel has an address all the same, so the context lives."""
    owner, name, options = FREED_BEFORE[where]
    launching, state = getattr(owner, name), _state()
    memory = torch.arange(20_000, device="cuda")
    state |= {"packed": memory[:10_000], "made dense": memory.view(100, 200)[:, ::2]}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    with aiockpt.SyncCheckpointer(chunk_bytes=8 * CHUNK, fsync=False, on_failure="warn", **options) as ckpt:
        ckpt.save(state, tmp_path / "before")

        def freeing(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():  # where the samples are taken
                memory.untyped_storage().resize_(0)
            return launching(*args)

        monkeypatch.setattr(owner, name, freeing)
        error = ckpt.submit(state, tmp_path / "c").written.exception(WAIT_S)
    assert not memory.untyped_storage().nbytes()
    if where == "sampled" and error is None:  # all was copied before
        assert_same(expected, aiockpt.load(tmp_path / "c"))
    else:
        assert isinstance(error, (aiockpt.TornSnapshotError, aiockpt.StageError)), error
        assert "packed" in str(error)
