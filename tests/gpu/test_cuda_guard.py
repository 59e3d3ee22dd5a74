"""Training on a CUDA device while saves are staged: every checkpoint is a state between two steps."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.states import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

CHUNK = 1 << 20
STEPS = 8


class Trainer:
    """A model with statistics that forward changes, and its optimizer; all on the device except the number of steps."""

    def __init__(self, **options: Any) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.inputs = torch.zeros(64, 512, device="cuda")
        self.done = 0
        self.apply: Callable[[], Any] = self.optimizer.step

    def forward_backward(self) -> None:
        self.inputs.normal_()
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.inputs).square().mean().backward()

    def step(self) -> None:
        self.apply()
        self.done += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "done": self.done}

    def copied(self) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, self.state())


def _train(
    ckpt: aiockpt.SyncCheckpointer,
    directory: Path,
    trainer: Trainer,
    step: Callable[[], Any],
    before: Callable[[], Any],
) -> tuple[list[Any], list[aiockpt.SaveHandle]]:
    """Save between every two steps, without ever waiting for the device."""
    states, saves = [], []
    for number in range(STEPS):
        states.append(trainer.copied())
        while True:
            try:
                saves.append(ckpt.submit(trainer.state(), directory / str(number)))
                break
            except aiockpt.TornSnapshotError:  # of an earlier save that was never awaited
                continue
        before()
        step()
    return states, saves


def _check(ckpt: aiockpt.SyncCheckpointer, states: list[Any], saves: list[aiockpt.SaveHandle]) -> list[bool]:
    """Compare each published checkpoint with its state; return whether each save was published."""
    succeeded = []
    for state, save in zip(states, saves, strict=True):
        error = save.written.exception(120)
        succeeded.append(error is None)
        if error is None:
            expected = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state)
            assert_same(expected, ckpt.load(save.path))
        else:
            assert isinstance(error, aiockpt.TornSnapshotError)
            assert not Path(save.path).exists()
    return succeeded


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("how", ["fence", "guard", pytest.param("nothing", marks=pytest.mark.unordered)])
@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("validate", ["versions", "hash"])
def test_every_checkpoint_is_a_state_between_two_steps(how, options, side_stream, validate, tmp_path: Path) -> None:
    """Samples of the bytes raise no false alarm."""
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    ckpt = aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=8 * CHUNK, validate=validate)
    with torch.cuda.stream(stream), ckpt:
        trainer = Trainer(**options)

        def step() -> None:
            trainer.forward_backward()
            trainer.step()

        step()
        guard = ckpt.guard(trainer.optimizer) if how == "guard" else None
        states, saves = _train(ckpt, tmp_path, trainer, step, ckpt.fence if how == "fence" else lambda: None)
        if guard is not None:
            guard.remove()
        succeeded = _check(ckpt, states, saves)
        if how != "nothing":
            assert succeeded == [True] * STEPS


@pytest.mark.parametrize("guarded", [False, True])
def test_replays_of_a_graph_after_a_fence(guarded, tmp_path: Path) -> None:
    """A whole step is one graph, whose changes bump no counter; a guard does nothing during the capture."""
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=8 * CHUNK) as ckpt:
        trainer = Trainer(capturable=True)
        guard = ckpt.guard(trainer.optimizer) if guarded else None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                trainer.forward_backward()
                trainer.optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # This save is copied during the capture, which changes no tensor yet.
        first = trainer.copied()
        early = ckpt.submit(trainer.state(), tmp_path / "early")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            trainer.optimizer.zero_grad(set_to_none=False)
            trainer.model(trainer.inputs).square().mean().backward()
            trainer.optimizer.step()
        early_error = early.written.exception(120)
        if guard is not None:
            guard.remove()

        def replay() -> None:
            trainer.inputs.normal_()
            graph.replay()

        states, saves = _train(ckpt, tmp_path, trainer, replay, ckpt.fence)
        assert _check(ckpt, states, saves) == [True] * STEPS
        # The capture bumps version counters although nothing runs, so the save may be reported as torn.
        assert early_error is None or isinstance(early_error, aiockpt.TornSnapshotError)
        if early_error is None:
            assert _check(ckpt, [first], [early]) == [True]
    assert not torch.equal(states[0]["model"]["0.weight"], states[1]["model"]["0.weight"])


def _large(count: int = 8) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(i, i + (8 << 20), dtype=torch.float32, device="cuda") for i in range(count)}


@pytest.mark.unordered
@pytest.mark.parametrize("how", ["data", "graph", "fused"])
def test_writes_that_no_counter_shows(how: str, tmp_path: Path) -> None:
    """The last tensors are changed long before they are copied: the bus is slower than the device's memory."""
    state = _large()
    victim = state["w7"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        victim.add_(1)

    def change() -> None:
        if how == "data":
            victim.data.add_(1)
        elif how == "graph":
            graph.replay()
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [victim], torch.zeros(1, device="cuda"), torch.full((), 0.5, device="cuda")
            )

    for validate in ("versions", "hash"):
        for number in range(3):
            expected = {name: tensor.cpu() for name, tensor in state.items()}
            with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK, validate=validate) as ckpt:
                save = ckpt.submit(state, tmp_path / f"{validate}{number}")
                change()
                error = save.written.exception(120)
                if validate == "hash":
                    assert isinstance(error, aiockpt.TornSnapshotError)
                    assert str(error).startswith("w7 changed between save() and staged, as their bytes show")
                else:
                    assert error is None
                    assert not torch.equal(ckpt.load(save.path)["w7"], expected["w7"])


def test_a_guard_and_samples_of_tensors_beside_the_optimizers(tmp_path: Path) -> None:
    """The samples of these were taken at `save()`: no kernel behind the backward pass has to make them."""
    frozen = torch.arange(8 << 20, dtype=torch.float32, device="cuda")
    weight = torch.nn.Parameter(torch.ones(2048, 2048, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with aiockpt.SyncCheckpointer(validate="hash") as ckpt, ckpt.guard(optimizer):
        ckpt.save({"weight": weight, "frozen": frozen}, tmp_path / "first")
        for number in range(3):
            save = ckpt.submit({"weight": weight, "frozen": frozen}, tmp_path / str(number))
            torch.cuda._sleep(500_000_000)  # the backward pass
            optimizer.step()
            save.written.result(120)


@pytest.mark.parametrize("side_stream", [False, True])
def test_samples_are_taken_in_stream_order_without_synchronising(side_stream: bool, tmp_path: Path) -> None:
    """Work enqueued before the call or after a fence is no change, and nothing synchronises."""
    state = _large() | {"transposed": torch.randn(900, 800, device="cuda").t()}
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    ckpt = aiockpt.SyncCheckpointer(chunk_bytes=16 * CHUNK, staging_bytes=512 * CHUNK, validate="hash")
    with ckpt, torch.cuda.stream(stream):
        ckpt.save(state, tmp_path / "first")  # makes the stream and pins the memory
        for number in range(3):
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.cuda._sleep(500_000_000)  # nothing is computed before everything is enqueued
                for tensor in state.values():
                    tensor.data.mul_(1.5)
                expected = {name: tensor.clone() for name, tensor in state.items()}
                save = ckpt.submit(state, tmp_path / str(number))
                ckpt.fence()
                for tensor in state.values():
                    tensor.data.add_(number + 1)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            save.written.result(120)
            assert_same({name: tensor.cpu() for name, tensor in expected.items()}, ckpt.load(save.path))


def _train_compiled(directory: Path) -> None:
    with aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=8 * CHUNK) as ckpt:
        trainer = Trainer()
        trainer.model, trainer.apply = torch.compile(trainer.model), torch.compile(trainer.optimizer.step)

        def step() -> None:
            trainer.forward_backward()
            trainer.step()

        step()
        with ckpt.guard(trainer.optimizer):
            states, saves = _train(ckpt, directory, trainer, step, lambda: None)
        assert _check(ckpt, states, saves) == [True] * STEPS


def test_compiled_training_with_a_guard(tmp_path: Path) -> None:
    """In a process of its own, because the compiler leaves processes and files behind."""
    if importlib.util.find_spec("triton") is None or not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("torch.compile needs triton and a C compiler")
    here = Path(__file__)
    code = (
        f"import sys, pathlib; sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[2])!r}];"
        f"import {here.stem} as tests_of; tests_of._train_compiled(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
