"""The base of both facades: everything but waiting."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.core.parameters import parameters_of
from aiockpt.engine.engine import Engine
from aiockpt.engine.queue import KEPT
from aiockpt.engine.submit import Submitter, locate, printable_path
from aiockpt.errors import DeleteError, LoadError, SaveError
from aiockpt.format.keys import check_patterns
from aiockpt.format.transforms.base import check_transforms
from aiockpt.options import CheckpointerOptions, LoadOptions, check_options
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.planner import stored_bytes
from aiockpt.reading.apply_live import Loading
from aiockpt.reading.collective import Gathering, conclude, load_together
from aiockpt.reading.load import CheckpointLoad
from aiockpt.reading.verify.verify import verify_checkpoint
from aiockpt.saving.fence import StepGuard, fence_all
from aiockpt.snapshot.capture import ready_events
from aiockpt.snapshot.live import check_optimizers, resolve
from aiockpt.storage.local.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    import torch

    from aiockpt.core.futures import Call, Completion
    from aiockpt.engine.queue import Failures, Statistics
    from aiockpt.engine.requests import LoadRequest, OpenRequest, StateDict
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import Path
    from aiockpt.planning.collective.local import LocalPlanner
    from aiockpt.reading.apply_live import Filled
    from aiockpt.reading.executor import LoadTools
    from aiockpt.reading.verify.report import VerifyReport
    from aiockpt.saving.job import SaveJob
    from aiockpt.storage.base import Storage

T = TypeVar("T")


class CheckpointerBase:
    """A checkpointer without methods that wait."""

    _unclosed: weakref.finalize[Any, Any] | None = None

    @parameters_of(CheckpointerOptions)
    def __init__(self, options: CheckpointerOptions) -> None:
        """Create a checkpointer. Nothing runs before its first use."""
        self._options = options
        self._transforms = check_transforms(options.transforms)
        self._storage = LocalStorage(direct_io=options.direct_io, fsync=options.fsync, retries=options.retries)
        self._failures: Failures = deque(maxlen=KEPT)
        self._engine = Engine(options, self._transforms, self._failures)
        self._submitter = Submitter(self._engine, self._storage, self._transforms)
        self._turn = asyncio.Lock()
        self._handing_over: set[int] = set()
        self._warns_as(f"{type(self).__name__}")

    def _warns_as(self, what: str) -> None:
        """End the engine when this object is garbage, with a warning that names it ``what``."""
        if self._unclosed is not None:
            self._unclosed.detach()
        self._unclosed = weakref.finalize(self, self._engine.close_when_idle, what)
        self._unclosed.atexit = False  # the engine finishes its saves at exit, without a warning

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._engine!r}>"

    def submit_items(
        self,
        items: Sequence[tuple[str, torch.Tensor | bytes]],
        directory: Path,
        planner: LocalPlanner,
        *,
        files: int | None = None,
        separation_hint: Sequence[str] = (),
        transforms: Sequence[Transform] = (),
    ) -> SaveJob:
        """Start to write tensors, and bytes of objects, to files in an existing directory. For adapters.

        The caller makes a checkpoint of the directory. If the save fails, its files are removed. ``planner`` names the
        files and keeps their layout for the next call. ``files`` is the most files to write; None: one for each item.
        Tensors whose names begin with a ``separation_hint`` go to files of their own, named after the hint.
        ``transforms`` are applied to each item, in order.
        """
        form = DcpFormat(files, separation_hint)
        return self._submitter.submit_items(items, directory, planner, form, transforms)

    def _opening(self, request: OpenRequest) -> tuple[Storage, str, LoadOptions]:
        """Return storage, path and options of a reader."""
        storage, where = locate(request.path, request.storage, self._storage)
        options = LoadOptions(verify=request.verify, safe_globals=request.safe_globals, trust=request.trust)
        check_options(options, into=False)
        return storage, where, options

    def _load(self, request: LoadRequest) -> Callable[[], Loading]:
        """Check the options of a load; return the function that starts it."""
        try:
            request = replace(request, keys=check_patterns(request.keys))
            check_options(request, into=request.state_dict is not None)
            storage, where = locate(request.path, request.storage, self._storage)
        except BaseException as exc:
            gathering = None if self._is_handing_over else self._gathering(request)
            if gathering is not None:
                self._refuse(gathering, exc)
            raise
        return lambda: self._start_load(request, storage, where)

    @property
    def _is_handing_over(self) -> bool:
        return threading.get_ident() in self._handing_over

    def _gathering(self, request: LoadRequest) -> Gathering | None:
        """Return this rank's part in a load of all ranks; None if this process loads alone."""
        coordinator = None if request.state_dict is None else self._engine.coordinator()
        return None if coordinator is None else Gathering(coordinator, printable_path(request.path))

    def _refuse(self, gathering: Gathering, error: BaseException) -> None:
        """Fail a load on the other ranks, which have called it too."""

        async def refused(_: Gathering) -> Filled:
            raise error

        self._engine.call(lambda _: load_together(gathering, self._turn, refused), gathering.what)

    def _start_load(self, request: LoadRequest, storage: Storage, where: str) -> Loading:
        gathering = self._gathering(request)
        if gathering is None:
            alone = self._checked(request, storage, where, together=False)
            call = self._engine.call(alone.run, f"load {os.fspath(request.path)}")
            return Loading(call, request.missing, lambda _: None, self._handing_over)
        if self._is_handing_over:
            raise LoadError(
                f"{request.path} can't be loaded within a load_state_dict() that this checkpointer calls: with several "
                "ranks it does one load after the other. Load it before or after, or with another checkpointer"
            )
        try:
            load = self._checked(request, storage, where, together=True)
        except BaseException as exc:
            self._refuse(gathering, exc)
            raise
        call = self._engine.call(
            lambda tools: load_together(gathering, self._turn, partial(load.run, tools)), gathering.what
        )
        return Loading(call, request.missing, partial(self._conclude, gathering), self._handing_over)

    def _conclude(self, gathering: Gathering, error: BaseException | None) -> Call[None] | None:
        """Report to the other ranks how the ``load_state_dict`` calls went, if there were any."""
        if not gathering.is_handing_over:
            return None
        return self._engine.call(lambda _: conclude(gathering, self._turn, error), gathering.what)

    def _checked(self, request: LoadRequest, storage: Storage, where: str, *, together: bool) -> CheckpointLoad:
        """Check what can be checked of the target."""
        state_dict = request.state_dict
        target = None if state_dict is None else resolve(state_dict, LoadError)
        if target is not None and together:
            check_optimizers(target.objects, LoadError)
        ready = {} if target is None else ready_events(target.tree)
        return CheckpointLoad(storage, where, request, state_dict, target, ready)

    def _verify(self, path: Path, storage: Storage | None) -> Call[VerifyReport]:
        storage, where = locate(path, storage, self._storage)
        return self._engine.call(
            lambda tools: verify_checkpoint(storage, where, tools.workers, self._transforms), f"verify {where}"
        )

    def _delete(self, path: Path, storage: Storage | None) -> Call[None]:
        storage, where = locate(path, storage, self._storage)
        if self._engine.queue.is_path_busy(where, overwrite=False):
            raise DeleteError(f"a save to {where} is in flight or hangs; wait for it, or cancel it, then delete it")
        return self._engine.call(lambda tools: storage.delete(where, workers=tools.workers), f"delete {where}")

    def _clean(self, directory: Path, older_than_s: float | None, storage: Storage | None) -> Call[list[str]]:
        storage, where = locate(directory, storage, self._storage)
        if older_than_s is not None and not older_than_s >= 0:
            raise ValueError(f"older_than_s must not be negative, not {older_than_s!r}")
        return self._engine.call(
            lambda tools: storage.clean(where, older_than_s=older_than_s, workers=tools.workers), f"clean {where}"
        )

    def fence(self, timeout: float | None = None) -> None:
        """Make the caller's current accelerator streams wait for the copies of all saves in flight.

        The same as `SaveHandle.fence`, for every save that is not staged yet. Call it before anything that changes
        tensors, such as an update of averaged weights (EMA) or the replay of a CUDA graph that contains an optimizer
        step, in the stream that makes the change. Changes in other streams are not detected after it. Without a save
        in flight it costs nothing.

        Args:
            timeout: seconds to block at most; None: as long as it takes.
        """
        fence_all(self._engine.queue.staging(), timeout)

    def guard(self, optimizer: torch.optim.Optimizer, *, timeout: float = 1800.0) -> StepGuard:
        """Make every ``optimizer.step()`` wait for the copies of saves in flight, so that no snapshot is torn.

        It waits as `SaveHandle.fence` does: for tensors on an accelerator the stream waits, not the program. A step
        never raises an error of a save; that is raised by the save's handle. Steps compiled with ``torch.compile``
        wait too (the guard breaks the graph, so ``fullgraph=True`` is not possible). A CUDA graph that contains a step
        is not guarded: call `fence` before its replay.

        The guard covers the parameters and the state of this optimizer. A change of other tensors before their copies
        are done, such as averaged weights (EMA) or those of another optimizer, still fails the save: guard that
        optimizer too, or call `fence` before the update.

        ::

            with ckpt.guard(optimizer):
                for batch in batches:
                    loss(model(batch)).backward()
                    optimizer.step()                 # waits for copies in flight
                    ckpt.save(state, path)           # SyncCheckpointer: submit

        Args:
            optimizer: the optimizer whose steps wait. A wrapper that forwards steps to its ``optimizer`` stands for
                that one.
            timeout: seconds that a step blocks at most. After that the snapshot is given up: the save fails with
                `TornSnapshotError`, and training goes on.

        Returns:
            The guard, in force until its ``remove()`` or the end of its ``with`` block.
        """
        return StepGuard(optimizer, self._engine.queue.staging, timeout)

    def statistics(self) -> Statistics:
        """Return counts of the saves so far, what was skipped, what failed, and the staging memory."""
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
        return locate(path, storage, self._checkpointer._storage)

    def call(self, function: Callable[[LoadTools], Coroutine[Any, Any, T]], what: str) -> Call[T]:
        """Run a coroutine on the engine's loop; ``what`` names it in messages."""
        return self._checkpointer._engine.call(function, what)
