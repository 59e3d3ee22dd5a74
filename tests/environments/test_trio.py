"""In a trio program: plain calls work in its threads; what asyncio alone could await says so at the call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

import aiockpt

trio = pytest.importorskip("trio")

STATE = {"x": torch.arange(5.0), "step": 3}
ONLY_ASYNCIO = r"can be awaited in asyncio only.*trio\.to_thread\.run_sync"


def test_plain_calls_work_in_threads(tmp_path: Path) -> None:
    async def main() -> None:
        ckpt = aiockpt.SyncCheckpointer()
        await trio.to_thread.run_sync(ckpt.save, STATE, tmp_path / "a")
        loaded = await trio.to_thread.run_sync(ckpt.load, tmp_path / "a")
        assert torch.equal(loaded["x"], STATE["x"])
        await trio.to_thread.run_sync(ckpt.close)

    trio.run(main)


def test_a_save_that_is_called_for_in_a_task_is_waited_for_in_a_thread(tmp_path: Path) -> None:
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
            await save.cancel()  # whether the moment has come or not
        await ckpt.window()
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
def test_what_is_awaited_says_so_and_nothing_has_begun(
    call: Callable[[aiockpt.AsyncCheckpointer, Path], Awaitable[object]], tmp_path: Path
) -> None:
    ckpt = aiockpt.AsyncCheckpointer()

    async def main() -> None:
        with pytest.raises(aiockpt.AiockptError, match=ONLY_ASYNCIO):
            await call(ckpt, tmp_path)

    trio.run(main)
    assert ckpt._engine.loop.thread is None


def test_so_do_readers_that_asyncio_has_opened(tmp_path: Path) -> None:
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


def test_a_completion_outside_of_any_loop_says_so(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(STATE, tmp_path / "a")
        with pytest.raises(aiockpt.AiockptError, match=r"`written` of .*can be awaited in asyncio only"):
            save.__await__().send(None)
        save.written.result(60)
