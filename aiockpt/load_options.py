"""How to load: the options, and whether they make sense together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from aiockpt.transforms.base import Transform

_CPU = torch.device("cpu")

MapLocation = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | torch.device | str | dict[str, str]


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
