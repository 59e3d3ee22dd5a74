"""`.metadata`: what torch's own classes read from ours, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import PurePosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError
from aiockpt.format.index import ChunkEntry, ItemPlace, ObjectEntry, TensorEntry
from aiockpt.format.metadata import decode_metadata
from aiockpt.format.metadata_writer import encode_metadata, finish_metadata, int_opcodes, text_opcodes


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], file: str, offset: int, length: int) -> TensorEntry:
    chunk = ChunkEntry((0,) * len(shape), shape, ItemPlace(file, offset, length))
    return TensorEntry(dtype, shape, (chunk,))


ENTRIES = [
    ("model.w", _tensor(torch.float32, (3, 4), "__0_0.distcp", 4096, 1577)),
    ("model.b", _tensor(torch.bfloat16, (), "__0_0.distcp", 8192, 70_000)),
    ("step", ObjectEntry(ItemPlace("", 0, 0))),
    ("model.same", _tensor(torch.float32, (3, 4), "__0_1.distcp", 2**33 + 5, 2**40)),
    ("l.0.ü" + "x" * 300, _tensor(torch.float8_e5m2, (0, 70_000), "__0_1.distcp", 2**31, 2**31 - 1)),
    ("n", ObjectEntry(ItemPlace("", 0, 0))),
]
PATHS = {
    "model.w": ("model", "w"),
    "model.b": ("model", "b"),
    "step": ("step",),
    "model.same": ("model", "same"),
    "l.0.ü" + "x" * 300: ("l", 0, "ü" + "x" * 300),
    "n": ("n",),
}
OBJECTS = [("step", ItemPlace("__0_0.distcp", 0, 1261)), ("n", ItemPlace("__0_0.distcp", 1261, 99))]


def test_torch_reads_what_we_write() -> None:
    data = finish_metadata(encode_metadata(ENTRIES, PATHS), OBJECTS)
    metadata = pickle.loads(data)
    assert isinstance(metadata, Metadata)
    assert metadata.planner_data == PATHS
    assert metadata.version == "1.0.0"
    assert list(metadata.state_dict_metadata) == list(PATHS)
    w = metadata.state_dict_metadata["model.w"]
    assert w == TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size([3, 4]),
        [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 4]))],
    )
    assert isinstance(metadata.state_dict_metadata["n"], BytesStorageMetadata)
    scalar = metadata.storage_data[MetadataIndex("model.b", torch.Size([]))]
    assert (scalar.relative_path, scalar.offset, scalar.length) == ("__0_0.distcp", 8192, 70_000)
    far = metadata.storage_data[MetadataIndex("model.same", torch.Size([0, 0]))]
    assert (far.relative_path, far.offset, far.length) == ("__0_1.distcp", 2**33 + 5, 2**40)
    assert metadata.storage_data[MetadataIndex("n")].offset == 1261
    assert len(metadata.storage_data) == 6


def test_we_read_what_we_write_and_what_torch_pickles() -> None:
    data = finish_metadata(encode_metadata(ENTRIES, PATHS), OBJECTS)
    for blob in (data, pickle.dumps(pickle.loads(data)), pickle.dumps(pickle.loads(data), protocol=2)):
        index = decode_metadata(blob)
        assert dict(index.paths) == PATHS
        expected = dict(ENTRIES) | {name: ObjectEntry(place) for name, place in OBJECTS}
        assert index.entries == expected


@pytest.mark.parametrize("value", [0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**63, 2**80])
def test_integers(value: int) -> None:
    assert pickle.loads(b"\x80\x04" + int_opcodes(value) + b".") == value


@pytest.mark.parametrize("value", ["", "a", "ü" * 200, "x" * 255, "x" * 256, "\ud800"])
def test_texts(value: str) -> None:
    assert pickle.loads(b"\x80\x04" + text_opcodes(value) + b".") == value


def _stock() -> Metadata:
    return pickle.loads(finish_metadata(encode_metadata(ENTRIES, PATHS), OBJECTS))


def test_later_versions_with_six_properties() -> None:
    """They end in the strides."""
    data = finish_metadata(encode_metadata(ENTRIES, PATHS), OBJECTS)
    six = data.replace(b"\x89tb", b"\x89K\x04K\x01\x86tb")
    assert six != data
    assert decode_metadata(six).entries["model.w"] == dict(ENTRIES)["model.w"]


def test_other_fields_that_stock_files_have() -> None:
    metadata = _stock()
    metadata.storage_meta = PurePosixPath("/a/b")
    metadata.planner_data = None
    metadata.storage_meta = None
    index = decode_metadata(pickle.dumps(metadata))
    assert index.paths["model.w"] == ("model.w",)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.storage_data.clear(),
        lambda m: setattr(m.storage_data[MetadataIndex("n")], "offset", -1),
        lambda m: setattr(m.storage_data[MetadataIndex("n")], "length", 1.5),
        lambda m: setattr(m.storage_data[MetadataIndex("n")], "relative_path", 5),
        lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([3])),
        lambda m: setattr(m.state_dict_metadata["model.w"].chunks[0], "sizes", torch.Size([3, 5])),
        lambda m: setattr(m.state_dict_metadata["model.w"], "properties", None),
        lambda m: m.planner_data.update(n=()),
        lambda m: m.planner_data.update(n=(1.5,)),
        lambda m: m.state_dict_metadata.update(x=5),
    ],
)
def test_nonsense_is_corrupt(change) -> None:
    metadata = _stock()
    change(metadata)
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        decode_metadata(pickle.dumps(metadata))


def test_transforms_are_refused_by_name() -> None:
    metadata = _stock()
    metadata.storage_data[MetadataIndex("n")].transform_descriptors = ["stream.zstd"]
    with pytest.raises(CorruptCheckpointError, match=r"n is stored with the transforms \['stream.zstd'\]"):
        decode_metadata(pickle.dumps(metadata))


@pytest.mark.parametrize("what", [eval, print, __import__, getattr, torch.load, type, object], ids=str)
def test_any_other_name_is_unsafe(what) -> None:
    with pytest.raises(UnsafeCheckpointError, match="which no checkpoint's metadata needs"):
        decode_metadata(pickle.dumps(what))
