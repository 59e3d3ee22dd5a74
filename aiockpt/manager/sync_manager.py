"""The manager of a run for programs without asyncio."""

from __future__ import annotations

import concurrent.futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from aiockpt.core.parameters import parameters_of
from aiockpt.errors import AiockptError, SaveError
from aiockpt.manager.base import ManagerBase
from aiockpt.manager.ops import Agree, Clean, Inspect, Load, Ready, Run, Verify
from aiockpt.manager.requests import RestoreOptions, StepRequest
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from aiockpt.engine.requests import StateDict
    from aiockpt.manager.ops import Op, Steps
    from aiockpt.manager.policies import Mode
    from aiockpt.manager.requests import Restored, StepChoice, Verification
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
                if run.due(step):
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
            self._drive(self._opened())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except AiockptError as exc:
            if error is None:
                raise
            error.add_note(f"closing the manager also failed: {exc}")

    def restore(
        self,
        state_dict: StateDict,
        step: StepChoice = "latest",
        *,
        metric: str | None = None,
        mode: Mode | None = None,
        verify: Verification = "auto",
        **options: Unpack[RestoreOptions],
    ) -> Restored | None:
        """Load the newest valid step, the best one, or a certain one, blocking; see `CheckpointManager.restore`."""
        return self._drive(self._restore(state_dict, step, metric, mode, verify, options))

    @parameters_of(StepRequest)
    def save(self, request: StepRequest) -> SaveResult:
        """Save a step and block until it is durable; see `CheckpointManager.save`.

        With ``on_failure="warn"``, a failed write does not raise; the result has it as ``error``.
        """
        handle = self._submit(request)
        try:
            return handle.written.result()
        except SaveError as exc:
            if not self._checkpointer_options.warn_only:
                raise
            from aiockpt.telemetry.saves import SaveResult

            return SaveResult.of_failure(handle.path, exc, handle._elapsed())

    @parameters_of(StepRequest)
    def submit(self, request: StepRequest) -> SaveHandle:
        """Start to save a step, blocking only until earlier saves are written; see `CheckpointManager.save`.

        Returns:
            The handle; ``stage, write = submit(...)`` unpacks its two futures.
        """
        return self._submit(request)

    def _submit(self, request: StepRequest) -> SaveHandle:
        return self._drive(self._save(request, lambda arguments: self._checkpointer.submit(**arguments)))

    @contextmanager
    def open(self, step: int) -> Iterator[SyncCheckpointReader]:
        """Inspect a step: ``with run.open(100) as reader:``; see `CheckpointManager.open`."""
        path = self.path_of(step)
        with self._reading(step), self._checkpointer.open(path) as reader:
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

    def _drive(self, steps: Steps[T]) -> T:
        """Do what a generator yields, and send it the answers."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                op = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                value: T = stop.value
                return value
            answer, error = None, None
            try:
                answer = self._do(op)
            except BaseException as exc:  # raised by the generator, or handled there
                error = exc

    def _do(self, op: Op) -> Any:
        checkpointer = self._checkpointer
        match op:
            case Load(path, state, options):
                return checkpointer.load(path, state, **options)
            case Verify(path):
                return checkpointer.verify(path)
            case Inspect(path):
                with checkpointer.open(path) as reader:
                    return dict(reader)
            case Agree(what, value, decide):
                return self._access.agree(what, value, decide).result()
            case Ready():
                return checkpointer.ready()
            case Clean(directory):
                return checkpointer.clean(directory)
            case Run(function):
                return function()
