"""Checkpoints on the disks of several hosts, each a directory here: what all have together is one checkpoint."""

from __future__ import annotations

from pathlib import Path

from aiockpt.storage.base import Storage
from aiockpt.storage.hosts import Disk, HostDisks
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import StorageConformance


class TestOneDisk(StorageConformance):
    """The disk of a job of one host."""

    def make_storage(self, tmp_path: Path) -> Storage:
        return HostDisks([Disk("a", "host", LocalStorage())], "a")
