"""The manifest, `.aiockpt.json`: what `.metadata` has no room for, in plain text.

It holds the user's own facts, sizes and CRCs of the files, totals and times, the containers that DCP's
metadata can't tell apart, and an index of the items, so that opening a checkpoint needs no unpickling. A checkpoint
without it is a plain DCP checkpoint and loads all the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiockpt.format.index import Index
    from aiockpt.format.transformed import ItemFacts

FORMAT_VERSION = 1

SEAL = ',\n  "manifest_crc32": "'

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The size of a file in bytes and the CRC-32 of all of it."""

    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        writer: name and version of the program that wrote the checkpoint.
        created: when, in ISO 8601 and UTC.
        metadata: the user's own facts.
        files: every file of the checkpoint but the manifest itself.
        totals: counts and bytes.
        times_s: durations in seconds.
        containers: those containers of the state dict that `.metadata` can't describe.
        index: what the checkpoint holds, as far as it was read from the manifest.
        transformed: the items that are stored otherwise than as they are, by file and offset.
    """

    writer: str
    created: str
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    times_s: Mapping[str, float] = field(default_factory=dict)
    containers: list[dict[str, JsonValue]] = field(default_factory=list)
    index: Index | None = None
    transformed: Mapping[tuple[str, int], ItemFacts] = field(default_factory=dict)


def encode_manifest(manifest: Manifest, index: str | None = None, transformed: str | None = None) -> bytes:
    """Write a manifest as JSON text that ends with its own CRC-32.

    Args:
        manifest: what to write, but for its index.
        index: the text of the index, see `aiockpt.format.manifest_index`; None to leave it out.
        transformed: the text of that section, see `aiockpt.format.transformed`; None to leave it out.
    """
    document = {
        "format": "aiockpt",
        "format_version": FORMAT_VERSION,
        "writer": manifest.writer,
        "created": manifest.created,
        "metadata": manifest.metadata,
        "totals": dict(manifest.totals),
        "times_s": {name: round(value, 6) for name, value in manifest.times_s.items()},
        "files": {name: {"bytes": facts.nbytes, "crc32": f"{facts.crc:08x}"} for name, facts in manifest.files.items()},
        "containers": manifest.containers,
    }
    body = json.dumps(document, indent=2, ensure_ascii=False).removesuffix("\n}")
    if any("\ud800" <= character <= "\udfff" for character in body):  # half a character, from a file name maybe
        body = json.dumps(document, indent=2).removesuffix("\n}")
    if index is not None:
        body += f',\n  "index": {index}'
    if transformed is not None:
        body += f',\n  "transformed": {transformed}'
    return f'{body}{SEAL}{crc32(body.encode()):08x}"\n}}\n'.encode()


def check_user_metadata(metadata: object) -> dict[str, JsonValue]:
    """Copy the user's facts, refusing what JSON can't hold.

    Raises:
        TypeError: naming the key that is not JSON-able.
    """
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of JSON-able values, not {type(metadata).__name__}")
    try:
        return {key: _json_copy(value, str(key)) for key, value in metadata.items() if _is_text(key, "metadata")}
    except RecursionError:
        raise TypeError("metadata is nested too deeply, or holds itself") from None


def _is_text(key: object, where: str) -> bool:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; JSON keys are strings")
    return True


def _json_copy(value: Any, where: str) -> JsonValue:
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"metadata[{where!r}] is {value}, which JSON can't hold; store it as text")
        return float(value)
    if isinstance(value, list | tuple):
        return [_json_copy(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {k: _json_copy(v, f"{where}.{k}") for k, v in value.items() if _is_text(k, f"metadata[{where!r}]")}
    raise TypeError(
        f"metadata[{where!r}] is a {type(value).__name__}, which JSON can't hold; "
        "convert it, for example with .item() or str()"
    )
