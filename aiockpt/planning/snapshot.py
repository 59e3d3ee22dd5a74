"""A state dict at the moment of `save()`, from which plans are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from aiockpt.core.dataclasses import dataclass, field
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
    addresses: list[int | None] = field(default_factory=list)  # of the memory on devices; None as in `versions`
    # for a leaf its DTensor, which has a version counter of its own, and that version
    wholes: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)  # immutable objects, pickled later
    blobs: dict[int, bytes] = field(default_factory=dict)  # mutable objects, pickled at the call
    together: bytes = b""  # those of several leaves in one pickle, by their numbers, if they are stored in one
    # the blobs that are not plain data: class, and result of `foreign_names`
    foreign: dict[int, tuple[str, dict[str, bool]]] = field(default_factory=dict)
    # classes whose tensors are saved dequantized, with a key of each
    encoded: dict[str, str] = field(default_factory=dict)
    shared: tuple[str, str, str] | None = None  # two objects that share a third one, and the class of that
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

    def changed(self, leaves: Iterable[int] | None = None) -> list[str]:
        """Return the names of these leaves (None: all) that changed, or moved, since; none once it is released."""
        # Each is read once: another thread may release them meanwhile.
        tensors, versions, addresses, names = self.tensors, self.versions, self.addresses, self.structure.names
        wholes = self.wholes
        if not len(tensors) == len(versions) == len(addresses) == len(names):
            return []
        parts = [
            names[leaf]
            for leaf in (wholes if leaves is None else leaves)
            if leaf in wholes and wholes[leaf][0]._version != wholes[leaf][1]
        ]
        if leaves is None:
            rows = zip(names, tensors, versions, addresses, strict=True)
        else:
            rows = zip(
                *([column[leaf] for leaf in leaves] for column in (names, tensors, versions, addresses)), strict=True
            )
        # Memory that was freed shows in no counter. If it was allocated again, that is elsewhere: see `Runtime.use`.
        return parts + [
            name
            for name, tensor, version, address in rows
            if tensor is not None
            and (
                (version is not None and tensor._version != version)
                or (address is not None and address_of(tensor) != address)
            )
        ]

    def ignore_changes(self, leaves: Iterable[int]) -> None:
        """Stop reporting changes of these leaves, and of the DTensors they are parts of."""
        versions, addresses, wholes = self.versions, self.addresses, self.wholes  # see `changed`
        for leaf in leaves if versions else ():
            wholes.pop(leaf, None)
            versions[leaf] = addresses[leaf] = None

    def release(self) -> None:
        """Release the tensors and objects."""
        self.token = None
        self.values = {}
        self.blobs = {}
        self.together = b""
        self.foreign = {}
        self.tensors = []
        self.versions = []
        self.addresses = []
        self.wholes = {}
        self.eager.clear()
        self.arenas.clear()
        self.events.clear()
