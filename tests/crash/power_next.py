"""The next run after a power cut: it starts from a state of the disk, cleans up and saves; then power fails again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.crash.lab.disk_names import Folder, read_content
from tests.crash.lab.power import Replay, Report, is_shown
from tests.crash.lab.power_choices import choose
from tests.crash.lab.power_promises import Promises
from tests.crash.power_recordings import Recording, record_next, run
from tests.crash.scenarios import SCENARIOS, Announce, Program, checkpointer
from tests.crash.zygote import Zygote

STEP = 9


@dataclass(frozen=True, slots=True)
class Found:
    """A state of the disk after a power cut.

    Attributes:
        cut: the number of calls before the power cut.
        content: the content of the disk, hidden names too.
        shows: the label that each name shows.
    """

    cut: int
    content: Folder = field(repr=False)
    shows: dict[str, str]


@dataclass(frozen=True, slots=True)
class NextRun:
    """The outcome of a next run.

    Attributes:
        found: the state that it started from.
        report: the promises that a power cut during this run could break.
        leftovers: the hidden names that are left after it.
    """

    found: Found
    report: Report
    leftovers: tuple[str, ...]


def save_again(folder: Path, announce: Announce, name: str) -> None:
    """Save under a new name, then over each existing checkpoint."""
    scenario = SCENARIOS[name]
    shown = [path for path in folder.iterdir() if is_shown(path.name)]
    checkpoints = [path for path in shown if path.is_file() or not any(each.is_dir() for each in path.iterdir())]
    names = [scenario.file("next"), *sorted(path.name for path in checkpoints)]
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce, flat=scenario.flat)
        for each in dict.fromkeys(names):
            program.save(each, STEP, overwrite=True, **scenario.options)


def choose_found(replaying: Replay, recording: Recording, count: int, seed: int = 0) -> list[Found]:
    """Choose random states after a power cut, from all cuts, some with many and some with few changes lost."""
    source = random.Random(seed)
    disk, promises = recording.disk(), Promises(recording.promised)
    found: dict[bytes, Found] = {}
    for cut, call in enumerate(recording.calls, 1):
        disk.apply(call, recording.root)
        promises.apply(call)
        pending = disk.pending()
        for choice in choose(pending, bound=20, source=source).chosen:
            content = disk.left({each.key: option for each, option in zip(pending, choice, strict=True)})
            if content.digest not in found:
                shows = replaying.shows(content, [name for name, _ in promises.names])
                found[content.digest] = Found(cut, content, shows)
    chosen = list(found.values())
    source.shuffle(chosen)
    return chosen[:count]


def next_runs(
    zygote: Zygote, replaying: Replay, recording: Recording, folder: Path, count: int, seed: int = 0
) -> Iterator[NextRun]:
    """Start the next run from some of the states, and replay it with a power cut after each of its calls."""
    program = partial(save_again, name=recording.name)
    for number, found in enumerate(choose_found(replaying, recording, count, seed)):
        root = folder / str(number)
        again = zygote.call(record_next, recording.name, found.shows, found.content, root, program)
        content = read_content(str(root))
        assert isinstance(content, Folder)
        hidden = tuple(sorted(name for name in content.entries if not is_shown(name)))
        yield NextRun(found, run(replaying, again), hidden)
