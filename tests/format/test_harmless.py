"""Plain values need no `safe_globals`; pickles that only resemble them are refused."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import io
import random
import types
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

import aiockpt
from aiockpt.format.item.harmless import UnknownMemberError, build_harmless
from aiockpt.format.item.objects import TensorSeeker, decode_object, encode_object
from aiockpt.format.pickle.machine import PickleError
from tests.hostile_inputs import pickle_of


@dataclass
class Config:
    rate: Any
    where: Path


class Color(enum.Enum):
    RED = 1


class Names(list[str]):
    """List with an attribute."""

    origin = ""


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, np.float32(2)


def _structured() -> np.ndarray[Any, Any]:
    array = np.zeros(3, dtype=[("a", "i4"), ("b", ">f8", (2,)), ("c", [("d", "U3")])])
    array["b"] = 1.5
    array["c"]["d"] = "xyz"
    return array


SHARED = [1, 2]
VALUES: dict[str, Any] = {
    "numpy's state": np.random.RandomState(1).get_state(),
    "a generator's state": np.random.default_rng(1).bit_generator.state,
    "another generator's": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    "python's state": random.Random(1).getstate(),
    "paths": [Path("/a/b"), PurePosixPath("x"), PureWindowsPath("c:/x"), {Path(f"p{n}"): n for n in range(1000)}],
    "decimals": [decimal.Decimal("1.50"), decimal.Decimal("NaN"), decimal.Decimal("-1e400")],
    "deques": [collections.deque([1, np.float32(3)], maxlen=5), collections.deque([[1]]), collections.deque()],
    "counters": collections.Counter("aab"),
    "defaultdicts": [
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(None, {1: 2}),
        collections.defaultdict(collections.Counter, x=collections.Counter("x")),
    ],
    "namespaces": argparse.Namespace(a=1, b=argparse.Namespace(c=[Path("q")]), d=types.SimpleNamespace(x=np.arange(3))),
    "scalars": [
        *(np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("äb"), np.bytes_(b"x"), np.complex64(1j)),
        *(np.float16(2), np.longdouble(1) / 3, np.datetime64("2020-01-01"), np.timedelta64(3, "ms"), np.void(b"abc")),
    ],
    "texts": [np.array(["a", "bcd"]), np.array([b"x", b"yz"]), np.zeros(2, dtype="U0"), np.array("x")],
    "objects": np.array([[1, "x"], [None, [2, np.ones(2)]]], dtype=object),
    "structured": _structured(),
    "orders": [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(5)],
    "times": [np.array(["2020-01-01T00", "NaT"], "M8[h]"), np.zeros((2, 0, 3), dtype=[("x", "M8[25s]")])],
    "dtypes": [np.dtype("f4"), np.dtype(">i8"), torch.float32],
    "shared": [SHARED, SHARED, np.ones(2)],
    "python's times": [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(1)],
    "sets": {1, "a", (2, 3), np.int64(7)},
}


def assert_alike(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (one.flags.c_contiguous, one.flags.f_contiguous) == (other.flags.c_contiguous, other.flags.f_contiguous)
        assert other.flags.writeable
        if one.dtype == object:
            assert_alike(one.tolist(), other.tolist())
        else:
            assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_alike(list(one.values()), list(other.values()))
        assert getattr(one, "default_factory", 0) == getattr(other, "default_factory", 0)
    elif isinstance(one, list | tuple | collections.deque):
        assert len(one) == len(other)
        assert getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    elif isinstance(one, set | frozenset):  # unordered
        assert {(type(each), each) for each in one} == {(type(each), each) for each in other}
    elif isinstance(one, argparse.Namespace | types.SimpleNamespace):
        assert_alike(vars(one), vars(other))
    else:
        assert repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_plain_values_need_no_safe_globals(value: Any) -> None:
    assert_alike(value, decode_object("k", encode_object("k", value)))


def test_a_bytes_file_keeps_its_position() -> None:
    file = io.BytesIO(b"hello")
    file.seek(2)
    again = decode_object("k", encode_object("k", [file]))[0]
    assert (again.read(), again.getvalue()) == (b"llo", b"hello")


def test_shared_values_stay_shared() -> None:
    one, other, _ = decode_object("k", encode_object("k", VALUES["shared"]))
    assert one is other


def test_the_classes_that_a_refusal_names_suffice() -> None:
    value = [Config(np.float64(0.5), Path("x")), Names(["a"]), Slotted()]
    value[1].origin = "here"
    blob = encode_object("k", value)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="could run code") as caught:
        decode_object("k", blob)
    for kind in (Config, Names, Slotted):
        assert f"{kind.__module__}.{kind.__qualname__}" in str(caught.value)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"safe_globals=\[[\w.]*Slotted\] as well"):
        decode_object("k", blob, safe_globals=[Config, Names])
    config, names, slotted = decode_object("k", blob, safe_globals=[Config, Names, Slotted])
    assert config == value[0]
    assert (names, names.origin, slotted.b) == (["a"], "here", 2)


def test_a_pickled_module_is_not_reported_as_damaged() -> None:
    blob = encode_object("k", torch.nn.Linear(2, 2))
    with pytest.raises(
        aiockpt.UnsafeCheckpointError, match=r"needs torch\.nn\.modules\.linear\.Linear, which could run"
    ) as caught:
        decode_object("k", blob)
    assert "damaged" not in str(caught.value)
    again = decode_object("k", blob, safe_globals=[torch.nn.Linear])
    assert again.in_features == 2


def test_lack_of_memory_is_not_reported_as_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = encode_object("k", torch.eye(3).to_sparse())

    def full(*_args: object, **_options: object) -> object:
        raise MemoryError("no room")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(aiockpt.LoadError, match="for lack of") as caught:
        decode_object("k", blob)
    assert type(caught.value) is aiockpt.LoadError
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(aiockpt.SaveError, match="k can't be pickled now, for lack of memory or descriptors: no room"):
        encode_object("k", {1})


DTYPE = b"cnumpy\ndtype\nX\x02\x00\x00\x00%s\x89\x88\x87R"
DTYPE += b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
ARRAY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
BYTES = b"c_codecs\nencode\nX\x08\x00\x00\x0012345678X\x06\x00\x00\x00latin1\x86R"
HOSTILE = {
    "an object from bytes": b"cnumpy._core.multiarray\nscalar\n" + DTYPE % b"O8" + BYTES + b"\x86R",
    "objects from bytes": ARRAY.replace(b"C\x01b", b"X\x01\x00\x00\x00b")
    + b"(K\x01K\x01\x85"
    + DTYPE % b"O8"
    + b"\x89"
    + BYTES
    + b"tb",
    "an array of too few bytes": ARRAY.replace(b"C\x01b", b"X\x01\x00\x00\x00b")
    + b"(K\x01K\xff\x85"
    + DTYPE % b"f8"
    + b"\x89"
    + BYTES
    + b"tb",
    "a dtype that is an expression": b"cnumpy\ndtype\nX\x05\x00\x00\x00i4,i4\x89\x88\x87R",
    "a dtype without a state": b"]cnumpy\ndtype\nX\x02\x00\x00\x00f8\x89\x88\x87Ra",
    "an array without a state": b"](" + ARRAY.replace(b"C\x01b", b"X\x01\x00\x00\x00b") + b"e",
    "a state for a namespace's class": b"cargparse\nNamespace\n}b",
    "a namespace of numbers": b"cargparse\nNamespace\n)\x81}K\x01K\x01sb",
    "a path of numbers": b"cpathlib\nPosixPath\nK\x01\x85R",
    "a decimal of a tuple": b"cdecimal\nDecimal\n)\x85R",
    "a bytes file at a negative place": b"c_io\nBytesIO\n)\x81(" + BYTES + b"J\xff\xff\xff\xffNtb",
    "a factory that runs": b"ccollections\ndefaultdict\ncbuiltins\nrange\n\x85R",
    "a function that was made": b"]cnumpy._core.multiarray\nscalar\n)R)R",
    "a number that is called": b"K\x01)R",
    "a long range in a list": b"cbuiltins\nlist\ncbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R\x85R",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_that_resemble_plain_values_are_refused(name: str) -> None:
    data = b"\x80\x02" + HOSTILE[name] + b"."
    with pytest.raises(PickleError):
        build_harmless(data, {})


COLOR = f"c{__name__}\nColor\n".encode()
RED = b"X\x03\x00\x00\x00RED"
MEMBER = b"c__builtin__\ngetattr\n" + COLOR + RED + b"\x86R"
HOSTILE_MEMBERS = {
    "of a module": MEMBER.replace(COLOR, b"cos\nsystem\n"),
    "of a class that is no Enum": MEMBER.replace(b"Color", b"Config"),
    "of a plain type": MEMBER.replace(COLOR, b"cbuiltins\nstr\n").replace(RED, b"X\x05\x00\x00\x00upper"),
    "of a value": MEMBER.replace(COLOR, b"X\x01\x00\x00\x00a"),
    "of a member": MEMBER.replace(COLOR, MEMBER),
    "of no text": MEMBER.replace(RED, b"K\x01"),
    "with a default": MEMBER.replace(b"\x86R", b"N\x87R"),
    "without a name": MEMBER.replace(RED + b"\x86", b"\x85"),
    "a state for a member": MEMBER + b"}X\x07\x00\x00\x00_value_K\x05sb",
}


@pytest.mark.parametrize("name", HOSTILE_MEMBERS)
def test_only_members_of_enums_are_looked_up(name: str) -> None:
    allowed = {f"{__name__}.{each.__qualname__}": each for each in (Color, Config)}
    assert build_harmless(b"\x80\x02" + MEMBER + b".", allowed) is Color.RED
    with pytest.raises(PickleError):
        build_harmless(b"\x80\x02" + HOSTILE_MEMBERS[name] + b".", allowed)
    assert Color.RED.value == 1


@pytest.mark.parametrize("attribute", ["mro", "__class__", "__members__", "_value2member_map_", "name"])
def test_other_attributes_of_an_enum_are_refused(attribute: str) -> None:
    blob = encode_object("k", Color.RED)
    text = b"X" + len(attribute).to_bytes(4, "little") + attribute.encode()
    with pytest.raises((PickleError, UnknownMemberError)):
        build_harmless(b"\x80\x02" + MEMBER.replace(RED, text) + b".", {f"{__name__}.Color": Color})
    with pytest.raises(PickleError):
        build_harmless(b"\x80\x02" + MEMBER.replace(RED, text) + b".", {})
    assert decode_object("k", blob, member_of=Color) is Color.RED


@pytest.mark.parametrize("name", ["structured", "times", "objects", "numpy's state", "namespaces", "deques"])
def test_any_change_of_a_byte_is_refused_or_makes_a_plain_value(name: str) -> None:
    """Change bytes of the pickle itself: an attacker would recompute the CRC as well."""
    data = bytearray(pickle_of(VALUES[name]))
    chosen, refused = random.Random(5), 0
    for _ in range(300):
        at = chosen.randrange(min(len(data), 2000))
        before = data[at]
        data[at] = chosen.randrange(256)
        try:
            made = build_harmless(bytes(data), {})
        except PickleError:
            refused += 1
        else:
            assert type(made).__module__ in ("builtins", "numpy", "argparse", "collections", "types"), made
        data[at] = before
    assert refused


def test_a_seeker_that_has_found_something_forgets_what_it_had_begun() -> None:
    inner, seeker = UserDict({"w": torch.ones(1)}), TensorSeeker()
    outer = UserDict({"a": 1})
    outer["inner"] = inner
    assert seeker.finds(outer)
    assert seeker.finds(inner)
    assert not seeker.finds(UserDict({"a": 1}))
