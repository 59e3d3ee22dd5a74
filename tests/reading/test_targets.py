"""Targets that share memory."""

from __future__ import annotations

import torch

from aiockpt.reading.targets import contested


def test_contested_misses_no_shared_address() -> None:
    whole, alone = torch.zeros(6, 8), torch.zeros(5)
    views = [
        whole[:2],
        whole[2:4],
        whole[1],
        whole[3:],
        whole[:, :4],
        whole.t()[5:],
        whole[5, 5:],
        whole[6:],
        torch.zeros(3),
        torch.zeros(0),
        torch.nn.Parameter(torch.zeros(4)),
    ]
    found = set()
    for one in views:
        for other in views:
            if one is other:
                continue

            share = bool(_addresses(one) & _addresses(other))
            names = contested([("one", one), ("other", other)])
            assert names == ({"one", "other"} if names else set())
            assert bool(names) >= share
            assert contested([("other", other), ("alone", alone), ("one", one)]) == names
            assert not contested([("one", one), ("one", other)])
            found.add((share, bool(names)))
    assert found == {(True, True), (False, False), (False, True)}
    assert not contested([(str(number), view) for number, view in enumerate(views[8:])])


def _addresses(tensor: torch.Tensor) -> set[int]:
    strided = tensor.detach()
    addresses = torch.full(strided.shape, strided.data_ptr(), dtype=torch.int64)
    for dim, (size, step) in enumerate(zip(strided.shape, strided.stride(), strict=True)):
        shape = [1] * strided.dim()
        shape[dim] = size
        addresses += (torch.arange(size) * step * strided.itemsize).view(shape)
    return set(addresses.flatten().tolist())
