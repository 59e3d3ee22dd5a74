"""Files that a checkpoint takes over from another one: only what was looked at, and nothing where it can't be had."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from isal.isal_zlib import crc32

from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.storage.local import adopting
from aiockpt.storage.local.adopting import KnownFiles, adopt
from aiockpt.storage.syscalls import UnsupportedError

DATA = bytes(range(256)) * 40
FACTS = FileFacts(len(DATA), crc32(DATA))


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "base").write_bytes(DATA)
    return str(tmp_path / "base")


def no_clones(fd: int, target: int) -> None:
    raise UnsupportedError(errno.EOPNOTSUPP, "no reflinks")


@pytest.mark.parametrize("how", ["clone", "link"])
@pytest.mark.parametrize("data", [DATA[:100], DATA[::-1], DATA * 2], ids=["cut", "other bytes", "longer"])
def test_a_base_that_changes_after_the_look_is_not_shared(
    how: str, data: bytes, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        Path(source).write_bytes(data)
        os.utime(source, ns=(0, 0))

    def clone(fd: int, target: int) -> None:
        if how == "link":
            no_clones(fd, target)
        change()
        os.write(target, os.pread(fd, 1 << 20, 0))

    def link(source: str, target: str, *, follow_symlinks: bool, real=os.link) -> None:
        change()
        real(source, target, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(adopting, "clone", clone)
    monkeypatch.setattr(os, "link", link)
    known = KnownFiles()
    assert not adopt(source, str(tmp_path / "own"), FACTS, known, fsync=True)
    assert os.listdir(tmp_path) == ["base"]
    assert known.crc_of(os.stat(source)) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EXDEV, errno.EINVAL])
def test_one_file_that_can_not_be_cloned_says_nothing_of_others(
    number: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, known = True, KnownFiles()

    def ioctl(target: int, request: int, fd: int) -> int:
        if fails:
            raise OSError(number, os.strerror(number))
        return os.write(target, os.pread(fd, 1 << 20, 0))

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    assert adopt(source, str(tmp_path / "linked"), FACTS, known, fsync=True)
    fails = False
    assert adopt(source, str(tmp_path / "cloned"), FACTS, known, fsync=True)
    inodes = [os.stat(tmp_path / name).st_ino for name in ("base", "linked", "cloned")]
    assert inodes[0] == inodes[1] != inodes[2]
    assert (tmp_path / "cloned").read_bytes() == DATA


def test_a_file_system_without_reflinks_is_asked_once(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ioctl(target: int, request: int, fd: int) -> int:
        asked.append(request)
        raise OSError(errno.EOPNOTSUPP, "no reflinks")

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    known = KnownFiles()
    assert all(adopt(source, str(tmp_path / name), FACTS, known, fsync=True) for name in "abc")
    assert len(asked) == 1
    assert len({os.stat(tmp_path / name).st_ino for name in ("base", *"abc")}) == 1
