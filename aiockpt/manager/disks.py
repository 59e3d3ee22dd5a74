"""The disks of a run whose hosts have one each: they meet when the run is opened, by two rounds of all ranks.

In the first, the ranks exchange the ids of their disks; the lowest rank of each disk then serves it. In the second,
they get the addresses of these servers. After that no round is needed to list, read, publish or delete.
"""

from __future__ import annotations

import secrets
import socket
import weakref
from typing import TYPE_CHECKING

from aiockpt.manager.replicas import sources_of
from aiockpt.manager.tiers import replicas_directory, replicated_disks
from aiockpt.storage.base import shared_storage
from aiockpt.storage.hosts import Disk, HostDisks
from aiockpt.storage.remote_disk import DiskEndpoint, RemoteDisk
from aiockpt.storage.remote_server import DiskServer

if TYPE_CHECKING:
    from aiockpt.engine.facade import EngineAccess
    from aiockpt.storage.base import Storage

_ID_BYTES = 16
_END_S = 5.0


class RunDisks:
    """This host's disk, and the way to the others. Its methods block.

    Attributes:
        storage: all disks as one; the own one alone until they have met.
        replica_directory: where each host has replicas of other disks, by the ids of these.
        own_damage: what this host can't copy; see `ReplicaCopies`.
    """

    def __init__(self, own: Storage, directory: str, access: EngineAccess, replica_directory: str = "") -> None:
        self.replica_directory = replicas_directory(own, directory, replica_directory)
        self._own, self._directory, self._access = shared_storage(own), directory, access
        self.storage = HostDisks([Disk("", socket.gethostname(), own)], "")
        self._server: DiskServer | None = None
        self._remote: list[RemoteDisk] = []
        self.own_damage: dict[str, str] = {}
        self._have_met = False

    @property
    def serves(self) -> bool:
        """Whether this rank serves the disk of its host, and does for all what one rank of a host does."""
        return self._server is not None

    def meet(self, *, make: bool) -> None:
        """Find the disks of all ranks, all of which call this; ``make``: choose an id for a disk without one."""
        if self._have_met:
            return
        access, what = self._access, f"the disks of {self._directory}"
        mine: tuple[str, str, list[str]] | Exception
        try:
            found = self._own.identify(self._directory, make=make)
            mine = (
                found or secrets.token_hex(_ID_BYTES),
                socket.gethostname(),
                replicated_disks(self._own, self.replica_directory),
            )
        except Exception as exc:  # raised on all ranks
            mine = exc
        ranks = access.agree(what, mine, list).result()
        serving: dict[str, int] = {}
        for rank, (each, *_) in enumerate(ranks):
            serving.setdefault(each, rank)
        own = ranks[access.rank][0]
        endpoint: DiskEndpoint | Exception | None = None
        if len(serving) > 1 and serving[own] == access.rank:
            try:
                endpoint = self._serve(what)
            except Exception as exc:  # raised on all ranks
                endpoint = exc
        endpoints = access.agree(f"the servers of {what}", endpoint, list).result()
        disks, replicas = [], []
        for each, rank in serving.items():
            storage: Storage = self._own
            if each != own:
                storage = remote = RemoteDisk(endpoints[rank], ranks[rank][1])
                self._remote.append(remote)
            disks.append(Disk(each, ranks[rank][1], storage))
            for source in sorted({*ranks[rank][2], sources_of(serving)[each]} - {each}):
                directory = storage.below(self.replica_directory, source)
                replicas.append(Disk(source, ranks[rank][1], storage, directory, is_near=each == own))
        self.storage.meet(disks, own, replicas)
        self._have_met = True

    def _serve(self, what: str) -> DiskEndpoint:
        if self._server is None:
            hosts = self._access.addresses(what).result()
            served = [self._directory, self.replica_directory]
            self._server = DiskServer(self._own, served, hosts=hosts, damage=self.own_damage)
            weakref.finalize(self, self._server.close, _END_S).atexit = False
        return self._server.endpoint

    def damage(self) -> dict[str, str]:
        """Return what all hosts can't copy, each as its disk's server says; raise OSError."""
        found = dict(self.own_damage)
        for disk in self._remote:
            found |= disk.damage()
        return found

    def close(self, timeout_s: float) -> None:
        """Leave the other disks; serve this one until the others have left it, for so long at most. Idempotent."""
        for disk in self._remote:
            disk.close()
        if self._server is not None:
            self._server.wait(timeout_s)
            self._server.close(_END_S)
