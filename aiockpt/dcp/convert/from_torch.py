"""Reads ``torch.save`` files as state dicts, and converts them to checkpoints in bounded memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.core.threads import off_duty
from aiockpt.dcp.convert.recode import check_expansion
from aiockpt.engine.facade import EngineAccess
from aiockpt.engine.submit import format_for
from aiockpt.errors import CheckpointExistsError, CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.item.objects import checked_sparse, extended_allow_list
from aiockpt.format.item.ziparchive import ZIP_MAGIC
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.flatten import TENSOR_TYPES, StructureError, flatten
from aiockpt.reading.load import CheckpointLoad
from aiockpt.reading.open import open_checkpoint
from aiockpt.reading.verify.verify import verify_checkpoint
from aiockpt.storage.local import beside
from aiockpt.storage.local.belonging import look_into
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.syscalls import open_directory
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.dcp.adapter import AnyCheckpointer
    from aiockpt.dcp.convert.recode import Recoding
    from aiockpt.options import LoadOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.loads import ReadReport

_FINAL = (CorruptCheckpointError, UnsafeCheckpointError, FileNotFoundError)
"""Errors of a file that torch is not asked to read either."""


# --- the file -----------------------------------------------------------------------------------------


async def map_torch_file(storage: Storage, path: str, options: LoadOptions, tools: LoadTools) -> Any:
    """Return the contents of a file, its tensors backed by it; ``options.verify`` reads it once to check its CRCs."""
    try:
        loaded = await CheckpointLoad(storage, path, replace(options, mmap=True)).run(tools)
        if options.verify:
            (await verify_checkpoint(storage, path, tools.workers)).raise_if_bad()
    except _FINAL:
        raise
    except LoadError as exc:  # a format, or a kind of tensor, that only torch itself can read
        return await tools.workers.run(_loaded_by_torch, path, options, exc)
    return loaded.value


def _loaded_by_torch(path: str, options: LoadOptions, why: LoadError) -> Any:
    """Load a file with torch, under the same restrictions."""
    with open(path, "rb") as file:
        mappable = file.read(4) == ZIP_MAGIC
    try:
        with (
            extended_allow_list(options.safe_globals),
            contextlib.nullcontext() if options.trust else checked_sparse(),
        ):
            return torch.load(path, map_location="cpu", mmap=mappable, weights_only=not options.trust)
    except Warning:  # an error only because the program turns warnings into errors
        raise
    except Exception as exc:  # a damaged pickle raises nearly anything
        raise type(why)(f"{why} (torch.load says: {type(exc).__name__}: {str(exc).partition('. ')[0]})") from exc


# --- its conversion -----------------------------------------------------------------------------------


async def write_checkpoint(
    recoding: Recoding, checkpointer: AnyCheckpointer, tools: LoadTools, report: ReadReport
) -> None:
    """Convert, on the checkpointer's loop; see `aiockpt.dcp.format_utils.torch_save_to_dcp`."""
    engine, run = EngineAccess(checkpointer), tools.workers.run
    storage, path = engine.locate(recoding.path)
    _, target = engine.locate(recoding.target)
    format_for("dcp", target)
    shared = await run(_must_move_in, target, overwrite=recoding.overwrite)
    inner = os.path.join(target, new_ticket()) if shared else target
    try:
        try:
            opened = await open_checkpoint(storage, path, recoding.options, tools)
        except _FINAL:
            raise
        except LoadError as exc:  # what only torch itself can read
            value = await run(_loaded_by_torch, path, recoding.options, exc)
            await _save(value, path, inner, recoding.overwrite, checkpointer, tools)
        else:
            if opened.index.wrapped is not None:
                await run(opened.source.close)
                raise _no_state_dict(path)
            await recoding.convert(opened, storage, inner, tools, report)
        if shared:
            names = {name: name for name in await run(os.listdir, inner) if name != METADATA_NAME}
            await run(beside.publish, inner, target, names, METADATA_NAME)
    finally:
        if shared:
            with anyio.CancelScope(shield=True):
                await run(beside.discard, inner)


def _no_state_dict(path: str) -> LoadError:
    return LoadError(f"{path} holds no state dict; load it with torch.load, and save it within a dict")


async def _save(
    value: Any, path: str, target: str, overwrite: bool, checkpointer: AnyCheckpointer, tools: LoadTools
) -> None:
    """Save what torch has loaded; cancel the save if this task is cancelled."""
    if not isinstance(value, Mapping):
        raise _no_state_dict(path)
    with contextlib.suppress(StructureError):  # raised by the save
        flat = flatten(value)
        tensors = zip(flat.names, flat.leaves, strict=True)
        strided = ((n, t) for n, t in tensors if type(t) in TENSOR_TYPES and t.layout is torch.strided)
        check_expansion(path, ((name, each.nbytes, each.untyped_storage().nbytes()) for name, each in strided))
    submit = checkpointer.submit if isinstance(checkpointer, SyncCheckpointer) else checkpointer.save

    # Off duty: the engine refuses waits in its own threads and tasks as deadlocks, but no save waits for this task.
    def begin() -> SaveHandle:
        with off_duty():
            return submit(value, target, overwrite=overwrite, format="dcp")

    handle = await tools.workers.run(begin)
    try:
        with off_duty():
            await handle.written
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await handle.cancel()
        raise


def _must_move_in(target: str, *, overwrite: bool) -> bool:
    """Return whether the target holds other files, so that the checkpoint must be moved in beside them.

    Raises CheckpointExistsError if it holds a checkpoint as well, which then can't be replaced atomically.
    """
    if not os.path.isdir(target) or os.path.islink(target):
        return False
    with open_directory(target) as directory:
        found = look_into(directory)
    if found.files and found.others and overwrite:
        raise CheckpointExistsError(
            f"{target} holds a checkpoint and other things ({found.others[0]}), so that it can't be replaced at once; "
            "move one of them away, or convert to another directory"
        )
    return bool(found.others) and not found.files
