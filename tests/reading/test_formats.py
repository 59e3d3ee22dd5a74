"""`load`, `open` and `verify` with files of torch.save and of safetensors."""

from __future__ import annotations

import argparse
import enum
import json
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from tests.states import assert_same, large_state, random_tensor, training_state
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


def _weights() -> dict[str, torch.Tensor]:
    return large_state(3, kib=3000) | {
        "layer.0.w": random_tensor(torch.bfloat16, (50, 70), 3),
        "layer.0.b": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
    }


# --- torch.save ---------------------------------------------------------------------------------------


def test_training_state_of_torch_save(ckpt, tmp_path: Path) -> None:
    state = training_state() | large_state(2, kib=3000) | {"t": random_tensor(torch.float32, (900, 500), 2).t()}
    torch.save(state, tmp_path / "s.pt")
    loaded = ckpt.load(tmp_path / "s.pt")
    assert_same(state, loaded)
    assert_same(torch.load(tmp_path / "s.pt"), loaded)
    target = training_state(seed=3)
    ckpt.load(tmp_path / "s.pt", target)
    assert_same({key: state[key] for key in target}, target)
    assert_same({"model": state["model"]}, ckpt.load(tmp_path / "s.pt", keys="model"))
    with ckpt.open(tmp_path / "s.pt") as reader:
        assert reader.format == "torch"
        assert torch.equal(reader.read("t", (slice(3, 9), 5)).view(torch.int32), state["t"][3:9, 5].view(torch.int32))
        assert reader.read("step") == 2
    assert ckpt.verify(tmp_path / "s.pt").ok


@pytest.mark.slow
def test_views_of_one_storage_share_memory_after_load(ckpt, tmp_path: Path) -> None:
    base = torch.arange(600_000, dtype=torch.float32)
    small = torch.arange(12.0)
    state = {
        "base": base,
        "tail": base[500_000:],
        "even": base[::2],
        "small": small.view(3, 4),
        "row": small.view(3, 4)[1],
        "wide": small[:1].expand(1000),
        "z": torch.complex(small, -small),
        "negated": torch._neg_view(small.view(3, 4)),
    }
    state["conj"] = state["z"].conj()
    torch.save(state, tmp_path / "s.pt")
    loaded = ckpt.load(tmp_path / "s.pt")
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    loaded["base"][500_000] = -1
    loaded["row"][0] = 77
    assert (loaded["tail"][0], loaded["even"][250_000], loaded["small"][1, 0]) == (-1, -1, 77)
    assert loaded["wide"].stride() == (0,)
    assert loaded["conj"].data_ptr() == loaded["z"].data_ptr()
    cast = ckpt.load(tmp_path / "s.pt", keys=["small", "negated"], dtype=torch.float64)
    assert_same({"small": small.view(3, 4).double(), "negated": -small.view(3, 4).double()}, cast)
    cast = ckpt.load(tmp_path / "s.pt", keys=["even", "small"], dtype=torch.float64)
    assert_same({"even": base[::2].double(), "small": small.view(3, 4).double()}, cast)
    with pytest.raises(aiockpt.LoadError, match="its elements share memory"):
        ckpt.load(tmp_path / "s.pt", keys=["wide"], dtype=torch.float64)
    with ckpt.open(tmp_path / "s.pt") as reader, pytest.raises(aiockpt.LoadError, match="its elements share memory"):
        reader.read("wide", slice(1, None))
    target = {"wide": torch.zeros(1000), "even": torch.zeros(300_000)}
    ckpt.load(tmp_path / "s.pt", target)
    assert_same({"wide": torch.zeros(1000), "even": base[::2]}, target)


@pytest.mark.parametrize("number", [50, 300_000])
@pytest.mark.parametrize("stock", [False, True], ids=["torch.save", "dcp.save"])
def test_conjugated_and_negated_tensors_keep_their_values(number: int, stock: bool, ckpt, tmp_path: Path) -> None:
    values = random_tensor(torch.complex64, (number,), 4)
    state = {"conjugated": values.conj(), "negated": torch._neg_view(values.real.clone())}
    if stock:
        dcp.save(state, checkpoint_id=tmp_path / "s.pt", **ALONE)
    else:
        torch.save(state, tmp_path / "s.pt")
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    ckpt.load(tmp_path / "s.pt", target)
    for loaded in (ckpt.load(tmp_path / "s.pt"), target):
        assert torch.equal(_bits(loaded["conjugated"]), _bits(state["conjugated"]))
        assert torch.equal(_bits(loaded["negated"]), _bits(state["negated"]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.resolve_conj().resolve_neg()
    return (torch.view_as_real(values) if values.is_complex() else values).view(torch.int32)


def test_views_of_different_dtypes_share_memory_after_load(ckpt, tmp_path: Path) -> None:
    base = (torch.arange(300_000) % 251).to(torch.uint8)
    views = (torch.float8_e4m3fn, torch.uint8, torch.uint16, torch.uint32)
    torch.save({str(dtype): base.view(dtype) for dtype in views}, tmp_path / "s.pt")
    loaded = ckpt.load(tmp_path / "s.pt")
    assert_same({str(dtype): base.view(dtype) for dtype in views}, loaded)
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == 1
    with ckpt.open(tmp_path / "s.pt") as reader:
        assert_same(loaded, reader.read_many(list(loaded)))


@pytest.mark.parametrize("value", [torch.arange(5), [torch.ones(2), {"a": 1}], (1, torch.zeros(3)), "text", 7])
def test_torch_save_files_without_a_dict(value, ckpt, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "v.pt")
    assert_same(value, ckpt.load(tmp_path / "v.pt"))


class Custom:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)


def test_objects_in_files_of_torch_save(ckpt, tmp_path: Path) -> None:
    torch.save({"o": Custom(), "w": torch.ones(2)}, tmp_path / "o.pt")
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="Custom"):
        ckpt.load(tmp_path / "o.pt")
    for options in ({"safe_globals": [Custom]}, {"trust": True}):
        assert_same({"o": Custom(), "w": torch.ones(2)}, ckpt.load(tmp_path / "o.pt", **options))
        with ckpt.open(tmp_path / "o.pt", **options) as reader:
            assert reader.read("o") == Custom()


class Color(enum.Enum):
    RED = 1


class Loader:
    """A configuration with parts that need permission in all places, tensors, and a tuple that is shared."""

    def __init__(self) -> None:
        self.parts = [Custom(), {Color.RED: {Color.RED}, "n": numpy.arange(2)}, torch.ones(2)]


def _lightning_like() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    return {
        "epoch": 3,
        "state_dict": OrderedDict(model.state_dict()),
        "half": torch.ones(3, dtype=torch.float8_e4m3fn),
        "cfg": Loader(),
        "args": argparse.Namespace(color=Color.RED, rate=0.5),
        "callbacks": {"best": {"path": "x", "why": Custom()}, Color.RED: 3, "plain": {"n": 1}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2, 3)}}, "hook": [1, (Custom(),)]}],
    }


@pytest.mark.parametrize("writer", ["torch", "aiockpt"])
def test_keys_of_a_file_of_torch_save_need_permission_for_themselves_alone(writer, ckpt, tmp_path: Path) -> None:
    state, path = _lightning_like(), tmp_path / "lit.ckpt"
    del state["callbacks"][Color.RED]
    if writer == "torch":
        state["callbacks"][Color.RED] = 3
        torch.save(state, path)
    else:
        del state["cfg"]
        ckpt.save(state, path)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"Custom.*safe_globals="):
        ckpt.load(path)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"Custom.*safe_globals="), ckpt.open(path):
        pass
    assert_same({"state_dict": state["state_dict"]}, ckpt.load(path, keys="state_dict"))
    keys = ["state_dict.weight", "epoch", "half", "callbacks.best.path", "callbacks.plain", "optimizer_states.0.state"]
    loaded = ckpt.load(path, keys=keys)
    assert loaded["epoch"] == 3
    assert loaded["state_dict"].keys() == {"weight"}
    assert loaded["half"].dtype == torch.float8_e4m3fn
    assert loaded["callbacks"] == {"best": {"path": "x"}, "plain": {"n": 1}}
    assert_same(loaded["optimizer_states"][0]["state"], state["optimizer_states"][0]["state"])
    module = torch.nn.Linear(3, 2)
    ckpt.load(path, {"state_dict": module}, keys="state_dict")
    assert torch.equal(module.weight, state["state_dict"]["weight"])
    refused = ["args", "callbacks", "callbacks.best", "callbacks.best.why", "optimizer_states", "*"]
    for key in [*refused, *(["cfg", "cfg.parts"] if writer == "torch" else [])]:
        with pytest.raises(aiockpt.UnsafeCheckpointError, match=rf"lit\.ckpt: {key.split('.')[0].strip('*')}.*Custom"):
            ckpt.load(path, keys=["state_dict", key])
    with pytest.raises(aiockpt.MissingKeysError):
        ckpt.load(path, keys=["nothing"])
    if writer == "aiockpt":
        assert ckpt.load(path, keys="args", safe_globals=[Custom, Color])["args"].color is Color.RED


def test_keys_beside_what_is_permitted(ckpt, tmp_path: Path) -> None:
    """A class that is permitted is given no placeholder."""
    torch.save({"a": Custom(), "b": Color.RED, "w": torch.ones(2)}, tmp_path / "p.pt")
    assert ckpt.load(tmp_path / "p.pt", keys="a", safe_globals=[Custom]) == {"a": Custom()}
    outer = Custom()
    outer.inner = [Color.RED]
    torch.save({"a": outer, "w": torch.ones(2)}, tmp_path / "q.pt")
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="Color"):
        ckpt.load(tmp_path / "q.pt", keys="a", safe_globals=[Custom])


def test_a_whole_object_in_a_file_of_torch_save(ckpt, tmp_path: Path) -> None:
    torch.save(Loader(), tmp_path / "o.pt")
    for keys in ("parts", "parts.*"):
        with pytest.raises(aiockpt.UnsafeCheckpointError, match="Loader"):
            ckpt.load(tmp_path / "o.pt", keys=keys)


@pytest.mark.filterwarnings("ignore::aiockpt.MissingKeysWarning")
def test_keys_that_a_whole_object_lacks(ckpt, tmp_path: Path) -> None:
    torch.save({1, 2}, tmp_path / "s.pt")
    assert ckpt.load(tmp_path / "s.pt", keys="model", strict=False) is None


class _OfDevice:
    """Is pickled as a tensor of a device that torch stores in a form of its own."""

    def __init__(self, function: str, *args: Any) -> None:
        self._reduced = getattr(torch._utils, function), args

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        _OfDevice("_rebuild_device_tensor_from_numpy", numpy.ones(2), torch.float32, "xla:0", False),
        _OfDevice("_rebuild_device_tensor_from_cpu_tensor", torch.ones(2), torch.float32, "hpu", False),
    ],
    ids=["meta", "xla", "hpu"],
)
def test_a_tensor_that_cannot_be_read_closes_no_other(tensor, ckpt, tmp_path: Path) -> None:
    torch.save({"m": {"w": torch.ones(2), "x": tensor}, "n": [torch.zeros(1)]}, tmp_path / "m.pt")
    with pytest.raises(aiockpt.LoadError, match=r"torch\.load"):
        ckpt.load(tmp_path / "m.pt")
    assert_same({"m": {"w": torch.ones(2)}, "n": [torch.zeros(1)]}, ckpt.load(tmp_path / "m.pt", keys=["m.w", "n"]))
    with pytest.raises(aiockpt.LoadError, match=r"m\.pt: m\.x .*torch\.load"):
        ckpt.load(tmp_path / "m.pt", keys="m")


def test_damage_in_files_of_torch_save(ckpt, tmp_path: Path) -> None:
    torch.save(large_state(3), tmp_path / "s.pt")
    data = (tmp_path / "s.pt").read_bytes()
    at = data.index(large_state(3)["w1"].numpy().tobytes()[:4000]) + 1234
    (tmp_path / "bad.pt").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    with pytest.raises(aiockpt.CorruptCheckpointError, match="the bytes of w1"):
        ckpt.load(tmp_path / "bad.pt")
    report = ckpt.verify(tmp_path / "bad.pt")
    assert not report.ok
    for length in (0, 3, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "short.pt").write_bytes(data[:length])
        with pytest.raises(aiockpt.LoadError, match=r"short\.pt"):
            ckpt.load(tmp_path / "short.pt")


# --- torch.save before 1.6 ------------------------------------------------------------------------------


def _legacy(state: Any, path: Path, **options: Any) -> bytes:
    torch.save(state, path, _use_new_zipfile_serialization=False, **options)
    return path.read_bytes()


def test_files_of_torch_before_1_6(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    state = {**training_state(), "empty": torch.zeros(0, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    state["views"] = [state["half"][1:], torch.nn.Parameter(torch.arange(7.0))]
    _legacy(state, path)
    assert_same(torch.load(path), ckpt.load(path))
    assert_same(torch.load(path), ckpt.load(path, mmap=True))
    with ckpt.open(path) as reader:
        assert torch.equal(reader.read("views.0"), state["views"][0])
        assert torch.equal(reader.read("views.1", slice(2, 5)), state["views"][1][2:5])
    report = ckpt.verify(path)
    assert report.ok
    assert not report.problems
    assert "without CRC" in str(report)


def test_permission_for_files_of_torch_before_1_6(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    _legacy({"o": Custom(), "n": numpy.arange(3), "w": torch.ones(2)}, path)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"needs .*Custom.*safe_globals="):
        ckpt.load(path)
    assert ckpt.load(path, keys=["w", "n"])["n"].tolist() == [0, 1, 2]
    for options in ({"safe_globals": [Custom]}, {"trust": True}):
        assert ckpt.load(path, **options)["o"] == Custom()


def test_a_file_of_python_2(ckpt, tmp_path: Path) -> None:
    """There the texts are byte strings."""
    data = _legacy({"w": torch.arange(3), "n": [1, "x"]}, tmp_path / "new.pt")
    end = data.index(b"\x80\x02]") if b"\x80\x02]" in data else 0
    assert end
    rest = data[end:]
    begin = data.index(b"\x80\x02}", 40)  # system information
    texts = re.compile(rb"X(.)\0\0\0")
    stop = rest.index(b".") + 1
    old = data[:begin] + texts.sub(rb"U\1", data[begin:end]) + texts.sub(rb"U\1", rest[:stop]) + rest[stop:]
    assert old != data
    (tmp_path / "old.pt").write_bytes(old)
    assert_same(torch.load(tmp_path / "old.pt"), ckpt.load(tmp_path / "old.pt"))


def test_damage_in_files_of_torch_before_1_6(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    data = _legacy({"w": torch.arange(300), "v": torch.arange(9.0)}, path)
    for length in (40, 100, 300, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"old\.pt"):
            ckpt.load(path)
    path.write_bytes(re.sub(rb"(little_endianq.)\x88", b"\\1\x89", data))
    with pytest.raises(aiockpt.LoadError, match="byte order"):
        ckpt.load(path)
    path.write_bytes(data.replace((9).to_bytes(8, "little"), (8).to_bytes(8, "little")))
    with pytest.raises(aiockpt.CorruptCheckpointError, match="of 36 bytes, is not whole"):
        ckpt.load(path)


# --- safetensors --------------------------------------------------------------------------------------


def test_safetensors_file(ckpt, tmp_path: Path) -> None:
    state = _weights()
    safetensors.torch.save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt", "step": "3"})
    loaded = ckpt.load(tmp_path / "m.safetensors")
    assert_same(dict(sorted(state.items())), dict(sorted(loaded.items())))
    assert_same(dict(sorted(state.items())), dict(sorted(ckpt.load(tmp_path / "m.safetensors", mmap=True).items())))
    nested = {"layer": [{"w": torch.zeros(50, 70, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.uint8)}]}
    ckpt.load(tmp_path / "m.safetensors", nested)
    assert_same({"layer": [{"w": state["layer.0.w"], "b": state["layer.0.b"]}]}, nested)
    with ckpt.open(tmp_path / "m.safetensors") as reader:
        assert reader.format == "safetensors"
        assert reader.metadata == {"format": "pt", "step": "3"}
        assert reader.read("w1", slice(5, 9)).tolist() == state["w1"][5:9].tolist()
    report = ckpt.verify(tmp_path / "m.safetensors")
    assert report.ok
    assert report.unverifiable == len([tensor for tensor in state.values() if tensor.numel()])


def test_safetensors_shards_with_an_index(ckpt, tmp_path: Path) -> None:
    state = _weights()
    home = tmp_path / "model"
    home.mkdir()
    names = sorted(state)
    shards = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, keys in shards.items():
        safetensors.torch.save_file({key: state[key] for key in keys}, home / file, metadata={"format": "pt"})
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    index = home / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": weight_map}))
    (home / "config.json").write_text("{}")
    assert_same({key: state[key] for key in names}, ckpt.load(home))
    with ckpt.open(home) as reader:
        assert reader["w2"].file == weight_map["w2"]
        assert reader.metadata["total_size"] == 5
        assert torch.equal(reader.read("w2", slice(-3, None)), state["w2"][-3:])
    (home / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        ckpt.load(home)
    index.write_text(json.dumps({"weight_map": {"w1": "../secret.safetensors"}}))
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="secret"):
        ckpt.load(home)


def test_directory_of_safetensors_without_an_index(ckpt, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.arange(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert_same({"w": torch.arange(4)}, ckpt.load(tmp_path))
    safetensors.torch.save_file({"v": torch.arange(3)}, tmp_path / "other.safetensors")
    with pytest.raises(aiockpt.LoadError, match=r"holds several: other\.safetensors, model\.safetensors; add"):
        ckpt.load(tmp_path)
    assert_same({"v": torch.arange(3)}, ckpt.load(tmp_path / "other.safetensors"))


def test_tied_tensors_of_a_safetensors_file(ckpt, tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(9, 9)
            self.b = torch.nn.Linear(9, 9)
            self.b.weight = self.a.weight

    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
    loaded = ckpt.load(tmp_path / "m.safetensors")
    assert sorted(loaded) == sorted(model.state_dict())
    assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
    assert torch.equal(loaded["a.weight"], model.a.weight)


def test_tied_tensors_of_safetensors_shards(ckpt, tmp_path: Path) -> None:
    weight = torch.randn(300, 400)
    state = {"a": weight, "b": torch.randn(300, 300), "c": weight, "d": torch.randn(200, 500)}
    ckpt.save(state, tmp_path / "m", format="safetensors", shard_bytes=600_000)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    loaded = ckpt.load(tmp_path / "m")
    assert_same(state, {key: loaded[key] for key in state})
    assert loaded["a"].data_ptr() == loaded["c"].data_ptr()
    assert ckpt.verify(tmp_path / "m").ok


def test_truncated_safetensors(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.arange(500), "v": torch.ones(3)}, path)
    data = path.read_bytes()
    for length in (*range(0, 200, 9), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(aiockpt.LoadError, match=r"m\.safetensors"):
            ckpt.load(path)


def test_paths_that_are_no_checkpoints(ckpt, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(os.urandom(500))
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"neither a torch\.save file"):
        ckpt.load(tmp_path / "x.bin")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("x")
    (tmp_path / "d" / "b.txt").write_text("x")
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"has no \.metadata and no safetensors"):
        ckpt.load(tmp_path / "d")


def test_module_metadata_of_torch_save(ckpt, tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(4).state_dict()
    torch.save(state, tmp_path / "m.pt")
    loaded = ckpt.load(tmp_path / "m.pt")
    assert isinstance(loaded, OrderedDict)
    torch.nn.BatchNorm1d(4).load_state_dict(loaded)
