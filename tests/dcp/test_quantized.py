"""Torch's own quantized tensors, as dcp.save stores them."""

from __future__ import annotations

import dataclasses
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import aiockpt
from aiockpt.dcp import FileSystemReader, FileSystemWriter
from aiockpt.dcp.format_utils import dcp_to_torch_save
from tests.dcp.test_cast_items import Committing
from tests.states import raw_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns once in a process
WRITERS = [dcp.FileSystemWriter, FileSystemWriter]


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(6, 8, generator=made)
    scales = torch.rand(6, generator=made, dtype=torch.float64) + 0.1
    large = torch.randn(700, 1600, generator=made)
    return {
        "tensor": torch.quantize_per_tensor(values, 0.07, 3, torch.quint8),
        "ints": torch.quantize_per_tensor(values, 0.001, 0, torch.qint32),
        "channel": torch.quantize_per_channel(values, scales, torch.arange(6), 0, torch.qint8),
        "large": torch.quantize_per_channel(
            large, torch.rand(1600) + 0.1, torch.zeros(1600, dtype=torch.int64), 1, torch.quint8
        ),
        "plain": values,
    }


def blank(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: _zeros_like(value) for name, value in state.items()}


def _zeros_like(value: torch.Tensor) -> torch.Tensor:
    if not value.is_quantized:
        return torch.zeros_like(value)
    zeros = torch.zeros(value.shape)
    if value.qscheme() is torch.per_tensor_affine:
        return torch.quantize_per_tensor(zeros, 1.0, 0, value.dtype)
    count, axis = len(value.q_per_channel_scales()), value.q_per_channel_axis()
    return torch.quantize_per_channel(
        zeros, torch.ones(count), torch.zeros(count, dtype=torch.int64), axis, value.dtype
    )


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
    assert set(expected) == set(found)
    for name, value in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        if not value.is_quantized:
            assert raw_bytes(other) == raw_bytes(value)
            continue
        assert torch.equal(other.int_repr(), value.int_repr()), name
        assert torch.equal(other.dequantize(), value.dequantize()), name
        assert other.qscheme() == value.qscheme()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, Committing])
def test_dcp_load_fills_quantized_tensors(tmp_path: Path, writer: Any, planner: Any) -> None:
    state = state_of()
    dcp.save(state | {"step": 4}, storage_writer=writer(tmp_path / "c"))
    target = blank(state)
    kept = dict(target)
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"), planner=planner())
    assert_equal(state, target)
    assert all(target[name] is kept[name] for name in target)
    described = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert described["channel"].properties.dtype is torch.qint8


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_aiockpt_loads_quantized_tensors(tmp_path: Path, writer: Any, trust: bool) -> None:
    state = state_of(1)
    dcp.save(state, storage_writer=writer(tmp_path / "c"))
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_equal(state, ckpt.load(tmp_path / "c", trust=trust))
        target = blank(state)
        ckpt.load(tmp_path / "c", target, trust=trust)
        assert_equal(state, target)
        with ckpt.open(tmp_path / "c") as reader:
            assert_equal({"ints": state["ints"]}, {"ints": reader.read("ints")})
        report = ckpt.verify(tmp_path / "c")
        assert report.ok
        assert not report.problems


@pytest.mark.parametrize("writer", [*WRITERS, None])
def test_quantized_tensors_convert_to_a_torch_save_file(tmp_path: Path, writer: Any) -> None:
    state: dict[str, Any] = {"model": state_of(5), "step": 4, "more": {"last": torch.arange(9)}}
    shared = state["model"]["channel"]
    state["more"]["again"] = torch.nn.Parameter(shared, requires_grad=False)
    if writer is None:
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save(state, tmp_path / "c")
    else:
        dcp.save(state, storage_writer=writer(tmp_path / "c"))
    dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_equal(state["model"], loaded["model"])
    assert_equal(state["more"], loaded["more"])
    assert loaded["step"] == 4
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None


def test_nested_tensors_of_objects_convert_to_a_torch_save_file(tmp_path: Path) -> None:
    parts = [torch.arange(3.0), torch.arange(2.0, 7.0)]
    dcp.save({"object": Namespace(value=torch.nested.nested_tensor(parts))}, checkpoint_id=tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt", trust=True)
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert [part.tolist() for part in loaded["object"].value] == [part.tolist() for part in parts]


def _load_part(path: Path, target: torch.Tensor) -> None:
    """Fill a block of a tensor with a block of the stored tensor."""
    reader, planner, state = FileSystemReader(path), DefaultLoadPlanner(), {"tensor": target}
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner(state, metadata, True)
    (item,) = planner.create_local_plan().items
    part = dataclasses.replace(
        item, storage_offsets=torch.Size((1, 2)), dest_offsets=torch.Size((3, 4)), lengths=torch.Size((3, 4))
    )
    reader.read_data(dcp.LoadPlan([part]), planner).wait()


def test_a_part_of_a_quantized_tensor_is_read(tmp_path: Path) -> None:
    state = state_of(3)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    target = torch.quantize_per_tensor(torch.zeros(6, 8), 0.07, 3, torch.quint8)
    _load_part(tmp_path / "c", target)
    assert torch.equal(target[3:6, 4:8].int_repr(), state["tensor"].int_repr()[1:4, 2:6])
    assert not target[:3].dequantize().any()
    with pytest.raises(aiockpt.ShapeMismatchError, match="tensor: a part of it can't be filled"):
        _load_part(tmp_path / "c", torch.quantize_per_tensor(torch.zeros(6, 8), 0.07, 4, torch.quint8))


def test_damage_is_found(tmp_path: Path) -> None:
    state = state_of(4)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(state["ints"].int_repr().numpy().tobytes()) + 21] ^= 8
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointException, match=r"ints.*(CRC|damaged)"):
        dcp.load(blank(state), storage_reader=FileSystemReader(tmp_path / "c"))
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"ints.*(CRC|damaged)"):
            ckpt.load(tmp_path / "c")
        assert [problem.key for problem in ckpt.verify(tmp_path / "c").problems] == ["ints"]


def test_an_item_that_is_not_the_tensor_of_the_metadata_is_damaged(tmp_path: Path) -> None:
    state = {"q": state_of()["tensor"]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    dcp.save({"q": [1, 2]}, storage_writer=dcp.FileSystemWriter(tmp_path / "other"))
    reader = FileSystemReader(tmp_path / "c")
    metadata = reader.read_metadata()
    (tmp_path / "c" / "__0_0.distcp").write_bytes((tmp_path / "other" / "__0_0.distcp").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = (tmp_path / "c" / "__0_0.distcp").stat().st_size
    reader.set_up_storage_reader(metadata, True)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(blank(state), metadata, True)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"q is no tensor of the shape \(6, 8\)"):
        reader.read_data(planner.create_local_plan(), planner)
