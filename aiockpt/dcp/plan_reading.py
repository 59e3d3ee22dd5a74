"""Carrying out a load plan: items are read by the engine's threads, the planner is called by the caller's alone."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType

from aiockpt.dcp.aliasing import AliasIndex
from aiockpt.errors import CorruptCheckpointError, LoadError, ShapeMismatchError
from aiockpt.format.item.objects import decode_object
from aiockpt.planning.ranges import Selection
from aiockpt.reading.executor import ItemReader
from aiockpt.reading.read_plan import TensorRead, annotate_partial_load
from aiockpt.reading.targets import check_memory
from aiockpt.snapshot.capture import ready_events
from aiockpt.snapshot.optimizer_hooks import count_change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from aiockpt.dcp.index import StoredItem
    from aiockpt.engine.engine import Engine
    from aiockpt.format.index import ItemRange, TensorItem
    from aiockpt.options import LoadOptions
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Source

_WINDOW_BYTES = 128 << 20
"""How much is read, at most, that is not yet where it belongs."""
_ALONE_BYTES = 32 << 20
"""Parts of this size and more are read straight to their place, one after the other if need be."""
_OBJECTS_AT_A_TIME = 64


@dataclass(eq=False, slots=True)
class _Request:
    """An item of a plan on its way.

    Attributes:
        item: what is asked for.
        stored: where it is.
        target: the planner's tensor, as soon as it was asked for it.
        staged: where the values are until they are copied to the target; None if they go straight there.
        read: how a tensor's part is read, if it has any bytes.
        blob: what was read of an object.
    """

    item: ReadItem
    stored: StoredItem
    target: torch.Tensor | None = None
    staged: torch.Tensor | None = None
    read: TensorRead | None = None
    blob: bytes | None = None

    @property
    def is_object(self) -> bool:
        """Whether it is an object, rather than a part of a tensor."""
        return bool(self.item.type == LoadItemType.BYTE_IO)

    @property
    def nbytes(self) -> int:
        """How many bytes are read for it."""
        if self.is_object or self.stored.dtype is None:
            return self.stored.place.length
        return math.prod(self.item.lengths) * self.stored.dtype.itemsize


class PlanReading:
    """Reads what a plan asks for.

    A planner of torch's usual kind is asked for all its tensors at once, and they are read straight into them. One that
    does something when a tensor is complete is asked for one tensor at a time, and told right after it is
    filled; its smaller tensors are read ahead, up to 128 MiB.

    Args:
        engine: whose threads read.
        source: the checkpoint's files.
        path: where they are, for messages.
        options: how to load.
        planner: says where things go, and takes objects.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        path: str,
        options: LoadOptions,
        planner: LoadPlanner,
    ) -> None:
        self._engine = engine
        self._source = source
        self._path = path
        self._options = options
        self._planner = planner
        self._ahead = getattr(type(planner), "commit_tensor", None) is DefaultLoadPlanner.commit_tensor
        self._known: dict[ItemRange, TensorItem] = {}
        self._extents = AliasIndex()
        self._window: list[_Request] = []
        self._window_bytes = 0
        self._reads: list[TensorRead] = []

    def run(self, items: Sequence[tuple[ReadItem, StoredItem]]) -> None:
        """Read all items, each with where it is. Blocks; see `aiockpt.dcp.reader.FileSystemReader.read_data`."""
        try:
            for item, stored in items:
                self._add(_Request(item, stored))
            self._flush()
        except LoadError as exc:
            if any(read.fills for read in self._reads):
                annotate_partial_load(exc, self._reads)
            raise

    def _add(self, request: _Request) -> None:
        if request.is_object:
            self._wait_for(request, request.nbytes)
            return
        if request.stored.chunk is None:
            raise CorruptCheckpointError(f"{self._path}: {request.item.storage_index.fqn} is an object, not a tensor")
        alone = not self._ahead and request.nbytes >= _ALONE_BYTES
        if alone:
            self._flush()
        if alone or self._ahead:
            self._resolve(request)
        held = request.nbytes
        if request.target is not None and self._is_direct(request, request.target):
            held = 0
        elif request.target is None or not request.target.is_meta:
            request.staged = torch.empty(tuple(request.item.lengths), dtype=request.stored.dtype, device="cpu")
        self._plan(request)
        self._wait_for(request, held)
        if alone:
            self._flush()

    def _wait_for(self, request: _Request, held: int) -> None:
        """Put a request into the window, and carry the window out when it is full."""
        if self._window_bytes + held > _WINDOW_BYTES:
            self._flush()
        self._window.append(request)
        self._window_bytes += held

    def _resolve(self, request: _Request) -> None:
        """Ask the planner for the tensor."""
        item = request.item
        request.target = target = self._planner.resolve_tensor(item).detach()
        if tuple(target.size()) != tuple(item.lengths):
            raise ShapeMismatchError(
                f"{item.dest_index.fqn}: the planner gave a tensor of the shape {tuple(target.size())} for a part of "
                f"{self._path} of the shape {tuple(item.lengths)}"
            )
        check_memory(item.dest_index.fqn, target)

    def _is_direct(self, request: _Request, target: torch.Tensor) -> bool:
        """Tell whether a target can be filled as it is; else its values are copied by torch, in the plan's order."""
        if type(target) is not torch.Tensor or target.layout is not torch.strided or target.is_quantized:
            return False
        accelerator = torch.accelerator.current_accelerator()
        if target.device.type != "cpu" and (accelerator is None or target.device.type != accelerator.type):
            return False
        if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
            return False
        return not self._ahead or self._extents.claim(request.item.dest_index.fqn, target)

    def _plan(self, request: _Request) -> None:
        """Say what is to be read, if there is anything."""
        item, stored = request.item, request.stored
        target = request.staged if request.staged is not None else request.target
        if target is None or target.is_meta or 0 in target.shape or stored.chunk is None or stored.dtype is None:
            return
        offsets, sizes = tuple(item.storage_offsets), stored.chunk.sizes
        wanted = tuple(Selection(at, count) for at, count in zip(offsets, item.lengths, strict=True))
        if any(s.start < 0 or s.start + s.count > size for s, size in zip(wanted, sizes, strict=True)):
            raise ShapeMismatchError(
                f"the plan wants {tuple(item.lengths)} at {offsets} of {item.storage_index}, which has {sizes}"
            )
        is_whole = tuple(item.lengths) == sizes
        request.read = TensorRead(
            item.dest_index.fqn,
            stored.dtype,
            stored.chunk,
            None if is_whole else wanted,
            target,
            fills=request.staged is None,
        )
        self._reads.append(request.read)

    def _flush(self) -> None:
        """Read what is in the window, and give it to the planner in the order of the plan."""
        window, self._window, self._window_bytes = self._window, [], 0
        if not window:
            return
        filled = [r.target for r in window if r.target is not None and r.staged is None and not r.target.is_meta]
        ready = ready_events({str(number): target for number, target in enumerate(filled)})

        async def read(tools: LoadTools) -> None:
            for device, event in ready.items():
                await tools.placer_for(device).begin(event)
            objects = [request for request in window if request.is_object]
            for at in range(0, len(objects), _OBJECTS_AT_A_TIME):
                await tools.workers.run(self._read_objects, objects[at : at + _OBJECTS_AT_A_TIME])
            reader = ItemReader(self._source, self._path, self._options, tools, self._known)
            await reader.read([request.read for request in window if request.read is not None])

        count_change(filled)
        try:
            self._engine.call(read, f"load {self._path}").result()
        finally:
            count_change(filled)
        for request in window:
            self._deliver(request)

    def _read_objects(self, requests: Sequence[_Request]) -> None:
        """Read objects, and look whether unpickling them is safe. Blocks."""
        for request in requests:
            request.blob = self._object(request)

    def _object(self, request: _Request) -> bytes:
        place, name = self._source.settled(request.stored.place), request.item.storage_index.fqn
        if request.stored.inline is not None:
            buffer = io.BytesIO()
            torch.save(request.stored.inline.value, buffer)
            return buffer.getvalue()
        data = bytearray(place.length)
        self._source.read(place.file, place.offset, memoryview(data))
        blob = bytes(data)
        if not self._options.trust:
            try:
                decode_object(name, blob, safe_globals=self._options.safe_globals, map_location="cpu")
            except LoadError as exc:
                raise type(exc)(f"{self._path}/{place.file}: {exc}") from exc
        return blob

    def _deliver(self, request: _Request) -> None:
        item = request.item
        if request.blob is not None:
            self._planner.load_bytes(item, io.BytesIO(request.blob))
            return
        if request.target is None:
            self._resolve(request)
        target: Any = request.target
        if request.staged is not None:
            with torch.no_grad():
                target.copy_(request.staged)
            request.staged = None
            if request.read is not None:
                request.read.target = None
        self._planner.commit_tensor(item, target)
