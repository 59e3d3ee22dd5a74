"""Less frequent garbage collection while many objects are created of which none is garbage."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt.core.forks import ModuleLock

_RARELY = 50_000_001  # a number that no program sets, so that `_end` can tell it from a setting of the program's

_lock = ModuleLock(threading.RLock)  # reentrant: a signal handler that saves may run while this thread holds it
_users = 0
_before = gc.get_threshold()


@contextmanager
def gc_pause() -> Iterator[None]:
    """Make collections rare, for the whole process, until the last thread has left this context.

    The collector is not disabled, which is up to the program: a setting that the program changes meanwhile is kept.
    """
    global _users, _before
    process = os.getpid()  # in a child that is forked within the context, `_end_in_child` has ended the pause
    with _lock.held():
        _users += 1
        if _users == 1:
            _before = gc.get_threshold()
            gc.set_threshold(_RARELY, *_before[1:])
    try:
        yield
    finally:
        if os.getpid() == process:
            with _lock.held():
                _users -= 1
                if not _users:
                    _end()


def _end() -> None:
    if gc.get_threshold()[0] == _RARELY:
        gc.set_threshold(*_before)


def _end_in_child() -> None:
    """End the pause of the parent, whose threads don't leave it here."""
    global _users
    if _users:
        _users = 0
        _end()


os.register_at_fork(after_in_child=_end_in_child)
