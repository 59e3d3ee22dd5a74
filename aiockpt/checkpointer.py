"""The facade for async programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.lowlevel

from aiockpt.core.threads import check_asyncio
from aiockpt.engine.facade import CheckpointerBase
from aiockpt.engine.submit import Path, SaveOptions, StateDict
from aiockpt.errors import AiockptError
from aiockpt.format.keys import check_patterns
from aiockpt.options import LoadOptions, check_options
from aiockpt.reading.reader import CheckpointReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import torch

    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.rules import CompressRule
    from aiockpt.options import MapLocation
    from aiockpt.reading.verify.report import VerifyReport
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.saving.hooks import Hook
    from aiockpt.saving.job import SaveFormat
    from aiockpt.snapshot.sampling import Validation
    from aiockpt.storage.base import Storage


_INSTEAD = "use a SyncCheckpointer in a thread"


class AsyncCheckpointer(CheckpointerBase):
    """Saves and loads checkpoints from asyncio programs, without ever blocking the loop.

    Only asyncio can await it; in trio use a `SyncCheckpointer` in ``trio.to_thread.run_sync``. Usable from any number
    of loops and threads::

        async with aiockpt.AsyncCheckpointer() as ckpt:
            save = ckpt.save({"model": model.state_dict()}, "runs/a/step-100")
            await save.staged    # now the tensors may change
            await save.written   # durable, under its final name
            state = await ckpt.load("runs/a/step-100")
    """

    async def __aenter__(self) -> Self:
        check_asyncio("an AsyncCheckpointer", _INSTEAD)
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
        format: SaveFormat | None = None,
        shard_bytes: int | None = None,
        separation_hint: str | Sequence[str] | None = None,
        pre_commit: Hook | None = None,
        post_commit: Hook | None = None,
        storage: Storage | None = None,
        compress: CompressRule = None,
        validate: Validation | None = None,
    ) -> SaveHandle:
        """Start to save a state dict. A plain function: it holds the caller for the capture only.

        Before it returns it has walked over the state, pickled the objects that could change, and copied small
        tensors (up to 64 KiB each, 16 MiB in all). Other tensors must stay as they are until `staged`; one
        that is changed in place before is found out, and the save fails with `TornSnapshotError`. Only steps of
        optimizers are seen from their beginning, fused ones as well; `guard` lets them wait instead. Any other
        operator counts as a change when it is done, and one that runs on for 20 ms after the copies is not seen:
        call `fence` before other updates in place, such as those of averaged weights (EMA), or loading into the
        tensors. Changes through ``tensor.data``, NumPy views, custom kernels that don't count, and replayed CUDA
        graphs can't be seen by counters at all: call `fence` before those as well, or ask for ``validate="hash"``.
        Larger NumPy arrays, which have no counter, are always looked at as that does.

        Saves go one after the other, in the order of the calls.

        Args:
            state_dict: nested dicts, lists and tuples with str or int keys, of tensors of any dtype and strides
                and of picklable objects. NumPy arrays of numbers are stored as tensors. Mappings of other types come
                back as dicts. What has ``state_dict`` and ``load_state_dict``, such as a module, an optimizer, a
                scheduler or a data loader, is saved as its ``state_dict()``, which is called here, once for each
                object; also the state itself may be one.
            path: a directory that doesn't exist yet, or with the ending ``.safetensors`` a file; its parents are made.
                ``~`` is the home directory. It must not be in the directory of another checkpoint.
            overwrite: replace a checkpoint at this path, atomically: a directory, or a file of ``torch.save`` or
                safetensors, or an empty directory. Of a link the link is replaced, not what it leads to. If the
                directory holds anything that the checkpoint does not name, it is refused, and that is listed.
            metadata: JSON-able facts, kept as text in `.aiockpt.json`, and for safetensors in the header of each
                file as well, where what is not text becomes JSON.
            format: None for "safetensors" if the path ends in ``.safetensors``, else for "dcp".
                "dcp" for what ``torch.distributed.checkpoint`` reads. "safetensors" for what
                ``safetensors`` and ``transformers`` read: plain tensors only, under dotted names and stored row by
                row; a tied tensor is stored under its first name, and the header's metadata gives that name
                for each other one. A directory gets ``model.safetensors``, or a set of files with
                ``model.safetensors.index.json``, and `.aiockpt.json` with their CRCs.
            shard_bytes: for a safetensors directory, how many bytes of tensors a file holds at most, but for a
                tensor that is larger. None: 5 GB.
            separation_hint: beginnings of names; what is called so goes to files of its own, whose names begin with
                the hint, for example to delete or to move the optimizer's part alone. For the "dcp" format.
            pre_commit: a function or coroutine function that is called with the path when all bytes are durable and
                nothing is published. If it fails, so does the save. Runs in a worker thread, a coroutine in an
                event loop of its own there; of several ranks each runs its own. With this checkpointer it may load,
                open, verify and delete; whatever would wait for the hook itself raises `SaveError` there: to save, to
                wait for a save, and to close.
            post_commit: the same, called when the checkpoint is published, before `written` comes. If it fails, the
                save has succeeded all the same: its result has ``post_commit_error``, and it is logged.
            storage: where to keep it; None for the file system.
            compress: which items to compress: None for none; "zstd" or `aiockpt.Zstd` for all; a mapping of names,
                names of containers and patterns (as ``keys`` in `load`) to these or None, of which the first that
                means a name counts, and what none means stays plain; or a function of name and tensor that gives one
                of these, which is not asked for objects. What hardly becomes smaller is stored as it is. Loading needs
                no option, and ``torch.distributed.checkpoint`` reads it too. For the "dcp" format.
            validate: how changes before `staged` are found. "versions": by version counters, as said above. "hash": by
                these, and by comparing 64 bytes in every 64 KiB of each tensor that is not copied at the call with what
                is there when all is staged: this finds every write of whole tensors, or of 64 KiB in one piece, however
                it was made; one of ``n`` bytes in one piece with a probability of about ``n / 65536``, at places that
                differ from save to save; and none that began and ended before the call, or was changed back. It holds
                the caller for some 2 ms per GiB and 6 us per tensor, as much again comes before `staged`, and
                a thousandth of the state is kept until then. None: as the checkpointer was told.

        Returns:
            A handle with the futures ``staged`` and ``written``.

        Raises:
            ValueError: the format or ``validate`` is not known, the format contradicts the path, or ``shard_bytes`` or
                ``compress`` is of no use here.
            SaveError: something can't be saved, or its ``state_dict()`` failed; the message names the key. Or it is
                called by a hook of its own.
            CheckpointExistsError: the path is taken.
            CheckpointerClosedError: the checkpointer is closed, or was made before a fork.
            AiockptError: the failure of an earlier save that nobody awaited.
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

    async def load(
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
        """Load a checkpoint: ours, one of ``torch.distributed.checkpoint``, of ``torch.save``, or of safetensors.

        When the waiting task is cancelled, the load stops, and the target is no longer touched once the
        cancellation comes through. No ``load_state_dict`` has been called then, or each has.

        Args:
            path: the checkpoint's directory, or a file of ``torch.save`` or safetensors.
            state_dict: what to load into. Its tensors and NumPy arrays are filled in place, whatever their device and
                strides, and whether an array or a tensor was saved there;
                its objects are replaced. Keys that only the checkpoint has are left out, but an empty container or
                None takes all that is stored there, in new containers of the types that were saved. What has
                ``state_dict`` and ``load_state_dict`` is given all that is stored under its key: the tensors of its
                ``state_dict()`` are filled in place where they fit, and ``load_state_dict`` is called, in the order
                of the state and inner objects first, by the caller's thread, or task, when everything is read.
                None: give everything, as a new state dict with the containers and key types that were saved.
                Tensors that were tied share memory again; parameters come back as plain tensors.
            map_location: where new tensors go, as in ``torch.load``; None: host memory, also beside targets on an
                accelerator (the ``load_state_dict`` of optimizers moves them to their parameters). NumPy arrays are
                always made in host memory, except that "meta" gives a tensor without memory.
            keys: load these alone: names, names of containers (all that is in them), and glob patterns such as
                ``"model.*.weight"``, whose ``*`` matches dots as well. Positions of lists that are left out are None.
            dtype: cast floating-point tensors to this dtype, as ``nn.Module.to`` does.
            strict: refuse to load when the checkpoint lacks a key of ``state_dict`` or of ``keys``. False: leave
                those as they are, and warn once, with a `MissingKeysWarning` that has them as ``keys``. It is passed
                on to modules. Objects other than modules judge themselves what they can do without, as long as
                something is stored for them.
            missing: a list, to which the keys are added that ``strict=False`` let be missing.
            verify: check the CRC of everything that is read, where it carries one.
            mmap: give tensors that are backed by the files: nothing is read before it is used, so no CRC is
                checked. Writing to one changes a private copy of the page, never the file. The files must stay
                as they are as long as the tensors live (replacing or deleting the checkpoint is safe, writing
                to its files is not). Not into a ``state_dict``, nor with ``dtype`` or ``map_location``.
            safe_globals: classes and functions that pickled objects may use, besides those torch allows.
            trust: unpickle objects without restriction, which runs whatever code they ask for; and let those that are
                compressed have as many bytes as they like, where else all of them may have 64 MiB in all, besides a
                hundred times what is stored.
            storage: where it is kept; None for the file system.

        Returns:
            The new state dict, or ``state_dict`` itself.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CorruptCheckpointError: it is unfinished, truncated or changed; the message names key and file.
                Tensors of a target may have been filled by then: the error's ``placed`` and ``partly_placed``
                name them. All that can be known without reading the tensors is looked at before.
            LoadError: a ``state_dict()`` failed, and nothing was changed; or a ``load_state_dict`` did: the message
                names the objects that had been given their states before it.
            MissingKeysError: keys of ``state_dict`` are not in it; nothing was changed.
            ShapeMismatchError: a shape or dtype differs; nothing was changed.
            UnsafeCheckpointError: an object needs something that was not allowed; nothing was changed.
        """
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
        check_asyncio("load()", _INSTEAD)
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
        options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust, transforms=self._transforms)
        check_options(options, into=False)
        return CheckpointReader(self._engine, storage, where, options, self)

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
        check_asyncio("verify()", _INSTEAD)
        return await self._verify(path, storage).wait()

    async def delete(self, path: Path, *, storage: Storage | None = None) -> None:
        """Delete a checkpoint: at once from its name, and for good before its files are removed.

        Whoever has it open can go on reading what is open. A process that is killed meanwhile leaves all of it, or
        nothing under its name and a leftover that the next save beside it removes. Of several ranks one calls it.
        Does not stop when the waiting task is cancelled.

        Args:
            path: a checkpoint's directory, a file of safetensors or ``torch.save``, or a link, of which the link alone
                is removed. Anything else is refused, and so is a directory that holds anything that the checkpoint
                does not name.
            storage: see `load`.

        Raises:
            CheckpointNotFoundError: nothing is there.
            DeleteError: it is no checkpoint, is being saved by this checkpointer, or can't be removed.
        """
        check_asyncio("delete()", _INSTEAD)
        await self._delete(path, storage).wait()

    async def clean(
        self, directory: Path, *, older_than_s: float | None = None, storage: Storage | None = None
    ) -> list[str]:
        """Remove the hidden directories (``.aiockpt-*``) that killed processes have left, without saving.

        Every first save into a directory does so as well, as far as it is proven that nobody needs them any more: their
        process ran on this machine and is gone, and no other, such as its writer process, holds them.

        Args:
            directory: where checkpoints are kept.
            older_than_s: remove also those of which that can't be known here, such as those of other hosts, in which
                nothing was changed for so many seconds. Be sure that no save takes that long.
            storage: see `load`.

        Returns:
            The paths of what was removed. What could not be removed is logged.

        Raises:
            ValueError: the age is negative.
            DeleteError: the directory can't be read.
        """
        check_asyncio("clean()", _INSTEAD)
        return await self._clean(directory, older_than_s, storage).wait()

    async def ready(self) -> None:
        """Wait until fewer than ``max_in_flight`` saves are in flight, so that a save now finds it not busy.

        That place is not reserved: of several tasks that wait, the first one to save has it. Safe to cancel.
        """
        await self._engine.line.ready()

    async def prewarm(self, state_dict: StateDict) -> None:
        """Make the staging memory for such a state, and fault it in, so that the first save is as fast as later ones.

        Args:
            state_dict: a state of the size to come; only its tensors' sizes matter.
        """
        check_asyncio("prewarm()", _INSTEAD)
        await self._prewarm(state_dict)

    async def window(self) -> None:
        """Let staging copy the next ``bytes_per_window`` of the ``staging_window``; does not wait until it has.

        For where the training loop can best spare the bus, once per step, say.
        """
        self._engine.open_window()
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Finish the saves in flight, join every thread and free staging memory. Idempotent.

        Cancelling this await does not stop the closing.

        Raises:
            AiockptError: the failure of an earlier save that nobody awaited.
            SaveCancelledError: a save took longer than ``drain_timeout`` and was cancelled.
        """
        check_asyncio("aclose()", "use a SyncCheckpointer, and close() in a thread")
        closed = self._engine.close()
        await closed.settled()
        self._engine.join()
        await closed


def open(
    path: Path,
    *,
    verify: bool = True,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    transforms: Sequence[Transform] = (),
) -> CheckpointReader:
    """Look into a checkpoint without a checkpointer: ``async with aiockpt.open(path) as reader:``.

    See `AsyncCheckpointer.open`. The threads that read are the reader's own, and end with it.
    """
    checkpointer = AsyncCheckpointer(transforms=transforms)
    options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust, transforms=checkpointer._transforms)
    return _LoneReader(checkpointer, path, options)


class _LoneReader(CheckpointReader):
    """A reader that closes its checkpointer as well."""

    def __init__(self, checkpointer: AsyncCheckpointer, path: Path, options: LoadOptions) -> None:
        storage, where = checkpointer._located(path, None)
        super().__init__(checkpointer._engine, storage, where, options, checkpointer)
        checkpointer._warns_as(f"reader of {where}")
        self._checkpointer = checkpointer

    async def __aenter__(self) -> Self:
        check_asyncio(f"a reader of {self.path}", _INSTEAD)
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
