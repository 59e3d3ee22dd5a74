"""Pipes, devices, sockets and huge holes in the place of files: nothing waits for them, or reads without bound."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests import commands
from tests.kinds import files, indexed, save_ours
from tests.memory import peak_growth

MOST_BYTES = 256 << 20  # what is imported is part of it; a device or a hole would give far more


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "hole": _hole,
}
PLACES = {
    "manifest": "step-00000002/.aiockpt.json",
    "metadata": "step-00000002/.metadata",
    "data": "step-00000002/__0_0.distcp",
    "lock": ".aiockpt.lock",
    "safetensors": "m/model.safetensors",
    "index": "i/model.safetensors.index.json",
    "index of torch": "t/pytorch_model.bin.index.json",
    "torch": "last.pt",
    "lone torch": "p/last.pt",
    "metadata of a rank": "step-00000002/__0.metadata",
    "common": "step-00000002/common.pt",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of a run with other checkpoints beside its steps."""
    path = tmp_path / "run"
    for step in (1, 2):
        save_ours(path / f"step-0000000{step}")
    files(path / "m", "model.safetensors")
    files(path / "p", "last.pt")
    indexed(path / "i", ".safetensors", "model.safetensors.index.json")
    indexed(path / "t", ".bin", "pytorch_model.bin.index.json")
    return path


def operations(run: Path, place: Path) -> list[Callable[[], object]]:
    """Return what may meet the file, reading before writing."""

    def invoke(*arguments: object) -> None:
        done = commands.invoke(*arguments)
        assert done.exit_code in (0, 1, 3), done.output
        assert "Traceback" not in done.output

    def manager(use: Callable[[aiockpt.SyncCheckpointManager], object], *, read_only: bool) -> None:
        with aiockpt.SyncCheckpointManager(run, read_only=read_only, process_group=None) as each:
            use(each)

    def checkpointer(use: Callable[[aiockpt.SyncCheckpointer], object]) -> None:
        with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
            use(ckpt)

    above = place.parent
    return [
        lambda: invoke("ls", run),
        lambda: invoke("ls", above),
        lambda: invoke("verify", run),
        lambda: invoke("verify", place),
        lambda: invoke("inspect", above),
        lambda: invoke("convert", above, run.parent / "out"),
        lambda: manager(lambda each: each.steps(), read_only=True),
        lambda: manager(lambda each: each.restore({"w": torch.zeros(6)}), read_only=True),
        lambda: checkpointer(lambda ckpt: ckpt.load(above)),
        lambda: checkpointer(lambda ckpt: ckpt.load(place)),
        lambda: invoke("clean", run),
        lambda: invoke("prune", run, "--keep-latest", 2),
        lambda: manager(lambda each: each.restore({"w": torch.zeros(6)}), read_only=False),
        lambda: checkpointer(lambda ckpt: ckpt.save({"w": torch.ones(2)}, above, overwrite=True)),
        lambda: invoke("rm", "--yes", above),
    ]


def combinations() -> Iterator[Any]:
    """Yield a pipe in each place, and one other kind of file; all others only repeat what these find."""
    kinds = [kind for kind in SPECIAL if kind != "pipe"]
    for number, place in enumerate(PLACES):
        for kind in SPECIAL:
            if kind == "pipe":
                yield pytest.param(kind, place)
            else:
                is_chosen = kind == kinds[number % len(kinds)]
                yield pytest.param(kind, place, marks=pytest.mark.slow if is_chosen else pytest.mark.full)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("special", "place"), list(combinations()))
@pytest.mark.filterwarnings("ignore::aiockpt.DamagedCheckpointWarning")
def test_special_files_neither_block_nor_fill_the_memory(special: str, place: str, run: Path, tmp_path: Path) -> None:
    path = run / PLACES[place]
    if path.exists():
        path.unlink()
    SPECIAL[special](path)

    def meet() -> None:
        for operation in operations(run, path):
            with contextlib.suppress(aiockpt.AiockptError):
                operation()

    assert peak_growth(meet) < MOST_BYTES
    assert (run / "step-00000001").is_dir()
    shutil.rmtree(run)
