"""Comparison of two runs, bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import aiockpt


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two states."""

    tensors: int
    nbytes: int  # of the tensors
    digests: tuple[str, str]  # the SHA-256 of each state
    differences: tuple[str, ...]  # the keys that differ, in order


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
    """Load two checkpoints and compare them."""
    async with aiockpt.AsyncCheckpointer() as ckpt:
        return compare_states(await ckpt.load(first), await ckpt.load(second))


def compare_states(first: Any, second: Any) -> Comparison:
    """Compare two state dicts: keys, types, shapes and every bit."""
    a, b = dict(leaves(first)), dict(leaves(second))
    tensors = [leaf for leaf in a.values() if isinstance(leaf, torch.Tensor)]
    keys = list(a) + [key for key in b if key not in a]
    return Comparison(
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        digests=(digest(a), digest(b)),
        differences=tuple(key for key in keys if key not in a or key not in b or not identical(a[key], b[key])),
    )


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, lists and tuples, with dotted keys."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = enumerate(value)
    else:
        yield key, value
        return
    for name, item in items:
        yield from leaves(item, f"{key}.{name}" if key else str(name))


def identical(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal bit by bit: unlike ``==``, NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
    return type(a) is type(b) and repr(a) == repr(b)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def digest(flat: Mapping[str, Any]) -> str:
    """Return the SHA-256 of leaves, with their keys, dtypes and shapes."""
    sha = hashlib.sha256()
    for key in sorted(flat):
        leaf = flat[key]
        if isinstance(leaf, torch.Tensor):
            sha.update(f"{key} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            data = raw(leaf)
            sha.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
        else:
            sha.update(f"{key} {leaf!r}\n".encode())
    return sha.hexdigest()
