"""The documents that are written last, after all data files: `.metadata` and the manifest.

Everything in them is known before the items are written, except sizes, CRCs and times. So they can be sent to another
process, which completes the checkpoint without the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt._version import __version__
from aiockpt.format.manifest.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME

if TYPE_CHECKING:
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.manifest.index_writer import IndexDraft
    from aiockpt.format.transforms.item_transforms import TransformedDraft


def writer_name() -> str:
    """Return the versions of the software that writes, for a manifest."""
    import torch  # not above: the writer process needs it only to commit in place of a dead rank 0

    return f"aiockpt {__version__} (torch {torch.__version__})"


def now() -> str:
    """Return the time for a manifest: ISO 8601, UTC, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class CommitDocuments:
    """The metadata and the manifest of a checkpoint, encoded as far as they are known."""

    images: Sequence[str]  # the files with items, in order
    documents: Mapping[str, bytes] = field(repr=False)  # except the manifest
    manifest: Manifest  # without files, index and times
    index: IndexDraft | None = field(repr=False)  # None: the format has its own
    transformed: TransformedDraft | None = field(repr=False, default=None)  # None: items are stored as they are

    def encode(
        self,
        written: Mapping[str, FileFacts],
        crcs: Sequence[Sequence[int]],
        times_s: Mapping[str, float],
        encoded: Sequence[Sequence[EncodedItem]] | None = None,
    ) -> dict[str, bytes]:
        """Return the manifest and the documents, in the order in which they are to be written."""
        documents, totals = self.documents, self.manifest.totals
        section = None
        if self.transformed is not None and encoded is not None:
            documents = {METADATA_NAME: self.transformed.metadata.finish(encoded), **documents}
            section = self.transformed.section(encoded)
            totals = {**totals, "file_bytes": sum(facts.nbytes for facts in written.values())}
        files = {name: written[name] for name in self.images}
        files |= {name: FileFacts(len(data), crc32(data)) for name, data in documents.items()}
        manifest = replace(self.manifest, files=files, times_s=times_s, totals=totals)
        index = None if self.index is None else self.index.finish(crcs)
        return {MANIFEST_NAME: encode_manifest(manifest, index, section), **documents}
