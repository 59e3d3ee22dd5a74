"""The base of both managers: every decision, and everything that does not wait."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import html
import logging
import secrets
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.core.futures import Completion
from aiockpt.core.importing import importing
from aiockpt.core.parameters import outer_stacklevel, parameters_of
from aiockpt.core.threads import has_loop, in_thread, start_thread, uninterrupted
from aiockpt.core.wording import time_text
from aiockpt.engine.facade import CheckpointerBase, EngineAccess
from aiockpt.errors import (
    AiockptError,
    CheckpointerClosedError,
    CheckpointNotFoundError,
    DeleteError,
    NoThreadError,
    SaveError,
    printable_key,
)
from aiockpt.manager.policies import (
    Mode,
    SavePolicy,
    StepFacts,
    as_policy,
    check_metric,
    kept_text,
    metric_of,
    ranked,
    select,
    split,
)
from aiockpt.manager.preemption import Answer, Asked, LastSaveRequests, Pace, decide
from aiockpt.manager.requests import (
    ManagerOptions,
    Mirror,
    Restored,
    RestoreRequest,
    StepRequest,
    check_metadata,
    check_metrics,
    check_step,
    mirror_of,
)
from aiockpt.manager.restoring import Restore
from aiockpt.manager.retention import Retention
from aiockpt.manager.scan import RUN_KEY, StepInfo, StepNames
from aiockpt.manager.tiers import Tier
from aiockpt.options import CheckpointerOptions, SaveOptions
from aiockpt.planning.filters import recorded
from aiockpt.storage.base import room_coming
from aiockpt.telemetry.card import size_text

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.manager.disks import RunDisks
    from aiockpt.manager.mirror import MirrorCopier
    from aiockpt.manager.ports import CheckpointerPort
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import RunLease, Storage
    from aiockpt.telemetry.mirrors import MirrorBacklog

T = TypeVar("T")

logger = logging.getLogger("aiockpt")

_WRITER_S = 60.0  # for the writer process of a killed trainer to finish
_WRITER_POLL_S = 0.05
_QUIET_S = 1.0  # closing waits so long without a word, as after a Ctrl-C
_ID_BYTES = 8
_SHOWN = 20  # steps in a notebook's table


class ManagerBase:
    """A manager without its public methods that wait.

    Those that wait are written once, as coroutines: in the async manager they suspend, in the blocking one they block.
    """

    _kind: type[CheckpointerBase] = CheckpointerBase
    _suspends: bool
    _port_of: Callable[[Any], CheckpointerPort]

    @parameters_of(ManagerOptions)
    def __init__(self, options: ManagerOptions) -> None:
        """Create a manager of the checkpoints in one directory. Nothing is read or locked before its first use."""
        if options.mode not in ("write", "read"):
            raise ValueError(f"mode must be 'write' or 'read', not {options.mode!r}")
        if options.save is not None and not isinstance(options.save, SavePolicy):
            raise TypeError(f"save must be a policy such as EverySteps(100), not {options.save!r}")
        self._keep = as_policy(options.keep)
        self._by_step, self._by_facts = split(options.save)
        self._owns_checkpointer = options.checkpointer is None
        self._checkpointer = _checkpointer_of(options, self._kind)
        in_force = self._checkpointer._options
        if options.own_disks and options.base is not None:
            raise ValueError(
                "base and own_disks=True can't be used together: several ranks save whole steps; leave base out"
            )
        if options.own_disks and in_force.fallback_path is not None:
            raise ValueError(
                "fallback_path and own_disks=True can't be used together: hosts serve each other the directory of the "
                "run, and no other; leave fallback_path out, and pass mirror= for a second place"
            )
        self._port = self._port_of(self._checkpointer)
        self._access = EngineAccess(self._checkpointer)
        self._storage, self.directory = self._access.locate(options.directory)
        self.writes = options.mode == "write"
        self._names = StepNames(options.names)
        self._disks: RunDisks | None = None
        if options.own_disks:
            with importing():
                from aiockpt.manager.disks import RunDisks

            self._disks = RunDisks(self._storage, self.directory, self._names, self._access)
            self._storage = self._disks.storage
        self._locks = self.writes and options.lock
        self._must_exist = not (self.writes or options.missing_ok)
        self._filters = {"include": options.include, "exclude": options.exclude}
        self._base = options.base
        self._tier = Tier(self._storage, self.directory, self._names)
        self._scanner = self._tier.scanner
        mirror = mirror_of(options)
        self._mirror_tier = None if mirror is None else self._tier_of(mirror)  # on all ranks
        self._mirror: MirrorCopier | None = None  # of the rank that copies
        self._mirror_options = mirror
        self._drain_s = min(in_force.drain_timeout, threading.TIMEOUT_MAX)  # locks refuse infinity
        self._retention = Retention(self._tier.new_scanner(), self._keep, options.on_written, self._storage)
        self._requests = LastSaveRequests()
        self._lock: RunLease | None = None
        self._run_id = ""  # as the steps have it; chosen at the first save of a new run
        self._is_open = False
        self._is_closed = False
        self._has_warned = False  # that it blocks a loop
        self._closing: Completion[None] | None = None  # since an async manager is being closed
        self._closer: threading.Thread | None = None
        self._hurry: concurrent.futures.Future[None] = concurrent.futures.Future()  # done: it waits for less
        self._has_failed = False  # its block was left by an error
        self._previous: int | None = None  # the step that was asked about, or restored
        self._restored: int | None = None
        self._final: int | None = None  # the last step, as `due` was told
        self._begun: tuple[int, SaveHandle] | None = None  # the last save
        self._last_began = time.monotonic()  # the last save, or this manager
        self._is_stopping = False
        self._pace = Pace()
        self._calls_left = 1  # until the next exchange with the other ranks

    def _tier_of(self, mirror: Mirror) -> Tier:
        with importing():
            from aiockpt.manager import mirror as _  # noqa: F401 - for what copies, in the caller's thread
        storage, directory = self._access.locate_by_path(mirror.directory)
        if f"{directory}/".startswith(f"{self.directory}/") or f"{self.directory}/".startswith(f"{directory}/"):
            raise ValueError(f"mirror is {directory}, and the run {self.directory}: one must not be in the other")
        return Tier(storage, directory, self._names)

    @property
    def _mirror_patience_s(self) -> float:
        return 0.0 if self._mirror_options is None else self._mirror_options.timeout

    def _copier_of(self, mirror: Mirror, tier: Tier) -> MirrorCopier:
        from aiockpt.manager.mirror import MirrorCopier, MirrorSettings  # imported already, since there is a mirror

        keep = self._keep if mirror.keep is None else as_policy(mirror.keep)
        settings = MirrorSettings(self._keep, keep, mirror.every, mirror.bandwidth, mirror.required, self._locks)
        return MirrorCopier(self._tier, tier, settings, self._access.reports, self._retention)

    # --- waiting, and what rank 0 does for all ranks ----------------------------------------------------------

    def _storage_at(self, *, is_mirror: bool) -> Storage:
        """Return the storage of the run's directory, or of its mirror."""
        tier = self._mirror_tier if is_mirror else self._tier
        if tier is None:
            raise RuntimeError("there is no mirror")
        return tier.storage

    async def _agree(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> T:
        """Agree with the other ranks; see `EngineAccess.agree`."""
        call, received = self._asked(what, value, decide)
        return received(await call.wait() if self._suspends else call.result())

    def _agree_now(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> T:
        """Do as `_agree`, blocking."""
        call, received = self._asked(what, value, decide)
        return received(call.result())

    def _asked(
        self, what: str, value: object, decide: Callable[[Sequence[Any]], T]
    ) -> tuple[Call[Any], Callable[[Any], T]]:
        """Begin a round; return it, and what makes the value of the reply. It carries changes of the hosts' disks."""
        disks = self._disks
        if disks is None:
            return self._access.agree(what, value, decide), lambda reply: reply
        return self._access.agree(what, disks.sent(value), partial(disks.decided, decide)), disks.received

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that blocks. A task that is cancelled leaves it behind, in its thread."""
        return await asyncio.wrap_future(in_thread(function, *args)) if self._suspends else function(*args)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides, or there are no other ranks."""
        return self._access.leads

    async def _led(self, what: str, work: Callable[[], Awaitable[T]], *, on_each_host: bool = False) -> T:
        """Do something on rank 0 alone; its result, or its error, is that of all ranks.

        ``on_each_host``: hosts with disks of their own do it too, each on its own; an error of one is that of all.
        """
        if self._access.world_size == 1:
            return await work()
        value: T | BaseException | None = None
        error: BaseException | None = None
        if self.leads or (on_each_host and self._disks is not None and self._disks.serves):
            try:
                value = await work()
            except BaseException as exc:  # raised below, once the other ranks have been notified
                error = exc
                value = exc if isinstance(exc, Exception) else AiockptError(f"{what} was interrupted: {exc!r}")
        try:
            result: T = await self._agree(what, value, of_rank_0)
        except AiockptError:
            # The error itself: what the other ranks get is made of its class name and text, and lacks its attributes.
            if error is not None:
                raise error from None
            raise
        return result

    # --- opening and closing ------------------------------------------------------------------------------

    async def _opened(self) -> None:
        """Take the run's lock at the first use, unless the manager only reads."""
        if self._is_closed:
            raise CheckpointerClosedError(f"this manager of {self.directory} is closed; make a new one")
        if self._is_open:
            return
        if self._disks is not None:
            await self._run(partial(self._disks.meet, make=self.writes))
        if self.writes:
            await self._led(f"the lock of {self.directory}", self._take_lock, on_each_host=True)
        if self.writes and self._disks is not None:
            await self._led(f"what is left in {self.directory}", partial(self._delete_torn, self._disks))
        if self.writes and self.leads and self._mirror_tier is not None and self._mirror_options is not None:
            self._mirror = self._copier_of(self._mirror_options, self._mirror_tier)
            self._retention.attach(self._mirror)
            self._mirror.poke()  # what an earlier manager has left
        self._is_open = True

    async def _take_lock(self) -> None:
        if self._locks and self._lock is None:  # else it was taken, and what follows was interrupted
            try:
                await self._run(self._lock_run)
            except AiockptError:  # such as RunLockedError, which is an OSError too
                raise
            except OSError as exc:
                raise AiockptError(
                    f"the run {self.directory} can't be locked: {exc}; to only read it, pass mode='read'"
                ) from exc
        try:
            await self._port.clean(self.directory, self._storage)
        except AiockptError as exc:  # orphans cost space, no more
            logger.warning("can't look for what killed processes have left in %s: %s", self.directory, exc)
        with contextlib.suppress(OSError):  # a restore raises it
            latest = await self._run(self._scanner.latest) if self.leads else None
            self._run_id = self._run_id or (latest.run_id if latest is not None else "")
        deadline = time.monotonic() + _WRITER_S
        while await self._run(self._is_finishing):  # else its step would appear after the restore
            if time.monotonic() > deadline:
                logger.warning("a writer process of a killed trainer still writes to %s", self.directory)
                break
            await self._run(time.sleep, _WRITER_POLL_S)

    async def _delete_torn(self, disks: RunDisks) -> None:
        """Delete what was published, or deleted, on some disks only."""
        try:
            torn = await self._run(disks.delete_torn)
        except (OSError, AiockptError) as exc:  # it costs space, no more
            logger.warning("can't look for what killed processes have left on all disks: %s", exc)
        else:
            if torn:
                logger.info("%s: not all hosts have published these, or had deleted them", ", ".join(torn))

    async def _settle_disks(self, *, renames: bool) -> None:
        """Wait until all hosts have renamed, or deleted, what rank 0 has decided on; raise DeleteError if one can't."""
        disks = self._disks
        if disks is None:
            return
        left = 1
        while left:
            await self._run(disks.wait)
            left = await self._agree(
                f"the changes of {self.directory}", None, lambda _: disks.storage.changes.left(renames=renames)
            )

    def _lock_run(self) -> None:
        self._lock = self._storage.lease(self.directory)
        if self._is_closed:  # meanwhile, as the task that asked for it was cancelled
            self._unlock()

    def _is_finishing(self) -> bool:
        try:
            return self._storage.is_finishing(self.directory)
        except OSError as exc:
            raise AiockptError(f"the run {self.directory} can't be looked at: {exc}") from exc

    def _close(self) -> None:
        """Close the checkpointer, wait for deletions, and let others write to the run. Blocks; idempotent."""
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # each of these, whatever becomes of those before
            stack.callback(self._end)
            stack.callback(self._wait_for_deletions)
            if self._owns_checkpointer:
                stack.callback(self._access.close)
            self._finish_mirror()

    def _close_behind(self) -> Completion[None]:
        """Close in a thread of its own, which also a loop that has ended does not stop; idempotent."""
        if self._closing is None:
            uninterrupted(self._start_closing)
        assert self._closing is not None
        return self._closing

    def _start_closing(self) -> None:
        closing: Completion[None] = Completion(f"the end of closing {self.directory}")

        def close() -> None:
            error: BaseException | None = None
            try:
                self._close()
            except BaseException as exc:  # delivered to whoever closes
                error = exc
            closing._settle(None, error)

        closer = threading.Thread(target=close, name="aiockpt-close", daemon=False)  # the process waits for its end
        try:
            start_thread(closer)
            self._closer = closer
        except NoThreadError as exc:  # rather here than never
            logger.warning("this thread closes the manager of %s, and blocks: %s", self.directory, exc)
            close()
        self._closing = closing

    def _wait(self, future: concurrent.futures.Future[Any], timeout_s: float) -> None:
        """Wait for the end of a future, whatever it is, for so long at most, and no longer once closing is hurried."""
        concurrent.futures.wait([future, self._hurry], timeout_s, concurrent.futures.FIRST_COMPLETED)

    def _wait_for_deletions(self) -> None:
        if not self._retention.has_ended:
            self._wait(self._retention.finished(), self._drain_s)

    def _finish_mirror(self) -> None:
        """Wait for the saves in flight, and until they are mirrored, for `drain_timeout` at most; then stop that."""
        mirror = self._mirror
        if mirror is None or self._retention.has_ended:
            return
        deadline = time.monotonic() + self._drain_s
        with contextlib.closing(mirror):
            self._wait(self._retention.finished(), self._drain_s)
            left = mirror.finish()
            if left is not None:
                left_s = max(0.0, deadline - time.monotonic())
                self._wait(left, min(_QUIET_S, left_s))
                if not left.done() and not self._hurry.done() and left_s > _QUIET_S:
                    mirror.log_wait(left_s - _QUIET_S)
                    self._wait(left, left_s - _QUIET_S)

    def _end(self) -> None:
        """End the deletions, and let others write to the run. Blocks; idempotent."""
        self._retention.end()
        self._unlock()
        if self._disks is not None:
            # A rank that fails must end soon, for the launcher to end the others.
            self._disks.close(0.0 if self._has_failed else self._drain_s)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    # --- what is there --------------------------------------------------------------------------------------

    def infos(self) -> tuple[StepInfo, ...]:
        """Return all steps in the directory, in order, with their state; see `StepInfo`.

        Reads the directory, no tensors; blocks for that. With many ranks, all call it, and get what rank 0 sees: to
        look on one rank alone, use `aiockpt.manager.scan.scan`. The same holds for `steps`, `latest` and `best`.

        Raises:
            CheckpointNotFoundError: this manager only reads, and there is no such directory; see ``missing_ok``.
            OSError: the directory can't be read.
        """
        return self._seen(self._scanner.scan)

    def _found(self, look: Callable[[], T]) -> T:
        found = look()
        if not found and self._mirror_tier is None:  # else a restore looks there as well
            self._check_exists(self._tier)
        return found

    def _check_exists(self, *tiers: Tier) -> None:
        """Raise CheckpointNotFoundError if none of these directories is there, and this manager can't make them."""
        for tier in tiers if self._must_exist else ():
            with contextlib.suppress(FileNotFoundError), tier.storage.look(tier.directory):
                return
        if self._must_exist:
            raise CheckpointNotFoundError(
                f"there is no run at {' or '.join(tier.directory for tier in tiers)}: check the path, or pass "
                "missing_ok=True to read a run that may not have begun"
            )

    def _seen(self, look: Callable[[], T]) -> T:
        """Return what rank 0 sees."""
        if self._suspends and "://" in self.directory and has_loop() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"this blocks the event loop until the store of {self.directory} has answered: await alatest(), "
                "asteps(), ainfos() or abest() of the manager instead",
                stacklevel=outer_stacklevel(),
            )
        if self._disks is not None:
            self._disks.meet(make=self.writes)
        if self._access.world_size == 1:
            return self._found(look)
        value: object = None
        if self.leads:
            try:
                value = self._found(look)
            except OSError as exc:
                value = exc
        found: T = self._agree_now(f"the steps of {self.directory}", value, of_rank_0)
        return found

    def steps(self) -> list[int]:
        """Return the numbers of the complete steps, in order. Blocks to read the directory; see `infos`."""
        return [info.step for info in self._complete()]

    def latest(self) -> StepInfo | None:
        """Return the complete step with the highest number; None if there is none. See `infos`."""
        return self._seen(self._scanner.latest)

    def best(self, metric: str | None = None, mode: Mode | None = None) -> StepInfo | None:
        """Return the complete step with the best value of a metric; None if no step has one. See `infos`.

        NaN is never the best. Of equal values, that of the later step is the better.

        Args:
            metric: the name of the metric; None: that of the `KeepBest` of this manager.
            mode: whether the smallest ("min") or the largest ("max") value is the best; None: as the `KeepBest` of
                this metric, else "min".

        Raises:
            ValueError: no metric is given, and there is no `KeepBest`.
        """
        return next(iter(ranked(self._complete(), *self._metric(metric, mode))), None)

    def _complete(self) -> list[StepInfo]:
        return [info for info in self.infos() if info.state == "complete"]

    def _metric(self, metric: str | None, mode: Mode | None) -> tuple[str, Mode]:
        known = metric_of(self._keep, metric)
        if metric is None:
            if known is None:
                raise ValueError("name the metric, as in best('loss'): there is no KeepBest that names one")
            metric = known[0]
        mode = mode or (known[1] if known is not None else "min")
        check_metric(metric, mode)
        return metric, mode

    def path_of(self, step: int) -> str:
        """Return the path of a step's directory, whether it exists or not."""
        return self._storage.below(self.directory, self._names.name_of(check_step(step)))

    # --- restoring --------------------------------------------------------------------------------------------

    async def _restore(self, request: RestoreRequest) -> Restored | None:
        step, discard_later = request.step, request.discard_later
        if request.verify not in ("auto", "before", "while"):
            raise ValueError(f"verify must be 'auto', 'before' or 'while', not {request.verify!r}")
        if step not in ("latest", "best"):
            if isinstance(step, str):
                raise ValueError(f"step must be 'latest', 'best' or a number, not {step!r}")
            step = check_step(step)
        if discard_later and not self.writes:
            raise ValueError(f"discard_later: this manager only reads {self.directory}; make one with mode='write'")
        chosen = self._metric(request.metric, request.mode) if step == "best" else ("", "min")
        await self._opened()
        restored = await Restore(self, request, step, *chosen).run()
        if restored is not None:
            self._previous = self._restored = restored.step
            self._final = self._begun = None
            self._retention.restored(restored.step)
            if discard_later:
                await self._led("the later steps", partial(self._run, self._discard, restored.step))
                await self._settle_disks(renames=False)
            elif discard_later is None and step != "latest" and self.writes and self.leads:
                infos = await self._run(partial(self._scanner.scan, lenient=True))
                latest = max((info.step for info in infos if info.state == "complete"), default=0)
                latest = max(latest, (self._mirror and self._mirror.backlog.newest) or 0)
                if latest > restored.step:
                    warnings.warn(
                        f"step {restored.step} of {self.directory} was restored, but a restart takes its latest step, "
                        f"{latest}: pass discard_later=True to remove the later steps, or False to keep them",
                        stacklevel=outer_stacklevel(),
                    )
        return restored

    def _discard(self, after: int) -> None:
        """Delete the steps after one, first from the mirror: else a restart would take them from there."""
        with contextlib.nullcontext() if self._disks is None else self._disks.storage.changes.in_order():
            self._discard_everywhere(after)

    def _discard_everywhere(self, after: int) -> None:
        if self._mirror is None:
            self._retention.discard(after)
            return
        try:
            self._mirror.discard(after, self._mirror_patience_s)
        except AiockptError as exc:
            raise DeleteError(f"step {after} was restored, but the mirror has later ones: {exc}") from exc
        else:
            self._retention.discard(after)
        finally:
            self._mirror.resume()

    @property
    def mirror_backlog(self) -> MirrorBacklog | None:
        """The steps that are not mirrored yet, when they were looked at last; None without a mirror, or not on rank 0.

        Does not block.
        """
        return None if self._mirror is None else self._mirror.backlog

    # --- saving -------------------------------------------------------------------------------------------------

    async def _save(self, request: StepRequest, start: Callable[..., SaveHandle]) -> SaveHandle:
        step = check_step(request.step)
        metrics = check_metrics(request.metrics)
        metadata = check_metadata(request.metadata)
        if request.storage is not None:
            raise ValueError("a manager saves to the directory of its run: leave storage out")
        if not self.writes:
            raise SaveError(f"this manager only reads {self.directory}; make one with mode='write'")
        await self._opened()
        is_last = self._is_stopping or step == self._final
        if is_last and not request.overwrite and (saved := await self._saved(step)) is not None:
            return saved
        # The last save is neither skipped nor superseded: whatever on_busy says, it waits for its turn.
        if is_last or self._checkpointer._options.on_busy == "wait":
            await self._port.ready()
        while is_last and (failure := self._access.take_failure()) is not None:  # else `start` raises it
            logger.error("an earlier save has failed, and the last one is begun all the same", exc_info=failure)
        if self._lock is not None:
            try:
                await self._run(self._lock.check)
            except AiockptError as exc:
                self._access.refuse(self.path_of(step), exc)
                raise
        now = time.time()
        self._run_id = self._run_id or secrets.token_hex(_ID_BYTES)
        kept = kept_text(self._keep)
        metadata[RUN_KEY] = {"step": step, "metrics": metrics, "time": now, "keep": kept, "id": self._run_id}
        options = {each.name: getattr(request, each.name) for each in fields(SaveOptions)} | {"metadata": metadata}
        filters = {name: rule if options[name] is None else options[name] for name, rule in self._filters.items()}
        options |= filters
        options["base"] = self._base if request.base is None else request.base
        if known := recorded(**filters):
            metadata[RUN_KEY]["filters"] = known
        if self._disks is not None:
            options["storage"] = self._storage
        deletes = self.leads and self._keep is not None
        room = self._retention.finished() if deletes else None  # of the saves before this one
        token = room_coming.set(room)
        try:
            handle = start(request.state_dict, self.path_of(step), **options)
        finally:
            room_coming.reset(token)
        if not handle.skipped:
            self._last_began = time.monotonic()
        if self._mirror is not None:
            handle._follow_mirror(self._mirror.promises.make(step, handle, now))
        self._retention.follow(handle, step, prunes=self.leads)
        self._begun = step, handle
        return handle

    async def _saved(self, step: int) -> SaveHandle | None:
        """Return the last save if it is of this step and has succeeded on all ranks; wait for its end."""
        handle = self._begun[1] if self._begun is not None and self._begun[0] == step else None
        if handle is not None:
            await self._run(handle.written.ended, None)
        has_succeeded = handle is not None and handle.written._exception is None
        return handle if await self._agree(f"the save of step {step}", has_succeeded, all) else None

    def pin(self, step: int) -> None:
        """Keep a step whatever the policies say, until `unpin` or the end of this manager.

        With many ranks, call it on rank 0, or on all.
        """
        self._retention.pin(check_step(step))

    def unpin(self, step: int) -> None:
        """End `pin`; the policies decide again after the next save."""
        self._retention.unpin(check_step(step))

    # --- when ---------------------------------------------------------------------------------------------------

    def due(self, step: int, *, last: bool = False) -> bool:
        """Return whether to save at this step: by the policy, as it is the last one, or a last save was requested.

        Call it once for each step, after the step. With many ranks, all call it, and get the same answer; it blocks
        until all have. Where the steps are so short that a message to each rank would cost more than a hundredth of
        their time, the ranks exchange messages only every few steps, at most 16; `EverySteps` needs none.

        After a request for a last save, from `on_signal` or `request_last_save` on any rank, it returns True once, and
        `stopping` is True from then on. If the save could not be written within the notice, it returns False instead.

        Args:
            step: the number of the step.
            last: whether the run ends with this step, the same on every rank. A save is then due whatever the policy
                says, unless this step was restored. In or after the loop: a second `save` of it returns the first.

        Raises:
            CoordinationError: the ranks ask about different steps, or a rank does not come.
        """
        step = check_step(step)
        if self._is_stopping or (last and step == self._restored):
            return False
        if last:
            self._final = step
        is_idle = self._checkpointer.statistics().in_flight == 0
        facts = StepFacts(step, self._previous, time.monotonic() - self._last_began, is_idle)
        self._previous = step
        is_due = last or self._by_step.is_due(facts)
        self._calls_left -= 1
        if self._calls_left > 0:
            return is_due
        answer = self._exchange(facts, is_last=last)
        self._calls_left = answer.calls
        if answer.is_stopping:
            self._is_stopping = True
            if answer.is_late and self.leads:
                logger.warning(
                    "the last save of %s, at step %d, is not begun: it would take about %.1f s, longer than the notice",
                    self.directory,
                    step,
                    self._expected_s(),
                )
            return answer.is_due
        return is_due or answer.is_due

    def _exchange(self, facts: StepFacts, *, is_last: bool) -> Answer:
        mine = Asked(facts.step, self._requests.remaining_s(), is_last)
        is_alone = self._access.world_size == 1
        began = time.monotonic()
        calls = 1 if is_alone or not self.leads else self._pace.begin(began)
        by_facts, expected_s = self._by_facts.is_due(facts), self._expected_s()
        answer = partial(decide, is_due=by_facts, expected_s=expected_s, calls=calls)
        if is_alone:
            return answer([mine])
        agreed = self._agree_now(f"the next save of {self.directory}", mine, answer)
        if self.leads:
            self._pace.end(time.monotonic() - began)
        return agreed

    def _expected_s(self) -> float:
        """Return the expected seconds until a save that begins now would survive what is announced."""
        mirror = self._mirror if self._mirror_options is not None and self._mirror_options.ephemeral else None
        return self._retention.expected_s() + (0.0 if mirror is None else mirror.expected_s())

    @property
    def stopping(self) -> bool:
        """Whether the ranks have agreed, in `due`, that this step is the last one: leave the loop."""
        return self._is_stopping

    def on_signal(self, *signals: int, grace_s: float | None = None) -> None:
        """Request a last save when a signal comes, such as SIGTERM, by which schedulers announce the end of a job.

        The next `due` of all ranks acts on it, also if the signal reaches one rank alone. The handler only notes the
        time. It then calls the handler that was there before, except that of SIGINT, which is called for a second
        Ctrl-C only. Closing the manager restores the handlers. Forked children handle signals as if this had not been
        called.

        ::

            run.on_signal(signal.SIGTERM, grace_s=60)

        Args:
            signals: the numbers of the signals.
            grace_s: the seconds from the signal to the end of the process. A last save that would take longer, by the
                longest of the last saves, is not begun. They are counted from when Python handles the signal, which is
                after the C function that the main thread is in. None: no limit.

        Raises:
            ValueError: this is not the main thread, or ``grace_s`` is not positive.
        """
        self._requests.listen(signals, grace_s)

    def request_last_save(self, grace_s: float | None = None) -> None:
        """Request a last save at the next `due`, as a signal does; see `on_signal`. From any thread, on any rank.

        Args:
            grace_s: the seconds that are left from now; None: no limit.
        """
        self._requests.request(grace_s)

    # --- shown ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._is_open else "idle"
        mode = "" if self.writes else ", reading only"
        return f"<{type(self).__name__} {self.directory}: {state}{mode}>"

    def _repr_html_(self) -> str:
        """Return a table of the steps for notebooks, as this rank sees the directory. Blocks to read it."""
        infos = self._scanner.scan()
        mirror = self._mirror
        there = None if mirror is None else {info.step: mirror.state_of(info) for info in infos}
        kept = select(self._keep, infos, time.time())
        return _html_table(repr(self)[1:-1], infos, kept, self._retention.pinned, there)


def of_rank_0(values: Sequence[Any]) -> Any:
    """Return the value of rank 0, for `EngineAccess.agree`."""
    return values[0]


def _checkpointer_of(options: ManagerOptions, kind: type[CheckpointerBase]) -> CheckpointerBase:
    """Return the checkpointer that was given, or make one of the options."""
    values = {each.name: getattr(options, each.name) for each in fields(CheckpointerOptions)}
    if options.checkpointer is None:
        made = kind(**values)
        made._warns_as("manager")
        return made
    if not isinstance(options.checkpointer, kind):
        raise TypeError(f"checkpointer must be a {kind.__name__}, not {options.checkpointer!r}")
    given = [each.name for each in fields(CheckpointerOptions) if values[each.name] != each.default]
    if given:
        raise TypeError(f"{', '.join(given)}: these are options of the checkpointer, which was given: set them there")
    return options.checkpointer


def _html_table(
    title: str,
    infos: Sequence[StepInfo],
    kept: Mapping[int, Sequence[str]],
    pinned: Collection[int],
    there: Mapping[int, str] | None,
) -> str:
    """Return a table of the last steps: state, size, time, metrics, the policies that keep each, and the mirror."""
    metrics = sorted({name for info in infos for name in info.metrics})
    rows = [_row(info, metrics, kept, pinned) for info in infos[-_SHOWN:]]
    titles = ["step", "state", "size", "saved", *metrics, "kept by"]
    if there is not None:
        titles.append("mirror")
        rows = [[*row, there[info.step]] for row, info in zip(rows, infos[-_SHOWN:], strict=True)]
    head = "".join(f"<th>{html.escape(printable_key(name))}</th>" for name in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    earlier = f"<p>and {len(infos) - len(rows)} earlier ones</p>" if len(infos) > len(rows) else ""
    return f"<p><b>{html.escape(printable_key(title))}</b></p><table><tr>{head}</tr>{body}</table>{earlier}"


def _row(
    info: StepInfo, metrics: Sequence[str], kept: Mapping[int, Sequence[str]], pinned: Collection[int]
) -> list[str]:
    values = [f"{info.metrics[name]:.6g}" if name in info.metrics else "" for name in metrics]
    reasons = [*kept.get(info.step, ()), *(["a pin"] if info.step in pinned else [])]
    state = f"{info.state}: {info.problem}" if info.problem else info.state
    return [str(info.step), state, size_text(info.nbytes), time_text(info.time), *values, ", ".join(reasons)]
