"""The policies of a run: which steps it keeps, and which are due to be saved. Pure, and without torch.

::

    KeepLatest(3) | KeepEvery(1000) | KeepBest(2, "loss")
    KeepWithin(24 * 3600) & KeepEvery(100)
    EverySteps(100) | EverySeconds(600)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from aiockpt.manager.scan import StepInfo, is_number, is_usable

Mode = Literal["min", "max"]

Selection = dict[int, list[str]]
"""The steps that are kept, each with the policies that keep it, as text."""


class KeepPolicy(ABC):
    """Chooses the steps of a run that are kept. Combine policies with ``|`` and ``&``."""

    @abstractmethod
    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        """Return the steps to keep.

        Args:
            infos: the complete steps, in the order of their numbers.
            now: the time in seconds, as in `time.time`.

        Returns:
            Each step to keep, with the reasons: the policies that keep it, as text.
        """

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        """Return a policy that keeps what either keeps."""
        return KeepAny((self, other)) if isinstance(other, KeepPolicy) else NotImplemented

    def __and__(self, other: KeepPolicy) -> KeepPolicy:
        """Return a policy that keeps what both keep."""
        return KeepAll((self, other)) if isinstance(other, KeepPolicy) else NotImplemented

    def _because(self, steps: Iterable[int]) -> Selection:
        reason = repr(self)
        return {step: [reason] for step in steps}


@dataclass(frozen=True, slots=True)
class KeepLatest(KeepPolicy):
    """Keep the ``n`` steps with the highest numbers.

    Attributes:
        n: how many, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_count(self, "n", self.n)

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        return self._because(info.step for info in infos[-self.n :])

    def __repr__(self) -> str:
        return f"KeepLatest({self.n})"


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keep each step whose number is a multiple of ``steps``.

    Attributes:
        steps: the distance, at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_count(self, "steps", self.steps)

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        return self._because(info.step for info in infos if info.step % self.steps == 0)

    def __repr__(self) -> str:
        return f"KeepEvery({self.steps})"


@dataclass(frozen=True, slots=True)
class KeepWithin(KeepPolicy):
    """Keep each step that was saved within the last ``seconds``.

    Attributes:
        seconds: the age, more than 0. The time of a step is that of rank 0's clock when it was saved.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds(self, self.seconds)

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        return self._because(info.step for info in infos if now - info.time <= self.seconds)

    def __repr__(self) -> str:
        return f"KeepWithin({self.seconds:g})"


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the ``n`` steps with the best value of a metric. Of equal values, that of the later step is the better.

    Steps without the metric, and those where it is NaN, are not among the best.

    Attributes:
        n: how many, at least 1.
        metric: the name of the metric, as given to ``save(metrics=...)``.
        mode: whether the smallest ("min") or the largest ("max") value is the best.
    """

    n: int
    metric: str
    mode: Mode = "min"

    def __post_init__(self) -> None:
        check_count(self, "n", self.n)
        check_metric(self.metric, self.mode)

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        return self._because(info.step for info in ranked(infos, self.metric, self.mode)[: self.n])

    def __repr__(self) -> str:
        return f"KeepBest({self.n}, {self.metric!r}{', ' + repr(self.mode) if self.mode != 'min' else ''})"


@dataclass(frozen=True, slots=True)
class KeepIf(KeepPolicy):
    """Keep each step for which a function returns true.

    Attributes:
        predicate: a function of a `StepInfo`. If it raises, nothing is deleted, and the error is logged.
    """

    predicate: Callable[[StepInfo], object]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise TypeError(f"KeepIf takes a function of a StepInfo, not {self.predicate!r}")

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        return self._because(info.step for info in infos if self.predicate(info))

    def __repr__(self) -> str:
        return f"KeepIf({getattr(self.predicate, '__qualname__', repr(self.predicate))})"


@dataclass(frozen=True, slots=True)
class KeepAny(KeepPolicy):
    """Keep what any of several policies keeps; the same as ``|``.

    Attributes:
        policies: the policies.
    """

    policies: tuple[KeepPolicy, ...]

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        kept: Selection = {}
        for policy in self.policies:
            for step, reasons in policy.select(infos, now).items():
                kept.setdefault(step, []).extend(reasons)
        return kept

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies)) or "KeepAny(())"


@dataclass(frozen=True, slots=True)
class KeepAll(KeepPolicy):
    """Keep what all of several policies keep; the same as ``&``.

    Attributes:
        policies: the policies.
    """

    policies: tuple[KeepPolicy, ...]

    def select(self, infos: Sequence[StepInfo], now: float) -> Selection:
        chosen = [policy.select(infos, now) for policy in self.policies]
        common = set.intersection(*(set(each) for each in chosen)) if chosen else set()
        return {step: [" & ".join(" | ".join(each[step]) for each in chosen)] for step in common}

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, KeepAny) else repr(p) for p in self.policies) or "KeepAll(())"


def as_policy(keep: KeepPolicy | Iterable[KeepPolicy] | None) -> KeepPolicy | None:
    """Return one policy for a policy, a list of them (``|``), or None, which keeps everything."""
    if keep is None or isinstance(keep, KeepPolicy):
        return keep
    policies: tuple[KeepPolicy, ...] = tuple(keep) if isinstance(keep, Iterable) else (keep,)
    for policy in policies:
        if not isinstance(policy, KeepPolicy):
            raise TypeError(f"keep must be policies such as KeepLatest(3), or None for everything, not {policy!r}")
    if not policies:
        raise ValueError("keep is empty, which would keep the newest step alone: pass None to keep everything")
    return policies[0] if len(policies) == 1 else KeepAny(policies)


def select(keep: KeepPolicy | None, infos: Iterable[StepInfo], now: float) -> Selection:
    """Return the complete steps that a policy keeps, each with its reasons; None keeps all. Without the safeguards.

    Steps that are not complete are neither kept nor counted.
    """
    complete = _complete(infos)
    if keep is None:
        return {info.step: ["everything is kept"] for info in complete}
    return keep.select(complete, now)


def to_delete(
    keep: KeepPolicy | None, infos: Iterable[StepInfo], now: float, protected: Collection[int] = ()
) -> list[StepInfo]:
    """Return the steps to delete, oldest first: complete ones that no policy keeps, and that are not protected.

    The newest complete step always stays. Steps that are not complete are none of retention's business.
    """
    complete = _complete(infos)
    kept = select(keep, complete, now)
    return [info for info in complete[:-1] if info.step not in kept and info.step not in protected]


def ranked(infos: Iterable[StepInfo], metric: str, mode: Mode = "min") -> list[StepInfo]:
    """Return the complete steps that have a value of a metric, the best first; NaN is no value."""
    sign = 1.0 if mode == "min" else -1.0
    valued = [info for info in _complete(infos) if is_usable(info.metrics.get(metric))]
    return sorted(valued, key=lambda info: (sign * info.metrics[metric], -info.step))


def metric_of(keep: KeepPolicy | None, metric: str | None = None) -> tuple[str, Mode] | None:
    """Return metric and mode of the first `KeepBest` in a policy, of this metric if named; None if there is none."""
    if isinstance(keep, KeepBest):
        return (keep.metric, keep.mode) if metric in (None, keep.metric) else None
    parts = keep.policies if isinstance(keep, KeepAny | KeepAll) else ()
    return next((found for part in parts if (found := metric_of(part, metric)) is not None), None)


def check_metric(metric: object, mode: object) -> None:
    """Raise TypeError or ValueError if these are not the name of a metric and a mode."""
    if not isinstance(metric, str):
        raise TypeError(f"metric must be the name of a metric, not {metric!r}")
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")


def _complete(infos: Iterable[StepInfo]) -> list[StepInfo]:
    return sorted((info for info in infos if info.state == "complete"), key=lambda info: info.step)


def check_count(policy: object, name: str, value: object) -> None:
    """Raise TypeError or ValueError if a field of a policy is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} of {type(policy).__name__} must be an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} of {type(policy).__name__} must be at least 1, not {value!r}")


def check_seconds(policy: object, value: object) -> None:
    """Raise TypeError or ValueError if the seconds of a policy are not a positive number."""
    if not is_number(value):
        raise TypeError(f"seconds of {type(policy).__name__} must be a number, not {value!r}")
    if not value > 0:
        raise ValueError(f"seconds of {type(policy).__name__} must be more than 0, not {value!r}")


# --- when a run saves --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts that decide whether a save is due.

    Attributes:
        step: the step that is asked about.
        previous: the step that was asked about before, or that was restored; None for the first of a new run.
        elapsed_s: the seconds since the last save of this run began, or since the run was opened.
        is_idle: whether no save is in flight.
    """

    step: int
    previous: int | None
    elapsed_s: float
    is_idle: bool


class SavePolicy(ABC):
    """Decides whether a save is due. Combine policies with ``|``.

    Attributes:
        by_step: whether the answer follows from the steps alone. It then is the same on every rank without a message.
    """

    by_step: bool = False

    @abstractmethod
    def is_due(self, facts: StepFacts) -> bool:
        """Return whether a save is due."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """Return a policy by which a save is due when it is by either."""
        return SaveAny((self, other)) if isinstance(other, SavePolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """A save is due at each multiple of ``n`` but 0, or at the first step that is asked about after it.

    Attributes:
        n: the distance in steps, at least 1.
    """

    n: int

    by_step = True

    def __post_init__(self) -> None:
        check_count(self, "n", self.n)

    def is_due(self, facts: StepFacts) -> bool:
        if facts.previous is None or facts.step <= facts.previous:
            return facts.step > 0 and facts.step % self.n == 0
        return facts.step // self.n > facts.previous // self.n


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """A save is due when the last one began so many seconds ago. With many ranks, the clock of rank 0 counts.

    Attributes:
        seconds: the distance in seconds, more than 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds(self, self.seconds)

    def is_due(self, facts: StepFacts) -> bool:
        return facts.elapsed_s >= self.seconds


@dataclass(frozen=True, slots=True)
class WhenIdle(SavePolicy):
    """A save is due whenever the one before it is written: as often as the disk allows."""

    def is_due(self, facts: StepFacts) -> bool:
        return facts.is_idle


@dataclass(frozen=True, slots=True)
class SaveAny(SavePolicy):
    """A save is due when it is by any of several policies; the same as ``|``.

    Attributes:
        policies: the policies.
    """

    policies: tuple[SavePolicy, ...]

    @property
    def by_step(self) -> bool:  # type: ignore[override]
        return all(policy.by_step for policy in self.policies)

    def is_due(self, facts: StepFacts) -> bool:
        return any(policy.is_due(facts) for policy in self.policies)


def split(policy: SavePolicy | None) -> tuple[SavePolicy, SavePolicy]:
    """Return the part of a policy that goes by the step alone, and the rest."""
    parts = () if policy is None else _parts(policy)
    return SaveAny(tuple(p for p in parts if p.by_step)), SaveAny(tuple(p for p in parts if not p.by_step))


def _parts(policy: SavePolicy) -> Sequence[SavePolicy]:
    return [part for any_ in policy.policies for part in _parts(any_)] if isinstance(policy, SaveAny) else (policy,)
