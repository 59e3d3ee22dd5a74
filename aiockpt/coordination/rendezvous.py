"""Where ranks find each other: the store of the caller's group, and names that are the same on every rank."""

from __future__ import annotations

import itertools
import os
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from aiockpt.coordination.pair_channel import Link, make_device
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

_SHORTEST_POLL_S = 0.002
_LONGEST_POLL_S = 0.1

_made: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


def appears(store: Store, key: str, timeout_s: float) -> bool:
    """Wait until a key is in the store; say whether it came in time.

    It looks again and again, since a blocking wait holds the store against whoever shares it.
    """
    deadline = time.monotonic() + timeout_s
    for pause_s in pauses():
        if store.check([key]):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return False


def put(store: Store, key: str, content: bytes) -> None:
    """Put bytes into the store."""
    store.set(key, content)  # type: ignore[arg-type]  # it takes bytes, whatever its type stub says


def pauses() -> Iterator[float]:
    """Give how long to wait between two looks: short at first."""
    pause_s = _SHORTEST_POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


class RankAddress:
    """What a process group tells of this rank and of the way to the others, read without a word to them.

    Args:
        group: the caller's.

    Attributes:
        rank: the number of this rank in the group.
        world_size: how many ranks the group has.

    Raises:
        CoordinationError: this process is no member of the group, or the group has no store.
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
        self._number = next(_made.setdefault(group, itertools.count()))

    def named(self, rank: int) -> str:
        """Name a rank for people: its number in the group, and in the whole job where that differs."""
        overall = self._global_ranks[rank]
        return f"rank {rank}" if overall == rank else f"rank {rank} of the process group (global rank {overall})"

    def introduced(self) -> str:
        """Name this rank, with its host and process."""
        return f"{self.named(self.rank)} on host {socket.gethostname()}, process {os.getpid()},"

    def meeting(self, lane: str) -> Rendezvous:
        """Make a lane's way to the other ranks. Call it in the lane's own thread."""
        return Rendezvous(PrefixStore(f"{self._number}/{lane}", _separate(self._store)))


class Rendezvous:
    """One lane's part of the store, and the links that are made through it.

    Args:
        store: used by this lane's thread alone.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._device = make_device()

    def link(self, rank: int, generation: int, *, side: int, timeout_s: float) -> Link:
        """Make the link between rank 0 and another one; both call it."""
        store = PrefixStore(f"link/{rank}/{generation}", self.store)
        return Link(store, side, self._device, timeout_s=timeout_s)


def _store_of(group: dist.ProcessGroup) -> Store:
    from torch.distributed.distributed_c10d import _world

    try:
        store: Store = _world.pg_map[group][1]
    except KeyError as exc:
        raise CoordinationError("torch.distributed does not know this process group; was it destroyed?") from exc
    return PrefixStore(f"aiockpt/{_world.pg_names[group]}", store)


def _separate(store: Store) -> Store:
    """Give a client of the same store whose waits don't hold up the caller's own use of it.

    A TCP store has one connection, on which a wait keeps everyone else waiting: the caller's ``new_group`` on one
    rank and a round on another could wait for each other.
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
