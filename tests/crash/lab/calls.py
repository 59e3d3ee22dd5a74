"""What a process asked of the file system: the record that kill points and lost power are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CallName = Literal[
    "create",
    "write",
    "truncate",
    "allocate",
    "sync",
    "rename",
    "exchange",
    "link",
    "symlink",
    "unlink",
    "mkdir",
    "rmdir",
    "mark",
]


@dataclass(frozen=True, slots=True)
class FileCall:
    """A system call that changes the file system, or makes what has changed durable.

    Attributes:
        name: what it does. "create" is an open that may create or truncate; "sync" is of a file or a directory; "mark"
            is none of the file system's: the traced program has written ``data`` to tell the tracer something.
        path: the absolute path that it concerned, when it was called.
        to: the other path of "rename", "exchange" and "link"; for "symlink" its target; else empty.
        offset: where in the file, in bytes, for "write".
        data: what was written, as far as it was.
        nbytes: the bytes of "write", the new size of "truncate", the space of "allocate".
        flags: as given to the kernel: of "create" those of open(2), of "allocate" the mode of fallocate(2).
        inode: which file or directory, of "create", "write", "truncate", "allocate", "sync" and "mkdir" (after the
            call); 0 where it is not known.
        result: what the kernel answered; negative: the error number.
        process: the process.
        thread: the thread.
    """

    name: CallName
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = field(default=b"", repr=False)
    nbytes: int = 0
    flags: int = 0
    inode: int = 0
    result: int = 0
    process: int = 0
    thread: int = 0
