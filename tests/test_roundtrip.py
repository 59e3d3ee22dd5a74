"""Loaded states equal the saved ones, through our loader and through torch's."""

from __future__ import annotations

import io
import json
import tempfile
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import aiockpt
from aiockpt.planning import planner
from tests.examples import examples
from tests.states import assert_same, random_tensor, raw_bytes, storable_dtypes, training_state
from tests.stock import ALONE, PAYLOAD_OFFSET

# torch's DCP warns that it runs without a process group, which is what we want here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_DTYPES = storable_dtypes()


def _shapes():
    return st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def _tensors(draw):
    base = random_tensor(draw(st.sampled_from(_DTYPES)), draw(_shapes()), draw(st.integers(0, 2**31)))
    form = draw(st.sampled_from(["plain", "permuted", "strided", "expanded", "view", "parameter", "conj"]))
    if form == "permuted" and base.dim() > 1:
        return base.permute(draw(st.permutations(range(base.dim()))))
    if form == "strided" and base.dim():
        return base[:: draw(st.integers(1, 3))]
    if form == "expanded":
        return base.unsqueeze(0).expand(3, *base.shape)
    if form == "view" and base.dim():
        return base[draw(st.integers(0, base.shape[0])) :]
    if form == "parameter" and base.is_floating_point():
        return torch.nn.Parameter(base, requires_grad=draw(st.booleans()))
    # torch 2.14 makes conjugated views of bcomplex32, and can't copy them.
    if form == "conj" and base.is_complex() and base.dtype is not getattr(torch, "bcomplex32", None):
        return base.conj()
    return base


_OBJECTS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.lists(st.integers(), max_size=3),
    st.tuples(st.floats(0, 1), st.text(max_size=3)),
    st.just(torch.Size([2, 3])),
    st.just(torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.5, -2.5], (2, 2), check_invariants=True)),
)
_PLAIN_KEYS = st.one_of(st.integers(-3, 99), st.floats(allow_nan=False), st.booleans(), st.none())
_KEYS = st.one_of(
    _PLAIN_KEYS,
    st.lists(_PLAIN_KEYS, max_size=3).map(tuple),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=4),
)


def _states(leaves):
    nested = st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(_KEYS, children, max_size=4),
            st.dictionaries(_KEYS, children, max_size=4).map(OrderedDict),
        ),
        max_leaves=12,
    )
    return st.dictionaries(_KEYS, nested, max_size=4).filter(_distinct)


def _distinct(state) -> bool:
    """Return whether no dict has two keys with the same text, such as a number and its text."""
    if isinstance(state, dict):
        return len(set(map(str, state))) == len(state) and all(map(_distinct, state.values()))
    return all(map(_distinct, state)) if isinstance(state, list | tuple) else True


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.slow
@examples(150, HealthCheck)
@given(state=_states(st.one_of(_tensors(), _OBJECTS)))
def test_any_state_loads_unchanged(state, folder: Path) -> None:
    path = folder / uuid.uuid4().hex
    with aiockpt.SyncCheckpointer(chunk_bytes=4096, staging_bytes=8192) as ckpt:
        ckpt.save(state, path)
        assert_same(state, ckpt.load(path))


_ODD_KEYS = {1.5: 1, True: torch.ones(2), None: [torch.zeros(1), 3], (1, "x", None): {float("inf"): 4, 2: 5, "2.0": 6}}


def test_keys_that_are_not_strings(folder: Path) -> None:
    """Every way to load restores them; stock DCP sees their text."""
    path = folder / "odd"
    nan = float("nan")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"d": _ODD_KEYS, "n": {nan: 7}}, path)
        assert_same(_ODD_KEYS, ckpt.load(path, keys=["d"])["d"])
        ((key, value),) = ckpt.load(path)["n"].items()
        assert key != key
        assert value == 7
        assert_same({True: torch.ones(2)}, ckpt.load(path, keys=["d.True"])["d"])
        target = {"d": {1.5: 0, True: torch.zeros(2), (1, "x", None): {float("inf"): 0}}, "n": {nan: 0}}
        ones = target["d"][True]
        ckpt.load(path, target)
        assert target["n"][nan] == 7
        assert_same({1.5: 1, True: torch.ones(2), (1, "x", None): {float("inf"): 4}}, target["d"])
        assert target["d"][True] is ones
        with ckpt.open(path) as reader:
            assert reader.read("d.(1, 'x', None).inf") == 4
    stock = {"d": {"1.5": 0, "True": torch.zeros(2)}}
    dcp.load(stock, checkpoint_id=path, **ALONE)
    assert_same({"1.5": 1, "True": torch.ones(2)}, stock["d"])


def test_counters_and_defaultdicts_are_containers(folder: Path) -> None:
    path = folder / "kinds"
    state = {
        "seen": Counter("aab"),
        "lists": defaultdict(list, {1: [torch.ones(1)], 2.5: [4]}),
        "nested": defaultdict(Counter, x=Counter("x")),
        "none": defaultdict(None, a=1),
        "empty": defaultdict(int),
        "other": defaultdict(lambda: 5, a=1),
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)
        loaded = ckpt.load(path)
    assert type(loaded["other"]) is dict
    expected = {key: value for key, value in state.items() if key != "other"}
    assert_same(expected, {key: loaded[key] for key in expected})
    factories = [loaded[key].default_factory for key in ("lists", "nested", "none", "empty")]
    assert factories == [list, Counter, None, int]


def test_metadata_of_a_run_that_diverged(folder: Path) -> None:
    """JSON has no nan, but the metadata is read as it was given; the file is strict JSON."""
    path = folder / "facts"
    given = {
        "loss": float("nan"),
        "best": [float("inf"), {"worst": -float("inf")}],
        "numpy": [np.float32(0.5), np.int64(3), np.bool_(True), np.array(7), np.float64("nan"), np.longdouble(2)],
        "torch": [torch.tensor(1.5, requires_grad=True), torch.tensor(3), torch.tensor(True)],
        "where": Path("/a/b"),
        "text": "nan",
    }
    expected = {
        "best": [float("inf"), {"worst": -float("inf")}],
        "torch": [1.5, 3, True],
        "where": "/a/b",
        "text": "nan",
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": 1}, path, metadata=given)
        ckpt.save({"x": torch.ones(1)}, folder / "facts.safetensors", format="safetensors", metadata=given)
        with ckpt.open(path) as reader:
            found = dict(reader.metadata)
    assert repr(found.pop("loss")) == "nan"
    assert repr(found.pop("numpy")) == "[0.5, 3, True, 7, nan, 2.0]"
    assert_same(expected, {key: found[key] for key in expected})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (path / ".aiockpt.json").read_text()
    assert json.loads(text, parse_constant=refuse)["metadata"]["loss"] == {"$float": "nan"}


@pytest.mark.slow
def test_thousands_of_numbers_are_read_without_torch_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.load`` would take most of a millisecond for each number."""
    path, stock = folder / "numbers", folder / "stock_numbers"
    values = [*range(5000), 2**70, -1, -(2**31), 0.5, float("-inf"), True, False, None, "", "x" * 300, "\u00e9\ud800"]
    state = {"d": {f"k{n}": value for n, value in enumerate(values)}}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, path)
        dcp.save({"d": dict(list(state["d"].items())[-300:])}, checkpoint_id=stock, **ALONE)

        def refuse(*_args: object, **_options: object) -> object:
            raise AssertionError("torch.load was called")

        monkeypatch.setattr(torch, "load", refuse)
        assert_same(state, ckpt.load(path))
        assert_same(list(state["d"].values())[-300:], list(ckpt.load(stock)["d"].values()))
        assert ckpt.verify(path).ok
    monkeypatch.undo()
    target = {"d": dict.fromkeys(state["d"], 0)}
    dcp.load(target, checkpoint_id=path, **ALONE)
    assert_same(state, target)


# Torch's own converter fails on lists of lists and on empty containers.
_STOCK_STATES = st.recursive(
    st.one_of(_tensors(), st.lists(_tensors(), min_size=1, max_size=3), st.integers(), st.text(max_size=5)),
    lambda children: st.dictionaries(st.text("abcxyz", min_size=1, max_size=3), children, min_size=1, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@examples(40, HealthCheck)
@given(state=_STOCK_STATES)
def test_checkpoints_of_stock_dcp_load(state, folder: Path) -> None:
    path = folder / uuid.uuid4().hex
    state = {"wrapped": state, "anchor": torch.arange(3)}
    dcp.save(state, checkpoint_id=path, **ALONE)
    theirs = folder / f"{uuid.uuid4().hex}.pt"
    dcp_to_torch_save(path, theirs)
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(torch.load(theirs, weights_only=False), ckpt.load(path))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_both_ways(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {
        "vector": random_tensor(dtype, (37,), 1),
        "matrix": random_tensor(dtype, (5, 7), 2),
        "transposed": random_tensor(dtype, (5, 7), 3).t(),
        "scalar": random_tensor(dtype, (), 4),
        "empty": random_tensor(dtype, (0, 3), 5),
    }
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "ours")
        dcp.save(state, checkpoint_id=tmp_path / "stock", **ALONE)
        for path in (tmp_path / "ours", tmp_path / "stock"):
            loaded = ckpt.load(path)
            assert_same(state, loaded)
            assert loaded["transposed"].stride() == (1, 7)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(target, checkpoint_id=tmp_path / "ours", **ALONE)
    assert_same(state, target)


def test_stock_tools_read_a_training_state(tmp_path: Path) -> None:
    state = training_state()
    state.pop("nested")  # its tuple of tensors is one object to DCP
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "ours")
    target = training_state(seed=1)
    target.pop("nested")
    target["step"] = 0
    dcp.load(target, checkpoint_id=tmp_path / "ours", **ALONE)
    assert_same(state, target)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=False)
    assert_same(state["model"]["0.weight"], converted["model"]["0.weight"])
    assert converted["optim"]["param_groups"][0]["lr"] == state["optim"]["param_groups"][0]["lr"]


def test_every_item_is_a_torch_save_file(tmp_path: Path) -> None:
    """torch.load and unzip read the bytes of one item, CRCs included."""
    import zipfile

    from aiockpt.format.dcp.metadata import decode_metadata
    from aiockpt.format.index import ObjectEntry

    state = training_state()
    state["big"] = torch.arange(1 << 19, dtype=torch.int32)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
    index = decode_metadata((tmp_path / "c" / ".metadata").read_bytes())
    assert len(index.entries) > 30
    for name, entry in index.entries.items():
        place = entry.place if isinstance(entry, ObjectEntry) else entry.chunks[0].place
        with open(tmp_path / "c" / place.file, "rb") as file:
            file.seek(place.offset)
            blob = file.read(place.length)
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            assert archive.testzip() is None, name
        value = torch.load(io.BytesIO(blob), weights_only=True)
        if not isinstance(entry, ObjectEntry):
            assert value.shape == torch.Size(entry.shape)
    large = next(e for n, e in index.entries.items() if n == "big")
    assert (large.chunks[0].place.offset + PAYLOAD_OFFSET) % 4096 == 0


def test_training_state_resumes_exactly(tmp_path: Path) -> None:
    state = training_state()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", metadata={"step": 2})
        loaded = ckpt.load(tmp_path / "c")
    assert_same(state, loaded)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert isinstance(loaded["model"], OrderedDict)


def test_strides_and_views(tmp_path: Path) -> None:
    base = torch.arange(1 << 18, dtype=torch.float64).reshape(64, 64, 64)
    state = {
        "channels_last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "permuted": base.permute(2, 0, 1),
        "every_second": base[:, ::2, 1::3],
        "one_row_of_many": base[3],
        "expanded": torch.arange(5).expand(1000, 5),
        "negative": torch.randn(400, 200, dtype=torch.complex64).conj().imag,
        "diagonal": torch.arange(90_000).reshape(300, 300).diagonal(),
    }
    assert state["negative"].is_neg()
    with aiockpt.SyncCheckpointer(chunk_bytes=4096, staging_bytes=16384) as ckpt:
        result = ckpt.save(state, tmp_path / "c")
        loaded = ckpt.load(tmp_path / "c")
    assert_same(state, loaded)
    for name in ("channels_last", "permuted", "one_row_of_many"):
        assert loaded[name].stride() == state[name].stride(), name
    # Only the elements of the views are stored.
    assert result.tensor_bytes == sum(t.numel() * t.itemsize for t in state.values())


def test_tied_tensors_are_stored_once_and_loaded_tied(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(1000, 64)
    head = torch.nn.Linear(64, 1000, bias=False)
    head.weight = embedding.weight
    state = {"embedding": embedding.state_dict(), "head": head.state_dict(), "part": embedding.weight[10:20]}
    with aiockpt.SyncCheckpointer() as ckpt:
        result = ckpt.save(state, tmp_path / "c")
        loaded = ckpt.load(tmp_path / "c")
    assert result.tensor_bytes == embedding.weight.nbytes + 10 * 64 * 4
    assert loaded["embedding"]["weight"].data_ptr() == loaded["head"]["weight"].data_ptr()
    assert loaded["part"].data_ptr() != loaded["embedding"]["weight"].data_ptr()
    assert_same(state["part"], loaded["part"])
    target = {"embedding": {"weight": torch.zeros(1000, 64)}, "head": {"weight": torch.zeros(1000, 64)}}
    dcp.load(target, checkpoint_id=tmp_path / "c", **ALONE)
    assert (
        raw_bytes(target["head"]["weight"]) == raw_bytes(embedding.weight) == raw_bytes(target["embedding"]["weight"])
    )


def test_tensors_that_are_no_longer_tied_are_both_stored(tmp_path: Path) -> None:
    shared = torch.arange(100_000)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": shared, "b": shared}, tmp_path / "1")
        other = shared + 7
        ckpt.save({"a": shared, "b": other}, tmp_path / "2")
        assert_same({"a": shared, "b": other}, ckpt.load(tmp_path / "2"))
        ckpt.save({"a": shared, "b": shared}, tmp_path / "3")
        assert_same({"a": shared, "b": shared}, ckpt.load(tmp_path / "3"))


@pytest.mark.parametrize("checked_ahead", [True, False])
def test_the_plan_is_remade_when_the_layout_of_a_tensor_changes(
    checked_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same names, other shapes, strides or dtypes: the cached layout is refused, early or late in the save."""
    if not checked_ahead:
        monkeypatch.setattr(planner, "CHECKED_AHEAD", 0)
    states = [
        {"w": torch.arange(60_000).reshape(300, 200), "s": 1},
        {"w": torch.arange(60_000).reshape(200, 300), "s": 10**60},
        {"w": torch.arange(60_000).reshape(300, 200).t(), "s": "x" * 5000},
        {"w": torch.arange(60_000, dtype=torch.float64).reshape(200, 300), "s": None},
        {"w": torch.arange(59_999), "s": 1},
        {"w": torch.randn(50_000, dtype=torch.complex64), "s": 1},
        {"w": torch.randn(50_000, dtype=torch.complex64).conj(), "s": 1},
        {"w": torch.randn(50, dtype=torch.complex64), "s": 1},
        {"w": torch.randn(50, dtype=torch.complex64).conj(), "s": 1},
        {"w": torch.randn(50, dtype=torch.complex64).conj().imag, "s": 1},
        {"w": torch.sparse_coo_tensor([[1]], [2.0], (4,), check_invariants=True), "s": 1},
        {"w": torch.arange(59_999), "s": 1},
    ]
    with aiockpt.SyncCheckpointer(staging_bytes=1 << 16, chunk_bytes=1 << 16, save_timeout=60) as ckpt:
        for number, state in enumerate(states):
            ckpt.save(state, tmp_path / str(number))
            loaded = ckpt.load(tmp_path / str(number))
            assert_same(state, loaded)
            if state["w"].layout is torch.strided and state["w"].is_contiguous():
                assert loaded["w"].stride() == state["w"].stride()


def test_unusual_tensors_are_stored_as_objects(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(5, 5), 0.1, 3, torch.qint8)
    state = {
        "sparse": torch.randn(4, 4).relu().to_sparse(),
        "csr": torch.eye(5).to_sparse_csr(),
        "quantized": quantized,
        "counter": {"list": [1, 2, 3], "none": None},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, tmp_path / "c")
            loaded = ckpt.load(tmp_path / "c")
    assert torch.equal(loaded["sparse"].to_dense(), state["sparse"].to_dense())
    assert loaded["csr"].layout is torch.sparse_csr
    assert torch.equal(loaded["quantized"].int_repr(), quantized.int_repr())
    assert loaded["counter"] == state["counter"]


def test_empty_state(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({}, tmp_path / "c")
        assert ckpt.load(tmp_path / "c") == {}


@pytest.mark.slow
def test_many_tiny_tensors(tmp_path: Path) -> None:
    state = {f"t{i}": torch.tensor([i, i * i, -i]) for i in range(5000)}
    with aiockpt.SyncCheckpointer(chunk_bytes=65536) as ckpt:
        for name in ("first", "second"):
            ckpt.save(state, tmp_path / name)
            assert_same(state, ckpt.load(tmp_path / name))


@pytest.mark.slow
@pytest.mark.parametrize("staging_bytes", [4096, 10_000, 65536, 1 << 20])
def test_pool_smaller_than_the_state(staging_bytes: int, tmp_path: Path) -> None:
    """Pools smaller than one tensor, down to one chunk."""
    state = {
        "big": torch.arange(300_001),
        "b2": torch.arange(200_003, dtype=torch.int16),
        "s": torch.ones(()),
        "o": "x",
    }
    with aiockpt.SyncCheckpointer(staging_bytes=staging_bytes) as ckpt:
        ckpt.save(state, tmp_path / "c")
        assert ckpt.statistics().staging_bytes <= staging_bytes
        assert_same(state, ckpt.load(tmp_path / "c"))


def test_conjugated_and_negated_views_are_not_tied(tmp_path: Path) -> None:
    x = torch.randn(400, 400, dtype=torch.complex64)
    state = {"a": x[:, ::2], "b": x[:, ::2].conj(), "i": x.imag, "n": x.conj().imag}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
        assert_same(state, ckpt.load(tmp_path / "c"))


@pytest.mark.slow
@pytest.mark.parametrize("checked_ahead", [True, False])
def test_empty_and_tied_tensors_whose_layout_changes(
    checked_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked_ahead:
        monkeypatch.setattr(planner, "CHECKED_AHEAD", 0)
    w = torch.arange(50_000.0)
    states = [
        {"a": w, "b": w, "e": torch.empty(0), "c": torch.ones(1)},
        {"a": w, "b": w[:5], "e": torch.empty(0), "c": torch.ones(1)},
        {"a": w, "b": w.view(torch.int32), "e": torch.empty(0), "c": torch.ones(1)},
        {"a": w, "b": w, "e": torch.ones(7), "c": torch.empty(0, 3)},
    ]
    with aiockpt.SyncCheckpointer() as ckpt:
        for number, state in enumerate(states):
            ckpt.save(state, tmp_path / str(number))
            assert_same(state, ckpt.load(tmp_path / str(number)))
