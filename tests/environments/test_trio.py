"""Trio programs: synchronous calls work in threads; calls that only asyncio can await raise an error that says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

import aiockpt

trio = pytest.importorskip("trio")

STATE = {"x": torch.arange(5.0), "step": 3}
ONLY_ASYNCIO = r"can be awaited in asyncio only.*trio\.to_thread\.run_sync"


def test_synchronous_calls_work_in_threads(tmp_path: Path) -> None:
    async def main() -> None:
        ckpt = aiockpt.SyncCheckpointer()
        await trio.to_thread.run_sync(ckpt.save, STATE, tmp_path / "a")
        loaded = await trio.to_thread.run_sync(ckpt.load, tmp_path / "a")
        assert torch.equal(loaded["x"], STATE["x"])
        await trio.to_thread.run_sync(ckpt.close)

    trio.run(main)


def test_a_save_submitted_in_a_task_can_be_waited_for_in_a_thread(tmp_path: Path) -> None:
    async def main() -> None:
        ckpt = aiockpt.AsyncCheckpointer()
        save = ckpt.save(STATE, tmp_path / "a")
        for awaitable in (save, save.staged, save.written):
            with pytest.raises(aiockpt.AiockptError, match=ONLY_ASYNCIO):
                await awaitable
        with pytest.raises(aiockpt.AiockptError, match=ONLY_ASYNCIO):
            async for _ in save.progress():
                pass
        assert (await trio.to_thread.run_sync(save.written.result)).tensors == 1
        with pytest.raises(aiockpt.AiockptError, match=ONLY_ASYNCIO):
            await save.cancel()  # whether it is done or not
        await trio.to_thread.run_sync(ckpt._engine.close().result)
        ckpt._engine.join()

    trio.run(main)


@pytest.mark.parametrize(
    "call",
    [
        lambda ckpt, path: ckpt.load(path),
        lambda ckpt, path: ckpt.verify(path),
        lambda ckpt, path: ckpt.delete(path),
        lambda ckpt, path: ckpt.clean(path),
        lambda ckpt, path: ckpt.prewarm(STATE),
        lambda ckpt, path: ckpt.ready(),
        lambda ckpt, path: ckpt.aclose(),
        lambda ckpt, path: ckpt.__aenter__(),
        lambda ckpt, path: ckpt.open(path),
        lambda ckpt, path: aiockpt.open(path),
    ],
)
def test_calls_to_be_awaited_raise_and_start_nothing(
    call: Callable[[aiockpt.AsyncCheckpointer, Path], Awaitable[object]], tmp_path: Path
) -> None:
    ckpt = aiockpt.AsyncCheckpointer()

    async def main() -> None:
        with pytest.raises(aiockpt.AiockptError, match=ONLY_ASYNCIO):
            await call(ckpt, tmp_path)

    trio.run(main)
    assert ckpt._engine.loop.thread is None


def test_readers_opened_in_asyncio_raise_in_trio(tmp_path: Path) -> None:
    import asyncio

    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, tmp_path / "a")

    async def opened() -> aiockpt.CheckpointReader:
        return await aiockpt.open(tmp_path / "a")

    reader = asyncio.run(opened())

    async def main() -> None:
        for read in (reader.read("x"), reader.read_many(), anext(reader.stream())):
            with pytest.raises(aiockpt.AiockptError, match=ONLY_ASYNCIO):
                await read

    trio.run(main)
    asyncio.run(reader.aclose())


def test_awaiting_a_completion_outside_any_loop_raises(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(STATE, tmp_path / "a")
        with pytest.raises(aiockpt.AiockptError, match=r"`written` of .*can be awaited in asyncio only"):
            save.__await__().send(None)
        save.written.result(60)
