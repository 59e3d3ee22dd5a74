"""Verify a checkpoint: its documents, the plan of what should be where, then the bytes of every item."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.spans import record_to, span
from aiockpt.core.threads import run_each
from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError, sanitize_error
from aiockpt.format.checks import check_index
from aiockpt.format.file_sets import join_common
from aiockpt.format.index import Entry, Index, ItemRange, TensorEntry
from aiockpt.format.item.arrays import check_arrays
from aiockpt.format.item.tensor_item import Framed, ItemChecker, read_framing
from aiockpt.format.item.ziparchive import ZIP_MAGIC, FramingError
from aiockpt.format.layouts import LooseFiles
from aiockpt.format.names import COMMON_NAME, CONFIG_NAME, MANIFEST_NAME, METADATA_NAME
from aiockpt.planning.flatten import StructureError, unflatten
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.jobs import ItemWindow
from aiockpt.reading.open import IndexReader, look_at, open_files
from aiockpt.reading.verify.inventory import (
    Extent,
    Inventory,
    Segment,
    StoredFile,
    StoredItem,
    combined,
    cut_segments,
    split_overlaps,
)
from aiockpt.telemetry.progress import ReadReport
from aiockpt.telemetry.verification import Findings, ProblemKind, Severity, VerifyReport

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.format.transforms.base import Transform
    from aiockpt.storage.base import Source, Storage

T = TypeVar("T")

_SHOWN_KEYS = 100


async def verify_checkpoint(
    storage: Storage,
    path: str,
    workers: Workers,
    transforms: Sequence[Transform] = (),
    report: ReadReport | None = None,
) -> VerifyReport:
    """Check everything about a checkpoint; see `aiockpt.AsyncCheckpointer.verify`.

    Every file is read once, by all threads, with a few MiB in memory per thread; a transformed item is decoded whole.
    Cancelling returns when the threads are done.
    """
    report = report or ReadReport("verify", path)
    record_to(report.spans)
    with span("open"):
        source = DecodedSource(await open_files(storage, path, workers), path, transforms)
    try:
        findings = Findings()
        reading = _Reading(source, path, findings)
        with span("plan"):
            inventory = await workers.run(reading.take_inventory)
        verifier = ItemVerifier(source, workers, findings, report)
        files = [file for name, file in inventory.files.items() if name not in source.items]
        report.expect(
            sum(source.items[n].place.length for n in source.items if n in inventory.files)
            + sum(file.nbytes for file in files)
        )
        await verifier.verify_decoded([inventory.files[n] for n in source.items if n in inventory.files], source)
        await verifier.verify(files)
        return VerifyReport(
            path=path,
            format=reading.format,
            problems=await workers.run(findings.ordered),
            files=len(files) + len(reading.described),
            items=inventory.entries,
            checked_bytes=verifier.read_bytes + sum(reading.described.values()),
            unverifiable=len(verifier.without_crc),
            unverifiable_keys=tuple(sorted(verifier.without_crc)[:_SHOWN_KEYS]),
            elapsed_s=report.elapsed_s,
            recording=report.recording,
        )
    finally:
        with anyio.CancelScope(shield=True):
            await workers.run(source.close)


@dataclass(eq=False)
class _Reading:
    """Opens a checkpoint as far as it can be read. Blocks."""

    source: DecodedSource
    path: str
    findings: Findings
    format: str = "unknown"
    described: dict[str, int] = field(default_factory=dict)  # the documents that were read, and their bytes

    @gc_pause()
    def take_inventory(self) -> Inventory:
        """Return what the checkpoint should consist of."""
        files = self.source.files
        found = look_at(self.source, self.path, is_joint=True)
        reader = IndexReader(self.source, self.path, findings=self.findings)
        index, error = None, None
        try:
            index = reader.read(found)
        except LoadError as exc:
            error = exc
        facts = {} if reader.manifest is None else reader.manifest.files
        config = (CONFIG_NAME,) if COMMON_NAME in files else ()
        documents = {METADATA_NAME, MANIFEST_NAME, *found.ranks.values()}
        self.described = {name: files[name] for name in documents if name in files}
        inventory = Inventory(
            {name: size for name, size in files.items() if name not in {*documents, *config}},
            {name: fact for name, fact in facts.items() if name != METADATA_NAME},
            self.findings,
        )
        for item in self.source.items.values():
            inventory.add_decoded(item.name, item.most, item.place.file)
        if isinstance(found, LooseFiles):
            self._add_loose(inventory, found, index, error)
        elif error is not None:
            raise error
        else:
            self.format = "dcp" if reader.is_replaced else found.format
            if found.is_checkpoint:
                self._add_described(inventory, reader, index, found.ranks)
        return inventory

    def _add_described(
        self, inventory: Inventory, reader: IndexReader, index: Index | None, ranks: Mapping[int, str]
    ) -> None:
        """Add the items of a checkpoint of DCP, or of ranks that saved alone."""
        manifest = reader.manifest
        given = None if manifest is None else manifest.index
        if not ranks and METADATA_NAME not in self.source.files:
            message = "the checkpoint does not have it: its save was never finished, or it was removed"
            self.findings.add("missing file", METADATA_NAME, message)
        if given is not None and 0 in reader.stored and not reader.parts:
            self._compare(reader.stored[0], given)
        indexes = [*reader.parts.values()] if reader.parts else [index] if index is not None else []
        for part in indexes:
            inventory.add(part, given, is_part=bool(reader.parts))
        inventory.find_overlaps()
        if index is not None:
            # The container records of the manifest count leaves in the order of its own keys.
            self._check_structure(index if given is None else given, MANIFEST_NAME if manifest else METADATA_NAME)
            if reader.common is not None:
                inventory.add_archive(COMMON_NAME)
                whole = reader.attempt(COMMON_NAME, partial(join_common, index, reader.common))
                self._check_structure(whole or index, METADATA_NAME)
            if not self._has_errors:  # loading would raise this one
                reader.attempt(METADATA_NAME, partial(check_index, self.path, index, self.source.files))
            if reader.parts and not self._has_errors:  # if places are wrong, other bytes would be compared
                reader.attempt(METADATA_NAME, reader.compare_copies, "unreadable")
        if not indexes and manifest is None:
            if reader.error is not None:  # nothing could be read: the disk failed, and the checkpoint may be sound
                raise reader.error
        elif len(indexes) >= len(ranks):
            inventory.find_unreferenced()

    def _add_loose(self, inventory: Inventory, found: LooseFiles, index: Index | None, error: LoadError | None) -> None:
        """Add the items of a torch.save or safetensors checkpoint."""
        names = found.files
        if index is None:
            damaged = isinstance(error, CorruptCheckpointError)
            size = self.source.files.get(names[0], 0) if len(names) == 1 else 0  # an index may name what is not there
            is_archive = size > 0 and self.source.read_bytes(names[0], 0, min(4, size)) == ZIP_MAGIC
            if error is not None and not damaged and not is_archive:
                sanitize_error(error)
                raise error
            name = names[0] if len(names) == 1 else ""
            message = str(error).removeprefix(f"{self.path}: ")
            self.findings.add("metadata", name, message, severity="error" if damaged else "warning")
            if is_archive:  # the CRCs of its records can be checked although its pickle is refused
                self.format = "torch"
                inventory.add_archive(name)
            return
        self.format = index.format
        if found.index and found.index not in inventory.files:
            self.described[found.index] = self.source.files[found.index]
        self._check_structure(index, METADATA_NAME)
        inventory.add(index, None)
        for name in names if index.format == "torch" else ():  # without tensors
            if name not in inventory.files:
                inventory.add_archive(name)
        inventory.find_overlaps()
        for name in index.beside:
            self.findings.add(
                "unreferenced file", name, "it lies beside the checkpoint: not checked", severity="warning"
            )

    @property
    def _has_errors(self) -> bool:
        return any(problem.severity == "error" for problem in self.findings.problems)

    def _compare(self, index: Index, given: Index) -> None:
        """Add a problem for each key on which manifest and metadata disagree."""
        for key in dict.fromkeys((*index.entries, *given.entries)):
            one, other = index.entries.get(key), given.entries.get(key)
            if one is None or other is None:
                holder, lacking = (METADATA_NAME, MANIFEST_NAME) if other is None else (MANIFEST_NAME, METADATA_NAME)
                self.findings.add("disagreement", METADATA_NAME, f"{holder} has the key, {lacking} has not", key=key)
            elif _facts_of(one) != _facts_of(other):
                message = f"it says {_facts_of(one)}, but {MANIFEST_NAME} says {_facts_of(other)}"
                self.findings.add("disagreement", METADATA_NAME, message, key=key)

    def _check_structure(self, index: Index, name: str) -> None:
        try:
            unflatten(index.paths.values(), [0] * len(index.paths), index.containers)
            check_arrays(index.entries, index.paths, index.containers)
        except (StructureError, KeyError, TypeError, ValueError) as exc:
            self.findings.add("structure", name, f"the keys do not make up a state dict: {exc}")


def _facts_of(entry: Entry) -> tuple[object, ...]:
    """Return the facts of an entry that metadata and manifest both store."""
    if isinstance(entry, TensorEntry):
        return entry.dtype, entry.shape, *((chunk.offsets, chunk.sizes, chunk.place) for chunk in entry.chunks)
    return ("object", getattr(entry, "place", None))


# --- the bytes: one pass over each file computes its own CRC and those of all its items ------------------


STEP_BYTES = 4 << 20
"""Size of a thread's read buffer, and the most that one job reads, so that several threads share a large file."""
_FETCH_BYTES = 16 << 20  # larger than any zip directory or data.pkl, so a damaged size allocates no more
_DECODED_AT_ONCE = 64


@dataclass(eq=False)
class ItemVerifier:
    """Reads files with all worker threads and adds a problem for every mismatch."""

    _source: Source
    _workers: Workers
    _findings: Findings
    _progress: ReadReport
    without_crc: list[str] = field(default_factory=list)
    _checker: ItemChecker = field(default_factory=ItemChecker)
    _buffers: list[memoryview] = field(default_factory=list)
    # Bytes of each read; unlike +=, append is atomic, so threads need no lock.
    _counts: list[int] = field(default_factory=list)

    @property
    def read_bytes(self) -> int:
        """Bytes read so far; bytes that were read twice count once."""
        return sum(self._counts)

    async def verify(self, files: Sequence[StoredFile]) -> None:
        """Check files and their items. Cancelling waits for the threads."""
        large = [item for file in files for item in file.items if item.is_large]
        await self._run([partial(self._prepare, item) for item in large])
        await self._run(await self._workers.run(self._jobs, files))
        await self._workers.run(self._conclude, files)

    async def verify_decoded(self, files: Sequence[StoredFile], source: DecodedSource) -> None:
        """Check virtual files; each is decoded whole, in memory."""
        small = [file for file in files if file.nbytes < STEP_BYTES]
        groups = [[file] for file in files if file.nbytes >= STEP_BYTES]
        groups += [small[at : at + _DECODED_AT_ONCE] for at in range(0, len(small), _DECODED_AT_ONCE)]
        await self._run([partial(self._check_decoded, group, source) for group in groups])

    def _check_decoded(self, files: Sequence[StoredFile], source: DecodedSource) -> None:
        for name, item in [(file.name, item) for file in files for item in file.items]:
            known = source.items[name]
            place = known.place
            stored = replace(item, file=place.file, start=place.offset, covered=known.crc is not None)
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
        """Run blocking jobs in all threads."""
        with self._workers.at_least(min(self._source.most_reads, len(jobs))) as count:
            await run_each(self._run_one, jobs, count)

    async def _run_one(self, job: Callable[[], None]) -> None:
        with span("check"):
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
            jobs += [partial(self._read, file, each) for each in cut_segments(extents, whole, STEP_BYTES)]
            for one, _ in apart:
                cut = cut_segments([one], None, STEP_BYTES)
                jobs += [partial(self._read, file, each, overlaps=True) for each in cut]
        return jobs

    def _read(self, file: StoredFile, segment: Segment, *, overlaps: bool = False) -> None:
        """Read a segment of a file, whose CRC is that of all segments that don't overlap."""
        try:  # popped, so that no other thread has it
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, STEP_BYTES + BLOCK_BYTES))
        try:
            crc = self._read_segment(file, segment, buffer)
        except LoadError as exc:
            self._unreadable(file.name, segment.start, [extent.item for extent in segment.extents], exc)
        else:
            self._counts.append(segment.stop - segment.start)
            if not overlaps:
                file.parts.append((segment.start, segment.stop - segment.start, crc))
        self._buffers.append(buffer)

    def _read_segment(self, file: StoredFile, segment: Segment, buffer: memoryview) -> int:
        crc = 0

        def add(part: memoryview) -> None:
            nonlocal crc
            crc = crc32(part, crc)

        skip = segment.start % BLOCK_BYTES  # same offset in the page as in the file, as O_DIRECT requires
        view = buffer[skip : skip + segment.stop - segment.start]
        self._source.read(file.name, segment.start, view, add)
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
        elif isinstance(exc, CorruptCheckpointError):  # it was cut or removed since its size was listed
            kind = "size"
        self._findings.add(kind, file, str(exc), offset=offset)
        for item in items:
            self._report(item, kind, "it could not be read", max(0, offset - item.start))
