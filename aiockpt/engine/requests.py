"""Arguments of the facades' methods: what to save, load or open, where, and the options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.options import CommitOptions, LoadOptions, OpenOptions, Path, SaveOptions, StateOptions
from aiockpt.snapshot.live import Stateful

StateDict = Mapping[Any, Any] | Stateful


@dataclass(frozen=True, slots=True)
class SaveRequest(SaveOptions):
    """Arguments of a save.

    Attributes:
        state_dict: nested dicts, lists and tuples with str or int keys, of tensors of any dtype and strides and of
            picklable objects. NumPy arrays of numbers are stored as tensors. Mappings of other types are loaded as
            dicts. An object with ``state_dict`` and ``load_state_dict``, such as a module, an optimizer, a scheduler
            or a data loader, is saved as its ``state_dict()``, which this call calls once per object. The state
            itself may be such an object.
        path: a directory that doesn't exist yet, or a file if it ends in ``.safetensors``; parent directories are
            created. ``~`` is the home directory. It must not be inside another checkpoint.
    """

    state_dict: StateDict = field(repr=False)
    path: Path


@dataclass(frozen=True)
class TransactionRequest(CommitOptions):
    """Arguments of a transaction.

    Attributes:
        path: the directory that the checkpoints of the transaction are to be in; see `AsyncCheckpointer.save`. A
            ``pre_commit`` hook with a second parameter that has no default gets `CheckpointTransaction.directory` too.
        overwrite: atomically replace all of what is at this path; see `AsyncCheckpointer.save`.
    """

    path: Path
    overwrite: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class PartRequest(StateOptions):
    """Arguments of a save within a transaction.

    Attributes:
        state_dict: see `AsyncCheckpointer.save`.
        name: the directory below the transaction's that becomes this checkpoint, or the file if it ends in
            ``.safetensors``, ``.pt``, ``.pth``, ``.ckpt`` or ``.bin``. Empty: the transaction's directory itself.
    """

    state_dict: StateDict = field(repr=False)
    name: str = ""


@dataclass(frozen=True, slots=True)
class OpenRequest(OpenOptions):
    """Arguments for opening a checkpoint.

    Attributes:
        path: the checkpoint's directory, or a file of ``torch.save`` or safetensors.
    """

    path: Path


@dataclass(frozen=True, slots=True)
class LoadRequest(LoadOptions):
    """Arguments of a load.

    Attributes:
        path: the checkpoint's directory, or a file of ``torch.save`` or safetensors.
        state_dict: the target to load into. Its tensors and NumPy arrays are filled in place, whatever their device
            and strides, and whether an array or a tensor was saved there; its objects are replaced. Keys that only
            the checkpoint has are skipped, but an empty container or None is replaced by everything that is stored
            there, in new containers of the types that were saved. An object with ``state_dict`` and
            ``load_state_dict`` receives everything that is stored under its key: the tensors of its ``state_dict()``
            are filled in place where they fit, and ``load_state_dict`` is called when everything is read, in the
            order of the state and inner objects first, in the caller's thread or task.
            None: load everything into a new state dict, with the containers and key types that were saved. Tied
            tensors share memory again; parameters are loaded as plain tensors.
    """

    path: Path
    state_dict: StateDict | None = field(default=None, repr=False)
