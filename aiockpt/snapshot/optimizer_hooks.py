"""Counting the steps of optimizers, from their beginning, for the saves that are in flight."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.snapshot.sampling import Samples

logger = logging.getLogger("aiockpt")

_GUARDS = "_aiockpt_guards"


class Token:
    """Lives as long as a capture that is not released.

    Attributes:
        samples: what was seen of its tensors at the call, where that was asked for.
        is_blind: a step has come since of which nobody can tell what it changed.
    """

    __slots__ = ("__weakref__", "is_blind", "samples")

    def __init__(self, samples: Samples | None = None) -> None:
        self.samples = samples
        self.is_blind = False


_live: weakref.WeakSet[Token] = weakref.WeakSet()
_live_lock = threading.Lock()


def follow_steps(capture: Snapshot, samples: Samples | None = None) -> None:
    """Count the steps of optimizers that concern a capture, from now on until it is released."""
    capture.token = token = Token(samples)
    with _live_lock:
        _live.add(token)


def count_change(tensors: Iterable[torch.Tensor]) -> None:
    """Advance the version counters of tensors that are changed by other means than torch's operators."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait where that was asked for, and only then count the change, as if it had happened. Raises nothing."""
    for wait in getattr(optimizer, _GUARDS, ()):
        wait()
    if not _live:
        return
    try:
        count_change(tensors_of(optimizer))
    except Exception:
        logger.warning(
            "what a step of %s changes can't be told, so the saves in flight are dropped",
            type(optimizer).__name__,
            exc_info=True,
        )
        with _live_lock:
            for token in _live:
                token.is_blind = True


def saw_all(capture: Snapshot) -> bool:
    """Tell whether all steps of optimizers since a capture could be counted."""
    return not getattr(capture.token, "is_blind", False)


def samples_of(capture: Snapshot) -> Samples | None:
    """Give what was seen of a capture's tensors at the call; None where that was not asked for, or is let go of."""
    return getattr(capture.token, "samples", None)


def wait_before_steps(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Call a function before each step of an optimizer. It may be given to one optimizer once.

    A hook of the optimizer's own would come after `watch_optimizers`' one, which is for all.
    """
    watch_optimizers()
    setattr(optimizer, _GUARDS, (*getattr(optimizer, _GUARDS, ()), wait))


def wait_no_more(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Undo `wait_before_steps`. Idempotent."""
    setattr(optimizer, _GUARDS, tuple(each for each in getattr(optimizer, _GUARDS, ()) if each is not wait))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give all that a step is about to change: the parameters, and their state.

    These are counted before: operators do so when they are done, and what was copied meanwhile would be taken for
    good. Fused steps never do, nor do those that take many DTensors at once.
    """
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for value in list(optimizer.state.values()):
        found += _tensors_in(value)
    return found


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


@cache
def watch_optimizers() -> None:
    """Take note of the steps of all optimizers from now on; once for the process."""
    # A compiler that traced it would let it run once, or never.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
