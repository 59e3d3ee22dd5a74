"""The inventory of a verification: the files and items that a checkpoint should hold, and the segments to read them in.

Gaps, overlaps and missing files are found before any byte is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple

from isal.isal_zlib import crc32_combine

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.checks import cover_of, is_outside
from aiockpt.format.index import Entry, Index, InlineEntry, ItemRange, ObjectEntry, TensorEntry, TensorItem
from aiockpt.format.names import HIDDEN, METADATA_NAME

if TYPE_CHECKING:
    import torch

    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.telemetry.verification import Findings, ProblemKind

# --- extents that belong together, and the segments to read them in -------------------------------


_MAX_GAP_BYTES = 64 << 10  # read and thrown away, where that spares a read


@dataclass(eq=False, slots=True)
class Extent:
    """Bytes ``start`` to ``stop`` (exclusive) of a file that belong together: an item, or a part of one with a CRC."""

    start: int
    stop: int
    item: StoredItem
    streamed: bool = False  # they may be read piece by piece; else all of them must be in memory at once
    name: str = ""  # of the zip record; empty where the item has only one
    crc: int | None = None  # expected; None where it is unknown
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset, length and CRC-32 of each piece read


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``start`` to ``stop`` (exclusive) of a file, to be read in one go."""

    start: int
    stop: int
    extents: Sequence[Extent]  # those that lie within, or the streamed one of which this is a piece


def split_overlaps(extents: Sequence[Extent]) -> tuple[list[Extent], list[tuple[Extent, Extent]]]:
    """Return the extents that follow each other without overlap, and each other one with the one it overlaps."""
    clear: list[Extent] = []
    others: list[tuple[Extent, Extent]] = []
    for extent in sorted(extents, key=lambda extent: (extent.start, extent.stop)):
        if clear and extent.start < clear[-1].stop:
            others.append((extent, clear[-1]))
        else:
            clear.append(extent)
    return clear, others


def cut_segments(extents: Sequence[Extent], nbytes: int | None, most: int) -> Iterator[Segment]:
    """Cut a file into segments to read: all of its ``nbytes``, or only the extents if that is None.

    Extents come in order and without overlaps. A segment has at most ``most`` bytes, unless it is one extent that has
    to be in memory.
    """
    begin = end = 0
    held: list[Extent] = []
    for extent in extents:
        joins = nbytes is not None or (bool(held) and extent.start - end <= _MAX_GAP_BYTES)
        if joins and not extent.streamed and extent.stop - begin <= most:
            held.append(extent)
            end = extent.stop
            continue
        if held:
            yield Segment(begin, end, held)
        if nbytes is not None:
            yield from _pieces(end, extent.start, (), most)
        begin, end, held = extent.start, extent.stop, [extent]
        if extent.streamed:
            yield from _pieces(begin, end, held, most)
            begin, held = end, []
    if held:
        yield Segment(begin, end, held)
    if nbytes is not None:
        yield from _pieces(end, nbytes, (), most)


def _pieces(start: int, stop: int, extents: Sequence[Extent], most: int) -> Iterator[Segment]:
    for at in range(start, stop, most):
        yield Segment(at, min(at + most, stop), extents)


# --- files and items ------------------------------------------------------------------------------


_LARGE_BYTES = 1 << 20  # items of this size and more are streamed


class KeyRef(NamedTuple):
    """A key that is stored in an item, and what the item should hold."""

    key: str | None  # None where it is unknown
    dtype: torch.dtype | None = None  # None for objects
    sizes: tuple[int, ...] = ()  # of the chunk
    given: TensorItem | None = None  # the manifest's facts about the item


@dataclass(eq=False, slots=True)
class StoredItem:
    """An item of a file."""

    file: str
    start: int
    length: int
    kind: Literal["tensor", "object", "raw"]  # in a zip archive of its own, or the bare bytes of a tensor
    crc: int | None = None  # of raw bytes, if it is known
    covered: bool = False  # by a CRC of the whole file
    refs: list[KeyRef] = field(default_factory=list)
    inner: dict[int, list[KeyRef]] = field(default_factory=dict)  # torch.save file: the keys of each record's offset
    streams: list[Extent] = field(default_factory=list)  # of a large item

    @property
    def is_large(self) -> bool:
        """Whether it is streamed instead of read into memory whole."""
        return self.length >= _LARGE_BYTES

    def extent(self, *, streamed: bool = False, crc: int | None = None) -> Extent:
        """Return all of it as one extent."""
        return Extent(self.start, self.start + self.length, self, streamed=streamed, crc=crc)

    def extents(self) -> list[Extent]:
        return [stream for stream in self.streams if stream.start < stream.stop] if self.is_large else [self.extent()]


@dataclass(eq=False, slots=True)
class StoredFile:
    """A file to check."""

    name: str
    nbytes: int
    crc: int | None  # of the whole file; None: unknown, so only its items are read
    items: list[StoredItem] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset, length and CRC-32 of each piece read


def combined(parts: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Combine parts that follow each other, by offset, length and CRC-32; return the CRC-32 and length of all."""
    crc = length = 0
    for _, count, part in sorted(parts):
        crc, length = crc32_combine(crc, part, count), length + count
    return crc, length


# --- what should be there -------------------------------------------------------------------------


class Inventory:
    """The files and items that should be there, by the manifest's ``facts``; ``sizes`` has the files that exist."""

    def __init__(self, sizes: Mapping[str, int], facts: Mapping[str, FileFacts], findings: Findings) -> None:
        self._sizes = dict(sizes)
        self._findings = findings
        self._items: dict[tuple[object, ...], StoredItem] = {}
        self._referenced = set(facts)
        self.files: dict[str, StoredFile] = {}  # to check, by name
        self.entries = 0  # chunks of tensors, and objects
        for name, fact in facts.items():
            if not self._is_there(name):
                continue
            size = self._sizes[name]
            self.files[name] = StoredFile(name, size, fact.crc if size == fact.nbytes else None)
            if size != fact.nbytes:
                change = "was truncated" if size < fact.nbytes else "has grown"
                findings.add("size", name, f"it has {size} bytes but was written with {fact.nbytes}: it {change}")

    def _is_there(self, name: str) -> bool:
        """Return whether a file exists; report a missing one, which counts once."""
        if name in self._sizes:
            return True
        if is_outside(name):
            self._findings.add("unsafe path", name, "it leads out of the checkpoint and was not read")
        else:
            self._findings.add("missing file", name, "the checkpoint refers to it, but it is not there")
        return False

    def add_decoded(self, name: str, nbytes: int, file: str) -> None:
        """Add a virtual file: a transformed item of ``file``."""
        self._sizes[name] = nbytes
        self._referenced |= {name, file}

    def add(self, index: Index, given: Index | None, *, is_part: bool = False) -> None:
        """Add the items of an index; ``given`` is the manifest's index of the same items, if it has one."""
        if index.format == "torch":
            self._add_archive_of(index)
            return
        framed = index.format in ("aiockpt", "dcp")
        for key, entry in index.entries.items():
            if isinstance(entry, InlineEntry):
                self.entries += 1
            elif isinstance(entry, ObjectEntry):
                self._add_item(entry.place, "object", None, KeyRef(key))
            else:
                other = given.entries.get(key) if given is not None else None
                if not is_part:
                    self._check_coverage(key, entry)
                self._add_tensor(key, entry, other, framed=framed)

    def add_archive(self, name: str) -> StoredItem:
        """Add a file of ``torch.save``, with keys that are not known."""
        self._referenced.add(name)
        file = self.files.setdefault(name, StoredFile(name, self._sizes[name], None))
        item = StoredItem(name, 0, file.nbytes, "object", covered=file.crc is not None, refs=[KeyRef(None)])
        file.items.append(item)
        return item

    def _add_archive_of(self, index: Index) -> None:
        """Add ``torch.save`` files; each of their records may be the storage of several tensors."""
        archives: dict[str, StoredItem] = {}
        self.entries += len(index.entries)
        for key, entry in index.entries.items():
            for chunk in entry.chunks if isinstance(entry, TensorEntry) else ():
                name = chunk.place.file
                archive = archives.get(name) or archives.setdefault(name, self.add_archive(name))
                at = chunk.place.offset + (0 if chunk.item is None else chunk.item.payload_offset)
                archive.inner.setdefault(at, []).append(KeyRef(key))

    def _add_tensor(self, key: str, entry: TensorEntry, given: Entry | None, *, framed: bool) -> None:
        others = given.chunks if isinstance(given, TensorEntry) else ()
        for chunk, other in zip_longest(entry.chunks, others[: len(entry.chunks)]):
            item = chunk.item
            if item is None and other is not None and other.place == chunk.place:
                item = other.item
            ref = KeyRef(key, entry.dtype, chunk.sizes, item)
            if framed or chunk.item is None:
                self._add_item(chunk.place, "tensor", None, ref)
                continue
            place = chunk.place
            raw = ItemRange(place.file, place.offset + chunk.item.payload_offset, chunk.item.nbytes)
            self._add_item(raw, "raw", chunk.item.crc, ref)

    def _check_coverage(self, key: str, entry: TensorEntry) -> None:
        boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        cover = cover_of(entry.shape, boxes)
        if not cover.error:
            return
        first = entry.chunks[cover.wrong[0]].place if cover.wrong else None
        message = f"its {len(boxes)} chunks {cover.error} its shape {entry.shape}"
        if cover.lacking:
            whole = math.prod(entry.shape)
            held = f"its {len(boxes)} chunks hold {whole - cover.lacking} elements"
            message = f"{held}, but its shape {entry.shape} has {whole}"
        elif cover.wrong[1:]:
            one, other = (boxes[number] for number in cover.wrong)
            message = f"its chunk at {one[0]} of sizes {one[1]} overlaps the one at {other[0]} of sizes {other[1]}"
        files = [chunk.place.file for chunk in entry.chunks] or [METADATA_NAME]
        self._findings.add(
            "coverage", first.file if first else files[0], message, key=key, offset=first.offset if first else None
        )

    def _add_item(
        self, place: ItemRange, kind: Literal["tensor", "object", "raw"], crc: int | None, ref: KeyRef
    ) -> None:
        self.entries += 1
        if not self._is_placed(place, ref.key):
            return
        identity = (place.file, place.offset, place.length, kind, crc)
        item = self._items.get(identity)
        if item is None:
            file = self.files.get(place.file)
            if file is None:
                file = self.files[place.file] = StoredFile(place.file, self._sizes[place.file], None)
            item = self._items[identity] = StoredItem(
                place.file, place.offset, place.length, kind, crc, file.crc is not None
            )
            file.items.append(item)
        item.refs.append(ref)

    def _is_placed(self, place: ItemRange, key: str | None) -> bool:
        self._referenced.add(place.file)
        kind: ProblemKind
        if self._is_there(place.file):
            end, size = place.offset + place.length, self._sizes[place.file]
            if end <= size:
                return True
            kind, message = "place", f"it should be at bytes {place.offset} to {end}, but the file ends at byte {size}"
        elif is_outside(place.file):
            kind, message = "unsafe path", "its file is outside of the checkpoint and was not read"
        else:
            kind, message = "missing file", f"its {place.length} bytes are in a file that is missing"
        self._findings.add(kind, place.file, message, key=key, offset=place.offset)
        return False

    def find_overlaps(self) -> None:
        """Add a problem for each item whose bytes overlap those of another."""
        for file in self.files.values():
            extents = [item.extent() for item in file.items]
            reported: set[StoredItem] = set()
            for one, other in split_overlaps(extents)[1]:
                self._report_overlap(one.item, other)
                if other.item not in reported:
                    reported.add(other.item)
                    self._report_overlap(other.item, one)

    def _report_overlap(self, item: StoredItem, beside: Extent) -> None:
        message = f"its bytes overlap those of {beside.item.refs[0].key} at {beside.start} to {beside.stop}"
        for ref in item.refs:
            self._findings.add("overlap", item.file, message, key=ref.key, offset=item.start)

    def find_unreferenced(self) -> None:
        """Add a warning for each file or folder that nothing refers to."""
        folders = {name.partition("/")[0] for name in self._referenced if "/" in name}
        extra: dict[tuple[bool, str], list[str]] = {}
        for name in sorted(self._sizes.keys() - self._referenced):
            parts = name.split("/")
            hidden = next((n for n, part in enumerate(parts, 1) if part.startswith(HIDDEN)), 0)
            # A folder without any referenced file, such as another checkpoint, is reported as one.
            depth = hidden or (1 if parts[0] not in folders else len(parts))
            extra.setdefault((bool(hidden), "/".join(parts[:depth])), []).append(name)
        for (is_hidden, place), names in extra.items():
            what = f"{len(names)} files, {sum(map(self._sizes.__getitem__, names))} bytes in all"
            if is_hidden:
                message = f"it was left by a save that was interrupted ({what}); it can be removed"
                self._findings.add("leftover", place, message, severity="warning")
            else:
                message = f"no key of the checkpoint needs it ({what})"
                self._findings.add("unreferenced file", place, message, severity="warning")
