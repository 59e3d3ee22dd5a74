"""Messages between a trainer and its writer process. Tensors are in memory that both map, never in messages."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError, SaveError, unwrapped
from aiockpt.planning.layout import FileImage, Slot

if TYPE_CHECKING:
    from aiockpt.core.spans import Span
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.writing.file_writer import CommitInputs

# --- errors -------------------------------------------------------------------------------------------


_MAX_CAUSES = 8


def as_save_error(error: BaseException) -> BaseException:
    """Return the first error in a group; wrap it in a SaveError unless it is an AiockptError."""
    error = unwrapped(error)
    if isinstance(error, AiockptError):
        return error
    wrapped = SaveError(f"the save failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def dump_error(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, each in a form that can be pickled."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < _MAX_CAUSES:
        chain.append(_picklable(link))
        link = link.__cause__
    return chain


def load_error(chain: Sequence[BaseException]) -> BaseException:
    """Chain the errors from `dump_error`; return the first."""
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def _picklable(error: BaseException) -> BaseException:
    """Return a copy without cause and traceback; if it can't be pickled, a plain error with the same text."""
    try:  # both ways: many classes can be pickled, but not unpickled, since their __init__ has other arguments
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        is_own = isinstance(error, AiockptError)
        copy = SaveError(str(error)) if is_own else RuntimeError(f"{type(error).__name__}: {error}")
    for note in () if hasattr(copy, "__notes__") else getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy


PackedImage = tuple[FileImage, Sequence[Sequence[Any]]]
"""A file image without slots, and their columns, which pickle fast: there may be a slot for each of 100,000 tensors."""


def pack(image: FileImage) -> PackedImage:
    """Pack an image. Slow for many tensors."""
    return replace(image, slots=()), list(zip(*image.slots, strict=True))


def unpack(packed: PackedImage) -> FileImage:
    """Return the image that was packed."""
    image, columns = packed
    return replace(image, slots=list(map(Slot._make, zip(*columns, strict=True))))


# --- from the trainer ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: the settings of the process."""

    chunk_bytes: int
    io_threads: int
    nice: int  # see nice(1)
    ionice: tuple[int, int] | None  # class and level, see ionice(1); None: as the trainer's


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a save."""

    save: int  # its number, as in all messages
    path: str
    storage: bytes  # pickled
    overwrite: bool
    names: Sequence[str] = field(repr=False)  # of the files
    heads: Sequence[bytes] = field(repr=False)  # the first bytes of each file
    codings: bytes | None = field(repr=False)  # pickled transforms of each file's items; None: stored unchanged
    again: bool = False  # a retry: later saves have begun already, so it waits for none
    # known when it begins
    images: Sequence[PackedImage] | None = field(repr=False, default=None)  # None: those that were sent last
    ticket: str | None = None  # of the transaction to join, or for the one to begin
    joins: bool = False  # rank 0 has begun the transaction


@dataclass(frozen=True, slots=True)
class ChunkFilled:
    """A chunk holds the payload of the bytes ``start`` to ``stop`` of a file."""

    save: int
    image: int
    start: int
    stop: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Staged:
    """All chunks are filled: from now on the writer process can complete the checkpoint alone."""

    save: int
    inputs: CommitInputs = field(repr=False)


@dataclass(frozen=True)
class _Request:
    save: int


class Finish(_Request):
    """Publish the checkpoint of this process; or end the part of this rank, as rank 0 has published it."""


class Cancel(_Request):
    """Cancel a save."""


# --- from the writer process ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started."""


@dataclass(frozen=True, slots=True)
class Began:
    """A transaction has begun; by its stamp the trainer finds it if the process dies."""

    save: int
    stamp: str | None


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """The bytes of a chunk are written, and the chunk is free."""

    save: int
    nbytes: int
    chunk: int


@dataclass(frozen=True, slots=True)
class FilesWritten:
    """All files with items are written; with several ranks, they are durable."""

    save: int
    files: dict[str, FileFacts]
    spans: Sequence[Span] = field(repr=False, default=())  # of this process, if it does not commit
    # what rank 0 needs besides, see `ChunkWriter`
    crcs: bytes = field(repr=False, default=b"")
    encoded: Sequence[Sequence[EncodedItem]] | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Published:
    """The checkpoint is durable under its final name."""

    save: int
    sizes: dict[str, int] = field(repr=False)  # in bytes, of each file except the manifest
    spans: Sequence[Span] = field(repr=False, default=())  # of this process


@dataclass(frozen=True, slots=True)
class Failed:
    """The save has failed, and nothing of it is left."""

    save: int
    error: Sequence[BaseException]  # followed by its causes


@dataclass(frozen=True, slots=True)
class Log:
    """A record for the trainer's log."""

    level: int
    text: str


FromTrainer = Begin | ChunkFilled | Staged | Finish | Cancel
FromWriter = Began | ChunkWritten | FilesWritten | Published | Failed
Message = Hello | FromTrainer | Ready | Log | FromWriter
