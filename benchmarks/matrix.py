"""All benchmarks in one command: each section in a process of its own; figures, tables and pictures in a directory.

If a contender hangs or crashes its process, the process is killed, the section starts again without the contender,
and its row says so. Free memory and disk space are checked first. The results contain no host names or paths.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.limits import machine
from benchmarks.report.markdown import document
from benchmarks.report.pictures import draw

RESULTS, TABLES = "results.json", "results.md"
TIME_LIMIT_S, RUN_LIMIT_S = 1500.0, 60.0
GIB = 2.0

_COPIES_ON_DISK, _COPIES_IN_MEMORY = 8, 5
_GRACE = 3
_ATTEMPTS = 4
_TAIL = 400
_PROGRAM = (sys.executable, "-m", "benchmarks")
_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.@+~=-]+/)+")


@dataclass(frozen=True, slots=True)
class Section:
    """A benchmark of the matrix, with its options.

    Attributes:
        name: its name in the results.
        benchmark: the name of its command.
        share: its share of the time, relative to the other sections'.
        options: returns the options of the command, for the size of the state in GiB.
        rounds: the number of rounds after the warm-up.
    """

    name: str
    benchmark: str
    share: float
    options: Callable[[float], Mapping[str, object]]
    rounds: int = 3


def _sized(share: float, /, **more: object) -> Callable[[float], Mapping[str, object]]:
    return lambda gib: {"gib": share * gib, **more}


def _counted(gib: float) -> Mapping[str, object]:
    return {"count": max(500, int(100_000 * min(1.0, gib / GIB)))}


_SCALE = {"items": "100,1000", "limit": 20}
_SMALL_SCALE = {"ranks": "8,64,512", "items": "10,100", "world": "2,4,8"}

SECTIONS = (
    Section("save", "save", 6, _sized(1)),
    Section("load", "load", 6, _sized(1)),
    Section("new process", "new-process", 5, _sized(0.5)),
    Section("startup", "startup", 1.5, lambda _: {}),
    Section("slice", "slice", 1, _sized(0.25)),
    Section("open", "open", 1.5, lambda gib: {**_counted(gib), "load": True}, 2),
    Section("small tensors", "small", 2, _counted, 2),
    Section("model states", "models", 3, _sized(0.5), 2),
    Section("ranks", "ranks", 2.5, _sized(0.5, ranks="2,4"), 2),
    Section("safetensors from ranks", "safetensors-ranks", 1, _sized(0.25), 2),
    Section("blocked loop", "blocked-loop", 1.5, _sized(0.5), 2),
    Section("loop lag", "lag", 1, _sized(0.5)),
    Section("training", "training", 4, _sized(0.125, steps=16), 2),
    Section("compression", "compress", 1, _sized(0.125, part="fp32,bf16,moments"), 2),
    Section("by size and number", "sweep", 2.5, _sized(0.5), 2),
    Section("in processes of their own", "rows", 4, lambda gib: {"gib": min(1.0, gib)}),
    Section("growth", "growth", 3, lambda gib: {"gib": min(1.0, gib), "count": int(100_000 * min(1.0, gib))}, 2),
    Section("scale", "scale", 2.5, lambda gib: _SCALE if gib >= 1 else _SMALL_SCALE, 2),
)


def run(options: Namespace) -> int:
    """Run all sections, and write the results; return the exit code."""
    sections = [each for each in SECTIONS if _asked(each, options.only)]
    if not sections:
        raise SystemExit(f"--only {options.only} leaves nothing of: {', '.join(each.name for each in SECTIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    limit_s, begun = options.time_limit or TIME_LIMIT_S, time.monotonic()
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="aiockpt-benchmark-", dir=options.dir) as folder:
        directory = Path(folder)
        check_room(directory, options.gib)
        facts = machine.facts(directory)
        for number, section in enumerate(sections):
            left = limit_s - (time.monotonic() - begun)
            share_s = left * section.share / sum(each.share for each in sections[number:])
            least_s = (
                options.run_limit or RUN_LIMIT_S
            )  # on a slow machine the time limit is exceeded, but every section runs
            reports[section.name] = run_section(section, options, directory, max(share_s, least_s))
    results = {
        "written": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks all --gib {options.gib:g}",
        "gib": options.gib,
        "took_s": round(time.monotonic() - begun),
        "machine": facts,
        "sections": reports,
    }
    write(results, options.out)
    failed = [name for name, report in reports.items() if "failed" in report]
    print(f"figures, tables and pictures: {options.out}" + f"; failed: {', '.join(failed)}" * bool(failed))
    return int(bool(failed))


def write(results: Mapping[str, Any], directory: Path) -> None:
    """Write figures, tables and pictures to a directory."""
    (directory / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    pictures = draw(results, directory)
    (directory / TABLES).write_text(document(results, pictures))


def _asked(section: Section, only: str | None) -> bool:
    return not only or any(part.strip() in (section.name, section.benchmark) for part in only.split(","))


def check_room(directory: Path, gib: float) -> None:
    """Raise SystemExit if the disk or the memory has no room for a run of this size."""
    disk, memory = shutil.disk_usage(directory).free / 2**30, psutil.virtual_memory().available / 2**30
    fits = min((disk - 1) / _COPIES_ON_DISK, (memory - 2) / _COPIES_IN_MEMORY)
    if fits < gib:
        raise SystemExit(
            f"a run of {gib:g} GiB needs {_COPIES_ON_DISK * gib + 1:g} GiB of disk and {_COPIES_IN_MEMORY * gib + 2:g} "
            f"GiB of memory; free are {disk:.1f} and {memory:.1f}: use --gib {max(0.0, fits):.2g} or --dir"
        )


# --- one section -----------------------------------------------------------------------------------------


def run_section(
    section: Section, options: Namespace, directory: Path, seconds: float, program: Sequence[str] = _PROGRAM
) -> dict[str, Any]:
    """Run a section; if a contender ends its process, run it again without that contender. Return the report."""
    run_limit_s = options.run_limit or RUN_LIMIT_S
    without: dict[str, str] = {}
    ends = time.monotonic() + seconds * _GRACE + run_limit_s
    for _ in range(_ATTEMPTS):
        left_s = ends - time.monotonic()
        if left_s < 0:
            break
        folder = Path(tempfile.mkdtemp(dir=directory))
        file = folder / "report.json"
        arguments = {
            **section.options(options.gib),
            "rounds": options.rounds or section.rounds,
            "dir": folder,
            "json": file,
            "time-limit": min(seconds, left_s),
            "run-limit": run_limit_s,
        }
        command = [*program, section.benchmark]
        command += [f"--{key}" if value is True else f"--{key}={value}" for key, value in arguments.items()]
        command += [f"--without={name}={why}" for name, why in without.items()]
        print(f"\n===== {section.name}", flush=True)
        began = time.monotonic()
        code, said = end_in_time(command, left_s)
        in_time = time.monotonic() - began < left_s
        report = json.loads(file.read_text()) if file.exists() else None
        culprit = running(file).read_text() if running(file).exists() else None
        shutil.rmtree(folder)
        if report is not None:
            for name, why in without.items():
                _mark(report, name, why)
            return without_paths({**report, "took_s": round(time.monotonic() - began)})
        if not in_time:
            break
        if culprit is None or culprit in without:
            return without_paths({"failed": f"ended with {code}: {said[-_TAIL:]}", "tables": [], "bars": []})
        without[culprit] = f"killed: one run took longer than {run_limit_s:g} s" if code == 1 else f"ended with {code}"
        print(f"{culprit}: {without[culprit]}; running again without it", file=sys.stderr)
    return {"failed": f"not run to its end in {seconds:.0f} s", "tables": [], "bars": []}


def _mark(report: dict[str, Any], name: str, why: str) -> None:
    """Write the reason for which a contender was left out into its row of every table."""
    for table in report["tables"]:
        for run, row in zip(table["runs"], table["rows"], strict=True):
            if run["name"] == name:
                run["error"], row[-1] = why, why


def running(file: Path) -> Path:
    """Return the file with the name of the running contender that belongs to a file of figures."""
    return file.with_suffix(".running")


def end_in_time(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a command in a new session, and kill its process group at the end; return its exit code and its stderr."""
    with tempfile.TemporaryFile() as errors:
        root = Path(__file__).parents[1]
        process = subprocess.Popen(command, cwd=root, stderr=errors, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also processes that a contender has left
            process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    print("\n".join(said.splitlines()[-8:]), file=sys.stderr)
    return process.returncode, said


def without_paths(value: Any) -> Any:
    """Remove the directories of this machine's paths from all texts."""
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_paths(each) for each in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value
