"""A real Jupyter kernel, driven as a notebook drives it: cell by cell, in one persistent event loop."""

from __future__ import annotations

import asyncio
import queue
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest

import aiockpt

pytest.importorskip("ipykernel")
jupyter_client = pytest.importorskip("jupyter_client")
jupyter_core_utils = pytest.importorskip("jupyter_core.utils")

ROOT = Path(__file__).parents[2]
REPLY_S = 120.0

SETUP = """
import asyncio, gc, threading
import torch, aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage

STATE = {"x": torch.arange(1000.0), "step": 3}

def is_same(state):
    return torch.equal(state["x"], STATE["x"]) and state["step"] == 3

def engines():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]

async def tick():
    while True:
        await asyncio.sleep(0.01)

def gated():
    storage = GatedStorage(LocalStorage(), ["commit"])
    return storage, ckpt.save(STATE, "held", storage=storage)
"""


class Cell(NamedTuple):
    """Result of a cell: its output, and the name of the error that ended it."""

    output: str
    error: str | None


class Notebook:
    """A kernel in a process of its own, and the client that sends it cells."""

    def __init__(self, folder: Path) -> None:
        self._sockets = tempfile.mkdtemp()  # no ports: concurrent tests could compete for them
        self._manager = jupyter_client.KernelManager(transport="ipc", ip=f"{self._sockets}/ipc")
        self._manager.shutdown_wait_time = REPLY_S  # a slow kernel is not killed
        self._folder = folder

    def __enter__(self) -> Self:
        self._manager.start_kernel(cwd=str(self._folder), extra_arguments=["--HistoryManager.enabled=False"])
        self._client = self._manager.client()
        self._client.start_channels()
        try:
            self.begin()
        except BaseException:
            self.end(now=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.end(now=error is not None)

    def begin(self) -> None:
        self._client.wait_for_ready(timeout=REPLY_S)
        self.run(f"import sys; sys.path.insert(0, {str(ROOT)!r})")
        self.run(SETUP)

    def end(self, *, now: bool = False) -> None:
        """Shut the kernel down as the notebook's menu does; or kill it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=now)
        self._manager.cleanup_resources()
        self._manager.context.destroy(linger=0)
        shutil.rmtree(self._sockets)

    def restart(self) -> None:
        """Restart the kernel as the notebook's menu does: ask it to end, and start another."""
        self._manager.restart_kernel()
        self.begin()

    def start(self, code: str, until: str = "running") -> str:
        """Send a cell; return its number as soon as it has printed a word."""
        sent: str = self._client.execute(code)
        assert until in self._output(sent, until)
        return sent

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def finish(self, sent: str) -> Cell:
        """Wait for the end of a cell."""
        output = self._output(sent)
        while True:
            reply = self._client.get_shell_msg(timeout=REPLY_S)
            if reply["parent_header"].get("msg_id") == sent:
                break
        content: dict[str, Any] = reply["content"]
        return Cell(output, content.get("ename") if content["status"] == "error" else None)

    def run(self, code: str) -> str:
        """Run a cell that must succeed; return its output."""
        cell = self.finish(self._client.execute(code))
        assert cell.error is None, cell.output
        return cell.output.strip()

    def _output(self, sent: str, until: str | None = None) -> str:
        """Collect the output of a cell, up to its end or to a word."""
        found = ""
        deadline = time.monotonic() + REPLY_S
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                assert self._manager.is_alive(), f"the kernel has died; it printed {found}"
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            found += content.get("text", "") + "\n".join(content.get("traceback", ()))
            if (until and until in found) or content.get("execution_state") == "idle":
                return found
        raise TimeoutError(f"the cell did not end; it printed {found}")


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """Make the event loop of the client, which is never closed, before file descriptors are counted."""
    loop = jupyter_core_utils.ensure_event_loop()
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Return a kernel for all tests that leave it unchanged."""
    with Notebook(tmp_path_factory.mktemp("kernel")) as notebook:
        yield notebook


@pytest.fixture
def notebook(kernel: Notebook, tmp_path: Path) -> Iterator[Notebook]:
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})\nckpt = aiockpt.AsyncCheckpointer()")
    yield kernel
    assert kernel.run("await ckpt.aclose()\nprint(engines())") == "[]"


def assert_saved(path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.load(path)["step"] == 3
        assert ckpt.verify(path).ok


def test_cells_await_one_operation_after_the_other(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("await ckpt.save(STATE, 'a')")
    assert notebook.run("await ckpt.save(STATE, 'b')\nprint(is_same(await ckpt.load('a')))") == "True"
    notebook.run("save = ckpt.save(STATE, 'c')")
    notebook.run("await save.staged")
    assert notebook.run("print((await save.written).tensors)") == "1"
    assert notebook.run("async with ckpt.open('c') as reader:\n    print(len(await reader.read('x')))") == "1000"
    assert notebook.run("async with aiockpt.AsyncCheckpointer() as other:\n    print(is_same(await other.load('b')))")
    for name in "abc":
        assert_saved(tmp_path / name)


def test_a_synchronous_checkpointer_in_cells(notebook: Notebook) -> None:
    notebook.run("plain = aiockpt.SyncCheckpointer()\nplain.save(STATE, 'a')\nplain.save(STATE, 'b')")
    assert notebook.run("print(is_same(plain.load('a')), is_same(plain.load('b')))") == "True True"
    notebook.run("stage, write = plain.submit(STATE, 'c')")
    assert notebook.run("stage.result()\nprint(write.result(60).tensors)") == "1"
    notebook.run("plain.close()")


def test_a_blocking_cell_does_not_delay_a_save(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("save = ckpt.save(STATE, 'a')")
    notebook.run("while not save.written.done():\n    pass")
    assert_saved(tmp_path / "a")
    notebook.run("print(ckpt.save(STATE, 'b').written.result(60))")
    assert_saved(tmp_path / "b")


def test_nest_asyncio_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("nest_asyncio")
    with Notebook(tmp_path) as notebook:
        _use_nest_asyncio(notebook)


def _use_nest_asyncio(notebook: Notebook) -> None:
    apply = "import nest_asyncio\nnest_asyncio.apply()"
    nested = """
async def main(name):
    await ckpt.save(STATE, name, overwrite=True)
    return is_same(await ckpt.load(name))

print(asyncio.run(main('a')), asyncio.get_event_loop().run_until_complete(main('b')), await main('c'))
"""
    notebook.run("ckpt = aiockpt.AsyncCheckpointer()\nawait ckpt.save(STATE, 'first')\nsave = ckpt.save(STATE, 'over')")
    notebook.run(apply)
    assert notebook.run("print((await save).tensors, is_same(await ckpt.load('first')))") == "1 True"
    assert notebook.run(nested) == "True True True"
    notebook.run("await ckpt.aclose()\nckpt = aiockpt.AsyncCheckpointer()")  # its engine starts after apply()
    assert notebook.run(nested) == "True True True"
    notebook.run("with aiockpt.SyncCheckpointer() as plain:\n    plain.save(STATE, 'd')\n    plain.load('d')")
    notebook.run(apply)
    assert notebook.run(nested) == "True True True"


def test_interrupting_an_awaiting_cell_does_not_stop_the_save(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("storage, save = gated()\nawait storage.reached['commit']")
    # ipykernel handles an interrupt only when its loop wakes up the next time, for any reason.
    waiting = notebook.start("ticks = asyncio.ensure_future(tick())\nprint('running', flush=True)\nawait save")
    notebook.interrupt()
    assert notebook.finish(waiting).error == "CancelledError"
    notebook.run("ticks.cancel()")
    assert not (tmp_path / "held").exists()
    notebook.run("storage.open('commit')")
    assert notebook.run("print((await save).tensors, is_same(await ckpt.load('held')))") == "1 True"


def test_interrupting_a_blocking_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("storage, save = gated()\nawait storage.reached['commit']")
    waiting = notebook.start("print('running', flush=True)\nsave.written.result()")
    notebook.interrupt()
    assert notebook.finish(waiting).error == "KeyboardInterrupt"
    notebook.run("storage.open('commit')\nawait save")
    assert_saved(tmp_path / "held")


# Runs before the engines, which registered earlier, wait for saves in flight; functions of `atexit` run too late.
AT_THE_END = "threading._register_atexit(storage.open, 'commit')"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["restart", "shutdown"])
def test_a_kernel_that_ends_finishes_saves_in_flight(how: str, tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.run("ckpt = aiockpt.AsyncCheckpointer()\nstorage, save = gated()\nawait storage.reached['commit']")
        assert not (tmp_path / "held").exists()
        notebook.run(AT_THE_END)
        if how == "restart":
            notebook.restart()
            assert notebook.run("print('ckpt' in globals())") == "False"
            notebook.run("ckpt = aiockpt.AsyncCheckpointer()")
            assert notebook.run("print(is_same(await ckpt.load('held')))") == "True"
    assert_saved(tmp_path / "held")
    assert [entry.name for entry in tmp_path.iterdir()] == ["held"]


@pytest.mark.slow
def test_the_next_kernel_removes_the_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        notebook.run("ckpt = aiockpt.AsyncCheckpointer()\nstorage, save = gated()\nawait storage.reached['commit']")
        notebook.run("import os, signal")
        notebook._client.execute("os.kill(os.getpid(), signal.SIGKILL)")
        notebook.restart()
        assert not (tmp_path / "held").exists()
        notebook.run("ckpt = aiockpt.AsyncCheckpointer()\nawait ckpt.save(STATE, 'held')")
    assert_saved(tmp_path / "held")
    assert [entry.name for entry in tmp_path.iterdir()] == ["held"]


@pytest.mark.slow
def test_unclosed_checkpointers(tmp_path: Path) -> None:
    with Notebook(tmp_path) as notebook:
        for name in "abc":
            notebook.run(f"ckpt = aiockpt.AsyncCheckpointer()\nsave = ckpt.save(STATE, {name!r})")
    for name in "abc":
        assert_saved(tmp_path / name)
