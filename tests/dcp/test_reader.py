from __future__ import annotations

import dataclasses
import inspect
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import aiockpt
from aiockpt.dcp import EmptyStateDictLoadPlanner, FileSystemReader, FileSystemWriter
from tests.counting import CountingStorage
from tests.ranks.world import World
from tests.states import assert_same, random_tensor, raw_bytes, storable_dtypes

needs_saves_alone = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this version of torch has no such saves"
)


def state_of(seed: int = 0) -> dict[str, Any]:
    dtypes = {str(dtype): random_tensor(dtype, (3, 5), seed + n) for n, dtype in enumerate(storable_dtypes())}
    return {
        "model": {"w": random_tensor(torch.float32, (300, 1100), seed + 50), "b": random_tensor(torch.int8, (), seed)},
        "dtypes": dtypes,
        "list": [random_tensor(torch.int16, (7,), seed + 51), {"x": random_tensor(torch.int64, (2, 2), seed + 52)}],
        "none": torch.empty(0, 4),
        "step": 17 + seed,
        "facts": {"name": f"run {seed}", "sizes": [1, 2, seed]},
        "strided": random_tensor(torch.float32, (40, 60), seed + 53).t(),
    }


def blank(value: Any) -> Any:
    """Return the same structure with other values."""
    if isinstance(value, torch.Tensor):
        raw = torch.full((value.numel() * value.dtype.itemsize,), 1, dtype=torch.uint8)
        return raw.view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return None


def save_with(writer: str, state: dict[str, Any], path: Path) -> None:
    if writer == "torch":
        dcp.save(state, checkpoint_id=path)
        return
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, path)
    if writer == "without manifest":
        (path / ".aiockpt.json").unlink()


@pytest.mark.parametrize("writer", ["torch", "aiockpt", "without manifest"])
def test_dcp_load_fills_a_state_dict_as_with_torchs_reader(tmp_path: Path, writer: str) -> None:
    state = state_of()
    save_with(writer, state, tmp_path / "c")
    target, theirs = blank(state), blank(state)
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "c"))
    assert_same(state, target)
    assert_same(theirs, target)


def test_one_reader_reads_several_checkpoints(tmp_path: Path) -> None:
    reader = FileSystemReader(tmp_path / "nothing")
    ids = set()
    for seed in (1, 2):
        save_with("torch", state_of(seed), tmp_path / f"{seed}")
        target = blank(state_of())
        dcp.load(target, checkpoint_id=tmp_path / f"{seed}", storage_reader=reader)
        assert_same(state_of(seed), target)
        assert reader.checkpoint_id == tmp_path / f"{seed}"
        ids.add(reader.load_id)
    assert len(ids) == 2


@pytest.mark.parametrize("writer", ["torch", "aiockpt", "without manifest"])
def test_metadata_equals_that_of_torchs_reader(tmp_path: Path, writer: str) -> None:
    save_with(writer, state_of(), tmp_path / "c")
    reader = FileSystemReader(tmp_path / "c")
    ours, theirs = reader.read_metadata(), dcp.FileSystemReader(tmp_path / "c").read_metadata()
    for described in theirs.state_dict_metadata.values():
        if hasattr(getattr(described, "properties", None), "strides"):  # since torch 2.15, and optional
            described.properties.strides = None
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data == theirs.storage_data
    assert ours.storage_meta.load_id == reader.load_id
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    again = pickle.loads(pickle.dumps(ours))
    assert again.storage_data == theirs.storage_data


class Described(dcp.FileSystemWriter):
    """Writer that stores more about its save, as subclasses of torch's writer may."""

    def storage_meta(self) -> Any:
        return dataclasses.replace(super().storage_meta(), modules=["model", "optim"])


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FileSystemWriter, Described])
def test_metadata_keeps_the_facts_about_the_save(tmp_path: Path, writer: Any) -> None:
    saved = writer(tmp_path / "c")
    dcp.save({"w": torch.rand(2)}, storage_writer=saved)
    reader, theirs = FileSystemReader(tmp_path / "c"), dcp.FileSystemReader(tmp_path / "c")
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert (found.save_id, found.load_id) == (saved.save_id, reader.load_id)
    assert dataclasses.replace(found, load_id=theirs.load_id) == theirs.read_metadata().storage_meta
    hostile = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    hostile.storage_meta.save_id, hostile.storage_meta.modules = ["no", "text"], [1]
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(hostile))
    found = reader.read_metadata().storage_meta
    assert (found.save_id, found.modules) == (None, [])
    hostile.storage_meta = None
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(hostile))
    assert reader.read_metadata().storage_meta == type(found)(checkpoint_id=tmp_path / "c", load_id=reader.load_id)


def test_metadata_of_another_reader_is_accepted(tmp_path: Path) -> None:
    state = state_of()
    save_with("torch", state, tmp_path / "c")

    class Foreign(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return dcp.FileSystemReader(self.path).read_metadata()

    target = blank(state)
    dcp.load(target, storage_reader=Foreign(tmp_path / "c"))
    assert_same(state, target)


def test_metadata_is_not_executed(tmp_path: Path) -> None:
    save_with("torch", state_of(), tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    with pytest.raises(aiockpt.UnsafeCheckpointError, match="system"):
        FileSystemReader(tmp_path / "c").read_metadata()
    with pytest.raises(CheckpointException, match="system"):
        dcp.load(blank(state_of()), storage_reader=FileSystemReader(tmp_path / "c"))
    assert not (tmp_path / "harm").exists()


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Settings:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and other.value == self.value


def test_objects_are_checked_before_they_are_unpickled(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(3), "object": Harmful(tmp_path / "harm")}, checkpoint_id=tmp_path / "c")
    (tmp_path / "harm").unlink(missing_ok=True)
    target = {"w": torch.zeros(3), "object": None}
    with pytest.raises(CheckpointException, match=r"object needs posix\.system"):
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    assert not (tmp_path / "harm").exists()
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c", trust=True))
    assert (tmp_path / "harm").exists()


def test_allowed_classes_are_loaded(tmp_path: Path) -> None:
    dcp.save({"object": Settings(23)}, checkpoint_id=tmp_path / "c")
    target: dict[str, Any] = {"object": None}
    with pytest.raises(CheckpointException, match="Settings"):
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    assert target == {"object": None}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c", safe_globals=[Settings]))
    assert target == {"object": Settings(23)}


class Losses:
    """Stateful object that keeps a part of its state in a BytesIO, as trainers do."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.values, file)
        return {"losses": file, "count": torch.tensor(len(self.values)), "both": [io.BytesIO(b"x"), torch.ones(2)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict["losses"].seek(0)
        self.values = torch.load(state_dict["losses"])
        assert state_dict["count"] == len(self.values)
        assert state_dict["both"][0].getvalue() == b"x"


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FileSystemWriter])
def test_files_in_memory_need_no_safe_globals(tmp_path: Path, writer: Any) -> None:
    half_read = io.BytesIO(bytes(range(256)))
    half_read.seek(100)
    dcp.save({"train": Losses([0.5, 1.5]), "file": half_read}, storage_writer=writer(tmp_path / "c"))
    target: dict[str, Any] = {"train": Losses([]), "file": None}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    assert target["train"].values == [0.5, 1.5]
    assert (target["file"].getvalue(), target["file"].tell()) == (bytes(range(256)), 100)


@pytest.mark.parametrize("shape", [(40,), (900, 700)])
def test_damage_is_reported(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"first": random_tensor(torch.float32, shape, 1), "second": random_tensor(torch.float32, shape, 2)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(raw_bytes(state["second"])[:64])
    data[at + 99] ^= 4
    file.write_bytes(bytes(data))
    target = blank(state)
    with pytest.raises(CheckpointException, match=r"bytes of second .* do not match their CRC"):
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c", verify=False))
    assert raw_bytes(target["first"]) == raw_bytes(state["first"])
    assert raw_bytes(target["second"]) != raw_bytes(state["second"])


# --- planners -------------------------------------------------------------------------------------


class Renaming(DefaultLoadPlanner):
    """Planner that renames the keys in the metadata."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        metadata.state_dict_metadata = {f"new.{k}": v for k, v in metadata.state_dict_metadata.items()}
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[_under_the_old_name(item) for item in plan.items])


def _under_the_old_name(item: ReadItem) -> ReadItem:
    index = item.storage_index
    return dataclasses.replace(item, storage_index=dataclasses.replace(index, fqn=index.fqn.removeprefix("new.")))


def test_a_planner_may_rename(tmp_path: Path) -> None:
    state = {"a": random_tensor(torch.float32, (500, 700), 1), "b": random_tensor(torch.int32, (9,), 2), "n": 5}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    target = {"new.a": torch.zeros(500, 700), "new.b": torch.zeros(9, dtype=torch.int32), "new.n": None}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"), planner=Renaming())
    assert_same({f"new.{k}": v for k, v in state.items()}, target)


class Scratching(DefaultLoadPlanner):
    """Planner that returns one scratch tensor each time, and copies from it at the commit."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.empty(20_000_000, dtype=torch.float32)
        self.pending: ReadItem | None = None
        self.committed: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self.pending is None, "asked for the next tensor before the last was committed"
        self.pending = read_item
        count = torch.Size(read_item.lengths).numel()
        return self.scratch[:count].view(tuple(read_item.lengths))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert read_item is self.pending
        assert tensor.data_ptr() == self.scratch.data_ptr()
        self.pending = None
        self.committed.append(read_item.dest_index.fqn)
        super().resolve_tensor(read_item).copy_(tensor.mul(2))


def test_a_planner_may_process_each_tensor_at_its_commit(tmp_path: Path) -> None:
    state = {f"w{n}": torch.rand(n * 37 + 3, 5) for n in range(40)}
    state |= {"large": torch.rand(1200, 7500), "larger": torch.rand(1300, 7600), "last": torch.rand(3)}
    state["scalar"] = torch.rand(())
    dcp.save(state, checkpoint_id=tmp_path / "c")
    target, planner = blank(state), Scratching()
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"), planner=planner)
    assert_same({name: value * 2 for name, value in state.items()}, target)
    theirs = Scratching()
    dcp.load(blank(state), storage_reader=dcp.FileSystemReader(tmp_path / "c"), planner=theirs)
    assert planner.committed == sorted(theirs.committed, key=planner.committed.index)
    assert sorted(planner.committed) == sorted(state)


class Taking(DefaultLoadPlanner):
    """Planner that keeps the stored bytes of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.taken[read_item.dest_index.fqn] = value.read()


def test_a_planner_may_take_objects_as_bytes(tmp_path: Path) -> None:
    dcp.save({"a": [1, 2], "b": "text", "w": torch.rand(2)}, checkpoint_id=tmp_path / "c")
    planner = Taking()
    dcp.load({"a": 0, "b": 0, "w": torch.rand(2)}, storage_reader=FileSystemReader(tmp_path / "c"), planner=planner)
    assert {name: torch.load(io.BytesIO(blob)) for name, blob in planner.taken.items()} == {"a": [1, 2], "b": "text"}


class Wrong(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item)[:-1]


def test_a_planner_that_returns_another_shape_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(5, 2)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointException, match=r"w: the planner gave a tensor of the shape \(4, 2\)"):
        dcp.load({"w": torch.zeros(5, 2)}, storage_reader=FileSystemReader(tmp_path / "c"), planner=Wrong())


def test_targets_of_other_strides_and_dtypes(tmp_path: Path) -> None:
    state = {name: torch.rand(300, 900, dtype=torch.float64) for name in ("strided", "half", "conjugated")}
    state["conjugated"] = torch.rand(30, 40, dtype=torch.complex64)
    dcp.save(state, checkpoint_id=tmp_path / "c")
    target = {
        "strided": torch.zeros(900, 1200, dtype=torch.float64)[:, ::4].t(),
        "half": torch.zeros(300, 900, dtype=torch.float16),
        "conjugated": torch.zeros(30, 40, dtype=torch.complex64).conj(),
    }
    _load_state_dict(target, FileSystemReader(tmp_path / "c"), planner=DefaultLoadPlanner(), no_dist=True)
    assert_same(state["strided"], target["strided"])
    assert_same(state["half"].half(), target["half"])
    assert_same(state["conjugated"], target["conjugated"].resolve_conj())


def test_keys_that_share_memory_are_filled_in_the_order_of_the_plan(tmp_path: Path) -> None:
    state = {f"k{n}": random_tensor(torch.int32, (64, 64), n) for n in range(6)}
    dcp.save(state, checkpoint_id=tmp_path / "c")

    def shared() -> dict[str, torch.Tensor]:
        base = torch.zeros(6 * 64, 64, dtype=torch.int32)
        return {f"k{n}": base[20 * n : 20 * n + 64] for n in range(6)}

    ours, theirs = shared(), shared()
    dcp.load(ours, storage_reader=FileSystemReader(tmp_path / "c"))
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "c"))
    assert_same(theirs, ours)


def test_a_load_is_visible_to_autograd(tmp_path: Path) -> None:
    dcp.save({"w": torch.rand(5)}, checkpoint_id=tmp_path / "c")
    weight = torch.zeros(5, requires_grad=True)
    product = weight * weight
    dcp.load({"w": weight}, storage_reader=FileSystemReader(tmp_path / "c"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("keys", [None, {"model"}, {"model.w", "step"}])
def test_an_empty_state_dict_is_filled_as_by_torchs_planner(tmp_path: Path, keys: Any) -> None:
    save_with("torch", state_of(), tmp_path / "c")
    ours: dict[str, Any] = {}
    _load_state_dict(ours, FileSystemReader(tmp_path / "c"), planner=EmptyStateDictLoadPlanner(keys=keys), no_dist=True)
    theirs: dict[str, Any] = {}
    _load_state_dict(
        theirs, dcp.FileSystemReader(tmp_path / "c"), planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True
    )
    assert_same(theirs, ours)


# --- sources --------------------------------------------------------------------------------------


def test_only_the_bytes_of_a_part_are_read(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"w": random_tensor(torch.float32, (4096, 1024), 1)}, tmp_path / "c")
    storage = CountingStorage()
    reader = FileSystemReader(tmp_path / "c", storage=storage)
    rows = random_tensor(torch.float32, (4096, 1024), 1)[1000:1100]
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner = DefaultLoadPlanner()
    target = {"w": torch.zeros(4096, 1024)}
    planner.set_up_planner(target, metadata, True)
    plan = planner.create_local_plan()
    (item,) = plan.items
    part = dataclasses.replace(
        item, storage_offsets=torch.Size((1000, 0)), dest_offsets=torch.Size((7, 0)), lengths=torch.Size((100, 1024))
    )
    storage.reads.clear()
    reader.read_data(type(plan)([part]), planner).wait()
    assert raw_bytes(target["w"][7:107]) == raw_bytes(rows)
    assert not target["w"][:7].any()
    assert not target["w"][107:].any()
    assert storage.nbytes <= 1.1 * 100 * 4096 + 8192


def test_a_checkpointer_may_be_shared(tmp_path: Path) -> None:
    state = state_of()
    with aiockpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "c")
        for _ in range(2):
            target = blank(state)
            dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c", checkpointer=checkpointer))
            assert_same(state, target)
        checkpointer.save(state, tmp_path / "d")


def test_files_of_torch_save_and_safetensors_are_read_too(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {"a": {"w": random_tensor(torch.float32, (60, 70), 1)}, "n": [1, "x"]}
    torch.save(state, tmp_path / "m.pt")
    target = blank(state)
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "m.pt"))
    assert_same(state, target)
    save_file({"a.w": state["a"]["w"]}, tmp_path / "m.safetensors")
    flat = {"a.w": torch.zeros(60, 70)}
    dcp.load(flat, storage_reader=FileSystemReader(tmp_path / "m.safetensors"))
    assert_same({"a.w": state["a"]["w"]}, flat)


def test_paths_are_validated_as_by_torch(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path / "new"), "s3://bucket/c", "relative"):
        assert FileSystemReader.validate_checkpoint_id(path) == dcp.FileSystemReader.validate_checkpoint_id(path)


def test_a_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.CheckpointNotFoundError, match="no checkpoint at"):
        FileSystemReader(tmp_path / "nothing").read_metadata()
    with pytest.raises(aiockpt.LoadError, match="set_up_storage_reader"):
        FileSystemReader(tmp_path).read_data(None, DefaultLoadPlanner())  # type: ignore[arg-type]


# --- ranks ----------------------------------------------------------------------------------------


def _save_and_load_sharded(rank: int, world_size: int, path: Path) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = {n: random_tensor(torch.float32, (37, 29 + n), n) for n in range(3)}
    shards = {str(n): distribute_tensor(t, mesh, [Shard(n % 2)]) for n, t in whole.items()}
    dcp.save(shards | {"step": 7}, checkpoint_id=path)
    other = {str(n): distribute_tensor(torch.zeros_like(t), mesh, [Shard(1 - n % 2)]) for n, t in whole.items()}
    target = other | {"step": None}
    dcp.load(target, storage_reader=FileSystemReader(path))
    return [raw_bytes(other[str(n)].full_tensor()) == raw_bytes(t) for n, t in whole.items()] + [target["step"] == 7]


def test_ranks_load_into_another_layout(world4: World, tmp_path: Path) -> None:
    assert world4.results(_save_and_load_sharded, tmp_path / "c", timeout_s=100) == [[True] * 4] * 4
    target = {str(n): torch.zeros(37, 29 + n) for n in range(3)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    assert_same({str(n): random_tensor(torch.float32, (37, 29 + n), n) for n in range(3)}, target)


def _save_and_load_alone(rank: int, world_size: int, path: Path) -> bool:
    state = {"w": random_tensor(torch.float32, (11, 5), rank), "rank": rank}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's writer mistakes another rank's files for an older checkpoint
        dcp.save(state, checkpoint_id=path, use_collectives=False)
    torch.distributed.barrier()
    target = {"w": torch.zeros(11, 5), "rank": None}
    dcp.load(target, storage_reader=FileSystemReader(path))
    return raw_bytes(target["w"]) == raw_bytes(state["w"]) and target["rank"] == rank


@needs_saves_alone
def test_ranks_load_what_they_saved_alone(world2: World, tmp_path: Path) -> None:
    assert world2.results(_save_and_load_alone, tmp_path / "c", timeout_s=100) == [True, True]
