"""Recordings of programs that save, and replays of them with power cuts."""

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
from tests.crash.lab.disk_names import Folder, read_content, write_content
from tests.crash.lab.power import Replay, Report
from tests.crash.lab.power_promises import Promises
from tests.crash.lab.tracer import Decide, Tracer
from tests.crash.scenarios import SCENARIOS, Announce, Scenario, checkpointer, prepare
from tests.crash.zygote import forked
from tests.states import assert_same

Run = Callable[[Path, Announce], object]


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls of a program in a directory.

    Attributes:
        name: the scenario, of `SCENARIOS`, with the initial checkpoints and the states.
        root: the directory.
        before: the initial content of the directory.
        promised: the steps of the initial checkpoints, by name.
        calls: the calls.
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
        """Return a disk on which the initial content is durable."""
        return Disk.holding(self.before, ordered=ordered)

    def promises(self) -> Promises:
        return Promises(self.promised)

    def without(self, number: int) -> Recording:
        """Return this recording without one call."""
        calls = [call for at, call in enumerate(self.calls) if at != number]
        return Recording(self.name, self.root, self.before, self.promised, calls)


def record(
    name: str,
    folder: Path,
    run: Run | None = None,
    decide: Callable[[str], Decide] | None = None,
    then: Run | None = None,
) -> Recording:
    """Record a program. Call it in a zygote.

    Args:
        name: the scenario, with the initial checkpoints and the default program.
        folder: the directory to create and to save in.
        run: a program to run instead of that of the scenario.
        decide: returns, for that directory, the actions on the calls; see `Tracer.run`.
        then: the next run in the same directory, after the program has ended or was killed.
    """
    scenario = SCENARIOS[name]
    root = Path(os.path.realpath(folder))
    forked(prepare, scenario, root)
    programs = [(run or scenario.run, decide), *([(then, None)] if then else [])]
    return _traced(name, str(root), {each: str(step) for each, step in scenario.before.items()}, programs)


def record_next(name: str, shown: Mapping[str, str], content: Folder, folder: Path, run: Run) -> Recording:
    """Record a program that starts from the content after a power cut. Call it in a zygote."""
    write_content(content, str(folder))
    return _traced(name, os.path.realpath(folder), shown, [(run, None)])


def _traced(
    name: str,
    root: str,
    promised: Mapping[str, str],
    programs: Sequence[tuple[Run, Callable[[str], Decide] | None]],
) -> Recording:
    before = read_content(root)
    assert isinstance(before, Folder)
    tracer = Tracer(root, with_data=True)
    calls: list[FileCall] = []
    for run, decide in programs:
        trace = tracer.run(lambda run=run: run(Path(root), tracer.mark), decide and decide(root))
        assert decide or trace.exit == 0, trace.error
        calls += trace.calls
    return Recording(name, root, before, promised, calls)


class Loader:
    """A function that loads a checkpoint, checks it bit by bit, and returns its step."""

    def __init__(self, scenario: Scenario, load: Callable[[str], Any]) -> None:
        self._load = load
        self._state = functools.lru_cache(maxsize=8)(scenario.state)
        self._flat = scenario.flat

    def __call__(self, path: str, name: str) -> str:
        state = self._load(path)
        step = int((state if self._flat else state["model"])["b"][0]) % 1000
        # A safetensors file has its own order of tensors.
        saved, loaded = (
            (each if not self._flat else dict(sorted(each.items()))) for each in (self._state(name, step), state)
        )
        assert_same(saved, loaded)
        return str(step)


@contextmanager
def scratch() -> Iterator[str]:
    """Yield a temporary directory, in memory if possible."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield folder


@contextmanager
def replays(scenario: Scenario, **options: Any) -> Iterator[Replay]:
    """Yield a `Replay` for recordings of a scenario."""
    with scratch() as folder, checkpointer() as ckpt:
        yield Replay(Loader(scenario, ckpt.load), folder, **options)


def replay(recording: Recording, **options: Any) -> Report:
    """Replay a recording with a power cut after each call."""
    with replays(recording.scenario, **options) as replaying:
        return run(replaying, recording, **options)


def run(replaying: Replay, recording: Recording, *, ordered: bool = False, **_: Any) -> Report:
    disk = recording.disk(ordered=ordered)
    return replaying.run(recording.calls, recording.root, disk=disk, promises=recording.promises())


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of leaving out one sync.

    Attributes:
        number: the number of the call.
        what: a description of its file or directory.
        report: the report of the replay without this sync.
    """

    number: int
    what: str
    report: Report = field(repr=False)

    @property
    def needed(self) -> bool:
        return bool(self.report.findings)


def drop_each_sync(recording: Recording, **options: Any) -> list[Dropped]:
    """Replay a recording without each of its syncs in turn."""
    found = []
    with replays(recording.scenario, **options) as replaying:
        for number, call in enumerate(recording.calls):
            if call.name == "sync":
                report = run(replaying, recording.without(number), **options)
                found.append(Dropped(number, synced(call, recording.root), report))
    return found


def synced(call: FileCall, root: str) -> str:
    """Return a description of the file or directory of a sync."""
    path = os.path.relpath(call.path, root)
    if path == ".":
        return "the parent directory"
    names = {".metadata": ".metadata", ".aiockpt.json": "the manifest"}
    top, _, name = path.partition("/")
    if not name:
        return "the hidden directory" if top.startswith(".") else f"the directory {top}"
    return names.get(name, "a data file")
