"""What the trainer and its writer process tell each other. Tensors are in memory that both map, never in messages."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.planning.layout import FileImage, Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.item.framing import Framing
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.writing.commit import CommitDocuments


class Image(NamedTuple):
    """A file image in a few columns, for there may be a slot for each of 100,000 tensors."""

    name: str
    head_bytes: int
    nbytes: int
    framings: list[Framing]
    leaves: array[int]
    offsets: array[int]
    framing_of: array[int]

    @classmethod
    def of(cls, image: FileImage) -> Image:
        """Put an image into columns. Takes a while for many tensors."""
        numbers: dict[int, int] = {}  # by the identity of the framing, of which there is one for each form
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
        return cls(image.name, image.head_bytes, image.nbytes, framings, *columns)

    def unpacked(self) -> FileImage:
        """Give the image."""
        slots: list[Slot] = []
        for leaf, offset, number in zip(self.leaves, self.offsets, self.framing_of, strict=True):
            framing = self.framings[number]
            begin = offset + len(framing.prefix)
            slots.append(Slot(leaf, offset, framing, begin, begin + framing.nbytes))
        ends = [slot.payload_end + len(slot.framing.suffix) for slot in slots]
        return FileImage(self.name, self.head_bytes, slots, self.nbytes, ends)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: how to work.

    Attributes:
        chunk_bytes: the size of a chunk of the memory.
        io_threads: how many threads write.
        nice: how far the process steps back when others want the processor, as in nice(1).
        ionice: scheduling class and level for the disk, as in ionice(1); None: as the trainer has it.
        patience_s: how long the writers of several ranks wait for each other while nothing goes on.
    """

    chunk_bytes: int
    io_threads: int
    nice: int
    ionice: tuple[int, int] | None
    patience_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """A save begins.

    Attributes:
        save: its number.
        path: where the checkpoint is to be.
        storage: where to keep it, pickled.
        overwrite: replace what is there.
        names: what the files are called.
        layout: the number of the layout.
        images: the files; None: those of this layout as they were sent before.
        heads: what each file begins with.
        ticket: of a transaction that was begun by rank 0, or of one to begin.
        joins: it was begun by rank 0.
        started: when the save was called, by the clock that all processes share, in seconds.
        codings: what becomes of the items of each file, pickled; None: they are stored as they are.
        again: it was tried elsewhere before, so that those that have begun since are behind it, not before.
    """

    save: int
    path: str
    storage: bytes
    overwrite: bool
    names: Sequence[str] = field(repr=False)
    layout: int
    images: Sequence[Image] | None = field(repr=False)
    heads: Sequence[bytes] = field(repr=False)
    ticket: str | None
    joins: bool
    started: float
    codings: bytes | None = field(repr=False)
    again: bool = False


@dataclass(frozen=True, slots=True)
class Filled:
    """A chunk holds the payload of the bytes ``start`` to ``stop`` of a file."""

    save: int
    image: int
    start: int
    stop: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Staged:
    """All chunks are filled: from here on the writer can complete the checkpoint by itself.

    Attributes:
        save: the number of the save.
        ending: what makes it a checkpoint; None for one file, or where rank 0 decides.
        times_s: durations so far, in seconds.
        waits: the trainer says when to publish; if it dies before, nothing is published.
        parting: of several ranks, what their writers need to agree without the trainers, pickled.
    """

    save: int
    ending: CommitDocuments | None = field(repr=False)
    times_s: Mapping[str, float]
    waits: bool
    parting: bytes | None = field(repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Publish:
    """The trainer's word to publish."""

    save: int


@dataclass(frozen=True, slots=True)
class Agree:
    """The trainers can't agree any more, for one of them is gone: let the writers do."""

    save: int


@dataclass(frozen=True, slots=True)
class Over:
    """All ranks have published, or given up: the writer's part is over."""

    save: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Call a save off."""

    save: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The writer runs."""


@dataclass(frozen=True, slots=True)
class Began:
    """A transaction was begun: by this it is known again if the process dies."""

    save: int
    identity: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes are written, and their chunk is free."""

    save: int
    nbytes: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Written:
    """All files with items are durable.

    Attributes:
        save: the number of the save.
        files: the files.
        crcs: for each of them the CRC-32 of each slot's payload; empty where the writer completes the checkpoint.
    """

    save: int
    files: dict[str, FileFacts]
    crcs: Sequence[Sequence[int]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Published:
    """The checkpoint is durable under its final name.

    Attributes:
        save: the number of the save.
        sizes: the size in bytes of each file but the manifest.
    """

    save: int
    sizes: dict[str, int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The save has failed, and nothing of it is left.

    Attributes:
        save: the number of the save.
        error: what happened, and its cause, and that one's.
    """

    save: int
    error: Sequence[BaseException]


@dataclass(frozen=True, slots=True)
class Log:
    """Something for the trainer's log."""

    level: int
    text: str


Message = Any
