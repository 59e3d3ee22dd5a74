"""Kills of the trainer, and of the writer process, while the device has locked the memory that they share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.fakecuda import device as fake
from tests.polling import until
from tests.writing.gates import ended, writers_of

CHUNK = 64 << 10
OPTIONS: dict[str, Any] = {"writer": "process", "chunk_bytes": CHUNK, "staging_bytes": 64 * CHUNK, "fsync": False}
WAIT_S = 60

TRAINER = """
import os, signal, sys
from pathlib import Path
import torch
import aiockpt
from tests.fakecuda import device as fake
from tests.fakecuda.test_kills import OPTIONS, WAIT_S
from tests.writing.gates import writers_of

folder, moment = Path(sys.argv[1]), sys.argv[2]
tensor = torch.arange(60_000, device="cuda")
ckpt = aiockpt.SyncCheckpointer(**OPTIONS)
ckpt.save({"w": tensor}, folder / "first")
(writer,) = writers_of(os.getpid())
assert fake.locked()
if moment == "copies":
    fake.hold("to_host")
save = ckpt.submit({"w": tensor}, folder / "c")
save.fence(WAIT_S)
if moment == "staged":
    save.staged.result(WAIT_S)
(folder.parent / "writer").write_text(str(writer.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["copies", "staged"])
def test_a_killed_trainer(moment: str, tmp_path: Path) -> None:
    """What was staged becomes a checkpoint, of what was being copied nothing is left, and the writer ends."""
    folder = tmp_path / "checkpoints"
    with (tmp_path / "output").open("w+") as output:  # no pipe, which the writer process would keep open
        command = [sys.executable, "-c", TRAINER, str(folder), moment]
        done = subprocess.run(command, stdout=output, stderr=output, timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()
    until(lambda: ended(int((tmp_path / "writer").read_text())))
    assert sorted(os.listdir(folder)) == (["c", "first"] if moment == "staged" else ["first"])
    for name in os.listdir(folder):
        assert torch.equal(aiockpt.load(folder / name)["w"], torch.arange(60_000))


def test_a_killed_writer(tmp_path: Path) -> None:
    """The save fails once its copies are done; the next one has another process, which maps the same memory."""
    state = {"w": torch.arange(60_000, device="cuda")}
    with aiockpt.SyncCheckpointer(**OPTIONS) as ckpt:
        ckpt.prewarm(state)  # else the pool may still grow behind the first save
        ckpt.save(state, tmp_path / "first")
        (writer,) = writers_of(os.getpid())
        assert (locked := fake.locked())
        with fake.held("to_host"):
            save = ckpt.submit(state, tmp_path / "c")
            save.fence(WAIT_S)
            os.kill(writer.pid, signal.SIGKILL)
            assert ended(writer.pid)
        assert isinstance(save.written.exception(WAIT_S), aiockpt.WriteError)
        assert not (tmp_path / "c").exists()
        ckpt.save(state, tmp_path / "later")
        assert fake.locked() == locked
        assert torch.equal(ckpt.load(tmp_path / "later")["w"], torch.arange(60_000))
