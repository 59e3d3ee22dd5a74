"""The disk of another host: requests, and servers that are dead, silent, strangers, or asked for what is outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aiockpt.storage.base import Storage
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.remote import RemoteDisk
from aiockpt.storage.remote_server import DiskServer
from aiockpt.testing import StorageConformance


class TestRemoteDisk(StorageConformance):
    """Over a socket."""

    leases = False

    @pytest.fixture(autouse=True)
    def server(self, tmp_path: Path) -> Iterator[None]:
        """Serve the directory of a test."""
        server = DiskServer(LocalStorage(), [str(tmp_path)], hosts=["127.0.0.1"])
        self.disk = RemoteDisk(server.endpoint, "node17")
        yield
        self.disk.close()
        assert server.close()

    def make_storage(self, tmp_path: Path) -> Storage:
        return self.disk
