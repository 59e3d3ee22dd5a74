"""Loads into distributed tensors, saved by some ranks in one layout and loaded by others in another."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard as OwnedShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import Source
from tests.counting import CountingStorage
from tests.ranks.layouts import LAYOUTS, distributed, full_tensors
from tests.ranks.world import RankFailure, World, mesh_of

WRITERS = ["dcp", "aiockpt"] if "process_group" in inspect.signature(aiockpt.SyncCheckpointer).parameters else ["dcp"]


def save_with(writer: str, state: dict[str, Any], path: Path) -> None:
    if writer == "dcp":
        dcp.save(state, checkpoint_id=path)
        return
    with aiockpt.SyncCheckpointer(process_group=dist.group.WORLD) as ckpt:
        ckpt.save(state, path)


def save(rank: int, world_size: int, writer: str, path: Path, layout: str) -> None:
    save_with(writer, {"model": full_tensors() if layout == "plain" else distributed(layout, world_size)}, path)


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def local_of(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local()


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the keys whose local parts differ in any bit."""
    assert found.keys() == expected.keys()
    return [name for name in found if bits(local_of(found[name])) != bits(local_of(expected[name]))]


def load_in(rank: int, world_size: int, paths: list[Path], layout: str) -> None:
    """Load each checkpoint into tensors with other values, and compare with the layout that torch makes."""
    expected = distributed(layout, world_size)
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in paths:
            target = distributed(layout, world_size, seed=8)
            before = {name: (local_of(tensor), local_of(tensor).data_ptr()) for name, tensor in target.items()}
            assert ckpt.load(path, {"model": target})["model"] is target
            assert not differing(target, expected), path
            assert all(local_of(tensor).data_ptr() == before[name][1] for name, tensor in target.items()), path


@pytest.fixture(scope="module")
def saved(world2: World, world4: World, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that saves with a writer, number of ranks and layout; cached."""
    made: dict[tuple[str, int, str], Path] = {}

    def save_once(writer: str, ranks: int, layout: str) -> Path:
        key = (writer, ranks, layout)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved") / "-".join(map(str, key))
            if ranks == 1:
                with World(1) as world:
                    world.results(save, writer, made[key], layout)
            else:
                {2: world2, 4: world4}[ranks].results(save, writer, made[key], layout)
        return made[key]

    return save_once


SAVED = [("dcp", 1, "plain")] + [(w, ranks, layout) for w in WRITERS for ranks in (2, 4) for layout in LAYOUTS]


@pytest.mark.parametrize(("writer", "ranks", "layout"), SAVED)
def test_one_process_gets_whole_tensors(saved, writer: str, ranks: int, layout: str) -> None:
    path = saved(writer, ranks, layout)
    with aiockpt.SyncCheckpointer() as ckpt:
        fresh = ckpt.load(path)["model"]
        filled = {name: torch.full_like(tensor, 3) for name, tensor in fresh.items()}
        ckpt.load(path, {"model": filled})
        mapped = ckpt.load(path, mmap=True)["model"]
    expected = full_tensors()
    assert len(fresh) >= 4
    for name in fresh:
        assert (fresh[name].dtype, fresh[name].shape) == (expected[name].dtype, expected[name].shape)
        assert bits(fresh[name]) == bits(expected[name]) == bits(filled[name]) == bits(mapped[name]), name


READ = [("dcp", 4), ("aiockpt", 2), ("aiockpt", 8)]
"""Writers, each with a number of ranks that read its checkpoints."""


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("into", LAYOUTS)
def test_every_layout_loads_into_every_other(
    saved, world2: World, world4: World, world8: World, ranks: int, into: str
) -> None:
    world = {2: world2, 4: world4, 8: world8}[ranks]
    paths = []
    for writer, saved_by, layout in SAVED:
        if layout == "fsdp_tp" and into != "fsdp_tp":
            continue  # fsdp_tp has no empty and no 0-d tensors; see below
        if (writer, ranks) not in READ or (ranks == 8 and saved_by != 4):
            continue  # would find nothing more, and take minutes
        paths.append(saved(writer, saved_by, layout))
    world.results(load_in, paths, into)


def load_common(rank: int, world_size: int, path: Path, layout: str) -> None:
    expected = distributed(layout, world_size)
    target = distributed(layout, world_size, seed=8)
    untouched = {name: bits(local_of(target[name])) for name in ("scalar", "empty")}
    missing: list[str] = []
    with aiockpt.SyncCheckpointer() as ckpt, pytest.warns(aiockpt.MissingKeysWarning):
        ckpt.load(path, {"model": target}, strict=False, missing=missing)
    assert sorted(missing) == ["model.empty", "model.scalar"]
    assert {name: bits(local_of(target[name])) for name in untouched} == untouched
    assert differing(target, expected) == ["scalar"]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("into", [layout for layout in LAYOUTS if layout != "fsdp_tp"])
def test_fsdp_over_tensor_parallelism_loads_into_all(
    saved, world2: World, world8: World, writer: str, into: str
) -> None:
    for world in (world2, world8):
        world.results(load_common, saved(writer, 4, "fsdp_tp"), into)


# --- bytes read -----------------------------------------------------------------------------------


def count_bytes(rank: int, world_size: int, paths: list[Path], layout: str) -> list[tuple[int, int]]:
    expected = {"large": distributed(layout, world_size)["large"]}
    counts = []
    with aiockpt.SyncCheckpointer() as ckpt:
        for path in paths:
            target = {"large": distributed(layout, world_size, seed=8)["large"]}
            storage = CountingStorage()
            ckpt.load(path, {"model": target}, storage=storage)
            assert not differing(target, expected), path
            read = sum(nbytes for name, _, nbytes in storage.reads if not name.startswith("."))
            counts.append((read, local_of(target["large"]).nbytes))
    return counts


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("into", LAYOUTS)
def test_each_rank_reads_only_its_bytes(saved, world4: World, writer: str, into: str) -> None:
    layouts = ["shard0", "shard1", "replicate", "grid"]
    for counts in world4.results(count_bytes, [saved(writer, 2, layout) for layout in layouts], into):
        for layout, (read, wanted) in zip(layouts, counts, strict=True):
            assert wanted <= read <= 1.1 * wanted + 4096, layout


class Watched(WrapperStorage):
    """Storage that counts the sources that a load shares with other ranks of the host."""

    shared = 0

    async def open(self, path: str, **options: Any) -> Source:
        source = await super().open(path, **options)
        inner = source.share

        def share() -> None:
            self.shared += 1
            inner()

        source.share = share  # type: ignore[method-assign]
        return source


def load_large(rank: int, world_size: int, path: Path, placements: list[Placement]) -> int:
    """Load a tensor of 20 MiB with the given placements; return how many sources were shared."""
    whole = torch.randn(2560, 2048, generator=torch.Generator().manual_seed(12))
    mesh = mesh_of(2, world_size // 2)
    target = distribute_tensor(torch.zeros_like(whole), mesh, placements)
    storage = Watched(LocalStorage())
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"w": target}, storage=storage)
    assert torch.equal(local_of(target), local_of(distribute_tensor(whole, mesh, placements)))
    return storage.shared


def test_ranks_of_a_host_share_equal_reads_through_the_page_cache(world4: World, tmp_path: Path) -> None:
    whole = torch.randn(2560, 2048, generator=torch.Generator().manual_seed(12))
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": whole}, tmp_path / "c")
    assert world4.results(load_large, tmp_path / "c", [Replicate(), Replicate()]) == [1] * 4
    assert world4.results(load_large, tmp_path / "c", [Shard(0), Replicate()]) == [0] * 4  # 10 MiB, too few to share
    assert world4.results(load_large, tmp_path / "c", [Shard(0), Shard(1)]) == [0] * 4


# --- targets that do not fit ----------------------------------------------------------------------


def load_one(rank: int, world_size: int, path: Path, kind: str) -> str:
    mesh = mesh_of(world_size)
    full = full_tensors(8)["even"]
    target: Any = distribute_tensor(full, mesh, [Shard(0)])
    if kind == "shape":
        target = distribute_tensor(full[:15], mesh, [Shard(0)])
    elif kind == "dtype":
        target = distribute_tensor(full.half(), mesh, [Shard(0)])
    elif kind == "partial":
        target = DTensor.from_local(full, mesh, [Partial()])
    elif kind == "meta":
        target = DTensor.from_local(local_of(target).to("meta"), mesh, [Shard(0)])
    elif kind == "freed":
        local_of(target).untyped_storage().resize_(0)
    elif kind == "sizes":
        target = DTensor.from_local(
            full[: 5 + rank], mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(24, 1)
        )
    names = {"rank 1 alone": "odd" if rank == 1 else "even"}
    before = b"" if kind in ("meta", "freed") else bits(local_of(target))
    with aiockpt.SyncCheckpointer() as ckpt:
        try:
            ckpt.load(path, {"model": {names.get(kind, "even"): target}})
        except aiockpt.LoadError:
            assert kind in ("meta", "freed") or (kind == "damaged" and rank != 2) or bits(local_of(target)) == before
            raise
    return "loaded"


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("shape", "ShapeMismatchError", r"model.even has the shape \(15, 24\) in the target but \(16, 24\) in "),
        (
            "dtype",
            "ShapeMismatchError",
            r"model.even is torch.float16 in the target but torch.float32 in .*pass dtype=",
        ),
        ("partial", "ShapeMismatchError", r"model.even is a DTensor of partial values .*call redistribute"),
        ("meta", "ShapeMismatchError", r"part of model.even is on the meta device.*to_empty"),
        ("freed", "ShapeMismatchError", r"part of model.even .*was freed"),
        ("sizes", "ShapeMismatchError", r"model.even is a DTensor of \(16, 24\) whose local part is \([56], 24\)"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(saved, world2: World, kind: str, error: str, said: str) -> None:
    outcomes = world2.run(load_one, saved("dcp", 4, "shard0"), kind)
    assert [type(outcome) for outcome in outcomes] == [RankFailure, RankFailure]
    for outcome in outcomes:
        assert outcome.kind == error, outcome
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(outcome.text)


def test_a_missing_key_of_one_rank_changes_nothing_on_any_rank(saved, world2: World) -> None:
    first, second = world2.run(load_one, saved("dcp", 4, "shard0"), "rank 1 alone")
    assert (second.kind, second.text.count("the keys asked for: model.odd")) == ("MissingKeysError", 1)
    assert (first.kind, first.text) == ("MissingKeysError", second.text)
    assert first.text.startswith("rank 1: ")
    assert second.cause.startswith("MissingKeysError: ")


def test_damage_that_one_rank_finds_fails_the_load_on_all(saved, world4: World, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    world4.results(save, "dcp", path, "shard0")
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        chunks = reader._opened.index.entries["model.even"].chunks
        place = next(chunk.place for chunk in chunks if chunk.offsets == (8, 0))  # rank 2 reads it
    data = bytearray((path / place.file).read_bytes())
    needle = bits(full_tensors()["even"][8:12])
    data[data.index(needle, place.offset) + 5] ^= 0x10
    (path / place.file).write_bytes(data)
    outcomes = world4.run(load_one, path, "damaged")
    assert [outcome.kind for outcome in outcomes] == ["CorruptCheckpointError"] * 4
    for rank, outcome in enumerate(outcomes):  # each tells the cause, and its own state
        assert outcome.text.startswith("rank 2: ")
        assert "model.even" in outcome.text
        state = "no tensor was changed" if rank == 2 else "1 had been filled (model.even)"
        assert outcome.text.endswith(f"Of the 1 tensors to fill here, {state}."), outcome


# --- unusual targets ------------------------------------------------------------------------------


def load_unusual(rank: int, world_size: int, path: Path) -> None:
    full = full_tensors()
    other = full_tensors(8)
    mesh = mesh_of(world_size)
    part = DeviceMesh("cpu", [1, 3])
    parameter = torch.nn.Parameter(distribute_tensor(other["even"], mesh, [Shard(0)]))
    strided = distribute_tensor(other["cube"], mesh_of(2, 2), [_StridedShard(0, split_factor=3), Replicate()])
    outside = distribute_tensor(other["large"], part, [Shard(0)])
    backwards = DTensor.from_local(  # a local tensor that is not row-major
        local_of(distribute_tensor(other["uneven"], mesh, [Shard(1)])).t().contiguous().t(),
        mesh,
        [Shard(1)],
        run_check=False,
        shape=(5, 7),
        stride=(7, 1),
    )
    versions = parameter._version, local_of(parameter)._version
    target = {"even": parameter, "cube": strided, "large": outside, "uneven": backwards}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"model": target})
    assert parameter._version > versions[0]
    assert local_of(parameter)._version > versions[1]
    assert bits(parameter.full_tensor()) == bits(full["even"])
    rows = full["cube"].view(3, 2, 9, 10)[:, rank // 2]  # one row of every two
    assert bits(local_of(strided)) == bits(rows)
    columns = full["uneven"].chunk(world_size, 1)
    assert local_of(backwards).stride(0) == 1
    assert bits(local_of(backwards)) == bits(columns[rank])
    if rank in (1, 3):
        assert bits(local_of(outside)) == bits(full["large"].chunk(2)[rank // 2])
    else:
        assert local_of(outside).numel() == 0


def test_unusual_distributed_tensors(saved, world4: World) -> None:
    for writer in WRITERS:
        world4.results(load_unusual, saved(writer, 2, "grid"))


def load_sharded_tensor(rank: int, world_size: int, path: Path) -> None:
    full, other = full_tensors(), full_tensors(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ShardedTensor is deprecated
        tops = [0, 5, 6, 13][rank : rank + 2] + [16] * (rank == 3)
        where = [ShardMetadata([tops[0], 0], [tops[1] - tops[0], 10], f"rank:{rank}/cpu")]
        where += [ShardMetadata([tops[0], 10], [tops[1] - tops[0], 14], f"rank:{rank}/cpu")]
        shards = [
            OwnedShard(other["even"][a : a + n, b : b + m].clone(), each)
            for each in where
            for (a, b), (n, m) in [(each.shard_offsets, each.shard_sizes)]
        ]
        target = ShardedTensor._init_from_local_shards(shards, [16, 24])
    versions = [shard.tensor._version for shard in shards]
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"model": {"even": target}})
        with pytest.raises(aiockpt.ShapeMismatchError, match=r"model.large has the shape \(16, 24\) in the target"):
            ckpt.load(path, {"model": {"large": target}})
    rows = full["even"][slice(*tops)]
    assert [bits(shard.tensor) for shard in shards] == [bits(rows[:, :10]), bits(rows[:, 10:])]
    assert all(shard.tensor._version > before for shard, before in zip(shards, versions, strict=True))


def test_sharded_tensors(saved, world4: World) -> None:
    for writer in WRITERS:
        world4.results(load_sharded_tensor, saved(writer, 2, "grid"))


def load_unfinished(rank: int, world_size: int, path: Path) -> None:
    """Load into a tensor with a pending collective."""
    mesh = mesh_of(world_size)
    sharded = distribute_tensor(full_tensors(8)["even"], mesh, [Shard(0)])
    target = sharded.redistribute(placements=[Replicate()], async_op=True)
    assert isinstance(target._local_tensor, AsyncCollectiveTensor)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"model": {"even": target}})
    assert bits(target.full_tensor()) == bits(full_tensors()["even"])


def test_a_pending_collective_is_waited_for(saved, world2: World) -> None:
    world2.results(load_unfinished, saved("dcp", 4, "shard0"))


def read_into(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    full = full_tensors()
    out = distribute_tensor(full_tensors(8)["even"], mesh, [Shard(1)])
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        assert reader.read("model.even", out=out) is out
        assert bits(local_of(out)) == bits(full["even"].chunk(world_size, 1)[rank])
        with pytest.raises(TypeError, match=r"part of model.even can't be read into a DTensor.*leave the index out"):
            reader.read("model.even", slice(0, 4), out=out)
        with pytest.raises(aiockpt.ShapeMismatchError, match=r"model.uneven has the shape \(16, 24\)"):
            reader.read("model.uneven", out=out)
        assert bits(reader.read("model.large", (slice(7, 290, 3), slice(500, 900)))) == bits(
            full["large"][7:290:3, 500:900]
        )
        assert bits(reader.read("model.cube", (4, ..., -1))) == bits(full["cube"][4, ..., -1])


def test_a_reader_fills_the_part_of_its_rank(saved, world4: World) -> None:
    for writer in WRITERS:
        world4.results(read_into, saved(writer, 2, "grid"))
