"""The meeting place of ranks: the store of the caller's process group, under keys that are the same on every rank."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from aiockpt.coordination.link import Endpoint, addresses_of_this_host, check_descriptors
from aiockpt.coordination.protocol import Left
from aiockpt.coordination.ranks import Ranks
from aiockpt.core.threads import DaemonThreads
from aiockpt.errors import CoordinationError

T = TypeVar("T")

_coordinator_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


class Rendezvous:
    """This rank in a process group, or of `Ranks`, and messages to the others through the store that they have.

    The messages are the address at which rank 0 listens, and why a rank without a link has left. A store blocks, and
    one that has ended blocks for minutes. So its functions are called in a thread, which is left behind if the store
    does not answer in time: CoordinationError. Making it does not communicate.

    Raises CoordinationError if this process is no member of the group, or if the group has no store.
    """

    def __init__(self, group: dist.ProcessGroup | Ranks) -> None:
        self.host: str | None = None  # the address at which rank 0 listens; None: found out
        store: Store
        if isinstance(group, Ranks):
            self.rank, self.world_size, self.host = group.rank, group.size, group.address
            self._global_ranks = list(range(group.size))
            store = PrefixStore(f"aiockpt/generation {group.generation}", group.store)
        else:
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise CoordinationError(
                    "this process is not a member of the process group; pass a group that it is in, "
                    "or process_group=None to save on this rank alone"
                )
            self._global_ranks = dist.get_process_group_ranks(group)
            store = _store_of(group)
        # Every rank makes its coordinators over a group in the same order, so the count is the same everywhere.
        # It keeps coordinators of one group apart: keys of an earlier one stay in the store.
        number = next(_coordinator_numbers.setdefault(group, itertools.count()))
        self._shared = PrefixStore(str(number), store)  # with the program, whose waits block its connection
        self._own: Store | None = None
        self._thread: DaemonThreads | None = None
        self._seen = 0  # notices

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for messages: its number in the group, and in the whole job if that differs."""
        overall = self._global_ranks[rank]
        return f"rank {rank}" if overall == rank else f"rank {rank} of the process group (global rank {overall})"

    def own_name(self) -> str:
        """Return this rank's name with its host and process."""
        return f"{self.rank_name(self.rank)} on host {socket.gethostname()}, process {os.getpid()},"

    @property
    def _store_host(self) -> str | None:
        inner = _innermost(self._shared)
        return inner.host if isinstance(inner, TCPStore) else None

    async def addresses(self, operation: str, deadline: float) -> list[str]:
        if self.host is not None:
            return [self.host]
        return await self._call(lambda: addresses_of_this_host(self._store_host), operation, deadline)

    async def publish(self, endpoint: Endpoint, operation: str, deadline: float) -> None:
        """Write where rank 0 listens."""
        await self._call(lambda: _put(self._client(), "endpoint", endpoint), operation, deadline)

    async def notify(self, left: Left, deadline: float) -> None:
        """Write why this rank, which has no link, has left a round."""
        await self._call(partial(self._write, left), left.operation, deadline)

    def tell(self, left: Left, timeout_s: float) -> bool:
        """Do as `notify`, where there is no event loop; return whether it was done in time."""
        thread = self._thread = self._thread or DaemonThreads(1, "aiockpt-ranks")
        try:
            thread.submit(self._write, left).result(timeout_s)
        except TimeoutError:
            thread.rest()
            self._thread = None
            return False
        except RuntimeError:  # the store's, or that no thread can be started
            return False
        return True

    def _write(self, left: Left) -> None:
        store = self._own or self._shared  # if descriptors have run out, there is the program's connection alone
        _put(store, f"left/{store.add('left', 1)}", left)

    async def read(self, operation: str, deadline: float) -> tuple[Endpoint | None, list[Left]]:
        """Return where rank 0 listens, None if it does not yet, and what ranks without a link have written since."""

        def read() -> tuple[Endpoint | None, list[Left]]:
            client, lefts = self._client(), list[Left]()
            endpoint = pickle.loads(client.get("endpoint")) if client.check(["endpoint"]) else None
            count = client.add("left", 0)
            while self._seen < count and client.check([f"left/{self._seen + 1}"]):
                self._seen += 1
                lefts.append(pickle.loads(client.get(f"left/{self._seen}")))
            return endpoint, lefts

        return await self._call(read, operation, deadline)

    def close(self, timeout_s: float) -> bool:
        """End the thread; return whether it has ended in time."""
        thread, self._thread, self._own = self._thread, None, None
        return thread is None or thread.end(timeout_s)

    async def _call(self, function: Callable[[], T], operation: str, deadline: float) -> T:
        thread = self._thread = self._thread or DaemonThreads(1, "aiockpt-ranks")
        call = asyncio.get_running_loop().run_in_executor(thread, function)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, deadline - begun)):
                return await call
        except TimeoutError:
            thread.rest()  # it is left behind, and ends if the store answers after all
            self._thread, self._own = None, None
            raise self._failure(operation, f"no answer within {time.monotonic() - begun:.3g} s") from None
        except RuntimeError as exc:  # the store's
            self._own = None
            raise self._failure(operation, exc) from exc

    def _failure(self, operation: str, reason: object) -> CoordinationError:
        where = "" if self._store_host is None else f" on {self._store_host}"
        return CoordinationError(
            f"the store of the process group{where} failed during {operation}: {reason}; it is served by rank 0 or by "
            "the launcher of the job, which may have ended"
        )

    def _client(self) -> Store:
        if self._own is None:
            try:
                check_descriptors(1)  # without one, torch would try for minutes
            except OSError as exc:
                raise CoordinationError(
                    f"{self.own_name()} can't connect to the store of the process group: {exc}; close files, or raise "
                    "the limits (see ulimit)"
                ) from exc
            self._own = _separate_client(self._shared)
        return self._own


def _put(store: Store, key: str, value: object) -> None:
    store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes, whatever its stub says


def _store_of(group: dist.ProcessGroup) -> Store:
    from torch.distributed.distributed_c10d import _world

    try:
        store: Store = _world.pg_map[group][1]
    except KeyError as exc:
        raise CoordinationError("torch.distributed does not know this process group; was it destroyed?") from exc
    return PrefixStore(f"aiockpt/{_world.pg_names[group]}", store)


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _separate_client(store: Store) -> Store:
    """Return a client of the same store whose requests don't wait for the caller's own.

    A TCP store has one connection, on which a wait blocks all other requests: the caller's ``new_group`` on one rank
    and a round on another could wait for each other.
    """
    clone = getattr(store, "clone", None)  # since torch 2.8
    if clone is not None:
        cloned: Store = clone()
        return cloned
    inner = _innermost(store)
    if not isinstance(inner, TCPStore):
        return store  # a file, or memory: no connection is shared
    # The prefixes can't be read back, so the ranks agree on a new one, through the old ones.
    prefix: bytes = store.compare_set("prefix", "", uuid.uuid4().hex)
    return PrefixStore(prefix.decode(), TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False))
