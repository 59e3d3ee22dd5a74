"""`FileSystemWriterAsync`: what Megatron-Core's ``torch_dist`` checkpoints are written with.

Megatron plans a save in the training process, then lets a process of its own write (forked for each save, or kept), and
in the end gathers what all ranks have written. It asks its writer for a function to run there. To use this one::

    import megatron.core.dist_checkpointing.strategies.torch as strategies
    from aiockpt.dcp.megatron import FileSystemWriterAsync

    strategies.FileSystemWriterAsync = FileSystemWriterAsync

Source of the interface: ``filesystem_async.py``, ``async_utils.py`` and ``state_dict_saver.py`` of Megatron-Core.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import _StoragePrefix

from aiockpt.dcp import shared_commit
from aiockpt.dcp.items import resolved, results_of
from aiockpt.dcp.writer import FileSystemWriter
from aiockpt.errors import AiockptError, SaveError, WriteError
from aiockpt.planning.collective.local import LocalPlanner
from aiockpt.staging.runtime import has_events, ready_event
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

Values = list[tuple[str, torch.Tensor | bytes]]
"""Name and value of each item: a tensor, or the bytes of an object."""


@dataclass(frozen=True, slots=True)
class PartOptions:
    """How a rank's part is written, in whatever process.

    Attributes:
        path: the final path of the checkpoint.
        prefix: what the names of the rank's files begin with.
        files: how many files to write at most, besides those of the hint.
        hint: tensors whose names begin so go to files of their own.
        sync: make them durable.
        staging_bytes: the most memory to write through.
        direct_io: write past the page cache.
    """

    path: str
    prefix: str
    files: int
    hint: str | None
    sync: bool
    staging_bytes: int | None
    direct_io: bool


class FileSystemWriterAsync(FileSystemWriter):
    """Writes what Megatron-Core plans, in the process that Megatron chooses; takes the place of its class of this name.

    A writer is made for each save, and used in this order: `prepare_local_plan`; `prepare_global_plan` or
    `prepare_decentralized_global_plan` unless plans are reused; `prepare_write_data`; the functions of
    `get_save_function_and_args`, in any process of this machine; `retrieve_write_results`; on the coordinator `finish`.
    The checkpoint appears in `finish`, at once. The directory may be there already, with other files.

    Args:
        path: the checkpoint's directory.
        args: as for `aiockpt.dcp.FileSystemWriter`.
        separation_hint: tensors whose names begin so go to files of their own, which are called by it.
        use_msc: must be False: this writer writes to file systems.
        kwargs: as for `aiockpt.dcp.FileSystemWriter`.
    """

    can_run_decentralized_global_plan = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_msc:
            raise ValueError("this writer writes to file systems; leave use_msc out")
        super().__init__(path, *args, **kwargs)
        if not self.single_file_per_rank:
            raise ValueError("single_file_per_rank=False is not for saves in another process")
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self._is_coordinator = False
        self._items: list[WriteItem] | None = None
        self._values: Values = []
        self._options: PartOptions | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take what is known of the ranks; see `aiockpt.dcp.FileSystemWriter.set_up_storage_writer`."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    # --- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look whether the path may be written to, and make the hidden directory that all ranks write to.

        Raises:
            CheckpointExistsError: a checkpoint is there, and ``overwrite`` is False; or a file is.
            WriteError: the directory can't be made.
        """
        plan = super().prepare_local_plan(plan)
        hidden = shared_commit.ensure(self._path(), fsync=self.sync_files)
        if self._is_coordinator:
            self.discard()
            self._unpublished = weakref.finalize(self, shared_commit.discard, hidden, shared_commit.hold(hidden))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the beginning of its files' names."""
        return [replace(plan, storage_data=_StoragePrefix(f"__{number}_")) for number, plan in enumerate(plans)]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Do as `prepare_global_plan` for this rank, without the others."""
        return replace(local_plan, storage_data=_StoragePrefix(f"__{_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take hold of this rank's items. Nothing is copied yet.

        Raises:
            SaveError: the planner gives something of another kind than it said.
        """
        note = os.path.join(shared_commit.find(self._path(), None), _note_name(plan.storage_data.prefix))
        with contextlib.suppress(FileNotFoundError):  # of an earlier save whose results nobody has fetched
            os.unlink(note)
        self._items = list(plan.items)
        self._values = [(item.index.fqn, resolved(item, planner)) for item in self._items]
        self._options = PartOptions(
            path=self._path(),
            prefix=plan.storage_data.prefix,
            files=self._file_count(),
            hint=self.separation_hint,
            sync=self.sync_files,
            staging_bytes=self._staging_bytes,
            direct_io=self._direct_io,
        )

    def _file_count(self) -> int:
        threads = self.thread_count or 4
        return max(1, threads // 2) if self.separation_hint else threads

    # --- writing ----------------------------------------------------------------------------------

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[..., Values] | None, list[Any]]:
        """Give what writes this rank's items.

        Returns:
            a function that writes; one that copies the tensors to host memory, whose result takes the place of the
            second argument; and the arguments of the first. Each can be sent to another process. None, None and
            an empty list if there is nothing to write.
        """
        if not self._values or self._options is None:
            return None, None, []
        preload = partial(self.preload_tensors, self._values, pid=os.getpid())
        return partial(self.write_preloaded_data, self._options), preload, [_rank(), self._values, os.getpid()]

    @staticmethod
    def preload_tensors(values: Values, non_blocking: bool = True, *, pid: int | None = None) -> Values:
        """Copy to host memory what could change, or is not there. Blocks.

        Args:
            values: name and value of each item.
            non_blocking: let the copies from accelerators overlap.
            pid: the process that prepared the save; in another one, tensors in host memory are shared with it and are
                copied too, while a fork has copies of its own already.
        """
        shared = pid is not None and pid != os.getpid()
        staged: Values = []
        moved: set[torch.device] = set()
        for name, value in values:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                moved.add(value.device)
                staged.append((name, value.to("cpu", non_blocking=non_blocking and has_events(value.device))))
            else:
                staged.append((name, value.clone() if shared and isinstance(value, torch.Tensor) else value))
        for event in map(ready_event, moved):
            if event is not None:
                event.synchronize()
        return staged

    @staticmethod
    def write_preloaded_data(options: PartOptions, rank: int, values: Values, pid: int) -> None:
        """Write a rank's items, and note beside them where each is, or what went wrong. Blocks; does not raise that.

        Args:
            options: how.
            rank: whose they are.
            values: name and value of each, as `preload_tensors` gives them.
            pid: the process that prepared the save.
        """
        if pid != os.getpid():
            torch.set_num_threads(1)  # those that a parent has started are not there in its fork
        hidden = shared_commit.find(options.path, None)
        try:
            note: dict[str, Any] = {"places": _write(options, hidden, values)}
        except Exception as exc:  # told to who waits for the results
            note = {"error": f"{type(exc).__name__}: {exc}"}
        _write_note(os.path.join(hidden, _note_name(options.prefix)), note)

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Give where this rank's items are, once the function that writes has returned, in whatever process.

        Returns:
            a result for each item; or, as ``torch.distributed`` passes them between ranks, the error.
        """
        try:
            if self._items is None or self._options is None:
                raise SaveError("there are no results before prepare_write_data")
            if not self._items:
                return []
            path = os.path.join(shared_commit.find(self._path(), None), _note_name(self._options.prefix))
            return results_of(self._items, _read_note(path, len(self._items)))
        except AiockptError as exc:
            wrapped: WRAPPED_EXCEPTION = _wrap_exception(exc)
            return wrapped


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _note_name(prefix: str) -> str:
    return f".{prefix}results.json"


def _write(options: PartOptions, hidden: str, values: Values) -> Sequence[tuple[str, int, int]]:
    for name in os.listdir(hidden):  # what an earlier save of this rank has left there
        if name == _note_name(options.prefix) or (options.prefix in name and name.endswith(".distcp")):
            os.unlink(os.path.join(hidden, name))
    with SyncCheckpointer(
        process_group=None,
        fsync=options.sync,
        io_threads=options.files,
        staging_bytes=options.staging_bytes,
        direct_io=options.direct_io,
    ) as checkpointer:
        job = checkpointer.submit_items(
            values,
            hidden,
            LocalPlanner(options.prefix),
            files=options.files,
            separation_hint=(options.hint,) if options.hint else (),
        )
        try:
            job.handle.written.result()
        except BaseException:
            job.handle.cancel().result()
            raise
        return [job.places[number][:3] for number in range(len(values))]


def _write_note(path: str, note: dict[str, Any]) -> None:
    """Write a note for the process that waits for it, at once."""
    fresh = f"{path}.new"
    with open(fresh, "w") as file:
        json.dump(note, file)
    os.replace(fresh, path)


def _read_note(path: str, count: int) -> list[tuple[str, int, int]]:
    """Read a note, and remove it.

    Raises:
        WriteError: it says that writing failed, or is not there because the process that was to write it has died.
    """
    try:
        with open(path) as file:
            note = json.load(file)
        os.unlink(path)
        if "places" in note:
            places = [(str(name), int(offset), int(length)) for name, offset, length in note["places"]]
            if len(places) == count:
                return places
    except (OSError, ValueError, TypeError) as exc:
        raise WriteError(f"what was to be written has left no results at {path} ({exc}): did its process die?") from exc
    raise WriteError(f"writing failed: {note.get('error', 'some items have no place')}")
