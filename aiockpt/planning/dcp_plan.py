"""Plans in the format of torch's DCP: items in a few files, `.metadata`, and the index of the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aiockpt.core.dataclasses import dataclass, field, replace
from aiockpt.core.lazy import lazy_property
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.errors import SaveError
from aiockpt.format.index import ItemRange
from aiockpt.format.item.item_framing import tensor_framing
from aiockpt.format.item.objects import encode_object, is_shortage
from aiockpt.format.manifest.columnar_index import ItemForm
from aiockpt.planning.collective.cache import GlobalPlanCache
from aiockpt.planning.collective.messages import inventory_of, places_of
from aiockpt.planning.collective.plan import plan_globally
from aiockpt.planning.layout import FileImage, align_up, assign_buckets, bucket_count, lay_out
from aiockpt.planning.planner import FileFormat, Layout, RankLeaves, SavePlan, StateSummary
from aiockpt.planning.specs import TensorSpec, unstorable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiockpt.format.item.ziparchive import Framing
    from aiockpt.format.manifest.drafts import Drafts
    from aiockpt.planning.snapshot import Snapshot


def prefix_of(rank: int) -> str:
    """Return the prefix of the names of a rank's files, as DCP calls them."""
    return f"__{rank}_"


@dataclass
class DcpLayout(Layout):
    """The layout of a checkpoint in DCP's format, or of one rank's files; the first file begins with the objects."""

    objects: Mapping[int, int]  # for each leaf that is written as an object, the number of its file

    @lazy_property
    def framings(self) -> dict[int, Framing]:
        """The framing of each leaf that is a tensor item."""
        return {slot.leaf: slot.framing for image in self.stored_images for slot in image.slots}

    @lazy_property
    def forms(self) -> tuple[dict[ItemForm, int], NDArray[np.int64]]:
        """The distinct forms of the items of whole tensors, numbered, and the number of each leaf's; -1 for others."""
        forms: dict[ItemForm, int] = {}
        form_of = np.full(len(self.specs), -1)
        for leaf, framing in self.framings.items():
            spec, shard = self.specs[leaf], self.structure.shards.get(leaf)
            if spec is not None and (shard is None or shard.shape == tuple(spec.shape)):
                shape, before = tuple(spec.shape), len(framing.prefix)
                form = ItemForm(spec.dtype, shape, tuple(spec.saved_stride), framing.length, before, framing.nbytes)
                form_of[leaf] = forms.setdefault(form, len(forms))
        return forms, form_of

    @lazy_property
    def world(self) -> GlobalPlanCache:
        """The global plan, if this rank is the whole world; the same for every save."""
        framings, tied = self.framings, self.summary.tied
        inventory = inventory_of(self.summary, [], lambda leaf, _: framings[tied.get(leaf, leaf)])
        return GlobalPlanCache(0, [inventory], plan_globally([inventory]), [places_of(self)])


@dataclass(frozen=True)
class DcpPlan(SavePlan):
    """A layout together with the objects of one save."""

    layout: DcpLayout
    objects: Sequence[tuple[str, ItemRange]] = field(repr=False)

    @property
    def object_places(self) -> Mapping[int, ItemRange]:
        return dict(zip(self.layout.objects, (place for _, place in self.objects), strict=True))

    def drafts(self, *, is_transformed: bool = False) -> Drafts:
        drafts = self.layout.world.drafts([self.object_places], is_transformed=is_transformed)
        # Copies: the next save, which has the same layout, may be planned before this one is written.
        return replace(drafts, documents={name: bytes(data) for name, data in drafts.documents.items()})


_Group = tuple[str, bool]  # the hint that the names of tensors begin with, and whether they are cold


class DcpFormat(FileFormat):
    """The format of ``torch.distributed.checkpoint``.

    Writes at most ``max_buckets`` files for the items of each hint and for the others; None: a file for each item.
    Items whose names begin with one of ``separation_hints`` go to files of their own, which are named after the hint.
    """

    def __init__(self, max_buckets: int | None, separation_hints: Sequence[str] = ()) -> None:
        self._max_buckets = max_buckets
        self._hints = tuple(separation_hints)
        self.name = repr(("dcp", max_buckets, *self._hints))

    def framing(self, name: str, spec: TensorSpec) -> Framing:
        wrong = unstorable(spec.dtype, len(spec.shape))
        if wrong is not None:
            raise SaveError(f"{name} {wrong}")
        try:
            return tensor_framing(spec.dtype, tuple(spec.shape), spec.saved_stride)
        except Warning:  # an error only because the program makes errors of warnings
            raise
        except Exception as exc:  # torch.save raises many types for what it can't store
            if is_shortage(exc):
                raise SaveError(f"{name} can't be saved now, for lack of memory or descriptors: {exc}") from exc
            raise SaveError(f"{name} has the dtype {spec.dtype}, which torch.save can't store: {exc}") from exc

    def lay_out(self, summary: StateSummary, snapshot: Snapshot, written: RankLeaves | None = None) -> DcpPlan:
        """Distribute the tensors that this rank writes (None: all) over a few files of about one size."""
        alone = written is None
        if written is None:
            written = RankLeaves(prefix_of(0), [leaf for leaf in range(len(summary.specs)) if leaf not in summary.tied])
        blobs = _encode_objects(snapshot, [leaf for leaf in written.leaves if summary.specs[leaf] is None])
        if self._max_buckets is None:
            return self._lay_out_singly(summary, written, blobs)
        object_bytes = sum(map(len, blobs.values()))
        # Some room to spare, so that a counter which grows a digit does not move every tensor.
        spare = min(object_bytes // 4 + 1024, 65_536)
        head_bytes = align_up(object_bytes + spare, BLOCK_BYTES) if object_bytes else 0
        groups = self._separated(summary, written)
        images: list[FileImage] = []
        for (hint, is_cold), group in groups.items():
            objects_here = object_bytes if not (hint or is_cold) else 0
            if not group and not objects_here and (hint or not alone or len(groups) > 1):
                continue  # a rank with nothing to write makes no file
            sizes = [framing.length for _, framing in group]
            buckets = assign_buckets(sizes, bucket_count(sum(sizes) + objects_here, self._max_buckets))
            images += [
                lay_out(
                    f"{hint}{written.prefix}{written.first + len(images) + number}.distcp",
                    head_bytes if not images and number == 0 else 0,
                    [group[i] for i in bucket],
                )
                for number, bucket in enumerate(buckets)
            ]
        return _with_objects(DcpLayout(summary, images, dict.fromkeys(blobs, 0)), blobs)

    def _lay_out_singly(self, summary: StateSummary, written: RankLeaves, blobs: Mapping[int, bytes]) -> DcpPlan:
        """Lay out a file for each item; objects first."""
        names = summary.structure.names
        images = [lay_out(f"{written.prefix}{n}.distcp", len(blob), []) for n, blob in enumerate(blobs.values())]
        for leaf in written.leaves:
            if (spec := summary.specs[leaf]) is not None:
                framing = self.framing(names[leaf], spec)
                images.append(lay_out(f"{written.prefix}{len(images)}.distcp", 0, [(leaf, framing)]))
        return _with_objects(DcpLayout(summary, images, {leaf: n for n, leaf in enumerate(blobs)}), blobs)

    def _separated(self, summary: StateSummary, written: RankLeaves) -> dict[_Group, list[tuple[int, Framing]]]:
        """Group the tensors, with their framing, by hint, and whether they are cold; first those without either."""
        groups: dict[_Group, list[tuple[int, Framing]]] = {("", False): []}
        leaves = written.leaves
        # Device by device: small tensors side by side are packed there, and copied together, which those of another
        # device between them, as Adam's `step`, would prevent.
        devices = list(dict.fromkeys(spec.device for spec in summary.specs if spec is not None))
        if len(devices) > 1:
            specs = summary.specs
            leaves = sorted(leaves, key=lambda leaf: 0 if (spec := specs[leaf]) is None else devices.index(spec.device))
        for leaf in leaves:
            name, spec = summary.structure.names[leaf], summary.specs[leaf]
            if spec is not None:
                hint = next((hint for hint in self._hints if name.startswith(hint)), "") if self._hints else ""
                groups.setdefault((hint, leaf in written.cold), []).append((leaf, self.framing(name, spec)))
        return groups

    def fill(self, layout: Layout, snapshot: Snapshot) -> DcpPlan | None:
        """Put the objects into the room that a layout has for them; None if they don't fit."""
        if not isinstance(layout, DcpLayout):
            return None
        blobs = _encode_objects(snapshot, list(layout.objects))
        needed = [0] * len(layout.images)
        for leaf, number in layout.objects.items():
            needed[number] += len(blobs[leaf])
        fits = all(size <= image.head_bytes for size, image in zip(needed, layout.images, strict=True))
        return _with_objects(layout, blobs) if fits else None


def _encode_objects(snapshot: Snapshot, leaves: Sequence[int]) -> dict[int, bytes]:
    blobs: dict[int, bytes] = {}
    for leaf in leaves:
        blob = snapshot.blobs.get(leaf)
        if blob is None:
            tensor = snapshot.tensors[leaf]
            name = snapshot.structure.names[leaf]
            if tensor is None:
                blob = encode_object(name, snapshot.values[leaf])
            else:  # a sparse or quantized one
                with snapshot.readable(tensor.device):
                    blob = encode_object(name, tensor)
        blobs[leaf] = blob
    return blobs


def _with_objects(layout: DcpLayout, blobs: Mapping[int, bytes]) -> DcpPlan:
    places: list[tuple[str, ItemRange]] = []
    heads = [bytearray() for _ in layout.images]
    for leaf, number in layout.objects.items():
        place = ItemRange(layout.images[number].name, len(heads[number]), len(blobs[leaf]))
        places.append((layout.structure.names[leaf], place))
        heads[number] += blobs[leaf]
    return DcpPlan(layout, [bytes(head) for head in heads], places)
