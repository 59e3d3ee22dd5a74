"""Keeping what changes tensors behind the copies of them: for a moment, or at every step of an optimizer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import torch

from aiockpt.capture import wait_before_steps, wait_no_more
from aiockpt.errors import AiockptError, TornSnapshotError
from aiockpt.staging.runtime import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from aiockpt.job import SaveJob


def fence_all(jobs: Sequence[SaveJob], timeout: float | None) -> None:
    """Do what `SaveHandle.fence` does for several saves; raises the first error, when all were waited for."""
    deadline = None if timeout is None else time.monotonic() + timeout
    errors: list[Exception] = []
    for job in jobs:
        try:
            job.fence(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (AiockptError, TimeoutError) as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


class StepGuard:
    """Lets an optimizer's steps wait for what is being copied; see `AsyncCheckpointer.guard`.

    Args:
        optimizer: whose steps are to wait.
        jobs: gives the saves that are being staged.
        timeout: seconds that a step blocks at most.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, jobs: Callable[[], Sequence[SaveJob]], timeout: float) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"guard() is for a torch.optim.Optimizer, not a {type(optimizer).__name__}; for others call fence() "
                "before their steps"
            )
        if not timeout >= 0:
            raise ValueError(f"timeout must not be negative, not {timeout!r}")
        self._jobs = jobs
        self._timeout = timeout
        # A compiler that traced it would let it run once, or never.
        self._before = torch.compiler.disable(self._wait)  # type: ignore[no-untyped-call]
        self._optimizer = optimizer
        wait_before_steps(optimizer, self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Let steps go on without waiting. Idempotent."""
        wait_no_more(self._optimizer, self._before)

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout
        for job in self._jobs():
            hold_back(job, max(0.0, deadline - time.monotonic()))


def hold_back(job: SaveJob, timeout_s: float) -> None:
    """Order this thread's streams behind the copies of a save, or give its snapshot up. Raises nothing of the save's.

    While a stream captures a graph nothing is done: it can't wait for what is outside, and nothing runs yet.
    """
    try:
        if any(is_capturing(device) for device in list(job.capture.events)):
            return
        if job.order_behind(timeout_s):
            job.check_for_changes()  # before there are any that come behind the copies
    except TornSnapshotError:
        return  # which the save finds as well
    except TimeoutError:
        job.give_up(
            "it was not copied within the timeout of guard(), and the optimizer's step went on. Look at why the "
            "storage is slow, or allow more staging_bytes or a longer timeout"
        )
    except Exception as exc:
        job.give_up(f"an optimizer's step could not be ordered behind its copies: {exc}")
