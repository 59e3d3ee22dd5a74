"""``aiockpt verify``: every byte of checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import aiockpt
from aiockpt.cli.app import Code, report
from aiockpt.cli.found import walk
from aiockpt.cli.output import bar, console, print_json, shown
from aiockpt.errors import AiockptError, LoadError
from aiockpt.storage.registry import directories_for


async def verify(paths: Sequence[str], *, as_json: bool = False) -> Code:
    """Check checkpoints, or all in a directory, print the problems, and return the exit code."""
    code = Code.FINE
    records: list[dict[str, Any]] = []
    async with aiockpt.AsyncCheckpointer() as ckpt:
        for path in paths:
            async for at, outcome in _verified(ckpt, path):
                if isinstance(outcome, LoadError):
                    code = Code.FAILED
                    report(str(outcome))
                elif not outcome.ok:
                    code = max(code, Code.PROBLEMS)
                if as_json:
                    records.append(_record(at, outcome))
                elif not isinstance(outcome, LoadError):
                    _print(outcome)
    if as_json:
        print_json(records)
    return code


async def _verified(
    ckpt: aiockpt.AsyncCheckpointer, path: str
) -> AsyncIterator[tuple[str, aiockpt.VerifyReport | LoadError]]:
    """Yield the report of a checkpoint, and of each in a directory."""
    try:
        paths = _paths_in(path)
    except (OSError, AiockptError) as exc:
        yield path, LoadError(str(exc))
        return
    for each in paths:
        try:
            yield each, await _verify(ckpt, each)
        except LoadError as exc:
            yield each, exc


def _paths_in(path: str) -> list[str]:
    """Return the checkpoints in a directory, or the path itself where there is none."""
    place, at = directories_for(path)
    try:
        with place.look(at) as listing:
            is_file = listing.is_file
    except (FileNotFoundError, AiockptError):  # verifying says so, or can do without a list
        return [at]
    return ([] if is_file else [found.info.path for found in walk(at)]) or [at]


async def _verify(ckpt: aiockpt.AsyncCheckpointer, path: str) -> aiockpt.VerifyReport:
    with bar(f"checking {shown(path.rpartition('/')[2] or path)}") as shown_bar:
        return await ckpt.verify(path, progress=shown_bar)


def _print(outcome: aiockpt.VerifyReport) -> None:
    out = console()
    summary, *problems = str(outcome).splitlines()
    out.print(summary, style="green" if outcome.ok else "bold red")
    for problem in problems:
        out.print(problem)


def _record(path: str, outcome: aiockpt.VerifyReport | LoadError) -> dict[str, Any]:
    if isinstance(outcome, LoadError):
        return {"path": path, "ok": False, "error": str(outcome)}
    return {
        "path": outcome.path,
        "ok": outcome.ok,
        "format": outcome.format,
        "files": outcome.files,
        "items": outcome.items,
        "bytes": outcome.checked_bytes,
        "without_crc": outcome.unverifiable,
        "seconds": outcome.elapsed_s,
        "problems": [asdict(problem) for problem in outcome.problems],
    }
