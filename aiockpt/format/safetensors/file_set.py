"""Sets of safetensors files: the index that says which file holds which tensor, and what the set holds.

Source of the layout: ``save_pretrained`` of https://github.com/huggingface/transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError
from aiockpt.format.index import Index
from aiockpt.format.safetensors.header import HeaderError, parse_object, shared_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The contents of a ``*.safetensors.index.json``.

    Attributes:
        weight_map: for each tensor the file that holds it, relative to the index.
        metadata: facts about all of it, such as ``total_size``.
    """

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> Sequence[str]:
        """The files of the set, each once, in the order of the map."""
        return tuple(dict.fromkeys(self.weight_map.values()))


def decode_shard_index(name: str, data: bytes) -> ShardIndex:
    """Read the index of a set of safetensors files.

    Args:
        name: the index file, for messages.
        data: all of its bytes.

    Raises:
        CorruptCheckpointError: it is not such an index.
        UnsafeCheckpointError: it names a file outside of its directory.
    """
    try:
        document = parse_object(data)
        weight_map, metadata = document.get("weight_map"), document.get("metadata")
        if type(weight_map) is not dict or not all(type(file) is str for file in weight_map.values()):
            raise HeaderError("has no weight_map of tensor names to file names")
        if metadata is not None and type(metadata) is not dict:
            raise HeaderError("has a metadata that is no JSON object")
    except HeaderError as exc:
        raise CorruptCheckpointError(f"{name} {exc}; restore it from where it came") from exc
    for key, file in weight_map.items():
        if _leads_out(file):
            raise UnsafeCheckpointError(
                f"{name} puts the tensor {key!r} into {file!r}, which is not a plain path below the index; "
                "nothing was read. Correct the index if you trust it."
            )
    return ShardIndex(weight_map, metadata or {})


def _leads_out(file: str) -> bool:
    """Tell whether a path may lead out of a directory, here or on a system with drives and backslashes."""
    parts = file.split("/")
    return not {"", ".", ".."}.isdisjoint(parts) or not {"\\", ":", "\0"}.isdisjoint(file) or not file.isprintable()


def merge_shards(name: str, shards: ShardIndex, headers: Mapping[str, Index]) -> Index:
    """Make one index of a set of files.

    The map decides what belongs to the set: a tensor of a file that the map does not give to that file is left
    out, for it may be left from another save. A name that the file has only as a shared one is found as well.
    The facts of the map go before those of the files.

    Args:
        name: the index file, for messages.
        shards: what it says.
        headers: what `decode_header` gave for each of its files.

    Raises:
        CorruptCheckpointError: naming a tensor and the file that should hold it and does not.
    """
    metadata: dict[str, Any] = {}
    shared: dict[str, dict[str, str]] = {}
    for file, header in headers.items():
        metadata |= header.metadata
        shared[file] = shared_names(header)
    entries = {}
    for key, file in shards.weight_map.items():
        found = headers.get(file)
        entry = None if found is None else found.entries.get(shared[file].get(key, key))
        if entry is None:
            raise CorruptCheckpointError(
                f"{name} says that the tensor {key!r} is in {file}, "
                + ("which is missing" if found is None else "which does not hold it")
                + ": the files are of different saves, or incomplete. Get the set again."
            )
        entries[key] = entry
    metadata |= shards.metadata
    return Index(entries, {key: (key,) for key in entries}, metadata=metadata, format="safetensors")
