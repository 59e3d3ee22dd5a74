"""Adapters for ``torch.distributed.checkpoint``: its readers, writers and planners, on aiockpt's engine.

``import aiockpt`` does not load them, because importing ``torch.distributed.checkpoint`` takes a second::

    import torch.distributed.checkpoint as dcp
    from aiockpt.dcp import FileSystemReader, FileSystemWriter

    dcp.save(state_dict, storage_writer=FileSystemWriter("runs/a/step-100"))
    dcp.load(state_dict, storage_reader=FileSystemReader("runs/a/step-100"))

Conversions from and to ``torch.save`` files are in `aiockpt.dcp.format_utils`.

The page ``migrating`` has the calls of torch.distributed.checkpoint, of its experimental checkpointers and of
torch_checkpointing, and what takes their place.
"""

from __future__ import annotations

from aiockpt.dcp.broadcast import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, EmptyStateDictLoadPlanner
from aiockpt.dcp.reader import FileSystemReader
from aiockpt.dcp.writer import FileSystemWriter

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "EmptyStateDictLoadPlanner",
    "FileSystemReader",
    "FileSystemWriter",
]
