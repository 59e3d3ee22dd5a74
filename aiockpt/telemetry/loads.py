"""The progress of a load or a verification, and the result of a load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from aiockpt.core.spans import MOST, Span
from aiockpt.telemetry.timeline import Recording, Timed

if TYPE_CHECKING:
    from aiockpt.engine.reports import Follower
    from aiockpt.telemetry.verification import VerifyReport

ReadPhase = Literal["reading", "done", "failed", "cancelled"]


@dataclass(frozen=True)
class LoadResult(Timed):
    """A finished load: its size, and how long it took.

    Attributes:
        path: the checkpoint.
        nbytes: the bytes that were read from its files.
        tensors: how many tensors were read; each stored piece of one counts.
        objects: how many objects were read.
        opened_s: how long it took until its metadata was read, in seconds.
        loaded_s: from the call until everything was loaded, and every ``load_state_dict`` had returned.

    `timeline` returns what each thread did, `chrome_trace` writes it to a file, and a notebook shows it.
    """

    path: str
    nbytes: int
    tensors: int
    objects: int
    opened_s: float
    loaded_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes read per second."""
        return self.nbytes / self.loaded_s if self.loaded_s else 0.0

    def _repr_html_(self) -> str:
        from aiockpt.telemetry.card import card, size_text, time_text

        facts = {
            "tensors": f"{self.tensors}, and {self.objects} objects",
            "read": size_text(self.nbytes),
            "opened after": time_text(self.opened_s),
            "loaded after": f"{time_text(self.loaded_s)} ({size_text(self.bytes_per_s)}/s)",
        }
        return card("loaded", self.path, facts, self.timeline())


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The progress of a load or a verification.

    Attributes:
        what: "load" or "verify".
        path: the checkpoint.
        phase: "reading"; the last event has "done", "failed" or "cancelled".
        read_bytes: the bytes that are read so far.
        total_bytes: the bytes to read, as far as that is known: it is 0 until the metadata is read.
        elapsed_s: seconds since the call.
        result: in the last event, if it succeeded: the `LoadResult` or `VerifyReport`.
    """

    what: Literal["load", "verify"]
    path: str
    phase: ReadPhase
    read_bytes: int
    total_bytes: int
    elapsed_s: float
    result: LoadResult | VerifyReport | None = None


OnReadProgress = Callable[[ReadProgress], object]
"""A function that receives events in a thread of its own; it may miss some, but never the last one."""


class ReadReport:
    """Counts and records the work of a load or a verification, and reports its end; a context manager around it."""

    def __init__(
        self, what: Literal["load", "verify"] = "load", path: str = "", follower: Follower | None = None
    ) -> None:
        self.what = what
        self.path = path
        self._follower = follower  # is told of each count, and of the end
        self.started = time.perf_counter()
        self.spans: list[Span] = []
        self.read_bytes = self.total_bytes = self.tensors = self.objects = 0
        self.result: LoadResult | VerifyReport | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started

    @property
    def recording(self) -> Recording:
        """The operations recorded so far."""
        return Recording(tuple(self.spans), self.started)

    def event(self, phase: ReadPhase) -> ReadProgress:
        """Return the figures so far."""
        result = self.result if phase == "done" else None
        return ReadProgress(self.what, self.path, phase, self.read_bytes, self.total_bytes, self.elapsed_s, result)

    def expect(self, nbytes: int) -> None:
        """Count bytes to read."""
        self.total_bytes += nbytes
        self._note_change()

    def add(self, nbytes: int) -> None:
        """Count bytes that are read."""
        self.read_bytes += nbytes
        self._note_change()

    def _note_change(self) -> None:
        if self._follower is not None:
            self._follower.note_change(self)

    def did_read(self, begin: float, nbytes: int, file: str) -> None:
        """Count and record bytes that this thread has read since ``begin``. No lock: for one thread at a time."""
        if len(self.spans) < MOST:
            end, thread = time.perf_counter(), threading.current_thread().name
            self.spans.append(Span("read", thread, begin, end, nbytes, file))
        self.add(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Report that it has ended."""
        if error is None and self.result is None:
            opened = [span.end - self.started for span in self.spans if span.name == "open"]
            self.result = LoadResult(
                path=self.path,
                nbytes=self.read_bytes,
                tensors=self.tensors,
                objects=self.objects,
                opened_s=opened[0] if opened else 0.0,
                loaded_s=self.elapsed_s,
                recording=self.recording,
            )
        if self._follower is not None:
            self._follower.end(self, error)
