"""Live objects: modules, optimizers, schedulers and other objects with a state dict, saved and loaded directly."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import aiockpt
from tests.states import assert_same
from tests.stock import ALONE

# These warnings occur with torch 2.6; the first comes from SequentialLR itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter:UserWarning",
    "ignore:torch.distributed is unavailable or uninitialized:UserWarning",  # this and the next from stock DCP
    "ignore:TypedStorage is deprecated:UserWarning",
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "stateless": lambda p: torch.optim.SGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
    "adafactor": torch.optim.Adafactor,
}


class Net(nn.Module):
    """A model with tied weights, statistics, and extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(torch.relu(self.norm(self.first(x))))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Run:
    """A model in training, and everything that its next step depends on."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optim = OPTIMIZERS[optimizer](self.model.parameters())
        self.ema = swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0 * seed)
        self.schedulers: list[Any] = []
        if optimizer not in ("lbfgs", "tensor-lr"):
            self.schedulers = [
                lr_scheduler.ReduceLROnPlateau(self.optim, patience=0),
                lr_scheduler.SequentialLR(
                    self.optim,
                    [lr_scheduler.ConstantLR(self.optim, total_iters=2), lr_scheduler.CosineAnnealingLR(self.optim, 9)],
                    [2],
                ),
            ]

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optim": self.optim,
            "more": [self.ema, {"scaler": (self.scaler, 7)}],
            "schedulers": self.schedulers,
        }

    def dicts(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optim": self.optim.state_dict(),
            "more": [self.ema.state_dict(), {"scaler": (self.scaler.state_dict(), 7)}],
            "schedulers": [each.state_dict() for each in self.schedulers],
        }

    def train(self, steps: range) -> list[float]:
        losses: list[float] = []
        for step in steps:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                self.optim.zero_grad()
                loss = (self.model(x) - x).square().mean()
                loss.backward()
                return loss

            loss = self.optim.step(closure).item()
            for scheduler in self.schedulers:
                scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            self.ema.update_parameters(self.model)
            losses.append(loss)
        return losses


class Counter:
    """Records the thread of each call."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.threads: list[tuple[str, int]] = []

    def state_dict(self) -> dict[str, Any]:
        self.threads.append(("state_dict", threading.get_ident()))
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.threads.append(("load_state_dict", threading.get_ident()))
        self.count = state["count"]


class Whole:
    """An object with any state; records what it is given to load."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.given: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.given = state


class Broken(Whole):
    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("it does not fit")


# --- resuming a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_resumed_training_is_bitwise_identical(ckpt, tmp_path: Path, optimizer: str) -> None:
    run = Run(optimizer, seed=1)
    run.train(range(3))
    ckpt.save({**run.objects(), "step": 3}, tmp_path / "objects")
    ckpt.save({**run.dicts(), "step": 3}, tmp_path / "dicts")
    torch.save({**run.dicts(), "step": 3}, tmp_path / "file.pt")
    stock = {**run.dicts(), "step": 3}
    stock["more"][1]["scaler"] = list(stock["more"][1]["scaler"])  # DCP does not flatten tuples
    dcp.save(stock, checkpoint_id=tmp_path / "stock", **ALONE)
    expected = run.train(range(3, 6))
    for name in ("objects", "dicts", "file.pt", "stock"):
        for stepped in (False, True):
            other = Run(optimizer, seed=2)
            if stepped:
                other.train(range(10, 12))
            target = {**other.objects(), "step": 0}
            assert ckpt.load(tmp_path / name, target) is target
            assert target["model"] is other.model
            assert target["more"][1]["scaler"] == (other.scaler, 7)
            assert other.train(range(target["step"], 6)) == expected
            assert other.model.first.weight is other.model.last.weight
            for mine, theirs in ((run.ema, other.ema), (run.model, other.model)):
                assert_same(mine.state_dict(), theirs.state_dict())
            assert_same(run.dicts(), other.dicts())


def test_saved_objects_load_as_dicts(ckpt, tmp_path: Path) -> None:
    run = Run("adam", seed=1)
    run.train(range(2))
    ckpt.save(run.objects(), tmp_path / "c")
    everything = ckpt.load(tmp_path / "c")
    assert_same(run.dicts(), everything)
    assert set(everything["optim"]["state"]) == set(range(5))
    assert everything["model"]._metadata["norm"] == {"version": 2}
    other = Run("adam", seed=2).dicts()
    ckpt.load(tmp_path / "c", other)
    assert_same(run.dicts(), other)


def test_a_model_by_itself(ckpt, tmp_path: Path) -> None:
    model, other = Net(), Net()
    ckpt.save(model, tmp_path / "c")
    assert ckpt.load(tmp_path / "c", other) is other
    assert_same(model.state_dict(), other.state_dict())
    plain, again = nn.Linear(3, 3), nn.Linear(3, 3)
    ckpt.save(plain, tmp_path / "m.safetensors", format="safetensors")
    ckpt.load(tmp_path / "m.safetensors", again)
    assert torch.equal(plain.weight, again.weight)
    with pytest.raises(aiockpt.SaveError, match=r"optim\.param_groups\.0\.lr"):
        optim = torch.optim.SGD(plain.parameters(), lr=0.1)
        ckpt.save({"model": plain, "optim": optim}, tmp_path / "s", format="safetensors")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_wrapped_models(ckpt, tmp_path: Path) -> None:
    """A compiled module's keys have a prefix, when saved and when loaded; its parameters are filled in place."""
    compiled, other = torch.compile(Net()), torch.compile(Net())
    ckpt.save({"model": compiled}, tmp_path / "c")
    pointer = other.first.weight.data_ptr()
    ckpt.load(tmp_path / "c", {"model": other})
    assert_same(compiled.state_dict(), other.state_dict())
    assert other.first.weight.data_ptr() == pointer


# --- threads and times of the calls -------------------------------------------------------------------


def test_state_dict_methods_run_in_the_calling_thread(ckpt, tmp_path: Path) -> None:
    counter, other = Counter(5), Counter()
    ckpt.save({"a": counter, "b": [counter]}, tmp_path / "c")  # the same object twice: one call
    assert counter.threads == [("state_dict", threading.get_ident())]
    ckpt.load(tmp_path / "c", {"a": other, "b": [other]})
    loads = ["load_state_dict"] * 2  # as by hand: one for each name
    assert other.threads == [(name, threading.get_ident()) for name in ("state_dict", *loads)]
    assert other.count == 5


@pytest.mark.asyncio
async def test_state_dict_methods_run_in_the_callers_task(tmp_path: Path) -> None:
    class Task(Counter):
        def state_dict(self) -> dict[str, Any]:
            self.task = asyncio.current_task()
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert asyncio.current_task() is self.task
            super().load_state_dict(state)

    other = Task()
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"a": Counter(5)}, tmp_path / "c")
        await ckpt.load(tmp_path / "c", {"a": other})
    assert other.count == 5
    assert other.task is asyncio.current_task()


def test_the_state_at_the_call_is_saved(ckpt, tmp_path: Path) -> None:
    counter, model = Counter(1), nn.Linear(300, 300)
    with ckpt.guard(torch.optim.SGD(model.parameters(), lr=0.1)):
        ckpt.prewarm({"model": model, "counter": counter})
        save = ckpt.submit({"model": model, "counter": counter}, tmp_path / "c", validate="hash")
        counter.count = 2
        save.written.result()
    assert ckpt.load(tmp_path / "c")["counter"] == {"count": 1}


def test_inner_objects_are_loaded_first(ckpt, tmp_path: Path) -> None:
    order: list[str] = []

    class Outer:
        def __init__(self, count: int) -> None:
            self.inner = Counter(count)

        def state_dict(self) -> dict[str, Any]:
            return {"inner": self.inner, "own": [{"more": self.inner}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.extend(name for name, _ in self.inner.threads)
            assert state == {"inner": {"count": 8}, "own": [{"more": {"count": 8}}]}

    outer = Outer(0)
    ckpt.save({"outer": Outer(8)}, tmp_path / "c")
    ckpt.load(tmp_path / "c", {"outer": outer})
    assert order == ["state_dict", "load_state_dict", "load_state_dict"]  # one for each key
    assert outer.inner.count == 8


def test_a_state_that_holds_itself_is_refused(ckpt, tmp_path: Path) -> None:
    whole = Whole({})
    whole.state = {"me": whole}
    with pytest.raises(aiockpt.SaveError, match=r"a\.me \(Whole\) is part of its own state_dict\(\)"):
        ckpt.save({"a": whole}, tmp_path / "c")
    loop: list[Any] = [Whole({})]
    loop.append(loop)
    with pytest.raises(aiockpt.SaveError, match="nested too deeply, or holds itself"):
        ckpt.save({"a": loop}, tmp_path / "c")


class Pair(NamedTuple):
    model: Any
    step: int = 1


@dataclasses.dataclass(slots=True)
class Holder:
    model: Any
    itself: Any = None


@pytest.mark.parametrize(
    "holds",
    [
        Pair,
        Holder,
        lambda model: [(Pair([model]),)],
        lambda model: deque([1, model]),
        lambda model: {"model": {model}},
        lambda model: SimpleNamespace(model={"a": model}),
        lambda model: argparse.Namespace(model=model),
        lambda model: Holder(1, Holder(2, Pair({"a": [model]}))),
    ],
)
def test_objects_that_would_be_pickled_are_refused(ckpt, tmp_path: Path, holds: Callable[[Any], Any]) -> None:
    """Only dicts, lists and tuples are flattened."""
    model = nn.Linear(2, 2)
    with pytest.raises(
        aiockpt.SaveError, match=r"x\S* is a \w+ with a Linear in it, which would be pickled as a whole"
    ):
        ckpt.save({"x": holds(model), "y": 1}, tmp_path / "c")
    assert not list(tmp_path.iterdir())
    ckpt.save({"x": {"model": model}, "y": 1}, tmp_path / "c")
    with pytest.raises(aiockpt.LoadError, match=r"x\S* is a \w+ with a Linear in it"):
        ckpt.load(tmp_path / "c", {"x": holds(model), "y": 2})


@pytest.mark.filterwarnings("ignore::aiockpt.SafeGlobalsWarning")
def test_containers_without_live_objects_are_pickled(ckpt, tmp_path: Path) -> None:
    circle = Holder(1)
    circle.itself = Pair(circle)
    ckpt.save({"x": circle, "size": torch.Size([2, 3])}, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c", trust=True)
    assert loaded["x"].itself.model is loaded["x"]
    assert loaded["size"] == (2, 3)


def test_with_a_writer_process(tmp_path: Path) -> None:
    run, other = Run("adam", seed=1), Run("adam", seed=2)
    run.train(range(2))
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        ckpt.save(run.objects(), tmp_path / "c")
        ckpt.load(tmp_path / "c", other.objects())
    assert_same(run.dicts(), other.dicts())


# --- errors ---------------------------------------------------------------------------------------------


def test_a_state_dict_that_fails(ckpt, tmp_path: Path) -> None:
    class Failing(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state today")

    text = r"state_dict\(\) of a\.1 \(Failing\) failed: ValueError: no state today"
    with pytest.raises(aiockpt.SaveError, match=text) as caught:
        ckpt.save({"a": [1, Failing()]}, tmp_path / "c")
    assert isinstance(caught.value.__cause__, ValueError)
    ckpt.save({"a": [1, Counter(3)]}, tmp_path / "c")
    with pytest.raises(aiockpt.LoadError, match=text) as refused:
        ckpt.load(tmp_path / "c", {"a": [1, Failing()]})
    assert isinstance(refused.value.__cause__, ValueError)


def test_a_load_state_dict_that_fails(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": Counter(1), "b": Whole({"x": 1}), "c": Counter(3)}, tmp_path / "c")
    first, last = Counter(), Counter()
    with pytest.raises(
        aiockpt.LoadError,
        match=r"load_state_dict\(\) of b \(Broken\) failed: RuntimeError: it does not fit; a had been",
    ) as caught:
        ckpt.load(tmp_path / "c", {"a": first, "b": Broken({"x": 0}), "c": last})
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (first.count, last.count) == (1, 0)


def test_asynchronous_methods_are_refused(ckpt, tmp_path: Path) -> None:
    class Later(Counter):
        async def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {}

    class LoadsLater(Counter):
        async def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
            pass

    with pytest.raises(aiockpt.SaveError, match=r"state_dict\(\) of a \(Later\) is asynchronous"):
        ckpt.save({"a": Later()}, tmp_path / "c")
    ckpt.save({"a": Counter(3)}, tmp_path / "c")
    with pytest.raises(aiockpt.LoadError, match=r"load_state_dict\(\) of a \(LoadsLater\) is asynchronous"):
        ckpt.load(tmp_path / "c", {"a": LoadsLater()})


def test_an_optimizer_that_does_not_fit(ckpt, tmp_path: Path) -> None:
    run = Run("adam", seed=1)
    run.train(range(2))
    ckpt.save({"optim": run.optim}, tmp_path / "c")
    linear = nn.Linear(2, 2)
    two_groups = torch.optim.Adam([{"params": [linear.weight]}, {"params": [linear.bias], "lr": 0.5}])
    for optim, groups in ((torch.optim.Adam(linear.parameters()), "2"), (two_groups, "1, 1")):
        with pytest.raises(
            aiockpt.LoadError, match=rf"optim \(Adam\) has groups of {groups} parameters, but .* have 5"
        ):
            ckpt.load(tmp_path / "c", {"optim": optim})
    other = nn.ParameterList([nn.Parameter(torch.zeros(8, 9)), *(nn.Parameter(torch.zeros(8)) for _ in range(4))])
    stepped = torch.optim.Adam(other.parameters())
    sum(each.sum() for each in other).backward()
    stepped.step()
    ckpt.load(tmp_path / "c", {"optim": stepped})  # which torch accepts, and only its next step refuses
    assert_same(run.optim.state_dict()["state"], stepped.state_dict()["state"])


def test_a_module_that_does_not_fit(ckpt, tmp_path: Path) -> None:
    ckpt.save({"m": nn.Linear(3, 3), "n": nn.Linear(3, 3, bias=False)}, tmp_path / "c")
    small, large = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    before = large.weight.clone()
    with pytest.raises(aiockpt.MissingKeysError, match=r"lacks 1 of the keys asked for: n\.bias"):
        ckpt.load(tmp_path / "c", {"n": large})
    assert torch.equal(large.weight, before)
    with pytest.raises(aiockpt.LoadError, match=r"m \(Linear\) does not know 1 of the keys .*: m\.bias"):
        ckpt.load(tmp_path / "c", {"m": small})
    with pytest.raises(aiockpt.ShapeMismatchError, match=r"m\.weight has the shape \(4, 3\)"):
        ckpt.load(tmp_path / "c", {"m": nn.Linear(3, 4)})
    missing: list[str] = []
    with pytest.warns(
        aiockpt.MissingKeysWarning, match=r"lacks 1 of.*: n\.bias; it has 1 keys .* know: m\.bias"
    ) as seen:
        ckpt.load(tmp_path / "c", {"m": small, "n": large}, strict=False, missing=missing)
    assert missing == ["n.bias"]
    assert seen[0].message.keys == ("n.bias",)
    assert seen[0].message.unexpected == ("m.bias",)
    assert seen[0].filename == __file__
    assert_same(ckpt.load(tmp_path / "c")["n"]["weight"], large.weight.detach())


def test_modules_that_rename_keys_decide_in_load_state_dict(ckpt, tmp_path: Path) -> None:
    """The new weight norm reads checkpoints of the old one; a lazy module takes the stored shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = torch.nn.utils.weight_norm(nn.Linear(3, 3))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    lazy = nn.LazyLinear(3)
    ckpt.save({"old": old, "plain": nn.Linear(5, 3)}, tmp_path / "c")
    ckpt.load(tmp_path / "c", {"old": new, "plain": lazy})
    x = torch.randn(2, 3)
    assert torch.equal(old(x), new(x))
    assert lazy.weight.shape == (3, 5)
    other = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    with pytest.raises(
        aiockpt.LoadError, match=r"(?s)size mismatch for bias.*no other object had been given its state\.$"
    ):
        ckpt.load(tmp_path / "c", {"old": other})


def test_an_object_without_stored_state(ckpt, tmp_path: Path) -> None:
    ckpt.save({"step": 1, "object": 5}, tmp_path / "c")
    counter = Counter(7)
    with pytest.raises(aiockpt.MissingKeysError, match="lacks 1 of the keys asked for: counter") as caught:
        ckpt.load(tmp_path / "c", {"counter": counter, "step": 0})
    assert caught.value.keys == ("counter",)
    with pytest.raises(aiockpt.MissingKeysError, match="counter"):
        ckpt.load(tmp_path / "c", {"counter": counter}, keys="counter")
    with pytest.warns(aiockpt.MissingKeysWarning, match="counter"):
        ckpt.load(tmp_path / "c", {"counter": counter}, strict=False)
    assert [name for name, _ in counter.threads] == ["state_dict"] * 3
    with pytest.raises(aiockpt.ShapeMismatchError, match=r"object \(Counter\) is to be given .* single object"):
        ckpt.load(tmp_path / "c", {"object": counter})


def test_a_model_saved_within_another(ckpt, tmp_path: Path) -> None:
    """The error names a remedy, and the remedy works."""
    saved, new = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = nn.ModuleDict({"module": saved})  # as in DistributedDataParallel
    ckpt.save({"model": wrapped}, tmp_path / "wrapped")
    ckpt.save({"model": saved}, tmp_path / "bare")
    with pytest.raises(
        aiockpt.MissingKeysError, match=r"keys have 'module\.'.*Load into \{'module': model\}"
    ) as caught:
        ckpt.load(tmp_path / "wrapped", {"model": new})
    assert caught.value.keys == ("model.weight", "model.bias")
    ckpt.load(tmp_path / "wrapped", {"model": {"module": new}})
    assert_same(saved.state_dict(), new.state_dict())
    other = nn.ModuleDict({"module": nn.Linear(2, 2)})
    with pytest.raises(aiockpt.MissingKeysError, match=r"keys lack 'module\.'.*Load into .* model\.module\. Pass"):
        ckpt.load(tmp_path / "bare", {"model": other})
    ckpt.load(tmp_path / "bare", {"model": other.module})
    assert_same(saved.state_dict(), other.module.state_dict())


def test_loading_only_some_keys(ckpt, tmp_path: Path) -> None:
    run = Run("adam", seed=1)
    run.train(range(2))
    ckpt.save(run.objects(), tmp_path / "c")
    other = Run("adam", seed=2)
    other.train(range(1))
    before = {name: value.clone() for name, value in other.model.state_dict().items() if "_extra" not in name}
    ckpt.load(tmp_path / "c", other.objects(), keys=["optim.state.0", "model.norm.*"])
    mine, theirs = run.optim.state_dict(), other.optim.state_dict()
    assert_same(mine["state"][0], theirs["state"][0])
    assert theirs["state"][1]["step"] == 1
    for name, value in other.model.state_dict().items():
        if "_extra" not in name:
            assert torch.equal(value, (run.model.state_dict() if "norm" in name else before)[name])
    counter = Counter(4)
    ckpt.save({"c": Counter(1), "d": nn.Linear(2, 2)}, tmp_path / "d")
    ckpt.load(tmp_path / "d", {"c": counter, "d": nn.Linear(2, 2)}, keys="d")
    assert counter.count == 4


def test_objects_get_the_saved_state(ckpt, tmp_path: Path) -> None:
    """Whatever the object's present state, its own load_state_dict decides."""
    saved = {"rows": torch.ones(3, 2), "list": [{"x": 1}, {"x": 2}], "grown": {"a": 1, "b": torch.ones(1)}, 4: "four"}
    ckpt.save({"w": Whole(saved)}, tmp_path / "c")
    same = torch.zeros(3, 2)
    for state in (
        {"rows": same, "list": [], "gone": 3},
        {"rows": torch.zeros(9), "list": [{"x": 0}], "grown": {"a": torch.ones(2)}},
        {},
        None,
    ):
        whole = Whole(state)
        ckpt.load(tmp_path / "c", {"w": whole})
        assert_same(saved, whole.given)
        assert torch.equal(same, torch.zeros(3, 2))


def test_dtype_and_map_location(ckpt, tmp_path: Path) -> None:
    run = Run("adam", seed=1)
    run.train(range(1))
    ckpt.save({"model": run.model, "optim": run.optim}, tmp_path / "c")
    half = Net().to(torch.bfloat16)
    optim = torch.optim.Adam(half.parameters())
    ckpt.load(tmp_path / "c", {"model": half, "optim": optim}, dtype=torch.bfloat16)
    assert half.first.weight.equal(run.model.first.weight.bfloat16())
    assert optim.state[half.first.weight]["exp_avg"].dtype == torch.bfloat16
    seen: list[str] = []

    def place(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append(location)
        return storage

    fresh = torch.optim.Adam(Net().parameters())
    ckpt.load(tmp_path / "c", {"optim": fresh}, map_location=place)
    assert len(seen) == 15


# --- empty containers -----------------------------------------------------------------------------------

STORED: dict[str, Any] = {
    "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(4)}, 1: {"m": torch.zeros(2)}},
    "ordered": OrderedDict(a=torch.ones(2), b={"c": 5}),
    "pair": (torch.ones(1), "x"),
    "list": [{"a": 1}, torch.ones(3)],
    "number": 4,
    "tensor": torch.arange(5),
    "empty": {},
    "nothing": None,
}


def save_stored(ckpt: aiockpt.SyncCheckpointer, path: Path, form: str) -> Any:
    if form == "ours":
        ckpt.save(STORED, path)
    elif form == "torch":
        torch.save(STORED, path)
    else:
        dcp.save(STORED, checkpoint_id=path, **ALONE)
    return ckpt.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ours", "torch", "stock"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_empty_container_takes_everything(ckpt, tmp_path: Path, form: str, strict: bool) -> None:
    stored = save_stored(ckpt, tmp_path / "c", form)
    for make in (dict, OrderedDict, lambda: None, list, tuple):
        target = {key: make() for key in stored}
        assert ckpt.load(tmp_path / "c", target, strict=strict) is target
        assert_same(stored, target)
        inside = {"x": [{"deep": make()}]}
        ckpt.save({"x": [{"deep": STORED}]}, tmp_path / "d", overwrite=True)
        ckpt.load(tmp_path / "d", inside)
        assert_same({"x": [{"deep": STORED}]}, inside)
    top: dict[str, Any] = {}
    assert ckpt.load(tmp_path / "c", top, strict=strict) is top
    assert_same(stored, top)


def test_an_optimizers_dicts_from_a_stock_checkpoint(ckpt, tmp_path: Path) -> None:
    """DCP stores parameter numbers as text; the target's param_groups show that they are integers."""
    run = Run("adam", seed=1)
    run.train(range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"optim": run.optim.state_dict()}, checkpoint_id=tmp_path / "c", **ALONE)
    fresh = Run("adam", seed=2).optim
    target = {"optim": fresh.state_dict()}
    assert target["optim"]["state"] == {}
    ckpt.load(tmp_path / "c", target)
    fresh.load_state_dict(target["optim"])
    assert_same(run.optim.state_dict(), fresh.state_dict())


def test_from_safetensors(ckpt, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ckpt.save({"model": model}, tmp_path / "c.safetensors", format="safetensors")
    target: dict[str, Any] = {"model": {}}
    ckpt.load(tmp_path / "c.safetensors", target)
    assert {**target["model"]}.keys() == model.state_dict().keys()
    assert all(torch.equal(value, target["model"][name]) for name, value in model.state_dict().items())
    other = nn.Sequential(nn.Linear(2, 2))
    ckpt.load(tmp_path / "c.safetensors", {"model": other})
    assert_same(model.state_dict(), other.state_dict())


def test_an_empty_container_takes_only_the_keys_asked_for(ckpt, tmp_path: Path) -> None:
    ckpt.save(STORED, tmp_path / "c")
    target: dict[str, Any] = {"state": {}, "ordered": {}, "number": None}
    ckpt.load(tmp_path / "c", target, keys=["state.0", "*.m"], dtype=torch.float64)
    assert list(target["state"]) == [0, 1]
    assert target["state"][0]["step"].dtype == torch.float32
    assert target["state"][0]["m"].dtype == torch.float64
    assert (target["ordered"], target["number"]) == ({}, None)
    ckpt.load(tmp_path / "c", target, keys="ordered.b")
    assert_same(OrderedDict(b={"c": 5}), target["ordered"])
    with pytest.raises(aiockpt.MissingKeysError, match="pair"):
        ckpt.load(tmp_path / "c", target, keys="pair")


def test_an_empty_container_for_a_missing_key(ckpt, tmp_path: Path) -> None:
    ckpt.save(STORED, tmp_path / "c")
    for nothing in ({}, None, [], OrderedDict()):
        with pytest.raises(aiockpt.MissingKeysError, match=r"asked for: a\.other"):
            ckpt.load(tmp_path / "c", {"a": {"other": nothing}})
        target = {"a": {"other": nothing}, "empty": {}}
        with pytest.warns(aiockpt.MissingKeysWarning):
            ckpt.load(tmp_path / "c", target, strict=False)
        assert target == {"a": {"other": nothing}, "empty": {}}
    torch.save([1, {"a": torch.ones(2)}], tmp_path / "list.pt")
    with pytest.raises(aiockpt.LoadError, match="holds no dict"):
        ckpt.load(tmp_path / "list.pt", {})


def test_strict_false_reports_missing_keys(ckpt, tmp_path: Path) -> None:
    ckpt.save({"a": 1}, tmp_path / "c")
    missing: list[str] = []
    with pytest.warns(aiockpt.MissingKeysWarning) as seen:
        ckpt.load(tmp_path / "c", {"a": 0, "b": 2, "c": {"d": 1}}, strict=False, missing=missing)
    assert missing == ["b", "c.d"]
    assert len(seen) == 1
    with pytest.warns(aiockpt.MissingKeysWarning, match=r"nothing\.\*"):
        assert ckpt.load(tmp_path / "c", keys=["a", "nothing.*"], strict=False, missing=missing) == {"a": 1}
    assert missing == ["b", "c.d", "nothing.*"]
    with pytest.raises(TypeError, match="missing must be a list"):
        ckpt.load(tmp_path / "c", missing=())
