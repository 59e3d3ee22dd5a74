"""``aiockpt prune``: removing the steps of a run that no policy keeps."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import aiockpt
from aiockpt.cli.app import Code, CommandError, report
from aiockpt.cli.output import Column, console, print_json, print_table, shown, size_text
from aiockpt.manager.owner import take
from aiockpt.manager.policies import KeepAny, KeepPolicy, select, to_delete
from aiockpt.manager.scan import StepInfo, scan


def prune(directory: str, policies: Sequence[KeepPolicy], *, dry_run: bool = False, as_json: bool = False) -> Code:
    """Delete the steps of a run that no policy keeps, and print what is kept and why.

    The newest complete step always stays, and so does everything that is not a complete step of a manager.

    Raises:
        CommandError: there are no steps, or none has the metric of a policy; or the path is empty.
        aiockpt.RunLockedError: a manager writes to the run, and this is not dry.
    """
    if not directory:  # as of a variable of a shell that is not set; abspath would take the current directory
        raise CommandError("the path is empty; name a run's directory")
    directory = os.path.abspath(os.path.expanduser(directory))
    os.stat(directory)
    infos = scan(directory)
    _check(directory, infos, policies)
    lock = None if dry_run else take(directory)
    try:
        infos = scan(directory)  # again: no manager starts between this list and the deletions
        _check(directory, infos, policies)
        policy, now = KeepAny(tuple(policies)), time.time()
        doomed = to_delete(policy, infos, now)
        failed: set[int] = set() if dry_run else _delete(doomed)
    finally:
        if lock is not None:
            lock.release()
    kept = select(policy, infos, now)
    outcome = _Outcome(kept=kept, doomed={info.step for info in doomed}, failed=failed, dry_run=dry_run)
    if as_json:
        print_json([_record(info, outcome) for info in infos])
    else:
        _print(infos, outcome)
    return Code.FAILED if failed else Code.FINE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The fate of each step, by its number."""

    kept: Mapping[int, Sequence[str]]  # with the policies that keep them
    doomed: AbstractSet[int]
    failed: AbstractSet[int]  # those of them that could not be removed
    dry_run: bool

    def goes(self, info: StepInfo) -> bool:
        """Return whether a step was removed, or would be."""
        return info.step in self.doomed and info.step not in self.failed

    def reasons(self, info: StepInfo) -> Sequence[str]:
        """Return why a step stays."""
        if info.step in self.failed:
            return ["it could not be removed"]
        if info.state != "complete":
            return [f"{info.state}: {info.problem}"]
        return self.kept.get(info.step) or ["the newest"]


def _check(directory: str, infos: Sequence[StepInfo], policies: Sequence[KeepPolicy]) -> None:
    if not infos:
        raise CommandError(
            f"{directory} has no steps of a manager, such as step-00000100; what has other names is never pruned"
        )
    known = sorted({metric for info in infos for metric in info.metrics})
    for policy in policies:
        if isinstance(policy, aiockpt.KeepBest) and policy.metric not in known:
            raise CommandError(f"no step has the metric {policy.metric}; there are: {', '.join(known) or 'none'}")


def _delete(infos: Sequence[StepInfo]) -> set[int]:
    """Delete steps; return those that could not be, and report why."""
    failed: set[int] = set()
    if not infos:
        return failed
    with aiockpt.SyncCheckpointer() as ckpt:
        for info in infos:
            try:
                ckpt.delete(info.path)
            except (aiockpt.DeleteError, aiockpt.CheckpointNotFoundError) as exc:
                report(str(exc))
                failed.add(info.step)
    return failed


def _print(infos: Sequence[StepInfo], outcome: _Outcome) -> None:
    word = "would be removed" if outcome.dry_run else "removed"
    rows = [
        (str(info.step), size_text(info.nbytes))
        + ((word, "") if outcome.goes(info) else ("stays", ", ".join(map(shown, outcome.reasons(info)))))
        for info in infos
    ]
    print_table([Column("step", right=True), Column("size", right=True), Column(""), Column("because")], rows)
    gone = [info.nbytes for info in infos if outcome.goes(info)]
    console().print(f"{len(gone)} of {len(infos)} steps {word}, {size_text(sum(gone))}")


def _record(info: StepInfo, outcome: _Outcome) -> dict[str, object]:
    return {
        "step": info.step,
        "path": info.path,
        "bytes": info.nbytes,
        "removed": outcome.goes(info) and not outcome.dry_run,
        "would_be_removed": info.step in outcome.doomed,
        "because": [] if outcome.goes(info) else outcome.reasons(info),
    }
