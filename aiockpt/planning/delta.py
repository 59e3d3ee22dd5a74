"""Plans of delta saves: which files of the base become files of the new checkpoint, and what is written anew.

An item is unchanged if its form and the hash of its payload are those of the base. A file of the base is adopted if
unchanged items are half of it at least; the others are written, those that have changed and those that have not to
different files: so what changes from save to save soon is in files of its own, and what does not is adopted whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiockpt.core.gc_pause import gc_pause
from aiockpt.planning.dcp_plan import DcpFormat, DcpLayout, DcpPlan, prefix_of
from aiockpt.planning.layout import FileImage, Slot
from aiockpt.planning.planner import RankLeaves

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.format.manifest.columnar_index import IndexedEntries
    from aiockpt.format.manifest.manifest import FileFacts, Manifest
    from aiockpt.planning.snapshot import Snapshot

SINCE_FULL = "since_full"
"""Of the manifest's totals: how many delta saves, one upon the other, lie between a full save and this checkpoint."""
_LIVE_SHARE = 2  # a file is adopted if its live items, so many times, are as large as it


class BaseContents(NamedTuple):
    """The items and files that a base stores."""

    path: str
    entries: IndexedEntries
    hashes: Sequence[str | None]  # by row; None: it changed from save to save
    files: Mapping[str, FileFacts]
    since_full: int


def contents_of(path: str, manifest: Manifest) -> BaseContents | None:
    """Return what a checkpoint stores, by its manifest; None if that has no hashes, or the items are transformed."""
    entries: Any = None if manifest.index is None else manifest.index.entries
    if not entries or entries.hash_of is None or manifest.transformed or manifest.disks:
        return None
    since = manifest.totals.get(SINCE_FULL, 0)
    return BaseContents(path, entries, entries.hash_of, manifest.files, since if type(since) is int else 0)


@gc_pause()
def match(layout: DcpLayout, base: BaseContents) -> NDArray[np.int64]:
    """Return by leaf the row that the base has of it, if it has the same form there; else -1."""
    entries, (forms, form_of) = base.entries, layout.forms
    numbers = np.array([entries.numbers.get(name, -1) for name in layout.structure.names], dtype=np.int64)
    rows, is_same = entries.first_rows[numbers], numbers >= 0
    if entries.parts is not None:
        is_same &= entries.parts.division_of[numbers] < 0
    alike = np.array([*(forms.get(form, -2) for form in entries.forms), -2])  # the last one is that of objects, -1
    return np.where(is_same & (alike[entries.form_of[rows]] == form_of), rows, -1)


@dataclass(frozen=True, slots=True)
class AdoptedFiles:
    """Files of the base by their new names, and what is live in them."""

    files: Mapping[str, FileFacts] = field(default_factory=dict)
    places: Mapping[str, Sequence[tuple[int, int]]] = field(repr=False, default_factory=dict)  # leaf and offset of each
    crcs: Sequence[int] = field(repr=False, default=())  # of the live items, file by file
    hashes: Sequence[str | None] = field(repr=False, default=())

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(facts.nbytes for facts in self.files.values())


@gc_pause()
def choose_files(unchanged: NDArray[np.int64], rows: NDArray[np.int64], base: BaseContents, most: int) -> list[str]:
    """Return the files of the base to adopt, at most ``most``, by the leaves that have not changed.

    If there are more, the half with the most live bytes is left, so that it takes a while until there are too many.
    """
    entries = base.entries
    mine = rows[_one_of_each(unchanged, rows, entries)]
    live = np.bincount(entries.file_of[mine], entries.length_of[mine], len(entries.files))
    live_bytes = {name: nbytes for name, nbytes in zip(entries.files, live.tolist(), strict=True) if nbytes}
    known = [name for name in live_bytes if name in base.files and "/" not in name]
    chosen = [name for name in known if _LIVE_SHARE * live_bytes[name] >= base.files[name].nbytes]
    if len(chosen) > most:
        chosen = sorted(chosen, key=live_bytes.__getitem__)[-max(1, most // 2) :]
    return sorted(chosen)


@gc_pause()
def adopted_files(
    names: Mapping[str, str], unchanged: NDArray[np.int64], rows: NDArray[np.int64], base: BaseContents
) -> AdoptedFiles:
    """Return the files that are adopted, ``names`` being the new ones by those in the base."""
    entries, numbers = base.entries, {name: number for number, name in enumerate(base.entries.files)}
    leaves = _one_of_each(unchanged, rows, entries)
    places: dict[str, Sequence[tuple[int, int]]] = {}
    live: list[int] = []
    for name, new_name in names.items():
        mine = leaves[entries.file_of[rows[leaves]] == numbers[name]]
        places[new_name] = list(zip(mine.tolist(), entries.offset_of[rows[mine]].tolist(), strict=True))
        live += rows[mine].tolist()
    facts = {new_name: base.files[name] for name, new_name in names.items()}
    return AdoptedFiles(facts, places, entries.crc_of[live].tolist(), [base.hashes[row] for row in live])


def _one_of_each(leaves: NDArray[np.int64], rows: NDArray[np.int64], entries: IndexedEntries) -> NDArray[np.int64]:
    """Return leaves by file and offset. Of two tensors that were one there, one alone: else they would load as one."""
    files, offsets = entries.file_of[rows[leaves]], entries.offset_of[rows[leaves]]
    order = np.lexsort((offsets, files))
    is_other = np.diff(files[order], prepend=-1).astype(bool) | np.diff(offsets[order], prepend=-1).astype(bool)
    chosen: NDArray[np.int64] = leaves[order][is_other]
    return chosen


@dataclass
class DeltaLayout(DcpLayout):
    """The layout of a delta save: ``images`` are written, and ``adopted`` are files of the base, under new names."""

    adopted: Sequence[FileImage] = ()
    origin: Any = None  # what it was made from, by which a later save knows that it can use it

    @property
    def stored_images(self) -> Sequence[FileImage]:
        return [*self.images, *self.adopted]


@gc_pause()
def lay_out_delta(
    plan: DcpPlan,
    snapshot: Snapshot,
    file_format: DcpFormat,
    adopted: AdoptedFiles,
    cold: frozenset[int],
    first: int,
    kept: DeltaLayout | None,
) -> DcpPlan:
    """Return the plan of a delta save, from that of a full one, or with the layout that an earlier save has ``kept``.

    ``cold`` leaves are written to files of their own, as they do not change; ``first`` is the number of the first file.
    """
    summary, origin = plan.layout.summary, (adopted.files, adopted.places, cold, first)
    if kept is not None and kept.summary is summary and kept.origin == origin:
        filled = file_format.fill(kept, snapshot)
        if filled is not None:
            return filled
    framings = plan.layout.framings
    images = []
    for name, places in adopted.places.items():
        slots = []
        for leaf, offset in places:
            framing, begin = framings[leaf], offset + len(framings[leaf].prefix)
            slots.append(Slot(leaf, offset, framing, begin, begin + framing.nbytes))
        images.append(FileImage(name, 0, slots, adopted.files[name].nbytes))
    taken = {slot.leaf for image in images for slot in image.slots}
    written = [leaf for leaf in range(len(summary.specs)) if leaf not in summary.tied and leaf not in taken]
    new = file_format.lay_out(summary, snapshot, RankLeaves(prefix_of(0), written, first=first, cold=cold))
    layout = DeltaLayout(summary, new.layout.images, new.layout.objects, images, origin)
    return DcpPlan(layout, new.heads, new.objects)
