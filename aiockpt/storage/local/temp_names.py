r"""The names of hidden directories. They tell who has made one, so that those of processes that are gone are known.

A name is `.aiockpt-MACHINE BOOT SPACE.PID.START.RANDOM`, the first three being hashes of ten letters each without a gap
between them, and maybe a word behind it: `-part-3` for a file beside the directory, `-swept` for a directory that is
being removed. RANDOM has 64 bits, so that nobody can guess it.

The name of the checkpoint is no part of it. Programs that look for checkpoints may match hidden names as well: one that
searches for `step-(\d+)` would take a killed save for a complete one. For the same reason the hashes have no vowels and
no digits, so that no word comes about by chance, and no number follows a hyphen.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from functools import cache

from aiockpt.format.names import HIDDEN

_LETTERS = "bcdfghjklmnpqrstvwxz"
_HASH_LETTERS = 10
_FIRST_SPACE = "pid:[4026531836]"  # of the processes that are in no container; see PROC_PID_INIT_INO in the kernel
_OWNED = re.compile(
    r"(?P<base>\.aiockpt-(?P<machine>[a-z]{10})(?P<boot>[a-z]{10})(?P<space>[a-z]{10})"
    r"\.(?P<pid>[0-9]{1,7})\.(?P<start>[0-9]{1,20})\.[0-9a-f]{16})(?P<word>(?:-[a-z0-9]+)*)"
)
# Those of systems that don't tell, and of the adapters for DCP.
_UNOWNED = re.compile(
    r"(?P<base>\.aiockpt-(?:x\.[0-9]{1,7}\.[0-9a-f]{16}|dcp(?:-[a-z]{20})?))(?P<word>(?:-[a-z0-9]+)*)"
)
SWEPT = "-swept"
REPLACED = "-replaced"
"""Behind the name of a hidden directory: what its contents are about to replace; see `replacing`."""
RECORD = "-replaces"
"""The same: a file with the name of the checkpoint that they replace."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told from all others that there are or have been.

    Attributes:
        machine: a hash of what the machine is called; of nothing that anybody else has where that proves nothing.
        boot: a hash of what tells one run of its kernel from others.
        space: a hash of that and the process's namespace, within which its number counts.
        pid: its number there.
        start: when it was started, in ticks since the kernel was.
    """

    machine: str
    boot: str
    space: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.machine}{self.boot}{self.space}.{self.pid}.{self.start}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a name tells.

    Attributes:
        base: the name without its word.
        word: what is behind it; empty for the hidden directory itself.
        owner: who has made it; None if that is not known.
    """

    base: str
    word: str
    owner: Owner | None


def new_ticket() -> str:
    """Choose a hidden name."""
    return f"{HIDDEN}{this_process() or f'x.{os.getpid()}'}.{secrets.token_hex(8)}"


def shared_ticket(name: str) -> str:
    """Return the hidden name that all ranks of an adapter for DCP use for a checkpoint; a hash stands for its name."""
    return f"{HIDDEN}dcp-{_hash(name, 2 * _HASH_LETTERS)}"


def read_ticket(name: str) -> Ticket | None:
    """Tell what a name tells; None if it is no hidden one."""
    found = _OWNED.fullmatch(name)
    if found is not None:
        owner = Owner(found["machine"], found["boot"], found["space"], int(found["pid"]), int(found["start"]))
        return Ticket(found["base"], found["word"], owner)
    found = _UNOWNED.fullmatch(name)
    return None if found is None else Ticket(found["base"], found["word"], None)


def this_process() -> Owner | None:
    """Tell who this process is; None where the system doesn't say."""
    return _process(os.getpid())


@cache
def _process(pid: int) -> Owner | None:
    if sys.platform != "linux":
        return None
    try:
        boot = _contents("/proc/sys/kernel/random/boot_id")
        space = os.stat("/proc/self/ns/pid").st_ino
        start = _start(pid)
        if os.readlink("/proc/self") != str(pid) or start is None:  # a /proc of others
            return None
    except OSError:
        return None
    return Owner(_hash(_machine()), _hash(boot), _hash(f"{boot} {space}"), pid, start)


def is_running(owner: Owner) -> bool:
    """Tell whether a process of this namespace is still there; where that can't be told, it is."""
    try:
        os.kill(owner.pid, 0)
        return _start(owner.pid) == owner.start
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or not shown
        return True


def booted_s() -> float | None:
    """Tell when the kernel was started, in seconds as in `time.time`."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.time() - time.clock_gettime(clock)


def _start(pid: int) -> int | None:
    """Give when a process was started; None if it has ended and only its parent has not noticed."""
    state, *fields = _contents(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _machine() -> str:
    """Give what the machine is called: its host name too, for copies of a machine have the same number.

    Containers may share both with others: they get what equals nobody else's, as does a machine without a number.
    """
    try:
        number = _contents("/etc/machine-id")
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        number = space = ""
    if number in ("", "uninitialized") or space != _FIRST_SPACE:
        return secrets.token_hex(8)
    return f"{number} {socket.gethostname()}"


def _contents(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().strip()


def _hash(text: str, length: int = _HASH_LETTERS) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest(), "big")
    letters = []
    for _ in range(length):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)
