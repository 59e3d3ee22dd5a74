"""What makes a checkpoint of files with items: the documents beside them, and the manifest.

All that goes into them is known before the items are written, but for sizes, CRCs and times; so an ending can be
sent to another process, which completes the checkpoint without the state dict.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

from aiockpt.format.manifest.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiockpt.core.threads import Workers
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.manifest.index_writer import IndexDraft
    from aiockpt.format.transforms.item_transforms import TransformedDraft
    from aiockpt.storage.base import Transaction


@dataclass(frozen=True, slots=True)
class CommitDocuments:
    """What is written when all items are.

    Attributes:
        images: the names of the files with items, in order.
        documents: the files beside them and the manifest.
        manifest: what it says, but for files, index and times.
        index: its index; None for a format that has its own.
        transformed: describes the items where they are not stored as they are.
    """

    images: Sequence[str]
    documents: Mapping[str, bytes] = field(repr=False)
    manifest: Manifest
    index: IndexDraft | None = field(repr=False)
    transformed: TransformedDraft | None = field(repr=False, default=None)

    def encode(
        self,
        written: Mapping[str, FileFacts],
        crcs: Sequence[Sequence[int]],
        times_s: Mapping[str, float],
        encoded: Sequence[Sequence[EncodedItem]] | None = None,
    ) -> dict[str, bytes]:
        """Give the manifest and the documents, in the order in which they are to be written.

        Args:
            written: the files with items.
            crcs: for each of them the CRC-32 of each slot's payload.
            times_s: durations in seconds.
            encoded: for each of them what its items have come to, where they are not stored as they are.
        """
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


async def commit_checkpoint(
    transaction: Transaction,
    ending: CommitDocuments | None,
    written: Mapping[str, FileFacts],
    crcs: Sequence[Sequence[int]],
    times_s: Mapping[str, float],
    workers: Workers,
    encoded: Sequence[Sequence[EncodedItem]] | None = None,
    check: Callable[[], object] = lambda: None,
) -> dict[str, int]:
    """Write what makes it a checkpoint, and publish it.

    Args:
        transaction: where the files are.
        ending: what is left to write; None for a checkpoint that is one file.
        written: see `CommitDocuments.encode`.
        crcs: see `CommitDocuments.encode`.
        times_s: see `CommitDocuments.encode`.
        workers: for what takes long.
        encoded: see `CommitDocuments.encode`.
        check: is called right before publishing, and may raise what is then raised instead.

    Returns:
        The size in bytes of each file but the manifest.
    """
    sizes = {name: facts.nbytes for name, facts in written.items()}
    if ending is not None:
        documents = await workers.run(ending.encode, written, crcs, times_s, encoded)
        await write_documents(transaction, documents)
        sizes |= {name: len(data) for name, data in documents.items() if name != MANIFEST_NAME}
    check()
    await transaction.commit()
    return sizes


async def write_documents(transaction: Transaction, documents: Mapping[str, bytes | bytearray]) -> None:
    """Write small files, each as a whole."""
    for name, data in documents.items():
        sink = await transaction.create(name, len(data))
        await sink.write(memoryview(data))
        await sink.finish()
