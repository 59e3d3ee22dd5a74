"""The pieces of a distributed tensor that a rank has, by its placements; see tests/ranks for real ranks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from aiockpt.planning.dtensor import _Cut, _local_boxes, is_distributed


def cut_by_torch(whole: torch.Tensor, cuts: list[_Cut]) -> torch.Tensor:
    """Return the local tensor of a rank, cut with torch's own operators."""
    for dim, split, pieces, number in cuts:
        parts = [nth(part, pieces, number, dim) for part in chunks(whole, split, dim)]
        whole = torch.cat(parts, dim)
    return whole


def chunks(whole: torch.Tensor, pieces: int, dim: int) -> list[torch.Tensor]:
    found = list(whole.chunk(pieces, dim))
    return found + [whole.narrow(dim, 0, 0)] * (pieces - len(found))


def nth(whole: torch.Tensor, pieces: int, number: int, dim: int) -> torch.Tensor:
    return chunks(whole, pieces, dim)[number]


def assemble(whole: torch.Tensor, local: torch.Tensor, cuts: list[_Cut]) -> torch.Tensor:
    """Return a local tensor, filled from the whole as `_local_boxes` says."""
    pieces = _local_boxes(tuple(whole.shape), tuple(cuts), tuple(local.shape))
    assert pieces is not None
    made = torch.full_like(local, -1)
    for region, offsets in pieces:
        part = made if region is None else made[region]
        part.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))])
    return made


@pytest.mark.parametrize("seed", range(40))
def test_pieces_equal_the_shards_of_torch(seed: int) -> None:
    choose = random.Random(seed)
    shape = [choose.choice([0, 1, 2, 5, 7, 8, 9, 12, 30]) for _ in range(choose.randint(1, 3))]
    whole = torch.randperm(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape)
    mesh = [choose.randint(1, 4) for _ in range(choose.randint(1, 3))]
    forms = [(choose.randrange(len(shape)), choose.choice([1, 1, 2, 3])) for _ in mesh]
    seen = torch.zeros(whole.numel(), dtype=torch.int64)
    for place in itertools.product(*map(range, mesh)):
        cuts = [_Cut(dim, split, n, i) for (dim, split), n, i in zip(forms, mesh, place, strict=True)]
        local = cut_by_torch(whole, cuts)
        assert torch.equal(assemble(whole, local, cuts), local)
        seen[local.flatten()] += 1
    assert torch.all(seen == 1)  # the ranks together have each element once


@pytest.mark.parametrize("rows", [9, 13, 14, 28])
@pytest.mark.parametrize(("tp", "dp"), [(2, 4), (3, 4), (4, 2)])
def test_fsdp_shards_the_shards_of_tensor_parallelism(rows: int, tp: int, dp: int) -> None:
    whole = torch.randperm(rows * 3).view(rows, 3)
    for data, model in itertools.product(range(dp), range(tp)):
        local = nth(nth(whole, tp, model, 0), dp, data, 0)
        cuts = [_Cut(0, tp, dp, data), _Cut(0, 1, tp, model)]  # [_StridedShard(0, split_factor=tp), Shard(0)]
        if local.numel():
            assert torch.equal(assemble(whole, local, cuts), local)


def test_pieces_of_another_shape_are_refused() -> None:
    assert _local_boxes((8, 3), (_Cut(0, 1, 2, 1),), (4, 3)) is not None
    assert _local_boxes((8, 3), (_Cut(0, 1, 2, 1),), (3, 3)) is None
    assert _local_boxes((8, 3), (_Cut(0, 2, 2, 1),), (3, 3)) is None
    assert _local_boxes((8, 3), (), (4, 3)) is None
    assert _local_boxes((), (), ()) is not None


def test_plain_values_are_not_distributed() -> None:
    values = [
        torch.zeros(2),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, device="meta"),
        3,
        None,
        {},
        torch.nn.Buffer(),
    ]
    assert not any(map(is_distributed, values))
