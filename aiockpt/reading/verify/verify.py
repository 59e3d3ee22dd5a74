"""Verify a checkpoint: its documents, the plan of what should be where, then the bytes of every item."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import anyio
from isal.isal_zlib import crc32

from aiockpt.core.gc_pause import gc_pause
from aiockpt.core.spans import record_to, span
from aiockpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from aiockpt.format.checks import check_index
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.format.file_sets import in_directory, join_common, join_ranks
from aiockpt.format.index import Entry, Index, ObjectEntry, TensorEntry
from aiockpt.format.item.arrays import check_arrays
from aiockpt.format.item.ziparchive import ZIP_MAGIC
from aiockpt.format.manifest.manifest import FileFacts, Manifest, is_of_another_save
from aiockpt.format.manifest.reader import decode_manifest
from aiockpt.format.names import COMMON_NAME, CONFIG_NAME, MANIFEST_NAME, METADATA_NAME
from aiockpt.planning.flatten import StructureError, unflatten
from aiockpt.reading.copies import differing_copies
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.open import (
    NOT_ITS_MANIFEST,
    look_at,
    open_files,
    presented,
    read_common,
    read_document,
    read_index,
)
from aiockpt.reading.verify.inventory import Inventory
from aiockpt.reading.verify.items import ItemVerifier
from aiockpt.telemetry.loads import ReadReport
from aiockpt.telemetry.verification import Findings, Severity, VerifyReport

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.format.transforms.base import Transform
    from aiockpt.storage.base import Storage

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
            files=len(files) + reading.described_files,
            items=inventory.entries,
            checked_bytes=verifier.read_bytes + reading.described_bytes,
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
    """Reads `.metadata`, the manifest or headers as far as they can be read. Blocks."""

    source: DecodedSource
    path: str
    findings: Findings
    format: str = "unknown"
    described_files: int = 0  # documents read: `.metadata`, the manifest
    described_bytes: int = 0
    _read_error: LoadError | None = None  # of a document that the file system failed to read
    _is_replaced: bool = False  # another program wrote `.metadata` after our manifest

    @gc_pause()
    def take_inventory(self) -> Inventory:
        """Return what the checkpoint should consist of."""
        files = self.source.files
        found = look_at(self.source, self.path)
        manifest, metadata = self._read_documents()
        facts = {} if manifest is None else {k: v for k, v in manifest.files.items() if k != METADATA_NAME}
        config = (CONFIG_NAME,) if COMMON_NAME in files else ()
        documents = {METADATA_NAME, MANIFEST_NAME, *found.ranks.values(), *config}
        described = {name: size for name, size in files.items() if name not in documents}
        inventory = Inventory(described, facts, self.findings)
        if found.layout == "ranks":
            self._add_ranks(inventory, found.ranks)
        elif found.layout == "dcp":
            self._add_dcp(inventory, manifest, metadata)
        else:
            self._add_other(inventory)
        return inventory

    def _add_dcp(self, inventory: Inventory, manifest: Manifest | None, metadata: bytes | None) -> None:
        """Add the items named by `.metadata` or the manifest."""
        self.format = "dcp" if MANIFEST_NAME not in self.source.files or self._is_replaced else "aiockpt"
        index, given = self._decode_metadata(manifest, metadata)
        if index is not None:
            index = self._presented(index, inventory, manifest)
            inventory.add(index, given)
            inventory.find_overlaps()
            # The container records of the manifest count leaves in the order of its own keys.
            self._check_structure(index if given is None else given, manifest)
            self._add_common(inventory, index)
            self._check_index(index)
        if index is not None or manifest is not None:
            inventory.find_unreferenced()
        elif self._read_error is not None:  # nothing could be read: the disk failed, and the checkpoint may be sound
            raise self._read_error

    def _add_common(self, inventory: Inventory, index: Index) -> None:
        """Add what Megatron-Core stores beside `.metadata`."""
        try:
            common = read_common(self.source, self.path)
            if common is not None:
                inventory.add_archive(COMMON_NAME)
                self._check_structure(join_common(index, common))
        except LoadError as exc:
            self.findings.add("metadata", COMMON_NAME, str(exc))

    def _add_ranks(self, inventory: Inventory, ranks: Mapping[int, str]) -> None:
        """Add the items of ranks that saved alone: each rank's, and check that they are one checkpoint."""
        self.format = "dcp"
        parts: dict[int, Index] = {}
        stored: dict[int, Index] = {}
        for rank, name in ranks.items():
            part = self._decoded(name, decode_metadata, self._read_file(name))
            if part is not None:
                stored[rank] = part = in_directory(part, os.path.dirname(name))
                parts[rank] = self._presented(part, inventory, None, name)
                inventory.add(parts[rank], None, is_part=True)
        inventory.find_overlaps()
        if len(parts) < len(ranks):
            if self._read_error is not None and not parts:
                raise self._read_error
            return
        try:
            index = join_ranks(parts, self.source.files)
        except LoadError as exc:
            self.findings.add("coverage", METADATA_NAME, str(exc))
        else:
            self._check_structure(index)
            self._check_index(index)
            self._compare_copies(stored)
        inventory.find_unreferenced()

    def _compare_copies(self, parts: Mapping[int, Index]) -> None:
        """Add a problem for each value of which ranks that saved alone have different copies."""
        if any(problem.severity == "error" for problem in self.findings.problems):
            return  # if places are wrong, other bytes would be compared
        try:
            for key, file, message, is_error in differing_copies(self.source, parts):
                severity: Severity = "error" if is_error else "warning"
                self.findings.add("disagreement", file, message, key=key, severity=severity)
        except LoadError as exc:
            self.findings.add("unreadable", METADATA_NAME, str(exc))

    def _presented(
        self, index: Index, inventory: Inventory, manifest: Manifest | None, name: str = METADATA_NAME
    ) -> Index:
        """Expose transformed items as virtual files; leave them out if their places contradict each other."""
        try:
            index = presented(self.source, self.path, index, manifest, is_part=name != METADATA_NAME)
        except LoadError as exc:
            self.findings.add("metadata", name, str(exc))
            plain = {key: entry for key, entry in index.entries.items() if not _is_transformed(entry)}
            index = replace(index, entries=plain, paths={key: index.paths[key] for key in plain})
        for item in self.source.items.values():
            inventory.add_decoded(item.name, item.most, item.place.file)
        return index

    def _add_other(self, inventory: Inventory) -> None:
        """Add the items of a torch.save or safetensors checkpoint."""
        names = [name for name in self.source.files if name != MANIFEST_NAME]
        try:
            index = read_index(self.source, self.path)
        except CheckpointNotFoundError:
            raise
        except LoadError as exc:
            damaged = isinstance(exc, CorruptCheckpointError)
            head = self.source.read_bytes(names[0], 0, min(4, self.source.files[names[0]])) if len(names) == 1 else b""
            is_archive = head == ZIP_MAGIC
            if not damaged and not is_archive:
                raise
            name = names[0] if len(names) == 1 else ""
            self.findings.add("metadata", name, str(exc), severity="error" if damaged else "warning")
            if is_archive:  # the CRCs of its records can be checked although its pickle is refused
                self.format = "torch"
                inventory.add_archive(name)
            return
        self.format = index.format
        self._check_structure(index)
        inventory.add(index, None)
        inventory.find_overlaps()
        for name in index.beside:
            self.findings.add(
                "unreferenced file", name, "it lies beside the checkpoint: not checked", severity="warning"
            )

    def _check_index(self, index: Index) -> None:
        """Add the error that loading would raise, unless an error was found already."""
        if any(problem.severity == "error" for problem in self.findings.problems):
            return
        try:
            check_index(self.path, index, self.source.files)
        except LoadError as exc:
            self.findings.add("metadata", METADATA_NAME, str(exc))

    def _read_documents(self) -> tuple[Manifest | None, bytes | None]:
        """Return the manifest and the bytes of `.metadata`, as far as they can be read and belong together."""
        manifest = self._decoded(MANIFEST_NAME, decode_manifest, self._read_file(MANIFEST_NAME))
        metadata = self._read_file(METADATA_NAME)
        if manifest and metadata is not None and is_of_another_save(manifest.files, metadata):
            self.findings.add("manifest", MANIFEST_NAME, NOT_ITS_MANIFEST, severity="warning")
            self._is_replaced = True
            manifest = None
        return manifest, metadata

    def _decode_metadata(self, manifest: Manifest | None, metadata: bytes | None) -> tuple[Index | None, Index | None]:
        """Return the index to check against, and the manifest's, if it has one."""
        given = None if manifest is None else manifest.index
        if METADATA_NAME not in self.source.files:
            message = "the checkpoint does not have it: its save was never finished, or it was removed"
            self.findings.add("missing file", METADATA_NAME, message)
        if metadata is None:
            return given, given
        facts = None if manifest is None else manifest.files.get(METADATA_NAME)
        sound = facts is None or self._is_sound(metadata, facts)
        index = self._decoded(METADATA_NAME, decode_metadata, metadata)
        if index is None or given is None:
            return index or given, given
        self._compare(index, given)
        return (index if sound else given), given

    def _is_sound(self, data: bytes, facts: FileFacts) -> bool:
        if len(data) != facts.nbytes:
            message = f"it has {len(data)} bytes but was written with {facts.nbytes}: it was truncated or changed"
            self.findings.add("size", METADATA_NAME, message)
        elif crc32(data) != facts.crc:
            message = f"its {len(data)} bytes have the CRC-32 {crc32(data):08x} instead of {facts.crc:08x}"
            self.findings.add("file crc", METADATA_NAME, message)
        else:
            return True
        return False

    def _read_file(self, name: str) -> bytes | None:
        if name not in self.source.files:
            return None
        try:
            data = read_document(self.source, name)
        except LoadError as exc:
            if isinstance(exc, CorruptCheckpointError):
                self._add_damage(name, exc)
            else:
                self.findings.add("unreadable", name, str(exc))
                self._read_error = exc
            return None
        self.described_files += 1
        self.described_bytes += len(data)
        return data

    def _decoded(self, name: str, decode: Callable[[bytes], T], data: bytes | None) -> T | None:
        try:
            return None if data is None else decode(data)
        except LoadError as exc:
            self._add_damage(name, exc)
            return None

    def _add_damage(self, name: str, error: LoadError) -> None:
        self.findings.add("manifest" if name == MANIFEST_NAME else "metadata", name, str(error))

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

    def _check_structure(self, index: Index, manifest: Manifest | None = None) -> None:
        containers = index.containers if manifest is None else manifest.containers
        try:
            unflatten(index.paths.values(), [0] * len(index.paths), containers)
            check_arrays(index.entries, index.paths, containers)
        except (StructureError, KeyError, TypeError, ValueError) as exc:
            name = METADATA_NAME if manifest is None else MANIFEST_NAME
            self.findings.add("structure", name, f"the keys do not make up a state dict: {exc}")


def _is_transformed(entry: Entry) -> bool:
    if isinstance(entry, TensorEntry):
        return any(chunk.place.transforms for chunk in entry.chunks)
    return isinstance(entry, ObjectEntry) and bool(entry.place.transforms)


def _facts_of(entry: Entry) -> tuple[object, ...]:
    """Return the facts of an entry that metadata and manifest both store."""
    if isinstance(entry, TensorEntry):
        return entry.dtype, entry.shape, *((chunk.offsets, chunk.sizes, chunk.place) for chunk in entry.chunks)
    return ("object", getattr(entry, "place", None))
