"""What a process of the demo is to do, passed on its command line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any


def compute_threads() -> int:
    """Choose how many threads a small model can use on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of the model and of its batches.

    Attributes:
        layers: how many blocks.
        width: the size of the residual stream.
        heads: how many attention heads; divides ``width``.
        context: the length of a sequence, in bytes.
        batch: how many sequences make a batch.
        dropout: the share of activations that are dropped, which makes every step draw random numbers.
        learning_rate: AdamW's.
    """

    layers: int = 4
    width: int = 384
    heads: int = 4
    context: int = 128
    batch: int = 4
    dropout: float = 0.1
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of the training loop.

    Attributes:
        model: the model.
        steps: how many steps make the whole run.
        every: how many steps lie between two checkpoints.
        seed: of the weights, the dropout and the choice of text.
        device: where the model lives.
        threads: how many threads torch computes with; results depend on it.
        rng: resume with the random numbers that were saved.
        directory: where the checkpoints go, and where to look for one to resume from.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 32
    every: int = 8
    seed: int = 0
    device: str = "cpu"
    threads: int = field(default_factory=compute_threads)
    rng: bool = True
    directory: str = ""

    def to_json(self) -> str:
        """Write it for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Read it from a command line."""
        facts: dict[str, Any] = json.loads(text)
        return cls(**facts | {"model": ModelConfig(**facts["model"])})
