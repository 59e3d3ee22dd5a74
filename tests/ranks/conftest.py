"""Worlds of ranks, shared by the tests of a module; they save to the file system, with --full also to a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.conftest import anywhere as anywhere
from tests.ranks.world import World, start_server


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Start the server of the worlds before the leak checks count file descriptors and children."""
    start_server()


@pytest.fixture(scope="module")
def world2() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def world3() -> Iterator[World]:
    with World(3) as world:
        yield world


@pytest.fixture(scope="module")
def world4() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.fixture(scope="module")
def world8() -> Iterator[World]:
    with World(8) as world:
        yield world


@pytest.fixture(scope="module", params=["world2", "world4", pytest.param("world8", marks=pytest.mark.full)])
def any_world(request: pytest.FixtureRequest) -> World:
    """Return a world of each size."""
    return request.getfixturevalue(request.param)
