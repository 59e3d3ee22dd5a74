"""Tensor subclasses that store their values in a format of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch

import aiockpt


class Quantized(torch.Tensor):
    """Eight-bit values and a scale, as in quantized parameters of training libraries."""

    _levels: torch.Tensor
    _scale: float

    @staticmethod
    def __new__(cls, levels: torch.Tensor, scale: float) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=torch.float32, device=levels.device)
        made._levels, made._scale = levels, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} is not for quantized tensors")

    def dequantize(self) -> torch.Tensor:
        return self._levels.to(torch.float32) * self._scale


class Nested(Quantized):
    def dequantize(self) -> torch.Tensor:
        return Quantized(self._levels, self._scale)


def test_quantized_subclasses_are_saved_as_plain_values(tmp_path: Path) -> None:
    levels = torch.randint(-128, 128, (300, 7), dtype=torch.int8)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": Quantized(levels, 0.25), "plain": torch.arange(3.0)}, tmp_path / "c")
        state = ckpt.load(tmp_path / "c")
    assert type(state["w"]) is torch.Tensor
    assert torch.equal(state["w"], levels.float() * 0.25)
    assert torch.equal(state["plain"], torch.arange(3.0))


def test_a_dequantize_that_returns_no_plain_tensor_is_refused(tmp_path: Path) -> None:
    state = {"a": {"w": Nested(torch.ones(3, dtype=torch.int8), 1.0)}}
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.SaveError, match=r"a\.w is a Nested whose dequantize\(\) gave a Quantized"),
    ):
        ckpt.submit(state, tmp_path / "c")


class Large(Quantized):
    def dequantize(self) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")


def test_a_device_without_memory_for_the_plain_values_fails_the_call(tmp_path: Path) -> None:
    state = {"a": {"w": Large(torch.ones(3, dtype=torch.int8), 1.0)}}
    with (
        aiockpt.SyncCheckpointer() as ckpt,
        pytest.raises(aiockpt.SaveError, match=r"cpu has no memory for the plain values of a\.w, a Large"),
    ):
        ckpt.submit(state, tmp_path / "c")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch emits each of its warnings once a process
def test_torchs_own_quantized_tensors_stay_as_they_are(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(40), 0.1, 3, torch.qint8)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"w": quantized}, tmp_path / "c")
        found = ckpt.load(tmp_path / "c")["w"]
    assert found.is_quantized
    assert torch.equal(found.int_repr(), quantized.int_repr())
