"""Options of checkpointers, of writer processes and of loads, each checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from aiockpt.core.machine import BLOCK_BYTES

if TYPE_CHECKING:
    from aiockpt.format.transforms.base import Transform

_CPU = torch.device("cpu")

MapLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | torch.device | str | dict[str, str]

DEFAULT_CHUNK_BYTES = 16 << 20


OnBusy = Literal["wait", "skip", "supersede", "error"]
OnFailure = Literal["raise", "warn"]

_IONICE = {"realtime": 1, "best-effort": 2, "idle": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWriter:
    """A process of its own that computes CRCs, writes and commits; for ``writer=``.

    It shares staging memory with the trainer, and outlives it: what was staged becomes a checkpoint even if the
    trainer is killed.

    Attributes:
        nice: how far it steps back when others want the processor, 0 to 19; see nice(1).
        ionice: "idle", or "best-effort" or "realtime" with a level of 0 to 7, as in ``("best-effort", 7)``; see
            ionice(1). None: as the trainer.
        agreement_timeout: of several ranks, when a trainer has died: how long, in seconds, the writers wait for each
            other while nothing goes on, before they remove the unfinished checkpoint.
    """

    nice: int = 0
    ionice: Literal["idle"] | tuple[Literal["best-effort", "realtime"], int] | None = None
    agreement_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.agreement_timeout > 0:
            raise ValueError(f"agreement_timeout must be positive, not {self.agreement_timeout!r}")
        if not isinstance(self.nice, int) or not 0 <= self.nice <= 19:
            raise ValueError(f"nice is {self.nice!r}; it must be 0 to 19")
        numbers = self.ionice_numbers
        if numbers is not None and not 0 <= numbers[1] <= 7:
            raise ValueError(f"ionice is {self.ionice!r}; its level must be 0 to 7")

    @property
    def ionice_numbers(self) -> tuple[int, int] | None:
        """The class and level, as the kernel counts them."""
        if self.ionice is None:
            return None
        try:
            name, level = (self.ionice, 0) if isinstance(self.ionice, str) else self.ionice
            return _IONICE[name], int(level)
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"ionice is {self.ionice!r}; it must be 'idle', ('best-effort', level) or ('realtime', level)"
            ) from None


def check_writer(writer: object) -> ProcessWriter | None:
    """Give the process that is to write; None for threads.

    Raises:
        ValueError: it is neither.
    """
    if writer == "thread":
        return None
    if writer == "process":
        return ProcessWriter()
    if isinstance(writer, ProcessWriter):
        return writer
    raise ValueError(f"writer is {writer!r}; it must be 'thread', 'process' or an aiockpt.ProcessWriter")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingWindow:
    """How much may be copied when, so that staging leaves the bus and the memory to training.

    ::

        StagingWindow(bytes_per_s=4e9)             # so many bytes per second
        StagingWindow(bytes_per_window=64 << 20)   # so many after each `await ckpt.window()`, once per step, say

    Copies come in whole chunks (``chunk_bytes``); a chunk that is larger than the allowance uses up several.
    A save is staged without a pause from the moment on that somebody waits for it: at `fence()`, in a step behind
    `guard()`, for `staged`, for ``written.result()``, or when the checkpointer closes.

    Attributes:
        bytes_per_s: bytes per second; None for as fast as it goes.
        bytes_per_window: bytes after each `window()`; what is left of them does not add up. None: no windows.
        patience_s: seconds without a `window()` after which a save goes on all the same.
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


def check_window(window: StagingWindow | None) -> StagingWindow | None:
    """Check an option's type.

    Raises:
        TypeError: it is something else, such as a number that could mean either allowance.
    """
    if window is None or isinstance(window, StagingWindow):
        return window
    raise TypeError(
        f"staging_window is {window!r}; it must be a StagingWindow, with bytes_per_s for a rate or bytes_per_window "
        "for an allowance per step"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine works; see `aiockpt.AsyncCheckpointer` for the meaning of each."""

    staging_bytes: int | None = None
    chunk_bytes: int | None = None
    io_threads: int | None = None
    drain_timeout: float = 1800.0
    staging_window: StagingWindow | None = None
    writer: ProcessWriter | None = None
    on_busy: OnBusy = "wait"
    max_in_flight: int = 1
    on_failure: OnFailure = "raise"
    save_timeout: float | None = None

    def __post_init__(self) -> None:
        least_of = {"staging_bytes": BLOCK_BYTES, "chunk_bytes": BLOCK_BYTES, "io_threads": 1, "max_in_flight": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must not be negative, not {self.drain_timeout!r}")
        for name, known in (("on_busy", get_args(OnBusy)), ("on_failure", get_args(OnFailure))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(repr, known))}")
        if self.save_timeout is not None and not self.save_timeout > 0:
            raise ValueError(f"save_timeout must be positive, not {self.save_timeout!r}")

    @property
    def writing_threads(self) -> int:
        """How many threads write, and into how many files."""
        return self.io_threads or 4

    @property
    def chunk(self) -> int:
        """The chunk size: a whole number of blocks, not more than all staging memory."""
        chunk = self.chunk_bytes or DEFAULT_CHUNK_BYTES
        if self.staging_bytes is not None:
            chunk = min(chunk, self.staging_bytes)
        return max(BLOCK_BYTES, chunk // BLOCK_BYTES * BLOCK_BYTES)


# --- loading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `aiockpt.AsyncCheckpointer.load`."""

    map_location: MapLocation | None = None
    keys: Sequence[str] | None = None
    dtype: torch.dtype | None = None
    strict: bool = True
    missing: list[str] | None = None
    verify: bool = True
    mmap: bool = False
    safe_globals: Sequence[Any] = ()
    trust: bool = False
    transforms: Sequence[Transform] = ()


def check_options(options: LoadOptions, *, into: bool) -> None:
    """Check that options go together.

    Args:
        options: how to load.
        into: whether there is a target.

    Raises:
        TypeError: one is of the wrong kind.
        ValueError: two contradict each other.
    """
    if options.missing is not None and not isinstance(options.missing, list):
        raise TypeError(
            f"missing must be a list, to which the keys are added that were not there, not {options.missing!r}"
        )
    dtype, where = options.dtype, options.map_location
    if isinstance(options.safe_globals, str) or not isinstance(options.safe_globals, Iterable):
        raise TypeError(f"safe_globals must be a list of classes and functions, not {options.safe_globals!r}")
    if isinstance(where, dict) and not all(isinstance(to, str | torch.device) for to in where.values()):
        raise TypeError(f"map_location must map names of devices to devices, not {where!r}")
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, to which such tensors are cast, not {dtype!r}")
    if where is not None and not callable(where) and not isinstance(where, str | torch.device | dict):
        raise TypeError(f"map_location must be a device, its name, a dict or a function, not {where!r}")
    try:
        torch.empty(0, device=target_device(where))
    except (RuntimeError, AssertionError, NotImplementedError) as exc:  # what a missing device raises depends on it
        reason = str(exc).partition("\n")[0]
        raise ValueError(f"tensors can't be put on {where!r} here: {reason}") from exc
    if options.mmap and (into or dtype is not None or where is not None):
        raise ValueError(
            "mmap=True gives tensors of the files as they are: not into a state dict, nor with dtype= or map_location="
        )


def target_device(where: MapLocation | None) -> torch.device:
    """Give the device that new tensors are made on; a function that moves storages gets them in host memory."""
    if isinstance(where, dict):
        where = where.get("cpu", "cpu")
    if not isinstance(where, str | torch.device):
        return _CPU
    device = torch.device(where)
    if device.type not in ("cpu", "meta") and ":" not in str(device):
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device
