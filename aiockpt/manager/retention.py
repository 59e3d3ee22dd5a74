"""Deletion of the steps that are no longer kept: behind, one at a time, after each save that is durable."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from aiockpt.core.threads import DaemonThreads
from aiockpt.errors import AiockptError, CheckpointNotFoundError, DeleteError, NoThreadError
from aiockpt.manager.policies import KeepPolicy, to_delete
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.manager.scan import StepScanner
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.saves import SaveResult

logger = logging.getLogger("aiockpt")

_END_S = 5.0
_REMEMBERED = 8  # last saves, whose longest is the estimate for the next one


class MirrorPort(Protocol):
    """The mirror of a run, as the deletion of its steps sees it; see `MirrorCopier`."""

    @property
    def knows_held(self) -> bool:
        """Whether `held` has everything; until then no step must be deleted."""

    def held(self) -> set[int]:
        """Return the steps of the run that must not be deleted now."""

    def note_end(self, step: int, handle: SaveHandle, path: str = "") -> None:
        """Note that the save of a step has ended; ``path``: where it was written to instead."""


class Retention:
    """Follows the saves of a run in a thread, measures them, and deletes what is no longer kept.

    A step is deleted only after a later save of this manager is durable and found in the directory. Never deleted are:
    the newest complete step, those that this manager is writing, the one that it has written last, the one that the run
    was restored from until this manager has written one, those that are pinned, and those that are read. A deletion
    that fails is logged, and tried again after the next save.
    """

    def __init__(
        self,
        scanner: StepScanner,
        keep: KeepPolicy | None,
        on_written: Callable[[int, SaveResult], object] | None,
        storage: Storage,
    ) -> None:
        self._scanner = scanner
        self.keep = keep
        self._on_written = on_written
        self._origin = os.getpid()
        self._ended = False
        self._thread = DaemonThreads(1, "aiockpt-retention")
        self._unclosed = weakref.finalize(self, self._thread.end, 0.0)
        self._unclosed.atexit = False
        self._deleter = SyncCheckpointer(
            process_group=None, storage=storage
        )  # of its own: deleting goes on while closing
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()  # steps that are read or pinned
        self._pinned: set[int] = set()
        self._last: int | None = None  # the step that was written last, or restored
        self._written_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._in_flight: dict[SaveHandle, tuple[int, float]] = {}  # step and beginning of saves
        self._mirror: MirrorPort | None = None

    # --- from the caller's thread -----------------------------------------------------------------------

    def follow(self, handle: SaveHandle, step: int, *, prunes: bool) -> None:
        """Measure a save when it is written; with ``prunes``, then delete the steps that are no longer kept."""
        with self._lock:
            self._in_flight[handle] = (step, time.monotonic())
        try:
            self._thread.submit(self._follow, handle, step, prunes)
        except RuntimeError as exc:  # the save goes on all the same
            with self._lock:
                self._in_flight.pop(handle, None)
            logger.warning("no thread could be started to follow the save of %s: %s", handle.path, exc)

    def attach(self, mirror: MirrorPort) -> None:
        """Report to a mirror which steps are written, and keep those that it needs."""
        self._mirror = mirror

    def again(self) -> None:
        """Delete what is no longer kept, as a step is free again; does not block."""
        last = self._last
        if last is not None and self.keep is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended: the next run does it
                self._thread.submit(self._prune_safely, last)

    def restored(self, step: int) -> None:
        with self._lock:
            self._last = step

    def discard(self, after: int) -> None:
        """Delete the steps after one, the newest first, when the saves so far have ended. Blocks until it is durable.

        Wherever it is interrupted, the directory is as it was at the time of one of these steps.
        """
        self.finished().result()
        for info in reversed(self._scanner.scan(lenient=True)):
            if info.step <= after or info.state == "unfinished":
                continue
            try:
                self._deleter.delete(info.path)
            except AiockptError as exc:
                raise DeleteError(
                    f"step {after} was restored, but step {info.step} after it could not be discarded: {exc}"
                ) from exc
        self.restored(after)

    def pin(self, step: int) -> None:
        with self._lock:
            self._pinned.add(step)

    def unpin(self, step: int) -> None:
        with self._lock:
            self._pinned.discard(step)

    @contextlib.contextmanager
    def reading(self, *steps: int) -> Iterator[None]:
        with self._lock:
            self._held.update(steps)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(steps)

    @property
    def essential(self) -> set[int]:
        """The steps that are pinned, and the one that was written last, or restored."""
        with self._lock:
            return self._pinned | (set() if self._last is None else {self._last})

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(self._pinned)

    def expected_s(self) -> float:
        """Return the expected seconds until a save that begins now would be written; 0 if none was written before.

        This is the longest of the last saves, plus what is left of those in flight, which are written first.
        """
        with self._lock:
            longest = max(self._written_s, default=0.0)
            now = time.monotonic()
            return longest + sum(max(0.0, longest - (now - began)) for _, began in self._in_flight.values())

    def finished(self) -> Future[None]:
        """Return a future that completes when every save that is followed has ended, and its deletions are done."""
        try:
            return self._thread.submit(lambda: None)
        except NoThreadError:  # so there was none, and nothing is followed
            done: Future[None] = Future()
            done.set_result(None)
            return done

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing to wait for: it was ended, or this is a fork of its process."""
        return self._ended or os.getpid() != self._origin

    def end(self) -> None:
        """End the thread; if a deletion hangs, leave it behind. Blocks for seconds at most; idempotent."""
        if self.has_ended:
            return
        self._ended = True
        if self._thread.end(_END_S):
            self._deleter.close()
        else:
            logger.warning("a deletion, or a save of another's checkpointer, is left behind as it does not end")

    # --- in the thread ------------------------------------------------------------------------------------

    def _follow(self, handle: SaveHandle, step: int, prunes: bool) -> None:
        try:
            handle.written.ended(None)  # not its result: the failure is for the caller that awaits the save
            result = None if handle.written._exception is not None else handle.written._result
            is_here = result is not None and result.fallback_error is None
            with self._lock:
                self._in_flight.pop(handle, None)
                if result is not None and is_here:
                    self._written_s.append(result.written_s)
                    self._last = step
            if self._mirror is not None:  # before anything is deleted
                self._mirror.note_end(step, handle, "" if is_here or result is None else result.path)
            if result is not None and self._on_written is not None:
                self._call_on_written(step, result)
            if is_here and prunes and (info := self._scanner.look(step, handle.path)) is not None and info.problem:
                text = "step %d was written, but is %s: no restore takes it, and no step is deleted: %s"
                logger.error(text, step, info.state, info.problem)
        except Exception:
            logger.exception("the end of the save of %s was not followed", handle.path)
        else:
            with self._lock:
                others = [other.written._result for other in self._in_flight]
            is_last = all(other is None or other.fallback_error is not None for other in others)
            if is_here and prunes and is_last:  # else the next one deletes for both: a look at all steps takes a while
                self._prune_safely(step)

    def _prune_safely(self, written: int) -> None:
        try:
            self._prune(written)
        except Exception:
            logger.exception(
                "what is no longer kept beside step %d was not deleted; the next save tries again", written
            )

    def _call_on_written(self, step: int, result: SaveResult) -> None:
        try:
            if self._on_written is not None:
                self._on_written(step, result)
        except Exception:  # of the caller's function: the step is written all the same
            logger.exception("on_written has failed for step %d", step)

    def _prune(self, written: int) -> None:
        if self.keep is None or (self._mirror is not None and not self._mirror.knows_held):  # it calls `again`
            return
        infos = self._scanner.scan(lenient=True)  # what can't be read stays
        last = next((info for info in infos if info.step == written), None)
        if last is None or last.state != "complete":  # it was moved away, or the file system does not show it yet
            return
        for info in to_delete(self.keep, infos, time.time(), self.protected()):
            if info.step in self.protected():  # pinned, opened or saved again meanwhile
                continue
            try:
                self._deleter.delete(info.path)
            except CheckpointNotFoundError:
                continue
            except AiockptError as exc:
                logger.warning("step %d is no longer kept, but stays until the next save: %s", info.step, exc)

    def protected(self) -> set[int]:
        """Return the steps that must not be deleted now."""
        copied = set() if self._mirror is None else self._mirror.held()
        with self._lock:
            held = {step for step, count in self._held.items() if count > 0}
            written = {step for step, _ in self._in_flight.values()}  # they replace what is there
            return copied | held | written | self._pinned | (set() if self._last is None else {self._last})
