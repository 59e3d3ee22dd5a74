"""Save plans, the interface of file formats, and the planner that caches layouts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.core.lazy import lazy_property
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.format.item.arrays import ARRAY_TYPES, tensor_of
from aiockpt.planning.flatten import flatten
from aiockpt.planning.specs import TensorSpec, describe

if TYPE_CHECKING:
    from aiockpt.format.index import ItemRange
    from aiockpt.format.item.ziparchive import Framing
    from aiockpt.format.manifest.index_writer import Drafts
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.layout import FileImage
    from aiockpt.planning.snapshot import Snapshot, Structure


@dataclass
class StateSummary:
    """The tensors and objects of a state dict, before they have places in files."""

    structure: Structure
    specs: Sequence[TensorSpec | None]  # the assumed form of each leaf; None for objects
    late_objects: frozenset[int]  # leaves that are tensors but stored as objects
    tied: Mapping[int, int]  # leaves with the memory of an earlier leaf, and that leaf; stored once
    addresses: int  # number of distinct addresses of the tensors


@dataclass
class Layout:
    """The part of a plan that does not change from save to save: what goes where."""

    summary: StateSummary
    images: Sequence[FileImage]

    @property
    def structure(self) -> Structure:
        """Names and paths of the leaves."""
        return self.summary.structure

    @property
    def specs(self) -> Sequence[TensorSpec | None]:
        """Assumed form of each leaf; None for objects."""
        return self.summary.specs

    @lazy_property
    def never_staged(self) -> list[int]:
        """Leaves without a staged piece, which staging therefore does not check."""
        empty = (slot.leaf for image in self.images for slot in image.slots if slot.framing.nbytes == 0)
        return [*self.summary.tied, *empty, *self.summary.late_objects]

    @property
    def stored_images(self) -> Sequence[FileImage]:
        """All files with items, also those that are not written anew."""
        return self.images

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are written."""
        return sum(image.nbytes for image in self.images)

    @lazy_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each stored one counted once."""
        return sum(slot.framing.nbytes for image in self.stored_images for slot in image.slots)


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a checkpoint that was written; with several ranks, rank 0's for all."""

    files: dict[str, int] | None  # sizes in bytes; None for ranks other than 0, of which there may be thousands
    file_bytes: int  # of all files with items
    tensor_bytes: int  # of the tensors in them
    tensors: int
    objects: int


class SharedFiles(NamedTuple):
    """The files that all ranks write together, as one rank has to know them."""

    names: Sequence[str]
    sizes: Sequence[int]  # in bytes
    places: Mapping[int, tuple[int, int]]  # for each leaf that the rank writes: file, and offset of the whole tensor
    heads: Sequence[tuple[str, Mapping[str, str]]]  # on rank 0: what the header of each file describes; else empty


class RankLeaves(NamedTuple):
    """The leaves that one of several ranks writes."""

    prefix: str  # of the names of its files
    leaves: Sequence[int]
    shared: SharedFiles | None = None  # for a format whose files all ranks write together
    first: int = 0  # the number of the first file
    cold: Collection[int] = frozenset()  # leaves that go to files of their own


@dataclass(frozen=True)
class SavePlan(ABC):
    """A layout together with what differs from save to save."""

    layout: Layout
    # the bytes at the beginning of each file, at most ``head_bytes`` of its image
    heads: Sequence[bytes] = field(repr=False)

    @property
    def is_single_file(self) -> bool:
        """Whether the checkpoint is one file, with nothing beside it."""
        return False

    @property
    def object_places(self) -> Mapping[int, ItemRange]:
        """Where each leaf is stored that is no tensor."""
        return {}

    @abstractmethod
    def drafts(self, *, is_transformed: bool = False) -> Drafts:
        """Encode the documents of a checkpoint of this rank alone. The first call takes long for many tensors."""


class FileFormat(ABC):
    """A checkpoint format: how tensors are stored, and where."""

    name: str

    def validate(self, snapshot: Snapshot) -> None:
        """Drop what the format does not keep; raise `SaveError`, naming the key, for what it can't hold."""

    def check(self, names: Sequence[str], specs: Sequence[TensorSpec | None]) -> None:
        """Raise `SaveError`, naming the key, for a tensor that the format can't hold."""

    def describe(self, tensor: torch.Tensor) -> TensorSpec | None:
        """Return how a tensor is stored, by default with its dense strides; None if it is stored as an object."""
        return describe(tensor)

    @abstractmethod
    def framing(self, name: str, spec: TensorSpec) -> Framing:
        """Return the framing of a tensor; raise `SaveError` for one that can't be stored."""

    @abstractmethod
    def lay_out(self, summary: StateSummary, snapshot: Snapshot, written: RankLeaves | None = None) -> SavePlan:
        """Return a plan with a new layout of what this rank writes (None: it is alone); see `framing` for errors."""

    @abstractmethod
    def fill(self, layout: Layout, snapshot: Snapshot) -> SavePlan | None:
        """Return a plan with a layout of an earlier save in this form; None if this save does not fit it."""


# --- planning and reusing layouts -------------------------------------------------------------------


# Up to this many tensors are compared with a cached layout when planning; more only when they are staged.
CHECKED_AHEAD = 10_000


class ReusedPlan(NamedTuple):
    """A plan with the cached layout."""

    token: int  # of the global plan that the layout belongs to
    plan: SavePlan


class Planner:
    """Plans one rank's files; caches the last layout of each format for saves of the same structure.

    ``prefix`` begins the names of the files of one of several ranks, or of files that are added to a directory.
    """

    def __init__(self, default: FileFormat, prefix: str | None = None) -> None:
        self._default = default
        self._prefix = prefix
        # For each format the last layout, with the global plan's token and the containers that it was made from.
        self._kept: dict[str, tuple[int, Layout, list[dict[str, JsonValue]]]] = {}

    def invalidate(self) -> None:
        """Drop the cached layouts, because one turned out not to fit."""
        self._kept.clear()

    def plan(self, snapshot: Snapshot, file_format: FileFormat | None = None) -> SavePlan:
        """Plan a save of all leaves in a format (None: the default). Takes a while for many tensors."""
        file_format = self._default if file_format is None else file_format
        reused = self.reuse(snapshot, file_format)
        if reused is not None:
            return reused.plan
        leaves = None if self._prefix is None else range(len(snapshot.tensors))
        return self.lay_out(snapshot, file_format, summarize(snapshot, file_format), leaves)

    def reuse(self, snapshot: Snapshot, file_format: FileFormat, *, together: bool = False) -> ReusedPlan | None:
        """Return a plan with the cached layout, if that fits. Takes a while for many tensors.

        Compare every tensor if ``together``: a save of several ranks can't be planned again once staging finds another.
        """
        if file_format.name not in self._kept:
            return None
        token, layout, containers = self._kept[file_format.name]
        if together and containers != snapshot.containers:
            return None
        serves = can_reuse(layout, snapshot, file_format, every=together)
        plan = file_format.fill(layout, snapshot) if serves else None
        return None if plan is None else ReusedPlan(token, plan)

    def lay_out(
        self,
        snapshot: Snapshot,
        file_format: FileFormat,
        summary: StateSummary,
        leaves: Sequence[int] | None,
        token: int = 0,
        shared: SharedFiles | None = None,
    ) -> SavePlan:
        """Lay out the leaves that this rank writes (None: it is alone), by the global plan of a token."""
        written = None if leaves is None else RankLeaves(self._prefix or "", leaves, shared)
        plan = file_format.lay_out(summary, snapshot, written)
        self._kept[file_format.name] = token, plan.layout, snapshot.containers
        return plan


def summarize(snapshot: Snapshot, file_format: FileFormat) -> StateSummary:
    """Summarise a snapshot. Takes a while for many tensors."""
    tensors = snapshot.tensors
    specs = [None if tensor is None else file_format.describe(tensor) for tensor in tensors]
    late = frozenset(leaf for leaf, tensor in enumerate(tensors) if tensor is not None and specs[leaf] is None)
    addresses = _addresses(snapshot)
    return StateSummary(snapshot.structure, specs, late, _find_tied(specs, addresses), len(set(addresses)))


def can_reuse(layout: Layout, snapshot: Snapshot, file_format: FileFormat, *, every: bool = False) -> bool:
    """Return whether a cached layout fits a snapshot; staging later checks each tensor against its spec.

    Beyond `CHECKED_AHEAD` tensors only those that are never staged are compared here, unless ``every`` is set.
    """
    mine, theirs = layout.structure, snapshot.structure
    if mine.objects != theirs.objects or mine.names != theirs.names or mine.paths != theirs.paths:
        return False
    if mine.shards != theirs.shards:
        return False
    count = len(snapshot.tensors)
    ahead = range(count) if every or count <= CHECKED_AHEAD else layout.never_staged
    for leaf in ahead:
        tensor, spec = snapshot.tensors[leaf], layout.specs[leaf]
        if tensor is None:
            continue
        if not spec.describes(tensor) if spec is not None else file_format.describe(tensor) is not None:
            return False
    # Tied tensors are stored once, so the same ones must be tied as before, and no others.
    addresses = _addresses(snapshot)
    return len(set(addresses)) == layout.summary.addresses and all(
        addresses[leaf] == addresses[first] for leaf, first in layout.summary.tied.items()
    )


def _addresses(snapshot: Snapshot) -> list[int]:
    """Return the address of each leaf; zero for objects and for tensors that have none."""
    try:
        return [0 if tensor is None else tensor.data_ptr() for tensor in snapshot.tensors]
    except RuntimeError:  # sparse tensors have no address
        plain = [
            tensor if tensor is not None and tensor.layout is torch.strided else None for tensor in snapshot.tensors
        ]
        return [0 if tensor is None else tensor.data_ptr() for tensor in plain]


def _find_tied(specs: Sequence[TensorSpec | None], addresses: Sequence[int]) -> dict[int, int]:
    first: dict[tuple[int, TensorSpec], int] = {}
    tied: dict[int, int] = {}
    for leaf, (spec, address) in enumerate(zip(specs, addresses, strict=True)):
        if spec is not None and address and math.prod(spec.shape):
            earlier = first.setdefault((address, spec), leaf)
            if earlier != leaf:
                tied[leaf] = earlier
    return tied


def stored_bytes(state_dict: Mapping[Any, Any]) -> tuple[int, set[torch.device]]:
    """Return an upper estimate of a state dict's stored bytes, and the devices that its tensors are on."""
    leaves = (tensor_of(leaf) if type(leaf) in ARRAY_TYPES else leaf for leaf in flatten(state_dict).leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = [tensor for tensor in tensors if tensor.layout is torch.strided]
    framing_bytes = 2 * BLOCK_BYTES  # with the gap before a payload that is aligned
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize + framing_bytes for tensor in plain)
    return nbytes, {tensor.device for tensor in plain}
