"""A writer thread compared with a writer process, beside work that needs the GIL or the cores."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiockpt
from benchmarks.harness.measure import Runs, Sample, close, interleave
from benchmarks.harness.selection import chosen
from benchmarks.harness.states import State, size_of, small_state, transformer_state
from benchmarks.limits import machine, raw
from benchmarks.measured.pace import beside
from benchmarks.measured.work import Loader, PythonLoop, Work
from benchmarks.peers.beside import AiockptBeside, Beside, DcpBeside, Saving, peers
from benchmarks.peers.contenders import RawWrite
from benchmarks.report.bars import Bar, by_name, compare, shortest
from benchmarks.report.report import Report, Table, median_time, number, spread

OPTIONS = ("gib", "tensors", "count", "nbytes", "rounds", "only", "work", "alone")
ROUNDS = 3

_ARENA_BYTES = 256 << 20


class NoSave(Beside):
    """The work without a save, which shows how far the pace differs by itself.

    Args:
        seconds: the duration.
    """

    name, note = "no save", "how far the pace differs by itself"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin(self, state: State, path: Path) -> Saving:
        return _Nothing(self._seconds)


class _Nothing(Saving):
    blocked_s = 0.0

    def __init__(self, seconds: float) -> None:
        self._over = time.perf_counter() + seconds

    def let_change(self) -> None:
        """Nothing is copied."""

    def done(self) -> bool:
        return time.perf_counter() > self._over

    def finish(self) -> Sample:
        return {}


Contender = Beside | RawWrite


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of work, with the state that is saved beside it.

    Attributes:
        name: its name for `--work`.
        work: the work.
        state: creates the state.
        many: whether the state has very many tensors.
    """

    name: str
    work: Work
    state: Callable[[], State]
    many: bool = False

    def contenders(self, nbytes: int, alone_s: float) -> list[Contender]:
        """Return the contenders that save the state, and the limit."""
        arena = raw.Arena(min(nbytes, _ARENA_BYTES))
        kept_back = aiockpt.ProcessWriter(nice=19)
        ours = [AiockptBeside("thread"), AiockptBeside("process"), AiockptBeside(kept_back)]
        # With a process, the peers need a file descriptor for each tensor: more than the limit of open files.
        others = [DcpBeside("thread")] if self.many else peers()
        return [*(RawWrite(threads, arena) for threads in (1, 2, 4)), NoSave(alone_s), *ours, *others]


def cases(options: Namespace) -> list[Case]:
    """Return all cases, with states of the sizes that the options ask for."""

    def large() -> State:
        return transformer_state(int(options.gib * 2**30), options.tensors)

    def small() -> State:
        return small_state(options.count, options.nbytes)

    return [
        Case("python", PythonLoop(), large),
        Case("loader", Loader(), large),
        Case("small", PythonLoop(), small, many=True),
    ]


async def measure(
    case: Case, selected: Sequence[Contender], state: State, directory: Path, rounds: int, alone_s: float
) -> list[Runs]:
    """Save in rounds beside the work; measure the limit without the work."""

    async def save_once(saver: Contender, count: int) -> Sample:
        path = directory / f"{case.name}-{selected.index(saver)}-{count}"
        if count < 0:
            await saver.open(state)
        machine.settle()
        try:
            if isinstance(saver, RawWrite):
                return await saver.save(state, path)
            return beside(case.work, saver, state, path, alone_s)
        finally:
            machine.remove(path)

    runs = await interleave(selected, rounds, save_once)
    for saver, run in zip(selected, runs, strict=True):
        await close(saver, run)
    return runs


async def run(options: Namespace, directory: Path) -> Report:
    """Run the benchmark, and return its report."""
    rounds = options.rounds or ROUNDS
    tables, found = [], []
    for case in chosen(cases(options), options.work):
        state = case.state()
        selected = chosen(case.contenders(size_of(state), options.alone), options.only)
        runs = await measure(case, selected, state, directory, rounds, options.alone)
        size = f"{size_of(state) / 2**30:.2f} GiB in {len(state)} tensors"
        title = f"writers, {case.name}: {size} beside {case.work.name}, medians of {rounds} rounds"
        tables.append(Table(title, columns(runs, case.work.unit), runs))
        found += bars(case, runs)
    return Report("writers", vars(options), machine.facts(directory), tables, found, remarks())


def columns(runs: Sequence[Runs], unit: str) -> dict[str, Callable[[Runs], str]]:
    """Return the columns of a table."""
    limit_s = shortest(runs, "raw", "durable_s")
    return {
        f"{unit}/s alone": lambda run: number(run.median("alone_per_s"), 0),
        "while saving": lambda run: number(run.median("saving_per_s"), 0),
        "kept (min..max)": kept,
        "lost per save": median_time("lost_s"),
        "caller blocked": median_time("blocked_s"),
        "longest step": median_time("longest_s"),
        "staged": median_time("staged_s"),
        "durable (min..max)": lambda run: spread("durable_s")(run) if run.values("durable_s") else "-",
        "of limit's time": lambda run: number(run.median("durable_s") / limit_s, 1),
    }


def kept(run: Runs) -> str:
    """Return a cell with the share of the pace that is kept, and its smallest and greatest value."""
    values = run.values("kept")
    return f"{run.median('kept'):.2f} ({min(values):.2f}..{max(values):.2f})" if values else "-"


def remarks() -> list[str]:
    """Return the meaning of the columns."""
    return [
        "kept: the pace from the call until durable, as a share of the pace just before; the call counts",
        "lost per save: the delay of the work by a save",
        "of limit's time: time to durable, divided by that of the best raw O_DIRECT write without other work",
    ]


def bars(case: Case, runs: Sequence[Runs]) -> list[Bar]:
    """Compare each writer with the peer's of its kind, and the writers with each other."""
    found = []
    what = f"{case.name}, aiockpt"
    for kind in ("thread", "process"):
        ours, peer = by_name(runs, f"aiockpt, {kind}"), by_name(runs, f"dcp.async_save, {kind}")
        if case.many and kind == "process":
            continue
        found.append(compare(f"{what}, {kind} : {peer.name}, speed to durable", [peer], ours, "durable_s", 1))
        found.append(Bar(f"{what}, {kind} : {peer.name}, pace kept", ours.median("kept") / peer.median("kept")))
    thread, process = by_name(runs, "aiockpt, thread"), by_name(runs, "aiockpt, process")
    found.append(compare(f"{what}, process : in a thread, speed to durable", [thread], process, "durable_s"))
    found.append(Bar(f"{what}, process : in a thread, pace kept", process.median("kept") / thread.median("kept")))
    return found
