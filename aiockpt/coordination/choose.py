"""Chooses the coordinator for a process group: whether the program's ranks save together, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch.distributed

from aiockpt.coordination.ranks import Ranks
from aiockpt.core.lazy import importing
from aiockpt.errors import CoordinationError

if TYPE_CHECKING:
    from aiockpt.coordination.coordinator import Coordinator


ProcessGroupLike = torch.distributed.ProcessGroup | Ranks | Literal["default"] | None
"""A group of ranks; ``"default"`` for all ranks of the program, if it is distributed; None for this process alone."""


def check_group(group: object) -> None:
    """Raise TypeError if it is no process group, ValueError if this rank is not in it."""
    distributed = torch.distributed
    if group is None or group == "default" or isinstance(group, Ranks):
        return
    if distributed.is_available() and group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the process group; make no checkpointer here, or with process_group=None")
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup, aiockpt.Ranks, 'default' or None, not {group!r}"
        )


def choose_coordinator(group: ProcessGroupLike, timeout_s: float, *, was_distributed: bool) -> Coordinator | None:
    """Return the coordinator of a group, or None if there are no other ranks. Does not communicate.

    ``was_distributed``: the program was distributed when the checkpointer was made. If it no longer is, this raises
    CoordinationError.
    """
    if group is None or (isinstance(group, Ranks) and group.size == 1):
        return None
    if not isinstance(group, Ranks) and not is_distributed():
        if group == "default" and not was_distributed:
            return None
        raise CoordinationError(
            "the process group was destroyed before the checkpointer's first use, so this rank would save alone: save "
            "before destroy_process_group(), or make a checkpointer with process_group=None"
        )
    distributed = torch.distributed
    chosen = distributed.group.WORLD if group == "default" else group
    if chosen is None or (not isinstance(chosen, Ranks) and chosen.size() == 1):
        return None
    with importing():  # only now: it imports stores, which a torch without distributed does not have
        from aiockpt.coordination.coordinator import coordinator_of

    return coordinator_of(chosen, timeout_s=timeout_s)


def is_distributed() -> bool:
    """Return whether the program has initialised ``torch.distributed``."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def may_be_of_several(group: ProcessGroupLike) -> bool:
    """Return whether a checkpointer of this group, if it is made now, may save together with other ranks."""
    return group is not None and (isinstance(group, Ranks) or is_distributed())
