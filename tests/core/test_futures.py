"""`staged` and `written` are futures of `concurrent.futures`, for every function that takes such futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.core.futures import Completion
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage

STATE = {"w": torch.arange(50_000.0), "step": 3}
WAIT_S = 60


@pytest.fixture(autouse=True)
def callbacks_end() -> Iterator[None]:
    """Wait for the threads that run callbacks."""
    yield
    for thread in threading.enumerate():
        if thread.name == "aiockpt-callbacks":
            thread.join(WAIT_S)


def _names(written: Iterable[concurrent.futures.Future[aiockpt.SaveResult]]) -> list[str]:
    return [Path(future.result().path).name for future in written]


# --- functions that take futures ------------------------------------------------------------------------


def test_a_completion_is_a_running_future_until_it_is_done(tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(STATE, tmp_path / "a", storage=gate)
        staged, written = save
        gate.reached["commit"].result(WAIT_S)
        staged.result(WAIT_S)
        for future in (staged, written):
            assert isinstance(future, concurrent.futures.Future)
            assert (future.running(), future.cancel(), future.cancelled()) == (not future.done(), False, False)
        assert (staged.done(), written.done()) == (True, False)
        with pytest.raises(TimeoutError, match=r"`written` of .*/a did not complete within 0 s; the work goes on"):
            written.exception(0)
        gate.open("commit")
        assert written.result(WAIT_S).path == str(tmp_path / "a")
        assert (written.exception(), written.running(), written.cancel()) == (None, False, False)


def test_threads_wait_for_some_or_all_futures(tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer(max_in_flight=3) as ckpt:
        saves = [ckpt.submit(STATE, tmp_path / name, storage=gate) for name in "abc"]
        gate.reached["commit"].result(WAIT_S)
        done, left = concurrent.futures.wait(saves[0], WAIT_S, concurrent.futures.FIRST_COMPLETED)
        assert (done, left) == ({saves[0].staged}, {saves[0].written})
        written = [save.written for save in saves]
        assert concurrent.futures.wait(written, 0) == (set(), set(written))
        assert [future._waiters for future in written] == [[], [], []]
        arriving = concurrent.futures.as_completed([*written, *written], WAIT_S)
        gate.open("commit")
        assert _names(arriving) == ["a", "b", "c"]
        assert concurrent.futures.wait(written) == (set(written), set())
        assert _names(written) == ["a", "b", "c"]


def _waits(staged: Completion[None]) -> None:
    assert not concurrent.futures.wait([staged], WAIT_S / 2).not_done


def _goes_through(staged: Completion[None]) -> None:
    assert list(concurrent.futures.as_completed([staged], WAIT_S / 2)) == [staged]


def _wraps(staged: Completion[None]) -> None:
    async def wrapped() -> None:
        await asyncio.wait_for(asyncio.wrap_future(staged), WAIT_S / 2)

    asyncio.run(wrapped())


@pytest.mark.parametrize("wait", [_waits, _goes_through, _wraps])
def test_standard_functions_wait(wait: Callable[[Any], None], tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        wait(ckpt.submit(STATE, tmp_path / "a").staged)


@pytest.mark.asyncio
async def test_tasks_wait_with_all_functions_of_asyncio(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    gate = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer(max_in_flight=2) as ckpt:
        a, b = (ckpt.save(STATE, tmp_path / name, storage=gate).written for name in "ab")
        tasks = [asyncio.ensure_future(a), asyncio.wrap_future(b)]
        assert await asyncio.wait(tasks, timeout=0) == (set(), set(tasks))
        together = asyncio.gather(*tasks, a, asyncio.wrap_future(a), loop.run_in_executor(None, b.result, WAIT_S))
        await gate.reached["commit"]
        gate.open("commit")
        assert [Path(result.path).name for result in await together] == ["a", "b", "a", "a", "b"]
        assert (await asyncio.wrap_future(b)) is (await b)


@pytest.mark.asyncio
async def test_a_cancelled_waiter_leaves_nothing_and_the_save_goes_on(tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        written = ckpt.save(STATE, tmp_path / "a", storage=gate).written
        await gate.reached["commit"]
        for _ in range(100):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(written, 1e-6)
            with pytest.raises(TimeoutError):
                written.result(0)
        assert (written._loop_waiters, written._waiters, written.expected) == ([], [], False)
        wrapped = asyncio.wrap_future(written)
        assert wrapped.cancel()
        await asyncio.sleep(0)
        assert not written.cancelled()
        gate.open("commit")
        assert (await written).path == str(tmp_path / "a")
        assert wrapped.cancelled()


# --- callbacks ------------------------------------------------------------------------------------------


def test_a_signal_that_another_thread_takes_ends_the_wait() -> None:
    """The kernel does not wake the main thread for such a signal, nor for one right before the wait begins."""

    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        noticed.set()
        raise Interrupt

    def take() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        in_time.append(noticed.wait(30))
        future._settle(None)

    noticed, in_time = threading.Event(), []
    future = Completion[None]("the end")
    was = signal.signal(signal.SIGUSR1, interrupt)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    taker = threading.Timer(0.2, take)  # when this thread waits
    try:
        taker.start()
        with pytest.raises(Interrupt):
            future.result()
    finally:
        taker.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, was)
    assert in_time == [True]


def test_callbacks_are_called_in_order_and_their_errors_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    future = Completion[str]("the future")
    seen: list[tuple[int, Any, int]] = []
    last = threading.Event()

    def note(number: int) -> Callable[[Any], None]:
        return lambda done: seen.append((number, done, threading.get_ident()))

    def fails(error: BaseException) -> Callable[[Any], None]:
        def fail(_: object) -> None:
            raise error

        return fail

    for number, error in enumerate([ZeroDivisionError("first"), SystemExit("second"), KeyboardInterrupt("third")]):
        future.add_done_callback(note(number))
        future.add_done_callback(fails(error))
    future.add_done_callback(lambda _: last.set())
    assert future._settle("value")
    assert not future._settle("another")
    assert last.wait(WAIT_S)
    assert [(number, done) for number, done, _ in seen] == [(0, future), (1, future), (2, future)]
    assert {thread for _, _, thread in seen} & {threading.get_ident()} == set()
    future.add_done_callback(note(3))
    assert seen[3] == (3, future, threading.get_ident())
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["first", "second", "third"]
    assert future.result() == "value"


def test_blocking_callbacks_delay_nothing(tmp_path: Path) -> None:
    """Not even callbacks of a save that is superseded while a call of the checkpointer holds its lock."""
    gate = GatedStorage(LocalStorage(), ["commit"])
    called, go = threading.Semaphore(0), threading.Event()

    def block(_: object) -> None:
        called.release()
        assert go.wait(WAIT_S)

    with aiockpt.SyncCheckpointer(on_busy="supersede", staging_bytes=4096, chunk_bytes=4096) as ckpt:
        held = ckpt.submit(STATE, tmp_path / "a", storage=gate)
        superseded = ckpt.submit(STATE, tmp_path / "b")
        for future in (held.staged, held.written, superseded.staged, superseded.written):
            future.add_done_callback(block)
        last = ckpt.submit(STATE, tmp_path / "c")
        gate.open("commit")
        assert isinstance(superseded.written.exception(WAIT_S), aiockpt.SaveSkippedError)
        assert _names([last.written]) == ["c"]
        assert ckpt.statistics().skipped == 1
    for _ in range(4):
        assert called.acquire(timeout=WAIT_S)
    go.set()


def test_a_callback_may_use_the_checkpointer(tmp_path: Path) -> None:
    again: concurrent.futures.Future[aiockpt.SaveResult] = concurrent.futures.Future()

    def save_again(written: concurrent.futures.Future[aiockpt.SaveResult]) -> None:
        found = ckpt.load(written.result().path)
        again.set_result(ckpt.save(found, f"{written.result().path}-again"))
        ckpt.close()

    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.submit(STATE, tmp_path / "a").written.add_done_callback(save_again)
        assert again.result(WAIT_S).path == str(tmp_path / "a-again")


def test_a_callback_is_freed_after_its_call() -> None:
    class Held:
        pass

    future, called = Completion[int]("the future"), threading.Event()

    def add() -> weakref.ref[Held]:
        held = Held()
        future.add_done_callback(lambda _, held=held: called.set())
        return weakref.ref(held)

    held = add()
    future._settle(1)
    assert called.wait(WAIT_S)
    for thread in threading.enumerate():
        if thread.name == "aiockpt-callbacks":
            thread.join(WAIT_S)
    assert held() is None


def test_a_future_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        future = Completion[bytes]("the future")
        concurrent.futures.wait([future], 0)
        future._settle(b"much")
        gone = weakref.ref(future)
        del future
        assert gone() is None
    finally:
        gc.enable()


def test_callbacks_are_called_even_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    future = Completion[int]("the future")
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    monkeypatch.setattr(threading.Thread, "start", start)
    future._settle(1)
    assert seen == [future]


@pytest.mark.slow
def test_a_process_ends_only_after_its_callbacks(python: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, threading, torch, aiockpt\n"
        "def tell(written):\n"
        "    threading.main_thread().join()\n"
        "    print(written.result().path)\n"
        "ckpt = aiockpt.SyncCheckpointer()\n"
        "ckpt.submit({'x': torch.ones(50_000)}, sys.argv[1] + '/a').written.add_done_callback(tell)\n"
    )
    done = subprocess.run([*python, "-c", code, tmp_path], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/a\n", "")


# --- failures that count as delivered -------------------------------------------------------------------


def _failed(ckpt: aiockpt.SyncCheckpointer, path: Path) -> aiockpt.SaveHandle:
    """Submit a save that fails when its gate, the attribute ``_gate``, is opened."""
    gate = GatedStorage(FaultyStorage(LocalStorage(), "write", OSError(5, "Input/output error")), ["begin"])
    save = ckpt.submit(STATE, path, storage=gate)
    gate.reached["begin"].result(WAIT_S)
    save._gate = gate  # type: ignore[attr-defined]
    return save


def _fail(save: aiockpt.SaveHandle) -> None:
    save._gate.open("begin")  # type: ignore[attr-defined]
    save.written.ended(WAIT_S)


def _does_wait(save: aiockpt.SaveHandle) -> None:
    _fail(save)
    concurrent.futures.wait(save)
    list(concurrent.futures.as_completed(save))


def _adds_a_callback(save: aiockpt.SaveHandle) -> None:
    called = threading.Semaphore(0)
    save.written.add_done_callback(lambda _: called.release())
    _fail(save)
    save.written.add_done_callback(lambda _: called.release())
    assert called.acquire(timeout=WAIT_S)
    assert called.acquire(timeout=WAIT_S)


def _cancels_what_is_wrapped(save: aiockpt.SaveHandle) -> None:
    async def use() -> None:
        wrapped = asyncio.wrap_future(save.written)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wrapped, 1e-6)
        await asyncio.to_thread(_fail, save)

    asyncio.run(use())


@pytest.mark.parametrize("use", [_does_wait, _adds_a_callback, _cancels_what_is_wrapped])
def test_an_unobserved_failure_is_raised_by_the_next_save(
    use: Callable[[aiockpt.SaveHandle], None], tmp_path: Path
) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = _failed(ckpt, tmp_path / "a")
        use(save)
        assert not save.observed
        with pytest.raises(aiockpt.WriteError, match="Input/output error"):
            ckpt.save(STATE, tmp_path / "b")


def _asks_for_the_result(save: aiockpt.SaveHandle) -> None:
    _fail(save)
    with pytest.raises(aiockpt.WriteError):
        save.written.result(0)


def _asks_for_the_exception(save: aiockpt.SaveHandle) -> None:
    _fail(save)
    assert isinstance(save.written.exception(0), aiockpt.WriteError)


def _asks_in_a_callback(save: aiockpt.SaveHandle) -> None:
    given: concurrent.futures.Future[BaseException | None] = concurrent.futures.Future()
    save.written.add_done_callback(lambda written: given.set_result(written.exception()))
    _fail(save)
    assert isinstance(given.result(WAIT_S), aiockpt.WriteError)


def _awaits_what_is_wrapped(save: aiockpt.SaveHandle) -> None:
    async def use() -> None:
        wrapped = asyncio.wrap_future(save.written)
        await asyncio.to_thread(_fail, save)
        with pytest.raises(aiockpt.WriteError):
            await wrapped

    asyncio.run(use())


def _takes_a_snapshot(save: aiockpt.SaveHandle) -> None:
    """Call what asyncio.wrap_future calls since Python 3.14."""
    assert save.written._get_snapshot() == (False, False, None, None)
    _fail(save)
    *found, error = save.written._get_snapshot()
    assert found == [True, False, None]
    assert isinstance(error, aiockpt.WriteError)


@pytest.mark.parametrize(
    "use",
    [
        _asks_for_the_result,
        _asks_for_the_exception,
        _asks_in_a_callback,
        _awaits_what_is_wrapped,
        _takes_a_snapshot,
    ],
)
def test_a_delivered_failure_is_not_raised_again(use: Callable[[aiockpt.SaveHandle], None], tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = _failed(ckpt, tmp_path / "a")
        use(save)
        assert save.observed
        ckpt.save(STATE, tmp_path / "b")
