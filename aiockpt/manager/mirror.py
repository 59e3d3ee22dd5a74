"""The mirror of a run: its steps are copied to a second directory or a bucket, behind, one at a time.

Nothing is noted down: what is missing follows from what both directories show, and a copy that was interrupted goes on
with what is whole. Copies run on an engine of their own, so a store that hangs holds neither saves nor loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aiockpt.core.futures import Completion
from aiockpt.core.threads import Workers
from aiockpt.core.wording import some_of
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import (
    AiockptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    NoThreadError,
    RunLockedError,
    SaveError,
    SaveSkippedError,
)
from aiockpt.manager.policies import as_policy
from aiockpt.manager.scan import StepInfo, is_unreadable
from aiockpt.manager.tiers import Tier, backlog, due_steps, is_mirrored, mirror_to_delete, other_run
from aiockpt.storage.copying import RateLimit, copy_checkpoint
from aiockpt.sync_checkpointer import SyncCheckpointer
from aiockpt.telemetry.saves import MirrorBacklog, MirrorResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.core.futures import Call
    from aiockpt.engine.reports import Reports
    from aiockpt.manager.policies import KeepPolicy
    from aiockpt.manager.requests import Mirror
    from aiockpt.manager.retention import Retention
    from aiockpt.reading.executor import LoadTools
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import RunLease

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_PATIENCE_S = 60.0  # closing waits no longer for a mirror that fails all the time
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
)  # no such bucket, say
LEFT_S = 86400.0  # the age of copies that nobody goes on with
_END_S = 5.0
_NO_LIMIT_S = 1e6
_THREADS = 6
_NICE = 10
_MOST_SHOWN = 10
_REMEMBERED = 8
_NUMBERS = re.compile(r"\d[\d.]*\s?([nµm]?s\b)?")  # such as how long a request took

logger = logging.getLogger("aiockpt")


@dataclass(slots=True)
class _Promise:
    """The future `SaveHandle.mirrored` of a save whose step is not mirrored yet."""

    handle: SaveHandle
    future: Completion[MirrorResult]
    time_s: float  # its `StepInfo.time`
    is_written: bool = False


class Promises:
    """The promises of all saves. From any thread.

    Each is that of a save: the same step may be saved again, while an earlier save of it is looked at or copied.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, _Promise] = {}

    def make(self, step: int, handle: SaveHandle, time_s: float) -> Completion[MirrorResult]:
        """Return the future of a save that has begun."""
        made = _Promise(handle, Completion(f"`mirrored` of {handle.path}", handle._origin), time_s)
        self.fail(step, SaveSkippedError(f"step {step} was saved again before it was mirrored"))
        with self._lock:
            self._made[step] = made
        return made.future

    def of(self, step: int, handle: SaveHandle) -> _Promise | None:
        """Return the promise of a save, unless its step was saved again, or it is settled."""
        made = self._made.get(step)
        return made if made is not None and made.handle is handle else None

    @property
    def written(self) -> dict[int, SaveHandle]:
        """The saves that are written, and neither mirrored nor given up, by step."""
        with self._lock:
            return {step: made.handle for step, made in sorted(self._made.items()) if made.is_written}

    def keep(self, step: int, result: MirrorResult, of: SaveHandle | None) -> None:
        """Complete the future of a save that is mirrored; None: of none."""
        if of is not None and (made := self._take(step, of)) is not None:
            made.future._settle(result)

    def fail(self, step: int, error: BaseException, of: SaveHandle | None = None) -> None:
        """Fail the future of a save; None: of the last one of this step."""
        if (made := self._take(step, of)) is not None:
            made.future._settle(None, error)

    def fail_all(self, reason: str) -> None:
        """Fail what is left."""
        for step in list(self._made):
            self.fail(step, SaveError(f"step {step} is not mirrored: {reason}"))

    def _take(self, step: int, of: SaveHandle | None) -> _Promise | None:
        with self._lock:
            made = self._made.get(step)
            return self._made.pop(step) if made is not None and of in (None, made.handle) else None


class MirrorCopier:
    """Copies the steps of a run to another directory whenever there is something to copy.

    ``keep`` is the policy of the run's directory, and ``retention`` deletes its steps, if anything does. ``locks``: the
    mirror has one writer.
    """

    def __init__(
        self,
        here: Tier,
        there: Tier,
        options: Mirror,
        reports: Reports,
        *,
        keep: KeepPolicy | None = None,
        retention: Retention | None = None,
        locks: bool = True,
    ) -> None:
        self.here, self.there, self.promises = here, there, Promises()
        self._options, self._reports, self._retention, self._locks = options, reports, retention, locks
        self.is_ephemeral = options.ephemeral  # the run's directory is lost with the node
        self._keep, self._mirror_keep = keep, keep if options.keep is None else as_policy(options.keep)
        self._checkpointer = SyncCheckpointer(process_group=None, drain_timeout=_END_S)
        self._checkpointer._warns_as("manager with a mirror")
        self._access = EngineAccess(self._checkpointer)
        self.workers = Workers(_THREADS, "aiockpt-mirror", nice=_NICE)
        self._unclosed = weakref.finalize(self, self.workers.end, 0.0)
        self._unclosed.atexit = False
        self._task = _CopyingTask(self)
        self._limit = RateLimit(options.bandwidth)
        self._lease: RunLease | None = None
        self._state = _MirrorState()
        self._origin = os.getpid()

    # --- from the caller's threads ----------------------------------------------------------------------

    @property
    def backlog(self) -> MirrorBacklog:
        """The work that is left, as it was seen last."""
        return self._state.backlog

    def state_of(self, info: StepInfo) -> str:
        """Return whether the mirror has a step of the run, as it was seen last, or will get it; as text."""
        if is_mirrored(info, {each.step: each for each in self._state.mirror}):
            return "complete"
        return "waits" if info.step in self.backlog.steps else ""

    @property
    def knows_held(self) -> bool:
        """Whether `held` has everything; until then no step must be deleted."""
        return self._state.has_looked or not self._options.required

    def held(self) -> set[int]:
        """Return the steps of the run that must not be deleted now."""
        held = set() if self._state.copied is None else {self._state.copied}
        return held | {*self._state.backlog.steps, *self.promises.written} if self._options.required else held

    def expected_s(self) -> float:
        """Return the expected seconds until a step would be mirrored that is written when this run is closed.

        This is the longest of the last copies, twice if one is being made. 0 if there was none.
        """
        return max(self._state.took_s, default=0.0) * (1 if self._state.copied is None else 2)

    def poke(self) -> None:
        """Look for something to copy. From any thread; never raises."""
        try:
            self._task.poke()
        except (AiockptError, RuntimeError) as exc:  # closed, or no thread can be had: the next step tries again
            logger.warning("%s can't be mirrored now: %s", self.here.directory, exc)

    def note_end(self, step: int, handle: SaveHandle, path: str = "") -> None:
        """Note that the save of a step has ended; ``path``: where it was written to instead."""
        error = handle.written._exception
        if path:
            error = SaveSkippedError(f"step {step} is not mirrored: it was written to {path}")
        if error is not None:
            self.promises.fail(step, error, handle)
        else:
            if (made := self.promises.of(step, handle)) is not None:
                made.is_written = True
            self._state.times.setdefault(step, time.time())
            self.poke()

    def discard(self, after: int) -> None:
        """Delete the steps of the mirror after one, the newest first; nothing is copied until `resume`. Blocks.

        Raises:
            AiockptError: something can't be deleted, or the mirror can't be reached.
        """
        what = f"discard steps of {self.there.directory}"
        try:
            self._task.pause(max(self._options.timeout, _PATIENCE_S))
            steps = self._access.call(self._owned_steps, what).completion.result(self._options.timeout)
            later = [info for info in reversed(steps) if info.step > after and info.state != "unfinished"]
            self._access.call(partial(self._delete, later), what).result()
        except OSError as exc:
            raise AiockptError(f"{self.there.directory} can't be read: {exc}") from exc

    def resume(self) -> None:
        """Copy again, after `discard`."""
        self._task.resume()

    @property
    def has_work(self) -> bool:
        """Whether a step waits, or may do so."""
        return not self._state.has_looked or bool(self.promises.written or self.backlog.steps)

    def finish(self) -> Completion[None] | None:
        """Finish what is left; return a future of the end, or None if there is nothing to wait for."""
        self._task.is_closing = True
        if self._options.every is not None:  # the newest step
            self.poke()
        return self._task.finish()

    def log_wait(self, most_s: float) -> None:
        """Log what closing waits for."""
        limit = f"for {most_s:.0f} s at most" if most_s < _NO_LIMIT_S else "without a limit"
        what = self._shown_left() or "what it lacks"
        text = "closing waits until %s of %s is mirrored to %s, %s; a second Ctrl-C ends that"
        logger.warning(text, what, self.here.directory, self.there.directory, limit)

    def _shown_left(self) -> str:
        left = self.promises.written or self.backlog.steps
        return f"step{'s'[: len(left) > 1]} {some_of(list(map(str, left)), _MOST_SHOWN)}" if left else ""

    def close(self) -> None:
        """Stop copying, and say what is not mirrored. Blocks for seconds at most; idempotent."""
        if self._origin != os.getpid():
            return
        self._task.stop()
        if shown := self._shown_left():
            why = f": {self.backlog.error}" if self.backlog.error is not None else ""
            text = "%s lacks %s of %s, until a manager opens the run again, or `aiockpt mirror` is run%s"
            logger.warning(text, self.there.directory, shown, self.here.directory, why)
        self.promises.fail_all("the manager was closed before")
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self.workers.submit(lease.release).result(_END_S)
            except TimeoutError:  # a store that can't be reached may take minutes to say so
                pass
            except NoThreadError:
                lease.release()
        self._checkpointer.close()
        if not self.workers.end(_END_S):
            logger.warning("a request to the mirror %s is left behind as it does not end", self.there.directory)

    # --- on the engine's loop -----------------------------------------------------------------------------

    async def advance(self) -> bool:
        """Copy one step; return whether there may be more to do."""
        workers = self.workers
        written = self.promises.written  # before the directory is read, which shows all of them
        local = await workers.run(partial(self.here.scanner.scan, lenient=True))
        knew_held = self.knows_held
        # As the mirror was seen last: it may fail, or not answer, while the backlog grows.
        self._look(local, self._state.mirror, {})
        if not knew_held and self._retention is not None:
            self._retention.again()
        await self._own(workers)
        self._state.mirror = await workers.run(self._steps_there)
        text = other_run(self.here.directory, local, self.there.directory, self._state.mirror)
        if text:
            raise RunLockedError(text)
        mirror = await self._pruned(self._state.mirror, workers)
        missing = self._look(local, mirror, written)
        await self._give_up({info.save_id for info in missing}, workers)
        return bool(missing) and await self._go_on(missing, written)

    def _steps_there(self) -> Sequence[StepInfo]:
        known = {info.step: info for info in self._state.mirror}
        found = self.there.scanner.scan(lenient=True)
        return [known.get(info.step, info) if is_unreadable(info) else info for info in found]

    async def _go_on(self, missing: Sequence[StepInfo], written: Mapping[int, SaveHandle]) -> bool:
        """Copy one of the missing steps; return whether there may be more to do."""
        # What can't be read here holds up no other. The newest, if there may be no time for all.
        unreadable = {each.step: each.problem for each in self._state.mirror if is_unreadable(each)}
        there = [info for info in missing if info.step not in unreadable]
        left = [info for info in there if info.save_id not in self._state.unreadable] or there
        if not left:  # perhaps a later save stands there: it is not replaced
            step = missing[0].step
            raise OSError(f"{self.there.path_of(step)} of the mirror: {unreadable[step]}")
        info = left[-1 if self._task.is_closing else 0]
        self._state.copied = info.step
        try:
            await self._copy(info, written.get(info.step), self.workers)
        finally:
            self._state.copied = None
            if self._retention is not None:
                self._retention.again()  # its step may be deleted from now on
        return True

    def note_failure(self, error: BaseException) -> None:
        """Note why a copy, or looking for one, has failed."""
        self._state.backlog = replace(self._state.backlog, error=error)
        self._reports.copied(self.there.directory, 0.0, None, error, self.backlog)
        if isinstance(error, RunLockedError):  # another one writes there: that does not pass by itself
            for step, handle in self.promises.written.items():
                self.promises.fail(step, error, handle)
        logged, self._state.logged = self._state.logged, _NUMBERS.sub("", repr(error))
        is_gone = isinstance(error, CheckpointNotFoundError)  # deleted or replaced just now
        if logged != self._state.logged and not is_gone:
            logger.warning("%s can't be mirrored to %s now: %s", self.here.directory, self.there.directory, error)

    async def _own(self, workers: Workers) -> None:
        """Take the lease of the mirror, and remove what nobody goes on with."""
        if self._lease is not None or not self._locks:
            return
        self._lease = await workers.run(self.there.storage.lease, self.there.directory)
        with contextlib.suppress(AiockptError):  # it costs space, no more
            await self.there.storage.clean(self.there.directory, older_than_s=LEFT_S, workers=workers)

    def _check_lease(self) -> None:
        lease = self._lease
        if lease is not None:
            try:
                lease.check()
            except RunLockedError as exc:
                self._lease = None
                lease.release()
                raise AiockptError(
                    f"the mirror {self.there.directory}, or its lock, was removed or taken by another manager; unless "
                    "another one has it, the copy is made again. Find out what removes files there"
                ) from exc

    def _look(
        self, local: Sequence[StepInfo], mirror: Sequence[StepInfo], written: Mapping[int, SaveHandle]
    ) -> list[StepInfo]:
        """Return what is missing; settle the futures of steps that were written if they are there, or are dropped."""
        state = self._state
        there = {info.step: info for info in mirror}
        state.times |= {info.step: info.time for info in (*mirror, *local) if info.state == "complete"}
        due = due_steps(self._options.every, dict(state.times))
        if self._task.is_closing:
            due.add(max((info.step for info in local if info.state == "complete"), default=-1))
        # What was deleted there, as its policy says, does not come back.
        over = {info.step for info in local if info.save_id in state.over and info.step not in there}
        over |= {info.step for info in local if info.save_id in state.damaged}
        missing = backlog(
            local,
            mirror,
            due=due - over,
            keep=self._keep,
            mirror_keep=self._mirror_keep,
            now=time.time(),
            protected=set() if self._retention is None else self._retention.essential,
            drops=not self._options.required,
        )
        state.has_looked = True
        newest = max((info for info in mirror if info.state == "complete"), key=lambda info: info.step, default=None)
        state.backlog = MirrorBacklog(
            tuple(info.step for info in missing),
            sum(info.nbytes for info in missing),
            None if newest is None else newest.step,
            0.0 if newest is None else newest.time,
            state.backlog.error if missing else None,
        )
        self._settle({info.step: info for info in local}, there, written, due, {info.step for info in missing})
        return missing

    def _settle(
        self,
        here: Mapping[int, StepInfo],
        there: Mapping[int, StepInfo],
        written: Mapping[int, SaveHandle],
        due: Collection[int],
        waiting: Collection[int],
    ) -> None:
        """Settle the futures of steps that were written if they are there, or are dropped."""
        state = self._state
        for step, handle in written.items():
            if step in here and here[step].state == "damaged" and not is_unreadable(here[step]):
                damage = CorruptCheckpointError(f"step {step} is not mirrored, as it is damaged: {here[step].problem}")
                self.promises.fail(step, damage, handle)
            elif self._has_it(here.get(step), there.get(step), handle):
                self.promises.keep(step, MirrorResult(there[step].path, there[step].nbytes, 0, 0.0), handle)
            elif step in here and here[step].save_id in state.damaged:  # found before the end of the save was noted
                self.promises.fail(step, state.damaged[here[step].save_id], handle)
            elif step not in waiting:
                every = "`every` of the mirror says so; the newest is when the run is closed"
                why = "the policies keep later ones" if step in due else every
                why += "" if step in here else ", or it was deleted by other means"
                self.promises.fail(step, SaveSkippedError(f"step {step} is not mirrored: {why}"), handle)

    def _has_it(self, own: StepInfo | None, copy: StepInfo | None, handle: SaveHandle) -> bool:
        """Return whether the mirror has what a save has written: which may be deleted here, if it was copied early."""
        if copy is None or copy.state != "complete":
            return False
        if own is not None:
            return is_mirrored(own, {copy.step: copy})
        made = self.promises.of(copy.step, handle)
        return made is not None and made.time_s == copy.time

    async def _copy(self, info: StepInfo, handle: SaveHandle | None, workers: Workers) -> None:
        """Copy a step, and report it; ``handle``: of its save, if that was written before the directory was read."""
        path, begun = self.there.path_of(info.step), time.perf_counter()
        self._state.begun[info.save_id] = path
        try:
            result = await copy_checkpoint(
                self.here.storage,
                info.path,
                self.there.storage,
                path,
                info.save_id,
                workers=workers,
                limit=self._limit,
                base=self._base_of(info),
                check=self._check_lease,
            )
        except CorruptCheckpointError as exc:
            self._state.damaged[info.save_id] = exc
            del self._state.begun[info.save_id]  # it is removed already
            if handle is not None:
                self.promises.fail(info.step, exc, handle)
            text = "step %d is not mirrored, as it is damaged; what is there stays: %s"
            logger.warning(text, info.step, exc)
            self._reports.copied(path, time.perf_counter() - begun, None, exc, self.backlog)
            return
        except LoadError:
            self._state.unreadable.add(info.save_id)
            raise
        self._state.took_s.append(result.mirrored_s)
        self._state.note_copied(info, path)
        self._reports.copied(path, result.mirrored_s, result, None, self.backlog)
        self.promises.keep(info.step, result, handle)

    def _base_of(self, info: StepInfo) -> str | None:
        """Return the path of the step there that shares most files with a step, likely: the one before, or the next."""
        others = [each for each in self._state.mirror if each.state == "complete" and each.step != info.step]
        return (
            min(others, key=lambda each: (each.step > info.step, abs(each.step - info.step))).path if others else None
        )

    async def _give_up(self, waiting: set[str], workers: Workers) -> None:
        """Remove what was copied of steps that have failed, and are left out by now."""
        for save_id in self._state.begun.keys() - waiting:
            path = self._state.begun[save_id]
            if save_id not in self._state.over:
                with contextlib.suppress(AiockptError):  # it costs space, no more, and must not hold up the others
                    left = await self.there.storage.resume(path, save_id, workers=workers)
                    await left.abort()
            del self._state.begun[save_id]

    async def _pruned(self, mirror: Sequence[StepInfo], workers: Workers) -> Sequence[StepInfo]:
        """Delete from the mirror what is no longer kept; return what is left there."""
        committed, self._state.committed = self._state.committed, None
        if committed is None:  # only after a copy
            return mirror
        left = list(mirror)
        for info in mirror_to_delete(self._mirror_keep, mirror, committed, time.time(), self._protected()):
            await workers.run(self._check_lease)
            if info.step in self._protected():  # pinned meanwhile
                continue
            try:
                await self.there.storage.delete(info.path, workers=workers)
                left.remove(info)
            except AiockptError as exc:
                logger.warning("%s is no longer kept, but stays until the next step is mirrored: %s", info.path, exc)
        return left

    def _protected(self) -> set[int]:
        return set() if self._retention is None else self._retention.protected()

    async def _owned_steps(self, _: LoadTools) -> Sequence[StepInfo]:
        await self._own(self.workers)
        return await self.workers.run(partial(self.there.scanner.scan, lenient=True))

    async def _delete(self, steps: Sequence[StepInfo], _: LoadTools) -> None:
        for info in steps:
            await self.workers.run(self._check_lease)
            await self.there.storage.delete(info.path, workers=self.workers)


class _MirrorState:
    """The state of a mirror in this process."""

    def __init__(self) -> None:
        self.backlog = MirrorBacklog()
        self.has_looked = False
        self.logged = ""  # the last error since a copy was made, which is not logged at each attempt
        self.copied: int | None = None  # the step that is being copied
        self.committed: StepInfo | None = None  # what was copied, until the mirror is looked at again
        self.mirror: Sequence[StepInfo] = ()  # the steps there, as they were seen last
        self.took_s: deque[float] = deque(maxlen=_REMEMBERED)  # how long copies have taken
        self.times: dict[int, float] = {}  # when each step was saved
        self.begun: dict[str, str] = {}  # the paths of copies that were begun, by the ids of their steps
        self.over: set[str] = set()  # the ids of steps that were mirrored
        self.damaged: dict[str, CorruptCheckpointError] = {}  # why those are not mirrored whose bytes are damaged
        self.unreadable: set[str] = set()  # of those that could not be read; they are tried after all others

    def note_copied(self, info: StepInfo, path: str) -> None:
        """Take a step off the backlog; the mirror is looked at again only after that."""
        self.over.add(info.save_id)
        self.logged = ""
        self.mirror = [*(each for each in self.mirror if each.step != info.step), replace(info, path=path)]
        self.committed, before = info, self.backlog
        steps = tuple(step for step in before.steps if step != info.step)
        is_newest = before.newest is None or info.step >= before.newest
        newest = (info.step, info.time) if is_newest else (before.newest, before.newest_time)
        self.backlog = MirrorBacklog(steps, before.nbytes - info.nbytes, *newest)


class _CopyingTask:
    """The coroutine that copies as long as there is something to copy; started when there may be."""

    def __init__(self, mirror: MirrorCopier) -> None:
        self._mirror = mirror
        self._lock = threading.Lock()
        self._call: Call[None] | None = None
        self._wake: Callable[[], object] = lambda: None
        self._is_poked = self._is_paused = self.is_closing = self._is_over = self._has_succeeded = False

    def poke(self) -> None:
        with self._lock:
            self._is_poked = True
            if self._call is not None:
                self._wake()
            elif not (self._is_paused or self._is_over):
                self._call = self._mirror._access.call(self._run, f"mirror {self._mirror.here.directory}")

    def pause(self, timeout_s: float) -> None:
        """Stop, and start nothing until `resume`. Blocks until the copy has stopped; raise TimeoutError if it hangs."""
        with self._lock:
            self._is_paused, call = True, self._call
        if call is not None:
            call.cancel()
            call.completion.ended(timeout_s)

    def resume(self) -> None:
        with self._lock:
            self._is_paused = False
        self._mirror.poke()

    def finish(self) -> Completion[None] | None:
        with self._lock:
            self._wake()
            # If the mirror was never reached, a first request may take minutes to fail.
            is_vain = not (self._has_succeeded or self._mirror.has_work or self._is_poked)
            return None if self._call is None or is_vain else self._call.completion

    def stop(self) -> None:
        """Stop for good. Blocks for seconds at most."""
        with self._lock:
            self._is_over, call = True, self._call
        if call is not None:
            call.cancel()
            with contextlib.suppress(TimeoutError):  # a thread hangs, and is left behind
                call.completion.ended(_END_S)

    async def _run(self, _: LoadTools) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._wake = partial(_call_in, loop, woken.set)
        delay_s, failing_since = _FIRST_RETRY_S, 0.0
        try:
            while True:
                with self._lock:
                    self._is_poked = False
                woken.clear()
                try:
                    is_more = await self._mirror.advance()
                    delay_s, failing_since, self._has_succeeded = _FIRST_RETRY_S, 0.0, True
                except Exception as exc:
                    self._mirror.note_failure(exc)
                    failing_since = failing_since or time.monotonic()
                    is_hopeless = isinstance(exc, RunLockedError) or time.monotonic() - failing_since > _PATIENCE_S
                    is_hopeless |= isinstance(exc, _LASTING) and delay_s > _FIRST_RETRY_S
                    if self.is_closing and (is_hopeless or not self._mirror.has_work):
                        self._has_ended(anyway=True)
                        return
                    with anyio.move_on_after(delay_s):
                        await woken.wait()
                    delay_s = min(2 * delay_s, _LONGEST_RETRY_S)
                    continue
                if not is_more and self._has_ended():
                    return
        except BaseException:  # it is stopped
            self._has_ended(anyway=True)
            raise

    def _has_ended(self, *, anyway: bool = False) -> bool:
        """Return whether there is nothing to do; then the next `poke` starts anew."""
        with self._lock:
            if self._is_poked and not anyway:
                return False
            self._call, self._wake = None, lambda: None
            return True


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(function)
