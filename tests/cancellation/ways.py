"""Ways to make a waiter go away; each returns when the waiter is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

Wait = Callable[[], Coroutine[Any, Any, object]]
Way = Callable[[Wait], Awaitable[object]]


class SiblingError(Exception):
    """Failure of a sibling task of the waiter."""


async def _started(wait: Wait) -> asyncio.Task[object]:
    task = asyncio.get_running_loop().create_task(wait())
    await asyncio.sleep(0)
    assert not task.done(), "there is nothing to wait for"
    return task


async def _fails() -> None:
    await asyncio.sleep(0)
    raise SiblingError


async def task_cancelled(wait: Wait) -> None:
    task = await _started(wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_again_and_again(wait: Wait) -> None:
    task = await _started(wait)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def timed_out(wait: Wait) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await wait()


async def waited_for(wait: Wait) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait(), 1e-6)


async def sibling_failed(wait: Wait) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(wait())
            group.create_task(_fails())
    assert [type(error) for error in caught.value.exceptions] == [SiblingError]
    assert task.cancelled()


async def sibling_failed_in_anyio(wait: Wait) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(_fails)
    assert [type(error) for error in caught.value.exceptions] == [SiblingError]


async def moved_on(wait: Wait) -> None:
    with anyio.move_on_after(0) as scope:
        await wait()
    assert scope.cancelled_caught


async def failed_after(wait: Wait) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(0):
        await wait()


async def scope_cancelled(wait: Wait) -> None:
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        await wait()
    assert scope.cancelled_caught


async def run_ended(wait: Wait) -> None:
    """End `asyncio.run` in another thread, with a waiter in its loop."""
    factory = type(asyncio.get_running_loop())

    def target() -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_started(wait))

    await asyncio.to_thread(target)


async def loop_closed(wait: Wait) -> object:
    """Close a loop in another thread, with a waiter in it that is never cancelled; return the waiter."""
    factory = type(asyncio.get_running_loop())

    def target() -> object:
        loop = factory()
        loop.set_exception_handler(lambda *_: None)  # it would report the destroyed pending task
        task = loop.run_until_complete(_started(wait))
        loop.close()
        return task

    return await asyncio.to_thread(target)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        task_cancelled,
        cancelled_again_and_again,
        timed_out,
        waited_for,
        sibling_failed,
        sibling_failed_in_anyio,
        moved_on,
        failed_after,
        scope_cancelled,
        run_ended,
        loop_closed,
    )
}
