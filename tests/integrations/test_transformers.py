"""The Trainer of Transformers, with a small model and no downloads."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # first: the other import takes seconds in each process
pytest.importorskip("transformers.trainer")

import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, TrainerCallback, TrainingArguments

import aiockpt
from aiockpt.integrations.transformers import Trainer
from tests.states import assert_same

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

PROGRAM = """
import os, signal, sys
from tests.integrations.test_transformers import make
trainer = make(sys.argv[1], steps=8)
if sys.argv[2] == "kill":
    def die(path):
        if path.endswith("checkpoint-6"):
            os.kill(os.getpid(), signal.SIGKILL)
    def transaction(path, _own=trainer._saves.checkpointer.transaction, **options):
        return _own(path, pre_commit=die, **options)
    trainer._saves.checkpointer.transaction = transaction
trainer.train(resume_from_checkpoint=sys.argv[2] == "resume")
"""


class Numbers(torch.utils.data.Dataset[Any]):
    """Sentences that are the same in every process."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(at, at + 12) % 100
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def make(directory: str, *, steps: int, kind: Any = Trainer, **options: Any) -> Any:
    transformers.set_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    given: dict[str, Any] = {"save_total_limit": 2, "save_steps": 2, **options}
    args = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="steps",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        **given,
    )
    return kind(model=BertForMaskedLM(config), args=args, train_dataset=Numbers())


def _weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(aiockpt.load(path / "model.safetensors").items()))


def test_its_checkpoints_are_those_of_the_stock_trainer(tmp_path: Path) -> None:
    make(str(tmp_path / "ours"), steps=6).train()
    make(str(tmp_path / "stock"), steps=6, kind=transformers.Trainer).train()
    assert sorted(os.listdir(tmp_path / "ours")) == ["checkpoint-4", "checkpoint-6"]
    for step in (4, 6):
        ours, stock = (tmp_path / each / f"checkpoint-{step}" for each in ("ours", "stock"))
        assert_same(_weights(stock), _weights(ours))
        assert {each.name for each in stock.iterdir()} - {"optimizer.pt"} <= {each.name for each in ours.iterdir()}
        assert json.loads((ours / "trainer_state.json").read_text())["global_step"] == step
        assert aiockpt.verify(ours).ok
        one, other = (BertForMaskedLM.from_pretrained(each).state_dict() for each in (ours, stock))
        assert_same(dict(one), dict(other))
    stored = aiockpt.load(tmp_path / "ours" / "checkpoint-6" / "optimizer")
    expected = torch.load(tmp_path / "stock" / "checkpoint-6" / "optimizer.pt", weights_only=True)
    for number, state in expected["state"].items():
        assert_same(dict(state), dict(stored["state"][number]))


def test_a_run_that_was_killed_within_a_save_goes_on(tmp_path: Path) -> None:
    def run(directory: Path, how: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, directory, how], timeout=200, capture_output=True, check=False
        ).returncode

    assert run(tmp_path / "whole", "whole") == 0
    assert run(tmp_path / "broken", "kill") == -signal.SIGKILL
    there = {name for name in os.listdir(tmp_path / "broken") if not name.startswith(".")}
    assert there == {"checkpoint-2", "checkpoint-4"}
    assert run(tmp_path / "broken", "resume") == 0
    for directory in ("whole", "broken"):
        assert sorted(os.listdir(tmp_path / directory)) == ["checkpoint-6", "checkpoint-8"]
    assert_same(_weights(tmp_path / "whole/checkpoint-8"), _weights(tmp_path / "broken/checkpoint-8"))


def test_a_failed_save_is_raised_and_keeps_the_old_ones(tmp_path: Path) -> None:
    trainer = make(str(tmp_path / "run"), steps=8)

    def refuse(path: str) -> None:
        if path.endswith("checkpoint-4"):
            raise OSError("the disk is gone")

    class Waits(TrainerCallback):
        """Waits for the save that fails: the next one is to find that out."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                concurrent.futures.wait([made[-1].written])

    own, made = trainer._saves.checkpointer.transaction, []

    def transaction(path: str, **options: Any) -> Any:
        made.append(own(path, pre_commit=refuse, **options))
        return made[-1]

    trainer._saves.checkpointer.transaction = transaction
    trainer.add_callback(Waits())
    with pytest.raises(aiockpt.AiockptError, match="the disk is gone"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert "checkpoint-4" not in os.listdir(tmp_path / "run")
    assert aiockpt.verify(tmp_path / "run" / "checkpoint-2").ok
