"""`FileSystemWriter`: what ``dcp.save`` and ``dcp.async_save`` write checkpoints with."""

from __future__ import annotations

import os
import pathlib
import pickle
import uuid
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from aiockpt.dcp import shared_commit
from aiockpt.dcp.items import files_of, places_of, resolved, results_of
from aiockpt.errors import CheckpointExistsError
from aiockpt.format.names import DCP_VERSION, SUFFIX
from aiockpt.planning.collective.local import LocalPlanner
from aiockpt.storage.local.storage import absolute
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from aiockpt.checkpointer import AsyncCheckpointer

    Path = str | os.PathLike[str]


class FileSystemWriter(StorageWriter, BlockingAsyncStager):
    """Writes checkpoints for ``dcp.save`` and ``dcp.async_save``, in the format of ``torch.distributed.checkpoint``.

    It takes the place of torch's class of this name: tensors are staged and written by several threads past the page
    cache, each with its CRC, and the checkpoint appears at once, complete and durable, under its name: a save that
    fails or dies half way leaves what was there before::

        dcp.save(state_dict, storage_writer=FileSystemWriter("runs/a/step-100"))

    All ranks must write to one file system. Threads run during `write_data` only, so there is nothing to close.

    Args:
        path: the checkpoint's directory. It may be there already, and hold other files.
        single_file_per_rank: write ``thread_count`` files at most, rather than a file for each tensor and object.
        sync_files: make every file and directory durable.
        thread_count: how many threads write, and into how many files at most. None: 4.
        per_thread_copy_ahead: of no effect here; ``staging_bytes`` bounds what is copied ahead.
        cache_staged_state_dict: as in torch: keep the copy that ``dcp.async_save`` makes, for the next time.
        overwrite: replace a checkpoint that is there, when the new one is complete.
        _extensions: must be None or empty: there are no stream transforms here.
        serialization_format: must be that of ``torch.save``.
        staging_bytes: the most memory to write through, in bytes; see `aiockpt.SyncCheckpointer`.
        direct_io: write past the page cache where the file system allows it.
        checkpointer: whose threads and memory to use, instead of own ones that start and end with each call.
    """

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
        checkpointer: SyncCheckpointer | AsyncCheckpointer | None = None,
    ) -> None:
        StorageWriter.__init__(self)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        if _extensions:
            raise ValueError("this writer knows no stream transforms; leave _extensions out")
        if serialization_format is not None and getattr(serialization_format, "value", None) != "torch_save":
            raise ValueError(
                f"this writer writes items as torch.save does, not as {serialization_format}; for safetensors use "
                "aiockpt's own save with format='safetensors'"
            )
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, not {thread_count!r}")
        self.path = _local(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
        self._staging_bytes = staging_bytes
        self._direct_io = direct_io
        self._checkpointer = checkpointer
        self._planners: dict[str, LocalPlanner] = {}
        self._unpublished: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"FileSystemWriter({os.fspath(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # It may go to the process that dcp.async_save saves in, which has threads and memory of its own.
        return vars(self) | {"_checkpointer": None, "_planners": {}, "_unpublished": None, "state_dict_cache": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint goes."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this can be the path of a checkpoint on a file system."""
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def storage_meta(self) -> StorageMeta | None:
        """Name this save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin with another save, to ``checkpoint_id`` if one is given; remove what a failed one has left."""
        self.discard()
        if checkpoint_id:
            self.path = _local(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def discard(self) -> None:
        """Remove the files of a save that has failed on another rank; the writer's end does so as well. Blocks."""
        if self._unpublished is not None:
            self._unpublished()
            self._unpublished = None

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:
        """Take what is known of the ranks.

        Args:
            is_coordinator: whether this rank makes the plans.
            kwargs: ``rank``: its number; ``use_collectives``: whether the ranks save one checkpoint together.
        """
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    # --- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look whether the path may be written to.

        Raises:
            CheckpointExistsError: a checkpoint is there, and ``overwrite`` is False; or a file is.
        """
        path = self._path()
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CheckpointExistsError(f"{path} is not a directory; save under another name")
        marker = shared_commit.metadata_name(None if self.use_collectives else 0)
        if not self.overwrite and os.path.lexists(os.path.join(path, marker)):
            raise CheckpointExistsError(f"{path} holds a checkpoint; save under another name, or pass overwrite=True")
        if self._alone is not None:
            plan = replace(plan, storage_data=_StoragePrefix(f"__{self._alone}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory that all ranks write to, and give each rank the beginning of its files' names.

        Raises:
            WriteError: it can't be made.
        """
        self.discard()
        hidden = shared_commit.begin(self._path(), self._alone, fsync=self.sync_files)
        self._unpublished = weakref.finalize(self, shared_commit.discard, hidden, shared_commit.hold(hidden))
        return [
            plan if plan.storage_data is not None else replace(plan, storage_data=_StoragePrefix(f"__{number}_"))
            for number, plan in enumerate(plans)
        ]

    # --- writing ----------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Blocks.

        Returns:
            A future that is done, with the place of each item.

        Raises:
            SaveError: with the cause chained; nothing of this rank's is left.
        """
        items = list(plan.items)
        results = self._write(plan.storage_data.prefix, items, [resolved(item, planner) for item in items])
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(
        self, prefix: str, items: Sequence[WriteItem], values: Sequence[torch.Tensor | bytes]
    ) -> list[WriteResult]:
        if not items:
            return []
        hidden = shared_commit.find(self._path(), self._alone)
        layout = self._planners.setdefault(prefix, LocalPlanner(prefix))
        files = (self.thread_count or 4) if self.single_file_per_rank else None
        named = [(item.index.fqn, value) for item, value in zip(items, values, strict=True)]
        with self._lent() as checkpointer:
            job = checkpointer.submit_items(named, hidden, layout, files=files)
            try:
                job.handle.written.result()
            except BaseException:
                job.handle.cancel().result()
                raise
        return results_of(items, (job.places[number][:3] for number in range(len(items))))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make a checkpoint of what all ranks have written: durable, complete, under its final name.

        Args:
            metadata: what was planned; gets the places of the items.
            results: what `write_data` gave on each rank.

        Raises:
            SaveError: an item was not written, or the checkpoint can't be published; nothing is left of it.
            CheckpointExistsError: a checkpoint has come to the path meanwhile.
        """
        path, rank = self._path(), self._alone
        hidden = shared_commit.find(path, rank)
        try:
            names = shared_commit.names_for(files_of(results), hidden, path)
            metadata.storage_data = places_of(metadata, results, names)
            metadata.storage_meta = self.storage_meta()
            if hasattr(metadata, "version"):  # since torch 2.8
                metadata.version = DCP_VERSION
            name = shared_commit.metadata_name(rank)
            shared_commit.write_metadata(hidden, name, pickle.dumps(metadata), fsync=self.sync_files)
            shared_commit.publish(hidden, path, names, rank, overwrite=self.overwrite, fsync=self.sync_files)
        except BaseException:
            shared_commit.discard(hidden)
            raise
        finally:
            self.discard()  # of which nothing is left by now

    @property
    def _alone(self) -> int | None:
        """The rank, if it saves without the others."""
        return None if self.use_collectives else self.rank

    def _path(self) -> str:
        return absolute(self.path)

    @contextmanager
    def _lent(self) -> Iterator[SyncCheckpointer | AsyncCheckpointer]:
        """Give the checkpointer that writes: the caller's, or one for now."""
        if self._checkpointer is not None:
            yield self._checkpointer
            return
        with SyncCheckpointer(
            process_group=None,
            fsync=self.sync_files,
            io_threads=self.thread_count,
            staging_bytes=self._staging_bytes,
            direct_io=self._direct_io,
        ) as checkpointer:
            yield checkpointer


def _local(path: Path) -> pathlib.Path:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path must be text or an os.PathLike of text, not {path!r}")
    if "://" in text:
        raise ValueError(f"{text} is a URL; this writer writes to directories, so give a path")
    if text.endswith(SUFFIX):
        raise ValueError(f"{text} ends in {SUFFIX}, and this writer writes to directories; rename it")
    return pathlib.Path(text)
