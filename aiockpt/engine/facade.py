"""The base of both facades: everything but waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.coordination.choose import may_be_of_several
from aiockpt.core.futures import Completion
from aiockpt.core.lazy import importing, lazy_property
from aiockpt.core.parameters import parameters_of
from aiockpt.core.threads import outlast
from aiockpt.engine.engine import Engine
from aiockpt.engine.queue import KEPT, Failures, Statistics
from aiockpt.errors import AiockptError, CoordinationError, DeleteError, SaveError, printable
from aiockpt.format.transforms.base import Transform, check_transforms
from aiockpt.options import CheckpointerOptions, Path
from aiockpt.snapshot.live import resolve
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.registry import Storages

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from aiockpt.core.futures import Call
    from aiockpt.engine.loader import Loader
    from aiockpt.engine.reports import Reports
    from aiockpt.engine.requests import StateDict
    from aiockpt.engine.submit import Submitter
    from aiockpt.planning.planner import Planner
    from aiockpt.reading.apply_live import Loading
    from aiockpt.reading.executor import LoadTools
    from aiockpt.reading.known_items import KnownItems
    from aiockpt.reading.reader import CheckpointReader, SyncCheckpointReader
    from aiockpt.saving.fence import StepGuard
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.saves import LoadResult

logger = logging.getLogger("aiockpt")

T = TypeVar("T")

_LEAVE_S = 1.0  # for a cancelled waiter to see the end of closing: else a loop may end before all threads have


@contextlib.contextmanager
def closing(what: str, error: BaseException | None) -> Iterator[None]:
    """Add the failure of closing, within this context, as a note to the error that has ended a `with` block, if any."""
    try:
        yield
    except AiockptError as exc:
        if error is None:
            raise
        error.add_note(f"closing the {what} also failed: {exc}")


async def until_closed(closed: Completion[None], hurry: Future[None] | None = None) -> None:
    """Wait until closing has ended. A waiter that is cancelled leaves it behind, unless it ends soon.

    It completes ``hurry`` then, so that closing waits for less.
    """
    try:
        await closed.settled()
    except asyncio.CancelledError:
        if hurry is not None and not hurry.done():
            hurry.set_result(None)
        await outlast(asyncio.wait([closed.settled()], timeout=_LEAVE_S))
        raise
    await closed


class CheckpointerBase:
    """A checkpointer without methods that wait."""

    _unclosed: weakref.finalize[Any, Any] | None = None

    @parameters_of(CheckpointerOptions)
    def __init__(self, options: CheckpointerOptions) -> None:
        """Create a checkpointer. Nothing runs before its first use."""
        self._options = options
        self._transforms = check_transforms(options.transforms)
        local = LocalStorage(direct_io=options.direct_io, fsync=options.fsync, retries=options.retries)
        self._storages = Storages(options.storage, local, options.storage_options, options.local_only)
        self._failures: Failures = deque(maxlen=KEPT)
        self._engine = Engine(options, self._transforms, self._failures)
        self._warns_as(f"{type(self).__name__}")
        if may_be_of_several(options.process_group):
            self._import_all()

    def _warns_as(self, what: str) -> None:
        """End the engine when this object is garbage, with a warning that names it ``what``."""
        if self._unclosed is not None:
            self._unclosed.detach()
        self._unclosed = weakref.finalize(self, self._engine.close_when_idle, what)
        self._unclosed.atexit = False  # the engine finishes its saves at exit, without a warning

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._engine!r}>"

    # A process that only saves imports no code that loads, and the other way round. Both are imported in the caller's
    # thread: a process that is forked while another thread imports would hang at its own next import.

    # No lock is held meanwhile, as a signal handler may save or load in the middle of it: the first object is kept.

    @lazy_property
    def _submitter(self) -> Submitter:
        with importing():
            from aiockpt.engine.submit import Submitter

        return Submitter(self._engine, self._storages, self._transforms)

    @lazy_property
    def _loader(self) -> Loader:
        with importing():
            from aiockpt.engine.loader import Loader

        return Loader(self._engine, self._storages, self._transforms)

    def _import_all(self) -> None:
        """Import now what several ranks need: one that can't at its first call can't inform the others either."""
        with importing():
            import aiockpt.coordination.coordinator
            import aiockpt.engine.transaction
            import aiockpt.reading.executor
            import aiockpt.saving.collective  # noqa: F401
        self._submitter, self._loader  # noqa: B018

    def submit_items(
        self,
        items: Sequence[tuple[str, torch.Tensor | bytes]],
        path: Path,
        ticket: str,
        planner: Planner,
        transforms: Sequence[Transform] = (),
        storage: Storage | None = None,
    ) -> SaveJob:
        """Start to write tensors, and bytes of objects, to files of a transaction that was begun. For adapters.

        The caller makes a checkpoint of them. If the save fails, they are removed. ``planner`` has the format and the
        names of the files, and keeps their layout for the next call. ``transforms`` are applied to each item, in order.
        """
        return self._submitter.submit_items(items, path, ticket, planner, transforms, storage)

    def _delete(self, path: Path, storage: Storage | None, after: SaveHandle | None) -> Call[None]:
        storage, where = self._storages.of(path, storage)
        queue, reports = self._engine.queue, self._engine.reports

        def check() -> None:
            if queue.is_path_busy(where, overwrite=False):
                raise DeleteError(f"a save to {where} is in flight or hangs; wait for it, or cancel it, then delete it")

        async def delete(tools: LoadTools) -> None:
            begin, error = time.perf_counter(), None
            try:
                if after is not None:
                    await _written(after, where)
                    check()
                await storage.delete(where, workers=tools.workers)
            except BaseException as exc:
                error = exc
                if after is not None:  # perhaps nobody waits for it
                    logger.warning("%s stays: %s", where, printable(str(exc)))
                raise
            finally:
                reports.deleted(where, time.perf_counter() - begin, error)

        if after is None:
            check()
        elif not isinstance(getattr(after, "written", None), Completion):
            raise TypeError(f"after must be the handle of a save, not {after!r}")
        elif after.path == where:
            raise DeleteError(f"{where} is what the save writes after which it is to be deleted")
        else:
            after.written.check_waiter()
        return self._engine.call(delete, f"delete {where}")

    def _clean(self, directory: Path, older_than_s: float | None, storage: Storage | None) -> Call[list[str]]:
        storage, where = self._storages.of(directory, storage)
        if older_than_s is not None and not older_than_s >= 0:
            raise ValueError(f"older_than_s must not be negative, not {older_than_s!r}")
        return self._engine.call(
            lambda tools: storage.clean(where, older_than_s=older_than_s, workers=tools.workers), f"clean {where}"
        )

    def fence(self, timeout: float | None = None) -> None:
        """Make the caller's current accelerator streams wait for the copies of all saves in flight.

        The same as `SaveHandle.fence`, for every save that is not staged yet. Call it before anything that changes
        tensors, such as an update of averaged weights (EMA) or the replay of a CUDA graph that contains an optimizer
        step, in the stream that makes the change. Changes in other streams are not detected after it. Without a save
        in flight it costs nothing.

        Args:
            timeout: seconds to block at most; None: as long as it takes.

        Raises:
            TornSnapshotError: a tensor has changed already; all saves were waited for.
            SaveError: a save has failed.
            TimeoutError: the copies were not enqueued in time.
            ValueError: the timeout is negative, or no number.
            AiockptError: a CUDA graph is being captured; see `SaveHandle.fence`.
        """
        with importing():
            from aiockpt.saving.fence import fence_all

        fence_all(self._engine.queue.staging(), timeout)

    def guard(self, optimizer: torch.optim.Optimizer, *, timeout: float = 1800.0) -> StepGuard:
        """Make every ``optimizer.step()`` wait for the copies of saves in flight, so that no snapshot is torn.

        It waits as `SaveHandle.fence` does: for tensors on an accelerator the stream waits, not the program. A step
        never raises an error of a save; that is raised by the save's handle. Steps compiled with ``torch.compile``
        wait too (the guard breaks the graph, so ``fullgraph=True`` is not possible). A CUDA graph that contains a step
        is not guarded: call `fence` before its replay.

        The guard covers the parameters and the state of this optimizer. A change of other tensors before their copies
        are done, such as averaged weights (EMA) or those of another optimizer, still fails the save: guard that
        optimizer too, or call `fence` before the update.

        ::

            with ckpt.guard(optimizer):
                for batch in batches:
                    loss(model(batch)).backward()
                    optimizer.step()                 # waits for copies in flight
                    ckpt.save(state, path)           # SyncCheckpointer: submit

        Args:
            optimizer: the optimizer whose steps wait. A wrapper that forwards steps to its ``optimizer`` stands for
                that one.
            timeout: seconds that a step blocks at most. After that the snapshot is given up: the save fails with
                `TornSnapshotError`, and training goes on.

        Returns:
            The guard, in force until its ``remove()`` or the end of its ``with`` block.

        Raises:
            TypeError: this is no ``torch.optim.Optimizer``, or one whose steps call no hooks.
            ValueError: the timeout is negative, or no number.
        """
        with importing():
            from aiockpt.saving.fence import StepGuard

        return StepGuard(optimizer, self._engine.queue.staging, timeout)

    @property
    def last_load(self) -> LoadResult | None:
        """The figures and the timeline of the load that has ended last; None if none has succeeded."""
        return self._engine.reports.last_load

    def statistics(self) -> Statistics:
        """Return counts of the saves so far, what was skipped, what failed, and the staging memory."""
        return self._engine.statistics()

    def _close(self) -> None:
        closed = self._engine.close()
        try:
            closed.result()
        finally:
            if closed.done():
                self._engine.join()

    def _prewarm(self, state_dict: StateDict) -> Completion[None]:
        with importing():
            from aiockpt.planning.planner import stored_bytes

        tree = resolve(state_dict, SaveError).tree
        nbytes, devices = stored_bytes(tree)
        self._submitter.rehearse(tree)
        return self._engine.prewarm(nbytes, {device for device in devices if device.type != "meta"})  # it has no bytes


class EngineAccess:
    """The engine of a checkpointer, for adapters to other interfaces."""

    def __init__(self, checkpointer: CheckpointerBase) -> None:
        self._checkpointer = checkpointer

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The checkpointer's transforms."""
        return self._checkpointer._transforms

    @property
    def reports(self) -> Reports:
        """The observers, and the progress callables."""
        return self._checkpointer._engine.reports

    def locate(
        self, path: Path, storage: Storage | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Storage, str]:
        """Return the storage of a path, the checkpointer's own if None, and the path in it."""
        return self._checkpointer._storages.of(path, storage, options)

    def locate_by_path(self, path: Path) -> tuple[Storage, str]:
        """Return the storage of a path by the path alone, and the path in it."""
        return self._checkpointer._storages.by_path(path)

    @property
    def world_size(self) -> int:
        """The number of ranks that save together; 1 for a process that saves alone."""
        coordinator = self._checkpointer._engine.coordinator()
        return 1 if coordinator is None else coordinator.world_size

    @property
    def rank(self) -> int:
        """The number of this rank; 0 for a process that saves alone."""
        coordinator = self._checkpointer._engine.coordinator()
        return 0 if coordinator is None else coordinator.rank

    def addresses(self, what: str) -> Call[list[str]]:
        """Find out the addresses at which other ranks reach this host; for a process of several ranks."""
        coordinator = self._checkpointer._engine.coordinator()
        assert coordinator is not None
        return self.call(lambda _: coordinator.addresses(what), what)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, or saves alone."""
        return self._checkpointer._engine.coordinator() is None or self._checkpointer._engine.leads

    def take_failure(self) -> BaseException | None:
        """Return an earlier save's failure that was not delivered, which counts as delivered then; None: no more."""
        try:
            self._checkpointer._engine.queue.raise_unreported()
        except BaseException as exc:
            return exc
        return None

    def refuse(self, path: str, error: BaseException) -> None:
        """Fail the save to a path that the other ranks call, as this rank raises an error instead."""
        self._checkpointer._submitter.refuse(path, error)

    def agree(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> Call[T]:
        """Agree with the other ranks: each calls it with a value, and each gets what rank 0 decides from all values.

        One round of messages. Every rank calls it the same number of times and in the same order, and starts the next
        one when this one has completed. Saves and loads don't delay it.

        Args:
            what: what is agreed on, for messages, such as ``the step to restore``; the same on every rank.
            value: this rank's value, which can be pickled. An exception fails the call on every rank.
            decide: called on rank 0 alone, with the values of all ranks in their order; must not block.
        """
        engine = self._checkpointer._engine
        coordinator = engine.coordinator()
        agreement = None if coordinator is None else coordinator.call("agree")

        async def decide_for_all(values: Sequence[Any]) -> Sequence[T]:
            return [decide(values)] * len(values)

        async def run(_: LoadTools) -> T:
            if coordinator is not None and agreement is not None:
                reply: T = await coordinator.round(agreement, what, value, decide_for_all)
                return reply
            if isinstance(value, BaseException):
                raise value
            return decide([value])

        return engine.call(run, what, agreement)

    def leave_ranks(self, unbegun: str | None) -> None:
        """Make what waits for other ranks fail, now and later, on this rank and then on those.

        ``unbegun``: what they agree on, if this rank has not come to it once: then it is noted in their store, which
        blocks for two seconds at most.
        """
        engine = self._checkpointer._engine
        coordinator = engine.coordinator() if may_be_of_several(self._checkpointer._options.process_group) else None
        if coordinator is not None and unbegun is not None:
            error = CoordinationError(f"rank {coordinator.rank} has closed before the first round of {unbegun}")
            coordinator.tell(coordinator.call("agree"), unbegun, error)
        engine.leave_ranks()

    def load_opened(
        self, reader: CheckpointReader | SyncCheckpointReader, state_dict: StateDict, known: KnownItems
    ) -> Loading:
        """Start to load an open checkpoint into a state, on this rank alone, without what the state has already."""
        return self._checkpointer._loader.load_opened(reader, state_dict, known)

    def close(self) -> None:
        """Close the checkpointer, blocking."""
        self._checkpointer._close()

    def call(self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str) -> Call[T]:
        """Run a coroutine on the engine's loop; ``what`` names it in messages."""
        return self._checkpointer._engine.call(function, what)


async def _written(save: SaveHandle, path: str) -> None:
    """Wait until a save has ended; raise DeleteError for a path that it was to replace, unless it was written."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: closing has not waited any longer
            loop.call_soon_threadsafe(over.set)

    save.written.add_done_callback(wake)  # it can't be awaited here, in the engine's own thread
    await over.wait()
    error = save.written._exception  # not `exception()`: its own waiter has to see it
    if error is not None:
        raise DeleteError(f"{path} is not deleted, as the save of {save.path} has failed: {error}") from error
