"""The timeline of a save or a load: which thread did what, and when; as values, and in Chrome's trace format."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiockpt.errors import printable

if TYPE_CHECKING:
    from aiockpt.core.spans import Span


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """A piece of work of one thread.

    Attributes:
        name: the kind of work; see the table in the documentation's page "observing".
        thread: the name of the thread.
        pid: the number of its process; a writer process has another one than the trainer.
        start_s: when it began, in seconds since the call of `save` or `load`.
        end_s: when it ended, likewise.
        nbytes: the bytes that were copied, read or written; 0 if it is about none.
        file: the file, relative to the checkpoint; empty if it is about none.
    """

    name: str
    thread: str
    pid: int
    start_s: float
    end_s: float
    nbytes: int
    file: str

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Recording:
    """Spans of work as they were recorded, with the moment from which their times count."""

    spans: Sequence[Span] = ()
    started: float = 0.0  # by time.perf_counter()
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A result that has a timeline."""

    recording: Recording = field(default_factory=Recording, repr=False, compare=False)

    def timeline(self) -> list[TimelineEvent]:
        """Return what each thread did and when, in order of the beginnings; at most 100,000 events are recorded."""
        begin, pid = self.recording.started, self.recording.pid
        return [
            TimelineEvent(name, thread, own or pid, start - begin, end - begin, nbytes, file)
            for name, thread, start, end, nbytes, file, own in sorted(self.recording.spans, key=lambda span: span.start)
        ]

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a JSON file for Perfetto (ui.perfetto.dev) or chrome://tracing. Blocks.

        The file is in the Trace Event Format: complete events (``"ph": "X"``) with times in microseconds, and metadata
        events that name processes and threads.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace_of(self.timeline(), self.recording.pid), file)


def lanes_of(events: Sequence[TimelineEvent]) -> list[tuple[int, str]]:
    """Return the processes and threads of events; those of one pool beside each other, in order."""
    pools: dict[tuple[int, str], list[str]] = {}
    for pid, thread in dict.fromkeys((event.pid, event.thread) for event in events):
        pools.setdefault((pid, thread.rstrip("0123456789")), []).append(thread)
    return [
        (pid, thread)
        for (pid, _), threads in pools.items()
        # By length first, so that thread 10 of a pool comes after thread 9.
        for thread in sorted(threads, key=lambda name: (len(name), name))
    ]


def lane_name(lane: tuple[int, str], trainer: int) -> str:
    """Return the name of a process and thread in a picture; ``trainer`` is the number of the main process."""
    name = lane[1].removeprefix("aiockpt-")
    return name if lane[0] == trainer else f"writer: {name}"


def trace_of(events: Sequence[TimelineEvent], trainer: int) -> dict[str, Any]:
    """Return events as an object of the Trace Event Format; ``trainer`` is the number of the main process."""
    lanes = {lane: number for number, lane in enumerate(lanes_of(events))}
    names = [
        _metadata("process_name", pid, 0, name="aiockpt" if pid == trainer else "aiockpt writer process")
        for pid in dict.fromkeys(pid for pid, _ in lanes)
    ]
    names += [_metadata("thread_name", pid, tid, name=printable(thread)) for (pid, thread), tid in lanes.items()]
    names += [_metadata("thread_sort_index", pid, tid, sort_index=tid) for (pid, _), tid in lanes.items()]
    work = [
        {
            "name": event.name,
            "cat": "aiockpt",
            "ph": "X",
            "ts": event.start_s * 1e6,
            "dur": event.duration_s * 1e6,
            "pid": event.pid,
            "tid": lanes[event.pid, event.thread],
            "args": {"bytes": event.nbytes, "file": event.file},
        }
        for event in events
    ]
    return {"traceEvents": names + work, "displayTimeUnit": "ms"}


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
