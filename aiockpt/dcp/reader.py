"""`FileSystemReader`: reads checkpoints for ``dcp.load``."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from aiockpt.dcp.adapter import AnyCheckpointer, borrowed, finished, registered, resolved_target
from aiockpt.dcp.index import DescribedCheckpoint, DescribedItem, described_item
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import CorruptCheckpointError, LoadError, ShapeMismatchError
from aiockpt.format.dtypes import QUANTIZED_DTYPES
from aiockpt.format.item.objects import decode_object, encode_object
from aiockpt.options import LoadOptions, Path, check_options
from aiockpt.planning.flatten import TENSOR_TYPES
from aiockpt.planning.ranges import Selection
from aiockpt.reading.decoded import DecodedSource, VirtualFile
from aiockpt.reading.executor import LoadTools, ReadExecutor
from aiockpt.reading.open import IndexReader, read_index
from aiockpt.reading.read_plan import ReadPlan, TensorRead, annotate_partial_load
from aiockpt.reading.targets import contested, encoded_copy, is_encoding
from aiockpt.snapshot.capture import ready_events
from aiockpt.storage.registry import text_of

if TYPE_CHECKING:
    from torch.futures import Future

    from aiockpt.format.index import Index, ItemRange, TensorItem
    from aiockpt.storage.base import Storage


class FileSystemReader(filesystem.FileSystemReader):
    """Reads checkpoints for ``dcp.load``: those of ``torch.distributed.checkpoint``, and all formats that we load.

    Replaces torch's class of this name, and is a subclass of it. Nothing in a checkpoint is executed. Several threads
    read only the bytes that the planner asks for, directly into its tensors, and check the CRC of each item that is
    read as a whole::

        dcp.load(state_dict, storage_reader=FileSystemReader("runs/a/step-100"))

    Every method blocks. Threads run only during `read_metadata` and `read_data`, so there is nothing to close.

    Args:
        path: the checkpoint's directory, or a URL.
        _extension_registry: torch's registry of stream transforms that items are stored with, besides ZStandard.
            None: the transforms of the checkpointer.
        verify: check the CRC of every stored item that is read as a whole.
        safe_globals: classes and functions that pickled objects may use, in addition to those that torch allows.
        trust: unpickle objects without restriction, which runs whatever code they ask for.
        io_threads: half the number of reading threads; see `aiockpt.SyncCheckpointer`. None: 4.
        direct_io: read past the page cache, except what is in it already.
        checkpointer: use this checkpointer's threads, instead of a new one for each call.
        storage: the storage of the checkpoint; None: by the path, or that of the checkpointer.
        storage_options: options of the storage of a URL; see `aiockpt.SyncCheckpointer`.
    """

    def __init__(
        self,
        path: Path,
        _extension_registry: Any = None,
        *,
        verify: bool = True,
        safe_globals: Sequence[Any] = (),
        trust: bool = False,
        io_threads: int | None = None,
        direct_io: bool = True,
        checkpointer: AnyCheckpointer | None = None,
        storage: Storage | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(text_of(path))
        self.path = _fs_path(path)
        self.rank: Any = None  # an int, once `set_up_storage_reader` was told
        self.use_collectives = True
        self._registry = _extension_registry
        self._options = LoadOptions(verify=verify, safe_globals=safe_globals, trust=trust)
        check_options(self._options, into=True)
        self._settings: dict[str, Any] = {"io_threads": io_threads, "direct_io": direct_io}
        self._checkpointer = checkpointer
        self._storage, self._storage_options = storage, storage_options
        self._metadata: Metadata | None = None
        self._described: DescribedCheckpoint | None = None
        self._transformed: Mapping[str, VirtualFile] = {}

    def __repr__(self) -> str:
        return f"FileSystemReader({os.fspath(self.path)!r})"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, of the checkpoint at ``checkpoint_id`` if given."""
        self.storage_data = {}
        self._metadata = self._described = None
        if checkpoint_id:
            self.path = _fs_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata. Nothing that it names is imported or called.

        Args:
            kwargs: ``rank``: read this rank's own metadata, if each rank has saved alone; None: that of all ranks.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or no such metadata.
            CorruptCheckpointError: it is unfinished, truncated or damaged.
            UnsafeCheckpointError: reading it would run code, or leave its directory.
        """
        rank = kwargs.get("rank")

        def read(source: DecodedSource, path: str) -> Index:
            if rank is not None:
                return IndexReader(source, path, as_stored=True).read_rank(int(rank))
            options = self._options
            return read_index(source, path, safe_globals=options.safe_globals, trust=options.trust, as_stored=True)

        with self._opened() as (engine, source, path):
            call = engine.call(lambda tools: tools.workers.run(read, source, path), f"metadata of {path}")
            index = call.result()
            self._transformed = source.items
        self._described = DescribedCheckpoint(index, self._transformed)
        metadata = self._described.metadata
        stored = {name: value for name, value in index.storage_meta.items() if name in StorageMeta.__dataclass_fields__}
        metadata.storage_meta = StorageMeta(**{"checkpoint_id": self.path, **stored, "load_id": self.load_id})
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        """Store the metadata that the plans will refer to.

        Args:
            metadata: the result of `read_metadata`, maybe of another rank.
            is_coordinator: whether this rank makes the global plan.
            kwargs: ``rank``: its number; ``use_collectives``: whether the ranks load one checkpoint together.

        Raises:
            LoadError: it has no locations of items.
        """
        if metadata.storage_data is None:
            raise LoadError(f"the metadata given for {self.path} does not say where its items are (storage_data)")
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for into the planner's tensors. Blocks; the planner is called only in this thread.

        Returns:
            A future that is done.

        Raises:
            CorruptCheckpointError: bytes are missing or have changed since they were written. Tensors may have been
                filled by then: the error's ``placed`` and ``partly_placed`` name them.
            ShapeMismatchError: the planner returned a tensor of another shape than its plan says.
            UnsafeCheckpointError: an object needs something that was not allowed.
            MissingKeysError: the plan is for another checkpoint.
        """
        if self._metadata is None:
            raise LoadError("read_data needs set_up_storage_reader before it, which dcp.load calls")
        with self._opened() as (engine, source, path):
            source.know(self._transformed)
            state = getattr(planner, "state_dict", None)  # of DefaultLoadPlanner and its subclasses
            if self._described is not None and isinstance(state, dict):
                self._described.check_held(path, state)
            items = [(i, described_item(self._metadata, self._described, path, i.storage_index)) for i in plan.items]
            PlanExecution(engine, source, path, self._options, planner).run(items)
        return finished(None)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[EngineAccess, DecodedSource, str]]:
        """Open the checkpoint's files, and close them afterwards."""
        with borrowed(self._checkpointer, **self._settings) as checkpointer:
            engine = EngineAccess(checkpointer)
            transforms = list(engine.transforms)
            if self._registry is not None:
                used = {name for item in self._transformed.values() for name in item.place.transforms}
                transforms += registered(self._registry, used)
            storage, path = engine.locate(self.path, self._storage, self._storage_options)
            call = engine.call(lambda tools: storage.open(path, workers=tools.workers), f"open {path}")
            source = DecodedSource(call.result(drop=lambda opened: opened.close()), path, transforms)
            with contextlib.closing(source):
                yield engine, source, path


def _fs_path(path: Path) -> Path:
    text = text_of(path)
    return text if "://" in text else pathlib.Path(text)


# --- the execution of a plan ------------------------------------------------------------------------


_WINDOW_BYTES = 128 << 20
"""Limit for what is read ahead of the planner."""
_ALONE_BYTES = 32 << 20
"""Parts of at least this size are read directly into their targets, if need be one at a time."""
_OBJECTS_AT_A_TIME = 64


@dataclass(eq=False, slots=True)
class _PlannedRead:
    """An item of a plan, and its state."""

    item: ReadItem
    stored: DescribedItem
    target: torch.Tensor | None = None  # the planner's, once resolved
    staged: torch.Tensor | None = None  # holds the values until they are copied to the target; None: read directly
    read: TensorRead | None = None  # of a tensor's part that has any bytes
    blob: bytes | None = None  # the bytes of an object, once read

    @property
    def is_object(self) -> bool:
        return bool(self.item.type == LoadItemType.BYTE_IO)

    @property
    def is_whole(self) -> bool:
        """Whether the item is unpickled: it has several storages, or may have."""
        is_own = self.target is not None and type(self.target) not in TENSOR_TYPES and not self.target.is_meta
        return not self.is_object and (self.stored.dtype in QUANTIZED_DTYPES or is_own)

    @property
    def nbytes(self) -> int:
        if self.is_object or self.is_whole or self.stored.dtype is None:
            return self.stored.range.length
        return math.prod(self.item.lengths) * self.stored.dtype.itemsize


@dataclass(eq=False)
class PlanExecution:
    """Reads the items of a plan.

    A planner with torch's own ``commit_tensor`` is asked for all its tensors at once, and they are read directly into
    these. A planner that overrides it may depend on the order: it is asked for one tensor at a time, and called back
    right after that tensor is filled. Its smaller tensors are read ahead, up to 128 MiB.
    """

    _engine: EngineAccess
    _source: DecodedSource
    _path: str
    _options: LoadOptions
    _planner: LoadPlanner
    _known: dict[ItemRange, TensorItem] = field(default_factory=dict)
    _contested: set[str] = field(default_factory=set)  # keys whose targets share memory
    _window: list[_PlannedRead] = field(default_factory=list)
    _window_bytes: int = 0
    _reads: list[TensorRead] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ahead = getattr(type(self._planner), "commit_tensor", None) is DefaultLoadPlanner.commit_tensor

    def run(self, items: Sequence[tuple[ReadItem, DescribedItem]]) -> None:
        """Read all items. Blocks; see `aiockpt.dcp.reader.FileSystemReader.read_data`."""
        requests = [_PlannedRead(item, stored) for item, stored in items]
        try:
            if self._ahead:
                for request in requests:
                    if request.stored.chunk is not None and not request.is_object and not request.is_whole:
                        self._resolve(request)
                self._try_encodings(requests)
                targets = ((each.item.dest_index.fqn, each.target) for each in requests)
                self._contested = contested((name, target) for name, target in targets if target is not None)
            for request in requests:
                self._add(request)
            self._flush()
        except LoadError as exc:
            annotate_partial_load(exc, self._reads)
            raise

    def _try_encodings(self, requests: Sequence[_PlannedRead]) -> None:
        """Raise ShapeMismatchError if a class of targets takes no values of its first item, before any is filled."""
        for request in {type(each.target): each for each in reversed(requests)}.values():
            if request.target is not None and is_encoding(request.target):
                encoded_copy(self._path, request.item.dest_index.fqn, request.target, self._read_whole(request))

    def _add(self, request: _PlannedRead) -> None:
        if request.stored.chunk is None and not request.is_object:
            raise CorruptCheckpointError(f"{self._path}: {request.item.storage_index.fqn} is an object, not a tensor")
        is_read_in_parts = not request.is_object and not request.is_whole
        alone = is_read_in_parts and not self._ahead and request.nbytes >= _ALONE_BYTES
        if alone:
            self._flush()
            self._resolve(request)
        held = request.nbytes
        if is_read_in_parts:
            if request.target is not None and self._is_direct(request, request.target):
                held = 0
            elif request.target is None or not request.target.is_meta:
                request.staged = torch.empty(tuple(request.item.lengths), dtype=request.stored.dtype, device="cpu")
            self._plan(request)
        if self._window_bytes + held > _WINDOW_BYTES:
            self._flush()
        self._window.append(request)
        self._window_bytes += held
        if alone:
            self._flush()

    def _resolve(self, request: _PlannedRead) -> None:
        """Ask the planner for its tensor."""
        request.target = resolved_target(self._planner, request.item, self._path)

    def _is_direct(self, request: _PlannedRead, target: torch.Tensor) -> bool:
        """Return whether a target can be read into directly; if not, torch copies its values, in the plan's order."""
        if type(target) is not torch.Tensor or target.layout is not torch.strided or target.is_quantized:
            return False
        accelerator = torch.accelerator.current_accelerator()
        if target.device.type != "cpu" and (accelerator is None or target.device.type != accelerator.type):
            return False
        # Expanded: its elements share memory. `copy_` raises for it, where a read would write one over the other.
        if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
            return False
        return request.item.dest_index.fqn not in self._contested

    def _plan(self, request: _PlannedRead) -> None:
        """Plan the read of a tensor's part, if it has any bytes."""
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
        """Read the requests of the window, and hand them to the planner in the order of the plan."""
        window, self._window, self._window_bytes = self._window, [], 0
        if not window:
            return
        filled = [r.target for r in window if r.target is not None and r.staged is None and not r.target.is_meta]
        # The copies to accelerators run in other streams: they must come after the caller's own work on the targets.
        ready = ready_events({str(number): target for number, target in enumerate(filled)})

        async def read(tools: LoadTools) -> None:
            await tools.begin(ready)
            objects = [request for request in window if request.is_object or request.is_whole]
            for at in range(0, len(objects), _OBJECTS_AT_A_TIME):
                await tools.workers.run(self._read_objects, objects[at : at + _OBJECTS_AT_A_TIME])
            reader = ReadExecutor(self._source, self._path, self._options, tools, self._known)
            reads = [request.read for request in window if request.read is not None]
            await reader.fill(ReadPlan(fills=reads, filled=filled))

        self._engine.call(read, f"load {self._path}").result()
        for request in window:
            self._deliver(request)

    def _read_objects(self, requests: Sequence[_PlannedRead]) -> None:
        """Read objects, and check that unpickling them is safe. Blocks."""
        for request in requests:
            if request.is_whole:
                request.staged = self._read_whole(request)
            else:
                request.blob = self._read_object(request)

    def _read_object(self, request: _PlannedRead) -> bytes:
        if request.stored.inline is not None:
            return encode_object(request.item.storage_index.fqn, request.stored.inline.value)
        blob = self._read_blob(request)
        # The planner will unpickle it with weights_only=False, so a restricted decoder has to accept it before.
        if not self._options.trust:
            self._decode(request, blob)
        return blob

    def _read_whole(self, request: _PlannedRead) -> torch.Tensor:
        """Read a tensor whose values and parameters are several storages of one item, so that it is unpickled."""
        tensor, item, chunk = self._decode(request, self._read_blob(request)), request.item, request.stored.chunk
        sizes = () if chunk is None else chunk.sizes
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes:
            raise CorruptCheckpointError(
                f"{self._path}/{request.stored.range.file}: the item of {item.storage_index.fqn} is no tensor of the "
                f"shape {sizes}; its metadata is damaged"
            )
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor if length == tensor.shape[dim] else tensor.narrow(dim, start, length)
        return tensor

    def _read_blob(self, request: _PlannedRead) -> bytes:
        place = self._source.exact_range(request.stored.range)
        return self._source.read_bytes(place.file, place.offset, place.length)

    def _decode(self, request: _PlannedRead, blob: bytes) -> Any:
        try:
            name, options = request.item.storage_index.fqn, self._options
            allowed, trust = options.safe_globals, options.trust
            return decode_object(name, blob, safe_globals=allowed, trust=trust, map_location="cpu")
        except LoadError as exc:
            raise type(exc)(f"{self._path}/{request.stored.range.file}: {exc}") from exc

    def _deliver(self, request: _PlannedRead) -> None:
        item = request.item
        if request.blob is not None:
            self._planner.load_bytes(item, io.BytesIO(request.blob))
            request.blob = None
            return
        if request.target is None:
            self._resolve(request)
        target: Any = request.target
        if request.staged is not None:
            self._check_scale(item, target, request.staged)
            with torch.no_grad():
                target.copy_(request.staged)
            request.staged = None
            if request.read is not None:  # kept for messages, so it must not keep the staged values alive
                request.read.target = None
        self._planner.commit_tensor(item, target)

    def _check_scale(self, item: ReadItem, target: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse to fill a part of a quantized tensor of another scale: its values would change their meaning."""
        if not (target.is_quantized and target._is_view() and values.is_quantized):
            return
        if target.qscheme() is not torch.per_tensor_affine or (target.q_scale(), target.q_zero_point()) != (
            values.q_scale(),
            values.q_zero_point(),
        ):
            raise ShapeMismatchError(
                f"{item.dest_index.fqn}: a part of it can't be filled from {self._path}, where its scale is another; "
                "load it as a whole"
            )
