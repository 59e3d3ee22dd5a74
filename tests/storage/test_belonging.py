"""Replacing and deleting take the files of the checkpoint, and refuse where there is anything else."""

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
from aiockpt.storage.local import belonging, commit
from aiockpt.storage.local import delete as deleting
from aiockpt.storage.local.belonging import OtherThingsError, checkpoint_above, look_into, remove
from aiockpt.storage.local.orphans import clean
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.testing import GatedStorage
from tests.stock import ALONE

STATE = {"notes": torch.arange(3000.0), "sub": {"b": torch.arange(7)}, "step": 3}
NEW = {"w": torch.ones(5)}


@pytest.fixture
def ckpt():
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        yield checkpointer


def by_stock(path: Path, state: dict | None = None, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(path, **options)
        dcp.save(dict(STATE if state is None else state), storage_writer=writer, **ALONE)


def of_shards(path: Path) -> None:
    path.mkdir()
    for number in (1, 2):
        safetensors.torch.save_file({f"t{number}": torch.ones(3)}, path / f"model-{number}.safetensors")
    weights = {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def of_one_rank(path: Path) -> None:
    by_stock(path)
    (path / ".metadata").rename(path / "__0.metadata")


def without(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damaged(path: Path) -> None:
        make(path)
        (path / name).unlink()

    return damaged


def with_half(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damaged(path: Path) -> None:
        make(path)
        (path / name).write_bytes((path / name).read_bytes()[:-7])

    return damaged


def ours(path: Path, **options) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        checkpointer.save(STATE, path, **options)


def ours_of_tensors(path: Path) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as checkpointer:
        checkpointer.save({f"t{n}": torch.ones(1000) for n in range(3)}, path, format="safetensors", shard_bytes=4000)


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "ours": ours,
    "ours with a hint": lambda path: ours(path, separation_hint="sub"),
    "ours in safetensors": ours_of_tensors,
    "stock": by_stock,
    "stock with a file for each": lambda path: by_stock(path, single_file_per_rank=False),
    "stock of one rank alone": of_one_rank,
    "a set of safetensors": of_shards,
    "a directory of one": lambda path: (path.mkdir(), safetensors.torch.save_file(NEW, path / "my.safetensors")),
    "damaged manifest": with_half(".aiockpt.json", ours),
    "damaged metadata": with_half(".metadata", by_stock),
    "both damaged": with_half(".metadata", with_half(".aiockpt.json", ours)),
    "no metadata": without(".metadata", ours),
    "unfinished": without(".metadata", by_stock),
    "damaged index of shards": with_half("model.safetensors.index.json", of_shards),
}
THINGS = ("step-1/", "notes", "thesis.tex", "__7_0.distcp", "other.safetensors", "common.pt")


def put(path: Path, name: str) -> None:
    if name.endswith("/"):
        ours(path / name)
    else:
        (path / name).write_text("mine")


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_what_a_checkpoint_names_is_replaced_and_deleted(kind: str, ckpt, tmp_path: Path) -> None:
    for path in (tmp_path / "a", tmp_path / "b"):
        CHECKPOINTS[kind](path)
    ckpt.save(NEW, tmp_path / "a", overwrite=True)
    assert torch.equal(ckpt.load(tmp_path / "a")["w"], NEW["w"])
    ckpt.delete(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("kind", ["ours", "ours in safetensors", "stock", "stock of one rank alone"])
def test_other_things_are_refused_and_listed(kind: str, thing: str, ckpt, tmp_path: Path) -> None:
    path = tmp_path / "a"
    CHECKPOINTS[kind](path)
    put(path, thing) if not thing.endswith("/") else shutil.copytree(_nested(tmp_path), path / thing)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointExistsError, match=rf"/a is a .* other things than a checkpoint \({thing}\)"):
        ckpt.submit(NEW, path, overwrite=True)  # at the call
    with pytest.raises(DeleteError, match=rf"other things than a checkpoint \({thing}\); nothing was deleted"):
        ckpt.delete(path)
    assert sorted(tmp_path.rglob("*")) == before


def _nested(folder: Path) -> Path:
    if not (folder / "nested").exists():
        ours(folder / "nested")
    return folder / "nested"


@pytest.mark.parametrize("kind", ["both damaged", "damaged metadata", "unfinished", "damaged index of shards"])
def test_damaged_ones_with_other_things_are_refused(kind: str, ckpt, tmp_path: Path) -> None:
    CHECKPOINTS[kind](tmp_path / "a")
    (tmp_path / "a" / "thesis.tex").write_text("mine")
    for call in (lambda: ckpt.save(NEW, tmp_path / "a", overwrite=True), lambda: ckpt.delete(tmp_path / "a")):
        with pytest.raises((CheckpointExistsError, DeleteError), match=r"\(thesis.tex\)"):
            call()
    assert (tmp_path / "a" / "thesis.tex").read_text() == "mine"


def test_a_long_list_is_cut_short(ckpt, tmp_path: Path) -> None:
    ours(tmp_path / "a")
    for number in range(300):
        (tmp_path / "a" / f"{number:03}\n").touch()
    with pytest.raises(DeleteError, match=r"\(000\\n, 001\\n, 002\\n, 003\\n, 004\\n and 295 more\); nothing was del"):
        ckpt.delete(tmp_path / "a")


def test_several_files_of_safetensors_are_several_checkpoints(ckpt, tmp_path: Path) -> None:
    of_shards(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointExistsError, match=r"\(model-1.safetensors, model-2.safetensors\)"):
        ckpt.save(NEW, tmp_path / "a", overwrite=True)


def test_what_users_tell_is_not_what_the_manifest_lists(ckpt, tmp_path: Path) -> None:
    ckpt.save(STATE, tmp_path / "a", metadata={"base": "base.safetensors"})
    (tmp_path / "a" / "base.safetensors").write_text("mine")
    with pytest.raises(DeleteError, match=r"\(base.safetensors\)"):
        ckpt.delete(tmp_path / "a")


def test_empty_directories(ckpt, tmp_path: Path) -> None:
    """They are no checkpoints, and nothing is lost with them."""
    (tmp_path / "a").mkdir()
    with pytest.raises(DeleteError, match="/a is empty; nothing was deleted"):
        ckpt.delete(tmp_path / "a")
    with pytest.raises(CheckpointExistsError, match="exists already"):
        ckpt.save(NEW, tmp_path / "a")
    ckpt.save(NEW, tmp_path / "a", overwrite=True)
    assert torch.equal(ckpt.load(tmp_path / "a")["w"], NEW["w"])


# --- what comes meanwhile -----------------------------------------------------------------------------


def test_a_file_that_is_put_there_before_it_is_published(ckpt, tmp_path: Path) -> None:
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
    """Let something happen once, right before a function of a module is called."""
    real, pending = getattr(module, function), [action]

    def first(*args, **kwargs):
        if pending:
            pending.pop()()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, function, first)


def test_a_file_that_is_put_there_at_the_last_moment(ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look and the exchange: the names change places again."""
    ckpt.save(STATE, tmp_path / "a")
    mine = tmp_path / "a" / "thesis.tex"
    _before("rename_exchange", commit, lambda: mine.write_text("mine"), monkeypatch)
    with pytest.raises(CheckpointExistsError, match=r"changed during the save, .*\(thesis.tex\); it was left as it is"):
        ckpt.save(NEW, tmp_path / "a", overwrite=True)
    assert mine.read_text() == "mine"
    mine.unlink()
    assert ckpt.load(tmp_path / "a")["step"] == 3
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_is_put_into_what_is_being_deleted(ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(STATE, tmp_path / "a")
    mine = tmp_path / "a" / "thesis.tex"
    _before("rename_noreplace", deleting, lambda: mine.write_text("mine"), monkeypatch)
    with pytest.raises(DeleteError, match=r"\(thesis.tex\); nothing was deleted"):
        ckpt.delete(tmp_path / "a")
    assert mine.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_is_put_into_what_is_being_removed(
    ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a program that has the directory open, say: it stays, and the error says where."""
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
async def test_a_file_that_is_put_into_an_unfinished_save(tmp_path: Path) -> None:
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


# --- within a checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "ours in safetensors", "stock", "both damaged"])
@pytest.mark.parametrize("below", ["step-1", "x/y/step-1", "m.safetensors"])
def test_nothing_is_saved_into_a_checkpoint(kind: str, below: str, ckpt, tmp_path: Path) -> None:
    CHECKPOINTS[kind](tmp_path / "r")
    (tmp_path / "last").symlink_to("r")
    before = sorted(tmp_path.rglob("*"))
    for name in ("r", "last"):
        for overwrite in (False, True):
            with pytest.raises(CheckpointExistsError, match=rf"in the directory of a .*, {tmp_path}/r, .* beside"):
                ckpt.submit(NEW, tmp_path / name / below, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_directories_that_only_look_like_checkpoints_may_hold_some(ckpt, tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir()
    ckpt.save(NEW, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_text("of another program")
    ckpt.save(NEW, tmp_path / "b" / "c")
    assert checkpoint_above(str(tmp_path / "b" / "c" / "d")) == str(tmp_path / "b" / "c")


def test_the_other_path_is_not_within_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    ours(tmp_path / "r")
    with aiockpt.SyncCheckpointer(process_group=None, fallback_path=tmp_path / "r") as ckpt:
        save = ckpt.submit(NEW, tmp_path / "file" / "a")
        with pytest.raises(aiockpt.AiockptError):
            save.written.result(30)
    assert "a" not in os.listdir(tmp_path / "r")


# --- links and files ----------------------------------------------------------------------------------


def test_a_link_is_replaced_and_deleted_itself(ckpt, tmp_path: Path) -> None:
    ckpt.save(STATE, tmp_path / "step-1")
    (tmp_path / "step-1" / "thesis.tex").write_text("mine")  # what a link leads to is not touched
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
def test_links_to_nowhere_and_to_other_things(name: str, ckpt, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["last.ckpt", "m.safetensors"])
@pytest.mark.parametrize("kind", FILES)
def test_files_of_others_are_replaced_and_deleted(kind: str, name: str, ckpt, tmp_path: Path) -> None:
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


def test_a_file_replaces_a_directory(ckpt, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    by_stock(path)
    ckpt.save(NEW, path, overwrite=True, format="safetensors")
    assert path.is_file()
    path.unlink()
    by_stock(path)
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"\(thesis.tex\)"):
        ckpt.save(NEW, path, overwrite=True, format="safetensors")
    assert os.listdir(tmp_path) == ["m.safetensors"]


def _zip(path: Path) -> None:
    shutil.make_archive(str(path), "zip", Path(__file__).parent, "__init__.py")
    path.with_name(path.name + ".zip").rename(path)


OTHER_FILES: dict[str, Callable[[Path], object]] = {
    "a text": lambda path: path.write_text("mine"),
    "a compiled program": lambda path: torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), path),
    "a pipe": os.mkfifo,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", ["a", "a.safetensors", "a.pt"])
@pytest.mark.parametrize("kind", OTHER_FILES)
def test_other_files_stay(kind: str, name: str, ckpt, tmp_path: Path) -> None:
    path = tmp_path / name
    OTHER_FILES[kind](path)
    with pytest.raises(CheckpointExistsError, match=r"is a file, but neither|is neither a directory nor a file"):
        ckpt.save(NEW, path, overwrite=True, format="safetensors")
    with pytest.raises(DeleteError, match="nothing was deleted"):
        ckpt.delete(path)
    assert os.path.lexists(path)


# --- removal ------------------------------------------------------------------------------------------


def test_a_removal_that_was_interrupted_is_completed(tmp_path: Path) -> None:
    """Whatever it has got to: what describes the other files goes last."""
    for step in range(6):
        hidden = tmp_path / new_ticket()
        ours(hidden)
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
