"""Storages as values of a state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aiockpt


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_come_back_as_they_were(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"untyped": tensor.untyped_storage(), "typed": tensor.storage()}, tmp_path / "c")
        loaded = ckpt.load(tmp_path / "c")
    assert type(loaded["untyped"]) is torch.UntypedStorage
    assert bytes(loaded["untyped"]) == bytes(tensor.untyped_storage())
    assert type(loaded["typed"]) is torch.TypedStorage
    assert loaded["typed"].tolist() == tensor.tolist()
