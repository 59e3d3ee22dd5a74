"""The state dicts that are saved: random bits, and memory of its own for every tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from isal.isal_zlib import crc32

State = dict[str, torch.Tensor]

# The matrices of one transformer layer, in sixteenths of its bytes.
_LAYER = {"q": 1, "k": 1, "v": 1, "o": 1, "gate": 4, "up": 4, "down": 4}
_COLUMNS = 256
_PAGE_BYTES = 4096


def transformer_state(nbytes: int, tensors: int) -> State:
    """Return fp32 tensors of about ``nbytes`` in all, sized like the matrices of a transformer's layers."""
    names = [f"layers.{number // len(_LAYER)}.{list(_LAYER)[number % len(_LAYER)]}" for number in range(tensors)]
    weights = [_LAYER[name.rpartition(".")[2]] for name in names]
    rows = nbytes / sum(weights) / (4 * _COLUMNS)
    return {
        f"{name}.weight": random_tensor(max(1, round(rows * weight)), _COLUMNS)
        for name, weight in zip(names, weights, strict=True)
    }


def small_state(count: int, nbytes: int) -> State:
    """Return ``count`` fp32 tensors of ``nbytes`` each."""
    block = random_tensor(count, max(1, nbytes // 4))
    return {f"table.{number // 1000}.{number % 1000}": row.clone() for number, row in enumerate(block)}


def random_tensor(*shape: int) -> torch.Tensor:
    """Return an fp32 tensor of random bits, which cannot be compressed."""
    return torch.empty(shape, dtype=torch.int32).random_().view(torch.float32)


def empty_like(state: Mapping[str, torch.Tensor]) -> State:
    """Return a target to load into, its memory touched."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def size_of(state: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of a state."""
    return sum(tensor.nbytes for tensor in state.values())


def split(state: Mapping[str, torch.Tensor], parts: int) -> list[State]:
    """Split a state into parts of about the same number of bytes."""
    dealt: list[State] = [{} for _ in range(parts)]
    sizes = [0] * parts
    for name, tensor in sorted(state.items(), key=lambda item: -item[1].nbytes):
        least = sizes.index(min(sizes))
        dealt[least][name] = tensor
        sizes[least] += tensor.nbytes
    return [part for part in dealt if part]


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two states are equal bit for bit, NaNs included."""
    return left.keys() == right.keys() and all(
        tensor.shape == right[name].shape
        and tensor.dtype == right[name].dtype
        and torch.equal(_bytes_of(tensor), _bytes_of(right[name]))
        for name, tensor in left.items()
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def checksums(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the CRC-32 of every tensor, to compare states of two processes."""
    return {name: crc32(_bytes_of(tensor).numpy()) for name, tensor in state.items()}


def read_pages(state: Mapping[str, torch.Tensor]) -> None:
    """Read a byte of every page, so that the pages of a mapped state are read from the file."""
    for tensor in state.values():
        _byte_of_each_page(tensor).max()


def write_pages(state: Mapping[str, torch.Tensor]) -> None:
    """Write a byte of every page, so that a mapped state gets memory of its own, as in training."""
    for tensor in state.values():
        _byte_of_each_page(tensor).bitwise_or_(0)


def _byte_of_each_page(tensor: torch.Tensor) -> torch.Tensor:
    return _bytes_of(tensor)[::_PAGE_BYTES]
