"""The documents that are written last, after all data files: `.metadata` and the manifest.

Everything in them is known before the items are written, except sizes, CRCs and times. So they can be sent to another
process, which completes the checkpoint without the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from isal.isal_zlib import crc32

from aiockpt._version import __version__
from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.errors import CommitError, printable_key
from aiockpt.format.belonging import describes
from aiockpt.format.layouts import DOCUMENT_BYTES
from aiockpt.format.manifest.manifest import DIVIDED_KEY, INDEX_KEY, FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME

if TYPE_CHECKING:
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.manifest.index_writer import Drafts
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.delta import AdoptedFiles

T = TypeVar("T", bytes, bytes | bytearray)


def writer_name() -> str:
    """Return the versions of the software that writes, for a manifest."""
    import torch  # not above: the writer process does not need it

    return f"aiockpt {__version__} (torch {torch.__version__})"


def now() -> str:
    """Return the time for a manifest: ISO 8601, UTC, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class CommitDocuments:
    """The metadata and the manifest of a checkpoint, encoded as far as they are known."""

    files: Mapping[str, bytes] = field(repr=False)  # that the caller has added
    drafts: Drafts = field(repr=False)
    manifest: Manifest  # without files, index and times
    adopted: AdoptedFiles | None = None  # further files, whose items come behind those that are written

    def encode(
        self,
        written: Mapping[str, FileFacts],
        crcs: Sequence[int],
        times_s: Mapping[str, float],
        encoded: Sequence[Sequence[EncodedItem]],
        hashes: Sequence[str | None] | None = None,
    ) -> dict[str, bytes | bytearray]:
        """Return the manifest and the documents, in the order in which they are to be written.

        ``written`` are all files with items, ``crcs`` those of the payloads of all tensor items, file by file, and
        ``encoded`` the items of each file as they are stored, if they are transformed; ``hashes`` are those of the same
        payloads, if they were hashed.
        """
        documents, index, transformed = self.drafts.documents, self.drafts.index, self.drafts.transformed
        section = None
        if self.adopted is not None:
            written, crcs = {**written, **self.adopted.files}, [*crcs, *self.adopted.crcs]
            hashes = None if hashes is None else [*hashes, *self.adopted.hashes]
        if transformed is not None:
            documents = {**documents, METADATA_NAME: transformed.metadata.finish(encoded)}
            section = transformed.section(encoded)
        documents = {**self.files, **documents}  # `.metadata` comes last
        totals = {**self.manifest.totals, "file_bytes": sum(facts.nbytes for facts in written.values())}
        files = {**written, **{name: FileFacts(len(data), crc32(data)) for name, data in documents.items()}}
        manifest = replace(self.manifest, files=files, times_s=times_s, totals=totals)
        text = None if index is None else index.finish(crcs, hashes)
        index_key = DIVIDED_KEY if index is not None and index.is_divided else INDEX_KEY
        return checked({MANIFEST_NAME: encode_manifest(manifest, text, section, index_key=index_key), **documents})


def checked(documents: dict[str, T]) -> dict[str, T]:
    """Return the documents of a checkpoint; raise CommitError if one is larger than any that is read."""
    for name, data in documents.items():
        if describes(name.rpartition("/")[2]) and len(data) > DOCUMENT_BYTES:
            raise CommitError(
                f"{printable_key(name)} would have {len(data)} bytes, and none of more than {DOCUMENT_BYTES} is read: "
                "save fewer keys, in several checkpoints, or less metadata"
            )
    return documents


def commit_documents(
    drafts: Drafts,
    totals: Mapping[str, int],
    metadata: dict[str, JsonValue],
    containers: list[dict[str, JsonValue]],
    files: Mapping[str, bytes],
) -> CommitDocuments:
    """Return what is known of the documents before the items are written; metadata and ``files`` are the user's own."""
    manifest = Manifest(writer_name(), now(), metadata, totals=totals, containers=containers)
    return CommitDocuments(files, drafts, manifest)
