"""Replacing and deleting remove only the files of a checkpoint, and refuse a directory that holds anything else."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.errors import CheckpointExistsError, DeleteError, WriteError
from aiockpt.storage import LocalStorage
from aiockpt.storage.local import belonging, commit
from aiockpt.storage.local import storage as deleting
from aiockpt.storage.local.belonging import OtherThingsError, checkpoint_above, look_into, remove
from aiockpt.storage.local.orphans import clean
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.testing import GatedStorage
from tests.stock import ALONE

STATE = {"notes": torch.arange(3000.0), "sub": {"b": torch.arange(7)}, "step": 3}
NEW = {"w": torch.ones(5)}


def save_stock(path: Path, state: dict | None = None, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(path, **options)
        dcp.save(dict(STATE if state is None else state), storage_writer=writer, **ALONE)


def save_shards(path: Path) -> None:
    path.mkdir()
    for number in (1, 2):
        safetensors.torch.save_file({f"t{number}": torch.ones(3)}, path / f"model-{number}.safetensors")
    weights = {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def save_as_lightning(path: Path) -> None:
    save_stock(path)
    torch.save({"epoch": 1}, path / "meta.pt")


def save_one_rank(path: Path) -> None:
    save_stock(path)
    (path / ".metadata").rename(path / "__0.metadata")


def without_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damaged(path: Path) -> None:
        make(path)
        (path / name).unlink()

    return damaged


def with_truncated(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damaged(path: Path) -> None:
        make(path)
        (path / name).write_bytes((path / name).read_bytes()[:-7])

    return damaged


def save_ours(path: Path, **options) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        checkpointer.save(STATE, path, **options)


def save_our_safetensors(path: Path) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        checkpointer.save({f"t{n}": torch.ones(1000) for n in range(3)}, path, format="safetensors", shard_bytes=4000)


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "ours": save_ours,
    "ours with a hint": lambda path: save_ours(path, separation_hint="sub"),
    "ours in safetensors": save_our_safetensors,
    "stock": save_stock,
    "stock with a file for each": lambda path: save_stock(path, single_file_per_rank=False),
    "stock of one rank alone": save_one_rank,
    "stock of Lightning": save_as_lightning,
    "a set of safetensors": save_shards,
    "a directory of one": lambda path: (path.mkdir(), safetensors.torch.save_file(NEW, path / "my.safetensors")),
    "metadata damaged, manifest whole": with_truncated(".metadata", save_ours),
    "no metadata": without_file(".metadata", save_ours),
    "data missing": without_file("__0_0.distcp", save_stock),
}
UNPROVEN: dict[str, Callable[[Path], object]] = {
    "damaged manifest": with_truncated(".aiockpt.json", save_ours),
    "damaged metadata": with_truncated(".metadata", save_stock),
    "both damaged": with_truncated(".metadata", with_truncated(".aiockpt.json", save_ours)),
    "unfinished": without_file(".metadata", save_stock),
    "damaged index of shards": with_truncated("model.safetensors.index.json", save_shards),
    "an index of torch as well": lambda path: (
        save_shards(path),
        (path / "other.bin.index.json").write_text('{"weight_map": {"x": "other.bin"}}'),
        torch.save(NEW, path / "other.bin"),
    ),
    "two indexes": lambda path: (
        save_shards(path),
        (path / "lora.safetensors.index.json").write_text('{"weight_map": {"t1": "model-1.safetensors"}}'),
    ),
}
FOREIGN_NAMES = ("step-1/", "notes", "thesis.tex", "__7_0.distcp", "other.safetensors", "common.pt")


def put_foreign(path: Path, name: str) -> None:
    if name.endswith("/"):
        save_ours(path / name)
    else:
        (path / name).write_text("mine")


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoint_is_replaced_and_deleted(kind: str, ckpt, tmp_path: Path) -> None:
    for path in (tmp_path / "a", tmp_path / "b"):
        CHECKPOINTS[kind](path)
    ckpt.save(NEW, tmp_path / "a", overwrite=True)
    assert torch.equal(ckpt.load(tmp_path / "a")["w"], NEW["w"])
    ckpt.delete(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("foreign", FOREIGN_NAMES)
@pytest.mark.parametrize("kind", ["ours", "ours in safetensors", "stock", "stock of one rank alone"])
def test_foreign_files_are_refused_and_listed(kind: str, foreign: str, ckpt, tmp_path: Path) -> None:
    path = tmp_path / "a"
    CHECKPOINTS[kind](path)
    put_foreign(path, foreign) if not foreign.endswith("/") else shutil.copytree(_nested(tmp_path), path / foreign)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointExistsError, match=rf"/a is a .* other things than a checkpoint \({foreign}\)"):
        ckpt.submit(NEW, path, overwrite=True)  # at the call
    with pytest.raises(DeleteError, match=rf"other things than a checkpoint \({foreign}\); nothing was deleted"):
        ckpt.delete(path)
    assert sorted(tmp_path.rglob("*")) == before


def _nested(folder: Path) -> Path:
    if not (folder / "nested").exists():
        save_ours(folder / "nested")
    return folder / "nested"


@pytest.mark.parametrize("kind", UNPROVEN)
def test_what_cannot_be_read_proves_nothing(kind: str, ckpt, tmp_path: Path) -> None:
    UNPROVEN[kind](tmp_path / "a")
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointExistsError, match=r"\)(: .*)?; overwrite=True replaces a checkpoint and nothing else"
    ):
        ckpt.save(NEW, tmp_path / "a", overwrite=True)
    with pytest.raises(
        DeleteError, match=r"\)(: .*)?; nothing was deleted. Move away what is to stay, or remove it all"
    ):
        ckpt.delete(tmp_path / "a")
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_long_list_of_foreign_files_is_truncated(ckpt, tmp_path: Path) -> None:
    save_ours(tmp_path / "a")
    for number in range(300):
        (tmp_path / "a" / f"{number:03}\n").touch()
    with pytest.raises(DeleteError, match=r"\(000\\n, 001\\n, 002\\n, 003\\n, 004\\n and 295 more\); nothing was del"):
        ckpt.delete(tmp_path / "a")


def test_safetensors_files_without_index_are_refused(ckpt, tmp_path: Path) -> None:
    save_shards(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointExistsError, match=r"\(model-1.safetensors, model-2.safetensors\)"):
        ckpt.save(NEW, tmp_path / "a", overwrite=True)


def test_user_metadata_does_not_claim_files(ckpt, tmp_path: Path) -> None:
    ckpt.save(STATE, tmp_path / "a", metadata={"base": "base.safetensors"})
    (tmp_path / "a" / "base.safetensors").write_text("mine")
    with pytest.raises(DeleteError, match=r"\(base.safetensors\)"):
        ckpt.delete(tmp_path / "a")


def test_empty_directory_is_replaced_but_not_deleted(ckpt, tmp_path: Path) -> None:
    """An empty directory is no checkpoint, but replacing it loses nothing."""
    (tmp_path / "a").mkdir()
    with pytest.raises(DeleteError, match="/a is empty; nothing was deleted"):
        ckpt.delete(tmp_path / "a")
    with pytest.raises(CheckpointExistsError, match="exists already"):
        ckpt.save(NEW, tmp_path / "a")
    ckpt.save(NEW, tmp_path / "a", overwrite=True)
    assert torch.equal(ckpt.load(tmp_path / "a")["w"], NEW["w"])


# --- files that appear meanwhile ----------------------------------------------------------------------


def test_foreign_file_created_before_commit(ckpt, tmp_path: Path) -> None:
    ckpt.save(STATE, tmp_path / "a")
    storage = GatedStorage(LocalStorage(), ["commit"])
    save = ckpt.submit(NEW, tmp_path / "a", overwrite=True, storage=storage)
    storage.reached["commit"].result(30)
    (tmp_path / "a" / "thesis.tex").write_text("mine")
    storage.open("commit")
    with pytest.raises(CheckpointExistsError, match=r"\(thesis.tex\)"):
        save.written.result(30)
    assert torch.equal(ckpt.load(tmp_path / "a")["notes"], STATE["notes"])
    assert (tmp_path / "a" / "thesis.tex").read_text() == "mine"
    assert os.listdir(tmp_path) == ["a"]


def _before(function: str, module, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an action once, right before the first call of a function of a module."""
    real, pending = getattr(module, function), [action]

    def first(*args, **kwargs):
        if pending:
            pending.pop()()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, function, first)


def test_foreign_file_created_just_before_the_exchange(ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file created between the last check and the exchange makes the commit exchange the names back."""
    ckpt.save(STATE, tmp_path / "a")
    mine = tmp_path / "a" / "thesis.tex"
    _before("rename_exchange", commit, lambda: mine.write_text("mine"), monkeypatch)
    with pytest.raises(CheckpointExistsError, match=r"changed during the save, .*\(thesis.tex\); it was left as it is"):
        ckpt.save(NEW, tmp_path / "a", overwrite=True)
    assert mine.read_text() == "mine"
    mine.unlink()
    assert ckpt.load(tmp_path / "a")["step"] == 3
    assert os.listdir(tmp_path) == ["a"]


def test_foreign_file_created_just_before_a_delete(ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(STATE, tmp_path / "a")
    mine = tmp_path / "a" / "thesis.tex"
    _before("rename_noreplace", deleting, lambda: mine.write_text("mine"), monkeypatch)
    with pytest.raises(DeleteError, match=r"\(thesis.tex\); nothing was deleted"):
        ckpt.delete(tmp_path / "a")
    assert mine.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a"]


def test_foreign_file_created_during_removal(
    ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file stays, as one from a program that has the directory open, and the error names its place."""
    ckpt.save(STATE, tmp_path / "a")
    directory = os.open(tmp_path / "a", os.O_RDONLY)

    def write() -> None:
        os.close(os.open("thesis.tex", os.O_CREAT | os.O_WRONLY, dir_fd=directory))

    _before("rmdir", belonging.os, write, monkeypatch)
    with pytest.raises(DeleteError, match=r"/a is deleted, but .* removed from .*holds other .*\(thesis.tex\), which"):
        ckpt.delete(tmp_path / "a")
    (hidden,) = tmp_path.iterdir()
    assert os.listdir(hidden) == ["thesis.tex"]
    ckpt.save(NEW, tmp_path / "a")
    assert sorted(tmp_path.iterdir()) == sorted([hidden, tmp_path / "a"])
    shutil.rmtree(hidden)
    os.close(directory)


@pytest.mark.asyncio
async def test_foreign_file_in_an_unfinished_save(tmp_path: Path) -> None:
    workers = Workers(1, "aiockpt-test")
    try:
        transaction = await LocalStorage().begin(str(tmp_path / "a"), overwrite=False, workers=workers)
        sink = await transaction.create("any name", 3)
        await sink.write(memoryview(b"abc"))
        await sink.finish()
        mine = tmp_path / transaction.ticket / "thesis.tex"
        mine.write_text("mine")
        with pytest.raises(WriteError, match=r"\(thesis.tex\), which stay there") as caught:
            await transaction.abort()
        assert isinstance(caught.value.__cause__, OtherThingsError)
        assert mine.exists()
        mine.unlink()
        remove(str(mine.parent), also=["any name"])
    finally:
        workers.close()
    assert list(tmp_path.iterdir()) == []


# --- inside a checkpoint ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "ours in safetensors", "stock", "both damaged"])
@pytest.mark.parametrize("below", ["step-1", "x/y/step-1", "m.safetensors"])
def test_save_inside_a_checkpoint_is_refused(kind: str, below: str, ckpt, tmp_path: Path) -> None:
    {**CHECKPOINTS, **UNPROVEN}[kind](tmp_path / "r")
    (tmp_path / "last").symlink_to("r")
    before = sorted(tmp_path.rglob("*"))
    for name in ("r", "last"):
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError, match=rf"in the directory of a .*, {tmp_path}/r, .* beside"):
                ckpt.submit(NEW, tmp_path / name / below, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_directory_that_only_looks_like_a_checkpoint_may_hold_checkpoints(ckpt, tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir()
    ckpt.save(NEW, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_text("of another program")
    ckpt.save(NEW, tmp_path / "b" / "c")
    assert checkpoint_above(str(tmp_path / "b" / "c" / "d")) == str(tmp_path / "b" / "c")


def test_fallback_path_inside_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    save_ours(tmp_path / "r")
    with aiockpt.SyncCheckpointer(process_group=None, fallback_path=tmp_path / "r") as ckpt:
        save = ckpt.submit(NEW, tmp_path / "file" / "a")
        with pytest.raises(aiockpt.AiockptError):
            save.written.result(30)
    assert "a" not in os.listdir(tmp_path / "r")


# --- links and files ----------------------------------------------------------------------------------


def test_symlink_itself_is_replaced_and_deleted(ckpt, tmp_path: Path) -> None:
    ckpt.save(STATE, tmp_path / "step-1")
    (tmp_path / "step-1" / "thesis.tex").write_text("mine")  # the target of a symlink is not touched
    (tmp_path / "last").symlink_to("step-1")
    before = sorted((tmp_path / "step-1").iterdir())
    with pytest.raises(CheckpointExistsError, match="exists already"):
        ckpt.save(NEW, tmp_path / "last")
    ckpt.save(NEW, tmp_path / "last", overwrite=True)
    assert not (tmp_path / "last").is_symlink()
    assert list(ckpt.load(tmp_path / "last")) == ["w"]
    (tmp_path / "link").symlink_to(tmp_path / "step-1")
    ckpt.delete(tmp_path / "link")
    assert sorted((tmp_path / "step-1").iterdir()) == before
    (tmp_path / "single.safetensors").symlink_to("step-1")
    ckpt.save(NEW, tmp_path / "single.safetensors", overwrite=True, format="safetensors")
    assert (tmp_path / "single.safetensors").is_file()
    assert not (tmp_path / "single.safetensors").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["last", "single.safetensors", "step-1"]


@pytest.mark.parametrize("name", ["last", "last.safetensors"])
def test_dangling_symlinks_and_symlinks_to_foreign_targets(name: str, ckpt, tmp_path: Path) -> None:
    link = tmp_path / name
    link.symlink_to("nowhere")
    ckpt.save(NEW, link, overwrite=True, format="safetensors")
    assert not link.is_symlink()
    ckpt.delete(link)
    link.symlink_to("nowhere")
    ckpt.delete(link)
    assert not os.path.lexists(link)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    for target in ("work", "work/thesis.tex"):
        link.symlink_to(target)
        with pytest.raises(CheckpointExistsError, match="is a link to what is no checkpoint"):
            ckpt.save(NEW, link, overwrite=True, format="safetensors")
        with pytest.raises(DeleteError, match="is a link to what is no checkpoint; nothing was deleted"):
            ckpt.delete(link)
        link.unlink()
    assert os.listdir(tmp_path) == ["work"]


FILES: dict[str, Callable[[Path], object]] = {
    "torch.save": lambda path: torch.save(STATE, path),
    "old torch.save": lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
    "half of torch.save": lambda path: (torch.save(STATE, path), os.truncate(path, 2000)),
    "safetensors": lambda path: safetensors.torch.save_file(NEW, path),
    "half of safetensors": lambda path: (safetensors.torch.save_file(NEW, path), os.truncate(path, 40)),
    "empty": Path.touch,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last.ckpt", "m.safetensors"])
@pytest.mark.parametrize("kind", FILES)
def test_checkpoint_files_of_other_libraries_are_replaced_and_deleted(
    kind: str, name: str, ckpt, tmp_path: Path
) -> None:
    path = tmp_path / name
    FILES[kind](path)
    ckpt.save(NEW, path, overwrite=True, format="safetensors")
    assert path.is_dir() == (name == "last.ckpt")
    assert torch.equal(ckpt.load(path)["w"], NEW["w"])
    ckpt.delete(path)
    if kind != "empty":
        FILES[kind](path)
        ckpt.delete(path)
    assert list(tmp_path.iterdir()) == []


def test_file_replaces_a_checkpoint_directory(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_stock(path)
    ckpt.save(NEW, path, overwrite=True, format="safetensors")
    assert path.is_file()
    path.unlink()
    save_stock(path)
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"\(thesis.tex\)"):
        ckpt.save(NEW, path, overwrite=True, format="safetensors")
    assert os.listdir(tmp_path) == ["m.safetensors"]


def _zip(path: Path) -> None:
    shutil.make_archive(str(path), "zip", Path(__file__).parent, "__init__.py")
    path.with_name(path.name + ".zip").rename(path)


FOREIGN_FILES: dict[str, Callable[[Path], object]] = {
    "a text": lambda path: path.write_text("mine"),
    "a compiled program": lambda path: torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), path),
    "a pipe": os.mkfifo,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", ["a", "a.safetensors", "a.pt"])
@pytest.mark.parametrize("kind", FOREIGN_FILES)
def test_foreign_file_at_the_path_stays(kind: str, name: str, ckpt, tmp_path: Path) -> None:
    path = tmp_path / name
    FOREIGN_FILES[kind](path)
    with pytest.raises(CheckpointExistsError, match=r"is a file, but neither|is neither a directory nor a file"):
        ckpt.save(NEW, path, overwrite=True, format="safetensors")
    with pytest.raises(DeleteError, match="nothing was deleted"):
        ckpt.delete(path)
    assert os.path.lexists(path)


# --- removal ------------------------------------------------------------------------------------------


def test_interrupted_removal_is_completed(tmp_path: Path) -> None:
    """At any step: the files that describe the others are removed last."""
    for step in range(6):
        hidden = tmp_path / new_ticket()
        save_ours(hidden)
        (hidden / "odd name").touch()
        fd = os.open(hidden, os.O_RDONLY)
        found = look_into(fd)
        os.close(fd)
        assert found.others == ["odd name"]
        assert found.files[-2:] == [".aiockpt.json", ".metadata"]
        (hidden / "odd name").unlink()
        for name in found.files[:step]:
            (hidden / name).unlink()
        remove(str(hidden))
    assert list(tmp_path.iterdir()) == []
    assert clean(str(tmp_path), fsync=True) == ([], False)
