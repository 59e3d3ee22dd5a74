"""The object that makes a checkpoint: DCP's metadata, other documents, the facts of the commit, and a footer."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.names import METADATA_NAME

if TYPE_CHECKING:
    from aiockpt.storage.base import Document, Stamp

COMMIT_NAME = METADATA_NAME
FILES = "files/"
_FOOTER = struct.Struct("<QI8s")  # the length of the facts, their CRC-32, and:
_MAGIC = b"AIOCKPTC"
TAIL_BYTES = 256 << 10  # usually all but the metadata
# A string of a pickle without frames and the opcode that puts it into the memo: ours, see
# `aiockpt.format.dcp.metadata_opcodes`, or of protocol 2.
_TEXT = rb"(?P<kind>\x8c.|X.{4})%b(?P<name>__[0-9]+(?:_[0-9]+)+\.distcp)(?=[qr])"
_FILE = re.compile(_TEXT % b"", re.DOTALL)
_TOMB, _TICKET_BYTES = b"aiockpt: deleted ", 85
TOMB_BYTES = len(_TOMB) + len("delete ") + _TICKET_BYTES

Tomb = Literal["put", "parts", "delete"]


@dataclass(frozen=True, slots=True)
class Commit:
    """The facts of a checkpoint."""

    token: str  # the prefix of its objects, up to its "/"; empty of one that is being deleted
    begun: Stamp = ""  # the stamp of the transaction
    files: Mapping[str, int] = field(default_factory=dict)  # the sizes of the objects, by the names of the files
    # where the other files are in the commit object: offset, length there, and length
    documents: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    replaces: str = ""  # the token of what it has replaced
    key: str = ""  # of the commit object
    stamp: Stamp = ""  # of the commit object, as `modified` and `tail`, its last bytes, and `size`
    modified: float = 0.0
    size: int = 0
    tail: bytes = field(default=b"", repr=False)
    tomb: Tomb | None = None  # which request its owner is about to send; None of a checkpoint
    ticket: str = ""  # of that owner

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all files, by name."""
        return {**self.files, **{name: place[2] for name, place in self.documents.items()}}


def encode_tomb(kind: Tomb, ticket: str) -> bytes:
    """Return a tombstone, all of the same size; a new ticket makes it differ from all others."""
    return _TOMB + f"{kind:<6} {ticket:<{_TICKET_BYTES}}".encode()


def decode_tomb(data: bytes, given: Mapping[str, Any]) -> Commit | None:
    """Return what a tombstone says; None if it is none."""
    if len(data) != TOMB_BYTES or not data.startswith(_TOMB):
        return None
    kind, ticket = data.removeprefix(_TOMB).decode().split()
    return Commit("", tomb=kind, ticket=ticket, **given)  # type: ignore[arg-type] # as it was written


@dataclass(slots=True)
class Claim:
    """The tombstone of this process, at a key, which it renews."""

    key: str
    tomb: Tomb
    stamp: Stamp


def encode_commit(
    token: str, begun: Stamp, files: Mapping[str, int], documents: Mapping[str, Document], replaces: str, path_key: str
) -> bytes:
    """Return the commit object of a checkpoint whose keys begin with ``path_key``."""
    pieces: list[Document] = []
    places: dict[str, tuple[int, int, int]] = {}
    at = 0
    for name in sorted(documents, key=lambda name: name != METADATA_NAME):  # where stock's reader looks for it
        data = documents[name]
        stored = relocated(data, token.removeprefix(path_key)) if name == METADATA_NAME else data
        places[name] = at, len(stored), len(data)
        pieces.append(stored)
        at += len(stored)
    facts = {
        # Relative, so that the checkpoint can be copied to another place.
        "token": token.removeprefix(path_key),
        "begun": begun,
        "files": dict(files),
        "documents": places,
        "replaces": replaces.removeprefix(path_key),
    }
    text = json.dumps(facts).encode()
    return b"".join([*pieces, text, _FOOTER.pack(len(text), crc32(text), _MAGIC)])


def with_token(data: bytes, token: str) -> bytes:
    """Return a commit object with the absolute token ``/`` + token, for a copy that refers to objects elsewhere."""
    text, begin = _facts(data, len(data))
    facts = json.loads(text) | {"token": f"/{token}"}
    text = json.dumps(facts).encode()
    return data[:begin] + text + _FOOTER.pack(len(text), crc32(text), _MAGIC)


def facts_bytes(tail: bytes) -> int | None:
    """Return how many of the last bytes of an object are the facts and the footer; None if it is no commit object."""
    if not tail.endswith(_MAGIC):
        return None
    length, _, _ = _FOOTER.unpack(tail[-_FOOTER.size :])
    return int(length) + _FOOTER.size


def decode_commit(tail: bytes, size: int, path_key: str, given: Mapping[str, Any]) -> Commit:
    """Return the facts from the last bytes of a commit object of this size; ``given`` are those of the object."""
    text, _ = _facts(tail, size)
    try:
        facts = json.loads(text)
        documents = {
            name: (int(at), int(stored), int(nbytes)) for name, (at, stored, nbytes) in facts["documents"].items()
        }
        files = {str(name): int(nbytes) for name, nbytes in facts["files"].items()}
        token, replaces = (_absolute(facts[name], path_key) for name in ("token", "replaces"))
        if any(at < 0 or stored < 0 or at + stored > size for at, stored, _ in documents.values()):
            raise ValueError("documents are not where they should be")
        return Commit(token, str(facts["begun"]), files, documents, replaces, size=size, tail=tail, **given)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptCheckpointError(f"{path_key}{COMMIT_NAME} is damaged: {exc}; use an older checkpoint") from exc


def _absolute(token: str, path_key: str) -> str:
    return token[1:] if token.startswith("/") else path_key + token if token else ""


def _facts(tail: bytes, size: int) -> tuple[bytes, int]:
    """Return the JSON of the facts, and where it begins in ``tail``."""
    length, crc, _ = _FOOTER.unpack(tail[-_FOOTER.size :])
    begin = len(tail) - _FOOTER.size - length
    text = tail[max(0, begin) : len(tail) - _FOOTER.size]
    if begin < 0 or crc32(text) != crc:
        raise CorruptCheckpointError(f"a commit object of {size} bytes is damaged; use an older checkpoint")
    return text, begin


# --- names of files within DCP's metadata ---------------------------------------------------------------


def relocated(metadata: Document, folder: str) -> bytes:
    """Put the folder of the objects before the names of the files that DCP's metadata refers to."""
    prefix = f"{folder}{FILES}".encode()
    return _FILE.sub(lambda found: _text(found["kind"], prefix + found["name"]), bytes(metadata))


def original(metadata: bytes, folder: str) -> bytes:
    """Return what `relocated` was given. The folder has so many random letters that it is nothing else."""
    named = re.compile(_TEXT % re.escape(f"{folder}{FILES}".encode()), re.DOTALL)
    return named.sub(lambda found: _text(found["kind"], found["name"]), metadata)


def _text(kind: bytes, text: bytes) -> bytes:
    """Return the opcodes of a string that was written by opcodes of this kind."""
    return b"\x8c%c" % len(text) + text if kind[:1] == b"\x8c" else b"X" + struct.pack("<I", len(text)) + text
