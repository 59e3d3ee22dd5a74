"""One system call on the file system: the unit of a recording, of a kill point and of a simulated power cut."""

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
    """A system call that changes the file system, or makes changes durable.

    Attributes:
        name: the kind of call. "create" is an open that may create or truncate; "sync" is an fsync of a file or a
            directory; "mark" is no call on the file system: the traced program wrote ``data`` as a message for the
            record.
        path: the absolute path at the time of the call.
        to: the other path of "rename", "exchange" and "link"; for "symlink" its target; else empty.
        offset: for "write", the offset in the file in bytes.
        data: the bytes that were written; after a short write only these.
        nbytes: the bytes of "write", the new size of "truncate", the space of "allocate".
        flags: the kernel's flags: for "create" those of open(2), for "allocate" the mode of fallocate(2).
        inode: the file or directory of "create", "write", "truncate", "allocate", "sync" and "mkdir" (after the
            call); 0 if unknown.
        result: the return value; a negative error number if the call failed.
        process: the process that made the call.
        thread: the thread that made the call.
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
