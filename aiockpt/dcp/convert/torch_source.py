"""Opens ``torch.save`` files as state dicts whose tensors are mapped from the file."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import torch

from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import InlineEntry, TensorEntry
from aiockpt.format.item.objects import checked_sparse, extended_allow_list
from aiockpt.format.item.ziparchive import ZIP_MAGIC
from aiockpt.reading.assemble import build_state
from aiockpt.reading.executor import MapReader
from aiockpt.reading.open import read_index
from aiockpt.reading.verify.verify import verify_checkpoint

if TYPE_CHECKING:
    from aiockpt.options import LoadOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Source, Storage


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
    finally:
        with anyio.CancelScope(shield=True):
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
