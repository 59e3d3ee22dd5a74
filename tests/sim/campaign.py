"""Many random programs, in batches that their seed repeats."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.sim import device as sim
from tests.sim.programs import Program, programs, run

BATCH = 200


@dataclass(slots=True)
class Counts:
    """The number of programs, and what has come of their saves.

    Attributes:
        programs: programs that were run.
        saves: saves that were begun.
        published: checkpoints, which were compared with the state at their `save()`.
        disturbed: those of them that were begun before the program changed something that it had not fenced.
        torn: saves that failed because the program had changed something.
        ended: saves that were cancelled, or failed for a device without memory.
        wrong: programs that failed a check, with the seed of their batch.
    """

    programs: int = 0
    saves: int = 0
    published: int = 0
    disturbed: int = 0
    torn: int = 0
    ended: int = 0
    wrong: list[str] = field(default_factory=list)


def run_programs(*, full: bool, folder: Path, seconds: float = 300.0, first: int = 0) -> Counts:
    """Run two batches, or with ``full`` as many as there is time for; ``first`` is the seed of the first."""
    sim.build()
    sim.extension()
    logging.getLogger("aiockpt").setLevel(logging.CRITICAL)  # each failed save would be a line
    found: Counter[str] = Counter()
    wrong: list[str] = []
    until, batch = time.monotonic() + seconds, first
    while batch < first + 2 or (full and time.monotonic() < until):
        _run_batch(batch, folder / str(batch), found, wrong)
        batch += 1
    return Counts(
        programs=found["programs"],
        saves=found["saves"],
        published=found["published"],
        disturbed=found["published, though disturbed"],
        torn=found["TornSnapshotError"],
        ended=found["SaveCancelledError"] + found["StageError"] + found["SaveError"],
        wrong=wrong,
    )


def _run_batch(number: int, folder: Path, counts: Counter[str], wrong: list[str]) -> None:
    folder.mkdir()

    @seed(number)
    @settings(
        max_examples=BATCH,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs)
    def run_one(program: Program) -> None:
        counts["programs"] += 1
        try:
            counts.update(run(program, folder / str(counts["programs"])))
        except Exception as exc:  # each is counted, and the others go on
            wrong.append(f"seed {number}: {exc!r} of {program}")

    run_one()
