"""What differs between saves that are made alone and those that are made together: all but staging and writing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.planner import SavePlan
    from aiockpt.saving.handle import SaveResult
    from aiockpt.storage.base import Transaction
    from aiockpt.writing.commit import CommitDocuments
    from aiockpt.writing.file_writer import ChunkWriter


@dataclass(frozen=True, slots=True)
class Transferred:
    """What was written, once all of it is in its files.

    Attributes:
        plan: what was to be written.
        files: the files with items.
        crcs: for each image the CRC-32 of each slot's payload.
        times_s: durations so far, in seconds.
        writing: who has written it.
    """

    plan: SavePlan = field(repr=False)
    files: dict[str, FileFacts]
    crcs: Sequence[Sequence[int]] = field(repr=False)
    times_s: Mapping[str, float]
    writing: ChunkWriter = field(repr=False)


class SaveStrategy(ABC):
    """How one save is planned, begun and ended; between that, its bytes are staged and written."""

    plans_anew = False
    """Whether `plan` may be called a second time, after `forget`."""

    @abstractmethod
    async def plan(self) -> SavePlan:
        """Decide what to write.

        Raises:
            AiockptError: the save has failed, and `end` is not to be called.
        """

    def forget(self) -> None:
        """Drop what is kept of earlier plans: it turned out not to fit."""

    @abstractmethod
    async def begin(self) -> Transaction:
        """Start to write."""

    async def ending(self, plan: SavePlan) -> CommitDocuments | None:
        """Encode what makes a checkpoint of the files with items; None where that is for somebody else."""
        return None

    async def parting(self, plan: SavePlan) -> bytes | None:
        """Give what the writers of several ranks need to agree without the trainers, pickled; None for one rank."""
        return None

    async def ticket(self) -> str | None:
        """Give what a writer process needs to take part in what rank 0 has begun; None: it is to begin itself."""
        return None

    @abstractmethod
    async def finish(self, transferred: Transferred) -> SaveResult:
        """Publish what was written. Not to be cancelled: from here on it is done or undone, not half."""

    @abstractmethod
    async def fail(self, error: BaseException) -> BaseException:
        """Undo what was done since `plan`; give the error to raise. Not to be cancelled."""
