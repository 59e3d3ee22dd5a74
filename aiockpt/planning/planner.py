"""From a capture to a plan: what is stored, in which file, at which byte; and the cache of such plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.errors import SaveError
from aiockpt.format.index import ChunkEntry, Entry, ItemPlace, ObjectEntry, TensorEntry
from aiockpt.format.metadata_writer import MetadataHead, encode_metadata, finish_metadata
from aiockpt.format.objects import encode_object
from aiockpt.format.torchzip import Framing, tensor_framing
from aiockpt.planning.buckets import assign_buckets, bucket_count
from aiockpt.planning.layout import BLOCK_BYTES, FileImage, align_up, lay_out
from aiockpt.planning.tree import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.planning.source import Capture, Structure


CHECKED_AHEAD = 20_000
"""Up to this many tensors are compared with a kept layout when planning; more only when they are staged."""


class TensorSpec(NamedTuple):
    """What a plan assumes of a tensor; staging checks it.

    Attributes:
        shape: its sizes.
        dtype: its dtype.
        stride: its strides in elements.
        saved_stride: the strides that it is stored with; they leave no gaps.
        is_raw: its memory is, byte for byte, what is stored.
        device: where it is.
        is_conj: its values are lazily conjugated.
        is_neg: its values are lazily negated.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    saved_stride: tuple[int, ...]
    is_raw: bool
    device: torch.device
    is_conj: bool = False
    is_neg: bool = False

    def describes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor still is what was planned for."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.stride() == self.stride
            and tensor.device == self.device
            and tensor.is_conj() is self.is_conj
            and tensor.is_neg() is self.is_neg
        )


def describe(tensor: torch.Tensor) -> TensorSpec | None:
    """Describe a tensor, or give None if it is not plain: sparse, quantized, or of another layout."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    shape, dtype, stride, device = tensor.shape, tensor.dtype, tensor.stride(), tensor.device
    conj, neg = tensor.is_conj(), tensor.is_neg()
    if (tensor.is_contiguous() or is_dense(shape, stride)) and not (conj or neg):
        return TensorSpec(shape, dtype, stride, stride, True, device)
    # The strides that Tensor.clone gives, which is what DCP stores a view with.
    blueprint = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return TensorSpec(shape, dtype, stride, torch.empty_like(blueprint).stride(), False, device, conj, neg)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether strides reach every element of a storage once, in some order of the dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


@dataclass
class Layout:
    """Where everything goes that does not change from save to save.

    Attributes:
        structure: names and paths of the leaves.
        specs: for each leaf what was assumed of it; None for objects.
        late_objects: leaves that are tensors but stored as objects.
        tied: leaves that are the same memory as an earlier leaf, with that leaf; stored once.
        addresses: how many distinct addresses the tensors had.
        images: the files.
    """

    structure: Structure
    specs: Sequence[TensorSpec | None]
    late_objects: frozenset[int]
    tied: Mapping[int, int]
    addresses: int
    images: Sequence[FileImage]

    @property
    def head_bytes(self) -> int:
        """The room for objects, at the beginning of the first file."""
        return self.images[0].head_bytes

    @cached_property
    def object_leaves(self) -> list[int]:
        """The leaves that are stored as objects."""
        return sorted(self.structure.objects | self.late_objects)

    @cached_property
    def never_staged(self) -> list[int]:
        """The leaves that no piece is copied of, so that staging does not check them."""
        empty = (slot.leaf for image in self.images for slot in image.slots if slot.framing.nbytes == 0)
        return [*self.tied, *empty, *self.late_objects]

    @cached_property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors, each stored one counted once."""
        return sum(slot.framing.nbytes for image in self.images for slot in image.slots)

    @cached_property
    def metadata_head(self) -> MetadataHead:
        """The beginning of `.metadata`."""
        places: dict[int, ItemPlace] = {
            slot.leaf: ItemPlace(image.name, slot.offset, slot.framing.length)
            for image in self.images
            for slot in image.slots
        }
        entries: list[tuple[str, Entry]] = []
        nowhere = ObjectEntry(ItemPlace("", 0, 0))
        for leaf, name in enumerate(self.structure.names):
            spec = self.specs[leaf]
            if spec is None:
                entries.append((name, nowhere))
            else:
                shape = tuple(spec.shape)
                chunk = ChunkEntry((0,) * len(shape), shape, places[self.tied.get(leaf, leaf)])
                entries.append((name, TensorEntry(spec.dtype, shape, (chunk,))))
        return encode_metadata(entries, dict(zip(self.structure.names, self.structure.paths, strict=True)))


@dataclass(frozen=True)
class SavePlan:
    """A layout together with the objects of one save."""

    layout: Layout
    head: bytes
    objects: Sequence[tuple[str, ItemPlace]] = field(repr=False)

    def metadata(self) -> bytes:
        """Encode `.metadata`. The first time for a layout takes long for many tensors."""
        return finish_metadata(self.layout.metadata_head, self.objects)


class Planner:
    """Makes plans and keeps the last layout, which serves again while the structure stays the same.

    Args:
        max_buckets: the most files to write.
    """

    def __init__(self, max_buckets: int) -> None:
        self._max_buckets = max_buckets
        self._layout: Layout | None = None

    def forget(self) -> None:
        """Drop the kept layout: it turned out not to fit."""
        self._layout = None

    def plan(self, capture: Capture) -> SavePlan:
        """Plan a save. Pure but for the kept layout; takes a while for many tensors.

        Raises:
            SaveError: an object can't be serialised.
        """
        layout = self._layout
        if layout is not None and _may_serve(layout, capture):
            blobs = _encode_objects(capture, layout.object_leaves)
            if sum(map(len, blobs.values())) <= layout.head_bytes:
                return _with_objects(layout, blobs)
        specs = [None if tensor is None else describe(tensor) for tensor in capture.tensors]
        late = frozenset(
            leaf for leaf, tensor in enumerate(capture.tensors) if tensor is not None and specs[leaf] is None
        )
        blobs = _encode_objects(capture, sorted(capture.structure.objects | late))
        self._layout = layout = self._lay_out(capture, specs, late, sum(map(len, blobs.values())))
        return _with_objects(layout, blobs)

    def _lay_out(
        self,
        capture: Capture,
        specs: Sequence[TensorSpec | None],
        late: frozenset[int],
        object_bytes: int,
    ) -> Layout:
        tied = _find_tied(capture, specs)
        framings: list[tuple[int, Framing]] = []
        for leaf, spec in enumerate(specs):
            if spec is not None and leaf not in tied:
                framings.append((leaf, _framing_of(capture.structure.names[leaf], spec)))
        sizes = [framing.length for _, framing in framings]
        buckets = assign_buckets(sizes, bucket_count(sum(sizes) + object_bytes, self._max_buckets))
        # Some room to spare, so that a counter which grows a digit does not move every tensor.
        spare = min(object_bytes // 4 + 1024, 65_536)
        head_bytes = align_up(object_bytes + spare, BLOCK_BYTES) if object_bytes else 0
        images = [
            lay_out(f"__0_{number}.distcp", head_bytes if number == 0 else 0, [framings[i] for i in bucket])
            for number, bucket in enumerate(buckets)
        ]
        return Layout(capture.structure, specs, late, tied, len(set(_addresses(capture))), images)


def _framing_of(name: str, spec: TensorSpec) -> Framing:
    try:
        return tensor_framing(spec.dtype, tuple(spec.shape), spec.saved_stride)
    except Exception as exc:  # whatever torch.save raises for what it can't store
        raise SaveError(f"{name} has the dtype {spec.dtype}, which torch.save can't store: {exc}") from exc


def _may_serve(layout: Layout, capture: Capture) -> bool:
    """Tell whether a kept layout may serve; staging then checks each tensor against its spec."""
    mine, theirs = layout.structure, capture.structure
    if mine.objects != theirs.objects or mine.names != theirs.names or mine.paths != theirs.paths:
        return False
    ahead = range(len(capture.tensors)) if len(capture.tensors) <= CHECKED_AHEAD else layout.never_staged
    for leaf in ahead:
        tensor, spec = capture.tensors[leaf], layout.specs[leaf]
        if tensor is None:
            continue
        if not spec.describes(tensor) if spec is not None else describe(tensor) is not None:
            return False
    addresses = _addresses(capture)
    return len(set(addresses)) == layout.addresses and all(
        addresses[leaf] == addresses[first] for leaf, first in layout.tied.items()
    )


def _addresses(capture: Capture) -> list[int]:
    """Give the address of each leaf; zero for objects and for tensors that have none."""
    try:
        return [0 if tensor is None else tensor.data_ptr() for tensor in capture.tensors]
    except RuntimeError:  # sparse tensors have no address
        plain = [
            tensor if tensor is not None and tensor.layout is torch.strided else None for tensor in capture.tensors
        ]
        return [0 if tensor is None else tensor.data_ptr() for tensor in plain]


def _find_tied(capture: Capture, specs: Sequence[TensorSpec | None]) -> dict[int, int]:
    first: dict[tuple[int, TensorSpec], int] = {}
    tied: dict[int, int] = {}
    for leaf, (spec, address) in enumerate(zip(specs, _addresses(capture), strict=True)):
        if spec is not None and address and math.prod(spec.shape):
            earlier = first.setdefault((address, spec), leaf)
            if earlier != leaf:
                tied[leaf] = earlier
    return tied


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


def _with_objects(layout: Layout, blobs: Mapping[int, bytes]) -> SavePlan:
    places: list[tuple[str, ItemPlace]] = []
    position = 0
    for leaf, blob in blobs.items():
        places.append((layout.structure.names[leaf], ItemPlace(layout.images[0].name, position, len(blob))))
        position += len(blob)
    return SavePlan(layout, b"".join(blobs.values()), places)


def stored_bytes(state_dict: Mapping[Any, Any]) -> tuple[int, set[torch.device]]:
    """Estimate, from above, the bytes that a state dict takes when stored; and give the devices it is on."""
    tensors = [leaf for leaf in flatten(state_dict).leaves if isinstance(leaf, torch.Tensor)]
    plain = [tensor for tensor in tensors if tensor.layout is torch.strided]
    framing_bytes = 2 * BLOCK_BYTES  # with the gap before a payload that is aligned
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize + framing_bytes for tensor in plain)
    return nbytes, {tensor.device for tensor in plain}
