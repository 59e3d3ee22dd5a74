"""A small GPT over bytes, its text and its training state."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import aiockpt

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The shape of the model, and one run of the training loop."""

    layers: int = 4
    width: int = 384  # of the residual stream
    heads: int = 4  # of attention; divides the width
    context: int = 128  # bytes per sequence
    batch: int = 4
    dropout: float = 0.1  # makes every step draw random numbers
    learning_rate: float = 3e-4
    steps: int = 32
    every: int = 8  # steps between two checkpoints
    seed: int = 0  # of the weights, the dropout and the choice of text
    device: str = "cpu"
    rng: bool = True  # restore the saved random-number states when resuming


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next byte; input and output embeddings are the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(config.context, width)
        block = nn.TransformerEncoderLayer(
            width, config.heads, 4 * width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) bytes to (batch, length, 256) logits."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        with sdpa_kernel(SDPBackend.MATH):  # the gradients of the fused kernels are not reproducible on every device
            x = self.blocks(x, mask, is_causal=True)
        return functional.linear(x, self.tokens.weight)


class Trainer:
    """A model in training, and everything that its next step depends on."""

    def __init__(self, config: Config) -> None:
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
            seed_generator(config.seed)
        self.config = config
        self.device = torch.device(config.device)
        self.model = GPT(config).to(self.device)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        sources = sorted(Path(aiockpt.__file__).parent.rglob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, sources))), dtype=torch.uint8)
        self.choice = torch.Generator().manual_seed(config.seed)  # of windows of the text
        self.step = 0  # how many steps are done
        self.losses = torch.full((config.steps,), torch.nan, dtype=torch.float64)  # NaN for the steps to come

    def forward_backward(self) -> float:
        """Compute the gradients of the next batch and return the loss; weights and optimizer stay unchanged."""
        batch, context = self.config.batch, self.config.context
        starts = torch.randint(len(self.text) - context, (batch, 1), generator=self.choice)
        windows = self.text[starts + torch.arange(context + 1)].long().to(self.device)
        self.optim.zero_grad()
        loss = functional.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
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
            "rng": {"global": aiockpt.RngState(), "text": self.choice.get_state()},
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a loaded `state`: the load has filled all but the step, and the state of our own generator.

        If the state has no ``rng``, the next steps differ from those of a run without interruption.
        """
        self.step = state["step"]
        if "rng" in state:
            self.choice.set_state(state["rng"]["text"])
