"""Loads with options (keys, dtype, mmap, map_location), loads that fail half way, and cancelled loads."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.dcp.format_utils import convert_checkpoint
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import FaultyStorage
from tests.counting import CountingStorage
from tests.states import assert_same, large_state, random_tensor, training_state
from tests.stock import ALONE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


# --- keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_keys_by_name_container_and_pattern(stock: bool, ckpt, tmp_path: Path) -> None:
    state = {
        "model": {"a.weight": torch.ones(3), "a.bias": torch.zeros(2), "b.weight": torch.arange(4)},
        "optim": {"state": {"0": {"step": torch.tensor(7.0)}}, "lr": 0.1},
        "model_step": 5,
    }
    if stock:
        dcp.save(state, checkpoint_id=tmp_path / "c", **ALONE)
    else:
        ckpt.save(state, tmp_path / "c")
    load = lambda keys, **more: ckpt.load(tmp_path / "c", keys=keys, **more)  # noqa: E731
    assert_same({"model": state["model"]}, load("model"))
    assert_same({"optim": {"lr": 0.1}, "model_step": 5}, load(["model_step", "optim.lr"]))
    weights = {"a.weight": torch.ones(3), "b.weight": torch.arange(4)}
    assert_same({"model": weights}, load("*.weight"))
    assert_same({"model": {"a.bias": torch.zeros(2)}}, load(["model.?.bias"]))
    assert_same({"model": weights, "model_step": 5}, load(["model.[ab].w*", "*_step"]))
    with pytest.raises(aiockpt.MissingKeysError, match=r"no key that matches 'x\.\*', 'optim\.mom'") as caught:
        load(["model", "x.*", "optim.mom"])
    assert caught.value.keys == ("x.*", "optim.mom")
    assert_same({"model": state["model"]}, load(["model", "x.*"], strict=False))
    assert_same({}, load([]))
    with pytest.raises(TypeError, match="keys must be names and patterns"):
        load([5])


def test_key_with_pattern_characters_matches_itself(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a[0]": 1, "a0": 2, "b*": 3, "b*x": 4}, tmp_path / "c")
    assert ckpt.load(tmp_path / "c", keys="a[0]") == {"a[0]": 1}
    assert ckpt.load(tmp_path / "c", keys=["b*"]) == {"b*": 3}
    assert ckpt.load(tmp_path / "c", keys=["b?x"]) == {"b*x": 4}


def test_containers_of_selected_keys_keep_their_types(ckpt, tmp_path: Path) -> None:
    state = {
        "x": OrderedDict(a={1: torch.ones(1), 2: {}}, b=(torch.zeros(2), "t")),
        "y": {3: torch.ones(2), "z": {}},
        "last": OrderedDict(),
    }
    ckpt.save(state, tmp_path / "c")
    assert_same({"x": state["x"]}, ckpt.load(tmp_path / "c", keys="x"))
    assert_same({"y": {3: torch.ones(2), "z": {}}}, ckpt.load(tmp_path / "c", keys="y"))
    assert_same({"x": OrderedDict(b=(torch.zeros(2), "t"))}, ckpt.load(tmp_path / "c", keys="x.b"))


def test_only_the_bytes_of_selected_keys_are_read(ckpt, tmp_path: Path) -> None:
    ckpt.save(large_state(6, kib=2048), tmp_path / "c")
    storage = CountingStorage()
    loaded = ckpt.load(tmp_path / "c", keys=["w3"], storage=storage)
    assert_same({"w3": large_state(6, kib=2048)["w3"]}, loaded)
    assert sum(n for name, _, n in storage.reads if name.endswith(".distcp")) <= 1.01 * (2048 << 10)


def test_keys_of_a_target(ckpt, tmp_path: Path) -> None:
    ckpt.save({"m": {"a": torch.ones(3), "b": torch.ones(2)}, "n": 4}, tmp_path / "c")
    target = {"m": {"a": torch.zeros(3), "b": torch.zeros(2)}, "n": 0, "only mine": torch.zeros(1)}
    ckpt.load(tmp_path / "c", target, keys=["m.a", "n"])
    assert_same({"m": {"a": torch.ones(3), "b": torch.zeros(2)}, "n": 4, "only mine": torch.zeros(1)}, target)
    with pytest.raises(aiockpt.MissingKeysError, match="lacks 1 of the keys asked for: only mine"):
        ckpt.load(tmp_path / "c", target, keys=["only mine"])


# --- dtype --------------------------------------------------------------------------------------------


def test_dtype_casts_floating_point_only(ckpt, tmp_path: Path) -> None:
    state = {
        "large": torch.randn(700, 900),
        "moved": torch.randn(900, 700).t(),
        "small": torch.randn(5),
        "half": torch.randn(3).half(),
        "ints": torch.arange(400_000),
        "flags": torch.tensor([True, False]),
        "z": torch.randn(3, dtype=torch.complex64),
        "o": [1.5],
    }
    ckpt.save(state, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c", dtype=torch.bfloat16)
    expected = {k: v.bfloat16() if k in ("large", "moved", "small", "half") else v for k, v in state.items()}
    assert_same(expected, loaded)
    target = {"large": torch.zeros(900, 700, dtype=torch.float64).t(), "small": torch.zeros(5, dtype=torch.float64)}
    ckpt.load(tmp_path / "c", target, dtype=torch.float64)
    assert torch.equal(target["large"], state["large"].double())
    assert torch.equal(target["small"], state["small"].double())
    with pytest.raises(aiockpt.ShapeMismatchError, match=r'large is torch\.float64.*pass dtype="target"'):
        ckpt.load(tmp_path / "c", target)
    with pytest.raises(aiockpt.ShapeMismatchError, match=r"loaded as torch\.float16"):
        ckpt.load(tmp_path / "c", target, dtype=torch.float16)


def _optimized(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), foreach=False)


def _step(model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2, dtype=next(model.parameters()).dtype)).sum().backward()
    optim.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "target"])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("by_run", [False, True])
def test_numbers_of_steps_are_not_cast(dtype, stepped, by_run, tmp_path: Path) -> None:
    """In bfloat16, 257 is 256, and adding one leaves it so."""
    model, optim = _optimized(torch.float32)
    _step(model, optim)
    optim.state[model.weight]["step"].fill_(257)
    path = tmp_path / "run"
    with aiockpt.SyncCheckpointManager(path) as run:
        step = run.save(1, {"model": model, "optim": optim}).path
    fresh, other = _optimized(torch.bfloat16)
    if stepped:
        _step(fresh, other)
    target = {"model": fresh, "optim": other}
    if by_run:
        with aiockpt.SyncCheckpointManager(path, read_only=True) as run:
            run.restore(target, dtype=dtype)
    else:
        aiockpt.load(step, target, dtype=dtype)
    found = other.state[fresh.weight]
    assert (found["step"].dtype, found["step"].item()) == (torch.float32, 257)
    assert found["exp_avg"].dtype == torch.bfloat16
    assert other.param_groups[0]["lr"].dtype == torch.float32
    assert torch.equal(fresh.weight, model.weight.bfloat16())


def test_numbers_are_not_cast_where_there_is_no_target(ckpt, tmp_path: Path) -> None:
    ckpt.save({"step": torch.tensor(257.0), "w": torch.ones(3)}, tmp_path / "c")
    assert ckpt.load(tmp_path / "c", dtype=torch.bfloat16)["step"].item() == 257
    with ckpt.open(tmp_path / "c") as reader:
        assert reader.read("step", dtype=torch.bfloat16).item() == 257
        assert reader.read("w", 0, dtype=torch.bfloat16).dtype == torch.bfloat16  # an element of a tensor is cast
    convert_checkpoint(tmp_path / "c", tmp_path / "d", to="dcp", dtype=torch.bfloat16)
    converted = ckpt.load(tmp_path / "d")
    assert (converted["step"].item(), converted["w"].dtype) == (257, torch.bfloat16)


def test_a_scalar_parameter_is_cast_to_the_dtype_that_it_has(ckpt, tmp_path: Path) -> None:
    ckpt.save({"scale": torch.tensor(1.5)}, tmp_path / "c")
    target = {"scale": torch.tensor(0.0, dtype=torch.bfloat16)}
    with pytest.raises(aiockpt.ShapeMismatchError, match=r'pass dtype="target"'):
        ckpt.load(tmp_path / "c", target)
    for dtype in (torch.bfloat16, "target"):
        target["scale"].zero_()
        ckpt.load(tmp_path / "c", target, dtype=dtype)
        assert target["scale"].item() == 1.5


def test_a_target_of_several_dtypes(ckpt, tmp_path: Path) -> None:
    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))

    saved, fresh = make(), make()
    ckpt.save({"m": saved, "whole": torch.arange(3), "array": np.arange(3.0)}, tmp_path / "c")
    fresh[0].bfloat16()
    for dtype in (None, torch.bfloat16):
        with pytest.raises(aiockpt.ShapeMismatchError, match=r'pass dtype="target" to cast each tensor'):
            ckpt.load(tmp_path / "c", {"m": fresh}, dtype=dtype)
    target = {"m": fresh, "whole": torch.zeros(3, dtype=torch.int64), "array": np.zeros(3, "f4")}
    ckpt.load(tmp_path / "c", target, dtype="target")
    assert torch.equal(fresh[0].weight, saved[0].weight.bfloat16())
    assert torch.equal(fresh[1].weight, saved[1].weight)
    assert (target["array"].tolist(), target["array"].dtype) == ([0, 1, 2], np.float32)
    with pytest.raises(aiockpt.ShapeMismatchError, match=r"whole is torch.float32 in the target but torch.int64"):
        ckpt.load(tmp_path / "c", {"whole": torch.zeros(3)}, dtype="target")
    with pytest.raises(ValueError, match="state_dict"):
        ckpt.load(tmp_path / "c", dtype="target")


@pytest.mark.parametrize("dtype", [torch.int32, "float32", 5])
def test_dtype_must_be_a_floating_point_dtype(dtype, ckpt, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        ckpt.load(tmp_path / "c", dtype=dtype)


def test_tied_tensors_stay_tied_when_cast(ckpt, tmp_path: Path) -> None:
    weight = torch.randn(50, 40)
    ckpt.save({"a": weight, "b": weight}, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c", dtype=torch.float16)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert_same({"a": weight.half(), "b": weight.half()}, loaded)


# --- mmap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["ours", "stock", "torch"])
def test_mapped_tensors_are_copy_on_write(writer: str, ckpt, tmp_path: Path) -> None:
    state = {"model": dict(training_state()["model"]), "step": 2}
    state |= large_state(3) | {"t": random_tensor(torch.float64, (300, 500), 4).t()}
    path = tmp_path / "c"
    if writer == "ours":
        ckpt.save(state, path)
    elif writer == "stock":
        dcp.save(state, checkpoint_id=path, **ALONE)
    else:
        torch.save(state, path)
    before = {file: file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}
    storage = CountingStorage()
    loaded = ckpt.load(path, mmap=True, storage=storage)
    assert_same(state, loaded)
    assert not any(nbytes > 1 << 19 for _, _, nbytes in storage.reads)
    loaded["w1"][7] = -1
    loaded["t"].zero_()
    assert {file: file.read_bytes() for file in before} == before
    assert_same(state["w1"], ckpt.load(path, mmap=True)["w1"])
    assert loaded["w1"][7] == -1


def test_mapped_checkpoint_may_be_replaced(ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.full((500_000,), 1.0)}, tmp_path / "c")
    mapped = ckpt.load(tmp_path / "c", mmap=True)
    ckpt.save({"w": torch.full((500_000,), 2.0)}, tmp_path / "c", overwrite=True)
    assert mapped["w"].eq(1).all()
    assert ckpt.load(tmp_path / "c", mmap=True)["w"].eq(2).all()


def test_mmap_refuses_options_that_copy(ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3)}, tmp_path / "c")
    for more in ({"dtype": torch.float16}, {"map_location": "meta"}):
        with pytest.raises(ValueError, match="mmap=True returns tensors that are backed by the files"):
            ckpt.load(tmp_path / "c", mmap=True, **more)
    with pytest.raises(ValueError, match="not for a state_dict"):
        ckpt.load(tmp_path / "c", {"w": torch.zeros(3)}, mmap=True)


@pytest.mark.parametrize("where", ["cuda:77", "xpu", torch.device("cuda:99")])
def test_unavailable_devices_are_refused(where, ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(ValueError, match="tensors can't be put on"):
        ckpt.load(tmp_path / "c", map_location=where)
    with ckpt.open(tmp_path / "c") as reader, pytest.raises(ValueError, match="tensors can't be put on"):
        reader.read("w", device=where)
    with pytest.raises(TypeError, match="map_location must be"):
        ckpt.load(tmp_path / "c", map_location=5)


# --- failures -----------------------------------------------------------------------------------------


def _damage(path: Path, reader: aiockpt.SyncCheckpointReader, key: str) -> None:
    chunk = reader[key].chunks[0]
    with open(path / chunk.file, "r+b") as file:
        file.seek(chunk.offset + chunk.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_failed_load_lists_filled_tensors(stock: bool, tmp_path: Path) -> None:
    """Both threads read in file order, so some tensors are filled before the damage is found."""
    state = large_state(6, kib=2048) | {"small": torch.arange(5), "note": "new"}
    path = tmp_path / "c"
    with aiockpt.SyncCheckpointer(io_threads=1) as ckpt:
        if stock:
            dcp.save(state, checkpoint_id=path, **ALONE)
        else:
            ckpt.save(state, path)
        with ckpt.open(path) as reader:
            _damage(path, reader, "w2")
        target = {name: torch.zeros_like(tensor) for name, tensor in large_state(6, kib=2048).items()}
        target |= {"small": torch.zeros(5, dtype=torch.int64), "note": "old"}
        with pytest.raises(aiockpt.CorruptCheckpointError, match="the bytes of w2") as caught:
            ckpt.load(path, target)
    error = caught.value
    assert "w2" in error.partly_placed
    assert "small" in error.placed
    assert f"{len(error.partly_placed)} hold a part of it" in str(error)
    assert f"{len(error.placed)} had been filled" in str(error)
    for name in error.placed:
        assert torch.equal(target[name], state[name])
    untouched = {f"w{i}" for i in range(6)} - {*error.placed, *error.partly_placed}
    assert all(not target[name].any() for name in untouched)
    assert target["note"] == "old"


@pytest.mark.parametrize(("count", "dtype"), [(7, None), (1 << 20, torch.float64)], ids=["small", "converted"])
def test_tensor_with_a_wrong_crc_is_not_placed(count: int, dtype: torch.dtype | None, ckpt, tmp_path: Path) -> None:
    """Small and converted tensors are read through a buffer, which is checked before it is copied."""
    state = {"a": torch.arange(1, 6), "b": torch.full((count,), 7.25)}
    ckpt.save(state, tmp_path / "c")
    (file,) = (each for each in (tmp_path / "c").glob("*.distcp") if b"\0\0\xe8\x40" * 7 in each.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(b"\0\0\xe8\x40" * 7) + 9] ^= 1
    file.write_bytes(data)
    target = {"a": torch.zeros(5, dtype=torch.int64), "b": torch.zeros(count, dtype=dtype)}
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"the bytes of b .* do not match their CRC") as caught:
        ckpt.load(tmp_path / "c", target, dtype=dtype)
    assert not target["b"].any()
    assert "b" not in caught.value.placed + caught.value.partly_placed
    assert ("a" in caught.value.placed) == bool(target["a"].any())


@pytest.mark.parametrize(("count", "dtype"), [(7, None), (1 << 20, torch.float64)], ids=["small", "converted"])
def test_target_freed_during_the_load_is_not_written(
    count: int, dtype: torch.dtype | None, ckpt, tmp_path: Path
) -> None:
    target = torch.zeros(count, dtype=dtype)

    class Freeing(CountingStorage):
        def before_read(self, name: str, offset: int, nbytes: int) -> None:
            if name.endswith(".distcp") and nbytes >= target.numel():
                target.untyped_storage().resize_(0)

    ckpt.save({"w": torch.ones(count)}, tmp_path / "c")
    with pytest.raises(aiockpt.ShapeMismatchError, match="w in the target was freed") as caught:
        ckpt.load(tmp_path / "c", {"w": target}, dtype=dtype, storage=Freeing())
    assert caught.value.placed == caught.value.partly_placed == ()


def test_objects_and_framing_are_checked_before_tensors_are_filled(ckpt, tmp_path: Path) -> None:
    """Damaged objects and damaged framing leave every tensor of the target as it is."""
    state = large_state(3, kib=2048) | {"small": torch.arange(5), "o": {"k": [1, 2]}}
    for broken in ("o.k", "w1"):
        path = tmp_path / broken
        dcp.save(state, checkpoint_id=path, **ALONE)
        with ckpt.open(path) as reader:
            info = reader[broken]
            file, offset = (info.file, info.offset) if broken == "o.k" else (info.file, info.chunks[0].offset)
        with open(path / file, "r+b") as opened:
            opened.seek(offset + 60)
            opened.write(b"\xff" * 400)
        target = {name: torch.zeros_like(tensor) for name, tensor in large_state(3, kib=2048).items()}
        target |= {"small": torch.zeros(5, dtype=torch.int64), "o": {"k": None}}
        with pytest.raises(aiockpt.CorruptCheckpointError, match=broken):
            ckpt.load(path, target)
        assert not any(target[name].any() for name in ("w0", "w1", "w2", "small"))
        assert target["o"] == {"k": None}


def test_disk_read_errors(ckpt, tmp_path: Path) -> None:
    state = large_state(4, kib=2048)
    ckpt.save(state, tmp_path / "c")
    for nth in range(1, 6):
        storage = FaultyStorage(LocalStorage(), "read", OSError(5, "Input/output error"), nth=nth)
        with pytest.raises(aiockpt.LoadError, match="Input/output error") as caught:
            ckpt.load(tmp_path / "c", storage=storage)
        assert isinstance(caught.value.__cause__, OSError)
    assert_same(state, ckpt.load(tmp_path / "c"))


# --- cancellation -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("moment", range(1, 14, 2))
async def test_load_cancelled_at_any_read_stops(moment: int, tmp_path: Path) -> None:
    state = large_state(12, kib=2048)
    loop = asyncio.get_running_loop()

    class Cancelling(CountingStorage):
        def before_read(self, name: str, offset: int, nbytes: int) -> None:
            super().before_read(name, offset, nbytes)
            if len(self.reads) == moment:
                loop.call_soon_threadsafe(task.cancel)

    storage = Cancelling()
    async with aiockpt.AsyncCheckpointer(io_threads=2) as ckpt:
        await ckpt.save(state, tmp_path / "c")
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        task = asyncio.ensure_future(ckpt.load(tmp_path / "c", target, storage=storage))
        while not task.done():  # however often it is cancelled, it waits for its threads
            await asyncio.wait([task], timeout=0.001)
            task.cancel()
        assert task.cancelled()
        assert len(storage.reads) <= moment + 6  # one more read for each thread, and those that had begun
        reads, before = len(storage.reads), {name: tensor.clone() for name, tensor in target.items()}
        assert_same(state, await ckpt.load(tmp_path / "c"))
        assert len(storage.reads) == reads
        assert_same(before, target)


def test_ctrl_c_waits_for_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After KeyboardInterrupt, no thread writes to the caller's tensors."""
    state = large_state(12, kib=2048)
    interrupted = threading.Event()

    class Interrupting(CountingStorage):
        def before_read(self, name: str, offset: int, nbytes: int) -> None:
            super().before_read(name, offset, nbytes)
            if len(self.reads) == 4:
                signal.pthread_kill(main, signal.SIGINT)
            elif len(self.reads) > 4:
                interrupted.wait(0.3)  # reads that last until long after the signal

    main = threading.main_thread().ident
    with aiockpt.SyncCheckpointer(io_threads=2) as ckpt:
        ckpt.save(state, tmp_path / "c")
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        with pytest.raises(KeyboardInterrupt):
            ckpt.load(tmp_path / "c", target, storage=Interrupting())
        interrupted.set()
        for tensor in target.values():
            tensor.fill_(-7)
        ckpt.load(tmp_path / "c")
        assert all(tensor.eq(-7).all() for tensor in target.values())


def test_failed_read_into_out_names_the_partly_filled_tensor(ckpt, tmp_path: Path) -> None:
    ckpt.save(large_state(2, kib=40_000), tmp_path / "c")
    with ckpt.open(tmp_path / "c") as reader:
        _damage(tmp_path / "c", reader, "w1")
        out = torch.zeros(40_000 * 256, dtype=torch.int32)
        with pytest.raises(aiockpt.CorruptCheckpointError, match="1 hold a part of it") as caught:
            reader.read("w1", out=out)
        assert caught.value.partly_placed == ("w1",)
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"Use an older checkpoint\.$"):
            reader.read("w1")


def test_unsupported_targets_are_refused(ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3, 4)}, tmp_path / "c")
    lazy = torch.nn.LazyLinear(3).weight
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(3, 4)
    for wrong, message in (
        (lazy, "w is not initialised"),
        (nested, "w is a nested tensor"),
        (fake, "w is a FakeTensor"),
    ):
        with pytest.raises(aiockpt.ShapeMismatchError, match=message):
            ckpt.load(tmp_path / "c", {"w": wrong})


def test_map_location_function_must_return_a_storage(ckpt, tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(3, 4)}, tmp_path / "c")
    with pytest.raises(TypeError, match="map_location gave a int"):
        ckpt.load(tmp_path / "c", map_location=lambda storage, where: 5)
