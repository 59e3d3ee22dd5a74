"""A progress bar for what takes longer than a second, on standard error, and only if that is a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from aiockpt.cli.output import console, rate_text, size_text

_AFTER_S = 1.0


class _Amount(ProgressColumn):
    """The bytes that are done, those in all, and the speed."""

    def render(self, task: Task) -> Text:
        of = "" if task.total is None else f" of {size_text(task.total)}"
        speed = task.finished_speed or task.speed
        return Text(f"{size_text(task.completed)}{of}" + ("" if not speed else f", {rate_text(speed)}"))


class Bar:
    """A bar of bytes with speed and time left."""

    def __init__(self, progress: Progress | None, title: str, total: int | None) -> None:
        self._progress = progress
        if progress is not None:
            self._task = progress.add_task(title, total=total)

    def advance(self, nbytes: int) -> None:
        """Add bytes that are done."""
        if self._progress is not None:
            self._progress.advance(self._task, nbytes)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the bytes that are done, and those there are in all."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)


@contextmanager
def bar(title: str, total: int | None = None) -> Iterator[Bar]:
    """Show a bar within the context. ``total``: the bytes in all; None as long as that is not known."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield Bar(None, title, total)
        return
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        _Amount(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )
    timer = threading.Timer(_AFTER_S, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield Bar(progress, title, total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the display just now
        if progress.live.is_started:
            progress.stop()
