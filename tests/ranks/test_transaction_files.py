"""Transactions of several ranks that hold checkpoints of one file, which rank 0 writes alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.errors import SaveError
from tests.ranks.world import World

STATE = {"x": torch.arange(1000.0), "y": torch.ones(3)}


def saves(rank: int, world_size: int, path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        for step in range(2):
            with ckpt.transaction(path / str(step)) as tx:
                tx.save({"a": STATE["x"], f"own{rank}": torch.full((5,), float(rank))}, "first")
                if step == 0 or rank == 0:  # the others may leave it out
                    tx.save(STATE, "model.safetensors", metadata={"format": "pt"})
                tx.save({"b": STATE["x"]}, "second")
                tx.save(STATE, "state.pt")
                Path(tx.directory, f"rank-{rank}").write_text(str(rank))
            assert tx.written.result().path == str(path / str(step))
            assert ckpt.verify(path / str(step)).ok


def test_rank_0_writes_them_alone(world2: World, tmp_path: Path) -> None:
    world2.results(saves, tmp_path)
    for step in ("0", "1"):
        names = sorted(each.name for each in (tmp_path / step).iterdir())
        assert names == [".aiockpt.json", "first", "model.safetensors", "rank-0", "rank-1", "second", "state.pt"]
        assert sorted(aiockpt.load(tmp_path / step / "first")) == ["a", "own0", "own1"]
        assert torch.equal(aiockpt.load(tmp_path / step / "second")["b"], STATE["x"])
        for file in ("model.safetensors", "state.pt"):
            loaded = aiockpt.load(tmp_path / step / file)
            assert all(torch.equal(loaded[name], value) for name, value in STATE.items())


def refuses(rank: int, world_size: int, path: Path) -> str:
    with aiockpt.SyncCheckpointer() as ckpt:
        with ckpt.transaction(path / "lost") as tx:
            tx.save(STATE, "first")
            if rank == 0:
                with pytest.raises(SaveError, match="not a plain tensor"):
                    tx.save({"x": object}, "model.safetensors")
            tx.save(STATE, "second")
        with pytest.raises(SaveError) as raised:
            tx.written.result()
        with ckpt.transaction(path / "next") as tx:
            tx.save(STATE, "model.safetensors")
        tx.written.result()
        return str(raised.value)


def test_what_is_refused_on_rank_0_fails_on_all(world2: World, tmp_path: Path) -> None:
    assert all("not a plain tensor" in message for message in world2.results(refuses, tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["next"]


def is_torn(rank: int, world_size: int, path: Path) -> str:
    """Rank 0's file fails: its tensors change while they are copied."""
    with aiockpt.SyncCheckpointer() as ckpt:
        big = {"x": torch.zeros(1 << 22)}
        with ckpt.transaction(path / "lost") as tx:
            tx.save(STATE, "first")
            tx.save(big, "model.safetensors")
            big["x"].add_(1)
        with pytest.raises(SaveError) as raised:
            tx.written.result()
        return str(raised.value)


@pytest.mark.unordered
def test_what_fails_on_rank_0_fails_on_all(world2: World, tmp_path: Path) -> None:
    assert all("model.safetensors" in message for message in world2.results(is_torn, tmp_path))
    assert not list(tmp_path.iterdir())


def overlaps(rank: int, world_size: int, path: Path) -> None:
    """Rank 1 plans the next transaction before it comes to publish this one, for which rank 0 waits already."""
    comes, planned = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        comes.set()
        assert rank == 0 or planned.wait(60)

    with aiockpt.SyncCheckpointer() as ckpt:
        with ckpt.transaction(path / "0", pre_commit=hold) as first:
            first.save(STATE, "part")
        assert comes.wait(60)
        with ckpt.transaction(path / "1") as second:
            second.save(STATE, "part")
            if rank == 1:
                handle = second._open().parts["part"].handle
                next((event for event in handle.progress() if event.phase == "planned"), None)
                planned.set()
        first.written.result()
        second.written.result()


def test_the_next_one_is_planned_before_this_one_is_published(world2: World, tmp_path: Path) -> None:
    world2.results(overlaps, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]
