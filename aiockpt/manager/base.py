"""The base of both managers: every decision, and everything that does not wait."""

from __future__ import annotations

import concurrent.futures
import contextlib
import html
import logging
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.core.futures import Completion
from aiockpt.core.parameters import outer_stacklevel, parameters_of
from aiockpt.core.threads import start_thread, uninterrupted
from aiockpt.core.wording import time_text
from aiockpt.engine.facade import CheckpointerBase, EngineAccess
from aiockpt.errors import AiockptError, NoThreadError, SaveError, printable_key
from aiockpt.manager.policies import Mode, as_policy, check_metric, metric_of, ranked, select
from aiockpt.manager.preemption import Due
from aiockpt.manager.requests import (
    ManagerOptions,
    Restored,
    RestoreRequest,
    StepRequest,
    check_metadata,
    check_metrics,
    check_step,
    checked_restore,
)
from aiockpt.manager.restoring import Restore
from aiockpt.manager.retention import Retention
from aiockpt.manager.run import RunDirectory, Tiers
from aiockpt.manager.scan import RUN_KEY, StepInfo
from aiockpt.options import CheckpointerOptions, SaveOptions
from aiockpt.planning.filters import recorded
from aiockpt.storage.base import room_coming
from aiockpt.telemetry.card import size_text

if TYPE_CHECKING:
    from aiockpt.checkpointer import AsyncCheckpointer
    from aiockpt.manager.mirror import MirrorCopier
    from aiockpt.manager.tiers import Tier
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.sync_checkpointer import SyncCheckpointer
    from aiockpt.telemetry.saves import MirrorBacklog

C = TypeVar("C", bound=CheckpointerBase)

logger = logging.getLogger("aiockpt")

_QUIET_S = 1.0  # closing waits so long without a word, as after a Ctrl-C
_ID_BYTES = 8
_SHOWN = 20  # steps in a notebook's table


class ManagerBase:
    """A manager without its public methods that wait.

    Those that wait are written once, as coroutines: in the async manager they suspend, in the blocking one they block.
    """

    _kind: type[AsyncCheckpointer | SyncCheckpointer]
    _checkpointer: AsyncCheckpointer | SyncCheckpointer

    @parameters_of(ManagerOptions)
    def __init__(self, options: ManagerOptions) -> None:
        """Create a manager of the checkpoints in one directory. Nothing is read or locked before its first use."""
        self.writes = not options.read_only
        self._options, self._keep, self._due = options, as_policy(options.keep), Due(options.save)
        self._checkpointer = _checkpointer_of(options, self._kind)
        in_force = self._checkpointer._options
        _check_own_disks(options, in_force)
        access = EngineAccess(self._checkpointer)
        self._tiers = Tiers(options, access)
        self._disks, self._scanner = self._tiers.disks, self._tiers.run.scanner
        self._run = RunDirectory(options, self._tiers, access, self._checkpointer, writes=self.writes)
        self.directory = self._run.directory
        scanner = self._tiers.run.new_scanner()
        self._retention = Retention(scanner, self._keep, options.on_written, self._tiers.run.storage)
        self._drain_s = min(in_force.drain_timeout, threading.TIMEOUT_MAX)  # locks refuse infinity
        self._closing = Closing(self.directory)
        self._begun: tuple[int, SaveHandle] | None = None  # the last save
        self._last_began = time.monotonic()  # the last save, or this manager

    @property
    def _mirror(self) -> MirrorCopier | None:
        """The mirror's copier, on the rank that has it."""
        return self._tiers.copier

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides, or there are no other ranks."""
        return self._run.leads

    # --- opening and closing ------------------------------------------------------------------------------

    async def _opened(self) -> None:
        """Take the run's lock at the first use, and begin to mirror, unless the manager only reads."""
        await self._run.open()
        if self.writes and self.leads:
            self._tiers.begin_to_copy(self._keep, self._retention, self._run.access, locks=self._run.locks)

    def _close(self) -> None:
        """Close the checkpointer, wait for deletions, and let others write to the run. Blocks; idempotent."""
        self._run.is_closed = True
        with contextlib.ExitStack() as stack:  # each of these, whatever becomes of those before
            stack.callback(self._due.requests.close)
            stack.callback(self._end)
            stack.callback(self._wait_for_deletions)
            if self._options.checkpointer is None:
                stack.callback(self._run.access.close)
            self._finish_mirror()

    def _close_behind(self) -> Completion[None]:
        """Close in a thread of its own; idempotent."""
        return self._closing.begin(self._close)

    def _wait_for_deletions(self) -> None:
        if not self._retention.has_ended:
            self._closing.wait(self._retention.finished(), self._drain_s)

    def _finish_mirror(self) -> None:
        """Wait for the saves in flight, and until they are mirrored, for `drain_timeout` at most; then stop that."""
        mirror, closing = self._mirror, self._closing
        if mirror is None or self._retention.has_ended:
            return
        deadline = time.monotonic() + self._drain_s
        with contextlib.closing(mirror):
            closing.wait(self._retention.finished(), self._drain_s)
            left = mirror.finish()
            if left is not None:
                left_s = max(0.0, deadline - time.monotonic())
                closing.wait(left, min(_QUIET_S, left_s))
                if not left.done() and not closing.hurry.done() and left_s > _QUIET_S:
                    mirror.log_wait(left_s - _QUIET_S)
                    closing.wait(left, left_s - _QUIET_S)

    def _end(self) -> None:
        """End the deletions, and let others write to the run. Blocks; idempotent."""
        self._retention.end()
        self._run.unlock()
        if self._disks is not None:
            # A rank that fails must end soon, for the launcher to end the others.
            self._disks.close(0.0 if self._closing.has_failed else self._drain_s)

    # --- what is there --------------------------------------------------------------------------------------

    def infos(self) -> tuple[StepInfo, ...]:
        """Return all steps in the directory, in order, with their state; see `StepInfo`.

        Reads the directory, no tensors; blocks for that. With many ranks, all call it, and get what rank 0 sees: to
        look on one rank alone, use `aiockpt.manager.scan.scan`. The same holds for `steps`, `latest` and `best`.

        Raises:
            CheckpointNotFoundError: this manager only reads, and there is no such directory; see ``missing_ok``.
            OSError: the directory can't be read.
        """
        return self._run.seen(self._scanner.scan)

    def steps(self) -> list[int]:
        """Return the numbers of the complete steps, in order. Blocks to read the directory; see `infos`."""
        return [info.step for info in self._complete()]

    def latest(self) -> StepInfo | None:
        """Return the complete step with the highest number; None if there is none. See `infos`."""
        return self._run.seen(self._scanner.latest)

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
        return self._run.path_of(step)

    # --- restoring --------------------------------------------------------------------------------------------

    async def _restore(self, request: RestoreRequest) -> Restored | None:
        request = checked_restore(request, self.directory, writes=self.writes)
        metric, mode = self._metric(request.metric, request.mode) if request.step == "best" else ("", "min")
        await self._opened()
        restored = await Restore(self._run, self._retention, request, metric, mode).perform()
        if restored is not None:
            self._due.go_on_from(restored.step)
            self._begun = None
            self._retention.restored(restored.step)
            if request.discard_later:
                discard = partial(self._run.call, self._tiers.discard, restored.step, self._retention)
                await self._run.led("the later steps", discard)
                await self._run.settle_disks()
            elif request.discard_later is None and request.step != "latest" and self.writes and self.leads:
                await self._warn_of_later(restored.step)
        return restored

    async def _warn_of_later(self, step: int) -> None:
        infos = await self._run.call(partial(self._scanner.scan, lenient=True))
        latest = max((info.step for info in infos if info.state == "complete"), default=0)
        latest = max(latest, (self._mirror and self._mirror.backlog.newest) or 0)
        if latest > step:
            warnings.warn(
                f"step {step} of {self.directory} was restored, but a restart takes its latest step, {latest}: pass "
                "discard_later=True to remove the later steps, or False to keep them",
                stacklevel=outer_stacklevel(),
            )

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
            raise SaveError(f"this manager only reads {self.directory}; make one without read_only=True")
        await self._opened()
        is_last = self._due.is_last(step)
        if is_last and not request.overwrite and (saved := await self._saved(step)) is not None:
            return saved
        await self._turn(step, is_last=is_last)
        now = time.time()
        options = self._save_options(request, metadata, {"step": step, "metrics": metrics, "time": now})
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

    async def _turn(self, step: int, *, is_last: bool) -> None:
        """Wait until a save may begin; raise an error if the run is not this manager's any more."""
        # The last save is neither skipped nor superseded: whatever on_busy says, it waits for its turn.
        if is_last or self._checkpointer._options.on_busy == "wait":
            await self._run.waited(self._checkpointer.ready())
        access = self._run.access
        while is_last and (failure := access.take_failure()) is not None:  # else `start` raises it
            logger.error("an earlier save has failed, and the last one is begun all the same", exc_info=failure)
        try:
            await self._run.check_lock()
        except AiockptError as exc:
            access.refuse(self.path_of(step), exc)
            raise

    def _save_options(self, request: StepRequest, metadata: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the checkpointer's save; the metadata gets the facts of the step."""
        run, ours = self._run, self._options
        run.id = run.id or secrets.token_hex(_ID_BYTES)
        metadata[RUN_KEY] = {**facts, "id": run.id}
        options = {option.name: getattr(request, option.name) for option in fields(SaveOptions)}
        filters = {"include": ours.include, "exclude": ours.exclude}
        filters = {name: rule if options[name] is None else options[name] for name, rule in filters.items()}
        if known := recorded(**filters):
            metadata[RUN_KEY]["filters"] = known
        options |= {**filters, "metadata": metadata, "base": ours.base if request.base is None else request.base}
        return options if self._disks is None else options | {"storage": self._disks.storage}

    async def _saved(self, step: int) -> SaveHandle | None:
        """Return the last save if it is of this step and has succeeded on all ranks; wait for its end."""
        handle = self._begun[1] if self._begun is not None and self._begun[0] == step else None
        if handle is not None:
            await self._run.call(handle.written.ended, None)
        has_succeeded = handle is not None and handle.written._exception is None
        return handle if await self._run.agree(f"the save of step {step}", has_succeeded, all) else None

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
        is_idle = self._checkpointer.statistics().in_flight == 0
        expected_s = self._retention.expected_s()
        if self._mirror is not None and self._mirror.is_ephemeral:
            expected_s += self._mirror.expected_s()
        elapsed_s = time.monotonic() - self._last_began
        return self._due.at(
            step, is_last=last, elapsed_s=elapsed_s, is_idle=is_idle, expected_s=expected_s, run=self._run
        )

    @property
    def stopping(self) -> bool:
        """Whether the ranks have agreed, in `due`, that this step is the last one: leave the loop."""
        return self._due.is_stopping

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
        self._due.requests.listen(signals, grace_s)

    def request_last_save(self, grace_s: float | None = None) -> None:
        """Request a last save at the next `due`, as a signal does; see `on_signal`. From any thread, on any rank.

        Args:
            grace_s: the seconds that are left from now; None: no limit.
        """
        self._due.requests.request(grace_s)

    # --- shown ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "closed" if self._run.is_closed else "open" if self._run.is_open else "idle"
        mode = "" if self.writes else ", reading only"
        return f"<{type(self).__name__} {self.directory}: {state}{mode}>"

    def _repr_html_(self) -> str:
        """Return a table of the steps for notebooks, as this rank sees the directory. Blocks to read it."""
        infos = self._scanner.scan()
        mirror = self._mirror
        there = None if mirror is None else {info.step: mirror.state_of(info) for info in infos}
        kept = select(self._keep, infos, time.time())
        return _html_table(repr(self)[1:-1], infos, kept, self._retention.pinned, there)


class Closing:
    """The end of a manager, in a thread of its own: it goes on if its waiter is cancelled, or its event loop has ended.

    Args:
        directory: the run's, for messages.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.hurry: concurrent.futures.Future[None] = concurrent.futures.Future()  # complete it to make `wait` return
        self.has_failed = False  # whether the manager's block was left by an error
        self._end: Completion[None] | None = None  # since it was begun
        self._thread: threading.Thread | None = None

    def begin(self, close: Callable[[], None]) -> Completion[None]:
        """Call what closes the manager, which blocks; return the future of the end. Idempotent."""
        if self._end is None:
            uninterrupted(partial(self._start, close))
        assert self._end is not None
        return self._end

    def _start(self, close: Callable[[], None]) -> None:
        end: Completion[None] = Completion(f"the end of closing {self._directory}")

        def close_and_tell() -> None:
            error: BaseException | None = None
            try:
                close()
            except BaseException as exc:  # delivered to whoever closes
                error = exc
            end._settle(None, error)

        # The process waits for its end.
        thread = threading.Thread(target=close_and_tell, name="aiockpt-close", daemon=False)
        try:
            start_thread(thread)
            self._thread = thread
        except NoThreadError as exc:  # rather here than never
            logger.warning("this thread closes the manager of %s, and blocks: %s", self._directory, exc)
            close_and_tell()
        self._end = end

    def join(self) -> None:
        """Wait for the thread to end, if closing has ended."""
        if self._thread is not None and self._end is not None and self._end.done():
            self._thread.join()

    def wait(self, future: concurrent.futures.Future[Any], timeout_s: float) -> None:
        """Wait for the end of a future, whatever it is, for so long at most, and no longer once closing is hurried."""
        concurrent.futures.wait([future, self.hurry], timeout_s, concurrent.futures.FIRST_COMPLETED)


def followed(manager: ManagerBase) -> tuple[Tier, Retention]:
    """Return the tier that a manager's run is in, and what keeps its steps while they are read."""
    return manager._tiers.run, manager._retention


def _check_own_disks(options: ManagerOptions, in_force: CheckpointerOptions) -> None:
    """Raise ValueError for options that can't be used together with disks of the hosts."""
    if options.own_disks and options.base is not None:
        raise ValueError(
            "base and own_disks=True can't be used together: several ranks save whole steps; leave base out"
        )
    if options.own_disks and in_force.fallback_path is not None:
        raise ValueError(
            "fallback_path and own_disks=True can't be used together: hosts serve each other the directory of the "
            "run, and no other; leave fallback_path out, and pass mirror= for a second place"
        )


def _checkpointer_of(options: ManagerOptions, kind: type[C]) -> C:
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
