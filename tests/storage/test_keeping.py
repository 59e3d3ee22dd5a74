"""Safetensors that are replaced beside the other files of a model repository, which are kept."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage, syscalls
from aiockpt.storage.local.orphans import clean
from aiockpt.testing import GatedStorage
from tests.states import large_state

OTHERS = {
    "config.json": "{}",
    "generation_config.json": "{1}",
    "tokenizer.json": "t",
    "tokenizer_config.json": "tc",
    "special_tokens_map.json": "s",
    "vocab.txt": "v",
    "merges.txt": "m",
    "README.md": "# Mine",
    ".gitattributes": "*.safetensors lfs",
}
OLD, NEW = {"w": torch.zeros(500)}, {"w": torch.ones(500)}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return a directory that was exported, and to which the files of the repository were added."""
    path = tmp_path / "export"
    aiockpt.save(OLD, path, format="safetensors")
    for name, text in OTHERS.items():
        (path / name).write_text(text)
    return path


def assert_kept(path: Path, value: float) -> None:
    assert aiockpt.load(path)["w"][0].item() == value
    assert {name: (path / name).read_text() for name in OTHERS} == OTHERS
    left = {each.name for each in path.iterdir()} - OTHERS.keys()
    assert left == {".aiockpt.json", "model.safetensors"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def refuse_exchange(patch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")

    patch.setattr(syscalls, "_call", unsupported)


def refuse_links(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    patch.setattr(os, "link", refuse)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_an_export_is_repeated(writer: str, export: Path) -> None:
    inode = (export / "config.json").stat().st_ino
    with aiockpt.SyncCheckpointer(writer=writer) as ckpt:  # type: ignore[arg-type]
        for number in range(1, 3):
            ckpt.save({"w": torch.full((500,), float(number))}, export, format="safetensors", overwrite=True)
            assert_kept(export, number)
    assert (export / "config.json").stat().st_ino == inode
    assert (export / "config.json").stat().st_nlink == 1


@pytest.mark.parametrize("refuse", [refuse_exchange, refuse_links])
def test_without_the_means_of_the_file_system(
    refuse: Callable[[pytest.MonkeyPatch], None], export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    aiockpt.save(NEW, export, format="safetensors", overwrite=True)
    assert_kept(export, 1)


@pytest.mark.parametrize("refuse", [lambda _: None, refuse_exchange, refuse_links], ids=["exchange", "steps", "copies"])
def test_a_first_export_beside_them(
    refuse: Callable[[pytest.MonkeyPatch], None], export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".aiockpt.json", "model.safetensors"):
        (export / name).unlink()
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.CheckpointExistsError, match="exists already"):
            ckpt.submit(NEW, export, format="safetensors")
        with pytest.raises(aiockpt.CheckpointExistsError, match="config"):
            ckpt.submit(NEW, export, overwrite=True)
        with pytest.raises(aiockpt.DeleteError, match="config"):
            ckpt.delete(export)
    refuse(monkeypatch)
    aiockpt.save(NEW, export, format="safetensors", overwrite=True)
    assert_kept(export, 1)


def test_shards_of_before_go(export: Path) -> None:
    state = large_state(2)
    aiockpt.save(state, export, format="safetensors", shard_bytes=100, overwrite=True)
    assert (export / "model.safetensors.index.json").exists()
    aiockpt.save(NEW, export, format="safetensors", overwrite=True)
    assert_kept(export, 1)


@pytest.mark.parametrize("name", ["notes.txt", "pytorch_model.bin", "tokenizer/", "README.md@"])
def test_anything_else_is_refused(name: str, export: Path) -> None:
    other = export / name.rstrip("@/")
    other.unlink(missing_ok=True)
    if name.endswith("/"):
        other.mkdir()
    elif name.endswith("@"):
        other.symlink_to("/etc/hostname")
    else:
        other.write_text("mine")
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.CheckpointExistsError, match=re.escape(other.name)):
        ckpt.submit(NEW, export, format="safetensors", overwrite=True)  # at the call
    assert os.path.lexists(other)
    assert aiockpt.load(export)["w"][0].item() == 0


def test_only_safetensors_are_put_beside_them(export: Path, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.CheckpointExistsError, match="config"):
            ckpt.submit(NEW, export, overwrite=True)
        with pytest.raises(aiockpt.DeleteError, match="config"):
            ckpt.delete(export)
        ckpt.save(OLD, tmp_path / "dcp")
        (tmp_path / "dcp" / "config.json").write_text("{}")
        with pytest.raises(aiockpt.CheckpointExistsError, match="config"):
            ckpt.submit(NEW, tmp_path / "dcp", format="safetensors", overwrite=True)


@pytest.mark.parametrize("refuse", [lambda _: None, refuse_exchange], ids=["exchange", "steps"])
def test_a_file_that_changes_during_the_commit_is_not_lost(
    refuse: Callable[[pytest.MonkeyPatch], None], export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    link = os.link

    def change(source: str, target: str, **options: bool) -> None:
        link(source, target, **options)
        if source == str(export / "config.json"):
            (export / "new").write_text("edited")
            (export / "new").rename(source)

    monkeypatch.setattr(os, "link", change)
    with pytest.raises(aiockpt.CheckpointExistsError, match="its other files are not those"):
        aiockpt.save(NEW, export, format="safetensors", overwrite=True)
    assert (export / "config.json").read_text() == "edited"
    assert aiockpt.load(export)["w"][0].item() == 0
    assert [each.name for each in export.parent.iterdir()] == ["export"]


def test_a_cancelled_save_leaves_all_as_it_was(export: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(NEW, export, format="safetensors", overwrite=True, storage=storage)
        storage.reached["commit"].result(60)
        (export / "notes.txt").write_text("mine")  # refused at the commit
        storage.open("commit")
        with pytest.raises(aiockpt.CheckpointExistsError, match="notes"):
            save.written.result(60)
    (export / "notes.txt").unlink()
    assert_kept(export, 0)


@pytest.mark.parametrize("step", ["before", "after"])
def test_what_a_killed_save_leaves_is_removed(step: str, export: Path, python: list[str]) -> None:
    code = (
        "import os, signal, sys, torch, aiockpt\n"
        "from aiockpt.storage.local import commit\n"
        "rename = commit.rename_exchange\n"
        "def kill(*names):\n"
        f"    {'rename(*names)' if step == 'after' else 'pass'}\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "commit.rename_exchange = kill\n"
        "aiockpt.save({'w': torch.ones(500)}, sys.argv[1], format='safetensors', overwrite=True)\n"
    )
    done = subprocess.run([*python, "-c", code, str(export)], capture_output=True, timeout=120, check=False)
    assert done.returncode != 0, done.stderr
    (hidden,) = export.parent.glob(".aiockpt-*")
    assert (hidden / "config.json").read_text() == "{}"
    clean(str(export.parent), fsync=True)
    assert_kept(export, 1 if step == "after" else 0)
