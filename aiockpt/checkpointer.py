"""The facade: `AsyncCheckpointer` for async programs, `SyncCheckpointer` for plain ones, on one engine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio

from aiockpt.capture import capture_state, watch_optimizers
from aiockpt.engine import Engine
from aiockpt.errors import AiockptError, CheckpointExistsError, SaveError
from aiockpt.format.manifest import check_user_metadata
from aiockpt.item_reader import LoadOptions
from aiockpt.job import SaveJob
from aiockpt.load import load_checkpoint
from aiockpt.options import EngineOptions
from aiockpt.planning.planner import stored_bytes
from aiockpt.storage.local import LocalStorage

if TYPE_CHECKING:
    from types import TracebackType

    from aiockpt.engine import Call
    from aiockpt.handle import Completion, SaveHandle, SaveResult
    from aiockpt.item_reader import MapLocation
    from aiockpt.planning.tree import NameMemo
    from aiockpt.storage.base import Storage

StateDict = Mapping[Any, Any]
Path = str | os.PathLike[str]


class _Checkpointer:
    """What both checkpointers share: options, the engine, and the making of jobs."""

    def __init__(
        self,
        *,
        staging_bytes: int | None = None,
        chunk_bytes: int | None = None,
        io_threads: int | None = None,
        direct_io: bool = True,
        fsync: bool = True,
        drain_timeout: float = 1800.0,
    ) -> None:
        """Make a checkpointer. Nothing runs before its first use.

        Args:
            staging_bytes: the most staging memory to use, in bytes. None: as much as the state is large, but
                at most half of the memory that is available. A larger state streams through it: written as
                fast, but `staged` comes later.
            chunk_bytes: the size of one piece of staging memory and of one write, in bytes. None: 16 MiB.
            io_threads: how many threads write (and read), and into how many files a large state goes. None: 4.
            direct_io: write past the page cache where the file system allows it.
            fsync: make every file and directory durable before `written`. Without it a crash of the machine
                can lose a checkpoint that was announced.
            drain_timeout: how long closing waits for saves in flight, in seconds, before it cancels them.
        """
        options = EngineOptions(
            staging_bytes=staging_bytes, chunk_bytes=chunk_bytes, io_threads=io_threads, drain_timeout=drain_timeout
        )
        watch_optimizers()
        self._engine = Engine(options)
        self._names: NameMemo = {}
        self._storage: Storage = LocalStorage(direct_io=direct_io, fsync=fsync)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._engine!r}>"

    def _submit(
        self,
        state_dict: StateDict,
        path: Path,
        *,
        overwrite: bool,
        metadata: Mapping[str, Any] | None,
        storage: Storage | None,
    ) -> SaveHandle:
        started = time.perf_counter()
        self._engine.raise_unseen()
        storage = storage if storage is not None else self._storage
        where = storage.locate(os.fspath(path))
        if self._engine.in_flight(where):
            raise CheckpointExistsError(f"a save to {where} is in flight; wait for it, or save under another name")
        storage.check(where, overwrite=overwrite)
        try:
            facts = check_user_metadata({} if metadata is None else metadata)
        except TypeError as exc:
            raise SaveError(str(exc)) from None
        capture = capture_state(state_dict, self._names)
        job = SaveJob(
            path=where,
            storage=storage,
            overwrite=overwrite,
            metadata=facts,
            capture=capture,
            started=started,
        )
        self._engine.submit(job)
        job.captured_s = time.perf_counter() - started
        return job.handle

    def _load(
        self, path: Path, state_dict: StateDict | None, options: LoadOptions, storage: Storage | None
    ) -> Call[Any]:
        storage = storage if storage is not None else self._storage
        where = storage.locate(os.fspath(path))
        return self._engine.call(
            lambda workers: load_checkpoint(storage, where, state_dict, options, workers), f"load {where}"
        )

    def _prewarm(self, state_dict: StateDict) -> Completion[None]:
        nbytes, devices = stored_bytes(state_dict)
        return self._engine.prewarm(nbytes, devices)


class AsyncCheckpointer(_Checkpointer):
    """Saves and loads checkpoints from asyncio programs, without ever blocking the loop.

    Usable from any number of loops and threads::

        async with aiockpt.AsyncCheckpointer() as ckpt:
            save = ckpt.save({"model": model.state_dict()}, "runs/a/step-100")
            await save.staged    # now the tensors may change
            await save.written   # durable, under its final name
            state = await ckpt.load("runs/a/step-100")
    """

    async def __aenter__(self) -> Self:
        self._engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self.aclose()
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
        storage: Storage | None = None,
    ) -> SaveHandle:
        """Start to save a state dict. A plain function: it holds the caller for the capture only.

        Before it returns it has walked over the state, pickled the objects that could change, and copied small
        tensors (up to 64 KiB each, 16 MiB in all). Other tensors must stay as they are until `staged`; one
        that is changed in place before is found out, and the save fails with `TornSnapshotError`. Steps of
        fused optimizers are seen as well. Changes through ``tensor.data``, NumPy views, custom kernels that
        don't count, and replayed CUDA graphs can't be seen.

        Saves go one after the other, in the order of the calls.

        Args:
            state_dict: nested dicts, lists and tuples with str or int keys, of tensors of any dtype and strides
                and of picklable objects. Mappings of other types come back as dicts.
            path: a directory that doesn't exist yet; its parents are made.
            overwrite: replace a checkpoint at this path, atomically.
            metadata: JSON-able facts, kept as text in `.aiockpt.json`.
            storage: where to keep it; None for the file system.

        Returns:
            A handle with the futures ``staged`` and ``written``.

        Raises:
            SaveError: something can't be saved; the message names the key.
            CheckpointExistsError: the path is taken.
            CheckpointerClosedError: the checkpointer is closed.
            AiockptError: the failure of an earlier save that nobody awaited.
        """
        return self._submit(state_dict, path, overwrite=overwrite, metadata=metadata, storage=storage)

    async def load(
        self,
        path: Path,
        state_dict: StateDict | None = None,
        *,
        map_location: MapLocation | None = None,
        strict: bool = True,
        verify: bool = True,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        storage: Storage | None = None,
    ) -> Any:
        """Load a checkpoint, ours or one of ``torch.distributed.checkpoint``.

        When the waiting task is cancelled, the load stops, and the target is no longer touched once the
        cancellation comes through.

        Args:
            path: the checkpoint's directory.
            state_dict: what to load into. Its tensors are filled in place, whatever their device and strides;
                its objects are replaced. Keys that only the checkpoint has are left out. None: give everything,
                as a new state dict with the containers and key types that were saved. Tensors that were tied
                share memory again; parameters come back as plain tensors.
            map_location: where new tensors go, as in ``torch.load``; None: host memory.
            strict: refuse to load when the checkpoint lacks a key of ``state_dict``.
            verify: check the CRC of everything that is read.
            safe_globals: classes and functions that pickled objects may use, besides those torch allows.
            trust: unpickle objects without restriction, which runs whatever code they ask for.
            storage: where it is kept; None for the file system.

        Returns:
            The new state dict, or ``state_dict`` itself.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CorruptCheckpointError: it is unfinished, truncated or changed; the message names key and file.
                Tensors of a target may have been filled by then.
            MissingKeysError: keys of ``state_dict`` are not in it; nothing was changed.
            ShapeMismatchError: a shape or dtype differs; nothing was changed.
            UnsafeCheckpointError: an object needs something that was not allowed.
        """
        options = LoadOptions(
            map_location=map_location, strict=strict, verify=verify, safe_globals=safe_globals, trust=trust
        )
        call = self._load(path, state_dict, options, storage)
        try:
            return await call.completion
        finally:
            if not call.completion.done():
                call.cancel()
                with anyio.CancelScope(shield=True):
                    await call.completion.settled()

    async def prewarm(self, state_dict: StateDict) -> None:
        """Make the staging memory for such a state, and fault it in, so that the first save is as fast as later ones.

        Args:
            state_dict: a state of the size to come; only its tensors' sizes matter.
        """
        await self._prewarm(state_dict)

    async def aclose(self) -> None:
        """Finish the saves in flight, join every thread and free staging memory. Idempotent.

        Cancelling this await does not stop the closing.

        Raises:
            AiockptError: the failure of an earlier save that nobody awaited.
            SaveCancelledError: a save took longer than ``drain_timeout`` and was cancelled.
        """
        closed = self._engine.close()
        await closed.settled()
        self._engine.join()
        await closed


class SyncCheckpointer(_Checkpointer):
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
        storage: Storage | None = None,
    ) -> SaveResult:
        """Save a state dict and block until it is durable; see `AsyncCheckpointer.save`."""
        handle = self.submit(state_dict, path, overwrite=overwrite, metadata=metadata, storage=storage)
        return handle.written.result()

    def submit(
        self,
        state_dict: StateDict,
        path: Path,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> SaveHandle:
        """Start to save; see `AsyncCheckpointer.save`.

        Returns:
            The handle; ``stage, write = submit(...)`` gives its two futures, each with ``result(timeout)``.
        """
        return self._submit(state_dict, path, overwrite=overwrite, metadata=metadata, storage=storage)

    def load(
        self,
        path: Path,
        state_dict: StateDict | None = None,
        *,
        map_location: MapLocation | None = None,
        strict: bool = True,
        verify: bool = True,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        storage: Storage | None = None,
    ) -> Any:
        """Load a checkpoint, blocking; see `AsyncCheckpointer.load`."""
        options = LoadOptions(
            map_location=map_location, strict=strict, verify=verify, safe_globals=safe_globals, trust=trust
        )
        call = self._load(path, state_dict, options, storage)
        try:
            return call.completion.result()
        finally:
            if not call.completion.done():  # interrupted, by Ctrl-C above all
                call.cancel()

    def prewarm(self, state_dict: StateDict) -> None:
        """Make and fault in staging memory for such a state, blocking; see `AsyncCheckpointer.prewarm`."""
        self._prewarm(state_dict).result()

    def close(self) -> None:
        """Finish the saves in flight and end all threads, blocking; see `AsyncCheckpointer.aclose`."""
        closed = self._engine.close()
        try:
            closed.result()
        finally:
            if closed.done():
                self._engine.join()
