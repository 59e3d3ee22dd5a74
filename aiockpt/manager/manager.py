"""The managers of a run: for asyncio programs, and for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import anyio

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.core.parameters import parameters_of
from aiockpt.core.threads import check_asyncio, has_loop, in_thread
from aiockpt.engine.facade import closing, until_closed
from aiockpt.manager.base import ManagerBase
from aiockpt.manager.requests import Restored, RestoreRequest, StepRequest
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.manager.policies import Mode
    from aiockpt.manager.scan import StepInfo
    from aiockpt.reading.reader import CheckpointReader, SyncCheckpointReader
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.telemetry.saves import SaveResult

T = TypeVar("T")

_INSTEAD = "use a SyncCheckpointManager in a thread"


class CheckpointManager(ManagerBase):
    """Keeps the checkpoints of one training run in one directory, for asyncio programs.

    It numbers them, finds the one to go on from, decides when to save and what to keep, and makes a last save when the
    job is about to end::

        keep = [aiockpt.KeepLatest(3), aiockpt.KeepBest(2, "loss")]
        async with aiockpt.CheckpointManager("runs/a", keep=keep, save=aiockpt.EverySteps(100)) as run:
            run.on_signal(signal.SIGTERM, grace_s=60)
            start = await run.restore(state)                 # None if the run is new
            for step in range(start.step + 1 if start else 0, steps):
                train(step)
                if run.due(step, last=step == steps - 1):
                    save = await run.save(step, state, metrics={"loss": loss})
                    await save.staged
                if run.stopping:
                    break

    With many ranks, each makes a manager of the same directory and calls the same methods in the same order. Rank 0
    decides, and all get the same answers.

    Attributes:
        directory: the run's directory, as an absolute path.
        writes: whether it owns the run; False with ``read_only=True``.
    """

    _kind = AsyncCheckpointer
    _checkpointer: AsyncCheckpointer

    @property
    def checkpointer(self) -> AsyncCheckpointer:
        """The checkpointer that saves and loads, such as for `AsyncCheckpointer.fence` and ``guard``."""
        return self._checkpointer

    def __enter__(self) -> NoReturn:
        raise TypeError("closing is awaited: write `async with CheckpointManager(...)`, or use a SyncCheckpointManager")

    __exit__ = None  # type checkers refuse `with` as well

    async def __aenter__(self) -> Self:
        check_asyncio("a CheckpointManager", _INSTEAD)
        try:
            await self._opened()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closing.has_failed = error is not None
        with closing("manager", error), anyio.CancelScope(shield=True):
            await self.aclose()

    @parameters_of(RestoreRequest)
    async def restore(self, request: RestoreRequest) -> Restored | None:
        """Load the newest valid step, the best one, or a certain one, into a state; see `AsyncCheckpointer.load`.

        Steps that turn out damaged are passed over: the next older one (or, for "best", the next best) is taken, a
        `DamagedCheckpointWarning` names them, and they are renamed to ``step-00000100.damaged``. Structure and sizes
        are checked first, the CRC of everything that is read while it is read. A step is never taken for damaged
        because it could not be read, or does not fit the state: that is raised, and nothing is renamed.

        The target gets no byte of a damaged step: a step is loaded at once only if an older one would overwrite
        all of it; else everything in it is verified first, which reads it twice. If the step that was loaded at once is
        damaged, and then every older one as well, this raises, and the target may have bytes of the first.

        With a mirror, its steps count as well. Of a step that both have, the copy in the run's directory is read, and
        what is damaged there from the mirror.

        Returns:
            The step; None if the run has none.

        Raises:
            CheckpointNotFoundError: there is no such step, no step has the metric, or the run's owner deletes steps
                faster than this reader can read them; or this manager only reads, and there is no run.
            CorruptCheckpointError: the step is damaged, or all are. Nothing was renamed.
            MissingKeysError: the newest valid step lacks keys of the state.
            ShapeMismatchError: a shape or dtype differs.
            LoadError: a step can't be read, or a ``load_state_dict`` failed; or the run's directory has no step, and
                the mirror can't be read.
            DeleteError: a later step could not be discarded; the state is that of the restored one.
            RunLockedError: another manager writes to the run.
        """
        check_asyncio("restore()", _INSTEAD)
        return await self._restore(request)

    @parameters_of(StepRequest)
    async def save(self, request: StepRequest) -> SaveHandle:
        """Start to save a step; see `AsyncCheckpointer.save`. Waits only for its turn: until earlier saves are written.

        Wrong arguments raise here. The step counts when it is written; then steps that are no longer kept are deleted,
        behind. A save that fails or is skipped deletes nothing. A second save of the last step, see `due`, waits for
        the first, and returns its handle, unless it has failed or ``overwrite`` is given.

        Returns:
            A handle with the futures ``staged`` and ``written``.

        Raises:
            TypeError: the step is no integer, or a metric no number.
            ValueError: the step is negative, or ``metadata`` has the key "run".
            CheckpointExistsError: the step exists; pass ``overwrite=True`` to replace it.
            SaveError: something can't be saved, or the manager only reads; see `AsyncCheckpointer.save`.
            RunLockedError: another manager writes to the run, or may, as the lock of this one was removed.
        """
        check_asyncio("save()", _INSTEAD)
        return await self._save(request, self._checkpointer.save)

    async def ainfos(self) -> tuple[StepInfo, ...]:
        """Return all steps in the directory, as `infos`, without blocking the event loop. So do the next ones."""
        return await asyncio.wrap_future(in_thread(self.infos))

    async def asteps(self) -> list[int]:
        """Return the numbers of the complete steps, as `steps`."""
        return await asyncio.wrap_future(in_thread(self.steps))

    async def alatest(self) -> StepInfo | None:
        """Return the complete step with the highest number, as `latest`."""
        return await asyncio.wrap_future(in_thread(self.latest))

    async def abest(self, metric: str | None = None, mode: Mode | None = None) -> StepInfo | None:
        """Return the complete step with the best value of a metric, as `best`."""
        return await asyncio.wrap_future(in_thread(self.best, metric, mode))

    @asynccontextmanager
    async def open(self, step: int) -> AsyncIterator[CheckpointReader]:
        """Inspect a step: ``async with run.open(100) as reader:``. It is not deleted meanwhile.

        See `AsyncCheckpointer.open`. Involves this rank alone; on another one than rank 0, pin the
        step on rank 0 as well.

        Raises:
            CheckpointNotFoundError: there is no such step.
        """
        path = self.path_of(step)
        with self._retention.reading(step):
            async with self._checkpointer.open(path, storage=self._tiers.run.storage) as reader:
                yield reader

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Finish the saves and deletions, let others write to the run, and restore the handlers of signals. Idempotent.

        A checkpointer that was given stays open. Closing begins with the call, so a task that is cancelled before its
        first step closes too, in full. If the waiting task is cancelled later, closing no longer waits for the mirror
        and for deletions; the rest of it goes on behind.

        Raises:
            AiockptError: the failure of a save that nobody awaited; see `AsyncCheckpointer.aclose`.
        """
        if has_loop():
            self._close_behind()
        return self._closed()

    async def _closed(self) -> None:
        check_asyncio("aclose()", _INSTEAD)
        try:
            await until_closed(self._close_behind(), self._closing.hurry)
        finally:
            self._due.requests.close()
            self._closing.join()


class SyncCheckpointManager(ManagerBase):
    """Keeps the checkpoints of one training run in one directory, for programs without asyncio.

    ::

        with aiockpt.SyncCheckpointManager("runs/a", keep=aiockpt.KeepLatest(3), save=aiockpt.EverySteps(100)) as run:
            start = run.restore(state)
            for step in range(start.step + 1 if start else 0, steps):
                train(step)
                if run.due(step, last=step == steps - 1):
                    run.save(step, state, metrics={"loss": loss})    # blocks until written; or: run.submit

    See `CheckpointManager`.
    """

    _kind = SyncCheckpointer
    _checkpointer: SyncCheckpointer

    @property
    def checkpointer(self) -> SyncCheckpointer:
        """The checkpointer that saves and loads, such as for `SyncCheckpointer.fence` and ``guard``."""
        return self._checkpointer

    def __enter__(self) -> Self:
        try:
            self._finish(self._opened())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closing.has_failed = error is not None
        with closing("manager", error):
            self.close()

    @parameters_of(RestoreRequest)
    def restore(self, request: RestoreRequest) -> Restored | None:
        """Load the newest valid step, the best one, or a certain one, blocking; see `CheckpointManager.restore`."""
        return self._finish(self._restore(request))

    @parameters_of(StepRequest)
    def save(self, request: StepRequest) -> SaveResult:
        """Save a step and block until it is durable; see `CheckpointManager.save`.

        With ``on_failure="warn"``, a failed write does not raise; the result has it as ``error``.
        """
        return self._checkpointer._written(self._finish(self._save(request, self._checkpointer.submit)))

    @parameters_of(StepRequest)
    def submit(self, request: StepRequest) -> SaveHandle:
        """Start to save a step, blocking only until earlier saves are written; see `CheckpointManager.save`.

        Returns:
            The handle; ``stage, write = submit(...)`` unpacks its two futures.
        """
        return self._finish(self._save(request, self._checkpointer.submit))

    @contextmanager
    def open(self, step: int) -> Iterator[SyncCheckpointReader]:
        """Inspect a step: ``with run.open(100) as reader:``; see `CheckpointManager.open`."""
        path = self.path_of(step)
        with self._retention.reading(step), self._checkpointer.open(path, storage=self._tiers.run.storage) as reader:
            yield reader

    def close(self) -> None:
        """Finish the saves and deletions, and let others write to the run, blocking; see `CheckpointManager.aclose`."""
        try:
            self._close()
        finally:
            self._due.requests.close()

    def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in one step: whatever it awaits here blocks, and so never suspends it."""
        try:
            work.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        raise AssertionError("a blocking manager awaits nothing that suspends")
