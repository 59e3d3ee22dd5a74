"""An asyncio-native checkpoint engine for PyTorch, in DCP's own file format.

The public names are imported when they are first used: a process that only writes files needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiockpt._version import __version__
    from aiockpt.checkpointer import AsyncCheckpointer, open
    from aiockpt.core.futures import Completion
    from aiockpt.engine.queue import Statistics
    from aiockpt.errors import (
        AiockptError,
        CheckpointerBusyError,
        CheckpointerClosedError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CommitError,
        CoordinationError,
        CorruptCheckpointError,
        DeleteError,
        LoadError,
        MissingKeysError,
        MissingKeysWarning,
        SaveCancelledError,
        SaveError,
        SaveSkippedError,
        SaveTimeoutError,
        ShapeMismatchError,
        StageError,
        TornSnapshotError,
        UnsafeCheckpointError,
        WriteError,
    )
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.zstd import Zstd
    from aiockpt.options import ProcessWriter, StagingWindow
    from aiockpt.reading.info import ChunkInfo, ObjectInfo, TensorInfo
    from aiockpt.reading.reader import CheckpointReader, SyncCheckpointReader
    from aiockpt.reading.verify.report import Problem, VerifyReport
    from aiockpt.saving.fence import StepGuard
    from aiockpt.saving.handle import ProgressEvent, SaveHandle, SaveResult
    from aiockpt.storage.local.retries import Retries
    from aiockpt.sync_checkpointer import SyncCheckpointer

__all__ = [
    "AiockptError",
    "AsyncCheckpointer",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "CheckpointerBusyError",
    "CheckpointerClosedError",
    "ChunkInfo",
    "CommitError",
    "Completion",
    "CoordinationError",
    "CorruptCheckpointError",
    "DeleteError",
    "LoadError",
    "MissingKeysError",
    "MissingKeysWarning",
    "ObjectInfo",
    "Problem",
    "ProcessWriter",
    "ProgressEvent",
    "Retries",
    "SafeGlobalsWarning",
    "SaveCancelledError",
    "SaveError",
    "SaveHandle",
    "SaveResult",
    "SaveSkippedError",
    "SaveTimeoutError",
    "ShapeMismatchError",
    "StageError",
    "StagingWindow",
    "Statistics",
    "StepGuard",
    "SyncCheckpointReader",
    "SyncCheckpointer",
    "TensorInfo",
    "TornSnapshotError",
    "Transform",
    "UnsafeCheckpointError",
    "VerifyReport",
    "WriteError",
    "Zstd",
    "__version__",
    "open",
]

_HOMES = {
    "_version": ("__version__",),
    "checkpointer": ("AsyncCheckpointer", "open"),
    "reading.info": ("ChunkInfo", "ObjectInfo", "TensorInfo"),
    "errors": (
        "AiockptError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CheckpointerBusyError",
        "CheckpointerClosedError",
        "CommitError",
        "CoordinationError",
        "CorruptCheckpointError",
        "DeleteError",
        "LoadError",
        "MissingKeysError",
        "MissingKeysWarning",
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
    "saving.handle": ("ProgressEvent", "SaveHandle", "SaveResult"),
    "engine.queue": ("Statistics",),
    "options": ("ProcessWriter", "StagingWindow"),
    "reading.reader": ("CheckpointReader", "SyncCheckpointReader"),
    "storage.local.retries": ("Retries",),
    "sync_checkpointer": ("SyncCheckpointer",),
    "format.transforms.base": ("Transform",),
    "format.transforms.zstd": ("Zstd",),
    "reading.verify.report": ("Problem", "VerifyReport"),
}
_HOME_OF = {name: f"aiockpt.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
