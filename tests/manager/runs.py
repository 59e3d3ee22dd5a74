"""States of runs, and ways to damage a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZE = 300_000
"""Elements per tensor. Loads read tensors this large straight into the target, before their CRC is known."""
LOCK_NAME, DISK_NAME = ".aiockpt.lock", ".aiockpt.disk"


def state_of(step: int) -> dict[str, Any]:
    """Return a state in which each value encodes its step and its key."""
    tensors = [torch.arange(float(SIZE)) + 1000 * step + number for number in range(4)]
    return {"a": tensors[0], "b": tensors[1], "layers": tensors[2:], "step": step}


def empty() -> dict[str, Any]:
    state = state_of(0)
    for tensor in tensors_of(state):
        tensor.fill_(-1)
    state["step"] = -1
    return state


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [state["a"], state["b"], *state["layers"]]


def step_in(state: dict[str, Any]) -> int:
    """Return the step whose values a state has; fail if it mixes steps."""
    found = {int((tensor[0].item() - number) // 1000) for number, tensor in enumerate(tensors_of(state))}
    assert len(found) == 1, found
    (step,) = found
    if state["step"] != -1:
        assert state["step"] == step
        expected = state_of(step)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors_of(expected), strict=True))
    return step


def is_untouched(state: dict[str, Any]) -> bool:
    return state["step"] == -1 and all(bool((tensor == -1).all()) for tensor in tensors_of(state))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def flip(folder: Path, step: int, *, where: float = 0.9) -> None:
    """Flip one bit of a tensor; only the CRC detects it."""
    file = max(path_of(folder, step).glob("*.distcp"), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    at = int(len(data) * where)
    data[at] ^= 0x10
    if isinstance(file, Path):  # in place: it never is shorter
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(data[at : at + 1])
    else:
        file.write_bytes(data)


def truncate(folder: Path, step: int) -> None:
    file = max(path_of(folder, step).glob("*.distcp"), key=lambda each: each.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def unfinish(folder: Path, step: int) -> None:
    for name in (".metadata", ".aiockpt.json"):
        (path_of(folder, step) / name).unlink()
