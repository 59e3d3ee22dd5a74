"""Transactions of several ranks: each calls the same, and all of it appears at once, or nothing on any rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import aiockpt
from aiockpt.errors import AiockptError
from tests.ranks.layouts import distributed, full_tensors
from tests.ranks.world import World
from tests.states import assert_same

Writer = Literal["thread", "process"]
SOON_S = 40.0  # far below the limit for other ranks, which is minutes


def save_all(rank: int, world_size: int, path: Path, writer: Writer) -> list[str]:
    with aiockpt.SyncCheckpointer(writer=writer) as ckpt:
        for step in (1, 2):
            with ckpt.transaction(path / f"{step}") as tx:
                tx.save({"model": distributed("grid", world_size, seed=step)})
                tx.save({"step": step, "of": {str(rank): torch.full((3,), rank)}}, "optimizer")
                tx.add("config.json", b"of rank %d" % rank)
                Path(tx.directory, f"rng_{rank}.bin").write_bytes(bytes([rank]) * (rank + step))
            tx.staged.result(60)
            result = tx.written.result(60)
            assert result.path == str(path / f"{step}")
        assert ckpt.statistics().written == 2
        return sorted(result.files)


@pytest.mark.main
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_all_parts_appear_at_once(world2: World, writer: Writer, tmp_path: Path) -> None:
    files, others = world2.results(save_all, tmp_path, writer)
    assert files == others
    assert {"config.json", "rng_0.bin", "rng_1.bin", "optimizer/.metadata", ".metadata"} < set(files)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    for step in (1, 2):
        assert_same(full_tensors(seed=step), aiockpt.load(tmp_path / f"{step}")["model"])
        assert_same(
            {"step": step, "of": {str(rank): torch.full((3,), rank) for rank in range(2)}},
            aiockpt.load(tmp_path / f"{step}" / "optimizer"),
        )
        assert (tmp_path / f"{step}" / "config.json").read_bytes() == b"of rank 0"
        assert (tmp_path / f"{step}" / "rng_1.bin").read_bytes() == b"\1" * (1 + step)
        assert aiockpt.verify(tmp_path / f"{step}").ok


def fail_within(rank: int, world_size: int, path: Path, where: str, writer: Writer) -> tuple[str, float]:
    """Fail on rank 1, at one of several places; return what was raised, and how long it took."""
    state = {"x": distributed("grid", world_size, seed=3)}
    with aiockpt.SyncCheckpointer(writer=writer, on_failure="raise") as ckpt:
        begin, seen = time.monotonic(), ""
        try:
            with ckpt.transaction(path / "a") as tx:
                if where == "before" and rank == 1:
                    raise ValueError("rank 1 leaves")
                tx.save({"y": lambda: rank} if where == "state" and rank == 1 else state)
                if where == "between" and rank == 1:
                    raise ValueError("rank 1 leaves")
                tx.save(state, "part")
                if where == "after" and rank == 1:
                    raise ValueError("rank 1 leaves")
            tx.written.result(120)
        except (AiockptError, ValueError) as exc:
            seen = f"{type(exc).__name__}: {exc}"
        took = time.monotonic() - begin
        ckpt.save(state, path / "later")  # the ranks are in step again
    return seen, took


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("where", ["state", "between", "after", "before"])
def test_what_fails_on_one_rank_leaves_nothing_on_any(where: str, writer: Writer, tmp_path: Path) -> None:
    with World(2) as world:
        outcomes: list[Any] = world.results(fail_within, tmp_path, where, writer)
    for seen, took in outcomes:
        assert seen, "a rank took it for written"
        assert took < SOON_S, seen
    assert sorted(os.listdir(tmp_path)) == ["later"]


def die_within(rank: int, world_size: int, path: Path, where: str) -> str:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": distributed("grid", world_size, seed=1)}, path / "a")
        try:
            with ckpt.transaction(path / "a", overwrite=True) as tx:
                tx.save({"x": distributed("grid", world_size, seed=2)})
                if rank == 1 and where == "within":
                    os.kill(os.getpid(), signal.SIGKILL)
                tx.save({"big": {str(rank): torch.ones(5_000_000)}}, "part")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            tx.written.result(120)
        except AiockptError as exc:
            return f"{type(exc).__name__}: {exc}"
        finally:
            ckpt._engine._abandon_ranks()
    return ""


@pytest.mark.parametrize("where", ["within", "after"])
def test_a_rank_that_dies_leaves_the_old_checkpoint(where: str, tmp_path: Path) -> None:
    with World(2) as world:
        outcomes = world.run(die_within, tmp_path, where)
    assert outcomes[1].killed  # type: ignore[union-attr]
    loaded = aiockpt.load(tmp_path / "a")
    published = "part" in os.listdir(tmp_path / "a")
    assert_same(full_tensors(seed=2 if published else 1), loaded["x"])
    assert aiockpt.verify(tmp_path / "a").ok
    assert published == (outcomes[0] == ""), outcomes[0]
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.clean(tmp_path)
    assert os.listdir(tmp_path) == ["a"]
