"""The pickle machine: it reads metadata as pickle does, and refuses what costs more than its bytes."""

from __future__ import annotations

import pickle
import struct
from dataclasses import fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt.format.dtypes import DTYPES
from aiockpt.format.pickle.machine import HANDLERS, OPCODES, Function, Machine, PickleError, Record, read_pickle
from tests.examples import examples

KINDS = {
    kind.__name__: type(kind.__name__, (Record,), {"repeats": kind is TensorStorageMetadata})
    for kind in (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties)
} | {name: type(name, (Record,), {"repeats": name[0] == "T"}) for name in ("TensorStorageMetadata", "_StorageInfo")}


def find_global(module: str, name: str) -> Any:
    if name in KINDS:
        return KINDS[name]
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if name == "Size":
        return Function(lambda sizes: tuple(sizes))
    if name == "PurePosixPath":  # pickled in parts, or as one string since Python 3.13
        return Function(lambda *parts: PurePosixPath(*parts).parts)
    if name in ("_get_layout", "_MEM_FORMAT_ENCODING"):
        return Function(lambda value: (name, value))
    raise LookupError(f"{module}.{name}")


def simple(data: bytes) -> Any:
    return Machine(data, find_global, None, HANDLERS).run()


def plain(value: Any) -> Any:
    """Return the content of torch's classes and of records in one form, to compare them."""
    if isinstance(value, Record):
        inner = value.values if value.names is None else dict(zip(value.names, value.values, strict=True))
        return (type(value).__name__, plain(inner))
    if type(value) is TensorProperties:
        layout, form = ("_get_layout", str(value.layout)), ("_MEM_FORMAT_ENCODING", 0)
        known = (value.dtype, layout, value.requires_grad, form, value.pin_memory)
        return (type(value).__name__, known + value.__getstate__()[len(known) :])  # strides, since torch 2.15
    if isinstance(value, PurePosixPath):
        return value.parts
    if is_dataclass(value):
        state = value.__getstate__()
        state = {each.name: getattr(value, each.name) for each in fields(value)} if state is None else state
        return (type(value).__name__, plain(state) if state else None)
    if isinstance(value, dict):
        return [(plain(key), plain(each)) for key, each in value.items()]
    if isinstance(value, list):
        return ["list", *map(plain, value)]
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value


NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.integers(0, 2**40), st.integers(2**62, 2**70))
TEXTS = st.one_of(st.sampled_from(["a", "model", "w.0", "", "ü" * 150]), st.text(max_size=8))
SIZES = st.lists(st.integers(0, 80_000), max_size=5)
DTYPE = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])


@st.composite
def metadata(draw: Any) -> Metadata:
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    shapes = [torch.Size(each) for each in draw(st.lists(SIZES, min_size=1, max_size=3))]
    files = draw(st.lists(TEXTS, min_size=1, max_size=2))
    for name in draw(st.lists(TEXTS, max_size=12, unique=True)):
        place = _StorageInfo(draw(st.sampled_from(files)), draw(NUMBERS), draw(NUMBERS))
        if draw(st.integers(0, 3)) == 0:
            described[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = place
            continue
        shape = draw(st.sampled_from(shapes))
        chunks = [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)] * draw(st.integers(1, 2))
        described[name] = TensorStorageMetadata(TensorProperties(dtype=draw(DTYPE)), shape, chunks)
        stored[MetadataIndex(name, torch.Size([0] * len(shape)), draw(st.integers(0, 3)))] = place
    planned = {name: draw(st.lists(st.one_of(TEXTS, NUMBERS), max_size=4).map(tuple)) for name in described}
    meta = StorageMeta(PurePosixPath("/a/b")) if draw(st.booleans()) else None
    return Metadata(described, planned, stored, meta)


@examples(100)
@given(metadata())
def test_metadata_reads_as_pickle_reads_it(value: Metadata) -> None:
    for protocol in range(2, 6):
        data = pickle.dumps(value, protocol)
        expected = plain(pickle.loads(data))
        assert plain(read_pickle(data, find_global)) == expected
        assert plain(simple(data)) == expected


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(TEXTS, st.integers(-(2**59), 2**59)), inner, max_size=5),
    ),
    max_leaves=20,
)


@examples(100)
@given(VALUES)
def test_plain_values_read_as_pickle_reads_them(value: Any) -> None:
    for protocol in range(2, 6):
        data = pickle.dumps(value, protocol)
        assert read_pickle(data, find_global) == value
        assert plain(simple(data)) == plain(value)


@pytest.mark.slow
def test_many_items_with_memo_references_of_every_form() -> None:
    """More than 256 memoized values make references of one byte and of four."""
    sizes = [torch.Size([16, n % 7]) for n in range(7)]
    described, stored = {}, {}
    for n in range(3000):
        size = sizes[n % 7]
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
        described[f"l.{n}"] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [chunk])
        stored[MetadataIndex(f"l.{n}", torch.Size([0, 0]), 0)] = _StorageInfo(f"f{n % 2}", n * 7001, 300 + n)
    value = Metadata(described, {name: tuple(name.split(".")) for name in described}, stored, None)
    for protocol in (2, 4, 5):
        data = pickle.dumps(value, protocol)
        assert plain(read_pickle(data, find_global)) == plain(simple(data)) == plain(value)


def _shared(depth: int) -> bytes:
    return b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(depth)) + b"."


BOMBS = {
    "a huge memo index": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a huge memo index as text": b"Np99999999999\n.",
    "a huge text": b"\x80\x04\x8d" + struct.pack("<Q", 2**50) + b"ab.",
    "a truncated text": b"\x80\x04X" + struct.pack("<I", 2**31) + b"ab.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**50) + b"ab.",
    "a huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**50) + b"ab.",
    "a huge number": b"\x80\x04\x8b" + struct.pack("<i", 2**30) + b"ab.",
    "a number of many digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "a long number of many digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a line without an end": b"c" + b"a" * 1_000_000,
    "shared tuples as a key": _shared(60)[:-1] + b"0}h\x3cNs.",
    "tuples that hold one tuple twice": b"\x80\x04)" + b"2\x86" * 60 + b".",
    "an extension": b"\x80\x02\x82\x01.",
    "an instance": b"(itorch\nSize\n.",
    "an object": b"(ctorch\nSize\no.",
    "a state for a list": b"]}b.",
    "a state for the second time": b"c__main__\nMetadata\n)\x81}b}b.",
    "a state that is no state": b"c__main__\nMetadata\n)\x81Nb.",
    "a list as a key": b"}]Ns.",
    "a tuple as a key": b"})Ns.",
    "a number as a key that hides its hash": b"}\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fNs.",
    "a call of a class": b"c__main__\nMetadata\n)R.",
    "a call without a tuple": b"ctorch\nSize\n]R.",
    "a call of a number": b"K\x05)R.",
    "a call with the wrong arguments": b"ctorch\nSize\nK\x01K\x02\x86R.",
    "a new number": b"K\x05)\x81.",
    "a new object with arguments": b"c__main__\nMetadata\nK\x01\x85\x81.",
    "an append to a number": b"K\x05Na.",
    "items for a list": b"](NNu.",
    "a key without a value": b"}(Nu.",
    "a persistent id": b"K\x05Q.",
    "a persistent id as text": b"Pabc\n.",
    "no end": b"\x80\x04N",
    "nothing": b"",
    "nothing on the stack": b".",
    "too much on the stack": b"NN.",
    "an open mark": b"(N.",
    "a mark too few": b"t.",
    "a value that is not memoized": b"h\x05.",
    "a value memoized twice": b"Nq\x00q\x00.",
    "half a character": b"\x8c\x01\xff.",
    "a later protocol": b"\x80\x06N.",
    "a name that is a number": b"NN\x93.",
    "an invalid number": b"Iabc\n.",
    "an invalid index": b"gx\n.",
    "a duplicate": b"N2\x86.",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_hostile_pickles_are_refused(data: bytes) -> None:
    for read in (lambda: read_pickle(data, find_global), lambda: simple(data)):
        with pytest.raises(PickleError):
            read()


def test_deep_nesting_and_recursive_lists_are_read() -> None:
    deep = read_pickle(b"]" * 100_000 + b"a" * 99_999 + b".", find_global)
    while deep:
        (deep,) = deep
    itself = read_pickle(b"]\x94h\x00a.", find_global)
    assert itself[0] is itself


def test_shared_tuples_of_shared_tuples_become_opaque() -> None:
    value = read_pickle(b"\x80\x04K\x01\x85\x94h\x00\x86\x94h\x01\x86.", find_global)
    assert value[0] == ((1,), (1,))
    assert type(value[1]) is object


def test_only_the_callers_function_looks_up_names() -> None:
    with pytest.raises(LookupError, match=r"^'?os\.system"):
        read_pickle(b"cos\nsystem\n.", find_global)


def test_persistent_ids() -> None:
    assert read_pickle(b"K\x05Q.", find_global, lambda pid: pid + 1) == 6


FRAGMENTS = st.one_of(
    st.sampled_from([code.encode("latin1") for code in OPCODES]),
    st.sampled_from([*b"(NIJKMh})]"]).map(lambda code: bytes([code])),
    st.binary(max_size=3),
    st.sampled_from(
        [b"K\x01", b"h\x00", b"h\x01", b"j\x00\x00\x00\x00", b"\x8c\x01a", b"cm\nMetadata\n", b"ctorch\nSize\n"]
    ),
    st.sampled_from([b")\x81\x94}\x94(", b"ub", b"h\x00)\x81\x94}\x94(h\x01K\x01h\x02K\x02ub", b"\x94\x86\x94"]),
    st.sampled_from([b"cm\nTensorStorageMetadata\n\x94", b"h\x00K\x01\x85\x94\x85\x94R\x94", b"\x8c\x03abc\x94"]),
)


@pytest.mark.slow
@examples(800)
@given(st.lists(FRAGMENTS, max_size=30).map(b"".join))
def test_any_opcodes_give_a_value_or_an_error(program: bytes) -> None:
    for data in (program, program + b"."):
        for read in (lambda data: read_pickle(data, find_global), simple):
            try:
                read(data)
            except (PickleError, LookupError):
                continue


@pytest.mark.slow
@examples(200)
@given(metadata(), st.data())
def test_damaged_metadata_gives_a_value_or_an_error(value: Metadata, draw: st.DataObject) -> None:
    data = bytearray(pickle.dumps(value, draw.draw(st.integers(2, 5))))
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    for read in (lambda: read_pickle(bytes(data), find_global), lambda: simple(bytes(data))):
        try:
            read()
        except (PickleError, LookupError):
            continue
