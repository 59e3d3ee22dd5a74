"""Forks while another thread of the parent holds a lock or pauses the garbage collector."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakSet

import pytest

from aiockpt.core.forks import ModuleLock, called_in_children
from aiockpt.core.gc_pause import gc_pause
from aiockpt.staging.pool import MappedMemory, SharedMemory

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


@pytest.mark.parametrize("kind", [MappedMemory, SharedMemory])
def test_a_child_that_frees_memory_of_the_engine_keeps_its_own(kind: type[MappedMemory | SharedMemory]) -> None:
    nbytes = 64 << 20
    held = [kind(nbytes)]
    held[0].view[:5] = b"whole"
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

    def keeps_its_own() -> bool:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # Without MAP_FIXED the address is a hint: the kernel takes it if it is free.
        own = libc.mmap(held[0].address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        ctypes.memset(own, 7, nbytes)
        held.clear()
        gc.collect()
        return ctypes.string_at(own, nbytes).count(7) == nbytes

    assert _in_a_child(keeps_its_own) == 0
    assert held[0].view[:5] == b"whole"
    if isinstance(held[0], SharedMemory):
        held[0].close()
