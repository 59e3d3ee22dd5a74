"""``aiockpt rm``, ``prune`` and ``clean``: removing checkpoints, and what killed processes have left of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import typer

import aiockpt
from aiockpt.cli.app import Code, CommandError, report
from aiockpt.cli.found import find
from aiockpt.cli.output import console, print_json, print_table, shown, size_text
from aiockpt.errors import AiockptError
from aiockpt.format.names import HIDDEN
from aiockpt.manager.policies import KeepAny, KeepPolicy, select, to_delete
from aiockpt.manager.scan import StepInfo, StepNames, scan
from aiockpt.storage.base import Directories
from aiockpt.storage.registry import directories_for

# --- policies of prune --------------------------------------------------------------------------------


def parse_best(text: str) -> aiockpt.KeepBest:
    """Return the policy of a text such as 2:loss or 1:accuracy:max; raise ValueError for another."""
    number, _, rest = text.partition(":")
    metric, _, mode = rest.rpartition(":") if rest.endswith((":min", ":max")) else (rest, "", "min")
    if not number.isdecimal() or not metric:
        raise ValueError(f"{text!r} is not N:METRIC or N:METRIC:max, such as 2:loss or 1:accuracy:max")
    return aiockpt.KeepBest(int(number), metric, "max" if mode == "max" else "min")


def policies_of(
    latest: int | None, every: Sequence[int], within_s: float | None, best: Sequence[str]
) -> list[KeepPolicy]:
    """Return the policies of the options of ``prune``; raise ValueError if there are none, or one is wrong."""
    policies: list[KeepPolicy] = [] if latest is None else [aiockpt.KeepLatest(latest)]
    policies += map(aiockpt.KeepEvery, every)
    policies += [] if within_s is None else [aiockpt.KeepWithin(within_s)]
    policies += map(parse_best, best)
    if not policies:
        raise ValueError("say what to keep: --keep-latest, --keep-every, --keep-within or --keep-best")
    return policies


# --- checkpoints ---------------------------------------------------------------------------------------


def rm(paths: Sequence[str], *, yes: bool = False) -> Code:
    """Delete checkpoints, each at once as a whole; unless ``yes``, ask on the terminal before."""
    out = console()
    if not yes:
        _ask([directories_for(path)[1] for path in paths])
    code = Code.FINE
    for path in _deleted(paths):
        if path:
            out.print(f"removed {shown(path)}")
        else:
            code = Code.FAILED
    return code


def _deleted(paths: Sequence[str]) -> Iterator[str]:
    """Delete checkpoints, and report those that can't be; yield the canonical name of each that was, else nothing."""
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in paths:
            try:
                path = directories_for(path)[1]
                ckpt.delete(path)
            except AiockptError as exc:
                report(str(exc))
                yield ""
            else:
                yield path


def _ask(paths: Sequence[str]) -> None:
    """Ask whether to delete; exit if not."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on: pass --yes to remove without being asked")
    for path in paths:
        try:
            found = find(path)
        except (OSError, AiockptError):  # what is not there, or can't be looked at, is said when it is deleted
            found = []
        nbytes = sum(each.info.nbytes for each in found)
        console(stderr=True).print(f"{shown(path)}  {size_text(nbytes) if found else 'no checkpoint'}")
    if not typer.confirm("Remove this?" if len(paths) == 1 else f"Remove these {len(paths)}?", err=True):
        console(stderr=True).print("Nothing was removed.")
        raise typer.Exit(Code.FINE)


# --- steps of a run -------------------------------------------------------------------------------------


def prune(
    directory: str, policies: Sequence[KeepPolicy], *, names: StepNames, dry_run: bool = False, as_json: bool = False
) -> Code:
    """Delete the steps of a run that no policy keeps, and print what is kept and why.

    The newest complete step always stays, and so does everything that is not a complete step of a manager.

    Raises:
        CommandError: there are no steps, or none has the metric of a policy.
        aiockpt.RunLockedError: a manager writes to the run, and this is not dry.
    """
    place, directory = directories_for(directory)
    with place.look(directory):  # it is there
        _checked(directory, policies, names)
    lock = None if dry_run else place.lease(directory)
    try:
        infos = _checked(directory, policies, names)  # again: no manager starts between this list and the deletions
        policy, now = KeepAny(tuple(policies)), time.time()
        shared = {info.step: _shared_bytes(place, info.path) for info in infos}
        doomed = to_delete(policy, infos, now)
        fates = [] if dry_run else list(_deleted([info.path for info in doomed]))
    finally:
        if lock is not None:
            lock.release()
    kept = select(policy, infos, now)
    doomed_steps = {info.step for info in doomed}
    failed = {info.step for info, gone in zip(doomed, fates, strict=False) if not gone}
    records = [
        {
            "step": info.step,
            "path": info.path,
            "bytes": info.nbytes,
            "shared_bytes": shared[info.step],
            "removed": not dry_run and info.step in doomed_steps - failed,
            "would_be_removed": info.step in doomed_steps,
            "because": [] if info.step in doomed_steps - failed else _reasons(info, kept, failed),
        }
        for info in infos
    ]
    if as_json:
        print_json(records)
    else:
        _print(records, "would be removed" if dry_run else "removed")
    return Code.FAILED if failed else Code.FINE


def _shared_bytes(place: Directories, path: str) -> int:
    try:
        with place.look(path) as listing:
            return listing.shared_bytes
    except (OSError, AiockptError):  # it is gone
        return 0


def _reasons(info: StepInfo, kept: Mapping[int, Sequence[str]], failed: AbstractSet[int]) -> Sequence[str]:
    """Return why a step stays."""
    if info.step in failed:
        return ["it could not be removed"]
    if info.state != "complete":
        return [f"{info.state}: {info.problem}"]
    return kept.get(info.step) or ["the newest"]


def _checked(directory: str, policies: Sequence[KeepPolicy], names: StepNames) -> Sequence[StepInfo]:
    """Return the steps, if the policies can be applied to them."""
    infos = scan(directory, names=names)
    if not infos:
        raise CommandError(
            f"{directory} has no steps of a manager, such as {names.name_of(100)}; for others pass --names"
        )
    known = sorted({metric for info in infos for metric in info.metrics})
    for policy in policies:
        if isinstance(policy, aiockpt.KeepBest) and policy.metric not in known:
            raise CommandError(f"no step has the metric {policy.metric}; there are: {', '.join(known) or 'none'}")
    return infos


def _print(records: Sequence[Mapping[str, Any]], word: str) -> None:
    rows = [
        (
            str(each["step"]),
            size_text(each["bytes"]),
            size_text(each["shared_bytes"]) if each["shared_bytes"] else "",
            *(("stays", ", ".join(map(shown, each["because"]))) if each["because"] else (word,)),
        )
        for each in records
    ]
    print_table((">step", ">size", ">shared", "", "because"), rows)
    gone = [each["bytes"] for each in records if not each["because"]]
    console().print(f"{len(gone)} of {len(records)} steps {word}, {size_text(sum(gone))}")


# --- leftovers ------------------------------------------------------------------------------------------


def clean(directory: str, *, older_than_s: float | None, as_json: bool = False) -> None:
    """Remove what killed processes have left in a directory, and print what stays and why."""
    with aiockpt.SyncCheckpointer() as ckpt:
        removed = ckpt.clean(directory, older_than_s=older_than_s)
    try:
        left = [found for found in find(directory) if found.name.startswith(HIDDEN)]
    except (FileNotFoundError, AiockptError):
        if not removed:  # else nothing was beside it, in a storage that has no empty directories
            raise
        left = []
    if as_json:
        print_json({"removed": removed, "left": [{"path": each.info.path, "why": each.info.problem} for each in left]})
        return
    out = console()
    for path in removed:
        out.print(f"removed {shown(path)}")
    for each in left:
        out.print(f"left {shown(each.info.path)}: {shown(each.info.problem)}")
    if not removed and not left:
        out.print("There is nothing to remove.")
