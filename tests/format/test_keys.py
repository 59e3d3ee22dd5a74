"""Hints for missing keys: similar names, and wrapped models."""

from __future__ import annotations

import difflib

import pytest

from aiockpt.format import keys as selection
from aiockpt.format.keys import hint

LAYERS = [f"layers.{i}.{part}.{kind}" for i in range(12) for part in ("up", "down") for kind in ("weight", "bias")]
INSIDE = [f"model.{name}" for name in LAYERS]


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("model.layers.3.up.wieght", "model.layers.3.up.weight"),  # at the end
        ("modle.layers.3.up.weight", "model.layers.3.up.weight"),  # at the beginning
        ("model.layers.3.upp.weight", "model.layers.3.up.weight"),
        ("model.layres.7.down.bias", "model.layers.7.down.bias"),
        ("modle", "model"),  # a container
        ("model.layerz.*", "model.layers"),  # a pattern
    ],
)
def test_a_typo(missing: str, found: str) -> None:
    assert hint([missing], INSIDE) == f" What looks alike: '{found}' for '{missing.removesuffix('.*')}'."


def test_a_container_is_named_as_one() -> None:
    """It is not said to look like itself."""
    text = " 'model.layers.0' is a container of keys such as 'model.layers.0.up.weight'."
    assert hint(["model.layers.0"], INSIDE) == text
    assert hint(["modle", "model.layers.0"], INSIDE) == text


def test_keys_that_were_asked_for_are_not_suggested() -> None:
    """The new layers of a grown model are no typos of the old ones, which it asks for as well."""
    grown = [name.replace("layers.1.", "layers.12.") for name in INSIDE if "layers.1." in name]
    assert hint(grown, INSIDE, {*INSIDE, *grown}) == ""
    assert hint(["lr"], [*INSIDE, "momentum"]) == ""
    assert hint(["lr"], []) == ""


@pytest.mark.parametrize(
    ("level", "wrapper"),
    [
        ("module", "DistributedDataParallel"),
        ("_orig_mod", "torch.compile"),
        ("module._orig_mod", "DistributedDataParallel and torch.compile"),
    ],
)
@pytest.mark.parametrize("outer", ["", "state.model."])
def test_a_wrapped_model(level: str, wrapper: str, outer: str) -> None:
    wrapped, bare = ([f"{outer}{inner}{name}" for name in LAYERS] for inner in (f"{level}.", ""))
    text = hint(bare, wrapped, bare, fills=True)
    nested, ends = "".join(f"{{'{each}': " for each in level.split(".")), "}" * len(level.split("."))
    assert text == (
        f" Its keys have '{level}.', as in '{wrapped[0]}' for '{bare[0]}': it was saved from a model within {wrapper}. "
        f"Load into {nested}model{ends} in place of model; what is saved as model.{level} has no such keys."
    )
    text = hint(wrapped, bare, wrapped, fills=True)
    assert text == (
        f" Its keys lack '{level}.', as in '{bare[0]}' for '{wrapped[0]}': it was saved from a model that was not "
        f"within {wrapper}. Load into what is below '{level}' in the target, model.{level}."
    )
    assert hint(wrapped, bare).endswith(f"that was not within {wrapper}.")


def test_an_outer_level_that_is_missing_or_extra() -> None:
    assert hint(LAYERS, INSIDE) == " Its keys have 'model.', as in 'model.layers.0.up.weight' for 'layers.0.up.weight'."
    assert hint(INSIDE, LAYERS, fills=True) == (
        " Its keys lack 'model.', as in 'layers.0.up.weight' for 'model.layers.0.up.weight'. "
        "Load into what is below 'model' in the target."
    )
    assert hint(LAYERS, INSIDE, fills=True).endswith(". Put a dict around what it fills: {'model': ...}.")
    assert hint([*LAYERS, "head.weight"], INSIDE).startswith(" Its keys have 'model.'")  # of all keys but one
    assert "'ema.net'" not in hint(["weight"], ["ema.net.weight", "net.weight"])  # ambiguous
    both = [f"{level}.{kind}" for level in ("net.0", "net.2") for kind in ("weight", "bias")]
    assert "Its keys" not in hint(["net.weight", "net.bias"], both)
    assert hint(["a.a.w", "a.a.b"], ["a.a.a.w", "a.a.a.b"]).startswith(" Its keys have 'a.'")  # at any position
    assert hint(["w"], ["model.w"]).startswith(" Its keys have 'model.'")


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    closest = difflib.get_close_matches

    def counted(word: str, names: list[str], *args: float) -> list[str]:
        compared.append(len(names))
        return closest(word, names, *args)

    monkeypatch.setattr(selection.difflib, "get_close_matches", counted)
    stored = [f"model.layers.{i}.up.weight" for i in range(100_000)]
    missing = [f"model.layers.{i}.up.wieght" for i in range(5_000)]
    assert hint(missing, stored).startswith(" What looks alike: 'model.layers.0.up.weight' for 'model.layers.0.up.wie")
    assert hint([f"{i}.of.something.else" for i in range(5_000)], stored) == ""
    assert len(compared) <= 20
    assert max(compared) <= 200
    assert hint(["a." * 100_000, "b" * 100_000], ["a." * 100_001, "b" * 100_001]) == ""


def test_names_are_printed_safely() -> None:
    text = hint(["model.\x1b[2Jw\ny"], ["model.\x1b[2Jw\nx"])
    assert text == r" What looks alike: 'model.\x1b[2Jw\nx' for 'model.\x1b[2Jw\ny'."
    assert "\x1b" not in hint(["w", "b"], ["\x1b.w", "\x1b.b"], fills=True)
