"""What the ranks tell each other when they save."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aiockpt.format.names import METADATA_NAME

if TYPE_CHECKING:
    from aiockpt.planning.collective.cache import GlobalPlanCache
    from aiockpt.planning.collective.inventory import RankInventory


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a rank brings to the first round.

    Attributes:
        overwrite: as the caller said.
        decentralized: whether it decides alone what it writes.
        form: the name of the form to save in.
        token: the plan of all ranks that the rank's kept layout belongs to, if that may serve.
        holdings: what the rank has, where it does not, and rank 0 is to decide.
    """

    overwrite: bool
    decentralized: bool
    form: str
    token: int | None
    holdings: RankInventory | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """What rank 0 replies.

    Attributes:
        ticket: for taking part in the transaction; None: come again, with all that you have.
        token: the plan of all ranks.
        leaves: what to write; None: the same as last time, or what the rank decides.
        tell_places: say where the items are.
        secret: what the writer processes of the ranks know each other by.
    """

    ticket: str | None
    token: int
    leaves: list[int] | None = field(repr=False)
    tell_places: bool
    secret: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class Summary:
    """What rank 0 tells all ranks of the checkpoint.

    Attributes:
        files: the size in bytes of each file; None for other ranks than 0, of which there may be thousands.
        file_bytes: the bytes of all files with items.
        tensor_bytes: the bytes of the tensors in them.
        tensors: how many tensors there are.
        objects: how many objects there are.
    """

    files: dict[str, int] | None
    file_bytes: int
    tensor_bytes: int
    tensors: int
    objects: int

    @staticmethod
    def for_ranks(ranks: int, files: dict[str, int], book: GlobalPlanCache) -> list[Summary]:
        """Make the summaries for all ranks, in order."""
        items = sum(nbytes for name, nbytes in files.items() if name != METADATA_NAME)
        brief = Summary(None, items, book.tensor_bytes, book.tensors, book.objects)
        return [replace(brief, files=files), *[brief] * (ranks - 1)]
