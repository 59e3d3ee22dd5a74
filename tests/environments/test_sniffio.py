"""With sniffio installed, by which anyio detects the library that it runs in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aiockpt

pytest.importorskip("sniffio")

STATE = {"x": torch.arange(5.0), "step": 3}


@pytest.mark.asyncio
@pytest.mark.parametrize("writer", ["thread", "process"])
async def test_one_operation_after_the_other(writer: str, tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(writer=writer) as ckpt:
        saves = [ckpt.save(STATE, tmp_path / name) for name in "abc"]
        for save in saves:
            await save.staged
            await save
        assert torch.equal((await ckpt.load(tmp_path / "b"))["x"], STATE["x"])
        assert not await saves[0].cancel()
        await ckpt.prewarm(STATE)
        assert (await ckpt.verify(tmp_path / "c")).ok
        async with ckpt.open(tmp_path / "a") as reader:
            assert {key async for key, _ in reader.stream()} == {"x", "step"}


def test_in_a_synchronous_program(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        for name in "abc":
            ckpt.save(STATE, tmp_path / name)
            assert torch.equal(ckpt.load(tmp_path / name)["x"], STATE["x"])
        stage, write = ckpt.submit(STATE, tmp_path / "d")
        stage.result(60)
        assert write.result(60).tensors == 1
