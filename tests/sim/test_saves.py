"""Saves and loads of tensors on the simulated device: where the device is full, slow or broken, or captures."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.staging import runtime
from tests.sim import device as sim
from tests.states import assert_same

CHUNK = 64 << 10
OPTIONS: dict[str, Any] = {"chunk_bytes": CHUNK, "staging_bytes": 4 * CHUNK, "fsync": False}
WAIT_S = 60


def _state(device: str = "sim:0") -> dict[str, torch.Tensor]:
    """Return tensors that are copied one by one, packed, made dense, and at the call."""
    numbers = torch.arange(60_000, device=device)
    complex_ = torch.complex(numbers[:20_000].float(), numbers[:20_000].float() + 1)
    return {
        "large": numbers,
        "strided": numbers.view(-1, 3)[:, ::2].clone().view(-1, 2)[:, :1],
        "transposed": (numbers + 1).view(300, 200).t(),
        "conjugated": complex_.conj(),
        "negated": complex_.clone().conj().imag,
        "middle": numbers[:10_000] + 3,
        "small": numbers[:100] + 4,
        "other device": numbers[:10_000].to("sim:1"),
        "host": torch.arange(10_000),
    }


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


@pytest.mark.parametrize("validate", ["versions", "hash"])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_every_kind_of_tensor_comes_back(writer, validate, locking, tmp_path: Path) -> None:
    """On the host, on the device, and in place; and the state itself is not changed."""
    state = _state()
    expected = _on_host(state)
    with aiockpt.SyncCheckpointer(writer=writer, validate=validate, **OPTIONS) as ckpt:
        ckpt.prewarm(state)
        ckpt.save(state, tmp_path / "c")
        assert_same(expected, _on_host(state))
        assert_same(expected, ckpt.load(tmp_path / "c"))
        assert_same(expected, _on_host(ckpt.load(tmp_path / "c", map_location="sim")))
        for tensor in state.values():
            tensor.zero_()
        ckpt.load(tmp_path / "c", state)
        assert_same(expected, _on_host(state))


@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_the_device_is_full_at_any_allocation(validate, tmp_path: Path) -> None:
    """The save does without the memory, or fails with an error of its own; so does the load."""
    state = _state()
    expected = _on_host(state)
    outcomes = set()
    with aiockpt.SyncCheckpointer(validate=validate, on_failure="warn", **OPTIONS) as ckpt:
        ckpt.save(state, tmp_path / "whole")
        for number in itertools.count(1):
            sim.fail_allocations(number, 1 + number % 2)
            before = sim.statistics()["refused"]
            error = None
            try:
                error = ckpt.submit(state, tmp_path / str(number)).written.exception(WAIT_S)
            except aiockpt.SaveError as exc:
                error = exc
            refused = sim.statistics()["refused"] > before
            sim.fail_allocations(0, 0)
            if error is None:
                assert_same(expected, ckpt.load(tmp_path / str(number)))
            outcomes.add(type(error))
            assert error is None or isinstance(error, aiockpt.SaveError)
            if not refused:
                break
        for number in itertools.count(1):
            sim.fail_allocations(number)
            try:
                ckpt.load(tmp_path / "whole", map_location="sim")
                break
            except aiockpt.LoadError as exc:
                assert "no memory" in str(exc)
    assert len(outcomes) > 1


def test_a_first_save_during_a_capture(tmp_path: Path) -> None:
    """Whether a kind of device has streams is found out without spoiling the capture."""
    runtime._has_streams.cache_clear()
    tensor = torch.zeros(100_000, device="sim")
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        graph = sim.Graph(torch.Stream("sim"))
        with graph.capture(), pytest.raises(aiockpt.SaveError, match="captures a graph"):
            ckpt.submit({"w": tensor}, tmp_path / "c")
        with graph.capture():
            tensor.add_(1)
            with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                ckpt.load(tmp_path / "c", {"w": tensor})
        ckpt.save({"w": tensor}, tmp_path / "c")
        graph.replay()
        assert ckpt.load(tmp_path / "c")["w"].sum() == 0
    assert tensor.sum().item() == 100_000


def test_streams_are_used_again(tmp_path: Path) -> None:
    """Torch hands out its few streams in turn: of many, the program would soon get one that copies are made in."""
    state = _state()

    def save(name: str) -> None:
        with aiockpt.SyncCheckpointer(validate="hash", **OPTIONS) as ckpt:
            for number in range(3):
                ckpt.save(state, tmp_path / f"{name}{number}")
                ckpt.load(tmp_path / f"{name}{number}", map_location="sim")

    save("a")
    before = torch.Stream("sim").stream_id
    save("b")
    assert torch.Stream("sim").stream_id - before == 1
