"""When a run saves: by its policies, at its last step, and as a signal or a call on any rank asks for a last save."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.core.dataclasses import dataclass
from aiockpt.errors import CoordinationError
from aiockpt.manager.policies import SavePolicy, StepFacts, split
from aiockpt.manager.scan import is_number

if TYPE_CHECKING:
    from types import FrameType

    from aiockpt.manager.run import RunDirectory

logger = logging.getLogger("aiockpt")

Handler = Callable[[int, "FrameType | None"], Any] | int | None

_MOST_COST = 0.01  # of the time between two exchanges with the other ranks, at most this part is spent on one
_MOST_CALLS = 16  # between two exchanges, so that a request is not noticed much later if the steps become longer


# --- requests, on one rank ----------------------------------------------------------------------------


class LastSaveRequests:
    """Requests for a last save, by signals and calls. Signal handlers only record the deadline."""

    def __init__(self) -> None:
        self._deadline: float | None = None  # by the monotonic clock; None: no save was requested
        self._previous: dict[int, Handler] = {}
        self._grace_s: dict[int, float] = {}
        self._seen: set[int] = set()
        self._closed = False
        self._pid = os.getpid()

    def request(self, grace_s: float | None = None) -> None:
        """Request a last save, which is to be written within so many seconds from now; None: no limit."""
        if grace_s is not None and (not is_number(grace_s) or math.isnan(grace_s)):
            raise TypeError(f"grace_s must be a number of seconds, or None, not {grace_s!r}")
        # Without a lock: a signal handler may run in the middle of this very method, and would wait for it forever.
        deadline = math.inf if grace_s is None else time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline; infinity without one; None if no save was requested."""
        deadline = self._deadline
        return None if deadline is None else deadline - time.monotonic()

    def listen(self, signals: Sequence[int], grace_s: float | None) -> None:
        """Install handlers for signals; see `CheckpointManager.on_signal`."""
        if not signals:
            raise TypeError("on_signal() needs at least one signal, such as signal.SIGTERM")
        if grace_s is not None and not (is_number(grace_s) and grace_s > 0):
            raise ValueError(f"grace_s must be a positive number of seconds, or None, not {grace_s!r}")
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_signal() must be called in the main thread, where Python handles signals")
        for number in map(int, signals):
            self._grace_s[number] = math.inf if grace_s is None else grace_s
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        """Restore the handlers that were there before, unless others have replaced them meanwhile. Idempotent.

        In another thread than the main one it can't: the handlers then pass signals on to those before.
        """
        self._closed = True
        for number, previous in list(self._previous.items()):
            # Not `is`: each access to `self._handle` makes another bound method.
            if signal.getsignal(number) == self._handle:
                try:
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)
                except ValueError:  # not the main thread
                    continue
            del self._previous[number]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        again = number in self._seen
        self._seen.add(number)
        if self._closed or os.getpid() != self._pid:  # a forked child ends as it would without `listen`
            _pass_on(previous, number, frame)
            return
        grace_s = self._grace_s.get(number, math.inf)
        self.request(None if grace_s == math.inf else grace_s)
        if number != signal.SIGINT:
            if callable(previous):
                previous(number, frame)
        elif again:  # the handlers of Ctrl-C end the program, so only the second one gets there
            _pass_on(previous, number, frame)


def _pass_on(handler: Handler, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # so that the exit status names the signal


# --- decisions, for all ranks --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The contribution of one rank to an exchange."""

    step: int
    remaining_s: float | None  # of a last save; None if this rank has no request for one
    is_last: bool = False  # the run ends with this step


@dataclass(frozen=True, slots=True)
class Answer:
    """The decision that all ranks follow."""

    is_due: bool  # a save is due at this step
    is_stopping: bool = False  # the run stops after this step
    is_late: bool = False  # the last save would not be written in time, and is not begun
    calls: int = 1  # the exchanges are so many calls apart from now on


def decide(asked: Sequence[Asked], *, is_due: bool, expected_s: float, calls: int = 1) -> Answer:
    """Decide for all ranks, from the requests of each, and from rank 0's policy and measurements."""
    steps = {each.step for each in asked}
    if len(steps) > 1:
        raise CoordinationError(
            f"the ranks ask whether a save is due at different steps ({', '.join(map(str, sorted(steps)))}): call "
            "due() on every rank for each step"
        )
    if len({each.is_last for each in asked}) > 1:
        raise CoordinationError(
            f"step {asked[0].step} is the last one for some ranks only: pass the same last= to due() on every rank"
        )
    deadlines = [each.remaining_s for each in asked if each.remaining_s is not None]
    if not deadlines:
        return Answer(is_due, calls=calls)
    is_late = expected_s > min(deadlines)
    return Answer(is_due=not is_late, is_stopping=True, is_late=is_late)


class Pace:
    """Chooses how many calls of `due` go by between two exchanges, so that these cost little. For rank 0.

    An exchange costs a message to each rank. It is made at each call, unless the steps are so short that it would take
    more than a hundredth of the time; then it is made every few steps.
    """

    def __init__(self) -> None:
        self._cost_s = math.inf
        self._last: float | None = None
        self._calls = 1

    def begin(self, now: float) -> int:
        """Return how many calls there are from this exchange, which begins now, to the next."""
        if self._last is not None and self._cost_s < math.inf:
            step_s = max((now - self._last) / self._calls, 1e-9)
            self._calls = min(max(1, math.ceil(self._cost_s / _MOST_COST / step_s)), _MOST_CALLS)
        self._last = now
        return self._calls

    def end(self, seconds: float) -> None:
        """Record the duration of an exchange. The shortest counts: in longer ones, rank 0 waited for slow ranks."""
        self._cost_s = min(self._cost_s, seconds)


class Due:
    """Whether a save is due, as the ranks agree."""

    def __init__(self, policy: SavePolicy | None) -> None:
        if policy is not None and not isinstance(policy, SavePolicy):
            raise TypeError(f"save must be a policy such as EverySteps(100), not {policy!r}")
        self._by_step, self._by_facts = split(policy)
        self.requests = LastSaveRequests()  # those for a last save, on this rank
        self.is_stopping = False  # whether the ranks have agreed that the last step is reached
        self._previous: int | None = None  # the step that was asked about, or restored
        self._restored: int | None = None
        self._final: int | None = None  # the last step, as the caller has said
        self._calls_left = 1  # until the next exchange with the other ranks
        self._pace = Pace()

    def is_last(self, step: int) -> bool:
        """Return whether the save of this step is the last one of the run."""
        return self.is_stopping or step == self._final

    def go_on_from(self, step: int) -> None:
        """Note that a step was restored, from which the run goes on."""
        self._previous = self._restored = step
        self._final = None

    def at(
        self, step: int, *, is_last: bool, elapsed_s: float, is_idle: bool, expected_s: float, run: RunDirectory
    ) -> bool:
        """Return whether to save at a step; see `StepFacts`. Blocks for the other ranks.

        ``expected_s``: until a save that begins now would survive what is announced.
        """
        if self.is_stopping or (is_last and step == self._restored):
            return False
        if is_last:
            self._final = step
        facts = StepFacts(step, self._previous, elapsed_s, is_idle)
        self._previous = step
        by_step = is_last or self._by_step.is_due(facts)
        self._calls_left -= 1
        if self._calls_left > 0:  # the ranks exchange messages at a later call
            return by_step
        answer = self._exchange(facts, is_last, expected_s, run)
        if answer.is_late and run.leads:
            logger.warning(
                "the last save of %s, at step %d, is not begun: it would take about %.1f s, longer than the notice",
                *(run.directory, step, expected_s),
            )
        self._calls_left = answer.calls
        self.is_stopping |= answer.is_stopping
        return answer.is_due or (by_step and not answer.is_stopping)

    def _exchange(self, facts: StepFacts, is_last: bool, expected_s: float, run: RunDirectory) -> Answer:
        mine = Asked(facts.step, self.requests.remaining_s(), is_last)
        is_alone = run.access.world_size == 1
        began = time.monotonic()
        calls = 1 if is_alone or not run.leads else self._pace.begin(began)
        answer = partial(decide, is_due=self._by_facts.is_due(facts), expected_s=expected_s, calls=calls)
        if is_alone:
            return answer([mine])
        agreed = run.agree_now(f"the next save of {run.directory}", mine, answer)
        if run.leads:
            self._pace.end(time.monotonic() - began)
        return agreed
