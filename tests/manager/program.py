"""A training program with a manager. `test_programs` runs it: ``python -m tests.manager.program ...``.

Each step writes a line to standard output when it begins, and ends when it reads a line from standard input.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
import tests.places  # noqa: F401 - registers the storage of the server's URLs


def report(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def wait_in_step(step: int) -> None:
    report("step", step)
    sys.stdin.readline()


def make_state(rank: int) -> dict[str, Any]:
    weights = torch.zeros(50_000)
    return {"weights": weights, f"own{rank}": torch.zeros(50_000), "rng": aiockpt.RngState()}


def train(state: dict[str, Any], rank: int) -> None:
    state["weights"] += 1
    state[f"own{rank}"] += random.random()


def run_sync(rank: int, folder: str, grace_s: float | None) -> None:
    state = make_state(rank)
    with aiockpt.SyncCheckpointManager(folder, keep=aiockpt.KeepLatest(2), save=aiockpt.EverySteps(2)) as run:
        run.on_signal(signal.SIGTERM, grace_s=grace_s)
        start = run.restore(state)
        for step in range(start.step + 1 if start else 1, 1000):
            wait_in_step(step)
            train(state, rank)
            if run.due(step):
                run.save(step, state)
                report("saved", step)
            if run.stopping:
                break
    report("own", state[f"own{rank}"][0].item())


async def run_async(rank: int, folder: str, grace_s: float | None) -> None:
    """Train as `run_sync` does, but in an event loop. Steps block the loop; saves continue during them."""
    state = make_state(rank)
    save = None
    keep, when = aiockpt.KeepLatest(2), aiockpt.EverySteps(2)
    async with aiockpt.CheckpointManager(folder, keep=keep, save=when) as run:
        run.on_signal(signal.SIGTERM, grace_s=grace_s)
        start = await run.restore(state)
        for step in range(start.step + 1 if start else 1, 1000):
            wait_in_step(step)
            if save is not None:
                await save.staged
            train(state, rank)
            if run.due(step):
                save = await run.save(step, state)
                report("saved", step)
            if run.stopping:
                break
    report("own", state[f"own{rank}"][0].item())


def main(kind: str, rank: int, size: int, store: str, folder: str, grace: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    random.seed(rank)
    grace_s = float(grace) if grace else None
    if kind == "blocking":
        run_sync(rank, folder, grace_s)
    else:
        asyncio.run(run_async(rank, folder, grace_s))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7])
