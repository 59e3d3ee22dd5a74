"""The configuration of a demo process, passed on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from aiockpt.core.machine import cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of the model and of its batches."""

    layers: int = 4
    width: int = 384  # of the residual stream
    heads: int = 4  # of attention; divides the width
    context: int = 128  # bytes per sequence
    batch: int = 4
    dropout: float = 0.1  # makes every step draw random numbers
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of the training loop."""

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 32
    every: int = 8  # steps between two checkpoints
    seed: int = 0  # of the weights, the dropout and the choice of text
    device: str = "cpu"
    threads: int = field(default_factory=lambda: min(cores(), 8))  # results depend on their number
    torch_save: bool = False  # save with torch.save instead, for comparison
    rng: bool = True  # restore the saved random-number states when resuming
    directory: str = ""  # of the checkpoints, also of the one to resume from

    def to_json(self) -> str:
        """Return the configuration as JSON, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Return the configuration of a command line."""
        facts: dict[str, Any] = json.loads(text)
        return cls(**facts | {"model": ModelConfig(**facts["model"])})
