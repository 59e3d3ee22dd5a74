"""The tests that a command runs, and the processes and event loops that they run in.

The fixtures are in `tests.fixtures`. The process that starts others for the tests does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import re
import shlex
import signal
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests import forked_python
from tests.examples import PROFILES

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell's script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so children do not inherit that it is ignored
# On a busy machine, any example may take long.
for name, count in PROFILES.items():
    settings.register_profile(name, deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("few")

LONGEST_TEST_S = 600  # then the test hangs, and fails with the stacks of all threads
WORKER_BYTES = 700 << 20  # what a process of the run takes, with the processes that its tests start
TESTS = Path(__file__).parent
MARKED = {
    "ranks": (
        "manager/test_host_failures.py",
        "manager/test_mirror_ranks.py",
        "manager/test_own_disks.py",
        "manager/test_ranks.py",
        "objects/test_ranks.py",
        "ranks/test_described.py",
        "ranks/test_descriptors.py",
        "ranks/test_filters.py",
        "ranks/test_following.py",
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
        "notebooks/test_notebook.py",
        "ranks/test_readme.py",
        "test_benchmark_results.py",
    ),
    "slow": (
        "cli/test_bench.py",
        "cli/test_completion.py",
        "manager/test_union.py",
        "objects/test_conformance.py",
        "objects/test_dcp.py",
        "objects/test_outage.py",
        "objects/test_use.py",
    ),
}
"""Files whose tests have a mark, but for those that are marked ``main``, which run by default."""
LONGEST = (
    "manager/test_histories.py",
    "objects/test_histories.py",
    "crash/test_matrix.py",
    "test_benchmarks.py",
    "objects/test_outage.py",
    "test_recognition.py",
    "manager/test_mirror_histories.py",
    "engine/test_interrupts.py",
    "cli/test_demo.py",
    "faults/test_threads.py",
)
"""Files that come first: begun late, one of them would run on alone when all others have ended."""
FOLDERS = {"fakecuda": "fake", "gpu": "gpu"}
"""Folders whose tests have a mark and run with it alone: they need a device in their process."""
NEEDS = {*FOLDERS.values(), "full"}
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
PLACES = ("local", "server")
"""Of the fixture ``anywhere``: the second one of a test is ``slow``."""
BOTH = {"cancellation", "core", "engine", "environments"}
"""Folders of tests about waiting, cancelling and closing, where the loop matters: the second one is ``slow``."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures where tests run; or start the servers that fork workers, programs and ranks."""
    starts_workers = getattr(config.option, "numprocesses", None) and not config.option.collectonly
    if not starts_workers or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("tests.fixtures")
        return
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # glibc would keep memory for each thread that ever was
    servers = contextlib.ExitStack()
    servers.enter_context(forked_python.shared())
    config.add_cleanup(servers.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork the workers from a process that has imported what they need, so that they share the memory of that."""
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.join(forked_python.command(os.environ[forked_python.FOLDER], "worker"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the cases that only repeat what others find")
    parser.addoption("--check-order", action="store_true", help="check the order of all accesses in tests/gpu")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item):
    """Run an async test on both loops if the caller's loop may matter, else on one."""
    if config.getoption("full") or item.path.parent.name in BOTH or item.get_closest_marker("both_loops"):
        return LOOPS
    name = _half_of(item.name, [*LOOPS])
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
    for item in items:
        mark = _mark_of(item.path)
        if mark in NEEDS or (mark and not item.get_closest_marker("main")):
            item.add_marker(mark)
        if _is_other_half(item):
            item.add_marker("slow")
    items.sort(key=lambda item: (_rank_of(item.path), _mark_of(item.path) is None))
    named = _named(config)
    kept = [item for item in items if _runs(item, config, named)]
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = kept


def _is_other_half(item: pytest.Item) -> bool:
    """Whether a test runs on both loops, or in both places, and this is the second one."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    params, name = item.callspec.params, item.originalname
    loop, place = LOOPS[_half_of(name, [*LOOPS])], _half_of(name, PLACES)
    return params.get("_asyncio_loop_factory", loop) is not loop or params.get("anywhere", place) != place


def _half_of(name: str, both: Sequence[str]) -> str:
    """Return the one of two that a test uses by default: half of a file's tests each."""
    return both[zlib.crc32(name.encode()) % 2]


def _runs(item: pytest.Item, config: pytest.Config, named: set[Path]) -> bool:
    """Whether a test is not left out: ``-m`` names one of its marks, or its file is named, or it has no such mark."""
    marks = {mark.name for mark in item.iter_markers()}
    asked = _asked(config)
    is_full = config.getoption("full")
    if not (marks & NEEDS) <= (asked | {"full"} if is_full else asked - {"full"}):
        return False
    costs = marks & MARKED.keys()
    return not costs or bool(costs & asked) or is_full or item.path in named


def _asked(config: pytest.Config) -> set[str]:
    """Return the marks that ``-m`` names."""
    return set(re.findall(r"\w+", config.getoption("markexpr")))


def _named(config: pytest.Config) -> set[Path]:
    """Return the files and folders that the command line names."""
    return {Path(arg.partition("::")[0]).resolve() for arg in config.args}


@functools.cache
def _rank_of(path: Path) -> int:
    """Return when a file comes."""
    name = _name_of(path)
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def _name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


@functools.cache
def _mark_of(path: Path) -> str | None:
    """Return the mark that `MARKED` or `FOLDERS` gives to a file, or to a folder."""
    name = _name_of(path)
    folder = name.partition("/")[0]
    return FOLDERS.get(folder) or next((mark for mark, files in MARKED.items() if name in files), None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test can run.

    With the mark of a folder alone these are all others: a machine with a GPU may lack what they import.
    """
    mark = _mark_of(collection_path)
    if (only := config.getoption("markexpr")) in FOLDERS.values():
        return (collection_path.is_file() and mark != only) or None
    asked = _asked(config)
    if mark in NEEDS:
        return mark not in asked or None
    if mark is None or mark in asked or config.getoption("full") or collection_path in _named(config):
        return None
    return "mark.main" not in collection_path.read_text() or None
