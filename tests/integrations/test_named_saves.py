"""Saves under the names of a framework, and links to them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.integrations.saves import NamedSaves
from aiockpt.storage import LocalStorage
from aiockpt.testing import Fault, FaultyStorage

STATE = {"x": torch.arange(1000.0)}


def test_what_a_failed_save_was_to_be_linked_as_can_be_removed_later(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), faults=[Fault("commit", OSError(errno.EIO, "broken"))])
    saves = NamedSaves(storage=storage)
    saves.beside = saves.links = True
    linked: list[str] = []

    def save(name: str) -> None:
        saves.save(STATE, str(tmp_path / name))
        saves.link(str(tmp_path / name), lambda: linked.append(name))

    save("a")
    saves.wait()
    with pytest.raises(aiockpt.CommitError):
        saves.raise_failure()
    assert linked == []
    for name in ("a", "b"):
        save(name)
        saves.wait()
        saves.raise_failure()
    assert linked == ["a", "b"]
    saves.remove(str(tmp_path / "a"))
    saves.end()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
