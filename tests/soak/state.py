"""The state that a soak saves: a function of the number of the save."""

from __future__ import annotations

from typing import Any

import torch

_LENGTHS = (9_000, 40_001, 70_003, 100, 17_000)
_APART = 1_000_003


def state_of(number: int) -> dict[str, Any]:
    """Return the state of a number: tensors of several layouts, small ones, objects; every fifth has one more key."""
    state: dict[str, Any] = {
        "weights": {
            f"w{i}": torch.arange(n, dtype=torch.int32) + (number + _APART * i) for i, n in enumerate(_LENGTHS)
        },
        "strided": (torch.arange(30_000, dtype=torch.float64) * 0.5 + number).reshape(100, 300).t(),
        "half": torch.arange(50_000).add(number).remainder(251).to(torch.bfloat16),
        "step": number,
        "log": [number, f"step {number}", {"loss": number / 8}],
        "scale": torch.tensor(number, dtype=torch.int64),
    }
    if number % 5 == 0:
        state["extra"] = {str(number % 3): torch.full((20_000,), number)}
    return state


def fill(target: dict[str, Any], number: int) -> dict[str, Any]:
    """Change the tensors of a state in place to those of another number, as training does; return the new state."""
    fresh = state_of(number)
    for name, tensor in fresh["weights"].items():
        target["weights"][name].copy_(tensor)
    for name in ("strided", "half", "scale"):
        target[name].copy_(fresh[name])
    return {**fresh, **{name: target[name] for name in ("weights", "strided", "half", "scale")}}


def differences(one: Any, other: Any, where: str = "state") -> str | None:
    """Return the first difference of two states in dtypes, shapes, values or keys; None if there is none."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{where} has another type, dtype or shape"
        return None if torch.equal(one, other) else f"{where} has other values"
    if type(one) is not type(other):
        return f"{where} is a {type(other).__name__}, not a {type(one).__name__}"
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{where} has the keys {list(other)}, not {list(one)}"
        return next((found for key in one if (found := differences(one[key], other[key], f"{where}.{key}"))), None)
    return None if one == other else f"{where} is {other!r}, not {one!r}"
