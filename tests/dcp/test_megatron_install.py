from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiockpt.dcp import megatron
from aiockpt.errors import AiockptError

STRATEGIES = "megatron/core/dist_checkpointing/strategies"
NVRX = "nvidia_resiliency_ext/checkpointing/async_ckpt"

OLD = {
    f"{STRATEGIES}/filesystem_async.py": "class FileSystemWriterAsync: ...",
    f"{STRATEGIES}/torch.py": """
from .filesystem_async import FileSystemWriterAsync
def created():
    return FileSystemWriterAsync
""",
}
NEW = {
    f"{STRATEGIES}/filesystem_async.py": "class FileSystemWriterAsync: ...",
    f"{STRATEGIES}/torch.py": f"""
def get_async_strategy(async_strategy="nvrx", module=None):
    if async_strategy == "nvrx":
        try:
            from {NVRX.replace("/", ".")}.filesystem_async import FileSystemWriterAsync
        except ImportError:
            raise ModuleNotFoundError("install it")
    elif async_strategy == "mcore":
        from {STRATEGIES.replace("/", ".")}.filesystem_async import FileSystemWriterAsync
    else:
        raise TypeError(async_strategy)
    modules = dict(FileSystemWriterAsync=FileSystemWriterAsync)
    return async_strategy, modules[module] if module else modules
def created(strategy):
    return get_async_strategy(strategy)[1]["FileSystemWriterAsync"]
""",
}
RESILIENCY = {f"{NVRX}/filesystem_async.py": "class FileSystemWriterAsync: ..."}
# A possible later version: it keeps the class in a default argument, which `install` can't replace.
CLOSED = {
    f"{STRATEGIES}/torch.py": """
def get_async_strategy(async_strategy="nvrx", module=None, _kind=type("FileSystemWriterAsync", (), {})):
    return async_strategy, {"FileSystemWriterAsync": _kind}
"""
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that alone provides the packages `megatron` and `nvidia_resiliency_ext`."""
    names = ("megatron", "nvidia_resiliency_ext")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    megatron.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(kept)


def write(folder: Path, *versions: dict[str, str]) -> None:
    for version in versions:
        for name, text in version.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for parent, _, _ in os.walk(folder):
        (Path(parent) / "__init__.py").touch()
    (folder / "__init__.py").unlink()
    importlib.invalidate_caches()


def module(path: str) -> object:
    return importlib.import_module(path.replace("/", "."))


def test_the_class_of_an_old_megatron_is_replaced_where_it_is_used(packages: Path) -> None:
    write(packages, OLD)
    used = module(f"{STRATEGIES}/torch")
    stock = used.created()
    places = megatron.install()
    assert used.created() is megatron.FileSystemWriterAsync
    assert set(places) == {
        "megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync",
        "megatron.core.dist_checkpointing.strategies.torch.FileSystemWriterAsync",
    }
    assert megatron.install() == places
    megatron.uninstall()
    assert used.created() is stock
    megatron.uninstall()


@pytest.mark.parametrize("resiliency", [True, False])
def test_the_classes_that_a_new_megatron_chooses_from_are_replaced(packages: Path, resiliency: bool) -> None:
    write(packages, NEW, *([RESILIENCY] if resiliency else []))
    strategies = ["mcore", "nvrx"] if resiliency else ["mcore"]
    used = module(f"{STRATEGIES}/torch")
    stock = [used.created(strategy) for strategy in strategies]
    places = megatron.install()
    assert [used.created(strategy) for strategy in strategies] == [megatron.FileSystemWriterAsync] * len(strategies)
    assert len(places) == len(strategies)
    assert any("nvidia_resiliency_ext" in place for place in places) == resiliency
    megatron.uninstall()
    assert [used.created(strategy) for strategy in strategies] == stock


def test_nvrx_without_megatron(packages: Path) -> None:
    write(packages, RESILIENCY)
    other = {f"{NVRX}/saver.py": "from .filesystem_async import FileSystemWriterAsync"}
    write(packages, other)
    holder = module(f"{NVRX}/saver")
    assert len(megatron.install()) == 2
    assert holder.FileSystemWriterAsync is megatron.FileSystemWriterAsync


def test_a_package_that_is_installed_later_is_patched_by_the_next_call(packages: Path) -> None:
    write(packages, NEW)
    first = megatron.install()
    write(packages, RESILIENCY)
    assert set(megatron.install()) > set(first)
    assert module(f"{STRATEGIES}/torch").created("nvrx") is megatron.FileSystemWriterAsync


def test_a_version_that_keeps_its_class_is_an_error_and_nothing_is_replaced(packages: Path) -> None:
    write(packages, RESILIENCY, CLOSED)
    stock = module(f"{NVRX}/filesystem_async").FileSystemWriterAsync
    with pytest.raises(AiockptError, match=r"strategies\.torch with the strategy nvrx goes on using <class"):
        megatron.install()
    assert module(f"{NVRX}/filesystem_async").FileSystemWriterAsync is stock


def test_no_package_is_an_error(packages: Path) -> None:
    write(packages)
    with pytest.raises(ImportError, match="are they installed"):
        megatron.install()


def test_a_package_that_cannot_be_imported_is_an_error(packages: Path) -> None:
    write(packages, OLD, {f"{STRATEGIES}/torch.py": "import a_module_that_is_nowhere"})
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
        megatron.install()
