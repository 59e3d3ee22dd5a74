"""Minimal forms of hostile inputs that once loaded, or cost far more time or memory than their size justifies."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import aiockpt
from aiockpt.errors import printable, printable_key, sanitize_error
from aiockpt.format.item.objects import decode_object, encode_object
from aiockpt.format.item.ziparchive import FramingError, read_directory
from tests.fuzz import archives
from tests.fuzz.judge import Judge
from tests.fuzz.pickled import number
from tests.fuzz.targets import Target, make_targets
from tests.fuzz.watch import Watch
from tests.hostile_inputs import pickle_of
from tests.states import assert_same
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return make_targets(tmp_path_factory.mktemp("known"))


@pytest.fixture
def refused(watch: Watch) -> Iterator[Callable[[Target, bytes], None]]:
    judge = Judge(watch)

    def check(target: Target, data: bytes) -> None:
        judge.outcomes.clear()
        assert judge.wrong_with(target, data) is None
        assert "load: done" not in judge.outcomes

    yield check
    judge.close()


# --- objects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("DATA.PKL", "data.pkl"), ("data.pkl", "DATA.PKL"), ("data.pkl", "data.pkl")])
def test_two_records_of_one_name_are_refused(names: tuple[str, str]) -> None:
    """torch ignores the case of record names, so it might read another pickle than the one that was checked."""
    harmless, other = pickle_of(5), pickle_of(6)
    records = [(f"archive/{names[0]}", harmless), (f"archive/{names[1]}", other), ("archive/version", b"3\n")]
    with pytest.raises(aiockpt.CorruptCheckpointError, match="same name"):
        decode_object("k", archives.written(records))


def test_an_archive_with_two_directories_is_refused() -> None:
    """If the 64-bit end record lacks its signature, other readers use the 32-bit one behind it instead."""
    blob = bytearray(encode_object("k", 5))
    at = blob.rindex(b"PK\6\6")
    blob[at] ^= 1
    with pytest.raises(FramingError, match="64-bit"):
        read_directory(len(blob), lambda offset, size: bytes(blob[offset : offset + size]))
    blob[at] ^= 1
    blob[-2] = 1  # the length of the archive's comment, in bytes
    with pytest.raises(FramingError, match="no end-of-directory"):
        read_directory(len(blob), lambda offset, size: bytes(blob[offset : offset + size]))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_indices_out_of_bounds(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators use the indices as memory offsets, without checks, so bad ones would corrupt memory."""
    sparse = torch.eye(8)[6:].to_sparse() if layout == "coo" else torch.eye(8)[6:].to_sparse_csr()
    blob = encode_object("k", sparse)
    again = decode_object("k", blob)
    assert again.to_dense().equal(torch.eye(8)[6:])
    records = [(name, _moved(data)) for name, data in archives.records_of(blob)]
    with pytest.raises(aiockpt.LoadError, match="ind"):
        decode_object("k", archives.written(records))
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


def _moved(data: bytes) -> bytes:
    """Replace the index 7 by one far out of bounds."""
    return data.replace(struct.pack("<2q", 6, 7), struct.pack("<2q", 6, 1 << 40))


def _complex(real: int, imaginary: int) -> bytes:
    return b"c__builtin__\ncomplex\n" + number(real) + number(imaginary) + b"\x86R"


def test_keys_with_one_hash(targets, refused) -> None:
    """An attacker can choose the hashes of numbers and tuples; a dict of colliding keys takes quadratic time."""
    keys = [_complex(-1000003 * k, k) for k in range(6000)]
    assert len({hash(complex(-1000003 * k, k)) for k in range(6000)}) < 10
    for opcodes in (
        b"}(" + b"".join(key + b"N" for key in keys) + b"u",
        b"}(" + b"".join(key + b"K\x01\x86N" for key in keys) + b"u",
        b"c__builtin__\nset\n](" + b"".join(keys) + b"e\x85R",
        b"ccollections\nCounter\n}(" + b"".join(key + b"K\x01" for key in keys) + b"u\x85R",
    ):
        refused(targets["object pickle"], b"\x80\x02" + opcodes + b".")


def test_ordinary_keys_load() -> None:
    values = {torch.Size([n, 2]): n for n in range(3000)}, {(n, (str(n), 0.5)) for n in range(10_000)}
    for value in (*values, {complex(n, 1) for n in range(500)}, {frozenset({n, 5}) for n in range(500)}):
        assert decode_object("k", encode_object("k", value)) == value


def test_ranges_that_become_lists(targets, refused) -> None:
    """A few bytes make a list of a whole range: the number of opcodes stays within its limit, the memory does not."""
    one = b"c__builtin__\nlist\nc__builtin__\nxrange\n" + number(3_000_000) + b"\x85R\x85R"
    refused(targets["object pickle"], b"\x80\x02(" + one * 3 + b"(" + b"N" * 400_000 + b"tt.")


@pytest.mark.parametrize("kind", ["bytes", "bytearray"])
def test_texts_in_slow_encodings(kind: str, targets, refused) -> None:
    """Encoding to punycode takes quadratic time."""
    text = "".join(map(chr, range(0x4E00, 0x9000))).encode()
    argument = b"X" + struct.pack("<I", len(text)) + text + b"X\x08\x00\x00\x00punycode"
    refused(targets["object pickle"], f"\x80\x02c__builtin__\n{kind}\n".encode("latin1") + argument + b"\x86R.")
    value = {"bytes": b"\xff\x00a", "bytearray": bytearray(b"\xff\x00a")}[kind]
    assert decode_object("k", encode_object("k", value)) == value


# --- whole files of torch.save --------------------------------------------------------------------


def _doubled(make: Callable[[Any], Any]) -> Any:
    """Return nested containers, 60 levels deep, each of which holds the next one twice: 2**60 paths."""
    value = None
    for _ in range(60):
        value = make(value)
    return value


def test_containers_within_containers(targets, refused, tmp_path: Path) -> None:
    for make in (lambda x: [x, x], lambda x: (x, x), lambda x: {"a": x, "b": x}):
        refused(targets["torch pickle"], pickle_of({"x": _doubled(make)}))
    loop: dict[str, Any] = {}
    loop["x"] = [loop, loop]
    refused(targets["torch pickle"], pickle_of(loop))
    shared = [torch.ones(1), {"b": 1}]
    torch.save({"a": shared, "b": [shared] * 50}, tmp_path / "x.pt")
    with aiockpt.SyncCheckpointer() as ckpt:
        assert len(ckpt.load(tmp_path / "x.pt")["b"]) == 50


def test_names_that_are_joined_from_long_keys(targets, refused) -> None:
    """The name of each leaf repeats all keys above it, while the file holds each key only once."""
    value: Any = {str(n): None for n in range(2000)}
    key = "k" * 100_000
    for _ in range(20):
        value = {key: value}
    refused(targets["torch pickle"], pickle_of(value))


def test_lists_that_each_hold_a_long_list(targets, refused) -> None:
    """The same list is visited again for each key."""
    shared = list(range(10_000))
    refused(targets["torch pickle"], pickle_of({str(n): [shared] for n in range(3000)}))


# --- tensors --------------------------------------------------------------------------------------


def test_conjugated_values_that_share_memory(targets, watch) -> None:
    judge = Judge(watch)
    try:
        for values in (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag):
            for data in (pickle_of(values.expand(2, 3)), pickle_of(values.as_strided((2, 3), (0, 0)))):
                if values.is_complex():
                    data = data.replace(b"ComplexDouble", b"ComplexFloat")
                assert judge.wrong_with(targets["tensor pickle"], data) is None
        assert judge.outcomes["load: done"]
    finally:
        judge.close()


def test_conjugated_values_load(tmp_path: Path) -> None:
    complex_ = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state = {"a": complex_, "b": complex_.imag, "c": complex_[:1].expand(2, 3), "d": complex_.imag[1:].expand(4)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "c", **ALONE)
    with aiockpt.SyncCheckpointer() as ckpt:
        for mmap in (False, True):
            assert_same(state, ckpt.load(tmp_path / "c", mmap=mmap))


def test_flags_that_a_dtype_can_not_have(targets, refused) -> None:
    flagged = pickle_of(torch.tensor([1 + 2j] * 6).view(2, 3).conj())
    assert b"conj" in flagged
    refused(targets["tensor pickle"], flagged.replace(b"ComplexFloatStorage", b"FloatStorage"))


# --- metadata and manifests -----------------------------------------------------------------------


def _described(paths: dict[str, tuple[Any, ...]], shape: tuple[int, ...] = (0,), chunks: Any = ()) -> bytes:
    """Return the metadata of tensors without any stored bytes."""
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), list(chunks))
    places = {
        MetadataIndex(name, chunk.offsets): _StorageInfo("__0_0.distcp", 0, 0) for name in paths for chunk in chunks
    }
    return pickle.dumps(Metadata(dict.fromkeys(paths, tensor), paths, places))


def test_positions_far_past_the_end_of_lists(targets, refused) -> None:
    refused(targets["metadata"], _described({f"k{n}.9": (f"k{n}", 1_000_000) for n in range(200)}))
    refused(targets["metadata"], _described({"a": ("x", *range(500_000, 500_003), "y")}))

    def far(document: dict[str, Any]) -> None:
        record = {"type": "list", "at": 0}
        document["containers"] += [{"path": [f"k{n}", 1_000_000], **record} for n in range(200)]

    refused(targets["manifest"], _changed(targets["manifest"], far))


def test_long_lists_load(tmp_path: Path) -> None:
    state = {"x": [*[{}] * 300, torch.ones(2), *[{}] * 1000], "y": [torch.full((1,), n) for n in range(30)]}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        assert_same(state, ckpt.load(tmp_path / "c"))


def test_chunks_that_are_cut_in_every_dimension(targets, refused) -> None:
    """A chunk has 2**11 corners, and a check of all corners of all chunks would take too long."""
    places = product((0, 1), repeat=11)
    chunks = [ChunkStorageMetadata(torch.Size(place), torch.Size([1] * 11)) for place in places]
    refused(targets["metadata"], _described({"x": ("x",)}, (2,) * 11, chunks))


def _changed(target: Target, change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(target.seeds[0])
    change(document)
    return json.dumps(document).encode()


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a shape without end": lambda d: d["index"]["forms"][0].__setitem__(1, [1 << 60] * 100_000),
    "strides without end": lambda d: d["index"]["forms"][0].__setitem__(2, [1 << 60] * 100_000),
    "a size that is a text": lambda d: d["files"][".metadata"].update(bytes="9"),
    "a size that is nothing": lambda d: d["files"][".metadata"].update(bytes=None),
    "a negative size": lambda d: d["files"][".metadata"].update(bytes=-1),
    "a long CRC": lambda d: d["files"][".metadata"].update(crc32="f" * 100),
    "files that are a list": lambda d: d.update(files=[]),
    "containers that are a mapping": lambda d: d.update(containers={}),
    "a container that is a number": lambda d: d.update(containers=[1]),
    "a path that is a text": lambda d: d.update(containers=[{"path": "abc", "type": "dict", "at": 0}]),
    "a path of lists": lambda d: d.update(containers=[{"path": [[]], "type": "dict", "at": 0}]),
    "a container at a text": lambda d: d.update(containers=[{"path": [], "type": "dict", "at": "x"}]),
    "metadata that is a list": lambda d: d.update(metadata=[]),
    "a writer that is a number": lambda d: d.update(writer=5),
}


def test_malformed_manifests_are_refused(targets, refused) -> None:
    for change in MANIFESTS.values():
        refused(targets["manifest"], _changed(targets["manifest"], change))


def test_a_manifest_that_does_not_list_the_metadata(targets, watch) -> None:
    """The CRC of the metadata is unknown then."""
    judge = Judge(watch)
    without = json.loads(targets["manifest"].seeds[1])
    del without["files"][".metadata"]
    assert judge.wrong_with(targets["manifest"], json.dumps(without).encode()) is None
    judge.close()


def test_many_integer_keys_beside_others(tmp_path: Path) -> None:
    state = {"x": {**{n: n for n in range(1500)}, "a": torch.ones(1)}}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        assert ckpt.load(tmp_path / "c")["x"].keys() == state["x"].keys()


def test_oversized_shapes_in_safetensors_are_refused(targets, refused) -> None:
    for shape in ([1 << 40] * 100_000, [1] * 65, [int("9" * 4000)], [0, 1 << 63]):
        header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        refused(targets["header"], json.dumps(header).encode())


# --- messages -------------------------------------------------------------------------------------


def test_messages_can_be_printed(targets, refused) -> None:
    """Names in a checkpoint can neither clear a terminal, nor make a message unencodable or very long."""
    for name in ("\x1b[2J", "\udc80", "\0", "\u202e", "\x7f", "x" * 100_000):
        described = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            torch.Size([1]),
            [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))],
        )
        place = {MetadataIndex(name, torch.Size([0])): _StorageInfo(name, 0, 4)}
        refused(targets["metadata"], pickle.dumps(Metadata({name: described}, {name: (name,)}, place)))
        refused(targets["shards"], json.dumps({"weight_map": {name: name}}).encode())
        refused(targets["header"], json.dumps({name: {"dtype": name, "shape": [1], "data_offsets": [0, 4]}}).encode())


NAME = "\x1b[2J\u202e<img>\nw"


def _can_be_printed(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_names_of_a_valid_checkpoint_can_be_printed(tmp_path: Path) -> None:
    """Each key is shown in one line, with its control characters escaped."""
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({NAME: torch.arange(9.0), NAME * 500: 5, "x": torch.ones(2)}, path := tmp_path / "c")
        with ckpt.open(path) as reader:
            assert NAME in reader
            lines = repr(reader).splitlines()
            assert len(lines) == 4
            assert all(map(_can_be_printed, (*lines, reader._repr_html_())))
            assert max(map(len, lines)) < 1000
            assert "<img" not in reader._repr_html_()
        for wrong in ({NAME: torch.ones(3)}, {NAME * 2: torch.ones(3)}):
            with pytest.raises(aiockpt.LoadError) as caught:
                ckpt.load(path, wrong)
            assert _can_be_printed(str(caught.value))
        file = path / "__0_0.distcp"
        data = file.read_bytes()
        file.write_bytes(data.replace(struct.pack("<3f", 1, 2, 3), struct.pack("<3f", 1, 2, 4)))
        report = ckpt.verify(path)
        assert report.damaged_keys == (NAME,)
        assert all(map(_can_be_printed, (str(report), repr(report), *(p.message for p in report.problems))))
        assert len(str(report).splitlines()) == 1 + len(report.problems)
        with pytest.raises(aiockpt.CorruptCheckpointError) as damaged:
            report.raise_if_bad()
        with pytest.raises(aiockpt.CorruptCheckpointError) as caught:
            ckpt.load(path)
    assert _can_be_printed(f"{damaged.value}{caught.value}")


def test_causes_can_be_printed() -> None:
    error = aiockpt.LoadError("a\x1b[2J")
    error.__cause__ = ValueError("b\x1b[2J", 5)
    error.__cause__.__cause__ = KeyError(5)
    error.__cause__.__cause__.__cause__ = RuntimeError()
    error.__cause__.__cause__.__cause__.__cause__ = error  # a program may chain errors in a circle
    sanitize_error(error)
    assert (error.args, error.__cause__.args) == (("a\\x1b[2J",), ("b\\x1b[2J", 5))


def test_printable() -> None:
    assert printable("a\nb\x1b[2J\udc80\u202eä") == "a\nb\\x1b[2J\\udc80\\u202eä"
    assert len(printable("x" * 10_000 + "the end")) < 2100
    assert printable("x" * 10_000 + "the end").endswith("the end")
    assert printable_key("a\nb\x1b" + "c" * 10_000).startswith("a\\nb\\x1bccc")
    assert len(printable_key("c" * 10_000)) < 320
