"""Conversions between checkpoints, ``torch.save`` files and safetensors, in bounded memory.

The names of those for ``torch.save`` files are those of ``torch.distributed.checkpoint.format_utils``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import torch

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.dcp.broadcast import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, EmptyStateDictLoadPlanner
from aiockpt.dcp.convert import Recoding
from aiockpt.format.keys import check_patterns
from aiockpt.format.manifest.manifest import JsonValue, check_user_metadata
from aiockpt.format.names import SUFFIX
from aiockpt.options import LoadOptions, Path, check_options, check_progress
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.safetensors_plan import SafetensorsFormat
from aiockpt.planning.torch_plan import TorchFormat
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.planning.planner import FileFormat
    from aiockpt.telemetry.progress import OnProgress

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "EmptyStateDictLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "convert_checkpoint",
    "convert_checkpoint_async",
    "dcp_to_torch_save",
    "dcp_to_torch_save_async",
    "torch_save_to_dcp",
    "torch_save_to_dcp_async",
]

_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner  # torch's name of it
_STAGING_BYTES = 128 << 20
_FILES = 4  # of a DCP checkpoint, as a save writes it
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes to cast to, by the names that command lines take."""

P = ParamSpec("P")


def _blocking(prepare: Callable[P, Recoding]) -> Callable[P, None]:
    """Return the function that does what another one prepares."""

    @functools.wraps(prepare)
    def convert(*args: P.args, **kwargs: P.kwargs) -> None:
        conversion = prepare(*args, **kwargs)
        with SyncCheckpointer(process_group=None, staging_bytes=conversion.staging_bytes) as checkpointer:
            conversion.start(checkpointer).result()

    convert.__signature__ = inspect.signature(prepare).replace(return_annotation="None")  # type: ignore[attr-defined]
    return convert


def _async_form(convert: Callable[P, None]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Return the coroutine function of a conversion."""
    prepare: Callable[P, Recoding] = convert.__wrapped__  # type: ignore[attr-defined]

    async def convert_async(*args: P.args, **kwargs: P.kwargs) -> None:
        conversion = prepare(*args, **kwargs)
        async with AsyncCheckpointer(process_group=None, staging_bytes=conversion.staging_bytes) as checkpointer:
            await conversion.start(checkpointer).wait()

    name = convert.__name__
    convert_async.__name__ = convert_async.__qualname__ = f"{name}_async"
    convert_async.__doc__ = f"Do the same as `{name}`, in other threads. Cancelling it removes what was written."
    convert_async.__signature__ = inspect.signature(convert)  # type: ignore[attr-defined]
    return convert_async


@_blocking
def dcp_to_torch_save(
    dcp_checkpoint_dir: Path,
    torch_save_path: Path,
    *,
    overwrite: bool = True,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
) -> Recoding:
    """Convert a checkpoint to a file that ``torch.load`` reads. Blocks.

    The file appears atomically, complete and durable; if the conversion fails, whatever was there before stays. It
    holds what ``load()`` of the checkpoint returns, with tied tensors stored once. At most some 100 MB of tensors are
    in memory at a time; objects are read as a whole.

    Args:
        dcp_checkpoint_dir: a checkpoint of ``torch.distributed.checkpoint``, of any number of ranks, or of any other
            format that we load.
        torch_save_path: the file to write.
        overwrite: replace an existing file of torch.save or safetensors; if it is a link, the link is replaced.
        verify: see `convert_checkpoint`.
        safe_globals: see `convert_checkpoint`.
        trust: see `convert_checkpoint`.

    Raises:
        CheckpointExistsError: the file exists and ``overwrite`` is False, or it is a directory or a file of another
            kind. For other errors see `convert_checkpoint`.
    """
    options = _options(verify=verify, safe_globals=safe_globals, trust=trust)
    return Recoding(dcp_checkpoint_dir, torch_save_path, lambda _: TorchFormat(), options, {}, overwrite)


dcp_to_torch_save_async = _async_form(dcp_to_torch_save)


@_blocking
def torch_save_to_dcp(
    torch_save_path: Path,
    dcp_checkpoint_dir: Path,
    *,
    overwrite: bool = True,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    staging_bytes: int = _STAGING_BYTES,
) -> Recoding:
    """Convert a ``torch.save`` file to a checkpoint that ``dcp.load`` reads. Blocks.

    The checkpoint appears atomically, complete and durable; if the conversion fails, whatever was there before stays.
    The directory may hold other files, even the one that is converted: they stay. At most some 100 MB of tensors are
    in memory; a file that only torch itself can read is loaded by it, and saved through ``staging_bytes`` of memory.

    Args:
        torch_save_path: a file with a state dict.
        dcp_checkpoint_dir: the checkpoint's directory.
        overwrite: replace an existing checkpoint, if nothing else is in its directory.
        verify: see `convert_checkpoint`.
        safe_globals: see `convert_checkpoint`.
        trust: see `convert_checkpoint`.
        staging_bytes: staging memory, in bytes.

    Raises:
        LoadError: the file can't be read, or holds no state dict. For other errors see `convert_checkpoint`.
    """
    options = _options(verify=verify, safe_globals=safe_globals, trust=trust)
    return Recoding(
        torch_save_path,
        dcp_checkpoint_dir,
        lambda _: DcpFormat(_FILES),
        options,
        {},
        overwrite,
        staging_bytes,
        is_torch_save=True,
    )


torch_save_to_dcp_async = _async_form(torch_save_to_dcp)


@_blocking
def convert_checkpoint(
    path: Path,
    target: Path,
    *,
    to: Literal["dcp", "torch", "safetensors"],
    keys: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    progress: OnProgress | None = None,
) -> Recoding:
    """Convert a checkpoint of any format that we load to any format that we save, in bounded memory. Blocks.

    The result appears atomically, complete and durable; if the conversion fails, whatever was there before stays. At
    most some 100 MB of tensors are in memory; objects are read as a whole. Objects of DCP checkpoints are copied to
    other DCP checkpoints without being unpickled. Metadata of the user's is kept, but for files of torch.save, which
    have no place for it. Tensors are stored row by row::

        convert_checkpoint("runs/a/step-100", "model.pt", to="torch", keys="model", dtype=torch.bfloat16)

    Args:
        path: the checkpoint.
        target: a directory; for "torch" a file; for "safetensors" a directory, or a file whose name ends in
            ``.safetensors``.
        to: the format. "dcp" is that of `aiockpt.AsyncCheckpointer.save` and of ``torch.distributed.checkpoint``.
        keys: convert only these: names, names of containers, and glob patterns; see `aiockpt.AsyncCheckpointer.load`.
        dtype: cast floating-point tensors to this dtype.
        shard_bytes: of safetensors; see `aiockpt.AsyncCheckpointer.save`.
        fqn_to_index_mapping: see there.
        metadata: JSON values in place of the user's metadata of the checkpoint.
        overwrite: replace an existing checkpoint.
        verify: check the CRC of everything that is read, if it has one; large tensors are read once more for that.
        safe_globals: classes and functions that pickled objects may use, in addition to those that torch allows.
        trust: unpickle objects without restriction, which runs whatever code they ask for.
        progress: a function that is called while the conversion runs, as that of `aiockpt.AsyncCheckpointer.load`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: it is unfinished, truncated or changed.
        MissingKeysError: it has none of some keys.
        UnsafeCheckpointError: an object needs something that was not allowed.
        SaveError: safetensors can't hold a key: it is no tensor, or of a dtype without a name.
        CheckpointExistsError: something is there that may not be replaced.
        WriteError, CommitError: the files can't be written.
        ValueError: there is no such format, or it does not have one of the options.
    """
    options = _options(keys=keys, dtype=dtype, verify=verify, safe_globals=safe_globals, trust=trust)
    check_progress(progress)
    is_file = os.fspath(target).endswith(SUFFIX)
    forms: dict[str, Callable[[dict[str, JsonValue]], FileFormat]] = {
        "dcp": lambda _: DcpFormat(_FILES),
        "torch": lambda _: TorchFormat(),
        "safetensors": partial(
            SafetensorsFormat, single_file=is_file, shard_bytes=shard_bytes, file_of=fqn_to_index_mapping
        ),
    }
    if to not in forms:
        raise ValueError(f"to must be 'dcp', 'torch' or 'safetensors', not {to!r}")
    if to != "safetensors" and (shard_bytes is not None or fqn_to_index_mapping is not None):
        raise ValueError("shard_bytes= and fqn_to_index_mapping= are for to='safetensors'")
    forms[to]({})  # raises now what is wrong with its options
    facts = None if metadata is None else check_user_metadata(metadata)
    return Recoding(path, target, forms[to], options, facts, overwrite, progress=progress)


convert_checkpoint_async = _async_form(convert_checkpoint)


def _options(keys: str | Sequence[str] | None = None, **others: Any) -> LoadOptions:
    """Return the options of a load after checking them."""
    options = LoadOptions(keys=check_patterns(keys), **others)
    check_options(options, into=False)
    return options
