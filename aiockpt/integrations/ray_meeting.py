"""A meeting of Ray's actors, to write one checkpoint together without ``torch.distributed``; see `Meeting`."""

from __future__ import annotations

import asyncio
from typing import Any

from torch._C._distributed_c10d import TCPStore

from aiockpt.coordination.ranks import Ranks
from aiockpt.core.threads import in_thread
from aiockpt.errors import CoordinationError
from aiockpt.integrations.saves import missing

try:
    import ray
    import ray.util
except ImportError as exc:
    missing("Ray", "ray", exc)

_PREFIX = "aiockpt-meeting-"


class _MeetingPlace:
    """The actor: it hosts the store in which ranks meet, and lets them go when all of a generation are there."""

    def __init__(self) -> None:
        self._host = ray.util.get_node_ip_address()
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._generation = 0
        self._size = 0
        self._here: set[int] = set()
        self._complete = asyncio.Event()

    async def join(self, rank: int, size: int) -> tuple[str, int, int]:
        """Wait for the other ranks; return the address of the store, and the number of this generation."""
        if self._here and size != self._size:
            raise ValueError(f"rank {rank} comes as one of {size}, but ranks of {self._size} are waiting")
        self._size = size
        self._here.add(rank)
        complete = self._complete
        if len(self._here) == size:
            self._generation += 1
            self._here, self._complete = set(), asyncio.Event()
            complete.set()
        await complete.wait()
        return self._host, self._store.port, self._generation

    async def leave(self, rank: int) -> None:
        """Wait no longer."""
        self._here.discard(rank)


class Meeting:
    """A place where actors of Ray find each other, without ``torch.distributed``.

    An actor of the cluster that uses no CPU, is restarted when its node is lost, and lives until `end`.
    """

    @staticmethod
    async def join(name: str, rank: int, size: int, *, timeout: float = 300.0) -> Ranks:
        """Wait until all ranks are there; return what a checkpointer takes as ``process_group=``.

        If an actor dies, the saves and loads of the others fail at once and name it. Then all of them close their
        checkpointers and join again, as the restarted one does: the next generation saves together.

        Args:
            name: the same for all ranks, and for no others in the cluster.
            rank: the number of this actor, from 0.
            size: how many there are.
            timeout: seconds to wait for the others.

        Raises:
            CoordinationError: the others did not come in time.
            ValueError: the others come as a group of another size.
        """
        place = _actor(name)
        try:
            host, port, generation = await asyncio.wait_for(_call(place.join.remote(rank, size)), timeout)
        except TimeoutError:
            await _call(place.leave.remote(rank))
            raise CoordinationError(
                f"rank {rank} of {size} has waited {timeout:g} s for the other ranks of the meeting {name!r}"
            ) from None
        except ray.exceptions.RayTaskError as exc:
            raise exc.as_instanceof_cause() from None
        store = await asyncio.wrap_future(in_thread(TCPStore, host, port, is_master=False, wait_for_workers=False))
        return Ranks(rank, size, store, generation=generation, address=ray.util.get_node_ip_address())

    @staticmethod
    def end(name: str) -> None:
        """End the meeting's actor, if it is there. Its ranks that are connected go on."""
        try:
            ray.kill(ray.get_actor(_PREFIX + name))
        except ValueError:  # there is none
            return


async def _call(reference: Any) -> Any:
    return await reference


def _actor(name: str) -> Any:
    kind: Any = ray.remote(_MeetingPlace)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "lifetime": "detached"}
    return kind.options(name=_PREFIX + name, get_if_exists=True, max_concurrency=1000, **options).remote()
