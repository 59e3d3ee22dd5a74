"""Transactions: several checkpoints and files in one directory, which appear at once or not at all."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import TYPE_CHECKING, Self

import anyio

from aiockpt.core.parameters import parameters_of
from aiockpt.core.threads import check_asyncio
from aiockpt.engine.requests import PartRequest, SaveRequest, TransactionRequest
from aiockpt.engine.submit import format_for, read_files
from aiockpt.errors import AiockptError, CheckpointExistsError, SaveCancelledError, SaveError
from aiockpt.format.names import SUFFIX
from aiockpt.options import Path, StateOptions
from aiockpt.saving.joint import Joint
from aiockpt.storage.base import SharedStorage

if TYPE_CHECKING:
    from aiockpt.core.futures import Call, Completion
    from aiockpt.engine.submit import Submitter
    from aiockpt.reading.executor import LoadTools
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.telemetry.saves import SaveResult


class CheckpointTransaction:
    """Several checkpoints and files in one directory, which appear at once or not at all.

    Saves begin to copy when they are called, as those of the checkpointer do. Leaving the block does not wait: it
    publishes in the background, when everything is written. Leaving it by an exception removes everything, and so does
    a failure of any save. Every file is durable then, and listed in the manifest at the top with its size and CRC, so
    that ``verify`` of the directory covers all of it. It is loaded as it was saved: the directory is what is at its
    top, and each directory below is a checkpoint of its own. It is replaced and deleted as one.

    With several ranks, each enters, calls the same methods in the same order, and leaves. What is one file is rank 0's:
    the files that it adds, and the checkpoints of one file that it saves, such as ``model.safetensors``; the others may
    leave these calls out. A save within it is not handed to another path by ``fallback_path``; if the trainer dies, its
    writer process does not publish it.

    Attributes:
        path: where it will be.
    """

    def __init__(self, owner: object, submitter: Submitter, request: TransactionRequest) -> None:
        self._owner = owner  # a checkpointer that is garbage ends its engine
        self._submitter = submitter
        self._request = request
        self._storage, self.path = submitter.storages.of(request.path, request.storage, request.storage_options)
        self._joint: Joint | None = None
        self._handle: SaveHandle | None = None

    def __repr__(self) -> str:
        state = "open" if self._joint is not None else "left" if self._handle is not None else "not entered"
        return f"<{type(self).__name__} {self.path} {state}>"

    # --- within the block -----------------------------------------------------------------------------

    @parameters_of(PartRequest)
    def save(self, request: PartRequest) -> None:
        """Start to save a state dict as a part of the transaction; see `AsyncCheckpointer.save`.

        Raises:
            ValueError: the name is taken, or no name.
            SaveError: something can't be saved; nothing of the transaction will be published.
        """
        joint, name = self._open(), request.name
        submitter, options = self._submitter, {}
        path = self._storage.below(self.path, str(name)) if name else self.path
        try:
            self._check_name(name)
            is_file = format_for(request.format, name) == "torch" or name.endswith(SUFFIX)
        except BaseException as exc:
            submitter.refuse(path, exc)
            joint.refused = exc
            raise
        if is_file and not self._submitter.engine.leads:
            return
        try:
            options = {each.name: getattr(request, each.name) for each in fields(StateOptions)}
            storage = joint.storage_of(name)
            save = SaveRequest(request.state_dict, path, storage=storage, overwrite=True, **options)
            (joint.files if is_file else joint.parts)[name] = submitter.submit_part(save, is_alone=is_file)
        except BaseException as exc:
            if is_file:
                joint.refused_file = exc
            else:
                joint.refused = exc
            raise

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or "/" in name or "\0" in name or name.startswith("."):
            raise ValueError(f"name is {name!r}; it is one directory or file: no '/', and no '.' at its beginning")
        joint = self._open()
        if name in joint.jobs or name in joint.added:
            raise ValueError(f"{self.path}: {name!r} is in this transaction already; give it another name")

    def add(self, name: str, content: bytes | Path) -> None:
        """Add a file: its bytes, or the path of a file to copy, which is read here. Of several ranks, rank 0's counts.

        Raises:
            ValueError: the name is taken, is no name, or is one that readers take for a part of a state.
            SaveError: the file can't be read.
        """
        self._check_name(name)
        self._open().added |= read_files({name: content}, is_single=False)

    @property
    def directory(self) -> str:
        """A directory to write other files into, until the block is left; what is in it then is published too.

        Raises:
            SaveError: the storage has none; use `add`.
        """
        folder = self._open().folder
        if folder is None:
            kind = type(self._storage).__name__
            raise SaveError(f"{self.path}: {kind} has no directory to write into; add files instead")
        return folder

    def _open(self) -> Joint:
        if self._joint is None:
            what = "is over" if self._handle is not None else "has not begun: enter it by `async with` or `with`"
            raise SaveError(f"the transaction of {self.path} {what}")
        return self._joint

    # --- after it -------------------------------------------------------------------------------------

    @property
    def handle(self) -> SaveHandle:
        """The save of all of it, once the block is left: to cancel it, for its progress, and for ``delete(after=)``."""
        if self._handle is None:
            raise SaveError(f"leave the block of the transaction of {self.path} before you wait for it")
        return self._handle

    @property
    def staged(self) -> Completion[None]:
        """Completes when every tensor of all saves is copied: they may change from then on."""
        return self.handle.staged

    @property
    def written(self) -> Completion[SaveResult]:
        """Completes when everything is durable and has appeared."""
        return self.handle.written

    # --- entering and leaving ---------------------------------------------------------------------------

    def _begin(self) -> Call[Joint]:
        engine, storage = self._submitter.engine, self._storage
        if self._joint is not None or self._handle is not None:
            raise SaveError(f"the transaction of {self.path} can be entered once only")
        engine.origin.check(f"a transaction of {self.path}")
        coordinator = engine.coordinator()
        call = None if coordinator is None else coordinator.call("agree")
        objection: BaseException | None = None
        try:
            self._check()
        except AiockptError as exc:
            objection = exc

        async def begin(_: LoadTools) -> Joint:
            if not isinstance(storage, SharedStorage):
                raise SaveError(
                    f"{self.path}: {type(storage).__name__} has no transactions of several checkpoints, which are for "
                    "storages derived from aiockpt.storage.SharedStorage"
                )
            joint = Joint(self.path, storage, self._request.overwrite)
            await joint.begin(coordinator, call, objection, engine.tools.io_workers)
            engine.joints.add(joint)
            return joint

        return engine.call(begin, f"the transaction of {self.path}", call)

    def _check(self) -> None:
        queue, overwrite = self._submitter.engine.queue, self._request.overwrite
        queue.raise_unreported()
        if self.path.endswith(SUFFIX):
            raise SaveError(f"{self.path} names one file; a transaction makes a directory")
        if self._submitter.engine.leads:
            queue.admit(self.path)
        if queue.is_path_busy(self.path, overwrite=overwrite):
            raise CheckpointExistsError(f"a save to {self.path} is in flight; wait for it, or save under another name")
        self._storage.check(self.path, overwrite=overwrite)

    def _leave(self, error: BaseException | None) -> SaveHandle:
        joint, self._joint = self._open(), None
        if error is not None:
            joint.given_up = SaveCancelledError(
                f"the transaction of {self.path} was left by {type(error).__name__}; nothing of it is left"
            )
            for job in joint.jobs.values():
                job.cancel()
        self._handle = self._submitter.submit_joint(joint, self._request)
        return self._handle


class AsyncTransaction(CheckpointTransaction):
    """A transaction of an `AsyncCheckpointer`."""

    async def __aenter__(self) -> Self:
        check_asyncio("a transaction", "use a SyncCheckpointer in a thread")
        self._joint = await self._begin().wait()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handle = self._leave(error)
        if error is not None:
            with anyio.CancelScope(shield=True):
                await handle.written.settled()


class SyncTransaction(CheckpointTransaction):
    """A transaction of a `SyncCheckpointer`. Entering blocks until it has begun."""

    def __enter__(self) -> Self:
        self._joint = self._begin().result()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handle = self._leave(error)
        if error is not None:
            with contextlib.suppress(AiockptError):
                handle.written.result()
