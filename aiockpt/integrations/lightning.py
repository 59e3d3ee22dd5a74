"""Checkpoints of Lightning's Trainer and Fabric, written beside training.

::

    from aiockpt.integrations.lightning import AiockptCallback, AiockptCheckpointIO

    trainer = Trainer(plugins=[AiockptCheckpointIO()], callbacks=[AiockptCallback(), ModelCheckpoint(save_top_k=2)])

The classes are those of ``lightning``, or of ``pytorch_lightning`` if only that is imported before, or installed.
"""

from __future__ import annotations

import importlib
import io
import os
import shutil
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from aiockpt.errors import CheckpointExistsError, DeleteError, SafeGlobalsWarning
from aiockpt.integrations.saves import NamedSaves, missing

_IS_SEPARATE = find_spec("lightning") is None or ("pytorch_lightning" in sys.modules and "lightning" not in sys.modules)
_PYTORCH = "pytorch_lightning" if _IS_SEPARATE else "lightning.pytorch"
_FABRIC = "lightning_fabric" if _IS_SEPARATE else "lightning.fabric"
try:
    _callbacks: Any = importlib.import_module(f"{_PYTORCH}.callbacks")
    _strategies: Any = importlib.import_module(f"{_PYTORCH}.strategies")
    _plugins: Any = importlib.import_module(f"{_FABRIC}.plugins")
except ImportError as exc:
    missing("lightning", "lightning", exc)

_SMALL_BYTES = 64 << 10  # tensors up to that are copied at the call
_TENSORS = ("state_dict", "optimizer_states")
_META = "meta.pt"  # beside the shards: what belongs to neither a module nor an optimizer
# Of SLURM's requeued jobs, which begin while this one still runs; and of the tuner, which loads them again.
_URGENT = ("hpc_ckpt_", ".")
_Base: Any = object


# --- files ------------------------------------------------------------------------------------------------


class _Saving(_Base):
    """A CheckpointIO or a strategy whose saves run beside training. Stands before Lightning's class among the bases."""

    saves: NamedSaves

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as Lightning does, when no save is in flight."""
        self.saves.wait()
        return super().load_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        """Wait until every save is durable and what they replace is removed, and end all threads. Idempotent.

        Raises:
            AiockptError: the failure of a save that nobody has got.
        """
        try:
            self.saves.end()
        finally:
            super().teardown()


class AiockptCheckpointIO(_Saving, _plugins.TorchCheckpointIO):
    """Writes the files that Lightning would write, beside training; loads them as Lightning does.

    A file is what ``torch.save`` writes, so `load_from_checkpoint` and everything else reads it. It appears when it is
    durable. A checkpoint is removed only when the one that was saved after it is durable. URLs are left to Lightning.

    Saves run beside training within ``trainer.fit`` if there is an `AiockptCallback`. Outside of it, and without one,
    a save blocks until it is durable, and leaves no thread.

    Args:
        wait: "auto": as said. "staged": a save blocks until the tensors are copied, also outside of ``fit``; for
            Fabric, with `teardown` at the end. "written": every save blocks until it is durable.
        options: those of `SyncCheckpointer`.

    Attributes:
        saves: the saves in flight, and their checkpointer.
    """

    def __init__(self, *, wait: Literal["auto", "staged", "written"] = "auto", **options: Any) -> None:
        super().__init__()
        if wait not in ("auto", "staged", "written"):
            raise ValueError(f"wait is {wait!r}; it must be 'auto', 'staged' or 'written'")
        self._wait = wait
        self.saves = NamedSaves(process_group=None, **options)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint; see the class for how long it blocks.

        Raises:
            AiockptError: it can't be saved, or an earlier save has failed whose error nobody has got.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        path, saves = os.path.abspath(path), self.saves
        state = {key: part if key in _TENSORS else with_whole_objects(part) for key, part in checkpoint.items()}
        durable = _is_urgent(path) or self._wait == "written"
        saves.beside = saves.beside or (self._wait == "staged" and not durable)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SafeGlobalsWarning)  # it is loaded by torch.load, by other rules
            try:
                saves.save(state, path, durable=durable, format="torch")
            except CheckpointExistsError:
                if not os.path.isfile(path):
                    raise
                os.remove(path)  # which is no checkpoint, but is replaced by Lightning too
                saves.save(state, path, durable=durable, format="torch")
        if self._wait == "staged":
            saves.wait_for_copies()

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint: when the save that was begun last is durable, or at once if none is in flight."""
        if not _is_local(path):
            super().remove_checkpoint(path)
            return
        try:
            self.saves.remove(path)
        except DeleteError:  # there is something else, which Lightning removes too
            super().remove_checkpoint(path)


def _is_urgent(path: str) -> bool:
    """Return whether Lightning uses a checkpoint of this name as soon as its save returns."""
    return os.path.basename(path).startswith(_URGENT)


def _is_local(path: Any) -> bool:
    return "://" not in os.fspath(path)


# --- objects that are stored as pickle stores them ----------------------------------------------------------

_CONTAINERS: tuple[type[Any], ...] = (dict, OrderedDict, defaultdict)
_KEYS = (str, int, float, bool, type(None))
_PLAIN = (*_KEYS, bytes, complex)


class _Whole:
    """Is pickled as the value that it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self.value,)


def _itself(value: Any) -> Any:
    return value


def with_whole_objects(value: Any) -> Any:
    """Return a value with the same contents, to be saved as a file of ``torch.save``, which it then equals.

    Modules and all other objects are pickled whole at the call, with their tensors, and so are dicts with keys that are
    neither text nor numbers. Tensors elsewhere are still copied beside training.
    """
    kind = type(value)
    if kind in _CONTAINERS and all(type(key) in _KEYS for key in value):
        items = {key: with_whole_objects(part) for key, part in value.items()}
        if all(items[key] is part for key, part in value.items()):
            return value
        return _Whole(value) if kind is defaultdict else kind(items)
    if kind is list or kind is tuple:
        parts = [with_whole_objects(part) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else kind(parts)
    return value if kind in _PLAIN or isinstance(value, torch.Tensor) else _Whole(value)


# --- beside training ----------------------------------------------------------------------------------------


class AiockptCallback(_callbacks.Callback):
    """Lets saves run beside training: steps of the optimizers wait until the tensors are copied.

    For an `AiockptCheckpointIO`, or a strategy of this module. Name it before callbacks that change tensors, such as
    averages of weights. A failed save is raised at the next batch, or at the end. What loggers are told about a
    checkpoint, and the link of ``save_last="link"``, wait until it is durable.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saves = NamedSaves()  # of this fit
        self._replaced: list[tuple[Any, str]] = []
        self._large_buffers: list[Any] = []
        self._versions = 0
        self._forward_changes = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a trainer that saves in another way."""
        if saves_of(trainer) is None and not hasattr(trainer.strategy.checkpoint_io, "checkpoint_io"):
            raise ValueError(
                "AiockptCallback has nothing to do: give the Trainer plugins=[AiockptCheckpointIO()], or for shards "
                "strategy=AiockptModelParallelStrategy() or AiockptFSDPStrategy()"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Let saves run beside training."""
        saves = saves_of(trainer)
        if saves is None:  # within another plug-in, whose threads call it
            return
        self._restore()
        self._saves, self._forward_changes = saves, False
        saves.beside, saves.optimizers = True, lambda: trainer.optimizers
        self._large_buffers = [each for each in pl_module.buffers() if each.nbytes > _SMALL_BYTES]
        for callback in trainer.checkpoint_callbacks:
            saves.links = saves.links or getattr(callback, "save_last", None) == "link"
            self._replace(callback, "file_exists", _is_taken)
            self._replace(callback, "_link_checkpoint", _link)
        for logger in trainer.loggers:
            self._replace(logger, "after_save_checkpoint", lambda saves, stock, each: saves.then(lambda: stock(each)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Raise the failure of a save."""
        self._saves.raise_failure()
        self._versions = self._sum_of_versions()
        if self._forward_changes:
            self._saves.fence()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Wait for the copies."""
        self._saves.fence()
        self._forward_changes = self._forward_changes or self._versions != self._sum_of_versions()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the copies: averages of weights are exchanged with the weights now."""
        self._saves.fence()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until everything is durable; raise the failure of a save."""
        self._saves.end()
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait until everything is durable. Saves block until they are from now on."""
        self._saves.end_after(exception)
        self._restore()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo what `on_fit_start` has done, if there was nothing to train."""
        self._restore()

    def _sum_of_versions(self) -> int:
        return sum(0 if each.is_inference() else each._version for each in self._large_buffers)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        if hasattr(owner, name) and name not in vars(owner):
            setattr(owner, name, partial(function, self._saves, getattr(owner, name)))
            self._replaced.append((owner, name))

    def _restore(self) -> None:
        while self._replaced:
            delattr(*self._replaced.pop())


def saves_of(trainer: Any) -> NamedSaves | None:
    """Return the saves of a trainer; None if they are not ours."""
    strategy = trainer.strategy
    owner = strategy if isinstance(strategy, InShards) and strategy.in_shards else strategy.checkpoint_io
    return owner.saves if isinstance(owner, _Saving) else None


def _is_taken(saves: NamedSaves, stock: Callable[..., bool], path: Any, trainer: Any) -> bool:
    is_flying = trainer.is_global_zero and saves.will_be(path)
    return stock(path, trainer) or trainer.strategy.reduce_boolean_decision(is_flying, all=False)


def _link(saves: NamedSaves, stock: Callable[..., Any], trainer: Any, path: str, link: str) -> None:
    if trainer.is_global_zero and os.path.abspath(path) != os.path.abspath(link):
        saves.link(path, lambda: _make_link(path, link))
    trainer.strategy.barrier()


def _make_link(path: str, link: str) -> None:
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    beside = f"{link}.{os.getpid()}"
    os.symlink(os.path.relpath(path, os.path.dirname(link)), beside)
    os.replace(beside, link)


# --- shards -------------------------------------------------------------------------------------------------


class InShards(_Saving):
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
        self.saves.save(state, path, durable=_is_urgent(path), format="dcp", files={_META: rest.getvalue()})

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint: when the save that was begun last is durable, or at once if none is in flight."""
        if self.is_global_zero:
            self.saves.remove(filepath)


class AiockptModelParallelStrategy(InShards, _strategies.ModelParallelStrategy):
    """Saves the shards of FSDP2 and tensor parallelism beside training; see `InShards`."""


class AiockptFSDPStrategy(InShards, _strategies.FSDPStrategy):
    """Saves the shards of FSDP beside training, with ``state_dict_type="sharded"``; see `InShards`."""

    _model_key = "model"
