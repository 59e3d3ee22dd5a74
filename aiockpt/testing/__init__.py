"""Storages that wait, hang or fail on demand, one in a server, and tests for storages: for tests of programs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiockpt.testing.storages import Chances, Fault, FaultyStorage, GatedStorage, HangingStorage

if TYPE_CHECKING:
    from aiockpt.testing.conformance import StorageConformance
    from aiockpt.testing.server import start_server
    from aiockpt.testing.server_storage import ServerStorage

__all__ = [
    "Chances",
    "Fault",
    "FaultyStorage",
    "GatedStorage",
    "HangingStorage",
    "ServerStorage",
    "StorageConformance",
    "start_server",
]

_HOMES = {"ServerStorage": "server_storage", "StorageConformance": "conformance", "start_server": "server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: the conformance suite needs pytest, and the server is a program of its own.
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
