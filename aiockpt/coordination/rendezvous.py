"""The meeting place of ranks: the store of the caller's process group, under keys that are the same on every rank."""

from __future__ import annotations

import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from aiockpt.coordination.pair_channel import Link, make_device
from aiockpt.errors import CoordinationError

_SHORTEST_POLL_S = 0.002
_LONGEST_POLL_S = 0.1

_coordinator_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()

StoreKey = Literal["connect", "accept", "missed", "reply", "left"]  # see `protocol`


class RankAddress:
    """This rank in a process group, and the way to the others. Made without communication.

    Raises CoordinationError if this process is no member of the group, or if the group has no store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank: int = dist.get_rank(group)
        if self.rank < 0:
            raise CoordinationError(
                "this process is not a member of the process group; pass a group that it is in, "
                "or process_group=None to save on this rank alone"
            )
        self.world_size: int = dist.get_world_size(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        self._store = _store_of(group)
        # Every rank makes its coordinators over a group in the same order, so the count is the same everywhere.
        # It keeps coordinators of one group apart: keys of an earlier one stay in the store.
        self._number = next(_coordinator_numbers.setdefault(group, itertools.count()))

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for messages: its number in the group, and in the whole job if that differs."""
        overall = self._global_ranks[rank]
        return f"rank {rank}" if overall == rank else f"rank {rank} of the process group (global rank {overall})"

    def own_name(self) -> str:
        """Return this rank's name with its host and process."""
        return f"{self.rank_name(self.rank)} on host {socket.gethostname()}, process {os.getpid()},"

    def rendezvous(self, lane: str) -> Rendezvous:
        """Open a lane's keys in the store. To be called in the lane's own thread."""
        return Rendezvous(PrefixStore(f"{self._number}/{lane}", _separate_client(self._store)))


class Rendezvous:
    """One lane's keys in the store, and the links made through it; for the lane's thread alone.

    Each key belongs to a rank and to a generation of its link. If the store fails, the methods raise RuntimeError.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._device = make_device()

    def has(self, key: StoreKey, rank: int, generation: int) -> bool:
        """Return whether a key is set."""
        return self._store.check([f"{key}/{rank}/{generation}"])

    def wait_for(self, key: StoreKey, rank: int, generation: int, timeout_s: float) -> bool:
        """Wait until a key is set; return whether it was in time.

        It polls, because a blocking wait in the store blocks all other requests on the same connection.
        """
        deadline = time.monotonic() + timeout_s
        for interval_s in poll_intervals():
            if self.has(key, rank, generation):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(interval_s)
        return False

    def is_explained(self, key: StoreKey, rank: int, generation: int, within_s: float) -> bool:
        """Return whether the other side, which has closed its link, sets this key in time, and so is alive."""
        try:
            return self.wait_for(key, rank, generation, within_s)
        except RuntimeError:
            return False  # with neither link nor store it can't be reached

    def get(self, key: StoreKey, rank: int, generation: int) -> bytes:
        """Return the value of a key that is set."""
        return self._store.get(f"{key}/{rank}/{generation}")

    def put(self, key: StoreKey, rank: int, generation: int, value: bytes) -> None:
        """Set a key."""
        self._store.set(f"{key}/{rank}/{generation}", value)  # type: ignore[arg-type]  # bytes, whatever its stub says

    def link(self, rank: int, generation: int, *, side: int, timeout_s: float) -> Link:
        """Connect rank 0 and another rank; both call it."""
        store = PrefixStore(f"link/{rank}/{generation}", self._store)
        return Link(store, side, self._device, timeout_s=timeout_s)


def poll_intervals() -> Iterator[float]:
    """Yield the seconds to sleep between polls: short at first."""
    interval_s = _SHORTEST_POLL_S
    while True:
        yield interval_s
        interval_s = min(2 * interval_s, _LONGEST_POLL_S)


def _store_of(group: dist.ProcessGroup) -> Store:
    from torch.distributed.distributed_c10d import _world

    try:
        store: Store = _world.pg_map[group][1]
    except KeyError as exc:
        raise CoordinationError("torch.distributed does not know this process group; was it destroyed?") from exc
    return PrefixStore(f"aiockpt/{_world.pg_names[group]}", store)


def _separate_client(store: Store) -> Store:
    """Return a client of the same store whose waits don't block the caller's own use of it.

    A TCP store has one connection, on which a wait blocks all other requests: the caller's ``new_group`` on one rank
    and a round on another could wait for each other.
    """
    clone = getattr(store, "clone", None)  # since torch 2.8
    if clone is not None:
        cloned: Store = clone()
        return cloned
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore):
        return store  # a file, or memory: no connection is shared
    # The prefixes can't be read back, so the ranks agree on a new one, through the old ones.
    prefix: bytes = store.compare_set("prefix", "", uuid.uuid4().hex)
    return PrefixStore(prefix.decode(), TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False))
