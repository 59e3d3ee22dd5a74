"""Fuzzing: hostile files of every kind for a given time, guided by coverage where atheris is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = (
    *("metadata", "manifest", "transformed", "tensor pickle", "tensor zip", "object pickle", "object zip"),
    *("torch pickle", "torch zip", "header", "safetensors", "shards", "frames"),
)
QUICK_S = 5.0
_LEAST_S = 2.0
_GRACE_S = 180.0  # for the start of a process, and for its last input
_REPOSITORY = Path(__file__).parents[2]


@dataclass(slots=True)
class Fuzzed:
    """The number of tries, and their outcomes.

    Attributes:
        kinds: kinds of files that were tried.
        tried: inputs; each was loaded, opened and verified.
        loaded: inputs that loaded.
        outcomes: the distinct outcomes, by kind of file.
        edges: branches of the readers that were taken, summed over the kinds; 0 without atheris.
        wrong: the outcomes that are not allowed, each with its input.
    """

    kinds: int = 0
    tried: int = 0
    loaded: int = 0
    outcomes: set[str] = field(default_factory=set)
    edges: int = 0
    wrong: list[str] = field(default_factory=list)


def run_fuzz(*, full: bool, folder: Path, seconds: float) -> Fuzzed:
    """Fuzz every kind of file that a checkpoint consists of, each kind in a process of its own.

    Args:
        full: use all of ``seconds``; else a few seconds for each kind.
        folder: the directory for the results of each process.
        seconds: the time limit, without the start of processes.
    """
    atonce = max(1, (os.cpu_count() or 1) // 2)  # each process has threads of its own
    each_s = max(_LEAST_S, min(seconds * atonce / len(NAMES), seconds if full else QUICK_S))
    counts = Fuzzed()
    with ThreadPoolExecutor(atonce) as pool:
        for name, found in zip(NAMES, pool.map(lambda name: _run(name, folder, each_s), NAMES), strict=True):
            _add(counts, name, *found)
    return counts


def _run(name: str, folder: Path, seconds: float) -> tuple[dict[str, Any], str]:
    """Fuzz one kind of file in a new process; return its findings and its stderr."""
    report = folder / name.replace(" ", "-") / "found.json"
    report.parent.mkdir()
    seed = str(time.time_ns() % (1 << 31))
    command = [sys.executable, "-m", "tests.fuzz.guided", name, str(int(seconds)), seed, str(report)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + _GRACE_S,
            check=False,
            cwd=_REPOSITORY,
        )
        said, code = done.stderr, done.returncode
    except subprocess.TimeoutExpired as exc:
        said, code = str(exc), -1
    found = json.loads(report.read_text()) if report.exists() else {"tried": 0, "outcomes": {}, "found": []}
    if code:
        found["found"].append((f"the process ended with {code}: {said[-1500:]}", ""))
    return found, said


def _add(counts: Fuzzed, name: str, found: dict[str, Any], said: str) -> None:
    counts.kinds += 1
    counts.tried += found["tried"]
    counts.loaded += found["outcomes"].get("load: done", 0)
    counts.outcomes |= {f"{name}: {outcome}" for outcome in found["outcomes"]}
    covered = re.findall(r"cov: (\d+)", said)
    counts.edges += int(covered[-1]) if covered else 0
    counts.wrong += [f"{name}: {wrong} {data[:400]}" for wrong, data in found["found"]]
    if not found["tried"]:
        counts.wrong.append(f"{name}: nothing was tried")
