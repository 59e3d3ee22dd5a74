"""Contenders that load: aiockpt, torch, safetensors, and the machine's limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks.harness.measure import Sample, timed
from benchmarks.harness.states import State, read_pages, same_bits, write_pages
from benchmarks.limits import raw
from benchmarks.limits.machine import files_under

READ = "maps the page cache; a byte of each page read"
WRITTEN = "maps; a byte of each page written, so memory of its own"


class Loader(ABC):
    """A contender that loads a saved state.

    Attributes:
        path: the file or directory it reads.
        into_target: whether it loads into existing tensors.
    """

    name: str
    note: str = ""
    into_target = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """Return the files that are read."""
        return files_under(self.path)

    async def prepare(self) -> None:
        """Prepare a load, before each measurement."""

    @abstractmethod
    async def load(self) -> State | None:
        """Load once; return None if only bytes are read."""

    async def measured(self) -> tuple[State | None, Sample]:
        """Load once; return the state and a sample."""
        return await timed(self.load, "loaded_s")

    def matches(self, loaded: State | None, state: State) -> bool:
        """Return whether a loaded state equals the saved one."""
        return loaded is None or same_bits(loaded, state)

    async def close(self) -> None:
        """Release what is kept between loads."""


class Blocking(Loader):
    """A function that blocks until the load is done."""

    def __init__(
        self, name: str, path: Path, load: Callable[[Path], State | None], note: str = "", *, into_target: bool = False
    ) -> None:
        super().__init__(path)
        self.name, self.note, self.into_target = name, note, into_target
        self._load = load

    async def load(self) -> State | None:
        return self._load(self.path)


class Aiockpt(Loader):
    """This package.

    Args:
        path: the checkpoint to load.
        target: the state to load into; None for new tensors.
        name: its name in tables.
        note: its note in tables.
        use: called with the loaded state; its time counts.
        options: the options of ``load``.
    """

    def __init__(
        self,
        path: Path,
        target: State | None = None,
        *,
        name: str,
        note: str = "CRC verified",
        use: Callable[[State], None] = lambda _: None,
        **options: Any,
    ) -> None:
        super().__init__(path)
        self.name, self.note = name, note
        self.into_target = target is not None
        self._target, self._use, self._options = target, use, options
        self._checkpointer = aiockpt.AsyncCheckpointer()

    async def load(self) -> State:
        loaded: Any = await self._checkpointer.load(self.path, self._target, **self._options)
        self._use(loaded)
        return loaded

    async def close(self) -> None:
        await self._checkpointer.aclose()


def limits(path: Path, touched: raw.Arena, *, direct: bool) -> list[Loader]:
    """Return readers of plain bytes, written by `raw.write_direct`, from the disk or from the page cache."""
    how = "O_DIRECT" if direct else "page cache"

    def into_touched(threads: int, *, crc: bool = False) -> Loader:
        name = f"{'CRC, ' * crc}raw {how}, {threads} thread{'s' * (threads > 1)}"
        return Blocking(
            name,
            path,
            lambda files: raw.read_into(files / raw.FIRST_FILE, touched, threads, direct=direct, crc=crc),
            "touched memory" + ", each byte checked" * crc,
        )

    def into_fresh(*, crc: bool = False) -> Loader:
        def read(files: Path) -> None:
            file = files / raw.FIRST_FILE
            raw.read_into(file, raw.Arena(file.stat().st_size, touched=False), 2, direct=direct, crc=crc)

        note = "huge pages where there are any" + ", each byte checked" * crc
        return Blocking(f"{'CRC, ' * crc}fresh memory, {how}, 2 threads", path, read, note)

    checked = into_touched(8 if direct else 2, crc=True)
    touched_ones = [into_touched(threads) for threads in ((1, 2, 4) if direct else (1, 2))]
    return [*touched_ones, checked, into_fresh(), into_fresh(crc=True)]


def dcp_load(path: Path, target: State) -> Loader:
    """Return the contender ``dcp.load``."""

    def load(directory: Path) -> State:
        dcp.load(target, checkpoint_id=directory, no_dist=True)
        return target

    return Blocking("dcp.load, into a target", path, load, into_target=True)


def torch_load(path: Path) -> Loader:
    """Return the contender ``torch.load``."""
    return Blocking("torch.load", path, torch.load)


def mapped(name: str, path: Path, load: Callable[[Path], State]) -> list[Loader]:
    """Return two contenders of a function that maps a file: they read or write each page, since mapping reads none."""

    def and_use(use: Callable[[State], None]) -> Callable[[Path], State]:
        def load_and_use(file: Path) -> State:
            state = load(file)
            use(state)
            return state

        return load_and_use

    return [
        Blocking(f"{name}, read", path, and_use(read_pages), READ),
        Blocking(f"{name}, written", path, and_use(write_pages), WRITTEN),
    ]


def torch_map(path: Path) -> list[Loader]:
    """Return the contenders ``torch.load(mmap=True)``."""
    return mapped("torch.load mmap", path, lambda file: torch.load(file, mmap=True))


def safetensors_load(path: Path) -> list[Loader]:
    """Return the contenders ``safetensors.torch.load_file``: the default, which maps, and the backend that reads."""

    def load(file: Path, backend: str = "mmap") -> State:
        from safetensors.torch import load_file

        return load_file(file, backend=backend)

    return [
        *mapped("safetensors mmap", path, load),
        Blocking("safetensors pread", path, lambda file: load(file, "pread")),
    ]
