"""Startup: the import of a package and its first save or load of a tiny state, in a new process after ``import torch``.

``python -m benchmarks.measured.startup CONTENDER DIRECTORY startup`` imports torch alone, prints "ready", waits for a
line on stdin, imports the package, saves or loads, and prints the figures.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.harness.measure import Sample
    from benchmarks.measured.new_process import NewProcess
    from benchmarks.report.report import Report

OPTIONS = ("rounds", "only")
ROUNDS = 5

_BAR_S = 0.15
_MODULES = {
    "aiockpt": ("aiockpt", "aiockpt"),
    "torch": ("torch", "state.pt"),
    "dcp": ("torch.distributed.checkpoint", "dcp"),
    "safetensors": ("safetensors.torch", "state.safetensors"),
}
_ALL = {f"{name}, first {what}": (name, what) for what in ("save", "load") for name in _MODULES}


def tiny_state() -> dict[str, torch.Tensor]:
    """Return the tiny state."""
    return {"weight": torch.arange(256.0).view(16, 16), "bias": torch.arange(16)}


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    from benchmarks.harness.measure import interleave
    from benchmarks.harness.selection import chosen
    from benchmarks.limits import machine
    from benchmarks.measured.new_process import NewProcess
    from benchmarks.peers.checkpoints import make
    from benchmarks.report.bars import Bar, by_name
    from benchmarks.report.report import Report, Table, median_time, spread

    for _, name in _MODULES.values():
        make(tiny_state(), directory / name)
    candidates = [
        NewProcess(name, directory, "startup", {}, module=__name__, note="after import torch") for name in _ALL
    ]
    rounds = options.rounds or ROUNDS

    async def once(each: NewProcess, _number: int) -> Sample:
        return await each.measure(lambda: None)

    runs = await interleave(chosen(candidates, options.only), rounds, once, warm_up=False)
    table = Table(
        f"startup: import, and first save or load of a tiny state, medians of {rounds} rounds",
        {"whole (min..max)": spread("whole_s"), "of it the import": median_time("import_s")},
        runs,
        "whole_s",
    )
    bars = [
        Bar(f"{name}, with the import", by_name(runs, name).median("whole_s"), _BAR_S, True, "s")
        for name in ("aiockpt, first save", "aiockpt, first load")
    ]
    return Report("startup", vars(options), machine.facts(directory), [table], bars)


# --- in the new process ----------------------------------------------------------------------------------


def save(package: Any, path: Path) -> None:
    """Save the tiny state with a package."""
    if package.__name__ == "aiockpt":
        with package.SyncCheckpointer() as checkpointer:
            checkpointer.save(tiny_state(), path)
    elif package.__name__ == "safetensors.torch":
        package.save_file(tiny_state(), path)
    elif package.__name__ == "torch":
        package.save(tiny_state(), path)
    else:
        package.save(tiny_state(), checkpoint_id=path, no_dist=True)


def load(package: Any, path: Path) -> dict[str, torch.Tensor]:
    """Load the tiny state with a package."""
    if package.__name__ == "aiockpt":
        with package.SyncCheckpointer() as checkpointer:
            return checkpointer.load(path)
    if package.__name__ == "safetensors.torch":
        return package.load_file(path)
    if package.__name__ == "torch":
        return package.load(path)
    target = {name: torch.zeros_like(tensor) for name, tensor in tiny_state().items()}
    package.load(target, checkpoint_id=path, no_dist=True)
    return target


def measured(name: str, directory: Path) -> dict[str, float]:
    """Wait for a line on stdin, then import, and save or load; return the times.

    Raises:
        ValueError: if the loaded state differs from the saved one.
    """
    module, what = _ALL[name]
    package, file = _MODULES[module]
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = directory / file if what == "load" else Path(folder) / file
        print(json.dumps("ready"), flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        imported = importlib.import_module(package)
        import_s = time.perf_counter() - began
        loaded = load(imported, path) if what == "load" else save(imported, path)
        whole_s = time.perf_counter() - began
        loaded = load(imported, path) if loaded is None else loaded
        state = tiny_state()
        if loaded.keys() != state.keys() or not all(torch.equal(loaded[key], state[key]) for key in state):
            raise ValueError("what was loaded differs from what was saved")
    return {"whole_s": whole_s, "import_s": import_s}


if __name__ == "__main__":
    try:
        said: dict[str, Any] = {"sample": measured(sys.argv[1], Path(sys.argv[2])), "checksums": None}
    except Exception as exc:
        said = {"error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps(said), flush=True)
