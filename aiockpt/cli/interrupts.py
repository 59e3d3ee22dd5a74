"""Blocks of code that an interrupt doesn't stop in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # interrupts come to the main thread alone
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
