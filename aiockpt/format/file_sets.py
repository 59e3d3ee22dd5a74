"""Checkpoints of several files: a set with an index, a set by the numbers in its names, and the shards of ranks.

Sources of the names: ``save_pretrained`` of https://github.com/huggingface/transformers, which writes an index for
safetensors and for files of ``torch.save``; for shards ``torch/distributed/checkpoint/_hf_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.dcp.joined import JoinedTensor
from aiockpt.format.index import Index, TensorEntry
from aiockpt.format.recognise import PART
from aiockpt.format.safetensors.reader import HeaderError, parse_object, shared_names

# --- sets without an index ------------------------------------------------------------------------------


def check_alone(name: str, index: Index, folder: str) -> str | None:
    """Return a warning if a file that is read alone is a part of a set; raise LoadError if it holds shards."""
    part = PART.fullmatch(name)
    rank = part and part[1]
    if rank or index.is_part:
        raise LoadError(
            f"{name} holds the shards of {f'rank {int(rank)}' if rank else 'one rank'} alone, not whole tensors: name "
            f"the directory with the files of all ranks, {folder}"
        )
    if part is None or int(part[4]) < 2:
        return None
    return f"{name} is part {int(part[3])} of {int(part[4])}, and the others were not read; for all, name {folder}"


def join_files(headers: Mapping[str, Index]) -> Index:
    """Return one index of the files of a set without an index, from the index of each, with shards of ranks joined."""
    if len(headers) == 1:
        return next(iter(headers.values()))
    holders: dict[str, list[str]] = {}
    for file, header in headers.items():
        for key in header.entries:
            holders.setdefault(key, []).append(file)
    is_of_ranks = all(part and part[1] for part in map(PART.fullmatch, headers))
    joined = {}
    for key, files in holders.items():
        if files[1:] and not is_of_ranks:
            raise CorruptCheckpointError(
                f"{key} is in both {files[0]} and {files[1]}: the files are of different saves"
            )
        found = [headers[file].entries[key] for file in files]
        joined[key] = _join_shards(key, found) if is_of_ranks else found[0]
    index = next(iter(headers.values()))
    metadata = {key: value for header in headers.values() for key, value in header.metadata.items()}
    return Index(joined, {key: (key,) for key in joined}, metadata=metadata, format=index.format)


def _join_shards(key: str, shards: Sequence[Any]) -> TensorEntry:
    """Return the tensor of some shards: as large as they reach, because none says how large it is."""
    first = shards[0]
    if any((each.dtype, len(each.shape)) != (first.dtype, len(first.shape)) for each in shards):
        raise CorruptCheckpointError(f"the shards of {key} differ in dtype or dimensions: they are of different saves")
    shape = tuple(map(max, zip(*(each.shape for each in shards), strict=True)))
    joined = JoinedTensor(TensorEntry(first.dtype, shape, ()))
    for each in shards:
        joined.add(chunk for chunk in each.chunks if math.prod(chunk.sizes))  # a rank without rows has an empty shard
    if joined.lacking > 0:
        raise CorruptCheckpointError(
            f"it lacks {joined.lacking} elements of {key} with the shape {shape}: files of some ranks, shard-..., are "
            "missing. Add them, or use an older checkpoint"
        )
    return joined.entry._replace(chunks=tuple(joined.chunks.values()) or first.chunks)


# --- sets with an index -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The contents of a ``*.safetensors.index.json`` or ``*.bin.index.json``."""

    weight_map: Mapping[str, str]  # the file of each tensor, relative to the index
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the whole set, such as ``total_size``

    @property
    def files(self) -> Sequence[str]:
        """Files of the set, each once, in the order of the map."""
        return tuple(dict.fromkeys(self.weight_map.values()))


def decode_shard_index(name: str, data: bytes) -> ShardIndex:
    """Decode the index of a set of files; raise UnsafeCheckpointError if it leads out of its directory."""
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
    """Return whether a path may lead out of a directory, here or on a system with drives and backslashes."""
    parts = file.split("/")
    return not {"", ".", ".."}.isdisjoint(parts) or not {"\\", ":", "\0"}.isdisjoint(file) or not file.isprintable()


def merge_shards(name: str, shards: ShardIndex, headers: Mapping[str, Index]) -> Index:
    """Return one index of a set of files, from the index of each file.

    The map decides what belongs to the set: a tensor that it does not assign to the file that holds it is left out,
    because it may be left from another save. A name that a file has only as a shared one is found as well. The map's
    metadata takes precedence over that of the files.
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
    first = next(iter(headers.values()), Index({}, {}, format="safetensors"))
    return Index(entries, {key: (key,) for key in entries}, metadata=metadata, format=first.format)
