"""Plans of delta saves: which files of the base become files of the new checkpoint, and what is written anew.

An item is unchanged if its form and the hash of its payload are those of the base. A file of the base is adopted if
unchanged items are half of it at least; the others are written, those that have changed and those that have not to
different files: so what changes from save to save soon is in files of its own, and what does not is adopted whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.core.gc_pause import gc_pause
from aiockpt.format.manifest.columnar_index import ItemForm
from aiockpt.planning.dcp_plan import DcpFormat, DcpLayout, DcpPlan, prefix_of
from aiockpt.planning.layout import FileImage, Slot
from aiockpt.planning.planner import RankLeaves

if TYPE_CHECKING:
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.base import BaseContents, BaseItem
    from aiockpt.planning.snapshot import Snapshot

_LIVE_SHARE = 2  # a file is adopted if its live items, so many times, are as large as it


@dataclass
class DeltaLayout(DcpLayout):
    """The layout of a delta save: ``images`` are written, and ``adopted`` are files of the base, under new names."""

    adopted: Sequence[FileImage] = ()

    @property
    def stored_images(self) -> Sequence[FileImage]:
        return [*self.images, *self.adopted]


@dataclass(frozen=True, slots=True)
class AdoptedFiles:
    """The facts of adopted files, by their new names, and of their live items, file by file."""

    files: Mapping[str, FileFacts] = field(default_factory=dict)
    crcs: Sequence[int] = field(repr=False, default=())
    hashes: Sequence[str | None] = field(repr=False, default=())

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(facts.nbytes for facts in self.files.values())


@gc_pause()
def match(layout: DcpLayout, base: BaseContents) -> dict[int, BaseItem]:
    """Return the item that the base has of each leaf, if it has the same form there."""
    found: dict[int, BaseItem] = {}
    names, shards = layout.structure.names, layout.structure.shards
    for leaf, framing in layout.framings.items():
        spec, item, shard = layout.specs[leaf], base.items.get(names[leaf]), shards.get(leaf)
        if item is None or spec is None or (shard is not None and shard.shape != tuple(spec.shape)):
            continue
        shape, before = tuple(spec.shape), len(framing.prefix)
        form = ItemForm(spec.dtype, shape, tuple(spec.saved_stride), framing.length, before, framing.nbytes)
        if form == item.form:
            found[leaf] = item
    return found


@gc_pause()
def choose_files(unchanged: Mapping[int, BaseItem], base: BaseContents, most: int) -> dict[str, list[int]]:
    """Return the files of the base to adopt, at most ``most``, and the leaves in each, by their offset.

    If there are more, the half with the most live bytes is left, so that it takes a while until there are too many.
    """
    leaves: dict[str, dict[int, int]] = {}
    live: Counter[str] = Counter()
    for leaf, item in unchanged.items():
        # Of two tensors that were one in the base, and are equal still, one alone: else they would be loaded as one.
        if leaves.setdefault(item.file, {}).setdefault(item.offset, leaf) == leaf:
            live[item.file] += item.form.item_bytes
    known = [file for file in leaves if file in base.files and "/" not in file]
    chosen = [file for file in known if _LIVE_SHARE * live[file] >= base.files[file].nbytes]
    if len(chosen) > most:
        chosen = sorted(chosen, key=lambda file: live[file])[-max(1, most // 2) :]
    return {file: [leaf for _, leaf in sorted(leaves[file].items())] for file in sorted(chosen)}


@gc_pause()
def adopted_images(
    layout: DcpLayout,
    leaves: Mapping[str, Sequence[int]],
    items: Mapping[int, BaseItem],
    facts: Mapping[str, FileFacts],
) -> list[FileImage]:
    """Return the images of adopted files, by their new names: what is live in them."""
    images = []
    for name, live in leaves.items():
        slots = []
        for leaf in live:
            framing, offset = layout.framings[leaf], items[leaf].offset
            begin = offset + len(framing.prefix)
            slots.append(Slot(leaf, offset, framing, begin, begin + framing.nbytes))
        images.append(FileImage(name, 0, slots, facts[name].nbytes))
    return images


class KeptLayout(NamedTuple):
    """The layout of a delta save, for a later one with the same files."""

    layout: DeltaLayout
    cold: frozenset[int]


def lay_out_delta(
    plan: DcpPlan,
    snapshot: Snapshot,
    file_format: DcpFormat,
    adopted: Sequence[FileImage],
    cold: frozenset[int],
    first: int,
    kept: KeptLayout | None,
) -> DcpPlan:
    """Return the plan of a delta save, from that of a full one, and from what an earlier save has ``kept``.

    ``cold`` leaves are written to files of their own, as they do not change; ``first`` is the number of the first file.
    """
    summary = plan.layout.summary
    if kept is not None and kept.layout.summary is summary and (kept.layout.adopted, kept.cold) == (adopted, cold):
        filled = file_format.fill(kept.layout, snapshot)
        if filled is not None:
            return filled
    taken = {slot.leaf for image in adopted for slot in image.slots}
    written = [leaf for leaf in range(len(summary.specs)) if leaf not in summary.tied and leaf not in taken]
    new = file_format.lay_out(summary, snapshot, RankLeaves(prefix_of(0), written, first=first, cold=cold))
    layout = DeltaLayout(summary, new.layout.images, new.layout.objects, adopted)
    return DcpPlan(layout, new.heads, new.objects)
