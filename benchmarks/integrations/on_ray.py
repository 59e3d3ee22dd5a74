"""Ray Train, two workers on this machine: how long a save and its report block the training function of rank 0."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

_MIB = 128
_LAYER = 1024  # a layer of this width has 4 MiB
_PAUSE_S = 1.0  # of training between saves


def rows(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds blocked for each save, by contender."""
    import ray

    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:
        ray.init(
            num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=200 << 20, _temp_dir=short
        )
        try:
            kinds = {
                "stock: torch.save and report, SYNC": "sync",
                "stock: torch.save and report, ASYNC": "async",
                "stock: dcp.async_save, reported when done": "dcp",
                "aiockpt: report": "ours",
            }
            return {name: _fit(directory / kind, kind, rounds + 1) for name, kind in kinds.items()}
        finally:
            ray.shutdown()


def _fit(folder: Path, kind: str, saves: int) -> list[float]:
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder.mkdir(parents=True)
    TorchTrainer(
        _train,
        train_loop_config={"kind": kind, "saves": saves, "answer": str(folder / "answer.json"), "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "storage"), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    ).fit()
    found: list[float] = json.loads((folder / "answer.json").read_text())
    return found


def _train(config: dict[str, Any]) -> None:
    import ray.train
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from ray.train import Checkpoint, CheckpointUploadMode
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from aiockpt.integrations import ray as plugin

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(_LAYER, _LAYER) for _ in range(_MIB // 4)])
    kind, rank, storage = config["kind"], dist.get_rank(), ray.train.get_context().get_storage()
    if kind in ("ours", "dcp"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = plugin.manager() if kind == "ours" else None
    if run is not None:
        run.__enter__()
        run.checkpointer.guard(optimizer)
    group = dist.new_group(backend="gloo") if kind == "dcp" else None
    blocked: list[float] = []
    save: Any = None
    for step in range(config["saves"]):
        model(torch.randn(8, _LAYER)).square().mean().backward()
        dist.barrier()
        begin = time.perf_counter()
        optimizer.step()  # which waits for what is still copied, with a guard
        waited = time.perf_counter() - begin if kind == "ours" and step else 0.0
        optimizer.zero_grad()
        dist.barrier()
        begin, name = time.perf_counter(), f"checkpoint_{step:06d}"
        if run is not None:
            plugin.report(run.submit(step, {"model": model}), {"step": step})
        elif kind == "dcp":
            if save is not None:
                save.result()
            path = f"{storage.experiment_fs_path}/{name}"
            save = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path, process_group=group)

            def done(checkpoint: Any, _: str, save: Any = save) -> Any:
                save.result()
                return checkpoint

            found = Checkpoint(path, filesystem=storage.storage_filesystem)
            mode = CheckpointUploadMode.ASYNC
            ray.train.report({"step": step}, found, name, mode, False, done)
        else:
            local = None
            if rank == 0:
                folder = tempfile.mkdtemp(dir=config["folder"])
                torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
                local = Checkpoint.from_directory(folder)
            mode = CheckpointUploadMode.SYNC if kind == "sync" else CheckpointUploadMode.ASYNC
            ray.train.report({"step": step}, local, name, mode, None if kind == "sync" else True)
        blocked.append(time.perf_counter() - begin + waited)
        time.sleep(_PAUSE_S)
    if run is not None:
        run.close()
    if rank == 0:
        Path(config["answer"]).write_text(json.dumps(blocked))
