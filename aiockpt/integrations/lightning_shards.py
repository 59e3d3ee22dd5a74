"""The checkpoints of Lightning's strategies for sharded models, which save and load directories by themselves."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from aiockpt.integrations.named_saves import NamedSaves

_META = "meta.pt"  # beside the shards: what belongs to neither a module nor an optimizer
# Of SLURM's requeued jobs, which begin while this one still runs; and of the tuner, which loads them again.
_URGENT = ("hpc_ckpt_", ".")
_Strategy: Any = object


def is_urgent(path: str) -> bool:
    """Return whether Lightning uses a checkpoint of this name as soon as its save returns."""
    return os.path.basename(path).startswith(_URGENT)


class InShards(_Strategy):
    """Saves shards beside training, into the directories that the strategy would write; it loads them itself.

    For one of Lightning's strategies, which stands behind it in the list of bases. A directory appears when it is
    durable, and replaces what is there. A checkpoint is removed only when the one that was saved after it is durable.

    Saves run beside training within ``trainer.fit`` if there is an `AiockptCallback`; otherwise a save blocks until it
    is durable. A checkpoint that is one file is left to the strategy and its CheckpointIO.

    Args:
        args: those of the strategy.
        checkpointer: options of `SyncCheckpointer`.
        kwargs: those of the strategy.

    Attributes:
        saves: the saves in flight, and their checkpointer.
    """

    _model_key = "state_dict"

    def __init__(self, *args: Any, checkpointer: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saves = NamedSaves(**(checkpointer or {}))

    @property
    def in_shards(self) -> bool:
        """Whether every rank saves its own shards."""
        return bool(getattr(self, "_save_distributed_checkpoint", getattr(self, "_state_dict_type", "") == "sharded"))

    def lightning_module_state_dict(self) -> Any:
        """Return this rank's shards of the model; they are not copied."""
        return get_model_state_dict(self.model) if self.in_shards else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return this rank's shards of an optimizer's state; they are not copied."""
        if not self.in_shards:
            return super().optimizer_state(optimizer)
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint; all ranks call it.

        Raises:
            AiockptError: it can't be saved, or an earlier save has failed whose error nobody has got.
        """
        if storage_options is not None or not self.in_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = os.path.abspath(self.broadcast(filepath))
        state = {self._model_key: checkpoint.pop("state_dict")}
        state |= {f"optimizer_{number}": each for number, each in enumerate(checkpoint.pop("optimizer_states", []))}
        rest = io.BytesIO()
        torch.save(checkpoint, rest)
        self.saves.save(state, path, durable=is_urgent(path), format="dcp", files={_META: rest.getvalue()})

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint when no save is in flight."""
        self.saves.wait()
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint: when the save that was begun last is durable, or at once if none is in flight."""
        if self.is_global_zero:
            self.saves.remove(filepath)

    def teardown(self) -> None:
        """Wait until every save is durable and what they replace is removed, and end all threads.

        Raises:
            AiockptError: the failure of a save that nobody has got.
        """
        try:
            self.saves.end()
        finally:
            super().teardown()
