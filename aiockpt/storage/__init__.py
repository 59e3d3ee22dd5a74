"""Where checkpoints are kept: the interface of storages, their registry, the file system. Sees names and bytes only.

To keep checkpoints elsewhere, derive from `Storage` (one process) or `SharedStorage` (ranks, and writer processes),
test it with `aiockpt.testing.StorageConformance`, and pass it as ``storage=``, or `register` it for a scheme of URLs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiockpt.storage.base import (
        FileSink,
        LeaseFacts,
        Listing,
        LookBudget,
        PartSink,
        RunLease,
        SharedStorage,
        SharedTransaction,
        Source,
        Stamp,
        Storage,
        Traits,
        Transaction,
    )
    from aiockpt.storage.local.storage import LocalStorage
    from aiockpt.storage.registry import register, storage_for
    from aiockpt.storage.wrapper import WrapperStorage

__all__ = [
    "FileSink",
    "LeaseFacts",
    "Listing",
    "LocalStorage",
    "LookBudget",
    "PartSink",
    "RunLease",
    "SharedStorage",
    "SharedTransaction",
    "Source",
    "Stamp",
    "Storage",
    "Traits",
    "Transaction",
    "WrapperStorage",
    "register",
    "storage_for",
]

_HOMES = {
    "LocalStorage": "local.storage",
    "WrapperStorage": "wrapper",
    "register": "registry",
    "storage_for": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'base')}"), name)
    return value
