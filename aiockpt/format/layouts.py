"""The layouts of a checkpoint: the problem of each, as far as its documents tell, and its own files. Without torch.

| layout | is read by | its own files are proven by |
| --- | --- | --- |
| `DcpFiles` | `.metadata`, or aiockpt's manifest | `.metadata`, if it can be decoded: it names them |
| `RankFiles` | `__N.metadata` of ranks that saved alone | these, if they can be decoded |
| `SafetensorsFiles`, `TorchFiles` with an index | the index | the index: the files of tensors in its map |
| `SafetensorsFiles` without one | the headers of its files | these |
| `TorchFiles` without one | its only file, or a set of them | nothing |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.errors import CorruptCheckpointError, LoadError, printable_key
from aiockpt.format.item.ziparchive import LEGACY_MAGIC, ZIP_MAGIC, FramingError, read_directory
from aiockpt.format.names import COMMON_NAME, CONFIG_NAME, METADATA_NAME, SHARDING_KEY, SUFFIX

Format = Literal["aiockpt", "dcp", "safetensors", "torch", ""]
State = Literal["complete", "unfinished", "damaged"]

Fetch = Callable[[str, int, int], bytes]
"""Returns the bytes of a file, by its name, from an offset on, as many as asked for; fewer where the file ends."""

DOCUMENT_BYTES = 2 << 30
"""The largest document that is read, for whatever purpose; a larger one is damaged."""
HOLE = bytes(64 << 10)
"""Zeros that no document has: where they are, it was cut short."""
DATA_NAMES = "*.distcp"

_PART_BYTES = 1 << 20  # of a document that are read at once
_HEADER_BYTES = 100_000_000
_CONFIG_BYTES = 1 << 20
_LENGTH_BYTES = 8  # of the header's length in a safetensors file
_BEGIN_BYTES = 1024  # enough for the name of the first record of an archive
_DIRECTORY_BYTES = 64 << 10  # the end of an archive: all of its directory, unless it is large
_FIRST_RECORD = re.compile(rb"PK\x03\x04.{4}\x00\x00.{20}[^/]+/data\.pkl", re.DOTALL)  # stored, not compressed
_DATA_IN_METADATA = re.compile(rb"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
SHARD_ALONE = "it holds the shards of one rank alone, not whole tensors: name the directory with the files of all ranks"

_LIGHTNING = "meta.pt"
_OF_RANK = re.compile(r"shard-[0-9]", re.IGNORECASE)
_MAGICS = (
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as of Keras"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"version https://git-lfs", "a Git LFS pointer in place of the file: fetch the file with `git lfs pull`"),
)


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """The answer of recognition: of this class no checkpoint, and of one below a checkpoint of that layout."""

    format: Format = ""  # its format; of a directory of checkpoints, that they were published together, by aiockpt
    problem: str = ""  # why it is not complete, as far as names tell, or what it is in place of a checkpoint
    files: tuple[str, ...] = ()  # the files of a set, in order
    index: str = ""  # the document that names them, if there is one
    ranks: Mapping[int, str] = field(default_factory=dict)  # the metadata files of ranks that saved alone
    choices: tuple[str, ...] = ()  # the checkpoints in it, by their relative paths, if it is none itself
    beside: tuple[str, ...] = ()  # the other files at its top, which are not read with it

    broken: ClassVar[State] = "damaged"  # its state, if it has a problem

    @property
    def is_checkpoint(self) -> bool:
        return type(self) is not Recognised

    @property
    def is_described(self) -> bool:
        """Whether documents at its top say what belongs to it, whatever is in directories below."""
        return bool(self.index)

    @property
    def state(self) -> State:
        """Its state, as far as names tell."""
        return self.broken if self.problem else "complete"

    def find_problem(self, files: Mapping[str, int], fetch: Fetch) -> str:
        """Return why it can't be complete, by its documents; empty if it may be."""
        return ""

    def own_files(self, files: Mapping[str, int], fetch: Fetch) -> set[str]:
        """Return the names that are proven to be its own, without a manifest; raise LoadError if something hinders."""
        if self.choices or self.problem:
            raise CorruptCheckpointError("it is no checkpoint, but has some in it" if self.choices else self.problem)
        return set()


class DcpFiles(Recognised):
    """`.metadata`, or aiockpt's manifest, and the files that it names."""

    @property
    def is_described(self) -> bool:
        return True

    @property
    def documents(self) -> list[str]:
        """The metadata that names its files."""
        return [METADATA_NAME]

    def find_problem(self, files: Mapping[str, int], fetch: Fetch) -> str:
        return next(filter(None, (metadata_problem(name, files, fetch) for name in self.documents)), "")

    def own_files(self, files: Mapping[str, int], fetch: Fetch) -> set[str]:
        if not files.keys() >= set(self.documents):
            raise CorruptCheckpointError(self.problem)
        own = {*self.documents}.union(*(named_by(name, document(name, files, fetch)) for name in self.documents))
        # What other programs store beside a `.metadata`, which does not name it.
        if METADATA_NAME in own and type(config_of(files, fetch).get("sharded_backend")) is str:
            own |= {COMMON_NAME, CONFIG_NAME}
        is_there = METADATA_NAME in own and _LIGHTNING in files
        if is_there and isinstance(recognise_file(_LIGHTNING, files[_LIGHTNING], fetch), TorchFiles):
            own.add(_LIGHTNING)
        return own


class UnfinishedFiles(DcpFiles):
    """Files of a save that has written no `.metadata`."""

    broken = "unfinished"


class RankFiles(DcpFiles):
    """The metadata of ranks that saved alone, with the files of each."""

    @property
    def documents(self) -> list[str]:
        return list(self.ranks.values())


class LooseFiles(Recognised):
    """Files that hold tensors by name: one, those of an index, or a set by their names."""

    are_proven: ClassVar[bool]  # without an index, by their headers

    def find_problem(self, files: Mapping[str, int], fetch: Fetch) -> str:
        keys: dict[str, Mapping[str, str]] = {}
        for name in self.files:
            inner = recognise_file(name, files[name], fetch)
            try:
                if type(inner) is not type(self):
                    raise CorruptCheckpointError(inner.problem or "it is damaged")
                keys[name] = self.keys_of(name, files[name], fetch)
            except CorruptCheckpointError as exc:
                return f"{printable_key(name)}: {exc}" if self.files[1:] else str(exc)
        return self.problem_of_keys(keys, document(self.index, files, fetch) if self.index else b"")

    def keys_of(self, name: str, size: int, fetch: Fetch) -> Mapping[str, str]:
        """Return the tensors of a file by their names, as its header tells; raise if it can't be whole."""
        raise NotImplementedError

    def problem_of_keys(self, keys: Mapping[str, Mapping[str, str]], index: bytes) -> str:
        """Return why files with these tensors can't be one checkpoint; empty if they may be."""
        return ""

    def own_files(self, files: Mapping[str, int], fetch: Fetch) -> set[str]:
        if self.index and self.files:
            return {self.index, *(name for name in self.files if name.endswith(SUFFIX if self.are_proven else ".bin"))}
        if problem := self.problem or (self.find_problem(files, fetch) if self.are_proven else ""):
            raise CorruptCheckpointError(problem)
        return {*self.files} if self.are_proven else set()


@dataclass(frozen=True, kw_only=True)
class SafetensorsFiles(LooseFiles):
    """Safetensors files."""

    format: Format = "safetensors"
    are_proven = True

    def keys_of(self, name: str, size: int, fetch: Fetch) -> Mapping[str, str]:
        length = int.from_bytes(fetch(name, 0, min(size, _LENGTH_BYTES)), "little")
        if length > _HEADER_BYTES or _LENGTH_BYTES + length > size:
            raise CorruptCheckpointError("its header is cut short or damaged")
        try:
            header = json.loads(fetch(name, _LENGTH_BYTES, length))
            metadata = header.pop("__metadata__", {})
            expected = _LENGTH_BYTES + length + max((facts["data_offsets"][1] for facts in header.values()), default=0)
            places = json.loads(metadata.get(SHARDING_KEY, "{}"))
            is_rest = self.files == (name,) and any(any(place["saved_offsets"]) for place in places.values())
            shared = {key: kept for key, kept in metadata.items() if kept in header}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise CorruptCheckpointError("its header is damaged") from None
        if expected != size or is_rest:
            raise CorruptCheckpointError(SHARD_ALONE if is_rest else f"it has {size} bytes, but should have {expected}")
        return shared | {key: key for key in header}

    def problem_of_keys(self, keys: Mapping[str, Mapping[str, str]], index: bytes) -> str:
        if index:
            placed = {key: plain_name(str(name)) for key, name in json.loads(index)["weight_map"].items()}
            wrong = next((key for key, name in placed.items() if key not in keys[name]), None)
            says = f", as {self.index} says"
            return "" if wrong is None else f"{placed[wrong]} does not hold {printable_key(wrong)}{says}"
        if all(map(_OF_RANK.match, self.files)):
            return ""
        holders: dict[str, str] = {}
        for name, stored in keys.items():
            for key in (key for key, kept in stored.items() if key == kept):
                if holders.setdefault(key, name) is not name:
                    return f"{printable_key(key)} is in both {holders[key]} and {name}: they are of different saves"
        return ""


@dataclass(frozen=True, kw_only=True)
class TorchFiles(LooseFiles):
    """Files of ``torch.save``; without an index nothing proves that they are of one checkpoint."""

    format: Format = "torch"
    are_proven = False

    def keys_of(self, name: str, size: int, fetch: Fetch) -> Mapping[str, str]:
        if fetch(name, 0, 4) == ZIP_MAGIC and "data.pkl" not in _records(name, size, fetch):
            raise CorruptCheckpointError("it was cut short, or is damaged")
        return {}


def plain_name(name: str) -> str:
    """Return a name in the map of an index as files are listed: without "./", which leads nowhere."""
    return re.sub(r"(?<![^/])(\./)+", "", name)


def leads_out(name: str) -> bool:
    """Return whether a path may lead out of a directory, here or on a system with drives and backslashes."""
    parts = name.split("/")
    return not {"", ".", ".."}.isdisjoint(parts) or not {"\\", ":", "\0"}.isdisjoint(name) or not name.isprintable()


# --- documents ------------------------------------------------------------------------------------------


def parts_of(name: str, offset: int, size: int, fetch: Fetch) -> Iterator[bytes]:
    """Yield a byte range in parts, up to where the file ends.

    A sparse file takes no disk space, but would take up to 2 GiB of memory before its first hole is seen.
    """
    end = offset + size
    while offset < end and (part := fetch(name, offset, min(_PART_BYTES, end - offset))):
        yield part
        offset += len(part)


def document(name: str, files: Mapping[str, int], fetch: Fetch) -> bytes:
    """Return a file that describes others; nothing of one that has a hole, or is larger than any can be."""
    data = bytearray()
    for part in parts_of(name, 0, files[name], fetch) if files[name] <= DOCUMENT_BYTES else ():
        if HOLE in part:
            return b""
        data += part
    return bytes(data)


def metadata_problem(name: str, files: Mapping[str, int], fetch: Fetch) -> str:
    """Return why a `.metadata` of DCP can't be whole: it is cut short, or a file that it names is missing."""
    metadata, folder = document(name, files, fetch), name[: name.rfind("/") + 1]
    if metadata[:1] != b"\x80" or metadata[-1:] != b".":
        return f"{name} is cut short or damaged"
    named = sorted({folder + name.decode() for name in _DATA_IN_METADATA.findall(metadata)})
    return next((f"it lacks its file {name}" for name in named if name not in files), "")


def named_by(name: str, metadata: bytes) -> set[str]:
    """Return the data files that a `.metadata` of DCP names; raise LoadError if it can't be decoded."""
    from aiockpt.format.dcp.metadata import decode_metadata  # imports torch, which the writer process rarely needs

    try:
        return {file for file in decode_metadata(metadata, as_stored=True).files if fnmatchcase(file, DATA_NAMES)}
    except LoadError as exc:
        raise CorruptCheckpointError(f"{name} can't be decoded, so nothing tells which files are its own") from exc


def config_of(files: Mapping[str, int], fetch: Fetch) -> Mapping[str, object]:
    """Return Megatron-Core's `metadata.json`; nothing if there is none, or it is another program's."""
    if not 0 < files.get(CONFIG_NAME, 0) <= _CONFIG_BYTES:
        return {}
    try:
        config = json.loads(document(CONFIG_NAME, files, fetch))
    except (ValueError, RecursionError):
        return {}
    return config if type(config) is dict else {}


def has_common(files: Mapping[str, int], fetch: Fetch) -> bool:
    """Return whether Megatron-Core has stored what is not sharded in `common.pt`, as its `metadata.json` says."""
    return config_of(files, fetch).get("common_backend") == "torch"


# --- files ----------------------------------------------------------------------------------------------


def recognise_file(name: str, size: int, fetch: Fetch) -> Recognised:
    """Return what a file is, by its first bytes."""
    begin = fetch(name, 0, min(size, _BEGIN_BYTES))
    if begin[:4] == ZIP_MAGIC:
        return _recognise_archive(name, size, begin, fetch)
    if LEGACY_MAGIC in begin[:64]:
        return TorchFiles(files=(name,))
    for magic, what in _MAGICS:
        if begin.startswith(magic):
            return Recognised(problem=f"it is {what}")
    if begin[257:262] == b"ustar":
        how = "of NeMo: unpack it with tar, and load what is in it" if name.endswith(".nemo") else "of any contents"
        old = begin.startswith(b"sys_info\0")
        return Recognised(
            problem=f"it is a tar archive {'of torch before 0.2: load it with torch.load' if old else how}"
        )
    if name.endswith(".onnx"):
        return Recognised(problem="it is an ONNX model")
    if name.lower().endswith(SUFFIX) or is_safetensors(begin):
        return SafetensorsFiles(files=(name,))
    if begin[:1] == b"\x80" and begin[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return Recognised(problem="it is a pickle, but not one of torch.save; to unpickle it may run code")
    return Recognised()


def is_safetensors(begin: bytes) -> bool:
    """Return whether a file that begins so is one of safetensors."""
    return begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") <= _HEADER_BYTES


def _recognise_archive(name: str, size: int, begin: bytes, fetch: Fetch) -> Recognised:
    end = fetch(name, max(0, size - _DIRECTORY_BYTES), min(size, _DIRECTORY_BYTES))
    if b"/constants.pkl" in end:
        return Recognised(
            problem="it is a TorchScript program, not a torch.save file: open it with torch.jit.load, and save its "
            "state_dict()"
        )
    if name.endswith(".npz"):
        return Recognised(problem="it is a NumPy .npz archive")
    if not _FIRST_RECORD.match(begin) and "data.pkl" not in _records(name, size, fetch):
        return Recognised(problem="it is a zip archive, but not one of torch.save")
    return TorchFiles(files=(name,))


def _records(name: str, size: int, fetch: Fetch) -> set[str]:
    """Return the names in an archive of torch.save; none if it was cut short or is damaged."""
    try:
        records = read_directory(size, lambda at, length: fetch(name, at, max(0, min(length, size - at))))
    except FramingError:
        return set()
    return {record.name.partition("/")[2] for record in records}
