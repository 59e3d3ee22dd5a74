"""Storages that wait, hang or fail on demand, for tests of aiockpt and of programs that use it."""

from aiockpt.testing.faults import Chances, Fault
from aiockpt.testing.storages import FaultyStorage, GatedStorage, HangingStorage

__all__ = ["Chances", "Fault", "FaultyStorage", "GatedStorage", "HangingStorage"]
