"""Transformed items as if they were files of their own, which hold the item as it was saved.

So whoever reads items needs not know how they are stored: an index of a checkpoint with such items is changed to one
whose places are in these files. They are made as they are read, and nothing larger than asked for is kept of them,
but for some items of which parts were asked for.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.errors import AiockptError, CorruptCheckpointError, LoadError
from aiockpt.format.transforms.undoing import TransformFailedError, find_transforms, undone
from aiockpt.format.transforms.zstd import Zstd, require_zstd
from aiockpt.reading.decoded_cache import DecodedCache, ExpansionBudget
from aiockpt.reading.virtual_files import OBJECT_BYTES, VirtualFile, expose
from aiockpt.storage.base import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from aiockpt.format.index import Index, ItemRange
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.item_transforms import ItemFacts

_STEP_BYTES = 4 << 20
_PAGE_BYTES = 4096
_NEAR_BYTES = 4096
_AHEAD_BYTES = 64 << 10


class DecodedSource(Source):
    """The files of a checkpoint, and its transformed items as further ones. Any number of threads may read at once.

    Args:
        inner: the files.
        path: where they are, for messages.
        transforms: what can be undone, besides zstd.
    """

    def __init__(self, inner: Source, path: str, transforms: Sequence[Transform] = ()) -> None:
        self._inner = inner
        self._path = path
        self._given = {transform.descriptor: transform for transform in transforms}
        self._items: dict[str, VirtualFile] = {}
        self._files: dict[str, int] | None = None
        self._kept = DecodedCache()
        self._allowance = ExpansionBudget(OBJECT_BYTES)
        self._local = threading.local()

    @property
    def files(self) -> Mapping[str, int]:
        """The size in bytes of each file; of an item of unknown size, the most that it can have."""
        return self._inner.files if self._files is None else self._files

    @property
    def items(self) -> Mapping[str, VirtualFile]:
        """The transformed items, by the names of their files."""
        return self._items

    def expose(self, index: Index, facts: Mapping[tuple[str, int], ItemFacts], *, trust: bool = False) -> Index:
        """Make files of the transformed items of an index; give it with their places there.

        Args:
            index: the index, whose places were checked.
            facts: what the manifest says of the items.
            trust: let objects have as many bytes as they say.

        Raises:
            CorruptCheckpointError: they contradict each other.
        """
        presented, items = expose(self._path, index, facts, trust=trust)
        self.know({item.name: item for item in items})
        return presented

    def know(self, items: Mapping[str, VirtualFile]) -> None:
        """Take over items that were presented by another source of these files."""
        self._items |= items
        self._files = {**self._inner.files, **{name: item.most for name, item in self._items.items()}}

    def settled(self, place: ItemRange) -> ItemRange:
        """Give the place of an item with its true length; see `Source.settled`."""
        item = self._items.get(place.file)
        if item is None:
            return place
        self._transforms_of(item)
        if not item.is_exact:
            exact = self._kept.lengths.get(item.name)
            return place._replace(length=len(self.whole(item.name)) if exact is None else exact)
        return place

    def comes_whole(self, name: str) -> bool:
        """Tell whether a file is best read at once; see `Source.comes_whole`."""
        return name in self._items

    def read(
        self, name: str, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill ``view``; see `Source.read`."""
        item = self._items.get(name)
        if item is None:
            self._inner.read(name, offset, view, seen)
        elif item.is_exact and 2 * len(view) >= item.most and not self._kept.has(name):
            self._stream(item, offset, view, seen)
        else:
            self._copy(item, offset, view)
            if seen is not None:
                seen(view)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        """Read many short runs; see `Source.read_runs`."""
        if name not in self._items:
            self._inner.read_runs(name, runs, view)
            return
        at, whole = 0, self.whole(name)
        for offset, length in runs:
            view[at : at + length] = whole[offset : offset + length]
            at += length

    def map(self, name: str) -> mmap.mmap:
        """Map a file; see `Source.map`. A transformed item can't be mapped."""
        item = self._items.get(name)
        if item is None:
            return self._inner.map(name)
        raise LoadError(
            f"{self._path}: {item.key} is stored with {_listed(item)}, so it can't be mapped; load it without mmap=True"
        )

    def share(self) -> None:
        """See `Source.share`."""
        self._inner.share()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._kept.clear()
        self._inner.close()

    def whole(self, name: str) -> memoryview:
        """Give all of an item. Blocks; raises as `read` does."""
        return self._kept.get(name, lambda: self.decode(name))

    def decode(self, name: str) -> memoryview:
        """Give all of an item, and keep nothing of it. Blocks; raises as `read` does."""
        data = bytearray()
        for piece in self._pieces(self._items[name]):
            data += piece
        return memoryview(data)

    # --- undoing ----------------------------------------------------------------------------------

    def _copy(self, item: VirtualFile, offset: int, view: memoryview) -> None:
        whole = self.whole(item.name)
        if offset + len(view) > len(whole):
            raise self._short(item, len(whole))
        view[:] = whole[offset : offset + len(view)]

    def _stream(
        self, item: VirtualFile, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None
    ) -> None:
        """Undo an item straight to where its bytes belong."""
        at = -offset  # in the view
        for piece in self._pieces(item):
            low, high = max(at, 0), min(at + len(piece), len(view))
            if low < high:
                view[low:high] = piece[low - at : high - at]
                if seen is not None:
                    seen(view[low:high])
            at += len(piece)

    def _pieces(self, item: VirtualFile) -> Iterator[memoryview]:
        """Give an item piece by piece; what is wrong with it shows by the last."""
        stored = _StoredBytes(item.place, self._window)
        total = 0
        try:
            for piece in undone(self._transforms_of(item), iter(stored), item.place.length, item.most):
                total += len(piece)
                self._draw(item, total)
                yield piece
        except TransformFailedError as exc:
            for _ in stored.rest():
                pass  # the CRC tells whether the bytes are wrong, or what is to undo them
            self._check_crc(item, stored.crc)
            raise self._failed(item, exc) from exc.__cause__
        self._check_crc(item, stored.crc)
        if total != item.most and item.is_exact:
            raise self._short(item, total)

    def _draw(self, item: VirtualFile, nbytes: int) -> None:
        """Let an item have so many bytes; what objects have of them beyond their share is limited in all."""
        if item.free is not None and not self._allowance.draw(item.name, nbytes - item.free):
            raise LoadError(
                f"{self._path}/{item.place.file}: the {item.place.length} stored bytes of {item.key} (at offset "
                f"{item.place.offset}) stand for {nbytes} or more, or others for as many: far more than objects have "
                "as a rule. If you trust the checkpoint, pass trust=True."
            )

    def _transforms_of(self, item: VirtualFile) -> list[Transform | Zstd]:
        found = find_transforms(item.place.transforms, self._given)
        if isinstance(found, str):
            raise LoadError(
                f"{self._path}: {item.key} is stored with the transform {found!r}, which this checkpointer was not "
                "given: pass transforms=[...] with the one that it was saved with"
            )
        if any(isinstance(each, Zstd) for each in found):
            try:
                require_zstd()
            except AiockptError as exc:
                raise LoadError(f"{self._path}: {item.key} is compressed: {exc}") from exc
        return found

    def _check_crc(self, item: VirtualFile, crc: int) -> None:
        if item.crc is not None and crc != item.crc:
            place = item.place
            raise CorruptCheckpointError(
                f"{self._path}/{place.file}: the stored bytes of {item.key} (at offset {place.offset}, {place.length} "
                "bytes) do not match their CRC: they changed since they were written. Use an older checkpoint."
            )

    def _failed(self, item: VirtualFile, exc: TransformFailedError) -> LoadError:
        place = item.place
        where = f"{self._path}/{place.file}: the {place.length} stored bytes of {item.key} (at offset {place.offset})"
        if exc.descriptor not in self._given:
            return CorruptCheckpointError(f"{where} can't be read: {exc}. Use an older checkpoint.")
        known = "are those that were written" if item.crc is not None else "may have changed since they were written"
        return LoadError(
            f"{where} can't be read: {exc}. They {known}; was the transform made with the same key and options?"
        )

    def _short(self, item: VirtualFile, nbytes: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}/{item.place.file}: {item.key} (at offset {item.place.offset}) has {nbytes} bytes, but "
            f"should have {item.most}; its metadata or its bytes are damaged"
        )

    @property
    def _window(self) -> _Window:
        """The calling thread's window on the stored bytes."""
        window: _Window | None = getattr(self._local, "window", None)
        if window is None:
            window = self._local.window = _Window(self._inner)
        return window


class _Window:
    """One thread's view of the stored bytes. Of small items that follow each other the next ones are read as well."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = memoryview(mmap.mmap(-1, _STEP_BYTES + _PAGE_BYTES))
        self._file = ""
        self._begin = self._end = 0

    def read(self, file: str, offset: int, count: int) -> memoryview:
        """Give bytes, `_STEP_BYTES` at most; they stay until the next call."""
        if file != self._file or offset < self._begin or offset + count > self._end:
            follows = file == self._file and 0 <= offset - self._end <= _NEAR_BYTES
            self._file = ""  # in case that reading fails
            self._fill(file, offset, max(count, _AHEAD_BYTES) if follows else count)
        at = self._begin % _PAGE_BYTES + offset - self._begin
        return self._buffer[at : at + count]

    def _fill(self, file: str, offset: int, count: int) -> None:
        count = min(count, self._source.files.get(file, offset + count) - offset)
        skip = offset % _PAGE_BYTES  # so that direct I/O goes straight to the buffer
        self._source.read(file, offset, self._buffer[skip : skip + count])
        self._file, self._begin, self._end = file, offset, offset + count


class _StoredBytes:
    """The stored bytes of an item, piece by piece, and their CRC."""

    def __init__(self, place: ItemRange, window: _Window) -> None:
        self._place = place
        self._window = window
        self._at = 0
        self.crc = 0

    def __iter__(self) -> Iterator[memoryview]:
        return self.rest()

    def rest(self) -> Iterator[memoryview]:
        """Give what was not given yet."""
        place = self._place
        while self._at < place.length:
            count = min(_STEP_BYTES, place.length - self._at)
            view = self._window.read(place.file, place.offset + self._at, count)
            self._at += count
            self.crc = crc32(view, self.crc)
            yield view


def _listed(item: VirtualFile) -> str:
    return ", ".join(item.place.transforms)
