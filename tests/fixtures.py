"""Fixtures of all tests, and a check for leaks after every test; the processes that run tests import it."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import aiockpt
from aiockpt import sync_checkpointer
from aiockpt.staging.pool import ChunkPool
from aiockpt.storage.local import replacing
from tests import forked_python
from tests.memory import settled_bytes
from tests.object_server import start_server
from tests.places import ServerPath, left_in
from tests.server_storage import ServerStorage


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Return freed memory to the system after each file."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        settled_bytes()


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open what stays open in a process, such as uvloop's pipe, before leaks are counted."""
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(1)}, tmp_path_factory.mktemp("warm") / "c")
    gc.collect()  # the tests that are left out
    gc.freeze()  # the imported modules: scanning them in every collection takes a sixth of the time of all tests
    gc.enable()
    settled_bytes()


@pytest.fixture(scope="session")
def _pythons() -> Iterator[str]:
    with forked_python.started("torch", "aiockpt") as folder:
        yield folder


@pytest.fixture(scope="session")
def python(_pythons: str) -> list[str]:
    """Return the command line of a Python that has imported aiockpt; see `tests.forked_python`."""
    return forked_python.command(_pythons, "aiockpt")


@pytest.fixture(scope="session")
def python_with_torch(_pythons: str) -> list[str]:
    """Return the command line of a Python that has imported torch, but nothing else; see `tests.forked_python`."""
    return forked_python.command(_pythons, "torch")


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer() as made:
        yield made


@pytest.fixture(scope="session")
def forks() -> None:
    """Start the server that ranks and programs are forked from, before file descriptors and children are counted."""
    from tests.ranks import world  # not for a machine with the fake device alone

    world.start_server()


@pytest.fixture(scope="session")
def _server() -> Iterator[str]:
    with start_server() as url:
        ServerStorage(url).objects.remove("")  # this thread's connection stays open
        yield url


@pytest.fixture
def server_url(_server: str) -> Iterator[str]:
    """Return the URL of a server of objects; a test leaves none of an unfinished save."""
    yield _server
    left = left_in(_server)
    ServerStorage(_server).objects.remove("")
    assert not left, f"objects left: {left}"


@pytest.fixture(params=["local", "server"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, server_url: str) -> Path | ServerPath:
    """Return a directory where nothing is: in the file system, and in a server."""
    return tmp_path if request.param == "local" else ServerPath(f"{server_url}/{tmp_path.name}")


def _open_files(process: psutil.Process) -> int:
    """Count file descriptors, except those of CUDA, which opens them at any time."""
    if not torch.cuda.is_available():
        return process.num_fds()
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            count += not os.readlink(link).startswith(("/dev/nvidia", "anon_inode:"))
    return count


def _children(process: psutil.Process) -> set[psutil.Process]:
    try:  # cheap checks first: psutil looks at all processes of the machine
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return set(process.children())
    found: set[psutil.Process] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):  # it has just ended
            found |= {psutil.Process(int(pid)) for pid in (task / "children").read_text().split()}
    return found


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Assert that a test leaves no thread, file descriptor, lease, child process or hidden directory."""
    pools: list[ChunkPool] = []
    make = ChunkPool.__init__

    def recorded(self: ChunkPool, *args, **kwargs) -> None:
        make(self, *args, **kwargs)
        pools.append(self)

    monkeypatch.setattr(ChunkPool, "__init__", recorded)
    process = psutil.Process()
    before = _open_files(process)
    servers = _children(process)  # these live as long as the test run, such as the server of tests/ranks
    monkeypatch.setattr(sync_checkpointer, "IDLE_S", 0.0)
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("aiockpt"):
            thread.join(10)  # one whose work is done ends by itself, as do those of the shared checkpointer
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("aiockpt")]
    assert not left, f"threads left: {left}"
    assert [pool.leased for pool in pools] == [0] * len(pools)
    assert not _children(process) - servers
    hidden = [str(path) for path in tmp_path.rglob(".aiockpt-*")]
    assert not hidden, f"unfinished checkpoints left: {hidden}"
    deadline = time.monotonic() + 10  # other threads, such as those of a DataLoader, may still be closing files
    while _open_files(process) > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    assert _open_files(process) <= before, f"{_open_files(process) - before} file descriptors left"


@pytest.fixture(autouse=True)
def no_known_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which file systems can exchange names: a test may make them answer otherwise."""
    monkeypatch.setattr(replacing, "_EXCHANGES", {})


@pytest.fixture(autouse=True)
def seeded() -> None:
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # for devices that may come later, torch would keep a stack trace of each test
        torch.default_generator.manual_seed(0)
