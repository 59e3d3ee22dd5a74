"""Every system call of every kind of save fails in every way, at the kernel; see `tests.faults.sweep`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.crash.zygote import Zygote
from tests.faults.groups import Counts
from tests.faults.plan import QUICK, Task, all_tasks, carry_out


def run_faults(*, full: bool, folder: Path | None = None) -> Counts:
    """Try the faults; a part of `python -m benchmarks crash`.

    Args:
        full: all faults on all saves, some thousands of runs, which take about ten minutes; else about a hundred.
        folder: where to save to; None: in memory if there is such a place, for it is not the disk that is tried.

    Returns:
        How many faults were injected (``faults``), of how many kinds (``kinds``: the call and the fault), how many
        saves failed and said so rightly (``failed``), how many were written all the same (``saved``), and what was
        wrong (``wrong``), one line for each.
    """
    tasks: list[Task] = list(all_tasks()) if full else list(QUICK)
    memory = Path("/dev/shm")
    parent = folder if folder is not None else memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent) as own, Zygote() as one, Zygote() as other:
        return carry_out(tasks, Path(own), (one, other))


if __name__ == "__main__":
    import sys

    counts = run_faults(full="--full" in sys.argv)
    print(f"{counts.faults} faults, {len(counts.kinds)} kinds, {counts.failed} saves failed rightly")
    print(f"{counts.saved} were written all the same, {len(counts.wrong)} wrong, {counts.seconds:.0f} s of runs")
    print(*counts.wrong, sep="\n")
