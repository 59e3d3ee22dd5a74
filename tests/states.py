"""State dicts for tests: values that would show a swapped key, a shifted offset or a stale buffer."""

from __future__ import annotations

import ctypes
import io
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

DTYPES = [
    dtype
    for name in sorted(dir(torch))
    if isinstance(dtype := getattr(torch, name), torch.dtype) and name == str(dtype).removeprefix("torch.")
]


def storable_dtypes() -> list[torch.dtype]:
    """Return every dtype of strided tensors that torch.save itself can store."""
    found = []
    for dtype in DTYPES:
        if str(dtype).startswith(("torch.q", "torch.bits")):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that complex32 is experimental
                torch.save(torch.empty(2, dtype=dtype), io.BytesIO())
        except (KeyError, RuntimeError, TypeError, NotImplementedError):
            continue
        found.append(dtype)
    return found


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes: any value of the dtype, including NaNs with payloads."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the values in row-major order."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach().cpu())
    return ctypes.string_at(dense.data_ptr(), dense.nbytes)


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """Assert that two states are the same: types of containers and keys, order, dtypes, bits of values."""
    if isinstance(one, torch.Tensor) and one.layout is torch.strided and not one.is_quantized:
        assert isinstance(other, torch.Tensor), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert raw_bytes(one) == raw_bytes(other), f"{where} has other bits"
        return
    assert type(one) is type(other), f"{where}: {type(one)} became {type(other)}"
    if isinstance(one, dict):
        assert list(one) == list(other), f"{where} has other keys"
        assert [type(key) for key in one] == [type(key) for key in other], f"{where} has other types of keys"
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}.{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    else:
        assert one == other or (one != one and other != other), f"{where}: {one!r} became {other!r}"


def training_state(seed: int = 0, width: int = 64) -> dict[str, Any]:
    """Return the state of a small real training run: model, optimizer after two steps, scheduler, counters."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 2 * width), torch.nn.BatchNorm1d(2 * width), torch.nn.Linear(2 * width, width)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 2,
        "loss": [0.5, 0.25],
        "rng": torch.get_rng_state(),
        "empty": {},
        "nested": OrderedDict(a=(torch.ones(2), "x"), b=[{}, [], ()], c={1: torch.zeros(3), 2: None}),
    }


def large_state(count: int = 6, kib: int = 512) -> dict[str, torch.Tensor]:
    """Return distinct tensors, each too large to be copied at the call."""
    return {f"w{i}": torch.arange(i * 1_000_003, i * 1_000_003 + kib * 256, dtype=torch.int32) for i in range(count)}
