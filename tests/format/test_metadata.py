"""`.metadata`: torch's classes read aiockpt's, aiockpt reads torch's, and damage is refused."""

from __future__ import annotations

import dataclasses
import enum
import gc
import io
import pickle
import threading
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt.core.gc_pause import gc_pause
from aiockpt.errors import CorruptCheckpointError, UnsafeCheckpointError
from aiockpt.format.dcp.metadata import decode_metadata
from aiockpt.format.dcp.metadata_opcodes import int_opcodes, metadata_tail, text_opcodes
from aiockpt.format.dcp.metadata_writer import RangeTable, ShardedEntry, encode_metadata
from aiockpt.format.index import ItemRange, ObjectEntry, StoredChunk, TensorEntry


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], file: str, offset: int, length: int) -> TensorEntry:
    chunk = StoredChunk((0,) * len(shape), shape, ItemRange(file, offset, length))
    return TensorEntry(dtype, shape, (chunk,))


ENTRIES = [
    ("model.w", _tensor(torch.float32, (3, 4), "__0_0.distcp", 4096, 1577)),
    ("model.b", _tensor(torch.bfloat16, (), "__0_0.distcp", 8192, 70_000)),
    ("step", ObjectEntry(ItemRange("", 0, 0))),
    ("model.same", _tensor(torch.float32, (3, 4), "__0_1.distcp", 2**33 + 5, 2**40)),
    ("l.0.ü" + "x" * 300, _tensor(torch.float8_e5m2, (0, 70_000), "__0_1.distcp", 2**31, 2**31 - 1)),
    ("n", ObjectEntry(ItemRange("", 0, 0))),
]
PATHS = {
    "model.w": ("model", "w"),
    "model.b": ("model", "b"),
    "step": ("step",),
    "model.same": ("model", "same"),
    "l.0.ü" + "x" * 300: ("l", 0, "ü" + "x" * 300),
    "n": ("n",),
}
OBJECTS = [("step", ItemRange("__0_0.distcp", 0, 1261)), ("n", ItemRange("__0_0.distcp", 1261, 99))]


def metadata_of_aiockpt() -> bytes:
    """Encode `ENTRIES`, as a world of one rank whose leaves they are."""
    rows = [entry.chunks[0].place if isinstance(entry, TensorEntry) else None for _, entry in ENTRIES]
    files = ["__0_0.distcp", "__0_1.distcp"]
    file_of, offsets, lengths = (np.zeros(len(rows), kind) for kind in (np.int32, np.int64, np.int64))
    entries: list[tuple[str, ShardedEntry | None]] = []
    for leaf, ((name, entry), place) in enumerate(zip(ENTRIES, rows, strict=True)):
        if place is None or not isinstance(entry, TensorEntry):
            entries.append((name, None))
            continue
        file_of[leaf], offsets[leaf], lengths[leaf] = files.index(place.file), place.offset, place.length
        chunks = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        entries.append((name, ShardedEntry(entry.dtype, entry.shape, chunks, (0,), (leaf,))))
    head = encode_metadata(entries, PATHS, RangeTable(files, np.array([0]), file_of, offsets, lengths))
    return head.data + metadata_tail(head.remembered, OBJECTS)


def test_torch_reads_metadata_of_aiockpt() -> None:
    data = metadata_of_aiockpt()
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


def test_aiockpt_reads_its_own_metadata_and_torchs() -> None:
    data = metadata_of_aiockpt()
    for blob in (data, *(pickle.dumps(pickle.loads(data), protocol) for protocol in range(2, 6))):
        index = decode_metadata(blob)
        assert dict(index.paths) == PATHS
        expected = dict(ENTRIES) | {name: ObjectEntry(place) for name, place in OBJECTS}
        assert index.entries == expected


@pytest.mark.parametrize("value", [0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**63, 2**80])
def test_integers(value: int) -> None:
    assert pickle.loads(b"\x80\x04" + int_opcodes(value) + b".") == value


@pytest.mark.parametrize("value", ["", "a", "ü" * 200, "x" * 255, "x" * 256, "\ud800"])
def test_strings(value: str) -> None:
    assert pickle.loads(b"\x80\x04" + text_opcodes(value) + b".") == value


def _stock() -> Metadata:
    return pickle.loads(metadata_of_aiockpt())


def test_later_versions_with_six_properties() -> None:
    """The sixth property is the strides."""
    data = metadata_of_aiockpt()
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
def test_invalid_fields_are_corrupt(change) -> None:
    metadata = _stock()
    change(metadata)
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        decode_metadata(pickle.dumps(metadata))


ODD = [5, 1.5, ["a"], ("a",), {"a": 1}, torch.int8, True, 2**64, (-1,), (2**63,), (0,) * 65]


@pytest.mark.parametrize("where", ["fqn", "offset"])
@pytest.mark.parametrize("value", ODD)
def test_odd_fields_of_places_are_corrupt(where: str, value: object) -> None:
    metadata = _stock()
    index = next(iter(metadata.storage_data))
    object.__setattr__(index, where, value)
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        decode_metadata(pickle.dumps(metadata))


def test_messages_are_bounded() -> None:
    metadata = _stock()
    nested: object = "x" * 1000
    for _ in range(60):
        nested = (nested, nested)
    for name, value in (("offset", nested), ("relative_path", nested), ("transform_descriptors", nested)):
        metadata = _stock()
        setattr(metadata.storage_data[MetadataIndex("n")], name, value)
        with pytest.raises(CorruptCheckpointError) as caught:
            decode_metadata(pickle.dumps(metadata))
        assert len(str(caught.value)) < 500


def test_tensor_properties_of_old_files() -> None:
    """Up to torch 2.2, `TensorProperties` is in another module."""
    data = pickle.dumps(_stock(), protocol=2)
    old = data.replace(
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
        b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n",
    )
    assert old != data
    assert decode_metadata(old).entries["model.w"] == dict(ENTRIES)["model.w"]


def test_empty_chunks_of_several_ranks_are_merged() -> None:
    metadata = _stock()
    described = metadata.state_dict_metadata["model.w"]
    empty = ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([0, 4]))
    described.chunks += [empty, ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([0, 4]))]
    metadata.storage_data[MetadataIndex("model.w", torch.Size([3, 0]))] = _StorageInfo("__0_0.distcp", 9000, 1577)
    del metadata.state_dict_metadata["model.same"]
    entry = decode_metadata(pickle.dumps(metadata)).entries["model.w"]
    assert [chunk.sizes for chunk in entry.chunks] == [(3, 4), (0, 4)]
    assert [chunk.place.offset for chunk in entry.chunks] == [4096, 9000]


def test_two_chunks_at_one_place_of_the_tensor_are_corrupt() -> None:
    metadata = _stock()
    metadata.state_dict_metadata["model.w"].chunks *= 2
    with pytest.raises(CorruptCheckpointError, match="has two chunks at"):
        decode_metadata(pickle.dumps(metadata))


def test_one_list_of_chunks_for_very_many_tensors_is_corrupt() -> None:
    metadata = _stock()
    chunks = [ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([0, 4]))] * 20_000
    for n in range(1000):
        tensor = TensorStorageMetadata(TensorProperties(dtype=torch.int8), torch.Size([3, 4 + n]), chunks)
        metadata.state_dict_metadata[f"t{n}"] = tensor
        metadata.storage_data[MetadataIndex(f"t{n}", torch.Size([3, 0]))] = _StorageInfo("__0_0.distcp", 0, 1)
    with pytest.raises(CorruptCheckpointError, match="or an impossible one"):
        decode_metadata(pickle.dumps(metadata))


def test_gc_pause_restores_the_garbage_collector() -> None:
    before = gc.get_threshold(), gc.isenabled()
    seen = []
    with gc_pause(), gc_pause():
        seen.append(gc.get_threshold()[0])
    assert seen[0] > 1_000_000
    assert (gc.get_threshold(), gc.isenabled()) == before
    with pytest.raises(ValueError), gc_pause():
        raise ValueError
    assert gc.get_threshold() == before[0]
    try:
        with gc_pause():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before[0])


def test_gc_pause_in_several_threads() -> None:
    before = gc.get_threshold()
    barrier = threading.Barrier(4)

    def work() -> None:
        for _ in range(200):
            with gc_pause():
                assert gc.get_threshold() != before
        barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.get_threshold() == before


def test_transforms_are_part_of_the_place() -> None:
    metadata = _stock()
    assert not decode_metadata(pickle.dumps(metadata)).is_transformed
    metadata.storage_data[MetadataIndex("n")].transform_descriptors = ["lock/2", "stream.zstd/1"]
    index = decode_metadata(pickle.dumps(metadata))
    assert index.is_transformed
    places = {name: getattr(entry, "place", None) for name, entry in index.entries.items()}
    assert places.pop("n").transforms == ("lock/2", "stream.zstd/1")
    assert not any(place.transforms for place in places.values() if place)


@pytest.mark.parametrize("wrong", ["stream.zstd/1", [7], {"a": 1}, ["x/1"] * 100], ids=str)
def test_odd_transforms_are_corrupt(wrong: object) -> None:
    metadata = _stock()
    metadata.storage_data[MetadataIndex("n")].transform_descriptors = wrong
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        decode_metadata(pickle.dumps(metadata))


@pytest.mark.parametrize("what", [eval, print, __import__, torch.load, type, object])
def test_any_other_global_is_unsafe(what) -> None:
    with pytest.raises(UnsafeCheckpointError, match="which no checkpoint's metadata needs"):
        decode_metadata(pickle.dumps(what))


class _ByName(pickle.Pickler):
    """Pickles members of Enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_enums_may_be_pickled_by_name(protocol: int) -> None:
    stored = io.BytesIO()
    _ByName(stored, protocol).dump(_stock())
    assert b"getattr" in stored.getvalue()
    assert decode_metadata(stored.getvalue()) == decode_metadata(pickle.dumps(_stock()))


class _Attribute:
    def __init__(self, *args: object) -> None:
        self._args = args

    def __reduce__(self) -> object:
        return getattr, self._args


@pytest.mark.parametrize("args", [(torch.Size, "__init__"), (Metadata, "__init__"), (TensorProperties, "x")], ids=str)
def test_other_attributes_are_unsafe(args: tuple[object, str]) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"names builtins\.getattr, which no checkpoint's metadata needs"):
        decode_metadata(pickle.dumps(_Attribute(*args)))


def test_plans_in_the_metadata_are_ignored() -> None:
    """Megatron-Core keeps the plans of all ranks in the metadata, and reuses them in its next save."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.randn(3, 4), "step": 5}, is_coordinator=True)
    plan = planner.create_local_plan()
    plans, metadata = planner.create_global_plan([plan])
    metadata.storage_data = {
        MetadataIndex("w", torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 1577),
        MetadataIndex("step"): _StorageInfo("__0_0.distcp", 1577, 1261),
    }
    metadata.all_local_plans = [dataclasses.replace(plans[0], storage_data=_StoragePrefix("__0_"))]
    stored = io.BytesIO()
    pickle.dump(metadata, stored)
    index = decode_metadata(stored.getvalue())
    assert index.entries["w"].chunks[0].place == ItemRange("__0_0.distcp", 0, 1577)
    assert index.entries["step"].place == ItemRange("__0_0.distcp", 1577, 1261)
    assert list(index.paths.values()) == [("w",), ("step",)]
