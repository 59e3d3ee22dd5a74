"""`FileSystemWriter`: writes the checkpoints of ``dcp.save`` and ``dcp.async_save``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import pickle
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from aiockpt.core.threads import outlast
from aiockpt.dcp.adapter import AnyCheckpointer, ExtensionTransform, borrowed, finished
from aiockpt.dcp.index import storage_info
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError, CheckpointExistsError, CommitError, SaveError, WriteError
from aiockpt.format.names import DCP_VERSION, METADATA_NAME, SUFFIX
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.planner import Planner
from aiockpt.storage.base import SharedStorage, Stamp, shared_storage
from aiockpt.storage.local import beside
from aiockpt.storage.local.directories import absolute
from aiockpt.storage.local.temp_dir import hold
from aiockpt.storage.registry import scheme_of, storage_for, text_of

if TYPE_CHECKING:
    from torch.futures import Future

    from aiockpt.format.index import ItemRange
    from aiockpt.format.transforms.base import Transform
    from aiockpt.options import Path
    from aiockpt.reading.executor import LoadTools
    from aiockpt.storage.base import Storage

    Resolve = Callable[[WriteItem], torch.Tensor | bytes]
    _Numbered = tuple[int, WriteItem]

# --- one transaction of all ranks, where the storage is no file system --------------------------------


logger = logging.getLogger("aiockpt")


@dataclass
class SharedPrefix(_StoragePrefix):
    """The data that a rank needs to write its files: how their names begin, and the ticket of the transaction."""

    ticket: str


@dataclass(eq=False, slots=True)
class SharedSave:
    """The transaction of all ranks. Between the calls of torch only its ticket is kept, so no engine has to run."""

    storage: SharedStorage  # where it writes to
    path: str  # of the checkpoint
    ticket: str = ""  # of the transaction that this rank takes part in; empty if there is none
    stamp: Stamp | None = None  # on the rank that has begun it, that of the transaction
    over: str = ""  # the ticket of the last one, which has ended

    def begin(self, checkpointer: AnyCheckpointer, *, overwrite: bool) -> str:
        """Begin a transaction and return its ticket. Blocks."""

        async def begin(tools: LoadTools) -> tuple[str, Stamp | None]:
            begun = await self.storage.begin(self.path, overwrite=overwrite, workers=tools.workers)
            await begun.release()  # it lives as long as this process
            return begun.ticket, begun.stamp

        self.ticket, self.stamp = EngineAccess(checkpointer).call(begin, f"begin to write {self.path}").result()
        return self.ticket

    def follow(self, prefix: _StoragePrefix) -> None:
        """Take part in the transaction that a plan names; raise WriteError if the plan is of an earlier save."""
        ticket = getattr(prefix, "ticket", "")
        if not ticket or ticket == self.over or (self.ticket and self.ticket != ticket):
            raise WriteError(
                f"the plan for {self.path} is that of an earlier save: a URL needs a new plan for each save, so leave "
                "out enable_plan_caching"
            )
        self.ticket = ticket

    def leave(self) -> None:
        """Forget the transaction, whose files belong to the rank that has begun it."""
        if self.stamp is None:
            self.ticket, self.over = "", self.ticket

    def publish(self, checkpointer: AnyCheckpointer, metadata: bytes, files: Iterable[str], *, overwrite: bool) -> None:
        """Publish what all ranks have written. Blocks; if it fails, everything is removed."""

        async def publish(tools: LoadTools) -> None:
            taken = await self.storage.take_over(
                self.path, self.ticket, overwrite=overwrite, workers=tools.workers, stamp=self.stamp
            )
            try:
                missing = set(files).difference(await taken.sizes())
                if missing:
                    raise CommitError(f"{self.path}: {min(missing)}, which a rank has written, is not there")
                await taken.commit({METADATA_NAME: metadata})
            except BaseException:
                await outlast(taken.abort())
                raise

        EngineAccess(checkpointer).call(publish, f"publish {self.path}").result()
        self.ticket, self.stamp, self.over = "", None, self.ticket

    def discard(self, checkpointer: AnyCheckpointer) -> None:
        """Remove the files of all ranks, which then can't publish them any more, as far as that works. Blocks."""
        ticket, self.ticket, self.stamp, self.over = self.ticket, "", None, self.ticket

        async def discard(tools: LoadTools) -> None:
            joined = await self.storage.join(self.path, ticket, workers=tools.workers)
            await joined.discard_all()

        try:
            EngineAccess(checkpointer).call(discard, f"discard {self.path}").result()
        except AiockptError as exc:  # it may be gone; what is left goes when the processes of the save have ended
            logger.debug("an unfinished save of %s may be left: %s", self.path, exc)


# --- the writer ---------------------------------------------------------------------------------------


class FileSystemWriter(filesystem.FileSystemWriter):
    """Writes checkpoints for ``dcp.save`` and ``dcp.async_save``, in the format of ``torch.distributed.checkpoint``.

    Replaces torch's class of this name, and is a subclass of it. Several threads stage the tensors and write them past
    the page cache, each with its CRC. The checkpoint appears under its name atomically, complete and durable; a save
    that fails or is killed leaves whatever was there before::

        dcp.save(state_dict, storage_writer=FileSystemWriter("runs/a/step-100"))

    All ranks must write to the same file system. Threads run only during `write_data`, so there is nothing to close.

    A URL such as ``s3://bucket/step-100`` is written to by the storage of its scheme, as one transaction of all ranks.
    Such a path is for this checkpoint alone, and for all ranks together (``use_collectives=True``), whose planners make
    each plan anew (``enable_plan_caching=False``).

    Args:
        path: the checkpoint's directory. It may exist already and hold other files. Or a URL.
        single_file_per_rank: write at most ``thread_count`` files, instead of one for each tensor and object.
        sync_files: fsync every file and directory.
        thread_count: number of writing threads, and maximum number of files. None: 4.
        per_thread_copy_ahead: ignored; ``staging_bytes`` limits how much is copied ahead.
        cache_staged_state_dict: as in torch: keep the copy that ``dcp.async_save`` makes for the next save.
        overwrite: replace an existing checkpoint once the new one is complete.
        _extensions: stream transforms of torch's, applied to each item in this order.
        serialization_format: that of ``torch.save`` alone.
        staging_bytes: maximum staging memory in bytes; see `aiockpt.SyncCheckpointer`. Pickled objects, and tensors
            that a planner makes anew, are asked for until they take as much, and written; then the next ones, to
            further files.
        direct_io: write past the page cache where the file system allows it.
        checkpointer: use this checkpointer's threads and memory, instead of a new one for each call.
        storage: the storage of the checkpoint; None: by the path.
        storage_options: options of the storage of a URL; see `aiockpt.SyncCheckpointer`.
    """

    _takes_urls = True
    rank: int | None = None
    use_collectives = True
    _is_coordinator = False
    _unpublished: weakref.finalize[Any, Any] | None = None
    _shared: SharedSave | None = None  # None: to a directory

    def __init__(
        self,
        path: Path,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        staging_bytes: int | None = 256 << 20,
        direct_io: bool = True,
        checkpointer: AnyCheckpointer | None = None,
        storage: Storage | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if getattr(serialization_format, "value", None) == "safetensors":
            raise ValueError(
                "this writer writes no safetensors, which dcp.load can't read: use torch's HuggingFaceStorageWriter, "
                "or format='safetensors' of a checkpointer"
            )
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, not {thread_count!r}")
        super().__init__(
            path=os.curdir,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count or 4,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        if serialization_format is not None:
            self.serialization_format = serialization_format
        self._transforms = [ExtensionTransform(extension) for extension in _extensions or ()]
        self._staging_bytes, self._direct_io, self._checkpointer = staging_bytes, direct_io, checkpointer
        self._planners: dict[str, Planner] = {}
        self._storage, self._storage_options = storage, storage_options
        self._go_to(path)

    def __repr__(self) -> str:
        return f"FileSystemWriter({os.fspath(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # dcp.async_save may send it to its own process, which has threads and memory of its own.
        return vars(self) | {"_checkpointer": None, "_planners": {}, "_unpublished": None, "state_dict_cache": None}

    def _go_to(self, path: Path) -> None:
        """Write to another path from now on."""
        text = text_of(path)
        if text.endswith(SUFFIX):
            raise ValueError(f"{text} ends in {SUFFIX}, and this writer writes to directories; rename it")
        if not scheme_of(text) and self._storage is None:
            if "://" in text:
                raise ValueError(f"{text} is a URL of the file system: give its path")
            self.path, self._shared = pathlib.Path(text), None
            return
        if not self._takes_urls:
            raise ValueError(f"{text} is a URL; this writer writes to directories, so give a path")
        if self._checkpointer is not None:
            place = EngineAccess(self._checkpointer).locate(text, self._storage, self._storage_options)
        elif self._storage is not None:
            place = self._storage, self._storage.resolve(text)
        else:
            place = storage_for(text, **(self._storage_options or {}))
        self._shared = SharedSave(shared_storage(place[0]), place[1])
        self.path = self._shared.path  # as text: a pathlib.Path can't hold a URL

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save, to ``checkpoint_id`` if given; remove the files of a failed one."""
        self.discard()
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def discard(self) -> None:
        """Remove the files of a save that failed on another rank. Blocks.

        Those in a directory are removed too when the writer is collected.
        """
        if self._shared is not None and self._shared.ticket:
            with self._borrowed() as checkpointer:
                self._shared.discard(checkpointer)
        if self._unpublished is not None:
            self._unpublished()
            self._unpublished = None

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        """Store this rank's role in the save.

        Args:
            is_coordinator: whether this rank makes the global plan.
            kwargs: ``rank``: its number; ``use_collectives``: whether the ranks save one checkpoint together.
        """
        self._is_coordinator = is_coordinator
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    # --- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the path may be written to; warn if a checkpoint there will be replaced.

        Raises:
            CheckpointExistsError: the path is a file, or holds a checkpoint and ``overwrite`` is False.
            SaveError: the path is a URL, and each rank saves alone.
        """
        if self._shared is not None:
            if self._alone is not None:
                raise SaveError(
                    f"{self.path}: with use_collectives=False each rank would publish alone. Save with "
                    "use_collectives=True, or each rank with no_dist=True to a path of its own"
                )
            return plan
        path = self._path()
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CheckpointExistsError(f"{path} is not a directory; save under another name")
        marker = beside.metadata_name(None if self.use_collectives else 0)
        if os.path.lexists(os.path.join(path, marker)):
            if not self.overwrite:
                raise CheckpointExistsError(
                    f"Checkpoint already exists: {path} holds one; save under another name, or pass overwrite=True"
                )
            warnings.warn(
                f"Detected an existing checkpoint in {path}; it is replaced once the new one is complete. Pass "
                "overwrite=False to raise an error instead",
                stacklevel=2,
            )
        if self._alone is not None:
            plan = replace(plan, storage_data=_StoragePrefix(f"__{self._alone}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the directory that all ranks write to, and assign each rank the prefix of its file names.

        Raises:
            WriteError: it can't be created.
            CheckpointExistsError: the path of a URL is taken, or what is to be replaced can't be decoded.
        """
        self.discard()
        if self._shared is not None:
            with self._borrowed() as checkpointer:
                ticket = self._shared.begin(checkpointer, overwrite=self.overwrite)
            return [replace(plan, storage_data=SharedPrefix(f"__{at}_", ticket)) for at, plan in enumerate(plans)]
        hidden = beside.begin(self._path(), self._alone, fsync=self.sync_files)
        self._unpublished = weakref.finalize(self, beside.discard, hidden, hold(hidden))
        return [
            plan if plan.storage_data is not None else replace(plan, storage_data=_StoragePrefix(f"__{number}_"))
            for number, plan in enumerate(plans)
        ]

    # --- writing ----------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Blocks.

        Returns:
            A future that is done, with the location of each item.

        Raises:
            SaveError: with the cause chained; this rank's files are removed.
        """
        items, prefix = list(plan.items), plan.storage_data.prefix
        try:
            if self._shared is not None:
                self._shared.follow(plan.storage_data)
            places = self._write(prefix, items, planner) if items else []
        except BaseException:
            if self._shared is None:
                beside.remove_files(self._path(), self._alone, prefix)
            else:
                self.discard()
            raise
        if self._shared is not None:
            self._shared.leave()
        return finished(results_of(items, places))

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[AnyCheckpointer]:
        settings: dict[str, Any] = {"io_threads": self.thread_count, "staging_bytes": self._staging_bytes}
        if self._shared is None:
            settings |= {"fsync": self.sync_files, "direct_io": self._direct_io}
        with borrowed(self._checkpointer, **settings) as checkpointer:
            yield checkpointer

    def _write(self, prefix: str, items: Sequence[WriteItem], planner: SavePlanner) -> Sequence[ItemRange]:
        if self._shared is None:
            storage, path, ticket = None, self._path(), beside.ticket_of(self._path(), self._alone)
        else:
            storage, path, ticket = self._shared.storage, self._shared.path, self._shared.ticket
        file_format = DcpFormat(self.thread_count if self.single_file_per_rank else None)
        places: list[ItemRange] = []
        with self._borrowed() as checkpointer:
            for number, values in enumerate(resolved_batches(items, planner, self._staging_bytes)):
                name = f"{prefix}{number}_" if number else prefix
                files = self._planners.setdefault(name, Planner(file_format, name))
                places += write_items(checkpointer, values, path, ticket, files, self._transforms, storage)
        return places

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written: make it durable, and move it to its final name.

        Args:
            metadata: the global plan's; the locations of the items are added to it.
            results: the results of `write_data` on each rank.

        Raises:
            SaveError: an item was not written, or the checkpoint can't be published. Its files are removed.
            CheckpointExistsError: another checkpoint has appeared at the path meanwhile.
        """
        try:
            if self._shared is None:
                self._publish(metadata, results)
                return
            self._complete(metadata, results, {name: name for name in files_of(results)})
            # Without frames, whose lengths would be wrong once the names of the files are those of the objects.
            data = pickle.dumps(metadata, protocol=2)
            with self._borrowed() as checkpointer:
                self._shared.publish(checkpointer, data, files_of(results), overwrite=self.overwrite)
        finally:
            self.discard()  # nothing is left if it was published: it only closes the directory

    def _publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        path, rank = self._path(), self._alone
        hidden = beside.find(path, rank)
        try:
            names = beside.names_for(files_of(results), hidden, path)
            self._complete(metadata, results, names)
            name = beside.metadata_name(rank)
            beside.write_metadata(hidden, name, pickle.dumps(metadata), fsync=self.sync_files)
            beside.publish(hidden, path, names, name, overwrite=self.overwrite, fsync=self.sync_files)
        except BaseException:
            beside.discard(hidden)
            raise

    def _complete(self, metadata: Metadata, results: list[list[WriteResult]], names: Mapping[str, str]) -> None:
        """Add to the metadata what is known only now."""
        metadata.storage_data = locations_of(metadata, results, names)
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):  # since torch 2.8
            metadata.version = DCP_VERSION

    @property
    def _alone(self) -> int | None:
        """This rank, if it saves without the others."""
        return None if self.use_collectives else self.rank

    def _path(self) -> str:
        return absolute(self.path)


# --- items: between torch's planners and the files ------------------------------------------------

ItemValues = list[tuple[str, torch.Tensor | bytes]]
"""Name and value of each item: a tensor, or the bytes of an object."""


def resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor | bytes:
    """Return the planner's value of an item; raise SaveError if it is sparse, or not of the item's type."""
    value = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO and isinstance(value, io.BytesIO):
        return value.getvalue()
    if item.type != WriteItemType.BYTE_IO and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise SaveError(
                f"{item.index.fqn} has the layout {value.layout}, which DCP's format can't hold as a tensor: save "
                "value.to_dense(), or use aiockpt's own save, which stores it as an object"
            )
        return value.detach()
    raise SaveError(f"{item.index.fqn}: the planner gave a {type(value).__name__} for an item of type {item.type.name}")


def resolved_batches(items: Sequence[WriteItem], planner: SavePlanner, most_bytes: int | None) -> Iterator[ItemValues]:
    """Resolve items in batches; each ends, and is emptied, once its values take ``most_bytes`` of new memory."""
    # As torch has them, they return tensors of the state dict; overridden, they may make new ones, which take memory.
    methods = ("resolve_data", "lookup_object", "transform_object")
    makes_tensors = any(getattr(type(planner), name, None) is not getattr(DefaultSavePlanner, name) for name in methods)
    values: ItemValues = []
    nbytes = 0
    for item in items:
        value = resolved(item, planner)
        values.append((item.index.fqn, value))
        if isinstance(value, bytes):
            nbytes += len(value)
        elif makes_tensors:
            nbytes += value.nbytes
        del value  # or it would stay alive while the batch is written, and until the next one is resolved
        if most_bytes is not None and nbytes >= most_bytes:
            yield values
            values.clear()
            nbytes = 0
    if values:
        yield values


def write_items(
    checkpointer: AnyCheckpointer,
    values: ItemValues,
    path: str,
    ticket: str,
    planner: Planner,
    transforms: Sequence[Transform] = (),
    storage: Storage | None = None,
) -> Sequence[ItemRange]:
    """Write items to files of a transaction; return the location of each. ``storage``: None: by the path.

    Blocks; if it is interrupted, the files are removed.
    """
    job = checkpointer.submit_items(values, path, ticket, planner, transforms, storage)
    try:
        job.handle.written.result()
    except BaseException:
        job.handle.cancel().result()
        raise
    return [job.item_ranges[number] for number in range(len(values))]


def results_of(items: Sequence[WriteItem], places: Iterable[ItemRange]) -> list[WriteResult]:
    """Return torch's results for items that were written."""
    return [
        WriteResult(index=item.index, size_in_bytes=place.length, storage_data=storage_info(place))
        for item, place in zip(items, places, strict=True)
    ]


def files_of(results: Sequence[Sequence[WriteResult]]) -> list[str]:
    """Return the files that all ranks have written."""
    return list(dict.fromkeys(result.storage_data.relative_path for rank in results for result in rank))


def locations_of(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], names: Mapping[str, str]
) -> dict[MetadataIndex, _StorageInfo]:
    """Return the location of every item, in files of their final names; raise WriteError if one was not written."""
    locations: dict[MetadataIndex, _StorageInfo] = {}
    for result in (result for rank in results for result in rank):
        info = result.storage_data
        locations[result.index] = replace(info, relative_path=names[info.relative_path])
    for name, described in metadata.state_dict_metadata.items():
        wanted = [MetadataIndex(name)]
        if isinstance(described, TensorStorageMetadata):
            wanted = [MetadataIndex(name, chunk.offsets) for chunk in described.chunks]
        missing = [index for index in wanted if index not in locations]
        if missing:
            raise WriteError(f"{name} was not written by any rank ({missing[0]}); nothing was published")
    return locations
