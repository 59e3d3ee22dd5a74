"""Several that overwrite and delete one path at the same time, in every order of their system calls."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiockpt.errors import CheckpointNotFoundError, DeleteError
from aiockpt.storage import syscalls
from aiockpt.storage.local.commit import Publication, check_free
from aiockpt.storage.local.storage import delete
from aiockpt.storage.local.temp_dir import make_hidden, new_ticket
from aiockpt.testing.conformance.suite import metadata_of
from tests.interruption import Interruption

FILES = (".metadata", "__0_0.distcp")


def write(folder: Path, word: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(metadata_of(word))
    (folder / "__0_0.distcp").write_text(word)


def word_at(path: Path) -> str | None:
    """Return the word in a checkpoint, whole; None if there is none."""
    if not path.exists():
        return None
    if path.is_file():
        return path.read_bytes().removeprefix(HEADER).decode()
    word = (path / "__0_0.distcp").read_text()
    assert (path / ".metadata").read_bytes() == metadata_of(word)
    assert sorted(os.listdir(path)) == sorted(FILES)
    return word


HEADER = (2).to_bytes(8, "little") + b"{}"


class Parties:
    """Those who use one path: directories, or safetensors files."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / ("c" if kind == "directory" else "c.safetensors")
        self._single = "" if kind == "directory" else "single"
        self.answers: list[str] = []

    def overwrite(self, word: str) -> None:
        """Do what a save with overwrite=True does; it always succeeds."""
        check_free(str(self.path), overwrite=True)
        hidden = self.path.with_name(new_ticket())
        held = make_hidden(str(hidden))
        if self._single:
            (hidden / self._single).write_bytes(HEADER + word.encode())
        else:
            write(hidden, word)
        publication = Publication(str(hidden), str(self.path), self._single, True, False, held.identity)
        publication.attempt()
        held.release()
        assert publication.rest is None

    def delete(self, _word: str) -> None:
        try:
            delete(str(self.path), str(self.path.with_name(new_ticket())), False)
        except CheckpointNotFoundError:
            self.answers.append("not found")
        except DeleteError as exc:
            self.answers.append(str(exc))
        else:
            self.answers.append("deleted")


@pytest.fixture(params=["exchange", "steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way to replace a checkpoint: file systems that can't exchange two names do it in steps."""
    real = syscalls._call

    def call(name: str, *args: Any) -> None:
        if name == "renameat2" and args[-1].value == 2:
            raise syscalls.UnsupportedError(errno.EINVAL, "Invalid argument")
        real(name, *args)

    if request.param == "steps":
        monkeypatch.setattr(syscalls, "_call", call)
    return request.param


@pytest.mark.kills
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["directory", "file"])
@pytest.mark.parametrize("is_there", [True, False], ids=["something", "nothing"])
@pytest.mark.parametrize("first", ["overwrite", "delete"])
@pytest.mark.parametrize(
    "others", ["overwrite", "delete", "overwrite overwrite", "overwrite delete", "delete overwrite"]
)
def test_each_order_leaves_one_whole_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, first: str, others: str, is_there: bool
) -> None:
    for number in itertools.count():
        parties = Parties(tmp_path, kind)
        if is_there != parties.path.exists():
            parties.overwrite("old") if is_there else parties.delete("")
        parties.answers.clear()

        def interrupt(parties: Parties = parties) -> None:
            for place, other in enumerate(others.split()):
                getattr(parties, other)(f"other {place}")

        with monkeypatch.context() as patch:
            interruption = Interruption(patch, number, interrupt)
            act: Callable[[str], None] = getattr(parties, first)
            act("first")
        if not interruption.is_over:
            break
        assert os.listdir(tmp_path) in ([], [parties.path.name]), number
        final = word_at(parties.path)
        if final is None:
            assert "delete" in (first, others.split()[-1])
        else:
            assert final in ("first", f"other {len(others.split()) - 1}")
        assert set(parties.answers) <= {"deleted", "not found", f"{parties.path}{REPLACED}"}, number
    assert number > 2


@pytest.mark.parametrize("way", ["steps"], indirect=True)
def test_delete_takes_what_a_save_is_about_to_publish_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The save is between its two renames, another one publishes, and the deletion removes what both have left."""
    parties = Parties(tmp_path, "directory")
    parties.overwrite("old")
    is_between, may_go = threading.Event(), threading.Event()
    saving = threading.Thread(target=parties.overwrite, args=("first",))
    call, unlink, listdir = syscalls._call, os.unlink, os.listdir

    def gated(name: str, *args: Any) -> None:
        is_last = args[3] == os.fsencode(parties.path) and not parties.path.exists()
        if threading.current_thread() is saving and is_last and not is_between.is_set():
            is_between.set()
            assert may_go.wait(60)
        call(name, *args)

    def published(path: Any = ".") -> list[str]:
        if threading.current_thread() is not saving and not (may_go.is_set() or parties.path.exists()):
            parties.overwrite("second")
        return listdir(path)

    def unlinked(path: Any, **kwargs: Any) -> None:
        """Let the save go on before the deletion removes the first file."""
        if threading.current_thread() is not saving and not may_go.is_set():
            may_go.set()
            saving.join(60)
        unlink(path, **kwargs)

    monkeypatch.setattr(syscalls, "_call", gated)
    saving.start()
    try:
        assert is_between.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", published)
            patch.setattr(os, "unlink", unlinked)
            parties.delete("")
    finally:
        may_go.set()
        saving.join(60)
    assert not saving.is_alive()
    assert word_at(parties.path) in (None, "first", "second")
    assert os.listdir(tmp_path) in ([], ["c"])


REPLACED = " was replaced by something else while it was being deleted; nothing was deleted"
