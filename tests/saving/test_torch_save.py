"""Saving to one file of torch.save: torch reads it back bit for bit, with all checksums right."""

from __future__ import annotations

import errno
import io
import tempfile
import uuid
import warnings
import zipfile
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.examples import examples
from tests.finders import names_in
from tests.states import assert_same, large_state, random_tensor, raw_bytes, storable_dtypes, training_state
from tests.test_roundtrip import _OBJECTS, _states, _tensors

CHUNK = 64 << 10


@dataclass
class Config:
    weights: list[torch.Tensor]
    name: str = "x"


def small_checkpointer(**options: Any) -> aiockpt.SyncCheckpointer:
    return aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=3 * CHUNK, io_threads=2, **options)


def check_sums(path: Path) -> None:
    """Check the CRC-32 of each record in the directory and behind its bytes."""
    data = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        for record in archive.infolist():
            name, extra = (
                int.from_bytes(data[at : at + 2], "little")
                for at in (record.header_offset + 26, record.header_offset + 28)
            )
            end = record.header_offset + 30 + name + extra + record.file_size
            if record.file_size:
                assert data[end : end + 8] == b"PK\7\10" + record.CRC.to_bytes(4, "little"), record.filename


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@examples(60, HealthCheck)
@given(state=_states(st.one_of(_tensors(), _OBJECTS)))
def test_any_state_is_what_torch_save_makes_of_it(state, folder: Path) -> None:
    path = folder / f"{uuid.uuid4().hex}.pt"
    with aiockpt.SyncCheckpointer(chunk_bytes=4096, staging_bytes=8192) as ckpt:
        ckpt.save(state, path)
    check_sums(path)
    theirs = io.BytesIO()
    torch.save(state, theirs)
    theirs.seek(0)
    assert_same(torch.load(theirs, weights_only=False), torch.load(path, weights_only=False))
    assert_same(state, torch.load(path, weights_only=False, mmap=True))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_every_way_to_read_it(suffix: str, writer: Any, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    state = {**training_state(), "large": large_state(3), "counts": Counter("aab"), "size": torch.Size([2])}
    with small_checkpointer(writer=writer) as ckpt:
        for turn in range(2):
            state["step"] = 10**turn
            result = ckpt.save(state, path, overwrite=bool(turn))
            check_sums(path)
            for options in ({}, {"mmap": True}):
                assert_same(state, torch.load(path, weights_only=True, **options))
            assert_same(state, ckpt.load(path))
        assert ckpt.verify(path).ok
        with ckpt.open(path) as reader:
            assert reader.format == "torch"
            assert result.tensors + result.objects == len(reader)
            assert_same(state["large"]["w1"][5:900], reader.read("large.w1", slice(5, 900)))
    assert names_in(tmp_path) == [path.name]
    assert result.files == {path.name: path.stat().st_size}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("count", [3, 300_000], ids=["small", "large"])
def test_every_dtype(count: int, tmp_path: Path) -> None:
    state = {str(dtype): random_tensor(dtype, (count,), seed=i) for i, dtype in enumerate(storable_dtypes())}
    with small_checkpointer() as ckpt:
        result = ckpt.save(state, tmp_path / "m.pt")
    check_sums(tmp_path / "m.pt")
    assert_same(state, torch.load(tmp_path / "m.pt", weights_only=True))
    assert result.tensor_bytes == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("side", [5, 300], ids=["small", "large"])
def test_every_view(side: int, tmp_path: Path) -> None:
    base = torch.arange(2.0 * side * side).reshape(2, side, side)
    complexes = torch.complex(base[0], base[1])
    state = {
        "transposed": base[0].t(),
        "every second": base[:, ::2, 1:],
        "part": base[1, 1:],
        "expanded": torch.tensor([1.5, 2.5]).expand(side, 2),
        "channels last": torch.randn(2, 3, side, side).to(memory_format=torch.channels_last),
        "conjugated": complexes.conj(),
        "negated": torch._neg_view(base[0]),
        "0-d": torch.tensor(2.25),
        "empty": torch.zeros(0, 7, dtype=torch.int64),
        "empty too": torch.zeros(3, 0).t(),
        "of a parameter": torch.nn.Parameter(torch.ones(side)),
    }
    with small_checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_same({name: tensor.detach() for name, tensor in state.items()}, found)
    for name in ("transposed", "channels last"):
        assert found[name].stride() == state[name].stride(), name
    # The elements of a view are stored, not the memory that it is a view of.
    assert {name: tensor.untyped_storage().nbytes() for name, tensor in found.items()} == {
        name: tensor.nbytes for name, tensor in state.items()
    }


@pytest.mark.parametrize("side", [5, 300], ids=["small", "large"])
@pytest.mark.parametrize("turned", [False, True])
def test_tied_tensors_are_stored_once_and_come_back_tied(side: int, turned: bool, tmp_path: Path) -> None:
    weight = torch.arange(2.0 * side * side).reshape(2 * side, side)
    weight = weight.t() if turned else weight
    with small_checkpointer() as ckpt:
        result = ckpt.save({"in": weight, "deep": [{"out": weight}], "part": weight[:1].clone()}, tmp_path / "m.pt")
        found = torch.load(tmp_path / "m.pt", weights_only=True)
        loaded = ckpt.load(tmp_path / "m.pt")
    assert result.tensor_bytes == weight.nbytes + weight[:1].nbytes
    for state in (found, loaded):
        assert state["in"].data_ptr() == state["deep"][0]["out"].data_ptr()
        assert raw_bytes(state["deep"][0]["out"]) == raw_bytes(weight)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_objects_are_in_the_one_pickle_as_they_were_at_the_call(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "config": Config([torch.arange(4.0), torch.ones(70_000)]),
        "list": [1, "two", {"three"}],
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "array": np.arange(12.0).reshape(3, 4),
        "w": torch.ones(100_000),
    }
    with small_checkpointer() as ckpt:
        with pytest.warns(aiockpt.SafeGlobalsWarning, match="config is a"):
            stage, write = ckpt.submit(values, tmp_path / "m.pt")
        values["list"].append("later")
        values["config"].weights[0].zero_()
        stage.result()
        write.result()
    check_sums(tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=False)
    assert list(found) == list(values)
    assert found["list"] == [1, "two", {"three"}]
    assert_same([torch.arange(4.0), torch.ones(70_000)], found["config"].weights)
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(found["quantized"].int_repr(), values["quantized"].int_repr())
    assert_same(torch.arange(12.0, dtype=torch.float64).reshape(3, 4), found["array"])


def test_the_versions_of_modules_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    aiockpt.save({"model": model}, tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert (type(found), found._metadata) == (OrderedDict, model.state_dict()._metadata)
    aiockpt.load(tmp_path / "m.pt", {"model": model})


@pytest.mark.parametrize("state", [{}, {"step": 1, "name": "x"}, {"empty": torch.zeros(0, 3)}])
def test_without_bytes_of_tensors(state: dict[str, Any], tmp_path: Path) -> None:
    aiockpt.save(state, tmp_path / "m.pt")
    check_sums(tmp_path / "m.pt")
    assert_same(state, torch.load(tmp_path / "m.pt", weights_only=True))


def test_torch_set_to_compute_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        aiockpt.save({**large_state(2), "x": [torch.ones(3), 5]}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    check_sums(tmp_path / "m.pt")


def test_an_object_that_can_not_be_pickled_is_refused_at_the_call(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=r"x\.y is a .*can't be pickled"):
        ckpt.submit({"x": {"y": lambda: None}}, tmp_path / "m.pt")
    assert names_in(tmp_path) == []


class _OneWay:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_an_object_that_can_not_be_unpickled_is_named(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=r"x\.y can't be put into the one"):
        ckpt.save({"x": {"y": _OneWay()}}, tmp_path / "m.pt")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "path", "message"),
    [
        ({"metadata": {"step": 1}}, "m.pt", "no place for metadata=: put it into the state"),
        ({"compress": "zstd"}, "m.pt", "compress is for format='dcp'"),
        ({"shard_bytes": 5}, "m.pt", "shard_bytes is for format='safetensors'"),
        ({"fqn_to_index_mapping": {"w": 1}}, "m.pt", "fqn_to_index_mapping is for format='safetensors'"),
        ({"separation_hint": "optim"}, "m.pt", "separation_hint is for format='dcp'"),
        ({"format": "torch"}, "m.safetensors", "contradicts format='torch'"),
        ({"format": "pickle"}, "m.pt", "format is 'pickle'; it must be 'dcp', 'safetensors' or 'torch'"),
    ],
)
def test_options_that_contradict_are_refused(
    arguments: dict[str, Any], path: str, message: str, tmp_path: Path
) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(ValueError, match=message):
        ckpt.submit({"w": torch.ones(1)}, tmp_path / path, **arguments)
    assert names_in(tmp_path) == []


def test_the_format_can_be_named(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.ones(3)}, tmp_path / "weights", format="torch")
        ckpt.save({"w": torch.ones(3)}, tmp_path / "last.ckpt", format="dcp")
        assert_same(ckpt.load(tmp_path / "last.ckpt"), torch.load(tmp_path / "weights", weights_only=True))
        with pytest.raises(aiockpt.CheckpointExistsError, match="exists already"):
            ckpt.save({"w": torch.ones(3)}, tmp_path / "last.ckpt")
        ckpt.save({"w": torch.ones(4)}, tmp_path / "last.ckpt", overwrite=True)
        (tmp_path / "notes.bin").write_text("mine")
        with pytest.raises(aiockpt.CheckpointExistsError, match="overwrite=True replaces a checkpoint and nothing"):
            ckpt.save({"w": torch.ones(4)}, tmp_path / "notes.bin", overwrite=True)
    assert_same({"w": torch.ones(4)}, torch.load(tmp_path / "last.ckpt", weights_only=True))


@pytest.mark.asyncio
@pytest.mark.parametrize(("step", "nth"), [("begin", 1), ("create", 1), ("write", 2), ("finish", 1), ("commit", 1)])
async def test_a_failure_leaves_the_file_that_was_there(step: str, nth: int, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    faulty = FaultyStorage(LocalStorage(), step, OSError(errno.EIO, "Input/output error"), nth=nth)
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK) as ckpt:
        await ckpt.save({"old": torch.ones(5)}, path)
        save = ckpt.save(large_state(3), path, overwrite=True, storage=faulty)
        with pytest.raises(aiockpt.SaveError, match="Input/output error"):
            await save
        assert names_in(tmp_path) == ["m.pt"]
        assert_same({"old": torch.ones(5)}, torch.load(path, weights_only=True))
        await ckpt.save(large_state(3), path, overwrite=True)
        assert_same(large_state(3), torch.load(path, weights_only=True))


@pytest.mark.asyncio
async def test_a_tensor_that_changes_its_shape_before_it_is_staged(tmp_path: Path) -> None:
    state = large_state()
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        gate = GatedStorage(LocalStorage(), ["write"])
        save = ckpt.save(state, tmp_path / "m.pt", storage=gate)
        await gate.reached["write"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state["w5"].resize_(17)
        gate.open("write")
        with pytest.raises(aiockpt.TornSnapshotError, match="w5"):
            await save
    assert names_in(tmp_path) == []


def test_the_fallback_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with aiockpt.SyncCheckpointer(fallback_path=tmp_path / "spare", retries=None) as ckpt:
        result = ckpt.save(large_state(2), tmp_path / "file" / "m.pt")
    assert result.path == str(tmp_path / "spare" / "m.pt")
    check_sums(tmp_path / "spare" / "m.pt")
    assert_same(large_state(2), torch.load(result.path, weights_only=True))
