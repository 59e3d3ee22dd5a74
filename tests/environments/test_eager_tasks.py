"""Loops whose tasks begin at once, within `create_task`, and task groups of asyncio: since Python 3.12."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.states import assert_same, large_state

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has eager tasks")


def eagerly(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function in a loop with eager tasks."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_task_factory(asyncio.eager_task_factory)
        return runner.run(main())


def test_saves_and_loads(tmp_path: Path) -> None:
    state = large_state()

    async def main() -> None:
        async with aiockpt.AsyncCheckpointer() as ckpt, asyncio.TaskGroup() as group:
            save = ckpt.save(state, tmp_path / "c")
            staged = group.create_task(_of(save.staged))
            written = group.create_task(_of(save.written))
            await staged
            assert (await written).path == str(tmp_path / "c")
            loads = [group.create_task(ckpt.load(tmp_path / "c")) for _ in range(3)]
            for load in loads:
                assert_same(state, await load)

    eagerly(main)


async def _of(awaitable: Any) -> Any:
    return await awaitable


def test_what_is_done_already_is_had_without_a_turn_of_the_loop(tmp_path: Path) -> None:
    async def main() -> None:
        async with aiockpt.AsyncCheckpointer() as ckpt:
            save = ckpt.save({"a": torch.ones(1)}, tmp_path / "c")
            await save
            assert asyncio.create_task(_of(save.written)).done()

    eagerly(main)


def test_a_failure_ends_a_group_and_not_the_checkpointer(tmp_path: Path) -> None:
    async def main() -> None:
        storage = FaultyStorage(LocalStorage(), "commit", OSError(28, "No space left on device"))
        async with aiockpt.AsyncCheckpointer() as ckpt:
            with pytest.raises(ExceptionGroup) as caught:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_of(ckpt.save(large_state(), tmp_path / "c", storage=storage)))
                    group.create_task(_of(asyncio.Event().wait()))
            assert [type(each) for each in caught.value.exceptions] == [aiockpt.CommitError]
            await ckpt.save(large_state(), tmp_path / "c", storage=storage)

    eagerly(main)


def test_a_cancelled_waiter_does_not_cancel_the_save(tmp_path: Path) -> None:
    async def main() -> None:
        storage = GatedStorage(LocalStorage(), ["commit"])
        async with aiockpt.AsyncCheckpointer() as ckpt:
            save = ckpt.save(large_state(), tmp_path / "c", storage=storage)
            waiter = asyncio.create_task(_of(save.written))
            await storage.reached["commit"]
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await save
            storage.open("commit")
            await save
            assert_same(large_state(), await ckpt.load(tmp_path / "c"))

    eagerly(main)


def test_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with aiockpt.CheckpointManager(tmp_path / "run", keep=aiockpt.KeepLatest(1)) as run:
            for step in range(3):
                save = await asyncio.create_task(run.save(step, {"a": torch.full((3,), float(step))}))
                await save.staged
            await save
            target = {"a": torch.zeros(3)}
            found = await asyncio.create_task(run.restore(target))
            assert found is not None
            assert (found.step, target["a"][0].item()) == (2, 2.0)

    eagerly(main)


def test_readers_in_a_group(tmp_path: Path) -> None:
    aiockpt.save(state := {name: torch.randn(100) for name in "abcdefgh"}, tmp_path / "c")

    async def main() -> dict[str, torch.Tensor]:
        async with aiockpt.AsyncCheckpointer() as ckpt, ckpt.open(tmp_path / "c") as reader:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(reader.read(name)) for name in reader}
            return {name: task.result() for name, task in tasks.items()}

    assert_same(state, eagerly(main))
