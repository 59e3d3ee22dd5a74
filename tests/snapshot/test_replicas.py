"""Digests by which ranks compare their copies of a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiockpt.snapshot import capture
from aiockpt.snapshot.capture import capture_state
from aiockpt.snapshot.sampling import digest_replicas


def digests_of(state: dict[str, Any]) -> list[int]:
    return list(memoryview(digest_replicas(capture_state(state))).cast("I"))


def tensors() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "bytes1": torch.randint(256, (1,), dtype=torch.uint8),
        "bytes3": torch.randint(256, (3,), dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "bytes63": torch.randint(256, (63,), dtype=torch.uint8),
        "bytes64": torch.randint(256, (64,), dtype=torch.uint8),
        "bytes65": torch.randint(256, (65,), dtype=torch.uint8),
        "matrix": torch.randn(40, 5),
        "large": torch.randn(300, 300),
        "tail": torch.randint(256, (5,), dtype=torch.uint8),
    }


@pytest.mark.parametrize("eager_bytes", [capture.EAGER_BYTES, 100, -1])
def test_digest_depends_on_the_values_alone(eager_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the tensors beside it, nor on whether it was copied at the call."""
    expected = digests_of(tensors())
    assert all(expected)
    assert len(set(expected)) == len(expected)
    monkeypatch.setattr(capture, "EAGER_BYTES", eager_bytes)
    assert digests_of(tensors()) == expected
    alone = [digests_of({name: tensor})[0] for name, tensor in tensors().items()]
    assert alone == expected


@pytest.mark.parametrize("eager_bytes", [capture.EAGER_BYTES, -1])
@pytest.mark.parametrize("place", [0, -1])
def test_changed_ends_change_the_digest(place: int, eager_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "EAGER_BYTES", eager_bytes)
    expected = digests_of(tensors())
    for number, name in enumerate(tensors()):
        state = tensors()
        state[name].view(-1).view(torch.uint8)[place] ^= 1
        found = digests_of(state)
        assert found[number] != expected[number]
        assert found[:number] + found[number + 1 :] == expected[:number] + expected[number + 1 :]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_is_not_sampled_has_no_digest() -> None:
    state = {
        "object": "x",
        "empty": torch.empty(0),
        "transposed": torch.randn(300, 200).t(),
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
    }
    assert digests_of(state) == []
    assert digests_of({}) == []
    assert [bool(digest) for digest in digests_of(state | {"some": torch.ones(3)})] == [False] * 5 + [True]
