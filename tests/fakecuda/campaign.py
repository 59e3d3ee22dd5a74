"""Many random programs, in batches that their seed repeats: ``python -m tests.fakecuda.campaign --programs 10000``."""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fakecuda.mutants import MUTANTS
from tests.fakecuda.programs import Program, programs
from tests.fakecuda.runner import run

BATCH = 100


@dataclass(slots=True)
class Counts:
    """The number of programs, and what has come of their saves.

    Attributes:
        programs: programs that were run.
        saves: saves that were begun.
        published: checkpoints, which were compared with the state at their `save()`.
        overlapped: those of them that were copied while the program went on changing its state.
        disturbed: those of them that were begun before the program changed something that it had not fenced.
        torn: saves that failed because the program had changed something.
        ended: saves that were cancelled, or failed for a device without memory.
        wrong: programs that failed a check, with the seed of their batch.
    """

    programs: int = 0
    saves: int = 0
    published: int = 0
    overlapped: int = 0
    disturbed: int = 0
    torn: int = 0
    ended: int = 0
    wrong: list[str] = field(default_factory=list)


class _EnoughError(Exception):
    """No further program is wanted."""


def run_programs(
    *, folder: Path, number: int, seconds: float = 1e9, first: int = 0, until_wrong: bool = False
) -> Counts:
    """Run so many programs, or as many as there is time for; ``first`` is the seed of the first batch."""
    logging.getLogger("aiockpt").setLevel(logging.CRITICAL)  # each failed save would be a line
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    end, batch = time.monotonic() + seconds, first
    while outcomes["programs"] < number and time.monotonic() < end and not (wrong and until_wrong):
        _run_batch(batch, min(BATCH, number - outcomes["programs"]), folder / str(batch), outcomes, wrong, until_wrong)
        batch += 1
    return Counts(
        programs=outcomes["programs"],
        saves=outcomes["saves"],
        published=outcomes["published"],
        overlapped=outcomes["published, though overlapped"],
        disturbed=outcomes["published, though disturbed"],
        torn=outcomes["TornSnapshotError"],
        ended=outcomes["SaveCancelledError"] + outcomes["StageError"] + outcomes["SaveError"],
        wrong=wrong,
    )


def _run_batch(
    batch: int, number: int, folder: Path, outcomes: Counter[str], wrong: list[str], until_wrong: bool
) -> None:
    folder.mkdir()

    @seed(batch)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs)
    def run_one(program: Program) -> None:
        if wrong and until_wrong:
            return
        outcomes["programs"] += 1
        try:
            outcomes.update(run(program, folder / str(outcomes["programs"])))
        except Exception as exc:  # it is counted, and the others go on
            wrong.append(f"seed {batch}: {exc!r} of {program}")

    run_one()


def find_mutant(name: str, *, folder: Path, number: int, first: int = 0) -> Counts:
    """Run programs on a mutant until one of them is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        return run_programs(folder=folder, number=number, first=first, until_wrong=True)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mutants", action="store_true", help="how many programs it takes to find each mutant")
    parser.add_argument("--mutant", choices=MUTANTS, help="only this one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not (options.mutants or options.mutant):
            numbers = {"number": options.programs, "seconds": options.seconds, "first": options.first}
            print(run_programs(folder=Path(folder), **numbers))  # noqa: T201 - what was asked for
            return
        for count, name in enumerate([options.mutant] if options.mutant else MUTANTS):
            own = Path(folder) / str(count)
            own.mkdir()
            counts = find_mutant(name, folder=own, number=options.programs, first=options.first)
            how = counts.wrong[0].partition(" of Program")[0] if counts.wrong else "NOT FOUND"
            print(f"{name}: {counts.programs} programs: {how[:200]}", flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
