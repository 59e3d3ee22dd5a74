"""The handle of a save: the futures `staged` and `written`, progress, and cancellation.

Everything here may be used from any thread and any asyncio loop. Waiting never influences the save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeVar

from aiockpt.core.futures import Completion
from aiockpt.core.threads import Origin, check_asyncio
from aiockpt.errors import SaveSkippedError

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

Phase = Literal["planned", "staging", "staged", "writing", "written", "committed"]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a save is.

    Attributes:
        phase: what has just happened, or what is going on.
        staged_bytes: bytes of the files that are copied into staging memory so far.
        written_bytes: bytes of the files that are written so far.
        total_bytes: bytes of all files.
        elapsed_s: seconds since `save()` was called.
    """

    phase: Phase
    staged_bytes: int
    written_bytes: int
    total_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A written checkpoint: its size, and how long saving took.

    Attributes:
        path: where the checkpoint is.
        nbytes: the bytes of its files with items.
        tensor_bytes: the bytes of the tensors in them.
        tensors: how many tensors were stored.
        objects: how many objects were stored.
        files: the size in bytes of each file; of several ranks, rank 0 has all and each other one its own.
        captured_s: how long `save()` held its caller, in seconds.
        planned_s: how long planning took.
        staged_s: from the call until staged.
        written_s: from the call until durable under the final name.
        post_commit_error: the exception of the post_commit hook, if it failed.
        fallback_error: why it is at the ``fallback_path``; None if it is where it was to go.
        error: why nothing was written, in the results of `SyncCheckpointer.save` with ``on_failure="warn"``.
    """

    path: str
    nbytes: int
    tensor_bytes: int
    tensors: int
    objects: int
    files: Mapping[str, int] = field(repr=False)
    captured_s: float
    planned_s: float
    staged_s: float
    written_s: float
    post_commit_error: BaseException | None = None
    fallback_error: BaseException | None = None
    error: BaseException | None = None

    @classmethod
    def of_failure(cls, path: str, error: BaseException, elapsed_s: float) -> Self:
        """Make the result of a save that has failed, and wrote nothing."""
        return cls(path, 0, 0, 0, 0, {}, 0.0, 0.0, 0.0, elapsed_s, error=error)

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the files per second, from the call until durable."""
        return self.nbytes / self.written_s if self.written_s else 0.0


class Control(Protocol):
    """The save behind a handle."""

    def cancel(self) -> Completion[bool]:
        """Cancel the save."""

    def fence(self, timeout: float | None) -> None:
        """Order the caller's stream behind the copies."""


class SaveHandle(Awaitable[SaveResult]):
    """A save in flight.

    Attributes:
        path: where the checkpoint will be.
        staged: comes when every tensor is copied: they may change from then on.
        written: comes when the checkpoint is durable and complete under its final name.

    Both can be awaited, and are `concurrent.futures.Future`s too; see `Completion`. A failure is raised by both, if
    they had not come before; if nobody awaits them, by the next `save()` or by closing the checkpointer.
    ``await handle`` is ``await handle.written``; ``stage, write = handle`` gives the two.
    """

    def __init__(self, path: str, control: Control, started: float, origin: Origin | None = None) -> None:
        self.path = path
        self.staged: Completion[None] = Completion(f"`staged` of {path}", origin)
        self.written: Completion[SaveResult] = Completion(f"`written` of {path}", origin)
        self._origin = origin
        self._control = control
        self._started = started
        self._events: list[ProgressEvent] = []
        self._last: ProgressEvent | None = None
        self._news = self._next_news()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        last = self._last
        if self.written.done():
            state = "skipped" if self.skipped else "failed" if self.written._exception is not None else "written"
        else:
            state = last.phase if last else "waiting"
        if last is None:
            return f"<SaveHandle {self.path} {state}>"
        return (
            f"<SaveHandle {self.path} {state}: {last.staged_bytes} staged and {last.written_bytes} written "
            f"of {last.total_bytes} bytes>"
        )

    def __await__(self) -> Generator[Any, None, SaveResult]:
        return self.written.__await__()

    def __iter__(self) -> Iterator[Completion[Any]]:
        return iter((self.staged, self.written))

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped, or superseded by a later one; see ``on_busy``."""
        return isinstance(self.written._exception, SaveSkippedError)

    @property
    def observed(self) -> bool:
        """Whether a caller has received this save's failure."""
        return self.staged.observed or self.written.observed

    @property
    def expected(self) -> bool:
        """Whether a caller is about to receive this save's failure."""
        return self.staged.expected or self.written.expected

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
        return self._control.cancel()

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
        self._control.fence(timeout)

    async def progress(self) -> AsyncIterator[ProgressEvent]:
        """Iterate over the events of this save, from the first, until it is over. Never raises its error."""
        seen = 0
        check_asyncio(f"the progress of {self.path}")
        if self._origin is not None:
            self._origin.check_process()
        while True:
            with self._lock:
                news = self._news
                fresh = self._events[seen:]
            for event in fresh:
                yield event
            seen += len(fresh)
            if not fresh:
                if self.written.done():
                    return
                await news

    def _report(self, event: ProgressEvent) -> None:
        with self._lock:
            self._events.append(event)
            self._last = event
            news, self._news = self._news, self._next_news()
        news._settle(None)

    def _next_news(self) -> Completion[None]:
        return Completion(f"progress of {self.path}", self._origin)

    def _wake(self) -> None:
        """Wake the iterators over events: there will be no more."""
        with self._lock:
            news = self._news
        news._settle(None)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started
