"""Storages that were written for the interface of aiockpt 0.1 and 0.2 go on working."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import aiockpt
from aiockpt.storage.base import Storage
from aiockpt.testing import StorageConformance
from tests.states import assert_same, large_state
from tests.storage.first_edition_storage import DerivedStorage, FirstEditionStorage
from tests.writing.gates import Gate, writers_of


class TestDerivedStorage(StorageConformance):
    revokes = looks = leases = sets_aside = False

    def make_storage(self, tmp_path: Path) -> Storage:
        return DerivedStorage()


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.asyncio
async def test_states_are_saved_and_loaded(writer: str, tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer(storage=FirstEditionStorage(), writer=writer) as ckpt:
        for number in (1, 4):
            await ckpt.save(large_state(number), tmp_path / "c", overwrite=number > 1)
            assert_same(large_state(number), await ckpt.load(tmp_path / "c"))
        assert (await ckpt.verify(tmp_path / "c")).ok
        with pytest.raises(aiockpt.CheckpointExistsError):
            await ckpt.save(large_state(2), tmp_path / "c")
        await ckpt.delete(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["write", "commit"])
def test_what_a_dead_writer_process_has_begun_is_taken_over(
    step: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate = Gate(tmp_path_factory.mktemp("own") / "gate")
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        save = ckpt.submit(large_state(3), tmp_path / "c", storage=gate.storage(step, inner=FirstEditionStorage()))
        gate.wait()
        (writer,) = writers_of(os.getpid())
        writer.kill()
        with pytest.raises(aiockpt.WriteError, match="has died"):
            save.written.result(60)
        assert list(tmp_path.iterdir()) == []
        ckpt.save(large_state(4), tmp_path / "c", storage=FirstEditionStorage())
        assert_same(large_state(4), ckpt.load(tmp_path / "c"))
