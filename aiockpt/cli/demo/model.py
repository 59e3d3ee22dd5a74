"""A small GPT over bytes, its text and its training state."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import aiockpt
from aiockpt.cli.demo.config import ModelConfig

VOCABULARY = 256
TEXT_BYTES = 4 << 20


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised first and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        attended: Tensor = x + self.dropout(self.attend(self.attention_norm(x)))
        fed: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return fed

    def attend(self, x: Tensor) -> Tensor:
        """Apply causal self-attention: (batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        # Written out: the fused kernels' gradients are not reproducible on every device.
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed: Tensor = self.projection((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return mixed


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next byte; input and output embeddings are the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) bytes to (batch, length, 256) logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Text:
    """The sources of Python's standard library, as random windows of bytes."""

    def __init__(self, seed: int) -> None:
        self.bytes = torch.frombuffer(bytearray(standard_library(TEXT_BYTES)), dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Draw windows, and the same windows one byte later; each (batch, context), int64."""
        starts = torch.randint(len(self.bytes) - context, (batch, 1), generator=self.generator)
        windows = self.bytes[starts + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def standard_library(most_bytes: int) -> bytes:
    """Read the top-level modules of Python's standard library, in the order of their names.

    Raises:
        FileNotFoundError: this Python comes without the sources of its library.
    """
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:most_bytes]
    if len(text) < 1 << 16:
        raise FileNotFoundError(f"too few Python sources in {sysconfig.get_paths()['stdlib']} to train on")
    return text


class Trainer:
    """A model in training, and everything that its next step depends on."""

    def __init__(self, config: ModelConfig, *, steps: int, seed: int, device: str) -> None:
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
            seed_generator(seed)
        self.config = config
        self.device = torch.device(device)
        self.model = GPT(config).to(self.device)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.text = Text(seed)
        self.step = 0  # how many steps are done
        self.losses = torch.full((steps,), torch.nan, dtype=torch.float64)  # NaN for the steps to come

    def forward_backward(self) -> float:
        """Compute the gradients of the next batch and return the loss; weights and optimizer stay unchanged."""
        inputs, targets = (part.to(self.device) for part in self.text.batch(self.config.batch, self.config.context))
        self.optim.zero_grad()
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def update(self, loss: float) -> None:
        """Update the weights, which ends the step."""
        self.optim.step()
        self.losses[self.step] = loss
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on: to save, or to load into."""
        return {
            "model": self.model,
            "optim": self.optim,
            "step": self.step,
            "losses": self.losses,
            "rng": {"global": aiockpt.RngState(), "text": self.text.generator.get_state()},
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a loaded `state`: the load has filled all but the step, and the state of our own generator.

        If the state has no ``rng``, the next steps differ from those of a run without interruption.
        """
        self.step = state["step"]
        if "rng" in state:
            self.text.generator.set_state(state["rng"]["text"])
