"""Bars in a terminal, by rich. All bars of a stream are on one live display, as rich allows only one."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from aiockpt.core.lazy import lazy_property

if TYPE_CHECKING:
    from rich.progress import TaskID

logger = logging.getLogger("aiockpt")


def bars(console: Console, *, transient: bool = False) -> Progress:
    """Return a display of bars of bytes, not started yet. ``transient``: it disappears at its end."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=transient,
        expand=True,
        # rich would put its own streams in place of sys.stdout and sys.stderr, from this thread: what the program
        # prints meanwhile would miss the file or the pipe that it is for.
        redirect_stdout=False,
        redirect_stderr=False,
    )


class Screen:
    """The bars of one stream."""

    def __init__(self) -> None:
        self._bars = 0
        self._progress: Progress | None = None

    def begin(self, stream: TextIO, title: str, *, force: bool) -> tuple[Progress, TaskID] | None:
        """Add a bar, and begin to show them if it is the first; None if the program has a live display already."""
        with _lock:
            if self._progress is None:
                console = Console(file=stream, force_terminal=True if force else None, emoji=False)
                progress = bars(console)
                try:
                    progress.start()
                except LiveError as exc:
                    logger.debug("%s is not shown: %s", title, exc)
                    return None
                self._progress = progress
            self._bars += 1
            return self._progress, self._progress.add_task(title, total=None, note="")

    def end(self) -> None:
        """Count a bar as ended; after the last one, stop the live display, whose last state stays on the screen."""
        with _lock:
            self._bars -= 1
            if not self._bars and self._progress is not None:
                self._progress.stop()
                self._progress = None


_screens: weakref.WeakKeyDictionary[TextIO, Screen] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class TerminalBar:
    """One bar; it appears with its first event."""

    def __init__(self, stream: TextIO, title: str, *, force: bool) -> None:
        self._stream = stream
        self._title = title
        self._force = force
        with _lock:
            self._screen = _screens.setdefault(stream, Screen())

    @lazy_property
    def _begun(self) -> tuple[Progress, TaskID] | None:
        return self._screen.begin(self._stream, self._title, force=self._force)

    def __call__(self, done: int, total: int, note: str, ok: bool | None) -> None:
        """Show how far it is."""
        if self._begun is None:
            return
        progress, task = self._begun
        if ok is not None:
            # rich shows a total of 0 as complete, and none as still running: neither is true of a failure before the
            # plan.
            total = done if ok else max(total, 1)
        progress.update(task, completed=done, total=total if ok is not None else total or None, note=note)
        if ok is not None:
            progress.stop_task(task)
            self._screen.end()
