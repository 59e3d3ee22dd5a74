"""Messages between a trainer and its writer process. Tensors are in memory that both map, never in messages."""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.errors import AiockptError, SaveError, unwrapped
from aiockpt.planning.layout import FileImage, Slot
from aiockpt.planning.parts import PartImage

if TYPE_CHECKING:
    from aiockpt.core.spans import Span
    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.item.ziparchive import Framing
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.ranges import StoredStream
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
    notes = list(getattr(error, "__notes__", ()))
    try:  # both ways: many classes can be pickled, but not unpickled, since their __init__ has other arguments
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        kind = SaveError if isinstance(error, AiockptError) else RuntimeError
        copy = kind(str(error) if isinstance(error, AiockptError) else f"{type(error).__name__}: {error}")
    if not hasattr(copy, "__notes__"):
        for note in notes:
            copy.add_note(note)
    return copy


class PackedImage(NamedTuple):
    """A file image in a few columns, which pickle fast: there may be a slot for each of 100,000 tensors."""

    name: str
    head_bytes: int
    nbytes: int
    framings: list[Framing]
    leaves: array[int]
    offsets: array[int]
    framing_of: array[int]
    tail: bytes = b""
    crc_at: Sequence[tuple[int, int]] = ()
    file_bytes: int = 0  # of a file that others write too
    streams: Sequence[StoredStream] | None = None  # of a part of such a file: where each slot belongs

    @classmethod
    def of(cls, image: FileImage) -> PackedImage:
        """Pack an image. Slow for many tensors."""
        numbers: dict[int, int] = {}  # by the identity of the framing, which all slots of one form share
        framings: list[Framing] = []
        columns = array("q"), array("q"), array("q")
        leaves, offsets, framing_of = columns
        for slot in image.slots:
            number = numbers.setdefault(id(slot.framing), len(framings))
            if number == len(framings):
                framings.append(slot.framing)
            leaves.append(slot.leaf)
            offsets.append(slot.offset)
            framing_of.append(number)
        packed = cls(image.name, image.head_bytes, image.nbytes, framings, *columns, image.tail, image.crc_at)
        if isinstance(image, PartImage):
            return packed._replace(file_bytes=image.file_bytes, streams=image.streams)
        return packed

    def unpack(self) -> FileImage:
        slots: list[Slot] = []
        for leaf, offset, number in zip(self.leaves, self.offsets, self.framing_of, strict=True):
            framing = self.framings[number]
            begin = offset + len(framing.prefix)
            slots.append(Slot(leaf, offset, framing, begin, begin + framing.nbytes))
        ends = [slot.payload_end + len(slot.framing.suffix) for slot in slots]
        if self.streams is not None:
            image = self.name, self.head_bytes, slots, self.nbytes, ends
            return PartImage(*image, file_bytes=self.file_bytes, streams=self.streams)
        return FileImage(self.name, self.head_bytes, slots, self.nbytes, ends, self.tail, self.crc_at)


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


class Publish(_Request):
    """Publish the checkpoint."""


class Finish(_Request):
    """End a save: rank 0 has published it."""


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


FromTrainer = Begin | ChunkFilled | Staged | Publish | Finish | Cancel
FromWriter = Began | ChunkWritten | FilesWritten | Published | Failed
Message = Hello | FromTrainer | Ready | Log | FromWriter
