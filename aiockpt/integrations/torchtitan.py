"""torchtitan: its checkpoints, written beside training, in its own files.

::

    from aiockpt.integrations.torchtitan import AiockptCheckpointManager

    config = Trainer.Config(..., checkpoint=AiockptCheckpointManager.Config(enable=True, interval=500))
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from aiockpt.engine.facade import closing
from aiockpt.errors import AiockptError, CheckpointNotFoundError, SaveError
from aiockpt.integrations.saves import IDLE_S, missing
from aiockpt.manager.manager import SyncCheckpointManager
from aiockpt.manager.policies import KeepLatest

try:
    import torchtitan.components.checkpointer as _titan
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
except ImportError as exc:
    missing("torchtitan", "torchtitan", exc)

if TYPE_CHECKING:
    from aiockpt.core.futures import Completion
    from aiockpt.saving.fence import StepGuard
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.telemetry.saves import SaveResult

logger = logging.getLogger("aiockpt")

_Base: Any = _titan.BaseCheckpointManager
_MODEL = _titan.MODEL


class AiockptCheckpointManager(_Base):
    """Keeps the checkpoints of a torchtitan run: the directories ``step-N`` in its folder.

    A save returns when the state is captured; ``maybe_wait_for_staging``, which the trainer calls before the
    optimizers' step, waits for the copies, and so do the steps themselves. A checkpoint appears when it is durable.
    Older ones are removed only then. The last save blocks until it is durable.

    The failure of a save is raised by the next save, by ``maybe_wait_for_saving``, or by ``close``, once. Before the
    last save it is logged instead, so that the last one is made in any case.

    Args:
        config: what to do.
        dataloader: its state is saved.
        model_parts: modules; their states are saved as one, under their own names.
        optimizers: their state is saved, and their steps wait for copies.
        lr_schedulers: their state is saved.
        states: other objects with a state, by name. The above are added.
        sd_adapter: converts to the names of Hugging Face's models and back.
        base_folder: what the config's folder is relative to.

    Attributes:
        save_future: completes when the last save is durable; None when it was waited for.
        run: the manager that does the work, with its ``infos()`` and its ``checkpointer``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """Options of torchtitan's managers, where ``keep_latest_k=1`` is allowed, and those of the checkpointer."""

        keep_latest_k: int = 10
        """Number of recent checkpoints to keep, or zero to keep all. With 1, the newest that is durable stays."""

        checkpointer: dict[str, Any] = field(default_factory=dict)
        """Options of `aiockpt.SyncCheckpointManager`, such as ``{"staging_bytes": 1 << 30}``."""

        def __post_init__(self) -> None:
            # Refused by the base, as its managers remove the older one before the newer is durable.
            keep, self.keep_latest_k = self.keep_latest_k, 2 if self.keep_latest_k == 1 else self.keep_latest_k
            _Base.Config.__post_init__(self)
            self.keep_latest_k = keep

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("checkpoint.last_save_in_hf is True, but sd_adapter is not provided.")
        self.save_future: Completion[SaveResult] | None = None
        self.folder = filesystem.join(base_folder, config.folder)
        self.keep_latest_k = config.keep_latest_k
        self.states = states
        self.states |= {
            _MODEL: _titan.ModelWrapper(model_parts),
            _titan.OPTIMIZER: optimizers,
            _titan.DATALOADER: dataloader,
            _titan.LR_SCHEDULER: lr_schedulers,
        }
        self.sd_adapter, self._config = sd_adapter, config
        self._flying: SaveHandle | None = None
        self.run = SyncCheckpointManager(
            self.folder,
            keep=KeepLatest(self.keep_latest_k) if self.keep_latest_k else None,
            read_only=config.load_only,
            missing_ok=True,  # then the job begins from other weights
            names="step-{}",
            lock=False,  # torchtitan's restarts see to it that one job writes
            **{"idle_timeout": IDLE_S, **config.checkpointer},
        )
        self._guards = self._guards_of(optimizers)
        logger.info("checkpoints are loaded from and saved to %s", self.folder)

    def _guards_of(self, optimizers: Any) -> list[StepGuard]:
        """Guard all optimizers: a step of the container announces what the inner steps change."""
        guards: list[StepGuard] = []
        for optimizer in (optimizers, *getattr(optimizers, "optimizers", ())):
            with contextlib.suppress(TypeError):  # its steps call no hooks: the trainer waits
                guards.append(self.run.checkpointer.guard(optimizer))
        return guards

    # --- saving -------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or is_first or curr_step % config.interval == 0):
            return False
        try:
            self.maybe_wait_for_saving()
        except AiockptError:
            if not last_step:
                raise
            logger.exception("an earlier save has failed, and the last one is begun all the same")
        if last_step:
            self._save_last(curr_step)
        else:
            self._flying = self.run.submit(curr_step, self._state(self.states), overwrite=True)
            self.save_future = self._flying.written
        return True

    def _save_last(self, step: int) -> None:
        config, state, options = self._config, self._state(self.states), dict[str, Any]()
        if config.last_save_model_only:
            dtype, state = TORCH_DTYPE_MAP[config.export_dtype], self.states[_MODEL].state_dict()
            state = {name: _as_dtype(each, dtype) for name, each in state.items()}
            if self.keep_latest_k:  # nobody can go on from an export: the others stay
                for each in self.run.steps()[-self.keep_latest_k :]:
                    self.run.pin(each)
        if config.last_save_in_hf:
            state = self.sd_adapter.to_hf(state)
            options = {"format": "safetensors", "fqn_to_index_mapping": self.sd_adapter.fqn_to_index_mapping}
        self.run.save(step, state, overwrite=True, **options)

    @staticmethod
    def _state(states: Mapping[str, Any]) -> dict[str, Any]:
        """Return states as they are stored: the model's tensors have their own names, without a prefix."""
        others = {name: each for name, each in states.items() if name != _MODEL}
        return others | (states[_MODEL].state_dict() if _MODEL in states else {})

    def _maybe_wait_for_staging(self) -> None:
        with contextlib.suppress(SaveError):  # on this rank alone; `_wait_for_saving` raises it, on all
            self.run.checkpointer.fence()

    def _wait_for_saving(self) -> None:
        flying, self._flying, self.save_future = self._flying, None, None
        if flying is not None:
            self.run.checkpointer._written(flying)

    # --- loading ------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        if self.save_future is not None:
            concurrent.futures.wait([self.save_future])  # its failure is not the load's
        latest = self.run.latest()
        if step == -1 and latest is None and "mirror" not in self._config.checkpointer:
            return self._load_initial()
        number = latest.step if step == -1 and latest is not None else step
        try:
            found = self._fill(number == 0, lambda target: self.run.restore(target, "latest" if step == -1 else step))
        except CheckpointNotFoundError as exc:
            raise CheckpointNotFoundError(f"--checkpoint.load_step={step} not found: {exc}") from exc
        return found or self._load_initial()

    def _load_initial(self) -> bool:
        config, adapter = self._config, self.sd_adapter
        path = config.initial_load_path
        if not config.initial_load_in_hf:
            if path:
                self._fill(config.initial_load_model_only, lambda target: self.run.checkpointer.load(path, target))
            return bool(path)
        path = path or getattr(adapter, "hf_assets_path", None)
        if adapter is None or not path:
            raise ValueError("initial_load_in_hf needs an sd_adapter, and its hf_assets_path or initial_load_path")
        model = self.states[_MODEL]
        with torch.no_grad():
            target = adapter.to_hf(model.state_dict())
            reader = adapter.get_hf_storage_reader(path, config.initial_load_in_hf_quantized)
            if type(reader) is HuggingFaceStorageReader:
                self.run.checkpointer.load(path, target)
            else:  # such as one that dequantizes
                stock_load(target, storage_reader=reader)
            model.load_state_dict(adapter.from_hf(target))
        return True

    def _fill(self, model_only: bool, load: Any) -> bool:
        """Load into this run's objects; return whether there is something to load.

        Of each object, the present state says what is read; the rest would not fit here.
        """
        excluded = self._config.exclude_from_loading
        unknown = [name for name in excluded if name not in self.states]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} not found in state_dict.")
        chosen = {name: each for name, each in self.states.items() if name not in excluded}
        if model_only:
            chosen = {_MODEL: self.states[_MODEL]}
        target = self._state(chosen)
        live = {name: each for name, each in chosen.items() if name != _MODEL and hasattr(each, "load_state_dict")}
        target |= {name: each.state_dict() for name, each in live.items()}
        if load(target) is None:
            return False
        for name, each in live.items():
            each.load_state_dict(target[name])
        self.states[_MODEL].load_state_dict(target)
        return True

    # --- the end ------------------------------------------------------------------------------------------

    def _close(self) -> None:
        with closing("checkpoint manager", sys.exception()):
            try:
                self._wait_for_saving()
            finally:
                for guard in self._guards:
                    guard.remove()
                self.run.close()


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
