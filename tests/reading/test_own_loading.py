"""A live object is loaded as its own load_state_dict would load it: random trees of modules with random loaders."""

from __future__ import annotations

import copy
import functools
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import aiockpt
from tests.states import assert_same

# --- modules whose loading is more than a copy by name ----------------------------------------------


class Layer(nn.Module):
    """A square weight, a bias, and a buffer, each with values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.bias = nn.Parameter(torch.randn(2))
        self.register_buffer("mean", torch.randn(2))
        self.seen: list[Any] = []


class Older(Layer):
    """Reads states of its first version, which had the logarithm, and resets its statistics."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[prefix + "bias"] = state[prefix + "bias"].exp()
        self.mean.zero_()
        super()._load_from_state_dict(state, prefix, metadata, *rest)
        self.mean.mul_(2)


class Extra(Layer):
    """Has more of a state than tensors, and changes its children by it."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.extra = extra
        self.child = Layer()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra
        with torch.no_grad():
            self.child.bias.mul_(3)
            self.weight.mul_(3)


class Ring(Layer):
    """Appends to a history what it is given; its state has another name for its bias."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "offset"] = destination.pop(prefix + "bias")

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "bias"] = state.pop(prefix + "offset") + self.bias.detach()
        super()._load_from_state_dict(state, prefix, *rest)


class Bank(nn.Module):
    """Takes the size of what is stored."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(size, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.rows = torch.zeros_like(state[prefix + "rows"])
        super()._load_from_state_dict(state, prefix, *rest)


class Crossed(Layer):
    """Its state dict has the mean as the bias, and the other way round."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        state[prefix + "bias"], state[prefix + "mean"] = state[prefix + "mean"], state[prefix + "bias"]
        return state


def swap(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "bias"], state[prefix + "mean"] = state[prefix + "mean"], state[prefix + "bias"]


def transpose(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


def average(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "mean"] = (state[prefix + "mean"] + module.mean) / 2


def shift(module: Any, state: Any, prefix: str, *_: Any) -> None:
    """Move what is stored for each child to the next one."""
    names = [name for name, _ in module.named_children()]
    moved = {key: state.pop(key) for key in list(state) if key[len(prefix) :].split(".")[0] in names}
    for key, value in moved.items():
        name, _, rest = key[len(prefix) :].partition(".")
        state[f"{prefix}{names[(names.index(name) + 1) % len(names)]}.{rest}"] = value


def scale(module: Any, incompatible: Any) -> None:
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(2)


def forgive(module: Any, incompatible: Any) -> None:
    incompatible.missing_keys.clear()
    incompatible.unexpected_keys.clear()


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda module: None,
    "swap": lambda module: module.register_load_state_dict_pre_hook(swap),
    "swap privately": lambda module: module._register_load_state_dict_pre_hook(swap, with_module=True),
    "transpose": lambda module: module.register_load_state_dict_pre_hook(transpose),
    "average": lambda module: module.register_load_state_dict_pre_hook(average),
    "scale": lambda module: module.register_load_state_dict_post_hook(scale),
    "forgive": lambda module: module.register_load_state_dict_post_hook(forgive),
}
LEAVES: dict[str, Callable[[], nn.Module]] = {
    "layer": Layer,
    "older": Older,
    "extra tensor": lambda: Extra(torch.randn(3)),
    "extra dict": lambda: Extra({"amax": 1.5, "history": torch.randn(2)}),
    "extra none": Extra,
    "ring": Ring,
    "crossed": Crossed,
    "bank": lambda: Bank(3),
    "norm": lambda: nn.BatchNorm1d(2),
    "lazy": lambda: nn.LazyLinear(2),
}
FRESH = {**LEAVES, "bank": Bank, "extra tensor": lambda: Extra(torch.randn(0)), "extra none": lambda: Extra({"a": 1})}

plain = st.just(("layer", "none"))
leaf = plain | st.tuples(st.sampled_from(sorted(LEAVES)), st.sampled_from(sorted(HOOKS)))
SHARES: dict[str, Callable[[Any, Any], object]] = {
    "nothing": lambda one, other: None,
    "weight": lambda one, other: setattr(other, "weight", one.weight),
    "mean": lambda one, other: setattr(other, "mean", one.mean),
    "view": lambda one, other: setattr(other, "mean", one.weight.detach()[0]),
    "overlap": lambda one, other: setattr(other, "bias", nn.Parameter(one.weight.detach().view(4)[1:3])),
}
"""What the last layer has in common with the first."""
tree = st.recursive(
    leaf,
    lambda inner: st.tuples(
        st.lists(inner, min_size=1, max_size=3), st.booleans(), st.sampled_from(sorted(SHARES)), st.booleans()
    ),
    max_leaves=5,
)


def build(described: Any, kinds: Any, *, lacks: bool = False, is_saved: bool = False) -> nn.Module:
    """Build a tree; ``lacks``: without the last child of the root."""
    if isinstance(described[0], str):
        module = kinds[described[0]]()
        if isinstance(module, Layer):
            HOOKS[described[1]](module)
        return module
    children, shifts, shared, by_both = described
    module = nn.ModuleList(build(each, kinds, is_saved=is_saved) for each in (children[:-1] if lacks else children))
    if shifts:
        module.register_load_state_dict_pre_hook(shift)
    layers = [each for each in module if isinstance(each, Layer)]
    if len(layers) > 1 and (by_both or not is_saved):
        SHARES[shared](layers[0], layers[-1])
    return module


def outcome(load: Callable[[], object], module: nn.Module) -> Any:
    """Load, and return all that there is of the module then; None if the load failed."""
    try:
        load()
    except Exception:
        return None
    with torch.no_grad():
        found: dict[str, Any] = {name: value.clone() for name, value in module.named_parameters() if _is_there(value)}
        found |= {name: value.clone() for name, value in module.named_buffers()}
    return found | {f"{name}.extra": each.extra for name, each in module.named_modules() if isinstance(each, Extra)}


def _is_there(parameter: torch.Tensor) -> bool:
    return not torch.nn.parameter.is_lazy(parameter)


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as made:
        yield made


@hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(tree, st.booleans(), st.booleans(), st.booleans())
def test_a_module_loads_as_by_its_own_load_state_dict(ckpt, described, lacks, strict, by_run) -> None:
    lacks = lacks and not isinstance(described[0], str)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(1)
        saved = {"m": materialised(build(described, LEAVES, is_saved=True))}
        if by_run:
            with aiockpt.SyncCheckpointManager(folder) as run:
                run.save(1, saved)
        else:
            ckpt.save(saved, f"{folder}/step-1")

        def fresh() -> nn.Module:
            torch.manual_seed(2)
            return build(described, FRESH, lacks=lacks)

        def load() -> None:
            if not by_run:
                ckpt.load(path, {"m": module}, strict=strict)
                return
            with aiockpt.SyncCheckpointManager(folder, read_only=True) as run:
                assert run.restore({"m": module}, strict=strict) is not None

        path = str(next(each for each in Path(folder).iterdir() if each.is_dir() and not each.name.startswith(".")))
        module = fresh()
        own = module
        expected = outcome(lambda: own.load_state_dict(ckpt.load(path)["m"], strict=strict), own)
        module = fresh()
        hypothesis.event(f"fails: {expected is None}")
        hypothesis.assume(strict or expected is None or not warns(own, ckpt.load(path)["m"]))
        found = outcome(load, module)
        assert (expected is None) == (found is None)
        if expected is not None:
            assert_same(expected, found)


def materialised(module: nn.Module) -> nn.Module:
    for each in module.modules():
        if isinstance(each, nn.LazyLinear):
            each(torch.zeros(1, 3))
    return module


def warns(module: nn.Module, state: Any) -> bool:
    """Return whether a load that is not strict warns, which is an error here."""
    return any(module.load_state_dict(state, strict=False))


# --- optimizers ---------------------------------------------------------------------------------


def make_optimizer(kind: type[torch.optim.Optimizer], seed: int, steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    optimizer = kind(parameters, lr=0.1)
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.randn(3)
        optimizer.step()
    return optimizer


def reverse(optimizer: Any, state: Any) -> Any:
    """Give the first parameter's state to the last one, as after a change of their order."""
    return {**state, "state": {2 - number: value for number, value in state["state"].items()}}


def blend(optimizer: Any, state: Any) -> None:
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and name in optimizer.state.get(parameter, {}):
                value.add_(optimizer.state[parameter][name])


def halve(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.div_(2)


OPTIMIZER_HOOKS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "none": lambda each: None,
    "reverse": lambda each: each.register_load_state_dict_pre_hook(reverse),
    "blend": lambda each: each.register_load_state_dict_pre_hook(blend),
    "halve": lambda each: each.register_load_state_dict_post_hook(halve),
    "state": lambda each: each.register_state_dict_post_hook(reverse),
}


class Own(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        held = {name: value.clone() for name, value in self.state[self.param_groups[0]["params"][0]].items()}
        super().load_state_dict(state_dict)
        for name, value in held.items():
            self.state[self.param_groups[0]["params"][0]][name] = value + state_dict["state"][0][name]


@pytest.mark.parametrize("hook", sorted(OPTIMIZER_HOOKS))
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS, Own])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_loads_as_by_its_own_load_state_dict(kind, hook, steps, ckpt, tmp_path: Path) -> None:
    if kind is torch.optim.LBFGS:
        hook, steps = "none", 0  # it steps by a closure
    saved = make_optimizer(kind, 1, 0 if kind is torch.optim.LBFGS else 3)
    ckpt.save({"o": saved}, tmp_path / "c")
    own, mine = (make_optimizer(kind, 2, steps) for _ in range(2))
    for each in (own, mine):
        OPTIMIZER_HOOKS[hook](each)
    own.load_state_dict(ckpt.load(tmp_path / "c")["o"])
    ckpt.load(tmp_path / "c", {"o": mine})
    assert_same(own.state_dict(), mine.state_dict())


def test_groups_that_share_the_tensor_of_a_learning_rate(ckpt, tmp_path: Path) -> None:
    def make() -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
        return torch.optim.AdamW(groups, lr=torch.tensor(0.5))

    saved, fresh = make(), make()
    saved.param_groups[1]["lr"] = torch.tensor(0.25)
    ckpt.save({"o": saved}, tmp_path / "c")
    ckpt.load(tmp_path / "c", {"o": fresh})
    assert [group["lr"].item() for group in fresh.param_groups] == [0.5, 0.25]


# --- objects of other classes ----------------------------------------------------------------------


class Running:
    """Statistics that are reset before they take over what is stored, in place."""

    def __init__(self, value: float) -> None:
        self.mean, self.history, self.array = torch.full((2,), value), deque([value], 3), [torch.full((1,), value)]

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "history": list(self.history), "array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each in (self.mean, self.array[0]):
            each.zero_()
        self.mean += state["mean"]
        self.array[0] += state["array"][0]
        self.history.extend(state["history"])


class Around:
    """An object whose state has another object in it, of which it takes a part."""

    def __init__(self, value: float) -> None:
        self.inner, self.weight = Running(value), torch.full((2,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.weight.sub_(state["weight"])


@pytest.mark.parametrize("kind", [Running, Around])
def test_an_object_loads_as_by_its_own_load_state_dict(kind, ckpt, tmp_path: Path) -> None:
    ckpt.save({"x": kind(5.0)}, tmp_path / "c")
    own, mine = kind(1.0), kind(1.0)
    own.load_state_dict(ckpt.load(tmp_path / "c")["x"])
    ckpt.load(tmp_path / "c", {"x": mine})
    assert_same(copied(own.state_dict()), copied(mine.state_dict()))


@pytest.mark.parametrize(("kind", "keys"), [(Running, "x.mean"), (Around, "x.inner.mean"), (Around, "x.weight")])
def test_an_object_keeps_what_is_not_asked_for(kind, keys, ckpt, tmp_path: Path) -> None:
    ckpt.save({"x": kind(5.0)}, tmp_path / "c")
    own, mine = kind(1.0), kind(1.0)
    state, part = copied(own.state_dict()), ckpt.load(tmp_path / "c", keys=keys)["x"]
    own.load_state_dict({**state, **part, **({"inner": state["inner"] | part["inner"]} if "inner" in part else {})})
    ckpt.load(tmp_path / "c", {"x": mine}, keys=keys)
    assert_same(copied(own.state_dict()), copied(mine.state_dict()))


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: copied(value) if isinstance(value, dict) else copy.deepcopy(value) for key, value in state.items()}


# --- what is filled in place ---------------------------------------------------------------------------


def test_only_an_odd_submodule_gets_new_memory(ckpt, tmp_path: Path) -> None:
    """Its siblings are filled in place: seen by an error that comes after them."""

    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"plain": Layer(), "odd": Older(), "last": Layer()})

    saved, fresh = make(), make()
    ckpt.save({"m": saved}, tmp_path / "c")

    def fail(*_: Any) -> None:
        raise RuntimeError("not now")

    fresh["odd"].register_load_state_dict_pre_hook(fail)
    with pytest.raises(
        aiockpt.LoadError, match=r"not now.*no other object had been given.*Of the 6 tensors to fill"
    ) as caught:
        ckpt.load(tmp_path / "c", {"m": fresh})
    filled = {f"m.{child}.{name}" for child in ("plain", "last") for name in ("weight", "bias", "mean")}
    assert set(caught.value.placed) == filled


def test_a_module_that_would_refuse_keys_is_left_as_it_is(ckpt, tmp_path: Path) -> None:
    ckpt.save({"m": nn.Sequential(Layer(), Layer()), "n": nn.Sequential(nn.Linear(2, 2))}, tmp_path / "c")
    fresh = nn.Sequential(Layer())
    before = copied(fresh.state_dict())
    with pytest.raises(aiockpt.LoadError, match=r"does not know 3 of the keys.*m\.1\.weight.*strict=False") as caught:
        ckpt.load(tmp_path / "c", {"m": fresh})
    assert caught.value.placed == ()
    assert_same(before, copied(fresh.state_dict()))


@pytest.mark.parametrize("hook", ["none", "scale"])
def test_a_function_says_which_keys_a_module_must_have(hook, ckpt, tmp_path: Path) -> None:
    """Also where only the module's own loading finds out what is missing."""

    def make(size: int) -> dict[str, nn.Module]:
        layers = [Layer() for _ in range(size)]
        HOOKS[hook](layers[0])
        return {"m": nn.ModuleList(layers)}

    ckpt.save(make(1), tmp_path / "c")
    with pytest.raises(aiockpt.LoadError, match=r"m\.1\.bias"):
        ckpt.load(tmp_path / "c", make(2), strict=lambda key: key == "m.1.bias")
    missing: list[str] = []
    with pytest.warns(aiockpt.MissingKeysWarning):
        ckpt.load(tmp_path / "c", make(2), strict=lambda key: key == "m.0.bias", missing=missing)
    assert missing == ["m.1.weight", "m.1.bias", "m.1.mean"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("group", [{"lr": 0.1}, 3, {"params": 5}], ids=str)
def test_groups_that_are_none_are_an_error_of_the_load(ckpt, tmp_path: Path, group: object, strict: bool) -> None:
    ckpt.save({"o": {"state": {}, "param_groups": [group]}}, tmp_path / "c")
    with pytest.raises(aiockpt.LoadError, match=r"load_state_dict\(\) of o"):
        ckpt.load(tmp_path / "c", {"o": torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)}, strict=strict)


@pytest.mark.parametrize("groups", ["fewer", "more"])
def test_an_optimizer_that_would_refuse_groups_leaves_all_as_it_is(ckpt, tmp_path: Path, groups: str) -> None:
    def made(split: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parts = {"saved": [[*model.parameters()]], "fewer": [[*model[0].parameters()]]}
        chosen = parts.get(split, [[each] for each in model.parameters()])
        return model, torch.optim.AdamW([{"params": each} for each in chosen])

    model, optimizer = made("saved")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckpt.save({"m": model, "o": optimizer}, tmp_path / "c")
    model, optimizer = made(groups)
    before = copied(model.state_dict())
    with pytest.raises(aiockpt.LoadError, match=r"o \(AdamW\) has groups of .* parameters, but .* have 4") as caught:
        ckpt.load(tmp_path / "c", {"m": model, "o": optimizer})
    assert caught.value.placed == ()
    assert_same(before, copied(model.state_dict()))
    assert not optimizer.state


def test_a_module_takes_a_part_of_its_keys(ckpt, tmp_path: Path) -> None:
    """By its own loading, with hooks: only what was asked for reaches it."""
    ckpt.save({"m": nn.ModuleDict({"a": Layer(), "b": Layer()})}, tmp_path / "c")
    own, mine = (nn.ModuleDict({"a": Layer(), "b": Layer()}) for _ in range(2))
    mine.load_state_dict(own.state_dict())
    for each in (own, mine):
        each["a"].register_load_state_dict_pre_hook(swap)
    own.load_state_dict(ckpt.load(tmp_path / "c", keys="m.a")["m"], strict=False)
    ckpt.load(tmp_path / "c", {"m": mine}, keys="m.a")
    assert_same(own.state_dict(), mine.state_dict())


def test_a_scalar_takes_a_tensor_of_one_element(ckpt, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.scale = nn.Parameter(scale)

    ckpt.save({"m": Scaled(torch.tensor([3.0]))}, tmp_path / "c")
    fresh = Scaled(torch.tensor(1.0))
    ckpt.load(tmp_path / "c", {"m": fresh})
    assert (fresh.scale.item(), fresh.scale.dim()) == (3.0, 0)


# --- what other code comes to ------------------------------------------------------------------------------


class Twins(nn.Module):
    """A network and its target network, which comes after it, and is filled from it by other code."""

    def __init__(self, register: Callable[[nn.Module, nn.Module], object]) -> None:
        super().__init__()
        self.net, self.target, self.last = Layer(), Layer(), Layer()
        register(self.net, self.target)


def follow(net: nn.Module, target: nn.Module) -> None:
    """Overwrite the target by a hook that knows it."""
    net.register_load_state_dict_post_hook(lambda module, _: target.load_state_dict(module.state_dict()) and None)


def zero(module: Any) -> None:
    nn.init.zeros_(module.weight)


def follow_weakly(net: nn.Module, target: nn.Module) -> None:
    reference = weakref.ref(target)
    net.register_load_state_dict_post_hook(lambda module, _: zero(reference()))


def read_before(net: nn.Module, target: nn.Module) -> None:
    def add(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "bias"] = state[prefix + "bias"] + target.bias.detach()

    net.register_load_state_dict_pre_hook(functools.partial(add))


class Zeroing(Layer):
    """Changes another module where it takes its extra state."""

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, extra: Any) -> None:
        zero(self.others[0])


def follow_by_state(net: Any, target: nn.Module) -> None:
    net.__class__, net.others = Zeroing, [target]


@pytest.mark.parametrize("register", [follow, follow_weakly, read_before, follow_by_state])
def test_what_other_code_comes_to_before_it_is_loaded(register, ckpt, tmp_path: Path) -> None:
    """The loading of one submodule reads or changes another, that is loaded after it."""
    torch.manual_seed(1)
    ckpt.save({"m": Twins(register)}, tmp_path / "c")
    torch.manual_seed(2)
    own = Twins(register)
    torch.manual_seed(2)
    mine = Twins(register)
    own.load_state_dict(ckpt.load(tmp_path / "c")["m"])
    ckpt.load(tmp_path / "c", {"m": mine})
    assert_same(own.state_dict(), mine.state_dict())


def alias(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, other: torch.Tensor) -> None:
    optimizer.state[parameter]["slow"] = parameter.detach()


def share(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, other: torch.Tensor) -> None:
    optimizer.state[parameter]["slow"] = other[1:4]


def expand(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, other: torch.Tensor) -> None:
    optimizer.state[parameter]["slow"] = other[:1].expand(3)


def train(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, other: torch.Tensor) -> None:
    optimizer.state[parameter]["slow"] = nn.Parameter(torch.zeros(3))


def learn(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, other: torch.Tensor) -> None:
    optimizer.state[parameter]["slow"] = torch.zeros(3, requires_grad=True)


@pytest.mark.parametrize("keep", [alias, share, expand, train, learn])
def test_an_optimizer_whose_state_is_the_memory_of_something_else(keep, ckpt, tmp_path: Path) -> None:
    saved, own, mine = (make_optimizer(torch.optim.AdamW, seed, 2) for seed in (1, 2, 2))
    for optimizer in (own, mine):
        other = torch.zeros(4)
        for parameter in optimizer.param_groups[0]["params"]:
            keep(optimizer, parameter, other)
    for number, parameter in enumerate(saved.param_groups[0]["params"]):
        saved.state[parameter]["slow"] = torch.full((3,), float(number))
    ckpt.save({"o": saved}, tmp_path / "c")
    own.load_state_dict(ckpt.load(tmp_path / "c")["o"])
    ckpt.load(tmp_path / "c", {"o": mine})
    assert_same(own.state_dict(), mine.state_dict())
    assert_same(own.param_groups[0]["params"], mine.param_groups[0]["params"])
    assert all(type(each["slow"]) is torch.Tensor and not each["slow"].requires_grad for each in mine.state.values())


def test_an_optimizer_takes_a_number_for_a_tensor(ckpt, tmp_path: Path) -> None:
    """L-BFGS has a number after its first step, and a tensor from its second on."""

    def make(steps: int) -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            (loss := (weight**4).sum()).backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return optimizer

    ckpt.save({"o": make(1)}, tmp_path / "c")
    own, mine = make(3), make(3)
    own.load_state_dict(ckpt.load(tmp_path / "c")["o"])
    ckpt.load(tmp_path / "c", {"o": mine})
    assert_same(own.state_dict(), mine.state_dict())


def opened(kind: type[torch.optim.Optimizer], dtype: torch.dtype, size: int, **given: Any) -> torch.optim.Optimizer:
    """Return an optimizer that has stepped."""
    parameters = [nn.Parameter(torch.randn(size, 2, dtype=dtype)) for _ in range(2)]
    optimizer = kind(parameters, **given)
    for each in parameters:
        each.grad = torch.randn_like(each)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.ASGD, {}),
    ],
)
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 3), (torch.float64, 3), (torch.float32, 5)])
def test_an_optimizer_takes_any_dtype_and_shape(dtype, size, kind, given, ckpt, tmp_path: Path) -> None:
    """Torch casts all but the steps to the dtype of the parameter."""
    ckpt.save({"o": opened(kind, dtype, size, **given)}, tmp_path / "c")
    own, mine = opened(kind, torch.float32, 3, **given), opened(kind, torch.float32, 3, **given)
    own.load_state_dict(ckpt.load(tmp_path / "c")["o"])
    ckpt.load(tmp_path / "c", {"o": mine})
    assert_same(own.state_dict(), mine.state_dict())


KEPT: list[torch.Tensor] = []


class Keeping(torch.optim.AdamW):
    """Refers to the tensors of its state from elsewhere too, for as long as it has not stepped again."""

    kept: Any = ()

    def step(self, closure: Any = None) -> Any:
        super().step()
        KEPT[:] = [each["exp_avg"] for each in self.state.values()]


def keep_in_itself(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    optimizer._cache = {"averages": [each["exp_avg"][1:] for each in state]}
    return optimizer._cache["averages"]


def keep_in_its_class(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    type(optimizer).kept = tuple(each["exp_avg"] for each in state)
    return list(type(optimizer).kept)


def keep_in_a_global(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    return list(KEPT)


def keep_in_a_group(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    optimizer.param_groups[0]["slow"] = state[0]["exp_avg"]
    return [state[0]["exp_avg"]]


def keep_in_a_parameter(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    optimizer.param_groups[0]["params"][0].slow = state[0]["exp_avg"]
    return [state[0]["exp_avg"]]


def keep_as_a_gradient(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    optimizer.param_groups[0]["params"][0].grad = state[0]["exp_avg"]
    return [state[0]["exp_avg"]]


def keep_in_a_hook(optimizer: Any, state: list[Any]) -> list[torch.Tensor]:
    averages = [each["exp_avg"] for each in state]
    optimizer.register_step_post_hook(lambda *_: averages.clear())
    return averages


@pytest.mark.parametrize("keep", [each for name, each in list(globals().items()) if name.startswith("keep_")])
def test_what_an_optimizer_keeps_elsewhere_too_stays_as_it_was(keep, ckpt, tmp_path: Path) -> None:
    ckpt.save({"o": opened(Keeping, torch.float32, 3)}, tmp_path / "c")
    mine = opened(Keeping, torch.float32, 3)
    kept = keep(mine, list(mine.state.values()))
    before = [each.clone() for each in kept]
    ckpt.load(tmp_path / "c", {"o": mine})
    assert_same(before, kept)
    assert_same(ckpt.load(tmp_path / "c")["o"]["state"], mine.state_dict()["state"])


def test_an_optimizer_of_torchs_is_filled_in_place(ckpt, tmp_path: Path) -> None:
    ckpt.save({"o": opened(torch.optim.AdamW, torch.float32, 3)}, tmp_path / "c")
    mine = opened(torch.optim.AdamW, torch.float32, 3)
    torch.optim.lr_scheduler.StepLR(mine, 1)
    ckpt.save({"o": mine}, tmp_path / "d")
    places = [value.data_ptr() for each in mine.state.values() for value in each.values()]
    ckpt.load(tmp_path / "c", {"o": mine})
    assert places == [value.data_ptr() for each in mine.state.values() for value in each.values()]
