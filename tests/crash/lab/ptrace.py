"""Bindings to follow another process: ptrace(2), and a seccomp(2) filter that selects the calls at which it stops.

Linux on x86-64 only. The functions take a thread ID; the ID of a process's first thread is its process ID.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WAIT_ALL: Final = 0x40000000  # __WALL: threads as well
EVENTS_STARTED: Final = frozenset({1, 2, 3})  # fork, vfork, clone
EVENT_EXEC: Final = 4
EVENT_SECCOMP: Final = 7
EVENT_STOP: Final = 128
SYSCALL_STOP: Final = 0x85  # SIGTRAP | 0x80: the entry or exit of a call, see PTRACE_O_TRACESYSGOOD

_CONT, _GETREGS, _SETREGS, _SYSCALL = 7, 12, 13, 24
_GETEVENTMSG, _SEIZE, _LISTEN = 0x4201, 0x4206, 0x4208
# TRACESYSGOOD, then forks, vforks, threads, execs, seccomp stops; EXITKILL: no tracee outlives its tracer.
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000

_SET_SUBREAPER, _GET_SUBREAPER, _SET_NO_NEW_PRIVS, _SET_SECCOMP = 36, 37, 38, 22
_FILTER_MODE = 2
_X86_64 = 0xC000003E
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _TRACE, _REFUSE = 0x7FFF0000, 0x7FF00000, 0x00050000 | errno.ENOSYS
_INVALID = 0x00050000 | errno.EINVAL
_RENAMEAT2 = 316
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENTS = 0, 4, 16

_NAMES = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)


class Registers(ctypes.Structure):
    """The registers of a stopped thread; ``orig_rax`` is the number of its call, ``rax`` the return value."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in _NAMES)

    rax: int
    rdx: int
    rsi: int
    r10: int
    orig_rax: int

    def copy(self) -> Registers:
        """Return a copy."""
        return Registers.from_buffer_copy(self)

    @property
    def arguments(self) -> tuple[int, ...]:
        """The six arguments of the call, unsigned."""
        return tuple(getattr(self, name) for name in ("rdi", "rsi", "rdx", "r10", "r8", "r9"))

    @property
    def answer(self) -> int:
        """The return value of the call; a negative error number if it failed."""
        return ctypes.c_int64(self.rax).value


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    return libc


def _ptrace(request: int, thread: int, data: Any = None) -> None:
    if _libc().ptrace(request, thread, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace request {request:#x} of thread {thread}: {os.strerror(number)}")


def unsupported() -> str:
    """Return why processes can't be traced on this platform; empty if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"processes are traced on Linux on x86-64 only, and this is {sys.platform} on {platform.machine()}"
    return ""


def seize(process: int) -> None:
    """Follow a process, its threads and everything that it starts from now on, without stopping it.

    Raises:
        OSError: tracing is not permitted, or there is no such process.
    """
    _ptrace(_SEIZE, process, _OPTIONS)


def resume(thread: int, signal: int = 0) -> None:
    """Resume a stopped thread, and deliver a signal to it."""
    _ptrace(_CONT, thread, signal)


def resume_until_answer(thread: int, signal: int = 0) -> None:
    """Resume a thread that was stopped at a call, until the call returns."""
    _ptrace(_SYSCALL, thread, signal)


def leave_stopped(thread: int) -> None:
    """Leave a thread in its group stop until SIGCONT."""
    _ptrace(_LISTEN, thread)


def event_message(thread: int) -> int:
    """Return the message of an event: for an exec the former ID of the thread, for a start the ID of the new one."""
    message = ctypes.c_ulong()
    _ptrace(_GETEVENTMSG, thread, ctypes.addressof(message))
    return message.value


def registers(thread: int) -> Registers:
    """Read the registers of a stopped thread."""
    found = Registers()
    _ptrace(_GETREGS, thread, ctypes.addressof(found))
    return found


def set_registers(thread: int, values: Registers) -> None:
    """Write the registers of a stopped thread."""
    _ptrace(_SETREGS, thread, ctypes.addressof(values))


def memory(thread: int, address: int, nbytes: int) -> bytes:
    """Return memory of another process from ``address`` on, as far as it is mapped; see process_vm_readv(2)."""
    buffer = ctypes.create_string_buffer(nbytes)
    ours = _Vector(ctypes.addressof(buffer), nbytes)
    theirs = _Vector(address, nbytes)
    count = _libc().process_vm_readv(thread, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"reading the memory of thread {thread}: {os.strerror(number)}")
    return buffer.raw[:count]


def text(thread: int, address: int) -> bytes:
    """Return a zero-terminated string from the memory of another process."""
    found = bytearray()
    while b"\0" not in found:  # one page at a time, because the next one may not be mapped
        found += memory(thread, address + len(found), 4096 - (address + len(found)) % 4096)
    return bytes(found[: found.index(0)])


def adopt_orphans(adopt: bool) -> bool:
    """Become, or cease to be, the reaper of orphaned descendants; return the previous setting."""
    before = ctypes.c_int()
    _libc().prctl(_GET_SUBREAPER, ctypes.addressof(before), None, 0, 0)
    _libc().prctl(_SET_SUBREAPER, int(adopt), None, 0, 0)
    return bool(before.value)


def stop_at(always: Sequence[int], by_flags: Mapping[int, tuple[int, int]], refused: Sequence[int] = ()) -> None:
    """Install a filter that stops the calling thread, and everything it starts from now on, at some calls.

    The filter can't be removed. Without a tracer these calls fail with ENOSYS.

    Args:
        always: the numbers of the calls that always stop.
        by_flags: for calls that stop only with certain flags: the position of the argument, and a mask of which any
            bit stops the call.
        refused: the numbers of the calls that fail with ENOSYS.

    Raises:
        OSError: the kernel does not support seccomp filters.
    """
    program = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_JUMP_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    for number in always:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _TRACE)]
    for number in refused:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for number, (argument, flags) in by_flags.items():
        program += [(_JUMP_EQUAL, 0, 4, number), (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument)]
        program += [(_JUMP_SET, 0, 1, flags), (_RETURN, 0, 0, _TRACE), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _ALLOW))
    _install(program)


def refuse_rename_flags() -> None:
    """Make renameat2(2) with any flag fail with EINVAL, as on NFS, in the calling thread and everything it starts.

    The filter can't be removed. A tracer does not see these calls.

    Raises:
        OSError: the kernel does not support seccomp filters.
    """
    flags = _AT_ARGUMENTS + 8 * 4
    _install(
        [
            (_LOAD, 0, 0, _AT_ARCH),
            (_JUMP_EQUAL, 0, 5, _X86_64),
            (_LOAD, 0, 0, _AT_NUMBER),
            (_JUMP_EQUAL, 0, 3, _RENAMEAT2),
            (_LOAD, 0, 0, flags),
            (_JUMP_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, _INVALID),
            (_RETURN, 0, 0, _ALLOW),
        ]
    )


def _install(program: Sequence[tuple[int, int, int, int]]) -> None:
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    whole = _Program(len(program), code)
    for option, value, data in ((_SET_NO_NEW_PRIVS, 1, None), (_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(whole))):
        if _libc().prctl(option, value, data, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"installing a seccomp filter: {os.strerror(ctypes.get_errno())}")
