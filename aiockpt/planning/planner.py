"""From a capture to a plan: what is stored, in which file, at which byte; and the cache of such plans."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.format.item.arrays import ARRAY_TYPES, tensor_of
from aiockpt.planning.dcp_plan import DcpForm
from aiockpt.planning.flatten import flatten
from aiockpt.planning.plans import Layout, SaveForm, SavePlan, StateSummary
from aiockpt.planning.specs import TensorSpec, describe, is_dense

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.planning.snapshot import Snapshot

__all__ = ["CHECKED_AHEAD", "Layout", "Planner", "SavePlan", "TensorSpec", "describe", "is_dense", "stored_bytes"]

CHECKED_AHEAD = 20_000
"""Up to this many tensors are compared with a kept layout when planning; more only when they are staged."""


class Planner:
    """Makes plans and keeps the last layout of each format, which serves again while the structure stays the same.

    Args:
        max_buckets: the most files to write in DCP's format.
    """

    def __init__(self, max_buckets: int) -> None:
        self._dcp = DcpForm(max_buckets)
        self._layouts: dict[str, Layout] = {}

    def forget(self) -> None:
        """Drop the kept layouts: one turned out not to fit."""
        self._layouts.clear()

    def plan(self, capture: Snapshot, form: SaveForm | None = None) -> SavePlan:
        """Plan a save. Pure but for the kept layouts; takes a while for many tensors.

        Args:
            capture: what to save.
            form: the format to save in; None for DCP's.

        Raises:
            SaveError: an object can't be serialised, or something can't be stored in this format.
        """
        form = self._dcp if form is None else form
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
