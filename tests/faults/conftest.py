"""Zygotes to fork traced processes from, and a directory in memory, where no test waits for a disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.conftest import zygotes

__all__ = ["memory", "zygotes"]


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a directory, in memory if possible, that other users may enter."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
