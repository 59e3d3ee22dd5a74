"""The threads that blocking functions run in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref

import anyio
import pytest

from aiockpt.core.threads import DaemonThreads, Workers, outlast


def test_functions_begin_in_order_in_a_fixed_number_of_threads() -> None:
    threads = DaemonThreads(2, "aiockpt-test")
    both = threading.Barrier(2)
    seen: list[int] = []

    def note(number: int) -> int:
        if number < 2:
            both.wait(30)
        seen.append(number)
        return threading.get_ident()

    used = {future.result(30) for future in [threads.submit(note, number) for number in range(8)]}
    assert len(used) == 2
    assert sorted(seen) == list(range(8))
    assert threads.end(30)
    with pytest.raises(RuntimeError, match="aiockpt-test has been shut down"):
        threads.submit(note, 9)


def test_errors_are_delivered_and_idle_threads_are_reused() -> None:
    threads = DaemonThreads(4, "aiockpt-test")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(30)
    names = set()
    for _ in range(20):
        names.add(threads.submit(lambda: threading.current_thread().name).result(30))
    assert len(names) <= 2  # a second one starts if the first is not marked idle yet
    assert threads.end(30)


def test_spare_threads_run_the_functions_behind_hanging_ones() -> None:
    threads = DaemonThreads(1, "aiockpt-test")
    works = threading.Event()
    stuck = threads.submit(works.wait, 60)
    waiting = threads.submit(lambda: "done")
    threads.spare(1)
    assert waiting.result(30) == "done"
    assert not stuck.done()
    works.set()
    assert stuck.result(30)
    threads.spare(-1)
    assert [threads.submit(lambda: 7).result(30) for _ in range(3)] == [7, 7, 7]
    assert sum(thread.is_alive() for thread in threads._threads) == 1
    assert threads.end(30)


def test_spare_threads_start_after_any_previous_work() -> None:
    threads = DaemonThreads(2, "aiockpt-test")
    for future in [threads.submit(lambda: None) for _ in range(20)]:
        future.result(30)
    works = threading.Event()
    stuck = [threads.submit(works.wait, 60) for _ in range(2)]
    threads.spare(2)
    assert threads.submit(lambda: "done").result(30) == "done"
    works.set()
    assert all(future.result(30) for future in stuck)
    assert threads.end(30)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_is_not_lost_when_a_further_thread_starts(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = DaemonThreads(2, "aiockpt-test")
    works = threading.Event()
    first = threads.submit(works.wait, 60)

    def fail(thread: threading.Thread) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                threads.submit(pytest.fail, "the caller was told that it was not submitted")
        else:
            second = threads.submit(lambda: "by the first thread")
    works.set()
    assert first.result(30)
    if error is RuntimeError:
        assert second.result(30) == "by the first thread"
    assert threads.end(30)
    assert threads.unfinished == 0


def test_an_owner_that_goes_with_its_last_task_ends_the_threads() -> None:
    """Its finaliser then runs in the thread that it is to end."""

    class Owner:
        def __init__(self) -> None:
            self.threads = DaemonThreads(1, "aiockpt-test")
            self.ended = weakref.finalize(self, self.threads.end, 0.0)

        def work(self) -> None:
            pass

    gate = threading.Event()
    owner = Owner()
    threads, ended = owner.threads, owner.ended
    threads.submit(gate.wait)
    threads.submit(owner.work)
    del owner
    gate.set()
    assert threads.end(10)
    assert not ended.alive


def test_functions_that_have_not_begun_are_cancelled_at_shutdown() -> None:
    threads = DaemonThreads(1, "aiockpt-test")
    begun, works = threading.Event(), threading.Event()
    running = threads.submit(lambda: begun.set() or works.wait(60))
    begun.wait(30)
    dropped = threads.submit(lambda: 1)
    threads.shutdown(wait=False, cancel_futures=True)
    assert dropped.cancelled()
    works.set()
    threads.shutdown(cancel_futures=True)
    assert running.result(0)
    assert not threads._threads[0].is_alive()


def test_a_hanging_thread_does_not_keep_the_process_alive() -> None:
    code = (
        "import threading\nfrom aiockpt.core.threads import Workers\n"
        "workers = Workers(2, 'stuck')\nbegun = threading.Event()\n"
        "workers.submit(lambda: begun.set() or threading.Event().wait())\nbegun.wait()\nprint('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


@pytest.mark.asyncio
async def test_an_exception_that_would_end_the_loop_becomes_an_error() -> None:
    workers = Workers(1, "aiockpt-test")
    with pytest.raises(RuntimeError, match="KeyboardInterrupt was raised in a worker thread"):
        await workers.run(_interrupted)
    workers.close()


def _interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.asyncio
async def test_a_wait_outlasts_cancellations_by_asyncio() -> None:
    """They are raised when what is waited for is over, with its error as their cause."""
    awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = asyncio.ensure_future(outlast(awaited))
    for _ in range(3):
        await asyncio.sleep(0)
        waiter.cancel("once more")
        await asyncio.sleep(0)
        assert (waiter.done(), awaited.done()) == (False, False)
    awaited.set_exception(ZeroDivisionError("at last"))
    with pytest.raises(asyncio.CancelledError, match="once more") as caught:
        await waiter
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.asyncio
async def test_a_wait_outlasts_the_cancellation_of_its_scope() -> None:
    """Which is raised at the next await: the result is not lost."""
    begun, go = asyncio.Event(), asyncio.Event()
    seen: list[object] = []

    async def work() -> str:
        begun.set()
        await go.wait()
        return "result"

    async def wait() -> None:
        seen.append(await outlast(work()))
        await asyncio.sleep(0)
        seen.append("not reached")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await begun.wait()
        tasks.cancel_scope.cancel()
        go.set()
    assert seen == ["result"]
