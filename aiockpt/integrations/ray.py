"""Ray: saves of Ray Train's workers, reported when they are durable; actors that write one checkpoint together.

In the function that Ray Train runs on every worker::

    from aiockpt.integrations import ray as aiockpt_ray

    with aiockpt_ray.manager() as run:
        restored = aiockpt_ray.restore(run, state)
        for step in range(0 if restored is None else restored.step + 1, steps):
            ...
            save = run.submit(step, state)
            aiockpt_ray.report(save, {"loss": loss})

Actors that are no workers of Ray Train meet by name::

    ckpt = aiockpt.AsyncCheckpointer(process_group=await Meeting.join("trainers", rank, size))
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from aiockpt.core.threads import in_thread
from aiockpt.errors import AiockptError
from aiockpt.integrations.ray_meeting import Meeting as Meeting
from aiockpt.integrations.saves import missing
from aiockpt.manager.manager import SyncCheckpointManager
from aiockpt.saving.handle import SaveHandle

try:
    import ray
    import ray.train
except ImportError as exc:
    missing("Ray", "ray", exc)

if TYPE_CHECKING:
    from aiockpt.engine.transaction import CheckpointTransaction
    from aiockpt.manager.requests import Restored

logger = logging.getLogger("aiockpt")
_announced: WeakKeyDictionary[SyncCheckpointManager, str] = WeakKeyDictionary()  # the last preemption

NAMES = "checkpoint_{:06d}"
"""The names of the steps' directories in the directory of an experiment."""


def manager(**options: Any) -> SyncCheckpointManager:
    """Return a manager of the checkpoints of this experiment, which deletes none: `CheckpointConfig` says what is kept.

    Every worker makes one. Its directory is that of the experiment in the run's ``storage_path``, which all nodes must
    see under the same path.

    Args:
        options: those of `aiockpt.SyncCheckpointManager`, but for ``directory``, ``keep`` and ``lock``.

    Raises:
        ValueError: an option is Ray's to decide, or the storage is no file system that is mounted here.
    """
    for name in ("directory", "keep", "lock"):
        if name in options:
            why = "num_to_keep of Ray's CheckpointConfig says what is kept" if name == "keep" else "Ray decides that"
            raise ValueError(f"leave out {name}=: {why}")
    return SyncCheckpointManager(experiment_directory(), keep=None, lock=False, **{"names": NAMES, **options})


def experiment_directory() -> str:
    """Return the directory of this experiment; raise ValueError if it is not in a mounted file system."""
    storage = ray.train.get_context().get_storage()
    if type(storage.storage_filesystem).__name__ != "LocalFileSystem":
        raise ValueError(
            f"the storage of this experiment, {storage.experiment_fs_path}, is no mounted file system: pass a "
            "storage_path that every node has mounted"
        )
    return str(storage.experiment_fs_path)


def report(save: SaveHandle | CheckpointTransaction, metrics: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Report a save to Ray Train, which registers it as a checkpoint when it is durable; training goes on meanwhile.

    Every worker calls it, as ``ray.train.report``, whose barrier it waits for. If the save fails, so does the worker,
    and Ray restarts the run from the last checkpoint that was registered. Of saves that are killed nothing is left.

    Args:
        save: into a directory of the experiment, as `manager` makes it; a transaction after its block.
        metrics: numbers of the step; no tensors.
        options: those of ``ray.train.report`` that are not about the upload, such as ``validation``.
    """
    handle = save if isinstance(save, SaveHandle) else save.handle
    report_directory(handle.path, handle, metrics, **options)


def report_directory(
    path: str | None, save: SaveHandle | None, metrics: Mapping[str, Any] | None, **options: Any
) -> None:
    """Report a directory as a checkpoint when a save into it is durable; see `report`.

    Args:
        path: the directory; None if other workers write it.
        save: the save; None if nothing is in flight.
        metrics: as for `report`.
        options: as for `report`.
    """

    def when_written(checkpoint: Any, _: str) -> Any:
        if save is not None:
            save.written.result()  # its failure ends the training, as an upload's does
        return checkpoint

    ray.train.report(
        dict(metrics or {}),
        None if path is None else _checkpoint(path),
        None if path is None else os.path.basename(path),
        ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=when_written,
        **options,
    )


async def areport(
    save: SaveHandle | CheckpointTransaction, metrics: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Do as `report`, in a thread, as Ray's own function blocks the event loop."""
    await asyncio.wrap_future(in_thread(report, save, metrics, **options))


def restore(run: SyncCheckpointManager, state: Any, **options: Any) -> Restored | None:
    """Go on from the newest step that is whole, on all workers. Blocks.

    That may be one that was written, but not yet reported when the workers were restarted: it is reported now, and no
    work is lost. Older ones that were never reported are deleted, as Ray does not know of them. If the newest is
    damaged, an older one is taken, and Ray counts the damaged one as a checkpoint until ``num_to_keep`` removes it.

    Args:
        run: what `manager` has returned.
        state: to load into, as for ``run.restore``.
        options: those of ``run.restore``.

    Returns:
        As ``run.restore``; None if there is no step.
    """
    restored = run.restore(state, **options)
    known = {os.path.basename(each.checkpoint.path) for each in ray.train.get_all_reported_checkpoints()}
    if restored is not None and os.path.basename(restored.path) not in known:
        ray.train.report(
            dict(restored.metrics),
            _checkpoint(restored.path),
            os.path.basename(restored.path),
            ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
    infos = () if restored is None else run.infos()
    if restored is not None and ray.train.get_context().get_world_rank() == 0:
        for info in infos:
            if info.step < restored.step and os.path.basename(info.path) not in known:
                try:
                    run.checkpointer.delete(info.path)
                except AiockptError as exc:  # such as what Ray has removed a part of
                    logger.warning("step %d was never reported, but stays: %s", info.step, exc)
    return restored


def heed_preemption(run: SyncCheckpointManager) -> bool:
    """Return whether Ray is about to take a node away, once for each time that it says so. Waits for all workers.

    Save then, and go on: Ray restarts the workers when the node is gone. Call it on every worker.
    """
    info = ray.train.get_preemption_info()
    if info is None:
        return False
    is_new, _announced[run] = _announced.get(run) != repr(info), repr(info)
    return is_new


def _checkpoint(path: str) -> Any:
    return ray.train.Checkpoint(path, filesystem=ray.train.get_context().get_storage().storage_filesystem)
