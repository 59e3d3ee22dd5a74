"""The conformance suite in object stores: one of this host in S3's and Google's ways, and those of other authors."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiockpt.storage.base import Storage
from aiockpt.testing import StorageConformance
from benchmarks.harness.object_server import ObjectServer
from tests.objects import servers
from tests.objects.buckets import Bucket


class _InBucket(StorageConformance):
    bucket: Bucket

    def make_storage(self, tmp_path: Path) -> Storage:
        return self.bucket.storage(grace_s=600.0)

    def path_for(self, tmp_path: Path, name: str) -> str:
        return self.bucket / f"{tmp_path.name}/{name}"


class TestS3(_InBucket):
    @pytest.fixture(autouse=True)
    def use(self, server: ObjectServer) -> None:
        type(self).bucket = Bucket(f"s3://{uuid.uuid4().hex}", server.options("s3"))


class TestGoogle(_InBucket):
    @pytest.fixture(autouse=True)
    def use(self, server: ObjectServer) -> None:
        type(self).bucket = Bucket(f"gs://{uuid.uuid4().hex}", server.options("gs"))


@pytest.mark.full
class TestMinistack(_InBucket):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def use(cls) -> Iterator[None]:
        with servers.ministack() as found:
            cls.bucket = Bucket(*found)
            cls.bucket.listed()  # the threads of obstore stay
            yield


@pytest.mark.full
class TestAzurite(_InBucket):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def use(cls) -> Iterator[None]:
        with servers.azurite() as found:
            cls.bucket = Bucket(*found)
            cls.bucket.listed()  # the threads of obstore stay
            yield
