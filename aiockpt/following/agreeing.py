"""Agreement of ranks that follow a run together: on the version that rank 0 has seen, and that all have opened it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.engine.facade import EngineAccess
    from aiockpt.manager.scan import StepInfo

_ROUND_S = 1.0  # between two rounds without news, by which rank 0 and the others see that all live


class Look(NamedTuple):
    """The result of a look at a run: a new version, or none; and whether the iteration ends."""

    info: StepInfo | None
    is_over: bool


class Agreement:
    """The rounds of all ranks. A process that follows for itself has none, and its own results count."""

    def __init__(self, access: EngineAccess, what: str) -> None:
        self._access = access
        self._what = what
        self._last_s = -math.inf
        self._has_begun = False

    @property
    def leads(self) -> bool:
        """Whether this process looks at the run: it is rank 0, or follows for itself."""
        return self._access.leads

    def look(self, own: Look | Exception | None) -> Call[Look] | Look:
        """Return the round in which all ranks learn what rank 0 has seen, or its own look if that is no news.

        ``own``: of rank 0; None on the others.
        """
        is_due = time.monotonic() - self._last_s >= _ROUND_S
        if isinstance(own, Look) and (self._is_alone or not (is_due or own.info is not None or own.is_over)):
            return own
        if isinstance(own, Exception) and self._is_alone:
            raise own
        self._last_s, self._has_begun = time.monotonic(), True
        return self._access.agree(self._what, own, lambda looks: looks[0])

    def opened(self, outcome: bool | Exception) -> Call[bool] | bool:
        """Return the round in which all ranks learn whether each has opened the version; an error is raised on all."""
        self._last_s = -math.inf  # the next round says that all are done with it
        if not self._is_alone:
            return self._access.agree(f"opening {self._what}", outcome, all)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def leave(self) -> None:
        """End what waits for other ranks, and have them fail when they wait for this one. Blocks for 2 s at most."""
        self._access.leave_ranks(None if self._has_begun else self._what)
        self._has_begun = True

    @property
    def _is_alone(self) -> bool:
        return self._access.world_size == 1
