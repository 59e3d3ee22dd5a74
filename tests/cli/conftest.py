"""Where the commands are tested: in the file system, with --full also in a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.places import ServerPath


@pytest.fixture(params=["local", pytest.param("server", marks=pytest.mark.full)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, server_url: str) -> Path | ServerPath:
    """Return a directory where nothing is."""
    return tmp_path if request.param == "local" else ServerPath(f"{server_url}/{tmp_path.name}")
