"""``aiockpt prune``: removing the steps of a run that no policy keeps."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import aiockpt
from aiockpt.cli.app import Code, CommandError, report
from aiockpt.cli.keeping import reason_text
from aiockpt.cli.output import Column, console, print_json, print_table, shown, size_text
from aiockpt.manager.owner import take
from aiockpt.manager.policies import KeepAny, KeepPolicy, select, to_delete
from aiockpt.manager.scan import StepInfo, scan


def prune(directory: str, policies: Sequence[KeepPolicy], *, dry_run: bool = False, as_json: bool = False) -> Code:
    """Delete the steps of a run that no policy keeps, and print what is kept and why.

    The newest complete step always stays, and so does everything that is not a complete step of a manager.

    Raises:
        CommandError: there are no steps, or none has the metric of a policy.
        aiockpt.RunLockedError: a manager writes to the run, and this is not dry.
    """
    directory = os.path.abspath(os.path.expanduser(directory))
    os.stat(directory)
    lock = None if dry_run else take(directory)
    try:
        infos = scan(directory)
        _check(directory, infos, policies)
        policy, now = KeepAny(tuple(policies)), time.time()
        doomed = to_delete(policy, infos, now)
        code = Code.FINE if dry_run else _delete(doomed)
    finally:
        if lock is not None:
            lock.release()
    kept = select(policy, infos, now)
    steps = {info.step for info in doomed}
    if as_json:
        print_json([_record(info, kept, steps, dry_run=dry_run) for info in infos])
    else:
        _print(infos, kept, steps, dry_run=dry_run)
    return code


def _check(directory: str, infos: Sequence[StepInfo], policies: Sequence[KeepPolicy]) -> None:
    if not infos:
        raise CommandError(
            f"{directory} has no steps of a manager, such as step-00000100; what has other names is never pruned"
        )
    known = sorted({metric for info in infos for metric in info.metrics})
    for policy in policies:
        if isinstance(policy, aiockpt.KeepBest) and policy.metric not in known:
            raise CommandError(f"no step has the metric {policy.metric}; there are: {', '.join(known) or 'none'}")


def _delete(infos: Sequence[StepInfo]) -> Code:
    if not infos:
        return Code.FINE
    code = Code.FINE
    with aiockpt.SyncCheckpointer() as ckpt:
        for info in infos:
            try:
                ckpt.delete(info.path)
            except (aiockpt.DeleteError, aiockpt.CheckpointNotFoundError) as exc:
                report(str(exc))
                code = Code.FAILED
    return code


def _reasons(info: StepInfo, kept: dict[int, list[str]]) -> list[str]:
    if info.state != "complete":
        return [f"{info.state}: {info.problem}"]
    return kept.get(info.step) or ["the newest"]


def _print(infos: Sequence[StepInfo], kept: dict[int, list[str]], doomed: set[int], *, dry_run: bool) -> None:
    word = "would be removed" if dry_run else "removed"
    rows = [
        (str(info.step), size_text(info.nbytes), word if info.step in doomed else "stays")
        + (("",) if info.step in doomed else (", ".join(shown(reason_text(each)) for each in _reasons(info, kept)),))
        for info in infos
    ]
    print_table(
        [Column("step", right=True), Column("size", right=True), Column(""), Column("because", wraps=True)], rows
    )
    freed = size_text(sum(info.nbytes for info in infos if info.step in doomed))
    console().print(f"{len(doomed)} of {len(infos)} steps {word}, {freed}")


def _record(info: StepInfo, kept: dict[int, list[str]], doomed: set[int], *, dry_run: bool) -> dict[str, object]:
    is_doomed = info.step in doomed
    return {
        "step": info.step,
        "path": info.path,
        "bytes": info.nbytes,
        "removed": is_doomed and not dry_run,
        "would_be_removed": is_doomed,
        "because": [] if is_doomed else _reasons(info, kept),
    }
