"""How long a framework's own save call blocks training: with its stock way to save, and with ours.

Each framework that is installed runs in a process of its own, with one model for all its contenders.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path

from benchmarks.harness.measure import Runs
from benchmarks.harness.selection import chosen
from benchmarks.limits import machine
from benchmarks.report.bars import Bar
from benchmarks.report.report import Report, Table, duration, median_time, spread

OPTIONS = ("rounds", "only")
ROUNDS = 6
OURS, STOCK = "aiockpt", "stock"
# Of our blocked time, to that of the fastest stock way.
BOUNDS = {"ray": 1 / 3, "lightning": 1 / 4, "transformers": 1 / 10, "accelerate": None, "torchtitan": 1 / 4}
LIMIT_S = 1200.0

_PROGRAM = """
import importlib, json, sys
from pathlib import Path
found = importlib.import_module(f"benchmarks.integrations.on_{sys.argv[1]}").rows(Path(sys.argv[2]), int(sys.argv[3]))
Path(sys.argv[4]).write_text(json.dumps(found))
"""


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    rounds = options.rounds or ROUNDS
    tables, bars, missing = [], [], []
    for name in BOUNDS:
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name} is not installed: pip install 'aiockpt[{name}]'")
            continue
        runs = chosen(await _measured(name, directory, rounds), options.only)
        columns = {
            "save call blocked": median_time("blocked_s"),
            "(min..max)": spread("blocked_s"),
            "first save": lambda run: duration(run.first.get("blocked_s", float("nan"))),
        }
        tables.append(Table(f"{name}: {rounds} saves, blocked within its save call", columns, runs, "blocked_s"))
        bars += _bars(name, runs)
    return Report("integrations", vars(options), machine.facts(directory), tables, bars, missing)


async def _measured(name: str, directory: Path, rounds: int) -> list[Runs]:
    """Measure one framework in a process of its own."""
    answer = directory / f"{name}.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, name, str(directory / name), str(rounds), str(answer)
    )
    try:
        await asyncio.wait_for(process.wait(), LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.returncode:
        return [Runs(name, error=f"the process has ended with {process.returncode}")]
    found: dict[str, list[float]] = json.loads(answer.read_text())
    return [
        Runs(text, "", {"blocked_s": blocked[0]}, [{"blocked_s": each} for each in blocked[1:]])
        for text, blocked in found.items()
    ]


def _bars(name: str, runs: list[Runs]) -> list[Bar]:
    """Compare each of ours with the fastest stock way."""
    stock = [run.median("blocked_s") for run in runs if run.name.startswith(STOCK)]
    ours = [run for run in runs if run.name.startswith(OURS)]
    if not stock or not ours:
        return []
    best = min(stock)
    return [
        Bar(
            f"{run.name} in {name} : its fastest stock way, blocked", run.median("blocked_s") / best, BOUNDS[name], True
        )
        for run in ours
    ]
