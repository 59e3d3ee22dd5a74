"""Processes that save together without ``torch.distributed``."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Ranks:
    """Processes that save together without ``torch.distributed``: actors, MPI ranks, plain programs on several hosts.

    ::

        store = torch.distributed.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)
        ckpt = aiockpt.AsyncCheckpointer(process_group=aiockpt.Ranks(rank, 3, store))

    The ranks meet in the store, and then connect to rank 0 by TCP. Make one object in each process, and use it for all
    its checkpointers, which every process makes in the same order. Making it does not communicate.

    Args:
        rank: the number of this process, from 0.
        size: how many there are.
        store: a store that all of them reach, such as a TCPStore or a FileStore. It has to be there for the first save
            or load only, and when a rank fails before it has connected.
        generation: a number that all ranks have in common. A process that was restarted counts its saves anew, so all
            ranks then need new checkpointers, with a further generation.
        address: the address of this host at which rank 0 listens. None: found out, or GLOO_SOCKET_IFNAME.

    Raises:
        ValueError: ``rank`` is not one of ``size``, or the generation is negative.
        TypeError: ``store`` is no `torch.distributed.Store`, or ``address`` no text.
    """

    rank: int
    size: int
    store: Store = field(repr=False)
    generation: int = field(default=0, kw_only=True)
    address: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        numbers = (self.rank, self.size, self.generation)
        is_whole = all(type(number) is int for number in numbers)
        if not is_whole or not 0 <= self.rank < self.size or self.generation < 0:
            raise ValueError(f"rank {self.rank!r} of {self.size!r}, generation {self.generation!r}: ranks count from 0")
        if not isinstance(self.address, str | None):
            raise TypeError(f"address must be that of this host, as text, not {self.address!r}")
        if not isinstance(self.store, getattr(torch.distributed, "Store", ())):
            raise TypeError(f"the store must be a torch.distributed.Store, such as a TCPStore, not {self.store!r}")


calling_ranks: ContextVar[Ranks | None] = ContextVar("calling_ranks", default=None)
"""The ranks of the checkpointer that is calling ``state_dict()`` of the program's objects, if it has any."""
