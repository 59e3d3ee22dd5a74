"""An observer that logs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiockpt.errors import printable, printable_key
from aiockpt.telemetry.card import size_text, time_text
from aiockpt.telemetry.observer import CallEvent, Observer, SaveEvent

if TYPE_CHECKING:
    from aiockpt.telemetry.progress import Outcome
    from aiockpt.telemetry.saves import LoadResult, MirrorBacklog, MirrorResult, SaveResult


class LoggingObserver(Observer):
    """Logs a line for each event: failures as errors, skipped saves as warnings.

    The figures are attributes of the log records too, for formatters that write JSON: ``aiockpt_event``, which is the
    name of the observer's method, ``path``, and where they are known ``bytes`` and ``seconds``.

    Args:
        logger: where to log; None: the logger "aiockpt.observers".
        level: the level of what goes well.
    """

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logging.getLogger("aiockpt.observers") if logger is None else logger
        self._level = level

    def save_started(self, event: SaveEvent) -> None:
        """Log at the level DEBUG: most programs only ask how it ends."""
        self._log(logging.DEBUG, "save_started", "saving %s", event.path)

    def staged(self, event: SaveEvent) -> None:
        """Log at the level DEBUG."""
        figures = {"bytes": event.nbytes, "seconds": event.elapsed_s}
        self._log(logging.DEBUG, "staged", "staged %s after %s", event.path, time_text(event.elapsed_s), **figures)

    def written(self, event: SaveEvent, result: SaveResult) -> None:
        """Log size, time and speed."""
        size, took, speed = size_text(result.nbytes), time_text(result.written_s), size_text(result.bytes_per_s)
        figures = {"bytes": result.nbytes, "seconds": result.written_s}
        self._log(self._level, "written", "saved %s: %s in %s (%s/s)", result.path, size, took, speed, **figures)

    def _unwritten(self, event: SaveEvent, outcome: Outcome, error: BaseException) -> None:
        """Log a failure as an error, all else as a warning."""
        level = logging.ERROR if outcome == "failed" else logging.WARNING
        self._log(level, outcome, "%s was not saved: %s", event.path, error, seconds=event.elapsed_s)

    def loaded(self, event: CallEvent, result: LoadResult | None) -> None:
        """Log size, time and speed, or the error."""
        if result is None:
            self._log_failure(logging.ERROR, "loaded", event)
            return
        size, took, speed = size_text(result.nbytes), time_text(result.loaded_s), size_text(result.bytes_per_s)
        figures = {"bytes": result.nbytes, "seconds": result.loaded_s}
        self._log(self._level, "loaded", "loaded %s: %s in %s (%s/s)", event.path, size, took, speed, **figures)

    def deleted(self, event: CallEvent) -> None:
        """Log the deletion, or the error."""
        if event.error is not None:
            self._log_failure(logging.ERROR, "deleted", event)
            return
        took = time_text(event.elapsed_s)
        self._log(self._level, "deleted", "deleted %s in %s", event.path, took, seconds=event.elapsed_s)

    def mirrored(self, event: CallEvent, result: MirrorResult | None, backlog: MirrorBacklog) -> None:
        """Log size, time and what is left, or the error."""
        left = {"backlog_steps": len(backlog.steps), "backlog_bytes": backlog.nbytes}
        if result is None:
            self._log_failure(logging.WARNING, "mirrored", event, **left)
            return
        size, took = size_text(result.nbytes), time_text(result.mirrored_s)
        figures = {"bytes": result.nbytes, "sent_bytes": result.sent_bytes, "seconds": result.mirrored_s, **left}
        text = "mirrored %s: %s in %s; %d steps are left"
        self._log(self._level, "mirrored", text, event.path, size, took, len(backlog.steps), **figures)

    def _log_failure(self, level: int, name: str, event: CallEvent, **figures: float) -> None:
        text = f"%s was not {name}: %s"
        self._log(level, name, text, event.path, event.error, seconds=event.elapsed_s, **figures)

    def _log(self, level: int, name: str, text: str, path: str, *args: object, **figures: float) -> None:
        shown = [printable(str(value)) if isinstance(value, BaseException) else value for value in args]
        extra = {"aiockpt_event": name, "path": path, **figures}
        self._logger.log(level, text, printable_key(path), *shown, extra=extra)
