"""Training on a CUDA device while saves are copied: what is written is a state that existed between two steps."""

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
    """A model with statistics that forward changes, and its optimizer; all on the device but for the step."""

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
            except aiockpt.TornSnapshotError:  # that of an earlier one, which nobody awaited
                continue
        before()
        step()
    return states, saves


def _check(ckpt: aiockpt.SyncCheckpointer, states: list[Any], saves: list[aiockpt.SaveHandle]) -> list[bool]:
    """Compare every checkpoint that was announced with the state that existed; tell which were."""
    announced = []
    for state, save in zip(states, saves, strict=True):
        error = save.written.exception(120)
        announced.append(error is None)
        if error is None:
            expected = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state)
            assert_same(expected, ckpt.load(save.path))
        else:
            assert isinstance(error, aiockpt.TornSnapshotError)
            assert not Path(save.path).exists()
    return announced


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("how", ["fence", "guard", "nothing"])
@pytest.mark.parametrize("side_stream", [False, True])
def test_every_checkpoint_is_a_state_between_two_steps(how, options, side_stream, tmp_path: Path) -> None:
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream), aiockpt.SyncCheckpointer(chunk_bytes=CHUNK, staging_bytes=8 * CHUNK) as ckpt:
        trainer = Trainer(**options)

        def step() -> None:
            trainer.forward_backward()
            trainer.step()

        step()
        guard = ckpt.guard(trainer.optimizer) if how == "guard" else None
        states, saves = _train(ckpt, tmp_path, trainer, step, ckpt.fence if how == "fence" else lambda: None)
        if guard is not None:
            guard.remove()
        announced = _check(ckpt, states, saves)
        if how != "nothing":
            assert announced == [True] * STEPS


@pytest.mark.parametrize("guarded", [False, True])
def test_replays_of_a_graph_behind_a_fence(guarded, tmp_path: Path) -> None:
    """A whole step is one graph, whose changes no counter shows; a guard is skipped while it is captured."""
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
        # One that is being copied while the graph is captured, which changes nothing yet.
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
        # The capture itself counts as a change, for who does not know that nothing ran.
        assert early_error is None or isinstance(early_error, aiockpt.TornSnapshotError)
        if early_error is None:
            assert _check(ckpt, [first], [early]) == [True]
    assert not torch.equal(states[0]["model"]["0.weight"], states[1]["model"]["0.weight"])


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
    """In a process of its own, for the compiler leaves processes and files behind."""
    if importlib.util.find_spec("triton") is None or not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("torch.compile needs triton and a C compiler")
    here = Path(__file__)
    code = (
        f"import sys, pathlib; sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[2])!r}];"
        f"import {here.stem} as tests_of; tests_of._train_compiled(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
