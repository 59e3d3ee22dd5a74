"""torchtitan: its checkpoints beside training, in its own files, and what it does at the end of a run."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'aiockpt[torchtitan]'")
pytest.importorskip("torchtitan.components.checkpointer", reason="this torchtitan is older than 0.3")

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

import aiockpt
from aiockpt.integrations.torchtitan import AiockptCheckpointManager
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.testing import FaultyStorage
from tests.finders import names_in
from tests.states import assert_same

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

WIDTH = 200  # its weights are too large to be copied at the call
ROOT = Path(__file__).parents[2]


class Counter:
    """The trainer's own state."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Loader(Counter):
    """The state of a data loader: pickled, by rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": pickle.dumps(self.step), "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = pickle.loads(state["dp_rank_0"])


class Adapter(StateDictAdapter):
    """Names as those of Hugging Face's models, with one tensor that is stored in another shape."""

    reads: list[tuple[str, bool]]

    def __init__(self, assets: str | None = None) -> None:
        super().__init__(None, assets)
        self.reads = []

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": each.unsqueeze(0) if "bias" in name else each for name, each in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        named = {name.removeprefix("model."): each for name, each in hf_state_dict.items()}
        return {name: each.squeeze(0) if "bias" in name else each for name, each in named.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        self.reads.append((path, from_quantized))
        return Dequantizing(path) if from_quantized else super().get_hf_storage_reader(path)


class Dequantizing(HuggingFaceStorageReader):
    """Doubles what it reads."""

    def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
        super()._process_read_request(f, req, planner)
        planner.resolve_tensor(req).detach().mul_(2)


class Run:
    """The objects of torchtitan's trainer, and its work at each step."""

    def __init__(self, folder: Path, kind: Any = AiockptCheckpointManager, adapter: Any = None, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=100
        )
        self.counter, self.loader = Counter(), Loader()
        config = {"enable": True, "folder": "run", "interval": 1, "initial_load_model_only": False, **config}
        self.checkpointer = kind.Config(**config).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            sd_adapter=adapter,
            base_folder=str(folder),
        )

    def train(self, steps: int, last: int = -1, *, waits: bool = True) -> None:
        for _ in range(steps):
            self.counter.step += 1
            self.loader.step += 2
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.counter.step))
            self.model(batch).square().mean().backward()
            if waits:
                self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.counter.step, last_step=self.counter.step == last)

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizers.state_dict()}
        copied = {
            part: {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in state.items()}
            for part, state in parts.items()
        }
        counted = {"train_state": self.counter.step, "loader": self.loader.step}
        return {**copied, **counted, "schedulers": self.schedulers.state_dict()["last_epoch"]}


@contextlib.contextmanager
def running(folder: Path, *args: Any, **config: Any) -> Iterator[Run]:
    run = Run(folder, *args, **config)
    with contextlib.closing(run.checkpointer):
        yield run


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, which torchtitan's own managers need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- the files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writes", "reads"), [(AiockptCheckpointManager, CheckpointManager), (CheckpointManager, AiockptCheckpointManager)]
)
@pytest.mark.usefixtures("group")
def test_each_reads_what_the_other_has_written(tmp_path: Path, writes: Any, reads: Any) -> None:
    with running(tmp_path, writes) as run:
        run.train(3)
        run.checkpointer.maybe_wait_for_saving()
        expected = run.state()
    with running(tmp_path, reads) as other:
        other.train(0)
        assert other.checkpointer.load()
        assert_same(other.state(), expected)
        other.train(2)
        run.checkpointer = reads.Config(enable=False).build(**_nothing())
        run.train(2)
        assert_same(other.state(), run.state())


def _nothing() -> dict[str, Any]:
    names = ("dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "sd_adapter")
    return dict.fromkeys(names)


def test_a_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, keep_latest_k=2) as run:
        assert not run.checkpointer.load()
        run.train(5)
        expected = run.state()
    assert names_in(tmp_path / "run") == ["step-4", "step-5"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt")]
    with running(tmp_path, keep_latest_k=2) as run:
        run.train(2)  # which the load waits for, and undoes
        assert run.checkpointer.load(4)
        assert run.counter.step == 4
        run.train(1)
        assert_same(run.state(), expected)


def test_a_run_on_another_disk_goes_on_from_its_mirror(tmp_path: Path) -> None:
    options = {"mirror": str(tmp_path / "mirror")}
    with running(tmp_path, checkpointer=options) as run:
        assert not run.checkpointer.load()
        run.train(2)
        expected = run.state()
    shutil.rmtree(tmp_path / "run")
    with running(tmp_path, checkpointer=options) as run:
        assert run.checkpointer.load()
        assert_same(run.state(), expected)


def test_the_step_must_be_there(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        with pytest.raises(FileNotFoundError, match=r"checkpoint\.load_step=7"):
            run.checkpointer.load(7)
        run.train(1)
        with pytest.raises(FileNotFoundError, match=r"checkpoint\.load_step=7"):
            run.checkpointer.load(7)


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.train(2)
        expected = run.state()
        run.train(1)
    (data,) = sorted((tmp_path / "run" / "step-3").glob("__0_0.distcp"))
    os.truncate(data, data.stat().st_size // 2)
    with running(tmp_path) as run:
        assert run.checkpointer.load()
        assert_same(run.state(), expected)
    assert "step-3.damaged" in names_in(tmp_path / "run")


def test_parts_are_excluded_from_loading(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.train(3)
        expected = run.state()
    with running(tmp_path, exclude_from_loading=["optimizer", "lr_scheduler", "dataloader"]) as run:
        fresh = run.state()
        assert run.checkpointer.load()
        assert_same(run.state(), {**fresh, "model": expected["model"], "train_state": 3})
    with running(tmp_path, exclude_from_loading=["ema"]) as run, pytest.raises(ValueError, match="ema not found"):
        run.checkpointer.load()


@pytest.mark.parametrize("model_only", [True, False])
def test_a_run_begins_with_the_checkpoint_of_another(tmp_path: Path, model_only: bool) -> None:
    with running(tmp_path) as run:
        run.train(3)
        expected = run.state()
    path = str(tmp_path / "run" / "step-3")
    options = {"initial_load_path": path, "initial_load_model_only": model_only}
    with running(tmp_path / "other", **options) as run:
        fresh = run.state()
        assert run.checkpointer.load()
        assert_same(run.state(), {**fresh, "model": expected["model"]} if model_only else expected)
        run.train(1)
    with running(tmp_path / "other", **options | {"initial_load_path": "/no/such/path"}) as run:
        assert run.checkpointer.load()  # its own folder counts first
        assert run.counter.step == (1 if model_only else 4)


def test_of_a_seed_only_the_model_is_loaded(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.checkpointer.save(0, last_step=True)
        expected = run.state()
    with running(tmp_path) as run:
        with torch.no_grad():
            run.model[0].weight.zero_()
        assert run.checkpointer.load()
        assert_same(run.state()["model"], expected["model"])


# --- beside training, and what is removed --------------------------------------------------------------------


class Watched(WrapperStorage):
    """Notes the steps that are there at each commit and each deletion, and holds the commits back."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalStorage())
        self.folder, self.seen, self.may_commit = folder, [], threading.Event()
        self.may_commit.set()

    async def before(self, step: str, name: str) -> None:
        if step in ("commit", "delete"):
            assert self.may_commit.wait(60)
            self.seen.append((step, os.path.basename(name), sorted(path.name for path in self.folder.glob("step-*"))))


@pytest.mark.parametrize("keep", [1, 2])
def test_old_checkpoints_stay_until_the_newer_is_durable(tmp_path: Path, keep: int) -> None:
    storage = Watched(tmp_path / "run")
    with running(tmp_path, keep_latest_k=keep, checkpointer={"storage": storage}) as run:
        run.train(5)
    assert names_in(tmp_path / "run") == [f"step-{step}" for step in range(6 - keep, 6)]
    commits = [there for step, _, there in storage.seen if step == "commit"]
    assert [len(there) for there in commits[:2]] == [0, 1]
    assert all(len(there) >= min(number, keep) for number, there in enumerate(commits))
    deletions = [(name, there) for step, name, there in storage.seen if step == "delete"]
    assert [name for name, _ in deletions] == [f"step-{step}" for step in range(1, 6 - keep)]
    for name, there in deletions:
        assert f"step-{int(name.removeprefix('step-')) + keep}" in there


@pytest.mark.parametrize("waits", [True, False])
def test_saves_run_beside_training(tmp_path: Path, waits: bool) -> None:
    """The steps of the optimizers wait for the copies, also where the trainer does not ask for that."""
    storage = Watched(tmp_path / "run")
    with running(tmp_path, interval=2, checkpointer={"storage": storage}) as run:
        run.train(1)
        storage.may_commit.clear()
        run.train(1, waits=waits)
        expected, future = run.state(), run.checkpointer.save_future
        assert future is not None
        run.train(1, waits=waits)
        assert not future.done()
        assert not list((tmp_path / "run").glob("step-*"))
        storage.may_commit.set()
        run.checkpointer.maybe_wait_for_saving()
        assert future.done()
        assert run.checkpointer.save_future is None
        assert run.checkpointer.load(2)
        assert_same(run.state(), expected)


def test_when_it_saves(tmp_path: Path) -> None:
    with running(tmp_path, interval=3, enable_first_step_checkpoint=True) as run:
        run.train(7)
    assert names_in(tmp_path / "run") == ["step-1", "step-3", "step-6"]
    with running(tmp_path, load_only=True) as run:
        assert run.checkpointer.load()
        run.train(1, last=7)
    assert names_in(tmp_path / "run") == ["step-1", "step-3", "step-6"]


def test_a_disabled_one_does_nothing(tmp_path: Path) -> None:
    manager = AiockptCheckpointManager.Config().build(**_nothing(), base_folder=str(tmp_path))
    assert not manager.load()
    assert not manager.save(1, last_step=True)
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()
    assert not names_in(tmp_path)


# --- failures ------------------------------------------------------------------------------------------------


def _broken(nth: int, times: int | None = 1) -> dict[str, Any]:
    return {"storage": FaultyStorage(LocalStorage(), "commit", OSError(errno.EIO, "broken"), nth=nth, times=times)}


def test_a_failed_save_is_raised_once_and_keeps_the_old(tmp_path: Path) -> None:
    with running(tmp_path, keep_latest_k=1, checkpointer=_broken(2)) as run:
        run.train(2)
        with pytest.raises(aiockpt.SaveError, match="broken"):
            run.train(1)
        assert names_in(tmp_path / "run") == ["step-1"]
        run.train(1)
    assert names_in(tmp_path / "run") == ["step-4"]


def test_the_failure_of_the_last_save_beside_training_is_raised_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpointer=_broken(2))
    run.train(2)
    with pytest.raises(aiockpt.SaveError, match="broken"):
        run.checkpointer.close()
    run.checkpointer.close()
    assert names_in(tmp_path / "run") == ["step-1"]


def test_the_last_save_is_made_though_the_one_before_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "aiockpt"), running(tmp_path, checkpointer=_broken(2)) as run:
        run.train(3, last=3)
        assert names_in(tmp_path / "run") == ["step-1", "step-3"]
    assert "the last one is begun all the same" in caplog.text


def test_failures_only_warn_if_they_are_to(tmp_path: Path) -> None:
    with running(tmp_path, checkpointer={**_broken(2), "on_failure": "warn"}) as run:
        run.train(4)
    assert names_in(tmp_path / "run") == ["step-1", "step-3", "step-4"]


def test_an_exception_that_ends_training_stays_what_it_is(tmp_path: Path) -> None:
    """torchtitan closes the manager while it handles that."""
    run = Run(tmp_path, checkpointer=_broken(1))
    with pytest.raises(KeyError) as caught:
        try:
            run.train(1)
            raise KeyError("of the loop")
        except Exception:
            run.checkpointer.close()
            raise
    assert any("broken" in note for note in caught.value.__notes__)


# --- the last save -------------------------------------------------------------------------------------------


def test_the_last_save_is_durable_and_leaves_the_others(tmp_path: Path) -> None:
    """It has the model alone, in the type of the export."""
    with running(tmp_path, keep_latest_k=2, export_dtype="bfloat16") as run:
        run.train(4, last=4)
        assert run.checkpointer.save_future is None
        assert (tmp_path / "run" / "step-4").is_dir()
    assert names_in(tmp_path / "run") == ["step-2", "step-3", "step-4"]
    expected = {name: each.to(torch.bfloat16) for name, each in run.model.state_dict().items()}
    assert_same(aiockpt.load(tmp_path / "run" / "step-4"), expected)


def test_a_whole_last_save_replaces_the_others(tmp_path: Path) -> None:
    with running(tmp_path, keep_latest_k=1, last_save_model_only=False) as run:
        run.train(3, last=3)
        expected = run.state()
    assert names_in(tmp_path / "run") == ["step-3"]
    with running(tmp_path) as run:
        assert run.checkpointer.load()
        assert_same(run.state(), expected)


def _assets(folder: Path) -> str:
    """Make what torchtitan learns the files of an export from."""
    folder.mkdir()
    files = {"model.0.weight": 1, "model.0.bias": 1, "model.1.weight": 2, "model.1.bias": 2}
    index = {"weight_map": {name: f"model-{number:05d}-of-00002.safetensors" for name, number in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def _exported(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: each for file in files for name, each in file.items()}


def _index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.usefixtures("group")
def test_an_export_equals_that_of_torchtitan(tmp_path: Path, has_index: bool) -> None:
    assets = _assets(tmp_path / "assets") if has_index else None
    for name, kind in (("ours", AiockptCheckpointManager), ("stock", CheckpointManager)):
        with running(tmp_path / name, kind, Adapter(assets), last_save_in_hf=True) as run:
            run.train(2, last=2)
    ours, stock = (tmp_path / name / "run" / "step-2" for name in ("ours", "stock"))
    assert aiockpt.verify(ours).ok
    assert_same(*(dict(sorted(_exported(each).items())) for each in (ours, stock)))
    if has_index:
        assert _index(ours) == _index(stock)
        assert len(set(_index(ours).values())) == 2
    else:
        assert [path.name for path in ours.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("quantized", [True, False])
def test_a_run_begins_with_the_weights_of_an_export(tmp_path: Path, quantized: bool) -> None:
    assets = _assets(tmp_path / "assets")
    with running(tmp_path, AiockptCheckpointManager, Adapter(assets), last_save_in_hf=True) as run:
        run.train(2, last=2)
    expected = {name: each * (2 if quantized else 1) for name, each in run.model.state_dict().items()}
    path = str(tmp_path / "run" / "step-2")
    options = {"initial_load_model_only": True, "initial_load_in_hf": True, "initial_load_in_hf_quantized": quantized}
    adapter = Adapter(assets)
    with running(tmp_path / "other", AiockptCheckpointManager, adapter, initial_load_path=path, **options) as run:
        assert run.checkpointer.load()
        assert_same(dict(run.model.state_dict()), expected)
    assert adapter.reads == [(path, quantized)]


def test_an_export_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sd_adapter"):
        Run(tmp_path, last_save_in_hf=True)
    options = {"initial_load_model_only": True, "initial_load_in_hf": True}
    with running(tmp_path, **options) as run, pytest.raises(ValueError, match="sd_adapter"):
        run.checkpointer.load()


# --- options -------------------------------------------------------------------------------------------------


def test_options_are_those_of_torchtitan_and_of_a_checkpointer(tmp_path: Path) -> None:
    assert AiockptCheckpointManager.Config(keep_latest_k=1).keep_latest_k == 1
    config = AiockptCheckpointManager.Config(checkpointer={"staging_bytes": 1 << 26})
    assert json.loads(json.dumps(config.to_dict()))["checkpointer"] == {"staging_bytes": 1 << 26}
    for wrong in ({"keep_latest_k": -1}, {"interval": 0}, {"exclude_from_loading": ["model"]}):
        with pytest.raises(ValueError, match=r"negative|at least 1|model key"):
            AiockptCheckpointManager.Config(**wrong)
    with pytest.raises(TypeError, match="on_bussy"):
        Run(tmp_path, checkpointer={"on_bussy": "skip"})


def test_options_are_given_on_the_command_line() -> None:
    tyro = pytest.importorskip("tyro")
    default = AiockptCheckpointManager.Config(enable=True, checkpointer={"staging_bytes": 1 << 26})
    found = tyro.cli(type(default), default=default, args=["--interval=7", "--keep_latest_k=1", "--no-enable"])
    assert isinstance(found, AiockptCheckpointManager.Config)
    assert (found.enable, found.interval, found.keep_latest_k) == (False, 7, 1)
    assert found.checkpointer == {"staging_bytes": 1 << 26}


def test_a_clear_error_without_torchtitan() -> None:
    code = "import sys\nsys.modules['torchtitan'] = None\nimport aiockpt.integrations.torchtitan\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ImportError: torchtitan is not installed: pip install 'aiockpt[torchtitan]'" in done.stderr


# --- several processes ---------------------------------------------------------------------------------------


def test_two_processes(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("torchtitan_driver.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(driver)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=110, env=environment, cwd=tmp_path
    )
    assert done.stdout.count("all is well") == 2, done.stdout + done.stderr


# --- the page ------------------------------------------------------------------------------------------------

PAGE = (Path(aiockpt.__file__).parent / "docs" / "integrations" / "torchtitan.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_configuration_of_the_page(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torchtitan's models need triton, which is not installed")
    (program,) = (each for each in PROGRAMS if each.startswith("# config_registry.py"))
    (tmp_path / "config_registry.py").write_text(program)
    code = (
        "from config_registry import *\n"
        "names = ('dataloader', 'optimizers', 'lr_schedulers', 'sd_adapter')\n"
        "config = llama3_beside_training().checkpoint\n"
        "manager = config.build(**dict.fromkeys(names), model_parts=[], states={}, base_folder='.')\n"
        "assert isinstance(manager, AiockptCheckpointManager), manager\n"
        "manager.close()\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_loop_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = (each for each in PROGRAMS if not each.startswith("# config_registry.py"))
    exec(compile(program, "example", "exec"), {})
    assert names_in(tmp_path / "runs" / "a" / "checkpoint") == ["step-20"]
    program = program.replace("progress.step < 20", "progress.step < 21").replace("step == 20", "step == 21")
    exec(compile(program, "example", "exec"), {})
    assert names_in(tmp_path / "runs" / "a" / "checkpoint") == ["step-21"]
