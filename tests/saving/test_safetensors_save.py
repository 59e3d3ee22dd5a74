"""Saving in the safetensors format: its own library and transformers read the files back bit for bit."""

from __future__ import annotations

import errno
import gc
import json
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from safetensors.torch import save as their_bytes

import aiockpt
import aiockpt.dcp
from aiockpt.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.finders import names_in
from tests.states import large_state, raw_bytes, training_state

CHUNK = 64 << 10
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)),
]  # fmt: skip


def patterned(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Make a tensor in which adjacent bytes differ; bools are 0 and 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count) * 7 + seed) % (2 if dtype is torch.bool else 251)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def small_checkpointer(chunks: int = 3, io_threads: int = 2) -> aiockpt.SyncCheckpointer:
    return aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=chunks * CHUNK, io_threads=io_threads)


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def assert_holds(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), f"{name} has other bits"


@pytest.mark.parametrize("count", [3, 300_000], ids=["small", "large"])
def test_every_dtype_comes_back(count: int, tmp_path: Path) -> None:
    state = {str(dtype): patterned(dtype, count, seed=i) for i, dtype in enumerate(DTYPES)}
    with small_checkpointer() as ckpt:
        result = ckpt.save(state, tmp_path / "m.safetensors", format="safetensors")
    assert_holds(load_file(tmp_path / "m.safetensors"), state)
    assert names_in(tmp_path) == ["m.safetensors"]
    assert result.files == {"m.safetensors": (tmp_path / "m.safetensors").stat().st_size}
    assert result.tensor_bytes == sum(tensor.nbytes for tensor in state.values())
    begin = 8 + int.from_bytes((tmp_path / "m.safetensors").read_bytes()[:8], "little")
    assert begin % 8 == 0
    for name, facts in header(tmp_path / "m.safetensors").items():
        if name != "__metadata__":
            assert (begin + facts["data_offsets"][0]) % state[name].dtype.itemsize == 0, name


@pytest.mark.parametrize("side", [5, 300], ids=["small", "large"])
def test_every_view_is_stored_contiguously(side: int, tmp_path: Path) -> None:
    base = torch.arange(2.0 * side * side).reshape(2, side, side)
    complexes = patterned(torch.int32, 2 * side, seed=9).to(torch.float32).view(torch.complex64)
    state = {
        "transposed": base[0].t(),
        "permuted": base.permute(2, 0, 1),
        "every second": base[:, ::2, 1:],
        "half": base[0].to(torch.bfloat16).t(),
        "bytes": base[1].to(torch.uint8).t(),
        "expanded": torch.tensor([1.5, 2.5]).expand(side, 2),
        "channels last": torch.randn(2, 3, side, side).to(memory_format=torch.channels_last),
        "conjugated": complexes.conj(),
        "negated": torch._neg_view(base[0]),
        "imaginary": complexes.conj().imag,
        "0-d": torch.tensor(2.25),
        "empty": torch.zeros(0, 7, dtype=torch.int64),
        "empty too": torch.zeros(3, 0).t(),
        "one": torch.full((1, 1, 1), 7, dtype=torch.int16),
    }
    with small_checkpointer() as ckpt:
        ckpt.save(state, tmp_path / "m.safetensors", format="safetensors")
    expected = {name: tensor.resolve_conj().resolve_neg().contiguous() for name, tensor in state.items()}
    assert_holds(load_file(tmp_path / "m.safetensors"), expected)


def test_the_file_equals_that_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {f"{dtype}.{i}": patterned(dtype, i + 1, seed=i) for dtype in DTYPES for i in range(3)}
    tensors |= {'a "quoted" ünicode\n\x7f\\name': torch.ones(3), "": torch.zeros(2), "empty": torch.zeros(0)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(tensors, tmp_path / "m.safetensors", format="safetensors")
        ckpt.save({}, tmp_path / "nothing.safetensors", format="safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == their_bytes(tensors, metadata={"format": "pt"})
    assert load_file(tmp_path / "nothing.safetensors") == {}


def test_nested_dicts_get_dotted_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    state = {"model": OrderedDict(a={"b.c": weight}, l=[weight + 1, {"x": weight + 2}]), 5: {6: weight + 3}}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c", format="safetensors")
    expected = {"model.a.b.c": weight, "model.l.0": weight + 1, "model.l.1.x": weight + 2, "5.6": weight + 3}
    assert_holds(load_file(tmp_path / "c" / "model.safetensors"), expected)
    manifest = json.loads((tmp_path / "c" / ".aiockpt.json").read_text())
    assert manifest["containers"] == []
    assert "index" not in manifest


def test_metadata_becomes_text_in_the_header(tmp_path: Path) -> None:
    metadata = {"run": "ä/1", "step": 7, "lr": 0.5, "tags": ["x", None], "done": True}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.ones(2)}, tmp_path / "c", format="safetensors", metadata=metadata)
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt", "run": "ä/1", "step": "7", "lr": "0.5", "tags": '["x", null]', "done": "true",
        }  # fmt: skip
    assert json.loads((tmp_path / "c" / ".aiockpt.json").read_text())["metadata"] == metadata


def test_metadata_that_grows_moves_the_tensors(tmp_path: Path) -> None:
    """Each save writes its own header, whether or not it fits into the room of the previous one."""
    state = {"w": patterned(torch.float32, 100_000), "b": patterned(torch.bool, 3)}
    with small_checkpointer() as ckpt:
        for number, step in enumerate((9, 10, 10**50, 1)):
            state["w"] += 1
            path = tmp_path / f"{number}.safetensors"
            ckpt.save(state, path, format="safetensors", metadata={"step": step})
            assert_holds(load_file(path), state)
            with safe_open(path, "pt") as file:
                assert file.metadata() == {"format": "pt", "step": str(step)}


class Versioned(torch.nn.Linear):
    """Has stored the logarithm of its bias since its second version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") is None or metadata["version"] < 2:
            state[prefix + "bias"] = state[prefix + "bias"].log()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("name", ["c.safetensors", "c", "dcp"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_versions_of_modules_are_recorded(name: str, is_nested: bool, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(Versioned(2, 2), torch.nn.Linear(2, 2))
        return {"m": model} if is_nested else model

    saved, fresh = make(1), make(2)
    path = tmp_path / name
    aiockpt.save(saved, path, **({} if name == "dcp" else {"format": "safetensors"}))
    aiockpt.load(path, fresh)
    for one, other in zip(*((each["m"] if is_nested else each).parameters() for each in (saved, fresh)), strict=True):
        assert torch.equal(one, other)
    if not is_nested:  # else the keys of the file are those of no module
        again = make(3)
        again.load_state_dict(aiockpt.load(path))
        assert torch.equal(again[0].bias, saved[0].bias)
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        assert not any("version" in key for key in reader.metadata)


def test_a_file_without_versions_is_loaded_as_torch_does(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.full((2,), 2.0)}, tmp_path / "old.safetensors")
    fresh = Versioned(2, 2)
    aiockpt.load(tmp_path / "old.safetensors", fresh)
    assert torch.equal(fresh.bias, torch.full((2,), 2.0).log())


def test_a_directory_of_one_file(tmp_path: Path) -> None:
    state = large_state()
    with small_checkpointer() as ckpt:
        result = ckpt.save(state, tmp_path / "c", format="safetensors")
    assert names_in(tmp_path / "c") == [".aiockpt.json", "model.safetensors"]
    assert_holds(load_file(tmp_path / "c" / "model.safetensors"), state)
    assert result.files == {"model.safetensors": (tmp_path / "c" / "model.safetensors").stat().st_size}


@pytest.mark.parametrize(("shard_bytes", "count"), [(1_100_000, 3), (1, 8), (524_288, 7), (10**9, 1)])
def test_a_set_of_files(shard_bytes: int, count: int, tmp_path: Path) -> None:
    """Also with more files than threads and chunks."""
    state = {**large_state(6), "tiny": torch.ones(3), "0-d": torch.tensor(5)}
    with small_checkpointer(chunks=1, io_threads=2) as ckpt:
        result = ckpt.save(state, tmp_path / "c", format="safetensors", shard_bytes=shard_bytes, metadata={"step": 3})
    count_name = f"{count:05d}"
    shards = [f"model-{i + 1:05d}-of-{count_name}.safetensors" for i in range(count)]
    if count == 1:
        shards = ["model.safetensors"]
    documents = [".aiockpt.json"] + ["model.safetensors.index.json"] * (count > 1)
    assert names_in(tmp_path / "c") == sorted(shards + documents)
    found: dict[str, torch.Tensor] = {}
    weight_map = {}
    for shard in shards:
        tensors = load_file(tmp_path / "c" / shard)
        with safe_open(tmp_path / "c" / shard, "pt") as file:
            assert file.metadata() == {"format": "pt", "step": "3"}
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= shard_bytes
        weight_map |= dict.fromkeys(tensors, shard)
        found |= tensors
    assert_holds(found, state)
    total = sum(tensor.nbytes for tensor in state.values())
    assert result.tensor_bytes == total
    if count > 1:
        index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
        assert index == {"metadata": {"total_size": total}, "weight_map": weight_map}
    facts = json.loads((tmp_path / "c" / ".aiockpt.json").read_text())["files"]
    assert sorted(facts) == [name for name in names_in(tmp_path / "c") if name != ".aiockpt.json"]
    for name, fact in facts.items():
        data = (tmp_path / "c" / name).read_bytes()
        assert (fact["bytes"], int(fact["crc32"], 16)) == (len(data), zlib.crc32(data)), name
        assert result.files[name] == len(data)


@pytest.mark.asyncio
async def test_many_files_in_a_row_with_little_memory(tmp_path: Path) -> None:
    """Saves of more files than may be open at once wait for each other's staging memory."""
    states = [{f"w{i}": torch.full((n * 20_000,), float(i)) for i in range(12)} for n in (1, 2, 3)]
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=3 * CHUNK, io_threads=2) as ckpt:
        saves = [
            ckpt.save(state, tmp_path / str(n), format="safetensors", shard_bytes=100) for n, state in enumerate(states)
        ]
        events = [event async for event in saves[0].progress()]
        for save in saves:
            await save
    assert events[-1].phase == "committed"
    assert events[-1].done_bytes == events[-1].total_bytes == events[-1].staged_bytes > 12 * 80_000
    for n, state in enumerate(states):
        found = {}
        for number in range(12):
            found |= load_file(tmp_path / str(n) / f"model-{number + 1:05d}-of-00012.safetensors")
        assert_holds(found, state)


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.arange(40_000.0).reshape(200, 200)
    state = {"wte": weight, "head": weight, "later": {"again": weight}, "rows": weight[:50], "turned": weight.t()}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "m.safetensors", format="safetensors", metadata={"step": 1})
        ckpt.save(state, tmp_path / "c", format="safetensors", shard_bytes=100_000)
    expected = {"wte": weight, "rows": weight[:50], "turned": weight.t().contiguous()}
    assert_holds(load_file(tmp_path / "m.safetensors"), expected)
    aliases = {"head": "wte", "later.again": "wte"}
    assert header(tmp_path / "m.safetensors")["__metadata__"] == {"format": "pt", "step": "1", **aliases}
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["rows", "turned", "wte"]
    assert index["metadata"] == {"total_size": 160_000 + 40_000 + 160_000}
    for name, shard in index["weight_map"].items():
        found = header(tmp_path / "c" / shard)["__metadata__"]
        assert found == ({"format": "pt", **aliases} if name == "wte" else {"format": "pt"})


def test_load_model_of_safetensors_restores_ties(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(30, 8)
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 30, bias=False)
            self.head.weight = self.wte.weight

    model, other = Model(), Model()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(model.state_dict(), tmp_path / "m.safetensors", format="safetensors")
    assert load_model(other, tmp_path / "m.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.wte.weight)
    assert other.head.weight is other.wte.weight


@pytest.mark.parametrize("path", ["m.safetensors", "c"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "x.y is not a plain tensor.*metadata=.*format='dcp'"),
        ("text", "x.y is not a plain tensor"),
        (None, "x.y is not a plain tensor"),
        ([1, 2], "x.y is not a plain tensor"),
        (lambda: None, "x.y"),
        (torch.eye(3).to_sparse(), "x.y is a tensor of 2 dimensions and of torch.sparse_coo, .*format='dcp'"),
        (torch.zeros(3, dtype=torch.complex128), "x.y .* torch.complex128, which safetensors has no name for"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "x.y .* torch.bits8"),
        (torch.zeros(3, device="meta"), "x.y is on the meta device"),
    ],
    ids=["int", "text", "None", "list", "function", "sparse", "complex128", "bits", "meta"],
)  # fmt: skip
def test_other_leaves_are_refused_at_the_call(value: Any, message: str, path: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "x": {"y": value}, "z": torch.zeros(3)}
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=message):
            ckpt.submit(state, tmp_path / path, format="safetensors")
        assert names_in(tmp_path) == []
        ckpt.save({"w": torch.ones(3)}, tmp_path / path, format="safetensors")


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_quantized_tensors_are_refused_at_the_call(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=r"x\.y .* torch\.qint8"):
        ckpt.submit({"w": torch.ones(3), "x": {"y": quantized}}, tmp_path / "c", format="safetensors")


def test_the_state_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    message = r"optim\.param_groups.* is not a plain tensor"
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=message):
        ckpt.submit(training_state(), tmp_path / "c", format="safetensors")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch lacks the dtype")
def test_a_packed_float4_tensor_needs_a_dimension(tmp_path: Path) -> None:
    single = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0]
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match="x is a tensor of 0 dimensions"):
        ckpt.submit({"x": single}, tmp_path / "c", format="safetensors")


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("__metadata__", {}, "__metadata__ is reserved"),
        ("w", {"format": "np"}, r"metadata\['format'\].*must be 'pt'"),
        ("w", {"half": "\ud800"}, r"metadata\['half'\] is no text"),
        ("w", {"x": object()}, "metadata"),
    ],
)
def test_invalid_header_entries_are_refused_at_the_call(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.SaveError, match=message):
        ckpt.submit({name: torch.ones(1)}, tmp_path / "c", format="safetensors", metadata=metadata)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "metadata", "message"),
    [
        ({"half \ud800": torch.ones(1)}, {}, "no text that a safetensors file can hold"),
        ({"a": torch.ones(1)}, {"b": 1}, "b is both a tied tensor"),
    ],
)
def test_invalid_header_entries_are_refused_during_the_save(
    state: dict[str, torch.Tensor], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "a" in state:
        state = {**state, "b": state["a"]}
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=message):
            ckpt.save(state, tmp_path / "m.safetensors", format="safetensors", metadata=metadata)
        assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "path", "message"),
    [
        ({"format": "pickle"}, "c", "format is 'pickle'; it must be 'dcp', 'safetensors' or 'torch'"),
        ({"shard_bytes": 5}, "c", "shard_bytes is for format='safetensors'"),
        ({"format": "safetensors", "shard_bytes": 5}, "m.safetensors", "the path names one safetensors file"),
        ({"format": "safetensors", "shard_bytes": 0}, "c", "shard_bytes is 0"),
        ({"format": "safetensors", "shard_bytes": -1}, "c", "shard_bytes is -1"),
        ({"format": "safetensors", "shard_bytes": True}, "c", "shard_bytes is True"),
        ({"format": "safetensors", "shard_bytes": 1.5}, "c", "shard_bytes is 1.5"),
        ({"format": "safetensors", "shard_bytes": "5GB"}, "c", "shard_bytes is '5GB'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], path: str, message: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        for call in (ckpt.save, ckpt.submit):
            with pytest.raises(ValueError, match=message):
                call({"w": torch.ones(1)}, tmp_path / path, **arguments)
    assert names_in(tmp_path) == []


def test_formats_take_turns(tmp_path: Path) -> None:
    """A cached plan is not reused for the other format, or for another `shard_bytes`."""
    state = {"w": torch.arange(300_000.0).reshape(1000, 300).t(), "b": torch.arange(5)}
    expected = {"w": state["w"].contiguous(), "b": state["b"]}
    with small_checkpointer() as ckpt:
        for turn in range(3):
            state["w"] += 1
            expected["w"] += 1
            ckpt.save(state, tmp_path / f"dcp{turn}")
            assert_holds(ckpt.load(tmp_path / f"dcp{turn}"), state)
            ckpt.save(state, tmp_path / f"{turn}.safetensors", format="safetensors")
            assert_holds(load_file(tmp_path / f"{turn}.safetensors"), expected)
            ckpt.save(state, tmp_path / f"one{turn}", format="safetensors")
            assert_holds(load_file(tmp_path / f"one{turn}" / "model.safetensors"), expected)
            ckpt.save(state, tmp_path / f"two{turn}", format="safetensors", shard_bytes=50)
            found = load_file(tmp_path / f"two{turn}" / "model-00001-of-00002.safetensors")
            found |= load_file(tmp_path / f"two{turn}" / "model-00002-of-00002.safetensors")
            assert_holds(found, expected)
        state["w"] = state["w"].contiguous()
        ckpt.save(state, tmp_path / "last.safetensors", format="safetensors")
        assert_holds(load_file(tmp_path / "last.safetensors"), expected)


def test_a_file_is_created_exclusively_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.ones(1)}, path, format="safetensors")
        before = path.read_bytes()
        with pytest.raises(aiockpt.CheckpointExistsError, match="exists already"):
            ckpt.submit({"w": torch.zeros(1)}, path, format="safetensors")
        assert path.read_bytes() == before
        ckpt.save({"v": torch.zeros(2)}, path, format="safetensors", overwrite=True)
        assert_holds(load_file(path), {"v": torch.zeros(2)})
        ckpt.save({"w": torch.ones(1)}, path, overwrite=True)
        assert_holds(ckpt.load(path), {"w": torch.ones(1)})
        ckpt.save({"v": torch.zeros(2)}, path, format="safetensors", overwrite=True)
        assert_holds(load_file(path), {"v": torch.zeros(2)})
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(aiockpt.CheckpointExistsError, match=r"notes\.txt is a file, but neither"):
            ckpt.submit({"w": torch.zeros(1)}, tmp_path / "notes.txt", format="safetensors", overwrite=True)
        (tmp_path / "link.safetensors").symlink_to(path)
        ckpt.save({"w": torch.ones(3)}, tmp_path / "link.safetensors", overwrite=True)
        assert not (tmp_path / "link.safetensors").is_symlink()
        assert_holds(load_file(path), {"v": torch.zeros(2)})
    assert names_in(tmp_path) == ["link.safetensors", "m.safetensors", "notes.txt"]


def test_a_directory_is_replaced_if_it_holds_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(large_state(2), path, format="safetensors", shard_bytes=100)
        with pytest.raises(aiockpt.CheckpointExistsError, match="exists already"):
            ckpt.submit({"w": torch.ones(1)}, path, format="safetensors")
        ckpt.save({"w": torch.ones(1)}, path, format="safetensors", overwrite=True)
        assert names_in(path) == [".aiockpt.json", "model.safetensors"]
        ckpt.save({"w": torch.ones(2)}, path, overwrite=True)
        assert_holds(ckpt.load(path), {"w": torch.ones(2)})
        ckpt.save({"w": torch.ones(3)}, path, format="safetensors", overwrite=True)
        (path / "notes.txt").write_text("mine")
        with pytest.raises(aiockpt.CheckpointExistsError, match=r"holds other things .*\(notes.txt\)"):
            ckpt.submit({"w": torch.ones(1)}, path, format="safetensors", overwrite=True)
    assert names_in(path) == [".aiockpt.json", "model.safetensors", "notes.txt"]


@pytest.mark.asyncio
async def test_a_file_that_appears_during_the_save_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    storage = GatedStorage(LocalStorage(), ["commit"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save({"w": torch.ones(1)}, path, format="safetensors", storage=storage)
        await storage.reached["commit"]
        assert not path.exists()
        path.write_text("mine")
        storage.open("commit")
        with pytest.raises(aiockpt.CheckpointExistsError, match="has appeared during the save"):
            await save
    assert path.read_text() == "mine"
    assert names_in(tmp_path) == ["m.safetensors"]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["m.safetensors", "c"])
@pytest.mark.parametrize(("step", "nth"), [("begin", 1), ("create", 1), ("write", 2), ("finish", 1), ("commit", 1)])
async def test_a_failure_leaves_nothing_new(step: str, nth: int, path: str, tmp_path: Path) -> None:
    faulty = FaultyStorage(LocalStorage(), step, OSError(errno.EIO, "Input/output error"), nth=nth)
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK) as ckpt:
        await ckpt.save({"old": torch.ones(5)}, tmp_path / path, format="safetensors")
        save = ckpt.save(large_state(3), tmp_path / path, format="safetensors", overwrite=True, storage=faulty)
        with pytest.raises(aiockpt.SaveError, match="Input/output error"):
            await save
        assert names_in(tmp_path) == [path]
        file = tmp_path / path if path != "c" else tmp_path / "c" / "model.safetensors"
        assert_holds(load_file(file), {"old": torch.ones(5)})
        await ckpt.save(large_state(3), tmp_path / path, format="safetensors", overwrite=True)
        assert_holds(load_file(file), large_state(3))


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["m.safetensors", "c", "m.pt"])
async def test_a_cancelled_save_leaves_nothing(path: str, tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["finish"])
    async with aiockpt.AsyncCheckpointer() as ckpt:
        save = ckpt.save(large_state(), tmp_path / path, format="safetensors" if path == "c" else None, storage=storage)
        await storage.reached["finish"]
        assert await save.cancel()
        with pytest.raises(aiockpt.SaveCancelledError):
            await save
        assert names_in(tmp_path) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["m.safetensors", "m.pt"])
async def test_a_change_before_staged_is_detected(path: str, tmp_path: Path) -> None:
    state = large_state()
    async with aiockpt.AsyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=CHUNK) as ckpt:
        gate = GatedStorage(LocalStorage(), ["write"])
        save = ckpt.save(state, tmp_path / path, storage=gate)
        await gate.reached["write"]
        state["w5"].add_(1)
        gate.open("write")
        with pytest.raises(aiockpt.TornSnapshotError, match="w5"):
            await save
    assert names_in(tmp_path) == []


def test_a_tensor_with_a_new_layout_is_planned_again(tmp_path: Path) -> None:
    """The same names, with other dtypes, sizes and strides."""
    with small_checkpointer() as ckpt:
        for number, dtype in enumerate((torch.float32, torch.int64, torch.bool)):
            state = {"a": patterned(dtype, 300, 500), "b": patterned(torch.float16, number + 2)}
            state["a"] = state["a"].t() if number % 2 else state["a"]
            ckpt.save(state, tmp_path / f"{number}.safetensors", format="safetensors")
            expected = {name: tensor.contiguous() for name, tensor in state.items()}
            assert_holds(load_file(tmp_path / f"{number}.safetensors"), expected)


def _gpt(transformers: Any) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def _llama(transformers: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_gpt, _llama], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_bytes", [None, 4000])
def test_transformers_loads_the_files(make: Callable[[Any], Any], shard_bytes: int | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="optional; where it is installed, it must read our files")
    model = make(transformers)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(model.state_dict(), tmp_path / "c", format="safetensors", shard_bytes=shard_bytes)
    assert (tmp_path / "c" / "model.safetensors.index.json").exists() == (shard_bytes is not None)
    model.config.save_pretrained(tmp_path / "c")
    loaded, info = type(model).from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_holds(dict(loaded.state_dict()), dict(model.state_dict()))
    del loaded, model
    gc.collect()


# --- paths -------------------------------------------------------------------------------------------


def test_the_suffix_of_the_path_selects_the_format(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": torch.ones(3)}, path)
        assert torch.equal(load_file(path)["w"], torch.ones(3))
        ckpt.submit({"w": torch.zeros(3)}, str(path), overwrite=True).written.result()
        assert torch.equal(load_file(path)["w"], torch.zeros(3))
        with pytest.raises(ValueError, match=r"m.safetensors ends in .safetensors, which contradicts format='dcp'"):
            ckpt.save({"w": torch.ones(3)}, tmp_path / "new" / "m.safetensors", format="dcp")
        with pytest.raises(ValueError, match="compress is for format='dcp'"):
            ckpt.save({"w": torch.ones(3)}, path, overwrite=True, compress="zstd")
        with pytest.raises(aiockpt.SaveError, match="step"):
            ckpt.save({"step": object()}, tmp_path / "n.safetensors")
        ckpt.save({"w": torch.ones(3), "step": 3}, tmp_path / "m")
    assert names_in(tmp_path) == ["m", "m.safetensors"]
    with pytest.raises(ValueError, match=r"ends in .safetensors, and this writer writes to directories"):
        aiockpt.dcp.FileSystemWriter(path)
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="which contradicts format='dcp'"):
        torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "n.safetensors")


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is expanded wherever a path is accepted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(3)}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.save(state, "~/a").path == str(tmp_path / "a")
        ckpt.save(state, Path("~/m.safetensors"))
        assert torch.equal(ckpt.load("~/a")["w"], state["w"])
        assert ckpt.verify("~/a").ok
        with pytest.raises(aiockpt.CheckpointExistsError, match=str(tmp_path / "a")):
            ckpt.save(state, "~/a")
        ckpt.delete("~/m.safetensors")
        assert ckpt.clean("~") == []
        ckpt.save(state, "./~/a")  # a directory of that name
    assert (tmp_path / "~" / "a" / ".metadata").exists()
    target = {"w": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        dcp.save(state, storage_writer=aiockpt.dcp.FileSystemWriter("~/b"))
        dcp.load(target, storage_reader=aiockpt.dcp.FileSystemReader("~/b"))
    assert torch.equal(target["w"], state["w"])
    dcp_to_torch_save("~/b", "~/b.pt")
    torch_save_to_dcp("~/b.pt", "~/c")
    (tmp_path / "file").touch()
    with aiockpt.SyncCheckpointer(fallback_path="~/other", retries=None) as ckpt:
        assert ckpt.save(state, "~/file/d").path == str(tmp_path / "other" / "d")
    assert names_in(tmp_path) == ["a", "b", "b.pt", "c", "file", "other", "~"]


@pytest.mark.asyncio
async def test_the_home_directory_without_a_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"w": torch.ones(3)}, "~/a")
    async with aiockpt.open("~/a") as reader:
        assert torch.equal(await reader.read("w"), torch.ones(3))
