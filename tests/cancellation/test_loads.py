"""Cancelling the waiter of a load stops it; after that, nothing is read and no thread touches the target tensors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage, Source, WrapperStorage
from tests.cancellation.moments import DRAIN_S
from tests.cancellation.stops import WAIT_S
from tests.cancellation.ways import WAYS, loop_closed
from tests.states import assert_same

# Each tensor is large enough to be read by itself.
STATE = {f"w{i}": torch.arange(i * 1_000_003, i * 1_000_003 + (1 << 18) + 10, dtype=torch.int32) for i in range(8)}


class HeldReads(WrapperStorage):
    """Holds reading threads from the third read on."""

    def __init__(self) -> None:
        super().__init__(LocalStorage())
        self.reads = 0
        self.reached = threading.Event()
        self._go = threading.Event()
        self._lock = threading.Lock()

    async def open(self, path: str, **options: Any) -> Source:
        self.loop = asyncio.get_running_loop()  # of the engine
        return await super().open(path, **options)

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        with self._lock:
            self.reads += 1
            is_held = self.reads > 2
        if is_held:
            self.reached.set()
            assert self._go.wait(WAIT_S)

    def release(self) -> None:
        self._go.set()


def _empty() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, -1) for name, tensor in STATE.items()}


def _release_after_cancel(task: asyncio.Task[object], storage: HeldReads, steps: int = 10) -> None:
    """Release the threads a few steps of both loops after the task was cancelled, and not before."""
    if task.cancelling():
        steps -= 1
    if steps:
        asyncio.get_running_loop().call_soon(_release_after_cancel, task, storage, steps)
        return
    if task.done():  # makes the test fail
        task.get_loop().call_exception_handler({"message": "the load has ended while its threads were at work"})
    _release_in_engine(storage)


def _release_in_engine(storage: HeldReads, steps: int = 10) -> None:
    """Release the threads when the engine has had time to handle the cancellation."""
    storage.loop.call_soon_threadsafe(partial(_release_in_engine, storage, steps - 1) if steps else storage.release)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "way",
    ["task_cancelled", "cancelled_again_and_again", "timed_out", "waited_for", "sibling_failed", "moved_on"],
)
async def test_cancelling_the_waiter_of_a_load_stops_it_and_waits_for_its_threads(way: str, tmp_path: Path) -> None:
    storage, target = HeldReads(), _empty()
    messages: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: messages.append(context["message"]))
    async with aiockpt.AsyncCheckpointer(io_threads=1, drain_timeout=DRAIN_S) as ckpt:
        await ckpt.save(STATE, tmp_path / "c")
        loading = asyncio.ensure_future(ckpt.load(tmp_path / "c", target, storage=storage))
        await asyncio.to_thread(storage.reached.wait, WAIT_S)

        async def waits() -> None:
            await loading

        _release_after_cancel(loading, storage)
        await WAYS[way](waits)
        assert loading.cancelled()
        await _assert_stopped(ckpt, tmp_path / "c", storage, target)
    assert messages == []


async def _assert_stopped(
    ckpt: aiockpt.AsyncCheckpointer, path: Path, storage: HeldReads, target: dict[str, torch.Tensor]
) -> None:
    reads, then = storage.reads, {name: tensor.clone() for name, tensor in target.items()}
    assert any(bool((tensor == -1).all()) for tensor in then.values())  # not everything was loaded
    assert_same(STATE, await ckpt.load(path))
    assert_same(then, target)
    assert storage.reads == reads
    await ckpt.load(path, target, storage=storage)
    assert_same(STATE, target)


def test_a_load_stops_when_its_asyncio_run_ends(tmp_path: Path) -> None:
    storage, target = HeldReads(), _empty()

    async def main(ckpt: aiockpt.AsyncCheckpointer) -> None:
        loading = asyncio.ensure_future(ckpt.load(tmp_path / "c", target, storage=storage))
        await asyncio.to_thread(storage.reached.wait, WAIT_S)
        _release_after_cancel(loading, storage)

    async def after(ckpt: aiockpt.AsyncCheckpointer) -> None:
        await _assert_stopped(ckpt, tmp_path / "c", storage, target)
        await ckpt.aclose()

    ckpt = aiockpt.AsyncCheckpointer(io_threads=1, drain_timeout=DRAIN_S)
    ckpt.save(STATE, tmp_path / "c").written.result(WAIT_S)
    asyncio.run(main(ckpt))
    asyncio.run(after(ckpt))


@pytest.mark.asyncio
async def test_a_load_whose_loop_was_closed_is_finished_by_closing(tmp_path: Path) -> None:
    """A closed loop can't cancel the load: it fills the tensors, and closing waits for it."""
    storage, target = HeldReads(), _empty()
    async with aiockpt.AsyncCheckpointer(io_threads=1, drain_timeout=DRAIN_S) as ckpt:
        await ckpt.save(STATE, tmp_path / "c")

        async def loads() -> None:
            await ckpt.load(tmp_path / "c", target, storage=storage)

        kept = await loop_closed(loads)
        await asyncio.to_thread(storage.reached.wait, WAIT_S)
        storage.release()
    assert_same(STATE, target)
    del kept


class Takes:
    """Records the state it is given, then calls a function."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.given: list[dict[str, int]] = []
        self.then = then

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given.append(state)
        self.then()


def _cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.asyncio
async def test_a_cancellation_during_load_state_dict_comes_after_the_load(tmp_path: Path) -> None:
    """All objects get their states without a pause between them; the caller's next await raises the cancellation."""
    first, second, after = Takes(_cancel_this_task), Takes(), []

    async def load(ckpt: aiockpt.AsyncCheckpointer) -> None:
        target = {"a": first, "b": second, "step": 0}
        assert await ckpt.load(tmp_path / "c", target) is target
        assert target["step"] == 5
        after.append("loaded")
        await asyncio.sleep(0)
        after.append("not here")

    async with aiockpt.AsyncCheckpointer(drain_timeout=DRAIN_S) as ckpt:
        await ckpt.save({"a": {"n": 7}, "b": {"n": 8}, "step": 5}, tmp_path / "c")
        task = asyncio.ensure_future(load(ckpt))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (first.given, second.given, after) == ([{"n": 7}], [{"n": 8}], ["loaded"])
        await ckpt.load(tmp_path / "c", {"a": second})
    assert second.given[1:] == [{"n": 7}]


@pytest.mark.asyncio
@pytest.mark.parametrize("stop", [asyncio.CancelledError, KeyboardInterrupt])
async def test_an_object_that_stops_the_load(tmp_path: Path, stop: type[BaseException]) -> None:
    def stops() -> None:
        raise stop("enough")

    first, second = Takes(stops), Takes()
    async with aiockpt.AsyncCheckpointer(drain_timeout=DRAIN_S) as ckpt:
        await ckpt.save({"a": {"n": 7}, "b": {"n": 8}}, tmp_path / "c")
        with pytest.raises(stop, match="enough"):
            await ckpt.load(tmp_path / "c", {"a": first, "b": second})
        assert (first.given, second.given) == ([{"n": 7}], [])
        await ckpt.load(tmp_path / "c", {"b": second})
    assert second.given == [{"n": 8}]


@pytest.mark.asyncio
async def test_a_cancellation_before_load_state_dict_leaves_objects_unchanged(tmp_path: Path) -> None:
    storage, taker = HeldReads(), Takes()
    target = {"a": taker, **_empty()}
    async with aiockpt.AsyncCheckpointer(io_threads=1, drain_timeout=DRAIN_S) as ckpt:
        await ckpt.save({"a": {"n": 7}, **STATE}, tmp_path / "c")
        loading = asyncio.ensure_future(ckpt.load(tmp_path / "c", target, storage=storage))
        await asyncio.to_thread(storage.reached.wait, WAIT_S)
        loading.cancel()
        storage.release()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert taker.given == []
        await ckpt.load(tmp_path / "c", target)
    assert taker.given == [{"n": 7}]
