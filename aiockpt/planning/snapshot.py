"""What a plan is made from: a state dict at the moment of `save()`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest.manifest import JsonValue


class Shard(NamedTuple):
    """Where a part of a tensor belongs in the whole.

    Attributes:
        shape: the sizes of the whole tensor.
        offsets: where the part begins in it.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(slots=True)
class Structure:
    """The names and kinds of a state dict's leaves, in order; equal structures may share a layout.

    Attributes:
        names: the fully qualified name of each leaf. A tensor of which this rank has several parts is several leaves.
        paths: the path of each leaf.
        objects: the leaves that are no tensors.
        shards: the leaves that are parts of tensors which several ranks have together.
    """

    names: list[str]
    paths: list[ObjPath]
    objects: frozenset[int]
    shards: dict[int, Shard] = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """A state dict at the moment of `save()`.

    Attributes:
        structure: names, paths and kinds of the leaves.
        containers: records of the containers that paths can't express.
        tensors: for each leaf its tensor, detached; None for objects.
        versions: for each leaf its version counter; None where changes can't be seen or don't matter.
        wholes: for leaves that are parts of DTensors that tensor, which has a counter of its own, and its version.
        values: objects that can't change, to be pickled later.
        blobs: objects that could change, pickled.
        foreign: of these, those that are not plain data: the class, and what `foreign_names` gives.
        eager: for each tensor copied at the call its place in the arena of its device: offset and bytes.
        arenas: for each device the bytes of the tensors copied at the call, dtype uint8.
        events: for each accelerator the moment in the caller's stream at which the tensors are ready.
        behind: makes a stream current that comes behind one of these events; for reading in another thread.
        token: is let go of when the tensors are.
    """

    structure: Structure
    containers: list[dict[str, JsonValue]]
    tensors: list[torch.Tensor | None]
    versions: list[int | None]
    wholes: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    foreign: dict[int, tuple[str, dict[str, bool]]] = field(default_factory=dict)
    eager: dict[int, tuple[int, int]] = field(default_factory=dict)
    arenas: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    events: dict[torch.device, torch.Event] = field(default_factory=dict)
    behind: Callable[[torch.device, torch.Event], AbstractContextManager[object]] | None = None
    token: object = None

    def readable(self, device: torch.device) -> AbstractContextManager[object]:
        """Let this thread read tensors of a device, once they are ready."""
        event = self.events.get(device)
        return nullcontext() if event is None or self.behind is None else self.behind(device, event)

    def changed(self) -> list[str]:
        """Give the names of the tensors that were changed in place since the capture; none when it is released."""
        # Each is read once: another thread may release them meanwhile.
        tensors, versions, wholes, names = self.tensors, self.versions, self.wholes, self.structure.names
        if not len(tensors) == len(versions) == len(names):
            return []
        parts = [names[leaf] for leaf, whole, version in wholes if whole._version != version]
        return parts + [
            name
            for name, tensor, version in zip(names, tensors, versions, strict=True)
            if version is not None and tensor is not None and tensor._version != version
        ]

    def overlook(self, allowed: Callable[[torch.Tensor], bool]) -> None:
        """No longer tell of changes of some tensors, and of the DTensors that they are parts of."""
        tensors, versions, wholes = self.tensors, self.versions, self.wholes  # see `changed`
        leaves = {leaf for leaf, tensor in enumerate(tensors) if tensor is not None and allowed(tensor)}
        if len(tensors) == len(versions):
            for leaf in leaves:
                versions[leaf] = None
        wholes[:] = [each for each in wholes if each[0] not in leaves]

    def release(self) -> None:
        """Let go of the tensors and objects."""
        self.token = None
        self.values = {}
        self.blobs = {}
        self.foreign = {}
        self.tensors = []
        self.versions = []
        self.wholes = []
        self.eager.clear()
        self.arenas.clear()
        self.events.clear()
