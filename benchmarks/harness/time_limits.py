"""Time limits: for each run of a contender, and for all rounds of a benchmark."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """The time limits of a benchmark, and the contenders that it leaves out.

    Attributes:
        run_s: the time limit of one run; None for no limit.
        until: the time after which no round begins, as a value of `time.monotonic`.
        running: the file with the name of the running contender; None for no file.
        without: the contenders to leave out: for each name the reason.
    """

    run_s: float | None = None
    until: float = math.inf
    running: Path | None = None
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether the time is over, so that no further round may begin."""
        return time.monotonic() > self.until

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """End this process if a run exceeds its time limit; the file then keeps the contender's name.

        `faulthandler` does it in a thread that needs no GIL: a peer can hang in native code while it holds the GIL.
        """
        if self.running is not None:
            self.running.write_text(name)
        if self.run_s is not None:
            faulthandler.dump_traceback_later(self.run_s, exit=True)
        try:
            yield
        finally:
            if self.run_s is not None:
                faulthandler.cancel_dump_traceback_later()
            if self.running is not None:
                self.running.unlink(missing_ok=True)


current: ContextVar[Limits] = ContextVar("limits", default=Limits())  # noqa: B039 - it is frozen
