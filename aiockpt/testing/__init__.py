"""Storages that wait or fail on demand, for tests of aiockpt and of programs that use it."""

from aiockpt.testing.storages import FaultyStorage, GatedStorage

__all__ = ["FaultyStorage", "GatedStorage"]
