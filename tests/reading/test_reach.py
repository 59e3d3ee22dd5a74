"""What the loading of one submodule does to another one, by whatever way it comes to it."""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.reading.plain_loading import ModuleLoading, loading_of
from tests.states import assert_same

HELD: list[Any] = []
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("held")
MODULE = types.ModuleType("aiockpt_test_held")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("mean", torch.randn(2))


class Pair(nn.Module):
    """The loading of the first layer comes to the second one."""

    def __init__(self, register: Callable[[Any, Any], object] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.last = Layer(), Layer(), Layer()
        if register is not None:
            register(self.first, self.second)


class Registry:
    items: Any = []  # a program's own, of its class

    @classmethod
    def newest(cls) -> Any:
        return cls.items[-1]


class Kind(type):
    held: Any = None


class OfKind(metaclass=Kind):
    pass


def zero(module: Any) -> None:
    with torch.no_grad():
        module.weight.zero_()
        module.mean.add_(7)


def hook(layer: nn.Module, function: Callable[[], object]) -> None:
    layer.register_load_state_dict_pre_hook(lambda *_: function() and None)


def become(layer: nn.Module, **attributes: Any) -> None:
    """Give a layer a class of its own, whose loading calls `before`."""

    def load(self: Any, *args: Any) -> None:
        self.before()
        Layer._load_from_state_dict(self, *args)

    layer.__class__ = type("Odd", (Layer,), {"_load_from_state_dict": load, **attributes})


def by_class(one: Any, other: Any) -> None:
    become(one, others=[other], before=lambda self: zero(self.others[0]))


def by_property(one: Any, other: Any) -> None:
    HELD[:] = [other]
    become(one, friend=property(lambda self: HELD[0]), before=lambda self: zero(self.friend))


def by_metaclass(one: Any, other: Any) -> None:
    Kind.held = other
    hook(one, lambda: zero(OfKind.held))


def by_class_method(one: Any, other: Any) -> None:
    Registry.items = [other]
    hook(one, lambda: zero(Registry.newest()))


def by_constructor(one: Any, other: Any) -> None:
    class Zeroing:
        def __init__(self) -> None:
            zero(HELD[0])

    HELD[:] = [other]
    hook(one, lambda: Zeroing() and None)


def by_global_of_inner_code(one: Any, other: Any) -> None:
    HELD[:] = [other]
    hook(one, lambda: [zero(each) for each in HELD])


def by_function_of_a_module(one: Any, other: Any) -> None:
    MODULE.held = other
    exec("def change():\n held.weight.detach().zero_()", vars(MODULE))
    hook(one, lambda: MODULE.change())


def by_import(one: Any, other: Any) -> None:
    sys.modules[MODULE.__name__] = MODULE
    MODULE.held = other

    def change() -> None:
        from aiockpt_test_held import held

        zero(held)

    hook(one, change)


def by_name_of_a_module(one: Any, other: Any) -> None:
    sys.modules[MODULE.__name__] = MODULE
    MODULE.held = other
    hook(one, lambda: zero(importlib.import_module("_".join(["aiockpt", "test", "held"])).held))


def by_text(one: Any, other: Any) -> None:
    HELD[:] = [other]
    hook(one, lambda: exec("zero(HELD[0])"))


def by_globals(one: Any, other: Any) -> None:
    HELD[:] = [other]
    hook(one, lambda: zero(globals()["HE" + "LD"][0]))


def by_builtins(one: Any, other: Any) -> None:
    builtins.aiockpt_test_held = other
    hook(one, lambda: zero(aiockpt_test_held))  # noqa: F821


def by_attribute_of_torch(one: Any, other: Any) -> None:
    nn.Linear.aiockpt_test_held = other
    hook(one, lambda: zero(torch.nn.Linear.aiockpt_test_held))


def by_attribute_of_any_name(one: Any, other: Any) -> None:
    one.__dict__["secret_1"] = [other]
    one.register_load_state_dict_pre_hook(lambda module, *_: zero(getattr(module, f"secret_{1}")[0]))


def by_dict(one: Any, other: Any) -> None:
    one.__dict__["secret_1"] = [other]

    def change(module: Any, *_: Any) -> None:
        module.__dict__.update(seen=True)
        zero(module.__dict__[f"secret_{1}"][0])

    one.register_load_state_dict_pre_hook(change)


def by_proxy(one: Any, other: Any) -> None:
    proxy = weakref.proxy(other)
    hook(one, lambda: zero(proxy))


def by_context(one: Any, other: Any) -> None:
    VARIABLE.set(other)
    hook(one, lambda: zero(VARIABLE.get()))


def by_collector(one: Any, other: Any) -> None:
    other.is_other = True
    hook(one, lambda: [zero(each) for each in gc.get_objects() if type(each) is Layer and "is_other" in vars(each)])


def by_generator(one: Any, other: Any) -> None:
    def changes() -> Any:
        while True:
            yield zero(other)

    hook(one, functools.partial(next, changes()))


def by_array(one: Any, other: Any) -> None:
    array = other.weight.detach().numpy()[::-1, 1:]
    hook(one, lambda: array.fill(3))


def by_bytes(one: Any, other: Any) -> None:
    view = memoryview(other.mean.numpy()).cast("B")
    hook(one, lambda: view.__setitem__(slice(None), bytes(8)))


def by_storage(one: Any, other: Any) -> None:
    storage = other.weight.untyped_storage()
    hook(one, lambda: storage.fill_(0))


def by_attribute_of_a_tensor(one: Any, other: Any) -> None:
    one.weight.friend = other
    one.register_load_state_dict_pre_hook(lambda module, *_: zero(module.weight.friend))


@pytest.fixture(autouse=True)
def _forgotten():
    """Leave nothing where tests put other layers."""
    yield
    HELD.clear()
    Registry.items, Kind.held = [], None
    sys.modules.pop(MODULE.__name__, None)
    for place in (builtins, nn.Linear):
        if hasattr(place, "aiockpt_test_held"):
            del place.aiockpt_test_held


@pytest.mark.parametrize("register", [each for name, each in list(globals().items()) if name.startswith("by_")])
def test_another_module_that_is_changed_before_it_is_loaded(register, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"m": Pair()}, tmp_path / "c")
        results = []
        for is_own in (True, False):
            torch.manual_seed(2)
            module = Pair(register)
            if is_own:
                module.load_state_dict(ckpt.load(tmp_path / "c")["m"])
            else:
                ckpt.load(tmp_path / "c", {"m": module})
            results.append(dict(module.state_dict()))
    assert_same(*results)


def test_a_lazy_module_has_no_memory(tmp_path: Path) -> None:
    saved, fresh = nn.LazyLinear(2), nn.LazyLinear(2)
    saved(torch.zeros(1, 3))
    aiockpt.save({"m": saved}, tmp_path / "c")
    aiockpt.load(tmp_path / "c", {"m": fresh})
    assert_same(dict(saved.state_dict()), dict(fresh.state_dict()))


class Config:
    """Has attributes by other names too, as those of transformers have, and what can't be looked into."""

    def __init__(self) -> None:
        self.names, self.code = {"width": "size"}, (lambda: importlib.import_module("torch"))

    def __getattribute__(self, name: str) -> Any:
        names = object.__getattribute__(self, "names")
        return super().__getattribute__(names.get(name, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.names, name)


def test_what_the_loading_does_not_use_costs_nothing() -> None:
    module = Pair()
    module.first.config = Config()
    module.first.register_load_state_dict_pre_hook(lambda *_: None)
    loading = loading_of(module)
    assert isinstance(loading, ModuleLoading)
    assert (loading.foreign, loading.apart) == (["first."], set())
