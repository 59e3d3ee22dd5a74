"""The fake CUDA device's controls. What is set holds until `reset`; README.md says what the device does.

Kinds of tasks: ``kernel``, ``to_host``, ``from_host`` and ``on_device`` (copies), ``memset``, ``register`` (host memory
is locked). Calls are those of CUDA's runtime and driver by name, and ``tensor``: a tensor gets memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

KINDS = ("kernel", "to_host", "from_host", "on_device", "memset", "register")
POSES = ("CUDA", "another kind", "another kind, which locks no memory")
"""Kinds of devices that the engine can take the device for."""
OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 2, 700, 801  # errors of CUDA
ALREADY_LOCKED = 712
POISON = 0xDB
"""The bytes of memory that was freed."""


def is_here() -> bool:
    """Return whether torch.cuda of this Python is the fake device."""
    return importlib.util.find_spec("fakecuda") is not None


@cache
def _library() -> Any:
    library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    for name in ("count", "bytes", "refused"):
        getattr(library, f"fakecuda_{name}").restype = ctypes.c_int64
    return library


def set_seed(seed: int) -> None:
    """Seed the delays, and the order of batched copies."""
    _library().fakecuda_set_seed(ctypes.c_uint64(seed))


def delay(**most_us: int) -> None:
    """Delay tasks of these kinds by up to so many microseconds, each second one not at all."""
    for kind, most in most_us.items():
        _library().fakecuda_delay(KINDS.index(kind), ctypes.c_int64(most))


def delay_launches(most_us: int) -> None:
    """Delay the host's part of each launch, in this thread only."""
    _library().fakecuda_launch_delay(ctypes.c_int64(most_us))


def sleep(us: int, device: int = 0) -> None:
    """Enqueue a kernel that takes so long in this thread's current stream."""
    with torch.cuda.device(device):
        torch.cuda._sleep(us * 2000)


def hold(*what: str | torch.cuda.Stream) -> None:
    """Hold the tasks of these kinds, or in these streams, before they begin, until `release`."""
    for one in what:
        _set_held(one, True)


@contextlib.contextmanager
def held(*what: str | torch.cuda.Stream) -> Iterator[None]:
    """Hold tasks within this context."""
    hold(*what)
    try:
        yield
    finally:
        release(*what)


def release(*what: str | torch.cuda.Stream) -> None:
    """End the holding of `held` before its context ends."""
    for one in what:
        _set_held(one, False)


def _set_held(what: str | torch.cuda.Stream, holds: bool) -> None:
    if isinstance(what, str):
        _library().fakecuda_hold(KINDS.index(what), int(holds))
    else:
        with torch.cuda.device(what.device):
            _library().fakecuda_hold_stream(ctypes.c_void_p(what.cuda_stream), int(holds))


def _keep_garbage() -> None:
    """Collect no tensor while the context may be broken, until `reset`: torch's allocator would end the process."""
    if gc.isenabled():
        gc.collect()
        gc.disable()


def fail_task(kind: str, after: int = 1, error: int = ILLEGAL_ADDRESS) -> None:
    """Make one of the next tasks break the context, for good; ``after`` 0: none."""
    if after:
        _keep_garbage()
    _library().fakecuda_fault(KINDS.index(kind), ctypes.c_int64(after), error)


def break_context(error: int = ILLEGAL_ADDRESS) -> None:
    """Break the context at once, for good."""
    _keep_garbage()
    _library().fakecuda_break(error)


def refuse(call: str, error: int, *, after: int = 0, count: int = 0, breaks: bool = False) -> None:
    """Make calls return an error, ``count`` of them (0: all), after some that go well; error 0: none any more.

    With ``breaks`` the error is one of the context's, for good.
    """
    if breaks:
        _keep_garbage()
    _library().fakecuda_refuse(call.encode(), ctypes.c_int64(after), ctypes.c_int64(count), error, int(breaks))


def refused() -> int:
    """Return how many calls were refused so far."""
    return int(_library().fakecuda_refused())


def calls() -> Counter[str]:
    """Return the number of calls so far, by name."""
    size = _library().fakecuda_calls(None, 0) + 1024
    text = ctypes.create_string_buffer(size)
    _library().fakecuda_calls(text, size)
    return Counter({name: int(count) for name, count in map(str.split, text.value.decode().splitlines())})


def tasks(kind: str) -> int:
    """Return the number of tasks of a kind so far."""
    return int(_library().fakecuda_count(KINDS.index(kind)))


def locked() -> int:
    """Return how many pieces of the program's own host memory are locked."""
    return int(_library().fakecuda_registered_by_program())


def misuses() -> list[str]:
    """Return what the program did wrong, or what the device can't do, and forget it."""
    text = ctypes.create_string_buffer(100_000)
    _library().fakecuda_misuses(text, len(text))
    return text.value.decode().splitlines()


def reset() -> None:
    """Undo all that was set, wait for all streams, and mend the context."""
    _library().fakecuda_reset()
    gc.enable()


def pose_as(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Have the engine use the device as one of these kinds; those but CUDA, such as XPU, by ``torch.accelerator`` only.

    That has no call to lock memory, so copies to the host block; "another kind" has CUDA's call for it all the same.
    """
    from aiockpt.staging import runtime

    if kind != "CUDA":
        patch.setattr(runtime, "_is_cuda", lambda device: False)
    if kind == "another kind":
        patch.setattr(runtime.Runtime, "lock", runtime.CudaRuntime.lock)
        patch.setattr(runtime.Runtime, "unlock", runtime.CudaRuntime.unlock)


def check() -> None:
    """Assert that what ran on the fake device means something.

    The engine used the driver's own calls, not what it has for where there is none, and neither a misuse nor a kernel
    that does not exist was noted.
    """
    from aiockpt.staging import runtime

    assert runtime._driver() is not None, "libcuda.so.1 was not found: the engine used torch's streams"
    assert not (noted := misuses()), noted
