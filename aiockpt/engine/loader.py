"""Starting loads: everything is checked in the caller's thread, then the engine reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiockpt.core.dataclasses import dataclass, replace
from aiockpt.core.lazy import importing
from aiockpt.engine.requests import LoadRequest
from aiockpt.errors import AiockptError, LoadError
from aiockpt.format.keys import check_patterns
from aiockpt.options import LoadOptions, Path, check_options, check_progress
from aiockpt.reading.apply_live import Filled, Loading
from aiockpt.reading.collective import Gathering
from aiockpt.reading.load import CheckpointLoad
from aiockpt.snapshot.capture import ready_events
from aiockpt.snapshot.live import check_optimizers, resolve

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.engine.engine import Engine
    from aiockpt.engine.requests import OpenRequest
    from aiockpt.format.transforms.base import Transform
    from aiockpt.reading.executor import LoadTools
    from aiockpt.reading.known_items import KnownItems
    from aiockpt.reading.reader import CheckpointReader, SyncCheckpointReader
    from aiockpt.storage.base import Storage
    from aiockpt.storage.registry import Storages
    from aiockpt.telemetry.progress import OnProgress, ReadReport
    from aiockpt.telemetry.verification import VerifyReport

_OPENING = ("verify", "safe_globals", "trust")  # the options of opening


@dataclass(eq=False)
class Loader:
    """Turns the calls of a checkpointer into calls of its engine."""

    _engine: Engine
    _storages: Storages
    _transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()  # of the loads of several ranks
        self._handing_over: set[int] = set()  # threads that are in a load_state_dict of this checkpointer's

    def open(
        self, request: OpenRequest, checkpointer: object, close_owner: Callable[[], Awaitable[None]] | None = None
    ) -> CheckpointReader:
        """Return a reader, which keeps its checkpointer alive; see `aiockpt.AsyncCheckpointer.open`."""
        with importing():
            from aiockpt.reading.reader import CheckpointReader

        return CheckpointReader(self._engine, *self._opening(request), checkpointer, close_owner)

    def open_sync(self, request: OpenRequest, checkpointer: object) -> SyncCheckpointReader:
        """Return a reader, which keeps its checkpointer alive; see `aiockpt.SyncCheckpointer.open`."""
        with importing():
            from aiockpt.reading.reader import SyncCheckpointReader

        return SyncCheckpointReader(self._engine, *self._opening(request), checkpointer)

    def _opening(self, request: OpenRequest) -> tuple[Storage, str, LoadOptions]:
        """Return storage, path and options of a reader."""
        self._engine.origin.check_process()
        storage, where = self._storages.of(request.path, request.storage, request.storage_options)
        options = LoadOptions(verify=request.verify, safe_globals=request.safe_globals, trust=request.trust)
        check_options(options, into=False)
        return storage, where, options

    def load(self, request: LoadRequest) -> Callable[[], Loading]:
        """Check the options of a load; return the function that starts it."""
        self._engine.origin.check_process()
        try:
            request = replace(request, keys=check_patterns(request.keys))
            check_options(request, into=request.state_dict is not None)
            storage, where = self._storages.of(request.path, request.storage, request.storage_options)
        except BaseException as exc:
            gathering = None if self._is_handing_over else self._gathering(request)
            if gathering is not None:
                self._refuse(gathering, exc)
            raise

        def start() -> Loading:
            report = self._engine.reports.read("load", where, request.progress)
            try:
                return self._start_load(request, storage, report)
            except BaseException as exc:
                report.end(exc)
                raise

        return start

    def load_opened(
        self, reader: CheckpointReader | SyncCheckpointReader, state_dict: Any, known: KnownItems
    ) -> Loading:
        """Start the load; see `EngineAccess.load_opened`."""
        opened = reader._opened
        request = LoadRequest(reader.path, state_dict, **{name: getattr(reader._options, name) for name in _OPENING})
        report = self._engine.reports.read("load", reader.path, None)
        try:
            checked = self._checked(request, reader._storage, report, together=False)
            load = replace(checked, opened=opened, known=known)
            call = self._engine.call(load.run, f"load {reader.path}")
        except BaseException as exc:
            report.end(exc)
            raise
        return Loading(call, None, lambda _: None, self._handing_over, report)

    @property
    def _is_handing_over(self) -> bool:
        return threading.get_ident() in self._handing_over

    def _gathering(self, request: LoadRequest) -> Gathering | None:
        """Return this rank's part in a load of all ranks; None if this process loads alone."""
        is_alone = request.state_dict is None and request.share is not True
        coordinator = None if is_alone else self._engine.coordinator()
        if coordinator is None:
            return None
        path = self._storages.printable(request.path, request.storage)
        return Gathering(coordinator, path, request.share, self._turn, self._engine.start_behind)

    def _refuse(self, gathering: Gathering, error: BaseException) -> None:
        """Fail a load on the other ranks, which have called it too."""
        # Ctrl-C interrupts this call only: as KeyboardInterrupt it would end the engine's loop.
        told = error if isinstance(error, Exception) else LoadError(f"{gathering.what} was interrupted: {error!r}")

        async def refused(_: Gathering) -> Filled:
            raise told

        with contextlib.suppress(AiockptError):  # this call raises its own error
            self._engine.call(lambda _: gathering.run(refused), gathering.what, gathering.call)

    def _start_load(self, request: LoadRequest, storage: Storage, report: ReadReport) -> Loading:
        gathering = self._gathering(request)
        if gathering is None:
            alone = self._checked(request, storage, report, together=False)
            call = self._engine.call(partial(self._run_alone, alone, report.path), f"load {os.fspath(request.path)}")
            return Loading(call, request.missing, lambda _: None, self._handing_over, report)
        if self._is_handing_over:
            raise LoadError(
                f"{request.path} can't be loaded within a load_state_dict() that this checkpointer calls: with several "
                "ranks it does one load after the other. Load it before or after, or with another checkpointer"
            )
        try:
            load = self._checked(request, storage, report, together=True)
        except BaseException as exc:
            self._refuse(gathering, exc)
            raise
        call = self._engine.call(lambda tools: gathering.run(partial(load.run, tools)), gathering.what, gathering.call)
        return Loading(call, request.missing, partial(self._conclude, gathering), self._handing_over, report)

    async def _run_alone(self, load: CheckpointLoad, path: str, tools: LoadTools) -> Filled:
        filled = await load.run(tools)
        self._engine.base_memory.restored(path)
        return filled

    def _conclude(self, gathering: Gathering, error: BaseException | None) -> Call[None] | None:
        """Report to the other ranks how the ``load_state_dict`` calls went, if there were any."""
        if not gathering.is_handing_over:
            return None
        return self._engine.call(lambda _: gathering.conclude(error), gathering.what)

    def _checked(self, request: LoadRequest, storage: Storage, report: ReadReport, *, together: bool) -> CheckpointLoad:
        """Check what can be checked of the target."""
        state_dict = request.state_dict
        target = None if state_dict is None else resolve(state_dict, LoadError, self._engine.options.process_group)
        if target is not None and together:
            check_optimizers(target.objects, LoadError)
        ready = {} if target is None else ready_events(target.tree)
        return CheckpointLoad(storage, report.path, request, state_dict, target, ready, report)

    def verify(self, path: Path, storage: Storage | None, progress: OnProgress | None) -> Call[VerifyReport]:
        with importing():
            from aiockpt.reading.verify.verify import verify_checkpoint

        storage, where = self._storages.of(path, storage)
        check_progress(progress)

        async def verify(tools: LoadTools) -> VerifyReport:
            with self._engine.reports.read("verify", where, progress) as report:
                report.result = found = await verify_checkpoint(storage, where, tools.workers, self._transforms, report)
                return found

        return self._engine.call(verify, f"verify {where}")
