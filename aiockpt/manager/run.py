"""The directory of a run as all ranks see it: its steps, its lock, and the rounds in which rank 0 decides for all.

Its tiers are the directory itself, which may be on the own disks of several hosts, and the mirror that gets its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.checkpointer import AsyncCheckpointer
from aiockpt.core.lazy import importing
from aiockpt.core.parameters import outer_stacklevel
from aiockpt.core.threads import has_loop, in_thread
from aiockpt.errors import AiockptError, CheckpointerClosedError, CheckpointNotFoundError, DeleteError
from aiockpt.manager.requests import Mirror, check_step
from aiockpt.manager.scan import StepNames
from aiockpt.manager.tiers import Tier
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from aiockpt.engine.facade import EngineAccess
    from aiockpt.manager.disks import RunDisks
    from aiockpt.manager.mirror import MirrorCopier
    from aiockpt.manager.policies import KeepPolicy
    from aiockpt.manager.requests import ManagerOptions
    from aiockpt.manager.retention import Retention
    from aiockpt.storage.base import RunLease, Storage

T = TypeVar("T")

logger = logging.getLogger("aiockpt")

_WRITER_S = 60.0  # for the writer process of a killed trainer to finish
_WRITER_POLL_S = 0.05


class Tiers:
    """The tiers of a run. A run without a mirror, or without disks of hosts, does not import their code.

    Attributes:
        run: the run's directory.
        disks: the disks of the hosts, if each has its own.
        mirror: the directory of the mirror, on all ranks; None: there is none.
        options: the settings of the mirror.
        copier: what copies to the mirror, on the rank that does; None until it begins.
    """

    def __init__(self, options: ManagerOptions, access: EngineAccess) -> None:
        storage, directory = access.locate(options.directory)
        names = StepNames(options.names)
        self.disks: RunDisks | None = None
        if options.own_disks:
            with importing():
                from aiockpt.manager.disks import RunDisks

            self.disks = RunDisks(storage, directory, names, access)
            storage = self.disks.storage
        self.run = Tier(storage, directory, names)
        mirror = options.mirror
        self.options = Mirror(mirror) if mirror is not None and not isinstance(mirror, Mirror) else mirror
        self.mirror = None if self.options is None else self._located(self.options, access)
        self.copier: MirrorCopier | None = None

    def _located(self, mirror: Mirror, access: EngineAccess) -> Tier:
        with importing():
            from aiockpt.manager import mirror as _  # noqa: F401 - for what copies, in the caller's thread
        storage, directory = access.locate_by_path(mirror.directory)
        run = self.run.directory
        if f"{directory}/".startswith(f"{run}/") or f"{run}/".startswith(f"{directory}/"):
            raise ValueError(f"mirror is {directory}, and the run {run}: one must not be in the other")
        return Tier(storage, directory, self.run.names)

    def storage_at(self, *, is_mirror: bool) -> Storage:
        """Return the storage of the run's directory, or of its mirror."""
        tier = self.mirror if is_mirror else self.run
        if tier is None:
            raise RuntimeError("there is no mirror")
        return tier.storage

    def begin_to_copy(
        self, keep: KeepPolicy | None, retention: Retention, access: EngineAccess, *, locks: bool
    ) -> None:
        """Copy from now on what the mirror lacks, which an earlier manager may have left. Idempotent."""
        if self.copier is not None or self.mirror is None or self.options is None:
            return
        from aiockpt.manager.mirror import MirrorCopier  # imported already, since there is a mirror

        self.copier = MirrorCopier(
            self.run, self.mirror, self.options, access.reports, keep=keep, retention=retention, locks=locks
        )
        retention.attach(self.copier)
        self.copier.poke()

    def discard(self, after: int, retention: Retention) -> None:
        """Delete the steps after one, first from the mirror: else a restart would take them from there. Blocks."""
        with contextlib.ExitStack() as stack:
            if self.copier is not None:
                stack.callback(self.copier.resume)
                try:
                    self.copier.discard(after)
                except AiockptError as exc:
                    raise DeleteError(f"step {after} was restored, but the mirror has later ones: {exc}") from exc
            retention.discard(after)


class RunDirectory:
    """The directory of a run. Its coroutines suspend in an async manager, and block in a blocking one.

    Attributes:
        writes: whether its manager writes to it.
        locks: whether it has one writer.
        id: the run's, as its steps have it; empty until the first save of a new run.
    """

    def __init__(
        self,
        options: ManagerOptions,
        tiers: Tiers,
        access: EngineAccess,
        checkpointer: AsyncCheckpointer | SyncCheckpointer,
        *,
        writes: bool,
    ) -> None:
        self.tiers, self.access, self.checkpointer = tiers, access, checkpointer
        self.directory, self.scanner = tiers.run.directory, tiers.run.scanner
        self.writes = writes
        self.locks = self.writes and options.lock
        self.id = ""
        self.is_open = self.is_closed = False
        self._must_exist = not (self.writes or options.missing_ok)
        self._suspends = isinstance(checkpointer, AsyncCheckpointer)
        self._has_warned = False  # that it blocks a loop
        self._lease: RunLease | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides, or there are no other ranks."""
        return self.access.leads

    def path_of(self, step: int) -> str:
        """Return the path of a step's directory, whether it exists or not."""
        return self.tiers.run.path_of(check_step(step))

    # --- waiting, and rounds of all ranks -------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that blocks. A task that is cancelled leaves it behind, in its thread."""
        return await asyncio.wrap_future(in_thread(function, *args)) if self._suspends else function(*args)

    async def waited(self, call: Awaitable[T] | T) -> T:
        """Return the result of a method of the checkpointer: one of asyncio is awaited, another has blocked already."""
        return await call if isinstance(call, Awaitable) else call

    async def inspect(self, path: str, storage: Storage) -> Mapping[str, Any]:
        """Open a checkpoint, which checks its structure and the sizes of its files; return the info of each key."""
        if isinstance(self.checkpointer, SyncCheckpointer):
            with self.checkpointer.open(path, storage=storage) as reader:
                return dict(reader)
        async with self.checkpointer.open(path, storage=storage) as opened:
            return dict(opened)

    async def agree(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> T:
        """Agree with the other ranks; see `EngineAccess.agree`."""
        call = self.access.agree(what, value, decide)
        return await call.wait() if self._suspends else call.result()

    def agree_now(self, what: str, value: object, decide: Callable[[Sequence[Any]], T]) -> T:
        """Do as `agree`, blocking."""
        return self.access.agree(what, value, decide).result()

    async def led(self, what: str, work: Callable[[], Awaitable[T]], *, on_each_host: bool = False) -> T:
        """Do something on rank 0 alone; its result, or its error, is that of all ranks.

        ``on_each_host``: hosts with disks of their own do it too, each on its own; an error of one is that of all.
        """
        if self.access.world_size == 1:
            return await work()
        value: T | BaseException | None = None
        error: BaseException | None = None
        disks = self.tiers.disks
        if self.leads or (on_each_host and disks is not None and disks.serves):
            try:
                value = await work()
            except BaseException as exc:  # raised below, once the other ranks have been notified
                error = exc
                value = exc if isinstance(exc, Exception) else AiockptError(f"{what} was interrupted: {exc!r}")
        try:
            result: T = await self.agree(what, value, of_rank_0)
        except AiockptError:
            # The error itself: what the other ranks get is made of its class name and text, and lacks its attributes.
            if error is not None:
                raise error from None
            raise
        return result

    async def settle_disks(self) -> None:
        """Wait until all hosts have renamed and deleted what rank 0 has decided on; an error of one is that of all."""
        disks = self.tiers.disks
        if disks is None:
            return
        what = f"the changes of {self.directory}"
        changes = await self.agree(what, disks.storage.decided(), of_rank_0)
        for part in (changes, ()):  # on the disks that come first, and then on the others
            await self.led(what, partial(self.call, disks.storage.change, part), on_each_host=True)

    # --- the lock -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the run's lock at the first use, unless the manager only reads."""
        if self.is_closed:
            raise CheckpointerClosedError(f"this manager of {self.directory} is closed; make a new one")
        if self.is_open:
            return
        disks = self.tiers.disks
        if disks is not None:
            await self.call(partial(disks.meet, make=self.writes))
        if self.writes:
            await self.led(f"the lock of {self.directory}", self._take_lock, on_each_host=True)
        if self.writes and disks is not None:
            left = f"what is left in {self.directory}"
            if await self.led(left, partial(self._delete_torn, disks)):
                with contextlib.suppress(DeleteError):  # it is logged, and costs space, no more
                    await self.settle_disks()
        self.is_open = True

    async def _take_lock(self) -> None:
        if self.locks and self._lease is None:  # else it was taken, and what follows was interrupted
            try:
                await self.call(self._lock)
            except AiockptError:  # such as RunLockedError, which is an OSError too
                raise
            except OSError as exc:
                raise AiockptError(
                    f"the run {self.directory} can't be locked: {exc}; to only read it, pass read_only=True"
                ) from exc
        try:
            await self.waited(self.checkpointer.clean(self.directory, storage=self.tiers.run.storage))
        except AiockptError as exc:  # orphans cost space, no more
            logger.warning("can't look for what killed processes have left in %s: %s", self.directory, exc)
        with contextlib.suppress(OSError):  # a restore raises it
            latest = await self.call(self.scanner.latest) if self.leads else None
            self.id = self.id or (latest.run_id if latest is not None else "")
        deadline = time.monotonic() + _WRITER_S
        while await self.call(self._is_finishing):  # else its step would appear after the restore
            if time.monotonic() > deadline:
                logger.warning("a writer process of a killed trainer still writes to %s", self.directory)
                break
            await self.call(time.sleep, _WRITER_POLL_S)

    async def _delete_torn(self, disks: RunDisks) -> bool:
        """Delete what was published, or deleted, on some disks only; return whether there was something."""
        try:
            torn = await self.call(disks.delete_torn)
        except (OSError, AiockptError) as exc:  # it costs space, no more
            logger.warning("can't look for what killed processes have left on all disks: %s", exc)
            return False
        if torn:
            logger.info("%s: not all hosts have published these, or had deleted them", ", ".join(torn))
        return bool(torn)

    def _lock(self) -> None:
        self._lease = self.tiers.run.storage.lease(self.directory)
        if self.is_closed:  # meanwhile, as the task that asked for it was cancelled
            self.unlock()

    def _is_finishing(self) -> bool:
        try:
            return self.tiers.run.storage.is_finishing(self.directory)
        except OSError as exc:
            raise AiockptError(f"the run {self.directory} can't be looked at: {exc}") from exc

    async def check_lock(self) -> None:
        """Raise an error if the lock of this run was removed, or taken by another manager."""
        if self._lease is not None:
            await self.call(self._lease.check)

    def unlock(self) -> None:
        """Release the lock, so that others may write to the run. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    # --- its steps ------------------------------------------------------------------------------------------

    def seen(self, look: Callable[[], T]) -> T:
        """Return what rank 0 sees in the run's directory. Blocks."""
        if self._suspends and "://" in self.directory and has_loop() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"this blocks the event loop until the store of {self.directory} has answered: await alatest(), "
                "asteps(), ainfos() or abest() of the manager instead",
                stacklevel=outer_stacklevel(),
            )
        disks = self.tiers.disks
        if disks is not None:
            disks.meet(make=self.writes)
        if self.access.world_size == 1:
            return self._existing(look)
        value: object = None
        if self.leads:
            try:
                value = self._existing(look), [] if disks is None else disks.storage.decided()
            except OSError as exc:
                value = exc
        result: T
        result, due = self.agree_now(f"the steps of {self.directory}", value, of_rank_0)
        if disks is not None:
            disks.storage.accept(due)
        return result

    def _existing(self, look: Callable[[], T]) -> T:
        result = look()
        if not result and self.tiers.mirror is None:  # else a restore looks there as well
            self.check_exists(self.tiers.run)
        return result

    def check_exists(self, *tiers: Tier) -> None:
        """Raise CheckpointNotFoundError if none of these directories is there, and this manager can't make them."""
        for tier in tiers if self._must_exist else ():
            with contextlib.suppress(FileNotFoundError), tier.storage.look(tier.directory):
                return
        if self._must_exist:
            raise CheckpointNotFoundError(
                f"there is no run at {' or '.join(tier.directory for tier in tiers)}: check the path, or pass "
                "missing_ok=True to read a run that may not have begun"
            )


def of_rank_0(values: Sequence[Any]) -> Any:
    """Return the value of rank 0, for `EngineAccess.agree`."""
    return values[0]
