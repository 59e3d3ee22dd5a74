"""Optimizer hooks: they advance version counters before a step changes tensors of the saves in flight."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from aiockpt.core.forks import ModuleLock

if TYPE_CHECKING:
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.snapshot.sampling import Samples

logger = logging.getLogger("aiockpt")

_GUARDS = "_aiockpt_guards"


class Token:
    """Lives until its snapshot is released."""

    __slots__ = ("__weakref__", "is_blind", "samples")

    def __init__(self, samples: Samples | None = None) -> None:
        self.samples = samples
        self.is_blind = False  # a step since then changed unknown tensors


_live: weakref.WeakSet[Token] = weakref.WeakSet()
_live_lock = ModuleLock(threading.RLock)  # reentrant: a signal handler may save or step


def follow_steps(snapshot: Snapshot, samples: Samples | None = None) -> None:
    """Follow the steps of optimizers from now on, until the snapshot is released."""
    snapshot.token = token = Token(samples)
    with _live_lock.held():
        _live.add(token)


def count_change(tensors: Iterable[torch.Tensor]) -> None:
    """Advance the version counters of tensors that no operator of torch changes; inference tensors have none."""
    torch.autograd.graph.increment_version(tensors)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Announce a step now, or when its closure returns if nothing is changed before. Raises nothing."""
    is_keyword = "closure" in kwargs
    closure = kwargs["closure"] if is_keyword else args[1] if len(args) > 1 else None
    # Torch's optimizers first evaluate the closure, with a whole forward and backward, and change tensors after it.
    # Others, such as SAM, may change tensors before.
    if closure is None or not type(optimizer).step.__module__.startswith("torch.optim."):
        _announce_step(optimizer)
        return None

    def evaluate() -> Any:
        loss = closure()
        _announce_step(optimizer)
        return loss

    if is_keyword:
        return args, kwargs | {"closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


def _announce_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the guards of this optimizer, then count its change in advance. Raises nothing."""
    # The guards first: they compare the version counters of the saves, which are advanced below.
    for wait in getattr(optimizer, _GUARDS, ()):
        wait()
    if not _live:
        return
    try:
        count_change(tensors_of(optimizer))
    except Exception:  # of an optimizer's own state; a save must not end training
        logger.warning(
            "the tensors that a step of %s changes are unknown, so the saves in flight are dropped",
            type(optimizer).__name__,
            exc_info=True,
        )
        with _live_lock.held():
            for token in _live:
                token.is_blind = True


def saw_all(snapshot: Snapshot) -> bool:
    """Return whether the changes of all optimizer steps since a snapshot are known."""
    return not getattr(snapshot.token, "is_blind", False)


def samples_of(snapshot: Snapshot) -> Samples | None:
    """Return the samples of a snapshot; None if there are none, or it was released."""
    return getattr(snapshot.token, "samples", None)


def wait_before_steps(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Call a function before each step of an optimizer.

    Not registered as the optimizer's own hook: that would run after the global hook of `watch_optimizers`.
    """
    watch_optimizers()
    setattr(optimizer, _GUARDS, (*getattr(optimizer, _GUARDS, ()), wait))


def stop_waiting_before_steps(optimizer: torch.optim.Optimizer, wait: Callable[[], object]) -> None:
    """Undo `wait_before_steps`. Idempotent."""
    setattr(optimizer, _GUARDS, tuple(guard for guard in getattr(optimizer, _GUARDS, ()) if guard is not wait))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors that a step may change: the parameters and their state.

    They are counted before the step: an operator counts its change when it is done, and a copy made meanwhile would
    pass as unchanged. Fused steps never count, nor do those that change many DTensors at once.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for value in list(optimizer.state.values()):
        tensors += _tensors_in(value)
    return tensors


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in list(value.values()):
            yield from _tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner)


@cache
def watch_optimizers() -> None:
    """Hook the steps of all optimizers from now on; once per process."""
    # A compiler that traced the hook would run it once, or never.
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
