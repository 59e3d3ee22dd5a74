"""Checkpoints of ranks that saved without each other (``use_collectives=False``): each rank has metadata of its own.

Their parts are joined to one index. Of values that several ranks have, the lowest rank's are taken, as a save with
collectives takes those of one rank.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.index import Index, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from aiockpt.format.index import ChunkEntry, Entry, ObjPath

_METADATA = re.compile(r"__(0|[1-9][0-9]{0,8})\.metadata")
_DATA = re.compile(r"__(0|[1-9][0-9]{0,8})_[0-9]+\.distcp")
_MOST_SHOWN = 10


def rank_metadata(files: Iterable[str]) -> dict[int, str]:
    """Return the metadata files of ranks that saved alone, by rank."""
    return dict(sorted((int(match[1]), match[0]) for match in map(_METADATA.fullmatch, files) if match))


@dataclass(eq=False, slots=True)
class _Tensor:
    """A tensor of several ranks."""

    entry: TensorEntry
    chunks: dict[str, ChunkEntry] = field(default_factory=dict)  # by text, whose hash can't be foreseen
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
    """Join the ranks' indexes; ``files`` are those of the checkpoint. The result is still to be checked.

    Raises:
        CorruptCheckpointError: ranks are missing; it names them.
        LoadError: ranks have different things of one name.
    """
    entries: dict[str, Entry] = {}
    paths: dict[str, ObjPath] = {}
    tensors: dict[str, _Tensor] = {}
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
            tensors.setdefault(name, _Tensor(entry)).add(entry.chunks)
    _check_complete(parts, files, tensors)
    for name, tensor in tensors.items():
        entries[name] = tensor.entry._replace(chunks=tuple(tensor.chunks.values()))
    return Index(entries, paths, is_transformed=any(part.is_transformed for part in parts.values()))


def _different(name: str, rank: int) -> LoadError:
    return LoadError(
        f"rank {rank}, which saved alone, has a {name} of another dtype or shape than a rank before it, so they can't "
        "be joined; load each rank's part with dcp.load"
    )


def _check_complete(parts: Mapping[int, Index], files: Collection[str], tensors: Mapping[str, _Tensor]) -> None:
    """Raise if ranks are missing: by the numbers of the others, by their data files, or by what tensors lack."""
    written = [int(match[1]) for match in map(_DATA.fullmatch, files) if match]
    ranks = known = 1 + max([*parts, *written])
    reason = ""
    for name, tensor in tensors.items():
        lacking, whole = tensor.lacking, math.prod(tensor.entry.shape)
        if lacking < 0:
            raise CorruptCheckpointError(
                f"the parts that ranks saved alone of {name} overlap; if some are left from a save with other ranks, "
                "remove their files"
            )
        if lacking:
            ranks = max(ranks, len(parts) + (-(-lacking // tensor.most) if tensor.most else 1))
            reason = reason or f": {lacking} of the {whole} elements of {name} are not there"
    count = ranks - len(parts)
    if count:
        missing = list(islice((rank for rank in range(ranks) if rank not in parts), _MOST_SHOWN))
        more = f" and {count - len(missing)} more" if count > len(missing) else ""
        least = " at least" if ranks > known else ""
        raise CorruptCheckpointError(
            f"it lacks the part of rank {', '.join(map(str, missing))}{more}{least}{reason}. Each rank saved alone: "
            f"add what is missing, such as __{missing[0]}.metadata, or use an older checkpoint"
        )
