"""A process forked from one that saves: uses of the parent's checkpointer raise, and none hangs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.staging.pool import MappedMemory, SharedMemory
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import GatedStorage

STATE = {"x": torch.arange(50_000.0), "step": 3}
_CHILD_S = 60


def _forked(function: Callable[[], object]) -> None:
    """Call a function in a forked process; fail if it fails or hangs."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads
        child = os.fork()
    if child == 0:
        signal.alarm(_CHILD_S)
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as report:
        text = report.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text or "it hangs"


@contextlib.contextmanager
def _held_elsewhere(*locks: Any) -> Iterator[None]:
    """Hold locks in another thread."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            over.wait(_CHILD_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(_CHILD_S)
    try:
        yield
    finally:
        over.set()
        thread.join()


async def _awaited(awaitable: Any) -> object:
    return await awaitable


async def _awaited_as(wrap: Any, future: Any) -> object:
    return await wrap(future)


async def _followed(save: aiockpt.SaveHandle) -> None:
    async for _ in save.progress():
        pass


USES: dict[str, Callable[[Any, aiockpt.SaveHandle, Any], object]] = {
    "await handle": lambda ckpt, save, reader: asyncio.run(_awaited(save)),
    "await staged": lambda ckpt, save, reader: asyncio.run(_awaited(save.staged)),
    "written.result": lambda ckpt, save, reader: save.written.result(),
    "written.exception": lambda ckpt, save, reader: save.written.exception(),
    "written.add_done_callback": lambda ckpt, save, reader: save.written.add_done_callback(print),
    "wait": lambda ckpt, save, reader: concurrent.futures.wait(save),
    "as_completed": lambda ckpt, save, reader: next(concurrent.futures.as_completed(save)),
    "wrap_future": lambda ckpt, save, reader: asyncio.run(_awaited_as(asyncio.wrap_future, save.staged)),
    "progress": lambda ckpt, save, reader: asyncio.run(_followed(save)),
    "cancel": lambda ckpt, save, reader: save.cancel(),
    "fence": lambda ckpt, save, reader: save.fence(),
    "save": lambda ckpt, save, reader: ckpt.save(STATE, "never"),
    "load": lambda ckpt, save, reader: ckpt.load(reader.path),
    "read": lambda ckpt, save, reader: reader.read("x"),
    "ready": lambda ckpt, save, reader: ckpt.ready(),
    "prewarm": lambda ckpt, save, reader: ckpt.prewarm(STATE),
    "statistics": lambda ckpt, save, reader: ckpt.statistics(),
    "enter": lambda ckpt, save, reader: ckpt.__enter__(),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", USES)
def test_calls_that_need_the_parents_threads_raise(what: str, tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["begin"])
    # The pool is so small that nothing is staged before it is written.
    with aiockpt.SyncCheckpointer(staging_bytes=4096, chunk_bytes=4096) as ckpt:
        ckpt.save(STATE, tmp_path / "a")
        with ckpt.open(tmp_path / "a") as reader:
            save = ckpt.submit(STATE, tmp_path / "b", storage=gate)
            gate.reached["begin"].result(60)

            def child() -> None:
                with pytest.raises(aiockpt.CheckpointerClosedError, match="made in another process, before a fork"):
                    USES[what](ckpt, save, reader)

            # During a fork, a thread of the parent, which the child lacks, may hold these locks.
            takes_them_first = what in ("wait", "as_completed")
            conditions = [] if takes_them_first else [save.staged._condition, save.written._condition]
            with ckpt._engine._lock, _held_elsewhere(*conditions):
                _forked(child)
            gate.open("begin")
            assert save.written.result(60).tensors == 1
            assert reader.read("step") == 3


@pytest.mark.parametrize("kind", [MappedMemory, SharedMemory])
def test_a_child_that_frees_memory_of_the_engine_keeps_its_own(kind: type[MappedMemory | SharedMemory]) -> None:
    nbytes = 64 << 20
    held = [kind(nbytes)]
    held[0].view[:5] = b"whole"
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

    def child() -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Without MAP_FIXED the address is a hint: the kernel takes it if it is free.
        own = libc.mmap(held[0].address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        ctypes.memset(own, 7, nbytes)
        held.clear()
        gc.collect()
        assert ctypes.string_at(own, nbytes).count(7) == nbytes

    _forked(child)
    assert held[0].view[:5] == b"whole"
    if isinstance(held[0], SharedMemory):
        held[0].close()


def test_results_from_before_the_fork_are_kept_and_closing_does_nothing(tmp_path: Path) -> None:
    gate = GatedStorage(LocalStorage(), ["begin"])
    with aiockpt.SyncCheckpointer() as ckpt:
        done = ckpt.submit(STATE, tmp_path / "a")
        done.written.result(60)
        save = ckpt.submit(STATE, tmp_path / "b", storage=gate)
        gate.reached["begin"].result(60)

        def child() -> None:
            assert done.written.result().tensors == 1
            assert asyncio.run(_awaited(done)).tensors == 1  # type: ignore[attr-defined]
            ckpt.close()
            with aiockpt.SyncCheckpointer() as own:
                own.save({"x": torch.ones(3)}, tmp_path / "c")  # too small for torch's threads, which the child lacks
                assert own.load(tmp_path / "a")["step"] == 3

        with ckpt._engine._lock:
            _forked(child)
        gate.open("begin")
        save.written.result(60)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "b", "c"}


def _in_a_process(ckpt: aiockpt.SyncCheckpointer, folder: str) -> None:
    try:
        ckpt.load(f"{folder}/a")
    except aiockpt.CheckpointerClosedError:
        Path(folder, "raised").touch()


def test_a_forked_process_of_multiprocessing_ends(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, tmp_path / "a")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process = multiprocessing.get_context("fork").Process(target=_in_a_process, args=(ckpt, str(tmp_path)))
            process.start()
        process.join(_CHILD_S)
        assert process.exitcode == 0
        process.close()
        assert (tmp_path / "raised").exists()


_WHILE_IT_STARTS = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch, aiockpt
state = {"x": torch.ones(1000)}
ckpt = aiockpt.SyncCheckpointer()
ckpt.submit(state, sys.argv[1] + "/a")
children = []
for number in range(40):  # while the thread starts, and a little longer
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        with aiockpt.SyncCheckpointer() as own:
            own.save(state, f"{sys.argv[1]}/{number}")
        os._exit(0)  # as children of multiprocessing do
    children.append(child)
    time.sleep(0.0005)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0] * len(codes), codes
ckpt.close()
"""


@pytest.mark.slow
def test_a_fork_while_the_engine_starts_leaves_a_child_that_can_save(
    python_with_torch: list[str], tmp_path: Path
) -> None:
    command = [*python_with_torch, "-c", _WHILE_IT_STARTS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_threads_of_an_engine_import_nothing(python_with_torch: list[str], tmp_path: Path) -> None:
    """A fork during a thread's import would leave the child with a half-imported module."""
    code = """
import sys, threading, torch, aiockpt
class Finder:
    def find_spec(self, name, path=None, target=None):
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not thread.name.startswith("Dummy"):  # which starts the engine
            found.append((threading.current_thread().name, name))
found = []
sys.meta_path.insert(0, Finder())
state = {"x": torch.ones(300_000), "small": torch.ones(3), "step": 3}
state["tied"] = state["x"]
interleaved = {"small": torch.zeros(100).as_strided((3,), (2,)), "grid": torch.zeros(100).as_strided((3, 3), (2, 3))}
where = sys.argv[1] + "/"
with aiockpt.SyncCheckpointer(writer=sys.argv[2]) as ckpt:
    ckpt.save(state, where + "a", pre_commit=lambda path: None)
    ckpt.save(state, where + "b", compress="zstd")
    for name in "ab":
        ckpt.load(where + name)
        assert ckpt.verify(where + name).ok
    ckpt.load(where + "a", dict(state))
    ckpt.save({"small": state["small"], "grid": torch.ones(3, 3)}, where + "g")
    ckpt.load(where + "g", interleaved)
    ckpt.delete(where + "b")
    ckpt.save({"x": state["x"]}, where + "s", format="safetensors")
    ckpt.load(where + "s", mmap=True)
    torch.save(state, where + "t.pt")
    ckpt.load(where + "t.pt")
assert found == [], found
"""
    for writer in ("thread", "process"):
        (tmp_path / writer).mkdir()
        done = subprocess.run(
            [*python_with_torch, "-c", code, tmp_path / writer, writer],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
