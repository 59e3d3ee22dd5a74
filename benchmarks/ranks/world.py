"""Processes that form a gloo group, and run the functions that the parent sends."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.context
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

_PRELOADED = [
    "benchmarks.ranks.savers",
    "benchmarks.ranks.share",
    "benchmarks.ranks.imagined_ours",
    "benchmarks.ranks.imagined_torch",
]
_END_S = 30.0


def context() -> multiprocessing.context.ForkServerContext:
    """Return a forkserver context whose server has imported torch and the benchmarks, so that processes start fast."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_PRELOADED)
    return made


@dataclass
class Rank:
    """One of the processes, as the functions that it runs see it.

    Attributes:
        rank: its rank.
        size: the number of ranks.
        runner: a runner whose loop lives as long as the process.
        kept: values that these functions leave for each other.
    """

    rank: int
    size: int
    runner: asyncio.Runner
    kept: dict[str, Any] = field(default_factory=dict)


class World:
    """New processes that all run the same functions, one after the other.

    Args:
        size: the number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="aiockpt-benchmark-world-")
        self._ranks = []
        processes = context()
        for rank in range(self.size):
            ours, theirs = processes.Pipe()
            args = (rank, self.size, self._folder.name, theirs)
            process = processes.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            if kind is None:
                process.join(_END_S)
            process.kill()
            process.join()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` in every process; return their results.

        Raises:
            RuntimeError: if it failed in a process, or a process has ended.
        """
        for _, pipe in self._ranks:
            pipe.send((function, args))
        answers = []
        for number, (process, pipe) in enumerate(self._ranks):
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join()
                raise RuntimeError(f"rank {number} has ended with exit code {process.exitcode}") from None
        failed = [error for _, error in answers if error]
        if failed:
            raise RuntimeError(failed[0])
        return [result for result, _ in answers]


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _quieten()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.join(folder, "store"), size), rank=rank, world_size=size
    )
    with asyncio.Runner() as runner:
        itself = Rank(rank, size, runner)
        while True:
            try:
                function, args = pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            try:
                pipe.send((function(itself, *args), None))
            except Exception as exc:
                pipe.send((None, f"rank {rank}: {type(exc).__name__}: {exc}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def _quieten() -> None:
    """Silence the warnings that torch logs on every save."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", module=r"torch\..*")
    logging.getLogger("torch").setLevel(logging.ERROR)
