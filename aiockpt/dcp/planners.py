"""Load planners for empty state dicts, and for files without metadata."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt.errors import CorruptCheckpointError, LoadError
from aiockpt.format.keys import matching
from aiockpt.planning.flatten import StructureError, unflatten

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Plans from the state dict alone, without metadata; for `aiockpt.dcp.BroadcastingTorchSaveReader`.

    Replaces torch's class of this name. Objects are loaded as well as tensors.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Build the metadata that the file must match: each tensor whole, as a single chunk."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # After super(), which flattens the state dict: the file is searched by these flat names.
        described: dict[str, Any] = {}
        for name, value in self.state_dict.items():
            described[name] = _described(value) if isinstance(value, torch.Tensor) else BytesStorageMetadata()
        self.metadata = Metadata(described)


def _described(tensor: torch.Tensor) -> TensorStorageMetadata:
    size = tensor.size()
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [chunk])


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Fills an empty dict with the contents of the checkpoint: new tensors in host memory, and objects.

    Replaces torch's private class of this name, for callers that fill the dict that they are given, such as
    ``_load_state_dict`` of ``torch.distributed.checkpoint.state_dict_loader``; ``dcp.load`` fills a copy.

    Args:
        keys: load only these: names of tensors, of objects, and of containers, which are loaded with all that they
            contain; and glob patterns, as in `aiockpt.AsyncCheckpointer.load`. None: everything.
        args: see `torch.distributed.checkpoint.DefaultLoadPlanner`.
        kwargs: see there.
    """

    def __init__(self, keys: Collection[str] | str | None = None, *args: Any, **kwargs: Any) -> None:
        self.keys = {keys} if isinstance(keys, str) else keys
        super().__init__(*args, **kwargs)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Create the tensors.

        Raises:
            LoadError: ``state_dict`` is not empty, or there is no metadata, or its structure is damaged.
        """
        if state_dict:
            raise LoadError(
                f"the state dict has {len(state_dict)} keys already; pass an empty one, or use DefaultLoadPlanner to "
                "fill what is there"
            )
        if metadata is None:
            raise LoadError("a state dict can't be made without the checkpoint's metadata")
        planned: Mapping[str, Any] = metadata.planner_data or {}
        names, paths, values = [], [], []
        known = metadata.state_dict_metadata
        wanted = known.keys() if self.keys is None else matching(known.keys(), self.keys)[0]
        for name, described in known.items():
            if name in wanted:
                _check_whole(name, described)
                names.append(name)
                paths.append(tuple(planned.get(name, (name,))))
                values.append(_empty(described))
        try:
            state_dict.update(unflatten(paths, values))
        except StructureError as exc:
            raise LoadError(f"the checkpoint's names can't be put together to a state dict: {exc}") from exc
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if self.keys is not None and self.flatten_state_dict:  # list positions that were left out hold None
            self.state_dict = {name: self.state_dict[name] for name in names}

    def create_local_plan(self) -> LoadPlan:
        """Plan to read everything that was created."""
        if self.metadata is None:
            raise LoadError("a plan can't be made before set_up_planner")
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)


_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner
"""Torch's name of it."""


def _check_whole(name: str, described: Any) -> None:
    """Raise if metadata lacks chunks of a tensor, so that a damaged shape allocates no memory."""
    if not isinstance(described, TensorStorageMetadata):
        return
    held, whole = sum(math.prod(chunk.sizes) for chunk in described.chunks), math.prod(described.size)
    if held < whole:
        raise CorruptCheckpointError(
            f"the metadata has {held} of the {whole} elements of {name}: it is that of one rank that saved alone, or "
            "damaged; pass a state dict with this rank's part to fill"
        )


def _empty(described: Any) -> Any:
    if isinstance(described, TensorStorageMetadata):
        return torch.empty(described.size, dtype=described.properties.dtype, device="cpu")
    return described
