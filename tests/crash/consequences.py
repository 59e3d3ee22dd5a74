"""Checks of a directory after a program that saved there was killed."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aiockpt import SyncCheckpointer
from aiockpt.errors import CheckpointNotFoundError
from tests.crash.lab.ptrace import refuse_rename_flags
from tests.crash.promises import Allowed
from tests.crash.scenarios import PART, Scenario, checkpointer

Kind = Literal["lost", "broken", "mixed", "stray", "next run", "leftover", "live", "program", "hang"]
"""The kinds of problems. In order: a checkpoint was announced but is missing; is listed but can't be loaded; loads but
holds no saved state; is listed but was never saved; the next run fails; it leaves files of the killed one behind; it
touches files of a live process; the program ended in an unexpected way; it did not end."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A violated guarantee."""

    kind: Kind
    what: str


def visible(folder: Path) -> set[str]:
    """Return the names that are listed."""
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def hidden(folder: Path) -> set[str]:
    """Return the names that are not listed."""
    return set(os.listdir(folder)) - visible(folder)


def compare(scenario: Scenario, folder: Path, allowed: Allowed) -> list[Problem]:
    """Compare the checkpoints with the allowed states. Call it in a process unrelated to the killed one."""
    problems = []
    found = visible(folder)
    with checkpointer() as ckpt:
        if scenario.refused:  # a checkpoint in the middle of a replacement is not listed, but can be read
            found |= {name for name in allowed if _is_read(ckpt, folder / name)}
        for name, steps in allowed.items():
            if name not in found and None not in steps:
                problems.append(Problem("lost", f"{name} was announced for a step of {steps}, but is missing"))
        for name in sorted(found):
            steps = {step for step in allowed.get(name, ()) if step is not None}
            if not steps:
                problems.append(Problem("stray", f"{name} is there, and should not be"))
                continue
            try:
                state = ckpt.load(folder / name)
            except Exception:
                problems.append(Problem("broken", f"{name} can't be loaded: {traceback.format_exc(limit=-2)}"))
                continue
            if not any(scenario.is_state(state, name, step) for step in steps):
                old = any(scenario.is_state(state, name, step) for step in range(20))
                problems.append(
                    Problem("lost" if old else "mixed", f"{name} holds the state of none of the steps {sorted(steps)}")
                )
            elif scenario.together and scenario.is_state(state, name, 2):
                problems += _compare_parts(ckpt, scenario, folder / name)
    return problems


def _compare_parts(ckpt: SyncCheckpointer, scenario: Scenario, path: Path) -> list[Problem]:
    """Compare what was published with a checkpoint."""
    try:
        report = ckpt.verify(path)
        if not report.ok:
            return [Problem("broken", str(report))]
        if not scenario.is_state(ckpt.load(path / PART), f"part of {path.name}", 2):
            return [Problem("mixed", f"{path.name}/{PART} holds another state")]
    except Exception:
        return [Problem("broken", f"{path.name}/{PART} can't be loaded: {traceback.format_exc(limit=-2)}")]
    found = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    lacking = {"config.json", "below/notes.txt"} - found if path.exists() else None  # else it is in between two names
    return [Problem("lost", f"{path.name} lacks {lacking}")] if lacking else []


def _is_read(ckpt: SyncCheckpointer, path: Path) -> bool:
    try:
        return ckpt.verify(path).ok
    except CheckpointNotFoundError:
        return False


def delete_all(scenario: Scenario, folder: Path, allowed: Allowed) -> list[Problem]:
    """Delete all checkpoints in a copy; none may reappear, and the next save may leave no hidden names."""
    copy = folder.with_name("deleted")
    shutil.copytree(folder, copy, symlinks=True)
    problems = []
    with checkpointer() as ckpt:
        for name in allowed:
            there = _is_read(ckpt, copy / name)
            try:
                ckpt.delete(copy / name)
            except CheckpointNotFoundError:
                if there:
                    problems.append(Problem("lost", f"{name} can be read, but not deleted"))
            if _is_read(ckpt, copy / name):
                problems.append(Problem("stray", f"{name} can be read after it was deleted"))
    problems += run_next(scenario, copy, ["next"])
    if visible(copy) != {scenario.file("next")}:
        problems.append(Problem("stray", f"{visible(copy)} is listed after all checkpoints were deleted"))
    problems += leftovers(copy)
    shutil.rmtree(copy)
    return problems


def run_next(scenario: Scenario, folder: Path, names: Sequence[str], step: int = 19) -> list[Problem]:
    """Save as the next run of the program would, under new names or over existing checkpoints."""
    problems = []
    options = {"overwrite": True, "storage": scenario.storage and scenario.storage(), **scenario.options}
    with checkpointer() as ckpt:
        for name in map(scenario.file, names):
            try:
                ckpt.save(scenario.state(name, step), folder / name, **options)
                if not scenario.is_state(ckpt.load(folder / name), name, step):
                    problems.append(Problem("next run", f"{name} does not hold the state that was saved there"))
            except Exception:
                problems.append(Problem("next run", f"saving {name}: {traceback.format_exc(limit=-2)}"))
    return problems


def leftovers(folder: Path) -> list[Problem]:
    """Return the hidden names that the next run should have removed."""
    return [Problem("leftover", f"{name} was left") for name in sorted(hidden(folder))]


def check(scenario: Scenario, folder: Path, allowed: Allowed) -> list[Problem]:
    """Check the checkpoints, save as the next run would, and check for leftovers."""
    if scenario.refused:
        refuse_rename_flags()
    problems = compare(scenario, folder, allowed)
    if scenario.refused:
        problems += delete_all(scenario, folder, allowed)
        problems += run_next(scenario, folder, ["next"])
        for name in {name for name, steps in allowed.items() if None not in steps} - visible(folder):
            problems.append(Problem("lost", f"{name} is not listed after the next run has saved"))
        problems += compare(scenario, folder, {**allowed, scenario.file("next"): {19}}) + leftovers(folder)
    problems += run_next(scenario, folder, [*sorted(visible(folder))[:1], "next"])
    return problems + leftovers(folder)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the inode and the bytes of each file, and the inode of each directory, below hidden names."""
    return {
        str(path): (path.stat().st_ino, path.read_bytes() if path.is_file() else b"")
        for name in hidden(folder)
        for path in (folder / name, *(folder / name).rglob("*"))
    }
