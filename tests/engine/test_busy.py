"""Saves submitted faster than they are written: they wait, are skipped, are superseded, or are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.states import assert_same


def state_of(step: int, nbytes: int = 1 << 20) -> dict:
    return {"step": step, "w": torch.arange(step, step + nbytes // 8), "b": torch.full((3,), float(step))}


@pytest.mark.asyncio
async def test_saves_are_queued_and_published_in_order(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    order: list[str] = []
    async with aiockpt.AsyncCheckpointer(staging_bytes=1 << 20, chunk_bytes=1 << 18) as ckpt:
        saves = [
            ckpt.save(
                state_of(step),
                tmp_path / f"step-{step}",
                storage=storage,
                post_commit=lambda path: order.append(Path(path).name),
            )
            for step in range(5)
        ]
        await storage.reached["commit"]
        assert ckpt.statistics().in_flight == 5
        assert not any(save.written.done() for save in saves)
        storage.open("commit")
        for save in saves:
            await save
        assert order == [f"step-{step}" for step in range(5)]
        found = ckpt.statistics()
        assert (found.in_flight, found.written, found.skipped, found.failed) == (0, 5, 0, 0)
        assert 0 < found.staging_bytes <= 1 << 20
        for step in range(5):
            assert_same(state_of(step), await ckpt.load(tmp_path / f"step-{step}"))


@pytest.mark.asyncio
async def test_a_save_is_staged_while_an_earlier_one_is_published_and_one_between_was_cancelled(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write", "commit"])
    async with aiockpt.AsyncCheckpointer(staging_bytes=2 << 20, chunk_bytes=1 << 18) as ckpt:
        states = [state_of(0, nbytes=8 << 20), state_of(1), state_of(2, nbytes=1 << 17)]
        first, second, third = (
            ckpt.save(state, tmp_path / str(step), storage=storage) for step, state in enumerate(states)
        )
        await storage.reached["write"]
        assert not first.staged.done()
        assert await second.cancel()  # before its turn to be staged
        storage.open("write")
        await storage.reached["commit"]
        try:
            await asyncio.wait_for(third.staged, 20)
            assert not first.written.done()
        finally:
            storage.open("commit")
        await third
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]


@pytest.mark.asyncio
async def test_a_save_is_skipped_while_another_is_in_flight(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer(on_busy="skip", drain_timeout=5) as ckpt:
        first = ckpt.save(state_of(1), tmp_path / "1", storage=storage)
        second = ckpt.save(state_of(2), tmp_path / "2", storage=storage)
        same = ckpt.save(state_of(3), tmp_path / "1", storage=storage)
        await second.staged  # at once: its tensors may change
        assert second.skipped
        assert same.skipped
        assert not first.skipped
        assert "skipped" in repr(second)
        with pytest.raises(aiockpt.SaveSkippedError, match=r"2 was skipped: 1 saves are in flight, .*/1, and on_busy"):
            await second.written
        assert [event async for event in second.progress()] == []
        assert not await second.cancel()
        second.fence()
        storage.open("commit")
        await first
        await ckpt.ready()
        third = ckpt.save(state_of(3), tmp_path / "3")  # does not raise for the skipped saves
        await third
        found = ckpt.statistics()
        assert (found.written, found.skipped, found.failed) == (2, 2, 0)
        assert found.skipped_paths == (str(tmp_path / "2"), str(tmp_path / "1"))
        assert_same(state_of(1), await ckpt.load(tmp_path / "1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


@pytest.mark.asyncio
async def test_a_save_is_skipped_only_beyond_max_in_flight(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer(on_busy="skip", max_in_flight=2) as ckpt:
        saves = [ckpt.save(state_of(step), tmp_path / str(step), storage=storage) for step in range(4)]
        assert [save.skipped for save in saves] == [False, False, True, True]
        storage.open("commit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.asyncio
async def test_queued_saves_are_superseded_by_the_newest(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    async with aiockpt.AsyncCheckpointer(on_busy="supersede", staging_bytes=1 << 18, chunk_bytes=1 << 18) as ckpt:
        saves = [ckpt.save(state_of(0), tmp_path / "0", storage=storage)]
        await storage.reached["write"]
        saves += [ckpt.save(state_of(step), tmp_path / str(step), storage=storage) for step in range(1, 5)]
        for save in saves[1:4]:
            await save.staged
            with pytest.raises(aiockpt.SaveSkippedError, match="was superseded by the save of"):
                await save
        assert [save.skipped for save in saves] == [False, True, True, True, False]
        storage.open("write")
        await saves[0]
        await saves[4]
        assert set(ckpt.statistics().skipped_paths) == {str(tmp_path / str(step)) for step in (1, 2, 3)}
        assert_same(state_of(0), await ckpt.load(tmp_path / "0"))
        assert_same(state_of(4), await ckpt.load(tmp_path / "4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "4"]


@pytest.mark.asyncio
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("staged", [1, 2])
async def test_first_and_staged_saves_are_not_superseded(staged: int, most: int, tmp_path: Path) -> None:
    """Of those behind, the newest one stays."""
    storage, chunk = GatedStorage(LocalStorage(), ["write"]), 1 << 18
    async with aiockpt.AsyncCheckpointer(
        on_busy="supersede", max_in_flight=most, staging_bytes=staged * 2 * chunk, chunk_bytes=chunk
    ) as ckpt:
        saves = []
        for step in range(6):  # with room for as many saves as are to be staged
            saves.append(ckpt.save(state_of(step, nbytes=2 * chunk - 16384), tmp_path / str(step), storage=storage))
            if step < staged:
                await saves[-1].staged
        kept = {*range(max(staged, most)), 5}
        storage.open("write")
        outcomes = await asyncio.gather(*saves, return_exceptions=True)
    assert {step for step, end in enumerate(outcomes) if not isinstance(end, aiockpt.SaveSkippedError)} == kept
    assert {int(path.name) for path in tmp_path.iterdir()} == kept


@pytest.mark.asyncio
async def test_queued_saves_to_one_path_are_superseded_by_the_newest(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer(on_busy="supersede") as ckpt:
        saves = [ckpt.save(state_of(0), tmp_path / "latest", storage=storage, overwrite=True)]
        await storage.reached["commit"]
        saves += [ckpt.save(state_of(step), tmp_path / "latest", storage=storage, overwrite=True) for step in (1, 2)]
        storage.open("commit")
        await saves[2]
        assert_same(state_of(2), await ckpt.load(tmp_path / "latest"))
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@pytest.mark.asyncio
async def test_a_save_is_refused_while_the_checkpointer_is_busy(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer(on_busy="error") as ckpt:
        first = ckpt.save(state_of(1), tmp_path / "1", storage=storage)
        with pytest.raises(aiockpt.CheckpointerBusyError, match=r"2 was not saved: 1 saves .* Await ckpt.ready\(\)"):
            ckpt.save(state_of(2), tmp_path / "2")
        assert not isinstance(aiockpt.CheckpointerBusyError("x"), aiockpt.SaveError)
        waiting = asyncio.ensure_future(ckpt.ready())
        gone = asyncio.ensure_future(ckpt.ready())
        await asyncio.sleep(0)
        gone.cancel()
        assert not waiting.done()
        storage.open("commit")
        await waiting
        assert first.written.done()
        await ckpt.save(state_of(2), tmp_path / "2")


def test_a_synchronous_program_waits_with_ready(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer(on_busy="error") as ckpt:
        ckpt.ready(timeout=0)
        ckpt.submit(state_of(1), tmp_path / "1", storage=storage)
        with pytest.raises(TimeoutError):
            ckpt.ready(timeout=0)
        storage.open("commit")
        ckpt.ready(timeout=60)
        ckpt.save(state_of(2), tmp_path / "2")


@pytest.mark.parametrize("on_busy", ["wait", "skip", "supersede"])
def test_memory_stays_within_its_bound(on_busy, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(on_busy=on_busy, staging_bytes=1 << 19, chunk_bytes=1 << 17) as ckpt:
        saves = [ckpt.submit(state_of(step), tmp_path / str(step)) for step in range(12)]
        for save in saves:
            save.written.exception(60)
        assert ckpt.statistics().staging_bytes <= 1 << 19
        assert ckpt.statistics().written == sum(not save.skipped for save in saves) >= 1
        for step, save in enumerate(saves):
            if not save.skipped:
                assert_same(state_of(step), ckpt.load(tmp_path / str(step)))
    assert len(list(tmp_path.iterdir())) == sum(not save.skipped for save in saves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_busy": "drop"}, "on_busy is 'drop'; it must be one of 'wait', 'skip', 'supersede', 'error'"),
        ({"on_failure": "ignore"}, "on_failure is 'ignore'"),
        ({"max_in_flight": 0}, "max_in_flight must be an integer of at least 1"),
        ({"save_timeout": 0}, "save_timeout must be positive, not 0"),
        ({"save_timeout": float("nan")}, "save_timeout must be positive"),
    ],
    ids=str,
)
def test_bad_policies_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aiockpt.SyncCheckpointer(**options)
