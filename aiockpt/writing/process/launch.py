"""Starting a writer process, and finding out how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing.spawn
import os
import signal
import socket
import sys
from typing import Any

_LAST_WORDS_BYTES = 2000
_END, _MEMORY = 3, 4  # what the descriptors are called in the process
_ABOVE = 5  # from here on, none is overwritten by one that is put in its place
# Not `-m`, nor anything that runs the trainer's own main module; isolated, so that no file beside the trainer's
# program passes for one of the modules that are imported.
_PROGRAM = f"""
import json, os, sys
try:
    most = max(map(int, os.listdir("/proc/self/fd")))
except OSError:
    most = 65536
os.closerange({_MEMORY + 1}, most + 1)
os.chdir("/")
sys.path[:] = json.loads(sys.argv[1])
from aiockpt.writing.process.child import main
main(int(sys.argv[2]), {_END}, {_MEMORY})
"""


class WriterProcess:
    """A process that was started, and what it says on its standard error.

    Attributes:
        pid: its number.
        end: this process's end of the socket between them.

    Args:
        memory: the descriptor of the memory that both map.
    """

    def __init__(self, memory: int) -> None:
        self._code: int | None = None
        self._reaped = False
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._words = -1
        try:
            with theirs, contextlib.ExitStack() as stack:
                self._words = os.memfd_create("aiockpt-writer-words", os.MFD_CLOEXEC)
                kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in (theirs.fileno(), memory, self._words)]
                for fd in kept:
                    stack.callback(os.close, fd)
                self.pid = _spawn(*kept)
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until it has ended. Blocks; for one thread."""
        try:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # the program waits for every child of its own accord
            self._code = None
        self._reaped = True

    def kill(self) -> None:
        """End it at once. From any thread."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """Say how it ended, and the last words that it left."""
        how = f"exit code {self._code}"
        if self._code is not None and self._code < 0:
            with contextlib.suppress(ValueError):  # a signal without a name
                how = f"exit code {self._code} ({signal.Signals(-self._code).name})"
        size = os.fstat(self._words).st_size
        words = os.pread(self._words, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        text = words.decode(errors="replace").strip()
        return f"{how}; its last words: {text}" if text else f"{how}, without a word"

    def close(self) -> None:
        """Let go of the socket and of its words. Idempotent."""
        self.end.close()
        if self._words >= 0:
            os.close(self._words)
            self._words = -1


def _spawn(end: int, memory: int, words: int) -> int:
    """Start the process; give its number.

    Not with `subprocess`: that waits for a pipe to be closed, which a fork of the program's own at that moment would
    hold open for as long as the forked process lives.

    Raises:
        OSError: it can't be started.
    """
    python = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
    paths = json.dumps([_absolute(path) for path in sys.path if isinstance(path, str)])
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, words, 2),
        (os.POSIX_SPAWN_DUP2, end, _END),
        (os.POSIX_SPAWN_DUP2, memory, _MEMORY),
    ]
    argv = [python, "-I", "-c", _PROGRAM, paths, str(os.getpid())]
    try:  # what ends the trainer's session or group, Ctrl-C or a launcher, is not meant for it
        return os.posix_spawn(python, argv, os.environ, file_actions=actions, setsid=True)
    except NotImplementedError:
        return os.posix_spawn(python, argv, os.environ, file_actions=actions, setpgroup=0)


def _absolute(path: str) -> str:
    with contextlib.suppress(OSError):  # the working directory is gone: then nothing is found by such a path
        return os.path.abspath(path)
    return path
