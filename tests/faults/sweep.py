"""Saves in which one system call fails at the kernel, with checks right after the save and of the following saves.

`Sweep` runs in a zygote (see `tests.crash.zygote`); a traced child saves, and reports the outcome with marks.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aiockpt
from tests.crash.lab.calls import FileCall
from tests.crash.lab.tracer import Action, Tracer
from tests.crash.zygote import forked
from tests.states import assert_same

NAME = "c"
NOT_TAKEN_BACK = "was published but can't be made durable"  # the only failure that leaves the new checkpoint visible
QUICK_RETRIES = aiockpt.Retries(first_s=0.001, most_s=0.001)


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Return a state that takes several files, one of them written with direct I/O in several writes."""
    return {
        "w": torch.arange(step, step + 160_000, dtype=torch.int64),
        "b": torch.full((7,), float(step)),
        "m": torch.arange(step * 7, step * 7 + 1000, dtype=torch.int32),
    }


@dataclass(frozen=True, slots=True)
class Scenario:
    """A save.

    Attributes:
        overwrite: True if a checkpoint is there to be replaced.
        checkpointer: the options of the checkpointer.
        save: the options of the save.
        file: the name of the checkpoint.
    """

    overwrite: bool = False
    checkpointer: Mapping[str, Any] = field(default_factory=dict)
    save: Mapping[str, Any] = field(default_factory=dict)
    file: str = NAME


SCENARIOS = {
    "first save": Scenario(save={"separation_hint": "m"}),
    "overwrite": Scenario(overwrite=True),
    "buffered": Scenario(checkpointer={"direct_io": False}),
    "not synced": Scenario(checkpointer={"fsync": False}, overwrite=True),
    "one file": Scenario(save={"format": "safetensors"}, file=f"{NAME}.safetensors"),
    "one file, overwrite": Scenario(save={"format": "safetensors"}, file=f"{NAME}.safetensors", overwrite=True),
    "writer process": Scenario(checkpointer={"writer": "process"}),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a save with a fault.

    Attributes:
        struck: the call that was made to fail; None if the save did not reach it.
        saved: True if the save succeeded.
        error: the error that the save raised; empty if none.
        number: the error number of the cause.
        messages: the notes on the error, and the logged warnings.
        wrong: a violated guarantee; empty if none.
        left: True if hidden names were left, and reported.
    """

    struck: FileCall | None
    saved: bool
    error: str
    number: int
    messages: tuple[str, ...]
    wrong: str
    left: bool

    @property
    def kind(self) -> str:
        """The kind of the struck call, see `kind_of`; empty if there was none."""
        return "" if self.struck is None else kind_of(self.struck)


def kind_of(call: FileCall) -> str:
    """Return the name of a call and of its file, without the parts that differ from run to run."""
    parts = Path(call.path).parts
    hidden = next((number for number, part in enumerate(parts) if part.startswith(".aiockpt-")), None)
    if hidden is None:
        return f"{call.name} {'final' if parts[-1].startswith(NAME) else 'parent'}"
    return f"{call.name} {'/'.join(parts[hidden + 1 :]) or 'hidden'}"


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def _holds(ckpt: aiockpt.SyncCheckpointer, path: Path, state: dict[str, torch.Tensor]) -> str:
    """Return why a checkpoint does not hold this state; empty if it does."""
    try:
        assert_same(state, ckpt.load(path))
    except (aiockpt.AiockptError, AssertionError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def program(folder: Path, scenario: Scenario, retries: aiockpt.Retries | None, tracer: Tracer) -> None:
    """Save with a fault, check the directory, and save again with the same checkpointer; mark the end of both saves."""
    path, warnings = folder / scenario.file, _Warnings()
    logging.getLogger("aiockpt").addHandler(warnings)
    options = {"chunk_bytes": 512 << 10, "staging_bytes": 4 << 20, "io_threads": 2, **scenario.checkpointer}
    report: dict[str, Any] = {"error": "", "number": 0, "messages": [], "wrong": ""}
    with aiockpt.SyncCheckpointer(process_group=None, retries=retries, **options) as ckpt:
        try:
            ckpt.save(state_of(2), path, overwrite=scenario.overwrite, **scenario.save)
        except Exception as exc:
            cause = exc.__cause__
            report |= {"error": f"{type(exc).__name__}: {exc}", "number": getattr(cause, "errno", 0) or 0}
            report["messages"] = list(getattr(exc, "__notes__", ()))
            if not isinstance(exc, aiockpt.SaveError):
                report["wrong"] = f"{exc!r} is no SaveError"
        tracer.mark("over")
        report["messages"] += warnings.messages
        report["wrong"] = report["wrong"] or _objection(ckpt, folder, scenario, report)
        report["left"] = bool(_hidden(folder))
        try:
            ckpt.save(state_of(3), path, overwrite=True, **scenario.save)
        except aiockpt.AiockptError as exc:
            report["wrong"] = report["wrong"] or f"the next save: {exc!r}"
        else:
            report["wrong"] = report["wrong"] or _holds(ckpt, path, state_of(3))
    tracer.mark(json.dumps(report))


def _objection(ckpt: aiockpt.SyncCheckpointer, folder: Path, scenario: Scenario, report: Mapping[str, Any]) -> str:
    """Return which guarantee the save has violated; empty if none."""
    path = folder / scenario.file
    published = not report["error"] or NOT_TAKEN_BACK in report["error"]
    there = [scenario.file] if scenario.overwrite or published else []
    if _visible(folder) != there:
        return f"{_visible(folder)} is there instead of {there}"
    if there and (difference := _holds(ckpt, path, state_of(2 if published else 1))):
        return f"after {report['error'] or 'success'}: {difference}"
    if _hidden(folder) and not report["messages"] and NOT_TAKEN_BACK not in report["error"]:
        return f"{_hidden(folder)} was left without a message"
    return ""


def prepare(folder: Path, scenario: Scenario) -> None:
    """Create the initial checkpoint."""
    with aiockpt.SyncCheckpointer(process_group=None, chunk_bytes=1 << 20) as ckpt:
        ckpt.save(state_of(1), folder / scenario.file, **scenario.save)


def _next_run(folder: Path, scenario: Scenario) -> str:
    """Save again in another process; return what is wrong afterwards."""
    path = folder / scenario.file
    with aiockpt.SyncCheckpointer(process_group=None, chunk_bytes=1 << 20) as ckpt:
        ckpt.save(state_of(4), path, overwrite=True, **scenario.save)
        return _holds(ckpt, path, state_of(4)) or ", ".join(_hidden(folder))


class _Strike:
    """A decision that strikes calls of the first save only: the mark at its end stops the faults."""

    def __init__(self, strikes: Callable[[int, FileCall], Action | None]) -> None:
        self._strikes = strikes
        self._over = False
        self.struck: FileCall | None = None

    def __call__(self, number: int, call: FileCall) -> Action | None:
        self._over = self._over or call.name == "mark"
        action = None if self._over else self._strikes(number, call)
        if action is not None and self.struck is None:
            self.struck = call
        return action


class Sweep:
    """The runs of one scenario, in their own directory.

    Args:
        folder: an empty directory.
        name: the name of the scenario.
        retries: the retries of the checkpointer.
        cleaned: check that the next run removes the hidden names that a failed clean-up left.
    """

    def __init__(
        self, folder: Path, name: str, retries: aiockpt.Retries | None = None, *, cleaned: bool = True
    ) -> None:
        self._scenario = SCENARIOS[name]
        self._folder = folder
        self._retries = retries
        self._cleaned = cleaned
        self._before = folder / "before"
        self._before.mkdir(parents=True)
        if self._scenario.overwrite:
            forked(prepare, self._before, self._scenario)

    def calls(self) -> list[FileCall]:
        """Return the calls of a save without a fault."""
        seen: list[FileCall] = []
        over: list[int] = []

        def note(number: int, call: FileCall) -> None:
            over.append(number) if call.name == "mark" else None
            if not over:
                seen.append(call)

        outcome = self.run(note)
        if outcome.wrong or outcome.error:
            raise AssertionError(f"without a fault: {outcome}")
        return seen

    def run(self, strikes: Callable[[int, FileCall], Action | None]) -> Outcome:
        """Save once with a fault."""
        disk = self._folder / "disk"
        shutil.copytree(self._before, disk)
        try:
            strike = _Strike(strikes)
            tracer = Tracer(disk, deadline_s=60)
            trace = tracer.run(lambda: program(disk, self._scenario, self._retries, tracer), strike)
            if trace.exit != 0 or len(trace.marks) < 2:
                return Outcome(strike.struck, False, "", 0, (), f"exit {trace.exit}: {trace.error}", False)
            report = json.loads(trace.marks[-1])
            wrong = report["wrong"]
            if self._cleaned and report["left"]:
                wrong = wrong or forked(_next_run, disk, self._scenario)
            messages, saved = tuple(report["messages"]), not report["error"]
            return Outcome(strike.struck, saved, report["error"], report["number"], messages, wrong, report["left"])
        finally:
            shutil.rmtree(disk, ignore_errors=True)
