"""Recordings of programs that save, and replays of lost power over them."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.lab.calls import FileCall
from tests.crash.lab.disk import Disk
from tests.crash.lab.disk_names import Folder, put, taken
from tests.crash.lab.power import Replay, Report
from tests.crash.lab.power_promises import Promises
from tests.crash.lab.tracer import Decide, Tracer
from tests.crash.scenarios import SCENARIOS, Announce, Scenario, checkpointer, prepare
from tests.crash.zygote import forked
from tests.states import assert_same

Run = Callable[[Path, Announce], object]


@dataclass(frozen=True, slots=True)
class Recording:
    """What a program has done to a directory.

    Attributes:
        name: of which of the `SCENARIOS` the beginning and the states are.
        root: the directory.
        before: what was in it.
        promised: the steps of the checkpoints that were there, by name.
        calls: what it has done.
    """

    name: str
    root: str
    before: Folder = field(repr=False)
    promised: Mapping[str, str]
    calls: Sequence[FileCall] = field(repr=False)

    @property
    def scenario(self) -> Scenario:
        return SCENARIOS[self.name]

    def disk(self, *, ordered: bool = False) -> Disk:
        """Give what was there at the beginning, durable."""
        return Disk.holding(self.before, ordered=ordered)

    def promises(self) -> Promises:
        return Promises(self.promised)

    def without(self, number: int) -> Recording:
        """Give the same without one call."""
        calls = [call for at, call in enumerate(self.calls) if at != number]
        return Recording(self.name, self.root, self.before, self.promised, calls)


def record(
    name: str,
    folder: Path,
    run: Run | None = None,
    decide: Callable[[str], Decide] | None = None,
    then: Run | None = None,
) -> Recording:
    """Record a program. Where processes are forked from.

    Args:
        name: a scenario: what is there before; and the program, unless there is another.
        folder: where it saves; is made.
        run: the other program.
        decide: gives, for that directory, what is done to the calls; see `Tracer.run`.
        then: the next run, in the same directory, when the program has ended or been killed.
    """
    scenario = SCENARIOS[name]
    root = Path(os.path.realpath(folder))
    forked(prepare, scenario, root)
    programs = [(run or scenario.run, decide), *([(then, None)] if then else [])]
    return _traced(name, str(root), {each: str(step) for each, step in scenario.before.items()}, programs)


def record_next(name: str, shown: Mapping[str, str], content: Folder, folder: Path, run: Run) -> Recording:
    """Record a program that finds what a power cut has left. Where processes are forked from."""
    put(content, str(folder))
    return _traced(name, os.path.realpath(folder), shown, [(run, None)])


def _traced(
    name: str,
    root: str,
    promised: Mapping[str, str],
    programs: Sequence[tuple[Run, Callable[[str], Decide] | None]],
) -> Recording:
    before = taken(root)
    assert isinstance(before, Folder)
    tracer = Tracer(root, with_data=True)
    calls: list[FileCall] = []
    for run, decide in programs:
        trace = tracer.run(lambda run=run: run(Path(root), tracer.mark), decide and decide(root))
        assert decide or trace.exit == 0, trace.error
        calls += trace.calls
    return Recording(name, root, before, promised, calls)


class Loader:
    """Tells which step a checkpoint holds, bit for bit, by loading it."""

    def __init__(self, scenario: Scenario, load: Callable[[str], Any]) -> None:
        self._load = load
        self._state = functools.lru_cache(maxsize=8)(scenario.state)
        self._flat = scenario.flat

    def __call__(self, path: str, name: str) -> str:
        state = self._load(path)
        step = int((state if self._flat else state["model"])["b"][0]) % 1000
        # The tensors of a file of safetensors come in an order of their own.
        saved, loaded = (
            (each if not self._flat else dict(sorted(each.items()))) for each in (self._state(name, step), state)
        )
        assert_same(saved, loaded)
        return str(step)


@contextmanager
def scratch() -> Iterator[str]:
    """Give a directory, in memory where there is one."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield folder


@contextmanager
def replays(scenario: Scenario, **options: Any) -> Iterator[Replay]:
    """Give what replays recordings of a scenario."""
    with scratch() as folder, checkpointer() as ckpt:
        yield Replay(Loader(scenario, ckpt.load), folder, **options)


def replay(recording: Recording, **options: Any) -> Report:
    """Lose power after each call of a recording."""
    with replays(recording.scenario, **options) as replaying:
        return run(replaying, recording, **options)


def run(replaying: Replay, recording: Recording, *, ordered: bool = False, **_: Any) -> Report:
    disk = recording.disk(ordered=ordered)
    return replaying.run(recording.calls, recording.root, disk=disk, promises=recording.promises())


@dataclass(frozen=True, slots=True)
class Dropped:
    """What comes of leaving one sync out.

    Attributes:
        number: which call it was.
        what: what it made durable.
        report: what could be lost then.
    """

    number: int
    what: str
    report: Report = field(repr=False)

    @property
    def needed(self) -> bool:
        return bool(self.report.findings)


def drop_each_sync(recording: Recording, **options: Any) -> list[Dropped]:
    """Leave out each sync in turn."""
    found = []
    with replays(recording.scenario, **options) as replaying:
        for number, call in enumerate(recording.calls):
            if call.name == "sync":
                report = run(replaying, recording.without(number), **options)
                found.append(Dropped(number, synced(call, recording.root), report))
    return found


def synced(call: FileCall, root: str) -> str:
    """Tell in words what a sync was of."""
    path = os.path.relpath(call.path, root)
    if path == ".":
        return "the parent directory"
    names = {".metadata": ".metadata", ".aiockpt.json": "the manifest"}
    top, _, name = path.partition("/")
    if not name:
        return "the hidden directory" if top.startswith(".") else f"the directory {top}"
    return names.get(name, "a data file")
