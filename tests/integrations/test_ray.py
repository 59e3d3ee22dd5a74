"""Ray: Train's workers, and actors, in a cluster of one machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import aiockpt
from aiockpt.integrations import ray as plugin

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster for all tests of this module."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:
        ray.init(
            num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=200 << 20, _temp_dir=short
        )
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not as for other tests: Ray keeps threads, descriptors and processes."""


def train(config: dict[str, Any]) -> None:
    """Train two workers with FSDP2, and kill one of them once, if that is wanted."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    rank, marks = dist.get_rank(), Path(config["marks"])
    with plugin.manager() as run, run.checkpointer.guard(optimizer):
        restored = plugin.restore(run, state)
        begin = 0 if restored is None else restored.step + 1
        with open(marks / f"begin-{rank}", "a") as file:
            file.write(f"{begin}\n")
        for step in range(begin, STEPS):
            batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(step * 2 + rank))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not plugin.heed_preemption(run)
            save = run.submit(step, state, metrics={"loss": loss.item()})
            if step == config["die_at"] and rank == 1 and not (marks / "died").exists():
                (marks / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            plugin.report(save, {"loss": loss.item(), "step": step})
    total = sum(parameter.full_tensor().double().abs().sum() for parameter in model.parameters())
    if rank == 0:
        (marks / "end").write_text(json.dumps([loss.item(), total.item()]))


def fit(folder: Path, *, die_at: int | None = None, function: Any = train) -> Any:
    (folder / "marks").mkdir(parents=True)
    return TorchTrainer(
        function,
        train_loop_config={"marks": str(folder / "marks"), "die_at": die_at},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


def test_a_run_whose_worker_is_killed_within_a_save_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = fit(whole)
    assert result.metrics["step"] == STEPS - 1
    assert Path(result.checkpoint.path).name == f"checkpoint_{STEPS - 1:06d}"
    fit(broken, die_at=2)
    assert json.loads((whole / "marks/end").read_text()) == json.loads((broken / "marks/end").read_text())
    begins = (broken / "marks/begin-0").read_text().split()
    assert begins[0] == "0"
    assert begins[1] in ("2", "3")  # the save of step 2 may have been whole when the worker died
    for folder in (whole, broken):
        kept = [f"checkpoint_{step:06d}" for step in (STEPS - 2, STEPS - 1)]
        there = [
            path.name for path in (folder / "storage/run").iterdir() if path.name.startswith((".aiockpt", "check"))
        ]
        assert sorted(name for name in there if name.startswith("checkpoint_0")) == kept
        assert not [name for name in there if name.startswith(".aiockpt")]
        for name in kept:
            assert aiockpt.verify(folder / "storage/run" / name).ok


def test_options_that_are_rays_are_refused() -> None:
    for name in ("keep", "directory", "lock"):
        with pytest.raises(ValueError, match=f"leave out {name}="):
            plugin.manager(**{name: 1})


# --- Lightning in its workers ----------------------------------------------------------------------------


def train_lightning(config: dict[str, Any]) -> None:
    """Train two workers of Lightning with DDP, and kill one of them once, if that is wanted."""
    import lightning.pytorch as pl
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    from aiockpt.integrations.lightning import AiockptCheckpointIO
    from aiockpt.integrations.ray_lightning import AiockptReportCallback

    marks, restored = Path(config["marks"]), ray.train.get_checkpoint()

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.layers(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    class Dies(pl.Callback):
        """After the report of the epoch, which has returned while its checkpoint was written."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_rank == 1:
                with open(marks / "epochs", "a") as file:
                    file.write(f"{trainer.current_epoch}\n")
            if trainer.current_epoch == config["die_at"] and trainer.global_rank == 1 and not (marks / "died").exists():
                (marks / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    model = Model()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment(), AiockptCheckpointIO()],
        callbacks=[AiockptReportCallback(), Dies()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=str(marks),
    )
    data = torch.ones(16, 256)  # all alike: in whatever order they come
    path = None if restored is None else os.path.join(restored.path, AiockptReportCallback.CHECKPOINT_NAME)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=path)
    if trainer.is_global_zero:
        sums = [parameter.detach().double().abs().sum().item() for parameter in model.parameters()]
        (marks / "end").write_text(json.dumps(sums))


def test_lightning_reports_what_is_durable_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = fit(tmp_path, die_at=2, function=train_lightning)
    assert result.metrics["epoch"] == 3
    torch.testing.assert_close(json.loads((tmp_path / "marks/end").read_text()), _weights_after_epochs(4))
    epochs = [int(line) for line in (tmp_path / "marks/epochs").read_text().split()]
    assert epochs[:3] == [0, 1, 2]
    assert epochs[3:] in ([2, 3], [1, 2, 3], [0, 1, 2, 3])  # it depends on what was durable when the worker died
    there = sorted(path for path in (tmp_path / "storage/run").iterdir() if path.name.startswith("checkpoint_0"))
    assert [path.name for path in there] == ["checkpoint_000006", "checkpoint_000008"]
    for path in there:
        assert [each.name for each in path.iterdir()] == ["checkpoint.ckpt"]
        assert torch.load(path / "checkpoint.ckpt", weights_only=True)["global_step"] in (6, 8)


def _weights_after_epochs(epochs: int) -> list[float]:
    """Train in one process, with batches as large as those of both workers together."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    for _ in range(2 * epochs):
        layers(torch.ones(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().double().abs().sum().item() for parameter in layers.parameters()]


# --- actors -------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0, max_restarts=1)
class Trainer:
    """An actor that holds a part of a state."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        self.rank, self.size, self.meeting = rank, size, meeting
        self.ckpt: aiockpt.AsyncCheckpointer | None = None
        self.state = {f"w{rank}": torch.full((4 << 20,), float(rank)), "same": torch.ones(1000)}

    async def save(self, path: str) -> int:
        if self.ckpt is None:
            ranks = await plugin.Meeting.join(self.meeting, self.rank, self.size, timeout=60)
            self.ckpt = aiockpt.AsyncCheckpointer(process_group=ranks)
        try:
            return len((await self.ckpt.save(self.state, path)).files)
        except aiockpt.errors.CoordinationError:
            ckpt, self.ckpt = self.ckpt, None
            await ckpt.aclose()
            raise

    async def ping(self) -> int:
        return self.rank

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.asyncio
async def test_actors_write_one_checkpoint_together(tmp_path: Path) -> None:
    size = 3
    actors = [Trainer.remote(rank, size, "three") for rank in range(size)]
    try:
        for number in range(2):
            saves = asyncio.gather(*[actor.save.remote(str(tmp_path / f"{number}")) for actor in actors])
            rounds = 0
            while not saves.done():  # other calls are served meanwhile
                assert await asyncio.gather(*[actor.ping.remote() for actor in actors]) == [0, 1, 2]
                rounds += 1
            await saves
        assert rounds >= 5
        loaded = aiockpt.load(tmp_path / "1")
        for rank in range(size):
            assert torch.equal(loaded[f"w{rank}"], torch.full((4 << 20,), float(rank)))
        begin = time.monotonic()
        doomed = [actor.save.remote(str(tmp_path / "2")) for actor in actors[:2]]
        actors[2].die.remote()
        for each in await asyncio.gather(*doomed, return_exceptions=True):
            assert "rank 2" in str(each), each
        assert time.monotonic() - begin < 100  # far below the limit for ranks that hang
        assert sorted(os.listdir(tmp_path)) == ["0", "1"]
        deadline = time.monotonic() + 60
        while True:  # until it is restarted
            try:
                assert await actors[2].ping.remote() == 2
                break
            except ray.exceptions.RayActorError:
                assert time.monotonic() < deadline, "the actor was not restarted"
        await asyncio.gather(*[actor.save.remote(str(tmp_path / "3")) for actor in actors])
        assert sorted(aiockpt.load(tmp_path / "3")) == ["same", "w0", "w1", "w2"]
    finally:
        for actor in actors:
            ray.kill(actor)
        plugin.Meeting.end("three")
        plugin.Meeting.end("three")


@pytest.mark.asyncio
async def test_a_meeting_whose_ranks_stay_away_ends() -> None:
    try:
        with pytest.raises(aiockpt.errors.CoordinationError, match="rank 0 of 2 has waited"):
            await plugin.Meeting.join("alone", 0, 2, timeout=3)
        with pytest.raises(aiockpt.errors.CoordinationError, match="rank 1 of 3 has waited"):  # the first has left
            await plugin.Meeting.join("alone", 1, 3, timeout=3)
    finally:
        plugin.Meeting.end("alone")
