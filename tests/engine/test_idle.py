"""`idle_timeout`: a checkpointer that nobody calls ends its threads, and starts them again at the next call."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import AsyncCheckpointer, Observer, SyncCheckpointer
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.polling import until
from tests.states import assert_same

STATE: dict[str, Any] = {"w": torch.arange(100_000.0), "step": 3}
SOON_S = 0.05


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


def _assert_awake(ckpt: SyncCheckpointer, path: Path) -> None:
    """Assert that the engine does not rest between calls: their thread stays the same."""
    (before,) = [thread for thread in threading.enumerate() if thread.name == "aiockpt-engine"]
    for _ in range(20):
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            ckpt.load(path)
    assert before in threading.enumerate()


def _wait_for_rest() -> None:
    until(lambda: not _threads())


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_it_rests_and_goes_on(writer: Any, tmp_path: Path) -> None:
    with SyncCheckpointer(idle_timeout=SOON_S, writer=writer) as ckpt:
        for number in range(3):
            ckpt.save({**STATE, "number": number}, tmp_path / str(number))
            _wait_for_rest()
            assert ckpt.statistics().staging_bytes == 0
            assert ckpt.statistics().written == number + 1
        assert_same({**STATE, "number": 1}, ckpt.load(tmp_path / "1"))
        _wait_for_rest()
        assert ckpt.verify(tmp_path / "2").ok


def test_it_does_not_rest_while_something_is_in_flight(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with SyncCheckpointer(idle_timeout=0.0) as ckpt:
        save = ckpt.submit(STATE, tmp_path / "a", storage=storage)
        storage.reached["commit"].result(60)
        _assert_awake(ckpt, tmp_path / "nothing")
        storage.open("commit")
        assert save.written.result(60).tensors == 1
        _wait_for_rest()


def test_an_open_transaction_keeps_it_awake(tmp_path: Path) -> None:
    with SyncCheckpointer(idle_timeout=0.0) as ckpt:
        with ckpt.transaction(tmp_path / "a") as tx:
            tx.save(STATE)
            _assert_awake(ckpt, tmp_path / "nothing")
        tx.written.result(60)
        _wait_for_rest()
        assert_same(STATE, ckpt.load(tmp_path / "a"))


@pytest.mark.asyncio
async def test_readers_and_observers_outlive_a_rest(tmp_path: Path) -> None:
    class Seen(Observer):
        def __init__(self) -> None:
            self.paths: list[str] = []

        def written(self, event: Any, result: Any) -> None:
            self.paths.append(Path(event.path).name)

    seen = Seen()
    async with AsyncCheckpointer(idle_timeout=0.0, observers=[seen]) as ckpt:
        await ckpt.save(STATE, tmp_path / "a")
        async with ckpt.open(tmp_path / "a") as reader:
            _wait_for_rest()
            assert torch.equal(await reader.read("w"), STATE["w"])
            _wait_for_rest()
            assert await reader.read("step") == 3
        await ckpt.save(STATE, tmp_path / "b")
    assert seen.paths == ["a", "b"]


def test_calls_that_meet_the_end_are_served(tmp_path: Path) -> None:
    def save(number: int) -> None:
        for turn in range(20):
            path = tmp_path / f"{number}-{turn}"
            ckpt.save({"n": number * 100 + turn}, path)
            assert ckpt.load(path) == {"n": number * 100 + turn}

    with SyncCheckpointer(idle_timeout=0.0) as ckpt, ThreadPoolExecutor(3) as pool:
        list(pool.map(save, range(3)))
    assert not _threads()


def test_one_that_rests_needs_no_closing(tmp_path: Path) -> None:
    ckpt = SyncCheckpointer(idle_timeout=0.0)
    ckpt.save(STATE, tmp_path / "a")
    _wait_for_rest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del ckpt
        gc.collect()


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_wrong_times_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="idle_timeout"):
        SyncCheckpointer(idle_timeout=value)
