"""Shows runs as they go: bars that move on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from aiockpt.cli.demo.events import Event, Ready, Saved, Saving, Stepped

MIB = 1 << 20
GIB = 1 << 30


class Display(ABC):
    """Shows events of one process after the other.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def title(self, text: str) -> None:
        """Begin a section."""
        self.console.print()
        self.console.print(Text(text, style="bold"))

    def say(self, text: str, style: str = "") -> None:
        """Print a sentence of this section."""
        self.console.print(Text(f"  {text}", style=style), soft_wrap=True)

    @contextlib.contextmanager
    def run(self, steps: int) -> Iterator[None]:
        """Show the events that come meanwhile, of a run of ``steps`` steps."""
        yield

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show an event."""


class LineDisplay(Display):
    """For logs and pipes: a line at the start and for each checkpoint."""

    _loss = float("nan")

    def show(self, event: Event) -> None:
        """Print the event, if it matters."""
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
        """Draw two bars until the process is over, and leave them there."""
        self._progress = Progress(
            TextColumn("  {task.description:<13}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            refresh_per_second=12,
        )
        self._training = self._progress.add_task("training", total=steps, note="starting a process")
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
                self._draw(event)
            case Saved():
                self._progress.update(self._saving, note=describe_save(event))
            case _:
                pass

    def _draw(self, event: Saving) -> None:
        """Draw how much is written of a checkpoint."""
        self._progress.start_task(self._saving)
        self._progress.update(
            self._saving,
            description=checkpoint_name(event.step),
            visible=True,
            total=event.total_bytes,
            completed=event.written_bytes,
            note=f"{event.phase}: {describe_progress(event)}",
        )


def open_display() -> Display:
    """Make the display that fits standard output."""
    console = Console(highlight=False)
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


def checkpoint_name(step: int) -> str:
    """Give the name of the checkpoint after so many steps."""
    return f"step-{step:06d}"


def describe_start(event: Ready) -> str:
    """Say what a process begins with."""
    model = f"GPT of {event.parameters / 1e6:.1f} million parameters"
    return f"{model}, resumed from {event.resumed_from}" if event.resumed_from else f"{model}, from step 0"


def describe_progress(event: Saving) -> str:
    """Say how far a save is."""
    return (
        f"{event.staged_bytes / MIB:.0f} of {event.total_bytes / MIB:.0f} MiB copied, "
        f"{event.written_bytes / MIB:.0f} written"
    )


def describe_save(event: Saved) -> str:
    """Say how long a save took."""
    return f"staged after {event.staged_s * 1e3:.0f} ms, durable after {event.written_s * 1e3:.0f} ms"
