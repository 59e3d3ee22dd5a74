"""`save(include=, exclude=)`: saving a part of a state; the rest is ignored."""

from __future__ import annotations

import re
from collections import OrderedDict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import aiockpt
from tests.examples import examples
from tests.states import assert_same, random_tensor, training_state
from tests.stock import ALONE


def numbered(seed: int = 0) -> dict[str, Any]:
    """A nested state of distinct values and of containers that names can't express."""

    def tensor(n: int) -> torch.Tensor:
        return random_tensor(torch.float32, (7, n + 1), 10 * seed + n)

    return {
        "model": OrderedDict({"a.weight": tensor(0), "a.bias": tensor(1), "b.weight": tensor(2)}),
        "ema": {"a.weight": tensor(3), "b.weight": tensor(4)},
        "optim": {"state": {0: {"m": tensor(5), "n": 3}, 1: {"m": tensor(6), "n": 4}}, "groups": [{"lr": 0.1}]},
        "pair": (tensor(7), "text", tensor(8)),
        "list": [tensor(9), {"x": [1, 2]}],
        "array": np.arange(5 + seed),
        "empty": {},
        "step": 7 + seed,
    }


def plain(value: Any) -> Any:
    """Return a state with tensors in place of its arrays, which `assert_same` can compare."""
    if isinstance(value, dict):
        return type(value)((key, plain(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return ("array", torch.from_numpy(value)) if isinstance(value, np.ndarray) else value


def _name(rule: object) -> str:
    return re.sub(r"<function .*? at 0x[0-9a-f]+>", "function", str(rule))


RULES: list[dict[str, Any]] = [
    {"include": "model"},
    {"include": ["model", "step"]},
    {"exclude": "optim"},
    {"exclude": ["optim.state", "ema.*", "pair.1"]},
    {"include": ["*.weight"], "exclude": ["ema"]},
    {"include": ["model.a.bias", "list.1", "array", "optim.state.1"]},
    {"exclude": ["optim.state.0", "list.0", "empty"]},
    {"include": lambda name, value: isinstance(value, torch.Tensor)},
    {"exclude": lambda name, value: name.startswith("model.")},
    {"include": ["model", "optim"], "exclude": lambda name, value: not isinstance(value, torch.Tensor)},
]


def leaves_of(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of a state by their names: tensors, and the largest lists without any and without dicts."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    below = {(inner := f"{name}.{key}".lstrip(".")): leaves_of(part, inner) for key, part in parts}
    leaves = {key: leaf for inner in below.values() for key, leaf in inner.items()}
    has_dicts = leaves.keys() != set(below)
    has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves.values())
    return leaves if isinstance(value, dict) or (leaves and (has_tensors or has_dicts)) else {name: value}


def is_chosen(rule: Any, name: str, leaf: Any) -> bool:
    if callable(rule):
        return bool(rule(name, leaf))
    patterns = [rule] if isinstance(rule, str) else rule
    return any(name.startswith(f"{each}.") or fnmatchcase(name, each) for each in patterns)


def kept(state: dict[str, Any], include: Any = None, exclude: Any = None) -> list[str]:
    """Return the names of the leaves that are to be saved."""
    return [
        name
        for name, leaf in leaves_of(state).items()
        if (include is None or is_chosen(include, name, leaf))
        and not (exclude is not None and is_chosen(exclude, name, leaf))
    ]


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_only_the_chosen_keys_are_saved(tmp_path: Path, rule: dict[str, Any]) -> None:
    """The loaded part equals what `keys=` loads from a checkpoint of the whole state."""
    state = numbered()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "all")
        ckpt.save(state, tmp_path / "part", **rule)
        names = kept(state, **rule)
        assert 0 < len(names) < len(leaves_of(state))
        with ckpt.open(tmp_path / "part") as reader:
            assert list(reader) == names
        part, wanted = ckpt.load(tmp_path / "part"), ckpt.load(tmp_path / "all", keys=names)
        part.pop("empty", None), wanted.pop("empty", None)  # kept by exclude=, not loaded by keys=
        assert_same(plain(part), plain(wanted))
        assert ckpt.verify(tmp_path / "part").ok
    assert_same(plain(numbered()), plain(state))


@pytest.mark.parametrize("rule", [{"include": "model"}, {"exclude": ["ema", "*.bias"]}], ids=_name)
def test_safetensors(tmp_path: Path, rule: dict[str, Any]) -> None:
    """Leaves that the format can't hold may be excluded."""
    state = {key: value for key, value in numbered().items() if key in ("model", "ema")} | {"step": 7}
    rule = rule if "include" in rule else {"exclude": [*rule["exclude"], "step"]}
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in (tmp_path / "c.safetensors", tmp_path / "d"):
            ckpt.save(state, path, format="safetensors", **rule)
            loaded = ckpt.load(path)
            assert loaded.keys() == set(kept(state, **rule))
            for name, value in loaded.items():
                assert_same(value, leaves_of(state)[name], name)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_stock_dcp_loads_a_filtered_save(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(numbered(), tmp_path / "c", include=["ema", "step"])
    state = {"ema": {"a.weight": torch.zeros(7, 4), "b.weight": torch.zeros(7, 5)}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", **ALONE)
    assert_same(state, {"ema": numbered()["ema"], "step": 7})


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_filters_may_change_from_save_to_save(tmp_path: Path, format: Any) -> None:
    """The layout of the previous save is reused only for the same leaves."""
    rules: list[dict[str, Any]] = [
        {},
        {"include": "ema"},
        {"include": "ema"},
        {"exclude": "ema"},
        {},
        {"include": "m*"},
    ]
    with aiockpt.SyncCheckpointer() as ckpt:
        for number, rule in enumerate([*rules, *rules]):
            state = {key: dict(value) for key, value in numbered(number).items() if key in ("model", "ema")}
            ckpt.save(state, tmp_path / str(number), format=format, **rule)
            assert set(leaves_of(ckpt.load(tmp_path / str(number)))) == set(kept(state, **rule))
            ckpt.load(tmp_path / str(number), target := numbered(99), keys=kept(state, **rule), strict=True)
            for name in kept(state, **rule):
                top, _, key = name.partition(".")
                assert_same(target[top][key], state[top][key], f"{number}: {name}")


def test_excluded_leaves_need_not_be_savable(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "meta": torch.empty(3, device="meta"), "bad": lambda: None, "lazy": [lambda: None]}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", exclude=["meta", "bad", "lazy"])
        assert_same(ckpt.load(tmp_path / "c"), {"w": torch.ones(3)})


def test_other_options_apply_to_the_remaining_keys(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(1 << 16), "v": torch.zeros(1 << 16)}, "optim": {"m": torch.ones(1 << 18)}}
    asked: list[str] = []

    def compress(name: str, tensor: torch.Tensor) -> str:
        asked.append(name)
        return "zstd"

    with aiockpt.SyncCheckpointer(validate="hash", writer="process") as ckpt:
        ckpt.prewarm(state)
        ckpt.save(state, tmp_path / "c", exclude="optim", compress=compress, separation_hint="model.v")
        assert asked == ["model.w", "model.v"]
        assert_same(ckpt.load(tmp_path / "c"), {"model": state["model"]})
        assert {path.name.partition("__")[0] for path in (tmp_path / "c").glob("*.distcp")} == {"", "model.v"}


def test_a_tied_tensor_is_saved_under_its_remaining_names(tmp_path: Path) -> None:
    tied = torch.arange(50_000.0)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": tied, "b": tied, "c": tied}, tmp_path / "c", exclude="a")
        loaded = ckpt.load(tmp_path / "c")
    assert list(loaded) == ["b", "c"]
    assert torch.equal(loaded["b"], tied)
    assert loaded["b"].data_ptr() == loaded["c"].data_ptr()


def test_a_filter_function_gets_the_callers_values(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "array": np.ones(3), "n": 1, "list": [1, 2]}
    seen: dict[str, Any] = {}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", include=lambda name, value: not seen.update({name: value}))
    assert seen.keys() == state.keys()
    assert all(seen[name] is state[name] for name in state)


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            {"include": ["model", "optm"]},
            "include has 'optm', which matches nothing in the state. What looks alike: 'op",
        ),
        ({"exclude": "optim.stat"}, "exclude has 'optim.stat', which matches nothing"),
        ({"exclude": ["optim.*", "*.nothing", "none"]}, r"exclude has '\*.nothing', 'none', which matches nothing"),
        ({"include": "model", "exclude": ["model.*"]}, "include and exclude leave nothing of the state to save"),
        ({"include": lambda name, value: value is None}, "leave nothing of the state to save"),
    ],
    ids=_name,
)
def test_a_filter_that_matches_nothing_is_refused_at_the_call(tmp_path: Path, rule: dict[str, Any], text: str) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(ValueError, match=text):
            ckpt.submit(numbered(), tmp_path / "c", **rule)
        assert not list(tmp_path.iterdir())
        ckpt.save(numbered(), tmp_path / "c")


@pytest.mark.parametrize("rule", [5, [5], [None], {"model": True, 3: False}], ids=_name)
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_wrong_types(tmp_path: Path, option: str, rule: Any) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(TypeError, match=f"{option} must be names and patterns"):
        ckpt.save(numbered(), tmp_path / "c", **{option: rule})


def test_a_failing_filter_function_is_reported_with_its_key(tmp_path: Path) -> None:
    def fails(name: str, value: Any) -> bool:
        return bool(value.requires_grad)  # fails for a number

    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=r"include failed for optim\.state\.0\.n: AttributeError"):
            ckpt.save(numbered(), tmp_path / "c", include=fails)
        with pytest.raises(aiockpt.SaveError, match=r"exclude failed for model\.a\.weight: RuntimeError"):
            ckpt.save(numbered(), tmp_path / "c", exclude=lambda name, value: value > 0)


def test_an_empty_container_has_a_name(tmp_path: Path) -> None:
    """One rule fits a new optimizer, whose state is empty, and one that has stepped."""
    model = torch.nn.Linear(3, 3)
    optim = torch.optim.AdamW(model.parameters())
    with aiockpt.SyncCheckpointer() as ckpt:
        for number in range(2):
            ckpt.save({"model": model, "optim": optim}, tmp_path / str(number), exclude=["optim.state"])
            assert not ckpt.load(tmp_path / str(number))["optim"].get("state")
            model(torch.ones(1, 3)).sum().backward()
            optim.step()


B = {"x": 1, "in": {}, "od": OrderedDict(y={})}
HOLLOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"exclude": "w"}, {"a": {}, "b": B, "c": [{}], "d": ({}, 2)}),
    ({"exclude": ["w", "a", "c"]}, {"b": B, "d": ({}, 2)}),
    ({"exclude": ["b.x", "*.od"]}, {"w": 5, "a": {}, "b": {"in": {}}, "c": [{}], "d": ({}, 2)}),
    ({"include": ["w", "a"]}, {"w": 5, "a": {}}),
    ({"include": ["w", "c", "b.od.y"]}, {"w": 5, "b": {"od": OrderedDict(y={})}, "c": [{}]}),
    ({"exclude": lambda name, _: name == "w"}, {"b": B, "d": ({}, 2)}),
]


@pytest.mark.parametrize(("rule", "wanted"), HOLLOW, ids=_name)
def test_empty_containers_are_kept_unless_they_are_left_out(
    rule: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": 5, "a": {}, "b": B, "c": [{}], "d": ({}, 2)}, tmp_path / "c", **rule)
        assert_same(ckpt.load(tmp_path / "c"), wanted)


class Disabled:
    """An object whose state dict is empty, such as a GradScaler that is not enabled."""

    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.mark.parametrize("rule", [{"exclude": "optim"}, {"include": ["model", "scaler"]}], ids=_name)
def test_an_object_with_an_empty_state_loads(rule: dict[str, Any], tmp_path: Path) -> None:
    scaler = Disabled()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"model": torch.ones(1), "scaler": scaler, "optim": 1}, tmp_path / "c", **rule)
        ckpt.load(tmp_path / "c", {"model": torch.zeros(1), "scaler": scaler})
    assert scaler.loaded == {}


# --- loading ------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen layer with tied weights, and a small trained one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(20, 20)
        self.head = torch.nn.Linear(20, 20)
        self.head.weight = self.base.weight
        self.lora = torch.nn.Linear(20, 2)
        self.norm = torch.nn.BatchNorm1d(20)
        for parameter in (self.base.weight, self.base.bias, self.head.bias):
            parameter.requires_grad_(False)


def test_saving_only_the_trained_parameters(tmp_path: Path) -> None:
    model, other = Adapted(1), Adapted(2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    trained = [f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad]
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"model": model, "step": 3}, tmp_path / "c", include=[*trained, "step"])
        with pytest.raises(aiockpt.MissingKeysError, match=r"lacks 7 of the keys .*model\.base\.weight") as caught:
            ckpt.load(tmp_path / "c", {"model": other, "step": 0})
        text = "Pass strict=False to leave missing keys as they are, or keys= to load a part: a save with include= or"
        assert text in str(caught.value)
        assert_same({**other.state_dict()}, before)
        with pytest.warns(aiockpt.MissingKeysWarning):
            ckpt.load(tmp_path / "c", state := {"model": other, "step": 0}, strict=False)
        assert state["step"] == 3
        wanted = before | {name: value for name, value in model.state_dict().items() if f"model.{name}" in trained}
        assert_same({**other.state_dict()}, wanted)
        ckpt.load(tmp_path / "c", state := {"model": {**Adapted(3).state_dict()}, "step": 0}, keys=trained)
        assert torch.equal(state["model"]["lora.weight"], model.lora.weight)


def test_without_the_optimizer(tmp_path: Path) -> None:
    state = training_state()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", exclude=["optim"])
        with pytest.raises(aiockpt.MissingKeysError, match=r"lacks 1 of the keys asked for: optim\. Pass strict=False"):
            ckpt.load(tmp_path / "c", {"model": model, "optim": optim})
        ckpt.load(tmp_path / "c", {"model": model, "optim": optim}, keys=["model"])
        assert_same({**model.state_dict()}, {**state["model"]})
        with pytest.warns(aiockpt.MissingKeysWarning, match="optim"):
            ckpt.load(tmp_path / "c", {"model": model, "optim": optim}, strict=False)
    assert (optim.param_groups[0]["lr"], len(optim.state)) == (0.5, 0)


# --- any state ----------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b", "weight", "0", 0, 1, (1, 2)])
LEAVES = st.one_of(
    st.integers(0, 9),
    st.sampled_from(["", "text", None, 0.5]),
    st.integers(0, 99).map(lambda seed: random_tensor(torch.int16, (3,), seed)),
    st.integers(0, 99).map(lambda seed: np.arange(seed, seed + 3)),
)
STATES = st.dictionaries(
    st.sampled_from("xyz"),
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("pq"), inner, max_size=2).map(OrderedDict),
        ),
        max_leaves=12,
    ),
    min_size=1,
)


def filled(value: Any) -> Any:
    """Return a state without empty containers; None if nothing is left."""
    if isinstance(value, dict):
        return {key: part for key, each in value.items() if (part := filled(each)) is not None} or None
    if isinstance(value, list | tuple):
        parts = [filled(each) for each in value]
        while parts and parts[-1] is None:
            parts.pop()
        return parts or None
    return value


@pytest.mark.slow
@given(data=st.data(), state=STATES)
@examples(60, [HealthCheck.function_scoped_fixture])
def test_any_part_of_any_state(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, state: Any) -> None:
    """A filtered save holds what `keys=` loads from a checkpoint of the whole state."""
    tmp_path = tmp_path_factory.mktemp("c")
    try:
        aiockpt.save(state, tmp_path / "all")
    except aiockpt.SaveError:  # two keys with the same name
        return
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(tmp_path / "all") as reader:
        names = list(reader)
    if not names:
        return
    subset = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    is_include = data.draw(st.booleans())
    wanted = [name for name in names if (name in subset) == is_include]
    if not wanted:
        return
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "part", **{"include" if is_include else "exclude": subset})
        with ckpt.open(tmp_path / "part") as reader:
            assert list(reader) == [name for name in names if name in wanted]
        part, other = ckpt.load(tmp_path / "part"), ckpt.load(tmp_path / "all", keys=wanted)
        if is_include:
            assert_same(plain(part), plain(other))
        else:  # exclude= keeps the empty containers that it does not name
            assert_same(filled(plain(part)), filled(plain(other)))
