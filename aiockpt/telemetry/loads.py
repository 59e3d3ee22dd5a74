"""The result of a load, and the report of what a load, a verification or a conversion does."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from aiockpt.core.spans import MOST, Span
from aiockpt.telemetry.progress import ProgressEvent, Reading, ReadPhase
from aiockpt.telemetry.timeline import Recording, Timed

if TYPE_CHECKING:
    from aiockpt.telemetry.verification import VerifyReport


@dataclass(frozen=True)
class LoadResult(Timed):
    """A finished load: its size, and how long it took.

    Attributes:
        path: the checkpoint.
        nbytes: the bytes that were read from its files, by this rank or by another one for it.
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
