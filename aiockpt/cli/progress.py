"""A progress bar for what takes longer than a second, on standard error, and only if that is a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aiockpt.cli.output import console
from aiockpt.core.threads import start_thread
from aiockpt.errors import NoThreadError
from aiockpt.progress.terminal import bars

if TYPE_CHECKING:
    from rich.progress import Progress

    from aiockpt.telemetry.progress import ProgressEvent

_AFTER_S = 1.0


class Bar:
    """A bar of bytes with speed and time left; a function for ``progress=`` of loads, verifications and conversions."""

    def __init__(self, progress: Progress, title: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, note="")
        self.done_bytes = 0  # as of the last event

    def advance(self, nbytes: int) -> None:
        """Add bytes that are done."""
        self._progress.advance(self._task, nbytes)

    def __call__(self, event: ProgressEvent) -> None:
        """Show an event."""
        self.done_bytes = event.done_bytes
        self._progress.update(self._task, completed=event.done_bytes, total=event.total_bytes or None)


@contextmanager
def bar(title: str, total: int | None = None) -> Iterator[Bar]:
    """Show a bar within the context. ``total``: the bytes in all; None as long as that is not known."""
    err = console(stderr=True)
    progress = bars(err, transient=True)
    timer = threading.Timer(_AFTER_S, progress.start)
    timer.daemon = True
    if err.is_terminal:
        with suppress(NoThreadError):
            start_thread(timer)
    try:
        yield Bar(progress, title, total)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # it may be starting the display just now
        if progress.live.is_started:
            progress.stop()
