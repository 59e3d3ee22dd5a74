"""What the processes of the demo tell the one that started them: a line of JSON for each event."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is made, or loaded: after ``step`` steps, from the checkpoint ``resumed_from`` if any."""

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
    """The save after ``step`` steps has come to ``phase``: "started", or one of `aiockpt.saving.handle.Phase`."""

    step: int
    phase: str
    staged_bytes: int = 0
    written_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """The save after ``step`` steps held training, in ``save()`` or until ``staged``; may come several times."""

    step: int
    held_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint after ``step`` steps is durable; the times count from the call of ``save()``."""

    step: int
    nbytes: int
    staged_s: float
    written_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to save a state, with nothing else going on; the times count from the call.

    Attributes:
        method: what was called.
        returned_s: until the call came back.
        staged_s: until the tensors may change.
        written_s: until the state is durable.
    """

    method: str
    returned_s: float
    staged_s: float
    written_s: float


Event = Ready | Stepped | Saving | Held | Saved | Measured
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (Ready, Stepped, Saving, Held, Saved, Measured)}


def encode(event: Event) -> str:
    """Write an event as one line."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"


def decode(line: str | bytes) -> Event | None:
    """Read an event from its line; None when something else was printed there."""
    try:
        facts = json.loads(line)
        return _KINDS[facts.pop("event")](**facts)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


class EventPipe:
    """Sends events to the process that started this one, over what was standard output.

    Whatever else is printed goes to standard error from now on.
    """

    def __init__(self) -> None:
        self._stream: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, event: Event) -> None:
        """Send an event at once."""
        self._stream.write(encode(event))
        self._stream.flush()
