"""Delta saves of tensors on a CUDA device, and readers that follow them into tensors there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aiockpt
from tests.states import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

_HOT = ("w00", "w05")


def _state() -> dict[str, torch.Tensor]:
    state = {f"w{n:02}": torch.arange(300_000.0 + n, device="cuda") * (n + 1) for n in range(12)}
    state["t"] = torch.arange(600_000, device="cuda", dtype=torch.int16).view(600, 1000).t()
    state["half"] = torch.arange(70_000, device="cuda").bfloat16()
    return state | {"host": torch.arange(50_000.0), "empty": torch.zeros(0, 3, device="cuda")}


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone(memory_format=torch.preserve_format) for name, tensor in state.items()}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[aiockpt.SyncCheckpointManager]:
    with aiockpt.SyncCheckpointManager(tmp_path / "run", base="auto", chunk_bytes=1 << 20) as run:
        yield run


def test_what_has_changed_on_the_device_is_written_and_the_rest_shared(run: aiockpt.SyncCheckpointManager) -> None:
    """Changes in place, in a stream that has not ended, and one without: each step is bit for bit what was saved."""
    state, saved, results = _state(), [], []
    for step in range(5):
        saved.append(_on_host(state))
        results.append(run.save(step, state))
        for name in _HOT:
            state[name].mul_(1.5).add_(step)  # enqueued only: the next save waits for it
    for step, expected in enumerate(saved):
        assert_same(expected, run.checkpointer.load(run.path_of(step)))
        assert run.checkpointer.verify(run.path_of(step)).ok
    hot_bytes = sum(state[name].nbytes for name in _HOT)
    assert results[0].bytes_reused == 0
    for result in results[3:]:  # by then what changes is in files of its own
        assert hot_bytes <= result.bytes_written < 1.2 * hot_bytes
        assert result.bytes_reused > 0.7 * result.nbytes


def test_changes_behind_a_fence_belong_to_the_next_step(run: aiockpt.SyncCheckpointManager) -> None:
    """Though all was to be shared, and was only hashed: the copies that are hashed come before the fence as well."""
    state, saved = _state(), []
    for step in range(6):
        saved.append(_on_host(state))
        save = run.submit(step, state)
        save.fence()
        for name in list(state)[step % 2 :: 3] if step > 1 else _HOT:
            if state[name].is_cuda:
                state[name].add_(1)
        save.written.result(60)
    for step, expected in enumerate(saved):
        assert_same(expected, run.checkpointer.load(run.path_of(step)))


def test_one_bit_on_the_device_is_a_change(run: aiockpt.SyncCheckpointManager) -> None:
    state = _state()
    state["w03"].fill_(torch.nan)
    run.save(0, state)
    state["w03"].view(torch.int32)[1234] ^= 1  # another NaN
    state["t"][7, 9] += 1
    run.save(1, state)
    assert_same(_on_host(state), run.checkpointer.load(run.path_of(1)))


def test_a_step_follows_another_device(run: aiockpt.SyncCheckpointManager) -> None:
    """The bytes count, wherever they are."""
    state = _state()
    run.save(0, state)
    assert run.save(1, _on_host(state)).bytes_reused > 0
    assert run.save(2, state).bytes_reused > 0
    assert_same(_on_host(state), run.checkpointer.load(run.path_of(2)))


def test_a_reader_fills_tensors_on_the_device_with_what_has_changed(run: aiockpt.SyncCheckpointManager) -> None:
    state = _state()
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with aiockpt.watch_sync(run.directory, poll_s=0.01) as watch:
        versions = iter(watch)
        for step in range(3):
            run.save(step, state)
            version = next(versions)
            expected = [name for name in state if step == 0 or name in _HOT or not state[name].numel()]
            changed = version.load(into)
            assert [name for name in changed if state[name].numel()] == [e for e in expected if state[e].numel()]
            assert_same(_on_host(state), _on_host(into))
            for name in _HOT:
                state[name].mul_(1.5)
        into["w07"].add_(1)  # by the caller: it is read again
        run.save(3, state)
        assert sorted(next(versions).load(into)) == sorted((*_HOT, "w07"))
        assert_same(_on_host(state), _on_host(into))
        versions.close()  # type: ignore[attr-defined]
