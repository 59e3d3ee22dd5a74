"""Forks while another thread of the parent holds a lock or pauses the garbage collector."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakSet

import pytest

from aiockpt.core.forks import ModuleLock, called_in_children
from aiockpt.core.gc_pause import gc_pause

# Python warns of forks beside threads, which these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def _in_a_child(check: Callable[[], bool]) -> int:
    """Return the exit code of a forked child: 0 if the check holds there."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def _held_by_a_thread(context: AbstractContextManager[object]) -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with context:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(make: Callable[[], threading.Lock]) -> None:
    lock = ModuleLock(make)

    def takes_it() -> bool:
        with lock.held():
            return True

    with _held_by_a_thread(lock.held()):
        assert _in_a_child(takes_it) == 0
        assert not lock._lock.acquire(blocking=False)  # the parent's lock is still held


def test_a_lock_that_the_forking_thread_holds_can_be_left_in_the_child() -> None:
    lock = ModuleLock()
    with lock.held():
        child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_child_has_the_gc_thresholds_of_the_program() -> None:
    usual = gc.get_threshold()

    def collects() -> bool:
        is_usual = gc.get_threshold() == usual
        with gc_pause():
            is_paused = gc.get_threshold() != usual
        return is_usual and is_paused and gc.get_threshold() == usual

    with _held_by_a_thread(gc_pause()):
        assert gc.get_threshold() != usual
        assert _in_a_child(collects) == 0
        assert gc.get_threshold() != usual
    assert gc.get_threshold() == usual


def test_leaving_the_parents_gc_pause_in_the_child_is_harmless() -> None:
    usual = gc.get_threshold()
    with gc_pause():
        child = os.fork()
    if not child:
        with gc_pause():
            is_paused = gc.get_threshold() != usual
        os._exit(0 if is_paused and gc.get_threshold() == usual else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_objects_that_live_are_called_in_the_child_alone() -> None:
    called: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    objects: WeakSet[Named] = called_in_children(lambda each: called.append(each.name))
    kept = Named("kept")
    objects.add(kept)
    objects.add(Named("gone"))
    assert _in_a_child(lambda: called == ["kept"]) == 0
    assert called == []
