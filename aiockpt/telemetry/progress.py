"""The progress of saves, loads, verifications and conversions, and the report of what those that read do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from aiockpt.core.spans import MOST, Span
from aiockpt.errors import SaveCancelledError, SaveSkippedError
from aiockpt.telemetry.saves import LoadResult
from aiockpt.telemetry.timeline import Recording

if TYPE_CHECKING:
    from aiockpt.telemetry.verification import VerifyReport

Reading = Literal["load", "verify", "convert"]
SavePhase = Literal["planned", "staging", "staged", "writing", "written", "committed"]
Outcome = Literal["written", "skipped", "failed", "cancelled"]
ReadPhase = Literal["reading", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """The progress of a save, a load, a verification or a conversion.

    Attributes:
        what: "save", "load", "verify" or "convert".
        path: the checkpoint.
        phase: of a save, what has just happened, or what is going on. Of the others, "reading"; the last event has
            "done", "failed" or "cancelled".
        done_bytes: the bytes that are written so far, or read by a load or a verification.
        total_bytes: all bytes to write or read, as far as that is known: of a load it is 0 until the metadata is read.
        elapsed_s: seconds since the call.
        staged_bytes: of a save, the bytes of the files that are copied into staging memory so far.
        result: in the last event of a load or a verification, if it succeeded: the `LoadResult` or `VerifyReport`.
    """

    what: Literal["save", Reading]
    path: str
    phase: SavePhase | ReadPhase
    done_bytes: int
    total_bytes: int
    elapsed_s: float
    staged_bytes: int = 0
    result: LoadResult | VerifyReport | None = None


def outcome_of(error: BaseException | None) -> Outcome:
    """Return the outcome of a save that ended with this error."""
    if error is None:
        return "written"
    if isinstance(error, SaveSkippedError):
        return "skipped"
    return "cancelled" if isinstance(error, SaveCancelledError) else "failed"


OnProgress = Callable[[ProgressEvent], object]
"""A function that receives events in a thread of its own; it may miss some, but never the last one."""


class ReadReport:
    """Counts and records the work of a load, a verification or a conversion; a context manager that reports its end."""

    def __init__(self, what: Reading = "load", path: str = "") -> None:
        self.what = what
        self.path = path
        self.started = time.perf_counter()
        self.spans: list[Span] = []
        self.done_bytes = self.total_bytes = self.tensors = self.objects = 0
        self.result: LoadResult | VerifyReport | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started

    @property
    def recording(self) -> Recording:
        """The operations recorded so far."""
        return Recording(tuple(self.spans), self.started)

    def event(self, phase: ReadPhase) -> ProgressEvent:
        """Return the figures so far."""
        result = self.result if phase == "done" else None
        figures = (self.done_bytes, self.total_bytes, self.elapsed_s)
        return ProgressEvent(self.what, self.path, phase, *figures, result=result)

    def expect(self, nbytes: int) -> None:
        """Count bytes to read, or to write."""
        self.total_bytes += nbytes
        self._note_change()

    def add(self, nbytes: int) -> None:
        """Count bytes that are read, or written."""
        self.done_bytes += nbytes
        self._note_change()

    def _note_change(self) -> None:
        """Note that the figures have changed."""

    def did_read(self, begin: float, nbytes: int, file: str, name: str = "read") -> None:
        """Count and record bytes that this thread has read since ``begin``. No lock: for one thread at a time."""
        if len(self.spans) < MOST:
            end, thread = time.perf_counter(), threading.current_thread().name
            self.spans.append(Span(name, thread, begin, end, nbytes, file))
        self.add(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Report that it has ended."""
        if error is None and self.what == "load":
            opened = [span.end - self.started for span in self.spans if span.name == "open"]
            self.result = LoadResult(
                path=self.path,
                nbytes=self.done_bytes,
                tensors=self.tensors,
                objects=self.objects,
                opened_s=opened[0] if opened else 0.0,
                loaded_s=self.elapsed_s,
                recording=self.recording,
            )
