"""The copy of a checkpoint in a temporary directory that the next process can go on with.

A file may have its size before it has its bytes. So a sidecar file says of each that it is whole, when it is durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from isal.isal_zlib import crc32

from aiockpt.core.threads import outlast
from aiockpt.format.names import OPEN_MARK
from aiockpt.storage.base import Document, FileSink
from aiockpt.storage.local.transaction import LocalTransaction


class ResumableTransaction(LocalTransaction):
    """A copy that this process has begun, or goes on with."""

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        await self._forget(name)  # a document may be there of an earlier attempt
        return _MarkingSink(self, name, nbytes or 0, await super().create(name, nbytes))

    async def whole_files(self) -> Mapping[str, int]:
        whole: dict[str, int] = {}
        for name, size in (await self.sizes()).items():
            if await self.get_sidecar(mark_of(name)) == _text_of(size):
                whole[name] = size
            else:
                await self._forget(name)
        await self._own_all()
        return whole

    async def _forget(self, name: str) -> None:
        await self.delete_sidecar(mark_of(name))
        await self._remove(os.path.join(self._hidden, name))

    async def _own_all(self) -> None:
        """Mark the directory, so that all in it is removed with it, by whomever: files of the user's as well."""
        await self._remove(os.path.join(self._hidden, OPEN_MARK))
        self._is_open = False
        await self.open_folder()

    async def commit(self, documents: Mapping[str, Document] = MappingProxyType({})) -> None:
        # Before: the directory may be exchanged for that of an older checkpoint, of which nothing is whole.
        for name in await self.sizes():
            await self.delete_sidecar(mark_of(name))
        await super().commit(documents)

    async def suspend(self) -> None:
        await outlast(self._suspend())

    async def _suspend(self) -> None:
        for sink in self._sinks:
            await sink.close()
        await self.release()

    async def _abort(self) -> None:
        for name in await self.sizes():
            await self.delete_sidecar(mark_of(name))
        await self._own_all()
        await super()._abort()


class _MarkingSink(FileSink):
    def __init__(self, transaction: ResumableTransaction, name: str, nbytes: int, inner: FileSink) -> None:
        self._transaction, self._name, self._nbytes, self._inner = transaction, name, nbytes, inner

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        await self._inner.write(view, free)

    async def finish(self) -> None:
        await self._inner.finish()
        await self._transaction.put_sidecar(mark_of(self._name), _text_of(self._nbytes))


def mark_of(name: str) -> str:
    """Return the name of the sidecar file that says of a file that it is whole."""
    return f"whole-{crc32(os.fsencode(name)):08x}"


def _text_of(nbytes: int) -> bytes:
    return f"{nbytes}.".encode()  # with an end, so that none is the beginning of another
