"""Values that need permission to load: the save warns of them and names the `safe_globals` to pass."""

from __future__ import annotations

import argparse
import asyncio
import collections
import enum
import functools
import io
import pathlib
import random
import types
import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp import FileSystemWriter
from tests.states import assert_same
from tests.stock import ALONE

NAME = __name__


class Config:
    def __init__(self, lr: Any = 0.1) -> None:
        self.lr = lr

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lr!r})"


class Schedule(Config):
    pass


class Chosen:
    """Pickled as a call of a builtin function, which `safe_globals` can't allow."""

    def __reduce__(self) -> Any:
        return getattr, ("abc", "upper")


def scale(value: float) -> float:
    return 2 * value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "kind", "names"),
    [
        (Config(), f"{NAME}.Config", [Config]),
        ([1, Config(Schedule())], "list", [Config, Schedule]),
        (collections.deque([Config()]), "collections.deque", [Config]),
        (Config(torch.ones(3)), f"{NAME}.Config", [Config]),
        (Config(np.arange(3)), f"{NAME}.Config", [Config]),
        (Config([0.5] * 200_000), f"{NAME}.Config", [Config]),
        (functools.partial(scale, 2.0), "functools.partial", [functools.partial, scale]),
    ],
    ids=["object", "nested", "in-a-deque", "with-a-tensor", "with-an-array", "large", "function"],
)
def test_the_named_safe_globals_suffice(value: Any, kind: str, names: list, ckpt, tmp_path: Path) -> None:
    with pytest.warns(aiockpt.SafeGlobalsWarning) as seen:
        ckpt.save({"optim": {"cfg": value, "lr": 0.1}}, tmp_path / "c")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    text = str(seen[0].message)
    listed = [f"{each.__module__}.{each.__qualname__}" for each in names]
    assert sorted(seen[0].message.names) == sorted(listed)
    assert text.startswith("optim.cfg")
    assert f" is a {kind}: loading it will need safe_globals=[" in text
    with pytest.raises(aiockpt.UnsafeCheckpointError):
        ckpt.load(tmp_path / "c")
    assert repr(ckpt.load(tmp_path / "c", safe_globals=names)["optim"]["cfg"]) == repr(value)


def test_each_set_of_classes_is_warned_of_once(ckpt, tmp_path: Path) -> None:
    with pytest.warns(aiockpt.SafeGlobalsWarning) as seen:
        ckpt.save({"a": Config(), "b": Config(2), "c": Schedule()}, tmp_path / "1")
    both = f"a is a {NAME}.Config, c is a {NAME}.Schedule: loading them will need "
    assert str(seen[0].message) == f"{both}safe_globals=[{NAME}.Config, {NAME}.Schedule]"
    ckpt.save({"a": Config(3), "z": Schedule()}, tmp_path / "2")
    with pytest.warns(aiockpt.SafeGlobalsWarning, match=r"z is a .*Config: loading it will need"):
        ckpt.save({"a": Config(3), "z": Config(Schedule())}, tmp_path / "3")


def test_values_that_safe_globals_can_not_allow(ckpt, tmp_path: Path) -> None:
    with pytest.warns(aiockpt.SafeGlobalsWarning, match=r"x is a .*Chosen: loading it will need trust=True"):
        ckpt.save({"x": Chosen()}, tmp_path / "c")
    assert ckpt.load(tmp_path / "c", trust=True)["x"]() == "ABC"


def test_a_warning_raised_as_an_error_leaves_nothing(ckpt, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(aiockpt.SafeGlobalsWarning, match="cfg is a"):
                ckpt.save({"cfg": Config(), "x": torch.ones(9)}, tmp_path / "c")
        assert list(tmp_path.iterdir()) == []
        ckpt.save({"x": torch.ones(9)}, tmp_path / "c")
    assert_same({"x": torch.ones(9)}, ckpt.load(tmp_path / "c"))


def test_warnings_of_the_async_facade_point_at_the_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with aiockpt.AsyncCheckpointer() as ckpt:
            with pytest.warns(aiockpt.SafeGlobalsWarning) as seen:
                save = ckpt.save({"cfg": Config()}, tmp_path / "c")
            assert seen[0].filename == __file__
            await save.written

    asyncio.run(main())


def test_plain_values_are_not_warned_of(ckpt, tmp_path: Path) -> None:
    state = {
        "scalars": [np.float64(1.5), np.int32(2), np.datetime64("2026-01-01")],
        "array": np.arange(12.0).reshape(3, 4),
        "objects": np.array([1, "a"], dtype=object),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "path": pathlib.Path("a/b"),
        "decimal": Decimal("1.5"),
        "deque": collections.deque([1, 2], maxlen=3),
        "counter": collections.Counter("abc"),
        "set": {1, 2},
        "args": argparse.Namespace(lr=0.1, where=pathlib.PurePosixPath("x")),
        "simple": types.SimpleNamespace(a=[1]),
        "bytes": io.BytesIO(b"abc"),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "generator": torch.Generator().get_state(),
        "sparse": torch.eye(3).to_sparse(),
        "buffer": {1: torch.ones(2), 2: [torch.nn.Parameter(torch.ones(3)), argparse.Namespace(x=torch.ones(1))]},
    }
    ckpt.save(state, tmp_path / "c")
    assert list(ckpt.load(tmp_path / "c")) == list(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_items_of_stock_dcp_are_not_warned_of(tmp_path: Path) -> None:
    dcp.save({"cfg": Config()}, storage_writer=FileSystemWriter(tmp_path / "c"), **ALONE)


class Color(enum.Enum):
    RED = 1
    GREEN = 2

    @classmethod
    def first(cls) -> Color:
        return cls.RED


class Outer:
    class Color(enum.Enum):
        RED = 1

    @classmethod
    def make(cls) -> Outer:
        return cls()


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Kind(enum.StrEnum):
    ADAM = "adam"
    SGD = "sgd"


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


ENUMS = [Color, Level, Kind, Mode]
MEMBERS = [Color.GREEN, Level.HIGH, Kind.SGD, Mode.WRITE, Mode.READ | Mode.WRITE]


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
def test_members_of_enums_need_their_class(member: enum.Enum, ckpt, tmp_path: Path) -> None:
    name = f"{NAME}.{type(member).__qualname__}"
    with pytest.warns(aiockpt.SafeGlobalsWarning, match="x is a") as seen:
        ckpt.save({"x": member}, tmp_path / "c")
    assert seen[0].message.names == (name,)
    assert f"safe_globals=[{name}]" in str(seen[0].message)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=rf"x needs {name}, .*safe_globals=\[{name}\]"):
        ckpt.load(tmp_path / "c")
    assert ckpt.load(tmp_path / "c", safe_globals=[type(member)])["x"] is member
    assert ckpt.load(tmp_path / "c", trust=True)["x"] is member


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_members_by_name_are_read_by_stock_dcp(ckpt, tmp_path: Path) -> None:
    ckpt.save({"x": Color.GREEN, "many": list(MEMBERS)}, tmp_path / "c")
    target: dict[str, Any] = {"x": Color.RED, "many": []}
    dcp.load(target, checkpoint_id=tmp_path / "c", **ALONE)
    assert target == {"x": Color.GREEN, "many": MEMBERS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_nested_members_come_back_by_name(monkeypatch: pytest.MonkeyPatch, ckpt, tmp_path: Path) -> None:
    values = {
        "alone": Color.GREEN,
        "many": [Color.RED, {Color.GREEN}],
        "in": Config(Color.GREEN),
        "large": [Color.GREEN, [0.5] * 200_000],
        "dtype": (torch.float32, Color.RED),
    }
    ckpt.save(values, tmp_path / "c")
    renumbered = enum.Enum("Color", {"GREEN": 1, "BLUE": 2, "RED": 3}, module=NAME)
    with pytest.raises(aiockpt.UnsafeCheckpointError):
        ckpt.load(tmp_path / "c", safe_globals=[Config])
    loaded = ckpt.load(tmp_path / "c", safe_globals=[Config, renumbered])
    assert loaded["alone"] is renumbered.GREEN
    assert loaded["many"] == [renumbered.RED, {renumbered.GREEN}]
    assert loaded["in"].lr is loaded["large"][0] is renumbered.GREEN
    assert loaded["dtype"] == (torch.float32, renumbered.RED)
    fewer = enum.Enum("Color", {"RED": 1, "BLUE": 2}, module=NAME)
    with pytest.raises(aiockpt.LoadError, match=f"alone can't be made: {NAME}.Color has no member 'GREEN'"):
        ckpt.load(tmp_path / "c", keys=["alone"], safe_globals=[fewer])


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_members_beside_tensors(ckpt, tmp_path: Path) -> None:
    ckpt.save({"x": Config([torch.ones(2), Color.GREEN, Color.RED])}, tmp_path / "c")
    _, *members = ckpt.load(tmp_path / "c", safe_globals=[Config, Color])["x"].lr
    assert members == [Color.GREEN, Color.RED]


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_a_class_registered_with_torch_is_allowed(ckpt, tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Color]):
        ckpt.save({"x": Color.GREEN}, tmp_path / "c")
        assert ckpt.load(tmp_path / "c") == {"x": Color.GREEN}


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_a_member_in_the_target_is_permission_for_its_key(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": {"x": Color.GREEN}, "y": Color.GREEN, "t": torch.ones(2)}, tmp_path / "c")
    target: dict[str, Any] = {"a": {"x": Color.RED}, "t": torch.zeros(2)}
    ckpt.load(tmp_path / "c", target)
    assert target["a"]["x"] is Color.GREEN
    for other in (None, Level.LOW, 1):
        target = {"a": {"x": Color.RED}, "y": other}
        with pytest.raises(aiockpt.UnsafeCheckpointError, match=f"y needs {NAME}.Color, "):
            ckpt.load(tmp_path / "c", target)
        assert target == {"a": {"x": Color.RED}, "y": other}


@pytest.mark.parametrize("value", [Color.first, Outer.make, Outer.Color.RED, str.upper], ids=repr)
def test_other_attributes_of_classes_need_trust(value: Any, ckpt, tmp_path: Path) -> None:
    with pytest.warns(aiockpt.SafeGlobalsWarning, match="loading it will need trust=True"):
        ckpt.save({"x": value}, tmp_path / "c")
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"needs .*builtins.getattr.* pass trust=True"):
        ckpt.load(tmp_path / "c", safe_globals=[Color, Outer])
    assert ckpt.load(tmp_path / "c", trust=True) == {"x": value}
