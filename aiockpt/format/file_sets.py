"""Checkpoints of several files: of ranks, of Megatron-Core, sets with an index, and sets by the numbers in their names.

Metadata of ranks that saved without each other is beside that of the others (``use_collectives=False``), or in a
directory for each rank (``no_dist=True``). Their parts are joined to one index. Of values that several ranks have, the
lowest rank's are taken, as a save with collectives takes those of one rank; `aiockpt.reading.open` compares them.

Megatron-Core stores what is not sharded in a file of ``torch.save``, ``common.pt``, and its loader merges the two.
Source: ``megatron/core/dist_checkpointing/serialization.py``.

Sources of the names: ``save_pretrained`` of https://github.com/huggingface/transformers, which writes an index for
safetensors and for files of ``torch.save``; for shards ``torch/distributed/checkpoint/_hf_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import Entry, Index, ItemRange, ObjectEntry, ObjPath, StoredChunk, TensorEntry, lacking_of
from aiockpt.format.layouts import SHARD_ALONE, leads_out, plain_name
from aiockpt.format.names import COMMON_NAME, METADATA_NAME
from aiockpt.format.recognise import PART, known_ranks
from aiockpt.format.safetensors.reader import HeaderError, parse_object, shared_names

_MOST_SHOWN = 10


def in_directory(index: Index, folder: str) -> Index:
    """Return an index whose files are in a directory."""
    if not folder:
        return index

    def moved(place: ItemRange) -> ItemRange:
        return place._replace(file=f"{folder}/{place.file}")

    entries: dict[str, Entry] = {}
    for name, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            chunks = tuple([chunk._replace(place=moved(chunk.place)) for chunk in entry.chunks])
            entries[name] = entry._replace(chunks=chunks)
        elif isinstance(entry, ObjectEntry):
            entries[name] = ObjectEntry(moved(entry.place))
    return replace(index, entries=entries)


@dataclass(eq=False, slots=True)
class JoinedTensor:
    """A tensor of several ranks, with the chunks of each; of equal ones the first is taken."""

    entry: TensorEntry
    chunks: dict[str, StoredChunk] = field(default_factory=dict)  # by text, whose hash is salted
    most: int = 0  # that one rank has

    def add(self, chunks: Iterable[StoredChunk]) -> None:
        mine = 0
        for chunk in chunks:
            self.chunks.setdefault(f"{chunk.offsets} {chunk.sizes}", chunk)
            mine += math.prod(chunk.sizes)
        self.most = max(self.most, mine)

    @property
    def lacking(self) -> int:
        return lacking_of(self.entry.shape, (chunk.sizes for chunk in self.chunks.values()))


def join_ranks(parts: Mapping[int, Index], files: Collection[str]) -> Index:
    """Join the ranks' indexes, unless some are missing or do not fit; the result is still to be checked.

    ``files`` are those of the checkpoint, from which missing ranks are known.
    """
    entries: dict[str, Entry] = {}
    paths: dict[str, ObjPath] = {}
    tensors: dict[str, JoinedTensor] = {}
    for rank, part in sorted(parts.items()):
        for name, entry in part.entries.items():
            known = entries.setdefault(name, entry)
            if known is entry:
                paths[name] = part.paths[name]
            if not isinstance(entry, TensorEntry):
                if isinstance(known, TensorEntry):
                    raise _different(name, rank)
                continue
            if not isinstance(known, TensorEntry) or known[:2] != entry[:2]:
                raise _different(name, rank)
            tensors.setdefault(name, JoinedTensor(entry)).add(entry.chunks)
    _check_complete(parts, files, tensors)
    for name, tensor in tensors.items():
        entries[name] = tensor.entry._replace(chunks=tuple(tensor.chunks.values()))
    return Index(entries, paths, is_transformed=any(part.is_transformed for part in parts.values()))


def _different(name: str, rank: int) -> LoadError:
    return LoadError(
        f"rank {rank}, which saved alone, has a {name} of another dtype or shape than a rank before it, so they can't "
        "be joined; load each rank's part with dcp.load"
    )


def _check_complete(parts: Mapping[int, Index], files: Collection[str], tensors: Mapping[str, JoinedTensor]) -> None:
    """Raise if ranks are missing: by the numbers of the others, by their data files, or by what tensors lack."""
    known = known_ranks(parts, files)
    # If the last ranks are missing, no number says so. What tensors lack tells how many they are at least, because
    # sharding gives later ranks no larger shares.
    reason, later = "", 0
    for name, tensor in tensors.items():
        lacking, whole = tensor.lacking, math.prod(tensor.entry.shape)
        if lacking < 0:
            raise CorruptCheckpointError(
                f"the parts that ranks saved alone of {name} overlap; if some are left from a save with other ranks, "
                "remove their files"
            )
        if lacking:
            later = max(later, -(-lacking // tensor.most) if tensor.most else 1)
            reason = reason or f": {lacking} of the {whole} elements of {name} are not there"
    least = " at least" if known == len(parts) else ""
    ranks = known + later if least else known
    count = ranks - len(parts)
    if count:
        missing = list(islice((rank for rank in range(ranks) if rank not in parts), _MOST_SHOWN))
        more = f" and {count - len(missing)} more" if count > len(missing) else ""
        raise CorruptCheckpointError(
            f"it lacks the part of rank {', '.join(map(str, missing))}{more}{least}{reason}. Each rank saved alone, "
            "with metadata of its own: add that of these ranks with its data files, or use an older checkpoint"
        )


def join_common(index: Index, common: Index) -> Index:
    """Return an index with the entries of ``common.pt`` after its own."""
    for key in common.entries:
        if key in index.entries:
            raise CorruptCheckpointError(
                f"{key} is in both {METADATA_NAME} and {COMMON_NAME}: they are of different saves"
            )
    containers = [{**each, "at": each["at"] + len(index.paths)} for each in common.containers if each["path"]]
    return replace(
        index,
        entries={**index.entries, **common.entries},
        paths={**index.paths, **common.paths},
        containers=[*index.containers, *containers],
    )


# --- sets without an index ------------------------------------------------------------------------------


def check_alone(name: str, index: Index, folder: str) -> str | None:
    """Return a warning if a file that is read alone is a part of a set; raise CorruptCheckpointError for shards."""
    part = PART.fullmatch(name)
    if index.is_part:
        raise CorruptCheckpointError(f"{SHARD_ALONE}, {folder}")
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


class ShardIndex(NamedTuple):
    """The contents of a ``*.safetensors.index.json`` or ``*.bin.index.json``."""

    weight_map: Mapping[str, str]  # the file of each tensor, relative to the index
    metadata: Mapping[str, Any]  # of the whole set, such as ``total_size``


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
        if leads_out(plain_name(file)):
            raise UnsafeCheckpointError(
                f"{name} puts the tensor {key!r} into {file!r}, which is not a plain path below the index; "
                "nothing was read. Correct the index if you trust it."
            )
    return ShardIndex({key: plain_name(file) for key, file in weight_map.items()}, metadata or {})


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
    containers = first.containers if first.format == "safetensors" else ()
    paths: dict[str, ObjPath] = {key: (key,) for key in entries}
    return Index(entries, paths, containers, metadata, first.format, versions=first.versions)
