"""The items that a state has from its last load, so that the next one reads only those whose bytes have changed.

Bytes are known to be the same by strong hashes in the index. A CRC-32 and a size are no proof: without hashes, every
item counts as changed. That the state still has the bytes is known by the memory of its tensors, which is compared by
storage, and by their version counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from aiockpt.core.extent import extent_of
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.reading.reach import LOADING, Reach

if TYPE_CHECKING:
    from aiockpt.format.index import Entry
    from aiockpt.reading.read_plan import TensorRead
    from aiockpt.reading.target_plan import TargetPlan


class _KnownItem(NamedTuple):
    """The memory of a tensor of the state, and the content that filled it."""

    storage: Any  # a StorageWeakRef: while it lives, no other storage has its address
    version: int
    content: tuple[Any, ...]


@dataclass(eq=False)
class KnownItems:
    """The items that one state has. Loads use it one after the other."""

    names: list[str] = field(default_factory=list)  # of what the last load has read
    _held: dict[Any, _KnownItem] = field(default_factory=dict)
    _next: dict[Any, tuple[torch.Tensor, tuple[Any, ...]]] = field(default_factory=dict)

    def leave_out(self, plan: TargetPlan, entries: Mapping[str, Entry]) -> None:
        """Remove from a plan the reads of what the state has; forget all until `settle`, as the load may fail."""
        held, self._held, self._next = self._held, {}, {}
        hashes, left, reach = _hashes(entries), [], Reach(LOADING)
        reach.sees(plan.code)  # which changes tensors after they were filled
        changed = reach.comes_to([(0, 0) if read.target is None else extent_of(read.target) for read in plan.reads])
        for read, may_change in zip(plan.reads, changed, strict=True):
            content, place = _content(read, hashes), _place(read)
            if content is not None and place is not None and not may_change:
                assert read.target is not None
                self._next[place] = read.target, content
                known = held.get(place)
                if (
                    known is not None
                    and known.content == content
                    and not known.storage.expired()
                    and known.version == read.target._version
                ):
                    continue
            left.append(read)
        plan.reads = left
        self.names = list(dict.fromkeys([*plan.names, *plan.fresh]))

    def settle(self) -> None:
        """Note what the state has, when the load has ended well: `load_state_dict` has been called too."""
        for place, (target, content) in self._next.items():
            self._held[place] = _KnownItem(_weak_reference(target.untyped_storage()), target._version, content)
        self._next = {}

    def forget(self) -> None:
        """Have the next load read everything."""
        self._held, self._next = {}, {}


_weak_reference: Any = reductions.StorageWeakRef  # which has no types


def _hashes(entries: Mapping[str, Entry]) -> dict[tuple[str, int], str]:
    """Return the hashes of items by file and offset."""
    if not isinstance(entries, IndexedEntries) or entries.hash_of is None:
        return {}
    rows = zip(entries.file_of.tolist(), entries.offset_of.tolist(), entries.hash_of, strict=True)
    return {(entries.files[file], offset): digest for file, offset, digest in rows if digest is not None}


def _content(read: TensorRead, hashes: Mapping[tuple[str, int], str]) -> tuple[Any, ...] | None:
    """Return what a read brings, for comparison; None if that is not known."""
    chunk = read.chunk
    digest = hashes.get((chunk.place.file, chunk.place.offset))
    if digest is None or chunk.item is None:
        return None
    item = chunk.item
    view = (item.dtype, item.shape, item.stride, item.storage_offset, item.nbytes, item.conj, item.neg)
    return digest, view, chunk.offsets, chunk.sizes, read.selections, chunk.place.transforms


def _place(read: TensorRead) -> tuple[Any, ...] | None:
    """Return the memory that a read fills, and how it is seen; None if it can't be known again."""
    target = read.target
    if target is None or type(target) not in (torch.Tensor, torch.nn.Parameter) or target.layout != torch.strided:
        return None
    if target.is_inference() or target.is_meta:
        return None
    place = (target.untyped_storage()._cdata, target.storage_offset(), tuple(target.shape), target.stride())
    return read.name, *place, target.dtype, target.is_conj(), target.is_neg()
