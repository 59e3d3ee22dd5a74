"""Disks of several hosts, in directories that only some processes use: the same path is another place on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from isal.isal_zlib import crc32

from aiockpt.format.manifest.manifest import FileFacts, Manifest, encode_manifest
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.storage.hosts import Disk, HostDisks
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.wrapper import WrapperStorage

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import (
        LeaseFacts,
        Listing,
        LookBudget,
        RunLease,
        SharedTransaction,
        Source,
        Stamp,
        Storage,
    )


class HostDisk(WrapperStorage):
    """The disk of a host: each path is below its root, wherever that is."""

    def __init__(self, root: Path, inner: Storage | None = None) -> None:
        super().__init__(inner or LocalStorage(direct_io=False, fsync=False))
        self.root = str(root)

    def place(self, path: str) -> str:
        return path if path.startswith(f"{self.root}/") else f"{self.root}{path}"

    def _name(self, place: str) -> str:
        return place.removeprefix(self.root)

    def resolve(self, path: str) -> str:
        return self._name(self.inner.resolve(path))

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        listing = self.inner.look(self.place(path), budget)
        listing.path = path
        return listing

    def stamp(self, path: str) -> Stamp | None:
        return self.inner.stamp(self.place(path))

    def stamps(self, directory: str, count: int) -> Mapping[str, Stamp] | None:
        return self.inner.stamps(self.place(directory), count)

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        return self._name(self.inner.set_aside(self.place(path), names))

    def lease(self, directory: str) -> RunLease:
        return self.inner.lease(self.place(directory))

    def owner_of(self, directory: str) -> LeaseFacts | None:
        return self.inner.owner_of(self.place(directory))

    def identify(self, directory: str, *, make: bool) -> str | None:
        return self.inner.identify(self.place(directory), make=make)

    def is_finishing(self, directory: str) -> bool:
        return self.inner.is_finishing(self.place(directory))

    def leftover(self, name: str) -> str | None:
        return self.inner.leftover(name)

    def check(self, path: str, *, overwrite: bool) -> None:
        self.inner.check(self.place(path), overwrite=overwrite)

    def check_repository(self, path: str, *, overwrite: bool) -> None:
        self.inner.check_repository(self.place(path), overwrite=overwrite)

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        return await super().begin(self.place(path), overwrite=overwrite, workers=workers, ticket=ticket)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        return await super().join(self.place(path), ticket, workers=workers)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        return await super().take_over(self.place(path), ticket, overwrite=overwrite, workers=workers, stamp=stamp)

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        return await super().resume(self.place(path), save_id, workers=workers)

    async def delete(self, path: str, *, workers: Workers) -> None:
        await super().delete(self.place(path), workers=workers)

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        removed = await super().clean(self.place(directory), older_than_s=older_than_s, workers=workers)
        return [self._name(each) for each in removed]

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await super().open(self.place(path), workers=workers)


def disks_in(folder: Path, *names: str) -> dict[str, Disk]:
    """Return disks whose ids and hosts have these names, each in its own directory of a folder."""
    disks = {}
    for name in names:
        (folder / name).mkdir(exist_ok=True, parents=True)
        disks[name] = Disk(name, f"host-{name}", HostDisk(folder / name))
    return disks


def union_of(disks: Mapping[str, Disk], own: str, *names: str) -> HostDisks:
    """Return what a process of the host ``own`` sees of these disks; of all, if none is named."""
    return HostDisks([disks[name] for name in names or disks], disks[own].id)


def documents_of(files: Mapping[str, bytes], note: str) -> dict[str, bytes]:
    """Return the documents of a checkpoint with these files."""
    index = b"index " + note.encode()
    facts = {name: FileFacts(len(data), crc32(data)) for name, data in {**files, METADATA_NAME: index}.items()}
    created = f"2026-01-01T00:00:{int(note.rpartition(' ')[2]) if note[-1].isdigit() else 0:02d}.000+00:00"
    return {MANIFEST_NAME: encode_manifest(Manifest("tests", created, {"note": note}, facts)), METADATA_NAME: index}


async def write(
    disks: Mapping[str, Disk], ranks: Sequence[str], path: str, note: str, workers: Workers, *, overwrite: bool = False
) -> dict[str, bytes]:
    """Save a checkpoint as ranks on these disks do, rank 0 first; return its contents, but for the documents."""
    files = {f"__{rank}_0.distcp": f"{note} of rank {rank}".encode() for rank in range(len(ranks))}
    job = list(dict.fromkeys(ranks))
    begun = await union_of(disks, ranks[0], *job).begin(path, overwrite=overwrite, workers=workers)
    try:
        for rank, disk in enumerate(ranks):
            name = f"__{rank}_0.distcp"
            joined = begun if rank == 0 else await union_of(disks, disk, *job).join(path, begun.ticket, workers=workers)
            await joined.write_files({name: files[name]})
            if rank:
                await joined.commit()
                await joined.release()
        assert await begun.sizes() == {name: len(data) for name, data in files.items()}
        await begun.commit(documents_of(files, note))
    except BaseException:
        with anyio.CancelScope(shield=True):
            await begun.abort()
        raise
    await begun.release()
    return files


async def read(storage: Storage, path: str, workers: Workers) -> dict[str, bytes]:
    """Return all files of a checkpoint but the documents."""
    source = await storage.open(path, workers=workers)
    try:
        return {
            name: source.read_bytes(name, 0, nbytes)
            for name, nbytes in source.files.items()
            if name.endswith(".distcp")
        }
    finally:
        source.close()
