"""Disks of several hosts, in directories that only some processes use: the same path is another place on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    return HostDisks([disks[name] for name in names or disks], own)
