"""What the facades share: options, the engine, and the making of jobs."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aiockpt.capture import capture_items, capture_state, ready_events
from aiockpt.coordination.choose import check_group, choose_coordinator, is_distributed
from aiockpt.engine import Engine
from aiockpt.errors import CheckpointExistsError, SaveError
from aiockpt.format.manifest import check_user_metadata
from aiockpt.guard import StepGuard, fence_all
from aiockpt.job import SaveJob, choose_form
from aiockpt.load import load_checkpoint
from aiockpt.load_options import LoadOptions, check_options
from aiockpt.load_together import Gathering, load_together
from aiockpt.options import EngineOptions, ProcessWriter, check_writer
from aiockpt.planning.dcp_plan import DcpForm
from aiockpt.planning.planner import stored_bytes
from aiockpt.staging.pacing import check_window
from aiockpt.storage.local import LocalStorage
from aiockpt.transforms.base import check_transforms
from aiockpt.transforms.rules import choose_compression
from aiockpt.verify import verify_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import torch

    from aiockpt.call import Call
    from aiockpt.coordination.base import Coordinator
    from aiockpt.coordination.choose import ProcessGroupLike
    from aiockpt.handle import Completion, SaveHandle
    from aiockpt.hooks import Hook
    from aiockpt.item_reader import LoadTools
    from aiockpt.job import SaveFormat
    from aiockpt.planning.tree import NameMemo
    from aiockpt.planning.world_planner import WorldPlanner
    from aiockpt.staging.pacing import StagingWindow
    from aiockpt.storage.base import Storage
    from aiockpt.transforms.base import Transform
    from aiockpt.transforms.rules import CompressRule
    from aiockpt.verify_report import VerifyReport

Planning = Literal["central", "decentralized"]
StateDict = Mapping[Any, Any]
Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save; see `aiockpt.AsyncCheckpointer.save` for the meaning of each."""

    overwrite: bool = False
    metadata: Mapping[str, Any] | None = None
    format: SaveFormat = "dcp"
    shard_bytes: int | None = None
    separation_hint: str | Sequence[str] | None = None
    pre_commit: Hook | None = None
    post_commit: Hook | None = None
    storage: Storage | None = None
    compress: CompressRule = None


class CheckpointerBase:
    """A checkpointer without a way to wait."""

    def __init__(
        self,
        *,
        process_group: ProcessGroupLike = "default",
        coordination_timeout: float = 1800.0,
        planning: Planning = "central",
        staging_bytes: int | None = None,
        chunk_bytes: int | None = None,
        io_threads: int | None = None,
        direct_io: bool = True,
        fsync: bool = True,
        drain_timeout: float = 1800.0,
        staging_window: StagingWindow | None = None,
        writer: Literal["thread", "process"] | ProcessWriter = "thread",
        transforms: Sequence[Transform] = (),
    ) -> None:
        """Make a checkpointer. Nothing runs before its first use.

        Args:
            process_group: the ranks that save together: every one of them calls `save` with its part of the state,
                the same number of times and in the same order, and gets one checkpoint. "default": all ranks of
                ``torch.distributed``, if that is initialised at the first use; else this process alone. None: this
                process alone. The group itself is not used to communicate: a gloo group of the same ranks is made
                at the first save.
            coordination_timeout: how long a rank waits for the others, in seconds, before the save fails; the
                time they take to write counts as well.
            planning: who decides which rank writes what, at the first save and after a change. "central": rank 0, so
                that everything is written once, and evenly. "decentralized": each rank for itself, without waiting
                for the others: of a DTensor's copies one is written; plain tensors and objects are written by every
                rank that has them, and the lowest one's counts.
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
            staging_window: when tensors may be copied: so many bytes per second, or so many after each `window()`.
                None: as fast as it goes.
            writer: who computes CRCs, writes and commits. "thread": threads of this process. "process", or a
                `ProcessWriter`: a process of its own, which is started in the background at the first use, shares
                staging memory with this one, and outlives it: a save that was staged becomes a checkpoint even if
                this process is killed, unless it has a ``pre_commit`` hook. Linux only; a ``storage`` must be
                picklable.
            transforms: what is done to every item of checkpoints in DCP's format, such as encryption: applied in this
                order when saving, after compression, and undone when loading; see `Transform`.
        """
        self._transforms = check_transforms(transforms)
        options = EngineOptions(
            staging_bytes=staging_bytes,
            chunk_bytes=chunk_bytes,
            io_threads=io_threads,
            drain_timeout=drain_timeout,
            staging_window=check_window(staging_window),
            writer=check_writer(writer),
        )
        check_group(process_group)
        if not coordination_timeout > 0:
            raise ValueError(f"coordination_timeout must be positive, not {coordination_timeout!r}")
        if planning not in ("central", "decentralized"):
            raise ValueError(f"planning is {planning!r}; it must be 'central' or 'decentralized'")
        self._decentralized = planning == "decentralized"
        self._group = process_group
        self._was_distributed = is_distributed()
        self._coordination_timeout = coordination_timeout
        self._engine = Engine(options)
        self._names: NameMemo = {}
        self._turn = asyncio.Lock()
        self._storage: Storage = LocalStorage(direct_io=direct_io, fsync=fsync)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._engine!r}>"

    def _coordinator(self) -> Coordinator | None:
        """Give the way to the other ranks; None where this process saves alone."""
        return self._engine.meet(
            lambda: choose_coordinator(self._group, self._coordination_timeout, was_distributed=self._was_distributed),
            decentralized=self._decentralized,
        )

    def _submit(self, state_dict: StateDict, path: Path, options: SaveOptions) -> SaveHandle:
        started = time.perf_counter()
        together = self._coordinator() is not None
        try:
            job = self._job(state_dict, path, options, started, together=together)
            self._engine.submit(job)
        except BaseException as exc:
            if together:  # the others have called as well: they are to fail, not to wait
                self._engine.refuse(SaveJob.of_refusal(_named(path), self._storage, exc, started))
            raise
        job.captured_s = time.perf_counter() - started
        return job.handle

    def _job(
        self, state_dict: StateDict, path: Path, options: SaveOptions, started: float, *, together: bool
    ) -> SaveJob:
        self._engine.raise_unseen()
        storage, where = self._located(path, options.storage)
        if self._engine.in_flight(where):
            raise CheckpointExistsError(f"a save to {where} is in flight; wait for it, or save under another name")
        storage.check(where, overwrite=options.overwrite)
        self._check_transforms(options, where, together=together)
        if self._engine.options.writer is not None:
            check_portable(storage, *self._transforms)
        try:
            facts = check_user_metadata({} if options.metadata is None else options.metadata)
        except TypeError as exc:
            raise SaveError(str(exc)) from None
        form = choose_form(
            options.format,
            where,
            facts,
            shard_bytes=options.shard_bytes,
            separation_hint=options.separation_hint,
            files=self._engine.io_threads,
            together=together,
        )
        capture = capture_state(state_dict, self._names, together=together, once=together and self._decentralized)
        if form is not None:
            form.admit(capture)
        names = capture.structure.names
        compression = None if options.compress is None else choose_compression(options.compress, names, capture.tensors)
        return SaveJob(
            path=where,
            storage=storage,
            overwrite=options.overwrite,
            metadata=facts,
            capture=capture,
            started=started,
            form=form,
            pre_commit=options.pre_commit,
            post_commit=options.post_commit,
            compression=compression,
            transforms=self._transforms,
        )

    def _check_transforms(self, options: SaveOptions, where: str, *, together: bool) -> None:
        """Refuse to compress, or to transform otherwise, what can't be.

        Raises:
            ValueError: it is for another format.
            SaveError: several ranks save together.
        """
        if options.compress is None and not self._transforms:
            return
        what = "transforms" if self._transforms else "compress"
        if options.format != "dcp":
            raise ValueError(f"{what} is for format='dcp'; {options.format} files hold tensors as they are")
        if together:
            raise SaveError(
                f"{where}: {what} is for one process; several ranks save their items as they are. Leave it out, or "
                "save with process_group=None"
            )

    def submit_items(
        self,
        items: Sequence[tuple[str, torch.Tensor | bytes]],
        directory: Path,
        planner: WorldPlanner,
        *,
        files: int | None = None,
        separation_hint: Sequence[str] = (),
    ) -> SaveJob:
        """Start to write items to files in a directory that is there, for who makes a checkpoint of it himself.

        When it fails, the files are removed again. For adapters to other interfaces.

        Args:
            items: name and value of each: a tensor, or the bytes of an object.
            directory: where the files go.
            planner: names the files, and keeps their layout for the next time.
            files: the most files to write; None: one for each item.
            separation_hint: beginnings of names; tensors that are called so go to files of their own, which are called
                by the hint.

        Returns:
            The save; its ``handle`` tells how it goes, its ``places`` where each item is once it is written.

        Raises:
            SaveError: something can't be saved; the message names it.
            CheckpointerClosedError: the checkpointer is closed.
        """
        started = time.perf_counter()
        if self._transforms:
            raise SaveError("items can't be added to another's checkpoint by a checkpointer that has transforms")
        storage, where = self._located(directory, None)
        job = SaveJob(
            path=where,
            storage=storage,
            overwrite=False,
            metadata={},
            capture=capture_items(items),
            started=started,
            form=DcpForm(files, separation_hint),
            part=planner,
        )
        self._engine.submit(job)
        job.captured_s = time.perf_counter() - started
        return job

    def _load(
        self, path: Path, state_dict: StateDict | None, options: LoadOptions, storage: Storage | None
    ) -> Call[Any]:
        coordinator = None if state_dict is None else self._coordinator()
        if coordinator is None:
            return self._engine.call(self._loading(path, state_dict, options, storage), f"load {os.fspath(path)}")
        gathering = Gathering(coordinator, _named(path))
        refusal: BaseException | None = None
        load: Callable[..., Coroutine[Any, Any, Any]] | None = None
        try:
            load = self._loading(path, state_dict, options, storage)
        except BaseException as exc:  # the others have called as well: they are to fail, not to wait
            refusal = exc
        call = self._engine.call(
            lambda tools: load_together(gathering, self._turn, partial(load, tools) if load else None, refusal),
            gathering.what,
        )
        if refusal is not None:
            raise refusal
        return call

    def _loading(
        self, path: Path, state_dict: StateDict | None, options: LoadOptions, storage: Storage | None
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Check what can be checked at the call; give what does the rest."""
        check_options(options, into=state_dict is not None)
        options = replace(options, transforms=self._transforms)
        storage, where = self._located(path, storage)
        ready = {} if state_dict is None else ready_events(state_dict)

        def load(tools: LoadTools, gathering: Gathering | None = None) -> Coroutine[Any, Any, Any]:
            return load_checkpoint(storage, where, state_dict, options, tools, ready, gathering)

        return load

    def _verify(self, path: Path, storage: Storage | None) -> Call[VerifyReport]:
        storage, where = self._located(path, storage)
        return self._engine.call(
            lambda tools: verify_checkpoint(storage, where, tools.workers, self._transforms), f"verify {where}"
        )

    def _located(self, path: Path, storage: Storage | None) -> tuple[Storage, str]:
        where = os.fspath(path)
        if not isinstance(where, str):
            raise TypeError(f"path must be text or an os.PathLike of text, not {path!r}")
        storage = storage if storage is not None else self._storage
        return storage, storage.locate(where)

    def fence(self, timeout: float | None = None) -> None:
        """Let the caller's current accelerator streams wait for the copies of all saves in flight.

        As `SaveHandle.fence`, for every save that is not staged yet: call it before whatever changes tensors, such as
        an update of averaged weights (EMA), or the replay of a CUDA graph that holds an optimizer's step, in the
        stream that does so. Changes in other streams are not seen after it. Costs nothing when there is no such save.

        Args:
            timeout: seconds to block at most; None for as long as it takes.

        Raises:
            TornSnapshotError: a tensor has changed already; all saves were waited for.
            SaveError: a save has failed meanwhile.
            TimeoutError: the copies were not enqueued in time.
            ValueError: the timeout is negative, or no number.
            AiockptError: a CUDA graph is being captured; see `SaveHandle.fence`.
        """
        fence_all(self._engine.staging(), timeout)

    def guard(self, optimizer: torch.optim.Optimizer, *, timeout: float = 1800.0) -> StepGuard:
        """Let every ``optimizer.step()`` wait for the copies of saves in flight, so that none is torn.

        The waiting is that of `SaveHandle.fence`: for tensors on an accelerator the stream waits, not the program.
        Nothing is ever raised out of a step: a save that failed tells so through its handle. Steps that are compiled
        with ``torch.compile`` wait as well (the guard breaks the graph, so not with ``fullgraph=True``). A CUDA graph
        that holds a step is not guarded: call `fence` before its replay.

        The optimizer's parameters and state may change from then on. For other tensors, such as averaged weights (EMA)
        or what another optimizer has, a change before the copies are done still fails the save: guard that one as
        well, or call `fence` before the update.

        ::

            with ckpt.guard(optimizer):
                for batch in batches:
                    loss(model(batch)).backward()
                    optimizer.step()                 # waits for what is still being copied
                    ckpt.save(state, path)           # SyncCheckpointer: submit

        Args:
            optimizer: whose steps are to wait. One that only hands them on to its ``optimizer`` stands for that.
            timeout: seconds that a step blocks at most; then the save's snapshot is given up: it fails with
                `TornSnapshotError`, and training goes on.

        Returns:
            The guard, in force until its ``remove()``, or the end of its ``with`` block.

        Raises:
            TypeError: it is no ``torch.optim.Optimizer``, or one whose steps call no hooks.
            ValueError: the timeout is negative, or no number.
        """
        return StepGuard(optimizer, self._engine.staging, timeout)

    def _prewarm(self, state_dict: StateDict) -> Completion[None]:
        nbytes, devices = stored_bytes(state_dict)
        return self._engine.prewarm(nbytes, devices)


def check_portable(*tools: Storage | Transform) -> None:
    """Refuse a storage, or a transform, that a writer process can't have.

    Raises:
        SaveError: it can't be pickled, or its class is defined where the process does not look.
    """
    for tool in tools:
        try:
            if b"__main__" in pickle.dumps(tool):
                raise TypeError("it is defined in the main module, which that process does not import: move it to one")
        except Exception as exc:  # whatever its class does
            raise SaveError(
                f"{type(tool).__name__} can't be sent to the writer process ({exc}): make it picklable, or use "
                "writer='thread'"
            ) from exc


def _named(path: Path) -> str:
    """Name a path as `Storage.locate` does, as far as that is possible."""
    try:
        return os.path.abspath(os.fspath(path))
    except (TypeError, ValueError):
        return str(path)
