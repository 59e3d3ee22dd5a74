"""The source of all loads: the checkpoint's files, and virtual files that are decoded as they are read.

Readers of items need not know how these are stored: `expose` changes the index to one whose transformed items are in
virtual files. A virtual file that is read at once is decoded straight into the caller's memory. One that is read in
parts is decoded once and cached.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.strides import row_strides
from aiockpt.errors import AiockptError, CorruptCheckpointError, LoadError
from aiockpt.format.index import Entry, Index, ItemRange, ObjectEntry, StoredChunk, TensorEntry, TensorItem
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.format.transforms.zstd import MOST_RATIO, ZSTD_DESCRIPTOR, ZSTD_NAME, Zstd, ZstdDecoder, require_zstd
from aiockpt.storage.base import Seen, Source

if TYPE_CHECKING:
    import torch

    from aiockpt.format.transforms.base import Decoder, Transform
    from aiockpt.format.transforms.item_transforms import ItemFacts

# --- decoding, piece by piece ---------------------------------------------------------------------


_SLACK_BYTES = 1 << 20


class TransformFailedError(Exception):
    """A transform can't decode its input; the message says why, the cause is the exception it raised."""

    def __init__(self, descriptor: str, reason: str) -> None:
        super().__init__(f"{descriptor} failed: {reason}")
        self.descriptor = descriptor


def decode_item(
    transforms: Sequence[Transform | Zstd], pieces: Iterable[memoryview], stored_bytes: int, most: int
) -> Iterator[memoryview]:
    """Decode the stored bytes of an item with its transforms, the last applied first; yield at most ``most`` bytes."""
    for number, transform in enumerate(transforms, 1):
        # The bytes between two transforms are not much longer than the stored or the final ones.
        limit = most if number == len(transforms) else max(stored_bytes, most) * 2 + _SLACK_BYTES
        pieces = _decode_once(transform, pieces, limit)
    yield from pieces


def _decode_once(transform: Transform | Zstd, pieces: Iterable[memoryview], most: int) -> Iterator[memoryview]:
    name, left = transform.descriptor, most
    with _translated(name):
        decoder = transform.decoder()
    for data in pieces:
        parts = _updates(decoder, data, left)
        while True:
            with _translated(name):
                part = next(parts, None)
            if part is None:
                break
            left = _subtract(left, part, name, most)
            yield part
    with _translated(name):
        part = memoryview(decoder.finish(left)).cast("B")
    _subtract(left, part, name, most)
    yield part


def _updates(decoder: Decoder | ZstdDecoder, data: memoryview, most: int) -> Iterator[memoryview]:
    made = decoder.parts(data) if isinstance(decoder, ZstdDecoder) else (decoder.update(data, most),)
    for part in made:
        yield memoryview(part).cast("B")


def _subtract(left: int, part: memoryview, descriptor: str, most: int) -> int:
    if len(part) > left:
        raise TransformFailedError(descriptor, f"its bytes decode to more than the expected {most}")
    return left - len(part)


@contextlib.contextmanager
def _translated(descriptor: str) -> Iterator[None]:
    """Translate exceptions of a transform."""
    try:
        yield
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:
        raise TransformFailedError(descriptor, f"{type(exc).__name__}: {exc}") from exc


# --- the source -----------------------------------------------------------------------------------


CACHE_BYTES = 256 << 20
"""Decoded items kept in memory; the last two are kept whatever their size."""
_STEP_BYTES = 4 << 20
_COPY_BYTES = 1 << 20
_NEAR_BYTES = 4096
_AHEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a file that are in memory."""

    file: str
    begin: int
    view: memoryview

    def copy(self, file: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> bool:
        """Copy runs of bytes into ``view``, as `Source.read_runs` does; return False if some are not there."""
        begin, end = self.begin, self.begin + len(self.view)
        if file != self.file or any(offset < begin or offset + length > end for offset, length in runs):
            return False
        source, target, at = np.frombuffer(self.view, np.uint8), np.frombuffer(view, np.uint8), 0
        for offset, length in runs:
            for low in range(0, length, _COPY_BYTES):  # the CRC of a piece finds it in the processor's cache
                count = min(_COPY_BYTES, length - low)
                start = offset - begin + low
                target[at : at + count] = source[start : start + count]  # without the GIL
                if seen is not None:
                    seen(view[at : at + count])
                at += count
        return True


class DecodedSource(Source):
    """The files and virtual files of a checkpoint. Any number of threads may read at once."""

    def __init__(self, inner: Source, path: str, transforms: Sequence[Transform] = ()) -> None:
        self._inner = inner
        self.gap_bytes, self.most_reads, self.is_remote = inner.gap_bytes, inner.most_reads, inner.is_remote
        self._path = path
        self._transforms = {transform.descriptor: transform for transform in transforms}
        self.items: dict[str, VirtualFile] = {}  # the virtual files by name
        self._files: dict[str, int] | None = None
        self._cache = DecodedCache()
        self._left = OBJECT_BYTES  # of the budget that all objects share
        self._drawn: dict[str, int] = {}  # by object
        self._lock = threading.Lock()
        self._local = threading.local()

    @contextlib.contextmanager
    def holding(self, held: Held | None) -> Iterator[None]:
        """Take what this thread reads from these bytes within the context, where they have all of it."""
        self._local.held = held
        try:
            yield
        finally:
            self._local.held = None

    @property
    def files(self) -> Mapping[str, int]:
        """The size in bytes of each file; an upper bound for items of unknown size."""
        return self._inner.files if self._files is None else self._files

    def expose(self, index: Index, facts: Mapping[tuple[str, int], ItemFacts], *, trust: bool = False) -> Index:
        """Return an index with its transformed items moved to virtual files, which are added.

        ``facts`` are the manifest's, by file and offset; ``trust``: do not limit the decoded size of objects.
        """
        exposer = _Exposer(self._path, facts, trust)
        entries = {key: exposer.entry(key, entry) for key, entry in index.entries.items()}
        self.know({item.name: item for item in exposer.items.values()})
        return replace(index, entries=entries, is_transformed=False)

    def know(self, items: Mapping[str, VirtualFile]) -> None:
        """Add virtual files that another source of the same checkpoint has exposed."""
        self.items |= items
        self._files = {**self._inner.files, **{name: item.most for name, item in self.items.items()}}

    def exact_range(self, place: ItemRange) -> ItemRange:
        """Return the range of an item with its exact length; decodes it if the manifest lacks the length."""
        item = self.items.get(place.file)
        if item is None:
            return place
        self._transforms_of(item)
        if not item.is_exact:
            exact = self._cache.lengths.get(item.name)
            return place._replace(length=len(self.whole(item.name)) if exact is None else exact)
        return place

    def is_virtual(self, name: str) -> bool:
        """Return whether a file is decoded as it is read, so that one whole read is cheaper than several parts."""
        return name in self.items

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        held: Held | None = getattr(self._local, "held", None)
        if held is not None and held.copy(name, [(offset, len(view))], view, seen):
            return
        item = self.items.get(name)
        if item is None:
            self._inner.read(name, offset, view, seen)
        # A read of less than half is likely to be followed by others, and each would decode from the beginning: cache.
        elif item.is_exact and 2 * len(view) >= item.most and not self._cache.has(name):
            self._stream(item, offset, view, seen)
        else:
            self._copy(item, offset, view)
            if seen is not None:
                seen(view)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        held: Held | None = getattr(self._local, "held", None)
        if held is not None and held.copy(name, runs, view):
            return
        if name not in self.items:
            self._inner.read_runs(name, runs, view)
            return
        at, whole = 0, self.whole(name)
        for offset, length in runs:
            view[at : at + length] = whole[offset : offset + length]
            at += length

    def is_cached(self, name: str, offset: int) -> bool:
        return name not in self.items and self._inner.is_cached(name, offset)

    def map(self, name: str) -> mmap.mmap:
        """Map a file; see `Source.map`. A virtual file can't be mapped."""
        item = self.items.get(name)
        if item is None:
            return self._inner.map(name)
        raise LoadError(
            f"{self._path}: {item.key} is stored with {', '.join(item.place.transforms)}, so it can't be mapped; load "
            "it without mmap=True"
        )

    def share(self) -> None:
        self._inner.share()

    def close(self) -> None:
        self._cache.clear()
        self._inner.close()

    def whole(self, name: str) -> memoryview:
        """Return all of an item and cache it. Blocks; raises as `read` does."""
        return self._cache.get(name, lambda: self.decode(name))

    def in_order(self, name: str) -> DecodedStream:
        """Return a virtual file of known size, to be read from its beginning to its end, in bounded memory."""
        return DecodedStream(self._pieces(self.items[name], _Window(self._inner)))

    def decode(self, name: str) -> memoryview:
        """Return all of an item without caching it. Blocks; raises as `read` does."""
        data = bytearray()
        for piece in self._pieces(self.items[name]):
            data += piece
        return memoryview(data)

    # --- decoding ---------------------------------------------------------------------------------

    def _copy(self, item: VirtualFile, offset: int, view: memoryview) -> None:
        whole = self.whole(item.name)
        if offset + len(view) > len(whole):
            raise self._short(item, len(whole))
        view[:] = whole[offset : offset + len(view)]

    def _stream(self, item: VirtualFile, offset: int, view: memoryview, seen: Seen | None) -> None:
        """Decode an item straight into the view."""
        at = -offset  # of the piece in the view
        for piece in self._pieces(item):
            low, high = max(at, 0), min(at + len(piece), len(view))
            if low < high:
                view[low:high] = piece[low - at : high - at]
                if seen is not None:
                    seen(view[low:high])
            at += len(piece)

    def _pieces(self, item: VirtualFile, window: _Window | None = None) -> Iterator[memoryview]:
        """Yield the decoded item piece by piece; damage raises at the latest after the last piece."""
        window, place = window or self._window, item.place
        total = crc = 0

        def read_stored() -> Iterator[memoryview]:
            nonlocal crc
            for at in range(0, place.length, _STEP_BYTES):
                view = window.read(place.file, place.offset + at, min(_STEP_BYTES, place.length - at))
                crc = crc32(view, crc)
                yield view

        stored = read_stored()
        try:
            for piece in decode_item(self._transforms_of(item), stored, place.length, item.most):
                total += len(piece)
                self._draw(item, total)
                yield piece
        except TransformFailedError as exc:
            for _ in stored:
                pass  # read to the end: the CRC of all stored bytes tells damage from a wrong key of the transform
            self._check_crc(item, crc)
            raise self._failed(item, exc) from exc.__cause__
        self._check_crc(item, crc)
        if total != item.most and item.is_exact:
            raise self._short(item, total)

    def _draw(self, item: VirtualFile, nbytes: int) -> None:
        """Raise if an object exceeds the budget that all objects share; what it had drawn before is released."""
        if item.free is None:
            return
        with self._lock:
            drawn = self._drawn.pop(item.name, 0)
            self._left += drawn
            is_exceeded = nbytes - item.free > self._left
            if not is_exceeded:
                # An item may be decoded twice, and then begins with few bytes again: it keeps what it had.
                self._drawn[item.name] = max(nbytes - item.free, drawn)
                self._left -= self._drawn[item.name]
        if is_exceeded:
            raise LoadError(
                f"{self._described(item)} decode to {nbytes} or more, which with the other objects is more than the "
                "limit for an untrusted checkpoint. If you trust it, pass trust=True."
            )

    def _transforms_of(self, item: VirtualFile) -> list[Transform | Zstd]:
        found: list[Transform | Zstd] = []
        for descriptor in item.place.transforms:
            name, _, version = descriptor.partition("/")
            if descriptor in self._transforms:
                found.append(self._transforms[descriptor])
            elif name == ZSTD_NAME and version.partition(".")[0] == ZSTD_DESCRIPTOR.rpartition("/")[2]:
                found.append(Zstd())
            else:
                raise LoadError(
                    f"{self._path}: {item.key} is stored with the transform {descriptor!r}, which this checkpointer "
                    "was not given: pass transforms=[...] with the one that it was saved with"
                )
        if any(isinstance(each, Zstd) for each in found):
            try:
                require_zstd()
            except AiockptError as exc:
                raise LoadError(f"{self._path}: {item.key} is compressed: {exc}") from exc
        return found

    def _check_crc(self, item: VirtualFile, crc: int) -> None:
        if item.crc is not None and crc != item.crc:
            raise CorruptCheckpointError(
                f"{self._described(item)} do not match their CRC: they changed since they were written. Use an older "
                "checkpoint."
            )

    def _failed(self, item: VirtualFile, exc: TransformFailedError) -> LoadError:
        what = f"{self._described(item)} can't be read: {exc}."
        if exc.descriptor not in self._transforms:
            return CorruptCheckpointError(f"{what} Use an older checkpoint.")
        state = "are those that were written" if item.crc is not None else "may have changed since they were written"
        return LoadError(f"{what} They {state}; was the transform made with the same key and options?")

    def _described(self, item: VirtualFile) -> str:
        place = item.place
        return f"{self._path}/{place.file}: the {place.length} stored bytes of {item.key} (at offset {place.offset})"

    def _short(self, item: VirtualFile, nbytes: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}/{item.place.file}: {item.key} (at offset {item.place.offset}) has {nbytes} bytes, but "
            f"should have {item.most}; its metadata or its bytes are damaged"
        )

    @property
    def _window(self) -> _Window:
        """The calling thread's read buffer."""
        window: _Window | None = getattr(self._local, "window", None)
        if window is None:
            window = self._local.window = _Window(self._inner)
        return window


class DecodedStream:
    """Decoded bytes of an item, in order. For one thread at a time, of any number."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._end = 0  # of the piece, in the item

    def fill(self, begin: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``begin`` on, which is behind what was read before. Blocks."""
        while view:
            skip = max(0, begin - (self._end - len(self._piece)))
            if skip >= len(self._piece):
                self._piece = next(self._pieces)
                self._end += len(self._piece)
                continue
            count = min(len(self._piece) - skip, len(view))
            view[:count] = self._piece[skip : skip + count]
            begin, view = begin + count, view[count:]

    def finish(self) -> None:
        """Read to the end; raise if the item is damaged. Blocks."""
        for _ in self._pieces:
            pass


class _Window:
    """One thread's read buffer of stored bytes. It reads ahead when small items are read one after the other."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = memoryview(mmap.mmap(-1, _STEP_BYTES + BLOCK_BYTES))  # page-aligned, as O_DIRECT requires
        self._file = ""
        self._begin = self._end = 0

    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Return up to `_STEP_BYTES` bytes, valid until the next call."""
        if file != self._file or offset < self._begin or offset + count > self._end:
            follows = file == self._file and 0 <= offset - self._end <= _NEAR_BYTES
            wanted = max(count, _AHEAD_BYTES) if follows else count
            wanted = min(wanted, self._source.files.get(file, offset + wanted) - offset)
            skip = offset % BLOCK_BYTES  # same offset in the page as in the file, as O_DIRECT requires
            self._file = ""  # the buffer is invalid if reading fails
            self._source.read(file, offset, self._buffer[skip : skip + wanted])
            self._file, self._begin, self._end = file, offset, offset + wanted
        at = self._begin % BLOCK_BYTES + offset - self._begin
        return self._buffer[at : at + count]


# --- memory for decoded items ---------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class DecodedCache:
    """LRU cache of decoded items. Threads that ask for the same item decode it once, unless that fails."""

    lengths: dict[str, int] = field(default_factory=dict)  # of all items that were ever decoded
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _items: dict[str, memoryview] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)  # held while an item is decoded
    _closed: bool = False

    def has(self, name: str) -> bool:
        return name in self._locks

    def get(self, name: str, make: Callable[[], memoryview]) -> memoryview:
        """Return an item; call ``make`` if it is not cached."""
        with self._lock:
            making = self._locks.setdefault(name, threading.Lock())
        with making:
            data = self._items.get(name)
            if data is None:
                data = make()
            with self._lock:
                self._items.pop(name, None)
                if not self._closed:
                    self.lengths[name] = len(data)
                    self._items[name] = data  # the last: most recently used
                    while len(self._items) > 2 and sum(map(len, self._items.values())) > CACHE_BYTES:
                        del self._items[next(iter(self._items))]
        return data

    def clear(self) -> None:
        """Empty the cache for good."""
        with self._lock:
            self._closed = True
            self._items.clear()


# --- virtual files, in the index ---------------------------------------------------------------------


FRAMING_BYTES = 64 << 10
"""Upper bound of an item's framing, the bytes around a tensor's."""
OBJECT_BYTES = 64 << 20
"""Limit for all objects together, beyond `OBJECT_RATIO` times their stored bytes: against decompression bombs."""
OBJECT_RATIO = 100
"""Pickles of plain values rarely compress further; only very many zeros do."""


@dataclass(frozen=True, slots=True)
class VirtualFile:
    """A transformed item, as a file of its own."""

    name: str
    key: str  # one of the keys stored in it
    place: ItemRange  # of the stored bytes
    most: int  # its decoded size in bytes, or an upper bound
    is_exact: bool  # ``most`` is the size
    crc: int | None  # CRC-32 of the stored bytes, if it is known
    # Decoded bytes that an object may have before it draws on OBJECT_BYTES. None: no limit, because the shape of a
    # tensor sets its size, or because the caller trusts the checkpoint.
    free: int | None


@dataclass(eq=False)
class _Exposer:
    _path: str
    _facts: Mapping[tuple[str, int], ItemFacts]
    _trust: bool
    items: dict[ItemRange, VirtualFile] = field(default_factory=dict)

    def entry(self, key: str, entry: Entry) -> Entry:
        if isinstance(entry, ObjectEntry) and entry.place.transforms:
            return ObjectEntry(self._place_object(key, entry.place))
        if isinstance(entry, TensorEntry) and any(chunk.place.transforms for chunk in entry.chunks):
            return entry._replace(chunks=tuple(self._chunk(key, entry.dtype, chunk) for chunk in entry.chunks))
        return entry

    def _chunk(self, key: str, dtype: torch.dtype, chunk: StoredChunk) -> StoredChunk:
        if not chunk.place.transforms:
            return chunk
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        place = self._place(key, chunk.place, nbytes, nbytes + FRAMING_BYTES, is_firm=True)
        facts = self._facts.get(chunk.place[:2])
        if facts is None:
            return chunk._replace(place=place)
        stride = row_strides(chunk.sizes) if facts.stride is None else facts.stride
        # The CRC in the manifest is that of the stored bytes, not of the decoded payload.
        item = TensorItem(dtype, chunk.sizes, stride, 0, facts.payload_offset, nbytes, None)
        return chunk._replace(place=place, item=item)

    def _place_object(self, key: str, stored: ItemRange) -> ItemRange:
        free = OBJECT_RATIO * stored.length
        # Above the budget, by which DecodedSource refuses an object while it decodes it, with the better message.
        most = max(free + 2 * OBJECT_BYTES, MOST_RATIO * stored.length if self._trust else 0)
        return self._place(key, stored, 0, most, is_firm=False, free=None if self._trust else free)

    def _place(
        self, key: str, stored: ItemRange, least: int, most: int, *, is_firm: bool, free: int | None = None
    ) -> ItemRange:
        """Return the virtual range of an item of ``least`` to ``most`` bytes.

        If ``most`` is not firm, the manifest may say that the item has more.
        """
        item = self.items.get(stored)
        if item is None:
            facts = self._facts.get(stored[:2])
            if facts is not None:
                self._check(key, stored, facts, least, most if is_firm else None)
                most = facts.raw_bytes
            if stored.transforms == (ZSTD_DESCRIPTOR,) and least > MOST_RATIO * stored.length:
                raise self._wrong(key, stored, f"{least} bytes, which its {stored.length} stored ones can't be")
            name = f"{stored.file}[{stored.offset}:{stored.offset + stored.length}]"
            crc = None if facts is None else facts.crc
            item = self.items[stored] = VirtualFile(name, key, stored, most, facts is not None, crc, free)
        return ItemRange(item.name, 0, item.most)

    def _check(self, key: str, stored: ItemRange, facts: ItemFacts, least: int, most: int | None) -> None:
        if facts.length != stored.length:
            raise self._wrong(key, stored, f"{stored.length} stored bytes, but {MANIFEST_NAME} says {facts.length}")
        if facts.raw_bytes < least or (most is not None and facts.raw_bytes > most):
            raise self._wrong(key, stored, f"at least {least} bytes, but {MANIFEST_NAME} says {facts.raw_bytes}")
        if stored.transforms == (ZSTD_DESCRIPTOR,) and facts.raw_bytes > MOST_RATIO * stored.length:
            raise self._wrong(key, stored, f"{facts.raw_bytes} bytes, which its {stored.length} stored ones can't be")

    def _wrong(self, key: str, place: ItemRange, contradiction: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}/{place.file}: the item of {key} at offset {place.offset} is said to have {contradiction}; "
            "the metadata is damaged"
        )
