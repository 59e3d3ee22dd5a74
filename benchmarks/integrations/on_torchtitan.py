"""torchtitan: `save` of its manager in two modes, and of ours, with the wait before the optimizers' next step."""

from __future__ import annotations

import logging
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LAYERS, _WIDTH = 16, 1024  # 64 MiB of parameters, and twice that of the optimizer
_STEPS = 4  # from save to save


def rows(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds blocked for each save, by contender. All keep the two newest."""
    from torchtitan.components.checkpointer import CheckpointManager

    from aiockpt.integrations.torchtitan import AiockptCheckpointManager

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    contenders = {
        "stock disabled": CheckpointManager.Config(async_mode="disabled"),
        "stock async": CheckpointManager.Config(async_mode="async"),
        "aiockpt": AiockptCheckpointManager.Config(),
    }
    try:
        return {name: _blocked(directory / name, config, rounds + 1) for name, config in contenders.items()}
    finally:
        dist.destroy_process_group()


def _blocked(directory: Path, config: Any, saves: int) -> list[float]:
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    optimizer = default_adamw()
    optimizer.implementation = "for-loop"
    optimizers = optimizer.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=1000)
    config.enable, config.interval, config.keep_latest_k = True, _STEPS, 2
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(directory),
    )
    blocked: list[float] = []
    steps: list[float] = []
    for number in range(1, saves * _STEPS + 2):
        model(torch.randn(16, _WIDTH)).square().mean().backward()
        begin = time.perf_counter()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        steps.append(time.perf_counter() - begin)
        optimizers.zero_grad()
        begin = time.perf_counter()
        if checkpointer.save(number):
            blocked.append(time.perf_counter() - begin)
    checkpointer.maybe_wait_for_saving()
    checkpointer.close()
    shutil.rmtree(directory)
    usual = statistics.median(steps)
    waits = [max(0.0, each - usual) for each in steps[_STEPS::_STEPS]]
    return [call + wait for call, wait in zip(blocked, waits, strict=True)]
