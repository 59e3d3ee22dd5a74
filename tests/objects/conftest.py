"""Servers that speak the protocols of object stores, and buckets there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("obstore")

from benchmarks.harness import object_server
from benchmarks.harness.object_server import ObjectServer
from tests.objects.buckets import Bucket


@pytest.fixture(scope="session")
def _server() -> Iterator[ObjectServer]:
    with object_server.start() as server:
        Bucket("s3://warm", server.options("s3")).listed()  # the threads of obstore stay
        yield server


@pytest.fixture
def server(_server: ObjectServer) -> Iterator[ObjectServer]:
    """Return a server of S3's and Google's requests without rules; a test leaves no upload open."""
    _server.rules()
    yield _server
    _server.rules()
    assert _server.uploads == 0, "uploads were left open"


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.full)])
def bucket(request: Any, server: ObjectServer) -> Bucket:
    """Return an empty bucket in that server."""
    return Bucket(f"{request.param}://{uuid.uuid4().hex}", server.options(request.param))
