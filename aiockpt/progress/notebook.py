"""Bars in a notebook, by tqdm: widgets where ipywidgets is installed, else text."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

_EVERY_S = 0.1  # between two messages to the browser


class NotebookBar:
    """One bar."""

    def __init__(self, title: str) -> None:
        try:
            # tqdm.notebook can be imported without ipywidgets, and then fails when a bar is made.
            if importlib.util.find_spec("ipywidgets") is None:
                from tqdm.std import tqdm
            else:
                from tqdm.notebook import tqdm
        except ImportError as exc:
            raise ImportError("progress bars in notebooks need tqdm: pip install 'aiockpt[notebook]'") from exc
        self._bar: Any = tqdm(total=0, desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=True)
        self._next = 0.0

    def update(self, done: int, total: int, note: str) -> None:
        """Show how far it is."""
        if not self._set_total(total) and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        self._show(done, note)

    def finish(self, done: int, total: int, note: str, *, ok: bool) -> None:
        """Show the end: green, or red where it has failed."""
        self._set_total(total if ok else max(total, done + 1))  # tqdm takes an unfinished bar for a failed one
        self._show(done, note)
        self._bar.close()

    def _set_total(self, total: int) -> bool:
        """Set the total, without beginning to measure the time anew; return whether it has changed."""
        if total == self._bar.total:
            return False
        begun = self._bar.start_t
        # A widget learns of another total from `reset` only, which also restarts the clock.
        self._bar.reset(total=total)
        self._bar.start_t = begun
        return True

    def _show(self, done: int, note: str) -> None:
        self._bar.n = done
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.refresh()
