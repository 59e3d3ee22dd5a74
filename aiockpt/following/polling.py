"""Polls a run's directory for its newest complete step. Without torch; blocks.

The newest version is the complete step with the highest number, as a manager sees it. It is new if it has another save
id than the version before (without a manifest: another stamp); so a rollback to an older step, and a step that was
replaced, are versions as well.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from aiockpt.manager.scan import DEFAULT_NAMES, StepInfo, StepNames, StepScanner
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.registry import Storages

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import Any

    from aiockpt.storage.base import Storage

_SURE_S = 2.0  # the times of a directory are coarser than two changes: so long after one, it is looked into each time
_LOOK_S = 1.0  # a step that is written in place shows only by a look
_MOST_FACTOR = 10  # of the shortest pause
_PAUSE_SHARE = 0.05  # of the time since the last version
_PATIENCE_S = 60.0  # of failed polls

logger = logging.getLogger("aiockpt")


class Poller:
    """Looks for the newest version of a run; `look` in one thread at a time."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        storage: Storage | None,
        storage_options: Mapping[str, Any] | None,
        names: StepNames,
        poll_s: float,
    ) -> None:
        if isinstance(poll_s, bool) or not isinstance(poll_s, int | float) or not 0 < poll_s < float("inf"):
            raise ValueError(f"poll_s must be a positive number of seconds, not {poll_s!r}")
        self.storage, self.directory = Storages(storage, LocalStorage(), storage_options).of(directory)
        self._scanner = StepScanner(self.storage, self.directory, names or DEFAULT_NAMES)
        self._poll_s = poll_s
        self._last: str | None = None  # the identity of the version that was taken last
        self._taken_s = self._changed_s = self._looked_s = time.monotonic()
        self._pulse: str | None = None
        self._failed_s: float | None = None  # since when polls fail

    @property
    def pause_s(self) -> float:
        """The seconds to wait until the next poll: longer ones while nothing happens."""
        idle_s = time.monotonic() - self._taken_s
        return min(max(self._poll_s, _PAUSE_SHARE * idle_s), _MOST_FACTOR * self._poll_s)

    def look(self) -> StepInfo | None:
        """Return the newest version if it is a new one; None if not, or if there is none yet.

        Raises:
            OSError: the directory could not be read for a minute.
        """
        try:
            info = self._newest()
        except OSError as exc:
            now = time.monotonic()
            self._failed_s = now if self._failed_s is None else self._failed_s
            if now - self._failed_s >= _PATIENCE_S or isinstance(exc, NotADirectoryError):
                raise
            logger.warning("can't look for versions in %s, and will try again: %s", self.directory, exc)
            return None
        self._failed_s = None
        return info

    def _newest(self) -> StepInfo | None:
        now = time.monotonic()
        try:
            pulse = self.storage.pulse(self.directory)
        except FileNotFoundError:
            return None  # a run that is not there yet
        if pulse != self._pulse:
            self._pulse, self._changed_s = pulse, now
        is_sure = pulse is not None and now - self._changed_s > _SURE_S
        if is_sure and self._looked_s > self._changed_s + _SURE_S and now - self._looked_s < _LOOK_S:
            return None
        info = self._scanner.latest()
        self._looked_s = now
        return None if info is None or self._identity(info) == self._last else info

    def take(self, info: StepInfo) -> None:
        """Note that a version was opened: it is no new one any more."""
        self._last, self._taken_s = self._identity(info), time.monotonic()

    def is_current(self, info: StepInfo) -> bool:
        """Return whether a step is still the one that was found."""
        known = self._scanner.look(info.step, info.path)
        return known is not None and known.state == "complete" and self._identity(known) == self._identity(info)

    def _identity(self, info: StepInfo) -> str:
        return f"{info.path} {info.save_id or self._scanner.stamp(info.path)}"
