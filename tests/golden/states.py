"""The contents of the golden checkpoints: values computed by arithmetic, the same with every torch."""

from __future__ import annotations

import argparse
import datetime
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
# For safetensors: without complex numbers.
PLAIN_DTYPES = tuple(dtype for dtype in DTYPES if dtype not in (torch.complex64, torch.complex128))


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of a fixed pattern."""
    count = int(np.prod(shape, dtype=np.int64))
    whole = (torch.arange(count, dtype=torch.int64) * 37 + 11 * seed) % 251
    if dtype is torch.bool:
        return (whole % 3 == 0).reshape(shape)
    if dtype is torch.int8:
        whole -= 125
    if dtype.is_complex:
        return torch.complex(whole.double(), -whole.double() / 4).to(dtype).reshape(shape)
    return (whole.double() / 8 if dtype.is_floating_point else whole).to(dtype).reshape(shape)


def tensors(dtypes: tuple[torch.dtype, ...] = PLAIN_DTYPES, *, large: bool = False) -> dict[str, torch.Tensor]:
    """Return a flat state: a tensor of each dtype, a scalar, an empty tensor, and optionally a large one."""
    state = {f"layer.{i}.{str(dtype)[6:]}": values(dtype, 3 + i, 5, seed=i) for i, dtype in enumerate(dtypes)}
    return {
        **state,
        "scalar": values(torch.float32, seed=9),
        "none": torch.zeros(0, 4),
        **({"large": values(torch.float32, 70, 257, seed=3)} if large else {}),
    }


def training(*, large: bool = False) -> dict[str, Any]:
    """Return the state of a training run: model, optimizer, counters and other values."""
    moments = {i: {"step": torch.tensor(float(i)), "exp_avg": values(torch.float32, 7, i + 2)} for i in (0, 1, 10)}
    return {
        "model": {"embed.weight": values(torch.bfloat16, 33, 8), "head": tensors(DTYPES, large=large)},
        "optim": {
            "state": moments,
            "param_groups": [{"lr": 0.125, "betas": (0.9, 0.999), "params": [0, 1, 10], "fused": None}],
        },
        "step": 1234567890123,
        "loss": [0.5, -0.25, float("inf")],
        "text": "käse / \U0001f9c0 \n.",
        "flags": (True, None, b"\x00\xff", 3 + 4j),
        "empty": {"dict": {}, "list": [], "tuple": (), "nested": [{}, [()]]},
        "ordered": OrderedDict(b=values(torch.int16, 4), a=[values(torch.uint8, 2, 2), {"x": 1}]),
        "a.b": {"c": 1, "c.d": values(torch.float32, 2)},
    }


def plain_values() -> dict[str, Any]:
    """Return objects that load without permission."""
    return {
        "keys": {7: "int", 2.5: "float", True: "bool", None: "none", (1, "a"): "tuple", "s": "text"},
        "array": np.arange(24, dtype=">i4").reshape(2, 3, 4)[:, ::2],
        "names": np.array(["a", "bcd"]),
        "times": np.array(["2026-01-02", "1969-12-31"], dtype="datetime64[D]"),
        "record": np.array([(1, 2.5)], dtype=[("x", "<i2"), ("y", "<f8")]),
        "scalar": np.float32(1.5),
        "numpy_rng": np.random.RandomState(7).get_state(),
        "python_rng": random.Random(7).getstate(),
        "path": PurePosixPath("runs/a"),
        "price": Decimal("1.10"),
        "queue": deque([1, 2, 3], maxlen=3),
        "count": Counter("abca"),
        "default": defaultdict(list, {"a": [1]}),
        "args": argparse.Namespace(lr=0.1, name="x"),
        "space": SimpleNamespace(a=1),
        "day": datetime.date(2026, 1, 2),
        "file": io.BytesIO(b"0123"),
        "sets": [{1, 2}, frozenset({"a"}), range(1, 9, 2)],
    }


def ranks(world_size: int = 2) -> dict[str, Any]:
    """Return the whole state of several ranks, as one process loads it."""
    return {
        "rows": values(torch.float32, 10, 6, seed=1),
        "columns": values(torch.bfloat16, 4, 9, seed=2),
        "uneven": values(torch.int64, 3, 2, seed=3),
        "same": values(torch.float64, 5, seed=4),
        "step": 77,
        **{f"rng.{rank}": {"seed": rank, "state": values(torch.uint8, 16, seed=rank)} for rank in range(world_size)},
    }
