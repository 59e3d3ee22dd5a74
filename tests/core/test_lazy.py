"""Properties that are computed once."""

from __future__ import annotations

import threading
from pathlib import Path

import aiockpt
from aiockpt.core.lazy import lazy_property


class _Counted:
    def __init__(self) -> None:
        self.calls = 0
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()

    @lazy_property
    def number(self) -> int:
        """A number."""
        self.calls += 1
        return 7

    @lazy_property
    def slow(self) -> list[int]:
        """A list."""
        if not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_go_on.wait(60)
        return [1]


def test_a_property_is_computed_once_for_each_instance() -> None:
    one, other = _Counted(), _Counted()
    assert (one.number, one.number, other.number, one.calls, other.calls) == (7, 7, 7, 1, 1)
    assert vars(one)["number"] == 7
    assert _Counted.number.__doc__ == "A number."


def test_no_thread_waits_for_another() -> None:
    """There is no lock that a forked child could find held: both threads compute, and get the same object."""
    counted = _Counted()
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(counted.slow))
    thread.start()
    assert counted.has_begun.wait(60)
    mine = counted.slow
    counted.may_go_on.set()
    thread.join(60)
    assert found[0] is mine is counted.slow


def test_the_package_does_not_use_cached_property() -> None:
    """`functools.cached_property` has a lock in Python 3.11."""
    for file in Path(aiockpt.__file__).parent.rglob("*.py"):
        assert "import cached_property" not in file.read_text(), file
