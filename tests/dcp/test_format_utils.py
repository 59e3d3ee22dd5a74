from __future__ import annotations

import asyncio
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import format_utils as theirs
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import aiockpt
from aiockpt.dcp import convert
from aiockpt.dcp import format_utils as ours
from aiockpt.reading import executor
from tests.dcp.test_reader import Settings, state_of
from tests.memory import peak_growth
from tests.ranks.world import World
from tests.states import assert_same, random_tensor, raw_bytes, training_state


def stock_load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def assert_sound(path: Path) -> None:
    """Assert that every record of the file matches its CRC."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.CRC for info in archive.infolist() if info.file_size)


# --- from a checkpoint to a torch.save file -------------------------------------------------------


def test_a_checkpoint_of_torch_converts_as_with_torchs_function(tmp_path: Path) -> None:
    dcp.save(state_of(), checkpoint_id=tmp_path / "c")
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "ours.pt")
    theirs.dcp_to_torch_save(tmp_path / "c", tmp_path / "theirs.pt")
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert_same(torch.load(tmp_path / "theirs.pt", weights_only=True), loaded)
    assert_same(state_of(), loaded)
    assert_sound(tmp_path / "ours.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "ours.pt", "theirs.pt"]


def test_a_checkpoint_of_aiockpt_converts_to_the_saved_state(tmp_path: Path) -> None:
    state = training_state() | {"key": {3: torch.rand(4), "t": (torch.rand(2), [torch.rand(1)])}}
    state["tied"] = state["model"]["0.weight"]
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "c")
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_same(state, loaded)
    assert loaded["tied"].data_ptr() == loaded["model"]["0.weight"].data_ptr()
    assert_sound(tmp_path / "m.pt")


BASE = torch.arange(1.0, 17.0).view(4, 4)
COMPLEX = torch.complex(BASE, -BASE)
VIEWS = {
    "halves": {"a": BASE[:2], "b": BASE[2:]},
    "turned": {"a": BASE, "b": BASE.t()},
    "negated": {"a": BASE, "b": torch._neg_view(BASE)},
    "conjugated": {"a": COMPLEX, "b": COMPLEX.conj()},
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_one_storage_become_separate_tensors(kind: str, tmp_path: Path) -> None:
    expected = {name: tensor.clone().resolve_conj().resolve_neg() for name, tensor in VIEWS[kind].items()}
    torch.save(VIEWS[kind], tmp_path / "m.pt")
    ours.dcp_to_torch_save(tmp_path / "m.pt", tmp_path / "ours.pt")
    assert_same(expected, torch.load(tmp_path / "ours.pt", weights_only=True))
    ours.convert_checkpoint(tmp_path / "m.pt", tmp_path / "m.safetensors", to="safetensors")
    assert_same(expected, load_file(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("writer", ["torch", "aiockpt"])
def test_large_tensors_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    monkeypatch.setattr(convert, "_CHUNK_BYTES", 64 * 1024)
    monkeypatch.setattr(executor, "BUFFER_BYTES", 64 * 1024)
    state = {
        "large": random_tensor(torch.float32, (777, 913), 1),
        "strided": random_tensor(torch.bfloat16, (300, 1001), 2).t(),
        "lattice": random_tensor(torch.float32, (10, 3, 50, 70), 3).to(memory_format=torch.channels_last),
        "small": random_tensor(torch.int64, (5,), 4),
        "bytes": random_tensor(torch.uint8, (1_000_003,), 5),
        "conjugated": random_tensor(torch.complex64, (200, 300), 6).conj(),
    }
    if writer == "torch":
        dcp.save(state, checkpoint_id=tmp_path / "c")
    else:
        with aiockpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(state, tmp_path / "c")
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    assert_same(state, torch.load(tmp_path / "m.pt", weights_only=True))
    assert_sound(tmp_path / "m.pt")


def _save_sharded(rank: int, world_size: int, path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2))
    whole = sharded_whole()
    state: dict[str, Any] = {
        "rows": distribute_tensor(whole["rows"], line, [Shard(0)]),
        "columns": distribute_tensor(whole["columns"], line, [Shard(1)]),
        "blocks": distribute_tensor(whole["blocks"], square, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(whole["copies"], square, [Replicate(), Shard(0)]),
        "few": distribute_tensor(whole["few"], line, [Shard(0)]),
    }
    dcp.save({"model": state, "step": 3, "plain": whole["plain"]}, checkpoint_id=path)


def sharded_whole() -> dict[str, torch.Tensor]:
    return {
        "rows": random_tensor(torch.float32, (403, 200), 1),
        "columns": random_tensor(torch.float16, (301, 403), 2),
        "blocks": random_tensor(torch.float64, (203, 211), 3),
        "copies": random_tensor(torch.int32, (101, 307), 4),
        "few": random_tensor(torch.float32, (3, 5), 5),
        "plain": random_tensor(torch.int8, (17,), 6),
    }


@pytest.mark.parametrize("chunk", [4096, 16 << 20])
def test_a_checkpoint_of_several_ranks(
    world4: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(convert, "_CHUNK_BYTES", chunk)
    world4.results(_save_sharded, tmp_path / "c", timeout_s=100)
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "ours.pt")
    theirs.dcp_to_torch_save(tmp_path / "c", tmp_path / "theirs.pt")
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    expected = torch.load(tmp_path / "theirs.pt", weights_only=True)
    expected["model"] = {name: expected["model"][name] for name in loaded["model"]}  # in aiockpt's order
    assert_same({name: expected[name] for name in loaded}, loaded)
    whole = sharded_whole()
    assert_same({"model": {name: whole[name] for name in loaded["model"]}, "step": 3, "plain": whole["plain"]}, loaded)
    assert_sound(tmp_path / "ours.pt")


def test_objects_that_hold_tensors(tmp_path: Path) -> None:
    values = random_tensor(torch.int32, (7,), 1)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 3]]), torch.rand(2), (4, 5), check_invariants=True)
    state = {"w": random_tensor(torch.int16, (6, 6), 2), "object": Settings(3), "sparse": sparse}
    state["object"].value = values  # type: ignore[assignment]
    with (
        aiockpt.SyncCheckpointer() as checkpointer,
        pytest.warns(aiockpt.SafeGlobalsWarning, match=r"safe_globals=\[.*Settings\]"),
    ):
        checkpointer.save(state, tmp_path / "c")
    with pytest.raises(aiockpt.UnsafeCheckpointError, match=r"safe_globals=\[.*Settings\]"):
        ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt", safe_globals=[Settings])
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert torch.equal(loaded["object"].value, values)
    assert torch.equal(loaded["sparse"].to_dense(), sparse.to_dense())
    assert_same(state["w"], loaded["w"])
    assert_sound(tmp_path / "m.pt")


@pytest.mark.parametrize("shape", [(50,), (900, 700), (3000, 4000)])
def test_a_damaged_checkpoint_leaves_the_old_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"first": torch.rand(3), "second": random_tensor(torch.float32, shape, 2)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.find(raw_bytes(state["second"])[:64]) + 99] ^= 4
    file.write_bytes(bytes(data))
    torch.save({"before": 1}, tmp_path / "m.pt")
    with pytest.raises(aiockpt.CorruptCheckpointError, match="bytes of second"):
        ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt") == {"before": 1}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(3)}, checkpoint_id=tmp_path / "c")
    torch.save({"before": 1}, tmp_path / "m.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "m.pt")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(aiockpt.CheckpointExistsError, match="overwrite=True"):
        ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt", overwrite=False)
    with pytest.raises(aiockpt.CheckpointExistsError, match="is a directory"):
        ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "c")
    with pytest.raises(aiockpt.CheckpointExistsError, match=r"notes is a file, but neither .* save under another name"):
        ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "link.pt")
    assert not (tmp_path / "link.pt").is_symlink()
    assert list(torch.load(tmp_path / "link.pt")) == ["w"]
    assert torch.load(tmp_path / "m.pt") == {"before": 1}
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "m.pt")
    assert list(torch.load(tmp_path / "m.pt")) == ["w"]


# --- from a torch.save file to a checkpoint -------------------------------------------------------


def test_a_file_converts_as_with_torchs_function(tmp_path: Path) -> None:
    state = state_of()
    base = random_tensor(torch.float32, (30, 40), 9)
    state |= {"view": base[3:9, 2:20], "base": base, "tied": state["model"]["w"]}
    torch.save(state, tmp_path / "m.pt")
    ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "ours")
    theirs.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "theirs")
    assert_same(stock_load(tmp_path / "theirs"), stock_load(tmp_path / "ours"))
    assert_same(state, stock_load(tmp_path / "ours"))
    target = {"model": {"w": torch.zeros(300, 1100)}}
    dcp.load(target, checkpoint_id=tmp_path / "ours")
    assert_same(state["model"]["w"], target["model"]["w"])


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
@pytest.mark.parametrize("how", ["legacy", "quantized", "class"])
def test_files_that_only_torch_reads(tmp_path: Path, how: str) -> None:
    state: dict[str, Any] = {"w": random_tensor(torch.float32, (33, 9), 1), "n": 4}
    if how == "quantized":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated
            state["q"] = torch.quantize_per_tensor(torch.rand(5, 3), 0.1, 3, torch.qint8)
    if how == "class":
        state["object"] = Settings(8)
    torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=how != "legacy")
    if how == "class":
        with pytest.raises(aiockpt.UnsafeCheckpointError, match="Settings"):
            ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c")
        assert not (tmp_path / "c").exists()
    ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c", safe_globals=[Settings] if how == "class" else ())
    with aiockpt.SyncCheckpointer() as checkpointer:
        loaded = checkpointer.load(tmp_path / "c", safe_globals=[Settings])
    assert_same(state["w"], loaded["w"])
    assert loaded["n"] == 4
    assert how != "class" or loaded["object"] == Settings(8)
    assert how != "quantized" or torch.equal(loaded["q"], state["q"])


def test_a_file_without_a_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.rand(2)], tmp_path / "m.pt")
    with pytest.raises(aiockpt.LoadError, match="holds no state dict"):
        ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c")
    with pytest.raises(aiockpt.CheckpointNotFoundError):
        ours.torch_save_to_dcp(tmp_path / "none.pt", tmp_path / "c")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(aiockpt.LoadError):
        ours.torch_save_to_dcp(tmp_path / "text.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_damaged_file_is_not_converted(tmp_path: Path) -> None:
    weight = random_tensor(torch.float32, (900, 700), 2)
    torch.save({"w": weight}, tmp_path / "m.pt")
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[data.find(raw_bytes(weight)[:64]) + 99] ^= 4
    (tmp_path / "m.pt").write_bytes(bytes(data))
    with pytest.raises(aiockpt.CorruptCheckpointError):
        ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c")
    assert not (tmp_path / "c").exists()
    ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c", verify=False)
    assert raw_bytes(stock_load(tmp_path / "c")["w"]) != raw_bytes(weight)


def test_the_file_may_be_in_the_target_directory(tmp_path: Path) -> None:
    state = state_of()
    torch.save(state, tmp_path / "m.pt")
    (tmp_path / "notes.txt").write_text("mine")
    before = (tmp_path / "m.pt").read_bytes()
    ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path)
    assert_same(state, stock_load(tmp_path))
    assert (tmp_path / "m.pt").read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with aiockpt.SyncCheckpointer() as checkpointer:
        assert checkpointer.verify(tmp_path).ok
    with pytest.raises(aiockpt.CheckpointExistsError, match="other things"):
        ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path)
    assert_same(state, stock_load(tmp_path))


def test_a_checkpoint_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    torch.save({"w": torch.full((3,), 7.0)}, tmp_path / "m.pt")
    dcp.save({"old": torch.rand(3)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(aiockpt.CheckpointExistsError):
        ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c", overwrite=False)
    assert list(stock_load(tmp_path / "c")) == ["old"]
    ours.torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "c")
    assert_same({"w": torch.full((3,), 7.0)}, stock_load(tmp_path / "c"))


# --- without blocking, and in bounded memory ------------------------------------------------------


@pytest.mark.asyncio
async def test_both_ways_without_blocking_the_loop(tmp_path: Path) -> None:
    state = state_of()
    torch.save(state, tmp_path / "m.pt")
    await ours.torch_save_to_dcp_async(tmp_path / "m.pt", tmp_path / "c")
    await ours.dcp_to_torch_save_async(tmp_path / "c", tmp_path / "again.pt")
    assert_same(state, torch.load(tmp_path / "again.pt", weights_only=True))
    with pytest.raises(aiockpt.CheckpointExistsError):
        await ours.dcp_to_torch_save_async(tmp_path / "c", tmp_path / "again.pt", overwrite=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["dcp_to_torch_save_async", "torch_save_to_dcp_async"])
async def test_cancelling_leaves_nothing(tmp_path: Path, way: str) -> None:
    state = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(48)}
    if way == "dcp_to_torch_save_async":
        dcp.save(state, checkpoint_id=tmp_path / "in")
    else:
        torch.save(state, tmp_path / "in")

    task = asyncio.ensure_future(getattr(ours, way)(tmp_path / "in", tmp_path / "out"))
    while not list(tmp_path.glob(".aiockpt-*")):  # until something is written
        await asyncio.wait([task], timeout=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _peak_of(rank: int, world_size: int, folder: Path, way: str) -> int:
    """Convert; return the peak growth of this process's memory in bytes."""
    warnings.simplefilter("ignore")
    torch.save({"warm": torch.rand(9)}, folder / "warm.pt")
    ours.torch_save_to_dcp(folder / "warm.pt", folder / "warm")
    ours.dcp_to_torch_save(folder / "warm", folder / "warmer.pt")
    return peak_growth(lambda: getattr(ours, way)(folder / "in", folder / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("large", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("way", ["dcp_to_torch_save", "torch_save_to_dcp"])
def test_memory_is_bounded(tmp_path: Path, way: str, large: bool) -> None:
    count, side = (1, 13000) if large else (40, 2048)
    state = {f"w{n}": torch.full((side, side), float(n + 1)) for n in range(count)}
    for n, tensor in enumerate(state.values()):
        tensor.view(-1)[n :: side + 1] = torch.rand(len(tensor.view(-1)[n :: side + 1]))
    if way == "dcp_to_torch_save":
        with aiockpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(state, tmp_path / "in")
    else:
        torch.save(state, tmp_path / "in")
    with World(1, store="file") as world:  # a new process, without an earlier peak that would hide the growth
        (peak_bytes,) = world.results(_peak_of, tmp_path, way)
    most = 96 << 20 if way == "dcp_to_torch_save" else 256 << 20  # torch_save_to_dcp stages 128 MiB and maps its source
    assert 8 << 20 < peak_bytes < most  # the state has 640 MiB or more
    if way == "dcp_to_torch_save":
        out = torch.load(tmp_path / "out", weights_only=True, mmap=True)
        assert all(torch.equal(out[name], tensor) for name, tensor in state.items())
    else:
        with aiockpt.SyncCheckpointer() as checkpointer:
            out = checkpointer.load(tmp_path / "out", mmap=True)
        assert all(torch.equal(out[name], tensor) for name, tensor in state.items())


def _convert_on_one(rank: int, world_size: int, folder: Path) -> None:
    if rank == 1:
        ours.torch_save_to_dcp(folder / "m.pt", folder / "c")
        ours.dcp_to_torch_save(folder / "c", folder / "n.pt")


def test_one_rank_of_several_converts_alone(world2: World, tmp_path: Path) -> None:
    torch.save({"w": torch.full((3,), 7.0)}, tmp_path / "m.pt")
    world2.results(_convert_on_one, tmp_path, timeout_s=100)
    assert_same({"w": torch.full((3,), 7.0)}, torch.load(tmp_path / "n.pt", weights_only=True))


def test_a_file_may_be_written_beside_the_files_that_it_is_made_of(tmp_path: Path) -> None:
    """Stock allows it, and does it in its own tests."""
    state = {"w": torch.arange(3000.0), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    ours.dcp_to_torch_save(tmp_path / "c", tmp_path / "c" / "model.pt")
    loaded = torch.load(tmp_path / "c" / "model.pt", weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["w"], state["w"])
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.CheckpointExistsError, match="in the directory of"):
        ckpt.save(state, tmp_path / "c" / "other.pt")
