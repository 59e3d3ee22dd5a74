"""Open a checkpoint of any supported format: read and check its index."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio
import torch
from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.lazy import lazy_property
from aiockpt.core.wording import some_of
from aiockpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    MissingHostError,
    MissingKeysError,
    printable,
    sanitize_error,
)
from aiockpt.format.checks import check_index
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.format.file_sets import (
    check_alone,
    decode_shard_index,
    in_directory,
    join_common,
    join_files,
    join_ranks,
    merge_shards,
)
from aiockpt.format.index import Entry, Index, InlineEntry, ItemRange, ObjectEntry, ObjPath, TensorEntry, TensorItem
from aiockpt.format.item.arrays import check_arrays
from aiockpt.format.item.objects import decode_object
from aiockpt.format.item.tensor_item import parse_tensor_item
from aiockpt.format.item.ziparchive import FramingError
from aiockpt.format.keys import check_patterns, hint, matching
from aiockpt.format.layouts import (
    DOCUMENT_BYTES,
    HOLE,
    SHARD_ALONE,
    DcpFiles,
    LooseFiles,
    RankFiles,
    Recognised,
    TorchFiles,
    has_common,
    parts_of,
    recognise_file,
)
from aiockpt.format.manifest.columnar_index import IndexedEntries
from aiockpt.format.manifest.manifest import FileFacts, Manifest, is_of_another_save, is_pickled
from aiockpt.format.manifest.reader import decode_manifest
from aiockpt.format.names import COMMON_NAME, MANIFEST_NAME, METADATA_NAME
from aiockpt.format.recognise import SHARD_INDEX, absent_text, rank_metadata, recognise, wrong_file
from aiockpt.format.safetensors.reader import (
    HEADER_PROBE_BYTES,
    decode_header,
    header_end,
    with_shared_names,
)
from aiockpt.format.torch_file.torch_file import read_torch_file
from aiockpt.planning.dtensor import is_distributed
from aiockpt.planning.flatten import StructureError, flatten, is_taken_apart
from aiockpt.planning.ranges import select
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.jobs import ItemWindow
from aiockpt.reading.read_plan import ReadRequest, value_key
from aiockpt.storage.folder import open_below

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.options import LoadOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Source, Storage
    from aiockpt.telemetry.verification import Findings, ProblemKind

T = TypeVar("T")

_PART_NAME = re.compile(r"(__[0-9]+)?\.metadata|\.aiockpt\.json|.*\.distcp", re.DOTALL)
_MOST_SHOWN = 10
_JOINED = "aiockpt's own load joins the ranks' parts"
_WRAPPED = "value"

_NOT_ITS_MANIFEST = (
    f"{MANIFEST_NAME} was left by a checkpoint that another program has replaced in place, so it is ignored; remove it"
)

logger = logging.getLogger("aiockpt")


def read_index(
    source: Source,
    path: str,
    *,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    as_stored: bool = False,
    keys: Sequence[str] | None = None,
) -> Index:
    """Read and check the index of a checkpoint, and its manifest, if it has one. Blocks.

    ``trust``: unpickle objects without restriction, and do not limit their decoded size. ``as_stored``: return what
    DCP's metadata says, for its planners: quantized tensors are tensors, and tensors may lack chunks, as in the
    metadata of one rank. ``keys``: only these have to be readable.
    """
    try:
        reader = IndexReader(source, path, safe_globals, trust=trust, as_stored=as_stored, keys=keys)
        index = reader.read(look_at(source, path))
    except LoadError as exc:
        sanitize_error(exc)
        raise
    assert index is not None  # there are no findings
    return index


def check_place(source: Source, path: str) -> None:
    """Raise CheckpointNotFoundError if the path is a file inside of a checkpoint."""
    name = posixpath.basename(path)
    if list(source.files) == [name] and _PART_NAME.fullmatch(name):
        raise CheckpointNotFoundError(
            f"{path} is a file inside of a checkpoint: pass its directory, {posixpath.dirname(path)}"
        )


def look_at(source: Source, path: str, *, is_joint: bool = False) -> Recognised:
    """Return what checkpoint a path shows; if it shows none, raise an error that says what it is. Blocks.

    ``is_joint``: it may be several checkpoints in directories below that were published together.
    """
    check_place(source, path)
    name, files = posixpath.basename(path), source.files
    alone = list(files) == [name]
    index = name if name in files and name.endswith(SHARD_INDEX) else ""
    found = recognise(files, source.read_bytes, alone=alone and not index, index=index)
    if found.choices and not (is_joint and found.format):
        raise CheckpointNotFoundError(
            f"{path}: it is no checkpoint, but holds {'several' if found.choices[1:] else 'one'}: "
            f"{some_of(found.choices, _MOST_SHOWN)}; add {'one of these' if found.choices[1:] else 'this'} to the path"
        )
    if not found.is_checkpoint and (found.problem or not found.format):
        what = "it is neither a torch.save file, nor a safetensors file, nor a directory"
        if not alone:
            what = f"the directory has no {METADATA_NAME} and no safetensors or torch.save file"
        raise CheckpointNotFoundError(f"{path}: there is no checkpoint: {found.problem or what}")
    return found


@dataclass(eq=False)
class IndexReader:
    """Reads the index of a checkpoint, layout by layout. Blocks.

    Problems are raised; if there are ``findings``, they are added there instead, and what is left is read.
    """

    source: Source
    path: str
    safe_globals: Sequence[Any] = ()
    trust: bool = False
    as_stored: bool = False
    keys: Sequence[str] | None = None
    findings: Findings | None = None

    manifest: Manifest | None = None  # unless another program has replaced the checkpoint in place
    is_replaced: bool = False
    stored: dict[int, Index] = field(default_factory=dict)  # what metadata says, by rank; 0 if it is that of all
    parts: dict[int, Index] = field(default_factory=dict)  # of ranks that saved alone, with decoded items
    common: Index | None = None  # what Megatron-Core stores beside `.metadata`
    error: LoadError | None = None  # of a document that the file system failed to read

    def read(self, found: Recognised) -> Index | None:
        """Return the index; with findings, None if there is none. Problems of loose files are always raised."""
        if self.findings is None:
            self._check_complete(found)
        self.manifest = self._decoded(MANIFEST_NAME, self._read(MANIFEST_NAME), decode_manifest)
        metadata = self._read_metadata()
        index: Index | None = None
        match found:
            case LooseFiles():
                self._check_complete(found)
                index = self._read_loose(found)
            case RankFiles():
                index = self._read_ranks(found.ranks)
            case DcpFiles():
                index = self._read_dcp(metadata)
        listed = {} if self.manifest is None else self.manifest.files  # added by the one who saved it
        beside = [name for name in found.beside if name not in listed]
        return replace(index, beside=beside) if index is not None and beside else index

    def _check_complete(self, found: Recognised) -> None:
        if found.problem and not (found.ranks or found.index):  # reading these tells more
            is_shard = self._is_alone and found.problem == SHARD_ALONE
            advice = (
                f", {posixpath.dirname(self.path)}"
                if is_shard
                else ". Use an older checkpoint, or restore what it lacks"
            )
            raise CorruptCheckpointError(f"{self.path}: {found.problem}{advice}")

    @property
    def _is_alone(self) -> bool:
        """Whether the path names the file, not its directory."""
        return [*self.source.files] == [posixpath.basename(self.path)]

    def attempt(self, name: str, call: Callable[[], T], kind: ProblemKind = "metadata") -> T | None:
        """Return what a call returns; with findings, None if it raises a problem of a file, which is added."""
        try:
            return call()
        except LoadError as exc:
            if self.findings is None:
                raise
            kind = "unreadable" if exc is self.error else "manifest" if name == MANIFEST_NAME else kind
            message = str(exc).removeprefix(f"{self.path}: ").removeprefix(f"{self.path}/{name}: ")
            self.findings.add(kind, name, message)
            return None

    def _read(self, name: str) -> bytes | None:
        def read() -> bytes:
            try:
                return read_document(self.source, name, self.path)
            except LoadError as exc:
                self.error = self.error if isinstance(exc, CorruptCheckpointError) else exc
                raise

        return self.attempt(name, read) if name in self.source.files else None

    def _decoded(self, name: str, data: bytes | None, decode: Callable[[bytes], T]) -> T | None:
        def decoded(data: bytes) -> T:
            with _located(self.path if name in (METADATA_NAME, MANIFEST_NAME) else posixpath.join(self.path, name)):
                return decode(data)

        return None if data is None else self.attempt(name, lambda: decoded(data))

    # --- files of tensors ---------------------------------------------------------------------------------

    def _read_loose(self, found: LooseFiles) -> Index:
        """Read the index of a file, or of a set of them."""
        with _located(self.path):
            index = self._read_headers(found)
            _check_readable(index, self.keys or ())
        check_index(self.path, index, self.source.files)
        self._check_files()
        return index

    def _read_headers(self, found: LooseFiles) -> Index:
        source, headers = self.source, dict[str, Index]()
        shards = decode_shard_index(found.index, read_document(source, found.index)) if found.index else None
        for name in found.files:
            if name not in source.files:
                raise CorruptCheckpointError(f"{found.index} names the file {name}, which is missing")
            if isinstance(found, TorchFiles):
                headers[name] = _read_torch(source, name, self.safe_globals, self.trust, self.keys is not None)
            else:
                headers[name] = _read_safetensors(source, name)
        index = join_files(headers) if shards is None else merge_shards(found.index, shards, headers)
        if self._is_alone and (warning := check_alone(found.files[0], index, posixpath.dirname(self.path))):
            logger.warning("%s: %s", self.path, warning)
        return with_shared_names(index)

    # --- DCP ----------------------------------------------------------------------------------------------

    def _read_metadata(self) -> bytes | None:
        """Return `.metadata`, unless it is not needed; the manifest is dropped if it is of another checkpoint."""
        if self.findings is None and self.manifest is not None and METADATA_NAME in self.source.files:
            # All of it is rarely needed: in most checkpoints the manifest has all of the index, in columns.
            begin = _bytes(self.source, METADATA_NAME, 0, min(3, self.source.files[METADATA_NAME]))
            given = None if self.manifest.index is None else self.manifest.index.entries
            if isinstance(given, IndexedEntries) and not is_pickled(begin):
                return None
        metadata = self._read(METADATA_NAME)
        if self.manifest and metadata is not None and is_of_another_save(self.manifest.files, metadata):
            self.manifest, self.is_replaced = None, True
            if self.findings is None:
                logger.warning("%s: %s", self.path, _NOT_ITS_MANIFEST)
            else:
                self.findings.add("manifest", MANIFEST_NAME, _NOT_ITS_MANIFEST, severity="warning")
        return metadata

    def _read_dcp(self, metadata: bytes | None) -> Index | None:
        is_strict, manifest = self.findings is None, self.manifest
        given = None if manifest is None else manifest.index
        if is_strict:
            self._check_files()
            if given is not None and isinstance(given.entries, IndexedEntries):
                given.entries.check(self.source.files, self.path)
                return given
        is_sound = metadata is None or self._is_sound(metadata)
        index = self._decoded(METADATA_NAME, metadata, partial(decode_metadata, as_stored=self.as_stored))
        if index is not None:
            self.stored[0] = index
        index = given or index if not is_sound else index or given
        if index is None:
            return None
        if is_strict:
            check_index(self.path, index, self.source.files, is_part=self.as_stored)
        index = self._presented(index, METADATA_NAME, is_part=self.as_stored)
        if manifest is not None:
            index = Index(index.entries, index.paths, manifest.containers, manifest.metadata, "aiockpt")
        try:
            if is_strict and manifest is not None:
                check_arrays(index.entries, index.paths, index.containers)
        except ValueError as exc:
            raise CorruptCheckpointError(f"{self.path}/{MANIFEST_NAME} does not fit {METADATA_NAME}: {exc}") from exc
        self.common = None if self.as_stored else self.attempt(COMMON_NAME, self._read_common)
        if self.common is None or not is_strict:
            return index
        with _located(self.path):
            return join_common(index, self.common)

    def _is_sound(self, metadata: bytes) -> bool:
        """Return whether `.metadata` is as the manifest says, if that says something."""
        facts = None if self.manifest is None else self.manifest.files.get(METADATA_NAME)
        if facts is None or facts == FileFacts(len(metadata), crc32(metadata)):
            return True
        if self.findings is None:
            raise CorruptCheckpointError(f"{self.path}/{METADATA_NAME} does not match its CRC; use an older checkpoint")
        message = f"it has {len(metadata)} bytes with the CRC-32 {crc32(metadata):08x}, but was written with {facts}"
        self.findings.add("file crc" if len(metadata) == facts.nbytes else "size", METADATA_NAME, message)
        return False

    def _check_files(self) -> None:
        manifest, files = self.manifest, self.source.files
        problem = "" if manifest is None else wrong_file(manifest.files, files)
        if manifest is not None and problem and (absent := absent_text(manifest.disks, files)):
            raise MissingHostError(
                f"{self.path}: {absent}: open the run with a manager that has own_disks=True, with ranks on all of "
                "these hosts"
            )
        if problem:
            raise CorruptCheckpointError(
                f"{self.path}: {problem}; it was truncated or changed, so use an older checkpoint"
            )

    def _read_common(self) -> Index | None:
        """Return what Megatron-Core stores beside `.metadata`; None if it did not write this checkpoint."""
        files = self.source.files
        if not has_common(files, self.source.read_bytes):
            return None
        if COMMON_NAME not in files:
            raise CorruptCheckpointError(
                f"{self.path} lacks {COMMON_NAME}, the part of Megatron's state that is not sharded"
            )
        with _located(self.path):
            try:
                common = _read_torch(self.source, COMMON_NAME, self.safe_globals, self.trust)
            except CorruptCheckpointError:
                raise
            except LoadError:
                # Its keys are not known without permission. As one object it asks for that when it is read, unless it
                # is left out.
                place = ItemRange(COMMON_NAME, 0, files[COMMON_NAME])
                return Index({COMMON_NAME: ObjectEntry(place)}, {COMMON_NAME: (COMMON_NAME,)})
        check_index(self.path, common, files)
        return common

    def _presented(self, index: Index, name: str, *, is_part: bool) -> Index:
        """Return an index whose transformed items, if there are any, are virtual files of the source.

        With findings, those whose places contradict each other are left out.
        """

        def exposed() -> Index:
            if not isinstance(self.source, DecodedSource):
                raise LoadError(f"{self.path} holds compressed or otherwise transformed items, which can't be read so")
            facts = {} if self.manifest is None else self.manifest.transformed
            shown = self.source.expose(index, facts, trust=self.trust)
            # Once more: the places are in virtual files now, whose lengths come from the manifest.
            check_index(self.path, shown, self.source.files, is_part=is_part)
            return shown

        if not index.is_transformed:
            return index
        if (shown := self.attempt(name, exposed)) is not None:
            return shown
        plain = {key: entry for key, entry in index.entries.items() if not _is_transformed(entry)}
        return replace(index, entries=plain, paths={key: index.paths[key] for key in plain})

    # --- ranks that saved alone ---------------------------------------------------------------------------

    def read_rank(self, rank: int) -> Index:
        """Read and check the metadata of a rank that saved alone, as it is stored."""
        check_place(self.source, self.path)
        ranks = rank_metadata(self.source.files)
        if rank not in ranks:
            others = f"; it has those of ranks {', '.join(map(str, ranks))}, {_JOINED}" if ranks else ""
            raise CheckpointNotFoundError(
                f"there is no checkpoint of rank {rank} alone: {self.path} lacks its metadata{others}"
            )
        self._read_part(rank, ranks[rank])
        return self.parts[rank]

    def _read_part(self, rank: int, name: str) -> None:
        part = self._decoded(name, self._read(name), partial(decode_metadata, as_stored=self.as_stored))
        if part is not None:
            self.stored[rank] = part = in_directory(part, posixpath.dirname(name))
            if self.findings is None:
                check_index(self.path, part, self.source.files, is_part=True)
            self.parts[rank] = self._presented(part, name, is_part=True)

    def _read_ranks(self, ranks: Mapping[int, str]) -> Index | None:
        """Read the metadata of ranks that saved alone, and join it."""
        if self.as_stored:
            raise CheckpointNotFoundError(
                f"{self.path} has no {METADATA_NAME}, only that of ranks {', '.join(map(str, ranks))}, which saved "
                f"alone: each reads its own with read_metadata(rank=...), as dcp.load does; {_JOINED}"
            )
        for rank, name in ranks.items():
            self._read_part(rank, name)
        if len(self.parts) < len(ranks):
            return None
        return self.attempt(METADATA_NAME, self._join, "coverage")

    def _join(self) -> Index:
        with _located(self.path):
            index = join_ranks(self.parts, self.source.files)
        if self.findings is None:
            check_index(self.path, index, self.source.files)
            self.compare_copies()
        return index

    def compare_copies(self) -> None:
        """Compare what several ranks that saved alone have stored each: its copies differ if their saves do."""
        for key, file, message, is_error in differing_copies(self.source, self.stored):
            if self.findings is not None:
                self.findings.add("disagreement", file, message, key=key, severity="error" if is_error else "warning")
            elif is_error:
                raise CorruptCheckpointError(f"{self.path}: {message}")
            else:
                logger.warning("%s: %s", self.path, printable(message))


def _is_transformed(entry: Entry) -> bool:
    if isinstance(entry, TensorEntry):
        return any(chunk.place.transforms for chunk in entry.chunks)
    return isinstance(entry, ObjectEntry) and bool(entry.place.transforms)


def _check_readable(index: Index, keys: Sequence[str]) -> None:
    """Raise the error of the first entry that keys ask for and that can't be read, or may hold what they ask for."""
    errors = {name: each.error for name, each in index.entries.items() if isinstance(each, InlineEntry) and each.error}
    if not errors:
        return
    found, unmatched = matching(index.entries, keys)
    for name, error in errors.items():
        if name in found or any(each.startswith(f"{name}.") or name == index.wrapped for each in unmatched):
            raise error


def _read_safetensors(source: Source, name: str) -> Index:
    size = source.files[name]
    head = _bytes(source, name, 0, min(size, HEADER_PROBE_BYTES))
    try:
        end = header_end(name, head, size)
    except CorruptCheckpointError as exc:
        what = recognise_file(name, size, source.read_bytes).problem
        raise (CorruptCheckpointError(f"{name}: {what}") if what else exc) from None
    if end > len(head):
        head += _bytes(source, name, len(head), end - len(head), name)
    return decode_header(name, head, size)


def _read_torch(source: Source, name: str, safe_globals: Sequence[Any], trust: bool, lenient: bool = False) -> Index:
    """Read the index of a file of torch.save; ``lenient``: what can't be read is an entry that has the error."""
    size = source.files[name]

    def fetch(offset: int, length: int) -> bytes:
        return _bytes(source, name, offset, max(0, min(length, size - offset)))

    file = read_torch_file(name, size, fetch, safe_globals=safe_globals, trust=trust, lenient=lenient)
    wrapped = None if is_taken_apart(file.value) else _WRAPPED
    try:
        flat = flatten(file.value if wrapped is None else {_WRAPPED: file.value})
    except StructureError as exc:
        raise LoadError(f"{name} can't be seen as a state dict: {exc}; read it with torch.load") from exc
    entries: dict[str, Entry] = {}
    paths: dict[str, ObjPath] = {}
    for key, place, leaf in zip(flat.names, flat.paths, flat.leaves, strict=True):
        try:
            entries[key] = file.entry(leaf, key) if isinstance(leaf, torch.Tensor) else file.object(leaf, key)
        except CorruptCheckpointError:
            raise
        except LoadError as exc:
            if not lenient:
                raise
            entries[key] = InlineEntry(None, exc)
        paths[key] = place
    return Index(entries, paths, flat.containers, {}, "torch", wrapped)


@contextlib.contextmanager
def _located(path: str) -> Iterator[None]:
    """Put the path before the messages of errors."""
    try:
        yield
    except LoadError as exc:
        raise type(exc)(f"{path}: {exc}") from exc


def read_document(source: Source, name: str, path: str = "") -> bytes:
    """Read a document whole, such as `.metadata`; refuse one with a hole."""
    return _bytes(source, name, 0, source.files[name], posixpath.join(path, name))


def _bytes(source: Source, name: str, offset: int, size: int, shown: str | None = None) -> bytes:
    """Read a byte range; with ``shown``, the path for messages, raise at the first hole."""
    if size > DOCUMENT_BYTES:
        raise CorruptCheckpointError(
            f"{shown or name} would have {size} bytes to describe what it holds; for a million tensors these are some "
            "100 MiB, so it is damaged. Use another checkpoint"
        )
    data = bytearray()
    for part in parts_of(name, offset, size, source.read_bytes):
        if shown is not None and HOLE in part:
            raise CorruptCheckpointError(
                f"{shown} has nothing but zeros somewhere behind byte {len(data)}: it was cut short or damaged. Use "
                "another checkpoint"
            )
        data += part
    return bytes(data)


# --- copies of one value by ranks that saved alone ------------------------------------------------------
# They differ where the ranks' files are of different saves.


_PIECE_BYTES = 1 << 20
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})

Verdict = Literal["same", "different", "unknown"]


def differing_copies(source: Source, parts: Mapping[int, Index]) -> Iterator[tuple[str, str, str, bool]]:
    """Yield key and file of each copy unlike the lowest rank's, a message, and whether it is an error. Blocks.

    Tensors and plain values must be equal. Other objects may differ from rank to rank, as states of generators do.
    """
    seen: dict[tuple[str, str], tuple[int, ItemRange]] = {}
    for rank, part in sorted(parts.items()):
        for name, box, place in [(name, *each) for name, entry in part.entries.items() for each in _places(entry)]:
            first_rank, first = seen.setdefault((name, box), (rank, place))
            if first_rank == rank:
                continue
            verdict = (_compare_tensors if box else _compare_objects)(source, first, place)
            which = f"ranks {first_rank} and {rank}, which saved alone, have different values of {name}"
            if verdict == "different":
                message = (
                    f"{which}: their files may be of different saves, of which the last was interrupted. Use an older "
                    "checkpoint, and give each save a directory of its own; data that differs between ranks needs "
                    "names that differ"
                )
                yield name, place.file, message, True
            elif verdict == "unknown":
                message = f"{which}, or store them in different ways; that of rank {first_rank} is used"
                yield name, place.file, message, False


def _places(entry: Entry) -> list[tuple[str, ItemRange]]:
    """Return where an entry is stored, chunk by chunk; an object has no box."""
    if isinstance(entry, TensorEntry):
        return [(f"{chunk.offsets} {chunk.sizes}", chunk.place) for chunk in entry.chunks]
    return [("", entry.place)] if isinstance(entry, ObjectEntry) else []


def _compare_tensors(source: Source, one: ItemRange, other: ItemRange) -> Verdict:
    """Compare by the CRCs in the framing, or byte by byte if there are none."""
    if one.transforms or other.transforms:
        return "same" if _is_same(source, one, other) else "unknown"
    try:
        items = [parse_tensor_item(place.length, ItemWindow(source, place).fetch) for place in (one, other)]
    except FramingError:  # of another serialization format
        return "same" if _is_same(source, one, other) else "different"
    if items[0].crc is None or items[1].crc is None:
        places = [
            place._replace(offset=place.offset + item.payload_offset, length=item.nbytes)
            for place, item in zip((one, other), items, strict=True)
        ]
        is_same = _is_same(source, *places)
    else:
        is_same = (items[0].nbytes, items[0].crc) == (items[1].nbytes, items[1].crc)
    if _layout(items[0]) != _layout(items[1]):
        return "unknown"
    return "same" if is_same else "different"


def _layout(item: TensorItem) -> tuple[object, ...]:
    return item.dtype, item.shape, item.stride, item.storage_offset, item.conj, item.neg


def _compare_objects(source: Source, one: ItemRange, other: ItemRange) -> Verdict:
    if _is_same(source, one, other):
        return "same"
    if one.transforms or other.transforms or max(one.length, other.length) > _PIECE_BYTES:
        return "unknown"
    try:
        values = [decode_object("", source.read_bytes(*place[:3])) for place in (one, other)]
    except LoadError:  # a load of it says why
        return "unknown"
    if not all(type(value) in _PLAIN for value in values):
        return "unknown"
    return "same" if repr(values[0]) == repr(values[1]) else "different"  # by repr: NaN is NaN, 1 is not True


def _is_same(source: Source, one: ItemRange, other: ItemRange) -> bool:
    """Compare byte by byte."""
    steps = range(0, one.length, _PIECE_BYTES)
    return one.length == other.length and all(
        source.read_bytes(one.file, one.offset + at, min(_PIECE_BYTES, one.length - at))
        == source.read_bytes(other.file, other.offset + at, min(_PIECE_BYTES, one.length - at))
        for at in steps
    )


# --- open checkpoints -----------------------------------------------------------------------------------


def _sharing(entries: Mapping[str, Entry]) -> list[str]:
    """Return the keys of entries whose first bytes are those of another one too: of very many, hardly any are."""
    if isinstance(entries, IndexedEntries):
        return entries.sharing()
    tensors = ((name, entry) for name, entry in entries.items() if isinstance(entry, TensorEntry))
    places = {name: entry.chunks[0].place[:2] for name, entry in tensors if entry.chunks}
    counts = Counter(places.values())
    return [name for name, place in places.items() if counts[place] > 1]


@dataclass(eq=False)
class OpenCheckpoint:
    """A checkpoint whose index was read."""

    source: DecodedSource
    path: str
    index: Index
    known: dict[ItemRange, TensorItem] = field(default_factory=dict)  # cache of parsed items

    @lazy_property
    def tied(self) -> dict[str, str]:
        """Keys of tensors that are stored under an earlier key, and that one."""
        first: dict[object, str] = {}
        found: dict[str, str] = {}
        for name in _sharing(self.index.entries):
            entry = self.index.entries[name]
            if isinstance(entry, TensorEntry) and (earlier := first.setdefault(value_key(name, entry), name)) != name:
                found[name] = earlier
        return found

    def names(self, keys: object) -> list[str]:
        """Return the keys that match names, names of containers and patterns, in their order."""
        patterns = check_patterns(keys)
        if patterns is None:
            return list(self.index.entries)
        found: dict[str, None] = {}
        for pattern in patterns:
            names, unmatched = matching(self.index.entries.keys(), [pattern])
            if unmatched:
                raise MissingKeysError(
                    f"{self.path} has no key that matches {pattern!r}.{hint(unmatched, self.index.entries)}",
                    unmatched,
                )
            found |= dict.fromkeys(names if len(names) < 2 else [n for n in self.index.entries if n in names])
        return list(found)

    def request(self, name: str, index: object, out: torch.Tensor | None = None) -> ReadRequest:
        """Validate a key and an index; return the read request."""
        entry = self.index.entries.get(name)
        if entry is None:
            raise KeyError(
                f"{self.path} has no {name!r}; keys() gives all that it has.{hint([str(name)], self.index.entries)}"
            )
        if out is not None and not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a tensor to fill, not a {type(out).__name__}")
        if not isinstance(entry, TensorEntry):
            if index is not None or out is not None:
                raise TypeError(f"{name} is an object, not a tensor: it is read as a whole")
            return ReadRequest(name, entry)
        if index is not None and is_distributed(out):
            raise TypeError(
                f"a part of {name} can't be read into a {type(out).__name__}, of which this rank's part is filled: "
                "leave the index out, or pass a plain tensor"
            )
        if index is None:
            return ReadRequest(name, entry, None, entry.shape, (), out)
        selections, shape, taken = select(entry.shape, index)
        return ReadRequest(name, entry, selections, shape, taken, out)


async def open_files(storage: Storage, path: str, workers: Workers) -> Source:
    """Open the files of a checkpoint; those beside it if the path is the index of a set."""
    return await open_below(storage, storage.split(path)[0] if path.endswith(SHARD_INDEX) else path, workers=workers)


async def open_checkpoint(storage: Storage, path: str, options: LoadOptions, tools: LoadTools) -> OpenCheckpoint:
    """Open the files of a checkpoint and read its index; the caller closes `OpenCheckpoint.source`."""
    source = DecodedSource(await open_files(storage, path, tools.workers), path, tools.transforms)
    keys = check_patterns(options.keys)
    try:
        index = await tools.workers.run(
            read_index, source, path, safe_globals=options.safe_globals, trust=options.trust, keys=keys
        )
    except BaseException:
        with anyio.CancelScope(shield=True):
            await tools.workers.run(source.close)
        raise
    if index.beside:
        names = some_of([printable(name) for name in index.beside], _MOST_SHOWN)
        logger.warning(
            "%s: other parts of the state lie beside it and were not read: %s; load them by name", path, names
        )
    return OpenCheckpoint(source, path, index)
