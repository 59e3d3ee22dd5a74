"""Where the commands are tested: in the file system, with --full also in a server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.checkpoints import killed_save
from tests.places import ServerPath


@pytest.fixture(params=["local", pytest.param("server", marks=pytest.mark.full)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, server_url: str) -> Path | ServerPath:
    """Return a directory where nothing is."""
    return tmp_path if request.param == "local" else ServerPath(f"{server_url}/{tmp_path.name}")


@pytest.fixture
def orphan(python: list[str], tmp_path: Path) -> Iterator[Path]:
    """Return what a killed save has left in the directory ``run``, which is removed in the end."""
    (tmp_path / "run").mkdir()
    killed_save(python, tmp_path / "run" / "c")
    yield next((tmp_path / "run").iterdir())
    shutil.rmtree(tmp_path / "run")
