"""Contenders that open a checkpoint of very many tensors: aiockpt and its peers."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import aiockpt
from benchmarks.harness.states import State
from benchmarks.limits.machine import files_under

MANIFEST = ".aiockpt.json"
METADATA = ".metadata"


def make_plain(checkpoint: Path, path: Path) -> None:
    """Create a checkpoint of aiockpt without its manifest, from hard links, as a tool that knows only DCP copies it."""
    path.mkdir()
    for file in files_under(checkpoint):
        if file.name != MANIFEST:
            os.link(file, path / file.name)


def make_stock(checkpoint: Path, path: Path, state: State) -> None:
    """Create a checkpoint as ``dcp.save`` writes it, but faster: with metadata by DCP, over aiockpt's data files."""
    make_plain(checkpoint, path)
    described = pickle.loads((path / METADATA).read_bytes())
    (path / METADATA).unlink()
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = [
        WriteResult(item.index, state[item.index.fqn].nbytes, described.storage_data[item.index])
        for item in plans[0].items
    ]
    dcp.FileSystemWriter(path).finish(metadata, [results])


class Opener(ABC):
    """A contender that opens a checkpoint."""

    name: str
    note: str = ""
    ranks = 1  # it was saved by so many, each tensor in as many parts: there are fewer tensors, but as many items

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """Return the files that may be read."""
        return files_under(self.path)

    @abstractmethod
    async def open(self, key: str, stack: AsyncExitStack) -> tuple[int, tuple[int, ...]]:
        """Open the checkpoint, to be closed by the stack; return the number of keys, and the shape of this key."""

    async def close(self) -> None:
        """Release what is kept between rounds."""


class Aiockpt(Opener):
    """This package."""

    def __init__(self, path: Path, name: str, note: str = "", *, ranks: int = 1) -> None:
        super().__init__(path)
        self.name, self.note, self.ranks = name, note, ranks
        self._checkpointer = aiockpt.AsyncCheckpointer()

    async def open(self, key: str, stack: AsyncExitStack) -> tuple[int, tuple[int, ...]]:
        reader = await stack.enter_async_context(self._checkpointer.open(self.path))
        return len(reader.keys()), tuple(reader[key].shape)

    async def close(self) -> None:
        await self._checkpointer.aclose()


class Blocking(Opener):
    """A function that blocks until the checkpoint is open."""

    def __init__(
        self,
        name: str,
        path: Path,
        look: Callable[[Path, str, AsyncExitStack], tuple[int, tuple[int, ...]]],
        note: str = "",
    ) -> None:
        super().__init__(path)
        self.name, self.note = name, note
        self._look = look

    async def open(self, key: str, stack: AsyncExitStack) -> tuple[int, tuple[int, ...]]:
        return self._look(self.path, key, stack)


def read_metadata(path: Path, name: str, note: str = "") -> Opener:
    """Return the contender ``FileSystemReader.read_metadata``, which unpickles ``.metadata``."""

    def look(directory: Path, key: str, stack: AsyncExitStack) -> tuple[int, tuple[int, ...]]:
        metadata = dcp.FileSystemReader(directory).read_metadata()
        stack.callback(lambda: metadata.state_dict_metadata.clear())
        return len(metadata.state_dict_metadata), tuple(metadata.state_dict_metadata[key].size)

    return Blocking(name, path, look, note)


def torch_map(path: Path) -> Opener:
    """Return the contender ``torch.load(mmap=True)``."""

    def look(file: Path, key: str, stack: AsyncExitStack) -> tuple[int, tuple[int, ...]]:
        state = torch.load(file, mmap=True)
        stack.callback(state.clear)
        return len(state), tuple(state[key].shape)

    return Blocking("torch.load mmap", path, look)


def safe_open(path: Path) -> Opener:
    """Return the contender ``safetensors.safe_open``."""

    def look(file: Path, key: str, stack: AsyncExitStack) -> tuple[int, tuple[int, ...]]:
        from safetensors import safe_open

        opened = stack.enter_context(safe_open(file, "pt"))
        return len(opened.keys()), tuple(opened.get_slice(key).get_shape())

    return Blocking("safetensors safe_open", path, look)
