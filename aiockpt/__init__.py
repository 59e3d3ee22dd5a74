"""An asyncio-native checkpoint engine for PyTorch, in DCP's own file format.

The public names are imported when they are first used: a process that only writes files needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiockpt._version import __version__
    from aiockpt.checkpointer import AsyncCheckpointer, open
    from aiockpt.entry_info import ChunkInfo, ObjectInfo, TensorInfo
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
    from aiockpt.guard import StepGuard
    from aiockpt.handle import Completion, ProgressEvent, SaveHandle, SaveResult
    from aiockpt.line import Statistics
    from aiockpt.options import ProcessWriter
    from aiockpt.reader import CheckpointReader, SyncCheckpointReader
    from aiockpt.staging.pacing import StagingWindow
    from aiockpt.storage.retries import Retries
    from aiockpt.sync_checkpointer import SyncCheckpointer
    from aiockpt.transforms.base import Transform
    from aiockpt.transforms.zstd import Zstd
    from aiockpt.verify_report import Problem, VerifyReport

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
    "entry_info": ("ChunkInfo", "ObjectInfo", "TensorInfo"),
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
    "guard": ("StepGuard",),
    "handle": ("Completion", "ProgressEvent", "SaveHandle", "SaveResult"),
    "line": ("Statistics",),
    "options": ("ProcessWriter",),
    "reader": ("CheckpointReader", "SyncCheckpointReader"),
    "staging.pacing": ("StagingWindow",),
    "storage.retries": ("Retries",),
    "sync_checkpointer": ("SyncCheckpointer",),
    "transforms.base": ("Transform",),
    "transforms.zstd": ("Zstd",),
    "verify_report": ("Problem", "VerifyReport"),
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
