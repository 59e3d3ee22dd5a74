"""One rank's side of planning together: what it has, what it was told to write, and the layout kept for that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from aiockpt.planning.collective.messages import ItemPlaces, RankInventory, ShardForm
from aiockpt.planning.dcp_plan import DcpForm, DcpPlan, Share, framing_of
from aiockpt.planning.planner import may_serve, survey_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.planning.dcp_plan import DcpLayout
    from aiockpt.planning.planner import StateSummary
    from aiockpt.planning.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class LocalProposal:
    """What a rank brings to the planning of one save.

    Attributes:
        token: the plan of all ranks that the kept layout belongs to, and may serve again; None if there is none.
        plan: this rank's plan by that layout.
        survey: what there is, where there is no such layout.
    """

    token: int | None
    plan: DcpPlan | None = field(repr=False)
    survey: StateSummary | None = field(repr=False)


class _Kept(NamedTuple):
    """The layout of a share, the plan of all ranks that it belongs to, and what else that was made from."""

    token: int
    layout: DcpLayout
    containers: list[dict[str, JsonValue]]


class LocalPlanner:
    """Plans one rank's share; keeps the last layout of each form.

    Args:
        prefix: what the names of the rank's files begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._kept: dict[str, _Kept] = {}

    def offer(self, capture: Snapshot, form: DcpForm, *, again: bool = False) -> LocalProposal:
        """Look whether the kept layout may serve again; else look at what there is. Takes a while for many tensors.

        Args:
            capture: what to save.
            form: how.
            again: whether the kept layout may be used.

        Raises:
            SaveError: an object can't be serialised.
        """
        kept = self._kept.get(form.name)
        if again and kept is not None and kept.containers == capture.containers:
            serves = may_serve(kept.layout, capture, form, every=True)
            plan = form.fill(kept.layout, capture) if serves else None
            if plan is not None:
                return LocalProposal(kept.token, plan, None)
        return LocalProposal(None, None, survey_of(capture, form))

    def take(
        self, capture: Snapshot, form: DcpForm, survey: StateSummary, token: int, leaves: Sequence[int]
    ) -> DcpPlan:
        """Lay out the share that this rank was given.

        Raises:
            SaveError: an object can't be serialised.
        """
        plan = form.lay_out(survey, capture, Share(self._prefix, leaves))
        self._kept[form.name] = _Kept(token, plan.layout, capture.containers)
        return plan


def inventory_of(survey: StateSummary, capture: Snapshot) -> RankInventory:
    """Say what a rank has.

    Raises:
        SaveError: a tensor has a dtype that can't be stored.
    """
    structure = survey.structure
    forms: dict[ShardForm, int] = {}
    form_of: list[int] = []
    offsets: list[tuple[int, ...]] = []
    nowhere: dict[int, tuple[int, ...]] = {}
    for leaf, spec in enumerate(survey.specs):
        if spec is None:
            form_of.append(-1)
            offsets.append(())
            continue
        sizes = tuple(spec.shape)
        shard = structure.shards.get(leaf)
        whole, at = shard if shard is not None else (sizes, nowhere.setdefault(len(sizes), (0,) * len(sizes)))
        form = ShardForm(spec.dtype, whole, sizes, framing_of(structure.names[leaf], spec).length)
        form_of.append(forms.setdefault(form, len(forms)))
        offsets.append(at)
    tied = dict(survey.tied)
    return RankInventory(structure.names, structure.paths, list(forms), form_of, offsets, tied, capture.containers)


def places_of(layout: DcpLayout) -> ItemPlaces:
    """Say where the tensors of a layout are."""
    rows = [
        (slot.leaf, number, slot.offset, slot.framing.length)
        for number, image in enumerate(layout.images)
        for slot in image.slots
    ]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return ItemPlaces([image.name for image in layout.images], *columns)
