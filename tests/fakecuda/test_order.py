"""The check of the order of all accesses, which `--check-order` makes in tests/gpu, on the fake device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: the check turns on torch's trace for good.
PROGRAM = """
import sys, pytest, torch, aiockpt
from tests.fakecuda import device as fake
from tests.fakecuda.mutants import MUTANTS
from tests.ordering import watch_cuda

folder, mutant = sys.argv[1:]
with pytest.MonkeyPatch.context() as patch, watch_cuda() as checker:
    if mutant in MUTANTS:
        MUTANTS[mutant](patch)
    tensor = torch.zeros(60_000, device="cuda")
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        for number in range(2):
            tensor.add_(1)
            save = ckpt.submit({"w": tensor}, f"{folder}/{number}")
            save.fence(60)
            tensor.add_(1)
            save.written.result(60)
fake.check()
print(*checker.errors, sep="\\n")
"""


@pytest.mark.parametrize("mutant", ["none", "the staging stream does not wait for save()"])
def test_an_order_that_is_missing(mutant: str, tmp_path: Path) -> None:
    """It is found whatever the order is that things happen to be done in; that of a fence is not.

    For torch tells that the host has waited for an event when it begins to wait.
    """
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), mutant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.strip()) == (mutant != "none"), done.stdout
