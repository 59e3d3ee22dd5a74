"""The first code blocks of the README, run as they stand."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.states import assert_same

README = Path(__file__).parents[1] / "README.md"


def block(title: str) -> str:
    """Return the first code block under a title."""
    found = re.search(rf"^\*\*{title}\*\*\n\n```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def run(title: str, names: dict[str, Any], without: str = "") -> None:
    """Run a block, in which `await` may stand at the top, as in a notebook."""
    lines = [line for line in block(title).splitlines() if not (without and without in line)]
    code = compile("\n".join(lines), title, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        names["runner"].run(result)


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optim = torch.optim.AdamW(model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(optim, 30)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(104)]
    return {"model": model, "optim": optim, "sched": sched, "batches": batches, "torch": torch, "aiockpt": aiockpt}


def test_training_and_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner:
        names = training(seed=1) | {"runner": runner}
        run("In an async loop", names)
        assert sorted(path.name for path in Path("runs/a").iterdir()) == ["step-0", "step-100"]
        resumed = training(seed=2) | {"runner": runner, "ckpt": aiockpt.AsyncCheckpointer()}
        run("Resuming", resumed, without="" if torch.cuda.is_available() else "cuda")
        assert resumed["start"] == 101
        assert len(resumed["optim"].state_dict()["state"]) == 4
        assert_same(resumed["everything"]["optim"], resumed["optim"].state_dict())
        for batch in names["batches"][resumed["start"] :]:  # as the first run did
            resumed["model"](batch).square().mean().backward()
            resumed["optim"].step()
            resumed["optim"].zero_grad()
            resumed["sched"].step()
        runner.run(resumed["ckpt"].aclose())
    for name in ("model", "optim", "sched"):
        assert_same(names[name].state_dict(), resumed[name].state_dict())


def test_plain_loops_and_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner:
        names = training(seed=1) | {"runner": runner}
        run("In a plain loop", names)
        assert sorted(path.name for path in Path("runs/a").iterdir()) == ["step-100", "step-200"]
        run("In a notebook", names)
        runner.run(names["ckpt"].aclose())
