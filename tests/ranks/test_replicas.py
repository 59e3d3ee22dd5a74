"""Plain tensors that several ranks have under one name, and that differ: found, reported, and never mixed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.ranks.world import World

SIZES = {"tiny": 1, "small": 300, "other": 300, "large": 100_000, "larger": 100_000}
"""Elements of tensors; the last two are not copied at the call."""


def state_of(rank: int, *differing: str) -> dict[str, Any]:
    tensors = {name: torch.full((size,), 1.0 + rank * (name in differing)) for name, size in SIZES.items()}
    return tensors | {f"own{rank}": torch.full((200,), float(rank))}


class Log(logging.Handler):
    """The warnings of a rank, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("aiockpt").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("aiockpt").removeHandler(self)


def values_in(path: Path) -> dict[str, list[float]]:
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        state = ckpt.load(path)
    return {name: state[name].unique().tolist() for name in SIZES}


def saves(rank: int, size: int, folder: Path, *turns: tuple[str, ...]) -> list[str]:
    with Log() as texts, aiockpt.SyncCheckpointer() as ckpt:
        for number, differing in enumerate(turns):
            ckpt.save(state_of(rank, *differing), folder / str(number))
    return texts


def test_tensors_that_differ_come_from_the_lowest_rank(world4: World, tmp_path: Path) -> None:
    every = tuple(SIZES)
    turns = [every, every, ()]
    first, *others = world4.results(saves, tmp_path, *turns)
    assert others == [[], [], []]
    (text,) = first
    assert text.startswith("tiny, small, other, large, larger: ")
    for number in range(3):
        assert values_in(tmp_path / str(number)) == {name: [1.0] for name in SIZES}


def test_difference_is_found_though_the_plan_is_known(world2: World, tmp_path: Path) -> None:
    """Each key is named once."""
    turns = [(), (), ("small", "large"), ("small", "large", "tiny"), ("tiny",)]
    first, second = world2.results(saves, tmp_path, *turns)
    assert [text.split(":")[0] for text in first] == ["small, large", "tiny"]
    assert second == []
    for number in range(5):
        assert values_in(tmp_path / str(number)) == {name: [1.0] for name in SIZES}


def keeps_its_plan(rank: int, size: int, folder: Path) -> list[Any]:
    with aiockpt.SyncCheckpointer() as ckpt:
        tokens = []
        for number in range(4):
            ckpt.save(state_of(rank, "small", *(["tiny"] if number == 2 else [])), folder / str(number))
            tokens.append({name: token for name, (token, *_) in ckpt._engine._world.planner._kept.items()})
        return tokens


def test_plan_is_kept_if_the_same_tensors_differ(world2: World, tmp_path: Path) -> None:
    for first, second, third, fourth in world2.results(keeps_its_plan, tmp_path):
        assert first == second
        assert second != third  # one more has to come from the lowest rank
        assert third == fourth


def refuses(rank: int, size: int, folder: Path) -> str:
    with Log() as texts, aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state_of(rank), folder / "same", replicas="error")
        with pytest.raises(aiockpt.SaveError) as caught:
            ckpt.save(state_of(rank, "small", "large"), folder / "differing", replicas="error")
        ckpt.save(state_of(rank), folder / "again", replicas="error")
    assert texts == []
    return str(caught.value)


def test_tensors_that_differ_fail_the_save_if_asked_for(world2: World, tmp_path: Path) -> None:
    first, second = world2.results(refuses, tmp_path)
    assert first == second
    assert first.startswith("rank 0: small, large: ")
    assert sorted(os.listdir(tmp_path)) == ["again", "same"]


def trusts(rank: int, size: int, folder: Path) -> list[str]:
    with Log() as texts, aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state_of(rank, "small"), folder / "trusted", replicas="trust")
        ckpt.save(state_of(rank, "small"), folder / "c.safetensors")
        with pytest.raises(aiockpt.SaveError, match="replicas is check on rank 0 but trust on rank 1"):
            ckpt.save(state_of(rank), folder / "contrary", replicas="trust" if rank else "check")
        with pytest.raises((ValueError, aiockpt.SaveError), match="replicas is 'never'; it must be one of"):
            ckpt.save(state_of(rank), folder / "wrong", replicas="never")
    return texts


def test_trusted_replicas_are_not_compared(world2: World, tmp_path: Path) -> None:
    first, second = world2.results(trusts, tmp_path)
    assert [text.split(":")[0] for text in first] == ["small"]  # of the second save, to safetensors
    assert second == []
    assert values_in(tmp_path / "c.safetensors")["small"] == [1.0]


def saves_parts(rank: int, size: int, folder: Path) -> list[str]:
    """Let the ranks have different keys, so that one copies what another is too full to copy at the call."""
    own = {f"own{number}": torch.zeros(16_000) for number in range(300 * rank)}
    with Log() as texts, aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({**own, "same": torch.arange(5000.0), "differs": torch.arange(5000.0) + rank}, folder / "c")
    return texts


def test_copied_at_the_call_or_not_makes_no_difference(world2: World, tmp_path: Path) -> None:
    first, second = world2.results(saves_parts, tmp_path)
    assert [text.split(":")[0] for text in first] == ["differs"]
    assert second == []
