"""Event loops and cases that tests run with, and a check for leaks after every test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.memory import settled_bytes
from tests.object_server import start_server
from tests.places import ServerPath, left_in
from tests.server_storage import ServerStorage

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell's script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so children do not inherit that it is ignored
# On a busy machine, any example may take long.
for name, count in (("few", 15), ("many", 50)):
    settings.register_profile(name, deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("few")

LONGEST_TEST_S = 600  # then the test hangs, and fails with the stacks of all threads
WORKER_BYTES = 700 << 20  # what a process of the run takes, with the processes that its tests start
TESTS = Path(__file__).parent
MARKED = {
    "ranks": (
        "manager/test_mirror_ranks.py",
        "manager/test_own_disks.py",
        "manager/test_ranks.py",
        "manager/test_replica_ranks.py",
        "objects/test_ranks.py",
        "ranks/test_described.py",
        "ranks/test_filters.py",
        "ranks/test_fsdp_load.py",
        "ranks/test_live.py",
        "ranks/test_one_product.py",
        "ranks/test_plain_ranks.py",
        "ranks/test_plain_values.py",
        "ranks/test_policies.py",
        "ranks/test_replicas.py",
        "ranks/test_resharding.py",
        "ranks/test_safetensors.py",
        "ranks/test_shared_reads.py",
        "ranks/test_tied.py",
        "ranks/test_timelines.py",
        "ranks/test_transaction_files.py",
        "ranks/test_transactions.py",
        "ranks/test_world.py",
    ),
    "kills": (
        "crash/test_matrix.py",
        "crash/test_mounts.py",
        "crash/test_power.py",
        "faults/test_calls.py",
        "faults/test_descriptors.py",
        "faults/test_special_files.py",
        "manager/test_histories.py",
        "manager/test_mirror_histories.py",
        "manager/test_programs.py",
        "manager/test_rank_histories.py",
        "objects/test_faults.py",
        "objects/test_histories.py",
        "objects/test_mirror.py",
        "objects/test_single.py",
        "ranks/test_failures.py",
        "ranks/test_strikes.py",
        "storage/test_hosts_histories.py",
        "writing/test_orphans.py",
    ),
    "docs": (
        "cli/test_readme.py",
        "environments/test_kernel.py",
        "ranks/test_readme.py",
        "test_benchmark_results.py",
    ),
    "slow": (
        "cli/test_bench.py",
        "cli/test_completion.py",
        "manager/test_union.py",
        "objects/test_conformance.py",
        "objects/test_dcp.py",
        "objects/test_use.py",
    ),
}
"""Files whose tests have a mark, but for those that are marked ``main``, which run by default."""
FAKE = TESTS / "fakecuda"
NEEDS = {"gpu", "sim", "fake", "full"}
"""Tests with such a mark run if it is asked for, in a file that is named as well."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in several processes, each file in one of them; named tests and GPU tests in one process.

    Half of the time the tests wait for disks and for other processes: so there is one process more than cores, if the
    memory suffices. The files that are marked come first, for they take the longest.
    """
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS and config.option.markexpr != "gpu"
    is_worker = hasattr(config, "workerinput")  # a worker must not start workers of its own
    if whole and not is_worker and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        number = min((psutil.cpu_count() or 1) + 1, psutil.virtual_memory().available // WORKER_BYTES)
        config.option.numprocesses, config.option.dist, config.option.loadscopereorder = number, "loadfile", False
        config.pluginmanager.register(_Scheduling())
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None and not config.option.full:
        config.option.timeout = LONGEST_TEST_S


class _Scheduling:
    """A plug-in: the tests that start ranks are all in one process, as several worlds at once need much memory."""

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadFileScheduling

        class ByFileOrRanks(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file = nodeid.partition("::")[0].removeprefix("tests/")
                return "ranks" if file.startswith("ranks/") or file in MARKED["ranks"] else file

        return ByFileOrRanks(config, log)


LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
BOTH = {"cancellation", "core", "engine", "environments"}
"""Folders of tests about waiting, cancelling and closing, where the loop matters: the second one is ``slow``."""


def pytest_configure(config: pytest.Config) -> None:
    """Start one server of programs for all workers; see `tests.forked_python`."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # glibc would keep memory for each thread that ever was
        servers = contextlib.ExitStack()
        servers.enter_context(forked_python.shared())
        config.add_cleanup(servers.close)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the cases that only repeat what others find")
    parser.addoption("--check-order", action="store_true", help="check the order of all accesses in tests/gpu")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item):
    """Run an async test on both loops if the caller's loop may matter, else on one."""
    if config.getoption("full") or item.path.parent.name in BOTH or item.get_closest_marker("both_loops"):
        return LOOPS
    name = _loop_of(item.name)
    return {name: LOOPS[name]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable the garbage collector while modules are imported: it would find little and take long."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the files in `MARKED`, and deselect what is left out; refuse names that differ between runs."""
    if differ := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{differ[0]} has an address in its name: give the parameters ids")
    marks = {TESTS / file: mark for mark, files in MARKED.items() for file in files}
    for item in items:
        if item.path in marks and not item.get_closest_marker("main"):
            item.add_marker(marks[item.path])
        if FAKE in item.path.parents:
            item.add_marker("fake")
        if _is_of_other_loop(item):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path not in marks)
    named = {Path(arg.partition("::")[0]).resolve() for arg in config.args}
    kept = [item for item in items if _runs(item, config, named)]
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = kept


def _is_of_other_loop(item: pytest.Item) -> bool:
    """Whether a test runs on two loops, and this is the second one."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    factory = item.callspec.params.get("_asyncio_loop_factory")
    return factory is not None and factory is not LOOPS[_loop_of(item.originalname)]


def _loop_of(name: str) -> str:
    """Return the loop that a test runs on by default: half of a file's tests on each."""
    return list(LOOPS)[zlib.crc32(name.encode()) % 2]


def _runs(item: pytest.Item, config: pytest.Config, named: set[Path]) -> bool:
    """Whether a test is not left out: ``-m`` names one of its marks, or its file is named, or it has no such mark."""
    marks = {mark.name for mark in item.iter_markers()}
    asked = set(re.findall(r"\w+", config.getoption("markexpr")))
    is_full = config.getoption("full")
    if not (marks & NEEDS) <= (asked | {"full"} if is_full else asked - {"full"}):
        return False
    costs = marks & MARKED.keys()
    return not costs or bool(costs & asked) or is_full or item.path in named


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only tests/gpu with ``-m gpu``: the others import packages that a GPU machine may lack.

    The tests of the fake device can be imported where it is.
    """
    if collection_path == FAKE and importlib.util.find_spec("fakecuda") is None:
        return True
    if config.getoption("markexpr") != "gpu" or not collection_path.is_file():
        return None
    return True if collection_path.parent.name != "gpu" else None


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
