"""Saves of small states: few changes of threads, each of which takes 5 ms beside a thread that keeps the GIL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import aiockpt
from aiockpt.core import threads
from tests.states import assert_same


@pytest.fixture
def jobs() -> Iterator[list[str]]:
    """Return the names of the threads of an engine, one for each function that they have run."""
    ran: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is threads._Task.run.__code__:
            ran.append(threading.current_thread().name)

    threading.setprofile(note)
    yield ran
    threading.setprofile(None)


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
@pytest.mark.parametrize("count", [3, 60])
def test_a_small_save_changes_threads_a_few_times(jobs: list[str], name: str, count: int, tmp_path: Path) -> None:
    state = {f"layer.{number:02}": torch.full((4000,), float(number)) for number in range(count)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.prewarm(state)  # else memory is faulted in for the next save, after the first one
        ckpt.save(state, tmp_path / "first" / name)
        jobs.clear()
        ckpt.save(state, tmp_path / "second" / name)
        assert 3 <= len(jobs) <= 4, jobs
        assert_same(state, ckpt.load(tmp_path / "second" / name))


def test_a_small_file_of_several_chunks(tmp_path: Path) -> None:
    state = {"a": torch.arange(5000), "b": torch.arange(50_000), "c": torch.arange(3)}
    with aiockpt.SyncCheckpointer(chunk_bytes=4096, staging_bytes=4096) as ckpt:
        ckpt.save(state, tmp_path / "c")
        assert_same(state, ckpt.load(tmp_path / "c"))
    assert aiockpt.verify(tmp_path / "c").ok
