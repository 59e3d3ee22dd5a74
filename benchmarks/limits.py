"""Time limits of a benchmark: of each run of a contender, and of all rounds together."""

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
    """What a contender and a benchmark may take.

    Attributes:
        run_s: the seconds of one run; None for any time.
        until: when no round begins any more, by `time.monotonic`.
        running: the file that holds the name of the contender that runs; None for no file.
        without: why contenders take no part, by name.
    """

    run_s: float | None = None
    until: float = math.inf
    running: Path | None = None
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether no round may begin any more."""
        return time.monotonic() > self.until

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """End this process if a run takes too long; its name is then left in the file.

        A thread of the interpreter's own does it, which needs no GIL: a peer can hang in native code.
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
