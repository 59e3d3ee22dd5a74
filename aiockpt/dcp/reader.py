"""`FileSystemReader`: what ``dcp.load`` reads checkpoints with."""

from __future__ import annotations

import os
import pathlib
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from aiockpt.dcp.index import DescribedCheckpoint, stored_item
from aiockpt.dcp.plan_reading import PlanReading
from aiockpt.errors import CheckpointNotFoundError, LoadError
from aiockpt.format.checks import check_index
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.format.names import METADATA_NAME
from aiockpt.options import LoadOptions, check_options
from aiockpt.reading.decoded import DecodedSource
from aiockpt.reading.open import check_place, presented, read_document, read_index
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from aiockpt.checkpointer import AsyncCheckpointer
    from aiockpt.format.index import Index
    from aiockpt.reading.executor import LoadTools
    from aiockpt.reading.virtual_files import VirtualFile
    from aiockpt.storage.base import Source, Storage

    Path = str | os.PathLike[str]


class FileSystemReader(StorageReader):
    """Reads checkpoints for ``dcp.load``: those of ``torch.distributed.checkpoint``, ours, and all that we load.

    It takes the place of torch's class of this name. Nothing in a checkpoint is executed; tensors are read by
    several threads straight to where the planner wants them, only the bytes that it asks for; and the CRC of each item
    that is read as a whole is checked::

        dcp.load(state_dict, storage_reader=FileSystemReader("runs/a/step-100"))

    Every method blocks. Threads run during `read_metadata` and `read_data` only, so there is nothing to close.

    Args:
        path: the checkpoint's directory.
        _extension_registry: must be None. What torch's ZStandard extension has compressed is read without it; other
            transforms are those of the checkpointer.
        verify: check the CRC of every stored item that is read as a whole.
        safe_globals: classes and functions that pickled objects may use, besides those torch allows.
        trust: unpickle objects without restriction, which runs whatever code they ask for.
        io_threads: half as many threads as read; see `aiockpt.SyncCheckpointer`. None: 4.
        direct_io: read past the page cache what is not in it.
        checkpointer: whose threads to use, instead of own ones that start and end with each call.
        storage: where the checkpoint is kept; None for the checkpointer's own, which is the file system.
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
        super().__init__()
        if _extension_registry is not None:
            raise ValueError(
                "this reader takes no stream transforms of torch's: ZStandard is read without, others with "
                "checkpointer=SyncCheckpointer(transforms=...), or with torch.distributed.checkpoint.FileSystemReader"
            )
        self.path = _fs_path(path)
        self.load_id = str(uuid.uuid4())
        self.storage_data: dict[Any, Any] = {}
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

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this can be the path of a checkpoint on a file system."""
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another load, of the checkpoint at ``checkpoint_id`` if one is given."""
        self.storage_data = {}
        self._metadata = self._described = None
        if checkpoint_id:
            self.path = _fs_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Read what the checkpoint holds, without unpickling anything that it names.

        Args:
            kwargs: ``rank``: the rank whose own metadata is wanted, where each has saved alone; None for that of all.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or no such metadata.
            CorruptCheckpointError: it is unfinished, truncated or damaged.
            UnsafeCheckpointError: reading it would run code, or leave its directory.
        """
        rank = kwargs.get("rank")

        def read(source: DecodedSource, path: str) -> Index:
            if rank is not None:
                return _rank_index(source, path, rank)
            options = self._options
            return read_index(source, path, safe_globals=options.safe_globals, trust=options.trust)[0]

        with self._lent() as checkpointer, self._opened(checkpointer) as (source, path):

            async def run(tools: LoadTools) -> Index:
                return await tools.workers.run(read, source, path)

            index = checkpointer._engine.call(run, f"metadata of {path}").result()
            self._transformed = source.items
        self._described = DescribedCheckpoint(index, self._transformed)
        metadata = self._described.metadata
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Take the metadata that plans are going to refer to.

        Args:
            metadata: what `read_metadata` gave, maybe on another rank.
            is_coordinator: whether this rank makes the plans.

        Raises:
            LoadError: it does not say where anything is.
        """
        if metadata.storage_data is None:
            raise LoadError(f"the metadata given for {self.path} does not say where its items are (storage_data)")
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for to where its planner wants it. Blocks; the planner is called by this thread.

        Returns:
            A future that is done.

        Raises:
            CorruptCheckpointError: bytes are missing or are not those that were written. Tensors may have been filled
                by then: the error's ``placed`` and ``partly_placed`` name them.
            ShapeMismatchError: the planner gave a tensor of another shape than its plan says.
            UnsafeCheckpointError: an object needs something that was not allowed.
            MissingKeysError: the plan is for another checkpoint.
        """
        if self._metadata is None:
            raise LoadError("read_data needs set_up_storage_reader before it, which dcp.load calls")
        with self._lent() as checkpointer, self._opened(checkpointer) as (source, path):
            source.know(self._transformed)
            items = [(i, stored_item(self._metadata, self._described, path, i.storage_index)) for i in plan.items]
            PlanReading(checkpointer._engine, source, path, self._options, planner).run(items)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextmanager
    def _lent(self) -> Iterator[SyncCheckpointer | AsyncCheckpointer]:
        """Give the checkpointer that reads: the caller's, or one for now."""
        if self._checkpointer is not None:
            yield self._checkpointer
            return
        with SyncCheckpointer(process_group=None, **self._settings) as checkpointer:
            yield checkpointer

    @contextmanager
    def _opened(self, checkpointer: SyncCheckpointer | AsyncCheckpointer) -> Iterator[tuple[DecodedSource, str]]:
        """Open the checkpoint's files."""
        storage, path = checkpointer._located(self.path, self._storage)
        call = checkpointer._engine.call(lambda tools: storage.open(path, workers=tools.workers), f"open {path}")
        source = DecodedSource(call.result(drop=lambda opened: opened.close()), path, checkpointer._transforms)
        try:
            yield source, path
        finally:
            source.close()


def _fs_path(path: Path) -> Path:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path must be text or an os.PathLike of text, not {path!r}")
    return text if "://" in text else pathlib.Path(text)


def _rank_index(source: Source, path: str, rank: int) -> Index:
    """Read the metadata of a rank that has saved without the others. Blocks."""
    check_place(source, path)
    name = f"__{int(rank)}{METADATA_NAME}"
    if name not in source.files:
        raise CheckpointNotFoundError(f"there is no checkpoint of rank {rank} alone: {path} has no {name}")
    data = read_document(source, name, path)
    try:
        index = decode_metadata(data)
    except LoadError as exc:
        raise type(exc)(f"{path}/{name}: {exc}") from exc
    check_index(path, index, source.files)
    return presented(source, path, index, None)
