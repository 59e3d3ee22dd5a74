"""Every error that aiockpt raises on purpose.

::

    AiockptError
    ├── SaveError                      a save failed or was refused
    │   ├── StageError                 copying tensors failed
    │   ├── WriteError                 writing files failed
    │   ├── CommitError                publishing the finished checkpoint failed
    │   │   └── CommitUncertainError   or it has not, but no answer came: everything is kept
    │   ├── TornSnapshotError          a tensor changed while it was being copied
    │   ├── SaveTimeoutError           (TimeoutError) the save took longer than ``save_timeout``
    │   ├── SaveSkippedError           the save was skipped, or superseded by a later one
    │   └── SaveCancelledError         the save was cancelled, or the drain timeout passed
    ├── LoadError                      a load failed or was refused
    │   ├── CheckpointNotFoundError    (FileNotFoundError) no checkpoint at this path
    │   ├── CorruptCheckpointError     bytes are missing or are not those that were written
    │   ├── MissingHostError           files are on the disk of a host that is not in this job
    │   ├── MissingKeysError           (KeyError, RuntimeError) the checkpoint lacks keys that were asked for
    │   ├── ShapeMismatchError         a target's shape, dtype or kind is not the checkpoint's
    │   └── UnsafeCheckpointError      reading it would execute code or leave its directory
    ├── CheckpointExistsError          (FileExistsError) the path is taken
    ├── DeleteError                    a checkpoint could not be deleted, or deleting it was refused
    ├── CheckpointerBusyError          earlier saves are in flight, and ``on_busy`` is "error"
    ├── CheckpointerClosedError        the checkpointer was used after it was closed
    ├── RunLockedError                 (BlockingIOError) another manager writes to the run's directory
    ├── CoordinationError              ranks could not agree
    └── NoThreadError                  (RuntimeError) the system has no further thread

    MissingKeysWarning                 (UserWarning) ``strict=False`` has let a load go on without some keys
    SafeGlobalsWarning                 (UserWarning) a saved object needs ``safe_globals`` to be loaded
    DequantizedWarning                 (UserWarning) encoded tensors are saved as plain values
    DamagedCheckpointWarning           (UserWarning) a run went back to an older step, as newer ones are damaged

A message says what happened, where (path, key, file, offset) and what to do about it; the underlying
exception is chained as ``__cause__``.
"""

from __future__ import annotations

_MOST_LETTERS = 2000
_LAST_LETTERS = 400
_NAME_LETTERS = 300


class AiockptError(Exception):
    """Base of every error that aiockpt raises on purpose."""


class SaveError(AiockptError):
    """A save failed or was refused; nothing was published."""


class StageError(SaveError):
    """Copying tensors into staging memory failed."""


class WriteError(SaveError):
    """Writing the checkpoint's files failed."""


class CommitError(SaveError):
    """The files are written, but the checkpoint could not be published."""


class CommitUncertainError(CommitError):
    """It can't be found out whether the checkpoint was published, so all of it is kept. Look at the path later."""


class TornSnapshotError(SaveError):
    """A tensor changed between ``save()`` and ``staged``, so the snapshot may mix two states."""


class SaveCancelledError(SaveError):
    """The save was cancelled before it was committed; nothing of it is left."""


class SaveTimeoutError(SaveError, TimeoutError):
    """The save took longer than ``save_timeout`` and was given up."""


class SaveSkippedError(SaveError):
    """The save was skipped because others were in flight, or superseded by a later one; see ``on_busy``."""


class LoadError(AiockptError):
    """A load failed or was refused.

    Attributes:
        placed: keys of the target whose tensors were filled when it failed.
        partly_placed: keys of the target whose tensors were filled in part, or with damaged bytes.
    """

    placed: tuple[str, ...] = ()
    partly_placed: tuple[str, ...] = ()
    _state: str = ""  # of the target, in words; of several ranks, each has its own

    def __str__(self) -> str:
        return printable(super().__str__() + self._state)  # it may contain names from an untrusted checkpoint


class CheckpointNotFoundError(LoadError, FileNotFoundError):
    """There is no checkpoint at this path."""


class CorruptCheckpointError(LoadError):
    """Bytes of the checkpoint are missing, or are not those that were written."""


class MissingHostError(LoadError):
    """Files of the checkpoint are on the own disk of a host that is not in this job."""


class MissingKeysError(LoadError, KeyError, RuntimeError):
    """The checkpoint does not hold every key that was asked for. Also the RuntimeError that torch's loaders raise.

    Attributes:
        keys: the missing keys, in the order of the target.
    """

    def __init__(self, message: str, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would hide the sentence.
        return printable(str(self.args[0]) + self._state)


class MissingKeysWarning(UserWarning):
    """A load with ``strict=False`` went on without keys that were asked for.

    Attributes:
        keys: the keys that the checkpoint lacks, in the order of the target.
        unexpected: the keys of the checkpoint that modules did not expect.
    """

    def __init__(self, message: str, keys: tuple[str, ...] = (), unexpected: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys
        self.unexpected = unexpected

    def __str__(self) -> str:
        return printable(super().__str__())


class SafeGlobalsWarning(UserWarning):
    """A saved state has objects that can only be loaded with ``safe_globals`` or ``trust``.

    Attributes:
        names: the full names of the classes and functions that ``safe_globals`` has to list.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names

    def __str__(self) -> str:
        return printable(super().__str__())


class DequantizedWarning(UserWarning):
    """A saved state has tensors of a class with an encoding of its own, which are saved as plain values."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ShapeMismatchError(LoadError):
    """A target's shape, dtype or kind differs from what the checkpoint holds; nothing was written."""


class UnsafeCheckpointError(LoadError):
    """Reading this checkpoint would run code from it, or leave its directory."""


class CheckpointExistsError(AiockptError, FileExistsError):
    """The path is taken, and ``overwrite`` was not given or is not safe."""


class DeleteError(AiockptError):
    """A path could not be deleted, is no checkpoint, or is being saved."""


class CheckpointerBusyError(AiockptError):
    """Earlier saves are in flight, and ``on_busy`` is "error"."""


class CheckpointerClosedError(AiockptError):
    """The checkpointer was closed; make a new one."""


class RunLockedError(AiockptError, BlockingIOError):
    """Another manager writes to the run's directory, or may still do so.

    Attributes:
        host: the name of its host; empty if it is not known.
        pid: the number of its process there; 0 if it is not known.
        since: when it took the run, in seconds as in `time.time`; 0 if it is not known.
    """

    def __init__(self, message: str, host: str = "", pid: int = 0, since: float = 0.0) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid
        self.since = since


class DamagedCheckpointWarning(UserWarning):
    """A run was restored from an older step, as newer ones are damaged.

    Attributes:
        skipped: the damaged steps, newest first; see `SkippedStep`.
    """

    def __init__(self, message: str, skipped: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.skipped = skipped

    def __str__(self) -> str:
        return printable(super().__str__())


class CoordinationError(AiockptError):
    """The ranks of a distributed save or load could not agree."""


class NoThreadError(AiockptError, RuntimeError):
    """No further thread can be started; the limits of the process or the machine are reached."""


# --- text from checkpoints in messages ------------------------------------------------------------------


def printable(text: str) -> str:
    """Return a text with control characters and surrogates escaped, and its middle cut out if it is very long."""
    if len(text) > _MOST_LETTERS:  # the end of a message says what to do
        text = f"{text[: _MOST_LETTERS - _LAST_LETTERS]} [...] {text[-_LAST_LETTERS:]}"
    return _escaped(text, "\n")


def printable_key(name: str) -> str:
    """Return a key or file name with control characters escaped, on one line and not too long."""
    if len(name) > _NAME_LETTERS:
        name = f"{name[: _NAME_LETTERS // 2]}[...]{name[-_NAME_LETTERS // 2 :]}"
    return _escaped(name, "")


def _escaped(text: str, but: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in but else c.encode("unicode_escape").decode() for c in text)


def unwrapped(error: BaseException) -> BaseException:
    """Return the first error in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def ungrouped(error: BaseException) -> BaseException:
    """Return the first error in a group, with no group among its causes and contexts: each prints a page of its own."""
    error = unwrapped(error)
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        at = left.pop()
        if at is None or id(at) in seen:
            continue
        seen.add(id(at))
        context = at.__context__
        while isinstance(context, BaseExceptionGroup):
            first = unwrapped(context)
            context = context.__context__ if id(first) in seen else first
        at.__context__ = context
        if isinstance(at.__cause__, BaseExceptionGroup):
            cause = unwrapped(at.__cause__)
            at.__cause__ = None if id(cause) in seen else cause
        left += [at.__context__, at.__cause__]
    return error


def sanitize_error(error: BaseException) -> None:
    """Escape the messages of an error and of its causes; see `printable`."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if at.args and type(at.args[0]) is str:
            at.args = (printable(at.args[0]), *at.args[1:])
        at = at.__cause__
