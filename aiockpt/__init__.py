"""An asyncio-native checkpoint engine for PyTorch, in DCP's own file format."""

from aiockpt._version import __version__
from aiockpt.checkpointer import AsyncCheckpointer, open
from aiockpt.entry_info import ChunkInfo, ObjectInfo, TensorInfo
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
from aiockpt.reader import CheckpointReader, SyncCheckpointReader
from aiockpt.sync_checkpointer import SyncCheckpointer
from aiockpt.verify_report import Problem, VerifyReport

__all__ = [
    "AiockptError",
    "AsyncCheckpointer",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "CheckpointerClosedError",
    "ChunkInfo",
    "CommitError",
    "Completion",
    "CoordinationError",
    "CorruptCheckpointError",
    "LoadError",
    "MissingKeysError",
    "ObjectInfo",
    "Problem",
    "ProgressEvent",
    "SaveCancelledError",
    "SaveError",
    "SaveHandle",
    "SaveResult",
    "ShapeMismatchError",
    "StageError",
    "SyncCheckpointReader",
    "SyncCheckpointer",
    "TensorInfo",
    "TornSnapshotError",
    "UnsafeCheckpointError",
    "VerifyReport",
    "WriteError",
    "__version__",
    "open",
]
