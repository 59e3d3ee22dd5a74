"""Save plans, the interface of file formats, and the planner that caches layouts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.format.item.arrays import ARRAY_TYPES, tensor_of
from aiockpt.planning.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.manifest.index_writer import IndexDraft
    from aiockpt.planning.layout import FileImage
    from aiockpt.planning.snapshot import Snapshot, Structure
    from aiockpt.planning.specs import TensorSpec


@dataclass
class StateSummary:
    """What a state dict is made of, before anything has a place.

    Attributes:
        structure: names and paths of the leaves.
        specs: for each leaf what was assumed of it; None for objects.
        late_objects: leaves that are tensors but stored as objects.
        tied: leaves that are the same memory as an earlier leaf, with that leaf; stored once.
        addresses: how many distinct addresses the tensors had.
    """

    structure: Structure
    specs: Sequence[TensorSpec | None]
    late_objects: frozenset[int]
    tied: Mapping[int, int]
    addresses: int

    @cached_property
    def object_leaves(self) -> list[int]:
        """The leaves that are stored as objects."""
        return sorted(self.structure.objects | self.late_objects)


@dataclass
class Layout:
    """Where everything goes that does not change from save to save.

    Attributes:
        survey: what there is.
        images: the files.
    """

    survey: StateSummary
    images: Sequence[FileImage]

    @property
    def structure(self) -> Structure:
        """Names and paths of the leaves."""
        return self.survey.structure

    @property
    def specs(self) -> Sequence[TensorSpec | None]:
        """For each leaf what was assumed of it; None for objects."""
        return self.survey.specs

    @cached_property
    def never_staged(self) -> list[int]:
        """The leaves that no piece is copied of, so that staging does not check them."""
        empty = (slot.leaf for image in self.images for slot in image.slots if slot.framing.nbytes == 0)
        return [*self.survey.tied, *empty, *self.survey.late_objects]

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(image.nbytes for image in self.images)

    @cached_property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors, each stored one counted once."""
        return sum(slot.framing.nbytes for image in self.images for slot in image.slots)


@dataclass(frozen=True)
class SavePlan(ABC):
    """A layout together with what differs from save to save.

    Attributes:
        layout: where everything goes.
        heads: the bytes at the beginning of each file, at most ``head_bytes`` of its image.
    """

    layout: Layout
    heads: Sequence[bytes] = field(repr=False)

    @property
    def is_single_file(self) -> bool:
        """Whether the checkpoint is one file, with nothing beside it."""
        return False

    @abstractmethod
    def documents(self) -> dict[str, bytes]:
        """Encode the files beside the images and the manifest. Takes long the first time for many tensors."""

    def index(self) -> IndexDraft | None:
        """Encode the index for the manifest, but for the CRCs; None for a format that has its own."""
        return None


class SaveForm(ABC):
    """A format to save in: what it makes of tensors, and where it puts them."""

    name: str

    def admit(self, capture: Snapshot) -> None:
        """Refuse what the format can't hold, and drop what it does not keep.

        Raises:
            SaveError: naming the key.
        """

    @abstractmethod
    def describe(self, tensor: torch.Tensor) -> TensorSpec | None:
        """Describe how a tensor is stored, or give None if it is stored as an object."""

    @abstractmethod
    def lay_out(self, survey: StateSummary, capture: Snapshot) -> SavePlan:
        """Make a plan with a new layout.

        Raises:
            SaveError: something can't be stored in this format; the message names the key.
        """

    @abstractmethod
    def fill(self, layout: Layout, capture: Snapshot) -> SavePlan | None:
        """Make a plan with a layout that was made by a form of this name; None if it is not for this form.

        Raises:
            SaveError: something can't be stored in this format; the message names the key.
        """


# --- planning and reusing layouts -------------------------------------------------------------------


CHECKED_AHEAD = 20_000
"""Up to this many tensors are compared with a kept layout when planning; more only when they are staged."""


class Planner:
    """Makes plans and keeps the last layout of each format, which serves again while the structure stays the same.

    Args:
        default: the format of saves that name none.
    """

    def __init__(self, default: SaveForm) -> None:
        self._default = default
        self._layouts: dict[str, Layout] = {}

    def forget(self) -> None:
        """Drop the kept layouts: one turned out not to fit."""
        self._layouts.clear()

    def plan(self, capture: Snapshot, form: SaveForm | None = None) -> SavePlan:
        """Plan a save. Pure but for the kept layouts; takes a while for many tensors.

        Args:
            capture: what to save.
            form: the format to save in; None for the default.

        Raises:
            SaveError: an object can't be serialised, or something can't be stored in this format.
        """
        form = self._default if form is None else form
        layout = self._layouts.get(form.name)
        if layout is not None and may_serve(layout, capture, form):
            plan = form.fill(layout, capture)
            if plan is not None:
                return plan
        plan = form.lay_out(survey_of(capture, form), capture)
        self._layouts[form.name] = plan.layout
        return plan


def survey_of(capture: Snapshot, form: SaveForm) -> StateSummary:
    """Look at what a capture is made of. Takes a while for many tensors."""
    tensors = capture.tensors
    specs = [None if tensor is None else form.describe(tensor) for tensor in tensors]
    late = frozenset(leaf for leaf, tensor in enumerate(tensors) if tensor is not None and specs[leaf] is None)
    addresses = _addresses(capture)
    return StateSummary(capture.structure, specs, late, _find_tied(specs, addresses), len(set(addresses)))


def may_serve(layout: Layout, capture: Snapshot, form: SaveForm, *, every: bool = False) -> bool:
    """Tell whether a kept layout may serve; staging then checks each tensor against its spec.

    Args:
        layout: the layout.
        capture: what is to be saved.
        form: the format to save in.
        every: compare every tensor now, however many there are.
    """
    mine, theirs = layout.structure, capture.structure
    if mine.objects != theirs.objects or mine.names != theirs.names or mine.paths != theirs.paths:
        return False
    if mine.shards != theirs.shards:
        return False
    count = len(capture.tensors)
    ahead = range(count) if every or count <= CHECKED_AHEAD else layout.never_staged
    for leaf in ahead:
        tensor, spec = capture.tensors[leaf], layout.specs[leaf]
        if tensor is None:
            continue
        if not spec.describes(tensor) if spec is not None else form.describe(tensor) is not None:
            return False
    addresses = _addresses(capture)
    return len(set(addresses)) == layout.survey.addresses and all(
        addresses[leaf] == addresses[first] for leaf, first in layout.survey.tied.items()
    )


def _addresses(capture: Snapshot) -> list[int]:
    """Give the address of each leaf; zero for objects and for tensors that have none."""
    try:
        return [0 if tensor is None else tensor.data_ptr() for tensor in capture.tensors]
    except RuntimeError:  # sparse tensors have no address
        plain = [
            tensor if tensor is not None and tensor.layout is torch.strided else None for tensor in capture.tensors
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
    """Estimate, from above, the bytes that a state dict takes when stored; and give the devices it is on."""
    leaves = (tensor_of(leaf) if type(leaf) in ARRAY_TYPES else leaf for leaf in flatten(state_dict).leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = [tensor for tensor in tensors if tensor.layout is torch.strided]
    framing_bytes = 2 * BLOCK_BYTES  # with the gap before a payload that is aligned
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize + framing_bytes for tensor in plain)
    return nbytes, {tensor.device for tensor in plain}
