from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import aiockpt
from aiockpt.dcp import FileSystemReader, FileSystemWriter
from tests.dcp.megatron_driver import write_alone
from tests.dcp.test_reader import blank, state_of
from tests.states import assert_same, random_tensor

extension = pytest.importorskip("torch.distributed.checkpoint._extension")
ZSTD = "stream.zstd/1"


class Rolling(extension.StreamTransformExtension):
    """Extension that adds to each byte the previous one and a key, and writes only when it is closed."""

    name, key = "stream.rolling", 5

    def __init__(self, version: str = "1") -> None:
        self.version = version

    @classmethod
    def registry_name(cls) -> str:
        return cls.name

    @classmethod
    def from_descriptor(cls, version: str) -> Any:
        if not version.startswith("1"):
            raise ValueError(f"version {version} of {cls.name} is not for this program")
        return cls(version)

    def get_descriptor(self) -> str:
        return f"{self.name}/{self.version}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        owner = self

        class Writer(io.RawIOBase):
            def __init__(self) -> None:
                self.data = bytearray()

            def write(self, data: Any) -> int:
                self.data += data
                return 1  # like compressors, which count the bytes that they passed on

            def close(self) -> None:
                if not self.closed:
                    super().close()
                    output.write(owner.rolled(self.data))
                    output.close()

        return Writer()  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(self.unrolled(input.read()))

    def rolled(self, data: bytes) -> bytes:
        before, made = 0, bytearray()
        for byte in data:
            before = (before + byte + self.key) % 256
            made.append(before)
        return bytes(made)

    def unrolled(self, data: bytes) -> bytes:
        return bytes((byte - before - self.key) % 256 for before, byte in zip(b"\0" + data, data, strict=False))


class Labelled(Rolling):
    """Extension that writes a label before the bytes, and requires it when they are read."""

    name = "stream.label"

    def rolled(self, data: bytes) -> bytes:
        return b"label" + data

    def unrolled(self, data: bytes) -> bytes:
        if not data.startswith(b"label"):
            raise ValueError("no label")
        return data[5:]


class Failing(Rolling):
    def rolled(self, data: bytes) -> bytes:
        raise ArithmeticError("it broke")


def registry(*classes: Any) -> Any:
    made = extension.ExtensionRegistry()
    for each in classes:
        made.register(each)
    return made


def small_state() -> dict[str, Any]:
    return {
        "w": random_tensor(torch.float32, (30, 11), 1),
        "strided": random_tensor(torch.int16, (4, 6), 2).t(),
        "none": torch.empty(0, 3),
        "more": {"b": random_tensor(torch.bfloat16, (9,), 3), "text": "abc " * 50},
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch closes its own stream twice
@pytest.mark.parametrize("extensions", [[Rolling()], [Labelled(), Rolling()], [Rolling("1.2"), Labelled()]], ids=len)
@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 2}])
def test_items_are_written_and_read_through_extensions(
    tmp_path: Path, extensions: list[Any], options: dict[str, Any]
) -> None:
    state = small_state()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c", _extensions=extensions, **options))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs", _extensions=extensions))
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata().storage_data for name in ("c", "theirs"))
    names = {index.fqn: info.transform_descriptors for index, info in ours.items()}
    assert names == {index.fqn: info.transform_descriptors for index, info in theirs.items()}
    for reader in (FileSystemReader, dcp.FileSystemReader):
        target = blank(state)
        dcp.load(target, storage_reader=reader(tmp_path / "c", registry(Rolling, Labelled)))
        assert_same(state, target)


def test_torch_and_aiockpt_read_zstandard_items(tmp_path: Path) -> None:
    state = state_of() | {"zeros": torch.zeros(700, 1000), "text": "again and again " * 9000}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c", _extensions=[extension.ZStandard()]))
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 2_000_000
    stored = dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data
    assert all(info.transform_descriptors == [ZSTD] for info in stored.values())
    for reader in (FileSystemReader, dcp.FileSystemReader):
        target = blank(state)
        dcp.load(target, storage_reader=reader(tmp_path / "c"))
        assert_same(state, target)
    with aiockpt.SyncCheckpointer() as checkpointer:
        assert_same(state, checkpointer.load(tmp_path / "c"))
        assert checkpointer.verify(tmp_path / "c").ok


def test_a_pickled_writer_keeps_its_extensions(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(FileSystemWriter(tmp_path / "c", _extensions=[Rolling("1.5")])))
    metadata = dcp.save(small_state(), storage_writer=writer)
    assert {tuple(info.transform_descriptors) for info in metadata.storage_data.values()} == {("stream.rolling/1.5",)}
    target = blank(small_state())
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c", registry(Rolling)))
    assert_same(small_state(), target)


def test_an_extension_that_is_not_registered_is_named(tmp_path: Path) -> None:
    dcp.save(small_state(), storage_writer=FileSystemWriter(tmp_path / "c", _extensions=[Rolling()]))
    with pytest.raises(CheckpointException, match=r"stream\.rolling/1.*which this checkpointer was not given"):
        dcp.load(blank(small_state()), storage_reader=FileSystemReader(tmp_path / "c"))
    with pytest.raises(CheckpointException, match=r"stream\.rolling/1.*which this checkpointer was not given"):
        dcp.load(blank(small_state()), storage_reader=FileSystemReader(tmp_path / "c", registry(Labelled)))


def test_an_extension_may_refuse_a_version(tmp_path: Path) -> None:
    dcp.save(small_state(), storage_writer=FileSystemWriter(tmp_path / "c", _extensions=[Rolling("2")]))
    with pytest.raises(CheckpointException, match=r"version 2 of stream\.rolling is not for this program"):
        dcp.load(blank(small_state()), storage_reader=FileSystemReader(tmp_path / "c", registry(Rolling)))


def test_a_failing_extension_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"stream\.rolling/1 failed for .*: ArithmeticError: it broke"):
        writer = FileSystemWriter(tmp_path / "c", _extensions=[Failing()])
        dcp.save(small_state(), storage_writer=writer)
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

    class Bomb(Rolling):
        def transform_from(self, input: IO[bytes]) -> IO[bytes]:
            return Endless()  # type: ignore[return-value]

    dcp.save({"w": torch.zeros(30)}, storage_writer=FileSystemWriter(tmp_path / "c", _extensions=[Rolling()]))
    with pytest.raises(CheckpointException, match=r"more than the expected \d+"):
        dcp.load({"w": torch.ones(30)}, storage_reader=FileSystemReader(tmp_path / "c", registry(Bomb)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch closes its own stream twice
def test_the_writer_of_megatron_applies_extensions(tmp_path: Path) -> None:
    state = small_state()
    write_alone(tmp_path / "c", state, thread_count=2, _extensions=[Rolling()])
    target = blank(state)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "c", _extension_registry=registry(Rolling)))
    assert_same(state, target)
