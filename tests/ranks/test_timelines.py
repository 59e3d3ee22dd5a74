"""Timelines and observers with several ranks: each rank has its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
import torch

import aiockpt
from tests.ranks.world import World


class Names(aiockpt.Observer):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_started(self, event: aiockpt.SaveEvent) -> None:
        self.calls.append("save_started")

    def written(self, event: aiockpt.SaveEvent, result: aiockpt.SaveResult) -> None:
        self.calls.append("written")

    def failed(self, event: aiockpt.SaveEvent, error: BaseException) -> None:
        self.calls.append(f"failed: {error}")

    def loaded(self, event: aiockpt.CallEvent, result: aiockpt.LoadResult | None) -> None:
        self.calls.append("loaded")


def save_and_load(
    rank: int, world_size: int, folder: Path, writer: Literal["thread", "process"]
) -> tuple[aiockpt.SaveResult, int, list[str], list[str]]:
    names = Names()
    phases: list[str] = []
    with aiockpt.SyncCheckpointer(writer=writer, observers=[names]) as ckpt:
        state = {f"rank{rank}": torch.full((100_000 * (rank + 1),), rank), "common": torch.ones(1000)}
        result = ckpt.save(state, folder / "a")
        host = ckpt._engine.tools.writer
        assert host is None or repr(host._connection).endswith(", 0 saves>")  # or a long run would accumulate them
        ckpt.load(folder / "a", state, progress=lambda event: phases.append(event.phase))
        with pytest.raises(aiockpt.SaveError):
            ckpt.save({"x": object() if rank else 1, "y": lambda: 0} if rank else {"x": 1}, folder / "b")
    return result, os.getpid(), names.calls, phases


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_each_rank_has_its_own_timeline_and_observers(writer: str, world2: World, tmp_path: Path) -> None:
    answers = world2.results(save_and_load, tmp_path, writer)
    written: dict[str, int] = {}
    for result, pid, calls, phases in answers:
        events = result.timeline()
        assert {event.pid for event in events if event.name in ("capture", "plan", "stage", "commit")} == {pid}
        assert any(event.pid != pid for event in events) == (writer == "process")
        mine: dict[str, int] = {}
        for event in events:
            if event.name == "write":
                mine[event.file] = mine.get(event.file, 0) + event.nbytes
        assert mine
        assert not written.keys() & mine.keys()
        written |= mine
        assert calls[:3] == ["save_started", "written", "loaded"]
        assert phases[-1] == "done"
    sizes = answers[0][0].files
    assert written == {name: nbytes for name, nbytes in sizes.items() if name != ".metadata"}
    # Rank 1 refuses its own state before the save begins there; on rank 0 the save begins and fails.
    assert answers[0][2][3] == "save_started"
    assert answers[0][2][4].startswith("failed: ")
    assert answers[1][2][3:] == []
