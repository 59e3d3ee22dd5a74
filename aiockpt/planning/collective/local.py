"""One rank's side of collective planning: its inventory, and the cached layout of its assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.planning.collective.messages import ItemPlaces, RankInventory, ShardForm
from aiockpt.planning.planner import FileFormat, Layout, RankLeaves, SavePlan, SharedFiles, StateSummary, can_reuse

if TYPE_CHECKING:
    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.snapshot import Snapshot


class ReusedPlan(NamedTuple):
    """A plan with the cached layout."""

    token: int  # of the global plan that the layout belongs to
    plan: SavePlan


class _Kept(NamedTuple):
    """Cached layout of this rank's assignment, with the global plan's token and the containers it was made from."""

    token: int
    layout: Layout
    containers: list[dict[str, JsonValue]]


class LocalPlanner:
    """Plans one rank's files, named ``prefix...``; caches the last layout of each format."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._kept: dict[str, _Kept] = {}

    def reuse(self, snapshot: Snapshot, file_format: FileFormat) -> ReusedPlan | None:
        """Return a plan with the cached layout, if that fits. Takes a while for many tensors."""
        kept = self._kept.get(file_format.name)
        if kept is None or kept.containers != snapshot.containers:
            return None
        # Every tensor, because a save of several ranks can't be planned again once staging finds another file_format.
        serves = can_reuse(kept.layout, snapshot, file_format, every=True)
        plan = file_format.fill(kept.layout, snapshot) if serves else None
        return None if plan is None else ReusedPlan(kept.token, plan)

    def lay_out(
        self,
        snapshot: Snapshot,
        file_format: FileFormat,
        summary: StateSummary,
        token: int,
        leaves: Sequence[int],
        shared: SharedFiles | None = None,
    ) -> SavePlan:
        """Lay out the leaves assigned to this rank."""
        plan = file_format.lay_out(summary, snapshot, RankLeaves(self._prefix, leaves, shared))
        self._kept[file_format.name] = _Kept(token, plan.layout, snapshot.containers)
        return plan


def inventory_of(summary: StateSummary, snapshot: Snapshot, file_format: FileFormat) -> RankInventory:
    """Return a rank's inventory; raise `SaveError` for a dtype that can't be stored."""
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
        sizes = tuple(spec.shape)
        shard = structure.shards.get(leaf)
        whole, at = shard if shard is not None else (sizes, nowhere.setdefault(len(sizes), (0,) * len(sizes)))
        part = ShardForm(spec.dtype, whole, sizes, file_format.framing(structure.names[leaf], spec).length)
        form_of.append(forms.setdefault(part, len(forms)))
        offsets.append(at)
    tied = dict(summary.tied)
    return RankInventory(structure.names, structure.paths, list(forms), form_of, offsets, tied, snapshot.containers)


def places_of(layout: Layout) -> ItemPlaces:
    """Return where the tensors of a layout are."""
    rows = [
        (slot.leaf, number, slot.offset, slot.framing.length)
        for number, image in enumerate(layout.images)
        for slot in image.slots
    ]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return ItemPlaces([image.name for image in layout.images], *columns)
