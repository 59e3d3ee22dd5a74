"""An asyncio-native checkpoint engine for PyTorch, in DCP's own file format."""

from aiockpt._version import __version__
from aiockpt.checkpointer import AsyncCheckpointer, SyncCheckpointer
from aiockpt.errors import (
    AiockptError,
    CheckpointerClosedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    CoordinationError,
    CorruptCheckpointError,
    LoadError,
    MissingKeysError,
    SaveCancelledError,
    SaveError,
    ShapeMismatchError,
    StageError,
    TornSnapshotError,
    UnsafeCheckpointError,
    WriteError,
)
from aiockpt.handle import Completion, ProgressEvent, SaveHandle, SaveResult

__all__ = [
    "AiockptError",
    "AsyncCheckpointer",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointerClosedError",
    "CommitError",
    "Completion",
    "CoordinationError",
    "CorruptCheckpointError",
    "LoadError",
    "MissingKeysError",
    "ProgressEvent",
    "SaveCancelledError",
    "SaveError",
    "SaveHandle",
    "SaveResult",
    "ShapeMismatchError",
    "StageError",
    "SyncCheckpointer",
    "TornSnapshotError",
    "UnsafeCheckpointError",
    "WriteError",
    "__version__",
]
