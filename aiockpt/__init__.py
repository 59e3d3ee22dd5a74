"""An asyncio-native checkpoint engine for PyTorch, in DCP's own file format.

A public name is imported at its first use: a process that only writes files needs no torch. Type checkers read the
names from ``__init__.pyi``; a test compares it with the table below.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiockpt.core.gc_pause import gc_pause

_HOMES = {
    "_version": ("__version__",),
    "checkpointer": ("AsyncCheckpointer", "open"),
    "coordination.ranks": ("Ranks",),
    "reading.info": ("ChunkInfo", "ObjectInfo", "TensorInfo"),
    "errors": (
        "AiockptError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CheckpointerBusyError",
        "CheckpointerClosedError",
        "CommitError",
        "CommitUncertainError",
        "CoordinationError",
        "CorruptCheckpointError",
        "DamagedCheckpointWarning",
        "DeleteError",
        "DequantizedWarning",
        "LoadError",
        "MissingHostError",
        "MissingKeysError",
        "MissingKeysWarning",
        "NoThreadError",
        "RunLockedError",
        "SafeGlobalsWarning",
        "SaveCancelledError",
        "SaveError",
        "SaveSkippedError",
        "SaveTimeoutError",
        "ShapeMismatchError",
        "StageError",
        "TornSnapshotError",
        "UnsafeCheckpointError",
        "WriteError",
    ),
    "saving.fence": ("StepGuard",),
    "core.futures": ("Completion",),
    "following.watch": ("SyncVersion", "SyncWatch", "Version", "Watch", "watch", "watch_sync"),
    "manager.rng": ("RngState",),
    "saving.handle": ("SaveHandle",),
    "engine.queue": ("Statistics",),
    "manager.policies": (
        "EverySeconds",
        "EverySteps",
        "KeepAll",
        "KeepAny",
        "KeepBest",
        "KeepEvery",
        "KeepIf",
        "KeepLatest",
        "KeepPolicy",
        "KeepWithin",
        "SaveAny",
        "SavePolicy",
        "StepFacts",
        "WhenIdle",
    ),
    "manager.scan": ("StepInfo",),
    "manager.manager": ("CheckpointManager", "SyncCheckpointManager"),
    "manager.requests": ("Mirror", "Restored", "SkippedStep"),
    "options": ("Base", "ProcessWriter", "StagingWindow"),
    "reading.reader": ("CheckpointReader", "SyncCheckpointReader"),
    "storage.local.retries": ("Retries",),
    "sync_checkpointer": ("SyncCheckpointer", "load", "save", "verify"),
    "telemetry.observer": ("CallEvent", "Observer", "SaveEvent"),
    "telemetry.progress": ("ProgressEvent",),
    "telemetry.saves": ("LoadResult", "MirrorBacklog", "MirrorResult", "SaveResult"),
    "telemetry.timeline": ("TimelineEvent",),
    "format.transforms.base": ("Transform",),
    "format.transforms.zstd": ("Zstd",),
    "telemetry.verification": ("Problem", "VerifyReport"),
}
_HOME_OF = {name: f"aiockpt.{home}" for home, names in _HOMES.items() for name in names}
_MODULES = ("dcp", "errors", "observers", "progress", "storage", "testing")  # `aiockpt.dcp.FileSystemWriter`

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if name in _MODULES:
        return importlib.import_module(f"aiockpt.{name}")
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with gc_pause():  # what is imported is no garbage: a collection would walk all of torch, and find nothing
        value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
