"""Loads from the page cache, by as many threads as there are cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.reading import executor
from aiockpt.storage.local.source import LocalSource
from tests.states import assert_same, random_tensor

KIB = 1 << 10


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


def state() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.int64, torch.bool] * 4):
        made[f"mid{number}"] = random_tensor(dtype, (96 * KIB // dtype.itemsize + number,), number)
        made[f"small{number}"] = random_tensor(dtype, (3, number), number)
    made["transposed"] = random_tensor(torch.float32, (200, 300), 1).t()
    made["part"] = random_tensor(torch.float32, (60_000,), 1)[100:]
    made["complex"] = random_tensor(torch.complex64, (20_000,), 1).conj()
    made["large"] = random_tensor(torch.float32, (KIB * KIB,), 1)
    return made


def warm(path: Path) -> None:
    """Read the files through the page cache: a save writes past it."""
    for file in path.iterdir():
        file.read_bytes()


def test_flipped_bit_is_found(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    ckpt.save(state(), path)
    with ckpt.open(path) as reader:
        chunk = reader["mid5"].chunks[0]
    file = path / chunk.file
    content = bytearray(file.read_bytes())
    content[chunk.offset + chunk.nbytes // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"the bytes of mid5 \(at offset"):
        ckpt.load(path)
    loaded = ckpt.load(path, verify=False)
    assert not torch.equal(loaded["mid5"], state()["mid5"])


def test_tied_tensors_stay_tied(ckpt, tmp_path: Path) -> None:
    saved = state()
    saved["again"] = saved["mid3"]
    ckpt.save(saved, tmp_path / "c")
    warm(tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c")
    assert_same(saved, loaded)
    assert loaded["again"].data_ptr() == loaded["mid3"].data_ptr()


def test_as_many_threads_as_cores_read_from_the_cache(ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "cores", lambda: 1)
    monkeypatch.setattr(executor, "PART_BYTES", KIB * KIB)
    saved = {f"w{number}": torch.zeros(KIB * KIB) for number in range(4)}
    ckpt.save(saved, tmp_path / "c")
    real = executor.ReadExecutor._take_turn
    calls: list[int] = []

    def take_turn(self: executor.ReadExecutor, pending: object) -> bool:
        calls.append(1)
        return real(self, pending)  # type: ignore[arg-type]

    monkeypatch.setattr(executor.ReadExecutor, "_take_turn", take_turn)
    monkeypatch.setattr(executor, "_TURN_S", 1e9)
    for is_cached, expected in ((True, 1), (False, 8)):
        monkeypatch.setattr(LocalSource, "is_cached", lambda *_args, found=is_cached: found)
        calls.clear()
        assert_same(saved, ckpt.load(tmp_path / "c"))
        assert len(calls) == expected
