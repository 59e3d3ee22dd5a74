"""What the facades share: options, the engine, and the making of jobs."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from aiockpt.coordination.choose import check_group, choose_coordinator, is_distributed
from aiockpt.engine.engine import Engine
from aiockpt.engine.queue import KEPT
from aiockpt.engine.submit import Path, SaveOptions, StateDict, Submitter, named
from aiockpt.errors import DeleteError, LoadError, SaveError
from aiockpt.format.transforms.base import check_transforms
from aiockpt.options import (
    EngineOptions,
    LoadOptions,
    OnBusy,
    OnFailure,
    ProcessWriter,
    check_options,
    check_window,
    check_writer,
)
from aiockpt.planning.planner import stored_bytes
from aiockpt.reading.apply_live import Loading
from aiockpt.reading.collective import Gathering, conclude, load_together
from aiockpt.reading.load import load_checkpoint
from aiockpt.reading.verify.verify import verify_checkpoint
from aiockpt.saving.fence import StepGuard, fence_all
from aiockpt.snapshot.capture import ready_events
from aiockpt.snapshot.live import check_optimizers, resolve
from aiockpt.snapshot.sampling import check_validation
from aiockpt.storage.local.retries import DEFAULT_RETRIES
from aiockpt.storage.local.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    import torch

    from aiockpt.coordination.base import Coordinator
    from aiockpt.coordination.choose import ProcessGroupLike
    from aiockpt.core.futures import Call, Completion
    from aiockpt.engine.queue import Failures, Statistics
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import StagingWindow
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.reading.apply_live import Filled
    from aiockpt.reading.executor import LoadTools
    from aiockpt.reading.verify.report import VerifyReport
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.saving.job import SaveJob
    from aiockpt.snapshot.sampling import Validation
    from aiockpt.storage.base import Storage
    from aiockpt.storage.local.retries import Retries

Planning = Literal["central", "decentralized"]
T = TypeVar("T")


class CheckpointerBase:
    """A checkpointer without a way to wait."""

    _unclosed: weakref.finalize[Any, Any] | None = None

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
        retries: Retries | int | None = DEFAULT_RETRIES,
        drain_timeout: float = 1800.0,
        on_busy: OnBusy = "wait",
        max_in_flight: int = 1,
        on_failure: OnFailure = "raise",
        save_timeout: float | None = None,
        fallback_path: Path | Callable[[str], Path] | None = None,
        staging_window: StagingWindow | None = None,
        writer: Literal["thread", "process"] | ProcessWriter = "thread",
        transforms: Sequence[Transform] = (),
        validate: Validation = "versions",
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
            retries: how often, and how fast, a write or another step is tried again that a file system has refused
                for a reason that may pass by itself, such as a server that is restarting; a full disk or a failing
                device is none. A number is that of attempts after the first; None or 0: no second attempt.
            drain_timeout: how long closing waits for saves in flight, in seconds, before it cancels them.
            on_busy: what becomes of a save while ``max_in_flight`` others are in flight, that is, not written yet.
                "wait": it waits in line; what it is to copy must stay as it is until `staged`, and `ready` tells when
                it would not have to wait. "skip": it is left out. "supersede": it waits, and those before it that only
                wait as well, behind the first ``max_in_flight``, give way to it. What is left out, or gives way, is
                over at once: `staged` comes, for its tensors may change, `written` raises `SaveSkippedError`, which
                nobody is told otherwise; ``handle.skipped`` and `statistics` show it. "error": the call raises
                `CheckpointerBusyError`. Of several ranks, rank 0 decides for all.
            max_in_flight: see ``on_busy``. With 1 a save that is made is copied as fast as memory allows; with 2 its
                copying may wait for the one before to be written, if there is not the staging memory for both.
            on_failure: "raise": a failed save raises from `staged` and `written`, and if nobody awaits these, from the
                next `save` or from closing. "warn": it is logged as an error, `staged` comes all the same, and
                nothing is raised but by `written`, which comes only for what is written; `statistics` has the errors.
                What is wrong with the call itself is raised by the call, in either case.
            save_timeout: how long a save may take, in seconds, from when the one before is over. Then it is called
                off, with `SaveTimeoutError`; if a thread of it hangs in the file system, the saves behind it go on
                without it. The staging memory that the thread holds is not used until it comes back; other memory may
                take its place, up to as much again. None: no limit.
            fallback_path: a directory, where a checkpoint goes under its own name when it can't be written, or not be
                published, where it was to go; or a function that gives for such a path another. Its result has that
                ``path``, and the error as ``spoilt``. Nothing is overwritten there. Its staging memory is kept until
                it is published; a state that is larger than that can be saved there only as long as it is not
                staged. For one process.
            staging_window: when tensors may be copied: so many bytes per second, or so many after each `window()`.
                None: as fast as it goes.
            writer: who computes CRCs, writes and commits. "thread": threads of this process. "process", or a
                `ProcessWriter`: a process of its own, which is started in the background at the first use, shares
                staging memory with this one, and outlives it: a save that was staged becomes a checkpoint even if
                this process is killed, unless it has a ``pre_commit`` hook. Linux only; a ``storage`` must be
                picklable.
            transforms: what is done to every item of checkpoints in DCP's format, such as encryption: applied in this
                order when saving, after compression, and undone when loading; see `Transform`.
            validate: how changes of tensors before `staged` are found, where `save` does not say; see there.
        """
        self._transforms = check_transforms(transforms)
        options = EngineOptions(
            staging_bytes=staging_bytes,
            chunk_bytes=chunk_bytes,
            io_threads=io_threads,
            drain_timeout=drain_timeout,
            staging_window=check_window(staging_window),
            writer=check_writer(writer),
            on_busy=on_busy,
            max_in_flight=max_in_flight,
            on_failure=on_failure,
            save_timeout=save_timeout,
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
        self._failures: Failures = deque(maxlen=KEPT)
        self._engine = Engine(options, self._failures)
        self._turn = asyncio.Lock()
        self._handing_over: set[int] = set()
        self._submitter = Submitter(
            self._engine,
            LocalStorage(direct_io=direct_io, fsync=fsync, retries=retries),
            transforms=self._transforms,
            fallback_path=fallback_path,
            validate=check_validation(validate),
            decentralized=self._decentralized,
        )
        self._warns_as(f"{type(self).__name__}")

    def _warns_as(self, what: str) -> None:
        """Have the engine end when the last reference to this goes, with a warning that names it so."""
        if self._unclosed is not None:
            self._unclosed.detach()
        self._unclosed = weakref.finalize(self, self._engine.let_go, what)
        self._unclosed.atexit = False  # saves in flight are finished then, and nothing is to be said

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._engine!r}>"

    def _coordinator(self) -> Coordinator | None:
        """Give the way to the other ranks; None where this process saves alone."""
        return self._engine.meet(
            lambda: choose_coordinator(self._group, self._coordination_timeout, was_distributed=self._was_distributed),
            decentralized=self._decentralized,
        )

    def _submit(self, state_dict: StateDict, path: Path, options: SaveOptions) -> SaveHandle:
        coordinator = self._coordinator()
        return self._submitter.submit(
            state_dict, path, options, ranks=None if coordinator is None else coordinator.world_size
        )

    @property
    def _forgiving(self) -> bool:
        return self._submitter.forgiving

    def submit_items(
        self,
        items: Sequence[tuple[str, torch.Tensor | bytes]],
        directory: Path,
        planner: LocalPlanner,
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
        return self._submitter.submit_items(items, directory, planner, files=files, separation_hint=separation_hint)

    def _load(self, path: Path, state_dict: StateDict | None, options: LoadOptions, storage: Storage | None) -> Loading:
        coordinator = None if state_dict is None else self._coordinator()
        if coordinator is None:
            alone = self._loading(path, state_dict, options, storage, together=False)
            call = self._engine.call(alone, f"load {os.fspath(path)}")
            return Loading(call, options.missing, lambda _: None, self._handing_over)
        if threading.get_ident() in self._handing_over:
            raise LoadError(
                f"{path} can't be loaded within a load_state_dict() that this checkpointer calls: with other ranks it "
                "does one load after the other. Load it before or after, or with another checkpointer"
            )
        gathering = Gathering(coordinator, named(path))
        refusal: BaseException | None = None
        load: Callable[..., Coroutine[Any, Any, Filled]] | None = None
        try:
            load = self._loading(path, state_dict, options, storage, together=True)
        except BaseException as exc:  # the others have called as well: they are to fail, not to wait
            refusal = exc
        call = self._engine.call(
            lambda tools: load_together(gathering, self._turn, partial(load, tools) if load else None, refusal),
            gathering.what,
        )
        if refusal is not None:
            raise refusal
        return Loading(call, options.missing, partial(self._conclude, gathering), self._handing_over)

    def _conclude(self, gathering: Gathering, error: BaseException | None) -> Call[None] | None:
        """Tell the other ranks how live objects have taken their states, where there are any."""
        if not gathering.is_handing_over:
            return None
        return self._engine.call(lambda _: conclude(gathering, self._turn, error), gathering.what)

    def _loading(
        self,
        path: Path,
        state_dict: StateDict | None,
        options: LoadOptions,
        storage: Storage | None,
        *,
        together: bool,
    ) -> Callable[..., Coroutine[Any, Any, Filled]]:
        """Check what can be checked at the call; give what does the engine's part."""
        check_options(options, into=state_dict is not None)
        options = replace(options, transforms=self._transforms)
        storage, where = self._located(path, storage)
        target = None if state_dict is None else resolve(state_dict, LoadError)
        if target is not None and together:
            check_optimizers(target.objects, LoadError)
        ready = {} if target is None else ready_events(target.tree)

        def load(tools: LoadTools, gathering: Gathering | None = None) -> Coroutine[Any, Any, Filled]:
            return load_checkpoint(storage, where, state_dict, target, options, tools, ready, gathering)

        return load

    def _verify(self, path: Path, storage: Storage | None) -> Call[VerifyReport]:
        storage, where = self._located(path, storage)
        return self._engine.call(
            lambda tools: verify_checkpoint(storage, where, tools.workers, self._transforms), f"verify {where}"
        )

    def _delete(self, path: Path, storage: Storage | None) -> Call[None]:
        storage, where = self._located(path, storage)
        if self._engine.line.holds(where, overwrite=False):
            raise DeleteError(
                f"a save to {where} is in flight, or hangs; wait for it, or cancel it, and delete it then"
            )
        return self._engine.call(lambda tools: storage.delete(where, workers=tools.workers), f"delete {where}")

    def _clean(self, directory: Path, older_than_s: float | None, storage: Storage | None) -> Call[list[str]]:
        storage, where = self._located(directory, storage)
        if older_than_s is not None and not older_than_s >= 0:
            raise ValueError(f"older_than_s must not be negative, not {older_than_s!r}")
        return self._engine.call(
            lambda tools: storage.clean(where, older_than_s=older_than_s, workers=tools.workers), f"clean {where}"
        )

    def _located(self, path: Path, storage: Storage | None) -> tuple[Storage, str]:
        return self._submitter.located(path, storage)

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

    def statistics(self) -> Statistics:
        """Sum up what has become of the saves so far: counts, what was skipped, what has failed, memory."""
        return self._engine.statistics()

    def _prewarm(self, state_dict: StateDict) -> Completion[None]:
        nbytes, devices = stored_bytes(resolve(state_dict, SaveError).tree)
        return self._engine.prewarm(nbytes, devices)


class EngineAccess:
    """The engine of a checkpointer, for adapters to other interfaces."""

    def __init__(self, checkpointer: CheckpointerBase) -> None:
        self._checkpointer = checkpointer

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The checkpointer's transforms."""
        return self._checkpointer._transforms

    def locate(self, path: Path, storage: Storage | None = None) -> tuple[Storage, str]:
        """Return the storage of a path, the checkpointer's own if None, and the path in it."""
        return self._checkpointer._located(path, storage)

    def call(self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str) -> Call[T]:
        """Run a coroutine on the engine's loop; ``what`` names it in messages."""
        return self._checkpointer._engine.call(function, what)
