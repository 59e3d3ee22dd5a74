"""`BroadcastingTorchSaveReader`, by which one rank reads for all; planners for loads without metadata or state."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from aiockpt.coordination.choose import is_distributed
from aiockpt.dcp.adapter import borrowed, finished, resolved_target
from aiockpt.dcp.convert import map_torch_file
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError, CorruptCheckpointError, LoadError, MissingKeysError, ShapeMismatchError
from aiockpt.format.item.objects import encode_object
from aiockpt.format.keys import hint
from aiockpt.options import LoadOptions, Path, check_options, target_device
from aiockpt.planning.ranges import Selection, boxes, overlap, select

if TYPE_CHECKING:
    from torch.futures import Future

    _Form = tuple[torch.dtype, tuple[int, ...]]
    _Contents = dict[str, bytes | _Form]
    """The coordinator's description of the file: objects, as torch.save writes them, and the forms of tensors."""


_PIECE_BYTES = 32 << 20
"""Size of the pieces in which a tensor is broadcast."""


class BroadcastingTorchSaveReader(format_utils.BroadcastingTorchSaveReader):
    """Reads a ``torch.save`` file on one rank, and broadcasts it tensor by tensor, for ``dcp.load``.

    Replaces torch's class of this name, and is a subclass of it. Objects are loaded as well as tensors, nothing in the
    file is executed, and no rank holds more than 32 MiB in addition to its own tensors::

        dcp.load(
            state_dict,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id="model.pt",
        )

    An error on the coordinator is raised by every rank. Without a process group the file is simply read.

    Args:
        checkpoint_id: the file; ``dcp.load`` passes it too.
        coordinator_rank: the rank that reads. It must be the coordinator of ``dcp.load``, which is rank 0.
        verify: check the CRCs of the file, which takes reading it once more.
        safe_globals: classes and functions that the file's pickle may use, in addition to those that torch allows.
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
        super().__init__(checkpoint_id, coordinator_rank)
        self.is_coordinator = False
        self._options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust)
        check_options(self._options, into=False)

    def __repr__(self) -> str:
        return f"BroadcastingTorchSaveReader({self.checkpoint_id!r}, {self.coordinator_rank})"

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Check that the right rank coordinates.

        Raises:
            LoadError: it does not, or no file was named.
        """
        self.is_coordinator = is_coordinator
        rank = dist.get_rank() if is_distributed() else self.coordinator_rank
        if is_coordinator != (rank == self.coordinator_rank):
            raise LoadError(
                f"rank {rank} {'plans' if is_coordinator else 'does not plan'} this load, but rank "
                f"{self.coordinator_rank} was to read the file; give coordinator_rank the rank that plans"
            )
        if self.checkpoint_id is None:
            raise LoadError("there is no file to read; pass checkpoint_id, here or to dcp.load")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and broadcast. Blocks; every rank must call it.

        Returns:
            A future that is done.

        Raises:
            MissingKeysError: the file lacks a key that a rank wants.
            ShapeMismatchError: the planner's tensor does not have the shape that its plan asks for, or the file's
                tensor is too small.
            CorruptCheckpointError: the file is damaged.
            UnsafeCheckpointError: it needs something that was not allowed.
        """
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index.fqn, []).append(item)
        names = _wanted_by_all(list(wanted))
        leaves, box = self._described(names, planner) if self.is_coordinator else ({}, [None])
        if is_distributed():
            dist.broadcast_object_list(box, src=self.coordinator_rank)
        if isinstance(box[0], AiockptError):
            raise box[0]
        contents: _Contents = box[0]
        failed: Exception | None = None
        for name in names:
            content, regions = contents[name], list[_WantedRegion]()
            try:
                regions = _wanted_regions(wanted.get(name, ()), content, planner)
            except Exception as exc:  # the other ranks continue, so this one joins their broadcasts to the end
                failed = failed or exc
            if not isinstance(content, bytes):
                self._broadcast_tensor(content, leaves.get(name), regions)
            for region in regions:
                planner.commit_tensor(region.item, region.target)
        if failed is not None:
            raise failed
        return finished(None)

    # --- on the coordinator -----------------------------------------------------------------------

    def _described(self, names: Sequence[str], planner: LoadPlanner) -> tuple[dict[str, Any], list[Any]]:
        """Return the file's leaves, and in a list the contents of those that are wanted, or an error for all ranks."""
        try:
            leaves = self._open()
            if not isinstance(leaves, dict):
                raise LoadError(f"{self.checkpoint_id} holds a {type(leaves).__name__}, not a state dict")
            if getattr(planner, "flatten_state_dict", True):
                leaves, _ = flatten_state_dict(leaves)
            missing = tuple(name for name in names if name not in leaves)
            if missing:
                raise MissingKeysError(
                    f"{self.checkpoint_id} lacks {', '.join(missing[:10])}.{hint(missing, leaves)}", missing
                )
            return leaves, [{name: _content(name, leaves[name]) for name in names}]
        except AiockptError as exc:
            return {}, [exc]
        except Exception as exc:  # whatever it is, the other ranks are waiting for this broadcast
            error = LoadError(f"reading {self.checkpoint_id} failed: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            return {}, [error]

    def _open(self) -> Any:
        with borrowed(None) as checkpointer:
            engine = EngineAccess(checkpointer)
            storage, path = engine.locate(os.fspath(self.checkpoint_id or ""))
            call = engine.call(lambda tools: map_torch_file(storage, path, self._options, tools), f"open {path}")
            return call.result()

    # --- on every rank ----------------------------------------------------------------------------

    def _broadcast_tensor(self, form: _Form, tensor: torch.Tensor | None, regions: Sequence[_WantedRegion]) -> None:
        """Broadcast a tensor piece by piece, and copy this rank's regions out of each piece."""
        dtype, shape = form
        kinds = [] if dist.group.WORLD is None else [device.type for device in dist.group.WORLD._device_types]
        # On the host if the group can broadcast from there, else on this thread's current device.
        device = target_device("cpu" if "cpu" in kinds or not kinds else kinds[0])
        for box in (box for start, stop in _pieces(shape, dtype) for box in boxes(shape, start, stop)):
            piece = torch.empty(box.count, dtype=dtype, device=device)
            if tensor is not None:
                block = tensor[box.index]
                piece.view(block.shape).copy_(block)
            if is_distributed():
                # As bytes: no backend broadcasts every dtype.
                dist.broadcast(piece.view(torch.uint8), src=self.coordinator_rank)
            block_at = select(shape, box.index).selections
            for region in regions:
                region.fill_from(block_at, piece)


def _content(name: str, value: Any) -> bytes | _Form:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else encode_object(name, value)


@dataclass(frozen=True, slots=True)
class _WantedRegion:
    """A region of a tensor that this rank wants."""

    item: ReadItem
    starts: tuple[int, ...]  # in the whole tensor
    lengths: tuple[int, ...]
    target: torch.Tensor

    def fill_from(self, block: Sequence[Selection], values: torch.Tensor) -> None:
        """Copy the overlap with a block of the whole tensor; ``values`` are its elements, row by row."""
        common = overlap(self.starts, self.lengths, block)
        if common is not None:
            ours = tuple(slice(part.start, part.start + part.count) for part in common.chunk)
            with torch.no_grad():
                self.target[ours].copy_(values.view([part.count for part in block])[common.target])


def _wanted_regions(items: Sequence[ReadItem], content: bytes | _Form, planner: LoadPlanner) -> list[_WantedRegion]:
    """Return the regions of a tensor that the plan asks for; hand an object to the planner at once."""
    regions: list[_WantedRegion] = []
    for item in items:
        name, is_object = item.storage_index.fqn, item.type == LoadItemType.BYTE_IO
        if is_object != isinstance(content, bytes):
            there, here = ("a tensor", "an object") if is_object else ("an object", "a tensor")
            raise ShapeMismatchError(f"{name} is {there} in the file but {here} in the state dict")
        if isinstance(content, bytes):
            planner.load_bytes(item, io.BytesIO(content))
            continue
        _, shape = content
        begin = item.storage_index.offset or (0,) * len(item.storage_offsets)
        starts = tuple(o + at for o, at in zip(begin, item.storage_offsets, strict=True))
        lengths = tuple(item.lengths)
        if len(starts) != len(shape) or any(s + n > size for s, n, size in zip(starts, lengths, shape, strict=True)):
            raise ShapeMismatchError(f"{name} has the shape {shape} in the file, which has no {lengths} at {starts}")
        regions.append(_WantedRegion(item, starts, lengths, resolved_target(planner, item, "the file")))
    return regions


def _pieces(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yield ranges of a tensor's elements that are broadcast together; they end at ends of rows where possible."""
    count = math.prod(shape)
    most = max(1, _PIECE_BYTES // dtype.itemsize)
    row = math.prod(shape[1:])
    step = most - most % row if 0 < row <= most else most
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _wanted_by_all(names: list[str]) -> list[str]:
    """Return the keys that any rank wants, in the same order on every rank."""
    if not is_distributed():
        return names
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return list(dict.fromkeys(name for each in gathered for name in each))


# --- planners -------------------------------------------------------------------------------------


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
            described[name] = BytesStorageMetadata()
            if isinstance(value, torch.Tensor):
                chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
                described[name] = TensorStorageMetadata(TensorProperties(value.dtype), value.size(), [chunk])
        self.metadata = Metadata(described)


class EmptyStateDictLoadPlanner(_EmptyStateDictLoadPlanner):
    """Fills an empty dict with the contents of the checkpoint: torch's private class of this name.

    For callers that fill the dict that they are given, such as ``_load_state_dict`` of
    ``torch.distributed.checkpoint.state_dict_loader``; ``dcp.load`` fills a copy.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Create the tensors; raise CorruptCheckpointError if the metadata lacks chunks of one."""
        if metadata is not None:
            for name, described in metadata.state_dict_metadata.items():
                if not isinstance(described, TensorStorageMetadata) or not self._should_include_key(name, metadata):
                    continue
                held, whole = sum(math.prod(chunk.sizes) for chunk in described.chunks), math.prod(described.size)
                if held < whole:  # so that a damaged shape allocates no memory
                    raise CorruptCheckpointError(
                        f"the metadata has {held} of the {whole} elements of {name}: it is that of one rank that saved "
                        "alone, or damaged; pass a state dict with this rank's part to fill"
                    )
        super().set_up_planner(state_dict, metadata, is_coordinator)
