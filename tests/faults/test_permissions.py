"""A save loses its write permission midway."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.crash.zygote import Zygote, forked
from tests.faults.checks import names
from tests.states import assert_same, large_state

_NOBODY = 65_534


def _save_without_permission(folder: Path, step: str) -> list[str]:
    """Save as a user whose write permission is taken away midway; return the error and its notes."""
    if os.geteuid() == 0:
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    storage = GatedStorage(LocalStorage(), [step])
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"old": 1}, folder / "c")
        save = ckpt.submit(large_state(2), folder / "c", overwrite=True, storage=storage)
        storage.reached[step].result(60)
        hidden = next(path for path in folder.iterdir() if path.name.startswith("."))
        lost = hidden if step == "create" else folder
        lost.chmod(0o555)
        storage.open(step)
        with pytest.raises(aiockpt.SaveError, match="Permission denied") as caught:
            save.written.result(60)
        assert isinstance(caught.value.__cause__, PermissionError)
        assert ckpt.load(folder / "c") == {"old": 1}
        outcome = [type(caught.value).__name__, *getattr(caught.value, "__notes__", [])]
        lost.chmod(0o755) if lost.exists() else None
        ckpt.save(large_state(2), folder / "c", overwrite=True, storage=storage)
        assert_same(large_state(2), ckpt.load(folder / "c"))
    return outcome


@pytest.mark.parametrize(("step", "kind"), [("create", "WriteError"), ("commit", "CommitError")])
def test_losing_write_permission_fails(step: str, kind: str, zygotes: tuple[Zygote, Zygote], memory: Path) -> None:
    folder = memory / "shared"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)
    outcome = zygotes[0].call(forked, _save_without_permission, folder, step)
    assert outcome[0] == kind
    assert names(folder) == ["c"]
