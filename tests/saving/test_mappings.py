"""Mappings that are more than dicts: configurations that refer to values elsewhere, and objects that share others."""

from __future__ import annotations

import os
import warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import aiockpt


class Config(MutableMapping[str, Any]):
    """A mapping like OmegaConf's: values may refer to the environment, and parts know what they are parts of."""

    def __init__(self, content: dict[str, Any], parent: Config | None = None) -> None:
        self.content, self.parent = {}, parent
        for key, value in content.items():
            self[key] = value

    def __getitem__(self, key: str) -> Any:
        value = self.content[key]
        return os.environ[value[1:]] if isinstance(value, str) and value.startswith("$") else value

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = Config(value, self) if isinstance(value, dict) else value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Computed(Mapping[str, Any]):
    """A mapping of tensors that can't be pickled, as that of an open file."""

    def __init__(self) -> None:
        self.read = lambda: torch.arange(3)

    def __getitem__(self, key: str) -> Any:
        return self.read()

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


class Shared:
    """Something that several others hold."""


class Holder:
    def __init__(self, shared: Shared) -> None:
        self.shared = shared


def _config(parts: int = 3, **more: Any) -> Config:
    return Config({f"k{number}": {"a": [1, 2]} for number in range(parts)} | more)


@pytest.fixture
def ckpt() -> Iterator[aiockpt.SyncCheckpointer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", aiockpt.SafeGlobalsWarning)
        warnings.filterwarnings("ignore", "config and (many|list) share a Config")
        with aiockpt.SyncCheckpointer() as made:
            yield made


@pytest.mark.parametrize("name", ["c", "c.pt"])
def test_a_configuration_is_one_object_whose_references_stay(
    name: str, ckpt: aiockpt.SyncCheckpointer, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("SECRET", "resolved-secret")
    config = _config(secret="$SECRET", unset="$NOT_SET_ANYWHERE")
    ckpt.save({"config": config, "many": [config["k0"], config["k1"]], "w": torch.ones(2)}, tmp_path / name)
    files = [tmp_path / name] if name.endswith(".pt") else list((tmp_path / name).iterdir())
    assert not any(b"resolved-secret" in file.read_bytes() for file in files)
    loaded = ckpt.load(tmp_path / name, safe_globals=[Config])
    assert loaded["config"].content["secret"] == "$SECRET"
    assert loaded["config"]["k0"].parent is loaded["config"]
    assert loaded["many"][0].parent is loaded["many"][1].parent
    target = {"config": Config({}), "w": torch.zeros(2)}
    assert ckpt.load(tmp_path / name, target, safe_globals=[Config])["config"].content["unset"] == "$NOT_SET_ANYWHERE"


def test_each_part_of_a_configuration_is_looked_at_and_stored_once(
    ckpt: aiockpt.SyncCheckpointer, tmp_path: Path
) -> None:
    sizes = []
    for parts in (20, 200):
        state = {"config": (config := _config(parts)), "list": list(config.values())}
        sizes.append(ckpt.save(state, tmp_path / str(parts)).nbytes)
    assert sizes[1] < 12 * sizes[0]


def test_mappings_with_tensors_below_are_taken_apart(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    one = torch.ones(2)
    state = {
        "config": Config({"a": {"b": one}}),
        "computed": Computed(),
        "list": [Config({"w": one})],
        "user": UserDict(w=1),
        "chain": ChainMap({"w": 1}, {"v": 2}),
        "proxy": MappingProxyType({"w": 1}),
        "dicts": {"o": OrderedDict(w=1), "c": Counter("a"), "d": defaultdict(int, w=1)},
        "without": Config({"w": 1}),
        "lists": [1, [Config({"w": 1})]],
    }
    names = ["config.a.b", "computed.a", "computed.b", "list.0.w", "user.w", "chain.v", "chain.w", "proxy.w"]
    names += ["dicts.o.w", "dicts.c.a", "dicts.d.w", "without", "lists"]
    with pytest.warns(aiockpt.SafeGlobalsWarning):
        ckpt.save(state, tmp_path / "c")
    with ckpt.open(tmp_path / "c") as reader:
        assert sorted(reader) == sorted(names)


def test_an_object_with_a_state_dict_in_a_mapping_is_saved_as_that(
    ckpt: aiockpt.SyncCheckpointer, tmp_path: Path
) -> None:
    ckpt.save({"parts": Config({"model": torch.nn.Linear(2, 2), "lr": 0.5})}, tmp_path / "c")
    loaded = ckpt.load(tmp_path / "c")["parts"]
    assert (sorted(loaded), sorted(loaded["model"])) == (["lr", "model"], ["bias", "weight"])


def test_a_configuration_that_was_stored_in_parts_is_loaded_into_one(
    ckpt: aiockpt.SyncCheckpointer, tmp_path: Path
) -> None:
    ckpt.save({"config": {"k0": {"a": 7}, "lr": 0.5}, "w": torch.ones(2)}, tmp_path / "c")  # as one was before
    config = Config({"k0": {"a": 1}, "lr": 0.0})
    loaded = ckpt.load(tmp_path / "c", {"config": config, "w": torch.zeros(2)})
    assert loaded["config"] is config
    assert (config["k0"]["a"], config["lr"]) == (7, 0.5)


def test_a_configuration_is_no_state(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    with pytest.raises(aiockpt.SaveError, match="not a Config; wrap it"):
        ckpt.save(_config(), tmp_path / "c")


def test_objects_of_a_torch_file_share_what_they_shared(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    shared, numbers = Shared(), [1, 2]
    state = {"a": Holder(shared), "b": {"c": Holder(shared)}, "d": numbers, "e": numbers, "w": torch.ones(2)}
    ckpt.save(state, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    assert loaded["a"].shared is loaded["b"]["c"].shared
    assert loaded["d"] is loaded["e"]


def test_objects_with_several_keys_that_share_one_are_told_once(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    shared = Shared()
    state = {"a": Holder(shared), "b": {"c": Holder(shared)}, "both": [Holder(shared)]}
    with pytest.warns(UserWarning, match=r"^a and b\.c share a Shared, which is stored with each"):
        ckpt.save(state, tmp_path / "c")
    ckpt.save(state, tmp_path / "d")
    ckpt.save({"all": [state["a"], state["b"]["c"]]}, tmp_path / "e")
