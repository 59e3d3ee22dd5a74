"""accelerate: `save_state`, and with ours the wait before the next optimizer step."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

import torch

_LAYERS, _WIDTH = 16, 1024  # 64 MiB of parameters, and twice that of the optimizer
_STEPS = 4  # from save to save


def rows(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds blocked for each save, by contender."""
    return {name: _measured(directory / name, rounds + 1, ours=name == "aiockpt") for name in ("stock", "aiockpt")}


def _measured(directory: Path, saves: int, *, ours: bool) -> list[float]:
    from accelerate import Accelerator

    from aiockpt.integrations.accelerate import install

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    blocked: list[float] = []
    steps: list[float] = []
    with contextlib.closing(install(accelerator)) if ours else contextlib.nullcontext():
        for number in range(saves * _STEPS + 1):
            accelerator.backward(model(torch.randn(4, _WIDTH)).square().mean())
            begin = time.perf_counter()
            optimizer.step()
            steps.append(time.perf_counter() - begin)
            optimizer.zero_grad()
            if number % _STEPS == 0 and number:
                begin = time.perf_counter()
                accelerator.save_state(str(directory / str(number)))
                blocked.append(time.perf_counter() - begin)
    usual = statistics.median(steps)
    waits = [max(0.0, each - usual) for each in [*steps[_STEPS + 1 :: _STEPS], usual]]
    return [call + wait for call, wait in zip(blocked, waits, strict=False)]
