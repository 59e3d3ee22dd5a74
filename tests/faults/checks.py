"""What must hold after a save that met a fault, whatever it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiockpt
from tests.states import assert_same


def names(folder: Path, *, besides: tuple[str, ...] = ()) -> list[str]:
    """Give what is in a directory, hidden or not."""
    return sorted(path.name for path in folder.iterdir() if path.name not in besides)


def assert_failed_rightly(error: BaseException, numbers: set[int]) -> None:
    """Assert that it is one of ours, of a save, and tells what the file system has said."""
    assert isinstance(error, aiockpt.SaveError), repr(error)
    cause = error.__cause__
    assert isinstance(cause, OSError), repr(cause)
    assert cause.errno in numbers, repr(cause)
    assert os.strerror(cause.errno) in str(error), str(error)
    assert not getattr(error, "__notes__", []), error.__notes__  # nothing that could not be removed


def assert_nothing_happened(folder: Path, kept: dict[str, Any], *, besides: tuple[str, ...] = ()) -> None:
    """Assert that a directory holds just these checkpoints, whole."""
    assert names(folder, besides=besides) == sorted(kept)
    with aiockpt.SyncCheckpointer() as ckpt:
        for name, state in kept.items():
            assert_same(state, ckpt.load(folder / name), name)
