"""The work of the call itself, which training waits for: counted, as times depend on the machine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.errors import SaveError
from aiockpt.snapshot.capture import capture_state
from aiockpt.staging.pool import ArenaCache
from tests.states import assert_same


def _trained(count: int = 20) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() for key, value in state.items()}


# --- work that is done once ---------------------------------------------------------------------------

_FIRST_CALL = """
import sys, torch, aiockpt
from tests.snapshot.test_call import _trained
state = _trained()
with aiockpt.SyncCheckpointer() as ckpt:
    ckpt.prewarm(state)
    before = set(sys.modules)
    save = ckpt.submit(state, sys.argv[1])
    print("imported", sorted(set(sys.modules) - before))
    save.written.result()
"""


@pytest.mark.slow
def test_the_first_call_after_prewarm_imports_nothing(python_with_torch: list[str], tmp_path: Path) -> None:
    command = [*python_with_torch, "-c", _FIRST_CALL, tmp_path / "c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout, done.stderr) == ("imported []\n", "")


def test_prewarm_accepts_what_can_not_be_saved(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    ckpt.prewarm({"shapes": torch.empty(1000, device="meta"), "unpicklable": lambda: None})
    ckpt.save(state := _plain(_trained()), tmp_path / "c")
    assert_same(state, ckpt.load(tmp_path / "c"))


def test_calls_of_functions_for_each_tensor() -> None:
    state = _trained(100)
    arenas = ArenaCache()
    capture_state(state, arenas=arenas).release()
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: object) -> None:
        counts[event] += 1

    sys.setprofile(count)
    snapshot = capture_state(state, arenas=arenas)
    sys.setprofile(None)
    tensors = sum(tensor is not None for tensor in snapshot.tensors)
    assert tensors == 800
    assert counts["call"] / tensors < 5
    assert counts["c_call"] / tensors < 21


# --- what is kept from one call to the next -----------------------------------------------------------


def test_changes_of_the_structure_are_seen(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    state: dict[str, Any] = _plain(_trained(3))
    slots = state["optim"]["state"]

    def add() -> None:
        slots[0]["amsgrad"] = torch.ones(3)

    def rename() -> None:
        slots[1] = {f"{key}_": value for key, value in slots[1].items()}

    def reorder() -> None:
        slots[2] = dict(reversed(slots[2].items()))

    def remove() -> None:
        del slots[3]

    def nest() -> None:
        slots[4]["step"] = {"step": slots[4]["step"], "note": "text"}

    def replace() -> None:
        slots[5]["exp_avg"] = torch.full((2, 3), 7.0)

    def resize() -> None:
        slots[0]["exp_avg"].resize_(2, 2)

    def grow() -> None:
        slots[0]["large"] = torch.arange(100_000)

    def longer() -> None:
        state["optim"]["param_groups"][0]["params"].append("text")

    for number, change in enumerate((dict, add, rename, reorder, remove, nest, replace, resize, grow, longer)):
        change()
        ckpt.save(state, tmp_path / str(number))
        assert_same(state, ckpt.load(tmp_path / str(number)))


def test_a_storage_that_was_freed_since_the_last_save_is_seen(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    state = {"a": torch.ones(9), "b": torch.ones(9)}
    ckpt.save(state, tmp_path / "1")
    state["b"].untyped_storage().resize_(4)
    with pytest.raises(SaveError, match="the memory of b was freed"):
        ckpt.save(state, tmp_path / "2")


def test_memory_for_copies_is_reused_when_nothing_refers_to_it() -> None:
    arenas = ArenaCache()
    first = arenas.take(5000)
    part, address = first[10:20], first.data_ptr()
    del first
    other = arenas.take(5000)
    assert other.data_ptr() != address
    del part, other
    again = arenas.take(100)
    assert len(again) == 100
    held = again.data_ptr()
    del again
    assert arenas.take(5000).data_ptr() == held
    arenas.clear()
    assert len(arenas.take(1 << 20)) == 1 << 20


def test_copies_of_saves_at_once_are_apart(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    values = torch.zeros(1000)
    saves = []
    for number in range(5):
        values.fill_(number)
        saves.append(ckpt.submit({"values": values}, tmp_path / str(number)))
    for number, save in enumerate(saves):
        save.written.result()
        assert ckpt.load(tmp_path / str(number))["values"].eq(number).all()
