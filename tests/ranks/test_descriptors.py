"""A rank that has no file descriptors left at its first save or load fails on all ranks, which don't wait for it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aiockpt
from tests.ranks.world import World

_LIMIT = 256
_LONGER_THAN_THE_TEST_S = 600.0


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def first_call(rank: int, world_size: int, path: Path, what: str, poor: int, left: int, is_warm: bool) -> str:
    """Return the error of the first call, made by all while one rank is poor of descriptors; the next save works."""
    state = {"w": torch.arange(100.0), "rank": rank}
    if what == "load" and not rank:
        with aiockpt.SyncCheckpointer(process_group=None) as alone:
            alone.save(state, path / "first")
    with aiockpt.SyncCheckpointer(coordination_timeout=_LONGER_THAN_THE_TEST_S) as ckpt:
        if is_warm:  # its loop runs, but has no connections yet
            ckpt.prewarm(state)
        dist.barrier()
        error = ""
        with few_descriptors(left) if rank == poor else contextlib.nullcontext():
            try:
                if what == "save":
                    ckpt.save(state, path / "first")
                elif what == "transaction":
                    with ckpt.transaction(path / "first") as transaction:
                        transaction.save(state, "part")
                    transaction.written.result()
                else:
                    ckpt.load(path / "first", state)
            except aiockpt.AiockptError as exc:
                error = str(exc)
        dist.barrier()
        ckpt.save(state, path / "next")
        dist.barrier()
    return error


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("poor", [0, 1])
@pytest.mark.parametrize(("what", "left"), [("save", 0), ("save", 6), ("load", 0), ("transaction", 0)])
def test_a_rank_without_descriptors_fails_on_all(
    world3: World, tmp_path: Path, what: str, left: int, poor: int, is_warm: bool
) -> None:
    errors = world3.results(first_call, tmp_path, what, poor, left, is_warm)
    assert all(errors) or (left and not any(errors))  # some may be enough
    assert all(not error or "Too many open files" in error for error in errors)
    assert all(not error or f"rank {poor}" in error for rank, error in enumerate(errors) if rank != poor)
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(tmp_path / "next").ok
