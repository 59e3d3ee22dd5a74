"""Transformers: the Trainer's call to save, and with ours the wait before the next optimizer step."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch


class _Ids(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(at, at + 16) % 100
        return {"input_ids": ids, "labels": ids}


def rows(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds blocked for each save, by contender."""
    import transformers

    from aiockpt.integrations.transformers import Trainer

    kinds = {"stock": transformers.Trainer, "aiockpt": Trainer}
    return {name: _measured(kind, directory / name, rounds + 1) for name, kind in kinds.items()}


def _measured(kind: Any, directory: Path, saves: int) -> list[float]:
    from transformers import BertConfig, BertForMaskedLM, TrainingArguments

    blocked: list[float] = []
    steps: list[float] = []

    class Measured(kind):  # type: ignore[misc]
        def _save_checkpoint(self, *args: Any, **options: Any) -> None:
            begin = time.perf_counter()
            super()._save_checkpoint(*args, **options)
            blocked.append(time.perf_counter() - begin)

        def create_optimizer(self, *args: Any, **options: Any) -> Any:
            optimizer = super().create_optimizer(*args, **options)
            own = optimizer.step

            def step(*args: Any, **options: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return own(*args, **options)
                finally:
                    steps.append(time.perf_counter() - begin)

            optimizer.step = step
            return optimizer

    model = BertForMaskedLM(BertConfig(num_hidden_layers=6, vocab_size=2000))
    args = TrainingArguments(
        output_dir=str(directory),
        max_steps=4 * saves,
        save_steps=4,
        per_device_train_batch_size=1,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Measured(model=model, args=args, train_dataset=_Ids()).train()
    usual = statistics.median(steps)
    waits = [max(0.0, each - usual) for each in [*steps[4::4], usual]]  # of the step that follows each save
    return [call + wait for call, wait in zip(blocked, waits, strict=False)]
