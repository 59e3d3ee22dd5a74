"""Safetensors: each tensor that is cut out of the file by its place equals that of ``load_file``."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import AiockptError, CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.file_sets import ShardIndex, decode_shard_index, merge_shards
from aiockpt.format.index import Index, TensorEntry
from aiockpt.format.safetensors.reader import (
    HEADER_PROBE_BYTES,
    MAX_HEADER_BYTES,
    decode_header,
    header_end,
    shared_names,
    with_shared_names,
)
from tests.examples import examples
from tests.states import assert_same, random_tensor, training_state

safetensors = pytest.importorskip("safetensors.torch")

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
]


def packed(header: Any, payload: bytes = b"") -> bytes:
    """Return a file with this header, given as JSON text or as an object to encode."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def decode(blob: bytes, name: str = "model.safetensors") -> Index:
    return decode_header(name, blob[: header_end(name, blob[:8], len(blob))], len(blob))


def cut_out(blobs: dict[str, bytes], entry: Any) -> torch.Tensor:
    """Return the tensor, made from the bytes of its file alone."""
    assert isinstance(entry, TensorEntry)
    (chunk,) = entry.chunks
    place, item = chunk.place, chunk.item
    assert item is not None
    assert (chunk.offsets, chunk.sizes) == ((0,) * len(entry.shape), entry.shape)
    assert (item.dtype, item.shape, item.storage_offset, item.payload_offset) == (entry.dtype, entry.shape, 0, 0)
    assert place.length == item.nbytes == entry.nbytes
    assert (item.crc, item.conj, item.neg) == (None, False, False)
    payload = bytearray(blobs[place.file][place.offset : place.offset + place.length])
    assert len(payload) == place.length
    raw = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    tensor = torch.empty(0, dtype=entry.dtype).set_(raw.untyped_storage(), 0, item.shape, item.stride)
    assert item.stride == torch.empty(item.shape, dtype=item.dtype).stride()
    return tensor


def check_file(path: Path) -> Index:
    """Check that aiockpt and safetensors read the same from a file."""
    blob = path.read_bytes()
    index = decode(blob, path.name)
    assert index.format == "safetensors"
    assert index.paths == {name: (name,) for name in index.entries}
    theirs = safetensors.load_file(path)
    ours = {name: cut_out({path.name: blob}, entry) for name, entry in index.entries.items()}
    assert_same({name: theirs[name] for name in ours}, ours)
    assert theirs.keys() == ours.keys()
    return index


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = [(), (0,), (7,), (3, 5), (2, 0, 4), (1, 2, 3, 4)]
    if str(dtype).endswith("_x2"):
        shapes = [shape for shape in shapes if shape]  # two values a byte: the last size is halved
    tensors = {f"t{i}": random_tensor(dtype, shape, i) for i, shape in enumerate(shapes)}
    path = tmp_path / "model.safetensors"
    safetensors.save_file(tensors, path)
    index = check_file(path)
    assert {name: entry.shape for name, entry in index.entries.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


def test_a_mixed_state_with_metadata(tmp_path: Path) -> None:
    state = {f"{i}.ünï.{name}": t.detach() for i, (name, t) in enumerate(training_state()["model"].items())}
    path = tmp_path / "model.safetensors"
    safetensors.save_file(state, path, metadata={"format": "pt", "note": 'ünï "quoted" \n'})
    index = check_file(path)
    assert index.metadata == {"format": "pt", "note": 'ünï "quoted" \n'}
    assert list(index.entries) == [key for key in _header(path) if key != "__metadata__"]
    safetensors.save_file({}, path)
    assert check_file(path).entries == {}


def _header(path: Path) -> dict[str, Any]:
    blob = path.read_bytes()
    return json.loads(blob[8 : header_end("", blob, len(blob))])


def test_bytes_after_the_header_are_ignored() -> None:
    blob = safetensors.save({"a": torch.arange(5), "b": torch.ones(3)})
    assert decode_header("f", blob, len(blob)) == decode(blob, "f")
    with pytest.raises(CorruptCheckpointError, match=r"f gave 50 bytes of its .* truncated"):
        decode_header("f", blob[:50], len(blob))
    assert HEADER_PROBE_BYTES < MAX_HEADER_BYTES


def test_truncated_anywhere() -> None:
    blob = safetensors.save({"a": torch.arange(5), "b": torch.ones(3)}, {"x": "y"})
    decode(blob)
    for length in range(len(blob)):
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            decode(blob[:length])
    with pytest.raises(CorruptCheckpointError, match="the last 1 of the 53 bytes that follow it to no tensor"):
        decode(blob + b"x")


U8 = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        (b"", b"", "not valid JSON"),
        (b"[]", b"", "no JSON object"),
        (b"{", b"", "not valid JSON"),
        (b"\xff", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"__metadata__": NaN}', b"", "holds NaN"),
        (b'{"a": ' + json.dumps(U8).encode() + b', "a": ' + json.dumps(U8).encode() + b"}", b"12", "the key 'a' twice"),
        (b'{"a": {"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"12", "the key 'dtype' twice"),
        (b'{"__metadata__": {"x": "1", "x": "2"}}', b"", "the key 'x' twice"),
        (b'{"\\ud800": ' + json.dumps(U8).encode() + b"}", b"12", "surrogates not allowed"),
        ({"a": U8 | {"later": ["\udc00"]}}, b"12", "surrogates not allowed"),
        ({"__metadata__": {"a": "\udc00"}}, b"", "surrogates not allowed"),
        ({"__metadata__": {"a": 1}}, b"", "not a map of texts to texts"),
        ({"__metadata__": {"a": 1.5}}, b"", "not a map of texts to texts"),
        ({"__metadata__": ["a"]}, b"", "not a map of texts to texts"),
        ({"a": [1, 2]}, b"", "the tensor 'a' in a way"),
        ({"a": None}, b"", "the tensor 'a' in a way"),
        ({"a": {"dtype": "U8", "shape": [2]}}, b"12", "'data_offsets'"),
        ({"a": U8 | {"dtype": ["U8"]}}, b"12", "the tensor 'a' in a way"),
        ({"a": U8 | {"shape": "2"}}, b"12", "no whole number"),
        ({"a": U8 | {"shape": {}}}, b"12", "no whole number"),
        ({"a": U8 | {"shape": [2.0]}}, b"12", "no whole number"),
        ({"a": U8 | {"shape": [2, True]}}, b"12", "no whole number"),
        ({"a": U8, "b": U8 | {"shape": [True]}}, b"12", "no whole number"),
        ({"a": U8 | {"shape": [-2]}}, b"12", "impossible shape"),
        ({"a": U8 | {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, b"", "impossible shape"),
        ({"a": U8 | {"data_offsets": [0, 2, 2]}}, b"12", "the tensor 'a' in a way"),
        ({"a": U8 | {"data_offsets": [0.0, 2]}}, b"12", "no whole number"),
        ({"a": U8 | {"data_offsets": [False, 2]}}, b"12", "no whole number"),
        ({"a": U8 | {"data_offsets": [-2, 0]}}, b"12", "at the bytes -2 to 0"),
        ({"a": U8 | {"data_offsets": [2, 0]}}, b"12", "at the bytes 2 to 0"),
        ({"a": U8 | {"data_offsets": [0, 3]}}, b"123", "'a' of 2 bytes at the bytes 0 to 3"),
        ({"a": U8 | {"data_offsets": [1, 3]}}, b"12", "at the bytes 1 to 3 of 2"),
        ({"a": U8 | {"dtype": "F32"}}, b"12", "'a' of 8 bytes at the bytes 0 to 2"),
        ({"a": U8 | {"data_offsets": [10**30, 10**30 + 2]}}, b"12", "at the bytes 1000"),
        ({"a": U8, "b": U8}, b"12", "'b' at byte 0, where it overlaps"),
        ({"a": U8, "b": U8 | {"data_offsets": [1, 3]}}, b"123", "'b' at byte 1, where it overlaps"),
        ({"a": U8, "b": U8 | {"data_offsets": [3, 5]}}, b"12345", "'b' at byte 3, where it lies behind bytes"),
        ({"a": U8 | {"data_offsets": [1, 3]}}, b"123", "'a' at byte 1, where it lies behind bytes"),
        ({"a": U8}, b"123", "the last 1 of the 3 bytes"),
        ({"a": U8, "e": U8 | {"shape": [0], "data_offsets": [1, 1]}}, b"12", "'e' at byte 1, where it overlaps"),
        ({}, b"1", "the last 1 of the 1 bytes"),
    ],
)
def test_invalid_headers_are_corrupt(header: Any, payload: bytes, message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=rf"the header of model\.safetensors .*{message}"):
        decode(packed(header, payload))


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"later":{"x":[1.5,true]}},"__metadata__":null}   ',
        b'  {"a":{"data_offsets":[0,2],"shape":[1,2,1],"dtype":"U8"}, "__metadata__":{}}',
        {"e": U8 | {"shape": [0], "data_offsets": [2, 2]}, "a": U8, "f": U8 | {"shape": [0], "data_offsets": [0, 0]}},
        {"b": U8 | {"data_offsets": [1, 2], "shape": []}, "a": U8 | {"data_offsets": [0, 1], "shape": [1]}},
    ],
)
def test_unusual_valid_headers_are_read(header: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(header, b"\x01\x02"))
    check_file(path)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}, r"'a' has the dtype 'F6_E2M3'"),
        ({"dtype": "X1", "shape": [3], "data_offsets": [0, 3]}, r"'a' has the dtype 'X1'"),
        ({"dtype": None, "shape": [3], "data_offsets": [0, 3]}, r"'a' has the dtype None"),
        ({"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}, r"'a' has \[2, 3\] 4-bit values"),
        ({"dtype": "F4", "shape": [], "data_offsets": [0, 3]}, r"'a' has \[\] 4-bit values"),
    ],
)
def test_dtypes_that_torch_lacks_are_refused(described: dict[str, Any], message: str) -> None:
    if described["dtype"] == "F4" and not hasattr(torch, "float4_e2m1fn_x2"):
        message = r"'a' has the dtype 'F4'"
    with pytest.raises(LoadError, match=rf"model\.safetensors: the tensor {message}") as caught:
        decode(packed({"a": described}, b"123"))
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_absurd_header_lengths_are_corrupt() -> None:
    for length in (MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        with pytest.raises(CorruptCheckpointError, match=f"{length} bytes, more than the 100000000"):
            header_end("f", struct.pack("<Q", length), 2**64)
    assert header_end("f", struct.pack("<Q", MAX_HEADER_BYTES), 2**40) == MAX_HEADER_BYTES + 8
    with pytest.raises(CorruptCheckpointError, match="ends at byte 107, inside its header, which goes up to byte 108"):
        header_end("f", struct.pack("<Q", 100), 107)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.weight = self.embed.weight
        self.alone = torch.nn.Parameter(torch.randn(2))


def test_names_that_save_model_omitted_are_restored(tmp_path: Path) -> None:
    model = Tied()
    path = tmp_path / "model.safetensors"
    safetensors.save_model(model, path, metadata={"format": "pt", "main": "embed.weight"})
    index = check_file(path)
    assert sorted(index.entries) == ["alone", "embed.weight"]
    assert shared_names(index) == dict.fromkeys(("head.weight", "weight", "main"), "embed.weight")
    whole = with_shared_names(index)
    assert whole.metadata == {"format": "pt", "main": "embed.weight"}
    assert list(whole.entries)[-3:] == list(shared_names(index))
    assert whole.paths == {name: (name,) for name in whole.entries}
    assert whole.format == "safetensors"
    blobs = {path.name: path.read_bytes()}
    state = {name: cut_out(blobs, entry) for name, entry in whole.entries.items()}
    assert state.keys() - model.state_dict().keys() == {"main"}
    assert_same(dict(model.state_dict()), {name: state[name] for name in model.state_dict()})
    assert whole.entries["head.weight"] is whole.entries["embed.weight"]


@pytest.mark.parametrize(
    ("key", "kept", "taken", "stays"),
    [
        ("head.weight", "embed.weight", True, False),
        ("weight", "embed.weight", True, False),
        ("b", "a", True, False),
        ("main_tensor", "embed.weight", True, True),
        ("the main one.", "embed.weight", False, True),
        ("", "a", False, True),
        (" ", "a", False, True),
        ("a", "embed.weight", False, True),
        ("embed.weight", "a", False, True),
        ("head.weight", "missing", False, True),
    ],
)
def test_metadata_with_names_of_tied_tensors(key: str, kept: str, taken: bool, stays: bool) -> None:
    blob = safetensors.save({"a": torch.ones(1), "embed.weight": torch.arange(3)}, {key: kept})
    index = decode(blob)
    assert shared_names(index) == ({key: kept} if taken else {})
    whole = with_shared_names(index)
    assert (key in whole.metadata) is stays
    assert not taken or whole.entries[key] == index.entries[kept]
    assert shared_names(whole) == {}


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]], metadata: dict[str, Any]) -> ShardIndex:
    """Write a set of shards as transformers does, and return its index."""
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(exist_ok=True)
        safetensors.save_file(tensors, folder / file, metadata={"format": "pt", "file": file})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    document = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return decode_shard_index("model.safetensors.index.json", json.dumps(document, indent=2).encode() + b"\n")


def test_a_set_of_shards(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": random_tensor(DTYPES[i % 9 + 1], (i + 1, 3), i) for i in range(12)}
    names = list(state)
    files = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2)] + ["more/model-00003-of-00003.safetensors"]
    parts = {file: {name: state[name] for name in names[i::3]} for i, file in enumerate(files)}
    shards = write_shards(tmp_path, parts, {"total_size": 123, "nested": {"x": [1.5]}})
    assert sorted({*shards.weight_map.values()}) == files
    blobs = {file: (tmp_path / file).read_bytes() for file in files}
    merged = merge_shards("i.json", shards, {file: decode(blob, file) for file, blob in blobs.items()})
    assert list(merged.entries) == sorted(state)
    assert merged.format == "safetensors"
    assert merged.paths == {name: (name,) for name in merged.entries}
    assert merged.metadata["total_size"] == 123
    assert merged.metadata["nested"] == {"x": [1.5]}
    assert merged.metadata["format"] == "pt"
    for name, entry in merged.entries.items():
        assert_same(state[name], cut_out(blobs, entry), name)
        assert_same(safetensors.load_file(tmp_path / shards.weight_map[name])[name], cut_out(blobs, entry), name)


def test_the_weight_map_decides_which_tensors_belong_to_a_set() -> None:
    one = decode(safetensors.save({"a": torch.ones(1), "stale": torch.ones(5)}, {"tied.a": "a", "x": "1"}), "one")
    two = decode(safetensors.save({"b": torch.ones(2), "a": torch.ones(9)}, {"x": "2"}), "two")
    headers = {"one": one, "two": two}
    merged = merge_shards("i.json", ShardIndex({"b": "two", "a": "one", "tied.a": "one"}, {"x": "3"}), headers)
    assert list(merged.entries) == ["b", "a", "tied.a"]
    assert merged.entries["a"].shape == (1,)
    assert merged.entries["tied.a"] == merged.entries["a"]
    assert merged.metadata == {"x": "3", "tied.a": "a"}
    assert shared_names(merge_shards("i.json", ShardIndex({"a": "one"}, {}), headers)) == {"tied.a": "a"}
    with pytest.raises(CorruptCheckpointError, match=r"i\.json .*'c' is in two, which does not hold it"):
        merge_shards("i.json", ShardIndex({"a": "one", "c": "two"}, {}), headers)
    with pytest.raises(CorruptCheckpointError, match=r"i\.json .*'c' is in three, which is missing"):
        merge_shards("i.json", ShardIndex({"a": "one", "c": "three"}, {}), headers)


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/etc/x",
        "a/../../x",
        "..",
        ".",
        "",
        "a//b",
        "./../a",
        ".//a",
        "a\\..\\b",
        "C:x",
        "a\0b",
        "a\nb",
        "a/",
    ],
)
def test_shards_outside_of_the_folder_are_unsafe(file: str) -> None:
    document = {"weight_map": {"fine": "model-1.safetensors", "w": file}}
    with pytest.raises(UnsafeCheckpointError, match=r"i\.json puts the tensor 'w' into "):
        decode_shard_index("i.json", json.dumps(document).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": null}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b'{"weight_map": {"\\ud800": "x"}}',
        b'{"weight_map": {"a": "x"}, "metadata": "m"}',
        b'{"weight_map": {"a": "x"}, "metadata": Infinity}',
        b"\xff\xfe",
    ],
)
def test_damaged_shard_indexes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^i\.json .*restore it"):
        decode_shard_index("i.json", data)


def test_a_shard_index_without_metadata() -> None:
    shards = decode_shard_index("i.json", b'{"weight_map": {"a": "x", "b": "y..z", "c": "x"}, "other": 1}')
    assert shards == ShardIndex({"a": "x", "b": "y..z", "c": "x"}, {})


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["U8", "F32", "F4", "x", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner),
    max_leaves=4,
)


@pytest.mark.slow
@examples(400)
@given(data=st.data())
def test_changed_headers_raise_our_errors_or_fit(data: st.DataObject) -> None:
    header: dict[str, Any] = {
        "__metadata__": {"a": "b"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "v": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
    }
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(header)))
        part = header[key]
        if isinstance(part, dict) and data.draw(st.booleans()):
            part[data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "a"]))] = data.draw(VALUES)
        else:
            header[key] = data.draw(VALUES)
    _fits_or_raises(packed(header, bytes(28)))


@examples(400)
@given(at=st.integers(0, 200), cut=st.integers(0, 20), put=st.binary(max_size=20))
def test_changed_files_raise_our_errors_or_fit(at: int, cut: int, put: bytes) -> None:
    blob = safetensors.save({"w": torch.ones(2, 3), "v": torch.arange(4)}, {"x": "y"})
    _fits_or_raises(blob[:at] + put + blob[at + cut :])


def _fits_or_raises(blob: bytes) -> None:
    try:
        index = decode(blob)
    except AiockptError:
        return
    places = sorted((e.chunks[0].place.offset, e.chunks[0].place.length) for e in index.entries.values())
    at = header_end("", blob, len(blob))
    for offset, length in places:
        assert offset == at
        at += length
    assert at == len(blob)
    try:
        theirs = safetensors.load(blob)
    except KeyError as exc:
        assert "F" in str(exc)  # load() lacks this dtype
        return
    for name, tensor in theirs.items():
        assert_same(tensor, cut_out({"model.safetensors": blob}, index.entries[name]), name)
