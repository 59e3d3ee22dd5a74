"""`FileSystemReader`: reads checkpoints for ``dcp.load``."""

from __future__ import annotations

import os
import pathlib
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from aiockpt.dcp.adapter import borrowed, finished, text_of
from aiockpt.dcp.extensions import registered
from aiockpt.dcp.index import DescribedCheckpoint, stored_item
from aiockpt.dcp.plan_execution import PlanExecution
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import LoadError
from aiockpt.options import LoadOptions, check_options
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.open import read_index, read_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future

    from aiockpt.checkpointer import AsyncCheckpointer
    from aiockpt.dcp.adapter import Path
    from aiockpt.format.index import Index
    from aiockpt.reading.virtual_files import VirtualFile
    from aiockpt.storage.base import Storage
    from aiockpt.sync_checkpointer import SyncCheckpointer


class FileSystemReader(filesystem.FileSystemReader):
    """Reads checkpoints for ``dcp.load``: those of ``torch.distributed.checkpoint``, and all formats that we load.

    Replaces torch's class of this name, and is a subclass of it. Nothing in a checkpoint is executed. Several threads
    read only the bytes that the planner asks for, directly into its tensors, and check the CRC of each item that is
    read as a whole::

        dcp.load(state_dict, storage_reader=FileSystemReader("runs/a/step-100"))

    Every method blocks. Threads run only during `read_metadata` and `read_data`, so there is nothing to close.

    Args:
        path: the checkpoint's directory.
        _extension_registry: torch's registry of stream transforms that items are stored with, besides ZStandard.
            None: the transforms of the checkpointer.
        verify: check the CRC of every stored item that is read as a whole.
        safe_globals: classes and functions that pickled objects may use, in addition to those that torch allows.
        trust: unpickle objects without restriction, which runs whatever code they ask for.
        io_threads: half the number of reading threads; see `aiockpt.SyncCheckpointer`. None: 4.
        direct_io: read past the page cache, except what is in it already.
        checkpointer: use this checkpointer's threads, instead of a new one for each call.
        storage: the storage of the checkpoint; None: the checkpointer's own, which is the file system.
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
        checkpointer: SyncCheckpointer | AsyncCheckpointer | None = None,
        storage: Storage | None = None,
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
        self._storage = storage
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
                return read_rank(source, path, int(rank))
            options = self._options
            return read_index(source, path, safe_globals=options.safe_globals, trust=options.trust, as_stored=True)

        with borrowed(self._checkpointer, **self._settings) as checkpointer:
            engine = EngineAccess(checkpointer)
            with self._opened(engine) as (source, path):
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
        with borrowed(self._checkpointer, **self._settings) as checkpointer:
            engine = EngineAccess(checkpointer)
            with self._opened(engine) as (source, path):
                source.know(self._transformed)
                state = getattr(planner, "state_dict", None)  # of DefaultLoadPlanner and its subclasses
                if self._described is not None and isinstance(state, dict):
                    self._described.check_held(path, state)
                items = [(i, stored_item(self._metadata, self._described, path, i.storage_index)) for i in plan.items]
                PlanExecution(engine, source, path, self._options, planner).run(items)
        return finished(None)

    @contextmanager
    def _opened(self, engine: EngineAccess) -> Iterator[tuple[DecodedSource, str]]:
        """Open the checkpoint's files, and close them afterwards."""
        transforms = list(engine.transforms)
        if self._registry is not None:
            used = {name for item in self._transformed.values() for name in item.place.transforms}
            transforms += registered(self._registry, used)
        storage, path = engine.locate(self.path, self._storage)
        call = engine.call(lambda tools: storage.open(path, workers=tools.workers), f"open {path}")
        source = DecodedSource(call.result(drop=lambda opened: opened.close()), path, transforms)
        try:
            yield source, path
        finally:
            source.close()


def _fs_path(path: Path) -> Path:
    text = text_of(path)
    return text if "://" in text else pathlib.Path(text)
