"""Faults injected at the kernel into every system call of every kind of save; see `tests.faults.sweep`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.crash.zygote import Zygote
from tests.faults.groups import Counts
from tests.faults.plan import QUICK, Task, all_tasks, carry_out


def run_faults(*, full: bool, folder: Path | None = None) -> Counts:
    """Inject the faults; a part of `python -m benchmarks crash`.

    Args:
        full: inject all faults into all saves: thousands of runs, about ten minutes; else about a hundred.
        folder: the directory for checkpoints; None: /dev/shm if it exists, since no real disk is needed.

    Returns:
        The injected faults (``faults``), their kinds (``kinds``: the call and the fault), the saves that failed with
        the right error (``failed``), the saves that were written in spite of a fault (``saved``), and the failed
        checks (``wrong``), one line for each.
    """
    tasks: list[Task] = list(all_tasks()) if full else list(QUICK)
    memory = Path("/dev/shm")
    parent = folder if folder is not None else memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent) as own, Zygote() as one, Zygote() as other:
        return carry_out(tasks, Path(own), (one, other))


if __name__ == "__main__":
    import sys

    counts = run_faults(full="--full" in sys.argv)
    print(f"{counts.faults} faults, {len(counts.kinds)} kinds, {counts.failed} saves failed with the right error")
    print(f"{counts.saved} were written in spite of a fault, {len(counts.wrong)} wrong, {counts.seconds:.0f} s of runs")
    print(*counts.wrong, sep="\n")
