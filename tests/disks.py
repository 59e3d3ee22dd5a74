"""Disks of several hosts, in directories that only some processes use: the same path is another place on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from isal.isal_zlib import crc32

from aiockpt.format.manifest.manifest import DiskFacts, FileFacts, Manifest, encode_manifest, with_disks
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import shared_storage
from aiockpt.storage.hosts import Disk, HostDisks

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


class Union(HostDisks):
    """What a process of one host sees of all disks. Whatever is to be done on the others, their hosts do at once."""

    def __init__(self, disks: Sequence[Disk], own: str, ranks: Sequence[str] = (), rank: int = 0) -> None:
        super().__init__(disks, own, ranks or [own, *(disk.id for disk in disks if disk.id != own)], rank)

    async def delete(self, path: str, *, workers: Workers) -> None:
        await super().delete(path, workers=workers)
        await settle(self, workers)

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        removed = [path for disk in self.disks for path in await disk.storage.clean(directory, workers=workers)]
        names = sorted(set().union(*self.folders_in(directory)))
        torn = self.delete_torn([self.below(directory, name) for name in names])
        await settle(self, workers)
        return removed + torn

    def _in_order_of_removal(self, path: str) -> list[Disk]:
        """Return the disks in the order in which a deletion reaches them."""
        _, whole = self._seen(path)
        return sorted(self.disks, key=lambda disk: disk.id != whole.last)


def union_of(disks: Mapping[str, Disk], own: str, *names: str) -> HostDisks:
    """Return what a process of the host ``own`` sees of these disks; of all, if none is named."""
    return Union([disks[name] for name in names or disks], disks[own].id)


async def settle(union: HostDisks, workers: Workers) -> None:
    """Let each host do what rank 0 has decided on, as in rounds of all ranks."""
    hosts = [HostDisks(union.disks, disk.id) for disk in union.disks]
    for changes in (union.decided(), []):
        for host in hosts:
            await workers.run(host.change, changes)


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
    job = {name: shared_storage(disks[name].storage) for name in dict.fromkeys(ranks)}
    begun: dict[str, SharedTransaction] = {}
    published: list[str] = []
    try:
        for name, storage in job.items():
            begun[name] = await storage.begin(path, overwrite=overwrite, workers=workers)
        for rank, name in enumerate(ranks):
            joined = begun[name]
            if rank:
                joined = await job[name].join(path, joined.ticket, workers=workers)
            await joined.write_files({f"__{rank}_0.distcp": files[f"__{rank}_0.distcp"]})
            if rank:
                await joined.commit()
                await joined.release()
        facts = [DiskFacts(disks[name].id, disks[name].host, frozenset(await begun[name].sizes())) for name in job]
        documents = documents_of(files, note)
        documents[MANIFEST_NAME] = with_disks(documents[MANIFEST_NAME], facts)
        for transaction in begun.values():
            await transaction.write_files(documents)
        for name in [*job][::-1]:  # that of rank 0 last
            await begun[name].commit()
            published.append(name)
    except BaseException:
        with anyio.CancelScope(shield=True):
            for name, transaction in begun.items():
                await (job[name].delete(path, workers=workers) if name in published else transaction.abort())
        raise
    for transaction in begun.values():
        await transaction.release()
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
