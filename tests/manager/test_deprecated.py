"""Options by their former names, which go on for a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiockpt
from tests.manager.runs import empty, state_of, step_in


@pytest.mark.parametrize("mode", ["write", "read"])
def test_mode_is_read_only_for_now(mode: Any, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=rf"mode='{mode}': pass read_only={mode == 'read'}") as warned:
        run = aiockpt.SyncCheckpointManager(tmp_path, mode=mode)
    assert warned[0].filename == __file__
    assert run.writes == (mode == "write")
    run.close()


def test_mode_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode must be 'write' or 'read', not 'append'"):
        aiockpt.SyncCheckpointManager(tmp_path, mode="append")  # type: ignore[arg-type]


def test_verify_is_verify_when_for_now(tmp_path: Path) -> None:
    state = empty()
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, state_of(1))
        with pytest.warns(DeprecationWarning, match="verify=: pass verify_when='before'") as warned:
            run.restore(state, verify="before")
        assert warned[0].filename == __file__
        assert step_in(state) == 1
        with pytest.raises(ValueError, match="verify_when must be 'auto', 'before' or 'while', not 'later'"):
            run.restore(state, verify_when="later")  # type: ignore[arg-type]
