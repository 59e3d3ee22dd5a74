"""Publish a finished checkpoint: one durable rename to its final name, which is safe to retry.

A checkpoint is written to a hidden directory. `Publication` renames that, or the file in it, to the final name;
`aiockpt.storage.local.beside` moves it into a directory that holds other files. The file that makes it a checkpoint
always comes last, after an fsync of everything else. All functions but `publish_repeatedly` block.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.errors import AiockptError, CheckpointExistsError, CommitError
from aiockpt.format.belonging import is_safetensors
from aiockpt.storage.local.belonging import (
    OtherThingsError,
    Version,
    checkpoint_above,
    kept_beside,
    remove,
    why_not_a_checkpoint,
)
from aiockpt.storage.local.replacing import (
    BetweenError,
    can_exchange,
    explained,
    remove_record,
    replace_in_steps,
    undo_replacement,
)
from aiockpt.storage.local.retries import AMBIGUOUS, NotSyncedError, Repeater, fault_of, sync_fd
from aiockpt.storage.local.temp_dir import REPLACED
from aiockpt.storage.syscalls import (
    Identity,
    UnsupportedError,
    identity,
    link,
    open_directory,
    rename_exchange,
    rename_noreplace,
)

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.local.temp_dir import Hold

_ATTEMPTS = 100

# Errors of a file system that can't sync directories, or not for this user, who then has created nothing there.
_NOT_OURS_TO_SYNC = frozenset({errno.EINVAL, errno.EROFS, errno.EACCES, errno.EPERM})

# NFS sends a request again when its answer was lost; the server then finds the name given, or the old one gone.
_MAYBE_PUBLISHED = AMBIGUOUS | {errno.EEXIST, errno.ENOENT}

_Undo = Literal["rename", "exchange", "steps", "nothing"]

Rest: TypeAlias = tuple[str, tuple[int, int] | None]
"""A hidden directory that is still there, and its identity."""

logger = logging.getLogger("aiockpt")


class NotDurableError(Exception):
    """A checkpoint was published, is not known to be durable, and could not be taken back."""


# --- the path, and the directories above it -----------------------------------------------------------


def check_free(path: str, *, overwrite: bool, keep: bool = False, within: bool = False) -> None:
    """Raise CheckpointExistsError unless a path is free, or holds what may be overwritten.

    ``keep``: safetensors may, beside the files of a model repository, which are kept. ``within``: the path may be in
    the directory of a checkpoint.
    """
    above = None if within else checkpoint_above(path)
    if above is not None:
        raise CheckpointExistsError(
            f"{path} is in the directory of a checkpoint, {above}, which is replaced and deleted as one; save beside it"
        )
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise CheckpointExistsError(
            f"{path} exists already; save under another name, or pass overwrite=True to replace it"
        )
    _check_replaceable(path, keep=keep)


def look_at(path: str, look: Callable[[str], str | None]) -> str | None:
    """Return what ``look`` objects to at a path; None if nothing is there. Look again if it is replaced meanwhile."""
    for _ in range(_ATTEMPTS):
        if not os.path.lexists(path):
            return None
        with contextlib.suppress(FileNotFoundError):  # what had the name is being removed
            before = os.lstat(path)
            found = look(path)
            after = os.lstat(path)  # another one can have the same inode
            if found is None or (os.path.samestat(before, after) and before.st_ctime_ns == after.st_ctime_ns):
                return found
    return "is replaced by others again and again"


def _check_replaceable(path: str, *, keep: bool) -> None:
    found = look_at(path, partial(why_not_a_checkpoint, keep=keep))
    if found is not None:
        raise CheckpointExistsError(
            f"{path} {found}; overwrite=True replaces a checkpoint and nothing else. Move that away, or save under "
            "another name."
        )


def make_directories(path: str, fsync: bool) -> None:
    """Make a directory with its parents, each of these durable in its own parent."""
    make_parents(path, fsync)
    _make_directory(path)


def make_parents(path: str, fsync: bool, settled: set[str] | None = None) -> None:
    """Make the directories above a path, each durable in its own parent.

    ``settled`` holds existing directories that are known to be durable, and is added to.
    """
    missing = []
    path = os.path.dirname(path)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    if fsync and (settled is None or path not in settled):
        _settle(path)
        if settled is not None:
            settled.add(path)
    for directory in reversed(missing):
        _make_directory(directory)
        if fsync:
            sync_directory(os.path.dirname(directory))


def _settle(path: str) -> None:
    """Fsync the parent: the directory may have been created by a process that died before it synced."""
    above = os.path.dirname(path)
    if os.stat(path).st_dev != os.stat(above).st_dev:  # a mount point, which mkdir does not make
        return
    try:
        sync_directory(above)
    except OSError as exc:
        if exc.errno not in _NOT_OURS_TO_SYNC:
            raise


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def sync_directory(path: str) -> None:
    """Make the changes of a directory's entries durable; a failed fsync raises `NotSyncedError`."""
    with open_directory(path, follow=True) as fd:
        sync_fd(fd)


def check_own(path: str, hidden: str, own: Identity | None) -> None:
    """Raise CommitError if another process has removed or replaced the hidden directory of a path."""
    if own is not None and identity(hidden) != own:
        raise CommitError(
            f"{path} can't be published: {hidden} is no longer the directory that it was written to; another process "
            "has removed or replaced it"
        )


# --- one rename ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Publication:
    """A finished checkpoint on its way to its final name. `attempt` is idempotent."""

    hidden: str  # the directory that it was written to; it is gone afterwards
    path: str  # the final name
    name: str  # the file in `hidden` that is the checkpoint; empty if the directory is
    overwrite: bool  # replace a checkpoint that is at `path`
    fsync: bool
    own: Identity | None  # the identity of `hidden`; None if it is not known
    check: Callable[[], object] = lambda: None  # called right before the rename; may raise
    held: Hold | None = None  # the hold of `hidden`, which is given up once it is published
    rest: Rest | None = field(init=False, default=None)  # left behind though published; to be removed later
    _goal: Identity | None = field(init=False, default=None)
    _tried: bool = field(init=False, default=False)
    _kept: dict[str, Version] = field(init=False, default_factory=dict)  # others' files in the directory to replace
    _linked: list[str] = field(init=False, default_factory=list)  # those of them that are in the new one too

    @property
    def _finished(self) -> str:
        return os.path.join(self.hidden, self.name) if self.name else self.hidden

    @property
    def _is_beside(self) -> bool:
        return os.path.dirname(self.hidden) == os.path.dirname(self.path)

    def attempt(self) -> None:
        """Publish it, unless an earlier attempt has done so in spite of its error."""
        if self._tried and self.complete():
            return
        if not self._tried:
            self._goal = identity(self._finished)  # a rename keeps the inode: this finds it under either name
        self._tried = True
        is_open = self.held is not None and self.held.release.alive and not self.name
        self.rest = self.held.renamed_by(self._publish, self.hidden) if self.held and is_open else self._publish()
        if self.held is not None:
            self.held.release()

    def complete(self) -> bool:
        """Return whether it has its final name; if so, do what follows the rename."""
        if self._goal is None or identity(self.path) != self._goal:
            return False
        try:
            if self.fsync:
                sync_directory(os.path.dirname(self.path))
        except OSError as exc:
            raise NotDurableError(f"{self.path} was published but can't be made durable ({exc})") from exc
        aside = self.hidden + REPLACED
        if os.path.lexists(aside):
            self.rest = self._remove_replaced(identity(aside))
        self.rest = self._remove_rest(self.hidden, identity(self.hidden)) or self.rest
        return True

    def _publish(self) -> Rest | None:
        try:
            check_own(self.path, self.hidden, self.own)
            if self.overwrite and not self.name:
                self._keep()
            if self.fsync and not self.name:  # a checkpoint of one file leaves this directory: only its parent counts
                sync_directory(self.hidden)
            # Opened before the rename: after it nothing but the fsync may fail.
            above = open_directory(os.path.dirname(self.path), follow=True)
            with above if self.fsync else contextlib.nullcontext() as parent:
                self.check()
                undo, replaced = self._rename(None if parent is None else partial(sync_fd, parent))
                if parent is not None:
                    self._make_durable(parent, undo)
                    if not self._is_beside:
                        with contextlib.suppress(OSError):  # it is durable under its name; the old one may come back
                            sync_directory(os.path.dirname(self.hidden))
        except AiockptError:
            raise
        except BetweenError as exc:
            raise NotDurableError(
                f"{self.path} is not complete under its name: {exc}. Loading it finds what is in {self.hidden}, and "
                "the next save of another process beside it gives that its name"
            ) from exc.__cause__
        except OSError as exc:
            raise CommitError(f"can't publish {self.path}: {explained(exc, self.path)}") from exc
        # Not before the fsync of the parent: until then a loss of power may bring the old name back.
        rest = self._remove_replaced(replaced) if undo == "steps" else None
        if self.name or undo == "exchange":  # else the hidden directory has become the checkpoint
            return self._remove_rest(self.hidden, self.own if self.name else replaced) or rest
        return rest

    def _keep(self) -> None:
        """Link the files that the directory keeps into the new one; after a kill they are under the path in any case.

        They are compared again after the rename, which is undone if one was changed meanwhile.
        """
        for attempt in range(_ATTEMPTS):
            while self._linked:  # in an attempt before
                remove(os.path.join(self.hidden, self._linked.pop()))
            self._kept = {}
            try:
                self._kept = kept_beside(self.path)
                own = os.listdir(self.hidden) if self._kept else []
                if self._kept and not is_safetensors(own):
                    self._kept = {}
                for name in self._kept.keys() - set(own):  # the others are replaced by files of this save
                    self._take(os.path.join(self.path, name), os.path.join(self.hidden, name))
                    self._linked.append(name)
            except FileNotFoundError:  # what is at the path is being replaced or deleted
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def _take(self, source: str, target: str) -> None:
        """Link a file, or else copy it durably."""
        if not link(source, target):
            shutil.copy2(source, target, follow_symlinks=False)
            with open(target, "rb") as copy:
                if self.fsync:
                    sync_fd(copy.fileno())

    def _rename(self, sync: Callable[[], object] | None) -> tuple[_Undo, Identity | None]:
        """Rename to the final name; return how to undo that, and the identity of what had the name before."""
        finished, path = self._finished, self.path
        new = identity(finished)
        for attempt in range(_ATTEMPTS):
            try:
                rename_noreplace(finished, path)
            except FileExistsError as exc:
                if not self.overwrite:
                    raise CheckpointExistsError(f"{path} has appeared during the save; it was left as it is") from exc
            else:
                return "rename", None
            try:
                checked = identity(path)
                _check_replaceable(path, keep=bool(self._kept))
                if can_exchange(self.hidden) is False:
                    raise UnsupportedError(errno.EINVAL, "the file system has refused an exchange before", path)
                rename_exchange(finished, path)
            except UnsupportedError:
                if os.path.isfile(finished) and os.path.isfile(path):
                    os.replace(finished, path)  # atomic for files; the old one is gone, so it can't be undone
                    return "nothing", None
                if not self._is_beside:  # the record of a replacement names what is beside it
                    raise CheckpointExistsError(f"{path} has appeared during the save; it was left as it is") from None
                objection = partial(_objection_now, checked=checked, kept=self._kept)
                replace_in_steps(finished, self.hidden, path, sync, objection)
                return "steps", identity(self.hidden + REPLACED)
            except FileNotFoundError:  # it has been deleted just now, unless it is done though the answer is an error
                if attempt == _ATTEMPTS - 1 or identity(path) == new:
                    raise
            else:
                # The path may have changed since the check. If another checkpoint had come there, that one is replaced.
                # A relative link leads elsewhere from here: if it is the one that was checked, it is not looked at
                # again.
                found = _objection_now(finished, checked, self._kept)
                if found is None:
                    return "exchange", identity(finished)
                self._give_back()
                raise CheckpointExistsError(f"{path} was changed during the save, and {found}; it was left as it is")
        raise AssertionError("the last attempt returns or raises")

    def _give_back(self) -> None:
        """Undo the exchange with something that took the path after it was checked."""
        try:
            rename_exchange(self._finished, self.path)
        except OSError as exc:
            raise NotDurableError(
                f"{self.path} was published in place of what somebody had just put there, which is in {self._finished} "
                f"now and can't be given its name back ({exc})"
            ) from exc

    def _make_durable(self, parent: int, undo: _Undo) -> None:
        try:
            sync_fd(parent)
        except OSError as exc:
            self._take_back(parent, undo, exc)
            raise

    def _take_back(self, parent: int, undo: _Undo, cause: OSError) -> None:
        hidden, finished, path = self.hidden, self._finished, self.path
        if undo == "nothing":
            self._remove_rest(hidden, None)
            raise NotDurableError(f"{path} was replaced but can't be made durable ({cause})") from cause
        try:
            if undo == "exchange":
                rename_exchange(finished, path)
            elif undo == "steps":
                undo_replacement(finished, hidden, path)
            elif identity(finished) == identity(path):  # both are names of one file, of which a rename would leave both
                os.unlink(path)
            else:
                os.rename(path, finished)
        except OSError as worse:
            raise NotDurableError(
                f"{path} was published but can't be made durable ({cause}), nor be taken back ({worse}); "
                f"{hidden} was left as it is"
            ) from cause
        try:
            sync_fd(parent)
        except OSError as worse:  # after a loss of power it may be there, so it has to stay whole
            raise NotDurableError(
                f"{path} could not be made durable ({cause}) and was taken back, which can't be made durable either "
                f"({worse}); {hidden} was left as it is"
            ) from cause

    def _remove_replaced(self, own: Identity | None) -> Rest | None:
        """Remove what was set aside by a replacement in two steps; return what can't be removed now."""
        try:
            remove_record(self.hidden)
        except OSError as exc:
            logger.warning("%s was published; the record of that can't be removed: %s", self.path, exc)
        return self._remove_rest(self.hidden + REPLACED, own)

    def _remove_rest(self, directory: str, own: Identity | None) -> Rest | None:
        """Remove a hidden directory that is not needed any more; return it if another attempt may succeed."""
        try:
            remove_own(directory, own)
        except OSError as exc:
            logger.warning(
                "%s was published; what it replaced could not be removed from %s: %s", self.path, directory, exc
            )
            return None if isinstance(exc, FileExistsError | OtherThingsError) else (directory, own)
        return None


def _objection_now(replaced: str, checked: Identity | None, kept: Mapping[str, Version]) -> str | None:
    """Return `why_not_a_checkpoint` of what has just been replaced, which may be gone already."""
    if identity(replaced) == checked and os.path.islink(replaced):
        return None
    try:
        if kept and os.path.lexists(replaced) and kept_beside(replaced) != kept:
            return "its other files are not those that were kept"
        return look_at(replaced, partial(why_not_a_checkpoint, keep=bool(kept)))
    except OSError as exc:
        return f"can't be looked at any more ({exc})"


def remove_own(path: str, own: Identity | None, also: Collection[str] = ()) -> None:
    """Remove a hidden directory if it still has this identity; None: any."""
    found = identity(path)
    if own is not None and found not in (None, own):
        raise FileExistsError(errno.EEXIST, "another process has put another directory in its place", path)
    remove(path, also=also)


async def publish_repeatedly(publication: Publication, repeater: Repeater, workers: Workers) -> None:
    """Publish a checkpoint, and retry transient errors; raise what `Publication.attempt` raises.

    On a network file system a rename may have happened though its answer is an error: then it counts as done.
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
