"""NumPy arrays are stored, checked, sliced and filled like tensors, and loaded as arrays."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import aiockpt
from aiockpt.format.manifest.manifest import SEAL
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.stock import ALONE

# torch's DCP warns that it runs without a process group, as it should here.
DCP_ALONE = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CHUNK = 64 << 10


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def _unaligned() -> np.ndarray[Any, Any]:
    array = np.frombuffer(bytearray(range(81)), dtype="f8", offset=1)
    assert not array.flags.aligned
    return array


def _odd_strides() -> np.ndarray[Any, Any]:
    return np.zeros(4, dtype=[("a", "i1"), ("b", "i4")])["b"]


FORMS = {
    "rows": np.arange(6.0).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "permuted": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "every other": np.arange(10.0)[::2],
    "backwards": np.arange(12.0).reshape(3, 4)[::-1, ::-2],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "read-only": _read_only(np.arange(30_000)),
    "empty": np.zeros((0, 3), dtype="f2"),
    "0-d": np.array(5),
    "unaligned": _unaligned(),
    "odd strides": _odd_strides(),
}
OTHERS = {
    "texts": np.array(["a", "bc"]),
    "times": np.array(["2020-01-01"], "M8[D]"),
    "structured": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
    "foreign": np.arange(5, dtype=">i4"),
    "long doubles": np.ones(3, np.longdouble),
    "objects": np.array([1, "x", None], dtype=object),
}


def _same(one: np.ndarray[Any, Any], other: object) -> bool:
    return (
        type(other) is np.ndarray
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.tobytes() == other.tobytes()
    )


def _write_manifest(path: Path, document: dict[str, Any]) -> None:
    """Write a manifest with this content and a matching CRC."""
    document.pop("manifest_crc32", None)
    body = json.dumps(document, indent=2).removesuffix("\n}").encode()
    (path / ".aiockpt.json").write_bytes(body + f'{SEAL}{zlib.crc32(body):08x}"\n}}\n'.encode())


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        yield ckpt


def test_every_form_comes_back(ckpt, tmp_path: Path) -> None:
    dtypes = {code: np.arange(20_000).astype(code) for code in "?bBhHiIlLqQefdFD"}
    mapped = np.memmap(tmp_path / "mapped", dtype="f4", mode="w+", shape=(100, 200))
    mapped[:] = 3
    state = {"forms": FORMS, "others": OTHERS, "dtypes": dtypes, "mapped": mapped, "list": [torch.ones(1), np.ones(2)]}
    ckpt.save(state, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c")
    for part in ("forms", "dtypes"):
        assert list(loaded[part]) == list(state[part])
        for name, array in state[part].items():
            assert _same(array, loaded[part][name]), name
    for name, array in OTHERS.items():
        assert (type(array), array.dtype, array.tolist()) == (
            type(loaded["others"][name]),
            loaded["others"][name].dtype,
            loaded["others"][name].tolist(),
        )
    assert loaded["forms"]["columns"].flags.f_contiguous
    assert loaded["forms"]["permuted"].strides == FORMS["permuted"].strides
    assert _same(np.asarray(mapped), loaded["mapped"])
    assert _same(np.ones(2), loaded["list"][1])
    loaded["forms"]["read-only"][:] = 0  # it has memory of its own
    assert FORMS["read-only"][5] == 5
    with ckpt.open(tmp_path / "c") as reader:
        assert {type(reader[f"forms.{name}"]) for name in FORMS} == {aiockpt.TensorInfo}
        assert {type(reader[f"others.{name}"]) for name in OTHERS} == {aiockpt.ObjectInfo}
    assert ckpt.verify(tmp_path / "c").ok


def test_load_options(ckpt, tmp_path: Path) -> None:
    array = np.arange(60_000.0).reshape(300, 200)
    ckpt.save({"a": {"x": array, "y": np.ones(3)}, "t": torch.ones(2)}, tmp_path / "c")
    only = ckpt.load(tmp_path / "c", keys=["a.x"])
    assert list(only) == ["a"]
    assert list(only["a"]) == ["x"]
    assert _same(array, only["a"]["x"])
    assert _same(array, ckpt.load(tmp_path / "c", mmap=True)["a"]["x"])
    moved = ckpt.load(tmp_path / "c", map_location=lambda storage, _: storage.clone())
    assert _same(array, moved["a"]["x"])
    assert ckpt.load(tmp_path / "c", map_location="meta")["a"]["x"].is_meta
    assert _same(array.astype("f4"), ckpt.load(tmp_path / "c", dtype=torch.float32)["a"]["x"])
    assert ckpt.load(tmp_path / "c", dtype=torch.bfloat16)["a"]["x"].dtype is torch.bfloat16
    with ckpt.open(tmp_path / "c") as reader:
        assert torch.equal(reader.read("a.x"), torch.from_numpy(array))
        assert torch.equal(reader.read("a.x", (slice(3, 9), 5)), torch.from_numpy(array[3:9, 5]))
        many = reader.read_many({"a.x": slice(2), "a.y": None})
        assert torch.equal(many["a.x"], torch.from_numpy(array[:2]))
        assert torch.equal(dict(reader.stream())["a.y"], torch.ones(3, dtype=torch.float64))


def test_compressed_arrays_and_separate_files(ckpt, tmp_path: Path) -> None:
    array = np.zeros(200_000)
    ckpt.save({"a": array, "b": [{"x": array.reshape(2, -1)}]}, tmp_path / "c", compress="zstd")
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 100_000
    loaded = ckpt.load(tmp_path / "c")
    assert _same(array, loaded["a"])
    assert _same(array.reshape(2, -1), loaded["b"][0]["x"])
    ckpt.save({"a": array}, tmp_path / "d", separation_hint={"a": "arrays"})
    assert _same(array, ckpt.load(tmp_path / "d")["a"])


def test_the_same_memory_is_stored_and_loaded_once(ckpt, tmp_path: Path) -> None:
    array = np.arange(100_000)
    backwards = array[::-1]
    state = {"a": array, "b": array.view(), "t": torch.from_numpy(array), "c": backwards, "d": backwards}
    ckpt.save(state, tmp_path / "c")
    assert sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp")) < 2.2 * array.nbytes
    loaded = ckpt.load(tmp_path / "c")
    loaded["a"][7] = -1
    assert loaded["b"][7] == loaded["t"][7] == -1
    assert np.shares_memory(loaded["c"], loaded["d"])


# --- targets --------------------------------------------------------------------------------------


def test_arrays_of_the_target_are_filled(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    state = {
        "a": {"x": np.arange(6.0).reshape(2, 3), "big": np.arange(100_000), "text": np.array(["a", "bc"])},
        "t": torch.arange(3.0),
        "rng": np.random.RandomState(5).get_state(),
        "none": np.ones(2),
        "other": np.ones(2),
    }
    ckpt.save(state, path)
    wide = np.zeros((2, 6))
    target: dict[str, Any] = {
        "a": {"x": wide[:, ::2], "big": np.zeros(100_000, dtype=int)[::-1], "text": np.array(["", "  "])},
        "t": np.memmap(tmp_path / "mapped", dtype="f4", mode="w+", shape=3),
        "rng": None,
        "none": None,
        "other": 5,
    }
    arrays = {**target["a"], "t": target["t"]}
    ckpt.load(path, target)
    for name, array in arrays.items():
        assert {**target["a"], "t": target["t"]}[name] is array
        assert np.array_equal(array, {**state["a"], "t": state["t"].numpy()}[name])
    assert wide[1, 2] == 4
    assert np.array_equal(state["rng"][1], target["rng"][1])
    assert _same(np.ones(2), target["none"])
    assert _same(np.ones(2), target["other"])
    tensors = {"a": {"x": torch.zeros(2, 3, dtype=torch.float64), "big": torch.zeros(100_000, dtype=torch.int64)}}
    ckpt.load(path, tensors)
    assert torch.equal(tensors["a"]["x"], torch.from_numpy(state["a"]["x"]))
    assert torch.equal(tensors["a"]["big"], torch.arange(100_000))


def test_a_tensor_fills_an_array_that_no_tensor_can_view(ckpt, tmp_path: Path) -> None:
    ckpt.save({"t": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")
    target = {"t": np.zeros((2, 3), dtype="f4")[::-1]}
    array = target["t"]
    ckpt.load(tmp_path / "c", target)
    assert target["t"] is array
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros((3, 2)), r"a\.x has the shape \(3, 2\) in the target but \(2, 3\) in "),
        (np.zeros((3, 2))[::-1], r"a\.x has the shape \(3, 2\) in the target but \(2, 3\) in "),
        (np.zeros((2, 3), "f4"), r"a\.x is torch\.float32 in the target but torch\.float64 .*pass dtype=.target"),
        (np.zeros((2, 3), "f4")[::-1], r"a\.x is torch\.float32 in the target but torch\.float64 in "),
        (np.zeros((2, 3), ">f8"), r"a\.x is an array of dtype\('>f8'\) in the target but torch\.float64 in "),
        (np.array([["", "", ""]] * 2), r"a\.x is an array of dtype\('<U1'\) in the target but torch\.float64 in "),
        (_read_only(np.zeros((2, 3))), r"a\.x is a read-only array in the target"),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (2, 3), (8, 8)), r"a\.x overlaps itself in the target"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong, message: str, ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": {"x": np.ones((2, 3)), "big": np.arange(100_000)}}, tmp_path / "c")
    before, big = wrong.copy(), np.zeros(100_000, dtype=int)
    with pytest.raises(aiockpt.ShapeMismatchError, match=message):
        ckpt.load(tmp_path / "c", {"a": {"x": wrong, "big": big}})
    assert not big.any()
    assert np.array_equal(before, wrong)


class _Buffer:
    """Live object with an array."""

    def __init__(self) -> None:
        self.array = np.zeros(30_000)
        self.extra: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array, "backwards": self.array[::-1], **({"extra": self.extra} if self.extra else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


def test_live_objects_are_given_arrays(ckpt, tmp_path: Path) -> None:
    saved, fresh = _Buffer(), _Buffer()
    saved.array[:] = np.arange(30_000)
    saved.extra = {"x": np.ones(3)}
    ckpt.save({"buffer": saved}, tmp_path / "c")
    ckpt.load(tmp_path / "c", {"buffer": fresh})
    assert _same(saved.array, fresh.given["array"])
    assert _same(saved.array[::-1], fresh.given["backwards"])
    assert _same(np.ones(3), fresh.given["extra"]["x"])


def test_random_states_come_back(ckpt, tmp_path: Path) -> None:
    random = np.random.RandomState(3)
    generator = np.random.Generator(np.random.MT19937(4))
    state = {"old": random.get_state(), "new": generator.bit_generator.state}
    ckpt.save(state, tmp_path / "c")
    expected = random.random_sample(5), generator.random(5)
    loaded = ckpt.load(tmp_path / "c")
    random.set_state(loaded["old"])
    generator.bit_generator.state = loaded["new"]
    assert np.array_equal(random.random_sample(5), expected[0])
    assert np.array_equal(generator.random(5), expected[1])


# --- other readers and formats ----------------------------------------------------------------------


@DCP_ALONE
def test_other_readers_get_tensors(ckpt, tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    ckpt.save({"a": {"x": array}, "rng": np.random.get_state()}, tmp_path / "c")
    stock = {"a": {"x": torch.zeros(2, 3, dtype=torch.float64)}, "rng": None}
    dcp.load(stock, checkpoint_id=tmp_path / "c", **ALONE)
    assert torch.equal(stock["a"]["x"], torch.from_numpy(array))
    assert stock["rng"][0] == "MT19937"
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    assert torch.equal(torch.load(tmp_path / "c.pt", weights_only=False)["a"]["x"], torch.from_numpy(array))
    (tmp_path / "c" / ".aiockpt.json").unlink()
    assert torch.equal(ckpt.load(tmp_path / "c")["a"]["x"], torch.from_numpy(array))


def test_safetensors_keep_tensors(ckpt, tmp_path: Path) -> None:
    ckpt.save({"x": np.arange(5)}, tmp_path / "c.safetensors")
    assert torch.equal(ckpt.load(tmp_path / "c.safetensors")["x"], torch.arange(5))
    with pytest.raises(aiockpt.SaveError, match="texts is not a plain tensor"):
        ckpt.save({"texts": OTHERS["texts"]}, tmp_path / "d.safetensors")


# --- changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["whole", "every other", "read-only view"])
def test_an_array_that_changes_during_a_save_is_found(form: str, tmp_path: Path) -> None:
    memory = np.arange(200_000)
    array = {"whole": memory, "every other": memory[::2], "read-only view": _read_only(memory.view())}[form]
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, fsync=False) as ckpt:
        save = ckpt.submit({"first": torch.arange(90_000), "victim": array}, tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)  # the only chunk is full
        memory[:] = -1
        storage.open("create")
        error = save.written.exception(60)
    assert isinstance(error, aiockpt.TornSnapshotError)
    assert str(error).startswith("victim changed between save() and staged, as their bytes show")
    assert not (tmp_path / "c").exists()


def test_small_arrays_and_copied_ones_may_change_at_once(tmp_path: Path) -> None:
    small, large = np.zeros(5000), np.zeros(200_000)
    state = {"first": torch.arange(90_000), "small": small, "columns": small.reshape(50, 100).T, "back": large[::-1]}
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK, fsync=False) as ckpt:
        save = ckpt.submit(state, tmp_path / "c", storage=storage)
        storage.reached["create"].result(60)
        small += 1
        large += 1
        storage.open("create")
        assert save.written.exception(60) is None
        loaded = ckpt.load(tmp_path / "c")
    assert not any(loaded[name].any() for name in ("small", "columns", "back"))


# --- records of arrays in a manifest ----------------------------------------------------------------


def _record(*path: object) -> dict[str, object]:
    return {"path": [*path], "type": "ndarray", "at": 0}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    "records",
    [
        [_record("object")],
        [_record("dict")],
        [_record()],
        [_record("x"), _record("x")],
        [_record("x"), {"path": ["x"], "type": "dict", "at": 0}],
        [_record("absent")],
        [_record("x", "y")],
        [_record("list", "0")],
        [_record("list", 7)],
        [_record("dict.y")],
        [_record("bfloat16")],
    ],
    ids=str,
)
def test_wrong_records_of_arrays_are_corrupt(records, has_index: bool, ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    state = {
        "x": torch.ones(2),
        "object": {1, 2},
        "dict": {"y": torch.ones(2)},
        "list": [torch.ones(2)],
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    }
    ckpt.save(state, path)
    document = json.loads((path / ".aiockpt.json").read_text())
    document["containers"] += records
    if not has_index:
        del document["index"]
    _write_manifest(path, document)
    for target in (None, {"x": torch.zeros(2)}):
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"\.aiockpt\.json"):
            ckpt.load(path, target)
    assert not ckpt.verify(path).ok


def test_a_valid_record_turns_a_tensor_into_an_array(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "c"
    ckpt.save({"x": {"y": torch.ones(2)}, "x.y": {}}, path)
    document = json.loads((path / ".aiockpt.json").read_text())
    document["containers"].append(_record("x", "y"))
    _write_manifest(path, document)
    assert _same(np.ones(2, "f4"), ckpt.load(path)["x"]["y"])
