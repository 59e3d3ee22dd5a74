"""A training program on the device: a transformer in bf16 with AdamW, with a state of a given size."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks.gpu.device import Device
from benchmarks.harness.states import State

# A parameter and AdamW's two moments, in fp32.
_BYTES_PER_PARAMETER = 12
_HEAD = 64
_STEP_S = 0.05
_MOST_SEQUENCES = 64


class Block(nn.Module):
    """A layer: attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a tensor of shape (batch, length, width) to one of the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, width // _HEAD, _HEAD)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model.

    Args:
        parameters: the approximate number of parameters.
    """

    def __init__(self, parameters: int) -> None:
        super().__init__()
        layers = 16 if parameters > 50_000_000 else 2
        width = max(_HEAD, int((parameters / (12 * layers)) ** 0.5) // _HEAD * _HEAD)
        self.words = max(64, min(32_768, (parameters - 12 * layers * width * width) // (2 * width)))
        self.embedding = nn.Embedding(self.words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next-token loss of tokens of shape (batch, length)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """A training program, and the state of its checkpoints.

    Args:
        device: the device that it runs on.
        nbytes: the approximate size of its state.

    Attributes:
        state: every parameter, and every tensor of the optimizer, in the same memory at each step.
        optimizer: AdamW, fused.
        step_s: the time of an undisturbed step.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        torch.manual_seed(0)
        with torch.device(device.type):
            self.model = Transformer(nbytes // _BYTES_PER_PARAMETER)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._choose_batch()
        self.state = self._state()

    def forward_backward(self) -> torch.Tensor:
        """Compute a loss and the gradients; on a GPU, only enqueue the work."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.model(self._tokens)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Run a whole step."""
        self.forward_backward()
        self.optimizer.step()

    def _choose_batch(self) -> None:
        """Choose a batch that keeps the device busy for 50 to 100 ms."""
        sequences, length = 1, 1024 if self.device.is_gpu else 16
        while True:
            self._tokens = torch.randint(self.model.words, (sequences, length), device=self.device.type)
            self.step()  # allocates, and chooses kernels
            self.step_s = self._time_steps(3)
            if not self.device.is_gpu or self.step_s >= _STEP_S or sequences >= _MOST_SEQUENCES:
                return
            sequences *= 2

    def _time_steps(self, count: int) -> float:
        self.device.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self.step()
        self.device.synchronize()
        return (time.perf_counter() - started) / count

    def _state(self) -> State:
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"optim.{number}.{name}": tensor for name, tensor in moments.items()}
        return state

    def describe(self) -> str:
        """Return a description of the model, its batch and the time of a step."""
        parameters = sum(each.numel() for each in self.model.parameters())
        batch = "x".join(map(str, self._tokens.shape))
        return f"{parameters / 1e6:.0f} M parameters, {batch} tokens, {self.step_s * 1e3:.0f} ms a step"
