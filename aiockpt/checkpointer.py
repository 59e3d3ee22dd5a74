"""The facade: `AsyncCheckpointer` for async programs, `SyncCheckpointer` for plain ones, on one engine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio

from aiockpt.capture import capture_state, ready_events, watch_optimizers
from aiockpt.engine import Engine
from aiockpt.errors import AiockptError, CheckpointExistsError, SaveError
from aiockpt.format.manifest import check_user_metadata
from aiockpt.job import SaveJob, choose_form
from aiockpt.load import load_checkpoint
from aiockpt.load_options import LoadOptions, check_options
from aiockpt.options import EngineOptions
from aiockpt.planning.planner import stored_bytes
from aiockpt.planning.selection import check_patterns
from aiockpt.reader import CheckpointReader, SyncCheckpointReader
from aiockpt.storage.local import LocalStorage
from aiockpt.verify import verify_checkpoint

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from aiockpt.call import Call
    from aiockpt.handle import Completion, SaveHandle, SaveResult
    from aiockpt.job import SaveFormat
    from aiockpt.load_options import MapLocation
    from aiockpt.planning.tree import NameMemo
    from aiockpt.storage.base import Storage
    from aiockpt.verify_report import VerifyReport

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
            io_threads: how many threads write, and into how many files a large state goes; twice as many read.
                None: 4.
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
        format: SaveFormat,
        shard_bytes: int | None,
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
        form = choose_form(format, where, facts, shard_bytes)
        capture = capture_state(state_dict, self._names)
        if form is not None:
            form.admit(capture)
        job = SaveJob(
            path=where,
            storage=storage,
            overwrite=overwrite,
            metadata=facts,
            capture=capture,
            started=started,
            form=form,
        )
        self._engine.submit(job)
        job.captured_s = time.perf_counter() - started
        return job.handle

    def _load(
        self, path: Path, state_dict: StateDict | None, options: LoadOptions, storage: Storage | None
    ) -> Call[Any]:
        check_options(options, into=state_dict is not None)
        storage, where = self._located(path, storage)
        ready = {} if state_dict is None else ready_events(state_dict)
        return self._engine.call(
            lambda tools: load_checkpoint(storage, where, state_dict, options, tools, ready), f"load {where}"
        )

    def _verify(self, path: Path, storage: Storage | None) -> Call[VerifyReport]:
        storage, where = self._located(path, storage)
        return self._engine.call(lambda tools: verify_checkpoint(storage, where, tools.workers), f"verify {where}")

    def _located(self, path: Path, storage: Storage | None) -> tuple[Storage, str]:
        where = os.fspath(path)
        if not isinstance(where, str):
            raise TypeError(f"path must be text or an os.PathLike of text, not {path!r}")
        storage = storage if storage is not None else self._storage
        return storage, storage.locate(where)

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
        format: SaveFormat = "dcp",
        shard_bytes: int | None = None,
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
            path: a directory that doesn't exist yet; its parents are made. With ``format="safetensors"`` a path that
                ends with ``.safetensors`` is one file.
            overwrite: replace a checkpoint at this path, atomically.
            metadata: JSON-able facts, kept as text in `.aiockpt.json`, and for safetensors in the header of each
                file as well, where what is not text becomes JSON.
            format: "dcp" for what ``torch.distributed.checkpoint`` reads. "safetensors" for what
                ``safetensors`` and ``transformers`` read: plain tensors only, under dotted names and stored row by
                row; a tied tensor is stored under its first name, and the header's metadata gives that name
                for each other one. A directory gets ``model.safetensors``, or a set of files with
                ``model.safetensors.index.json``, and `.aiockpt.json` with their CRCs.
            shard_bytes: for a safetensors directory, how many bytes of tensors a file holds at most, but for a
                tensor that is larger. None: 5 GB.
            storage: where to keep it; None for the file system.

        Returns:
            A handle with the futures ``staged`` and ``written``.

        Raises:
            ValueError: the format is not known, or ``shard_bytes`` is no number of bytes or is of no use here.
            SaveError: something can't be saved; the message names the key.
            CheckpointExistsError: the path is taken.
            CheckpointerClosedError: the checkpointer is closed.
            AiockptError: the failure of an earlier save that nobody awaited.
        """
        return self._submit(
            state_dict,
            path,
            overwrite=overwrite,
            metadata=metadata,
            format=format,
            shard_bytes=shard_bytes,
            storage=storage,
        )

    async def load(
        self,
        path: Path,
        state_dict: StateDict | None = None,
        *,
        map_location: MapLocation | None = None,
        keys: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = True,
        verify: bool = True,
        mmap: bool = False,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        storage: Storage | None = None,
    ) -> Any:
        """Load a checkpoint: ours, one of ``torch.distributed.checkpoint``, of ``torch.save``, or of safetensors.

        When the waiting task is cancelled, the load stops, and the target is no longer touched once the
        cancellation comes through.

        Args:
            path: the checkpoint's directory, or a file of ``torch.save`` or safetensors.
            state_dict: what to load into. Its tensors are filled in place, whatever their device and strides;
                its objects are replaced. Keys that only the checkpoint has are left out. None: give everything,
                as a new state dict with the containers and key types that were saved. Tensors that were tied
                share memory again; parameters come back as plain tensors.
            map_location: where new tensors go, as in ``torch.load``; None: host memory.
            keys: load these alone: names, names of containers (all that is in them), and glob patterns such as
                ``"model.*.weight"``, whose ``*`` matches dots as well. Positions of lists that are left out are None.
            dtype: cast floating-point tensors to this dtype, as ``nn.Module.to`` does.
            strict: refuse to load when the checkpoint lacks a key of ``state_dict`` or of ``keys``.
            verify: check the CRC of everything that is read, where it carries one.
            mmap: give tensors that are backed by the files: nothing is read before it is used, so no CRC is
                checked. Writing to one changes a private copy of the page, never the file. The files must stay
                as they are as long as the tensors live (replacing or deleting the checkpoint is safe, writing
                to its files is not). Not into a ``state_dict``, nor with ``dtype`` or ``map_location``.
            safe_globals: classes and functions that pickled objects may use, besides those torch allows.
            trust: unpickle objects without restriction, which runs whatever code they ask for.
            storage: where it is kept; None for the file system.

        Returns:
            The new state dict, or ``state_dict`` itself.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CorruptCheckpointError: it is unfinished, truncated or changed; the message names key and file.
                Tensors of a target may have been filled by then: the error's ``placed`` and ``partly_placed``
                name them. All that can be known without reading the tensors is looked at before.
            MissingKeysError: keys of ``state_dict`` are not in it; nothing was changed.
            ShapeMismatchError: a shape or dtype differs; nothing was changed.
            UnsafeCheckpointError: an object needs something that was not allowed; nothing was changed.
        """
        options = LoadOptions(
            map_location=map_location,
            keys=check_patterns(keys),
            dtype=dtype,
            strict=strict,
            verify=verify,
            mmap=mmap,
            safe_globals=safe_globals,
            trust=trust,
        )
        return await self._load(path, state_dict, options, storage).wait()

    def open(
        self,
        path: Path,
        *,
        verify: bool = True,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        storage: Storage | None = None,
    ) -> CheckpointReader:
        """Look into a checkpoint, and read what is wanted of it: ``async with ckpt.open(path) as reader:``.

        Does not block; the checkpoint is opened on entering, or by awaiting the reader.

        Args:
            path: see `load`.
            verify: check the CRC of every stored chunk that is read as a whole.
            safe_globals: see `load`.
            trust: see `load`.
            storage: see `load`.

        Returns:
            A mapping of keys to what is stored, with methods to read it.
        """
        storage, where = self._located(path, storage)
        options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust)
        check_options(options, into=False)
        return CheckpointReader(self._engine, storage, where, options)

    async def verify(self, path: Path, *, storage: Storage | None = None) -> VerifyReport:
        """Check all of a checkpoint: files, sizes, framing, CRCs, and what its metadata says of them.

        Reads every byte once, in bounded memory, and finds every problem rather than the first. When the waiting
        task is cancelled, it stops.

        Args:
            path: see `load`.
            storage: see `load`.

        Returns:
            A report of all problems, with keys and files; ``report.ok`` if there are none.

        Raises:
            CheckpointNotFoundError: nothing is there.
            LoadError: it can't be read at all.
        """
        return await self._verify(path, storage).wait()

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
        format: SaveFormat = "dcp",
        shard_bytes: int | None = None,
        storage: Storage | None = None,
    ) -> SaveResult:
        """Save a state dict and block until it is durable; see `AsyncCheckpointer.save`."""
        handle = self.submit(
            state_dict,
            path,
            overwrite=overwrite,
            metadata=metadata,
            format=format,
            shard_bytes=shard_bytes,
            storage=storage,
        )
        return handle.written.result()

    def submit(
        self,
        state_dict: StateDict,
        path: Path,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        format: SaveFormat = "dcp",
        shard_bytes: int | None = None,
        storage: Storage | None = None,
    ) -> SaveHandle:
        """Start to save; see `AsyncCheckpointer.save`.

        Returns:
            The handle; ``stage, write = submit(...)`` gives its two futures, each with ``result(timeout)``.
        """
        return self._submit(
            state_dict,
            path,
            overwrite=overwrite,
            metadata=metadata,
            format=format,
            shard_bytes=shard_bytes,
            storage=storage,
        )

    def load(
        self,
        path: Path,
        state_dict: StateDict | None = None,
        *,
        map_location: MapLocation | None = None,
        keys: str | Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = True,
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
        options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust)
        check_options(options, into=False)
        return SyncCheckpointReader(self._engine, storage, where, options)

    def verify(self, path: Path, *, storage: Storage | None = None) -> VerifyReport:
        """Check all of a checkpoint, blocking; see `AsyncCheckpointer.verify`."""
        return self._verify(path, storage).result()

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


def open(path: Path, *, verify: bool = True, safe_globals: Sequence[Any] = (), trust: bool = False) -> CheckpointReader:
    """Look into a checkpoint without a checkpointer: ``async with aiockpt.open(path) as reader:``.

    See `AsyncCheckpointer.open`. The threads that read are the reader's own, and end with it.
    """
    return _LoneReader(AsyncCheckpointer(), path, LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust))


class _LoneReader(CheckpointReader):
    """A reader that closes its checkpointer as well."""

    def __init__(self, checkpointer: AsyncCheckpointer, path: Path, options: LoadOptions) -> None:
        storage, where = checkpointer._located(path, None)
        super().__init__(checkpointer._engine, storage, where, options)
        self._checkpointer = checkpointer

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._checkpointer.aclose()
            raise

    async def aclose(self) -> None:
        """Close the files, and end the threads. Idempotent; what was read stays."""
        try:
            await super().aclose()
        finally:
            with anyio.CancelScope(shield=True):
                await self._checkpointer.aclose()
