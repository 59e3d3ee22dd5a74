"""Versions of a run as they appear, for asyncio programs and for others.

The newest version is the complete step with the highest number, as a manager sees it. It is new if it has another save
id than the version before (without a manifest: another stamp); so a rollback to an older step, and a step that was
replaced, are versions as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import anyio
import torch

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.core.dataclasses import KW_ONLY, dataclass, field
from aiockpt.core.parameters import arguments_of
from aiockpt.core.threads import check_asyncio, in_thread
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import CoordinationError
from aiockpt.manager.base import ManagerBase, followed
from aiockpt.manager.scan import DEFAULT_NAMES, StepInfo, StepNames, StepScanner
from aiockpt.options import OpenOptions
from aiockpt.reading.known_items import KnownItems
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.registry import Storages
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.coordination.choose import ProcessGroupLike
    from aiockpt.core.futures import Call
    from aiockpt.engine.requests import StateDict
    from aiockpt.format.transforms.base import Transform
    from aiockpt.manager.retention import Retention
    from aiockpt.options import Path
    from aiockpt.reading.apply_live import Loading
    from aiockpt.reading.reader import CheckpointReader, SyncCheckpointReader

# --- polls ------------------------------------------------------------------------------------------


_MOST_FACTOR = 10  # of the shortest pause
_PAUSE_SHARE = 0.05  # of the time since the last version
_PATIENCE_S = 60.0  # of failed polls

logger = logging.getLogger("aiockpt")


class _Poller:
    """Looks for the newest version of a run; `look` in one thread at a time."""

    def __init__(self, request: WatchRequest) -> None:
        poll_s = request.poll_s
        if isinstance(poll_s, bool) or not isinstance(poll_s, int | float) or not 0 < poll_s < float("inf"):
            raise ValueError(f"poll_s must be a positive number of seconds, not {poll_s!r}")
        where, storage, names = request.run, request.storage, DEFAULT_NAMES
        self.retention: Retention | None = None  # what keeps the steps of a manager of this process
        if isinstance(where, ManagerBase):
            tier, self.retention = followed(where)
            where, storage, names = tier.directory, tier.storage, tier.names
        if request.names is not None:
            names = StepNames(request.names)
        self.storage, self.directory = Storages(storage, LocalStorage(), request.storage_options).of(where)
        self._scanner = StepScanner(self.storage, self.directory, names)
        self._poll_s = poll_s
        self._last: str | None = None  # the identity of the version that was taken last
        self._taken_s = time.monotonic()
        self._failed_s: float | None = None  # since when polls fail

    @property
    def pause_s(self) -> float:
        """The seconds to wait until the next poll: longer ones while nothing happens."""
        idle_s = time.monotonic() - self._taken_s
        return min(max(self._poll_s, _PAUSE_SHARE * idle_s), _MOST_FACTOR * self._poll_s)

    def look(self) -> StepInfo | None:
        """Return the newest version if it is a new one; None if not, or if there is none yet. Blocks.

        Raises:
            OSError: the directory could not be read for a minute.
        """
        try:
            info = self._scanner.latest()
        except OSError as exc:
            now = time.monotonic()
            self._failed_s = now if self._failed_s is None else self._failed_s
            if now - self._failed_s >= _PATIENCE_S or isinstance(exc, NotADirectoryError):
                raise
            logger.warning("can't look for versions in %s, and will try again: %s", self.directory, exc)
            return None
        self._failed_s = None
        return None if info is None or self._identity(info) == self._last else info

    def take(self, info: StepInfo) -> None:
        """Note that a version was opened: it is no new one any more."""
        self._last, self._taken_s = self._identity(info), time.monotonic()

    def is_current(self, info: StepInfo) -> bool:
        """Return whether a step is still the one that was found."""
        known = self._scanner.look(info.step, info.path)
        return known is not None and known.state == "complete" and self._identity(known) == self._identity(info)

    def _identity(self, info: StepInfo) -> str:
        return f"{info.path} {info.save_id or self._scanner.stamp(info.path)}"


# --- watches ------------------------------------------------------------------------------------------


R = TypeVar("R", "CheckpointReader", "SyncCheckpointReader")
T = TypeVar("T")
Bucket = list[tuple[str, torch.Tensor]]
_ROUND_S = 1.0  # between two rounds without news, by which rank 0 and the others see that all live


@dataclass(frozen=True, slots=True)
class WatchRequest(OpenOptions):
    """Arguments of `watch`.

    Attributes:
        run: the run's directory, or a URL; or a manager of it in this process, which then keeps the step in use.
        until: a function that is called after each look that finds no new version: True ends the iteration.
        poll_s: the shortest time between two looks, in seconds. If there is no new version, it grows to ten times.
        names: the names of the steps, as those of a manager.
        transforms: as those of a checkpointer.
        process_group: the ranks that follow together, as those of a checkpointer; each of them iterates. Rank 0 looks,
            and asks its ``until``: all have the same versions, and get the next one when all have come for it. If a
            rank fails, closes its watch, or dies, the others raise. None: this process follows for itself.
        coordination_timeout: seconds that a rank waits for the others, each time.
    """

    run: Path | ManagerBase
    _: KW_ONLY
    until: Callable[[], bool] | None = None
    poll_s: float = 0.2
    names: str | None = None
    transforms: Sequence[Transform] = ()
    process_group: ProcessGroupLike = None
    coordination_timeout: float = 1800.0


@dataclass(eq=False, repr=False)
class _VersionBase(Generic[R]):
    """Base of both kinds of versions."""

    reader: R
    _info: StepInfo
    _watch: _WatchBase[R] = field(repr=False)

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._info.step

    @property
    def path(self) -> str:
        """The path of its checkpoint."""
        return self._info.path

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were saved with it."""
        return self._info.metrics

    @property
    def info(self) -> StepInfo:
        """All that is known of the step without reading tensors."""
        return self._info

    @property
    def age_s(self) -> float:
        """The seconds since it was saved, by the clocks of both machines."""
        return time.time() - self._info.time

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.step} of {self.path}>"

    @contextlib.contextmanager
    def _loading(self, state: StateDict) -> Iterator[tuple[Loading, KnownItems]]:
        """Start to load what a state lacks; in the context it is waited for."""
        watch = self._watch
        if state is not watch.loaded:  # one at a time, as a caller may build a new one for each version
            watch.loaded, watch.known = state, KnownItems()
        known = watch.known
        try:
            yield watch.access.load_opened(self.reader, state, known), known
        except BaseException:
            known.forget()
            raise
        known.settle()

    def _stream(self, nbytes: int, keys: str | Sequence[str] | None) -> Any:
        if keys is None:  # all tensors
            keys = [key for key, info in self.reader.items() if hasattr(info, "chunks")]
        return self.reader.stream(keys, buffer_bytes=nbytes)


class Version(_VersionBase["CheckpointReader"]):
    """A version of a run: a complete checkpoint, open until the loop's body ends.

    Attributes:
        reader: the open checkpoint.
    """

    async def load(self, state_dict: StateDict) -> list[str]:
        """Load into a state, in place, only what has changed since this watch has loaded into it last.

        The result is that of `AsyncCheckpointer.load`, with the same checks. Tensors are left out whose bytes are
        known to be the same: by the hashes of both versions (``hashes=True`` or ``base=`` at the save), if nothing has
        changed the tensor meanwhile. Without hashes everything is read: a CRC of 32 bits is no proof. Objects, and
        the states of live objects whose loading is no plain copy, are read each time. After an error or a
        cancellation, the next load reads everything. Changes that version counters miss (``tensor.data``, NumPy) are
        not seen. With several ranks, each loads for itself.

        Returns:
            The keys that were read.
        """
        check_asyncio("load()", "use watch_sync in a thread")
        with self._loading(state_dict) as (loading, known):
            await loading.wait()
        return known.names

    async def buckets(self, nbytes: int, keys: str | Sequence[str] | None = None) -> AsyncGenerator[Bucket, None]:
        """Yield the tensors in lists of names and tensors of at most so many bytes, or of one tensor.

        Args:
            nbytes: the most bytes of a list; about as many are read ahead.
            keys: names of tensors; None: all tensors.
        """
        bucket = _Filling(nbytes)
        async with contextlib.aclosing(self._stream(nbytes, keys)) as stream:
            async for name, tensor in stream:
                if (full := bucket.add(name, tensor)) is not None:
                    yield full
        if bucket.tensors:
            yield bucket.tensors


class SyncVersion(_VersionBase["SyncCheckpointReader"]):
    """A version of a run, for programs without asyncio; see `Version`.

    Attributes:
        reader: the open checkpoint.
    """

    def load(self, state_dict: StateDict) -> list[str]:
        """Load only what has changed, blocking; see `Version.load`."""
        with self._loading(state_dict) as (loading, known):
            loading.result()
        return known.names

    def buckets(self, nbytes: int, keys: str | Sequence[str] | None = None) -> Iterator[Bucket]:
        """Yield the tensors in lists; see `Version.buckets`."""
        bucket = _Filling(nbytes)
        for name, tensor in self._stream(nbytes, keys):
            if (full := bucket.add(name, tensor)) is not None:
                yield full
        if bucket.tensors:
            yield bucket.tensors


class _Filling:
    """A bucket that is being filled."""

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes
        self._nbytes = 0
        self.tensors: Bucket = []

    def add(self, name: str, tensor: torch.Tensor) -> Bucket | None:
        """Add a tensor; return the bucket before it if that is full."""
        full = None
        if self.tensors and self._nbytes + tensor.nbytes > self._most:
            full, self.tensors, self._nbytes = self.tensors, [], 0
        self.tensors.append((name, tensor))
        self._nbytes += tensor.nbytes
        return full


class _Look(NamedTuple):
    """The result of a look at a run: a new version, or none; and whether the iteration ends."""

    info: StepInfo | None
    is_over: bool


class _WatchBase(ABC, Generic[R]):
    """Base of both watches: its coroutines wait by four methods, which block in a `SyncWatch`."""

    def __init__(self, request: WatchRequest, kind: Callable[..., Any]) -> None:
        if request.until is not None and not callable(request.until):
            raise TypeError(f"until must be a function without arguments, not {request.until!r}")
        self._poller = _Poller(request)
        self._until = request.until
        self.loaded: object = None  # the state that was loaded last; what it holds is compared tensor by tensor
        self.known = KnownItems()
        self._opening = {name: getattr(request, name) for name in ("verify", "safe_globals", "trust")}
        self._checkpointer = kind(
            transforms=request.transforms,
            process_group=request.process_group,
            coordination_timeout=request.coordination_timeout,
        )
        self.access = EngineAccess(self._checkpointer)
        self._what = f"the next version of {self._poller.directory}"  # what ranks agree on
        self._agreed_s = -math.inf
        self._has_begun = False  # to agree
        self._closed = False

    @abstractmethod
    async def _called(self, function: Callable[[], T]) -> T:
        """Call a function that blocks."""

    @abstractmethod
    async def _outcome(self, call: Call[T]) -> T: ...

    @abstractmethod
    async def _sleep(self, seconds: float) -> None: ...

    @abstractmethod
    async def _open(self, reader: R) -> None: ...

    async def _next(self, pinned: ExitStack) -> tuple[R, StepInfo] | None:
        """Return an open reader of the next version; None at the end. ``pinned`` keeps its step."""
        while not (look := await self._looked()).is_over:
            pinned.close()  # all ranks have come: none reads the version before any more
            if look.info is None:
                # Rank 0 makes the others wait.
                await self._sleep(self._poller.pause_s if self.access.leads else 0.0)
                continue
            if self._poller.retention is not None:
                pinned.enter_context(self._poller.retention.reading(look.info.step))
            if (reader := await self._opened(look.info)) is not None:
                self._poller.take(look.info)
                return reader, look.info
        return None

    async def _looked(self) -> _Look:
        """Look, or learn what rank 0 has seen."""
        own: _Look | Exception | None = None
        if self.access.leads:
            try:
                info = await self._called(self._poller.look)
                is_over = info is None and (self._closed or (self._until is not None and bool(self._until())))
                own = _Look(info, is_over)
            except Exception as exc:
                own = exc
            is_due = time.monotonic() - self._agreed_s >= _ROUND_S
            if isinstance(own, _Look) and not (is_due or own.info is not None or own.is_over):
                return own
        try:
            return await self._agree(self._what, own, lambda looks: looks[0])
        except CoordinationError:
            if self._closed:
                return _Look(None, is_over=True)
            raise

    async def _opened(self, info: StepInfo) -> R | None:
        """Open a version; None if it is gone, or was replaced, meanwhile, on any rank."""
        reader: R = self._checkpointer.open(info.path, storage=self._poller.storage, **self._opening)
        error: Exception | None = None
        try:
            try:
                await self._open(reader)
            except Exception as exc:
                error = exc
            is_current = await self._called(lambda: self._poller.is_current(info))
            outcome = error if is_current and error else is_current
            is_open = await self._agree(f"opening {self._what}", outcome, all)
            self._agreed_s = -math.inf  # the next round says that all are done with it
        except BaseException:
            reader._close()
            raise
        if is_open:
            return reader
        reader._close()
        return None

    async def _agree(self, what: str, own: object, decide: Callable[[Sequence[Any]], T]) -> T:
        """Return what rank 0 decides from the values of all ranks; an exception among them is raised on all."""
        if self.access.world_size == 1:
            if isinstance(own, Exception):
                raise own
            return decide([own])
        self._agreed_s, self._has_begun = time.monotonic(), True
        try:
            return await self._outcome(self.access.agree(what, own, decide))
        except BaseException:
            self._leave()  # or the round would outlast a cancellation
            raise

    def _leave(self) -> None:
        """End what waits for other ranks, and have them fail when they wait for this one. Blocks for 2 s at most."""
        self.access.leave_ranks(None if self._has_begun else self._what)
        self._has_begun = True


class Watch(_WatchBase["CheckpointReader"]):
    """The versions of a run as they appear: an asynchronous iterable; see `watch`."""

    async def __aenter__(self) -> Self:
        check_asyncio("watch()", "use watch_sync in a thread")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the iteration, and close what it has open. Idempotent."""
        self._closed = True
        self._leave()
        with anyio.CancelScope(shield=True):
            await self._checkpointer.aclose()

    async def __aiter__(self) -> AsyncIterator[Version]:
        try:
            with ExitStack() as pinned:
                while (found := await self._next(pinned)) is not None:
                    version = Version(*found, self)
                    try:
                        yield version
                    finally:
                        version.reader._close()
        finally:
            await self.aclose()

    async def _called(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(in_thread(function))

    async def _outcome(self, call: Call[T]) -> T:
        return await call.completion

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _open(self, reader: CheckpointReader) -> None:
        await reader


class SyncWatch(_WatchBase["SyncCheckpointReader"]):
    """The versions of a run as they appear: an iterable; see `watch_sync`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration, and close what it has open. Idempotent."""
        self._closed = True
        self._leave()
        self._checkpointer.close()

    def __iter__(self) -> Generator[SyncVersion, None, None]:
        try:
            with ExitStack() as pinned:
                while (found := _blocking(self._next(pinned))) is not None:
                    version = SyncVersion(*found, self)
                    try:
                        yield version
                    finally:
                        version.reader.close()
        finally:
            self.close()

    async def _called(self, function: Callable[[], T]) -> T:
        return function()

    async def _outcome(self, call: Call[T]) -> T:
        return call.completion.result()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - see `_blocking`

    async def _open(self, reader: SyncCheckpointReader) -> None:
        reader.__enter__()


def _blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits by blocking, and so never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a coroutine of a SyncWatch has suspended")


@arguments_of(WatchRequest)
def watch(request: WatchRequest) -> Watch:
    """Follow a run: iterate over its versions as they appear; the newest wins, so a slow reader skips some.

    ::

        async for version in aiockpt.watch("runs/a"):
            changed = await version.load(state)      # in place, only what has changed
            print(version.step, len(changed))

    A version is the complete checkpoint with the highest step; a rollback to an older one, and one that was replaced,
    are versions too. A run that is not there yet is waited for. The iteration ends by ``until``, by `Watch.aclose`,
    or by cancelling; with ``async with aiockpt.watch(...) as versions``, a loop that is left early closes at once.

    On a file system a version can be read to its end although it is deleted meanwhile. In an object store it can't:
    then loading raises, unless the manager that would delete it was passed.

    Raises:
        ValueError: an option is wrong.
    """
    return Watch(request, AsyncCheckpointer)


@arguments_of(WatchRequest)
def watch_sync(request: WatchRequest) -> SyncWatch:
    """Follow a run, blocking: ``for version in aiockpt.watch_sync("runs/a")``; see `watch`."""
    return SyncWatch(request, SyncCheckpointer)
