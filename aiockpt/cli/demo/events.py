"""Events that the demo's processes send to their parent, one line of JSON each; and a record of a whole run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Ready:
    """Training starts after ``step`` steps, from the checkpoint ``resumed_from`` if there is one."""

    step: int
    parameters: int
    resumed_from: str | None


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step is done."""

    step: int
    loss: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Saving:
    """The save after ``step`` steps is in ``phase``: "started", or one of `aiockpt.saving.handle.Phase`."""

    step: int
    phase: str
    staged_bytes: int = 0
    written_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """The save after ``step`` steps blocked training, in ``save()`` or until ``staged``; sent once for each of them."""

    step: int
    held_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint after ``step`` steps is durable; the times count from the call of ``save()``."""

    step: int
    nbytes: int
    staged_s: float
    written_s: float


Event = Ready | Stepped | Saving | Held | Saved
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (Ready, Stepped, Saving, Held, Saved)}


def encode(event: Event) -> str:
    """Return an event as one line."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def decode(line: str | bytes) -> Event | None:
    """Return the event of a line, or None if the line is other output."""
    try:
        facts = json.loads(line)
        return _KINDS[facts.pop("event")](**facts)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


class EventPipe:
    """Sends events to the parent process over the original standard output.

    Creating it redirects everything else that this process prints to standard error.
    """

    def __init__(self) -> None:
        self._stream: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, event: Event) -> None:
        """Send an event without buffering."""
        self._stream.write(encode(event))
        self._stream.flush()


# --- what a run did ------------------------------------------------------------------------------------


@dataclass(slots=True)
class History:
    """The run of one process, or of several in a row. The keys of each dict are steps."""

    losses: list[tuple[int, float]] = field(default_factory=list)  # in order; a repeated step is in it twice
    step_s: dict[int, float] = field(default_factory=dict)
    saves: dict[int, Saving] = field(default_factory=dict)  # the last event of each save
    saved: dict[int, Saved] = field(default_factory=dict)
    held_s: dict[int, float] = field(default_factory=dict)  # how long each save blocked training, in all

    def add(self, event: Event) -> None:
        """Record an event."""
        match event:
            case Stepped():
                self.losses.append((event.step, event.loss))
                self.step_s[event.step] = event.elapsed_s
            case Saving():
                self.saves[event.step] = event
            case Saved():
                self.saved[event.step] = event
            case Held():
                self.held_s[event.step] = self.held_s.get(event.step, 0.0) + event.held_s
            case _:
                pass

    def waiting_s(self) -> float:
        """Return how long the steps waited for saves. The last save is left out: no step comes after it."""
        return sum(held for step, held in self.held_s.items() if step < max(self.step_s))
