"""The Trainer of Transformers with checkpoints that are written beside training, each as one transaction.

::

    from aiockpt.integrations.transformers import Trainer    # in place of transformers.Trainer

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

The stock code writes the small files of a checkpoint; the model and the optimizer are copied beside training.
``checkpoint-N`` appears when all of it is durable. Only then come the rotation by ``save_total_limit``, the push to the
Hub and ``on_save`` of callbacks.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from aiockpt.integrations.saves import SavesInFlight, missing, numbered, outdated, replaced

try:
    import transformers
    from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
    from transformers.utils.import_utils import is_torch_xla_available
except ImportError as exc:
    missing("transformers", "transformers", exc)

if TYPE_CHECKING:
    from aiockpt.engine.transaction import SyncTransaction

OPTIMIZER = "optimizer"
"""The directory of the optimizer's state in a checkpoint; it is a checkpoint of its own, in DCP's format."""
_SCHEDULER, _STATE = "scheduler.pt", "trainer_state.json"
_PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_SENTINEL = "checkpoint-is-incomplete.txt"  # of the JIT checkpoint: it is in the final directory before all else
_WRITERS = (
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("safetensors.torch", "save_file"),
)
_SHARDED = (  # in ways that the stock code gathers or writes itself
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "is_fsdp_xla_enabled",
    "is_tp_enabled",
    "is_distributed_loading_by_transformers",
)

_AnyTrainer: Any = object  # for type checkers: the mix-in comes before a Trainer


class _AfterSaves(TrainerCallback):  # type: ignore[misc]
    """What follows a checkpoint of a Trainer when it is written, at the Trainer's next event.

    ``about`` of each pending save is the state of the Trainer at the save, and whether it has called ``on_save``.
    """

    def __init__(self, trainer: Any, saves: SavesInFlight) -> None:
        self._trainer = trainer
        self._saves = saves
        handler = trainer.callback_handler
        self._call_on_save = handler.on_save
        handler.on_save = self._on_save

    def _on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Take the place of the handler's method: remember the call if its checkpoint is in flight."""
        save = self._saves.last
        if save is None or save.about[1] or save.about[0].global_step != state.global_step:
            return self._call_on_save(args, state, control, **kwargs)
        save.about = copy.copy(state), True
        control.should_save = False
        return control

    def deliver(self, *, wait: bool = False) -> None:
        """Push, rotate and call ``on_save`` for each checkpoint that is written."""
        trainer, args = self._trainer, self._trainer.args
        for save in self._saves.finished(wait=wait):
            state, is_announced = save.about
            if args.push_to_hub:
                current, trainer.state = trainer.state, state
                try:
                    trainer._push_from_checkpoint(save.path)
                finally:
                    trainer.state = current
            if args.should_save:
                best = state.best_model_checkpoint
                found = self._saves.settled(numbered(os.path.dirname(save.path), _PREFIX))
                for path in outdated(found, args.save_total_limit, save.path, best):
                    self._saves.retire(path)
            if is_announced:
                wanted = trainer.control.should_save
                trainer.control = self._call_on_save(args, state, trainer.control)
                trainer.control.should_save = trainer.control.should_save or wanted

    def settle(self) -> None:
        """Block until every checkpoint is written, and do what follows; raise the failure of one."""
        self.deliver(wait=True)
        self._saves.raise_failure()

    def end(self) -> None:
        """Do as `settle`, and end all threads."""
        try:
            self.settle()
        finally:
            self._saves.end()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.deliver()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.end()


class AiockptTrainerMixin(_AnyTrainer):  # type: ignore[misc]
    """Makes a Trainer write its checkpoints beside training: ``class MyTrainer(AiockptTrainerMixin, SFTTrainer)``.

    For training on one device and with DDP, where every rank writes a part of the optimizer's state. With DeepSpeed,
    FSDP, tensor parallelism, XLA or ``save_on_each_node``, the stock code saves.

    The copies are made after the Trainer's call to save has returned; ``optimizer.step()`` waits for them. The failure
    of a save is raised by the next save, or at the end of `train`. A checkpoint on SIGTERM (``enable_jit_checkpoint``)
    is durable when the Trainer's call returns.

    Attributes:
        checkpointer_options: options of `SyncCheckpointer`; set them in a subclass.
    """

    checkpointer_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = SavesInFlight(**self.checkpointer_options)
        self._after = _AfterSaves(self, self._saves)
        self.add_callback(self._after)

    def wait_for_checkpoints(self) -> None:
        """Block until every checkpoint is durable.

        Raises:
            AiockptError: one could not be written.
        """
        self._after.settle()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see ``transformers.Trainer.train``. Checkpoints in flight are finished, also after an error."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            try:
                self._after.end()
            except Exception as exc:
                error.add_note(f"a checkpoint also failed: {exc}")
            raise

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        is_sharded = any(getattr(self, name, False) for name in _SHARDED) or self.args.save_on_each_node
        if is_sharded or is_torch_xla_available():
            super()._save_checkpoint(model, trial)
            return
        self._after.deliver()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = super()._get_output_dir(trial)
        path = os.path.join(run, f"{_PREFIX}{self.state.global_step}")
        sentinel = os.path.join(path, _SENTINEL)
        what = f"whether {path} is the last save"
        is_last = self._saves.access.agree(what, os.path.exists(sentinel), any).result()
        if not is_last:
            self._saves.raise_failure()
        if self._saves.access.leads:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(sentinel)
            self._saves.clean(run)
            self._saves.make_room(path)
        with self._saves.writing(path, [self.optimizer]) as save:
            self._write(save.transaction, run)
            save.about = copy.copy(self.state), False
        if is_last:
            self.wait_for_checkpoints()

    def _write(self, transaction: SyncTransaction, run: str) -> None:
        """Do as the stock code does, in its order."""
        folder = transaction.directory

        def take(name: str, tensors: Any, metadata: Any) -> None:
            transaction.save(dict(tensors), name, metadata=metadata)

        # `save_pretrained` decides which tensors these are, under which names and in which files: it drops tied ones,
        # converts others, and knows adapters.
        with replaced(_WRITERS, folder, take):
            self.save_model(folder, _internal_call=True)
        if self.args.save_strategy != SaveStrategy.NO and self.state.best_global_step:
            best = os.path.join(run, f"{_PREFIX}{self.state.best_global_step}")
            if self._saves.will_be(best):
                self.state.best_model_checkpoint = best
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if self.args.should_save:
            for callback in (*self.callback_handler.callbacks, self.control):
                if isinstance(callback, ExportableState):
                    states, name = self.state.stateful_callbacks, type(callback).__name__
                    if isinstance(states[name], list):
                        states[name].append(callback.state())
                    else:
                        states[name] = callback.state()
            self.state.save_to_json(os.path.join(folder, _STATE))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        transaction = self._saves.open
        if transaction is None or output_dir != transaction.directory:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        transaction.save(self.optimizer.state_dict(), OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isdir(folder := os.path.join(checkpoint, OPTIMIZER)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        is_shared = self.args.world_size > 1 and self.args.device.type != "cpu"
        device = self.args.device if is_shared else "cpu"  # one device may not hold it twice; hosts, not once per rank
        self.optimizer.load_state_dict(self._saves.checkpointer.load(folder, map_location=device))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        self.wait_for_checkpoints()
        super()._load_best_model()

    def _get_output_dir(self, trial: Any) -> Any:
        """Return the directory of the run, with all its checkpoints: the end of training looks into it."""
        self._after.deliver(wait=True)
        return super()._get_output_dir(trial)


class Trainer(AiockptTrainerMixin, transformers.Trainer):
    """``transformers.Trainer``, with checkpoints that are written beside training; see `AiockptTrainerMixin`."""
