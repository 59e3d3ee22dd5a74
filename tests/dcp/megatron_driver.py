"""Driver of `FileSystemWriterAsync` like a Megatron-Core trainer; each rank of `test_megatron.py` runs it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper, _get_failure_dict
from torch.distributed.tensor import DTensor, Shard

from aiockpt.dcp.megatron import FileSystemWriterAsync
from tests.ranks.world import mesh_of


@dataclasses.dataclass
class Request:
    write: Callable[..., None] | None
    args: list[Any]
    preload: Callable[..., Any] | None
    finalize: Callable[[], None]


class Planner(DefaultSavePlanner):
    def create_decentralized_global_plan(self, local_plan: Any) -> Any:
        return local_plan


def plan_save(
    state: dict[str, Any], writer: FileSystemWriterAsync, how: str, kept: dict[str, Any]
) -> Callable[[], None]:
    """Plan a save, and return the function that finalises it."""
    ranks = _DistWrapper(None, True, 0)
    planner = Planner()
    metadata = None

    def local_step() -> Any:
        planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        return writer.prepare_local_plan(kept.get("local") or planner.create_local_plan())

    def global_step(plans: Any) -> Any:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    if how == "cached" and "central" in kept:
        local_step()
        central, metadata = kept["central"], kept["metadata"]
    elif how == "decentralized":
        local = local_step()
        gathered = ranks.gather_object(local)
        if gathered is not None:
            _, metadata = planner.create_global_plan(gathered)
            metadata.all_local_plans = gathered
        central = writer.prepare_decentralized_global_plan(planner.create_decentralized_global_plan(local))
    else:
        central = ranks.reduce_scatter("plan", local_step, global_step)
    kept |= {"central": central, "metadata": metadata}
    writer.prepare_write_data(planner.finish_plan(central), planner)

    def finalize() -> None:
        results = ranks.gather_object(writer.retrieve_write_results())
        failures = _get_failure_dict(results) if results is not None else {}
        if results is not None and not failures:
            writer.finish(metadata, results)
        failed = torch.tensor([len(failures)])
        dist.broadcast(failed, src=0)
        if failed:
            raise CheckpointException("write", failures)

    return finalize


@dataclasses.dataclass
class Alone:
    """A save of a single process that is planned but not written yet."""

    writer: FileSystemWriterAsync
    metadata: Any

    def write(self) -> Any:
        """Write in this process; return the results."""
        write, preload, args = self.writer.get_save_function_and_args()
        assert write is not None
        assert preload is not None
        args[1] = preload()
        write(*args)
        return self.writer.retrieve_write_results()


def plan_alone(path: Path, state: dict[str, Any], **options: Any) -> Alone:
    """Plan a save in a single process."""
    writer = FileSystemWriterAsync(path, **options)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(planner.finish_plan(plan), planner)
    return Alone(writer, metadata)


def write_alone(path: Path, state: dict[str, Any], **options: Any) -> None:
    """Save in a single process."""
    alone = plan_alone(path, state, **options)
    there = path.exists()
    results = alone.write()
    assert path.exists() == there
    assert isinstance(results, list), results
    alone.writer.finish(alone.metadata, [results])


def keep_writing(inbox: Any, preloaded: Any, done: Any) -> None:
    """Write requests until None arrives; run by the persistent writer process."""
    while (request := inbox.get()) is not None:
        write, args, preload = request
        args[1] = preload()
        preloaded.put(None)
        write(*args)
        done.put(None)


def die(*_: Any) -> None:
    os._exit(3)


class Calls:
    """Queue of saves; ``kind`` says which process writes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.running: list[tuple[Request, Any]] = []
        self.kept: Any = None

    def schedule(self, request: Request) -> None:
        process = None
        if request.write is None:
            pass
        elif self.kind == "inline":
            request.args[1] = request.preload()
            request.write(*request.args)
        elif self.kind == "forked":
            request.args[1] = request.preload()
            process = multiprocessing.get_context("fork").Process(target=request.write, args=request.args)
            process.start()
        else:
            context = torch.multiprocessing.get_context("spawn")
            if self.kept is None:
                self.queues = context.Queue(), context.Queue(), context.Queue()
                self.kept = context.Process(target=keep_writing, args=self.queues)
                self.kept.start()
            self.queues[0].put((request.write, request.args, request.preload))
            self.queues[1].get()
            process = self.queues[2]
        self.running.append((request, process))

    def finalize_all(self) -> None:
        for request, process in self.running:
            if self.kind == "forked" and process is not None:
                process.join()
            elif process is not None:
                process.get()
            dist.barrier()
            request.finalize()
        self.running.clear()

    def close(self) -> None:
        if self.kept is not None:
            self.queues[0].put(None)
            self.kept.join()


def state_of(step: int, rank: int, mesh: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shard = torch.randn(40, 300, generator=generator)
    return {
        "model.w": DTensor.from_local(shard, mesh, [Shard(0)]),
        "optim.m": DTensor.from_local(shard * 2, mesh, [Shard(0)]),
        "facts": {"step": step},
        "bias": torch.arange(7.0) + step,
    }


def drive(rank: int, size: int, folder: Path, kind: str, how: str, options: dict[str, Any]) -> str:
    """Save three times; return the outcomes."""
    warnings.simplefilter("ignore")
    calls, kept = Calls(kind), {}
    options = dict(options)
    breaks = options.pop("breaks", False)
    for step in range(3):
        path = folder / f"{step}"
        if rank == 0:
            path.mkdir()
            (path / "common.pt").write_text(f"common {step}")
        dist.barrier()
        state = state_of(step, rank, mesh_of(size))
        writer = FileSystemWriterAsync(path, **options)
        finalize = plan_save(state, writer, how, kept)
        write, preload, args = writer.get_save_function_and_args()
        if breaks and rank == 1:
            write = die
        calls.schedule(Request(write, args, preload, finalize))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
        if step == 1 and not breaks:
            calls.finalize_all()
    try:
        calls.finalize_all()
        outcome = "saved"
    except CheckpointException as exc:
        outcome = f"failed: {exc}"
    calls.close()
    return outcome
