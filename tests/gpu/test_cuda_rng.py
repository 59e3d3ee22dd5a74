"""`RngState` on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aiockpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_dropout_on_the_device_resumes_exactly(tmp_path: Path) -> None:
    dropout = torch.nn.Dropout()
    ones = torch.ones(1000, device="cuda")
    dropout(ones)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"rng": aiockpt.RngState()}, tmp_path / "c")
        wanted = [dropout(ones), torch.rand(5, device="cuda"), torch.rand(5)]
        ckpt.load(tmp_path / "c", {"rng": aiockpt.RngState()}, map_location="cuda")
    assert all(map(torch.equal, [dropout(ones), torch.rand(5, device="cuda"), torch.rand(5)], wanted))
    assert set(aiockpt.RngState().state_dict()["rank0"]) >= {f"cuda:{n}" for n in range(torch.cuda.device_count())}
