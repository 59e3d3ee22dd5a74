"""The Trainer of Transformers: what follows a save, models of several kinds, and two ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # first: the other import takes seconds in each process
pytest.importorskip("transformers.trainer")

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

import aiockpt
from aiockpt.integrations.saves import PendingSave, SavesInFlight
from aiockpt.integrations.transformers import AiockptTrainerMixin, Trainer
from tests.states import assert_same

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

_SIZE = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Numbers(torch.utils.data.Dataset[Any]):
    """Sentences that are the same in every process."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(at, at + 12) % 100
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def model_of(name: str) -> Any:
    transformers.set_seed(0)
    if name == "plain":
        return Plain()
    if name == "adapter":
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model_of("bert"), peft.LoraConfig(target_modules=["query", "value"]))
    if name == "mixture":  # whose stored tensors differ from those in memory
        config = transformers.MixtralConfig(**_SIZE, num_key_value_heads=2, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    if name == "tied":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZE, tie_word_embeddings=True))
    if name == "t5":
        more = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=100, **more))
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZE, max_position_embeddings=32))


class Plain(torch.nn.Module):
    """A model that is none of Transformers; a forward pass changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 100)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def make(directory: str | Path, steps: int, *, kind: Any = Trainer, model: str = "bert", **options: Any) -> Any:
    given: dict[str, Any] = {"save_total_limit": 2, "save_steps": 2, **options}
    args = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        **given,
    )
    return kind(model=model_of(model), args=args, train_dataset=Numbers(), eval_dataset=Numbers())


def _hooked(trainer: Any, hook: Any) -> None:
    """Give a hook to the trainer's transactions."""
    own = trainer._saves.checkpointer.transaction
    trainer._saves.checkpointer.transaction = lambda path, **options: own(path, pre_commit=hook, **options)


def _refuse_4(path: str) -> None:
    if path.endswith("checkpoint-4"):
        raise OSError("the disk is gone")


def _names(run: Path) -> list[str]:
    return sorted(each.name for each in run.iterdir() if not each.name.startswith("."))


# --- what follows a save ----------------------------------------------------------------------------------


class Listener(TrainerCallback):
    """Hears of checkpoints, and adds a file to each."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.trainer: Any = None
        self.heard: list[tuple[int, int]] = []  # the step of the save, and that of the training
        self.passed = {step: threading.Event() for step in range(20)}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.passed[state.global_step].set()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = self.run / f"checkpoint-{state.global_step}"
        assert aiockpt.verify(path).ok
        (path / "rollout_state.json").write_text("{}")
        self.heard.append((state.global_step, self.trainer.state.global_step))


def test_callbacks_hear_of_a_checkpoint_when_it_is_durable(tmp_path: Path) -> None:
    trainer, listener = make(tmp_path / "run", 8, save_steps=3), Listener(tmp_path / "run")
    listener.trainer = trainer
    trainer.add_callback(listener)

    def hold(path: str) -> None:
        if not path.endswith("-8"):  # the last step
            assert listener.passed[int(path.rpartition("-")[2]) + 1].wait(60)

    _hooked(trainer, hold)
    trainer.train()
    assert [step for step, _ in listener.heard] == [3, 6, 8]
    assert all(later > step for step, later in listener.heard[:2])
    assert _names(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]
    assert (tmp_path / "run/checkpoint-8/rollout_state.json").exists()


class Judged(transformers.Trainer):
    """Has a loss that is known before."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_loss": {2: 0.5, 4: 0.1, 6: 0.9}[self.state.global_step]}


class OursJudged(AiockptTrainerMixin, Judged):
    pass


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_one_is_kept_as_by_the_stock_trainer(limit: int, loads: bool, tmp_path: Path) -> None:
    trained = {}
    for kind in (Judged, OursJudged):
        run = tmp_path / kind.__name__
        options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
        options |= {"load_best_model_at_end": loads, "save_total_limit": limit}
        trained[kind] = trainer = make(run, 6, kind=kind, **options)
        trainer.train()
        assert os.path.samefile(trainer.state.best_model_checkpoint, run / "checkpoint-4")
    assert _names(tmp_path / "OursJudged") == _names(tmp_path / "Judged")
    assert_same(dict(trained[Judged].model.state_dict()), dict(trained[OursJudged].model.state_dict()))
    state = json.loads((tmp_path / "OursJudged/checkpoint-4/trainer_state.json").read_text())
    assert os.path.samefile(state["best_model_checkpoint"], tmp_path / "OursJudged/checkpoint-4")


def test_an_older_one_whose_turn_comes_late_removes_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = SavesInFlight.finished

    def all_at_the_end(saves: SavesInFlight, *, wait: bool = False) -> Iterator[PendingSave]:
        for save in saves._saves if wait else ():
            save.transaction.written.result()
        return finished(saves, wait=True) if wait else iter(())

    monkeypatch.setattr(SavesInFlight, "finished", all_at_the_end)
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "save_total_limit": 1}
    make(tmp_path, 6, kind=OursJudged, load_best_model_at_end=True, **options).train()
    assert _names(tmp_path) == ["checkpoint-4"]


class Stops(TrainerCallback):
    """Raises at a step, or sends SIGTERM there and waits until the Trainer has noticed it."""

    def __init__(self, step: int, manager: Any = None) -> None:
        self.step = step
        self.manager = manager

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        self.step = -1
        if self.manager is None:
            raise RuntimeError("the loss is gone")
        os.kill(os.getpid(), signal.SIGTERM)
        while not self.manager.is_checkpoint_requested:
            threading.Event().wait(0.01)


def test_what_is_in_flight_is_finished_though_training_has_failed(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", 8)
    trainer.add_callback(Stops(4))
    with pytest.raises(RuntimeError, match="the loss is gone"):
        trainer.train()
    assert _names(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]
    assert aiockpt.verify(tmp_path / "run/checkpoint-4").ok
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))  # its next run begins anew
    assert _names(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_checkpoint_on_sigterm_is_durable_when_its_call_returns(exists: bool, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", 8, enable_jit_checkpoint=True, save_steps=3)
    (jit,) = (each for each in trainer.callback_handler.callbacks if type(each).__name__ == "JITCheckpointCallback")
    jit.jit_manager.kill_wait = 0
    stops = Stops(3 if exists else 4, jit.jit_manager)
    trainer.callback_handler.callbacks.insert(0, stops)
    returned = []
    own = trainer._save_checkpoint

    def save(*args: Any, **options: Any) -> None:
        own(*args, **options)
        if stops.step < 0:
            returned.append(_names(tmp_path / "run"))

    trainer._save_checkpoint = save
    trainer.train()
    expected = ["checkpoint-3"] if exists else ["checkpoint-3", "checkpoint-4"]
    assert returned == [expected]
    assert _names(tmp_path / "run") == expected
    assert aiockpt.verify(tmp_path / "run" / expected[-1]).ok
    assert not list(tmp_path.rglob("*incomplete*"))


def test_the_failure_of_the_last_save_is_raised_at_the_end(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", 4)
    _hooked(trainer, _refuse_4)
    with pytest.raises(aiockpt.AiockptError, match="the disk is gone"):
        trainer.train()
    assert _names(tmp_path / "run") == ["checkpoint-2"]


def test_failures_can_be_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Careless(Trainer):
        checkpointer_options = {"on_failure": "warn"}

    trainer = make(tmp_path / "run", 6, kind=Careless)
    _hooked(trainer, _refuse_4)
    trainer.train()
    assert _names(tmp_path / "run") == ["checkpoint-2", "checkpoint-6"]
    assert "checkpoint-4 was not written" in caplog.text


def test_what_is_there_is_replaced(tmp_path: Path) -> None:
    make(tmp_path / "run", 2, kind=transformers.Trainer).train()
    for _ in range(2):  # a checkpoint of the stock code, and one of ours with a file of a callback
        (tmp_path / "run/checkpoint-2/notes.txt").write_text("of another run")
        make(tmp_path / "run", 2).train()
        assert aiockpt.verify(tmp_path / "run/checkpoint-2").ok
        assert not (tmp_path / "run/checkpoint-2/notes.txt").exists()


def test_the_stock_code_saves_where_ours_cannot(tmp_path: Path) -> None:
    make(tmp_path / "run", 2, save_on_each_node=True).train()
    assert (tmp_path / "run/checkpoint-2/optimizer.pt").exists()


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "adapter", "mixture", "tied", "t5"])
def test_the_model_is_stored_as_by_the_stock_trainer(name: str, tmp_path: Path) -> None:
    kinds = {"stock": transformers.Trainer, "ours": Trainer}
    for where, kind in kinds.items():
        make(tmp_path / where, 3, kind=kind, model=name).train()
    stock, ours = (tmp_path / where / "checkpoint-3" for where in kinds)
    assert set(_names(stock)) - {"optimizer.pt"} == set(_names(ours)) - {"optimizer"}
    (file,) = (each.name for each in stock.glob("*.safetensors"))
    with safe_open(stock / file, "pt") as one, safe_open(ours / file, "pt") as other:
        assert one.metadata() == other.metadata()
    assert_same(load_file(stock / file), load_file(ours / file))
    for where, kind in kinds.items():
        make(tmp_path / where, 4, kind=kind, model=name).train(resume_from_checkpoint=True)
    assert_same(*(load_file(tmp_path / where / "checkpoint-4" / file) for where in kinds))


# --- ranks --------------------------------------------------------------------------------------------------

RANKS = """
import sys, threading, transformers
from tests.integrations.test_trainer import make
run = sys.argv[1]
make(run + "/ours", 6, ddp_backend="gloo").train()
make(run + "/stock", 6, ddp_backend="gloo", kind=transformers.Trainer).train()
make(run + "/again", 6, ddp_backend="gloo").train(resume_from_checkpoint=run + "/ours/checkpoint-4")
assert not [each for each in threading.enumerate() if each.name.startswith("aiockpt")]
"""


def test_two_ranks_save_together(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(tmp_path)],
            env=os.environ | common | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for step in (4, 6):
        ours, stock = (tmp_path / each / f"checkpoint-{step}" for each in ("ours", "stock"))
        assert_same(load_file(stock / "model.safetensors"), load_file(ours / "model.safetensors"))
        assert aiockpt.verify(ours).ok
        assert set(_names(stock)) - {"optimizer.pt"} == set(_names(ours)) - {"optimizer"}
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(_names(ours))
        assert {name.split("_")[2] for name in _names(ours / "optimizer")} == {"0", "1"}  # who has written them
    whole, again = (load_file(tmp_path / each / "checkpoint-6/model.safetensors") for each in ("ours", "again"))
    assert_same(whole, again)
