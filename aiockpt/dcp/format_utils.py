"""Conversions between checkpoints, ``torch.save`` files and safetensors, in bounded memory; also ``python -m``.

The names of those for ``torch.save`` files are those of ``torch.distributed.checkpoint.format_utils``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.dcp.broadcast import BroadcastingTorchSaveReader
from aiockpt.dcp.convert.recode import Recoding
from aiockpt.dcp.convert.to_dcp import write_checkpoint
from aiockpt.dcp.convert.to_torch import write_torch_file
from aiockpt.dcp.planners import DynamicMetaLoadPlanner, EmptyStateDictLoadPlanner, _EmptyStateDictLoadPlanner
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError
from aiockpt.format.keys import check_patterns
from aiockpt.format.manifest.manifest import check_user_metadata
from aiockpt.format.names import SUFFIX
from aiockpt.options import LoadOptions, check_options
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.safetensors_plan import SafetensorsFormat
from aiockpt.storage.local.storage import absolute
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiockpt.core.futures import Call
    from aiockpt.dcp.adapter import AnyCheckpointer, Path
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.planner import FileFormat

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "EmptyStateDictLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "dcp_to_safetensors",
    "dcp_to_safetensors_async",
    "dcp_to_torch_save",
    "dcp_to_torch_save_async",
    "safetensors_to_dcp",
    "safetensors_to_dcp_async",
    "torch_save_to_dcp",
    "torch_save_to_dcp_async",
]

_STAGING_BYTES = 128 << 20
_FILES = 4  # of a DCP checkpoint, as a save writes it
_DTYPES = ("float64", "float32", "bfloat16", "float16")


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


def dcp_to_safetensors(
    dcp_checkpoint_dir: Path,
    safetensors_path: Path,
    *,
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = True,
    verify: bool = True,
) -> None:
    """Convert the tensors of a checkpoint to safetensors. Blocks.

    The result is what ``save(format="safetensors")`` of the loaded tensors writes. It appears atomically, complete and
    durable; if the conversion fails, whatever was there before stays. At most some 100 MB of tensors are in memory::

        dcp_to_safetensors("runs/a/step-100", "export", keys="model", dtype=torch.bfloat16)

    Args:
        dcp_checkpoint_dir: a checkpoint of ``torch.distributed.checkpoint``, of any number of ranks, or of any other
            format that we load.
        safetensors_path: a directory, or a file whose name ends in ``.safetensors``.
        keys: convert only these: names, names of containers, and glob patterns; see `aiockpt.AsyncCheckpointer.load`.
            They must be tensors.
        dtype: cast floating-point tensors to this dtype.
        shard_bytes: see `aiockpt.AsyncCheckpointer.save`.
        fqn_to_index_mapping: see there.
        metadata: see there.
        overwrite: replace an existing checkpoint.
        verify: check the CRC of everything that is read, if it has one; large tensors are read once more for that.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: it is unfinished, truncated or changed.
        MissingKeysError: it has none of some keys.
        SaveError: a key is no tensor, or of a dtype that safetensors has no name for.
        CheckpointExistsError: something is there that may not be replaced.
        WriteError, CommitError: the files can't be written.
    """
    options = _options(keys=keys, dtype=dtype, verify=verify)
    with SyncCheckpointer(process_group=None) as checkpointer:
        _start_to_safetensors(
            *(checkpointer, dcp_checkpoint_dir, safetensors_path, options, shard_bytes, fqn_to_index_mapping),
            metadata=metadata,
            overwrite=overwrite,
        ).result()


async def dcp_to_safetensors_async(
    dcp_checkpoint_dir: Path,
    safetensors_path: Path,
    *,
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = True,
    verify: bool = True,
) -> None:
    """Do the same as `dcp_to_safetensors`, in other threads. Cancelling it removes what was written."""
    options = _options(keys=keys, dtype=dtype, verify=verify)
    async with AsyncCheckpointer(process_group=None) as checkpointer:
        await _start_to_safetensors(
            *(checkpointer, dcp_checkpoint_dir, safetensors_path, options, shard_bytes, fqn_to_index_mapping),
            metadata=metadata,
            overwrite=overwrite,
        ).wait()


def safetensors_to_dcp(
    safetensors_path: Path,
    dcp_checkpoint_dir: Path,
    *,
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = True,
    verify: bool = True,
) -> None:
    """Convert safetensors to a checkpoint that ``dcp.load`` reads. Blocks.

    The checkpoint appears atomically, complete and durable; if the conversion fails, whatever was there before stays.
    Its keys are the names in the files. At most some 100 MB of tensors are in memory.

    Args:
        safetensors_path: a file, or a directory with a file or with a set of files and its index.
        dcp_checkpoint_dir: the checkpoint's directory.
        keys: convert only these, as for `dcp_to_safetensors`.
        dtype: cast floating-point tensors to this dtype.
        overwrite: replace an existing checkpoint.
        verify: check CRCs, which safetensors files don't have.

    Raises:
        CheckpointNotFoundError: there is nothing.
        CorruptCheckpointError: a file is truncated or damaged.
        MissingKeysError: there are none of some keys.
        CheckpointExistsError: something is there that may not be replaced.
        WriteError, CommitError: the files can't be written.
    """
    options = _options(keys=keys, dtype=dtype, verify=verify)
    with SyncCheckpointer(process_group=None) as checkpointer:
        _start_recoding(
            checkpointer, safetensors_path, dcp_checkpoint_dir, DcpFormat(_FILES), options, {}, overwrite=overwrite
        ).result()


async def safetensors_to_dcp_async(
    safetensors_path: Path,
    dcp_checkpoint_dir: Path,
    *,
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = True,
    verify: bool = True,
) -> None:
    """Do the same as `safetensors_to_dcp`, in other threads. Cancelling it removes what was written."""
    options = _options(keys=keys, dtype=dtype, verify=verify)
    async with AsyncCheckpointer(process_group=None) as checkpointer:
        await _start_recoding(
            checkpointer, safetensors_path, dcp_checkpoint_dir, DcpFormat(_FILES), options, {}, overwrite=overwrite
        ).wait()


def _options(
    *,
    verify: bool,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> LoadOptions:
    chosen = check_patterns(keys)
    options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust, keys=chosen, dtype=dtype)
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


def _start_to_safetensors(
    checkpointer: AnyCheckpointer,
    path: Path,
    target: Path,
    options: LoadOptions,
    shard_bytes: int | None,
    file_of: Mapping[str, int] | None,
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
) -> Call[None]:
    facts = check_user_metadata({} if metadata is None else metadata)
    single = os.fspath(target).endswith(SUFFIX)
    form = SafetensorsFormat(facts, single_file=single, shard_bytes=shard_bytes, file_of=file_of)
    return _start_recoding(checkpointer, path, target, form, options, facts, overwrite=overwrite)


def _start_recoding(
    checkpointer: AnyCheckpointer,
    path: Path,
    target: Path,
    form: FileFormat,
    options: LoadOptions,
    metadata: dict[str, JsonValue],
    *,
    overwrite: bool,
) -> Call[None]:
    engine = EngineAccess(checkpointer)
    storage, where = engine.locate(path)
    recoding = Recoding(
        storage=storage,
        path=where,
        target=engine.locate(target)[1],
        form=form,
        options=options,
        metadata=metadata,
        overwrite=overwrite,
    )
    return engine.call(recoding.run, f"convert {path}")


_MODES: dict[str, Callable[..., None]] = {
    "torch_to_dcp": torch_save_to_dcp,
    "dcp_to_torch": dcp_to_torch_save,
    "dcp_to_safetensors": dcp_to_safetensors,
    "safetensors_to_dcp": safetensors_to_dcp,
}
_RECODES = ("dcp_to_safetensors", "safetensors_to_dcp")


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m aiockpt.dcp.format_utils",
        description="Convert between checkpoints, torch.save files and safetensors.",
    )
    parser.add_argument("mode", choices=list(_MODES), help="the direction")
    parser.add_argument("src", help="what to convert")
    parser.add_argument("dst", help="where to write it")
    parser.add_argument("--trust", action="store_true", help="unpickle objects without restriction")
    parser.add_argument("--keys", action="append", help="safetensors: convert only this name or pattern; repeatable")
    parser.add_argument("--dtype", choices=_DTYPES, help="safetensors: cast floating-point tensors to this dtype")
    chosen = parser.parse_args(arguments)
    given: dict[str, Any] = {"trust": chosen.trust}
    if chosen.mode in _RECODES:
        if chosen.trust:
            parser.error("--trust is for torch.save files: safetensors hold no objects")
        given = {"keys": chosen.keys, "dtype": chosen.dtype and getattr(torch, chosen.dtype)}
    elif chosen.keys or chosen.dtype:
        parser.error(f"--keys and --dtype are for {' and '.join(_RECODES)}")
    try:
        _MODES[chosen.mode](chosen.src, chosen.dst, **given)
    except AiockptError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.write(f"converted {chosen.src} to {chosen.dst}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
