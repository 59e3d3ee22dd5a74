"""Several who wait for one save, several who call it off, and several saves of which some are called off."""

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
@pytest.mark.parametrize("called_off", [True, False])
async def test_all_who_wait_are_told(called_off: bool, tmp_path: Path) -> None:
    """In loops of both kinds, in threads without one, and who follows the progress."""

    async def waits(save: aiockpt.SaveHandle) -> str:
        try:
            return (await save).path
        except aiockpt.SaveCancelledError:
            return "called off"

    async def follows(save: aiockpt.SaveHandle) -> str:
        *_, last = [event.phase async for event in save.progress()]
        return save.path if last == "committed" else "called off"

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
        return ["called off" if isinstance(error, aiockpt.SaveCancelledError) else save.path]

    ready = threading.Barrier(5)
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS["writing"], "thread")) as ckpt:
        held = await hold(ckpt.save, "writing", tmp_path / "runs")
        kinds = (asyncio.new_event_loop, uvloop.new_event_loop, None, None)
        with ThreadPoolExecutor(4) as threads:
            told = [threads.submit(in_a_thread, held.save, kind) for kind in kinds]
            await asyncio.to_thread(ready.wait, WAIT_S)
            if called_off:
                assert await held.save.cancel()
            held.stop.open()
            ends = [end for each in told for end in await asyncio.wrap_future(each)]
        assert ends == ["called off" if called_off else str(held.path)] * 8
        await (assert_gone(ckpt, held, "writing") if called_off else assert_written(ckpt, held))


@pytest.mark.asyncio
@pytest.mark.parametrize("moment", ["captured", "staging", "inside a write", "committing"])
async def test_all_who_call_it_off_are_given_the_same_answer(moment: str, tmp_path: Path) -> None:
    """Threads at once, and again when it is over."""
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS[moment], "thread")) as ckpt:
        held = await hold(ckpt.save, moment, tmp_path / "runs")
        with ThreadPoolExecutor(4) as threads:
            asked = list(threads.map(lambda _: held.save.cancel(), range(8)))
        held.stop.open()
        answers = [await each for each in asked] + [await held.save.cancel()]
        assert answers == [not MOMENTS[moment].published] * 9
        await (assert_written(ckpt, held) if MOMENTS[moment].published else assert_gone(ckpt, held, moment))


async def _some_called_off(folder: Path, off: set[int], writer: Writer = "thread") -> None:
    """Call off some of four saves: one is being written; the others are copied meanwhile, or wait for memory."""
    stay = [number for number in range(4) if number not in off]
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
            await _call_off(saves, off, stops[0], folder)
            assert published == []  # though those behind the first that stays could go on
        finally:
            stops[first].open()
        for number in stay:
            assert_same(state_of(number), await ckpt.load((await saves[number]).path))
        for number in off:
            with pytest.raises(aiockpt.SaveCancelledError, match=f"/{number} was cancelled"):
                await saves[number]
    assert published == [str(number) for number in stay]
    assert {entry.name for entry in (folder / "runs").iterdir()} == set(published)


async def _call_off(saves: list[aiockpt.SaveHandle], off: set[int], stop: Stop, folder: Path) -> None:
    """Call some off, and give those that stay as long as a save takes."""
    await stop.reached()
    asked = [saves[number].cancel() for number in off]
    assert [await each for each in asked] == [True] * len(off)
    async with aiockpt.AsyncCheckpointer() as other:
        await other.save(state_of(9), folder / "other")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "off",
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
async def test_the_others_in_flight_are_written_in_their_order(off: set[int], tmp_path: Path) -> None:
    await _some_called_off(tmp_path, off)


def test_so_are_those_of_a_writer_process(tmp_path: Path) -> None:
    asyncio.run(_some_called_off(tmp_path, {1, 2}, "process"))


@pytest.mark.asyncio
async def test_who_cancels_is_not_told_again(tmp_path: Path) -> None:
    """Neither by the next save nor by closing, though he never looked."""
    async with aiockpt.AsyncCheckpointer(**options_of(MOMENTS["staging"], "thread")) as ckpt:
        held = await hold(ckpt.save, "staging", tmp_path / "runs")
        held.save.cancel()
        await ckpt.save(state_of(2), tmp_path / "runs" / "d")
        last = await hold(ckpt.save, "staging", tmp_path / "runs", seed=3)
        last.save.cancel()
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"d"}
