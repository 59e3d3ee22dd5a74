"""The engine's loop: whatever fails in it, nothing that was submitted stays pending."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt import Completion
from aiockpt.engine.engine import Engine
from aiockpt.engine.loop import EngineLoop
from aiockpt.engine.requests import LoadRequest
from aiockpt.engine.resources import EngineResources
from aiockpt.staging.pool import Chunk, ChunkPool
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.testing import GatedStorage
from tests.polling import until
from tests.states import assert_same, large_state

STATE = {"w": torch.arange(50_000.0), "step": 3}
WINDOW = aiockpt.StagingWindow(bytes_per_window=1 << 20, patience_s=600)


class Posts:
    """Records the functions posted to engines, and makes one of them raise instead of running."""

    def __init__(self, broken: int | None = None) -> None:
        self.names: list[str] = []
        self._broken = broken
        self._post = EngineLoop.post

    def post(self, engine: EngineLoop, function: Callable[[], object], owner: Any = None) -> None:
        named = function.func if isinstance(function, partial) else function
        self.names.append(named.__qualname__.split(".<locals>")[0])
        if len(self.names) - 1 == self._broken:
            function = self._raise
        self._post(engine, function, owner)

    def _raise(self) -> None:
        raise ZeroDivisionError("in the callback")


def _outcomes(folder: Path, *, writer: str) -> list[BaseException | None]:
    """Call everything that posts to the loop; return the outcome of each submission, all of which have to end."""
    ended: list[BaseException | None] = []

    def note(function: Callable[[], Completion[Any]]) -> None:
        try:
            ended.append(function().exception(60))
        except aiockpt.AiockptError as exc:
            ended.append(exc)

    ckpt = aiockpt.SyncCheckpointer(staging_window=WINDOW, writer=writer, chunk_bytes=1 << 20, drain_timeout=60)
    engine = ckpt._engine
    note(lambda: engine.prewarm(1 << 20, set()))
    for name in ("a", "b"):
        note(lambda name=name: ckpt.submit(STATE, folder / name).written)
    with contextlib.suppress(aiockpt.AiockptError):
        ckpt.window()
    gate = GatedStorage(LocalStorage(), ["begin"])
    with contextlib.suppress(aiockpt.AiockptError):
        save = ckpt.submit(STATE, folder / "c", storage=None if writer == "process" else gate)
        note(save.cancel)
    gate.open("begin")
    with contextlib.suppress(aiockpt.AiockptError):
        save = ckpt.submit(STATE, folder / "e")
        save._job.give_up("the test wants it")  # type: ignore[attr-defined]
        note(lambda: save.written)
    note(lambda: ckpt._loader.load(LoadRequest(folder / "a"))()._call.completion)
    with contextlib.suppress(aiockpt.AiockptError):
        call = ckpt._loader.load(LoadRequest(folder / "b"))()._call
        call.cancel()
        call.completion.ended(60)
    note(engine.queue.ready)
    engine.close().ended(60)
    assert engine.loop.thread is not None
    engine.join()
    engine.loop.thread.join(60)
    assert not engine.loop.thread.is_alive()
    with pytest.raises(aiockpt.AiockptError, match=r"is closed|has failed"):
        ckpt.save(STATE, folder / "d")
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_nothing_stays_pending_when_a_callback_raises(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Posts()
    with monkeypatch.context() as patched:
        patched.setattr(EngineLoop, "post", lambda *args: counted.post(*args))
        outcomes = _outcomes(tmp_path / "whole", writer=writer)
    assert [type(error) for error in outcomes if error is not None] == [aiockpt.TornSnapshotError]
    assert set(counted.names) == {
        "Engine._enqueue",
        "Engine._begin_call",
        "Engine._finish",
        "Throttle._open",
        "Throttle._unthrottle",
        "SaveJob._cancel_scope",
        "Call._cancel",
    }
    for number in range(len(counted.names)):
        posts = Posts(number)
        with monkeypatch.context() as patched:
            patched.setattr(EngineLoop, "post", lambda *args, posts=posts: posts.post(*args))
            _outcomes(tmp_path / str(number), writer=writer)


def _raise() -> None:
    raise ZeroDivisionError("in the callback")


def test_an_exception_without_an_owner_ends_everything_pending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = GatedStorage(LocalStorage(), ["begin"])
    with aiockpt.SyncCheckpointer() as ckpt:
        saves = [ckpt.submit(STATE, tmp_path / name, storage=gate) for name in "ab"]
        load = ckpt._engine.call(lambda _: asyncio.Event().wait(), "a call that never ends")
        ready = ckpt._engine.queue.ready()
        gate.reached["begin"].result(60)
        ckpt._engine.loop._loop.call_soon_threadsafe(_raise)  # type: ignore[union-attr]
        for save in saves:
            with pytest.raises(aiockpt.SaveError, match="failed with the engine: ZeroDivisionError") as caught:
                save.written.result(60)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert not save.cancel().result(60)
        with pytest.raises(aiockpt.AiockptError, match="a call that never ends failed with the engine"):
            load.completion.result(60)
        with pytest.raises(aiockpt.AiockptError, match="the engine has failed"):
            ready.result(60)
        with pytest.raises(aiockpt.AiockptError, match=r"has failed: ZeroDivisionError.*; make a new one"):
            ckpt.load(tmp_path / "a")
        gate.open("begin")
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]
    assert list(tmp_path.iterdir()) == []


def test_a_call_while_the_engine_breaks_gets_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the loop has no tasks any more, and the thread has not ended yet."""
    errors: list[BaseException | None] = []

    def load() -> None:
        try:
            errors.append(ckpt._engine.call(lambda _: asyncio.Event().wait(), "a late call").completion.exception(60))
        except aiockpt.AiockptError as exc:
            errors.append(exc)

    async def divide() -> None:
        raise ZeroDivisionError("in a task")

    def close(tools: EngineResources) -> None:
        caller.start()
        until(lambda: errors or list(ckpt._engine._calls))
        close_tools(tools)

    caller, close_tools = threading.Thread(target=load), EngineResources.close
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, tmp_path / "a")
        monkeypatch.setattr(EngineResources, "close", close)
        ckpt._engine.loop.post(lambda: ckpt._engine.start_behind(divide))
        until(lambda: caller.ident is not None)
        caller.join(60)
    (error,) = errors
    assert isinstance(error, aiockpt.AiockptError)
    assert "ZeroDivisionError('in a task')" in str(error)


def test_memory_that_can_not_be_had_ahead_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that has ended allocates for the next one; what goes wrong there is raised out of a group of tasks."""
    state = {"w": torch.arange(2_000_000.0)}  # eight chunks, of which few are needed where the copies are slow

    def touch(chunk: Chunk) -> None:
        raise MemoryError("no more of it")

    monkeypatch.setattr(Chunk, "touch", touch)
    window = aiockpt.StagingWindow(bytes_per_s=30e6)
    with aiockpt.SyncCheckpointer(chunk_bytes=1 << 20, staging_window=window) as ckpt:
        save = ckpt.submit(state, tmp_path / "a")
        until(save.written.done)  # whose result() would lift the throttle
        until(lambda: "could be allocated ahead of the next save: no more of it" in caplog.text)
        ckpt.save(state, tmp_path / "b")
        assert_same(state, ckpt.load(tmp_path / "b"))


class _SeesContext(WrapperStorage):
    """Records the value of a context variable where the save runs."""

    def __init__(self, variable: contextvars.ContextVar[str]) -> None:
        super().__init__(LocalStorage())
        self.variable = variable
        self.seen: list[str] = []

    def before_begin(self, path: str) -> None:
        self.seen.append(self.variable.get())

    async def begin(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(self.variable.get())
        return await super().begin(*args, **kwargs)


def test_saves_and_loads_run_in_the_context_of_the_engine(tmp_path: Path) -> None:
    variable = contextvars.ContextVar("variable", default="engine's")
    variable.set("caller's")
    storage = _SeesContext(variable)
    with aiockpt.SyncCheckpointer() as ckpt:
        for name in "abc":  # the first save may arrive before the loop runs, the others do not
            ckpt.save(STATE, tmp_path / name, storage=storage)
        call = ckpt._engine.call(lambda _: asyncio.to_thread(variable.get), "look")
        assert call.result() == "engine's"
    assert set(storage.seen) == {"engine's"}


_SNIFFIO = """
import contextvars
import threading
current_async_library_cvar = contextvars.ContextVar("current_async_library_cvar", default=None)
thread_local = type("ThreadLocal", (threading.local,), {"name": None})()
class AsyncLibraryNotFoundError(RuntimeError):
    pass
def current_async_library():
    import asyncio
    value = thread_local.name or current_async_library_cvar.get()
    if value is None:
        with __import__("contextlib").suppress(RuntimeError):
            if asyncio.current_task() is not None:
                return "asyncio"
        raise AsyncLibraryNotFoundError("unknown async library, or not in async context")
    return value
"""


def test_saves_work_where_anyio_detects_the_library_by_a_context_variable(
    python_with_torch: list[str], tmp_path: Path
) -> None:
    """As with sniffio: the module has the parts of sniffio that anyio uses."""
    (tmp_path / "sniffio.py").write_text(_SNIFFIO)
    code = (
        "import sys, torch, aiockpt, sniffio\nassert sniffio.__file__.startswith(sys.argv[1])\n"
        "with aiockpt.SyncCheckpointer() as ckpt:\n"
        "    for name in 'abc':\n"
        "        ckpt.save({'x': torch.ones(3)}, f'{sys.argv[1]}/{name}')\n"
        "        ckpt.load(f'{sys.argv[1]}/{name}')\n"
    )
    done = subprocess.run(
        [*python_with_torch, "-c", "import sys; sys.path.insert(0, sys.argv[1])\n" + code, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


PROGRAM_WITH_A_HANDLER = """
import os, signal, sys, torch, warnings, aiockpt
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2] and not handled:
            os.kill(os.getpid(), signal.SIGUSR1)
        return None

def handle(*_):
    handled.append(1)
    handled.append(ckpt.submit({"x": torch.ones(2)}, sys.argv[1] + "/last"))
    ckpt.load(sys.argv[1] + "/0")

warnings.simplefilter("ignore")
handled = []
state = {"x": torch.arange(3.0)}
with aiockpt.SyncCheckpointer() as ckpt:
    if sys.argv[2].endswith("loader"):
        ckpt.save(state, sys.argv[1] + "/0")
    else:
        aiockpt.SyncCheckpointer().save(state, sys.argv[1] + "/0")
    for name in [name for name in sys.modules if name == sys.argv[2]]:
        del sys.modules[name]
    signal.signal(signal.SIGUSR1, handle)
    sys.meta_path.insert(0, Interrupts())
    ckpt.save(state, sys.argv[1] + "/1")
    assert torch.equal(ckpt.load(sys.argv[1] + "/1")["x"], state["x"])
    handled[1].written.result(60)
"""


@pytest.mark.parametrize("part", ["submit", "loader"])
def test_a_signal_handler_may_save_and_load_within_the_first_call(
    python_with_torch: list[str], tmp_path: Path, part: str
) -> None:
    done = subprocess.run(
        [*python_with_torch, "-c", PROGRAM_WITH_A_HANDLER, tmp_path, f"aiockpt.engine.{part}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "last"}


@pytest.mark.asyncio
async def test_a_dead_engine_fails_every_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a defect, or without resources, no caller may wait for ever."""
    submitted = threading.Event()

    async def die(self: Engine, *_: object) -> None:
        submitted.wait(60)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Engine, "_main", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    ckpt = aiockpt.AsyncCheckpointer()
    save = ckpt.save({"x": 1}, tmp_path / "c")
    submitted.set()
    with pytest.raises(aiockpt.AiockptError, match="out of luck"):
        await save
    assert [event async for event in save.progress()] == []
    with pytest.raises(aiockpt.AiockptError, match="out of luck"):
        ckpt.save({"x": 1}, tmp_path / "d")
    await ckpt.aclose()


@pytest.mark.asyncio
async def test_a_pool_that_can_not_grow_in_advance_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiockpt.AsyncCheckpointer(chunk_bytes=(1 << 16), staging_bytes=64 * (1 << 16)) as ckpt:
        await ckpt.save(STATE, tmp_path / "1")

        def fail(self: ChunkPool, count: int):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(ChunkPool, "lease_new", fail)
        await ckpt.save(large_state(2), tmp_path / "2")
        await ckpt.save(large_state(3), tmp_path / "3")
        assert_same(large_state(3), await ckpt.load(tmp_path / "3"))
