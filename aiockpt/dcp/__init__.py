"""Adapters for ``torch.distributed.checkpoint``: its readers, writers and planners, on aiockpt's engine.

``import aiockpt`` does not load them, because importing ``torch.distributed.checkpoint`` takes a second::

    import torch.distributed.checkpoint as dcp
    from aiockpt.dcp import FileSystemReader, FileSystemWriter

    dcp.save(state_dict, storage_writer=FileSystemWriter("runs/a/step-100"))
    dcp.load(state_dict, storage_reader=FileSystemReader("runs/a/step-100"))

Conversions from and to ``torch.save`` files are in `aiockpt.dcp.format_utils`.

For programs that use other interfaces: ``ckpt`` is an `aiockpt.SyncCheckpointer`. The methods of an
`aiockpt.AsyncCheckpointer` are the same, but ``submit`` is its ``save``, and what blocks is awaited there::

    torch.distributed.checkpoint (dcp)             aiockpt
    ---------------------------------------------  ------------------------------------------------------------
    dcp.save(state, checkpoint_id=path)            ckpt.save(state, path)
    dcp.async_save(state, checkpoint_id=path)      save = ckpt.submit(state, path)
    its Future, or upload_completion               save.written
    staging_completion                             save.staged, or save.fence()
    async_checkpointer_type=PROCESS                SyncCheckpointer(writer="process")
    async_stager                                   none: see staging_bytes
    process_group, no_dist=True                    SyncCheckpointer(process_group=...), or None
    storage_writer, planner                        dcp.save with aiockpt.dcp.FileSystemWriter
    dcp.load(state, checkpoint_id=path)            ckpt.load(path, state)
    get_state_dict, set_state_dict                 the model and the optimizer themselves, as values of state

    torch.distributed.checkpoint._experimental     aiockpt
    ---------------------------------------------  ------------------------------------------------------------
    make_sync_checkpointer(), SyncCheckpointer     SyncCheckpointer(), ckpt.save(state, path)
    make_async_checkpointer(), AsyncCheckpointer   SyncCheckpointer(), stage, write = ckpt.submit(state, path)
    load(path, state, default_map_location=...)    ckpt.load(path, state, map_location=...)
    RuntimeError of strict=True                    MissingKeysError, a RuntimeError too; strict=True is the default
    WriterHook.pre_commit, WriterHook.post_commit  ckpt.submit(state, path, pre_commit=..., post_commit=...)
    CheckpointProcess                              SyncCheckpointer(writer="process")
    CheckpointStager, Barrier, RankInfo            none
    close()                                        ckpt.close(), of an AsyncCheckpointer aclose()

    torch_checkpointing                            aiockpt
    ---------------------------------------------  ------------------------------------------------------------
    CheckpointManager.save(path, state)            ckpt.submit(state, path).written
    AsyncCheckpointSaver.save(path, checkpoint)    stage, write = ckpt.submit(state, path)
    CheckpointManager.load(path, into=state)       ckpt.load(path, state); strict=True is the default
    CheckpointLoader.load(default_map_location)    ckpt.load(path, state, map_location=...)
    CheckpointManager.lock()                       ckpt.guard(optimizer), or ckpt.fence() before other changes
    CheckpointManager.prewarm_staging(state)       ckpt.prewarm(state)
    pre_finalize_callback, finalize_callback       ckpt.submit(state, path, pre_commit=..., post_commit=...)
    ItemSpec, Resharder                            none: every load reshards
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
