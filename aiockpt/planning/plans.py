"""Layouts, which serve for many saves, and plans, each of one save; whatever the format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

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
