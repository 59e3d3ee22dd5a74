"""What the ranks tell each other when they save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.planning.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank brings to the first round.

    Attributes:
        overwrite: as the caller said.
        decentralized: whether it decides alone what it writes.
        token: the plan of all ranks that the rank's kept layout belongs to, if that may serve.
        holdings: what the rank has, where it does not, and rank 0 is to decide.
    """

    overwrite: bool
    decentralized: bool
    token: int | None
    holdings: Holdings | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 replies.

    Attributes:
        ticket: for taking part in the transaction; None: come again, with all that you have.
        token: the plan of all ranks.
        leaves: what to write; None: the same as last time, or what the rank decides.
        tell_places: say where the items are.
    """

    ticket: str | None
    token: int
    leaves: list[int] | None = field(repr=False)
    tell_places: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """What rank 0 tells all ranks of the checkpoint."""

    files: dict[str, int]
    tensor_bytes: int
    tensors: int
    objects: int
