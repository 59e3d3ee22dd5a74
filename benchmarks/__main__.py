"""The command line: ``python -m benchmarks NAME [options]``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import math
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import benchmarks
from benchmarks import matrix
from benchmarks.harness import time_limits
from benchmarks.harness.time_limits import Limits
from benchmarks.limits.machine import Others
from benchmarks.report import readme
from benchmarks.report.figures import title_of

MODULES = {
    "save": "benchmarks.measured.save",
    "load": "benchmarks.measured.load",
    "slice": "benchmarks.measured.slice",
    "open": "benchmarks.measured.open",
    "small": "benchmarks.measured.small",
    "blocked-loop": "benchmarks.measured.blocked_loop",
    "new-process": "benchmarks.measured.new_process",
    "startup": "benchmarks.measured.startup",
    "models": "benchmarks.measured.models",
    "live": "benchmarks.measured.live",
    "sweep": "benchmarks.measured.sweep",
    "rows": "benchmarks.measured.rows",
    "growth": "benchmarks.measured.growth",
    "lag": "benchmarks.measured.lag",
    "ranks": "benchmarks.ranks.sharded",
    "safetensors-ranks": "benchmarks.ranks.safetensors_files",
    "share": "benchmarks.ranks.share",
    "scale": "benchmarks.ranks.scale",
    "compress": "benchmarks.measured.compress",
    "delta": "benchmarks.measured.delta",
    "writers": "benchmarks.measured.writers",
    "training": "benchmarks.measured.training",
    "objects": "benchmarks.measured.objects",
    "tiers": "benchmarks.measured.tiers",
    "integrations": "benchmarks.integrations.frameworks",
    "gpu": "benchmarks.gpu.parts",
    "crash": "benchmarks.crash.campaigns",
    "soak": "benchmarks.crash.soak",
}

OPTIONS: dict[str, dict[str, Any]] = {
    "gib": {"type": float, "default": 2.0, "help": "the size of the state, in GiB"},
    "tensors": {"type": int, "default": 168, "help": "the number of tensors of the state"},
    "count": {"type": int, "default": 100_000, "help": "the number of small tensors"},
    "nbytes": {"type": int, "default": 1024, "help": "the size of each small tensor, in bytes"},
    "steps": {"type": int, "default": 24, "help": "the number of training steps"},
    "every": {"type": int, "default": 4, "help": "training steps between saves"},
    "rounds": {"type": int, "help": "the number of rounds, after a warm-up that does not count"},
    "only": {"help": "the contenders to run: parts of their names, separated by commas"},
    "load": {"action": "store_true", "help": "also load the whole state with every contender"},
    "ranks": {"help": "the numbers of processes, or of simulated ranks, separated by commas"},
    "items": {
        "default": "1000,10000,100000",
        "help": "the numbers of tensor parts on each rank, separated by commas",
    },
    "world": {"default": "2,4,8,16,32", "help": "the numbers of real processes, separated by commas"},
    "limit": {"type": float, "default": 120.0, "help": "the time limit of one save, in seconds"},
    "work": {"help": "the kinds of work: parts of their names, separated by commas"},
    "alone": {"type": float, "default": 1.0, "help": "how long the work runs alone before each save, in seconds"},
    "device": {"choices": ("cuda", "cpu"), "default": "cuda", "help": "where the state is; cpu is a small dry run"},
    "part": {"help": "the parts of the benchmark to run: parts of their names, separated by commas"},
    "seconds": {"type": float, "default": 420.0, "help": "the time after which no round begins, in seconds"},
    "full": {"action": "store_true", "help": "try everything, until the time is over"},
    "hold": {"choices": ("sleep", "torch", "python"), "help": "the work that holds the loop (sleep, then torch)"},
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a subcommand for each benchmark."""
    root = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=benchmarks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = root.add_subparsers(dest="name", required=True, metavar="NAME")
    modules = {name: importlib.import_module(path) for name, path in MODULES.items()}
    for name, module in modules.items():
        command = names.add_parser(name, help=_first_line(module).replace("%", "%%"))
        _add_options(command, {option: _with_default(OPTIONS[option], module, option) for option in module.OPTIONS})
    whole = names.add_parser("all", help=_first_line(matrix))
    _add_options(whole, {"gib": OPTIONS["gib"], "rounds": OPTIONS["rounds"], "only": {"help": "the sections to run"}})
    whole.add_argument("--out", type=Path, required=True, help="the directory for figures, tables and pictures")
    page = names.add_parser("readme", help=_first_line(readme))
    page.add_argument("--results", type=Path, default=readme.RESULTS, help="the directory with the results")
    return root


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").splitlines()[0]


def _with_default(option: Mapping[str, Any], module: ModuleType, name: str) -> dict[str, Any]:
    """Return the argparse keywords of an option, with the benchmark's own default shown in the help."""
    default = getattr(module, "DEFAULTS", {}).get(name, option.get("default"))
    shown = "" if default is None else " (%(default)s)"
    return {**option, **({} if default is None else {"default": default}), "help": option["help"] + shown}


def _add_options(command: argparse.ArgumentParser, options: Mapping[str, Mapping[str, Any]]) -> None:
    for name, option in options.items():
        command.add_argument(f"--{name}", **option)
    command.add_argument(
        "--dir",
        "--directory",
        type=Path,
        help="a directory on the disk to measure (by default the system's temporary directory)",
    )
    command.add_argument(
        "--json",
        type=Path,
        help="the file for the figures (by default a temporary one; of gpu one of the results)",
    )
    command.add_argument("--time-limit", type=float, help="the seconds after which no round begins")
    command.add_argument("--run-limit", type=float, help="the seconds after which a run's process is killed")
    command.add_argument("--without", action="append", default=[], metavar="NAME=REASON", help="leave a contender out")


def run_one(options: argparse.Namespace) -> int:
    """Run a benchmark in this process, print its report and write its figures; return the exit code."""
    module = importlib.import_module(MODULES[options.name])
    time_limits.current.set(
        Limits(
            options.run_limit,
            time.monotonic() + (options.time_limit or math.inf),
            matrix.running(options.json) if options.run_limit else None,
            dict(each.split("=", 1) for each in options.without),
        )
    )
    with tempfile.TemporaryDirectory(prefix="aiockpt-benchmark-", dir=options.dir) as directory, Others() as others:
        report = asyncio.run(module.run(options, Path(directory)))
    report.machine["share_of_cores_used_by_others"] = others.share
    report.remarks.append(f"other processes, and the kernel for nobody, used {others.share:.0%} of the cores meanwhile")
    rounds = {len(run.samples) for table in report.tables for run in table.runs if run.samples}
    for table in report.tables:
        table.title = title_of(table.title, {len(run.samples) for run in table.runs} - {0})
    if len(rounds) > 1 or (options.time_limit and rounds):
        report.remarks.append(f"rounds that were measured: {' or '.join(map(str, sorted(rounds)))}")
    report.show()
    report.write(options.json)
    print(f"figures: {options.json}")
    missed = [bar for bar in report.bars if bar.passed is False]
    return int(bool(missed) and getattr(module, "JUDGED", False))


def default_json(name: str) -> Path:
    """Return the default file for the figures of a benchmark."""
    if name == "gpu" and torch.cuda.is_available():  # such a machine is rarely at hand: its figures are kept
        return readme.RESULTS / "gpu.json"
    return Path(tempfile.gettempdir()) / f"benchmark-{name}.json"


def main() -> int:
    """Run the command line; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary files are removed
    # The peers warn on each save: no process group, no GPU to pin memory for.
    warnings.filterwarnings("ignore", module=r"torch\..*")
    logging.getLogger("torch_checkpointing").setLevel(logging.CRITICAL)
    options = parser().parse_args()
    if options.name == "readme":
        return readme.rewrite(options.results)
    if options.name == "all":
        return matrix.run(options)
    options.json = options.json or default_json(options.name)
    return run_one(options)


if __name__ == "__main__":
    sys.exit(main())
