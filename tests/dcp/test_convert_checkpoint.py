"""Conversions from any format to any other: values, structure, metadata, views, casts, memory, interrupts."""

from __future__ import annotations

import asyncio
import math
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp.format_utils import convert_checkpoint, convert_checkpoint_async
from tests.memory import peak_growth
from tests.states import assert_same
from tests.stock import ALONE

FORMATS = ("dcp", "torch", "safetensors")
ENDINGS = {"dcp": "", "torch": ".pt", "safetensors": ".safetensors"}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "model.w": torch.randn(33, 17),
        "model.half": torch.randn(5, 3).to(torch.bfloat16),
        "model.column": torch.randn(6, 4).t(),
        "ids": torch.arange(11),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
    }


def write(form: str, path: Path, state: dict) -> Path:
    path = path.with_name(path.name + ENDINGS[form])
    if form == "torch":
        torch.save(state, path)
    elif form == "dcp":
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, path, metadata={"loss": 0.25, "nan": math.nan})
    else:
        safetensors.torch.save_file({k: v.contiguous() for k, v in state.items()}, path, {"format": "pt", "note": "x"})
    return path


def load(path: Path, **kwargs):
    with aiockpt.SyncCheckpointer() as ckpt:
        return ckpt.load(path, **kwargs)


def flat(state: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in state.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return dict(sorted(found.items()))  # safetensors files have an order of their own


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_becomes_every_other(form: str, to: str, tmp_path: Path) -> None:
    source = write(form, tmp_path / "in", tensors())
    target = tmp_path / f"out{ENDINGS[to]}"
    events: list[aiockpt.ProgressEvent] = []
    convert_checkpoint(source, target, to=to, progress=events.append)
    assert_same(flat(load(target)), flat(tensors()))
    last = events[-1]
    assert (last.what, last.path, last.phase) == ("convert", str(source), "done")
    assert last.done_bytes == last.total_bytes > sum(t.nbytes for t in tensors().values()) // 2
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(target).ok
    if to == "torch":
        assert_same(flat(torch.load(target, weights_only=True)), flat(tensors()))
    elif to == "safetensors":
        assert_same(flat(safetensors.torch.load_file(target)), flat(tensors()))
    else:
        into = {name: torch.zeros_like(value) for name, value in tensors().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(into, checkpoint_id=target)
        assert_same(into, tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name])


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("form", FORMATS)
def test_some_keys_are_converted_to_another_dtype(form: str, to: str, tmp_path: Path) -> None:
    source = write(form, tmp_path / "in", tensors())
    target = tmp_path / f"out{ENDINGS[to]}"
    convert_checkpoint(source, target, to=to, keys=["model", "i*"], dtype=torch.float16)
    wanted = {k: v.half() if v.is_floating_point() else v for k, v in tensors().items() if k[0] in "mi"}
    assert_same(flat(load(target)), flat(wanted))
    with pytest.raises(aiockpt.MissingKeysError, match=r"no\.such"):
        convert_checkpoint(source, tmp_path / "other", to=to, keys=["no.such"])
    assert not (tmp_path / "other").exists()


class Custom:
    pass


def nested() -> dict:
    tied = torch.randn(4, 4)
    return {
        "model": OrderedDict(a=tied, b=tied, view=tied[1:3]),
        "list": [torch.ones(2), {"x": 1, "y": [1, 2.5, None]}, (torch.zeros(1), "text")],
        "empty": {},
        "numbers": {3: torch.ones(1), (1, 2): torch.zeros(1)},
        "array": np.arange(6, dtype=np.float64).reshape(2, 3),
        "step": 7,
        "text": "größe",
    }


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_structure_objects_and_metadata_are_kept(form: str, tmp_path: Path) -> None:
    state = nested()
    if form == "torch":
        state["array"] = torch.from_numpy(state["array"])
    source = write(form, tmp_path / "in", state)
    for number, to in enumerate(["dcp", "dcp", "torch", "dcp"]):
        target = tmp_path / f"out{number}"
        convert_checkpoint(source, target, to=to)
        if to == "torch":
            state["array"] = torch.as_tensor(state["array"])
            assert_same(torch.load(target, weights_only=True), state)
        else:
            assert_same(load(target), state)
            with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(target) as reader:
                known = {"loss": 0.25} if form == "dcp" and number < 2 else {}
                assert {k: v for k, v in reader.metadata.items() if k != "nan"} == known
                assert reader["model.a"].chunks == reader["model.b"].chunks  # tied tensors are stored once
        source = target


def test_metadata_goes_to_safetensors_and_back(tmp_path: Path) -> None:
    source = write("dcp", tmp_path / "in", tensors())
    convert_checkpoint(source, tmp_path / "m.safetensors", to="safetensors")
    convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "again", to="dcp")
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(tmp_path / "again") as reader:
        assert set(reader.metadata) == {"loss", "nan"}


def test_a_part_of_a_nested_state(tmp_path: Path) -> None:
    source = write("dcp", tmp_path / "in", nested())
    for to in ("dcp", "torch"):
        convert_checkpoint(source, tmp_path / to, to=to, keys=["list.1", "list.2", "numbers", "array"])
        wanted = load(source, keys=["list.1", "list.2", "numbers", "array"])
        if to == "torch":
            wanted["array"] = torch.as_tensor(wanted["array"])
        assert_same(load(tmp_path / to), wanted)


def test_an_array_that_is_cast_comes_back_as_a_tensor(tmp_path: Path) -> None:
    source = write("dcp", tmp_path / "in", {"a": np.arange(4.0), "b": np.arange(4)})
    convert_checkpoint(source, tmp_path / "out", to="dcp", dtype=torch.bfloat16)
    assert_same(load(tmp_path / "out"), {"a": torch.arange(4).bfloat16(), "b": np.arange(4)})


@pytest.mark.parametrize("to", FORMATS)
def test_views_of_one_storage_become_separate_tensors(to: str, tmp_path: Path) -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    state = {"w": whole, "t": whole.t(), "top": whole[:2], "bottom": whole[2:], "again": whole}
    source = write("torch", tmp_path / "in", state)
    convert_checkpoint(source, tmp_path / f"out{ENDINGS[to]}", to=to)
    assert_same(flat(load(tmp_path / f"out{ENDINGS[to]}")), flat(state))


def test_objects_of_foreign_classes_are_copied_without_being_unpickled(tmp_path: Path) -> None:
    with pytest.warns(aiockpt.SafeGlobalsWarning):
        source = write("dcp", tmp_path / "in", {"x": torch.ones(2), "custom": Custom()})
    convert_checkpoint(source, tmp_path / "out", to="dcp", dtype=torch.float16)
    assert isinstance(load(tmp_path / "out", safe_globals=[Custom])["custom"], Custom)
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="Custom"):
        convert_checkpoint(source, tmp_path / "out.pt", to="torch")
    with pytest.raises(aiockpt.SaveError, match="custom"):
        convert_checkpoint(source, tmp_path / "out.safetensors", to="safetensors")
    convert_checkpoint(source, tmp_path / "out.safetensors", to="safetensors", keys="x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out.safetensors"]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_sharded_and_large_tensors(to: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("aiockpt.reading.executor.BUFFER_BYTES", 4096)
    monkeypatch.setattr("aiockpt.dcp.convert._CHUNK_BYTES", 8192)
    state = {
        "long": torch.randn(9001),
        "wide": torch.randn(3, 5000),
        "turned": torch.randn(80, 90).t(),
        "i": torch.arange(3000),
    }
    source = write("dcp", tmp_path / "in", state)
    convert_checkpoint(source, tmp_path / f"out{ENDINGS[to]}", to=to, dtype=dtype)
    wanted = {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in state.items()}
    assert_same(flat(load(tmp_path / f"out{ENDINGS[to]}")), flat(wanted))


@pytest.mark.parametrize("to", FORMATS)
def test_damage_is_found_where_large_tensors_are_cast(to: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("aiockpt.reading.executor.BUFFER_BYTES", 4096)
    monkeypatch.setattr("aiockpt.dcp.convert._CHUNK_BYTES", 8192)
    source = write("dcp", tmp_path / "in", {"w": torch.arange(9000.0)})
    file = source / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(torch.tensor([8998.0]).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"w\b.*CRC"):
        convert_checkpoint(source, tmp_path / "out", to=to, dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_damaged_objects_are_not_copied(tmp_path: Path) -> None:
    source = write("dcp", tmp_path / "in", {"x": torch.ones(2), "text": "a text to be damaged" * 9})
    file = source / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(b"to be damaged")] ^= 1
    file.write_bytes(data)
    with pytest.raises(aiockpt.CorruptCheckpointError, match="the object text is damaged"):
        convert_checkpoint(source, tmp_path / "out", to="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.full), torch.bfloat16])
def test_memory_is_bounded(to: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    state = {"large": torch.full((9 << 20, 6), 2.5), "wide": torch.full((3, 12 << 20), 1.5)}
    source = write("dcp", tmp_path / "in", state)
    total = sum(value.nbytes for value in state.values())
    state.clear()
    target = tmp_path / f"out{ENDINGS[to]}"
    convert_checkpoint(
        write("dcp", tmp_path / "warm", {"x": torch.ones(9)}), tmp_path / f"warm{to}", to=to, dtype=dtype
    )
    growth = peak_growth(lambda: convert_checkpoint(source, target, to=to, dtype=dtype))
    assert growth < 160 << 20 < total
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(target) as reader:
        assert reader.read("large", (slice(None, None, 100_000), -1)).unique().tolist() == [2.5]
        assert reader.read("wide", (slice(None), slice(None, None, 100_000))).unique().tolist() == [1.5]


@pytest.mark.parametrize("to", FORMATS)
def test_an_existing_target_is_replaced_only_if_allowed(to: str, tmp_path: Path) -> None:
    source = write("dcp", tmp_path / "in", tensors())
    target = write(to, tmp_path / "out", {"old": torch.ones(3)})
    with pytest.raises(aiockpt.CheckpointExistsError):
        convert_checkpoint(source, target, to=to)
    assert_same(load(target), {"old": torch.ones(3)})
    convert_checkpoint(source, target, to=to, overwrite=True)
    assert_same(flat(load(target)), flat(tensors()))


@pytest.mark.asyncio
@pytest.mark.parametrize("to", FORMATS)
async def test_cancelling_leaves_nothing(to: str, tmp_path: Path) -> None:
    source = write("dcp", tmp_path / "in", {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(48)})
    task = asyncio.ensure_future(convert_checkpoint_async(source, tmp_path / f"out{ENDINGS[to]}", to=to))
    while not list(tmp_path.glob(".aiockpt-*")):  # until something is written
        await asyncio.wait([task], timeout=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'onnx'"):
        convert_checkpoint(tmp_path, tmp_path / "x", to="onnx")  # type: ignore[arg-type]


def test_a_very_long_path_is_refused_where_it_can_not_be_pickled(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", **ALONE)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = {"w": ("a",) * 100_000}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(aiockpt.LoadError, match=r"nested too deeply .*c\.pt: convert to dcp"):
        convert_checkpoint(tmp_path / "c", tmp_path / "c.pt", to="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
