"""Who loads: aiockpt, torch and safetensors, and the limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks import raw
from benchmarks.machine import files_under
from benchmarks.measure import Sample, timed
from benchmarks.states import State, read_pages, same_bits, write_pages

READ = "maps the page cache; a byte of each page read"
WRITTEN = "maps; a byte of each page written, so memory of its own"


class Loader(ABC):
    """Loads what was saved to a path.

    Attributes:
        path: the file or directory it reads.
        into_target: whether what is loaded goes to tensors that exist.
    """

    name: str
    note: str = ""
    into_target = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """Give the files that are read."""
        return files_under(self.path)

    async def prepare(self) -> None:
        """Do what belongs to no measurement, before each."""

    @abstractmethod
    async def load(self) -> State | None:
        """Load once; None when what comes is only bytes."""

    async def measured(self) -> tuple[State | None, Sample]:
        """Load once, and measure it."""
        return await timed(self.load, "loaded_s")

    def matches(self, loaded: State | None, state: State) -> bool:
        """Tell whether what was loaded last is what was saved."""
        return loaded is None or same_bits(loaded, state)

    async def close(self) -> None:
        """End what lives from load to load."""


class Blocking(Loader):
    """A function that loads and returns when it is done."""

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
        path: what to load.
        target: what to load into; None for new tensors.
        name: how it is called in tables.
        note: said of it there.
        use: done with what was loaded, as a part of loading.
        options: of ``load``.
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
    """Give the readers of plain bytes, for the disk or for the page cache; they read what `raw.write_direct` wrote."""
    how = "O_DIRECT" if direct else "page cache"

    def into_touched(threads: int, *, crc: bool = False) -> Loader:
        name = f"{'CRC, ' * crc}raw {how}, {threads} thread{'s' * (threads > 1)}"
        return Blocking(
            name,
            path,
            lambda files: raw.read_into(files / raw.FIRST_FILE, touched, threads, direct=direct, crc=crc),
            "touched memory" + ", each byte checked" * crc,
        )

    def into_fresh(files: Path) -> None:
        file = files / raw.FIRST_FILE
        raw.read_into(file, raw.Arena(file.stat().st_size, touched=False), 2, direct=direct)

    fresh = Blocking(f"fresh memory, {how}, 2 threads", path, into_fresh, "huge pages where there are any")
    checked = into_touched(8 if direct else 2, crc=True)
    return [*(into_touched(threads) for threads in ((1, 2, 4) if direct else (1, 2))), checked, fresh]


def dcp_load(path: Path, target: State) -> Loader:
    """Make the contender ``dcp.load``."""

    def load(directory: Path) -> State:
        dcp.load(target, checkpoint_id=directory, no_dist=True)
        return target

    return Blocking("dcp.load, into a target", path, load, into_target=True)


def torch_load(path: Path) -> Loader:
    """Make the contender ``torch.load``."""
    return Blocking("torch.load", path, torch.load)


def mapped(name: str, path: Path, load: Callable[[Path], State]) -> list[Loader]:
    """Make the contenders of a function that maps the file: the pages come when they are first used."""

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
    """Make the contenders ``torch.load(mmap=True)``."""
    return mapped("torch.load mmap", path, lambda file: torch.load(file, mmap=True))


def safetensors_load(path: Path) -> list[Loader]:
    """Make the contenders ``safetensors.torch.load_file``, with its default and with the backend that reads."""

    def load(file: Path, backend: str = "mmap") -> State:
        from safetensors.torch import load_file

        return load_file(file, backend=backend)

    return [
        *mapped("safetensors mmap", path, load),
        Blocking("safetensors pread", path, lambda file: load(file, "pread")),
    ]
