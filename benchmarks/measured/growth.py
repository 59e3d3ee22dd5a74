"""Growth: CPU time and extra memory of a save by size and by number of tensors, and the wake-ups of an idle engine.

Each save is in a clean process. The state of the sizes has 168 tensors; that of the numbers tensors of 1 KiB. What does
not change per GiB, or per 1,000 tensors, grows as fast as the state.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness.measure import Runs, Sample
    from benchmarks.report.report import Report

OPTIONS = ("gib", "count", "rounds", "only")
DEFAULTS = {"gib": 1.0}
ROUNDS = 7

_KIB = 1 << 10
_SIZES = (1.0, 2.0, 4.0, 8.0)
_NUMBERS = (0.5, 1.0, 2.0)
_IDLE_S = 2.0
_ROOT = Path(__file__).parents[2]


def worker(kind: str, amount: float, directory: str) -> None:
    """Save once in this process, and print the CPU seconds of the save and of its call, and the extra bytes."""
    import aiockpt
    from benchmarks.harness.measure import PeakMemory
    from benchmarks.harness.states import small_state, transformer_state

    state = transformer_state(int(amount * (1 << 30)), 168) if kind == "GiB" else small_state(int(amount), _KIB)
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"warm": 1}, f"{directory}/warm")
        with PeakMemory() as memory:
            began = time.process_time()
            save = checkpointer.submit(state, f"{directory}/checkpoint")
            called = time.process_time()
            save.written.result()
            sample = {"cpu_s": time.process_time() - began, "call_s": called - began}
        sample["extra_bytes"] = memory.extra_bytes
        before = _switches()
        time.sleep(_IDLE_S)
        sample["wakeups"] = (_switches() - before - 1) / _IDLE_S  # less that of this thread
    print(json.dumps(sample), flush=True)
    os._exit(0)  # its threads need not end


def _switches() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


@dataclass(frozen=True, slots=True)
class _Save:
    """A save in a new process."""

    kind: str
    amount: float
    directory: Path
    note: str = ""

    @property
    def name(self) -> str:
        return f"aiockpt, {self.amount:,.6g} {self.kind}"

    def measure(self) -> Sample:
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:
            code = f"from benchmarks.measured import growth; growth.worker({self.kind!r}, {self.amount!r}, {folder!r})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        sample: Sample = json.loads(done.stdout.splitlines()[-1])
        per = self.amount if self.kind == "GiB" else self.amount / 1000
        return {**sample, "per_s": sample["cpu_s"] / per}


def fitting(gib: float, directory: Path) -> list[float]:
    """Return the sizes in GiB for which there is memory and disk space."""
    import psutil

    room = min(psutil.virtual_memory().available / 1.25 - (1 << 30), shutil.disk_usage(directory).free - (1 << 30))
    return [size for size in (gib * each for each in _SIZES) if size * (1 << 30) <= room]


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    from benchmarks.harness.measure import interleave
    from benchmarks.harness.selection import chosen
    from benchmarks.limits import machine
    from benchmarks.report.report import Report, Table, duration, median_time, most_mib, number

    async def once(each: _Save, _number: int) -> Sample:
        return await asyncio.to_thread(each.measure)

    def least(what: str, run: Runs) -> str:
        return duration(run.least(what))

    sizes = [_Save("GiB", size, directory) for size in fitting(options.gib, directory)]
    counts = [_Save("tensors", int(options.count * each), directory) for each in _NUMBERS]
    rounds = options.rounds or ROUNDS
    runs = await interleave(chosen([*sizes, *counts], options.only), rounds, once, warm_up=False)
    columns = {
        "CPU of a GiB, or of 1,000 tensors": median_time("per_s"),
        "least": lambda run: least("per_s", run),
        "CPU of the call": median_time("call_s"),
        "extra memory, MiB": most_mib("extra_bytes"),
        "wake-ups a second, when it is idle": lambda run: number(run.median("wakeups"), 1),
    }
    title = f"growth: a save in a clean process, medians of {rounds} rounds"
    return Report("growth", vars(options), machine.facts(directory), [Table(title, columns, runs, "cpu_s")], [])
