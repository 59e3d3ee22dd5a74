"""The manifest, `.aiockpt.json`: everything that `.metadata` has no room for, in plain text.

It holds the user's metadata, sizes and CRCs of the files, totals and times, the containers that DCP's metadata
can't express, and an index of the items, so that opening a checkpoint needs no unpickling. A checkpoint without it is
a plain DCP checkpoint and loads all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.wording import a
from aiockpt.format.names import METADATA_NAME

if TYPE_CHECKING:
    from aiockpt.format.index import Index
    from aiockpt.format.transforms.base import ItemFacts

FORMAT_VERSION = 1

_PICKLED = (b"\x95", b"c")  # a frame, of protocols 4 and later; the name of a class, of those before
_FLOAT = "$float"
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST_BITS = 4096  # Python makes no text of much longer numbers

SEAL = ',\n  "manifest_crc32": "'
INDEX_KEY, DIVIDED_KEY = "index", "divided_index"  # the section of the index; of one with tensors in parts
_LONG_PARTS = (
    b',\n  "index": ',
    b',\n  "divided_index": ',
    b',\n  "transformed": ',
)  # a line break can't be within a text of JSON

SAVE_ID_DIGITS = 16

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The size of a file in bytes and the CRC-32 of all of it."""

    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest."""

    writer: str  # name and version of the program
    created: str  # ISO 8601, UTC
    metadata: dict[str, JsonValue] = field(default_factory=dict)  # the user's own
    files: Mapping[str, FileFacts] = field(default_factory=dict)  # every file of the checkpoint except the manifest
    totals: Mapping[str, int] = field(default_factory=dict)  # counts and bytes
    times_s: Mapping[str, float] = field(default_factory=dict)  # durations in seconds
    containers: list[dict[str, JsonValue]] = field(default_factory=list)  # those that `.metadata` can't describe
    index: Index | None = None  # as far as it was read from the manifest
    # the transformed items, by file and offset
    transformed: Mapping[tuple[str, int], ItemFacts] = field(default_factory=dict)
    disks: tuple[DiskFacts, ...] = ()  # that have the files, if these are in several places


def encode_manifest(
    manifest: Manifest, index: str | None = None, transformed: str | None = None, *, index_key: str = INDEX_KEY
) -> bytes:
    """Encode a manifest as JSON text that ends with its own CRC-32.

    ``index`` and ``transformed`` are the JSON texts of these sections; None leaves them out.
    """
    document: dict[str, Any] = {
        "format": "aiockpt",
        "format_version": FORMAT_VERSION,
        "writer": manifest.writer,
        "created": manifest.created,
        "metadata": manifest.metadata,
        "totals": dict(manifest.totals),
        "times_s": {name: round(value, 6) for name, value in manifest.times_s.items()},
        "files": _listing(manifest.files),
        "containers": manifest.containers,
    }
    # The long sections come last: `decode_head` drops everything behind the first of them.
    sections = ""
    if index is not None:
        sections += f',\n  "{index_key}": {index}'
    if transformed is not None:
        sections += f',\n  "transformed": {transformed}'
    return _sealed(document, sections.encode())


def with_parts(data: bytes, files: Mapping[str, FileFacts], parts: Sequence[str]) -> bytes:
    """Return a manifest that lists these files as well, and names the checkpoints that were published with it.

    Args:
        data: the manifest of what is at the top.
        files: the size and CRC of each file.
        parts: the directories and files that are a checkpoint, relative to the top, which is the empty name.
    """
    document, sections = _divided(data)
    document["files"] |= _listing(files)
    return _sealed({**document, "parts": list(parts)}, sections)


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A disk that has some files of a checkpoint; see `aiockpt.storage.hosts`."""

    id: str
    host: str  # its name
    files: frozenset[str] = field(repr=False)

    def __str__(self) -> str:
        return f"host {self.host} (disk {self.id[:8]})"


def with_disks(data: bytes, disks: Sequence[DiskFacts]) -> bytes:
    """Return a manifest that says which disk has which files, besides the documents; the first is published last."""
    document, sections = _divided(data)
    listed = [{"id": each.id, "host": each.host, "files": sorted(each.files)} for each in disks]
    return _sealed({**document, "disks": listed}, sections)


def disks_in(head: Mapping[str, Any] | None) -> tuple[DiskFacts, ...]:
    """Return what the head of a manifest says of the disks that have its files; nothing if they are in one place."""
    try:
        listed = () if head is None else head.get("disks", ())
        return tuple(
            DiskFacts(str(each["id"]), str(each["host"]), frozenset(map(str, each["files"]))) for each in listed
        )
    except (KeyError, TypeError, AttributeError):
        return ()


def _divided(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the head of an intact manifest, and its long sections as they are."""
    body = data.rpartition(SEAL.encode())[0]
    begin = min((at for each in _LONG_PARTS if (at := body.find(each)) >= 0), default=len(body))
    document: dict[str, Any] = json.loads(body[:begin] + b"\n}")
    return document, body[begin:]


def _listing(files: Mapping[str, FileFacts]) -> dict[str, JsonValue]:
    return {name: {"bytes": facts.nbytes, "crc32": f"{facts.crc:08x}"} for name, facts in files.items()}


def _sealed(document: Mapping[str, Any], sections: bytes) -> bytes:
    body = json.dumps(document, indent=2, ensure_ascii=False).removesuffix("\n}")
    if any("\ud800" <= character <= "\udfff" for character in body):  # half a character, from a file name maybe
        body = json.dumps(document, indent=2).removesuffix("\n}")
    data = body.encode() + sections
    return data + f'{SEAL}{crc32(data):08x}"\n}}\n'.encode()


def parts_in(head: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of the checkpoints that were published together, by the head of their manifest; else none."""
    parts = [] if head is None else head.get("parts")
    return frozenset(map(str, parts)) if isinstance(parts, list) else frozenset()


def facts_in(head: Mapping[str, Any]) -> dict[str, FileFacts] | None:
    """Return the size and CRC of each file that a manifest lists; None if it is damaged."""
    try:
        facts = {name: FileFacts(each["bytes"], int(each["crc32"], 16)) for name, each in head["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    is_sound = all(type(each.nbytes) is int and each.nbytes >= 0 and 0 <= each.crc < 1 << 32 for each in facts.values())
    return facts if is_sound else None


def decode_head(data: bytes) -> dict[str, Any] | None:
    """Return the JSON of a manifest without its long sections, such as the index; None if it is damaged."""
    body, _, seal = data.rpartition(SEAL.encode())
    try:
        if int(seal[:8], 16) != crc32(body):
            return None
        for part in _LONG_PARTS:
            body = body.partition(part)[0]
        head = json.loads(body + b"\n}")
    except (ValueError, RecursionError):
        return None
    return head if type(head) is dict else None


def save_id_of(manifest: bytes) -> str:
    """Return what only copies of one checkpoint have in common, for its manifest has the CRC of each file."""
    return hashlib.sha256(manifest).hexdigest()[:SAVE_ID_DIGITS]


def is_pickled(metadata: bytes) -> bool:
    """Return whether `.metadata`, of which this is the beginning, was pickled: aiockpt's begins differently."""
    return metadata[:1] == b"\x80" and metadata[2:3] in _PICKLED


def is_of_another_save(files: Mapping[str, FileFacts], metadata: bytes) -> bool:
    """Return whether a manifest was left by a checkpoint that another program has replaced in place, by its files.

    It records a `.metadata` other than this one, which is pickled and names its save in a `StorageMeta`, as torch's
    writers do and aiockpt's does not. A damaged or edited `.metadata` of aiockpt's does neither.
    """
    if not (is_pickled(metadata) and b"save_id" in metadata):
        return False
    facts = files.get(METADATA_NAME)
    return facts is None or facts != FileFacts(len(metadata), crc32(metadata))


def check_user_metadata(metadata: object) -> dict[str, JsonValue]:
    """Return a copy of the user's metadata as JSON values; raise TypeError, naming the key, for any other value.

    Scalars of NumPy and of torch become numbers, paths become texts. JSON has no number for nan, inf and -inf: they
    become ``{"$float": "nan"}``, which `read_user_metadata` turns back into floats.
    """
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of JSON-able values, not {type(metadata).__name__}")
    try:
        return {key: _json_copy(value, str(key)) for key, value in metadata.items() if _is_text(key, "metadata")}
    except RecursionError:
        raise TypeError("metadata is nested too deeply, or holds itself") from None


def read_user_metadata(value: Any) -> Any:
    """Return the user's metadata as it was passed, from the result of `check_user_metadata`."""
    if type(value) is list:
        return [read_user_metadata(part) for part in value]
    if type(value) is not dict:
        return value
    if value.keys() == {_FLOAT} and value[_FLOAT] in _NOT_FINITE:
        return float(value[_FLOAT])
    return {key: read_user_metadata(part) for key, part in value.items()}


def _is_text(key: object, where: str) -> bool:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; JSON keys are strings")
    if key == _FLOAT:
        raise TypeError(f"{where} has the key {key!r}, which stands for nan and inf; use another")
    return True


def _json_copy(value: Any, where: str) -> JsonValue:
    if _is_array(value):
        value = _number_of(value, where)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise TypeError(f"metadata[{where!r}] has more than {_MOST_BITS} bits; store it as text")
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return [_json_copy(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {k: _json_copy(v, f"{where}.{k}") for k, v in value.items() if _is_text(k, f"metadata[{where!r}]")}
    raise TypeError(
        f"metadata[{where!r}] is {a(type(value).__name__)}, which JSON can't hold; "
        "convert it, for example with .item() or str()"
    )


def _is_array(value: Any) -> bool:
    """Return whether a value is of torch or NumPy. Neither is imported here: the writer process needs none of them."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.generic | numpy.ndarray)
    )


def _number_of(value: Any, where: str) -> Any:
    """Return the value of a scalar of torch or NumPy. Blocks until a tensor on an accelerator is computed."""
    if value.ndim:
        raise TypeError(
            f"metadata[{where!r}] is a {type(value).__name__} of {value.ndim} dimensions; metadata takes single "
            "values: put it into the state, or pass .tolist()"
        )
    try:
        return float(value) if type(value).__name__ == "longdouble" else value.item()
    except (RuntimeError, NotImplementedError) as exc:  # on the meta device, for one
        raise TypeError(f"metadata[{where!r}] is a {type(value).__name__} without a value: {exc}") from exc
