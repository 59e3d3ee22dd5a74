"""Tensors that describe which part of a whole they hold: by attributes, or by DCP's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import aiockpt
from tests.ranks.world import World, mesh_of
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS, COLUMNS = 12, 5
IS_KNOWN_TO_TORCH = hasattr(dcp, "CheckpointableTensor")


def whole() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def described(local: torch.Tensor, shape: Any, parts: list[tuple[Any, Any, Any]]) -> torch.Tensor:
    """Return a tensor with the attributes of a CheckpointableTensor.

    Args:
        local: the tensor.
        shape: the shape of the whole.
        parts: for each part its offsets in the whole, its offsets in ``local``, and its sizes.
    """
    local.global_shape = shape
    local.global_offsets, local.local_offsets, local.local_sizes = map(tuple, zip(*parts, strict=True))
    return local


class ProtocolTensor(torch.Tensor):
    """Rows of a tensor that implement DCP's protocol."""

    first: int

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size((ROWS, COLUMNS)))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((self.first, 0)), torch.Size(self.shape))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def part(kind: str, rank: int, world_size: int, *, filled: bool) -> Any:
    """Return a rank's part of the whole, sharded as ``kind`` says; zeros unless ``filled``."""
    values = whole() if filled else torch.zeros(ROWS, COLUMNS)
    step = ROWS // world_size
    first = rank * step
    if kind == "rows":
        return described(values[first : first + step].clone(), (ROWS, COLUMNS), [((first, 0), (0, 0), (step, COLUMNS))])
    if kind == "padded":  # two parts, adjacent neither here nor in the whole, amid padding
        half = step // 2
        local = torch.full((step + 4, COLUMNS + 1), -7.0)
        one, two = rank * half, ROWS // 2 + rank * half
        local[1 : 1 + half, :COLUMNS] = values[one : one + half]
        local[3 + half : 3 + step, 1:] = values[two : two + half]
        sizes = (half, COLUMNS)
        return described(local, (ROWS, COLUMNS), [((one, 0), (1, 0), sizes), ((two, 0), (3 + half, 1), sizes)])
    if kind == "parameter":
        local = torch.nn.Parameter(values[first : first + step].clone())
        return described(local, torch.Size((ROWS, COLUMNS)), [((first, 0), (0, 0), (step, COLUMNS))])
    if kind == "copies":  # each rank has a half; of four ranks, two have each half
        first = rank % 2 * (ROWS // 2)
        return described(
            values[first : first + ROWS // 2].clone(), (ROWS, COLUMNS), [((first, 0), (0, 0), (ROWS // 2, COLUMNS))]
        )
    if kind == "protocol":
        tensor = values[first : first + step].clone().as_subclass(ProtocolTensor)
        tensor.first = first
        return tensor
    mesh = mesh_of(world_size)
    if kind == "wrapper":  # as in TorchRec
        shards = LocalShardsWrapper([values[first : first + step].clone()], [(first, 0)])
        return DTensor.from_local(
            shards, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
        )
    return distribute_tensor(values, mesh, [Replicate() if kind == "replicated" else Shard(int(kind[-1]))])


def values_of(tensor: Any) -> list[torch.Tensor]:
    """Return a rank's parts without the padding."""
    if isinstance(tensor, ProtocolTensor):
        return [tensor.as_subclass(torch.Tensor)]
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]
    return [
        tensor.detach()[tuple(slice(at, at + n) for at, n in zip(inner, sizes, strict=True))]
        for inner, sizes in zip(tensor.local_offsets, tensor.local_sizes, strict=True)
    ]


KINDS = ["rows", "padded", "parameter", "copies", "protocol", "wrapper"]


def save(rank: int, world_size: int, path: Path, kind: str) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": part(kind, rank, world_size, filled=True), "step": 3}, path)


def load(rank: int, world_size: int, path: Path, kind: str) -> bool:
    target = part(kind, rank, world_size, filled=False)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.load(path, {"w": target})
    found, expected = values_of(target), values_of(part(kind, rank, world_size, filled=True))
    untouched = kind != "padded" or float(target[0].sum()) == -7.0 * (COLUMNS + 1)
    return untouched and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_no_part_is_lost(kind: str, world2: World, tmp_path: Path) -> None:
    world2.results(save, tmp_path / "c", kind)
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(tmp_path / "c").ok
        assert torch.equal(ckpt.load(tmp_path / "c")["w"], whole())
    target = {"w": torch.zeros(ROWS, COLUMNS)}
    dcp.load(target, checkpoint_id=tmp_path / "c", **ALONE)
    assert torch.equal(target["w"], whole())


@pytest.mark.parametrize("theirs", [*KINDS, "shard0", "shard1", "replicated"])
def test_each_kind_loads_into_every_other(theirs: str, world2: World, world4: World, tmp_path: Path) -> None:
    world4.results(save, tmp_path / "c", theirs if theirs != "padded" else "rows")
    for kind in [*KINDS, "shard1"]:
        assert world2.results(load, tmp_path / "c", kind) == [True, True], kind


def stock_save(rank: int, world_size: int, path: Path, kind: str) -> None:
    dcp.save({"w": part(kind, rank, world_size, filled=True)}, checkpoint_id=path)


def stock_load(rank: int, world_size: int, path: Path, kind: str) -> bool:
    target = part(kind, rank, world_size, filled=False)
    dcp.load({"w": target}, checkpoint_id=path)
    return all(map(torch.equal, values_of(target), values_of(part(kind, rank, world_size, filled=True))))


@pytest.mark.parametrize(
    "kind",
    [
        "wrapper",
        *(
            pytest.param(kind, marks=pytest.mark.skipif(not IS_KNOWN_TO_TORCH, reason="no CheckpointableTensor"))
            for kind in ("rows", "padded", "parameter")
        ),
    ],
)
def test_torch_and_aiockpt_read_each_others_checkpoints(kind: str, world2: World, tmp_path: Path) -> None:
    world2.results(stock_save, tmp_path / "theirs", kind)
    assert world2.results(load, tmp_path / "theirs", kind) == [True, True]
    with aiockpt.SyncCheckpointer() as ckpt:
        assert torch.equal(ckpt.load(tmp_path / "theirs")["w"], whole())
    world2.results(save, tmp_path / "ours", kind)
    assert world2.results(stock_load, tmp_path / "ours", kind) == [True, True]


def save_all_but_one_part(rank: int, world_size: int, path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": part("rows", 0, world_size, filled=True)}, path)


def test_a_part_that_no_rank_has_is_an_error(world2: World, tmp_path: Path) -> None:
    for outcome in world2.run(save_all_but_one_part, tmp_path / "c"):
        assert outcome.kind == "SaveError"
        assert "w" in str(outcome)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["rows", "padded", "parameter", "protocol"])
def test_one_process_refuses_a_part_and_saves_a_whole_tensor(kind: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=r"w is a .*, of which this process has a part only"):
            ckpt.submit({"w": part(kind, 1, 2, filled=True)}, tmp_path / "c")
        ckpt.save({"w": part(kind, 0, 1, filled=True)}, tmp_path / "c")
        assert torch.equal(ckpt.load(tmp_path / "c")["w"], whole())


@pytest.mark.main
@pytest.mark.parametrize(
    "change",
    [
        {"global_shape": None},
        {"global_shape": (ROWS,)},
        {"global_shape": (2, COLUMNS)},
        {"local_offsets": ((1, 0),)},
        {"local_sizes": ((3, COLUMNS), (3, COLUMNS))},
        {"global_offsets": ((-1, 0),)},
        {"global_offsets": ((0.5, 0),)},
    ],
    ids=str,
)
def test_inconsistent_attributes_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    tensor = part("rows", 0, 2, filled=True)
    for name, value in change.items():
        setattr(tensor, name, value)
    for name in (None, *("global_shape", "local_sizes")):
        if name is not None:
            delattr(tensor, name)
        with aiockpt.SyncCheckpointer() as ckpt:
            with pytest.raises(aiockpt.SaveError, match=r"m\.w is a tensor of .* do not say which part"):
                ckpt.submit({"m": {"w": tensor}}, tmp_path / "c")
            ckpt.save({"m": {"w": whole()}}, tmp_path / "good", overwrite=True)
            with pytest.raises(aiockpt.ShapeMismatchError, match=r"m\.w is a tensor of .* do not say which part"):
                ckpt.load(tmp_path / "good", {"m": {"w": tensor}})
