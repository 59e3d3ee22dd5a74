"""Loads into states with tied tensors, of which the checkpoint has one name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.golden.make_foreign import named
from tests.states import assert_same

HF = Path(__file__).parents[1] / "golden" / "foreign" / "hf-parts"


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer() as checkpointer:
        yield checkpointer


@pytest.fixture(params=["aiockpt", "safetensors", "torch"])
def stored(request: pytest.FixtureRequest, ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> tuple[Path, Any]:
    """Save the state of a model without the name of the tied tensor; return the path and the state."""
    state = {"model": {name: torch.randn_like(value) for name, value in Tied().state_dict().items()}}
    del state["model"]["head.weight"]
    flat = {f"model.{name}": value for name, value in state["model"].items()}
    path = tmp_path / f"c.{request.param}"
    if request.param == "torch":
        torch.save(state, path)
    else:
        ckpt.save(state if request.param == "aiockpt" else flat, path)
    return path, state["model"]


def assert_filled(state: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    assert_same({**stored, "head.weight": stored["embed.weight"]}, state)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


def test_a_tied_name_is_not_missing(ckpt: aiockpt.SyncCheckpointer, stored: tuple[Path, Any]) -> None:
    path, state = stored
    model = Tied()
    ckpt.load(path, {"model": model})
    assert_filled(dict(model.state_dict()), state)
    assert model.head.weight is model.embed.weight
    target = dict(Tied().state_dict())
    ckpt.load(path, {"model": target})
    assert_filled(target, state)


def test_a_tied_name_alone_is_filled(ckpt: aiockpt.SyncCheckpointer, stored: tuple[Path, Any]) -> None:
    path, state = stored
    for model in (Tied(), dict(Tied().state_dict())):
        before = torch.zeros(3)
        values = dict(model.state_dict()) if isinstance(model, Tied) else model
        values["norm.weight"].copy_(before)
        ckpt.load(path, {"model": model}, keys=["model.head.weight"])
        assert_same(state["embed.weight"], values["head.weight"])
        assert_same(before, values["norm.weight"])


@pytest.mark.parametrize(
    "change",
    [torch.clone, lambda weight: weight[:4], lambda weight: weight.t(), lambda weight: weight.view(torch.int32)],
)
def test_other_tensors_of_the_same_memory_are_missing(
    change: Any, ckpt: aiockpt.SyncCheckpointer, stored: tuple[Path, Any]
) -> None:
    target = dict(Tied().state_dict())
    target["head.weight"] = change(target["embed.weight"])
    with pytest.raises(aiockpt.MissingKeysError, match=r"lacks 1 of .*: model\.head\.weight"):
        ckpt.load(stored[0], {"model": target})


def test_empty_and_meta_tensors_are_not_tied(ckpt: aiockpt.SyncCheckpointer, tmp_path: Path) -> None:
    ckpt.save({"a": torch.zeros(0, 3)}, tmp_path / "c")
    with pytest.raises(aiockpt.MissingKeysError, match=r"asked for: b"):
        ckpt.load(tmp_path / "c", {"a": torch.zeros(0, 3), "b": torch.zeros(0, 3)})
    with pytest.raises(aiockpt.MissingKeysError, match=r"asked for: b"):
        ckpt.load(tmp_path / "c", {"a": torch.zeros(0, 3), "b": torch.zeros(0, 3, device="meta")})


@pytest.mark.slow
def test_a_model_of_transformers_loads_into_itself(ckpt: aiockpt.SyncCheckpointer) -> None:
    pytest.importorskip("transformers")
    model = importlib.import_module("tests.golden.make_foreign")._model(tied=True)
    state = dict(model.state_dict())
    for value in state.values():
        value.zero_()
    assert "lm_head.weight" in state
    ckpt.load(HF, model)
    for key, value in state.items():
        name = "model.embed_tokens.weight" if key == "lm_head.weight" else key
        assert_same(named(name, tuple(value.shape)), value, key)


@pytest.mark.parametrize("form", ["own", "metadata", "torch", "safetensors"])
def test_facts_name_the_key_that_one_is_tied_to(ckpt: aiockpt.SyncCheckpointer, form: str, tmp_path: Path) -> None:
    one = torch.arange(6.0)
    state = {"a": one, "part": one[:3], "none": torch.ones(0), "b": one, "nothing": torch.ones(0), "c": one.clone()}
    path = tmp_path / {"torch": "c.pt", "safetensors": "c.safetensors"}.get(form, "c")
    ckpt.save(state, path)
    if form == "metadata":
        (path / ".aiockpt.json").unlink()
    with ckpt.open(path) as reader:
        assert {key: info.tied_to for key, info in reader.items()} == dict.fromkeys(state) | {"b": "a"}
