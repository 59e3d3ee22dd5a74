"""If warnings are errors, the caller gets the warning, and not an error about the checkpoint."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage

pytestmark = pytest.mark.filterwarnings("error")


def warn() -> None:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)


class WarnsWhenPickled:
    def __reduce__(self) -> Any:
        warn()
        return WarnsWhenPickled, ()


class WarnsWhenMade:
    def __reduce__(self) -> Any:
        return make, ()


def make() -> WarnsWhenMade:
    warn()
    return WarnsWhenMade()


class UnportableStorage(GatedStorage):
    def __reduce__(self) -> Any:
        warn()
        return str, ()


class WarningTransform:
    """Passes bytes through, and warns in one of its methods."""

    descriptor = "test.warning/1"

    def __init__(self, where: str) -> None:
        self._where = where

    def encoder(self) -> WarningTransform:
        return self._at("encoder")

    def decoder(self) -> WarningTransform:
        return self._at("decoder")

    def update(self, data: Any, most: int | None = None) -> Any:
        self._at("update" if most is None else "decode")
        return bytes(data)

    def finish(self, most: int | None = None) -> Any:
        self._at("finish" if most is None else "decode")
        return b""

    def _at(self, where: str) -> WarningTransform:
        if where == self._where:
            warn()
        return self


def assert_warns(call: Callable[[], object]) -> None:
    """Assert that a call raises the warning, or, from the engine's threads, an error caused by it."""
    with pytest.raises((UserWarning, aiockpt.AiockptError)) as info:
        call()
    if not isinstance(info.value, UserWarning):
        assert type(info.value) in (aiockpt.SaveError, aiockpt.LoadError), info.value
        assert isinstance(info.value.__cause__, UserWarning)
    assert "mind the gap" in str(info.value)


def test_at_the_call(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_warns(lambda: ckpt.submit({"x": WarnsWhenPickled()}, tmp_path / "a"))
        assert_warns(lambda: ckpt.save({"x": torch.ones(9)}, tmp_path / "a", compress=lambda _name, _tensor: warn()))
        ckpt.save({"x": torch.ones(1)}, tmp_path / "a")
    with aiockpt.SyncCheckpointer(writer="process") as ckpt:
        storage = UnportableStorage(LocalStorage(), [])
        assert_warns(lambda: ckpt.submit({"x": torch.ones(1)}, tmp_path / "b", storage=storage))


def test_when_objects_are_read(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.save({"x": WarnsWhenMade(), "t": torch.ones(1)}, tmp_path / "file.pt")
        with aiockpt.SyncCheckpointer() as ckpt:
            ckpt.save({"x": WarnsWhenMade()}, tmp_path / "a")
    with aiockpt.SyncCheckpointer() as ckpt:
        for name in ("a", "file.pt"):
            assert_warns(lambda name=name: ckpt.load(tmp_path / name, trust=True))  # type: ignore[misc]
            assert_warns(lambda name=name: ckpt.load(tmp_path / name, safe_globals=[make]))  # type: ignore[misc]


@pytest.mark.parametrize("where", ["encoder", "update", "finish"])
def test_when_items_are_transformed(where: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(transforms=[WarningTransform(where)]) as ckpt:
        assert_warns(lambda: ckpt.save({"x": torch.ones(1000)}, tmp_path / "a"))


@pytest.mark.parametrize("where", ["decoder", "decode"])
def test_when_items_are_transformed_back(where: str, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(transforms=[WarningTransform(where)]) as ckpt:
        ckpt.save({"x": torch.ones(1000)}, tmp_path / "a")
        assert_warns(lambda: ckpt.load(tmp_path / "a"))


# These modules report whose method failed and what was done before; that holds for warnings too.
EXEMPT = {"apply_live.py", "live.py"}


def test_handlers_that_translate_errors_let_warnings_through() -> None:
    package = Path(aiockpt.__file__).parent
    wrong = []
    for path in package.rglob("*.py"):
        if "testing" in path.parts or path.name in EXEMPT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Try):
                continue
            names = [ast.unparse(handler.type) if handler.type else "" for handler in node.handlers]
            for at, handler in enumerate(node.handlers):
                raises = any(isinstance(each, ast.Raise) and each.exc for each in ast.walk(handler))
                if names[at] == "Exception" and raises and not any("Warning" in name for name in names[:at]):
                    wrong.append(f"{path.relative_to(package)}:{handler.lineno}")
    assert wrong == []
