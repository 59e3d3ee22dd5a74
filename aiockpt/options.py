"""Options of checkpointers, writer processes, saves and loads. Each is declared, typed and documented here alone."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from aiockpt.coordination.choose import ProcessGroupLike, check_group
from aiockpt.core.dataclasses import dataclass, field, fields
from aiockpt.core.machine import BLOCK_BYTES
from aiockpt.storage.base import Storage
from aiockpt.storage.local.retries import DEFAULT_RETRIES, Retries
from aiockpt.telemetry.observer import Observer

if TYPE_CHECKING:
    from aiockpt.format.transforms.base import Transform
    from aiockpt.format.transforms.zstd import CompressRule
    from aiockpt.planning.filters import Filter
    from aiockpt.telemetry.progress import OnProgress
    from aiockpt.telemetry.saves import SaveResult

Path = str | os.PathLike[str]
MapLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | torch.device | str | dict[str, str]
Hook = Callable[[str], "Awaitable[object] | object"]
"""A function or coroutine function that is called with the path of the checkpoint."""
CommitHook = Hook | Callable[[str, "SaveResult"], "Awaitable[object] | object"]
"""A hook that may take the result of the save too."""

OnBusy = Literal["wait", "skip", "supersede", "error"]
OnFailure = Literal["raise", "warn"]
SaveFormat = Literal["dcp", "safetensors", "torch"]
Validation = Literal["versions", "hash"]
Replicas = Literal["check", "trust", "error"]
DType = torch.dtype | Literal["target"] | None

DEFAULT_CHUNK_BYTES = 16 << 20
_IONICE = {"realtime": 1, "best-effort": 2, "idle": 3}
_CPU = torch.device("cpu")
_LOCAL_ONLY = frozenset({"direct_io", "fsync", "retries"})


# --- checkpointers ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWriter:
    """A separate process that computes CRCs, writes and commits; for ``writer=``.

    It shares staging memory with the trainer and outlives it: a save of one process that was staged becomes a
    checkpoint even if the trainer is killed.

    Attributes:
        nice: how far the process yields the CPU to others, 0 to 19; see nice(1).
        ionice: "idle", or "best-effort" or "realtime" with a level of 0 to 7, as in ``("best-effort", 7)``; see
            ionice(1). None: the same as the trainer.
    """

    nice: int = 0
    ionice: Literal["idle"] | tuple[Literal["best-effort", "realtime"], int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nice, int) or not 0 <= self.nice <= 19:
            raise ValueError(f"nice is {self.nice!r}; it must be 0 to 19")
        numbers = self.ionice_numbers
        if numbers is not None and not 0 <= numbers[1] <= 7:
            raise ValueError(f"ionice is {self.ionice!r}; its level must be 0 to 7")

    @property
    def ionice_numbers(self) -> tuple[int, int] | None:
        """The class and level as the kernel numbers them."""
        if self.ionice is None:
            return None
        try:
            name, level = (self.ionice, 0) if isinstance(self.ionice, str) else self.ionice
            return _IONICE[name], int(level)
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"ionice is {self.ionice!r}; it must be 'idle', ('best-effort', level) or ('realtime', level)"
            ) from None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagingWindow:
    """A throttle for staging, so that it leaves the bus and the memory to training.

    ::

        StagingWindow(bytes_per_s=4e9)             # a rate in bytes per second
        StagingWindow(bytes_per_window=64 << 20)   # an allowance after each `await ckpt.window()`, such as per step

    Staging copies whole chunks (``chunk_bytes``); a chunk larger than the allowance uses up several allowances.
    A save is no longer throttled once a caller waits for it: in `fence()`, in a step behind `guard()`, for `staged`,
    for ``written.result()``, or when the checkpointer closes.

    Attributes:
        bytes_per_s: bytes per second; None: no limit.
        bytes_per_window: bytes after each `window()`; what is left of an allowance is not carried over. None: no
            windows.
        patience_s: seconds without a `window()` after which a save continues anyway.
    """

    bytes_per_s: float | None = None
    bytes_per_window: int | None = None
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "bytes_per_window", "patience_s"):
            value = getattr(self, name)
            if value is None and name != "patience_s":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} of a StagingWindow must be a positive number, not {value!r}")
        if self.bytes_per_s is None and self.bytes_per_window is None:
            raise ValueError("a StagingWindow needs bytes_per_s or bytes_per_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerOptions:
    """Options of a checkpointer.

    Attributes:
        on_busy: what happens to a save while ``max_in_flight`` others are in flight, that is, not yet written.
            "wait": it is queued; its tensors must not change until `staged`. `ready` waits until a save would not be
            queued. "skip": it is not made. "supersede": it is queued, and cancels the queued saves before it that are
            behind the first ``max_in_flight`` and not staged. "error": the call raises `CheckpointerBusyError`.
            A skipped or superseded save is over at once: `staged` comes, since its tensors may change, and `written`
            raises `SaveSkippedError`. That is not reported in any other way, except by ``handle.skipped`` and
            `statistics`. With several ranks, rank 0 decides for all.
        max_in_flight: see ``on_busy``. With 1, a save is copied as fast as memory allows. With 2, copying may have to
            wait until the save before is written, if the staging memory is not large enough for both.
        on_failure: "raise": a failed save raises from `staged` and `written`; if neither is awaited, from the next
            `save` or from closing. "warn": the failure is logged as an error, `staged` comes anyway, and only
            `written` raises; `statistics` has the errors. In both cases the call itself raises if its arguments are
            wrong.
        save_timeout: seconds that a save may take, counted from the end of the save before. After that it is cancelled
            with `SaveTimeoutError`. If a thread of it hangs in the file system, the saves behind it go on without it;
            the staging memory that the thread holds is not used again until the thread returns, and up to as much
            again may be allocated instead. None: no limit.
        fallback_path: a directory for checkpoints that can't be written or published under their own path; there
            they keep their name. Or a function from the path to another path. The result has the new ``path``, and
            the error as ``fallback_error``. Nothing is overwritten there. The staging memory of the save is kept until
            it is published, so a state larger than the staging memory can use the fallback only while it is not staged.
            Of several ranks all save to the fallback of rank 0, or none do.
        writer: what computes CRCs, writes and commits. "thread": threads of this process. "process", or a
            `ProcessWriter`: a separate process, which is started in the background at the first use, shares staging
            memory with this one and outlives it. A save that was staged becomes a checkpoint even if this process is
            killed, unless it has a ``pre_commit`` hook, or several ranks save together. Linux only; a ``storage`` must
            be picklable.
        staging_bytes: upper limit of the staging memory, in bytes. None: the size of the state, but at most half of
            the available memory. A larger state streams through the staging memory: it is written as fast, but
            `staged` comes later.
        chunk_bytes: size of one piece of staging memory and of one write, in bytes. None: 16 MiB.
        io_threads: number of threads that write, and of files for a large state; twice as many threads read. None: 4.
        direct_io: bypass the page cache where the file system allows it.
        fsync: make every file and directory durable before `written`. Without it, a crash of the machine can lose a
            checkpoint that was reported as written.
        retries: how often and how fast to repeat a write or another operation that the file system refused for a
            reason that may pass, such as a server that restarts. A full disk or a failing device is not retried. A
            number: that many attempts after the first. None or 0: no retry.
        drain_timeout: seconds that closing waits for saves in flight before it cancels them.
        idle_timeout: seconds without a save, a load or another call after which all threads end and the staging memory
            is freed; the next call starts them again. None: when the checkpointer is closed. For programs that have no
            place to close it. Nothing ends while it saves together with other ranks.
        validate: how changes of tensors before `staged` are detected, unless `save` says otherwise; see there.
        process_group: the ranks that save together. Each of them calls `save` with its part of the state, the same
            number of times and in the same order; together they write one checkpoint. "default": all ranks of
            ``torch.distributed`` if that is initialised at the first use, else this process alone. None: this process
            alone. The group itself is not used to communicate: the ranks connect to rank 0 by TCP at the first save.
            `Ranks`: processes without ``torch.distributed``.
        coordination_timeout: seconds that a rank waits for the others before the save fails. The time that the others
            take to write counts too. It is also the time that rank 0 may be silent while it publishes.
        staging_window: a throttle for copying: a rate, or an allowance after each `window()`. None: no limit.
        transforms: encodings of every item in checkpoints of DCP's format, such as encryption. They are applied in
            this order when saving, after compression, and undone when loading; see `Transform`.
        observers: are told of every save, load and deletion, in a thread of their own; see `Observer`, and
            `aiockpt.observers` for those that log, and those that export metrics and traces.
        storage: where all checkpoints are kept, unless a call says otherwise; None: by the path, which is one of the
            file system or the URL of a registered storage; see `aiockpt.storage`. ``direct_io``, ``fsync`` and
            ``retries`` are options of the file system alone.
        storage_options: options of the storages of URLs, unless a call has its own.
    """

    on_busy: OnBusy = "wait"
    max_in_flight: int = 1
    on_failure: OnFailure = "raise"
    save_timeout: float | None = None
    fallback_path: Path | Callable[[str], Path] | None = None
    writer: Literal["thread", "process"] | ProcessWriter = "thread"
    staging_bytes: int | None = None
    chunk_bytes: int | None = None
    io_threads: int | None = None
    direct_io: bool = True
    fsync: bool = True
    retries: Retries | int | None = DEFAULT_RETRIES
    drain_timeout: float = 1800.0
    idle_timeout: float | None = None
    validate: Validation = "versions"
    process_group: ProcessGroupLike = "default"
    coordination_timeout: float = 1800.0
    staging_window: StagingWindow | None = None
    transforms: Sequence[Transform] = ()
    observers: Sequence[Observer] = ()
    storage: Storage | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        least_of = {"staging_bytes": BLOCK_BYTES, "chunk_bytes": BLOCK_BYTES, "io_threads": 1, "max_in_flight": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if self.idle_timeout is not None and not 0 <= self.idle_timeout < math.inf:
            raise ValueError(f"idle_timeout is None or seconds, not {self.idle_timeout!r}")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must not be negative, not {self.drain_timeout!r}")
        for name in ("coordination_timeout", "save_timeout"):
            value = getattr(self, name)
            if not (value is None and name == "save_timeout") and not value > 0:
                raise ValueError(f"{name} must be positive, not {value!r}")
        known_of = {"on_busy": OnBusy, "on_failure": OnFailure, "validate": Validation}
        for name, known in known_of.items():
            check_choice(name, getattr(self, name), known)
        check_group(self.process_group)
        if self.storage is not None:
            if not isinstance(self.storage, Storage):
                raise TypeError(f"storage must be an aiockpt.storage.Storage, not {self.storage!r}")
            if self.storage_options is not None:
                raise ValueError("storage_options are for URLs: leave them out beside storage=")
            if self.local_only:
                raise ValueError(f"{self.local_only}, which is for the file system: give it to the storage")
        for observer in self.observers:
            if not isinstance(observer, Observer):
                raise TypeError(f"observers must be a list of aiockpt.Observer, not of {observer!r}")
        if self.fallback_path is not None and not callable(self.fallback_path):
            os.fspath(self.fallback_path)
        if self.writer not in ("thread", "process") and not isinstance(self.writer, ProcessWriter):
            raise ValueError(f"writer is {self.writer!r}; it must be 'thread', 'process' or an aiockpt.ProcessWriter")
        if self.staging_window is not None and not isinstance(self.staging_window, StagingWindow):
            raise TypeError(
                f"staging_window is {self.staging_window!r}; it must be a StagingWindow, with bytes_per_s for a rate "
                "or bytes_per_window for an allowance per step"
            )

    @property
    def local_only(self) -> str:
        """The options that were given and that only the file system has, as text; empty if there are none."""
        given = [each for each in fields(self) if each.name in _LOCAL_ONLY and getattr(self, each.name) != each.default]
        return ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in given)

    @property
    def process_writer(self) -> ProcessWriter | None:
        """The process that writes; None: threads of this process."""
        if self.writer == "process":
            return ProcessWriter()
        return self.writer if isinstance(self.writer, ProcessWriter) else None

    @property
    def warn_only(self) -> bool:
        """Whether failed saves are logged and not raised."""
        return self.on_failure == "warn"

    @property
    def writing_threads(self) -> int:
        """Number of threads that write, and of files that they write into."""
        return self.io_threads or 4

    @property
    def chunk(self) -> int:
        """The chunk size: a whole number of blocks, not larger than all staging memory."""
        chunk = self.chunk_bytes or DEFAULT_CHUNK_BYTES
        if self.staging_bytes is not None:
            chunk = min(chunk, self.staging_bytes)
        return max(BLOCK_BYTES, chunk // BLOCK_BYTES * BLOCK_BYTES)


def check_choice(name: str, value: object, known: object) -> None:
    """Raise ValueError unless an option has one of the values of a ``Literal``."""
    choices = get_args(known)
    if value not in choices:
        either = " or ".join(map(repr, choices)) if len(choices) == 2 else f"one of {', '.join(map(repr, choices))}"
        raise ValueError(f"{name} is {value!r}; it must be {either}")


# --- saving -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Options of how a state is saved, wherever that is. They are checked by the save, as those of `SaveOptions` are.

    Attributes:
        metadata: JSON-able values, stored in `.aiockpt.json`. For safetensors also in the header of each file, where
            values that are not text are stored as JSON.
        format: "dcp": readable by ``torch.distributed.checkpoint``. "safetensors": readable by ``safetensors`` and
            ``transformers``. It stores plain tensors only, under dotted names and in row-major order; a tied tensor is
            stored under its first name, and the header's metadata maps each other name to that. A directory gets
            ``model.safetensors``, or a set of files with ``model.safetensors.index.json``, and `.aiockpt.json` with
            their CRCs. "torch": one file, as ``torch.save`` writes it, from one process. None: by the end of the path,
            "safetensors" for ``.safetensors``, "torch" for ``.pt``, ``.pth``, ``.ckpt`` and ``.bin``, else "dcp".
        include: save these only: names, names of containers (with everything in them), and glob patterns such as
            ``"model.*.weight"``, whose ``*`` matches dots too. Or a function of the dotted name and the value of each
            tensor and object, which returns whether to save it. A pattern that matches nothing in the state is
            refused; where only some of several ranks have a name, pass a function. Each live object still makes its
            whole state dict.
        exclude: leave these out, of all or of what ``include`` chooses; the same kinds of values. A checkpoint that
            lacks a part of the state is loaded with ``strict=False``, or with ``keys``.
        shard_bytes: for a safetensors directory: the most bytes of tensors in one file, unless a single tensor is
            larger. None: 5 GB.
        fqn_to_index_mapping: for a safetensors directory, instead of ``shard_bytes``: the number of the file of each
            tensor, counted from 1, by its name. The largest number is the count in the names of the files. Names that
            the state does not have are ignored.
        separation_hint: prefixes of names. Items with such a prefix go to files of their own, whose names begin with
            the prefix, so that for example the optimizer's part can be moved or deleted alone. For the "dcp" format.
        compress: which items to compress. None: none. "zstd" or `aiockpt.Zstd`: all. A mapping from names, names of
            containers and patterns (see ``keys`` of `load`) to one of these or None: the first match counts, and
            items without a match are not compressed. Or a function of name and tensor that returns one of these; it
            is not called for objects. An item that would hardly become smaller is stored uncompressed. Loading needs
            no option, and ``torch.distributed.checkpoint`` can read it too. For the "dcp" format.
        validate: how changes of tensors before `staged` are detected. "versions": by version counters, as described
            above. "hash": by these, and by comparing 64 bytes in every 64 KiB of each tensor that is not copied at the
            call with the bytes that are there when everything is staged. This detects every write of whole tensors or
            of 64 KiB in one piece, however it was made, and a write of ``n`` bytes in one piece with a probability of
            about ``n / 65536``; the sampled places differ from save to save. It does not detect a write that is undone
            before `staged`. It blocks the caller for about 2 ms per GiB and 6 us per tensor, takes as long again
            before `staged`, and keeps a thousandth of the state until then. None: the checkpointer's ``validate``.
        replicas: with several ranks: what happens to plain tensors that several of them have under one name, and that
            differ, as the statistics of batch norm do. "check": the values of the lowest rank are stored, of all such
            tensors, and a warning is logged that names each once. "error": the save fails. "trust": nothing is
            compared, and copies of different ranks may be mixed. Up to 256 bytes are compared of each contiguous
            tensor that is in host memory, or that is on a device and small enough to be copied at the call. It never
            blocks the caller. The same on all ranks.
    """

    metadata: Mapping[str, Any] | None = None
    format: SaveFormat | None = None
    include: Filter | None = None
    exclude: Filter | None = None
    shard_bytes: int | None = None
    fqn_to_index_mapping: Mapping[str, int] | None = None
    separation_hint: str | Sequence[str] | None = None
    compress: CompressRule = None
    validate: Validation | None = None
    replicas: Replicas = "check"


@dataclass(frozen=True, kw_only=True)
class CommitOptions:
    """Options of where a checkpoint is stored, and how it is published.

    Attributes:
        pre_commit: a function or coroutine function that is called with the path when all bytes are durable and
            nothing is published. If it fails, the save fails. It runs in a worker thread, a coroutine in an event loop
            of its own there; with several ranks, each runs its own hook. It may load, open, verify and delete with
            this checkpointer. Calls that would wait for the hook itself raise `SaveError`: to save, to wait for a
            save, and to close.
        post_commit: the same, called when the checkpoint is published, before `written` comes. With a second parameter
            that has no default, it gets the SaveResult too. If it fails, the save has still succeeded: the error is
            logged, and is ``post_commit_error`` of the result.
        storage: where the checkpoint is stored; None: as the checkpointer says.
        storage_options: options of the storage of a URL; None: the checkpointer's.
    """

    pre_commit: Hook | None = None
    post_commit: CommitHook | None = None
    storage: Storage | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class SaveOptions(StateOptions, CommitOptions):
    """Options of a save. They are checked by the save, not here: if one is wrong, the other ranks must be notified.

    Attributes:
        overwrite: atomically replace a checkpoint at this path: a directory, a file of ``torch.save`` or safetensors,
            or an empty directory. If the path is a link, the link is replaced, not its target. A directory that holds
            anything that its checkpoint does not name is refused, with a list of these files. Safetensors may replace
            others beside the files of a model repository, such as ``config.json``, which are kept.
        files: files to add to the checkpoint's directory, by name: their bytes, or the path of a file to copy, which is
            read at the call. They are published with it and are in its manifest, so `verify` checks them too. With
            several ranks, those of rank 0 are added.
        hashes: keep a hash (xxh3_128) of each tensor in the checkpoint's index, by which a later save knows what has
            not changed. It takes about a third of the time of the CRC, in the same pass. For the "dcp" format without
            ``compress`` and transforms, of one process, with ``writer="thread"``. Needs ``aiockpt[delta]``.
        base: an earlier checkpoint of this state, with hashes: its path, "auto" for the last one that this checkpointer
            wrote or loaded, or a `Base`. Files of which nothing has changed become files of the new checkpoint by hard
            links, and the rest is written; see the page on saving. The result has ``bytes_written`` and
            ``bytes_reused``. If it can't be used, for whatever reason, everything is written. It implies ``hashes``.
            For directories of a file system; not together with ``separation_hint`` and ``fallback_path``.
    """

    overwrite: bool = False
    files: Mapping[str, bytes | Path] | None = None
    hashes: bool = False
    base: Path | Base | None = None


# --- delta saves ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """An earlier checkpoint, of which a save shares the files that have not changed.

    ::

        ckpt.save(state, "runs/a/step-200", base="auto")                        # Base() with its defaults
        aiockpt.CheckpointManager("runs/a", base=aiockpt.Base(full_every=20))   # of each save of a run

    Attributes:
        path: the checkpoint. "auto": the last one that the checkpointer has written; before its first save, the last
            one that it has loaded.
        full_every: each so many saves, write everything anew. A damaged block of the disk damages all checkpoints that
            share it: at most so many. None: never.
    """

    path: Path = "auto"
    full_every: int | None = field(default=50, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"the path of a Base must be a path or 'auto', not {self.path!r}")
        if self.full_every is None:
            return
        if type(self.full_every) is not int or self.full_every < 1:
            raise ValueError(f"full_every of a Base must be a number of saves, at least 1, not {self.full_every!r}")


# --- loading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """Options of reading a checkpoint.

    Attributes:
        verify: check the CRC of everything that is read, where one is stored.
        safe_globals: classes and functions that pickled objects may use, besides those that torch allows.
        trust: unpickle objects without restriction, which runs whatever code they contain. It also lifts the limit on
            the decompressed size of objects, which is 64 MiB in all plus a hundred times their stored size.
        storage: where the checkpoint is stored; None: as the checkpointer says.
        storage_options: options of the storage of a URL; None: the checkpointer's.
    """

    verify: bool = True
    safe_globals: Sequence[Any] = ()
    trust: bool = False
    storage: Storage | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(OpenOptions):
    """Options of a load.

    Attributes:
        map_location: the device of new tensors, as in ``torch.load``. None: host memory, even if targets are on an
            accelerator (the ``load_state_dict`` of optimizers moves them to their parameters). NumPy arrays are
            always created in host memory, except that "meta" returns a tensor without memory.
        keys: load only these: names, names of containers (with everything in them), and glob patterns such as
            ``"model.*.weight"``, whose ``*`` matches dots too. Positions of lists that are left out are None.
        dtype: cast floating-point tensors to this dtype, as ``nn.Module.to`` does. Those without dimensions stay as
            they are: they count or steer, as a number of steps, a learning rate or a decay does. If the target has
            the dtype to cast to there, they are cast too. "target": cast each tensor to the dtype of the one that it
            fills; new tensors stay as they are.
        strict: raise if the checkpoint lacks a key of ``state_dict`` or of ``keys``. False: leave such keys as they
            are and warn once, with a `MissingKeysWarning` that has them as ``keys``. Modules get the same value for
            their ``load_state_dict``. Other objects decide for themselves, if anything is stored for them. A function
            of a key: whether it must be there; else as False.
        missing: a list to which the keys are appended that ``strict=False`` allowed to be missing.
        mmap: return tensors that are backed by the files. Nothing is read before it is used, so no CRC is checked.
            Writing to a tensor changes a private copy of the page, never the file. The files must not be written to
            while the tensors live; replacing or deleting the checkpoint is safe. Not with a ``state_dict``,
            ``dtype`` or ``map_location``.
        share: whether ranks that load together read once what several of them need: one of them reads it, and sends it
            to the others over a TCP connection. "auto": if the storage is an object store, or another one whose reads
            go over a network each time; not on a file system, where the ranks of a host share the page cache. True:
            always, and also without a ``state_dict``, which then all ranks have to load. False: never.
        progress: a function that is called with `ProgressEvent` values while the load runs, such as
            ``aiockpt.progress.bar()``. It is called in a thread of its own, and the load does not wait for it: it may
            miss events, but gets the last one, which says how the load has ended. An exception in it is logged, and
            it is not called again.
    """

    map_location: MapLocation | None = None
    keys: str | Sequence[str] | None = None
    dtype: DType = None
    strict: bool | Callable[[str], bool] = True
    missing: list[str] | None = None
    mmap: bool = False
    share: Literal["auto"] | bool = "auto"
    progress: OnProgress | None = None


def check_options(options: LoadOptions, *, into: bool) -> None:
    """Raise TypeError or ValueError if options are of the wrong type or contradict each other, or a target (into)."""
    if options.strict not in (True, False) and not callable(options.strict):
        raise TypeError(f"strict must be True or False, or a function of a key, not {options.strict!r}")
    if options.missing is not None and not isinstance(options.missing, list):
        raise TypeError(f"missing must be a list, to which the missing keys are appended, not {options.missing!r}")
    if options.share != "auto" and not isinstance(options.share, bool):
        raise ValueError(f"share must be 'auto', True or False, not {options.share!r}")
    check_progress(options.progress)
    dtype, where = options.dtype, options.map_location
    if isinstance(options.safe_globals, str) or not isinstance(options.safe_globals, Iterable):
        raise TypeError(f"safe_globals must be a list of classes and functions, not {options.safe_globals!r}")
    if isinstance(where, dict) and not all(isinstance(to, str | torch.device) for to in where.values()):
        raise TypeError(f"map_location must map names of devices to devices, not {where!r}")
    if dtype == "target" and not into:
        raise ValueError('dtype="target" casts to the dtypes of a state_dict, and none is given')
    if dtype not in (None, "target") and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(
            f'dtype must be a floating-point torch.dtype, to which such tensors are cast, or "target", not {dtype!r}'
        )
    if where is not None and not callable(where) and not isinstance(where, str | torch.device | dict):
        raise TypeError(f"map_location must be a device, its name, a dict or a function, not {where!r}")
    try:
        torch.empty(0, device=target_device(where))
    except torch.OutOfMemoryError:  # the load says so, if it needs memory there
        pass
    except (RuntimeError, AssertionError, NotImplementedError) as exc:  # depends on the device that is missing
        reason = str(exc).partition("\n")[0]
        raise ValueError(f"tensors can't be put on {where!r} here: {reason}") from exc
    if options.mmap and (into or dtype is not None or where is not None):
        raise ValueError(
            "mmap=True returns tensors that are backed by the files: not for a state_dict, nor with dtype= or "
            "map_location="
        )


def check_progress(progress: object) -> None:
    """Raise TypeError unless it is a function, or None."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, such as aiockpt.progress.bar(), not {progress!r}")


def target_device(where: MapLocation | None) -> torch.device:
    """Return the device to create new tensors on; a function that moves storages gets them in host memory."""
    if isinstance(where, dict):
        where = where.get("cpu", "cpu")
    if not isinstance(where, str | torch.device):
        return _CPU
    device = torch.device(where)
    if device.type not in ("cpu", "meta") and ":" not in str(device):
        current = getattr(torch.get_device_module(device), "current_device", lambda: 0)  # MPS has one device
        device = torch.device(device.type, current())
    return device
