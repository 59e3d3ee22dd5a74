"""Who saves: aiockpt, its peers at their best settings, and the limit."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import aiockpt
from benchmarks import raw
from benchmarks.machine import files_under, sync_files
from benchmarks.measure import Sample
from benchmarks.states import State, size_of, split

if TYPE_CHECKING:
    from torch_checkpointing.checkpoint_writer import CallbackArgs


class Saver(ABC):
    """Saves a state to a path, and tells the moments, in seconds since the call.

    ``blocked_s``: the call gave control back. ``staged_s``: tensors may change. ``durable_s``: done and synced.
    """

    name: str
    note: str = ""

    async def open(self, state: State) -> None:
        """Make what lives from save to save."""

    @abstractmethod
    async def save(self, state: State, path: Path) -> Sample:
        """Save once."""

    async def close(self) -> None:
        """End what `open` made."""


class Blocking(Saver):
    """A function that saves and returns when it is done."""

    def __init__(self, name: str, save: Callable[[State, Path], object], note: str = "") -> None:
        self.name, self.note = name, note
        self._save = save

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        self._save(state, path)
        took = time.perf_counter() - started
        return {"blocked_s": took, "staged_s": took, "durable_s": took}


class RawWrite(Saver):
    """The limit: as many bytes, written past the page cache and synced."""

    note = "no copy, no CRC, no format"

    def __init__(self, threads: int, arena: raw.Arena) -> None:
        self.name = f"raw O_DIRECT, {threads} thread{'s' * (threads > 1)}"
        self._threads, self._arena = threads, arena

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        await asyncio.to_thread(raw.write_direct, path, self._arena, size_of(state), self._threads)
        return {"durable_s": time.perf_counter() - started}


class Aiockpt(Saver):
    """This package."""

    note = "CRC"

    def __init__(self, name: str = "aiockpt", **options: Any) -> None:
        self.name = name
        self._options = options

    async def open(self, state: State) -> None:
        self._checkpointer = await aiockpt.AsyncCheckpointer(**self._options).__aenter__()

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        handle = self._checkpointer.save(state, path)
        blocked = time.perf_counter() - started
        await handle.staged
        staged = time.perf_counter() - started
        result = await handle.written
        durable = time.perf_counter() - started
        facts = {name: getattr(result, name) for name in ("captured_s", "planned_s", "written_s")}
        return {"blocked_s": blocked, "staged_s": staged, "durable_s": durable, **facts}

    async def close(self) -> None:
        await self._checkpointer.aclose()


class PrewarmedAiockpt(Aiockpt):
    """This package, with staging memory that was made before the first save."""

    name = "aiockpt, prewarmed"

    def __init__(self) -> None:
        super().__init__(self.name)

    async def open(self, state: State) -> None:
        await super().open(state)
        await self._checkpointer.prewarm(state)


def dcp_writer(path: Path, threads: int) -> dcp.FileSystemWriter:
    """Make DCP's own writer, durable."""
    return dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)


def dcp_save(threads: int) -> Blocking:
    """Make the contender ``dcp.save``; one thread is its default."""

    def save(state: State, path: Path) -> None:
        dcp.save(state, storage_writer=dcp_writer(path, threads), no_dist=True)

    return Blocking(f"dcp.save, thread_count={threads}", save)


class DcpAsyncSave(Saver):
    """``dcp.async_save`` with two writing threads and a stager that is kept, and with it its memory."""

    note = "thread_count=2, stager kept"

    def __init__(self, *, async_staging: bool) -> None:
        self.name = f"dcp.async_save, {'async' if async_staging else 'blocking'} stager"
        self._options = StagingOptions(
            use_pinned_memory=False,  # needs CUDA, like non-blocking copies
            use_shared_memory=False,  # for another process; slower
            use_async_staging=async_staging,
            use_non_blocking_copy=False,
        )

    async def open(self, state: State) -> None:
        self._stager = DefaultStager(self._options)

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        answer = dcp.async_save(
            state, storage_writer=dcp_writer(path, threads=2), async_stager=self._stager, no_dist=True
        )
        blocked = staged = time.perf_counter() - started
        written = answer
        if isinstance(answer, AsyncSaveResponse):
            await asyncio.wrap_future(answer.staging_completion)
            staged = time.perf_counter() - started
            written = answer.upload_completion
        at: list[float] = []
        written.add_done_callback(lambda _: at.append(time.perf_counter() - started))
        await asyncio.wrap_future(written)
        durable = time.perf_counter() - started
        # Its thread knows earlier than a caller whose loop is held.
        return {"blocked_s": blocked, "staged_s": staged, "durable_s": durable, "written_s": at[0]}

    async def close(self) -> None:
        self._stager.close()


def _torch_save(state: State, path: Path) -> None:
    torch.save(state, path)
    sync_files([path])


def _torch_save_without_crc(state: State, path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        _torch_save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)


def torch_save(*, crc: bool = True) -> Blocking:
    """Make the contender ``torch.save``."""
    if crc:
        return Blocking("torch.save + fsync", _torch_save, "CRC")
    return Blocking("torch.save + fsync, no CRC", _torch_save_without_crc, "set_crc32_options(False)")


def _safetensors_save(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, path)
    sync_files([path])


def safetensors_save() -> Blocking:
    """Make the contender ``safetensors.torch.save_file``."""
    return Blocking("safetensors save_file + fsync", _safetensors_save, "no CRC")


def sync_checkpoint(args: CallbackArgs) -> None:
    """Sync what torch_checkpointing wrote: its hook before a checkpoint is final. Runs in its process."""
    sync_files(files_under(Path(args.path)))


class TorchCheckpointing(Saver):
    """``torch_checkpointing``: staging to shared memory, writing from another process."""

    note = "no fsync of its own: synced by its pre_finalize_callback; direct I/O off; memory of its process not counted"
    _FILES = 4

    def __init__(self) -> None:
        self.name = f"torch_checkpointing, {self._FILES} files"

    async def open(self, state: State) -> None:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, CheckpointWriterConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        writer = CheckpointWriterConfig(
            barrier_config=None, write_to_temp_dir=False, file_write_max_threads=self._FILES
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(writer_config=writer),
                # With its direct I/O, writes of unaligned buffers fail on file systems that check.
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=sync_checkpoint,
            )
        )
        # It writes one file for each top-level item, in as many threads.
        self._items = {f"part{number}": part for number, part in enumerate(split(state, self._FILES))}
        self._manager.prewarm_staging(self._items)

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        written = self._manager.save(os.fspath(path), self._items)
        blocked = time.perf_counter() - started
        if not isinstance(written, Future):
            raise TypeError(f"an asynchronous save gave {written!r}")
        await asyncio.to_thread(self._wait_until_staged)
        staged = time.perf_counter() - started
        await asyncio.wrap_future(written)
        return {"blocked_s": blocked, "staged_s": staged, "durable_s": time.perf_counter() - started}

    def _wait_until_staged(self) -> None:
        with self._manager.lock():  # its way to wait before tensors change
            pass

    async def close(self) -> None:
        self._manager.close()
