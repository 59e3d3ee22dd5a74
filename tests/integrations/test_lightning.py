"""Lightning: checkpoints beside training, in its own files, and what it does with them."""

from __future__ import annotations

import errno
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.environments import SLURMEnvironment

import aiockpt
from aiockpt.integrations.lightning import AiockptCallback, AiockptCheckpointIO
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.testing import FaultyStorage
from tests.finders import names_in
from tests.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

IS_NEW = hasattr(pl.callbacks, "WeightAveraging")  # since 2.6
WIDTH = 256  # its weights are too large to be copied at the call
ROOT = Path(__file__).parents[2]


class Model(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(batch.repeat(8, 1), batch_size=4)


class Last(ModelCheckpoint):
    """Is called after all other callbacks, and saves nothing."""

    def __init__(self, function: Any) -> None:
        super().__init__(save_top_k=0)
        self.function = function

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.function(trainer)


class Other(pl.callbacks.Callback):
    def __init__(self, name: str, function: Any) -> None:
        setattr(self, name, lambda trainer, *args: function(trainer))


def trainer_of(
    directory: Path, *callbacks: Any, plugin: Any = None, more: Any = (), beside: bool = True, **options: Any
) -> pl.Trainer:
    return pl.Trainer(
        **{"max_steps": 8, "logger": False} | options,
        accelerator="cpu",
        default_root_dir=directory,
        plugins=[*more, AiockptCheckpointIO() if plugin is None else plugin],
        callbacks=[*([AiockptCallback()] if beside else []), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def newest(directory: Path, **options: Any) -> ModelCheckpoint:
    """Return a callback that saves after every two steps."""
    return ModelCheckpoint(directory, **{"monitor": "step", "mode": "max", "every_n_train_steps": 2} | options)


def fails(step: str = "commit", **options: Any) -> AiockptCheckpointIO:
    error = OSError(errno.EIO, "Input/output error")
    return AiockptCheckpointIO(storage=FaultyStorage(LocalStorage(), step, error, **options))


# --- files ------------------------------------------------------------------------------------------------


def test_checkpoints_equal_those_of_lightning(tmp_path: Path) -> None:
    for plugin in (AiockptCheckpointIO(), TorchCheckpointIO()):
        run = tmp_path / type(plugin).__name__
        is_ours = isinstance(plugin, AiockptCheckpointIO)
        trainer_of(tmp_path, newest(run, save_top_k=-1), plugin=plugin, beside=is_ours).fit(Model())
    ours, stock = tmp_path / "AiockptCheckpointIO", tmp_path / "TorchCheckpointIO"
    assert names_in(ours) == names_in(stock) == [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6, 8)]
    for name in names_in(ours):
        mine, theirs = (torch.load(run / name, weights_only=True) for run in (ours, stock))
        for state in (mine, theirs):  # have the path of the run
            state["callbacks"] = {}
        assert_same(mine, theirs)


def test_a_run_is_resumed_and_a_model_loaded(tmp_path: Path) -> None:
    whole = Model()
    trainer_of(tmp_path, plugin=TorchCheckpointIO(), beside=False, enable_checkpointing=False).fit(whole)
    half, last = Model(lr=0.1), tmp_path / "run" / "last.ckpt"
    trainer_of(tmp_path, newest(tmp_path / "run", save_last=True), max_steps=4).fit(half)
    loaded = Model.load_from_checkpoint(last)
    assert loaded.hparams["lr"] == 0.1
    assert_same(loaded.state_dict(), half.state_dict())
    model = Model(lr=0.5)
    trainer_of(tmp_path, newest(tmp_path / "run")).fit(model, ckpt_path=last)
    assert_same(model.state_dict(), whole.state_dict())


class Kind(OrderedDict):
    pass


def test_objects_are_stored_as_lightning_stores_them(tmp_path: Path) -> None:
    """Also those that have a state dict, as modules among the hyper-parameters do."""
    layer = torch.nn.Linear(2, 2)
    odd = {("a", 1): 1, "kind": Kind(a=1), "path": Path("x"), "layers": [layer, None], "deep": {"layer": layer, "n": 1}}
    checkpoint = {"state_dict": {"w": torch.ones(3)}, "hyper_parameters": odd, "epoch": 3, "extra": torch.arange(5.0)}
    AiockptCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert found["epoch"] == 3
    assert torch.equal(found["extra"], checkpoint["extra"])
    assert [type(each) for each in found["hyper_parameters"].values()] == [type(each) for each in odd.values()]
    for each in (found["hyper_parameters"]["layers"][0], found["hyper_parameters"]["deep"]["layer"]):
        assert_same(each.state_dict(), layer.state_dict())


def test_old_checkpoints_and_urls_are_loaded(tmp_path: Path) -> None:
    plugin, state = AiockptCheckpointIO(), {"state_dict": {"w": torch.arange(4.0)}, "epoch": 1}
    torch.save(state, tmp_path / "old.ckpt")
    assert_same(plugin.load_checkpoint(tmp_path / "old.ckpt"), state)
    plugin.save_checkpoint(state, "memory://aiockpt/a.ckpt")
    assert_same(plugin.load_checkpoint("memory://aiockpt/a.ckpt"), state)
    plugin.remove_checkpoint("memory://aiockpt/a.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint("memory://aiockpt/a.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")


def test_what_is_at_the_path_is_replaced(tmp_path: Path) -> None:
    plugin, state = AiockptCheckpointIO(), {"epoch": 1}
    (tmp_path / "cut.ckpt").write_bytes(b"PK cut")  # by a killed process that wrote in place
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "cut.ckpt")
    for name in ("link.ckpt", "cut.ckpt", "cut.ckpt"):
        plugin.save_checkpoint(state, tmp_path / name)
        assert plugin.load_checkpoint(tmp_path / name) == state
    assert not (tmp_path / "link.ckpt").is_symlink()
    plugin.remove_checkpoint(tmp_path / "cut.ckpt")
    plugin.remove_checkpoint(tmp_path / "cut.ckpt")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").touch()
    plugin.remove_checkpoint(tmp_path / "notes")
    assert names_in(tmp_path) == ["link.ckpt"]


def test_a_copy_has_the_options_alone(tmp_path: Path) -> None:
    plugin = AiockptCheckpointIO(wait="staged", on_failure="warn")
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "a.ckpt")
    copy = pickle.loads(pickle.dumps(plugin))
    assert copy.saves.checkpointer._options.on_failure == "warn"
    copy.teardown()
    plugin.teardown()


@pytest.mark.parametrize("options", [{"wait": "never"}, {"on_bussy": "skip"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"wait|on_bussy"):
        AiockptCheckpointIO(**options)


# --- how long a save blocks ---------------------------------------------------------------------------------


class Watched(WrapperStorage):
    """Notes the steps, and the checkpoints that are there at each."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LocalStorage())
        self.directory, self.seen = directory, []

    async def before(self, step: str, name: str) -> None:
        there = [path.name for path in self.directory.glob("*.ckpt")] if self.directory.exists() else []
        self.seen.append((step, os.path.basename(name), there, threading.current_thread().name))


def test_old_checkpoints_stay_until_the_newer_is_durable(tmp_path: Path) -> None:
    storage = Watched(tmp_path / "run")
    callback = newest(tmp_path / "run", save_top_k=2)
    trainer_of(tmp_path, callback, plugin=AiockptCheckpointIO(storage=storage), max_steps=12).fit(Model())
    assert names_in(tmp_path / "run") == ["epoch=0-step=8.ckpt", "epoch=1-step=10.ckpt", "epoch=1-step=12.ckpt"][1:]
    commits = [there for step, _, there, _ in storage.seen if step == "commit"]
    assert [len(there) for there in commits[:2]] == [0, 1]
    assert all(len(there) >= 2 for there in commits[2:])
    deleted = [name for step, name, *_ in storage.seen if step == "delete"]
    assert deleted == [f"epoch=0-step={step}.ckpt" for step in (2, 4, 6, 8)]
    for number, (step, name, there, _) in enumerate(storage.seen):
        if step == "delete":
            assert name in there
            assert len(there) == 3, number


def test_saves_run_beside_training_only_within_fit(tmp_path: Path) -> None:
    durable: dict[str, bool] = {}

    def save(name: str) -> Any:
        def call(trainer: Any) -> None:
            path = tmp_path / f"{name}-{trainer.global_step}.ckpt"
            trainer.save_checkpoint(path)
            saves = trainer.strategy.checkpoint_io.saves
            durable[path.stem] = path.exists() and saves._last is None

        return call

    hooks = ("on_train_batch_end", "on_train_end", "on_fit_end", "on_validation_end")
    trainer = trainer_of(tmp_path, *[Other(hook, save(hook)) for hook in hooks], max_steps=2)
    trainer.fit(model := Model(), None, torch.utils.data.DataLoader(torch.randn(4, WIDTH)))
    save("later")(trainer)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt")]
    assert durable["later-2"]
    assert durable["on_train_end-2"]
    assert durable["on_fit_end-2"]
    assert not durable["on_train_batch_end-1"]
    for path in tmp_path.glob("*.ckpt"):
        model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("plugin", [AiockptCheckpointIO(wait="written"), AsyncCheckpointIO(AiockptCheckpointIO())])
def test_without_the_rest_saves_are_durable(tmp_path: Path, plugin: Any) -> None:
    if isinstance(plugin, AsyncCheckpointIO) and not IS_NEW:
        pytest.skip("before 2.6, Lightning's own plug-in writes tensors that change meanwhile, which we refuse")
    trainer_of(tmp_path, newest(tmp_path / "run", save_top_k=-1), plugin=plugin).fit(Model())
    assert len(names_in(tmp_path / "run")) == 4


def test_the_callback_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plugins=\[AiockptCheckpointIO\(\)\]"):
        trainer_of(tmp_path, plugin=TorchCheckpointIO()).fit(Model())


class Manual(Model):
    """Steps by itself, with raw optimizers too, whose steps call no hook of Lightning."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.raw = False, raw

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        optimizer.zero_grad()
        self.manual_backward(self.layers(batch).square().mean())
        optimizer.step()


class Queue(Model):
    """Has a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1 << 20))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.queue.add_(1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["manual", "raw", "queue", "lbfgs", "accumulated"])
def test_changes_wait_for_the_copies(tmp_path: Path, kind: str) -> None:
    """Else a save fails with TornSnapshotError."""
    model = {"manual": lambda: Manual(False), "raw": lambda: Manual(True), "queue": Queue}.get(kind, Model)()
    if kind == "lbfgs":
        model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters(), max_iter=2)
    states: dict[int, Any] = {}

    def save(trainer: Any) -> None:  # after every batch, which may be no step
        trainer.save_checkpoint(tmp_path / "run" / f"{len(states)}.ckpt")
        states[len(states)] = {key: value.clone() for key, value in model.state_dict().items()}

    options = {"accumulate_grad_batches": 2} if kind == "accumulated" else {}
    trainer_of(tmp_path, Last(save), **options, max_epochs=1).fit(model)
    assert len(names_in(tmp_path / "run")) == 8
    for number, state in states.items():
        assert_same(dict(torch.load(tmp_path / "run" / f"{number}.ckpt", weights_only=True)["state_dict"]), state)


# --- what Lightning does with a file at once ------------------------------------------------------------------


def test_names_of_saves_in_flight_are_taken(tmp_path: Path) -> None:
    """Lightning asks the file system which names are taken."""
    callback = newest(tmp_path / "run", filename="{epoch}", save_top_k=-1, every_n_train_steps=1)
    trainer_of(tmp_path, callback, max_steps=4).fit(Model())
    assert names_in(tmp_path / "run") == ["epoch=0-v1.ckpt", "epoch=0-v2.ckpt", "epoch=0-v3.ckpt", "epoch=0.ckpt"]
    assert "file_exists" not in vars(callback)


def test_the_link_to_the_last_never_dangles(tmp_path: Path) -> None:
    dangling = []

    def look(trainer: Any) -> None:
        link = tmp_path / "run" / "last.ckpt"
        dangling.append(link.is_symlink() and not link.exists())

    callback = newest(tmp_path / "run", save_last="link", save_top_k=1)
    trainer_of(tmp_path, callback, Last(look)).fit(Model())
    assert not any(dangling)
    assert os.readlink(tmp_path / "run" / "last.ckpt") == "epoch=0-step=8.ckpt"
    trainer_of(tmp_path, max_steps=9).fit(model := Model(), ckpt_path=tmp_path / "run" / "last.ckpt")
    assert model.global_step == 9


class Reader(DummyLogger):
    """Reads a checkpoint when it is told of it, as loggers do that upload it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        found = Path(checkpoint_callback.dirpath).glob("*.ckpt")
        self.read.append(max(torch.load(path, weights_only=True)["global_step"] for path in found))


def test_loggers_are_told_when_it_is_durable(tmp_path: Path) -> None:
    logger = Reader()
    trainer_of(tmp_path, newest(tmp_path / "run", save_top_k=-1), logger=logger).fit(Model())
    assert len(logger.read) == 4
    assert all(read >= step for read, step in zip(logger.read, (2, 4, 6, 8), strict=True))
    assert "after_save_checkpoint" not in vars(logger)


def test_the_tuner_loads_what_it_has_saved(tmp_path: Path) -> None:
    finder = pl.callbacks.LearningRateFinder(num_training_steps=4)
    trainer_of(tmp_path, finder, newest(tmp_path / "run")).fit(Model())
    (name,) = names_in(tmp_path / "run")
    assert name.endswith("step=8.ckpt")  # some versions begin with epoch 1 then
    assert not list(tmp_path.glob(".lr_find*"))


def test_averages_of_weights_are_exchanged_after_the_copies(tmp_path: Path) -> None:
    if not IS_NEW:
        pytest.skip("Lightning averages weights since 2.6")
    average = pl.callbacks.WeightAveraging()
    callback = newest(tmp_path / "run", save_top_k=-1)
    validation = torch.utils.data.DataLoader(torch.randn(4, WIDTH))
    trainer_of(tmp_path, average, callback, val_check_interval=2).fit(Model(), None, validation)
    assert len(names_in(tmp_path / "run")) == 4


# --- ends -----------------------------------------------------------------------------------------------------


def test_a_failed_save_is_raised_once_and_keeps_the_old(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps, plugin = [], fails(nth=2)

    def wait(trainer: Any) -> None:
        steps.append(trainer.global_step)
        plugin.saves.wait()

    trainer = trainer_of(tmp_path, newest(tmp_path / "run"), Last(wait), plugin=plugin)
    with pytest.raises(aiockpt.CommitError, match="Input/output error"):
        trainer.fit(Model())
    assert steps == [1, 2, 3, 4], "it is raised at the next batch"
    assert names_in(tmp_path / "run") == ["epoch=0-step=2.ckpt"]
    assert "step=2.ckpt stays" in caplog.text
    plugin.teardown()
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert (tmp_path / "later.ckpt").exists()


def test_the_last_save_fails_at_the_end(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, newest(tmp_path / "run"), plugin=fails(nth=4))
    with pytest.raises(aiockpt.CommitError, match="Input/output error"):
        trainer.fit(Model())
    assert names_in(tmp_path / "run") == ["epoch=0-step=6.ckpt"]


def test_failures_only_warn_if_they_are_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = AiockptCheckpointIO(
        storage=FaultyStorage(LocalStorage(), "commit", OSError(errno.EIO, "broken"), nth=2), on_failure="warn"
    )
    trainer_of(tmp_path, newest(tmp_path / "run"), plugin=plugin).fit(Model())
    assert "broken" in caplog.text
    assert "epoch=0-step=8.ckpt" in names_in(tmp_path / "run")


def test_an_exception_is_raised_after_everything_is_durable(tmp_path: Path) -> None:
    there: list[list[str]] = []

    def fail(trainer: Any) -> None:
        if trainer.global_step == 5:
            raise KeyError("mine")

    rescue = OnExceptionCheckpoint(tmp_path, "rescue")
    options = {"save_on_exception": True} if IS_NEW else {}
    callbacks = [newest(tmp_path / "run", save_top_k=-1, **options), rescue, Last(fail)]
    trainer = trainer_of(
        tmp_path, Other("on_exception", lambda _: there.append(names_in(tmp_path / "run"))), *callbacks
    )
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(Model())
    assert there == [["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]]
    assert ("epoch=0-step=5.ckpt" in names_in(tmp_path / "run")) == IS_NEW
    assert torch.load(tmp_path / "rescue.ckpt", weights_only=True)["global_step"] == 5


def test_a_failure_behind_an_exception_is_a_note(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        trainer_of(tmp_path, newest(tmp_path / "run"), Last(fail), plugin=fails("write", times=None)).fit(Model())
    assert any("a checkpoint also failed" in note for note in caught.value.__notes__)


def test_a_job_is_requeued_with_a_durable_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\ncp {tmp_path}/hpc_ckpt_1.ckpt {tmp_path}/at-requeue && echo "$@" >> {tmp_path}/asked\n'
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    for name, value in {"JOB_ID": 7, "NTASKS": 1, "LOCALID": 0, "NODEID": 0, "PROCID": 0, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))

    def interrupt(trainer: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

    callbacks = [newest(tmp_path / "run", every_n_train_steps=1), Last(interrupt)]
    trainer_of(tmp_path, *callbacks, more=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)]).fit(Model())
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert torch.load(tmp_path / "at-requeue", weights_only=True)["global_step"] == 3
    trainer_of(tmp_path, max_steps=4).fit(model := Model())  # takes hpc_ckpt_1.ckpt by itself
    assert model.global_step == 4


def test_nothing_is_left_of_several_fits(tmp_path: Path) -> None:
    callback = newest(tmp_path / "run", save_last=True)
    trainer = trainer_of(tmp_path, callback, max_steps=4)
    model = Model()
    trainer.fit(model)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(model, ckpt_path="last")
    trainer.fit(model, ckpt_path="last")  # has nothing to do
    assert names_in(tmp_path / "run") == ["epoch=0-step=6.ckpt", "last.ckpt"]
    assert not vars(callback).keys() & {"file_exists", "_link_checkpoint"}


KILLED = """
import sys
sys.path.insert(0, {root!r})
from tests.integrations.test_lightning import *
from aiockpt.testing import Fault, HangingStorage

class Hangs(HangingStorage):
    async def before(self, step, name):
        if step == "commit" and "step=6" in name:
            print("in flight", flush=True)
            await super().before(step, name)

def wait(trainer):
    if trainer.global_step == 4:
        plugin.saves.wait()

run, plugin = Path({run!r}), AiockptCheckpointIO(storage=Hangs(LocalStorage(), "commit"))
trainer_of(run, newest(run, save_last="link"), Last(wait), plugin=plugin).fit(Model())
"""


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    """It is killed while a checkpoint is written, which is the only one that is kept."""
    code = KILLED.format(root=str(ROOT), run=str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "in flight\n" for line in process.stdout)
        process.kill()
    assert {"epoch=0-step=4.ckpt", "last.ckpt"} == {path.name for path in (tmp_path / "run").glob("*.ckpt")}
    model, whole = Model(), Model()
    trainer_of(tmp_path / "run", newest(tmp_path / "run", save_last="link")).fit(model, ckpt_path="last")
    assert names_in(tmp_path / "run") == ["epoch=0-step=8.ckpt", "last.ckpt"]
    trainer_of(tmp_path, plugin=TorchCheckpointIO(), beside=False, enable_checkpointing=False).fit(whole)
    assert_same(model.state_dict(), whole.state_dict())


# --- Fabric ---------------------------------------------------------------------------------------------------


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    plugin = AiockptCheckpointIO(wait="staged")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = torch.nn.Linear(WIDTH, WIDTH)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    expected = {}
    for step in range(4):
        fabric.backward(model(torch.randn(4, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        fabric.save(tmp_path / f"{step}.ckpt", {"model": model, "optimizer": optimizer, "step": step})
        expected[step] = {key: value.clone() for key, value in model.state_dict().items()}
        if step:
            plugin.remove_checkpoint(tmp_path / f"{step - 1}.ckpt")
    plugin.teardown()
    assert names_in(tmp_path) == ["3.ckpt"]
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "3.ckpt", state)
    assert state["step"] == 3
    assert_same(dict(model.state_dict()), expected[3])
    fabric.save(tmp_path / "4.ckpt", state)
    fabric.load(tmp_path / "4.ckpt", state)
    plugin.teardown()


# --- the page -------------------------------------------------------------------------------------------------

PAGE = (Path(aiockpt.__file__).parent / "docs" / "integrations" / "lightning.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("program", [each for each in PROGRAMS if "shards.py" not in each])
def test_programs_of_the_page(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "example", "exec"), {})
    (run,) = (tmp_path / "runs").iterdir()
    found = {"a": ["epoch=0-step=50.ckpt", "epoch=0-step=60.ckpt", "last.ckpt"], "c": ["15.ckpt"]}
    assert names_in(run) == found[run.name]


def test_program_of_the_page_for_shards(tmp_path: Path) -> None:
    (program,) = (each for each in PROGRAMS if each.startswith("# shards.py"))
    program = program.replace("tensor_parallel_size=1", 'tensor_parallel_size=1, process_group_backend="gloo"')
    (tmp_path / "shards.py").write_text(program)
    command, environment = [sys.executable, "shards.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert names_in(tmp_path / "runs" / "b") == ["epoch=0-step=20.ckpt"]
    assert aiockpt.verify(tmp_path / "runs" / "b" / "epoch=0-step=20.ckpt").ok


# --- other packages, and several processes ----------------------------------------------------------------------


def test_pytorch_lightning_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    code = (
        "import sys, torch, pytorch_lightning as pl\n"
        "from pytorch_lightning.demos.boring_classes import BoringModel\n"
        "from aiockpt.integrations.lightning import AiockptCallback, AiockptCheckpointIO\n"
        "assert isinstance(AiockptCallback(), pl.Callback) and 'lightning.pytorch' not in sys.modules\n"
        f"t = pl.Trainer(max_steps=3, default_root_dir={str(tmp_path)!r}, accelerator='cpu', logger=False,\n"
        "    plugins=[AiockptCheckpointIO()], callbacks=[AiockptCallback()], enable_progress_bar=False)\n"
        "t.fit(BoringModel())\n"
        "BoringModel.load_from_checkpoint(t.checkpoint_callback.best_model_path)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_a_clear_error_without_lightning(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('lightning', 'pytorch_lightning', 'lightning.pytorch', 'lightning.pytorch.callbacks'):\n"
        "    sys.modules[name] = None\n"
        "import importlib.util; importlib.util.find_spec = lambda name: None\n"
        "import aiockpt.integrations.lightning\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ImportError: lightning is not installed: pip install 'aiockpt[lightning]'" in done.stderr


@pytest.mark.parametrize("kind", ["ddp", "model parallel", "fsdp"])
def test_two_processes(tmp_path: Path, kind: str) -> None:
    driver = Path(__file__).with_name("lightning_driver.py")
    command = [sys.executable, str(driver), kind, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert "all is well" in done.stdout, done.stdout + done.stderr
