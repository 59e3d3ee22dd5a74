"""The outcome of a round: which rank failed, and the error that every rank raises for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiockpt import errors
from aiockpt.errors import AiockptError, CoordinationError, LoadError, SaveError

SAME_CALLS = (
    "every rank must call save and load the same number of times and in the same order; "
    "to save or load on one rank alone, give its checkpointer process_group=None"
)


class RemoteError(NamedTuple):
    """An error on its way to the other ranks."""

    rank: int  # where it happened
    kind: str  # the name of its class in aiockpt.errors; empty for any other class
    message: str


def first_failure(arrivals: Sequence[Any]) -> RemoteError | None:
    """Return the failure that all ranks raise, of a rank that does not come before one that has failed."""
    failures = [arrival for arrival in arrivals if isinstance(arrival, RemoteError)]
    return min(failures, key=lambda failure: failure.kind != "CoordinationError", default=None)


def coordination_failure(rank: int, text: str) -> RemoteError:
    """Return a failure that becomes a `CoordinationError` with exactly this text."""
    return RemoteError(rank, "CoordinationError", text)


def dead_rank_text(rank_name: str, operation: str) -> str:
    """Return the message for a rank whose process has ended."""
    return (
        f"{rank_name} is gone, so the ranks can't agree on {operation}: its process has ended, or its checkpointer was "
        f"closed; restart the job, or make a new checkpointer over a process group of the ranks that are left"
    )


def silence_text(rank_name: str, operation: str, after_s: float) -> str:
    """Return the message for a rank that sends no heartbeats."""
    return (
        f"{rank_name} was silent for {after_s:g} s during {operation}: its process is frozen, or the network between "
        "the hosts is cut"
    )


def timeout_text(rank_names: str, operation: str, after_s: float) -> str:
    """Return the message for ranks that did not come in time."""
    return f"{rank_names} did not come to {operation} within {after_s:g} s: {SAME_CALLS}"


def to_remote_error(rank: int, error: BaseException) -> RemoteError:
    """Return an error in the form in which it is sent to the other ranks."""
    kind = type(error).__name__ if isinstance(error, AiockptError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return RemoteError(rank, kind, text)


def to_exception(failure: RemoteError, operation: str, cause: BaseException | None = None) -> AiockptError:
    """Return the error that a rank raises; ``cause`` is the error itself, on the rank where it happened."""
    default = LoadError if operation.startswith("the load") else SaveError
    kind = getattr(errors, failure.kind, default) if failure.kind else default
    if not (isinstance(kind, type) and issubclass(kind, AiockptError)):
        kind = default
    names_rank = kind is CoordinationError or failure.message.startswith("rank ")
    error = kind(failure.message if names_rank else f"rank {failure.rank}: {failure.message}")
    error.__cause__ = cause
    return error
