"""The conformance suite that ships with the package, run on every storage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import Storage, shared_storage, shared_transaction
from aiockpt.testing import StorageConformance
from tests.server_storage import ServerStorage
from tests.storage.memory_storage import MemoryStorage


class TestLocalStorage(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage()


@pytest.mark.slow
class TestBufferedLocalStorage(StorageConformance):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(direct_io=False, fsync=False)


@pytest.mark.slow
class TestMemoryStorage(StorageConformance):
    revokes = shares = looks = sets_aside = leases = False

    def make_storage(self, tmp_path: Path) -> Storage:
        return MemoryStorage()


class TestServerStorage(StorageConformance):
    """One that is no file system."""

    @pytest.fixture(autouse=True)
    def server(self, server_url: str) -> None:
        """Use the server of all tests."""
        type(self).url = server_url

    url: str

    def make_storage(self, tmp_path: Path) -> Storage:
        return ServerStorage(self.url)

    def path_for(self, tmp_path: Path, name: str) -> str:
        return f"{self.url}/{tmp_path.name}/{name}"


@pytest.mark.slow
class TestWrapperStorage(StorageConformance):
    """A wrapper around a storage for one process."""

    revokes = shares = looks = sets_aside = leases = False

    def make_storage(self, tmp_path: Path) -> Storage:
        return WrapperStorage(MemoryStorage())


class LoopBoundStorage(WrapperStorage):
    """One whose client can be used on one event loop only."""

    loop: asyncio.AbstractEventLoop | None = None

    async def before(self, step: str, name: str) -> None:
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()


class TestLoopBoundStorage(TestWrapperStorage):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LoopBoundStorage(MemoryStorage())


# --- a storage for one process ------------------------------------------------------------------------


def test_wrapper_refuses_a_taken_path_at_the_call(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": 1}, tmp_path / "c")
        with pytest.raises(aiockpt.CheckpointExistsError, match="exists already"):
            ckpt.submit({"x": 2}, tmp_path / "c", storage=WrapperStorage(LocalStorage()))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_writer_process_needs_a_shared_storage(wrapped: bool, tmp_path: Path) -> None:
    storage = WrapperStorage(MemoryStorage()) if wrapped else MemoryStorage()
    with (
        aiockpt.SyncCheckpointer(writer="process") as ckpt,
        pytest.raises(aiockpt.SaveError, match="MemoryStorage takes the files of one process only: save with "),
    ):
        ckpt.save({"x": torch.ones(3)}, tmp_path / "c", storage=storage)


@pytest.mark.asyncio
async def test_transaction_of_one_process_cannot_be_joined() -> None:
    storage = WrapperStorage(MemoryStorage())
    transaction = await storage.begin("c", overwrite=False, workers=None)
    with pytest.raises(aiockpt.SaveError, match="_MemoryTransaction takes the files of one process only"):
        _ = transaction.ticket
    with pytest.raises(aiockpt.SaveError, match="MemoryStorage takes the files of one process only"):
        await storage.join("c", "ticket", workers=None)
    assert shared_storage(storage) is storage
    assert shared_transaction(transaction) is transaction
