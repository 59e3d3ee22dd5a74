"""Loads and saves, each in processes of its own that take turns: wall time and CPU time, user and system.

Loads are from the page cache: each process reads the checkpoint once before it measures. Of the samples of a process,
the one that took the least wall time counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.harness.measure import Sample
    from benchmarks.report.report import Report

OPTIONS = ("gib", "rounds", "part", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 7
REPEATS = 5  # in one process
_ROOT = Path(__file__).parents[2]


def checkpointer_load(**options: Any) -> Callable[[Path], Callable[[], object]]:
    """Return the contender that loads new tensors."""

    def prepare(directory: Path) -> Callable[[], object]:
        import aiockpt

        checkpointer = aiockpt.SyncCheckpointer()
        return lambda: checkpointer.load(directory / "aiockpt", **options)

    return prepare


def checkpointer_fill(directory: Path) -> Callable[[], object]:
    """Return the contender that loads into a target."""
    import torch

    import aiockpt

    checkpointer = aiockpt.SyncCheckpointer()
    target = {name: torch.zeros_like(value) for name, value in checkpointer.load(directory / "aiockpt").items()}
    return lambda: checkpointer.load(directory / "aiockpt", target)


def safetensors_load(directory: Path) -> Callable[[], object]:
    """Return the peer that reads."""
    from safetensors.torch import load_file

    return lambda: load_file(directory / "state.safetensors", backend="pread")


def checkpointer_save(directory: Path) -> Callable[[], object]:
    """Return the contender that saves durably."""
    import torch

    import aiockpt

    state = torch.load(directory / "state.pt")
    checkpointer = aiockpt.SyncCheckpointer()
    path = directory / f"new-{os.getpid()}"
    return lambda: checkpointer.save(state, path, overwrite=True)


def safetensors_save(directory: Path) -> Callable[[], object]:
    """Return the peer that saves, syncs and renames."""
    import torch
    from safetensors.torch import save_file

    state = torch.load(directory / "state.pt")
    path, hidden = directory / f"new-{os.getpid()}.safetensors", directory / f".new-{os.getpid()}"

    def save() -> None:
        save_file(state, hidden)
        for name, flags in ((hidden, os.O_RDONLY), (directory, os.O_RDONLY)):
            if name == directory:
                os.rename(hidden, path)
            fd = os.open(name, flags)
            os.fsync(fd)
            os.close(fd)

    return save


def copy_and_crc(directory: Path) -> Callable[[], object]:
    """Return the limit of a save's CPU time: each tensor copied in pieces, with the CRC of each piece."""
    import ctypes

    import torch
    from isal.isal_zlib import crc32

    state = torch.load(directory / "state.pt")
    buffer = bytearray(1 << 20)
    view, address = memoryview(buffer), ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def work() -> None:
        for tensor in state.values():
            for at in range(0, tensor.nbytes, len(buffer)):
                count = min(len(buffer), tensor.nbytes - at)
                ctypes.memmove(address, tensor.data_ptr() + at, count)
                crc32(view[:count])

    return work


def list_steps(directory: Path) -> Callable[[], object]:
    """Return the command line's list."""
    from aiockpt.cli.ls import ls
    from aiockpt.manager.scan import DEFAULT_NAMES

    def work() -> None:
        sys.stdout.flush()
        kept = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        try:
            ls(str(directory / "run"), names=DEFAULT_NAMES)
            sys.stdout.flush()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(null)

    return work


LOADS = {
    "aiockpt, new tensors": checkpointer_load(),
    "aiockpt, new tensors, no CRC": checkpointer_load(verify=False),
    "aiockpt, keys=": checkpointer_load(keys=["*"]),
    "aiockpt, into a target": checkpointer_fill,
    "safetensors pread": safetensors_load,
}
SAVES = {"aiockpt": checkpointer_save, "safetensors, fsync, rename": safetensors_save}


def small_state(count: int, nbytes: int) -> dict[str, Any]:
    """Return many small tensors; flat, so that all contenders return the same."""
    from benchmarks.harness.states import small_state as make

    return {name.replace(".", "_"): value for name, value in make(count, nbytes).items()}


def moe_state(nbytes: int) -> dict[str, Any]:
    """Return the state of a mixture of experts."""
    from benchmarks.measured.models import state_of

    return {name.replace(".", "_"): value for name, value in state_of("MoE-like", nbytes).items()}


def even_state(nbytes: int) -> dict[str, Any]:
    """Return the state of a small transformer."""
    from benchmarks.harness.states import transformer_state

    return {name.replace(".", "_"): value for name, value in transformer_state(nbytes, 168).items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work.

    Attributes:
        title: what is done.
        state: returns the state, for a size of 1 GiB or a part of it; None: a run with many steps.
        works: the contenders.
    """

    title: str
    state: Callable[[float], dict[str, Any]] | None
    works: dict[str, Callable[[Path], Callable[[], object]]]


def _saves(mib: int, **more: Callable[[Path], Callable[[], object]]) -> Row:
    works = {**SAVES, **{name.replace("_", " "): work for name, work in more.items()}}
    return Row(f"save: {mib} MiB in 168 tensors", lambda gib: even_state(int(gib * (mib << 20))), works)


ROWS = {
    "small-load": Row("load, cached: 50,000 tensors of 1 KiB", lambda gib: small_state(int(gib * 50_000), 1024), LOADS),
    "moe-load": Row("load, cached: MoE-like, 0.5 GiB", lambda gib: moe_state(int(gib * (1 << 29))), LOADS),
    "save-16": _saves(16),
    "save-64": _saves(64),
    "save-256": _saves(256),
    "save-1024": _saves(1024, CRC_and_copy=copy_and_crc),
    "ls": Row("the entries of a run with 10,000 steps", None, {"aiockpt ls": list_steps}),
}


def make(row: str, gib: float, directory: Path) -> None:
    """Write what the contenders of a row read."""
    import torch
    from safetensors.torch import save_file

    import aiockpt

    make_state = ROWS[row].state
    if make_state is None:
        with aiockpt.SyncCheckpointer() as checkpointer:
            checkpointer.save({"weight": torch.zeros(4)}, directory / "run" / "step-0")
        _copy_steps(directory / "run", int(gib * 10_000))
        return
    state = make_state(gib)
    if row.startswith("save"):
        torch.save(state, directory / "state.pt")
        return
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, directory / "aiockpt")
    save_file(state, directory / "state.safetensors")


def _copy_steps(run: Path, count: int) -> None:
    files = {file.name: file.read_bytes() for file in (run / "step-0").iterdir()}
    for number in range(1, count):
        folder = run / f"step-{number}"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)


def worker(row: str, name: str, directory: Path) -> None:
    """Measure a contender in this process, and print the figures."""
    from benchmarks.limits import machine

    machine.bring_into_cache(file for file in directory.rglob("*") if file.is_file() and row.endswith("load"))
    work = ROWS[row].works[name](directory)
    work()
    found = []
    for _ in range(REPEATS):
        used, began = time.process_time(), time.perf_counter()
        result = work()
        found.append((time.perf_counter() - began, time.process_time() - used))
        del result
    print(json.dumps(min(found)), flush=True)
    os._exit(0)  # its threads need not end


def _in_process(call: str) -> str:
    """Run a function of this module in a new process; return what it prints."""
    code = f"from benchmarks.measured import rows; from pathlib import Path; rows.{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return done.stdout


@dataclass(frozen=True, slots=True)
class _InProcesses:
    """A contender, in a new process each time."""

    row: str
    name: str
    directory: Path
    note: str = ""

    async def measure(self) -> Sample:
        call = f"worker({self.row!r}, {self.name!r}, Path({str(self.directory)!r}))"
        took, used = json.loads((await asyncio.to_thread(_in_process, call)).splitlines()[-1])
        return {"wall_s": took, "cpu_s": used}


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    from benchmarks.harness.measure import interleave
    from benchmarks.harness.selection import chosen
    from benchmarks.limits import machine
    from benchmarks.report.report import Report, Table, duration, spread

    async def once(each: _InProcesses, _number: int) -> Sample:
        return await each.measure()

    rounds, gib = options.rounds or ROUNDS, min(1.0, options.gib)
    report = Report("rows", vars(options), machine.facts(directory), [], [])
    for row, each in ROWS.items():
        if options.part and not any(part.strip() in row for part in options.part.split(",")):
            continue
        folder = directory / row
        folder.mkdir()
        await asyncio.to_thread(_in_process, f"make({row!r}, {gib!r}, Path({str(folder)!r}))")
        contenders = chosen([_InProcesses(row, name, folder) for name in each.works], options.only)
        runs = await interleave(contenders, rounds, once, warm_up=False)
        columns = {
            "wall (min..max)": spread("wall_s"),
            "CPU": lambda run: duration(run.median("cpu_s")),
            "CPU, least": lambda run: duration(run.least("cpu_s")),
        }
        size = "" if gib == 1 else f", {gib:g} of it"
        title = f"{each.title}{size}, in a process of its own, medians of {rounds} rounds"
        report.tables.append(Table(title, columns, runs, "wall_s", "CRC"))
        machine.remove(folder)
    return report
