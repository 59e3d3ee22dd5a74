"""Lightning's Trainer in Ray Train's workers: its checkpoints, reported to Ray when they are durable.

::

    from aiockpt.integrations.lightning import AiockptCheckpointIO
    from aiockpt.integrations.ray_lightning import AiockptReportCallback

    trainer = Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment(), AiockptCheckpointIO()],
        callbacks=[AiockptReportCallback()],
        enable_checkpointing=False,
    )
"""

from __future__ import annotations

import os
from typing import Any

from aiockpt.integrations import ray
from aiockpt.integrations.lightning import AiockptCallback, InShards, saves_of


class AiockptReportCallback(AiockptCallback):
    """Takes the place of Ray's ``RayTrainReportCallback``, and of `AiockptCallback`.

    After every epoch it saves ``checkpoint_000123/checkpoint.ckpt``, with the number of the step, into the directory of
    the experiment, which all nodes must see under the same path, and reports it. Ray copies nothing, and registers it
    when it is durable. With Ray's own callback, the Trainer would save into a temporary directory, which Ray would copy
    before the file is there.

    If a save fails, so does the worker, and Ray restarts the run from the last checkpoint that was registered.

    Args:
        options: those of ``ray.train.report`` that are not about the upload, such as ``validation``.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, and report; all workers do."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        directory = os.path.join(ray.experiment_directory(), ray.NAMES.format(trainer.global_step))
        path, saves = os.path.join(directory, self.CHECKPOINT_NAME), saves_of(trainer)
        writes = trainer.is_global_zero or isinstance(trainer.strategy, InShards)
        if saves is None:
            raise TypeError("the Trainer saves in another way: give it plugins=[AiockptCheckpointIO()]")
        if trainer.is_global_zero and os.path.isdir(directory):  # of a worker that was killed before it was reported
            saves.checkpointer.clean(directory)
        trainer.save_checkpoint(path)
        ray.report_directory(directory if writes else None, saves.in_flight(path), metrics, **self._options)
