"""Open the files that a CUDA device opens once in a process, before leaks are counted."""

from __future__ import annotations

import pytest
import torch

import aiockpt


@pytest.fixture(scope="session", autouse=True)
def warm_devices(warm: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not torch.cuda.is_available():
        return
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    state = {f"w{device.index}": torch.ones(300, 300, device=device) for device in devices}
    for tensor in state.values():
        (tensor @ tensor).sum().item()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path_factory.mktemp("warm") / "c")
