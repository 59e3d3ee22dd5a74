"""Versions of a run as they appear, for asyncio programs and for others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import anyio
import torch

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.futures import Call
from aiockpt.core.parameters import arguments_of
from aiockpt.core.threads import check_asyncio, in_thread
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import CoordinationError
from aiockpt.following.polling import Poller
from aiockpt.manager.base import ManagerBase, followed
from aiockpt.manager.scan import DEFAULT_NAMES, StepInfo, StepNames
from aiockpt.options import OpenOptions
from aiockpt.reading.known_items import KnownItems
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.coordination.choose import ProcessGroupLike
    from aiockpt.engine.requests import StateDict
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import Path
    from aiockpt.reading.apply_live import Loading
    from aiockpt.reading.reader import CheckpointReader, SyncCheckpointReader

# --- what all ranks agree on --------------------------------------------------------------------------


_ROUND_S = 1.0  # between two rounds without news, by which rank 0 and the others see that all live


class Look(NamedTuple):
    """The result of a look at a run: a new version, or none; and whether the iteration ends."""

    info: StepInfo | None
    is_over: bool


class Agreement:
    """The rounds of all ranks. A process that follows for itself has none, and its own results count."""

    def __init__(self, access: EngineAccess, what: str) -> None:
        self._access = access
        self._what = what
        self._last_s = -math.inf
        self._has_begun = False

    @property
    def leads(self) -> bool:
        """Whether this process looks at the run: it is rank 0, or follows for itself."""
        return self._access.leads

    def look(self, own: Look | Exception | None) -> Call[Look] | Look:
        """Return the round in which all ranks learn what rank 0 has seen, or its own look if that is no news.

        ``own``: of rank 0; None on the others.
        """
        is_due = time.monotonic() - self._last_s >= _ROUND_S
        if isinstance(own, Look) and (self._is_alone or not (is_due or own.info is not None or own.is_over)):
            return own
        if isinstance(own, Exception) and self._is_alone:
            raise own
        self._last_s, self._has_begun = time.monotonic(), True
        return self._access.agree(self._what, own, lambda looks: looks[0])

    def opened(self, outcome: bool | Exception) -> Call[bool] | bool:
        """Return the round in which all ranks learn whether each has opened the version; an error is raised on all."""
        self._last_s = -math.inf  # the next round says that all are done with it
        if not self._is_alone:
            return self._access.agree(f"opening {self._what}", outcome, all)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def leave(self) -> None:
        """End what waits for other ranks, and have them fail when they wait for this one. Blocks for 2 s at most."""
        self._access.leave_ranks(None if self._has_begun else self._what)
        self._has_begun = True

    @property
    def _is_alone(self) -> bool:
        return self._access.world_size == 1


# --- watches ------------------------------------------------------------------------------------------


R = TypeVar("R", "CheckpointReader", "SyncCheckpointReader")
T = TypeVar("T")
Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(OpenOptions):
    """Options of following a run.

    Attributes:
        until: a function that is called after each look that finds no new version: True ends the iteration.
        poll_s: the shortest time between two looks, in seconds. If there is no new version, it grows to ten times.
        names: the names of the steps, as those of a manager.
        transforms: as those of a checkpointer.
        process_group: the ranks that follow together, as those of a checkpointer; each of them iterates. Rank 0 looks,
            and asks its ``until``: all have the same versions, and get the next one when all have come for it. If a
            rank fails, closes its watch, or dies, the others raise. None: this process follows for itself.
        coordination_timeout: seconds that a rank waits for the others, each time.
    """

    until: Callable[[], bool] | None = None
    poll_s: float = 0.2
    names: str | None = None
    transforms: Sequence[Transform] = ()
    process_group: ProcessGroupLike = None
    coordination_timeout: float = 1800.0


@dataclass(frozen=True, slots=True)
class WatchRequest(WatchOptions):
    """Arguments of `watch`.

    Attributes:
        run: the run's directory, or a URL; or a manager of it in this process, which then keeps the step in use.
    """

    run: Path | ManagerBase


@dataclass(eq=False, repr=False)
class _VersionBase(Generic[R]):
    """Base of both kinds of versions."""

    reader: R
    _info: StepInfo
    _known: dict[int, tuple[Any, KnownItems]] = field(repr=False)
    _access: EngineAccess = field(repr=False)

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

    def _start(self, state: StateDict) -> tuple[Loading, KnownItems]:
        # The state stays referenced, so that no other one has its id. What it holds is compared tensor by tensor.
        if id(state) not in self._known:
            self._known.clear()  # one state at a time: a caller may build a new one for each version
        known = self._known.setdefault(id(state), (state, KnownItems()))[1]
        return self._access.load_opened(self.reader, state, known), known

    def _tensors(self) -> list[str]:
        return [key for key, info in self.reader.items() if hasattr(info, "chunks")]


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
        loading, known = self._start(state_dict)
        try:
            await loading.wait()
        except BaseException:
            known.forget()
            raise
        known.settle()
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

    def _stream(self, nbytes: int, keys: str | Sequence[str] | None) -> Any:
        return self.reader.stream(self._tensors() if keys is None else keys, buffer_bytes=nbytes)


class SyncVersion(_VersionBase["SyncCheckpointReader"]):
    """A version of a run, for programs without asyncio; see `Version`.

    Attributes:
        reader: the open checkpoint.
    """

    def load(self, state_dict: StateDict) -> list[str]:
        """Load only what has changed, blocking; see `Version.load`."""
        loading, known = self._start(state_dict)
        try:
            loading.result()
        except BaseException:
            known.forget()
            raise
        known.settle()
        return known.names

    def buckets(self, nbytes: int, keys: str | Sequence[str] | None = None) -> Iterator[Bucket]:
        """Yield the tensors in lists; see `Version.buckets`."""
        bucket = _Filling(nbytes)
        names = self._tensors() if keys is None else keys
        for name, tensor in self.reader.stream(names, buffer_bytes=nbytes):
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


class _WatchBase:
    """Base of both watches."""

    def __init__(self, request: WatchRequest, kind: Callable[..., Any]) -> None:
        if request.until is not None and not callable(request.until):
            raise TypeError(f"until must be a function without arguments, not {request.until!r}")
        where, storage, names, self._retention = request.run, request.storage, DEFAULT_NAMES, None
        if isinstance(where, ManagerBase):
            tier, self._retention = followed(where)
            where, storage, names = tier.directory, tier.storage, tier.names
        if request.names is not None:
            names = StepNames(request.names)
        self._poller = Poller(where, storage, request.storage_options, names, request.poll_s)
        self._until = request.until
        self._known: dict[int, tuple[Any, KnownItems]] = {}
        self._opening = {name: getattr(request, name) for name in ("verify", "safe_globals", "trust")}
        self._checkpointer = kind(
            transforms=request.transforms,
            process_group=request.process_group,
            coordination_timeout=request.coordination_timeout,
        )
        self._access = EngineAccess(self._checkpointer)
        self._agreement = Agreement(self._access, f"the next version of {self._poller.directory}")
        self._closed = False

    def _is_over(self) -> bool:
        return self._closed or (self._until is not None and bool(self._until()))

    def _pin(self, info: StepInfo, pinned: ExitStack) -> None:
        if self._retention is not None:
            pinned.enter_context(self._retention.reading(info.step))

    def _pause_s(self) -> float:
        return self._poller.pause_s if self._agreement.leads else 0.0  # rank 0 makes the others wait

    def _version_parts(self, info: StepInfo) -> tuple[StepInfo, dict[int, tuple[Any, KnownItems]], EngineAccess]:
        self._poller.take(info)
        return info, self._known, self._access


class Watch(_WatchBase):
    """The versions of a run as they appear: an asynchronous iterable; see `watch`."""

    _checkpointer: AsyncCheckpointer

    async def __aenter__(self) -> Self:
        check_asyncio("watch()", "use watch_sync in a thread")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the iteration, and close what it has open. Idempotent."""
        self._closed = True
        self._agreement.leave()
        with anyio.CancelScope(shield=True):
            await self._checkpointer.aclose()

    async def __aiter__(self) -> AsyncIterator[Version]:
        try:
            with ExitStack() as pinned:
                while not (look := await self._looked()).is_over:
                    pinned.close()  # all ranks have come: none reads the version before any more
                    if look.info is None:
                        await asyncio.sleep(self._pause_s())
                        continue
                    self._pin(look.info, pinned)
                    version = await self._opened(look.info)
                    if version is not None:
                        try:
                            yield version
                        finally:
                            version.reader._close()
        finally:
            await self.aclose()

    async def _looked(self) -> Look:
        """Look, or learn what rank 0 has seen."""
        own: Look | Exception | None = None
        if self._agreement.leads:
            try:
                info = await asyncio.wrap_future(in_thread(self._poller.look))
                own = Look(info, info is None and self._is_over())
            except Exception as exc:
                own = exc
        try:
            return await self._reply(self._agreement.look(own))
        except CoordinationError:
            if self._closed:
                return Look(None, is_over=True)
            raise

    async def _reply(self, call: Call[T] | T) -> T:
        if not isinstance(call, Call):
            return call
        try:
            return await call.completion
        except BaseException:
            self._agreement.leave()  # or the round would outlast a cancellation
            raise

    async def _opened(self, info: StepInfo) -> Version | None:
        """Open a version; None if it is gone, or was replaced, meanwhile, on any rank."""
        reader, error = self._checkpointer.open(info.path, storage=self._poller.storage, **self._opening), None
        try:
            try:
                await reader
            except Exception as exc:
                error = exc
            is_current = await asyncio.wrap_future(in_thread(self._poller.is_current, info))
            is_open = await self._reply(self._agreement.opened(error if is_current and error else is_current))
        except BaseException:
            reader._close()
            raise
        if is_open:
            return Version(reader, *self._version_parts(info))
        reader._close()
        return None


class SyncWatch(_WatchBase):
    """The versions of a run as they appear: an iterable; see `watch_sync`."""

    _checkpointer: SyncCheckpointer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration, and close what it has open. Idempotent."""
        self._closed = True
        self._agreement.leave()
        self._checkpointer.close()

    def __iter__(self) -> Generator[SyncVersion, None, None]:
        try:
            with ExitStack() as pinned:
                while not (look := self._looked()).is_over:
                    pinned.close()
                    if look.info is None:
                        time.sleep(self._pause_s())
                        continue
                    self._pin(look.info, pinned)
                    version = self._opened(look.info)
                    if version is not None:
                        try:
                            yield version
                        finally:
                            version.reader.close()
        finally:
            self.close()

    def _looked(self) -> Look:
        """Look, or learn what rank 0 has seen."""
        own: Look | Exception | None = None
        if self._agreement.leads:
            try:
                info = self._poller.look()
                own = Look(info, info is None and self._is_over())
            except Exception as exc:
                own = exc
        try:
            return self._reply(self._agreement.look(own))
        except CoordinationError:
            if self._closed:
                return Look(None, is_over=True)
            raise

    def _reply(self, call: Call[T] | T) -> T:
        if not isinstance(call, Call):
            return call
        try:
            return call.completion.result()
        except BaseException:
            self._agreement.leave()
            raise

    def _opened(self, info: StepInfo) -> SyncVersion | None:
        """Open a version; None if it is gone, or was replaced, meanwhile, on any rank."""
        reader, error = self._checkpointer.open(info.path, storage=self._poller.storage, **self._opening), None
        try:
            try:
                reader.__enter__()
            except Exception as exc:
                error = exc
            is_current = self._poller.is_current(info)
            is_open = self._reply(self._agreement.opened(error if is_current and error else is_current))
        except BaseException:
            reader.close()
            raise
        if is_open:
            return SyncVersion(reader, *self._version_parts(info))
        reader.close()
        return None


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
