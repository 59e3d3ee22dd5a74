"""Unclosed checkpointers and readers: the last reference frees their resources, with a ResourceWarning."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.memory import settled_bytes
from tests.polling import until
from tests.states import assert_same, large_state

STATE = {"x": torch.arange(50_000.0), "step": 3}


def _drop_with_warning(drop: Callable[[], object], what: str = "unclosed SyncCheckpointer") -> None:
    """Drop an unclosed object, expect the warning, and wait until its threads are gone."""
    with pytest.warns(ResourceWarning, match=what):
        _drop_and_join(drop)


def _drop_and_join(drop: Callable[[], object]) -> None:
    drop()
    for _ in range(600):  # the end of the last save may still hold something
        gc.collect()
        left = [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt")]
        if not left:
            return
        left[0].join(0.1)
    raise AssertionError(left)


def _drop_and_collect(drop: Callable[[], object]) -> None:
    drop()
    gc.collect()


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("aiockpt"):
            thread.join(60)
            assert not thread.is_alive(), thread.name


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_thirty_unclosed_checkpointers_leave_nothing(writer: str, tmp_path: Path) -> None:
    process = psutil.Process()
    count = 30 if writer == "thread" else 3
    made: list[aiockpt.SyncCheckpointer] = []

    def use(name: str) -> aiockpt.SyncCheckpointer:
        ckpt = aiockpt.SyncCheckpointer(chunk_bytes=1 << 20, writer=writer)
        ckpt.save(large_state(4), tmp_path / name)
        assert_same(large_state(4), ckpt.load(tmp_path / name))
        return ckpt

    def held() -> tuple[int, int, int]:
        return process.num_threads(), process.num_fds(), len(process.children())

    use("first").close()  # what torch starts and opens once in a process stays
    gc.collect()
    before, memory = held(), settled_bytes()
    made += [use(str(number)) for number in range(count)]
    assert [thread.name for thread in threading.enumerate()].count("aiockpt-engine") == count
    assert len(process.children()) == (count if writer == "process" else 0) + before[2]
    _drop_with_warning(made.clear)
    # A thread has ended for Python a little before it has for the kernel.
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert settled_bytes() < memory + (64 << 20)


@pytest.mark.parametrize("is_handle_kept", [True, False])
def test_saves_in_flight_are_finished(is_handle_kept: bool, tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["commit"])
    made = [aiockpt.SyncCheckpointer()]
    saves = [made[0].submit(STATE, tmp_path / name, storage=gate, post_commit=lambda _: made) for name in "ab"]
    gate.reached["commit"].result(60)
    with pytest.warns(ResourceWarning, match="unclosed SyncCheckpointer: leave it by `with` or `async with`"):
        _drop_and_collect(made.clear)
    assert not saves[0].written.done()
    if not is_handle_kept:
        saves.clear()
    gate.open("commit")
    _wait_for_threads()
    for save in saves:
        assert save.written.result(60).path == save.path
        assert not save.cancel().result(60)
        save.fence()
    with aiockpt.SyncCheckpointer() as ckpt:
        for name in "ab":
            assert_same(STATE, ckpt.load(tmp_path / name))


def test_a_checkpointer_that_its_own_hook_refers_to_is_freed(tmp_path: Path) -> None:
    def use() -> None:
        ckpt = aiockpt.SyncCheckpointer()
        storage = FaultyStorage(LocalStorage(), "write", OSError("no"))
        ckpt.submit(STATE, tmp_path / "a", post_commit=lambda _: ckpt.statistics()).written.result(60)
        failed = ckpt.submit(STATE, tmp_path / "b", storage=storage, post_commit=lambda _: ckpt.statistics())
        with pytest.raises(aiockpt.SaveError):
            failed.written.result(60)

    _drop_with_warning(use)


def test_an_unseen_failure_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def use() -> None:
        ckpt = aiockpt.SyncCheckpointer()
        ckpt.submit(STATE, tmp_path / "a", storage=FaultyStorage(LocalStorage(), "write", OSError("no")))

    with caplog.at_level(logging.ERROR, "aiockpt"):
        _drop_with_warning(use)
    assert "a save has failed after its checkpointer was garbage-collected" in caplog.text


@pytest.mark.asyncio
async def test_an_unclosed_reader_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, tmp_path / "a")
    before = _open_files()
    with _no_collector():
        made = [await aiockpt.open(tmp_path / "a")]
        assert (await made[0].read("step")) == 3
        with pytest.warns(ResourceWarning, match=f"unclosed reader of {tmp_path / 'a'}"):
            made.clear()
        await asyncio.to_thread(_wait_for_threads)
        left = {number: name for number, name in _open_files().items() if number not in before}
        assert len(_open_files()) <= len(before), left


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Disable the garbage collector: only reference counts free objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _open_files() -> dict[str, str]:
    """Return the target of each file descriptor."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def test_loaded_tensors_are_freed_with_their_last_reference(tmp_path: Path) -> None:
    def freed(state: dict[str, Any]) -> bool:
        gone = threading.Event()
        weakref.finalize(state["x"], gone.set)
        state.clear()
        return gone.wait(60)  # the engine's thread may still be about to end the call

    with _no_collector(), aiockpt.SyncCheckpointer() as ckpt:
        saved = dict(STATE, x=STATE["x"].clone())
        ckpt.save(saved, tmp_path / "a")
        assert freed(saved), "save"
        assert freed(ckpt.load(tmp_path / "a")), "load"
        assert freed(ckpt.load(tmp_path / "a", {"x": torch.zeros(50_000)})), "load into a state"
        with ckpt.open(tmp_path / "a") as reader:
            assert freed({"x": reader.read("x")}), "read"
            assert freed(dict(reader.stream())), "stream"


def test_a_reader_keeps_its_checkpointer(tmp_path: Path) -> None:
    made = [aiockpt.SyncCheckpointer()]
    made[0].save(STATE, tmp_path / "a")
    readers = [made[0].open(tmp_path / "a").__enter__()]
    made.clear()
    gc.collect()
    assert readers[0].read("step") == 3
    _drop_with_warning(readers.clear)


def test_closed_and_unused_checkpointers_do_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aiockpt.AsyncCheckpointer()
        aiockpt.open(tmp_path)
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(STATE, tmp_path / "a")
        del ckpt
        gc.collect()


def test_a_checkpointer_is_freed_when_the_collector_runs_in_its_own_thread(tmp_path: Path) -> None:
    made: list[Any] = [aiockpt.SyncCheckpointer()]
    made[0].save(STATE, tmp_path / "a")
    engine = made[0]._engine

    async def collect(_: object) -> None:
        with pytest.warns(ResourceWarning, match="unclosed"):
            _drop_and_collect(made.clear)

    engine.call(collect, "collect").result()
    _wait_for_threads()


@pytest.mark.asyncio
async def test_a_call_on_a_temporary_checkpointer(tmp_path: Path) -> None:
    with pytest.warns(ResourceWarning, match="unclosed AsyncCheckpointer"):
        await aiockpt.AsyncCheckpointer().save(STATE, tmp_path / "a")
    with pytest.warns(ResourceWarning, match="unclosed AsyncCheckpointer"):
        assert_same(STATE, await aiockpt.AsyncCheckpointer().load(tmp_path / "a"))
    await asyncio.to_thread(_wait_for_threads)


def test_a_forked_process_frees_nothing_of_the_parent(tmp_path: Path) -> None:
    made = [aiockpt.SyncCheckpointer()]
    made[0].save(STATE, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                made.clear()
                gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made[0].load(tmp_path / "a")["step"] == 3
    made[0].close()
