"""The facade for programs without asyncio: a checkpointer, and functions that share one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from aiockpt.coordination.choose import is_distributed
from aiockpt.core.lazy import importing
from aiockpt.core.parameters import arguments_of, parameters_of
from aiockpt.engine.facade import CheckpointerBase, closing
from aiockpt.engine.requests import LoadRequest, OpenRequest, SaveRequest, StateDict, TransactionRequest
from aiockpt.errors import SaveError

if TYPE_CHECKING:
    from aiockpt.core.futures import Completion
    from aiockpt.engine.transaction import SyncTransaction
    from aiockpt.options import Path
    from aiockpt.reading.reader import SyncCheckpointReader
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.progress import OnProgress
    from aiockpt.telemetry.saves import SaveResult
    from aiockpt.telemetry.verification import VerifyReport


class SyncCheckpointer(CheckpointerBase):
    """Saves and loads checkpoints from programs without asyncio, with the same engine in the background.

    ::

        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, "runs/a/step-100")             # blocks until durable
            stage, write = ckpt.submit(state, "runs/a/step-200")
            stage.result()                                  # now the tensors may change
    """

    def __enter__(self) -> Self:
        try:
            self._engine.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with closing("checkpointer", error):
            self.close()

    @parameters_of(SaveRequest)
    def save(self, request: SaveRequest) -> SaveResult:
        """Save a state dict and block until it is durable; see `AsyncCheckpointer.save`.

        With ``on_failure="warn"``, a failed write does not raise; the result has it as ``error``.
        """
        return self._written(self._submitter.submit(request))

    def _written(self, handle: SaveHandle) -> SaveResult:
        """Block until a save is durable; return its result, or with ``on_failure="warn"`` that of its failure."""
        try:
            return handle.written.result()
        except SaveError as exc:
            if not self._options.warn_only:
                raise
            from aiockpt.telemetry.saves import SaveResult

            return SaveResult.of_failure(handle.path, exc, handle._elapsed())

    @parameters_of(SaveRequest)
    def submit(self, request: SaveRequest) -> SaveHandle:
        """Start to save; see `AsyncCheckpointer.save`.

        Until `staged`, only optimizer steps are detected from their beginning: call `fence` before anything else that
        changes the tensors in place.

        Returns:
            The handle; ``stage, write = submit(...)`` unpacks its two futures, which are `concurrent.futures.Future`s.
        """
        return self._submitter.submit(request)

    @parameters_of(TransactionRequest)
    def transaction(self, request: TransactionRequest) -> SyncTransaction:
        """Save several checkpoints into one directory: ``with ckpt.transaction(path) as tx:``.

        See `AsyncCheckpointer.transaction`. Leaving the block does not wait: ``tx.written.result()`` does.
        """
        with importing():
            from aiockpt.engine.transaction import SyncTransaction

        return SyncTransaction(self, self._submitter, request)

    @parameters_of(LoadRequest)
    def load(self, request: LoadRequest) -> Any:
        """Load a checkpoint, blocking; see `AsyncCheckpointer.load`."""
        return self._loader.load(request)().result()

    @parameters_of(OpenRequest)
    def open(self, request: OpenRequest) -> SyncCheckpointReader:
        """Inspect a checkpoint: ``with ckpt.open(path) as reader:``; see `AsyncCheckpointer.open`."""
        return self._loader.open_sync(request, self)

    def verify(self, path: Path, *, storage: Storage | None = None, progress: OnProgress | None = None) -> VerifyReport:
        """Check all of a checkpoint, blocking; see `AsyncCheckpointer.verify`."""
        return self._loader.verify(path, storage, progress).result()

    def delete(
        self, path: Path, *, after: SaveHandle | None = None, storage: Storage | None = None
    ) -> Completion[None]:
        """Delete a checkpoint, blocking; see `AsyncCheckpointer.delete`.

        With ``after`` it does not block; what it returns completes when the checkpoint is deleted, or stays.
        """
        call = self._delete(path, storage, after)
        if after is None:
            call.result()
        return call.completion

    def clean(self, directory: Path, *, older_than_s: float | None = None, storage: Storage | None = None) -> list[str]:
        """Remove orphans in a directory, blocking; see `AsyncCheckpointer.clean`."""
        return self._clean(directory, older_than_s, storage).result()

    def ready(self, timeout: float | None = None) -> None:
        """Block until fewer than ``max_in_flight`` saves are in flight; see `AsyncCheckpointer.ready`.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: there were too many saves in flight all the time.
        """
        self._engine.queue.ready().result(timeout)

    def prewarm(self, state_dict: StateDict) -> None:
        """Allocate and fault in staging memory for a state, blocking; see `AsyncCheckpointer.prewarm`."""
        self._prewarm(state_dict).result()

    def window(self) -> None:
        """Allow staging to copy the next ``bytes_per_window``, without waiting; see `AsyncCheckpointer.window`."""
        self._engine.open_window()

    def close(self) -> None:
        """Finish the saves in flight and end all threads, blocking; see `AsyncCheckpointer.aclose`."""
        self._close()


# --- functions without a checkpointer -----------------------------------------------------------------

IDLE_S = 5.0  # after that the threads of the shared checkpointer end


@arguments_of(SaveRequest)
def save(request: SaveRequest) -> SaveResult:
    """Save a state dict and block until it is durable: ``aiockpt.save(state, "runs/a/step-100")``.

    For scripts and interactive use; see `SyncCheckpointer.save`. `save`, `load` and `verify` share a checkpointer with
    default options, which starts at the first call and ends a few seconds after the last. They may be called from any
    thread, and in a notebook or a coroutine, which they block. With several ranks, all of them call `save`.
    """
    with _used() as checkpointer:
        return checkpointer._written(checkpointer._submitter.submit(request))


@arguments_of(LoadRequest)
def load(request: LoadRequest) -> Any:
    """Load a checkpoint, blocking: ``state = aiockpt.load("runs/a/step-100")``.

    See `AsyncCheckpointer.load`, and `aiockpt.save` for the checkpointer that it uses.
    """
    with _used() as checkpointer:
        return checkpointer._loader.load(request)().result()


def verify(path: Path, *, storage: Storage | None = None, progress: OnProgress | None = None) -> VerifyReport:
    """Check all of a checkpoint, blocking: ``aiockpt.verify("runs/a/step-100").ok``.

    See `AsyncCheckpointer.verify`, and `aiockpt.save` for the checkpointer that it uses.
    """
    with _used() as checkpointer:
        return checkpointer.verify(path, storage=storage, progress=progress)


_lock = threading.RLock()  # reentrant: a signal handler may save or load
_shared: SyncCheckpointer | None = None


def _forget() -> None:
    global _lock, _shared
    _lock, _shared = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)  # its threads, and who held its lock, are the parent's


@contextlib.contextmanager
def _used() -> Iterator[SyncCheckpointer]:
    """Use the shared checkpointer; in a distributed program one of this call alone.

    There it is connected to those of the other ranks: one that is idle for longer would leave the others behind.
    """
    global _shared
    if is_distributed():
        with SyncCheckpointer() as own:
            yield own
        return
    with _lock:
        if _shared is None or not _shared._engine.is_open:
            _shared = SyncCheckpointer(idle_timeout=IDLE_S)
        shared = _shared
    yield shared
