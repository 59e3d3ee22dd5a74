"""Short random histories of a directory: generated, performed on a real file system, and reduced to plain tuples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from aiockpt.storage.syscalls import rename_exchange
from tests.crash.lab.calls import FileCall
from tests.crash.lab.disk import Disk
from tests.crash.lab.disk_names import Folder
from tests.crash.lab.power_choices import permitted

NAMES = ["a", "b", "d", "d/a"]
WORDS = [
    "create",
    "write",
    "write",
    "truncate",
    "sync",
    "sync",
    "rename",
    "exchange",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
]
OPERATIONS = st.tuples(
    st.sampled_from(WORDS), st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(0, 3), st.binary(max_size=2)
)

BEGINNINGS = [
    [],
    [("create", "a", "a", 0, b""), ("write", "a", "a", 0, b"xy")],
    [("create", "a", "a", 0, b""), ("create", "b", "b", 0, b"")],
    [("create", "a", "a", 0, b""), ("link", "a", "b", 0, b"")],
    [("mkdir", "d", "d", 0, b""), ("create", "d/a", "d/a", 0, b"")],
    [("mkdir", "d", "d", 0, b""), ("create", "a", "a", 0, b""), ("write", "a", "a", 1, b"z")],
]


def histories(most: int) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.sampled_from(BEGINNINGS), st.lists(OPERATIONS, max_size=most)).map(
        lambda both: [*both[0], *both[1]]
    )


def every_byte(offset: int, end: int) -> Sequence[int]:
    return range(offset + 1, end)


def perform(root: str, operation: tuple[str, str, str, int, bytes]) -> FileCall:
    """Perform an operation in a real directory; return the call as it would be recorded."""
    name, path, to, offset, data = operation
    path, to = (os.path.join(root, each) for each in (path, to))
    doing: dict[str, Callable[[], Any]] = {
        "create": lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY | (os.O_TRUNC if offset else 0))),
        "write": lambda: _with_fd(path, os.O_WRONLY, lambda fd: os.pwrite(fd, data, offset)),
        "truncate": lambda: os.truncate(path, offset),
        "allocate": lambda: _with_fd(path, os.O_WRONLY, lambda fd: os.posix_fallocate(fd, 0, 1 + offset)),
        "sync": lambda: _with_fd(path, os.O_RDONLY, lambda fd: None),
        "rename": lambda: os.rename(path, to),
        "exchange": lambda: rename_exchange(path, to),
        "link": lambda: os.link(path, to),
        "unlink": lambda: os.unlink(path),
        "mkdir": lambda: os.mkdir(path),
        "rmdir": lambda: os.rmdir(path),
    }
    try:
        doing[name]()
    except OSError as exc:
        return FileCall(name, path, to, result=-(exc.errno or 1))
    inode = os.stat(path).st_ino if name not in ("rename", "exchange", "link", "unlink", "rmdir") else 0
    flags = os.O_CREAT | (os.O_TRUNC if offset else 0)
    if name == "write":
        return FileCall(name, path, offset=offset, data=data, nbytes=len(data), result=len(data), inode=inode)
    nbytes = 1 + offset if name == "allocate" else offset
    return FileCall(name, path, to, nbytes=nbytes, flags=flags if name == "create" else 0, inode=inode)


def _with_fd(path: str, flags: int, do: Callable[[int], object]) -> None:
    fd = os.open(path, flags)
    try:
        do(fd)
    finally:
        os.close(fd)


def plain(content: Any) -> Any:
    """Return content as nested tuples of names and bytes."""
    if isinstance(content, Folder):
        return tuple((name, plain(entry)) for name, entry in sorted(content.entries.items()))
    return content.data


def states(disk: Disk) -> set[Any]:
    """Return every state that the model permits after a power cut."""
    pending = disk.pending()
    keys = [each.key for each in pending]
    return {plain(disk.left(dict(zip(keys, choice, strict=True)))) for choice in permitted(pending)}
