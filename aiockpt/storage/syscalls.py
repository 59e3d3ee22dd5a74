"""System calls that Python's `os` lacks: atomic renames, preallocation, page cache; and open directories."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import struct
import sys
from collections.abc import Iterator
from typing import Any

from aiockpt.core.machine import libc

_CACHESTAT = 451  # the number of the system call, which the C library does not name; since Linux 6.5
_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_NO_CLONES = frozenset({errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

logger = logging.getLogger("aiockpt")

_FICLONE = 0x40049409  # of ioctl, as the next one; see linux/fs.h and linux/fiemap.h
_FIEMAP = 0xC020660B
_EXTENT_SHARED = 0x2000
_EXTENTS = 128  # looked at at once


class UnsupportedError(OSError):
    """The kernel or the file system can't do this."""


@contextlib.contextmanager
def open_directory(path: str, *, dir_fd: int | None = None, follow: bool = False) -> Iterator[int]:
    """Yield the descriptor of a directory, which is closed afterwards; OSError for a link, unless ``follow``."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


# See statfs(2) and linux/magic.h. Of those in user space (FUSE), most are clients of object stores or of other hosts.
_NETWORK_FILE_SYSTEMS = {
    0x00C36400: "Ceph",
    0x01021997: "9P",
    0x0BD00BD0: "Lustre",
    0x19830326: "BeeGFS",
    0x47504653: "GPFS",
    0x5346414F: "AFS",
    0x65735546: "FUSE",
    0x6969: "NFS",
    0xAAD7AAEA: "PanFS",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
}


_WITH_REFLINKS = {0x58465342: "XFS", 0x794C7630: "overlayfs", 0x9123683E: "Btrfs", 0xCA451A4E: "bcachefs"}


def is_on_network(fd: int) -> bool:
    """Return whether an open file or directory is on a file system of other hosts, as far as the kernel says."""
    return _file_system(fd) in _NETWORK_FILE_SYSTEMS


def may_have_reflinks(fd: int) -> bool:
    """Return whether the file system of an open file or directory is one that can say which blocks files share."""
    return _file_system(fd) in _WITH_REFLINKS


def _file_system(fd: int) -> int:
    buffer = ctypes.create_string_buffer(256)  # a struct statfs, which begins with the kind
    try:
        _call("fstatfs", fd, buffer)
    except OSError:
        return 0
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def _call(name: str, *args: Any) -> None:
    function = getattr(libc(), name, None) if sys.platform == "linux" else None
    if function is None:
        raise UnsupportedError(errno.ENOSYS, f"{name} is not available here")
    if function(*args) != 0:
        number = ctypes.get_errno()
        kind = UnsupportedError if number in _UNSUPPORTED else OSError
        raise kind(number, os.strerror(number))


def rename_noreplace(source: str, target: str) -> None:
    """Rename, failing with FileExistsError if ``target`` exists; see renameat2(2).

    After InterruptedError it may have happened all the same: the caller has to find out.
    """
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_NOREPLACE))
    except UnsupportedError:
        _rename_in_steps(source, target)


def _rename_in_steps(source: str, target: str) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
    # rename(2) refuses to replace a directory that holds anything, so a checkpoint is safe all the same; it would
    # replace a file, while link(2) fails if one has come to the target meanwhile.
    if os.path.islink(source) or os.path.isdir(source) or not link(source, target):
        os.rename(source, target)
        return
    try:
        os.unlink(source)
    except OSError as exc:  # the new name counts
        logger.info("%s has got the name %s, and keeps its old one as well: %s", source, target, exc)


def link(source: str, target: str) -> bool:
    """Make a hard link; return False if the file system has none or forbids it; FileExistsError for a taken name."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as exc:
        if exc.errno in _NO_LINKS:
            return False
        raise
    return True


Identity = tuple[int, int]
"""Device and inode of a file or directory, which a rename keeps."""


def identity(path: str, dir_fd: int | None = None) -> Identity | None:
    """Return the identity of what is at a path; None if nothing is."""
    try:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def rename_exchange(one: str, other: str) -> None:
    """Swap two paths atomically; see renameat2(2).

    Never retry it: a second exchange would undo the first.
    """
    _call("renameat2", _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE))


def is_overlay(device: int) -> bool:
    """Return whether a device is an overlay file system, as in containers; see proc_pid_mountinfo(5)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.partition(" - ") for line in file]
    except OSError:
        return False
    return any(mount.split()[2] == number and kind.startswith("overlay ") for mount, _, kind in mounts)


def allocate(fd: int, nbytes: int) -> None:
    """Reserve space for a file without changing its size, where the file system can; see fallocate(2)."""
    keep_size = 1
    while True:
        try:
            return _call("fallocate", fd, keep_size, ctypes.c_longlong(0), ctypes.c_longlong(nbytes))
        except InterruptedError:  # idempotent
            continue
        except UnsupportedError:
            return None


def cached_pages(fd: int, offset: int, nbytes: int) -> int:
    """Count the pages of a range of a file that are in the page cache, without any I/O; see cachestat(2)."""
    if sys.platform != "linux":
        raise UnsupportedError(errno.ENOSYS, "cachestat is not available here")
    counts = (ctypes.c_uint64 * 5)()
    extent = (ctypes.c_uint64 * 2)(offset, nbytes)
    if libc().syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), extent, counts, ctypes.c_uint(0)) != 0:
        raise UnsupportedError(ctypes.get_errno(), "cachestat is not available here")
    return int(counts[0])


def clone(fd: int, target: int) -> None:
    """Make an empty open file share the blocks of another, until one of them is written to; see ioctl_ficlone(2).

    Raises:
        UnsupportedError: the file system has no reflinks.
        OSError: these files can't share blocks, such as those of two file systems.
    """
    try:
        fcntl.ioctl(target, _FICLONE, fd)
    except OSError as exc:
        if exc.errno in _NO_CLONES:
            raise UnsupportedError(exc.errno, exc.strerror) from None
        raise


def cloned_bytes(fd: int) -> int:
    """Return the bytes of an open file that are in blocks of other files too, by reflinks; 0 if that is not known."""
    shared = begin = 0
    while True:
        request = bytearray(32 + 56 * _EXTENTS)
        struct.pack_into("=QQLLLL", request, 0, begin, (1 << 64) - 1 - begin, 0, 0, _EXTENTS, 0)
        try:
            fcntl.ioctl(fd, _FIEMAP, request)
        except OSError:
            return 0
        count, found = struct.unpack_from("=L", request, 20)[0], 0
        for number in range(count):
            at, _, length, _, _, flags = struct.unpack_from("=QQQQQL", request, 32 + 56 * number)
            found, begin = number + 1, at + length
            shared += length if flags & _EXTENT_SHARED else 0
        if found < _EXTENTS:
            return min(shared, os.fstat(fd).st_size)
