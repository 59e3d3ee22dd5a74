"""The interface of observers, and the events that they are called with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.telemetry.progress import Outcome
    from aiockpt.telemetry.saves import LoadResult, MirrorBacklog, MirrorResult, SaveResult


@dataclass(frozen=True, slots=True)
class SaveEvent:
    """An event in the course of a save.

    Attributes:
        number: the number of the save; those of one process count from 1. All events of a save have the same.
        path: where the checkpoint is to be; for one that was written to the ``fallback_path``, see its result.
        time: when it happened, in seconds since 1970.
        elapsed_s: seconds since the call of `save`.
        nbytes: the bytes of its files, as soon as it is planned; before that 0. Of several ranks, this one's.
    """

    number: int
    path: str
    time: float
    elapsed_s: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class CallEvent:
    """The end of a load, a deletion, or a copy to a mirror.

    Attributes:
        path: the checkpoint.
        time: when it ended, in seconds since 1970.
        elapsed_s: how long it took, in seconds.
        error: why it failed; None if it did not.
    """

    path: str
    time: float
    elapsed_s: float
    error: BaseException | None = field(default=None, repr=False)


class Observer:
    """Base of observers, which are called for every save, load and deletion. Override the methods that you need.

    A checkpointer calls its observers in a thread of their own, one call after the other, in the order of what has
    happened. So they may block: neither saves nor loads wait for them. Exceptions in them are logged. They may load,
    verify and delete with the checkpointer; to save, to wait for a save or to close it raises `SaveError`. Closing
    waits up to 10 seconds for calls that are still to be made. If more than 10,000 wait, further ones are dropped, and
    the log says so.

    Every save has `save_started`, unless it is skipped at the call, and then one of `written`, `failed`, `cancelled`
    and `skipped`. `save_started` is called in a copy of the context (`contextvars`) of the caller of `save`.
    """

    def save_started(self, event: SaveEvent) -> None:
        """A save was called, and its state is captured."""

    def staged(self, event: SaveEvent) -> None:
        """All tensors of a save are copied."""

    def written(self, event: SaveEvent, result: SaveResult) -> None:
        """A checkpoint is durable and complete under its final name."""

    def failed(self, event: SaveEvent, error: BaseException) -> None:
        """A save has failed."""
        self._unwritten(event, "failed", error)

    def cancelled(self, event: SaveEvent, error: BaseException) -> None:
        """A save was cancelled."""
        self._unwritten(event, "cancelled", error)

    def skipped(self, event: SaveEvent, error: BaseException) -> None:
        """A save was skipped, or superseded by a later one; see ``on_busy``."""
        self._unwritten(event, "skipped", error)

    def _unwritten(self, event: SaveEvent, outcome: Outcome, error: BaseException) -> None:
        """A save has ended without a checkpoint: for observers that treat the three alike."""

    def loaded(self, event: CallEvent, result: LoadResult | None) -> None:
        """A load has ended; ``result`` is None if it has failed or was cancelled."""

    def deleted(self, event: CallEvent) -> None:
        """A deletion has ended."""

    def mirrored(self, event: CallEvent, result: MirrorResult | None, backlog: MirrorBacklog) -> None:
        """An attempt to mirror a step has ended; ``result`` is None if it has failed. ``backlog`` is what is left."""
