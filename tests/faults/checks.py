"""Assertions for any save that met a fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiockpt
from tests.states import assert_same


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def names(folder: Path, *, besides: tuple[str, ...] = ()) -> list[str]:
    """Return the names in a directory, hidden ones too."""
    return sorted(path.name for path in folder.iterdir() if path.name not in besides)


def assert_failed_rightly(error: BaseException, numbers: set[int]) -> None:
    """Assert that a `SaveError` has an `OSError` with one of these numbers as its cause and in its message."""
    assert isinstance(error, aiockpt.SaveError), repr(error)
    cause = error.__cause__
    assert isinstance(cause, OSError), repr(cause)
    assert cause.errno in numbers, repr(cause)
    assert os.strerror(cause.errno) in str(error), str(error)
    assert not getattr(error, "__notes__", []), error.__notes__  # a note would name files that could not be removed


def assert_nothing_happened(folder: Path, kept: dict[str, Any], *, besides: tuple[str, ...] = ()) -> None:
    """Assert that a directory holds exactly these checkpoints, and that each loads."""
    assert names(folder, besides=besides) == sorted(kept)
    with aiockpt.SyncCheckpointer() as ckpt:
        for name, state in kept.items():
            assert_same(state, ckpt.load(folder / name), name)
