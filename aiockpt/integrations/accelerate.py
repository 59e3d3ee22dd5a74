"""Checkpoints of accelerate: its objects as one state for a manager, or its own ``save_state`` beside training.

::

    from aiockpt.integrations.accelerate import state_of

    with aiockpt.SyncCheckpointManager("runs/a", keep=aiockpt.KeepLatest(3)) as run, run.checkpointer.guard(optimizer):
        start = run.restore(state_of(accelerator))          # after accelerator.prepare
        for step, batch in enumerate(loader):
            ...
            run.submit(step, state_of(accelerator))

or, for a program that calls ``accelerator.save_state`` and ``accelerator.load_state``::

    from aiockpt.integrations.accelerate import install

    install(accelerator)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiockpt.errors import CheckpointExistsError, CheckpointNotFoundError
from aiockpt.integrations.saves import SavesInFlight, missing, numbered, replaced
from aiockpt.manager.rng import RngState

try:
    import accelerate.checkpointing  # noqa: F401 - its `save` is replaced while a checkpoint is written
    from accelerate.utils import DistributedType
except ImportError as exc:
    missing("accelerate", "accelerate", exc)

if TYPE_CHECKING:
    from accelerate import Accelerator

_PREFIX = "checkpoint_"
_LARGE = ("model", "pytorch_model", "optimizer")  # the beginnings of the names of large files
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


# --- a state for a manager ------------------------------------------------------------------------------


class _Step:
    """The step counter of an accelerator, by which it accumulates gradients."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """Return all that ``accelerator.save_state`` writes, as a state to save and to restore.

    The models and optimizers that were prepared, without accelerate's wrappers, so that keys don't depend on them;
    schedulers, data loaders that keep their place, the gradient scaler, what was registered for checkpointing, the
    random numbers of this rank, and the accelerator's step. The objects are live: call it after
    ``accelerator.prepare``.

    With several ranks, all of them save and restore it. Parameters that FSDP2 has sharded are saved as shards.

    Returns:
        The objects by ``model``, ``optimizer``, ``scheduler``, ``data`` and ``custom``, each numbered from 0, as
        ``model_0``; ``scaler``, ``rng`` and ``step``.
    """
    state: dict[str, Any] = {"rng": RngState(), "step": _Step(accelerator)}
    groups = {
        "model": [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models],
        "optimizer": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "scheduler": accelerator._schedulers,
        "data": [loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)],
        "custom": accelerator._custom_objects,
    }
    for kind, objects in groups.items():
        state |= {f"{kind}_{number}": each for number, each in enumerate(objects)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


# --- save_state and load_state ----------------------------------------------------------------------------


class Installed:
    """The checkpoints of an accelerator whose ``save_state`` writes beside training; see `install`."""

    def __init__(self, accelerator: Accelerator, *, wait: bool, **options: Any) -> None:
        self._accelerator = accelerator
        self._wait = wait
        self._saves = SavesInFlight(**options)
        self._stock_save: Callable[..., Any] = accelerator.save_state
        self._stock_load: Callable[..., Any] = accelerator.load_state
        self._stock_end: Callable[..., Any] = accelerator.end_training
        accelerator.save_state, accelerator.load_state = self._save_state, self._load_state
        accelerator.end_training = self._end_training

    def wait_for_checkpoints(self) -> None:
        """Block until every checkpoint is durable, and those beyond ``total_limit`` are being removed.

        Raises:
            AiockptError: one could not be written.
        """
        self._rotate(wait=True)
        self._saves.raise_failure()

    def close(self) -> None:
        """Do as `wait_for_checkpoints`, and end all threads. Idempotent; a later save begins anew."""
        try:
            self.wait_for_checkpoints()
        finally:
            self._saves.end()

    def _save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save in the background; see ``Accelerator.save_state``. Returns the path where it will be."""
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        if accelerator.distributed_type in _OTHERS or project.save_on_each_node:
            return self._stock_save(output_dir, safe_serialization, **kwargs)
        self._rotate()
        self._saves.raise_failure()
        is_named = project.automatic_checkpoint_naming
        path = self._next() if is_named else os.path.abspath(os.path.expanduser(output_dir))
        if self._saves.access.leads:
            self._saves.clean(os.path.dirname(path))
        project.automatic_checkpoint_naming = False  # it would remove old ones before this one is written
        try:
            with self._saves.writing(path, accelerator._optimizers, above=is_named) as save:
                folder = save.transaction.directory

                def take(name: str, obj: Any, _: Any) -> None:
                    metadata = {"format": "pt"} if name.endswith(".safetensors") else None
                    save.transaction.save(obj, name, metadata=metadata)

                with replaced([("accelerate.checkpointing", "save")], folder, take, _LARGE):
                    self._stock_save(folder, safe_serialization, **kwargs)
                save.about = is_named
        finally:
            project.automatic_checkpoint_naming = is_named
        if self._wait:
            self.wait_for_checkpoints()
        return Path(path)

    def _next(self) -> str:
        """Return the path of the next checkpoint that accelerate names."""
        accelerator = self._accelerator
        path = os.path.join(self._run, f"{_PREFIX}{accelerator.save_iteration}")
        if self._saves.will_be(path):
            raise CheckpointExistsError(
                f"{path} exists: set `iteration` of the ProjectConfiguration to the number of the next checkpoint"
            )
        return path

    @property
    def _run(self) -> str:
        return os.path.abspath(os.path.join(self._accelerator.project_dir, "checkpoints"))

    def _rotate(self, *, wait: bool = False) -> None:
        """Remove checkpoints beyond ``total_limit`` once the newer ones are written."""
        limit = self._accelerator.project_configuration.total_limit
        for save in self._saves.finished(wait=wait):
            if save.about and limit is not None and self._accelerator.is_main_process:
                found = [path for _, path in numbered(self._run, _PREFIX)]
                for path in found[: max(0, len(found) - max(1, limit))]:
                    if path != save.path:
                        self._saves.retire(path)

    def _load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load, when every save is over; see ``Accelerator.load_state``."""
        self.wait_for_checkpoints()
        if input_dir is None and self._accelerator.project_configuration.automatic_checkpoint_naming:
            found = numbered(self._run, _PREFIX)  # accelerate would also look at what a killed process has left
            if not found:
                raise CheckpointNotFoundError(
                    f"{self._run} has no whole checkpoint, such as {_PREFIX}0, to load: begin anew, or pass input_dir"
                )
            input_dir = found[-1][1]
        return self._stock_load(input_dir, *args, **kwargs)

    def _end_training(self) -> None:
        """Finish what is in flight; see ``Accelerator.end_training``."""
        try:
            self.close()
        finally:
            self._stock_end()


def install(accelerator: Accelerator, *, wait: bool = False, **options: Any) -> Installed:
    """Make ``accelerator.save_state`` write beside training; ``load_state`` waits for it, and ``end_training`` too.

    The files and their names are accelerate's, so that it loads them without us. A directory appears when all in it is
    durable. Models and optimizers are copied after ``save_state`` has returned; ``optimizer.step()`` waits for that.
    ``total_limit`` removes old ones only when the newer is durable. The failure of a save is raised by the next
    ``save_state``, ``load_state`` or ``end_training``.

    For one process and DDP. FSDP's shards are written within the call, into the same directory. With DeepSpeed,
    Megatron-LM, XLA or ``save_on_each_node``, the stock code saves.

    Args:
        accelerator: whose methods are replaced.
        wait: block in ``save_state`` until it is durable.
        options: those of `SyncCheckpointer`.

    Returns:
        What waits and ends: ``with contextlib.closing(install(accelerator)):``, or its ``wait_for_checkpoints``.
    """
    return Installed(accelerator, wait=wait, **options)
