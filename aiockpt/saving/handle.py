"""The handle of a save: the futures `staged` and `written`, progress, and cancellation.

Everything here may be used from any thread and any asyncio loop. Waiting never influences the save.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aiockpt.core.futures import Completion, Listener
from aiockpt.core.threads import Origin, check_asyncio
from aiockpt.errors import AiockptError
from aiockpt.telemetry.progress import ProgressEvent, SavePhase, outcome_of
from aiockpt.telemetry.saves import SaveResult

if TYPE_CHECKING:
    from aiockpt.telemetry.saves import MirrorResult

SaveState = Literal["waiting", SavePhase, "skipped", "cancelled", "failed"]


class SaveControl(Listener, Protocol):
    """The save behind a handle."""

    def cancel(self) -> Completion[bool]:
        """See `SaveHandle.cancel`."""

    def fence(self, timeout: float | None) -> None:
        """See `SaveHandle.fence`."""


class SaveHandle(Awaitable[SaveResult]):
    """A save in flight.

    Attributes:
        path: where the checkpoint will be.
        staged: completes when every tensor is copied: they may change from then on.
        written: completes when the checkpoint is durable and complete under its final name.

    Both can be awaited, and are `concurrent.futures.Future`s too; see `Completion`. A failure is raised by each that
    has not completed before. If neither is awaited, the next `save()` or closing the checkpointer raises it.
    ``await handle`` is ``await handle.written``; ``stage, write = handle`` gives the two.
    """

    def __init__(self, path: str, job: SaveControl, started: float, origin: Origin | None = None) -> None:
        self.path = path
        self.staged: Completion[None] = Completion(f"`staged` of {path}", origin, listener=job)
        self.written: Completion[SaveResult] = Completion(f"`written` of {path}", origin, listener=job)
        self._mirrored: Completion[MirrorResult] | None = None
        self._origin = origin
        self._job = job
        self._started = started
        self._events: list[ProgressEvent] = []
        self._news = self._next_news()

    def __repr__(self) -> str:
        last = self._last
        if last is None:
            return f"<SaveHandle {self.path} {self.state}>"
        return (
            f"<SaveHandle {self.path} {self.state}: {last.staged_bytes} staged and {last.done_bytes} written "
            f"of {last.total_bytes} bytes>"
        )

    @property
    def _last(self) -> ProgressEvent | None:
        return self._events[-1] if self._events else None

    def __await__(self) -> Generator[Any, None, SaveResult]:
        return self.written.__await__()

    def __iter__(self) -> Iterator[Completion[Any]]:
        return iter((self.staged, self.written))

    @property
    def mirrored(self) -> Completion[MirrorResult]:
        """Completes when the step is durable in the run's mirror too; on rank 0, of a save of a manager with a mirror.

        An error of the mirror is raised here alone. While the mirror can't be reached, this waits for it, until the
        manager is closed.

        Raises:
            AiockptError: there is no mirror, or this is not rank 0.
        """
        if self._mirrored is None:
            raise AiockptError(f"{self.path} has no `mirrored`: only rank 0 of a manager with mirror= knows that")
        return self._mirrored

    # Set by a manager before the caller has the handle.

    def _follow_mirror(self, mirrored: Completion[MirrorResult]) -> None:
        self._mirrored = mirrored

    @property
    def state(self) -> SaveState:
        """Phase of the save, or its outcome. Reading it does not count as receiving its failure."""
        if not self.written.done():
            return self._last.phase if self._last else "waiting"  # type: ignore[return-value] # one of a save
        outcome = outcome_of(self.written._exception)
        return "committed" if outcome == "written" else outcome

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped, or superseded by a later one; see ``on_busy``."""
        return self.state == "skipped"

    @property
    def observed(self) -> bool:
        """Whether a caller has received this save's failure."""
        return self.staged.observed or self.written.observed

    def cancel(self) -> Completion[bool]:
        """Cancel the save. Does not block: await the result to know that nothing is left of the save.

        The result comes when its files are removed, its memory is free and no thread works for it; a thread in the
        middle of a write is waited for. The checkpoint that it was to overwrite stays, and so do other saves in
        flight. Only callers that await `staged` or `written` get the `SaveCancelledError`. May be called from any
        thread, any number of times, with the same result. Cancelling a waiter does not stop the cancellation.

        Returns:
            A completion: True when the save was cancelled and `written` raises `SaveCancelledError`; False
            when it was too late, because the save was being committed, was written or had failed.
        """
        return self._job.cancel()

    def fence(self, timeout: float | None = None) -> None:
        """Make the caller's current accelerator streams wait for the copies, without blocking on them.

        Work that is enqueued in these streams after this may change the tensors. For tensors on an accelerator this
        returns as soon as all copies are enqueued; for those in host memory it blocks until they are copied. Either
        way it checks that no tensor has changed since `save()`. Nothing is checked after that, because changes in these
        streams can't be told from others. Code that changes tensors in another stream or thread has to call it there
        too.

        Args:
            timeout: seconds to block at most; None for as long as it takes.

        Raises:
            TornSnapshotError: a tensor has changed already.
            TimeoutError: the copies were not enqueued in time.
            ValueError: the timeout is negative, or no number.
            AiockptError: a CUDA graph is being captured, which can't wait: call it before that, and before each
                replay.
        """
        self._job.fence(timeout)

    def progress(self) -> SaveProgress:
        """Return an iterator over the events of this save, from the first, until it is over. Never raises its error.

        For ``async for``, and in a thread, which it blocks, for ``for``. See `aiockpt.progress` for ready displays.
        """
        return SaveProgress(self)

    # No lock: only the engine's loop adds events, and a reader takes the news before it looks for events.

    def _report(self, event: ProgressEvent) -> None:
        self._events.append(event)
        news, self._news = self._news, self._next_news()
        news._settle(None)

    def _next_news(self) -> Completion[None]:
        return Completion(f"progress of {self.path}", self._origin)

    def _wake(self) -> None:
        """Wake the iterators over events: there will be no more."""
        self._news._settle(None)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


class SaveProgress(AsyncIterator[ProgressEvent], Iterator[ProgressEvent]):
    """The events of a save, for ``async for`` in asyncio and for ``for`` in a thread."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle
        self._seen = 0

    async def __anext__(self) -> ProgressEvent:
        check_asyncio(f"the progress of {self._handle.path}")
        while isinstance(event := self._look(), Completion):
            await event
        if event is None:
            raise StopAsyncIteration
        return event

    def __next__(self) -> ProgressEvent:
        while isinstance(event := self._look(), Completion):
            event.result()
        if event is None:
            raise StopIteration
        return event

    def _look(self) -> ProgressEvent | Completion[None] | None:
        """Return the next event, or else what completes when there may be one; None at the end."""
        handle = self._handle
        if handle._origin is not None:
            handle._origin.check_process()
        is_over, news = handle.written.done(), handle._news  # asked first: the last event comes before the end
        if self._seen < len(handle._events):
            self._seen += 1
            return handle._events[self._seen - 1]
        return None if is_over else news
