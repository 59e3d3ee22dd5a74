"""What rank 0 makes of what the ranks brought. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.coordination.base import RemoteError

if TYPE_CHECKING:
    from collections.abc import Sequence

SAME_CALLS = (
    "every rank must call save and load the same number of times and in the same order; "
    "to save or load on one rank alone, give its checkpointer process_group=None"
)


class Arrived(NamedTuple):
    """What a rank came with.

    Attributes:
        what: what the rank is at.
        value: its value, or its `RemoteError`.
    """

    what: str
    value: Any


class Dead(NamedTuple):
    """A rank's process has ended.

    Attributes:
        who: the rank, its host and process.
    """

    who: str


class TimedOut(NamedTuple):
    """A rank did not come.

    Attributes:
        who: the rank.
        after_s: how long it was waited for.
    """

    who: str
    after_s: float


Arrival = Arrived | Dead | TimedOut | RemoteError


def first_failure(arrivals: Sequence[Arrival], what: str) -> RemoteError | None:
    """Say whether all have come, to the same thing, with values.

    Args:
        arrivals: one for each rank, in order.
        what: what rank 0 is at.

    Returns:
        The trouble that everyone is told of; None without any.
    """
    brought = [arrival for arrival in arrivals if isinstance(arrival, Arrived)]
    for rank, arrival in enumerate(arrivals):
        if isinstance(arrival, Dead):
            return coordination_failure(rank, gone_text(arrival.who, what))
    for arrival in arrivals:
        if isinstance(arrival, RemoteError):
            return arrival
    if len(brought) < len(arrivals):
        return _late(arrivals, what)
    troubles = [arrival.value for arrival in brought if isinstance(arrival.value, RemoteError)]
    for rank, arrival in enumerate(brought):
        if arrival.what != what and not troubles:
            text = f"rank 0 is at {what} while rank {rank} is at {arrival.what}: {SAME_CALLS}"
            return coordination_failure(rank, text)
    return troubles[0] if troubles else None


def coordination_failure(rank: int, text: str) -> RemoteError:
    """Make a trouble that becomes a `CoordinationError` with just this text."""
    return RemoteError(rank, "CoordinationError", text)


def gone_text(who: str, what: str) -> str:
    """Say that a rank's process has ended."""
    return (
        f"{who} is gone, so the ranks can't agree on {what}: its process has ended, or its checkpointer was closed; "
        f"restart the job, or make a new checkpointer over a process group of the ranks that are left"
    )


def late_text(who: str, what: str, after_s: float) -> str:
    """Say that ranks did not come."""
    return f"{who} did not come to {what} within {after_s:g} s: {SAME_CALLS}"


def _late(arrivals: Sequence[Arrival], what: str) -> RemoteError:
    late = {rank: arrival for rank, arrival in enumerate(arrivals) if isinstance(arrival, TimedOut)}
    after_s = max(arrival.after_s for arrival in late.values())
    return coordination_failure(min(late), late_text(_listed([a.who for a in late.values()]), what, after_s))


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} others"
