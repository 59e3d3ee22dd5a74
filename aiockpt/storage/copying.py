"""Copies a committed checkpoint from one storage to another, file by file, in such a way that it can be gone on with.

What is copied is checked against the CRCs of its manifest before the copy is published, so a damaged checkpoint never
becomes two. The copy appears at once and whole, as a save does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from isal.isal_zlib import crc32

from aiockpt.core.threads import run_each
from aiockpt.errors import AiockptError, CheckpointNotFoundError, CorruptCheckpointError, WriteError
from aiockpt.format.manifest.manifest import FileFacts, decode_head, facts_in, save_id_of
from aiockpt.format.manifest.reader import decode_manifest
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.telemetry.saves import MirrorResult

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Source, Storage, Transaction

_CHUNK_BYTES = 16 << 20
_BUFFERS = 8
_FILES = 4  # at once
_DOCUMENTS = (METADATA_NAME, MANIFEST_NAME)

logger = logging.getLogger("aiockpt")


class RateLimit:
    """A limit of bytes per second, over a second or so; None: no limit. For one loop."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s or math.inf
        self._free_s = 0.0  # when what was taken so far is paid for

    @property
    def most_bytes(self) -> int:
        """How many bytes to take at once, so that they flow evenly."""
        return _CHUNK_BYTES if self._bytes_per_s >= _CHUNK_BYTES else max(1 << 20, int(self._bytes_per_s) >> 12 << 12)

    async def take(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent."""
        self._free_s = max(self._free_s, time.monotonic()) + nbytes / self._bytes_per_s
        await anyio.sleep(max(0.0, self._free_s - nbytes / self._bytes_per_s - time.monotonic()))


class _ChunkBuffers:
    """Memory for the chunks on their way, which is made as it is needed."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_BUFFERS)
        self._free: list[mmap.mmap] = []

    async def take(self, nbytes: int) -> mmap.mmap:
        await self._slots.acquire()
        return self._free.pop() if self._free else mmap.mmap(-1, nbytes)

    def give(self, buffer: mmap.mmap) -> None:
        self._free.append(buffer)
        self._slots.release()


async def copy_checkpoint(
    source: Storage,
    path: str,
    target: Storage,
    target_path: str,
    save_id: str,
    *,
    workers: Workers,
    limit: RateLimit,
    base: str | None = None,
    check: Callable[[], object] = lambda: None,
) -> MirrorResult:
    """Copy a checkpoint that has a manifest, replacing what is at the target.

    If this fails or is cancelled, the files that were copied as a whole stay, invisible, for the next call.

    Args:
        source: where it is.
        path: its path there.
        target: where to copy it.
        target_path: its path there.
        save_id: that of its manifest; see `save_id_of`.
        workers: threads for blocking work.
        limit: how fast to copy.
        base: the path of another checkpoint at the target, from which files that both have are taken.
        check: called in a thread before the copy is published; may raise.

    Raises:
        CheckpointNotFoundError: it is not there any more.
        CorruptCheckpointError: it is damaged. Nothing of the copy stays.
        SaveError: the target can't be written; the cause is chained.
    """
    begun = time.perf_counter()
    opened = await source.open(path, workers=workers)
    try:
        documents, files = await workers.run(partial(_contents, opened, path, save_id))
        transaction = await target.resume(target_path, save_id, workers=workers)
        try:
            whole = await transaction.whole_files()
            left = {name: facts for name, facts in files.items() if whole.get(name) != facts.nbytes}
            if base is not None and left and documents:
                taken = await _taken(target, base, transaction, documents[MANIFEST_NAME], left, workers)
                left = {name: facts for name, facts in left.items() if name not in taken}
            await _CopyTask(opened, path, transaction, workers, limit).copy(left)
            await transaction.vouch(left)  # what was whole already was read by nobody since: it may have rotted
            await workers.run(check)
            await transaction.commit(documents)
        except BaseException as exc:
            with anyio.CancelScope(shield=True):
                await (transaction.abort() if isinstance(exc, CorruptCheckpointError) else transaction.suspend())
            raise
    finally:
        with anyio.CancelScope(shield=True):
            await workers.run(opened.close)
    of_documents = sum(map(len, documents.values()))
    nbytes, sent_bytes = (of_documents + sum(facts.nbytes for facts in each.values()) for each in (files, left))
    return MirrorResult(target_path, nbytes, sent_bytes, time.perf_counter() - begun)


def _contents(source: Source, path: str, save_id: str) -> tuple[dict[str, bytes], Mapping[str, FileFacts]]:
    """Return the documents, the manifest as the last of them, and the facts of all other files. Blocks."""
    sizes = source.files
    documents = {name: source.read_bytes(name, 0, sizes[name]) for name in _DOCUMENTS if name in sizes}
    manifest = documents.get(MANIFEST_NAME)
    if manifest is None or save_id_of(manifest) != save_id:
        raise CheckpointNotFoundError(f"{path} was replaced before it was copied")
    head = decode_head(manifest) or {}
    files = dict(facts_in(head) or {})
    if METADATA_NAME in documents:
        data = documents[METADATA_NAME]
        if files.get(METADATA_NAME) != FileFacts(len(data), crc32(data)):
            raise CorruptCheckpointError(f"{path}/{METADATA_NAME} does not match its CRC, so it is not copied")
    files = {name: facts for name, facts in files.items() if name not in documents}
    for name, facts in files.items():
        if sizes.get(name) != facts.nbytes:  # nor is a name taken that leads out of the checkpoint
            raise CorruptCheckpointError(f"{path} lacks {name}, or a part of it, so it is not copied")
    return documents, files


async def _taken(
    target: Storage,
    base: str,
    transaction: Transaction,
    manifest: bytes,
    wanted: Mapping[str, FileFacts],
    workers: Workers,
) -> set[str]:
    """Take over files that another checkpoint of the target has too; return their names."""
    totals = (decode_head(manifest) or {}).get("totals")
    if not isinstance(totals, dict) or not totals.get("bytes_reused"):  # where it was saved, it shares none
        return set()
    try:
        opened = await target.open(base, workers=workers)
        try:
            its = await workers.run(lambda: opened.read_bytes(MANIFEST_NAME, 0, opened.files.get(MANIFEST_NAME, 0)))
            names = await workers.run(same_files, manifest, its)
        finally:
            with anyio.CancelScope(shield=True):
                await workers.run(opened.close)
    except (AiockptError, OSError) as exc:
        logger.info("%s can't be looked at for files that need not be sent: %s", base, exc)
        return set()
    files = {other: (name, wanted[name]) for name, other in names.items() if name in wanted}
    return {files[other][0] for other in await transaction.adopt(base, files)} if files else set()


def same_files(manifest: bytes, other: bytes) -> dict[str, str]:
    """Return the files that another checkpoint has too, with their names there, by both manifests.

    They have the same size and CRC, which alone are no proof, and all their items the same strong hashes there.
    """
    places = {facts: (name, items) for name, (facts, items) in _files_of(other).items()}
    found: dict[str, str] = {}
    for name, (facts, items) in _files_of(manifest).items():
        its_name, its_items = places.get(facts, ("", set()))
        if items <= its_items and all(digest for *_, digest in items):
            found[name] = its_name
    return found


def _files_of(manifest: bytes) -> dict[str, tuple[FileFacts, set[tuple[int, int, str | None]]]]:
    """Return the facts of each file with items, and the offset, the length and the hash of each item."""
    decoded = decode_manifest(manifest)
    entries: Any = None if decoded.index is None else decoded.index.entries
    if entries is None or entries.hash_of is None:
        return {}
    items: defaultdict[str, set[tuple[int, int, str | None]]] = defaultdict(set)
    columns = (entries.file_of, entries.offset_of, entries.length_of)
    for file, *item in zip(*(column.tolist() for column in columns), entries.hash_of, strict=True):
        items[entries.files[file]].add(tuple(item))
    return {name: (decoded.files[name], its) for name, its in items.items() if name in decoded.files}


class _CopyTask:
    def __init__(self, source: Source, path: str, transaction: Transaction, workers: Workers, limit: RateLimit) -> None:
        self._source, self._path, self._transaction = source, path, transaction
        self._workers, self._limit, self._buffers = workers, limit, _ChunkBuffers()

    async def copy(self, files: Mapping[str, FileFacts]) -> None:
        left = set(files)

        async def copy(name: str) -> None:
            await self._copy(name, files[name])
            left.discard(name)

        await run_each(copy, list(files), _FILES)
        if left:  # a task was cancelled alone, of which its group says nothing
            raise WriteError(f"{self._path} was not copied to its end: {', '.join(sorted(left))}")

    async def _copy(self, name: str, facts: FileFacts) -> None:
        sink = await self._transaction.create(name, facts.nbytes)
        offset = crc = 0
        while offset < facts.nbytes:
            length = min(self._limit.most_bytes, facts.nbytes - offset)
            await self._limit.take(length)
            buffer = await self._buffers.take(self._limit.most_bytes)
            view = memoryview(buffer)[:length]
            crc = await self._workers.run(self._read, name, offset, view, crc)
            offset += length
            if offset == facts.nbytes and crc != facts.crc:  # before the last bytes go: the file never gets whole
                raise CorruptCheckpointError(
                    f"{self._path}/{name} does not match its CRC, so it is not copied; use another checkpoint"
                )
            await sink.write(view, partial(self._buffers.give, buffer))
        await sink.finish()

    def _read(self, name: str, offset: int, view: memoryview, crc: int) -> int:
        self._source.read(name, offset, view)
        return crc32(view, crc)
