"""Saves and loads of tensors on the fake device: where it is full, refuses calls, or captures."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.staging import runtime
from tests.fakecuda import device as fake
from tests.states import assert_same

CHUNK = 64 << 10
OPTIONS: dict[str, Any] = {"chunk_bytes": CHUNK, "staging_bytes": 4 * CHUNK, "fsync": False}
WAIT_S = 60


def _state(device: str = "cuda:0") -> dict[str, torch.Tensor]:
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
        "other device": numbers[:10_000].to("cuda:1"),
        "host": torch.arange(10_000),
    }


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


REFUSED = {"nothing": "", "locking": "cuMemHostRegister_v2", "batches": "cuMemcpyBatchAsync"}
"""Calls that a driver may not know."""


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("validate", ["versions", "hash"])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_every_kind_of_tensor_comes_back(writer, validate, refused, tmp_path: Path, monkeypatch) -> None:
    """On the host, on the device, and in place; and the state itself is not changed."""
    monkeypatch.setattr(driver := runtime._driver(), "_copy_batch", driver._copy_batch)  # it asks once in a process
    if call := REFUSED[refused]:
        fake.refuse(call, fake.NOT_SUPPORTED)
        before = fake.refused()
    _check_round_trip(tmp_path, writer=writer, validate=validate)
    assert not call or fake.refused() > before


@pytest.mark.parametrize("kind", fake.POSES[1:], indirect=True)
@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_another_kind_of_device(validate, kind: str, tmp_path: Path) -> None:
    _check_round_trip(tmp_path, validate=validate)


def _check_round_trip(tmp_path: Path, **options: Any) -> None:
    state = _state()
    expected = _on_host(state)
    with aiockpt.SyncCheckpointer(**options, **OPTIONS) as ckpt:
        ckpt.prewarm(state)
        ckpt.save(state, tmp_path / "c")
        assert_same(expected, _on_host(state))
        assert_same(expected, ckpt.load(tmp_path / "c"))
        assert_same(expected, _on_host(ckpt.load(tmp_path / "c", map_location="cuda")))
        for tensor in state.values():
            tensor.zero_()
        ckpt.load(tmp_path / "c", state)
        assert_same(expected, _on_host(state))


@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_the_device_is_full_at_any_allocation(validate, kind: str, tmp_path: Path) -> None:
    """The save does without the memory, or fails with an error of its own; so does the load."""
    state = _state()
    expected = _on_host(state)
    outcomes = set()
    with aiockpt.SyncCheckpointer(validate=validate, on_failure="warn", **OPTIONS) as ckpt:
        ckpt.save(state, tmp_path / "whole")
        for number in itertools.count(1):
            fake.refuse("tensor", fake.OUT_OF_MEMORY, after=number - 1, count=1 + number % 2)
            before = fake.refused()
            error = None
            try:
                error = ckpt.submit(state, tmp_path / str(number)).written.exception(WAIT_S)
            except aiockpt.SaveError as exc:
                error = exc
            refused = fake.refused() > before
            fake.refuse("tensor", 0)
            if error is None:
                assert_same(expected, ckpt.load(tmp_path / str(number)))
            outcomes.add(type(error))
            assert error is None or isinstance(error, aiockpt.SaveError)
            if not refused:
                break
        for number in itertools.count(1):
            fake.refuse("tensor", fake.OUT_OF_MEMORY, after=number - 1, count=1)
            try:
                ckpt.load(tmp_path / "whole", map_location="cuda")
                break
            except aiockpt.LoadError as exc:
                assert "no memory" in str(exc)
    assert len(outcomes) > 1


def test_the_device_is_full_at_any_allocation_of_the_driver(tmp_path: Path) -> None:
    """Where torch's allocator keeps nothing, and asks the driver each time; torch tries a second time."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DRIVER, str(tmp_path)],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


FULL_DRIVER = """
import itertools, sys, torch, aiockpt
from tests.fakecuda import device as fake
numbers = torch.arange(60_000, device="cuda")
state = {"large": numbers, "strided": numbers.view(200, 300).t(), "small": numbers[:100]}
expected = {name: tensor.cpu() for name, tensor in state.items()}
options = {"chunk_bytes": 64 << 10, "staging_bytes": 256 << 10, "fsync": False, "on_failure": "warn"}
outcomes = set()
with aiockpt.SyncCheckpointer(**options) as ckpt:
    ckpt.save(state, sys.argv[1] + "/whole")
    for number in itertools.count():
        before = fake.refused()
        fake.refuse("cudaMalloc", fake.OUT_OF_MEMORY, after=number)
        try:
            error = ckpt.submit(state, f"{sys.argv[1]}/{number}").written.exception(60)
        except aiockpt.SaveError as exc:
            error = exc
        was_refused = fake.refused() > before
        fake.refuse("cudaMalloc", 0)
        if error is None:
            found = ckpt.load(f"{sys.argv[1]}/{number}")
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert error is None or isinstance(error, aiockpt.SaveError), error
        outcomes.add(type(error))
        if not was_refused:
            break
assert number > 1 and len(outcomes) > 1, (number, outcomes)
assert not fake.misuses()
"""


def test_a_first_save_during_a_capture(kind: str, tmp_path: Path) -> None:
    """Whether a kind of device has streams is found out without spoiling the capture."""
    runtime._has_streams.cache_clear()
    tensor = torch.zeros(100_000, device="cuda")
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(aiockpt.SaveError, match="captures a graph"):
            tensor.add_(0)
            ckpt.submit({"w": tensor}, tmp_path / "c")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(aiockpt.LoadError, match="captures a graph"):
                ckpt.load(tmp_path / "c", {"w": tensor})
        ckpt.save({"w": tensor}, tmp_path / "c")
        graph.replay()
        assert ckpt.load(tmp_path / "c")["w"].sum() == 0
    assert tensor.sum().item() == 100_000


def test_streams_are_used_again(kind: str, tmp_path: Path) -> None:
    """The engine's streams are its own, and never destroyed; torch hands out the few that it has in turn.

    So each is used again: of many of torch's, the program would soon get one that copies are made in.
    """
    state = _state()

    def streams() -> int:
        return fake.calls()["cuStreamCreate"] if kind == "CUDA" else len(runtime._spare[torch.device("cuda:0")])

    def save(name: str) -> int:
        before = streams()
        with aiockpt.SyncCheckpointer(validate="hash", **OPTIONS) as ckpt:
            for number in range(3):
                ckpt.save(state, tmp_path / f"{name}{number}")
                ckpt.load(tmp_path / f"{name}{number}", map_location="cuda")
        return streams() - before

    save("a")
    assert streams()
    assert save("b") == 0


@pytest.mark.parametrize("how", ["changed", "freed"])
def test_the_program_goes_on_while_copies_are_held(how: str, tmp_path: Path) -> None:
    """What it enqueues behind the fence waits for them, and memory of another stream stays until they are done."""
    tensor, stream = torch.arange(30_000, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with aiockpt.SyncCheckpointer(**OPTIONS | {"staging_bytes": 64 * CHUNK}) as ckpt:
        ckpt.save({"w": tensor}, tmp_path / "first")
        with fake.held("to_host"):
            with torch.cuda.stream(stream):
                save = ckpt.submit({"w": tensor}, tmp_path / "c")
                save.fence(WAIT_S)
                if how == "changed":
                    tensor.add_(1)
                    assert not stream.query()
            if how == "freed":
                tensor.untyped_storage().resize_(0)
                torch.cuda.current_stream().synchronize()
        save.written.result(WAIT_S)
        assert torch.equal(ckpt.load(tmp_path / "c")["w"], torch.arange(30_000))
