"""`FileSystemWriterAsync`: writes the checkpoints of Megatron-Core, and of NVRx (``nvidia-resiliency-ext``).

Both plan a save in the training process, write in another process (forked for each save, or persistent), and finally
gather the results of all ranks. They ask their writer for a function to run in that process. To let them use this one::

    import aiockpt.dcp.megatron

    aiockpt.dcp.megatron.install()  # before the first save, on every rank; returns what was replaced

Source of the interface: ``filesystem_async.py``, ``async_utils.py`` and ``state_dict_saver.py`` of Megatron-Core, and
``checkpointing/async_ckpt`` of NVRx.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import math
import os
import queue
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from aiockpt.coordination.choose import is_distributed
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.core.threads import DaemonThreads
from aiockpt.dcp.adapter import borrowed
from aiockpt.dcp.writer import FileSystemWriter, resolved, results_of, write_items
from aiockpt.errors import AiockptError, SaveError, WriteError
from aiockpt.format.index import ItemRange
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.layout import assign_buckets
from aiockpt.planning.planner import Planner
from aiockpt.snapshot.capture import dense_form
from aiockpt.staging.runtime import has_events, ready_event
from aiockpt.storage.local import beside
from aiockpt.storage.local.temp_dir import hold

if TYPE_CHECKING:
    from types import ModuleType

    from torch.distributed.checkpoint.storage import WriteResult

    from aiockpt.format.transforms.base import Transform

    WriteBucket = tuple[str, str, tuple[list[tuple[WriteItem, bytes]], list[tuple[WriteItem, Any]]]]

    "One file: its path, its name, and its items with their values, objects and tensors apart."


_logger = logging.getLogger("aiockpt")
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class RankWriteOptions:
    """Options for writing the files of one rank. Sent to the process that writes them."""

    pid: int  # of the process that prepared the save
    path: str  # of the checkpoint
    sync: bool  # fsync the files
    transforms: Sequence[Transform]  # applied to each item
    staging_bytes: int | None  # at most
    direct_io: bool  # write past the page cache


class _SharedPlace(NamedTuple):
    """A tensor's place in a block of shared memory."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the block."""
        length = math.prod(self.shape) * self.dtype.itemsize
        return block[self.offset : self.offset + length].view(self.dtype).view(self.shape)


class FileSystemWriterAsync(FileSystemWriter):
    """Writes what Megatron-Core or NVRx plans, in the process that they choose; replaces their class of this name.

    Create one writer for each save, and call its methods in this order: `prepare_local_plan`; `prepare_global_plan` or
    `prepare_decentralized_global_plan` unless plans are reused; `prepare_write_data`; the functions of
    `get_save_function_and_args`, in any process of this machine; `retrieve_write_results`; on the coordinator `finish`.
    The checkpoint appears atomically, in `finish`. The directory may exist already and hold other files.

    Args:
        path: the checkpoint's directory, on a file system.
        args: as for `aiockpt.dcp.FileSystemWriter`, with ``thread_count`` the number of files, if there are as many
            items: all are written at the same time.
        separation_hint: tensors whose names begin with it go to files of their own, whose names contain it. Half of
            the files are for them.
        use_msc: accepted as by the writers that this one replaces, for paths of a file system.
        is_multiproc_io: accepted likewise; all files are written at the same time, by threads.
        use_cached_data_structure: with ``use_cpu_shm_for_gpu_tensors``, use the shared memory of an earlier save again
            once its results were retrieved. The handles of other tensors are sent with every save, never cached, so
            that a save never reads memory that is no longer a tensor's.
        use_cpu_shm_for_gpu_tensors: copy tensors of accelerators to shared host memory in `prepare_write_data`, so that
            the writing process uses no accelerator.
        open_file: accepted likewise: the builtin ``open``.
        kwargs: as for `aiockpt.dcp.FileSystemWriter`.
    """

    can_run_decentralized_global_plan = True
    _takes_urls = False
    # Unused blocks by their size; the keys are the sizes of all. NVRx's tests clear its caches by these three names.
    _shm_tensor_cache: ClassVar[dict[int, list[torch.Tensor]]] = {}
    _cached_identifiers = _cached_tensor_data_ptrs = _shm_tensor_cache
    _shm_drain_callback: ClassVar[Callable[[], object] | None] = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        open_file: Callable[..., Any] = open,
        **kwargs: Any,
    ) -> None:
        if str(path).startswith("msc://"):
            raise ValueError(
                f"{path} is a URL of multistorageclient, which this writer does not use: save to a path of a file "
                "system, or with the stock writer, after aiockpt.dcp.megatron.uninstall()"
            )
        super().__init__(path, *args, **kwargs)
        if not self.single_file_per_rank:
            raise ValueError("single_file_per_rank=False is not for saves in another process")
        if open_file is not open:
            raise ValueError("open_file must be the builtin open: this writer opens its files itself")
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self.use_msc = use_msc
        self.open_file = open_file
        self.use_cached_data_structure = use_cached_data_structure
        self.use_cpu_shm_for_gpu_tensors = use_cpu_shm_for_gpu_tensors
        self.is_multi_proc_io = is_multiproc_io
        self._buckets: list[WriteBucket] | None = None
        self._block: torch.Tensor | None = None
        self._results: str | None = None

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint."""
        return self._path()

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Release the shared memory that is kept for later saves. Safe at any time."""
        cls._shm_tensor_cache.clear()

    @classmethod
    def register_shm_drain_callback(cls, fn: Callable[[], object] | None) -> None:
        """Register a function that waits for earlier saves, called before shared memory is reused; None removes it."""
        FileSystemWriterAsync._shm_drain_callback = fn

    # --- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the path may be written to, and create the hidden directory that all ranks write to.

        Raises:
            CheckpointExistsError: the path is a file, or holds a checkpoint and ``overwrite`` is False.
            WriteError: the directory can't be created.
        """
        plan = super().prepare_local_plan(plan)
        hidden = beside.begin(self._path(), None, fsync=self.sync_files, keep=True)
        if self._is_coordinator:
            self.discard()
            self._unpublished = weakref.finalize(self, beside.discard, hidden, hold(hidden))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank the prefix of its file names."""
        return [replace(plan, storage_data=_StoragePrefix(f"__{number}_")) for number, plan in enumerate(plans)]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Do the same as `prepare_global_plan`, for this rank alone and without communication."""
        return replace(local_plan, storage_data=_StoragePrefix(f"__{_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolve this rank's items. Copies nothing, unless ``use_cpu_shm_for_gpu_tensors``.

        Raises:
            SaveError: the planner returns a value of another type than its plan says.
        """
        prefix = plan.storage_data.prefix
        values = [dense_form(item.index.fqn, resolved(item, planner)) for item in plan.items]
        if self.use_cpu_shm_for_gpu_tensors:
            self._to_shared_memory(values)
        directory = beside.find(self._path(), None)
        self._results = os.path.join(directory, f".{prefix}results.json")
        with contextlib.suppress(FileNotFoundError):  # left by an earlier save whose results were never retrieved
            os.unlink(self._results)
        self._buckets = []
        for hint, group in self._groups(list(zip(plan.items, values, strict=True))):
            name = f"{hint}{prefix}{len(self._buckets)}.distcp"
            objects = [pair for pair in group if pair[0].type == WriteItemType.BYTE_IO]
            tensors = [pair for pair in group if pair[0].type != WriteItemType.BYTE_IO]
            self._buckets.append((os.path.join(directory, name), name, (objects, tensors)))

    def _groups(self, pairs: list[tuple[WriteItem, Any]]) -> Iterator[tuple[str, list[tuple[WriteItem, Any]]]]:
        """Distribute the items over files; yield the hint and the items of each."""
        hint = self.separation_hint
        is_hinted = [hint is not None and item.index.fqn.startswith(hint) for item, _ in pairs]
        for wanted, name in ((False, ""), (True, hint or "")):
            group = [pair for pair, hinted in zip(pairs, is_hinted, strict=True) if hinted == wanted]
            sizes = [_size_of(value) for _, value in group]
            for bucket in assign_buckets(sizes, max(1, self.thread_count // 2) if hint else self.thread_count):
                if bucket:
                    yield name, [group[position] for position in bucket]

    def _to_shared_memory(self, values: list[Any]) -> None:
        """Copy the tensors of accelerators to one block of shared memory; put their slots in their places."""
        slots: dict[int, _SharedPlace] = {}
        size = 0
        for number, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                slots[number] = _SharedPlace(size, value.dtype, value.shape)
                size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not slots:
            return
        block = self._block = self._shared_block(size)
        devices = {values[number].device for number in slots}
        for number, slot in slots.items():
            slot.of(block).copy_(values[number], non_blocking=has_events(values[number].device))
            values[number] = slot
        _wait_for(devices)

    def _shared_block(self, size: int) -> torch.Tensor:
        """Return a block that no unfinished save uses."""
        is_known = self.use_cached_data_structure and size in self._shm_tensor_cache
        unused = self._shm_tensor_cache.setdefault(size, []) if self.use_cached_data_structure else []
        drain = FileSystemWriterAsync._shm_drain_callback
        if is_known and not unused and drain is not None:
            drain()  # an earlier save is retrieved, and its block is unused
        block = unused.pop() if unused else torch.empty(size, dtype=torch.uint8)
        return block.share_memory_()  # type: ignore[no-untyped-call,no-any-return]

    # --- writing ----------------------------------------------------------------------------------

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[..., list[WriteBucket]] | None, list[Any]]:
        """Return the functions that write this rank's items.

        Returns:
            A function that writes; a function that copies the tensors to host memory, whose result replaces the second
            argument; and the arguments of the first function. Each can be pickled and sent to another process. None,
            None and an empty list if there is nothing to write.
        """
        if not self._buckets or self._results is None:
            return None, None, []
        options = RankWriteOptions(
            pid=os.getpid(),
            path=self._path(),
            sync=self.sync_files,
            transforms=self._transforms,
            staging_bytes=self._staging_bytes,
            direct_io=self._direct_io,
        )
        preload = partial(self.preload_tensors, self._buckets, True, pid=options.pid, block=self._block)
        return partial(self.write_preloaded_data_multithread, options), preload, [_rank(), None, self._results]

    @staticmethod
    def preload_tensors(
        write_buckets: list[WriteBucket],
        non_blocking: bool = True,
        *,
        pid: int | None = None,
        block: Any = None,
    ) -> list[WriteBucket]:
        """Copy tensors that could change, or that are not in host memory, to host memory. Blocks.

        Tensors in host memory are shared with another process than ``pid``, which has prepared the save, and are copied
        too; a forked process has its own copies already. ``block`` is the shared memory of what was copied there.
        """
        is_shared = pid is not None and pid != os.getpid()
        moved: set[torch.device] = set()

        def staged(value: Any) -> Any:
            if isinstance(value, _SharedPlace):
                return value.of(block)
            if value.device.type == "cpu":
                return value.clone() if is_shared else value
            moved.add(value.device)
            return value.to("cpu", non_blocking=non_blocking and has_events(value.device))

        buckets = [
            (path, name, (objects, [(item, staged(value)) for item, value in tensors]))
            for path, name, (objects, tensors) in write_buckets
        ]
        _wait_for(moved)
        return buckets

    @staticmethod
    def write_preloaded_data_multithread(
        options: RankWriteOptions, rank: int, write_buckets: list[WriteBucket], results_path: str
    ) -> None:
        """Write a rank's files, and a results file with the locations of their items, or the error. Blocks.

        ``write_buckets`` are those that `preload_tensors` returns. No error of writing is raised here, but by
        `retrieve_write_results`.
        """
        with _as_a_writing_process() if options.pid != os.getpid() else contextlib.nullcontext():
            results: dict[str, Any]
            try:
                written = _write_buckets(options, write_buckets)
                infos = [result.storage_data for each in written for result in each]
                places = [(i.relative_path, i.offset, i.length, i.transform_descriptors or ()) for i in infos]
                results = {"places": places}
            except Exception as exc:  # raised where the results are retrieved
                results = {"error": f"{type(exc).__name__}: {exc}"}
            try:
                with open(f"{results_path}.new", "w") as file:
                    json.dump(results, file)
                os.replace(f"{results_path}.new", results_path)  # a reader never sees half of it
            except OSError:  # raising would end a persistent process, and its callers would wait forever
                outcome = results.get("error", "nothing went wrong before")
                _logger.exception("rank %d did not write its results to %s (%s)", rank, results_path, outcome)

    @staticmethod
    def write_preloaded_data(
        transform_list: Sequence[Transform],
        local_proc_idx: int,
        write_bucket: WriteBucket,
        results_queue: Any,
        count_queue: Any,
        use_fsync: bool,
        **kwargs: Any,
    ) -> tuple[int, list[WriteResult] | Exception]:
        """Write one file. Blocks.

        Args:
            transform_list: applied to each item.
            local_proc_idx: number of the file among those of the rank.
            write_bucket: its path, its name, and its items; one of those that `get_save_function_and_args` leads to.
            results_queue: the result is put into this queue. None: it is only returned.
            count_queue: an entry is taken from this queue, and marked as done, when the file is written. None: none.
            use_fsync: make the file durable.
            kwargs: ``checkpoint``, its path; ``staging_bytes`` and ``direct_io``, as for the constructor.

        Returns:
            The number, and the results of the items, or the error.
        """
        result: list[WriteResult] | Exception
        try:
            result = _write_bucket(write_bucket, transform_list, fsync=use_fsync, **kwargs)
        except Exception as exc:
            result = exc
        if results_queue is not None:
            results_queue.put((local_proc_idx, result))
        if count_queue is not None:
            count_queue.get()
            count_queue.task_done()
        return local_proc_idx, result

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Return the locations of this rank's items, once the function that writes them has returned.

        Returns:
            A result for each item; or the error, in the form in which ``torch.distributed`` sends it between ranks.
        """
        try:
            if self._buckets is None or self._results is None:
                raise SaveError("there are no results before prepare_write_data")
            if not self._buckets:
                return []
            items = [item for _, _, pairs in self._buckets for item, _ in (*pairs[0], *pairs[1])]
            results = results_of(items, _read_results(self._results, len(items)))
        except AiockptError as exc:
            # Without its traceback: since Python 3.13 that holds code objects, which can't be sent to another rank.
            wrapped: WRAPPED_EXCEPTION = _wrap_exception(exc.with_traceback(None))
            return wrapped
        if self._block is not None and self._block.nbytes in self._shm_tensor_cache:
            self._shm_tensor_cache[self._block.nbytes].append(self._block)
        self._block = None
        return results


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def _size_of(value: Any) -> int:
    if isinstance(value, _SharedPlace):
        return math.prod(value.shape) * value.dtype.itemsize
    return value.nbytes if isinstance(value, torch.Tensor) else len(value)


def _wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for copies from devices."""
    for event in map(ready_event, devices):
        if event is not None:
            event.synchronize()


# --- in the writing process -----------------------------------------------------------------------


@contextlib.contextmanager
def _as_a_writing_process() -> Iterator[None]:
    """Use no intra-op threads, which a fork lacks, and free no tensors of accelerators, which belong to its parent."""
    torch.set_num_threads(1)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _write_buckets(options: RankWriteOptions, buckets: list[WriteBucket]) -> list[list[WriteResult]]:
    """Write all files of a rank at the same time; return the results of each; raise the first error."""
    share = options.staging_bytes and max(BLOCK_BYTES, options.staging_bytes // len(buckets))
    settings = {"checkpoint": options.path, "staging_bytes": share, "direct_io": options.direct_io}
    with DaemonThreads(len(buckets), "aiockpt-dcp") as threads:
        return list(threads.map(partial(_call, options, settings), enumerate(buckets)))


def _call(options: RankWriteOptions, settings: dict[str, Any], numbered: tuple[int, WriteBucket]) -> list[WriteResult]:
    """Call `FileSystemWriterAsync.write_preloaded_data`, which a test may have replaced, as its callers do."""
    number, bucket = numbered
    results: queue.Queue[Any] = queue.Queue()
    counts: queue.Queue[int] = queue.Queue()
    counts.put(number)
    FileSystemWriterAsync.write_preloaded_data(
        options.transforms, number, bucket, results, counts, options.sync, **settings
    )
    _, result = results.get_nowait()
    if isinstance(result, Exception):
        raise result
    return list(result)


def _write_bucket(
    bucket: WriteBucket,
    transforms: Sequence[Transform],
    *,
    checkpoint: str = "",
    fsync: bool,
    staging_bytes: int | None = None,
    direct_io: bool = True,
) -> list[WriteResult]:
    """Write one file, which is replaced if an earlier attempt left it."""
    path, name, (objects, tensors) = bucket
    pairs = [*objects, *tensors]
    # Under a name of its own: an attempt that was killed may have left its file, and a fork of it may still be writing.
    directory, planner = os.path.dirname(path), Planner(DcpFormat(1), f".{uuid.uuid4().hex}_")
    settings = {"staging_bytes": staging_bytes, "direct_io": direct_io, "fsync": fsync, "io_threads": 1}
    values = [(item.index.fqn, value) for item, value in pairs]
    checkpoint = checkpoint or directory  # any name beside it
    ticket = os.path.relpath(directory, os.path.dirname(checkpoint))
    with borrowed(None, **settings) as checkpointer:
        places = write_items(checkpointer, values, checkpoint, ticket, planner, transforms)
    (written,) = {place.file for place in places}
    os.replace(os.path.join(directory, written), path)
    return results_of([item for item, _ in pairs], [place._replace(file=name) for place in places])


def _read_results(path: str, count: int) -> list[ItemRange]:
    """Read and remove a results file; raise WriteError if it holds an error, or the writing process left none."""
    try:
        with open(path) as file:
            results = json.load(file)
        os.unlink(path)
        if "places" in results:
            locations = [
                ItemRange(str(name), int(at), int(length), tuple(t)) for name, at, length, t in results["places"]
            ]
            if len(locations) == count:
                return locations
    except (OSError, ValueError, TypeError) as exc:
        raise WriteError(
            f"the writing process left no results at {path} ({exc}): did its process die? See its log"
        ) from exc
    raise WriteError(f"Worker failure: {results.get('error', 'some items have no place')}")


# --- in the place of the packages' own class ------------------------------------------------------

_NAME = "FileSystemWriterAsync"
_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

_replaced: dict[str, Any] = {}  # name of a module: the class that it had


def install() -> tuple[str, ...]:
    """Make Megatron-Core and NVRx, whichever are installed, write with `FileSystemWriterAsync`. Idempotent.

    Replaces the class that this version creates its writers of, in every module of the two packages that has it. Then
    asks them again: when this returns, the replacement is in use. Modules of other packages that imported the class by
    name before keep it, so call this before importing them.

    Returns:
        The places, such as ``megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync``.

    Raises:
        ImportError: neither package is installed.
        AiockptError: a package goes on using another class; nothing is replaced then.
    """
    stock = [kind for kind in _created().values() if kind is not FileSystemWriterAsync]
    for name, module in list(sys.modules.items()):
        is_theirs = name.partition(".")[0] in ("megatron", "nvidia_resiliency_ext") and module is not None
        if is_theirs and any(vars(module).get(_NAME) is kind for kind in stock):
            _replaced[name] = vars(module)[_NAME]
            setattr(module, _NAME, FileSystemWriterAsync)
    for where, kind in _created().items():
        if kind is not FileSystemWriterAsync:
            uninstall()
            raise AiockptError(
                f"{where} goes on using {kind!r}, which install() can't replace in this version; nothing was changed. "
                "Pass an aiockpt.dcp.megatron.FileSystemWriterAsync to its planning functions yourself"
            )
    return tuple(f"{name}.{_NAME}" for name in _replaced)


def uninstall() -> None:
    """Undo `install`. Idempotent."""
    while _replaced:
        name, kind = _replaced.popitem()
        if name in sys.modules:
            setattr(sys.modules[name], _NAME, kind)


def _created() -> dict[str, Any]:
    """Return the class that each strategy of the installed packages creates its writers of."""
    kinds: dict[str, Any] = {}
    nvrx, megatron = _imported(_NVRX), _imported(_MEGATRON)
    if nvrx is not None:
        kinds[_NVRX] = getattr(nvrx, _NAME, None)
    if megatron is not None and not hasattr(megatron, "get_async_strategy"):  # before Megatron-Core 0.17
        kinds[_MEGATRON] = getattr(megatron, _NAME, None)
    elif megatron is not None:
        for strategy in ("nvrx", "mcore"):
            with contextlib.suppress(ModuleNotFoundError, TypeError):  # not installed; not one of this version
                kinds[f"{_MEGATRON} with the strategy {strategy}"] = megatron.get_async_strategy(strategy)[1][_NAME]
    if not kinds:
        raise ImportError("neither megatron.core nor nvidia_resiliency_ext has a writer: are they installed?")
    return kinds


def _imported(name: str) -> ModuleType | None:
    """Import a module; return None if its package is not installed, or has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and f"{name}.".startswith(f"{exc.name}."):
            return None
        raise
