"""What a plan is made from: a state dict at the moment of `save()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest import JsonValue


@dataclass(slots=True)
class Structure:
    """The names and kinds of a state dict's leaves, in order; equal structures may share a layout."""

    names: list[str]
    paths: list[ObjPath]
    objects: frozenset[int]


def freed_message(name: str) -> str:
    """Say that a tensor has no memory to copy."""
    return (
        f"the memory of {name} was freed: its storage is smaller than the tensor. Save a state dict whose tensors "
        "are materialised"
    )


@dataclass(slots=True)
class Capture:
    """A state dict at the moment of `save()`.

    Attributes:
        structure: names, paths and kinds of the leaves.
        containers: records of the containers that paths can't express.
        tensors: for each leaf its tensor, detached; None for objects.
        versions: for each leaf its version counter; None where changes can't be seen or don't matter.
        values: objects that can't change, to be pickled later.
        blobs: objects that could change, pickled.
        eager: for each tensor copied at the call its place in the arena of its device: offset and bytes.
        arenas: for each device the bytes of the tensors copied at the call, dtype uint8.
        events: for each accelerator the moment in the caller's stream at which the tensors are ready.
    """

    structure: Structure
    containers: list[dict[str, JsonValue]]
    tensors: list[torch.Tensor | None]
    versions: list[int | None]
    values: dict[int, Any] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    eager: dict[int, tuple[int, int]] = field(default_factory=dict)
    arenas: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    events: dict[torch.device, torch.Event] = field(default_factory=dict)

    def changed(self) -> list[str]:
        """Give the names of the tensors that were changed in place since the capture."""
        if not self.tensors:
            return []
        return [
            name
            for name, tensor, version in zip(self.structure.names, self.tensors, self.versions, strict=True)
            if version is not None and tensor is not None and tensor._version != version
        ]

    def release(self) -> None:
        """Let go of the tensors and objects."""
        self.values = {}
        self.blobs = {}
        self.tensors = []
        self.versions = []
        self.eager.clear()
        self.arenas.clear()
        self.events.clear()
