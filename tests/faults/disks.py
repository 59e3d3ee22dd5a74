"""Small real file systems, to be filled to the last block, frozen, or made to fail."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str | Path) -> Iterator[Path]:
    """Mount a file system during a with block; skip the test if mounting is not possible."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount file systems")
    folder.mkdir()
    if subprocess.run(["mount", *arguments, folder], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def tmpfs(folder: Path, nbytes: int, *, inodes: int = 10_000) -> contextlib.AbstractContextManager[Path]:
    """Mount a file system in memory."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={nbytes},nr_inodes={inodes}", "tmpfs")


@contextlib.contextmanager
def ext4(folder: Path, nbytes: int, *options: str) -> Iterator[Path]:
    """Mount an ext4 file system in a file, with direct I/O and without blocks reserved for root."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(nbytes)
    made = ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", *options, image]
    subprocess.run(made, check=True, capture_output=True)
    try:
        with mounted(folder, "-o", "loop", image) as disk:
            yield disk
    finally:
        image.unlink()


def fill(disk: Path, free_bytes: int) -> None:
    """Fill a disk up to this much free space, rounded to whole blocks."""
    room = os.statvfs(disk)
    present = (disk / BALLAST).stat().st_blocks * 512 if (disk / BALLAST).exists() else 0
    nbytes = present + room.f_bavail * room.f_frsize - free_bytes
    fd = os.open(disk / BALLAST, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, 0)
        if nbytes > 0:
            os.posix_fallocate(fd, 0, nbytes // room.f_frsize * room.f_frsize)
    finally:
        os.close(fd)
