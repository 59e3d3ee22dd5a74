"""Contenders that save: aiockpt, its peers at their best settings, and the machine's limit."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import aiockpt
from benchmarks.harness.measure import Sample
from benchmarks.harness.states import State, size_of
from benchmarks.limits import raw
from benchmarks.limits.machine import files_under, sync_files
from benchmarks.peers.checkpoints import TORCH_CHECKPOINTING_FILES, Format, torch_checkpointing_items

if TYPE_CHECKING:
    from torch_checkpointing.checkpoint_writer import CallbackArgs


class Saver(ABC):
    """A contender that saves a state to a path, and returns moments in seconds since the call.

    ``blocked_s``: the call returned. ``staged_s``: the tensors may change. ``durable_s``: the save is done and synced.

    Attributes:
        format: the format of the checkpoint; None if it cannot be loaded.
    """

    name: str
    note: str = ""
    format: Format | None = None

    async def open(self, state: State) -> None:
        """Create what is kept between saves."""

    @abstractmethod
    async def save(self, state: State, path: Path) -> Sample:
        """Save once, and return the moments."""

    async def close(self) -> None:
        """Release what `open` created."""


class Blocking(Saver):
    """A function that blocks until the save is done."""

    def __init__(self, name: str, save: Callable[[State, Path], object], format: Format, note: str = "") -> None:
        self.name, self.note, self.format = name, note, format
        self._save = save

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        self._save(state, path)
        took = time.perf_counter() - started
        return {"blocked_s": took, "staged_s": took, "durable_s": took}


class RawWrite(Saver):
    """The limit: the same number of bytes, written past the page cache and synced."""

    note = "no copy, no CRC, no format"

    def __init__(self, threads: int, arena: raw.Arena, *, staged: bool = False) -> None:
        self.name = f"{'copy, CRC, ' * staged}raw O_DIRECT, {threads} thread{'s' * (threads > 1)}"
        self.note = "copied and checked in pieces, no format" if staged else self.note
        self._threads, self._arena = threads, arena
        self._buffers = [raw.Arena(raw.WRITE_BYTES) for _ in range(threads)] if staged else []

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        await asyncio.to_thread(raw.write_direct, path, self._arena, size_of(state), self._threads, self._buffers)
        return {"durable_s": time.perf_counter() - started}


class Aiockpt(Saver):
    """This package."""

    note = "CRC, synced"
    format = "aiockpt"
    last: aiockpt.SaveResult | None = None

    def __init__(self, name: str = "aiockpt", **options: Any) -> None:
        self.name = name
        self._options = {"process_group": None, **options}

    async def open(self, state: State) -> None:
        self._checkpointer = await aiockpt.AsyncCheckpointer(**self._options).__aenter__()

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        handle = self._checkpointer.save(state, path)
        blocked = time.perf_counter() - started
        await handle.staged
        staged = time.perf_counter() - started
        result = self.last = await handle.written
        durable = time.perf_counter() - started
        facts = {name: getattr(result, name) for name in ("captured_s", "planned_s", "written_s")}
        return {"blocked_s": blocked, "staged_s": staged, "durable_s": durable, **facts}

    async def close(self) -> None:
        await self._checkpointer.aclose()


class Memmove(Saver):
    """The limit of staging: every tensor copied into touched memory."""

    def __init__(self, threads: int, arena: raw.Arena) -> None:
        self.name = f"memmove, {threads} thread{'s' * (threads > 1)}"
        self.note = "touched memory"
        self._threads, self._arena = threads, arena

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        raw.copy_state(state, self._arena, self._threads)
        return {"staged_s": time.perf_counter() - started}


class PrewarmedAiockpt(Aiockpt):
    """This package, with staging memory allocated before the first save."""

    name = "aiockpt, prewarmed"

    def __init__(self) -> None:
        super().__init__(self.name)

    async def open(self, state: State) -> None:
        await super().open(state)
        await self._checkpointer.prewarm(state)


def dcp_writer(path: Path, threads: int) -> dcp.FileSystemWriter:
    """Return DCP's own writer, which syncs its files."""
    return dcp.FileSystemWriter(path, thread_count=threads, sync_files=True)


def dcp_save(threads: int) -> Blocking:
    """Return the contender ``dcp.save``; one thread is its default."""

    def save(state: State, path: Path) -> None:
        dcp.save(state, storage_writer=dcp_writer(path, threads), no_dist=True)

    return Blocking(f"dcp.save, thread_count={threads}", save, "dcp", "sync_files")


def kept_stager(options: StagingOptions) -> DefaultStager:
    """Return a stager that keeps its memory: that of torch 2.11 drops it after each use, and fails at the next."""
    stager = DefaultStager(options)
    stager._state_dict_stager.close = lambda: None
    return stager


class DcpAsyncSave(Saver):
    """``dcp.async_save`` with one stager, and its memory, for all saves; pinned for a state on a GPU.

    Args:
        stager: "async" or "blocking".
        writer: "thread" or "process".
        device: the device of the state.
    """

    format = "dcp"

    def __init__(
        self,
        stager: Literal["async", "blocking"],
        writer: Literal["thread", "process"] = "thread",
        device: str = "cpu",
    ) -> None:
        self.name = f"dcp.async_save, {stager} stager, {writer}"
        self._threads = max(2, min(8, os.cpu_count() or 1))
        self._kind = AsyncCheckpointerType(writer)
        pinned = device == "cuda"
        self._options = StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=writer == "process",  # slower for a thread
            use_async_staging=stager == "async",
            use_non_blocking_copy=pinned,
        )
        self.note = f"thread_count={self._threads}, sync_files, stager kept"
        self._group: object = None

    async def open(self, state: State) -> None:
        if self._kind is AsyncCheckpointerType.PROCESS and not dist.is_initialized():
            # Its process needs a process group, even for one rank.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the hostname may not resolve
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self._group = dist.group.WORLD
        self._stager = kept_stager(self._options)

    def begin(self, state: State, path: Path) -> tuple[Future[Any] | None, Future[Any]]:
        """Start a save; return the future of staging, None if it is done already, and the future of the write."""
        answer = dcp.async_save(
            state,
            storage_writer=dcp_writer(path, self._threads),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            no_dist=True,
        )
        if isinstance(answer, AsyncSaveResponse):
            return answer.staging_completion, answer.upload_completion
        return None, answer

    async def save(self, state: State, path: Path) -> Sample:
        started = time.perf_counter()
        staging, written = self.begin(state, path)
        blocked = staged = time.perf_counter() - started
        if staging is not None:
            await asyncio.wrap_future(staging)
            staged = time.perf_counter() - started
        at: list[float] = []
        written.add_done_callback(lambda _: at.append(time.perf_counter() - started))
        await asyncio.wrap_future(written)
        durable = time.perf_counter() - started
        # The writer's thread records the end: a caller whose loop is held sees it later.
        return {"blocked_s": blocked, "staged_s": staged, "durable_s": durable, "written_s": at[0]}

    async def close(self) -> None:
        if hasattr(self, "_stager"):
            self._stager.close()
        if self._kind is AsyncCheckpointerType.PROCESS:
            _async_process_executor._CHECKPOINT_PROCESS = None  # DCP never ends this process, nor frees its memory
        if self._group is not None:
            dist.destroy_process_group()


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
    """Return the contender ``torch.save``."""
    if crc:
        return Blocking("torch.save + fsync", _torch_save, "torch", "CRC")
    return Blocking("torch.save + fsync, no CRC", _torch_save_without_crc, "torch", "set_crc32_options(False)")


def _safetensors_save(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, path)
    sync_files([path])


def safetensors_save() -> Blocking:
    """Return the contender ``safetensors.torch.save_file``."""
    return Blocking("safetensors save_file + fsync", _safetensors_save, "safetensors", "no CRC")


def sync_checkpoint(args: CallbackArgs) -> None:
    """Sync the files of torch_checkpointing: its hook before a checkpoint is final. Runs in its process."""
    sync_files(files_under(Path(args.path)))


class TorchCheckpointing(Saver):
    """``torch_checkpointing``: staging to shared memory, writing from another process."""

    note = "no fsync of its own: synced by its pre_finalize_callback; direct I/O off; memory of its process not counted"
    format = "torch_checkpointing"
    _FILES = TORCH_CHECKPOINTING_FILES

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
                # Its direct I/O writes unaligned buffers, which some file systems refuse.
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=sync_checkpoint,
            )
        )
        # It writes one file for each top-level item, each in a thread of its own.
        self._items = torch_checkpointing_items(state)
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
        with self._manager.lock():  # its way to wait until the tensors may change
            pass

    async def close(self) -> None:
        self._manager.close()
