"""Spans of work: which thread did what, and when.

A list of tuples is in a context variable while a save or a load runs. `span` adds a tuple to it; the worker threads
record when they begin and end the work that was submitted within it. Nothing is locked: `list.append` is atomic.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import NamedTuple

MOST = 100_000
"""Spans that one recording keeps at most: enough for half a TiB in chunks of 16 MiB."""


class Span(NamedTuple):
    """A piece of work. Times are of `time.perf_counter`, which all processes of a host share."""

    name: str
    thread: str
    start: float
    end: float
    nbytes: int = 0
    file: str = ""
    pid: int = 0  # 0: this process


_recording: ContextVar[list[Span] | None] = ContextVar("aiockpt-recording", default=None)
current: ContextVar[span | None] = ContextVar("aiockpt-span", default=None)
"""The span that work which is submitted now belongs to."""


def record_to(spans: list[Span]) -> None:
    """Record the spans of this task, and of those that it starts, in a list."""
    _recording.set(spans)


class span:  # used as a function
    """A context manager that records the work within it: by a worker thread, or else by this one."""

    __slots__ = ("_end", "_file", "_name", "_nbytes", "_spans", "_start", "_thread", "_token")

    def __init__(self, name: str, nbytes: int = 0, file: str = "") -> None:
        self._name = name
        self._nbytes = nbytes
        self._file = file
        self._thread = ""

    def __enter__(self) -> None:
        self._spans = _recording.get()
        if self._spans is not None:
            self._token = current.set(self)
            self._start = self._end = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._spans is None:
            return
        current.reset(self._token)
        if not self._thread:
            self._thread, self._end = threading.current_thread().name, time.perf_counter()
        if len(self._spans) < MOST:
            self._spans.append(Span(self._name, self._thread, self._start, self._end, self._nbytes, self._file))

    def begin_in_thread(self) -> None:
        """Record that a worker thread begins with it."""
        if not self._thread:
            self._thread, self._start = threading.current_thread().name, time.perf_counter()

    def end_in_thread(self) -> None:
        """Record that a worker thread has done it, or a part of it."""
        self._end = time.perf_counter()
