"""Order tensor updates behind the staging copies: once, with a fence, or at every optimizer step, with a guard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import torch

from aiockpt.errors import AiockptError, TornSnapshotError
from aiockpt.saving.job import SaveJob, check_timeout
from aiockpt.snapshot.optimizer_hooks import stop_waiting_before_steps, tensors_of, wait_before_steps
from aiockpt.staging.runtime import is_capturing

if TYPE_CHECKING:
    from types import TracebackType


def fence_all(jobs: Sequence[SaveJob], timeout: float | None) -> None:
    """Fence several saves; raise the first error after all were waited for."""
    deadline = time.monotonic() + check_timeout(timeout)
    errors: list[Exception] = []
    for job in jobs:
        try:
            job.fence(max(0.0, deadline - time.monotonic()))
        except (AiockptError, TimeoutError) as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


class StepGuard:
    """Makes the steps of an optimizer wait for the copies; see `AsyncCheckpointer.guard`."""

    def __init__(self, optimizer: torch.optim.Optimizer, jobs: Callable[[], Sequence[SaveJob]], timeout: float) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"guard() is for a torch.optim.Optimizer, not a {type(optimizer).__name__}; for others call fence() "
                "before their steps"
            )
        self._jobs = jobs
        self._timeout = check_timeout(timeout)
        # If torch.compile traced the function, it would run while tracing only, not at each step.
        self._before = torch.compiler.disable(self._wait)  # type: ignore[no-untyped-call]
        self._optimizer = _with_hooks(optimizer)
        wait_before_steps(self._optimizer, self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Stop making the steps wait. Idempotent."""
        stop_waiting_before_steps(self._optimizer, self._before)

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout
        for job in self._jobs():
            hold_back(job, max(0.0, deadline - time.monotonic()), self._optimizer)


def _with_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose steps call hooks: this one, or the one that it wraps; TypeError if there is none."""
    hooked, seen = optimizer, {id(optimizer)}
    while not getattr(type(hooked).step, "hooked", False):  # set by torch.optim.Optimizer.__init__, which wraps `step`
        held = (getattr(hooked, name, None) for name in ("optimizer", "_optimizer"))
        inner = next((optimizer for optimizer in held if isinstance(optimizer, torch.optim.Optimizer)), None)
        if inner is None or id(inner) in seen:
            raise TypeError(
                f"steps of a {type(optimizer).__name__} call no hooks (its __init__ does not call that of "
                "torch.optim.Optimizer), so they can't wait: guard() the optimizer within it, or call fence() before "
                "each step"
            )
        hooked = inner
        seen.add(id(hooked))
    return hooked


def _changed_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that a step changes, including those of optimizers inside this one."""
    tensors: list[torch.Tensor] = []
    waiting, seen = [optimizer], {id(optimizer)}
    for outer in waiting:
        tensors += tensors_of(outer)
        inner = [value for value in vars(outer).values() if isinstance(value, torch.optim.Optimizer)]
        waiting += [value for value in inner if id(value) not in seen]
        seen |= set(map(id, inner))
    return tensors


def hold_back(job: SaveJob, timeout_s: float, optimizer: torch.optim.Optimizer) -> None:
    """Order a step behind the copies of a save, or give up its snapshot. Raises no error of the save.

    Does nothing while a stream captures a CUDA graph: a captured stream can't wait for an event recorded outside of
    the capture, and a captured step changes no tensor before the replay.
    """
    try:
        if any(is_capturing(device) for device in list(job.snapshot.events)):
            return
        if job.order_behind(timeout_s):
            job.consistency.allow_changes(_changed_by(optimizer))
    except TornSnapshotError:
        return  # which the save finds as well
    except TimeoutError:
        job.give_up(
            "it was not copied within the timeout of guard(), and the optimizer's step went on. Look at why the "
            "storage is slow, or allow more staging_bytes or a longer timeout"
        )
    except Exception as exc:
        job.give_up(f"an optimizer's step could not be ordered behind its copies: {exc}")
