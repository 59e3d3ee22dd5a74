"""Policies of retention from text: from the options of ``prune``, and from what a manager notes in its checkpoints."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import aiockpt
from aiockpt.format.layouts import document
from aiockpt.format.manifest.manifest import decode_head
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.manager.policies import KeepAll, KeepAny, KeepPolicy
from aiockpt.manager.scan import RUN_KEY, StepInfo
from aiockpt.storage.base import Directories

_NOTED = ("KeepLatest", "KeepEvery", "KeepWithin", "KeepBest")


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


def noted_policy(place: Directories, infos: Sequence[StepInfo]) -> KeepPolicy | None:
    """Return the policy by which the manager of a run keeps steps, as its newest step notes it; None if none does.

    Functions (`aiockpt.KeepIf`) can't be noted, and are left out.
    """
    complete = [info for info in infos if info.state == "complete"]
    if not complete:
        return None
    try:
        with place.look(complete[-1].path) as listing:
            head: Any = decode_head(document(MANIFEST_NAME, listing.files, listing.fetch))
        texts = head["metadata"][RUN_KEY]["keep"]
        policies = [policy for text in texts if (policy := parse_policy(text)) is not None]
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return KeepAny(tuple(policies)) if policies else None


def parse_policy(text: str) -> KeepPolicy | None:
    """Return the policy of which this is the repr; None if it contains another kind. Runs nothing."""
    try:
        return _policy(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _policy(node: ast.expr) -> KeepPolicy:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _NOTED:
            policy: KeepPolicy = getattr(aiockpt, name)(*map(ast.literal_eval, args))
            return policy
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return KeepAny((_policy(left), _policy(right)))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return KeepAll((_policy(left), _policy(right)))
        case _:
            raise ValueError("it is no policy that can be noted")
