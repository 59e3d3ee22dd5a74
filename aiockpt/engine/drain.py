"""The end of an engine: waiting for saves and loads in flight, and cancelling those that take too long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from aiockpt.errors import SaveCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiockpt.core.futures import Call
    from aiockpt.engine.queue import SaveQueue
    from aiockpt.saving.job import SaveJob

CANCEL_GRACE_S = 30.0  # for what was cancelled to end


def drain(
    queue: SaveQueue,
    calls: Callable[[], Iterable[Call[Any]]],
    timeout_s: float,
    *,
    abandon_ranks: Callable[[], object],
    kill_writer: Callable[[], object],
) -> tuple[bool, SaveCancelledError | None]:
    """Wait for all saves, then for all loads; when the time is over, cancel what is left. Blocks.

    Returns whether a thread hangs and is left behind, and the error if saves were not written in time.
    """
    timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
    deadline = time.monotonic() + timeout_s
    for job in queue.staging():
        job.unthrottle()
    queue.wait_idle(timeout_s)
    late = queue.jobs
    for job in reversed(late):
        job.cancel()
    is_stuck = not queue.wait_idle(CANCEL_GRACE_S / 3, abandoned=True)
    if is_stuck:  # in a wait for other ranks, or for the writer process
        abandon_ranks()
        kill_writer()
        is_stuck = not queue.wait_idle(CANCEL_GRACE_S * 2 / 3 if late else 0.0, abandoned=True)
    is_stuck |= _drain_calls(list(calls()), deadline, abandon_ranks)
    return is_stuck, _report_late(late, timeout_s)


def _drain_calls(calls: list[Call[Any]], deadline: float, abandon_ranks: Callable[[], object]) -> bool:
    """Wait for loads, and cancel them at the deadline; return whether one hangs."""
    late = []
    for call in calls:
        try:
            call.completion.ended(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            call.cancel()
            late.append(call)
    abandon_ranks()  # whatever still waits for other ranks has been cancelled
    grace = time.monotonic() + CANCEL_GRACE_S / 3
    is_stuck = False
    for call in late:
        try:
            call.completion.ended(max(0.0, grace - time.monotonic()))
        except TimeoutError:  # a thread of it hangs in the file system
            is_stuck = True
    return is_stuck


def _report_late(jobs: list[SaveJob], timeout_s: float) -> SaveCancelledError | None:
    """Return an error that names the saves that were not written in time, if any; settle those that hang."""
    hanging = [job for job in jobs if not job.handle.written.done()]
    failed = [job for job in jobs if job.handle.written._error is not None]
    outcomes = ((hanging, "a thread hangs in the file system; it is left behind"), (failed, "nothing of it is left"))
    messages = [
        f"the save of {', '.join(job.path for job in group)} was not done after drain_timeout = {timeout_s:g} s "
        f"and was cancelled; {outcome}"
        for group, outcome in outcomes
        if group
    ]
    for job in hanging:  # else its waiters would wait for ever
        job.settle(None, SaveCancelledError(messages[0]))
    if not messages:
        return None
    error = SaveCancelledError("; ".join(messages))
    error.__cause__ = failed[0].handle.written._error if failed else None
    return error
