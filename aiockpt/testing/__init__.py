"""Storages that wait, hang or fail on demand, and tests for storages: for tests of programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.testing.storages import Chances, Fault, FaultyStorage, GatedStorage, HangingStorage

if TYPE_CHECKING:
    from aiockpt.testing.conformance import StorageConformance

__all__ = [
    "Chances",
    "Fault",
    "FaultyStorage",
    "GatedStorage",
    "HangingStorage",
    "StorageConformance",
]


def __getattr__(name: str) -> Any:
    if name != "StorageConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aiockpt.testing.conformance import StorageConformance  # only now: it needs pytest

    return StorageConformance
