"""Closing a manager: in a thread of its own, which goes on if its waiter is cancelled, or its event loop has ended."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from aiockpt.core.futures import Completion
from aiockpt.core.threads import start_thread, uninterrupted
from aiockpt.errors import NoThreadError

logger = logging.getLogger("aiockpt")


class Closing:
    """The end of a manager.

    Args:
        directory: the run's, for messages.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.hurry: concurrent.futures.Future[None] = concurrent.futures.Future()  # complete it to make `wait` return
        self.has_failed = False  # whether the manager's block was left by an error
        self._end: Completion[None] | None = None  # since it was begun
        self._thread: threading.Thread | None = None

    def begin(self, close: Callable[[], None]) -> Completion[None]:
        """Call what closes the manager, which blocks; return the future of the end. Idempotent."""
        if self._end is None:
            uninterrupted(partial(self._start, close))
        assert self._end is not None
        return self._end

    def _start(self, close: Callable[[], None]) -> None:
        end: Completion[None] = Completion(f"the end of closing {self._directory}")

        def close_and_tell() -> None:
            error: BaseException | None = None
            try:
                close()
            except BaseException as exc:  # delivered to whoever closes
                error = exc
            end._settle(None, error)

        thread = threading.Thread(
            target=close_and_tell, name="aiockpt-close", daemon=False
        )  # the process waits for its end
        try:
            start_thread(thread)
            self._thread = thread
        except NoThreadError as exc:  # rather here than never
            logger.warning("this thread closes the manager of %s, and blocks: %s", self._directory, exc)
            close_and_tell()
        self._end = end

    def join(self) -> None:
        """Wait for the thread to end, if closing has ended."""
        if self._thread is not None and self._end is not None and self._end.done():
            self._thread.join()

    def wait(self, future: concurrent.futures.Future[Any], timeout_s: float) -> None:
        """Wait for the end of a future, whatever it is, for so long at most, and no longer once closing is hurried."""
        concurrent.futures.wait([future, self.hurry], timeout_s, concurrent.futures.FIRST_COMPLETED)
