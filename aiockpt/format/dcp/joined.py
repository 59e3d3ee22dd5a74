"""Checkpoints that are more than one `.metadata`: of ranks that saved without each other, and of Megatron-Core.

Metadata of ranks that saved without each other is beside that of the others (``use_collectives=False``), or in a
directory for each rank (``no_dist=True``). Their parts are joined to one index. Of values that several ranks have, the
lowest rank's are taken, as a save with collectives takes those of one rank; `aiockpt.reading.copies` compares them.

Megatron-Core stores what is not sharded in a file of ``torch.save``, ``common.pt``, and its loader merges the two.
Source: ``megatron/core/dist_checkpointing/serialization.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import ChunkEntry, Entry, Index, ItemRange, ObjectEntry, ObjPath, TensorEntry
from aiockpt.format.names import COMMON_NAME, METADATA_NAME
from aiockpt.format.recognise import known_ranks

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
    chunks: dict[str, ChunkEntry] = field(default_factory=dict)  # by text, whose hash is salted
    elements: int = 0  # in all chunks
    most: int = 0  # that one rank has

    def add(self, chunks: Iterable[ChunkEntry]) -> None:
        mine = 0
        for chunk in chunks:
            nbytes = math.prod(chunk.sizes)
            mine += nbytes
            if self.chunks.setdefault(f"{chunk.offsets} {chunk.sizes}", chunk) is chunk:
                self.elements += nbytes
        self.most = max(self.most, mine)

    @property
    def lacking(self) -> int:
        return math.prod(self.entry.shape) - self.elements


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
