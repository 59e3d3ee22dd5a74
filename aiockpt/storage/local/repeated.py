"""Steps of several system calls that may be done again, though an attempt before has done some, or all, of them."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from aiockpt.errors import AiockptError, CheckpointExistsError, CommitError
from aiockpt.storage.local.publish import (
    CommitUncertainError,
    publish,
    remove_replaced,
    remove_rest,
    sync_directory,
    sync_fd,
)
from aiockpt.storage.local.retries import AMBIGUOUS, NotSyncedError, fault_of
from aiockpt.storage.local.temp_names import REPLACED
from aiockpt.storage.syscalls import identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Identity
    from aiockpt.storage.local.publish import Rest
    from aiockpt.storage.local.retries import Repeater

P = ParamSpec("P")
T = TypeVar("T")

# NFS sends a request again when its answer was lost; the server then finds the name given, or the old one gone.
_MAYBE_PUBLISHED = AMBIGUOUS | {errno.EEXIST, errno.ENOENT}


def syncing_once(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that syncs directories among other things, and let the failure of an fsync be known as such.

    Raises:
        BaseException: what the function raises; for an fsync that has failed the fault is a `NotSyncedError`, so that
            nobody tries it again.
    """
    try:
        return function(*args, **kwargs)
    except (OSError, AiockptError) as exc:
        fault = fault_of(exc)
        if fault is None or not _was_fsync(fault):
            raise
        unsynced = NotSyncedError(fault.errno, fault.strerror)
        unsynced.__cause__ = fault
        if fault is exc:
            raise unsynced from exc
        exc.__cause__ = unsynced
        raise


def _was_fsync(fault: OSError) -> bool:
    """Tell whether it was raised by the fsync of a directory."""
    return any(frame.f_code is sync_fd.__code__ for frame, _ in walk_tb(fault.__traceback__))


@dataclass(slots=True)
class Publication:
    """A finished checkpoint on its way to its final name; for the meaning of each see `publish`.

    Attributes:
        rest: what could not be removed after it was published; None for nothing.
    """

    hidden: str
    path: str
    name: str
    overwrite: bool
    fsync: bool
    own: Identity | None
    check: Callable[[], object] = lambda: None
    rest: Rest | None = field(init=False, default=None)
    _goal: Identity | None = field(init=False, default=None)
    _tried: bool = field(init=False, default=False)

    def attempt(self) -> None:
        """Publish it, unless an attempt before has done so, whatever that has answered. Blocks."""
        if self._tried and self.complete():
            return
        if not self._tried:
            self._goal = identity(os.path.join(self.hidden, self.name) if self.name else self.hidden)
        self._tried = True
        self.rest = syncing_once(
            publish,
            self.hidden,
            self.path,
            self.name,
            overwrite=self.overwrite,
            fsync=self.fsync,
            own=self.own,
            check=self.check,
        )

    def complete(self) -> bool:
        """Look whether it has its final name; if so, do what comes behind the rename. Blocks.

        Raises:
            NotTakenBackError: it has, but can't be made durable.
            OSError: it can't be found out.
        """
        if self._goal is None or identity(self.path) != self._goal:
            return False
        try:
            if self.fsync:
                sync_directory(os.path.dirname(self.path))
        except OSError as exc:
            raise CommitUncertainError(f"{self.path} was published but can't be made durable ({exc})") from exc
        aside = self.hidden + REPLACED
        if os.path.lexists(aside):
            self.rest = remove_replaced(self.path, self.hidden, identity(aside))
        self.rest = remove_rest(self.path, self.hidden, identity(self.hidden)) or self.rest
        return True


async def publish_repeatedly(publication: Publication, repeater: Repeater, workers: Workers) -> None:
    """Publish a checkpoint, trying again what may pass.

    On a network file system a rename may have happened though its answer is an error: then it counts as done.

    Raises:
        BaseException: see `publish`.
    """
    try:
        await repeater.run(f"publish {publication.path}", partial(workers.run, publication.attempt))
    except (CommitError, CheckpointExistsError) as exc:
        fault = fault_of(exc)
        if fault is None or isinstance(fault, NotSyncedError) or fault.errno not in _MAYBE_PUBLISHED:
            raise
        try:
            is_published = await workers.run(publication.complete)
        except OSError as worse:
            exc.add_note(f"it can't be found out whether {publication.path} was published all the same: {worse}")
            raise exc from fault
        if not is_published:
            raise
