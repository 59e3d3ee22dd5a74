"""The guard of objects: it passes pickles of torch.save, and refuses those that cost more than their bytes."""

from __future__ import annotations

import io
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.format.item.objects import decode_object, encode_object
from aiockpt.format.pickle.guard import Guard
from tests.examples import examples
from tests.hostile_inputs import OBJECT_BOMBS, pickle_of, zipped
from tests.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@dataclass
class Settings:
    rate: float
    names: list[str]


OBJECTS = {
    "numbers": [True, 5, -(2**100), 1.5, 2j, None],
    "texts": ["x" * 3000, "ü", b"", b"abc" * 1000, bytearray(), bytearray(b"xyz")],
    "containers": [[1, [2]], (1, (2, (3, (4, ())))), {"a": 1, 2: (3, 4), (1, (2, "b")): 3}, set(), frozenset()],
    "sets": [
        {1, "a", (1, 2), frozenset({5})},
        frozenset({1, (2, 3)}),
        set(range(5000)),
        {2**64 + n for n in range(50)},
    ],
    "keys": {(n, str(n), (n,)): n for n in range(3000)},
    "ranges": [range(10**12), range(5, 0, -2), range(0), slice(1, None, 2)],
    "deques": [deque(), defaultdict(list), OrderedDict(a=1), Counter("aab"), Counter()],
    "times": [date(2020, 1, 2), datetime(2020, 1, 2, 3, tzinfo=UTC), time(3, 4), timezone(timedelta(hours=2))],
    "torch": [torch.float32, torch.Size([2, 3]), torch.device("cpu"), torch.strided],
    "one thing many times": [shared := ("a", (1, 2)), *[shared] * 1000, {shared: 1}],
}
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "a view": lambda: torch.arange(10)[2:8:2],
    "expanded": lambda: torch.ones(2, 3).expand(4, 2, 3),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(5),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "unsigned": lambda: torch.ones(2, dtype=torch.uint16),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("value", OBJECTS.values(), ids=OBJECTS)
def test_plain_types_that_torch_saves_pass(value: Any) -> None:
    assert_same(value, decode_object("k", encode_object("k", value)))


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_tensors_in_objects_pass(make: Callable[[], torch.Tensor]) -> None:
    value = make()
    again = decode_object("k", encode_object("k", [value, {"same": value}]))
    dense = [
        each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (value, again[0])
    ]
    assert again[0].layout is value.layout
    assert_same(*dense)
    assert again[1]["same"] is again[0]


def test_sparse_tensors_are_checked_without_a_warning() -> None:
    far = torch.sparse_coo_tensor(torch.tensor([[0, 900]]), torch.ones(2), (3,), check_invariants=False)
    blobs = encode_object("k", [torch.eye(3).to_sparse()]), encode_object("k", [far])
    assert_same(torch.eye(3), decode_object("k", blobs[0])[0].to_dense())
    with pytest.raises(aiockpt.CorruptCheckpointError, match="900"):
        decode_object("k", blobs[1])
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    assert_same(torch.eye(3), decode_object("k", blobs[0])[0].to_dense())


def test_classes_that_the_caller_allows_pass() -> None:
    value = [Settings(0.5, ["a"]), numpy.arange(6.0).reshape(2, 3), numpy.float64(3)]
    blob = encode_object("k", value)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="Settings"):
        decode_object("k", blob)
    reconstruct = numpy.zeros(1).__reduce__()[0]
    dtypes = [type(numpy.dtype(numpy.float64)), numpy.float64(3).__reduce__()[0]]
    allowed = [Settings, numpy.ndarray, numpy.dtype, reconstruct, *dtypes]
    one, other, third = decode_object("k", blob, safe_globals=allowed)
    assert (one, third) == (value[0], value[2])
    assert (other == value[1]).all()
    huge = zipped(pickle_of(numpy.zeros(0)).replace(b"K\x00\x85", b"J\xff\xff\xff\x7f\x85"))
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="more than its bytes"):
        decode_object("k", huge, safe_globals=allowed)


def test_trust_disables_the_guard() -> None:
    blob = zipped(b"\x80\x02c__builtin__\nlist\nc__builtin__\nxrange\nJ\x40\x42\x0f\x00\x85R\x85R.")
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="more than its bytes"):
        decode_object("k", blob)
    assert len(decode_object("k", blob, trust=True)) == 1_000_000


def test_empty_storages_of_two_types_pass() -> None:
    empty = torch.empty(0)
    assert_same([empty, empty.double()], decode_object("k", encode_object("k", [empty, empty.view(torch.float64)])))


@pytest.mark.parametrize("trust", [False, True])
def test_other_archives_are_corrupt(trust: bool) -> None:
    legacy = io.BytesIO()
    torch.save([1], legacy, _use_new_zipfile_serialization=False)
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02]." + b"x" * 1000)
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_of([1]))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", pickle_of([2]))
    folder = bytearray(zipped(pickle_of([1])))
    folder[folder.index(b"PK\1\2") + 38] |= 0x10
    for blob, message in (
        (legacy.getvalue(), "not a zip file"),
        (bytes(folder), "marked as a directory"),
        (compressed.getvalue(), "compressed"),
        (zipped(pickle_of([1]))[:-1], "damaged"),
        (twice.getvalue(), "the same name"),
        (b"", "not a zip file"),
        (b"PK\3\4", "damaged"),
    ):
        with pytest.raises(aiockpt.CorruptCheckpointError, match=message):
            decode_object("k", blob, trust=trust)


@pytest.mark.parametrize("trust", [False, True])
def test_overlapping_records_are_corrupt(trust: bool) -> None:
    blob = bytearray(zipped(pickle_of([1]), bytes(100)))
    entries = [at for at in range(len(blob)) if blob[at : at + 4] == b"PK\1\2"]
    first, last = entries[0], entries[-1]
    for change, message in (
        ((last + 42, blob[first + 42 : first + 46]), "over another record"),
        ((last + 24, struct.pack("<I", 2**31)), "outside the file"),
        ((last + 24, struct.pack("<I", 1)), "does not match its CRC"),
    ):
        at, data = change
        damaged = blob[:at] + data + blob[at + len(data) :]
        with pytest.raises(aiockpt.CorruptCheckpointError, match=message):
            decode_object("k", bytes(damaged), trust=trust)


@pytest.mark.parametrize("name", OBJECT_BOMBS)
def test_bombs_are_refused(name: str) -> None:
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="was not unpickled"):
        decode_object("k", zipped(b"\x80\x02" + OBJECT_BOMBS[name] + b".", bytes(24)))


@pytest.mark.parametrize("name", ["tuples in tuples", "lists in lists", "dicts in dicts"])
def test_too_deep_nesting_is_refused_at_once(name: str) -> None:
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="was not unpickled: it nests containers deeper than"):
        decode_object("k", zipped(b"\x80\x02" + OBJECT_BOMBS[name] + b"."))


def test_containers_nested_as_deep_as_python_can_pickle_them_pass() -> None:
    for make in (lambda value: [value], lambda value: (value,), lambda value: {"k": value}):
        value: Any = 5
        for _ in range(400):
            value = make(value)
        assert decode_object("k", encode_object("k", value)) == value


def test_the_cost_of_empty_tuples_is_that_of_one() -> None:
    guard = Guard(b"\x80\x02(" + b")" * 1000 + b"t.", {}, ())
    assert len(set(map(id, guard.run().items))) == 1


KEYS = st.recursive(
    st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=4), st.binary(max_size=4), st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=4).map(tuple), st.frozensets(inner, max_size=4)),
    max_leaves=8,
)
VALUES = st.recursive(
    st.one_of(KEYS, st.floats(allow_nan=False), st.sets(KEYS, max_size=5), st.binary(max_size=50).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
        st.lists(inner, min_size=1, max_size=2).map(lambda items: [items[0]] * 5),
    ),
    max_leaves=15,
)


@pytest.mark.slow
@examples(200)
@given(VALUES)
def test_any_value_of_plain_types_passes(value: Any) -> None:
    assert_same(value, decode_object("k", encode_object("k", value)))
