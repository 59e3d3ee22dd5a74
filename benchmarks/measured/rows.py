"""Rows in which a peer was once faster: each run in a process of its own, interleaved; least and median of all.

``python -m benchmarks.measured.rows ROW [--rounds N] [--dir DIRECTORY] [--only NAMES]`` measures one row and prints a
table: wall time, and the CPU time of the process, user and system. Loads are from the page cache: each process reads
the checkpoint once before it measures. ``--aiockpt DIRECTORY`` adds the contenders of another version of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.limits import machine

REPEATS = 5  # in one process; the least and the median are of all


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


def moe_state() -> dict[str, Any]:
    """Return the state of a mixture of experts."""
    from benchmarks.measured.models import state_of

    return {name.replace(".", "_"): value for name, value in state_of("MoE-like", 1 << 29).items()}


def even_state(mib: int, tensors: int = 168) -> dict[str, Any]:
    """Return the state of a small transformer."""
    from benchmarks.harness.states import transformer_state

    return {name.replace(".", "_"): value for name, value in transformer_state(mib << 20, tensors).items()}


ROWS: dict[str, tuple[Callable[[], dict[str, Any]] | None, dict[str, Callable[[Path], Callable[[], object]]]]] = {
    "small-load": (lambda: small_state(50_000, 1024), LOADS),
    "moe-load": (moe_state, LOADS),
    "save-16": (lambda: even_state(16), SAVES),
    "save-64": (lambda: even_state(64), SAVES),
    "save-256": (lambda: even_state(256), SAVES),
    "save-1024": (lambda: even_state(1024), {**SAVES, "copy + CRC": copy_and_crc}),
    "ls": (None, {"aiockpt ls": list_steps}),
}


def make(row: str, directory: Path) -> None:
    """Write what the contenders of a row read."""
    import torch

    import aiockpt

    if ROWS[row][0] is None:
        (directory / "run").mkdir()
        with aiockpt.SyncCheckpointer() as checkpointer:
            for number in range(10_000):
                if number < 1:
                    checkpointer.save({"weight": torch.zeros(4)}, directory / "run" / f"step-{number}")
        _copy_steps(directory / "run", 10_000)
        return
    state = ROWS[row][0]()
    if row.startswith("save"):
        torch.save(state, directory / "state.pt")
        return
    from safetensors.torch import save_file

    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, directory / "aiockpt")
    save_file(state, directory / "state.safetensors")


def _copy_steps(run: Path, count: int) -> None:
    first = run / "step-0"
    files = {file.name: file.read_bytes() for file in first.iterdir()}
    for number in range(1, count):
        folder = run / f"step-{number}"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)


def worker(row: str, name: str, directory: Path) -> None:
    """Measure a contender in this process, and print the figures."""
    machine.bring_into_cache(file for file in directory.rglob("*") if file.is_file() and row.endswith("load"))
    work = ROWS[row][1][name](directory)
    work()
    found = []
    for _ in range(REPEATS):
        before, began = os.times(), time.perf_counter()
        result = work()
        took, after = time.perf_counter() - began, os.times()
        del result
        found.append((took, after.user - before.user + after.system - before.system))
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads need not end


def run(row: str, directory: Path, rounds: int, only: str, other: Path | None) -> None:
    """Measure a row, and print its table."""
    here = str(Path(__file__).parents[2])
    versions = {"": here} | ({" (other)": str(other)} if other else {})
    names = [name for name in ROWS[row][1] if any(part in name for part in only.split(","))]
    contenders = [
        (name + mark, name, package)
        for name in names
        for mark, package in versions.items()
        if not mark or "aiockpt" in name
    ]
    walls: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for _ in range(rounds):
        for shown, name, package in contenders:
            code = (
                f"import sys; sys.path[:0] = [{package!r}, {here!r}]; sys.path_importer_cache.clear(); "
                f"from benchmarks.measured import rows; rows.worker({row!r}, {name!r}, rows.Path({str(directory)!r}))"
            )
            done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            for wall, cpu in json.loads(done.stdout.splitlines()[-1]):
                walls.setdefault(shown, []).append(wall * 1e3)
                used.setdefault(shown, []).append(cpu * 1e3)
    print(
        f"{row}, ms, {rounds} processes of {REPEATS}".ljust(50) + "wall least    median CPU least    median".rjust(40)
    )
    for shown, wall in walls.items():
        cpu = used[shown]
        figures = min(wall), statistics.median(wall), min(cpu), statistics.median(cpu)
        print(f"{shown:<50}" + "".join(f"{figure:>10.1f}" for figure in figures), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--aiockpt", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        directory = Path(folder)
        code = f"from benchmarks.measured import rows; rows.make({options.row!r}, rows.Path({folder!r}))"
        made = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2])
        if made.returncode:
            sys.exit(made.returncode)
        run(options.row, directory, options.rounds, options.only, options.aiockpt)


if __name__ == "__main__":
    main()
