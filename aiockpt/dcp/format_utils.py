"""Conversions between checkpoints and ``torch.save`` files, in bounded memory; also ``python -m``.

The names are those of ``torch.distributed.checkpoint.format_utils``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.dcp.broadcast import BroadcastingTorchSaveReader
from aiockpt.dcp.convert.to_dcp import write_checkpoint
from aiockpt.dcp.convert.to_torch import write_torch_file
from aiockpt.dcp.planners import DynamicMetaLoadPlanner, EmptyStateDictLoadPlanner, _EmptyStateDictLoadPlanner
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError
from aiockpt.options import LoadOptions, check_options
from aiockpt.storage.local.storage import absolute
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiockpt.core.futures import Call
    from aiockpt.dcp.adapter import AnyCheckpointer, Path

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "EmptyStateDictLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "dcp_to_torch_save",
    "dcp_to_torch_save_async",
    "torch_save_to_dcp",
    "torch_save_to_dcp_async",
]

_STAGING_BYTES = 128 << 20


def dcp_to_torch_save(
    dcp_checkpoint_dir: Path,
    torch_save_path: Path,
    *,
    overwrite: bool = True,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
) -> None:
    """Convert a checkpoint to a file that ``torch.load`` reads. Blocks.

    The file appears atomically, complete and durable; if the conversion fails, whatever was there before stays. It
    holds what ``load()`` of the checkpoint returns, with tied tensors stored once. At most some 100 MB of tensors are
    in memory at a time; objects are read as a whole.

    Args:
        dcp_checkpoint_dir: a checkpoint of ``torch.distributed.checkpoint``, of any number of ranks, or of any other
            format that we load.
        torch_save_path: the file to write.
        overwrite: replace an existing file of torch.save or safetensors; if it is a link, the link is replaced.
        verify: check the CRC of everything that is read, if it has one.
        safe_globals: classes and functions that pickled objects may use, in addition to those that torch allows.
        trust: unpickle objects without restriction, which runs whatever code they ask for.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: it is unfinished, truncated or changed.
        UnsafeCheckpointError: an object needs something that was not allowed.
        CheckpointExistsError: the file exists and ``overwrite`` is False, or it is a directory or a file of another
            kind.
        WriteError, CommitError: the file can't be written.
    """
    options = _options(verify=verify, safe_globals=safe_globals, trust=trust)
    with SyncCheckpointer(process_group=None) as checkpointer:
        _start_to_torch(checkpointer, dcp_checkpoint_dir, torch_save_path, options, overwrite=overwrite).result()


async def dcp_to_torch_save_async(
    dcp_checkpoint_dir: Path,
    torch_save_path: Path,
    *,
    overwrite: bool = True,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
) -> None:
    """Do the same as `dcp_to_torch_save`, in other threads. Cancelling it removes what was written."""
    options = _options(verify=verify, safe_globals=safe_globals, trust=trust)
    async with AsyncCheckpointer(process_group=None) as checkpointer:
        await _start_to_torch(checkpointer, dcp_checkpoint_dir, torch_save_path, options, overwrite=overwrite).wait()


def torch_save_to_dcp(
    torch_save_path: Path,
    dcp_checkpoint_dir: Path,
    *,
    overwrite: bool = True,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    staging_bytes: int = _STAGING_BYTES,
) -> None:
    """Convert a ``torch.save`` file to a checkpoint that ``dcp.load`` reads. Blocks.

    The checkpoint appears atomically, complete and durable; if the conversion fails, whatever was there before stays.
    The directory may hold other files, even the one that is converted: they stay. Tensors are read through a mapping
    of the file and written through ``staging_bytes`` of memory.

    Args:
        torch_save_path: a file with a state dict.
        dcp_checkpoint_dir: the checkpoint's directory.
        overwrite: replace an existing checkpoint, if nothing else is in its directory.
        verify: check the CRCs of the file, which takes reading it once more.
        safe_globals: classes and functions that pickled objects may use, in addition to those that torch allows.
        trust: unpickle objects without restriction, which runs whatever code they ask for.
        staging_bytes: staging memory, in bytes.

    Raises:
        CheckpointNotFoundError: there is no file.
        CorruptCheckpointError: it is damaged.
        UnsafeCheckpointError: it needs something that was not allowed.
        LoadError: it can't be read, or holds no state dict.
        CheckpointExistsError: there is a checkpoint that may not be replaced.
        SaveError: the checkpoint can't be written.
    """
    options = _options(verify=verify, safe_globals=safe_globals, trust=trust)
    with SyncCheckpointer(process_group=None, staging_bytes=staging_bytes) as checkpointer:
        _start_to_dcp(checkpointer, torch_save_path, dcp_checkpoint_dir, options, overwrite=overwrite).result()


async def torch_save_to_dcp_async(
    torch_save_path: Path,
    dcp_checkpoint_dir: Path,
    *,
    overwrite: bool = True,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    staging_bytes: int = _STAGING_BYTES,
) -> None:
    """Do the same as `torch_save_to_dcp`, in other threads. Cancelling it removes what was written."""
    options = _options(verify=verify, safe_globals=safe_globals, trust=trust)
    async with AsyncCheckpointer(process_group=None, staging_bytes=staging_bytes) as checkpointer:
        await _start_to_dcp(checkpointer, torch_save_path, dcp_checkpoint_dir, options, overwrite=overwrite).wait()


def _options(*, verify: bool, safe_globals: Sequence[Any], trust: bool) -> LoadOptions:
    options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust)
    check_options(options, into=False)
    return options


def _start_to_torch(
    checkpointer: AnyCheckpointer, path: Path, target: Path, options: LoadOptions, *, overwrite: bool
) -> Call[None]:
    engine = EngineAccess(checkpointer)
    storage, where = engine.locate(path)
    file = absolute(target)
    return engine.call(
        lambda tools: write_torch_file(storage, where, file, options, tools, overwrite=overwrite), f"convert {path}"
    )


def _start_to_dcp(
    checkpointer: AnyCheckpointer, path: Path, target: Path, options: LoadOptions, *, overwrite: bool
) -> Call[None]:
    source, directory = os.fspath(path), os.fspath(target)
    return EngineAccess(checkpointer).call(
        lambda tools: write_checkpoint(checkpointer, source, directory, options, tools, overwrite=overwrite),
        f"convert {path}",
    )


_MODES: dict[str, Callable[..., None]] = {"torch_to_dcp": torch_save_to_dcp, "dcp_to_torch": dcp_to_torch_save}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m aiockpt.dcp.format_utils", description="Convert between checkpoints and torch.save files."
    )
    parser.add_argument("mode", choices=list(_MODES), help="the direction")
    parser.add_argument("src", help="what to convert")
    parser.add_argument("dst", help="where to write it")
    parser.add_argument("--trust", action="store_true", help="unpickle objects without restriction")
    chosen = parser.parse_args(arguments)
    try:
        _MODES[chosen.mode](chosen.src, chosen.dst, trust=chosen.trust)
    except AiockptError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.write(f"converted {chosen.src} to {chosen.dst}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
