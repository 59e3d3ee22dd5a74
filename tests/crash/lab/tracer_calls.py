"""The system calls at which a `Tracer` stops, and their translation from registers to a `FileCall`."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Final

from tests.crash.lab import ptrace
from tests.crash.lab.calls import FileCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.crash.lab.calls import CallName
    from tests.crash.lab.ptrace import Registers

    Description = Callable[[int, tuple[int, ...]], FileCall]

MARKS: Final = "aiockpt-marks"  # the name of the memfd that marks are written to

_HERE = -100  # AT_FDCWD
_REMOVE_DIRECTORY = 0x200  # AT_REMOVEDIR
_EXCHANGE = 2
_MAKES_FILES = 0o100 | 0o1000 | 0o20000000  # O_CREAT, O_TRUNC, O_TMPFILE
_WRITE, _PWRITE = 1, 18
_VECTORS = {20: _WRITE, 296: _PWRITE, 328: _PWRITE}
_DELETED = " (deleted)"


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFFFFFF).value


def fd_path(thread: int, fd: int) -> str:
    """Return the current path of an open file of a thread; for a pipe and the like its description."""
    try:
        return os.readlink(f"/proc/{thread}/fd/{_signed(fd)}").removesuffix(_DELETED)
    except OSError:  # not an open descriptor: the call will fail with EBADF
        return ""


def path_at(thread: int, directory: int, address: int) -> str:
    """Return the absolute path of a name passed to a call; symbolic links are followed except in the last part."""
    name = os.fsdecode(ptrace.text(thread, address))
    base = f"/proc/{thread}/cwd" if _signed(directory) == _HERE else f"/proc/{thread}/fd/{_signed(directory)}"
    whole = os.path.normpath(name if os.path.isabs(name) else os.path.join(os.readlink(base), name))
    parent, last = os.path.split(whole)
    return os.path.join(os.path.realpath(parent), last)


def _by_path(name: CallName, path: int, directory: int | None = None, flags: int | None = None) -> Description:
    """Describe a call by the positions of its arguments: the path, the directory's descriptor, the flags."""

    def describe(thread: int, args: tuple[int, ...]) -> FileCall:
        base = _HERE if directory is None else args[directory]
        return FileCall(name, path_at(thread, base, args[path]), flags=0 if flags is None else args[flags])

    return describe


def _by_paths(name: CallName, paths: tuple[int, int], directories: tuple[int, int] | None = None) -> Description:
    def describe(thread: int, args: tuple[int, ...]) -> FileCall:
        bases = [_HERE, _HERE] if directories is None else [args[each] for each in directories]
        one, other = (path_at(thread, base, args[path]) for base, path in zip(bases, paths, strict=True))
        return FileCall(name, one, other)

    return describe


def _symlink(target: int, path: int, directory: int | None) -> Description:
    def describe(thread: int, args: tuple[int, ...]) -> FileCall:
        base = _HERE if directory is None else args[directory]
        to = os.fsdecode(ptrace.text(thread, args[target]))
        return FileCall("symlink", path_at(thread, base, args[path]), to)

    return describe


def _renameat2(thread: int, args: tuple[int, ...]) -> FileCall:
    one, other = path_at(thread, args[0], args[1]), path_at(thread, args[2], args[3])
    flags = _signed(args[4])
    return FileCall("exchange" if flags & _EXCHANGE else "rename", one, other, flags=flags)


def _unlinkat(thread: int, args: tuple[int, ...]) -> FileCall:
    name: CallName = "rmdir" if args[2] & _REMOVE_DIRECTORY else "unlink"
    return FileCall(name, path_at(thread, args[0], args[1]))


def _openat2(thread: int, args: tuple[int, ...]) -> FileCall:
    flags = int.from_bytes(ptrace.memory(thread, args[2], 8), "little")
    if not flags & _MAKES_FILES:
        return FileCall("create", "")
    return FileCall("create", path_at(thread, args[0], args[1]), flags=flags)


def _creat(thread: int, args: tuple[int, ...]) -> FileCall:
    return FileCall("create", path_at(thread, _HERE, args[0]), flags=os.O_CREAT | os.O_WRONLY | os.O_TRUNC)


def _position(thread: int, fd: int) -> int:
    """Return the offset of the next write to an open file, in bytes."""
    path = f"/proc/{thread}/fdinfo/{_signed(fd)}"
    with open(path, encoding="ascii") as info:
        fields = dict(line.split(":", 1) for line in info if ":" in line)
    if int(fields["flags"], 8) & os.O_APPEND:
        return os.stat(f"/proc/{thread}/fd/{_signed(fd)}").st_size
    return int(fields["pos"])


def _write(fd: int, nbytes: int | None, offset: int | None) -> Description:
    """Describe a call that writes; if ``nbytes`` is None, arguments 1 and 2 are the parts of writev(2)."""

    def describe(thread: int, args: tuple[int, ...]) -> FileCall:
        path = fd_path(thread, args[fd])
        if path == f"/memfd:{MARKS}":
            return FileCall("mark", path, data=ptrace.memory(thread, args[1], args[2]), nbytes=args[2])
        if not path.startswith("/"):
            return FileCall("write", "")
        size = sum(length for _, length in _parts(thread, args)) if nbytes is None else args[nbytes]
        at = _position(thread, args[fd]) if offset is None else args[offset]
        return FileCall("write", path, offset=at, nbytes=size, inode=_inode(thread, args[fd]))

    return describe


def _parts(thread: int, args: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the addresses and lengths of the parts of a vectored write."""
    raw = ptrace.memory(thread, args[1], 16 * _signed(args[2]))
    words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    return list(zip(words[::2], words[1::2], strict=True))


def _to_open_file(name: CallName, nbytes: int | None = None, flags: int | None = None) -> Description:
    def describe(thread: int, args: tuple[int, ...]) -> FileCall:
        size = 0 if nbytes is None else args[nbytes]
        mode = 0 if flags is None else args[flags]
        at = args[2] if name == "allocate" else 0
        path, inode = fd_path(thread, args[0]), _inode(thread, args[0])
        return FileCall(name, path, offset=at, nbytes=size, flags=mode, inode=inode)

    return describe


def _truncate(thread: int, args: tuple[int, ...]) -> FileCall:
    path = path_at(thread, _HERE, args[0])
    return FileCall("truncate", path, nbytes=args[1], inode=_inode_of(path))


def _copy_file_range(thread: int, args: tuple[int, ...]) -> FileCall:
    offset = int.from_bytes(ptrace.memory(thread, args[3], 8), "little") if args[3] else _position(thread, args[2])
    return FileCall("write", fd_path(thread, args[2]), offset=offset, nbytes=args[4], inode=_inode(thread, args[2]))


def _inode(thread: int, fd: int) -> int:
    return _inode_of(f"/proc/{thread}/fd/{_signed(fd)}", follow=True)


def _inode_of(path: str, *, follow: bool = False) -> int:
    try:
        return os.stat(path, follow_symlinks=follow).st_ino
    except OSError:
        return 0


_CALLS: Final[dict[int, Description]] = {
    1: _write(0, 2, None),
    18: _write(0, 2, 3),
    20: _write(0, None, None),
    40: _write(0, 3, None),  # sendfile
    296: _write(0, None, 3),
    328: _write(0, None, 3),
    326: _copy_file_range,
    74: _to_open_file("sync"),
    75: _to_open_file("sync"),
    76: _truncate,
    77: _to_open_file("truncate", nbytes=1),
    285: _to_open_file("allocate", nbytes=3, flags=1),
    82: _by_paths("rename", (0, 1)),
    264: _by_paths("rename", (1, 3), (0, 2)),
    316: _renameat2,
    83: _by_path("mkdir", 0),
    258: _by_path("mkdir", 1, directory=0),
    84: _by_path("rmdir", 0),
    85: _creat,
    86: _by_paths("link", (0, 1)),
    265: _by_paths("link", (1, 3), (0, 2)),
    88: _symlink(0, 1, None),
    266: _symlink(0, 2, 1),
    87: _by_path("unlink", 0),
    263: _unlinkat,
    437: _openat2,
}
_OPENS: Final[dict[int, tuple[Description, int]]] = {
    2: (_by_path("create", 0, flags=1), 1),
    257: (_by_path("create", 1, directory=0, flags=2), 2),
}
_RINGS = 425  # io_uring_setup: requests in a ring bypass the tracer


def install_filter() -> None:
    """Install the filter that stops the calling thread, and everything it starts, at these calls."""
    ptrace.stop_at(list(_CALLS), {number: (flags, _MAKES_FILES) for number, (_, flags) in _OPENS.items()}, [_RINGS])


def describe(thread: int, registers: Registers) -> FileCall | None:
    """Return the call at which a thread is stopped; None if its arguments can't be read."""
    number = registers.orig_rax
    description = _CALLS.get(number) or _OPENS[number][0]
    try:
        return description(thread, registers.arguments)
    except OSError as exc:  # a bad address or descriptor: the kernel will refuse the call. Or the thread was killed
        if exc.errno in (errno.EFAULT, errno.ENOENT, errno.ESRCH, errno.EBADF, errno.ENOTDIR, errno.EIO):
            return None
        raise


def outcome(thread: int, call: FileCall, registers: Registers, *, with_data: bool) -> tuple[int, bytes]:
    """Return the inode of a call that has returned, and the bytes that it wrote."""
    answer = registers.answer
    if answer < 0:
        return call.inode, b""
    if call.name == "create":
        return _inode(thread, answer), b""
    if call.name == "mkdir":
        return _inode_of(call.path), b""
    if call.name == "write" and with_data:
        fd = registers.arguments[2 if registers.orig_rax == 326 else 0]
        with open(f"/proc/{thread}/fd/{_signed(fd)}", "rb", buffering=0) as file:
            return call.inode, os.pread(file.fileno(), answer, call.offset)
    return call.inode, call.data


def shortened(thread: int, registers: Registers, nbytes: int) -> Registers:
    """Return the registers with which a call writes fewer bytes; a vectored call writes from its first part only."""
    short = registers.copy()
    if plain := _VECTORS.get(registers.orig_rax):
        address, length = next((part for part in _parts(thread, registers.arguments) if part[1]), (0, 0))
        short.orig_rax, short.rsi, short.rdx = plain, address, min(nbytes, length)
    elif registers.orig_rax in (_WRITE, _PWRITE):
        short.rdx = min(nbytes, registers.rdx)
    else:
        raise ValueError(f"system call {registers.orig_rax} can't be shortened: choose a call that writes")
    return short
