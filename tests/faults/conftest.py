"""Processes to fork traced ones from, and a place where the disk is not what takes time."""

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
    """A directory in memory, if there is such a place, that others may look into."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
