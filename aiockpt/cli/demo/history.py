"""What a run of the training loop did, gathered from its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from aiockpt.cli.demo.events import Event, Held, Ready, Saved, Saving, Stepped


@dataclass(slots=True)
class History:
    """What one process, or several in a row, did.

    Attributes:
        parameters: the size of the model.
        resumed_from: the checkpoint that the last process began with.
        losses: steps and losses, as they came; steps that were done again come again.
        step_s: how long each step took.
        saves: for every step with a save, how far that came.
        saved: for every step with a durable checkpoint, how long it took.
        held_s: for every step with a save, how long it held training.
    """

    parameters: int = 0
    resumed_from: str | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    step_s: dict[int, float] = field(default_factory=dict)
    saves: dict[int, Saving] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    held_s: dict[int, float] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case Ready():
                self.parameters, self.resumed_from = event.parameters, event.resumed_from
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

    def typical_step_s(self, *, saving: bool) -> float | None:
        """Give the median time of the steps during which a save went on, or of the others."""
        times = [took for step, took in self.step_s.items() if step > 1 and (step - 1 in self.saves) is saving]
        return median(times) if times else None
