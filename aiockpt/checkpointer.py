"""The facade for asyncio programs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import anyio
import anyio.lowlevel

from aiockpt.core.lazy import importing
from aiockpt.core.parameters import parameters_of
from aiockpt.core.threads import check_asyncio, has_loop
from aiockpt.engine.facade import CheckpointerBase, closing, until_closed
from aiockpt.engine.requests import LoadRequest, OpenRequest, SaveRequest, StateDict, TransactionRequest

if TYPE_CHECKING:
    from aiockpt.core.futures import Completion
    from aiockpt.engine.transaction import AsyncTransaction
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import Path
    from aiockpt.reading.apply_live import Loading
    from aiockpt.reading.reader import CheckpointReader
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage
    from aiockpt.telemetry.progress import OnProgress
    from aiockpt.telemetry.verification import VerifyReport

_INSTEAD = "use a SyncCheckpointer in a thread"


class AsyncCheckpointer(CheckpointerBase):
    """Saves and loads checkpoints from asyncio programs, without blocking the event loop.

    It can only be awaited in asyncio; in trio, use a `SyncCheckpointer` in ``trio.to_thread.run_sync``. Any number of
    loops and threads can use it::

        async with aiockpt.AsyncCheckpointer() as ckpt:
            save = ckpt.save({"model": model.state_dict()}, "runs/a/step-100")
            await save.staged    # now the tensors may change
            await save.written   # durable, under its final name
            state = await ckpt.load("runs/a/step-100")
    """

    def __enter__(self) -> NoReturn:
        raise TypeError("closing is awaited: write `async with AsyncCheckpointer(...)`, or use a SyncCheckpointer")

    __exit__ = None  # type checkers refuse `with` as well

    async def __aenter__(self) -> Self:
        check_asyncio("an AsyncCheckpointer", _INSTEAD)
        try:
            self._engine.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with closing("checkpointer", error), anyio.CancelScope(shield=True):
            await self.aclose()

    @parameters_of(SaveRequest)
    def save(self, request: SaveRequest) -> SaveHandle:
        """Start to save a state dict. A plain function: it blocks the caller only while it captures the state.

        Before it returns, it walks the state, pickles the objects that could change, and copies small tensors (up to
        64 KiB each, 16 MiB in all). Other tensors must not change until `staged`. An in-place change before that is
        detected, and the save fails with `TornSnapshotError`. Only optimizer steps are detected from their beginning,
        including fused ones; `guard` makes them wait instead. Any other operator is detected when it is done, and not
        at all if it ends more than 20 ms after the copies: call `fence` before other in-place updates, such as those
        of averaged weights (EMA), and before loading into the tensors. Changes through ``tensor.data``, NumPy views,
        custom kernels that don't bump the version counter, and replayed CUDA graphs are invisible to version counters:
        call `fence` before those too, or use ``validate="hash"``. Larger NumPy arrays, which have no version counter,
        are always checked as with ``validate="hash"``.

        Saves are made one after the other, in the order of the calls.

        Returns:
            A handle with the futures ``staged`` and ``written``.

        Raises:
            ValueError: the format or ``validate`` is unknown, the format contradicts the path, or ``shard_bytes`` or
                ``compress`` can't be used here.
            SaveError: something can't be saved, or its ``state_dict()`` failed; the message names the key. Or the
                call is made by a hook of this checkpointer.
            CheckpointExistsError: the path is taken.
            CheckpointerClosedError: the checkpointer is closed, or was created before a fork.
            AiockptError: the failure of an earlier save that was not awaited.
        """
        return self._submitter.submit(request)

    @parameters_of(TransactionRequest)
    def transaction(self, request: TransactionRequest) -> AsyncTransaction:
        """Save several checkpoints and files into one directory, which appear at once or not at all.

        ::

            async with ckpt.transaction("runs/a/checkpoint-100") as tx:
                tx.save({"model": model}, format="safetensors")   # the directory itself
                tx.save({"optim": optimizer}, "optimizer")        # a checkpoint of its own, in a directory below
                tx.add("config.json", config)                     # bytes, or a path
            await tx.staged    # now the tensors may change
            await tx.written   # all of it is durable

        With several ranks it is collective. Leaving the block does not wait for the saves.

        Raises:
            SaveError: on entering, with what `save` raises: the path is taken, or the checkpointer is busy.
        """
        with importing():
            from aiockpt.engine.transaction import AsyncTransaction

        return AsyncTransaction(self, self._submitter, request)

    @parameters_of(LoadRequest)
    def load(self, request: LoadRequest) -> Coroutine[Any, Any, Any]:
        """Load a checkpoint of aiockpt, ``torch.distributed.checkpoint``, ``torch.save`` or safetensors.

        Wrong options fail at the call; everything else begins when the coroutine that it returns is awaited. If the
        waiting task is cancelled, the load stops; once the cancellation is raised, the target is no longer
        modified. By then either every ``load_state_dict`` has been called, or none.

        Returns:
            A coroutine, which returns the new state dict, or ``state_dict`` itself.

        Raises:
            CheckpointNotFoundError: nothing is at this path.
            CorruptCheckpointError: the checkpoint is unfinished, truncated or changed; the message names key and file.
                Tensors of the target may have been filled: the error's ``placed`` and ``partly_placed`` name them.
                Everything that can be checked without reading the tensors is checked before.
            LoadError: a ``state_dict()`` failed, and nothing was changed; or a ``load_state_dict`` failed, and the
                message names the objects that were loaded before it.
            MissingKeysError: the checkpoint lacks keys of ``state_dict``; nothing was changed.
            ShapeMismatchError: a shape or dtype differs; nothing was changed.
            UnsafeCheckpointError: an object needs something that is not allowed; nothing was changed.
        """
        return self._loaded(self._loader.load(request))

    async def _loaded(self, start: Callable[[], Loading]) -> Any:  # a method: it keeps the checkpointer alive
        check_asyncio("load()", _INSTEAD)
        return await start().wait()

    @parameters_of(OpenRequest)
    def open(self, request: OpenRequest) -> CheckpointReader:
        """Inspect a checkpoint and read parts of it: ``async with ckpt.open(path) as reader:``.

        Does not block: the checkpoint is opened on entering, or by awaiting the reader.

        Returns:
            A mapping from keys to descriptions of the stored items, with methods to read them.
        """
        return self._loader.open(request, self)

    async def verify(
        self, path: Path, *, storage: Storage | None = None, progress: OnProgress | None = None
    ) -> VerifyReport:
        """Check all of a checkpoint: files, sizes, framing, CRCs, and whether they match the metadata.

        Reads every byte once, in bounded memory, and reports all problems, not only the first. If the waiting task is
        cancelled, it stops.

        Args:
            path: see `load`.
            storage: see `load`.
            progress: see `load`.

        Returns:
            A report of all problems, with keys and files; ``report.ok`` is True if there are none.

        Raises:
            CheckpointNotFoundError: nothing is at this path.
            LoadError: the checkpoint can't be read at all.
        """
        check_asyncio("verify()", _INSTEAD)
        return await self._loader.verify(path, storage, progress).wait()

    def delete(
        self, path: Path, *, after: SaveHandle | None = None, storage: Storage | None = None
    ) -> Completion[None]:
        """Begin to delete a checkpoint; await the result. Atomic: its name is gone durably before files are removed.

        Readers that have it open can go on reading. If the process is killed meanwhile, either the whole checkpoint is
        left, or nothing under its name and a hidden directory that the next save beside it removes. With several
        ranks, one calls it. Cancelling the waiting task does not stop it, and closing waits for it.

        Args:
            after: a save that has to be written first, such as that of the checkpoint that is kept instead. If it fails
                or is skipped, nothing is deleted: DeleteError, which is logged too, as nobody may await it.
            path: a checkpoint's directory, or a file of safetensors or ``torch.save``. Of a link only the link is
                removed. Anything else is refused, and so is a directory with files that the checkpoint does not name.
            storage: see `load`.

        Raises:
            CheckpointNotFoundError: nothing is at this path.
            DeleteError: it is no checkpoint, is being saved by this checkpointer, or can't be removed.
        """
        check_asyncio("delete()", _INSTEAD)
        return self._delete(path, storage, after).completion

    async def clean(
        self, directory: Path, *, older_than_s: float | None = None, storage: Storage | None = None
    ) -> list[str]:
        """Remove orphans: hidden directories (``.aiockpt-*``) that killed processes have left.

        The first save into a directory does the same. A directory is removed if it is certain that no process needs
        it: its owner ran on this machine and is dead, and no other process, such as its writer process, holds its lock.

        Args:
            directory: the directory that contains checkpoints.
            older_than_s: also remove directories whose process can't be checked here, such as one on another host, if
                nothing in them has changed for so many seconds. Be sure that no save takes that long.
            storage: see `load`.

        Returns:
            The paths that were removed. Those that could not be removed are logged.

        Raises:
            ValueError: the age is negative.
            DeleteError: the directory can't be read.
        """
        check_asyncio("clean()", _INSTEAD)
        return await self._clean(directory, older_than_s, storage).wait()

    async def ready(self) -> None:
        """Wait until fewer than ``max_in_flight`` saves are in flight, so that ``on_busy`` does not apply to a save.

        Nothing is reserved: if several tasks wait, the first one to save gets the free place. Safe to cancel.
        """
        await self._engine.queue.ready()

    async def prewarm(self, state_dict: StateDict) -> None:
        """Allocate the staging memory for a state and fault it in, so that the first save is as fast as later ones.

        Also captures the state once and drops it, in the caller's thread: the call of the first save finds its imports,
        first calls and memory done.

        Args:
            state_dict: a state of the expected size and structure; nothing of it is kept.
        """
        check_asyncio("prewarm()", _INSTEAD)
        await self._prewarm(state_dict)

    async def window(self) -> None:
        """Allow staging to copy the next ``bytes_per_window`` of the ``staging_window``; does not wait for the copies.

        Call it where the training loop needs the bus least, such as once per step.
        """
        self._engine.open_window()
        await anyio.lowlevel.checkpoint()

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Finish the saves in flight, join every thread and free staging memory. Idempotent.

        Closing begins with the call. Cancelling the waiting task does not stop it.

        Raises:
            AiockptError: the failure of an earlier save that was not awaited.
            SaveCancelledError: a save took longer than ``drain_timeout`` and was cancelled.
        """
        if has_loop():
            self._engine.close()
        return self._closed()

    async def _closed(self) -> None:
        check_asyncio("aclose()", "use a SyncCheckpointer, and close() in a thread")
        closed = self._engine.close()
        try:
            await until_closed(closed)
        finally:
            if closed.done():
                self._engine.join()


def open(
    path: Path,
    *,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    transforms: Sequence[Transform] = (),
    storage: Storage | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointReader:
    """Inspect a checkpoint without a checkpointer: ``async with aiockpt.open(path) as reader:``.

    See `AsyncCheckpointer.open`. The reader has threads of its own, which end with it.
    """
    checkpointer = AsyncCheckpointer(transforms=transforms, storage=storage, storage_options=storage_options)
    request = OpenRequest(path=path, verify=verify, safe_globals=safe_globals, trust=trust)
    reader = checkpointer._loader.open(request, checkpointer, checkpointer.aclose)
    checkpointer._warns_as(f"reader of {reader.path}")
    return reader
