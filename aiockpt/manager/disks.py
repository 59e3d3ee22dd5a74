"""The disks of a run whose hosts have one each: they meet when the run is opened, by two rounds of all ranks.

In the first, the ranks exchange the ids of their disks; the lowest rank of each disk then serves it to the other hosts,
for reading. In the second, they get the addresses of these servers.
"""

from __future__ import annotations

import secrets
import socket
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from aiockpt.saving import hosts as _hosts  # noqa: F401 - which saves import in a thread else
from aiockpt.storage.base import shared_storage
from aiockpt.storage.hosts import Disk, HostDisks
from aiockpt.storage.peers import PeerDisk, PeerServer

if TYPE_CHECKING:
    from aiockpt.coordination.link import Endpoint
    from aiockpt.engine.facade import EngineAccess
    from aiockpt.manager.scan import StepNames
    from aiockpt.storage.base import Storage

T = TypeVar("T")

_ID_BYTES = 16
_END_S = 5.0


class RunDisks:
    """This host's disk, and the way to the others."""

    def __init__(self, own: Storage, directory: str, names: StepNames, access: EngineAccess) -> None:
        self._own, self._directory, self._names, self._access = shared_storage(own), directory, names, access
        # all disks as one; the own one alone until they have met
        self.storage = HostDisks([Disk("", socket.gethostname(), own)], "")
        self._server: PeerServer | None = None
        self._peers: list[PeerDisk] = []
        self._have_met = False

    # --- meeting; this blocks -----------------------------------------------------------------------------

    def meet(self, *, make: bool) -> None:
        """Find the disks of all ranks, all of which call this; an error of one is that of all.

        ``make``: choose an id for a disk that has none.
        """
        if self._have_met:
            return
        what, rank, host = f"the disks of {self._directory}", self._access.rank, socket.gethostname()
        mine = _tried(lambda: (self._own.identify(self._directory, make=make) or secrets.token_hex(_ID_BYTES), host))
        ranks: list[tuple[str, str]] = self._access.agree(what, mine, list).result()
        ids = [disk for disk, _ in ranks]
        serves = len(set(ids)) > 1 and ids.index(ids[rank]) == rank
        endpoint = _tried(lambda: self._serve(what)) if serves else None
        endpoints: list[Endpoint] = self._access.agree(f"the servers of {what}", endpoint, list).result()
        disks: list[Disk] = []
        for number in sorted(map(ids.index, set(ids))):
            disk, name = ranks[number]
            if disk != ids[rank]:
                self._peers.append(PeerDisk(endpoints[number], name))
            disks.append(Disk(disk, name, self._own if disk == ids[rank] else self._peers[-1]))
        self.storage.meet(disks, ids[rank], ids, rank)
        self._have_met = True

    def _serve(self, what: str) -> Endpoint:
        if self._server is None:
            self._server = PeerServer(self._own, self._directory, hosts=self._access.addresses(what).result())
            weakref.finalize(self, self._server.close, _END_S).atexit = False
        return self._server.endpoint

    @property
    def serves(self) -> bool:
        """Whether this is the lowest rank of its host, which does what is to be done on the disk."""
        return self.storage.serves

    def delete_torn(self) -> list[str]:
        """Delete the steps that were never announced, or are being deleted; return their paths. On rank 0; blocks."""
        folders = self.storage.folders_in(self._directory)
        names = sorted(name for name in set().union(*folders) if self._names.step_of(name) is not None)
        everywhere = set.intersection(*folders)
        below = self.storage.below
        return self.storage.delete_torn([below(self._directory, name) for name in names if name not in everywhere])

    def close(self, timeout_s: float) -> None:
        """Leave the other disks; serve this one until the others have left it, for so long at most. Idempotent."""
        self.storage.wait(timeout_s)
        for disk in self._peers:
            disk.close()
        if self._server is not None:
            self._server.wait(timeout_s)
            self._server.close(_END_S)


def _tried(function: Callable[[], T]) -> T | Exception:
    """Return what a function returns, or its error, which is raised on all ranks."""
    try:
        return function()
    except Exception as exc:
        return exc
