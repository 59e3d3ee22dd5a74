"""Comparison of two runs, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import aiockpt
from aiockpt.cli.diff import differences
from aiockpt.reading.info import TensorInfo
from aiockpt.reading.reader import CheckpointReader


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two states."""

    tensors: int
    nbytes: int  # of the tensors
    digests: tuple[str, str]  # the SHA-256 of each state
    differences: tuple[str, ...]  # the keys that differ


def compare_losses(seen: Iterable[tuple[int, float]], reference: Mapping[int, float]) -> str | None:
    """Describe the first difference between the losses of a resumed run and a reference; None if there is none.

    A step may be in ``seen`` more than once.
    """
    by_step: dict[int, list[float]] = {}
    for step, loss in seen:
        by_step.setdefault(step, []).append(loss)
    for step in sorted(by_step.keys() | reference.keys()):
        losses = by_step.get(step, [])
        if not losses or any(loss != reference.get(step) for loss in losses):
            return f"step {step}: loss {losses} when interrupted and resumed, {reference.get(step)} when not"
    return None


async def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Compare two checkpoints: keys, types, shapes and every bit."""
    async with aiockpt.open(first) as a, aiockpt.open(second) as b:
        found = await differences(a, b)
        tensors = [info for info in a.values() if isinstance(info, TensorInfo)]
        return Comparison(
            tensors=len(tensors),
            nbytes=sum(info.nbytes for info in tensors),
            digests=(await _digest(a), await _digest(b)),
            differences=tuple(each.key for each in (*found.changed, *found.removed, *found.added)),
        )


async def _digest(reader: CheckpointReader) -> str:
    """Return the SHA-256 of the values of a checkpoint, with their keys, dtypes and shapes."""
    sha = hashlib.sha256()
    values = await reader.read_many(dict.fromkeys(reader))
    for key, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            sha.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
            sha.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            sha.update(f"{key} {value!r}\n".encode())
    return sha.hexdigest()
