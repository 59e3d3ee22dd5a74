"""Steps that were saved with ``include`` and ``exclude``: a restore has what they have, and leaves the rest."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt


def made(value: float) -> dict[str, Any]:
    """Return a state with live objects, one of which has trained, all of whose tensors have this value."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(each["momentum_buffer"] for each in optimizer.state.values())]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)
    return {"model": model, "optim": optimizer, "step": int(value), "extra": {"w": torch.full((3,), value)}}


def values_of(state: dict[str, Any]) -> dict[str, float]:
    """Return one number for each part of a state."""
    return {
        "first": state["model"][0].weight[0, 0].item(),
        "last": state["model"][2].weight[0, 0].item(),
        "momentum": state["optim"].state[state["model"][0].weight]["momentum_buffer"][0, 0].item(),
        "step": float(state["step"]),
        "extra": state["extra"]["w"][0].item(),
    }


ALL = {"first", "last", "momentum", "step", "extra"}


def _is_first(name: str, _value: object) -> bool:
    return name.startswith("model.0.") or name == "step"


@pytest.mark.parametrize(
    ("filters", "restored"),
    [
        ({"include": "model"}, {"first", "last"}),
        ({"include": ["model", "step"]}, {"first", "last", "step"}),
        ({"include": ["model.0.weight", "step"]}, {"first", "step"}),
        ({"include": ["model.2.*"]}, {"last"}),
        ({"include": _is_first}, {"first", "step"}),
        ({"exclude": "optim"}, ALL - {"momentum"}),
        ({"exclude": ["optim.*", "extra.*"]}, ALL - {"momentum", "extra"}),
        ({"exclude": ["optim.state.*", "optim.param_groups"]}, ALL - {"momentum"}),
        ({"exclude": ["model.*.weight", "model.*.bias"]}, ALL - {"first", "last"}),
        ({"exclude": ["model.*"]}, ALL - {"first", "last"}),
        ({"exclude": lambda name, value: name.startswith("extra")}, ALL - {"extra"}),
        ({"include": ["model", "extra"], "exclude": "model.0"}, {"last", "extra"}),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize("given_to", ["manager", "save"])
def test_a_restore_has_what_the_step_has(filters: Any, restored: set[str], given_to: str, tmp_path: Path) -> None:
    of_all, of_one = (filters, {}) if given_to == "manager" else ({}, filters)
    with aiockpt.SyncCheckpointManager(tmp_path, **of_all) as run:
        run.save(1, made(1.0), **of_one)
    with aiockpt.SyncCheckpointManager(tmp_path, read_only=True) as reader:  # which does not know the filters
        state = made(2.0)
        with pytest.warns(aiockpt.MissingKeysWarning, match="stay as they are") as caught:
            found = reader.restore(state)
    assert found is not None
    assert {name for name, value in values_of(state).items() if value == 1.0} == restored
    assert {name for name, value in values_of(state).items() if value == 2.0} == ALL - restored
    assert found.left
    assert caught[0].message.keys == found.left  # type: ignore[union-attr]


@pytest.mark.asyncio
async def test_the_async_manager_too(tmp_path: Path) -> None:
    async with aiockpt.CheckpointManager(tmp_path, exclude="optim") as run:
        await (await run.save(1, made(1.0)))
        state = made(2.0)
        with pytest.warns(aiockpt.MissingKeysWarning, match="optim"):
            found = await run.restore(state)
    assert found is not None
    assert all(key.startswith("optim") for key in found.left)
    assert values_of(state) == dict.fromkeys(ALL, 1.0) | {"momentum": 2.0}


def test_what_was_not_left_out_must_be_there(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, exclude="optim") as run:
        run.save(1, made(1.0))
        state = made(2.0) | {"new": torch.ones(1)}
        with pytest.raises(aiockpt.MissingKeysError, match="lacks 1 of the keys asked for: new") as caught:
            run.restore(state)
        assert caught.value.keys == ("new",)
        assert values_of(state) == dict.fromkeys(ALL, 2.0), "it was checked before anything was filled"
        lacks: list[str] = []
        with pytest.warns(aiockpt.MissingKeysWarning):
            run.restore(state, strict=False, missing=lacks)
        assert "new" in lacks


def test_keys_decide_where_they_are_given(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, include=["model", "extra"]) as run:
        run.save(1, made(1.0))
        state = made(2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = run.restore(state, keys="extra")
        assert found is not None
        assert found.left == ()
        assert values_of(state) == dict.fromkeys(ALL, 2.0) | {"extra": 1.0}
        with pytest.raises(aiockpt.MissingKeysError, match="optim"):
            run.restore(state, keys="optim")


def test_a_save_may_differ_from_the_others(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path, include="model") as run:
        run.save(1, made(1.0), include="extra")
        run.save(2, made(2.0), exclude=["model.0"])
        with pytest.warns(aiockpt.MissingKeysWarning):
            run.restore(state := made(3.0), 1, discard_later=False)
        assert values_of(state) == dict.fromkeys(ALL, 3.0) | {"extra": 1.0}
        with pytest.warns(aiockpt.MissingKeysWarning):
            run.restore(state := made(3.0))
        assert values_of(state) == dict.fromkeys(ALL, 3.0) | {"last": 2.0}
        infos = run.infos()
    assert infos[0].filters == {"include": ["extra"]}
    assert infos[1].filters == {"include": ["model"], "exclude": ["model.0"]}
    assert infos[1].metadata == {}


@pytest.mark.parametrize(
    "filters", [3, "optim", {"include": 3}, {"include": [3]}, {"include": "model"}, {"exclude": False}]
)
def test_filters_that_can_not_be_understood_allow_nothing(filters: Any, tmp_path: Path) -> None:
    run = {"step": 1, "metrics": {}, "time": 1.0, "keep": "", "filters": filters}
    aiockpt.save({"a": torch.ones(1)}, tmp_path / "step-00000001", metadata={"run": run})
    with aiockpt.SyncCheckpointManager(tmp_path) as manager:
        assert manager.infos()[0].filters == {}
        with pytest.raises(aiockpt.MissingKeysError, match="optim"):
            manager.restore({"a": torch.zeros(1), "optim": torch.zeros(1)})


def test_a_function_of_a_key_says_what_must_be_there(tmp_path: Path) -> None:
    aiockpt.save({"a": torch.ones(1)}, tmp_path / "c")
    target = {"a": torch.zeros(1), "b": {"c": torch.zeros(1)}, "d": torch.zeros(1)}
    optional: Callable[[str], bool] = lambda key: not key.startswith("b")  # noqa: E731
    with pytest.raises(aiockpt.MissingKeysError, match="lacks 1 of the keys asked for: d"):
        aiockpt.load(tmp_path / "c", target, strict=optional)
    del target["d"]
    with pytest.warns(aiockpt.MissingKeysWarning, match=r"b\.c"):
        aiockpt.load(tmp_path / "c", target, strict=optional)
    assert target["a"].item() == 1.0
    with pytest.raises(TypeError, match="strict must be True or False, or a function of a key"):
        aiockpt.load(tmp_path / "c", target, strict="no")
