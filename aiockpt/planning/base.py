"""The checkpoint that a delta save is based on: what it stores, and what is remembered of the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field

if TYPE_CHECKING:
    from aiockpt.format.hashes import NewHash
    from aiockpt.format.manifest.columnar_index import IndexedEntries, ItemForm
    from aiockpt.format.manifest.manifest import FileFacts, Manifest

SINCE_FULL = "since_full"
"""Of the manifest's totals: how many delta saves, one upon the other, lie between a full save and this checkpoint."""


class BaseItem(NamedTuple):
    """A whole tensor in the base."""

    form: ItemForm
    file: str
    offset: int  # in bytes
    crc: int
    hash: str | None  # None: it changed from save to save


@dataclass(frozen=True, slots=True)
class BaseContents:
    """The files and items that a base stores."""

    path: str
    items: Mapping[str, BaseItem] = field(repr=False)  # by key
    files: Mapping[str, FileFacts] = field(repr=False)
    since_full: int


def contents_of(path: str, manifest: Manifest) -> BaseContents | None:
    """Return what a checkpoint stores, by its manifest; None if that has no hashes, or the items are transformed."""
    entries: Any = None if manifest.index is None else manifest.index.entries
    if entries is None or entries.hash_of is None or manifest.transformed or manifest.disks:
        return None
    since = manifest.totals.get(SINCE_FULL, 0)
    return BaseContents(path, dict(_whole_items(entries)), manifest.files, since if type(since) is int else 0)


def _whole_items(entries: IndexedEntries) -> Iterator[tuple[str, BaseItem]]:
    names, parts = entries.names, entries.parts
    rows = range(len(names)) if parts is None else parts.begin_of.tolist()
    divisions = [-1] * len(names) if parts is None else parts.division_of.tolist()
    columns = (entries.form_of, entries.file_of, entries.offset_of, entries.crc_of)
    forms, files, offsets, crcs = (column.tolist() for column in columns)
    hashes = entries.hash_of or ()
    for name, row, division in zip(names, rows, divisions, strict=True):
        if division < 0 and forms[row] >= 0:
            file = entries.files[files[row]]
            yield name, BaseItem(entries.forms[forms[row]], file, offsets[row], crcs[row], hashes[row])


class BaseMemory:
    """The memory of a checkpointer from save to save. For the engine's loop."""

    def __init__(self) -> None:
        self.path: str | None = None  # of the last checkpoint that it has written, or else restored
        self.calmed: frozenset[str] = frozenset()  # keys without a hash there that did not change at that save
        self.layout: Any = None  # of the last delta save, with what it was made from
        self._has_written = False

    def restored(self, path: str) -> None:
        """Note a checkpoint that was loaded: it is the base until one is written."""
        if not self._has_written:
            self.path, self.calmed = path, frozenset()

    def written(self, path: str, calmed: frozenset[str]) -> None:
        """Note a checkpoint that was written."""
        self.path, self.calmed, self._has_written = path, calmed, True


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """How a save keeps hashes, and upon what it is based."""

    new_hash: NewHash
    memory: BaseMemory = field(repr=False)
    path: str | None = None  # of the base
    is_auto: bool = False  # the base is the one that the memory has
    full_every: int | None = None
