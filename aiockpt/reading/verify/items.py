"""Check the bytes of a checkpoint: one pass over each file computes its own CRC and those of all its items."""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.spans import span as recorded
from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import ItemRange
from aiockpt.format.item.item_check import Framed, ItemChecker, read_framing
from aiockpt.format.item.ziparchive import FramingError
from aiockpt.reading.executor import run_each
from aiockpt.reading.jobs import ItemWindow
from aiockpt.reading.verify.inventory import (
    Extent,
    Segment,
    StoredFile,
    StoredItem,
    combined,
    cut_segments,
    group_segments,
    split_overlaps,
)

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.reading.decoded import DecodedSource
    from aiockpt.storage.base import Source
    from aiockpt.telemetry.loads import ReadReport
    from aiockpt.telemetry.verification import Findings, ProblemKind, Severity

RANGE_BYTES = 32 << 20
"""Upper bound of one job, so that several threads share a large file."""
STEP_BYTES = 4 << 20
"""Size of a thread's read buffer."""
_FETCH_BYTES = 16 << 20  # larger than any zip directory or data.pkl, so a damaged size allocates no more
_DECODED_AT_ONCE = 64


class ItemVerifier:
    """Reads files with all worker threads and adds a problem for every mismatch."""

    def __init__(self, source: Source, workers: Workers, findings: Findings, report: ReadReport) -> None:
        self._source = source
        self._workers = workers
        self._findings = findings
        self._checker = ItemChecker()
        self._progress = report
        self._buffers: list[memoryview] = []
        self._counts: list[int] = []  # bytes of each read; unlike +=, append is atomic, so threads need no lock
        self.without_crc: list[str] = []

    @property
    def read_bytes(self) -> int:
        """Bytes read so far; bytes that were read twice count once."""
        return sum(self._counts)

    async def verify(self, files: Sequence[StoredFile]) -> None:
        """Check files and their items. Cancelling waits for the threads."""
        large = [item for file in files for item in file.items if item.is_large]
        await self._run([functools.partial(self._prepare, item) for item in large])
        await self._run(await self._workers.run(self._jobs, files))
        await self._workers.run(self._conclude, files)

    async def verify_decoded(self, files: Sequence[StoredFile], source: DecodedSource) -> None:
        """Check virtual files; each is decoded whole, in memory."""
        small = [file for file in files if file.nbytes < STEP_BYTES]
        groups = [[file] for file in files if file.nbytes >= STEP_BYTES]
        groups += [small[at : at + _DECODED_AT_ONCE] for at in range(0, len(small), _DECODED_AT_ONCE)]
        await self._run([functools.partial(self._check_decoded, group, source) for group in groups])

    def _check_decoded(self, files: Sequence[StoredFile], source: DecodedSource) -> None:
        for name, item in [(file.name, item) for file in files for item in file.items]:
            known = source.items[name]
            place = known.place
            stored = dataclasses.replace(item, file=place.file, start=place.offset, covered=known.crc is not None)
            try:
                data = source.decode(name)
            except CorruptCheckpointError as exc:
                self._report(stored, "item crc", str(exc))
            except LoadError as exc:
                self._report(stored, "unreadable", str(exc))
            else:
                self._counts.append(place.length)
                self._check_small(stored, data)

    async def _run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run blocking jobs with all threads."""
        await run_each(self._run_one, jobs, self._workers.count)

    async def _run_one(self, job: Callable[[], None]) -> None:
        with recorded("check"):
            await self._workers.run(job)
        self._progress.add(self.read_bytes - self._progress.done_bytes)

    # --- framing of large items -------------------------------------------------------------------

    def _prepare(self, item: StoredItem) -> None:
        """Read the framing of a large item, and record which of its bytes are to be streamed."""
        if item.kind == "raw":
            self._accept(item, None)
            item.streams = [item.extent(streamed=True, crc=item.crc)]
            return
        window = ItemWindow(self._source, ItemRange(item.file, item.start, item.length), _FETCH_BYTES)
        try:
            framed = read_framing(item.length, window.fetch, is_tensor=item.kind == "tensor")
            self._accept(item, framed)
            for record in framed.checked:
                part = Extent(item.start + record.start, item.start + record.stop, item, True, record.name, record.crc)
                if window.holds(record.start, record.stop):
                    self._check_crc(part, crc32(window.fetch(record.start, record.stop - record.start)))
                else:
                    item.streams.append(part)
            if not framed.checked:  # there is no CRC to compare, but reading finds unreadable blocks
                item.streams = [item.extent(streamed=True)]
            if not item.covered:
                self._counts.append(item.length - sum(stream.stop - stream.start for stream in item.streams))
        except FramingError as exc:
            self._report(item, "framing", str(exc))
        except LoadError as exc:
            self._unreadable(item.file, item.start, [item], exc)

    # --- reading ----------------------------------------------------------------------------------

    def _jobs(self, files: Sequence[StoredFile]) -> list[Callable[[], None]]:
        jobs: list[Callable[[], None]] = []
        for file in files:
            extents, apart = split_overlaps([extent for item in file.items for extent in item.extents()])
            whole = None if file.crc is None else file.nbytes
            jobs += [functools.partial(self._read_range, file, each) for each in self._ranges(extents, whole)]
            jobs += [
                functools.partial(self._read_range, file, segments, overlaps=True)
                for extent, _ in apart
                for segments in self._ranges([extent], None)
            ]
        return jobs

    @staticmethod
    def _ranges(extents: Sequence[Extent], nbytes: int | None) -> Iterator[list[Segment]]:
        segments = cut_segments(extents, nbytes, step_bytes=STEP_BYTES, range_bytes=RANGE_BYTES)
        return group_segments(segments, RANGE_BYTES)

    def _read_range(self, file: StoredFile, segments: Sequence[Segment], *, overlaps: bool = False) -> None:
        """Read some segments of a file; its CRC is that of all segments that don't overlap."""
        try:  # popped, so that no other thread has it
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, STEP_BYTES + BLOCK_BYTES))
        for segment in segments:
            try:
                crc = self._read_segment(file, segment, buffer)
            except LoadError as exc:
                self._unreadable(file.name, segment.start, [extent.item for extent in segment.extents], exc)
                continue
            self._counts.append(segment.stop - segment.start)
            if not overlaps:
                file.parts.append((segment.start, segment.stop - segment.start, crc))
        self._buffers.append(buffer)

    def _read_segment(self, file: StoredFile, segment: Segment, buffer: memoryview) -> int:
        view, crc = buffer[:0], 0

        def add(part: memoryview) -> None:
            nonlocal crc
            crc = crc32(part, crc)

        for at in range(segment.start, segment.stop, STEP_BYTES):
            skip = at % BLOCK_BYTES  # same offset in the page as in the file, as O_DIRECT requires
            view = buffer[skip : skip + min(STEP_BYTES, segment.stop - at)]
            self._source.read(file.name, at, view, add)
        for extent in segment.extents:
            if extent.streamed:
                extent.parts.append((segment.start, segment.stop - segment.start, crc))
            else:
                self._check_small(extent.item, view[extent.start - segment.start : extent.stop - segment.start])
        return crc

    def _check_small(self, item: StoredItem, data: memoryview) -> None:
        if item.kind == "raw":
            self._accept(item, None)
            self._check_crc(item.extent(crc=item.crc), crc32(data))
            return
        try:
            framed, wrong = self._checker.check(data, is_tensor=item.kind == "tensor")
        except FramingError as exc:
            self._report(item, "framing", str(exc))
            return
        self._accept(item, framed)
        for record in wrong:
            part = Extent(item.start + record.start, item.start + record.stop, item, False, record.name, record.crc)
            self._check_crc(part, crc32(data[record.start : record.stop]))

    # --- comparing --------------------------------------------------------------------------------

    def _accept(self, item: StoredItem, framed: Framed | None) -> None:
        """Compare the dtype, shape and CRC in an item with the metadata's; raw bytes have none of their own."""
        has_crc = item.crc is not None if framed is None else bool(framed.checked)
        if not has_crc and not item.covered and item.length:
            refs = [ref for inner in item.inner.values() for ref in inner] or item.refs
            self.without_crc += [ref.key or item.file for ref in refs]
        for ref in item.refs:
            found = ref.given if framed is None else framed.tensor
            if found is None:
                continue
            given = ref.given
            if (found.dtype, found.shape) != (ref.dtype, ref.sizes):
                message = f"it holds {found.dtype} {found.shape}, but the metadata says {ref.dtype} {ref.sizes}"
                is_cast = given is None and found.shape == ref.sizes
                message += ": the planner of its save has cast it, and loading casts it back" if is_cast else ""
                severity: Severity = "warning" if is_cast else "error"
                self._findings.add("mismatch", item.file, message, key=ref.key, offset=item.start, severity=severity)
            if given is not None and given != (found if given.crc is not None else found._replace(crc=None)):
                message = "the manifest describes it in another way than its item does"
                self._findings.add("disagreement", item.file, message, key=ref.key, offset=item.start)

    def _check_crc(self, extent: Extent, crc: int) -> None:
        if extent.crc is not None and crc != extent.crc:
            what = f"of record {extent.name} " if extent.name else ""
            self._report(
                extent.item,
                "item crc",
                f"the {extent.stop - extent.start} bytes {what}have the CRC-32 {crc:08x} instead of {extent.crc:08x}: "
                "they changed since they were written",
                extent.start - extent.item.start,
            )

    def _conclude(self, files: Sequence[StoredFile]) -> None:
        """Combine the CRCs of the parts and compare them."""
        for file in files:
            for stream in (stream for item in file.items for stream in item.streams):
                crc, length = combined(stream.parts)
                if length == stream.stop - stream.start:
                    self._check_crc(stream, crc)
        named = {problem.file for problem in self._findings.problems if problem.key is not None}
        for file in files:
            crc, length = combined(file.parts)
            if file.crc is not None and length == file.nbytes and crc != file.crc:
                where = "see its items" if file.name in named else "no item shows it, so it is in what loading skips"
                message = f"its {file.nbytes} bytes have the CRC-32 {crc:08x} instead of {file.crc:08x}; {where}"
                self._findings.add("file crc", file.name, message)

    def _report(self, item: StoredItem, kind: ProblemKind, message: str, at: int = 0) -> None:
        for ref in item.inner.get(at, item.refs):
            self._findings.add(kind, item.file, message, key=ref.key, offset=item.start + at)

    def _unreadable(self, file: str, offset: int, items: Sequence[StoredItem], exc: LoadError) -> None:
        kind: ProblemKind = "unreadable"
        if isinstance(exc, UnsafeCheckpointError):  # a symlink that leaves the checkpoint concerns the whole file
            kind, offset = "unsafe path", 0
        self._findings.add(kind, file, str(exc), offset=offset)
        for item in items:
            self._report(item, kind, "it could not be read", max(0, offset - item.start))
