"""Tests of storages: the states of a checkpointer."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from aiockpt.errors import CheckpointExistsError, CheckpointNotFoundError, SaveError
from aiockpt.sync_checkpointer import SyncCheckpointer
from aiockpt.testing.conformance.suite import StoragePath, Suite
from aiockpt.testing.storages import FaultyStorage


class StateTests(Suite):
    """States that a checkpointer saves and loads."""

    def test_a_state_comes_back_bit_for_bit(self, place: StoragePath) -> None:
        """Tensors of several dtypes and sizes, and other values."""
        state = _state(1)
        with SyncCheckpointer(storage=place.storage) as checkpointer:
            checkpointer.save(state, place.path)
            _assert_same(checkpointer.load(place.path), state)
            report = checkpointer.verify(place.path)
        assert report.ok, f"verify found {report}"

    def test_a_state_is_overwritten(self, place: StoragePath) -> None:
        """Only where the caller says so."""
        with SyncCheckpointer(storage=place.storage) as checkpointer:
            checkpointer.save(_state(1), place.path)
            with pytest.raises(CheckpointExistsError):
                checkpointer.save(_state(2), place.path)
            _assert_same(checkpointer.load(place.path), _state(1))
            checkpointer.save(_state(2), place.path, overwrite=True)
            _assert_same(checkpointer.load(place.path), _state(2))

    @pytest.mark.parametrize("overwrite", [False, True], ids=["first", "overwrite"])
    @pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
    def test_a_failed_save_leaves_nothing(self, step: str, overwrite: bool, place: StoragePath) -> None:
        """Wherever it fails, the path shows what was there before; the next save succeeds."""
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with SyncCheckpointer(storage=place.storage) as checkpointer:
            if overwrite:
                checkpointer.save(_state(1), place.path)
            with pytest.raises(SaveError):
                checkpointer.save(
                    _state(2), place.path, storage=FaultyStorage(place.storage, step, error), overwrite=overwrite
                )
            if overwrite:
                _assert_same(checkpointer.load(place.path), _state(1))
            else:
                with pytest.raises(CheckpointNotFoundError):
                    checkpointer.load(place.path)
            checkpointer.save(_state(3), place.path, overwrite=overwrite)
            _assert_same(checkpointer.load(place.path), _state(3))


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8, generator=generator)
    return {
        "model": {
            "weight": torch.randn(1000, 777, generator=generator),
            "half": torch.randn(333, generator=generator).to(torch.bfloat16),
            "transposed": torch.randn(30, 40, generator=generator).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(seed, dtype=torch.int64),
            "large": large,
        },
        "step": seed,
        "notes": ["text", 1.5, None, (True, b"bytes")],
    }


def _assert_same(found: Any, expected: Any) -> None:
    assert _plain(found) == _plain(expected)


def _plain(value: Any) -> Any:
    """Return a value that is equal only to one of the same types, keys in the same order, and bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return type(value), [_plain(each) for each in inner] if isinstance(value, dict | list | tuple) else value
