"""Tensor subclasses that store their values in a format of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp import FileSystemReader, FileSystemWriter


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


class Encoding(Quantized):
    """Encodes what is copied to it, in steps of its scale."""

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["_levels"], self._scale

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], scale: float, size: Any, stride: Any) -> Self:
        return cls(inner["_levels"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Encoding):
            source = args[1].dequantize() if isinstance(args[1], Quantized) else args[1]
            args[0]._levels.copy_((source / args[0]._scale).round().to(torch.int8))
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0]._levels, args[0]._scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Stubborn(Encoding):
    """Takes no plain values, as most classes of quantized weights do not."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            raise AttributeError("'Tensor' object has no attribute 'qdata'")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Hidden(Stubborn):
    """Can't be copied either, so that it can't be tried."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


def _with_encoded(kind: type[Quantized]) -> torch.nn.ModuleList:
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    levels = torch.randint(-128, 128, (2, 2), dtype=torch.int8)
    layers[1].weight = torch.nn.Parameter(kind(levels, 0.25), requires_grad=False)
    return layers


@pytest.mark.filterwarnings("ignore::aiockpt.DequantizedWarning")
def test_a_module_encodes_the_plain_values_again(tmp_path: Path) -> None:
    saved, fresh = _with_encoded(Encoding), _with_encoded(Encoding)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"m": saved}, tmp_path / "c")
        ckpt.load(tmp_path / "c", {"m": fresh})
    assert type(fresh[1].weight.data) is Encoding or isinstance(fresh[1].weight, Encoding)
    assert torch.equal(fresh[1].weight._levels, saved[1].weight._levels)
    assert torch.equal(fresh[0].weight, saved[0].weight)


@pytest.mark.filterwarnings("ignore::aiockpt.DequantizedWarning")
@pytest.mark.parametrize(("kind", "error"), [(Stubborn, aiockpt.ShapeMismatchError), (Hidden, aiockpt.LoadError)])
def test_a_module_that_takes_no_plain_values_stays_as_it_is(kind, error, tmp_path: Path) -> None:
    saved, fresh = _with_encoded(Encoding), _with_encoded(kind)
    before = fresh[0].weight.clone(), fresh[1].weight._levels.clone()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"m": saved}, tmp_path / "c")
        with pytest.raises(error, match=r"no attribute 'qdata'") as caught:
            ckpt.load(tmp_path / "c", {"m": fresh})
    assert caught.value.placed == ()  # what torch's own loading did before it failed is not ours
    if kind is Stubborn:
        assert torch.equal(fresh[0].weight, before[0])
        assert torch.equal(fresh[1].weight._levels, before[1])


@pytest.mark.filterwarnings("ignore::aiockpt.DequantizedWarning")
def test_an_optimizer_keeps_the_encoding_of_its_state(tmp_path: Path) -> None:
    def make() -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([parameter])
        levels = torch.randint(-128, 128, (4,), dtype=torch.int8)
        optimizer.state[parameter]["momentum"] = Encoding(levels, 0.5)
        return optimizer

    saved, fresh = make(), make()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"o": saved}, tmp_path / "c")
        ckpt.load(tmp_path / "c", {"o": fresh})
    found = fresh.state_dict()["state"][0]["momentum"]
    assert type(found) is Encoding
    assert torch.equal(found._levels, saved.state_dict()["state"][0]["momentum"]._levels)


def test_an_encoded_tensor_is_no_target_by_itself(tmp_path: Path) -> None:
    plain = torch.zeros(2)
    target = {"a": plain, "w": Encoding(torch.ones(2, dtype=torch.int8), 1.0)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": torch.ones(2), "w": torch.ones(2)}, tmp_path / "c")
        with pytest.raises(
            aiockpt.ShapeMismatchError, match=r"w is an Encoding in the target.*put the module or optim"
        ):
            ckpt.load(tmp_path / "c", target)
    assert torch.equal(plain, torch.zeros(2))


class Nested(Quantized):
    def dequantize(self) -> torch.Tensor:
        return Quantized(self._levels, self._scale)


def test_quantized_subclasses_are_saved_as_plain_values(tmp_path: Path) -> None:
    levels = torch.randint(-128, 128, (300, 7), dtype=torch.int8)
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.warns(aiockpt.DequantizedWarning, match=r"^w is a Quantized: .* plain tensor comes back"):
            ckpt.save({"w": Quantized(levels, 0.25), "plain": torch.arange(3.0)}, tmp_path / "c")
        ckpt.save({"w": Quantized(levels, 0.25)}, tmp_path / "again")  # once for each class
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


# --- by the adapters of torch.distributed.checkpoint --------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_adapters_warn_of_them_too(tmp_path: Path) -> None:
    levels = torch.arange(6, dtype=torch.int8)
    with pytest.warns(aiockpt.DequantizedWarning, match="w is an Encoding"):
        dcp.save({"w": Encoding(levels, 0.5)}, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    target = {"w": torch.zeros(6)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(target["w"], levels * 0.5)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_item_that_torch_has_pickled_is_not_called_damaged(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "w": Encoding(torch.arange(6, dtype=torch.int8), 0.5)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(aiockpt.LoadError, match=r"w can't be loaded here: .* subclass\. It is not damaged") as caught:
        aiockpt.load(tmp_path / "c")
    assert not isinstance(caught.value, aiockpt.CorruptCheckpointError)
    assert torch.equal(aiockpt.load(tmp_path / "c", keys="a")["a"], torch.arange(3.0))
    with pytest.raises(dcp.api.CheckpointException, match="It is not damaged"):
        dcp.load({"w": torch.zeros(6)}, storage_reader=FileSystemReader(tmp_path / "c"), no_dist=True)
    assert aiockpt.verify(tmp_path / "c").ok


class Tagged(torch.Tensor):
    """A tensor with a name of its own, and no encoding."""


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FileSystemWriter])
@pytest.mark.parametrize("trust", [False, True])
def test_dcp_load_fills_tensors_of_a_subclass_by_permission(tmp_path: Path, writer: Any, trust: bool) -> None:
    def saved() -> None:
        dcp.save(
            {"a": torch.ones(2), "w": torch.arange(4.0).as_subclass(Tagged)}, storage_writer=writer(tmp_path / "c")
        )

    if writer is FileSystemWriter:
        with pytest.warns(aiockpt.SafeGlobalsWarning, match="Tagged"):
            saved()
    else:
        saved()
    target = {"a": torch.zeros(2), "w": torch.zeros(4).as_subclass(Tagged)}
    with pytest.raises(dcp.api.CheckpointException, match=r"pass safe_globals=\[.*Tagged"):
        dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    assert not target["a"].any()
    permission: Any = {"trust": True} if trust else {"safe_globals": [Tagged]}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "c", **permission))
    assert target["w"].tolist() == [0, 1, 2, 3]
    assert target["a"].all()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_load_fills_encoded_tensors_or_leaves_all_as_they_are(tmp_path: Path) -> None:
    levels = torch.arange(6, dtype=torch.int8)
    dcp.save({"a": torch.ones(2), "w": Encoding(levels, 0.5)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.warns(aiockpt.DequantizedWarning):
        dcp.save({"a": torch.ones(2), "w": Encoding(levels, 0.5)}, storage_writer=FileSystemWriter(tmp_path / "ours"))
    for name in ("stock", "ours"):
        target: dict[str, torch.Tensor] = {"a": torch.zeros(2), "w": Encoding(torch.zeros_like(levels), 0.25)}
        reader = FileSystemReader(tmp_path / name, safe_globals=[Encoding])
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["w"].dequantize(), levels * 0.5)
        stubborn: dict[str, torch.Tensor] = {"a": torch.zeros(2), "w": Stubborn(torch.zeros_like(levels), 0.5)}
        with pytest.raises(dcp.api.CheckpointException, match=r"w is a Stubborn in the target, which does not take"):
            dcp.load(stubborn, storage_reader=reader)
        assert not stubborn["a"].any()
