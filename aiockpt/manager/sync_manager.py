"""The manager of a run for programs without asyncio."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from aiockpt.core.parameters import parameters_of
from aiockpt.engine.facade import closing
from aiockpt.manager.base import ManagerBase
from aiockpt.manager.requests import Restored, RestoreOptions, StepChoice, StepRequest, Verification
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.engine.requests import StateDict
    from aiockpt.manager.policies import Mode
    from aiockpt.reading.reader import SyncCheckpointReader
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.telemetry.saves import SaveResult

T = TypeVar("T")


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
        with closing("manager", error):
            self.close()

    def restore(
        self,
        state_dict: StateDict,
        step: StepChoice = "latest",
        *,
        metric: str | None = None,
        mode: Mode | None = None,
        verify: Verification = "auto",
        discard_later: bool | None = None,
        **options: Unpack[RestoreOptions],
    ) -> Restored | None:
        """Load the newest valid step, the best one, or a certain one, blocking; see `CheckpointManager.restore`."""
        return self._finish(self._restore(state_dict, step, metric, mode, verify, discard_later, options))

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
        with self._retention.reading(step), self._checkpointer.open(path) as reader:
            yield reader

    def close(self) -> None:
        """Finish the saves and deletions, and let others write to the run, blocking; see `CheckpointManager.aclose`."""
        self._is_closed = True
        try:
            if self._owns_checkpointer:
                self._checkpointer.close()
        finally:
            try:
                if not self._retention.has_ended:
                    concurrent.futures.wait([self._retention.finished()], self._drain_s)
            finally:
                self._requests.close()
                self._end()

    def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in one step: whatever it awaits here blocks, and so never suspends it."""
        try:
            work.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        raise AssertionError("a blocking manager awaits nothing that suspends")

    async def _call(self, method: str, *args: object, **options: object) -> Any:
        return getattr(self._checkpointer, method)(*args, **options)

    async def _inspect(self, path: str) -> Mapping[str, Any]:
        with self._checkpointer.open(path) as reader:
            return dict(reader)

    async def _agree(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> T:
        return self._access.agree(what, value, decide).result()

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        return function(*args)
