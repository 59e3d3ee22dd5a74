"""Plans of faults and saves, a quick one and a complete one, and their execution in several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash.zygote import Zygote
from tests.faults.groups import GROUPS, Counts, sweep
from tests.faults.sweep import SCENARIOS

_RUN_S = 3.0  # more than a run takes even on a busy machine


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a plan; see `sweep`."""

    scenario: str
    groups: tuple[str, ...]
    step: int = 1
    first: int = 0


# Each call of the two main saves fails at least once; the error numbers take turns.
QUICK = (
    Task("overwrite", ("EIO", "ENOSPC", "EACCES"), step=3),
    Task("first save", ("EIO", "ENOSPC", "EACCES"), step=3, first=1),
    Task("overwrite", ("ESTALE once", "EAGAIN once", "EINTR once"), step=3, first=2),
    Task("one file, overwrite", ("EIO", "EIO for good", "EINTR once"), step=5),
    Task("writer process", ("EIO for good",), step=9, first=1),  # strikes its first rename, and some other calls
    Task("first save", ("direct I/O refused", "1 bytes at once", "4096 bytes at once", "nothing written"), step=2),
)


def all_tasks() -> Iterator[Task]:
    """Yield every fault on every save."""
    for scenario in SCENARIOS:
        for group in GROUPS:
            yield Task(scenario, (group,))


def carry_out(tasks: Sequence[Task], folder: Path, zygotes: Sequence[Zygote]) -> Counts:
    """Run the tasks in the zygotes, one at a time in each; return the total counts."""
    from multiprocessing.connection import wait

    waiting, counts = list(enumerate(tasks)), Counts()
    busy: dict[object, Zygote] = {}
    free = list(zygotes)
    while waiting or busy:
        while waiting and free:
            number, task = waiting.pop(0)
            zygote = free.pop()
            own = folder / str(number)
            zygote.send(_sweep, own, task, timeout_s=300 * _RUN_S)
            busy[zygote.pipe] = zygote
        for pipe in wait(list(busy)):
            zygote = busy.pop(pipe)
            counts.add(zygote.result())
            free.append(zygote)
    return counts


def _sweep(folder: Path, task: Task) -> Counts:
    return sweep(folder, task.scenario, task.groups, step=task.step, first=task.first)
