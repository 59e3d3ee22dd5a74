"""Gives up a save that takes too long, and lets the others go on without it if a thread of it hangs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from aiockpt.errors import SaveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.saving.job import SaveJob

_GRACE_S = 5.0
"""How long what is called off may take to end, before it counts as hanging."""

logger = logging.getLogger("aiockpt")


async def watch(
    job: SaveJob,
    timeout_s: float,
    *,
    shake: Callable[[], object],
    abandon: Callable[[], object],
) -> None:
    """Give a save up when its time is over; to be cancelled when the save has ended.

    Args:
        job: the save.
        timeout_s: how long it may take, in seconds, from the end of the save before.
        shake: is called when the save does not end though it was called off.
        abandon: is called when that hasn't helped either.
    """
    await job.turn.wait_for("reported")
    await anyio.sleep(timeout_s)
    if _is_published(job):
        return
    told = f"the save of {job.path} was not done after save_timeout = {timeout_s:g} s and was given up"
    job.time_out(SaveTimeoutError(f"{told}; nothing of it is left"))
    grace_s = min(_GRACE_S, timeout_s)
    await anyio.sleep(grace_s / 2)
    shake()
    await anyio.sleep(grace_s / 2)
    if _is_published(job):
        return
    job.quarantine()
    job.settle(
        None,
        SaveTimeoutError(
            f"{told}; a thread of it hangs in the file system, and holds its memory until it comes back. What was "
            "written is removed then, unless the system was just giving it its name. Look at the disk, and save "
            "elsewhere meanwhile"
        ),
    )
    job.turn.pass_phase("reported")
    logger.error("a thread of the save of %s hangs in the file system; saving goes on without it", job.path)
    abandon()


def _is_published(job: SaveJob) -> bool:
    """Tell whether what still goes on can't undo it: a hook."""
    return job.committed
