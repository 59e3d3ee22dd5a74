"""What the own loading of one object reads and changes of another one, which is loaded after it: the dict's order."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

import aiockpt
from tests.states import assert_same

T = TypeVar("T")

# --- what code does to another object ------------------------------------------------------------------------


def tensors_of(other: Any) -> list[torch.Tensor]:
    if isinstance(other, nn.Module):
        return [*other.parameters(), *other.buffers()]
    if isinstance(other, torch.optim.Optimizer):
        return [value for each in other.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [other.total]


def multiply(other: Any) -> None:
    with torch.no_grad():
        for each in tensors_of(other):
            each.mul_(2)


def write_data(other: Any) -> None:
    """Change no version counter."""
    for each in tensors_of(other):
        each.data.add_(1)


def write_array(other: Any) -> None:
    for each in tensors_of(other):
        each.detach().numpy()[...] = 3


def move(other: Any) -> None:
    for each in tensors_of(other):
        each.data = each.data.clone()


def ones(width: int) -> nn.Linear:
    made = nn.Linear(2, width)
    for each in made.parameters():
        nn.init.ones_(each)
    return made


def replace(other: Any) -> None:
    if isinstance(other, Net):
        other.head = ones(2)
    elif isinstance(other, torch.optim.Optimizer):
        other.state.clear()


def grow(other: Any) -> None:
    """Change the shape of a module to the one that is stored."""
    if isinstance(other, Net):
        other.head = ones(3)


def execute(other: Any) -> None:
    """Do what can't be looked into."""
    exec("multiply(other)", {"multiply": multiply, "other": other})


ACTIONS = {each.__name__: each for each in (multiply, write_data, write_array, move, replace, grow, execute)}

# --- objects with other objects ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(2, width), nn.BatchNorm1d(2)


class Trainer:
    """Reads what the other object is before it changes it."""

    def __init__(self, other: Any = None, act: Callable[[Any], object] = multiply) -> None:
        self.other, self.act, self.total, self.steps = other, act, torch.zeros(()), 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        with torch.no_grad():
            self.total = state["total"] + sum(each.sum() for each in tensors_of(self.other))
        self.act(self.other)


class Wrapper(Net):
    """A module with a loading of its own."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if "act" in vars(self):
            self.act(self.others[0])
        return super().load_state_dict(state, strict, assign)


class WithExtra(Net):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, extra: Any) -> None:
        if "act" in vars(self):
            self.act(self.others[0])


def wrapper(other: Any, act: Any, kind: type[Net] = Wrapper) -> Net:
    made = kind()
    if other is not None:
        made.others, made.act = [other], act
    return made


def with_extra(other: Any, act: Any) -> Net:
    return wrapper(other, act, WithExtra)


def hooked(other: Any, act: Any) -> Net:
    made = Net()
    made.head.register_load_state_dict_post_hook(lambda *_: act(other) if other is not None else None)
    return made


class OwnOptimizer(torch.optim.AdamW):
    """An optimizer with a loading of its own, which also calls the hooks."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def stepped(parameters: Any, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(parameters)
    for group in made.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    made.step()
    return made


def hooked_optimizer(other: Any, act: Any, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    made = stepped([nn.Parameter(torch.randn(3))], kind)
    made.register_load_state_dict_post_hook(lambda _: act(other) if other is not None else None)
    return made


def schedulers(other: Any, act: Any) -> Any:
    class Acting(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            if other is not None:
                act(other)

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [Acting(optimizer, 1), Acting(optimizer, 1)], [1])


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "trainer": Trainer,
    "wrapper": wrapper,
    "extra": with_extra,
    "hooked": hooked,
    "optimizer": hooked_optimizer,
    "own optimizer": functools.partial(hooked_optimizer, kind=OwnOptimizer),
    "schedulers": schedulers,
}

# --- the property ----------------------------------------------------------------------------------------------

holder = st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(ACTIONS)), st.integers(0, 9))
NAMES = ["model", "optim", "small", "one", "other"]


def made(described: Any, order: Any, *, is_saved: bool = False) -> dict[str, Any]:
    """Make objects, of which some change others: of those before them, by number."""
    model = Net()
    objects: dict[str, Any] = {"model": model, "optim": stepped(model.parameters()), "small": Net(3 if is_saved else 2)}
    for name, (kind, action, number) in zip(NAMES[3:], described, strict=False):
        other = [*objects.values()][number % len(objects)]
        objects[name] = KINDS[kind](None if is_saved and kind != "trainer" else other, ACTIONS[action])
    if not any("grow" in each for each in described):
        del objects["small"]  # which is loaded after it was grown alone
    return {name: objects[name] for name in order if name in objects}


def outcome(load: Callable[[], object], objects: dict[str, Any]) -> Any:
    """Load, and return what the objects are then; None if the load failed."""
    try:
        load()
    except Exception:
        return None
    return {name: each.state_dict() for name, each in objects.items()}


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as opened:
        yield opened


@hypothesis.settings(deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    st.lists(holder, min_size=1, max_size=2), st.permutations(NAMES), st.booleans(), st.sets(st.sampled_from(NAMES))
)
@hypothesis.example([("trainer", "multiply", 0)], ["one", "model", "optim", "small", "other"], True, set())
@hypothesis.example([("trainer", "grow", 2)], ["one", "small", "model", "optim", "other"], True, set())
@hypothesis.example([("wrapper", "replace", 1)], ["one", "optim", "model", "small", "other"], False, {"one", "optim"})
def test_each_object_is_loaded_after_those_before_it(ckpt, described: Any, order: Any, by_run: bool, asked: Any):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step-1"
        torch.manual_seed(1)
        if by_run:
            with aiockpt.SyncCheckpointManager(folder, names="step-{}") as run:
                run.save(1, made(described, order, is_saved=True))
        else:
            ckpt.save(made(described, order, is_saved=True), path)
        torch.manual_seed(2)
        own = made(described, order)
        torch.manual_seed(2)
        mine = made(described, order)
        keys = None if by_run else [name for name in own if name in asked] or None
        state = ckpt.load(path)

        def load_by_hand() -> None:
            for name, each in own.items():
                if keys is None or name in keys:
                    each.load_state_dict(state[name])

        def load() -> None:
            if not by_run:
                ckpt.load(path, mine, keys=keys)
                return
            with aiockpt.SyncCheckpointManager(folder, names="step-{}", read_only=True) as run:
                run.restore(mine)

        expected, found = outcome(load_by_hand, own), outcome(load, mine)
    hypothesis.event(f"fails: {expected is None}")
    assert (expected is None) == (found is None)
    if expected is not None:
        assert_same(expected, found)


# --- what it costs ---------------------------------------------------------------------------------------------


class Counting(Stateful, Generic[T]):
    """Has the model, as a trainer does, and does not touch it when it is loaded."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0

    def train(self) -> None:
        multiply(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Updating(Counting):
    """Takes over attributes, as schedulers do."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Failing(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("not now")


def filled(ckpt: aiockpt.SyncCheckpointer, path: Path, target: dict[str, Any]) -> set[str]:
    """Return the objects of which tensors were filled in place: an error that comes later says so."""
    ckpt.save(target, path)
    with pytest.raises(aiockpt.LoadError, match="not now") as caught:
        ckpt.load(path, target | {"last": Failing(Net())}, strict=False)
    return {name.partition(".")[0] for name in caught.value.placed}


def test_what_earlier_objects_do_not_touch_is_filled_in_place(ckpt, tmp_path: Path) -> None:
    model = Net()
    optimizer = stepped(model.parameters())
    one, other = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [one, other], [1])
    target = {
        "trainer": Counting(model),
        "updating": Updating(model),
        "scheduler": scheduler,
        "model": model,
        "optim": optimizer,
        "last": Trainer(model),
    }
    assert filled(ckpt, tmp_path / "c", target) == {"model", "optim"}


def test_only_what_an_earlier_object_comes_to_gets_new_memory(ckpt, tmp_path: Path) -> None:
    first, second = Net(), Net()
    target = {"before": first, "trainer": Trainer(first), "model": second, "again": first, "last": Trainer(second)}
    assert filled(ckpt, tmp_path / "c", target) == {"model"}
    target = {"trainer": Trainer(second.head), "before": first, "model": second, "last": Trainer(first)}
    assert filled(ckpt, tmp_path / "d", target) == {"before"}
