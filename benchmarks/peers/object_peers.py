"""Contenders that write to an object store and read from it: ours, plain requests, and what others use."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

import torch.distributed.checkpoint as dcp

import aiockpt
from benchmarks.harness.object_server import ObjectServer
from benchmarks.harness.states import State, empty_like, size_of

BUCKET = "bench"
POOL_BYTES = 256 << 20
PART_BYTES = 16 << 20
_FILES = 4
_IN_FLIGHT = 8  # requests of a file


class ObjectPeer(ABC):
    """Writes a state to a path, and reads it.

    Attributes:
        name: that of its row.
        note: behind the row.
    """

    name: str
    note = ""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.options = server.options("s3")
        self.endpoint = {"endpoint_url": server.url}

    @abstractmethod
    async def save(self, state: State, key: str) -> None:
        """Write a state."""

    @abstractmethod
    async def load(self, state: State, key: str) -> State:
        """Read a state that it has written, into new tensors."""

    async def close(self) -> None:
        """Release what is kept between rounds."""


class PlainObstore(ObjectPeer):
    """The limit: the same bytes in parts and ranges of the same size, without a checkpoint.

    What it reads is dropped as it comes, or all of it ``is_kept``: new memory takes time to be cleared.
    """

    def __init__(self, server: ObjectServer, *, is_kept: bool = False) -> None:
        super().__init__(server)
        self._is_kept, self.name = is_kept, "obstore, all bytes kept" if is_kept else "obstore, the bytes alone"

    @cached_property
    def _store(self) -> Any:
        from obstore.store import from_url

        return from_url(f"s3://{BUCKET}", **self.options)

    async def save(self, state: State, key: str) -> None:
        import obstore

        data = memoryview(bytearray(PART_BYTES))
        each = size_of(state) // _FILES

        async def parts() -> AsyncIterator[memoryview]:
            for begin in range(0, each, PART_BYTES):
                yield data[: min(PART_BYTES, each - begin)]

        sent = (
            obstore.put_async(
                self._store,
                f"{key}/{at}",
                parts(),
                chunk_size=PART_BYTES,
                max_concurrency=_IN_FLIGHT,
                use_multipart=True,
            )
            for at in range(_FILES)
        )
        await asyncio.gather(*sent)

    async def load(self, state: State, key: str) -> State:
        import obstore

        each = size_of(state) // _FILES
        slots = asyncio.Semaphore(_FILES * _IN_FLIGHT)

        kept: list[object] = []

        async def fetch(name: str, begin: int) -> int:
            async with slots:
                data = await obstore.get_range_async(self._store, name, start=begin, end=min(each, begin + PART_BYTES))
                if self._is_kept:
                    kept.append(data)
                return len(data)

        names = [f"{key}/{at}" for at in range(_FILES)]
        found = await asyncio.gather(*(fetch(name, at) for name in names for at in range(0, each, PART_BYTES)))
        if sum(found) != each * _FILES:
            raise ValueError("bytes are missing")
        return {}


class OursOnObjects(ObjectPeer):
    """aiockpt with a pool of 256 MiB and CRCs."""

    name = "aiockpt"

    def __init__(self, server: ObjectServer, name: str = "aiockpt", *, into_target: bool = False) -> None:
        super().__init__(server)
        self.name, self._into_target = name, into_target
        self._checkpointer = aiockpt.AsyncCheckpointer(staging_bytes=POOL_BYTES, storage_options=self.options)
        self._target: State | None = None

    async def save(self, state: State, key: str) -> None:
        await self._checkpointer.save(state, f"s3://{BUCKET}/{key}")

    async def load(self, state: State, key: str) -> State:
        path = f"s3://{BUCKET}/{key}"
        if not self._into_target:
            return await self._checkpointer.load(path)
        if self._target is None:
            self._target = empty_like(state)
        await self._checkpointer.load(path, self._target)
        return self._target

    async def close(self) -> None:
        await self._checkpointer.aclose()


class Fsspec(ObjectPeer):
    """DCP with its own fsspec storage and s3fs."""

    name = "dcp, FsspecWriter and s3fs"

    def _given(self) -> dict[str, Any]:
        keys = {"key": self.options["access_key_id"], "secret": self.options["secret_access_key"]}
        return {**keys, "client_kwargs": {**self.endpoint, "region_name": self.options["region"]}}

    async def save(self, state: State, key: str) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(f"s3://{BUCKET}/{key}", **self._given())
        await asyncio.to_thread(dcp.save, state, storage_writer=writer, no_dist=True)

    async def load(self, state: State, key: str) -> State:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        target = empty_like(state)
        reader = FsspecReader(f"s3://{BUCKET}/{key}", **self._given())
        await asyncio.to_thread(dcp.load, target, storage_reader=reader, no_dist=True)
        return target


class S3Connector(ObjectPeer):
    """DCP with the storage of AWS's connector."""

    name = "dcp, s3torchconnector"

    async def save(self, state: State, key: str) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(self.options["region"], f"s3://{BUCKET}/{key}", s3client_config=self._config())
        writer.fs._client = self._client()
        await asyncio.to_thread(dcp.save, state, storage_writer=writer, no_dist=True)

    async def load(self, state: State, key: str) -> State:
        from s3torchconnector.dcp import S3StorageReader

        target = empty_like(state)
        reader = S3StorageReader(self.options["region"], f"s3://{BUCKET}/{key}", s3client_config=self._config())
        reader.fs._client = self._client()
        await asyncio.to_thread(dcp.load, target, storage_reader=reader, no_dist=True)
        return target

    def _config(self) -> Any:
        from s3torchconnector import S3ClientConfig

        return S3ClientConfig(force_path_style=True)

    def _client(self) -> Any:
        from s3torchconnector._s3client import S3Client

        return S3Client(region=self.options["region"], endpoint=self.server.url, s3client_config=self._config())


class RunAi(ObjectPeer):
    """Run:ai Model Streamer, which only loads, and only safetensors."""

    name = "Run:ai streamer"
    note = "loads one safetensors object, which aiockpt has written; checks no bytes"

    def __init__(self, server: ObjectServer) -> None:
        super().__init__(server)
        self._checkpointer = aiockpt.AsyncCheckpointer(staging_bytes=POOL_BYTES, storage_options=self.options)

    async def save(self, state: State, key: str) -> None:
        await self._checkpointer.save(state, f"s3://{BUCKET}/{key}.safetensors")

    async def load(self, state: State, key: str) -> State:
        from runai_model_streamer import SafetensorsStreamer

        os.environ |= {
            "AWS_ENDPOINT_URL": self.server.url,
            "RUNAI_STREAMER_S3_ENDPOINT": self.server.url,
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "AWS_REGION": self.options["region"],
            "AWS_EC2_METADATA_DISABLED": "true",
        }

        def load() -> State:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(f"s3://{BUCKET}/{key}.safetensors")
                return {name: tensor.clone() for name, tensor in streamer.get_tensors()}  # else they share one buffer

        return await asyncio.to_thread(load)

    async def close(self) -> None:
        await self._checkpointer.aclose()
