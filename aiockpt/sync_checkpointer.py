"""The facade for plain programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from aiockpt.engine.facade import CheckpointerBase
from aiockpt.engine.submit import Path, SaveOptions, StateDict
from aiockpt.errors import AiockptError, SaveError
from aiockpt.format.keys import check_patterns
from aiockpt.options import LoadOptions, check_options
from aiockpt.reading.reader import SyncCheckpointReader
from aiockpt.saving.handle import SaveResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import torch

    from aiockpt.format.transforms.rules import CompressRule
    from aiockpt.options import MapLocation
    from aiockpt.reading.verify.report import VerifyReport
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.saving.hooks import Hook
    from aiockpt.saving.job import SaveFormat
    from aiockpt.snapshot.sampling import Validation
    from aiockpt.storage.base import Storage


class SyncCheckpointer(CheckpointerBase):
    """Saves and loads checkpoints from plain programs, with the same engine in the background.

    ::

        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, "runs/a/step-100")             # blocks until durable
            stage, write = ckpt.submit(state, "runs/a/step-200")
            stage.result()                                  # now the tensors may change
    """

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except AiockptError as exc:
            if error is None:
                raise
            error.add_note(f"closing the checkpointer also failed: {exc}")

    def save(
        self,
        state_dict: StateDict,
        path: Path,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        format: SaveFormat | None = None,
        shard_bytes: int | None = None,
        separation_hint: str | Sequence[str] | None = None,
        pre_commit: Hook | None = None,
        post_commit: Hook | None = None,
        storage: Storage | None = None,
        compress: CompressRule = None,
        validate: Validation | None = None,
    ) -> SaveResult:
        """Save a state dict and block until it is durable; see `AsyncCheckpointer.save`.

        With ``on_failure="warn"`` nothing is raised when the writing fails, and the result has the ``error``.
        """
        handle = self.submit(
            state_dict,
            path,
            overwrite=overwrite,
            metadata=metadata,
            format=format,
            shard_bytes=shard_bytes,
            separation_hint=separation_hint,
            pre_commit=pre_commit,
            post_commit=post_commit,
            storage=storage,
            compress=compress,
            validate=validate,
        )
        try:
            return handle.written.result()
        except SaveError as exc:
            if not self._forgiving:
                raise
            return SaveResult.of_failure(handle.path, exc, handle._elapsed())

    def submit(
        self,
        state_dict: StateDict,
        path: Path,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        format: SaveFormat | None = None,
        shard_bytes: int | None = None,
        separation_hint: str | Sequence[str] | None = None,
        pre_commit: Hook | None = None,
        post_commit: Hook | None = None,
        storage: Storage | None = None,
        compress: CompressRule = None,
        validate: Validation | None = None,
    ) -> SaveHandle:
        """Start to save; see `AsyncCheckpointer.save`.

        Until `staged`, steps of optimizers alone are seen from their beginning: call `fence` before whatever else
        changes the tensors in place.

        Returns:
            The handle; ``stage, write = submit(...)`` gives its two futures, each with ``result(timeout)``.
        """
        options = SaveOptions(
            overwrite=overwrite,
            metadata=metadata,
            format=format,
            shard_bytes=shard_bytes,
            separation_hint=separation_hint,
            pre_commit=pre_commit,
            post_commit=post_commit,
            storage=storage,
            compress=compress,
            validate=validate,
        )
        return self._submit(state_dict, path, options)

    def load(
        self,
        path: Path,
        state_dict: StateDict | None = None,
        *,
        map_location: MapLocation | None = None,
        keys: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = True,
        missing: list[str] | None = None,
        verify: bool = True,
        mmap: bool = False,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        storage: Storage | None = None,
    ) -> Any:
        """Load a checkpoint, blocking; see `AsyncCheckpointer.load`."""
        options = LoadOptions(
            map_location=map_location,
            keys=check_patterns(keys),
            dtype=dtype,
            strict=strict,
            missing=missing,
            verify=verify,
            mmap=mmap,
            safe_globals=safe_globals,
            trust=trust,
        )
        return self._load(path, state_dict, options, storage).result()

    def open(
        self,
        path: Path,
        *,
        verify: bool = True,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        storage: Storage | None = None,
    ) -> SyncCheckpointReader:
        """Look into a checkpoint: ``with ckpt.open(path) as reader:``; see `AsyncCheckpointer.open`."""
        storage, where = self._located(path, storage)
        options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust, transforms=self._transforms)
        check_options(options, into=False)
        return SyncCheckpointReader(self._engine, storage, where, options, self)

    def verify(self, path: Path, *, storage: Storage | None = None) -> VerifyReport:
        """Check all of a checkpoint, blocking; see `AsyncCheckpointer.verify`."""
        return self._verify(path, storage).result()

    def delete(self, path: Path, *, storage: Storage | None = None) -> None:
        """Delete a checkpoint, blocking; see `AsyncCheckpointer.delete`."""
        self._delete(path, storage).result()

    def clean(self, directory: Path, *, older_than_s: float | None = None, storage: Storage | None = None) -> list[str]:
        """Remove what killed processes have left in a directory, blocking; see `AsyncCheckpointer.clean`."""
        return self._clean(directory, older_than_s, storage).result()

    def ready(self, timeout: float | None = None) -> None:
        """Wait until a save finds it not busy, blocking; see `AsyncCheckpointer.ready`.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it was busy all the time.
        """
        self._engine.line.ready().result(timeout)

    def prewarm(self, state_dict: StateDict) -> None:
        """Make and fault in staging memory for such a state, blocking; see `AsyncCheckpointer.prewarm`."""
        self._prewarm(state_dict).result()

    def window(self) -> None:
        """Let staging copy the next ``bytes_per_window``, without waiting; see `AsyncCheckpointer.window`."""
        self._engine.open_window()

    def close(self) -> None:
        """Finish the saves in flight and end all threads, blocking; see `AsyncCheckpointer.aclose`."""
        closed = self._engine.close()
        try:
            closed.result()
        finally:
            if closed.done():
                self._engine.join()
