"""Event loops and cases that tests run with, and a check for leaks after every test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import uvloop
from hypothesis import HealthCheck, settings

import aiockpt
from aiockpt import sync_checkpointer
from aiockpt.staging.pool import ChunkPool
from aiockpt.storage.local import replacing
from tests import forked_python
from tests.object_server import start_server
from tests.places import ServerPath, left_in
from tests.server_storage import ServerStorage

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell's script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so children do not inherit that it is ignored
# On a busy machine, any example may take long.
settings.register_profile("busy", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in five processes, each file in one of them; named tests and GPU tests in one process.

    Half of the time the tests wait for disks and for other processes: four processes leave two cores idle for a quarter
    of the time. The files of `LONG` come first, the others in the order of their names.
    """
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS and config.option.markexpr != "gpu"
    is_worker = hasattr(config, "workerinput")  # a worker must not start workers of its own
    if whole and not is_worker and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist, config.option.loadscopereorder = 5, "loadfile", False
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None and not config.option.full:
        config.option.timeout = LONGEST_TEST_S


LONG = (
    "crash/test_matrix.py",
    "test_benchmarks.py",
    "ranks/test_safetensors.py",
    "faults/test_special_files.py",
    "ranks/test_strikes.py",
    "notebooks/test_notebook.py",
    "writing/test_orphans.py",
    "crash/test_mounts.py",
    "objects/test_single.py",
    "manager/test_own_disks.py",
    "integrations/test_ray.py",
)
"""Files that take a minute or so. They come first: at the end, the other processes would have no work left."""
LONGEST_TEST_S = 300  # then the test fails, with the stacks of all threads

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
BOTH = {"cancellation", "core", "engine", "environments"}
"""Folders of tests about waiting, cancelling and closing, where the caller's loop matters."""


def pytest_configure(config: pytest.Config) -> None:
    """Start one server of programs for all workers; see `tests.forked_python`."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        servers = contextlib.ExitStack()
        servers.enter_context(forked_python.shared())
        config.add_cleanup(servers.close)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the cases that only repeat what others find")
    parser.addoption("--check-order", action="store_true", help="check the order of all accesses in tests/gpu")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item):
    """Run an async test on both loops if the caller's loop may matter, else on one: half of a file's tests on each."""
    if config.getoption("full") or item.path.parent.name in BOTH or item.get_closest_marker("both_loops"):
        return LOOPS
    name = list(LOOPS)[zlib.crc32(item.name.encode()) % 2]
    return {name: LOOPS[name]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable the garbage collector while modules are imported: it would find little and take long."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``full`` or ``slow`` unless asked for; refuse names that differ between processes."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    if differ := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{differ[0]} has an address in its name: give the parameters ids")
    if not config.getoption("full"):
        left_out = {"full"} if config.getoption("markexpr") == "slow" else {"full", "slow"}
        kept = [item for item in items if left_out.isdisjoint(mark.name for mark in item.iter_markers())]
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only tests/gpu with ``-m gpu``: the others import packages that a GPU machine may lack."""
    if config.getoption("markexpr") != "gpu" or not collection_path.is_file():
        return None
    return True if collection_path.parent.name != "gpu" else None


@pytest.fixture(scope="session", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open what stays open in a process, such as uvloop's pipe, before leaks are counted."""
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(1)}, tmp_path_factory.mktemp("warm") / "c")
    gc.freeze()  # the imported modules: scanning them in every collection takes a sixth of the time of all tests
    gc.enable()


@pytest.fixture(scope="session")
def _pythons() -> Iterator[str]:
    with forked_python.started() as folder:
        yield folder


@pytest.fixture(scope="session")
def python(_pythons: str) -> list[str]:
    """Return the command line of a Python that has imported aiockpt; see `tests.forked_python`."""
    return forked_python.command(_pythons, "aiockpt")


@pytest.fixture(scope="session")
def python_with_torch(_pythons: str) -> list[str]:
    """Return the command line of a Python that has imported torch, but nothing else; see `tests.forked_python`."""
    return forked_python.command(_pythons, "torch")


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
    if sync_checkpointer._shared is not None:  # its threads end by themselves
        for thread in threading.enumerate():
            if thread.name.startswith("aiockpt"):
                thread.join(10)
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
