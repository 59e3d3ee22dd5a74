"""The example program for several ranks in the documentation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import aiockpt

PAGE = Path(aiockpt.__file__).parent / "docs/ranks.md"


def test_the_program_runs_under_torchrun(python: list[str], tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n# train\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    (command,) = re.findall(r"```\ntorchrun (.*?) train\.py runs/fsdp\n```", PAGE.read_text())
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.join(python)} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON_EXEC": str(tmp_path / "python")}
    done = subprocess.run(
        [*python, "-m", "torch.distributed.run", *command.split(), "train.py", "runs/fsdp"],
        cwd=tmp_path,
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"step-2: \d+ tensors, \d+ bytes, loss 0\.\d+", done.stdout)
    assert {path.name for path in (tmp_path / "runs/fsdp").iterdir()} == {"step-0", "step-1", "step-2"}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(tmp_path / "runs/fsdp/step-2").ok
        state = ckpt.load(tmp_path / "runs/fsdp/step-2")
    assert state["model"]["0.weight"].shape == (256, 64)
    assert state["optim"]["state"]["0.weight"]["exp_avg"].shape == (256, 64)
    assert state["step"] == 2
