"""A state dict at the moment of `save()`, from which plans are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.extent import address_of

if TYPE_CHECKING:
    import torch

    from aiockpt.format.index import ObjPath
    from aiockpt.format.manifest.manifest import JsonValue


class Shard(NamedTuple):
    """The position of a part in a whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the part begins in it


@dataclass(slots=True)
class Structure:
    """The names and kinds of a state dict's leaves, in order; equal structures may share a layout."""

    names: list[str]  # fully qualified; a tensor of which this rank has several parts is several leaves
    paths: list[ObjPath]
    objects: frozenset[int]  # leaves that are no tensors
    shards: dict[int, Shard] = field(default_factory=dict)  # leaves that are parts of distributed tensors


@dataclass(slots=True)
class Snapshot:
    """A state dict at the moment of `save()`; one row for each leaf."""

    structure: Structure
    containers: list[dict[str, JsonValue]]  # records of the containers that paths can't express
    tensors: list[torch.Tensor | None]  # detached; None for objects
    versions: list[int | None]  # version counters; None if changes can't be seen or don't matter
    # on devices, the memory's addresses; None as in `versions`. Empty if all is in host memory, which is copied at once
    addresses: list[int | None] = field(default_factory=list)
    # leaf, its DTensor, which has a version counter of its own, and that version
    wholes: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)  # immutable objects, pickled later
    blobs: dict[int, bytes] = field(default_factory=dict)  # mutable objects, pickled at the call
    # the blobs that are not plain data: class, and result of `foreign_names`
    foreign: dict[int, tuple[str, dict[str, bool]]] = field(default_factory=dict)
    # tensors copied at the call: offset and bytes in the arena of their device
    eager: dict[int, tuple[int, int]] = field(default_factory=dict)
    # per device the bytes of the tensors copied at the call, dtype uint8
    arenas: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    # per accelerator the point in the caller's stream at which the tensors are ready
    events: dict[torch.device, torch.Event] = field(default_factory=dict)
    # makes a stream current that waits for such an event, for reading in another thread
    behind: Callable[[torch.device, torch.Event], AbstractContextManager[object]] | None = None
    token: object = None  # released together with the tensors

    def readable(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which this thread may read tensors of a device, once they are ready."""
        event = self.events.get(device)
        return nullcontext() if event is None or self.behind is None else self.behind(device, event)

    def changed(self) -> list[str]:
        """Return the names of the tensors changed, or moved, since the snapshot; none once it is released."""
        # Each is read once: another thread may release them meanwhile.
        tensors, versions, wholes, names = self.tensors, self.versions, self.wholes, self.structure.names
        addresses = self.addresses
        if not len(tensors) == len(versions) == len(names):
            return []
        parts = [names[leaf] for leaf, whole, version in wholes if whole._version != version]
        # Memory that was freed shows in no counter. If it was allocated again, that is elsewhere: see `Runtime.use`.
        parts += [
            name
            for name, tensor, address in zip(names, tensors, addresses, strict=False)
            if address is not None and address != address_of(tensor)
        ]
        return parts + [
            name
            for name, tensor, version in zip(names, tensors, versions, strict=True)
            if version is not None and tensor is not None and tensor._version != version
        ]

    def ignore_changes(self, allowed: Callable[[torch.Tensor], bool]) -> None:
        """Stop reporting changes of the tensors that ``allowed`` selects, and of the DTensors they are parts of."""
        tensors, versions, wholes = self.tensors, self.versions, self.wholes  # see `changed`
        leaves = {leaf for leaf, tensor in enumerate(tensors) if tensor is not None and allowed(tensor)}
        if len(tensors) == len(versions):
            for leaf in leaves:
                versions[leaf] = None
                if self.addresses:
                    self.addresses[leaf] = None
        wholes[:] = [each for each in wholes if each[0] not in leaves]

    def release(self) -> None:
        """Release the tensors and objects."""
        self.token = None
        self.values = {}
        self.blobs = {}
        self.foreign = {}
        self.tensors = []
        self.versions = []
        self.addresses = []
        self.wholes = []
        self.eager.clear()
        self.arenas.clear()
        self.events.clear()
