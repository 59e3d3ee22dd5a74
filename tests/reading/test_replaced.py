"""Checkpoints that torch's writer replaced in place: our manifest stays, but describes the earlier save."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp import FileSystemReader
from tests.states import assert_same

OLD: dict[str, Any] = {"w": torch.arange(300_000.0), "b": torch.ones(7), "step": 1}
STATES: dict[str, dict[str, Any]] = {
    "same keys": {"w": torch.arange(300_000.0) + 1, "b": torch.zeros(7), "step": 2},
    "same values": OLD,
    "other keys": {"v": torch.arange(100.0), "nested": {"x": torch.ones(3)}},
    "other shapes": {"w": torch.arange(1000.0), "b": torch.ones(3, 5), "step": 2},
}


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer(process_group=None, io_threads=3) as checkpointer:
        yield checkpointer


def save_stock(state: Mapping[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it overwrites, and that there is no process group
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path, overwrite=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("options", [{}, {"separation_hint": "b"}, {"compress": "zstd"}], ids=["plain", "hint", "zstd"])
def test_checkpoint_replaced_by_the_stock_writer(
    kind: str, options: dict[str, Any], ckpt, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, state = tmp_path / "c", STATES[kind]
    ckpt.save(OLD, path, metadata={"epoch": 1}, **options)
    save_stock(state, path)
    assert (path / ".aiockpt.json").exists()
    with caplog.at_level(logging.WARNING, "aiockpt"):
        assert_same(state, ckpt.load(path))
    assert f"{path}: .aiockpt.json was left by a checkpoint that another program has replaced" in caplog.text
    target = {"w": torch.zeros(state["w"].shape)} if "w" in state else {"v": torch.zeros(100)}
    ckpt.load(path, target)
    assert all(torch.equal(value, state[key]) for key, value in target.items())
    with ckpt.open(path) as reader:
        assert (reader.format, reader.metadata) == ("dcp", {})
        assert set(reader) >= {"w" if "w" in state else "v"}
    report = ckpt.verify(path)
    assert report.ok
    assert report.format == "dcp"
    assert [problem.file for problem in report.problems if problem.kind == "manifest"] == [".aiockpt.json"]
    again = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(again, storage_reader=FileSystemReader(path))
    assert all(torch.equal(value, state[key]) for key, value in again.items())
    ckpt.save(OLD, path, overwrite=True)
    assert_same(OLD, ckpt.load(path))
    save_stock(state, path)
    ckpt.delete(path)  # also the files that only our manifest names
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_damaged_metadata_is_not_taken_for_another_save(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    ckpt.save({"w": torch.arange(9.0), "b": torch.ones(2)}, path)
    good = (path / ".metadata").read_bytes()
    for bit in range(0, len(good) * 8, 41):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        (path / ".metadata").write_bytes(data)
        assert not ckpt.verify(path).ok, f"bit {bit}"
    for data in (good[:-5], good + b"\0", b""):
        (path / ".metadata").write_bytes(data)
        assert not ckpt.verify(path).ok
        with pytest.raises(aiockpt.CorruptCheckpointError):
            ckpt.load(path)


def test_torn_replacement_is_corrupt(ckpt, tmp_path: Path) -> None:
    """A writer killed while it replaced our checkpoint left only its data file, or only its metadata."""
    path, theirs = tmp_path / "c", tmp_path / "theirs"
    ckpt.save(OLD, path)
    save_stock(STATES["other keys"], theirs)
    ours = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes((theirs / "__0_0.distcp").read_bytes())
    with pytest.raises(aiockpt.CorruptCheckpointError, match="truncated or changed"):
        ckpt.load(path)
    assert not ckpt.verify(path).ok
    (path / "__0_0.distcp").write_bytes(ours[:100])
    (path / ".metadata").write_bytes((theirs / ".metadata").read_bytes())
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"__0_0.distcp"):
        ckpt.load(path)
    assert not ckpt.verify(path).ok
    (path / "__0_0.distcp").write_bytes(ours)  # long enough, but with other items
    with pytest.raises(aiockpt.CorruptCheckpointError):
        ckpt.load(path)
    assert not ckpt.verify(path).ok


def test_safetensors_checkpoint_replaced_by_stock_dcp(ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3)}, tmp_path / "c", format="safetensors")
    save_stock(STATES["other keys"], tmp_path / "c")
    assert_same(STATES["other keys"], ckpt.load(tmp_path / "c"))
    assert ckpt.verify(tmp_path / "c").ok
    ckpt.delete(tmp_path / "c")
    assert os.listdir(tmp_path) == []
