"""Ways to save the same state, timed side by side on an otherwise idle machine, in a separate process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

import aiockpt
from aiockpt.cli.demo.events import EventPipe, Measured

ROUNDS = 4
"""The first warms up and is not reported."""

Method = Callable[[dict[str, Any], Path], Awaitable[Measured]]


async def with_torch_save(state: dict[str, Any], path: Path) -> Measured:
    """Save with ``torch.save`` into one file, and make it durable."""
    began = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    return Measured("torch.save + fsync", took, took, took)


async def with_dcp(state: dict[str, Any], path: Path) -> Measured:
    """Save with ``dcp.async_save`` and its defaults; it copies the state before it returns."""
    began = time.perf_counter()
    response = async_save(state, checkpoint_id=path)
    returned = time.perf_counter() - began
    future = response if isinstance(response, Future) else response.upload_completion
    await asyncio.wrap_future(future)
    return Measured("dcp.async_save", returned, returned, time.perf_counter() - began)


def with_aiockpt(ckpt: aiockpt.AsyncCheckpointer) -> Method:
    """Return a method that saves with a checkpointer."""

    async def save(state: dict[str, Any], path: Path) -> Measured:
        began = time.perf_counter()
        handle = ckpt.save(state, path)
        returned = time.perf_counter() - began
        result = await handle
        return Measured("aiockpt", returned, result.staged_s, result.written_s)

    return save


async def measure(checkpoint: Path, scratch: Path, device: str, pipe: EventPipe) -> None:
    """Load a checkpoint to a device, and save it again with each method in turn."""
    async with aiockpt.AsyncCheckpointer() as ckpt:
        state = await ckpt.load(checkpoint, map_location=device)
        methods: tuple[Method, ...] = (with_torch_save, with_dcp, with_aiockpt(ckpt))
        for number in range(ROUNDS):
            for method in methods:
                measured = await method(state, scratch / "state")
                await asyncio.to_thread(remove, scratch / "state")
                if number > 0:
                    pipe.send(measured)


def remove(path: Path) -> None:
    """Remove a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def main(checkpoint: str, scratch: str, device: str) -> None:
    """Measure, within the process group that DCP requires."""
    pipe = EventPipe()
    dist.init_process_group("gloo", init_method=f"file://{Path(scratch).absolute()}/group", rank=0, world_size=1)
    try:
        asyncio.run(measure(Path(checkpoint), Path(scratch), device, pipe))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
