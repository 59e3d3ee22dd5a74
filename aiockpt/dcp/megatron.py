"""`FileSystemWriterAsync`: writes Megatron-Core's ``torch_dist`` checkpoints.

Megatron plans a save in the training process, writes in another process (forked for each save, or persistent), and
finally gathers the results of all ranks. It asks its writer for a function to run in that process. To use this one::

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
from aiockpt.dcp.adapter import borrowed
from aiockpt.dcp.writer import FileSystemWriter, resolved, results_of, write_items
from aiockpt.errors import AiockptError, SaveError, WriteError
from aiockpt.format.index import ItemRange
from aiockpt.planning.collective.local import LocalPlanner
from aiockpt.staging.runtime import has_events, ready_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from aiockpt.dcp.writer import ItemValues


@dataclass(frozen=True, slots=True)
class RankWriteOptions:
    """How the items of one rank are written. Sent to the process that writes them."""

    path: str  # of the checkpoint, in the end
    prefix: str  # of the names of the rank's files
    files: int  # at most, besides those of the hint
    hint: str | None  # tensors whose names begin with it go to files of their own
    sync: bool  # fsync the files
    staging_bytes: int | None  # at most
    direct_io: bool  # write past the page cache


class FileSystemWriterAsync(FileSystemWriter):
    """Writes what Megatron-Core plans, in the process that Megatron chooses; replaces its class of this name.

    Create one writer for each save, and call its methods in this order: `prepare_local_plan`; `prepare_global_plan` or
    `prepare_decentralized_global_plan` unless plans are reused; `prepare_write_data`; the functions of
    `get_save_function_and_args`, in any process of this machine; `retrieve_write_results`; on the coordinator `finish`.
    The checkpoint appears atomically, in `finish`. The directory may exist already and hold other files.

    Args:
        path: the checkpoint's directory.
        args: as for `aiockpt.dcp.FileSystemWriter`.
        separation_hint: tensors whose names begin with it go to files of their own, whose names contain it.
        use_msc: must be False: this writer writes to file systems only.
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
        if self._transforms or self._as_safetensors:
            raise ValueError("_extensions and SAFETENSORS are not for saves in another process")
        if not self.single_file_per_rank:
            raise ValueError("single_file_per_rank=False is not for saves in another process")
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self._is_coordinator = False
        self._items: list[WriteItem] | None = None
        self._values: ItemValues = []
        self._options: RankWriteOptions | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store this rank's role in the save; see `aiockpt.dcp.FileSystemWriter.set_up_storage_writer`."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    # --- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the path may be written to, and create the hidden directory that all ranks write to.

        Raises:
            CheckpointExistsError: the path is a file, or holds a checkpoint and ``overwrite`` is False.
            WriteError: the directory can't be created.
        """
        plan = super().prepare_local_plan(plan)
        hidden = shared_commit.ensure(self._path(), fsync=self.sync_files)
        if self._is_coordinator:
            self.discard()
            self._unpublished = weakref.finalize(self, shared_commit.discard, hidden, shared_commit.hold(hidden))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank the prefix of its file names."""
        return [replace(plan, storage_data=_StoragePrefix(f"__{number}_")) for number, plan in enumerate(plans)]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Do the same as `prepare_global_plan`, for this rank alone and without communication."""
        return replace(local_plan, storage_data=_StoragePrefix(f"__{_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolve this rank's items. Copies nothing.

        Raises:
            SaveError: the planner returns a value of another type than its plan says.
        """
        hidden = shared_commit.find(self._path(), None)
        with contextlib.suppress(FileNotFoundError):  # left by an earlier save whose results were never retrieved
            os.unlink(os.path.join(hidden, _results_name(plan.storage_data.prefix)))
        self._items = list(plan.items)
        self._values = [(item.index.fqn, resolved(item, planner)) for item in self._items]
        self._options = RankWriteOptions(
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

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[..., ItemValues] | None, list[Any]]:
        """Return the functions that write this rank's items.

        Returns:
            A function that writes; a function that copies the tensors to host memory, whose result replaces the second
            argument; and the arguments of the first function. Each can be pickled and sent to another process. None,
            None and an empty list if there is nothing to write.
        """
        if not self._values or self._options is None:
            return None, None, []
        preload = partial(self.preload_tensors, self._values, pid=os.getpid())
        return partial(self.write_preloaded_data, self._options), preload, [_rank(), self._values, os.getpid()]

    @staticmethod
    def preload_tensors(values: ItemValues, non_blocking: bool = True, *, pid: int | None = None) -> ItemValues:
        """Copy tensors that could change, or that are not in host memory, to host memory. Blocks.

        Args:
            values: name and value of each item.
            non_blocking: let the copies from accelerators overlap.
            pid: the process that prepared the save. In another process, tensors in host memory are shared with it and
                are copied too; a forked process has its own copies already.
        """
        shared = pid is not None and pid != os.getpid()
        staged: ItemValues = []
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
    def write_preloaded_data(options: RankWriteOptions, rank: int, values: ItemValues, pid: int) -> None:
        """Write a rank's items, and a results file with their locations, or the error, beside them. Blocks.

        An error of writing is not raised here, but by `retrieve_write_results`.

        Args:
            options: how to write.
            rank: whose items these are.
            values: name and value of each, as `preload_tensors` returns them.
            pid: the process that prepared the save.
        """
        if pid != os.getpid():
            torch.set_num_threads(1)  # the intra-op threads of the parent do not exist in its fork
        hidden = shared_commit.find(options.path, None)
        try:
            results: dict[str, Any] = {"places": _write(options, hidden, values)}
        except Exception as exc:  # raised where the results are retrieved
            results = {"error": f"{type(exc).__name__}: {exc}"}
        _write_results(os.path.join(hidden, _results_name(options.prefix)), results)

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Return the locations of this rank's items, once the function that writes them has returned.

        Returns:
            A result for each item; or the error, in the form in which ``torch.distributed`` sends it between ranks.
        """
        try:
            if self._items is None or self._options is None:
                raise SaveError("there are no results before prepare_write_data")
            if not self._items:
                return []
            path = os.path.join(shared_commit.find(self._path(), None), _results_name(self._options.prefix))
            return results_of(self._items, _read_results(path, len(self._items)))
        except AiockptError as exc:
            wrapped: WRAPPED_EXCEPTION = _wrap_exception(exc)
            return wrapped


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _results_name(prefix: str) -> str:
    return f".{prefix}results.json"


def _write(options: RankWriteOptions, hidden: str, values: ItemValues) -> Sequence[ItemRange]:
    for name in os.listdir(hidden):  # left by an earlier attempt of this rank
        if name == _results_name(options.prefix) or (options.prefix in name and name.endswith(".distcp")):
            os.unlink(os.path.join(hidden, name))
    hint = (options.hint,) if options.hint else ()
    settings = {"staging_bytes": options.staging_bytes, "direct_io": options.direct_io}
    with borrowed(None, fsync=options.sync, io_threads=options.files, **settings) as checkpointer:
        planner = LocalPlanner(options.prefix)
        return write_items(checkpointer, values, hidden, planner, files=options.files, separation_hint=hint)


def _write_results(path: str, results: dict[str, Any]) -> None:
    """Write a results file atomically."""
    fresh = f"{path}.new"
    with open(fresh, "w") as file:
        json.dump(results, file)
    os.replace(fresh, path)


def _read_results(path: str, count: int) -> list[ItemRange]:
    """Read and remove a results file; raise WriteError if it holds an error, or the writing process left none."""
    try:
        with open(path) as file:
            results = json.load(file)
        os.unlink(path)
        if "places" in results:
            locations = [ItemRange(str(name), int(at), int(length)) for name, at, length, _ in results["places"]]
            if len(locations) == count:
                return locations
    except (OSError, ValueError, TypeError) as exc:
        raise WriteError(f"the writing process left no results at {path} ({exc}): did its process die?") from exc
    raise WriteError(f"writing failed: {results.get('error', 'some items have no place')}")
