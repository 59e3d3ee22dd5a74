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


@pytest.fixture(scope="session")
def _killed(python: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    killed_save(python, folder / "c")
    return next(folder.iterdir())


@pytest.fixture
def orphan(_killed: Path, tmp_path: Path) -> Iterator[Path]:
    """Return what a killed save has left in the directory ``run``, which is removed in the end."""
    yield Path(shutil.copytree(_killed, tmp_path / "run" / _killed.name))
    shutil.rmtree(tmp_path / "run")
