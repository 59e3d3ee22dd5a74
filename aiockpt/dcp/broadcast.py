"""`BroadcastingTorchSaveReader`: one rank reads a ``torch.save`` file, and gives the others what they need of it."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from aiockpt.dcp.broadcast_pieces import RegionPlace, box_origin, box_sizes, pieces, region
from aiockpt.dcp.convert.torch_source import map_torch_file
from aiockpt.errors import AiockptError, LoadError, MissingKeysError, ShapeMismatchError
from aiockpt.format.keys import hint
from aiockpt.options import LoadOptions, check_options
from aiockpt.planning.ranges import boxes
from aiockpt.reading.targets import check_memory
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from aiockpt.dcp.convert.torch_source import MappedState

    Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the coordinator tells the others about the file.

    Attributes:
        tensors: dtype and shape of each tensor that somebody wants.
        objects: each object that somebody wants, as ``torch.save`` writes it.
        error: why nothing can be read.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    error: AiockptError | None = None


class BroadcastingTorchSaveReader(StorageReader):
    """Reads a ``torch.save`` file on one rank, and broadcasts it tensor by tensor, for ``dcp.load``.

    Takes the place of torch's class of this name. Objects are loaded as well as tensors, nothing in the file is
    executed, and no rank holds more than 32 MiB beside its own tensors::

        dcp.load(
            state_dict,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id="model.pt",
        )

    What goes wrong on the coordinator is raised by every rank. Without a process group the file is just read.

    Args:
        checkpoint_id: the file; ``dcp.load`` gives it too.
        coordinator_rank: the rank that reads; that of ``dcp.load``, which is 0.
        verify: check the CRCs of the file, which takes reading it once more.
        safe_globals: classes and functions that the file's pickle may use, besides those torch allows.
        trust: unpickle without restriction, which runs whatever code the file asks for.
    """

    def __init__(
        self,
        checkpoint_id: Path | None = None,
        coordinator_rank: int = 0,
        *,
        verify: bool = True,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = False
        self._options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust)
        check_options(self._options, into=False)

    def __repr__(self) -> str:
        return f"BroadcastingTorchSaveReader({self.checkpoint_id!r}, {self.coordinator_rank})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a file."""
        return os.path.isfile(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another load, of the file ``checkpoint_id``."""
        self.checkpoint_id = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Give metadata that says nothing: `aiockpt.dcp.DynamicMetaLoadPlanner` makes it from the state dict."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Look whether the right rank coordinates.

        Raises:
            LoadError: it does not, or there is no file to read.
        """
        self.is_coordinator = is_coordinator
        rank = dist.get_rank() if _is_distributed() else self.coordinator_rank
        if is_coordinator != (rank == self.coordinator_rank):
            raise LoadError(
                f"rank {rank} {'plans' if is_coordinator else 'does not plan'} this load, but rank "
                f"{self.coordinator_rank} was to read the file; give coordinator_rank the rank that plans"
            )
        if self.checkpoint_id is None:
            raise LoadError("there is no file to read; pass checkpoint_id, here or to dcp.load")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and broadcast. Blocks; every rank must call it.

        Returns:
            A future that is done.

        Raises:
            MissingKeysError: the file lacks a key of some rank.
            ShapeMismatchError: the planner's tensor is not of the shape that it asked for, or the file's is too small.
            CorruptCheckpointError: the file is damaged.
            UnsafeCheckpointError: it needs something that was not allowed.
        """
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index.fqn, []).append(item)
        names = _wanted_by_all(list(wanted))
        leaves, offer = self._offer(names, planner) if self.is_coordinator else ({}, _Offer())
        offer = _broadcast_object(offer, self.coordinator_rank)
        if offer.error is not None:
            raise offer.error
        failed: Exception | None = None
        for name in names:
            places: list[RegionPlace] = []
            try:
                places = _places(wanted.get(name, ()), offer, name, planner)
            except Exception as exc:  # the others go on, and so does this rank until they are done
                failed = failed or exc
            if name in offer.tensors:
                self._spread(name, offer, leaves.get(name), places)
            for place in places:
                planner.commit_tensor(place.item, place.target)
        if failed is not None:
            raise failed
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- on the coordinator -----------------------------------------------------------------------

    def _offer(self, names: Sequence[str], planner: LoadPlanner) -> tuple[dict[str, Any], _Offer]:
        """Open the file, and describe what is wanted of it."""
        try:
            value = self._open().value
            if not isinstance(value, dict):
                raise LoadError(f"{self.checkpoint_id} holds a {type(value).__name__}, not a state dict")
            leaves: dict[str, Any] = value
            if getattr(planner, "flatten_state_dict", True):
                leaves, _ = flatten_state_dict(value)
            missing = tuple(name for name in names if name not in leaves)
            if missing:
                raise MissingKeysError(
                    f"{self.checkpoint_id} lacks {', '.join(missing[:10])}.{hint(missing, leaves)}", missing
                )
            tensors = {n: leaves[n] for n in names if isinstance(leaves[n], torch.Tensor)}
            offer = _Offer(
                {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
                {name: _saved(leaves[name]) for name in names if name not in tensors},
            )
        except AiockptError as exc:
            return {}, _Offer(error=exc)
        except Exception as exc:  # whatever it is, the other ranks are waiting to be told
            error = LoadError(f"reading {self.checkpoint_id} failed: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            return {}, _Offer(error=error)
        return tensors, offer

    def _open(self) -> MappedState:
        with SyncCheckpointer(process_group=None) as checkpointer:
            storage, path = checkpointer._located(os.fspath(self.checkpoint_id or ""), None)
            call = checkpointer._engine.call(
                lambda tools: map_torch_file(storage, path, self._options, tools), f"open {path}"
            )
            return call.result()

    # --- on every rank ----------------------------------------------------------------------------

    def _spread(self, name: str, offer: _Offer, tensor: torch.Tensor | None, places: Sequence[RegionPlace]) -> None:
        """Broadcast a tensor piece by piece, and take from it what is wanted here."""
        dtype, shape = offer.tensors[name]
        device = _device()
        for start, stop in pieces(shape, dtype):
            piece = torch.empty(stop - start, dtype=dtype, device=device)
            parts = boxes(shape, start, stop)
            views = [
                v.view(box_sizes(box, shape))
                for box, v in zip(parts, torch.split(piece, [b.count for b in parts]), strict=True)
            ]
            if tensor is not None:
                for box, view in zip(parts, views, strict=True):
                    view.copy_(tensor[box.index].view(view.shape))
            if _is_distributed():
                dist.broadcast(piece.view(torch.uint8), src=self.coordinator_rank)
            for box, view in zip(parts, views, strict=True):
                for place in places:
                    place.take(box_origin(box, shape), view)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    """Give the device whose tensors the default group broadcasts."""
    if not _is_distributed() or "gloo" in str(dist.get_backend()) or "cpu:" in str(dist.get_backend()):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _wanted_by_all(names: list[str]) -> list[str]:
    """Give the keys that some rank wants, in the same order on every rank."""
    if not _is_distributed():
        return names
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return list(dict.fromkeys(name for each in gathered for name in each))


def _broadcast_object(value: _Offer, source: int) -> _Offer:
    if not _is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _places(items: Sequence[ReadItem], offer: _Offer, name: str, planner: LoadPlanner) -> list[RegionPlace]:
    """Ask the planner for its tensors; give it an object at once.

    Raises:
        ShapeMismatchError: what it gives does not fit what it asked for.
    """
    if name in offer.objects:
        for item in items:
            if item.type != LoadItemType.BYTE_IO:
                raise ShapeMismatchError(f"{name} is an object in the file but a tensor in the state dict")
            planner.load_bytes(item, io.BytesIO(offer.objects[name]))
        return []
    places = []
    for item in items:
        starts, lengths = region(item, offer.tensors[name][1])
        target = planner.resolve_tensor(item).detach()
        if tuple(target.size()) != lengths:
            raise ShapeMismatchError(
                f"{name}: the planner gave a tensor of the shape {tuple(target.size())} for a part of {lengths}"
            )
        check_memory(name, target)
        places.append(RegionPlace(item, starts, lengths, target))
    return places
