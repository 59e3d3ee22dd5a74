"""Incidents before a power cut: a process is killed and the next run continues, or a system call fails."""

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


def save_next(folder: Path, announce: Announce, *, name: str = "next") -> None:
    """Save under a new name, without a delete: the save itself removes the files that killed processes have left."""
    with checkpointer() as ckpt:
        Program(ckpt, folder, announce).save(name, NEXT_STEP, **OPTIONS)


def save_twice(folder: Path, announce: Announce) -> None:
    """Save over an existing checkpoint; if that fails, continue with another name."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce)
        try:
            program.save("c", 2, overwrite=True, **OPTIONS)
        except AiockptError as exc:
            announce(f"failed c {type(exc).__name__}")
        program.save("d", 3, **OPTIONS)


def save_below(folder: Path, announce: Announce) -> None:
    """Save in a directory that does not exist yet."""
    with checkpointer() as ckpt:
        Program(ckpt, folder, announce).save("runs/c", 2, **OPTIONS)


def save_beside(folder: Path, announce: Announce) -> None:
    """Save under another name in the directory of `save_below`."""
    save_next(folder, announce, name="runs/next")


def once(matches: Callable[[FileCall, str], bool], action: Action, *, after: str = "mark") -> Callable[[str], Decide]:
    """Return a decision: apply an action to the first matching call, once a call named ``after`` was made."""

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


def refuse_flags(root: str) -> Decide:
    """Fail renames with flags, like a file system without RENAME_EXCHANGE and RENAME_NOREPLACE."""
    return lambda number, call: Fail(errno.EINVAL) if call.name in ("rename", "exchange") and call.flags else None


def _is_parents_sync(call: FileCall, root: str) -> bool:
    return call.name == "sync" and call.path == root


@dataclass(frozen=True, slots=True)
class Incident:
    """A program and the actions on its calls.

    Attributes:
        scenario: the scenario with the initial checkpoints.
        run: the program; None for that of the scenario.
        decide: returns, for a directory, the actions on the program's calls.
        then: the next run, if any.
    """

    scenario: str
    run: Run | None
    decide: Callable[[str], Decide]
    then: Run | None = None

    def record(self, folder: Path) -> Recording:
        """Record the incident. Call it in a zygote."""
        return record(self.scenario, folder, self.run, self.decide, self.then)


INCIDENTS: dict[str, Incident] = {
    "killed when it had replaced one, then the next run": Incident(
        "overwrite", None, once(_is_parents_sync, Kill("before"), after="exchange"), save_next
    ),
    "killed when it had published, then the next run": Incident(
        "first save", None, once(_is_parents_sync, Kill("before"), after="rename"), save_next
    ),
    "killed while it deleted, then the next run": Incident(
        "deleting older ones",
        None,
        once(_is_parents_sync, Kill("before"), after="rename"),
        save_next,
    ),
    "the writer killed when it had replaced one": Incident(
        "writer process",
        None,
        once(_is_parents_sync, Kill("before", whom="caller"), after="exchange"),
    ),
    "the sync after an exchange fails": Incident(
        "overwrite", save_twice, once(_is_parents_sync, Fail(errno.EIO), after="exchange")
    ),
    "the sync after a rename fails": Incident(
        "first save", save_twice, once(_is_parents_sync, Fail(errno.EIO), after="rename")
    ),
    "a file system that can't exchange, first save": Incident("one safetensors file", None, refuse_flags),
    "a file system that can't exchange, overwrite": Incident("one safetensors file (overwrite)", None, refuse_flags),
    "killed when it had made the directory, then the next run": Incident(
        "first save", save_below, once(_is_parents_sync, Kill("before"), after="mkdir"), save_beside
    ),
}


def record_incident(name: str, folder: Path) -> Recording:
    """Record an incident by its name. Call it in a zygote."""
    return INCIDENTS[name].record(folder)
