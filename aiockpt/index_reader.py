"""Opening a checkpoint: from its files to what it holds, checked."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import Index, ItemPlace, ObjectEntry, TensorEntry
from aiockpt.format.manifest import MANIFEST_NAME, Manifest, decode_manifest
from aiockpt.format.metadata import METADATA_NAME, decode_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiockpt.storage.base import Source


def read_index(source: Source, path: str) -> tuple[Index, Manifest | None]:
    """Read and check what describes a checkpoint. Blocks.

    Raises:
        CorruptCheckpointError: naming the file that is missing, cut short or damaged.
    """
    manifest = None
    if MANIFEST_NAME in source.files:
        manifest = _with_path(path, decode_manifest, _read_file(source, MANIFEST_NAME))
        for name, facts in manifest.files.items():
            size = source.files.get(name)
            if size is None:
                raise CorruptCheckpointError(f"{path} lacks its file {name}; use an older checkpoint")
            if size != facts.nbytes:
                raise CorruptCheckpointError(
                    f"{path}/{name} has {size} bytes but was written with {facts.nbytes}: it was truncated or "
                    "changed. Use an older checkpoint."
                )
    metadata = _read_file(source, METADATA_NAME)
    facts_of = {} if manifest is None else manifest.files
    if METADATA_NAME in facts_of and crc32(metadata) != facts_of[METADATA_NAME].crc:
        raise CorruptCheckpointError(f"{path}/{METADATA_NAME} does not match its CRC; use an older checkpoint")
    index = _with_path(path, decode_metadata, metadata)
    for name, entry in index.entries.items():
        places = [entry.place] if isinstance(entry, ObjectEntry) else [c.place for c in getattr(entry, "chunks", ())]
        for place in places:
            _check_place(path, name, place, source.files)
        if isinstance(entry, TensorEntry):
            if _overlap(entry):
                raise CorruptCheckpointError(f"{path}: chunks of {name} overlap; its metadata is damaged")
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != math.prod(entry.shape) or entry.nbytes > sum(place.length for place in places):
                raise CorruptCheckpointError(f"{path} does not hold all of {name}; its metadata is damaged")
    return index, manifest


def _overlap(entry: TensorEntry) -> bool:
    """Tell whether two of the chunks hold the same element; for very many chunks it is not looked into."""
    chunks = entry.chunks if len(entry.chunks) <= 256 else ()
    return any(
        all(
            a < b + m and b < a + n
            for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        )
        for one, other in combinations(chunks, 2)
    )


def _with_path(path: str, decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except LoadError as exc:
        raise type(exc)(f"{path}: {exc}") from exc


def _check_place(path: str, name: str, place: ItemPlace, files: Mapping[str, int]) -> None:
    size = files.get(place.file)
    if size is None:
        if place.file.startswith(("/", "..")) or ".." in place.file.split("/"):
            return  # refused where files are opened, as unsafe
        raise CorruptCheckpointError(f"{path} lacks the file {place.file}, which holds {name}; use an older checkpoint")
    if place.offset + place.length > size:
        raise CorruptCheckpointError(
            f"{path}/{place.file} ends at byte {size}, but {name} is at bytes {place.offset} to "
            f"{place.offset + place.length}: it was truncated. Use an older checkpoint."
        )


def _read_file(source: Source, name: str) -> bytes:
    data = bytearray(source.files[name])
    source.read(name, 0, memoryview(data))
    return bytes(data)
