"""The simulated accelerator ``sim``: built once, and then a device of torch in this process, for good; see device.cpp.

What is set here holds until `reset`. Kinds of tasks: ``kernel``, ``to_host`` and ``from_host`` (copies), ``free``
(freed memory is overwritten), ``register`` (host memory is locked).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.staging.runtime import Runtime

SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ["-O1", "-std=c++20", "-Wall"]


def _file() -> Path:
    """Return the extension of this source, torch and Python, which may not be built yet."""
    made_of = [torch.__version__, sys.version, *_FLAGS, SOURCE.read_text()]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "aiockpt-sim" / name / "aiockpt_sim.so"


def missing() -> str | None:
    """Return why the device can't be used here; None if it can."""
    if _file().exists():
        return None
    return "the simulated device is not built: python -m tests.sim.device builds it, with g++ and ninja"


def build() -> Path:
    """Build the extension, unless it is built; return its file."""
    from torch.utils import cpp_extension

    file = _file()
    if not file.exists():
        work = file.parent / f"build-{os.getpid()}"
        work.mkdir(parents=True)
        cpp_extension.load("aiockpt_sim", [str(SOURCE)], extra_cflags=_FLAGS, build_directory=str(work))
        (work / file.name).rename(file)
        shutil.rmtree(work)
    return file


@cache
def extension() -> Any:
    """Return the extension; from the first call on, torch has the device."""
    spec = importlib.util.spec_from_file_location("aiockpt_sim", _file())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(module))
    return module


def _device_module(module: Any) -> types.ModuleType:
    """Return ``torch.sim``, with what torch asks of such a module."""

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        module.set_device(-1 if index is None else index)

    made = types.ModuleType("torch.sim")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: module.DEVICES,
        "current_device": module.current_device,
        "set_device": set_device,
        "current_stream": torch.accelerator.current_stream,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": torch.accelerator.synchronize,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
    }
    vars(made).update(functions)
    return made


# --- what tests set -------------------------------------------------------------------------------


def _kind(name: str) -> int:
    return extension().KINDS.index(name)


def set_seed(seed: int) -> None:
    """Seed the delays."""
    extension().set_seed(seed)


def delay(**most_us: int) -> None:
    """Delay tasks of these kinds by up to so many microseconds, each second one not at all."""
    for kind, most in most_us.items():
        extension().set_delay(_kind(kind), most)


def sleep(us: int, device: int = 0) -> None:
    """Enqueue a kernel that takes so long in this thread's current stream."""
    extension().sleep(device, us)


def delay_launches(most_us: int) -> None:
    """Delay the host's part of each launch, in this thread only."""
    extension().set_launch_delay(most_us)


@contextlib.contextmanager
def held(*what: str | torch.Stream) -> Iterator[None]:
    """Hold the tasks of these kinds, or in these streams, before they begin."""
    for each in what:
        _hold(each, True)
    try:
        yield
    finally:
        release(*what)


def release(*what: str | torch.Stream) -> None:
    """End the holding of `held` before its context ends."""
    for each in what:
        _hold(each, False)


def _hold(what: str | torch.Stream, holds: bool) -> None:
    if isinstance(what, str):
        extension().hold_kind(_kind(what), holds)
    else:
        extension().hold_stream(what.device_index, what.stream_id, holds)


def fail_task(kind: str, after: int = 1) -> None:
    """Make one of the next tasks fail, with an error that stays."""
    extension().fail_task(_kind(kind), after)


def fail_allocations(after: int = 1, count: int = 1) -> None:
    """Make allocations fail from one of the next ones on."""
    extension().fail_allocations(after, count)


def fail_registrations(error: int) -> None:
    """Make the locking of host memory return an error; 0: none."""
    extension().fail_registrations(error)


def statistics() -> dict[str, int]:
    """Return the numbers of tasks, of blocks that were reused, or freed late, and of host memory that is locked."""
    return extension().statistics()


def misuses() -> list[str]:
    """Return what the program did wrong without an error, such as unlocking memory during a copy."""
    return extension().misuses()


def reset() -> None:
    """Undo all that was set, and wait for all streams."""
    extension().reset()


def lock_memory(patch: pytest.MonkeyPatch) -> None:
    """Patch in the locking of memory, for which `torch.accelerator` has no call; copies to other memory block."""
    patch.setattr(Runtime, "lock", lambda self, address, nbytes: extension().register_host(address, nbytes))
    patch.setattr(Runtime, "unlock", lambda self, address: extension().unregister_host(address))


# --- graphs ---------------------------------------------------------------------------------------


class Graph:
    """Kernels that were captured in a stream."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        at = self._stream.device_index, self._stream.stream_id
        with self._stream:
            extension().begin_capture(*at)
            try:
                yield
            finally:
                invalid = extension().end_capture(*at)
        assert not invalid, f"the capture is invalid: {invalid}"

    def replay(self) -> None:
        """Run the kernels in this thread's current stream."""
        into = torch.accelerator.current_stream(self._stream.device)
        extension().replay(self._stream.device_index, self._stream.stream_id, into.stream_id)


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
