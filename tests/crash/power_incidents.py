"""What happens to a program before power is lost: it is killed, and the next run goes on; a sync fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiockpt.errors import AiockptError
from tests.crash.lab.calls import FileCall
from tests.crash.lab.tracer import Action, Decide, Fail, Kill
from tests.crash.power_recordings import Recording, Run, record
from tests.crash.scenarios import OPTIONS, Announce, Program, checkpointer

NEXT_STEP = 9


def next_run(folder: Path, announce: Announce, *, name: str = "next") -> None:
    """Save under a new name, and delete nothing: what killed processes have left is cleaned first."""
    with checkpointer() as ckpt:
        Program(ckpt, folder, announce).save(name, NEXT_STEP, **OPTIONS)


def goes_on(folder: Path, announce: Announce) -> None:
    """Save over what is there; when that fails, save elsewhere."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce)
        try:
            program.save("c", 2, overwrite=True, **OPTIONS)
        except AiockptError as exc:
            announce(f"failed c {type(exc).__name__}")
        program.save("d", 3, **OPTIONS)


def saves_below(folder: Path, announce: Announce) -> None:
    """Save in a directory that is not there yet."""
    with checkpointer() as ckpt:
        Program(ckpt, folder, announce).save("runs/c", 2, **OPTIONS)


def saves_beside(folder: Path, announce: Announce) -> None:
    """Save in the same directory."""
    next_run(folder, announce, name="runs/next")


def once(matches: Callable[[FileCall, str], bool], action: Action, *, after: str = "mark") -> Callable[[str], Decide]:
    """Do something to the first call that matches, once a call named ``after`` was made."""

    def deciding(root: str) -> Decide:
        state = {"armed": after == "mark", "done": False}

        def decide(number: int, call: FileCall) -> Action | None:
            if not state["done"] and state["armed"] and matches(call, root):
                state["done"] = True
                return action
            state["armed"] = state["armed"] or call.name == after
            return None

        return decide

    return deciding


def without_flags(root: str) -> Decide:
    """Be a file system that neither exchanges nor refuses to replace."""
    return lambda number, call: Fail(errno.EINVAL) if call.name in ("rename", "exchange") and call.flags else None


def _is_parents_sync(call: FileCall, root: str) -> bool:
    return call.name == "sync" and call.path == root


@dataclass(frozen=True, slots=True)
class Incident:
    """What happens.

    Attributes:
        scenario: what is there before.
        run: the program; None for that of the scenario.
        decide: what is done to its calls.
        then: the next run.
    """

    scenario: str
    run: Run | None
    decide: Callable[[str], Decide]
    then: Run | None = None

    def record(self, folder: Path) -> Recording:
        """Record it. Where processes are forked from."""
        return record(self.scenario, folder, self.run, self.decide, self.then)


INCIDENTS: dict[str, Incident] = {
    "killed when it had replaced one, then the next run": Incident(
        "overwrite", None, once(_is_parents_sync, Kill("before"), after="exchange"), next_run
    ),
    "killed when it had published, then the next run": Incident(
        "first save", None, once(_is_parents_sync, Kill("before"), after="rename"), next_run
    ),
    "killed while it deleted, then the next run": Incident(
        "deleting older ones",
        None,
        once(_is_parents_sync, Kill("before"), after="rename"),
        next_run,
    ),
    "the writer killed when it had replaced one": Incident(
        "writer process",
        None,
        once(_is_parents_sync, Kill("before", whom="caller"), after="exchange"),
    ),
    "the sync after an exchange fails": Incident(
        "overwrite", goes_on, once(_is_parents_sync, Fail(errno.EIO), after="exchange")
    ),
    "the sync after a rename fails": Incident(
        "first save", goes_on, once(_is_parents_sync, Fail(errno.EIO), after="rename")
    ),
    "a file system that can't exchange, first save": Incident("one safetensors file", None, without_flags),
    "a file system that can't exchange, overwrite": Incident("one safetensors file (overwrite)", None, without_flags),
    "killed when it had made the directory, then the next run": Incident(
        "first save", saves_below, once(_is_parents_sync, Kill("before"), after="mkdir"), saves_beside
    ),
}


def record_incident(name: str, folder: Path) -> Recording:
    """Record one by its name. Where processes are forked from."""
    return INCIDENTS[name].record(folder)
