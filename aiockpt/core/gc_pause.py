"""Less frequent garbage collection while many objects are created of which none is garbage."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_RARELY = 50_000_001

_lock = threading.RLock()  # a signal handler may come here in the midst of it
_users = 0
_before = gc.get_threshold()


@contextmanager
def gc_pause() -> Iterator[None]:
    """Make collections rare, for the whole process, until the last thread has left this context.

    The collector is not disabled, which is up to the program: a setting that the program changes meanwhile is kept.
    """
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = gc.get_threshold()
            gc.set_threshold(_RARELY, *_before[1:])
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and gc.get_threshold()[0] == _RARELY:
                gc.set_threshold(*_before)
