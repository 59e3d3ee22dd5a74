"""Messages between the ranks of one save."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.format.manifest.columnar_index import ItemForm

if TYPE_CHECKING:
    import torch

    from aiockpt.format.dcp.metadata_opcodes import EncodedItem
    from aiockpt.format.index import ItemRange, ObjPath
    from aiockpt.format.item.ziparchive import Framing
    from aiockpt.format.manifest.manifest import FileFacts
    from aiockpt.planning.planner import Layout, SharedFiles, StateSummary
    from aiockpt.planning.specs import TensorSpec


# --- inventories ------------------------------------------------------------------------------------


RankLeaf = tuple[int, int]  # rank, and number of a leaf there

_PROTOCOL = 5


class ShardForm(NamedTuple):
    """The form of parts of tensors, whatever their offsets."""

    shape: tuple[int, ...]  # of the whole tensor
    item: ItemForm  # of the part as it is stored

    @property
    def dtype(self) -> torch.dtype:
        return self.item.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self.item.shape


@dataclass(frozen=True, slots=True)
class RankInventory:
    """A rank's leaves, sent to rank 0 for global planning."""

    names: list[str]
    paths: list[ObjPath]  # in the state dict
    forms: list[ShardForm]  # the distinct ones
    form_of: list[int]  # for each leaf its position in ``forms``; -1 for objects
    offsets: list[tuple[int, ...]]  # for each leaf where the part begins in the whole; () for objects
    tied: dict[int, int] = field(default_factory=dict)  # leaves with the memory of an earlier leaf, and that leaf
    containers: list[dict[str, Any]] = field(default_factory=list)  # records of the containers that paths can't express

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle of their own: rank 0 unpickles the names of thousands of ranks once if they are the same bytes.
        named = pickle.dumps((self.names, self.paths), _PROTOCOL)
        return _unpacked, (named, self.forms, self.form_of, self.offsets, self.tied, self.containers)


def inventory_of(
    summary: StateSummary, containers: list[dict[str, Any]], framing_of: Callable[[int, TensorSpec], Framing]
) -> RankInventory:
    """Return a rank's inventory; ``framing_of`` takes a leaf, and raises `SaveError` for one that can't be stored."""
    structure = summary.structure
    forms: dict[ShardForm, int] = {}
    form_of: list[int] = []
    offsets: list[tuple[int, ...]] = []
    nowhere: dict[int, tuple[int, ...]] = {}
    for leaf, spec in enumerate(summary.specs):
        if spec is None:
            form_of.append(-1)
            offsets.append(())
            continue
        sizes, framing = tuple(spec.shape), framing_of(leaf, spec)
        shard = structure.shards.get(leaf)
        whole, at = shard if shard is not None else (sizes, nowhere.setdefault(len(sizes), (0,) * len(sizes)))
        item = ItemForm(spec.dtype, sizes, spec.saved_stride, framing.length, len(framing.prefix), framing.nbytes)
        form_of.append(forms.setdefault(ShardForm(whole, item), len(forms)))
        offsets.append(at)
    return RankInventory(
        structure.names, structure.paths, list(forms), form_of, offsets, dict(summary.tied), containers
    )


def _unpacked(named: bytes, *rest: Any) -> RankInventory:
    return RankInventory(*_named(named), *rest)


@functools.lru_cache(maxsize=8)
def _named(data: bytes) -> tuple[list[str], list[ObjPath]]:
    """Unpickle names and paths; ranks that have the same ones share one list, which must not be changed."""
    names, paths = pickle.loads(data)
    return names, paths


# --- requests, assignments and results --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A rank's message in the first round."""

    overwrite: bool  # as passed by the caller
    file_format: str  # its name
    token: int | None  # of the global plan that the rank's reusable layout belongs to; None: there is none
    inventory: RankInventory | None = field(repr=False)  # None: rank 0 knows it by the token
    digests: bytes | None = field(repr=False, default=None)  # see `digest_replicas`; None: nothing is compared
    replicas: str = "check"  # as passed by the caller
    is_transformed: bool = False  # items are compressed or transformed
    has_fallback: bool = False


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Rank 0's reply."""

    ticket: str | None  # to join the transaction; None: send a full inventory in another round
    token: int  # of the global plan
    leaves: list[int] | None = field(repr=False)  # to write; None: the same as last time
    report_places: bool  # report where the items are
    shared: SharedFiles | None = field(repr=False, default=None)  # None: the same as last time, or files of its own


class ItemPlaces(NamedTuple):
    """The places of the items of one rank's assignment, one row for each."""

    files: list[str]  # names of the rank's files
    leaves: list[int]
    file_of: list[int]  # positions in ``files``
    offsets: list[int]  # in the file, in bytes
    lengths: list[int]  # in bytes


def places_of(layout: Layout) -> ItemPlaces:
    """Return where the tensors of a layout are."""
    rows = [
        (slot.leaf, number, slot.offset, slot.framing.length)
        for number, image in enumerate(layout.stored_images)
        for slot in image.slots
    ]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return ItemPlaces([image.name for image in layout.stored_images], *columns)


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's report of what it wrote."""

    files: dict[str, FileFacts]
    items: int  # number of tensor items
    objects: dict[int, ItemRange]  # by leaf
    places: ItemPlaces | None = field(repr=False)  # of tensor items; None if rank 0 knows them from an earlier save
    crcs: bytes = field(repr=False, default=b"")  # uint32: CRC-32 of the payload of each tensor item, file by file
    # of each file the items as they are stored; None: as they were planned
    encoded: Sequence[Sequence[EncodedItem]] | None = field(repr=False, default=None)
