"""Several waiters of one save, several callers of its `cancel()`, and several saves of which some are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

import aiockpt
from tests.cancellation.endings import assert_gone, assert_written
from tests.cancellation.moments import MOMENTS, Moment, hold, options_of, state_of
from tests.cancellation.stops import WAIT_S, Stop, Writer, stop_before
from tests.states import assert_same


@pytest.mark.asyncio
@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_all_waiters_are_notified(is_cancelled: bool, tmp_path: Path) -> None:
    """Waiters in loops of both kinds and in threads without a loop, and followers of the progress."""

    async def waits(save: aiockpt.SaveHandle) -> str:
        try:
            return (await save).path
        except aiockpt.SaveCancelledError:
            return "cancelled"

    async def follows(save: aiockpt.SaveHandle) -> str:
        *_, last = [event.phase async for event in save.progress()]
        return save.path if last == "committed" else "cancelled"

    async def in_a_loop(save: aiockpt.SaveHandle) -> list[str]:
        tasks = [asyncio.ensure_future(wait(save)) for wait in (waits, waits, follows)]
        await asyncio.sleep(0)
        ready.wait(WAIT_S)
        return await asyncio.gather(*tasks)

    def in_a_thread(save: aiockpt.SaveHandle, factory: Callable[[], Any] | None) -> list[str]:
        if factory is not None:
            with asyncio.Runner(loop_factory=factory) as runner:
                return runner.run(in_a_loop(save))
        ready.wait(WAIT_S)
        error = save.written.exception(WAIT_S)
        return ["cancelled" if isinstance(error, aiockpt.SaveCancelledError) else save.path]

    ready = threading.Barrier(5)
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS["writing"], "thread")) as ckpt:
        held = await hold(ckpt.save, "writing", tmp_path / "runs")
        kinds = (asyncio.new_event_loop, uvloop.new_event_loop, None, None)
        with ThreadPoolExecutor(4) as threads:
            outcomes = [threads.submit(in_a_thread, held.save, kind) for kind in kinds]
            await asyncio.to_thread(ready.wait, WAIT_S)
            if is_cancelled:
                assert await held.save.cancel()
            held.stop.open()
            ends = [end for each in outcomes for end in await asyncio.wrap_future(each)]
        assert ends == ["cancelled" if is_cancelled else str(held.path)] * 8
        await (assert_gone(ckpt, held, "writing") if is_cancelled else assert_written(ckpt, held))


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", ["captured", "staging", "inside a write", "committing"])
async def test_all_callers_of_cancel_get_the_same_answer(moment: str, tmp_path: Path) -> None:
    """From several threads at once, and again when the save has ended."""
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        with ThreadPoolExecutor(4) as threads:
            asked = list(threads.map(lambda _: held.save.cancel(), range(8)))
        held.stop.open()
        answers = [await each for each in asked] + [await held.save.cancel()]
        assert answers == [not MOMENTS[moment].published] * 9
        await (assert_written(ckpt, held) if MOMENTS[moment].published else assert_gone(ckpt, held, moment))


async def _cancel_some(folder: Path, cancelled: set[int], writer: Writer = "thread") -> None:
    """Cancel some of four saves: one is being written; the others are copied meanwhile, or wait for memory."""
    stay = [number for number in range(4) if number not in cancelled]
    first = min(stay, default=0)
    stops = {number: stop_before("finish", writer, folder) for number in {0, first}}
    published: list[str] = []
    async with aiockpt.AsyncCheckpointer(**options_of(Moment(chunks=9), writer)) as ckpt:
        saves = [
            ckpt.save(
                state_of(number),
                folder / "runs" / str(number),
                storage=stops[number].storage if number in stops else None,
                post_commit=lambda path: published.append(Path(path).name),
            )
            for number in range(4)
        ]
        try:
            await _cancel(saves, cancelled, stops[0], folder)
            assert published == []  # though the saves behind the first remaining one could go on
        finally:
            stops[first].open()
        for number in stay:
            assert_same(state_of(number), await ckpt.load((await saves[number]).path))
        for number in cancelled:
            with pytest.raises(aiockpt.SaveCancelledError, match=f"/{number} was cancelled"):
                await saves[number]
    assert published == [str(number) for number in stay]
    assert {entry.name for entry in (folder / "runs").iterdir()} == set(published)


async def _cancel(saves: list[aiockpt.SaveHandle], cancelled: set[int], stop: Stop, folder: Path) -> None:
    """Cancel some saves, then allow the others the time of a whole save."""
    await stop.reached()
    asked = [saves[number].cancel() for number in cancelled]
    assert [await each for each in asked] == [True] * len(cancelled)
    async with aiockpt.AsyncCheckpointer() as other:
        await other.save(state_of(9), folder / "other")


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "cancelled",
    [
        {0},
        {3},
        {2, 3},
        {0, 1, 2, 3},
        {1},
        {0, 2},
        {1, 2},
    ],
    ids=str,
)
async def test_the_remaining_saves_are_written_in_order(cancelled: set[int], tmp_path: Path) -> None:
    await _cancel_some(tmp_path, cancelled)


def test_the_remaining_saves_of_a_writer_process_are_written_in_order(tmp_path: Path) -> None:
    asyncio.run(_cancel_some(tmp_path, {1, 2}, "process"))


@pytest.mark.asyncio
async def test_a_cancelled_save_raises_nothing_later(tmp_path: Path) -> None:
    """Neither the next save nor closing raises, though the cancelled save was never awaited."""
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS["staging"], "thread")) as ckpt:
        held = await hold(ckpt.save, "staging", tmp_path / "runs")
        held.save.cancel()
        await ckpt.save(state_of(2), tmp_path / "runs" / "d")
        last = await hold(ckpt.save, "staging", tmp_path / "runs", seed=3)
        last.save.cancel()
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"d"}
