"""Plans in the format of torch's DCP: items in a few files, `.metadata`, and the index of the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aiockpt.errors import SaveError
from aiockpt.format.index import ChunkEntry, Entry, ItemPlace, ObjectEntry, TensorEntry
from aiockpt.format.indexed_entries import Form
from aiockpt.format.manifest_index import Places, encode_index, finish_index
from aiockpt.format.metadata import METADATA_NAME
from aiockpt.format.metadata_writer import MetadataHead, encode_metadata, finish_metadata
from aiockpt.format.objects import encode_object
from aiockpt.format.torchzip import Framing, tensor_framing
from aiockpt.planning.buckets import assign_buckets, bucket_count
from aiockpt.planning.layout import BLOCK_BYTES, FileImage, align_up, lay_out
from aiockpt.planning.plans import Layout, SaveForm, SavePlan, Survey
from aiockpt.planning.specs import describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from aiockpt.planning.source import Capture
    from aiockpt.planning.specs import TensorSpec


class Share(NamedTuple):
    """What one of several ranks writes.

    Attributes:
        rank: its number, which its files are called by.
        leaves: the leaves that it writes.
    """

    rank: int
    leaves: Sequence[int]


@dataclass
class DcpLayout(Layout):
    """The layout of a checkpoint in DCP's format, or of one rank's share of it; the first file begins with the objects.

    Attributes:
        objects: the leaves that are written as objects.
    """

    objects: Sequence[int]

    @property
    def head_bytes(self) -> int:
        """The room for objects."""
        return self.images[0].head_bytes if self.images else 0

    @cached_property
    def metadata_head(self) -> MetadataHead:
        """The beginning of `.metadata`."""
        places: dict[int, ItemPlace] = {
            slot.leaf: ItemPlace(image.name, slot.offset, slot.framing.length)
            for image in self.images
            for slot in image.slots
        }
        survey = self.survey
        entries: list[tuple[str, Entry]] = []
        nowhere = ObjectEntry(ItemPlace("", 0, 0))
        for leaf, name in enumerate(survey.structure.names):
            spec = survey.specs[leaf]
            if spec is None:
                entries.append((name, nowhere))
            else:
                shape = tuple(spec.shape)
                chunk = ChunkEntry((0,) * len(shape), shape, places[survey.tied.get(leaf, leaf)])
                entries.append((name, TensorEntry(spec.dtype, shape, (chunk,))))
        return encode_metadata(entries, dict(zip(survey.structure.names, survey.structure.paths, strict=True)))

    @cached_property
    def index_head(self) -> str | None:
        """The beginning of the manifest's index."""
        survey = self.survey
        forms: list[Form] = []
        numbers: dict[int, int] = {}  # by the identity of the framing, of which there is one for each form
        places = Places(*([filler] * len(survey.specs) for filler in (-1, 0, 0)))
        form_of, file_of, offset_of = places
        for file, image in enumerate(self.images):
            for leaf, offset, framing, begin, _ in image.slots:
                spec, number = survey.specs[leaf], numbers.setdefault(id(framing), len(forms))
                if number == len(forms) and spec is not None:
                    sizes = (framing.length, begin - offset, framing.nbytes)
                    forms.append(Form(spec.dtype, spec.shape, spec.saved_stride, *sizes))
                form_of[leaf], file_of[leaf], offset_of[leaf] = number, file, offset
        for leaf, first in survey.tied.items():
            for column in places:
                column[leaf] = column[first]
        files = [image.name for image in self.images]
        return encode_index(survey.structure.names, survey.structure.paths, files, forms, places)

    @cached_property
    def slot_leaves(self) -> Sequence[int]:
        """The leaf of each slot, file by file."""
        return [slot.leaf for image in self.images for slot in image.slots]


@dataclass(frozen=True)
class DcpPlan(SavePlan):
    """A layout together with the objects of one save."""

    layout: DcpLayout
    objects: Sequence[tuple[str, ItemPlace]] = field(repr=False)

    def documents(self) -> dict[str, bytes]:
        """Encode `.metadata`."""
        return {METADATA_NAME: finish_metadata(self.layout.metadata_head, self.objects)}

    def index(self, crcs: Sequence[Sequence[int]]) -> str | None:
        """Encode the index for the manifest."""
        layout = self.layout
        if layout.index_head is None:
            return None
        tied = layout.survey.tied
        column = np.zeros(len(layout.specs), dtype=np.int64)
        column[layout.slot_leaves] = np.fromiter(chain.from_iterable(crcs), dtype=np.int64)
        column[list(tied)] = column[list(tied.values())]
        places = (place for _, place in self.objects)
        objects = [(leaf, place.offset, place.length) for leaf, place in zip(layout.objects, places, strict=True)]
        return finish_index(layout.index_head, column.tolist(), objects)


class DcpForm(SaveForm):
    """The format of ``torch.distributed.checkpoint``.

    Args:
        max_buckets: the most files to write, for the items of each hint and for the others.
        separation_hints: beginnings of names; what is called so goes to files of its own, which are called by the
            hint.
    """

    def __init__(self, max_buckets: int, separation_hints: Sequence[str] = ()) -> None:
        self._max_buckets = max_buckets
        self._hints = tuple(separation_hints)
        self.name = repr(("dcp", *self._hints))

    def describe(self, tensor: torch.Tensor) -> TensorSpec | None:
        """Describe a tensor; its dense strides are kept."""
        return describe(tensor)

    def lay_out(self, survey: Survey, capture: Capture, share: Share | None = None) -> DcpPlan:
        """Spread the tensors over a few files of about one size.

        Args:
            survey: what there is.
            capture: the tensors and objects.
            share: what of it to write; None for all.
        """
        if share is None:
            leaves: Sequence[int] = [leaf for leaf in range(len(survey.specs)) if leaf not in survey.tied]
            rank = 0
        else:
            rank, leaves = share
        chosen = [leaf for leaf in leaves if survey.specs[leaf] is None]
        blobs = _encode_objects(capture, chosen)
        object_bytes = sum(map(len, blobs.values()))
        # Some room to spare, so that a counter which grows a digit does not move every tensor.
        spare = min(object_bytes // 4 + 1024, 65_536)
        head_bytes = align_up(object_bytes + spare, BLOCK_BYTES) if object_bytes else 0
        groups = self._separated(survey, leaves)
        images: list[FileImage] = []
        for hint, group in groups.items():
            if not group and (hint or not object_bytes) and (share is not None or len(groups) > 1):
                continue  # a rank that has nothing to write makes no file
            framings = [(leaf, framing_of(survey.structure.names[leaf], survey.specs[leaf])) for leaf in group]
            sizes = [framing.length for _, framing in framings]
            buckets = assign_buckets(sizes, bucket_count(sum(sizes) + object_bytes * (not hint), self._max_buckets))
            images += [
                lay_out(
                    f"{hint}__{rank}_{len(images) + number}.distcp",
                    head_bytes if not images and number == 0 else 0,
                    [framings[i] for i in bucket],
                )
                for number, bucket in enumerate(buckets)
            ]
        return _with_objects(DcpLayout(survey, images, chosen), blobs)

    def _separated(self, survey: Survey, leaves: Sequence[int]) -> dict[str, list[int]]:
        """Sort the tensors by the hint that their names begin with; those of none come first."""
        groups: dict[str, list[int]] = {"": []}
        for leaf in leaves:
            if survey.specs[leaf] is not None:
                name = survey.structure.names[leaf]
                hint = next((hint for hint in self._hints if name.startswith(hint)), "") if self._hints else ""
                groups.setdefault(hint, []).append(leaf)
        return groups

    def fill(self, layout: Layout, capture: Capture) -> DcpPlan | None:
        """Put the objects into the room that the layout has for them."""
        if not isinstance(layout, DcpLayout):
            return None
        blobs = _encode_objects(capture, layout.objects)
        return _with_objects(layout, blobs) if sum(map(len, blobs.values())) <= layout.head_bytes else None


def framing_of(name: str, spec: TensorSpec | None) -> Framing:
    """Give the framing of a tensor's item.

    Raises:
        SaveError: it has a dtype that can't be stored.
    """
    if spec is None:
        raise TypeError(f"{name} is no tensor")
    try:
        return tensor_framing(spec.dtype, tuple(spec.shape), spec.saved_stride)
    except Exception as exc:  # whatever torch.save raises for what it can't store
        raise SaveError(f"{name} has the dtype {spec.dtype}, which torch.save can't store: {exc}") from exc


def _encode_objects(capture: Capture, leaves: Sequence[int]) -> dict[int, bytes]:
    blobs: dict[int, bytes] = {}
    for leaf in leaves:
        blob = capture.blobs.get(leaf)
        if blob is None:
            tensor = capture.tensors[leaf]
            value = capture.values[leaf] if tensor is None else tensor
            blob = encode_object(capture.structure.names[leaf], value)
        blobs[leaf] = blob
    return blobs


def _with_objects(layout: DcpLayout, blobs: Mapping[int, bytes]) -> DcpPlan:
    places: list[tuple[str, ItemPlace]] = []
    position = 0
    for leaf, blob in blobs.items():
        places.append((layout.structure.names[leaf], ItemPlace(layout.images[0].name, position, len(blob))))
        position += len(blob)
    heads = [b"".join(blobs.values()), *[b""] * (len(layout.images) - 1)] if layout.images else []
    return DcpPlan(layout, heads, places)
