"""Whenever a program is killed, the checkpoint finders of other programs ignore the hidden names that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from aiockpt.dcp import FileSystemWriter
from aiockpt.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp
from tests.crash.lab.tracer import Tracer
from tests.crash.scenarios import checkpointer, save_one, state_of
from tests.crash.zygote import Zygote
from tests.dcp.megatron_driver import write_alone
from tests.finders import wrongly_found, wrongly_found_files
from tests.stock import ALONE

Program = Callable[[Path], object]
NAMES = ["step-30", "checkpoint-30", "iter_0000030", "last.ckpt", "last-v1.ckpt"]


def _native(folder: Path, name: str, **options: Any) -> None:
    for overwrite in (False, True):
        save_one(folder, str, name, overwrite=overwrite, **options)
    with checkpointer() as ckpt:
        ckpt.delete(folder / name)


def _by_process(folder: Path, name: str) -> None:
    with checkpointer(writer="process") as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(name, step), folder / name, overwrite=True)


def _by_adapter(folder: Path, name: str) -> None:
    for _ in range(2):  # the hidden directory of the first save is beside the path, that of the second within it
        dcp.save({"w": torch.ones(3000)}, storage_writer=FileSystemWriter(folder / name), **ALONE)


def _by_megatron(folder: Path, name: str) -> None:
    for _ in range(2):
        write_alone(folder / name, {"w": torch.ones(3000)})


def _converted(folder: Path) -> None:
    dcp.save({"w": torch.ones(3000)}, storage_writer=FileSystemWriter(folder / "step-1"), **ALONE)
    dcp_to_torch_save(folder / "step-1", folder / "last.ckpt")
    (folder / "step-30").mkdir()
    (folder / "step-30" / "mine").touch()
    torch_save_to_dcp(folder / "last.ckpt", folder / "step-30")
    torch_save_to_dcp(folder / "last.ckpt", folder / "step-40")


PROGRAMS: dict[str, Program] = {
    **{f"save, {name}": partial(_native, name=name, format="dcp") for name in NAMES},
    "safetensors file": partial(_native, name="step-30.safetensors", flat=True, format="safetensors"),
    "last.safetensors": partial(_native, name="last.safetensors", flat=True, format="safetensors"),
    "writer process": partial(_by_process, name="step-30"),
    **{f"adapter, {name}": partial(_by_adapter, name=name) for name in NAMES},
    "Megatron": partial(_by_megatron, name="iter_0000030"),
    "converted": _converted,
}


def watch(folder: Path, name: str) -> tuple[int, set[tuple[str, str]], str]:
    """Run all finders at each call of a program, the possible kill points; count how often hidden names were there."""
    seen, found = 0, set()

    def look(number: int, call: object) -> None:
        nonlocal seen
        for place in (folder, *(each for each in folder.iterdir() if each.is_dir())):
            seen += any(place.glob(".aiockpt-*"))
            found.update(wrongly_found(place), wrongly_found_files(place))

    trace = Tracer(folder).run(partial(PROGRAMS[name], folder), look)
    return seen, found, trace.error


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_finder_takes_a_hidden_name_for_a_checkpoint(name: str, zygote: Zygote, tmp_path: Path) -> None:
    seen, found, error = zygote.call(watch, tmp_path, name)
    assert not error
    assert seen > 10
    assert not found


def test_finders_are_misled_by_a_hidden_name_that_contains_the_name_of_the_checkpoint(tmp_path: Path) -> None:
    hidden = tmp_path / ".step-30.unfinished"
    hidden.mkdir()
    (hidden / "last.ckpt").touch()
    assert wrongly_found(tmp_path) == [(hidden.name, "torchtitan")]
    assert wrongly_found_files(tmp_path) == [("last.ckpt", "Lightning, all"), ("last.ckpt", "Lightning, last")]
