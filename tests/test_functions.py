"""`aiockpt.save`, `load` and `verify`: blocking calls on one hidden checkpointer, which ends when it is idle."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import sync_checkpointer
from aiockpt.engine.engine import Engine
from aiockpt.engine.requests import LoadRequest, SaveRequest
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.ranks.conftest import server, world2
from tests.ranks.world import World
from tests.states import assert_same

__all__ = ["server", "world2"]

STATE = {"x": torch.arange(50_000.0), "step": 3}
_CHILD_S = 60


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt")]


def _join() -> None:
    for thread in _threads():
        thread.join(60)
        assert not thread.is_alive(), thread.name


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Return the list of the engines made from now on, with none of `aiockpt.save` before."""
    monkeypatch.setattr(sync_checkpointer, "_shared", None)
    made: list[Engine] = []
    make = Engine.__init__

    def recorded(self: Engine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", recorded)
    return made


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep the hidden checkpointer for the length of a test."""
    monkeypatch.setattr(sync_checkpointer, "IDLE_S", 600.0)
    monkeypatch.setattr(sync_checkpointer, "_shared", None)
    yield
    held = sync_checkpointer._shared
    assert held is not None
    held.close()


def test_save_load_and_verify(tmp_path: Path) -> None:
    result = aiockpt.save(STATE, tmp_path / "c", metadata={"loss": 0.5})
    assert (result.path, result.tensors) == (str(tmp_path / "c"), 1)
    assert_same(STATE, aiockpt.load(tmp_path / "c"))
    target = {"x": torch.zeros(50_000)}
    assert aiockpt.load(tmp_path / "c", target) is target
    assert torch.equal(target["x"], STATE["x"])
    assert aiockpt.verify(tmp_path / "c").ok
    with pytest.raises(aiockpt.CheckpointExistsError):
        aiockpt.save(STATE, tmp_path / "c")
    aiockpt.save({"step": 4}, tmp_path / "c", overwrite=True)
    assert aiockpt.load(tmp_path / "c", keys=["step"]) == {"step": 4}


@pytest.mark.parametrize(("function", "request_type"), [(aiockpt.save, SaveRequest), (aiockpt.load, LoadRequest)])
def test_signature_and_help_have_every_option(function: Any, request_type: type[Any]) -> None:
    signature = inspect.signature(function)
    assert sorted(signature.parameters) == sorted(inspect.signature(request_type).parameters)
    for each in fields(request_type):
        assert f"\n    {each.name}: " in function.__doc__, each.name
        assert signature.parameters[each.name].annotation == each.type
    assert function.__module__.startswith("aiockpt")


def test_wrong_arguments_name_the_function() -> None:
    with pytest.raises(
        TypeError, match=r"^save\(\) got an unexpected keyword argument 'overwrit'. Did you mean 'overwrite'\?$"
    ):
        aiockpt.save({}, "a", overwrit=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^load\(\) missing a required argument: 'path'"):
        aiockpt.load()  # type: ignore[call-arg]


def test_calls_share_one_checkpointer_from_many_threads(lasting: None, starts: list[Engine], tmp_path: Path) -> None:
    def save_and_load(number: int) -> None:
        aiockpt.save({"n": number, **STATE}, tmp_path / str(number))
        assert aiockpt.load(tmp_path / str(number))["n"] == number

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save_and_load, range(16)))
    assert len(starts) <= 1  # none: one from before


def test_it_ends_when_it_is_idle_and_begins_again(starts: list[Engine], tmp_path: Path) -> None:
    for number in range(2):
        aiockpt.save(STATE, tmp_path / str(number))
        _join()
        assert not _threads()
        assert [engine.statistics().staging_bytes for engine in starts] == [0]


def test_it_does_not_end_while_it_is_used(starts: list[Engine], tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(aiockpt.save, STATE, tmp_path / "slow", storage=storage)
        storage.reached["commit"].result(60)
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            aiockpt.load(tmp_path / "nothing")
        assert [engine.statistics().in_flight for engine in starts] == [1]
        storage.open("commit")
        assert saving.result(60).tensors == 1
    _join()


def test_a_failed_engine_is_replaced(lasting: None, tmp_path: Path) -> None:
    aiockpt.save(STATE, tmp_path / "a")
    held = sync_checkpointer._shared
    assert held is not None
    held._engine._fail(MemoryError("no more"))
    assert aiockpt.load(tmp_path / "a", keys=["step"]) == {"step": 3}
    held.close()


@pytest.mark.asyncio
async def test_it_blocks_in_a_running_loop(tmp_path: Path) -> None:
    assert asyncio.get_running_loop().is_running()
    aiockpt.save(STATE, tmp_path / "c")
    assert_same(STATE, aiockpt.load(tmp_path / "c"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking a process with threads
def test_a_forked_process_has_its_own(lasting: None, tmp_path: Path) -> None:
    aiockpt.save(STATE, tmp_path / "parent")
    child = os.fork()
    if child == 0:
        signal.alarm(_CHILD_S)
        try:
            aiockpt.save(aiockpt.load(tmp_path / "parent"), tmp_path / "child")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(STATE, aiockpt.load(tmp_path / "child"))


def test_a_process_that_has_saved_ends_at_once(python: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, torch, warnings, aiockpt; warnings.simplefilter('error')\n"
        "aiockpt.save({'x': torch.ones(9)}, sys.argv[1])"
    )
    done = subprocess.run([*python, "-c", code, tmp_path / "c"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert aiockpt.verify(tmp_path / "c").ok


def _save_twice(rank: int, world_size: int, path: str) -> list[str]:
    for number in range(2):
        aiockpt.save({f"of{rank}": torch.full((5,), float(rank)), "step": number}, f"{path}/{number}")
        if rank == 0:
            _join()  # this rank is idle for longer than the other one
    return sorted(aiockpt.load(f"{path}/1"))


@pytest.mark.slow
def test_all_ranks_save_together(world2: World, tmp_path: Path) -> None:
    assert world2.results(_save_twice, str(tmp_path)) == [["of0", "of1", "step"]] * 2
