"""Ready-made displays of the progress of saves, loads and verifications: bars and log lines.

::

    save = ckpt.save(state, "runs/a/step-100")
    aiockpt.progress.bar(save)                  # in a terminal or a notebook; elsewhere it shows nothing
    aiockpt.progress.log(save)                  # as lines of the log
    await ckpt.load("runs/a/step-100", progress=aiockpt.progress.bar())
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from aiockpt.core.threads import start_thread
from aiockpt.errors import NoThreadError, printable_key
from aiockpt.telemetry.card import size_text

if TYPE_CHECKING:
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.telemetry.progress import ProgressEvent

__all__ = ["Display", "bar", "log"]

logger = logging.getLogger("aiockpt")

_NOTEBOOK_S = 0.1  # between two messages to the browser


Bar = Callable[[int, int, str, bool | None], object]
"""One bar on a screen, or its substitute: shows the bytes that are done, of so many, 0 if that is not known; what is
going on; and None, or at the end whether all went well. Nothing comes after that."""


class Display:
    """Shows how far saves, loads and verifications are.

    It is the value for ``progress=`` of `load` and `verify`. For saves, see `follow`.
    """

    def __init__(self, make: Callable[[str], Bar]) -> None:
        self._make = make
        self._bars: dict[tuple[str, str], Bar] = {}
        self._threads: list[threading.Thread] = []

    def __call__(self, event: ProgressEvent) -> None:
        """Show an event of a load, a verification or a conversion."""
        key = (event.what, event.path)
        bar = self._bars.get(key)
        if bar is None:
            bar = self._bars[key] = self._make(_title(event.what, event.path))
        if event.phase == "reading":
            bar(event.done_bytes, event.total_bytes, "", None)
            return
        del self._bars[key]
        ok = event.phase == "done"
        bar(event.done_bytes, event.done_bytes if ok else event.total_bytes, event.phase, ok)

    def follow(self, handle: SaveHandle) -> None:
        """Show a save, from a thread of its own, until it is over. Does not block."""
        bar = self._make(_title("save", handle.path))  # here: a notebook shows it below the cell that runs
        # Not a daemon: a terminal is left as it was found, also if the program ends meanwhile.
        thread = threading.Thread(target=self._follow, args=(handle, bar), name="aiockpt-progress", daemon=False)
        try:
            start_thread(thread)
        except NoThreadError as exc:
            logger.warning("the save of %s is not displayed: %s", handle.path, exc)
        else:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _follow(self, handle: SaveHandle, bar: Bar) -> None:
        done = total = 0
        try:
            for event in handle.progress():
                done, total = event.done_bytes, event.total_bytes
                note = event.phase
                if event.phase == "writing":
                    note = "staged" if event.staged_bytes >= total else "staging"
                bar(done, total, note, None)
            ok = handle.state == "committed"
            bar(done, total, "written" if ok else handle.state, ok)
        except Exception:
            logger.exception("the progress of %s can't be shown", handle.path)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the saves that it follows are over and shown; return whether they are. Blocks."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


def bar(save: SaveHandle | None = None, *, file: TextIO | None = None, force: bool = False) -> Display:
    """Show a progress bar: in a notebook by tqdm, in a terminal by rich, and elsewhere nothing.

    Does not block, and neither saves nor loads wait for it. A bar ends when the save or load is over, however that is.
    In a notebook this needs tqdm, and for bars that are widgets also ipywidgets: ``pip install 'aiockpt[notebook]'``.

    Args:
        save: the save to show. None: the display is for ``progress=`` of `load` and `verify`, or for `Display.follow`.
        file: the stream of a terminal; None: the standard error.
        force: show it even if the stream is no terminal.

    Returns:
        The display.
    """
    stream = sys.stderr if file is None else file
    if file is None and in_notebook():
        return _shown(save, _NotebookBar)
    if not force and not (hasattr(stream, "isatty") and stream.isatty()):
        return _shown(save, lambda _: lambda *_: None)
    from aiockpt.progress.terminal import TerminalBar

    return _shown(save, lambda title: TerminalBar(stream, title, force=force))


def log(
    save: SaveHandle | None = None,
    *,
    every_s: float = 10.0,
    logger: logging.Logger | None = None,
    level: int = logging.INFO,
) -> Display:
    """Log how far a save, a load or a verification is: a line when it begins, one now and then, and one at its end.

    Args:
        save: the save to log. None: the display is for ``progress=`` of `load` and `verify`, or for `Display.follow`.
        every_s: seconds between two lines at least.
        logger: where to log; None: the logger "aiockpt.progress".
        level: the level of the lines. The end of what has failed is logged as a warning.

    Returns:
        The display.
    """
    target = logging.getLogger("aiockpt.progress") if logger is None else logger
    return _shown(save, lambda title: _LogBar(target, level, title, every_s))


def _shown(save: SaveHandle | None, make: Callable[[str], Bar]) -> Display:
    display = Display(make)
    if save is not None:
        display.follow(save)
    return display


def in_notebook() -> bool:
    """Return whether the program runs in a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _title(what: str, path: str) -> str:
    return f"{what} {printable_key(os.path.basename(path.rstrip('/')) or path)}"


class _LogBar:
    """Lines of a log."""

    def __init__(self, target: logging.Logger, level: int, title: str, every_s: float) -> None:
        self._target = target
        self._level = level
        self._title = title
        self._every_s = every_s
        self._begin = time.monotonic()
        self._next = self._begin

    def __call__(self, done: int, total: int, note: str, ok: bool | None) -> None:
        """Log a line: at the end, or if the last one was long enough ago."""
        now = time.monotonic()
        if ok is not None:
            took = now - self._begin
            figures = f", {size_text(total)} in {took:.1f} s ({size_text(total / max(took, 1e-9))}/s)" if ok else ""
            self._target.log(self._level if ok else logging.WARNING, "%s: %s%s", self._title, note, figures)
        elif total and now >= self._next:
            self._next = now + self._every_s
            share = f"{100 * done // total} % of {size_text(total)}"
            self._target.log(self._level, "%s: %s%s", self._title, share, f", {note}" if note else "")


class _NotebookBar:
    """A bar in a notebook, by tqdm: a widget where ipywidgets is installed, else text."""

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

    def __call__(self, done: int, total: int, note: str, ok: bool | None) -> None:
        """Show how far it is; the end is green, or red where it has failed."""
        if ok is False:
            total = max(total, done + 1)  # tqdm takes an unfinished bar for a failed one
        if not self._set_total(total) and ok is None and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _NOTEBOOK_S
        self._bar.n = done
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.refresh()
        if ok is not None:
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
