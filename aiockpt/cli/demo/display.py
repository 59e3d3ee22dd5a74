"""Output of the demo: progress bars on a terminal, lines elsewhere, and the final tables."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from aiockpt.cli.demo.events import Event, History, Ready, Saved, Saving, Stepped

MIB = 1 << 20
GIB = 1 << 30


class Display(ABC):
    """Shows the events of the demo's processes on a console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def title(self, text: str) -> None:
        """Print the title of a section."""
        self.console.print()
        self.console.print(Text(text, style="bold"))

    def say(self, text: str, style: str = "") -> None:
        """Print a sentence within a section."""
        line = Text(text, style=style)
        width = self.console.width if self.console.is_terminal else sys.maxsize
        for part in line.wrap(self.console, width - 2):
            self.console.print(Text("  ") + part, soft_wrap=True)

    @contextlib.contextmanager
    def run(self, steps: int) -> Iterator[None]:
        """Show the events that arrive within the context, of a run of ``steps`` steps."""
        yield

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show an event."""


class LineDisplay(Display):
    """For logs and pipes: one line at the start, two for each checkpoint."""

    _loss = float("nan")

    def show(self, event: Event) -> None:
        """Print a start, a save or its result; ignore other events."""
        match event:
            case Ready():
                self.say(describe_start(event))
            case Stepped():
                self._loss = event.loss
            case Saving(phase="started"):
                self.say(f"step {event.step}: loss {self._loss:.3f}, saving {checkpoint_name(event.step)}")
            case Saved():
                self.say(f"{checkpoint_name(event.step)}: {describe_save(event)}")
            case _:
                pass


class LiveDisplay(Display):
    """For terminals: a bar of steps, and a bar of the bytes of the newest checkpoint."""

    _progress: Progress
    _training: TaskID
    _saving: TaskID

    @contextlib.contextmanager
    def run(self, steps: int) -> Iterator[None]:
        """Draw two bars within the context; their last state stays on the screen."""
        self._progress = Progress(
            TextColumn("  {task.description:<13}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            refresh_per_second=12,
        )
        self._training = self._progress.add_task("training", total=steps, note="a new process imports torch")
        self._saving = self._progress.add_task("checkpoint", total=None, start=False, visible=False, note="")
        with self._progress:
            yield

    def show(self, event: Event) -> None:
        """Move the bars."""
        match event:
            case Ready():
                self._progress.update(self._training, completed=event.step, note=describe_start(event))
            case Stepped():
                self._progress.update(
                    self._training, completed=event.step, note=f"step {event.step}, loss {event.loss:.3f}"
                )
            case Saving() if event.total_bytes:
                self._progress.start_task(self._saving)
                self._progress.update(
                    self._saving,
                    description=checkpoint_name(event.step),
                    visible=True,
                    total=event.total_bytes,
                    completed=event.written_bytes,
                    note=f"{event.phase}: {describe_progress(event)}",
                )
            case Saved():
                self._progress.update(self._saving, note=describe_save(event))
            case _:
                pass


def open_display() -> Display:
    """Create the display that suits standard output."""
    console = Console(highlight=False)
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def describe_start(event: Ready) -> str:
    """Describe the model, and the checkpoint that the process started from."""
    model = f"GPT of {event.parameters / 1e6:.1f} million parameters"
    return f"{model}, resumed from {event.resumed_from}" if event.resumed_from else f"{model}, from step 0"


def describe_progress(event: Saving) -> str:
    """Describe how many bytes of a save are copied and written."""
    return (
        f"{event.staged_bytes / MIB:.0f} of {event.total_bytes / MIB:.0f} MiB copied, "
        f"{event.written_bytes / MIB:.0f} written"
    )


def describe_save(event: Saved) -> str:
    """Describe how long a save took."""
    return f"staged after {event.staged_s * 1e3:.0f} ms, durable after {event.written_s * 1e3:.0f} ms"


# --- tables ------------------------------------------------------------------------------------------


def saves_table(history: History) -> Table:
    """Return a table of the saves of a run."""
    table = _table("Saves while training", "checkpoint", "training held", "staged", "durable", "size", "speed")
    for step, saved in sorted(history.saved.items()):
        table.add_row(
            checkpoint_name(step),
            _ms(history.held_s.get(step, 0.0)),
            _ms(saved.staged_s),
            _ms(saved.written_s),
            f"{saved.nbytes / MIB:.0f} MiB",
            f"{saved.nbytes / saved.written_s / GIB:.2f} GiB/s",
        )
    return table


def loops_table(loops: Mapping[str, History]) -> Table:
    """Return a table of training loops, each with the share of its time in which it did not wait for saves.

    The time of the steps is that of the faster loop for all: else a loop that other programs slow down looks better.
    """
    table = _table("The price in training time", "the loop saves with", "computing", "waiting for saves", "kept")
    steps_s = min(sum(history.step_s.values()) - history.waiting_s() for history in loops.values())
    for name, history in loops.items():
        waiting_s = history.waiting_s()
        table.add_row(name, f"{steps_s:.1f} s", f"{waiting_s:.2f} s", f"{steps_s / (steps_s + waiting_s):.1%}")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
