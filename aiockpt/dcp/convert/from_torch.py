"""Maps ``torch.save`` files as state dicts, and converts them to checkpoints in bounded memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.core.threads import off_duty
from aiockpt.dcp.convert.parts import check_expansion
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import CheckpointExistsError, CommitError, CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import InlineEntry, TensorEntry
from aiockpt.format.item.objects import checked_sparse, extended_allow_list
from aiockpt.format.item.ziparchive import ZIP_MAGIC
from aiockpt.format.names import METADATA_NAME
from aiockpt.planning.flatten import TENSOR_TYPES, StructureError, flatten
from aiockpt.reading.assemble import build_state
from aiockpt.reading.executor import LoadTools, MapReader
from aiockpt.reading.open import read_index
from aiockpt.reading.verify.verify import verify_checkpoint
from aiockpt.storage.local.belonging import look_into, remove
from aiockpt.storage.local.commit import move_in, sync_directory
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.syscalls import open_directory
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.dcp.adapter import AnyCheckpointer
    from aiockpt.options import LoadOptions, Path
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Source, Storage
    from aiockpt.telemetry.loads import ReadReport

_RELEASE_BYTES = 64 << 20
"""Pages of the file that was read are released each time so much was staged."""


# --- the file -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MappedState:
    """The contents of a ``torch.save`` file."""

    value: Any  # what was saved; its tensors are backed by the file
    maps: tuple[mmap.mmap, ...] = field(default=(), repr=False)

    def release_pages(self) -> None:
        """Unmap the pages that were read so far; another read faults them in again from the page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self.maps:
                mapped.madvise(mmap.MADV_DONTNEED)


async def map_torch_file(storage: Storage, path: str, options: LoadOptions, tools: LoadTools) -> MappedState:
    """Open a ``torch.save`` file, and map its tensors; ``options.verify`` reads it once to check its CRCs."""
    source = await storage.open(path, workers=tools.workers)
    try:
        mapped = await tools.workers.run(_mapped, source, path, options)
        if options.verify:
            (await verify_checkpoint(storage, path, tools.workers)).raise_if_bad()
    except (CorruptCheckpointError, UnsafeCheckpointError, FileNotFoundError):
        raise
    except LoadError as exc:  # a format, or a kind of tensor, that only torch itself can read
        return MappedState(await tools.workers.run(_loaded_by_torch, path, options, exc))
    else:
        return mapped
    finally:  # the maps stay valid without it
        await tools.workers.run(source.close)


def _mapped(source: Source, path: str, options: LoadOptions) -> MappedState:
    index = read_index(source, path, safe_globals=options.safe_globals, trust=options.trust)
    reader = MapReader(source, path)
    tensors = {name: entry for name, entry in index.entries.items() if isinstance(entry, TensorEntry)}
    values: dict[str, Any] = dict(reader.tensors(tensors))
    values |= {name: entry.value for name, entry in index.entries.items() if isinstance(entry, InlineEntry)}
    return MappedState(build_state(path, index, values), reader.maps)


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
    path: Path,
    target: Path,
    options: LoadOptions,
    overwrite: bool,
    checkpointer: AnyCheckpointer,
    tools: LoadTools,
    _report: ReadReport,
) -> None:
    """Convert, on the checkpointer's loop; see `aiockpt.dcp.format_utils.torch_save_to_dcp`."""
    engine = EngineAccess(checkpointer)
    storage, path = engine.locate(path)
    _, target = engine.locate(target)
    shared = await tools.workers.run(_must_move_in, target, overwrite=overwrite)
    mapped = await map_torch_file(storage, path, options, tools)
    if not isinstance(mapped.value, Mapping):
        raise LoadError(
            f"{path} holds a {type(mapped.value).__name__}, not a state dict; load it with torch.load, and save it "
            "within a dict"
        )
    with contextlib.suppress(StructureError):  # raised by the save
        flat = flatten(mapped.value)
        tensors = zip(flat.names, flat.leaves, strict=True)
        strided = ((n, t) for n, t in tensors if type(t) in TENSOR_TYPES and t.layout is torch.strided)
        check_expansion(path, ((name, each.nbytes, each.untyped_storage().nbytes()) for name, each in strided))
    inner = os.path.join(target, new_ticket()) if shared else target

    submit = checkpointer.submit if isinstance(checkpointer, SyncCheckpointer) else checkpointer.save

    # Off duty: the engine refuses waits in its own threads and tasks as deadlocks, but no save waits for this task.
    def begin() -> SaveHandle:
        with off_duty():
            return submit(mapped.value, inner, overwrite=overwrite, format="dcp")

    handle = await tools.workers.run(begin)
    with off_duty():
        await _written(handle, mapped)
    if shared:
        await tools.workers.run(_move_in, inner, target)


async def _written(handle: SaveHandle, mapped: MappedState) -> None:
    """Wait for a save, releasing the pages that it has read; cancel it if this task is cancelled."""
    done = 0
    try:
        async for event in handle.progress():
            if event.staged_bytes - done >= _RELEASE_BYTES or event.phase == "staged":
                mapped.release_pages()
                done = event.staged_bytes
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


def _move_in(inner: str, target: str) -> None:
    """Move a complete checkpoint into a directory with other files, its `.metadata` last."""
    moved: list[str] = []
    try:
        names = {name: name for name in os.listdir(inner) if name != METADATA_NAME}
        moved = move_in(inner, target, names, METADATA_NAME, fsync=True)
        remove(inner)
        sync_directory(target)
    except OSError as exc:
        for path in (*reversed(moved), inner):
            with contextlib.suppress(OSError):  # the error above is raised
                remove(path)
        if isinstance(exc, FileExistsError):
            raise CheckpointExistsError(f"files of a checkpoint have appeared in {target} meanwhile") from exc
        raise CommitError(f"can't publish {target}: {exc}") from exc
