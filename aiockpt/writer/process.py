"""Starting a writer process, and finding out how it ended."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys

_LAST_WORDS_BYTES = 2000
# Not `-m`, nor anything that runs the trainer's own main module; isolated, so that no file beside the trainer's
# program passes for one of the modules that are imported.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from aiockpt.writer.child import main; main(*map(int, sys.argv[2:]))"
)


class WriterProcess:
    """A process that was started, and what it says on its standard error.

    Attributes:
        pid: its number.
        end: this process's end of the socket between them.

    Args:
        memory: the descriptor of the memory that both map.
    """

    def __init__(self, memory: int) -> None:
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._words = os.memfd_create("aiockpt-writer-words", os.MFD_CLOEXEC)
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        python = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
        try:
            self._process = subprocess.Popen(
                [python, "-I", "-c", _PROGRAM, paths, str(theirs.fileno()), str(memory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                cwd="/",
                pass_fds=(theirs.fileno(), memory),
                start_new_session=True,  # what ends the trainer's group, Ctrl-C or a launcher, is not meant for it
            )
        except BaseException:
            self.end.close()
            os.close(self._words)
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; tell whether it has. Blocks."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def how_it_ended(self) -> str:
        """Say how it ended, and the last words that it left."""
        code = self._process.returncode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"exit code {code} ({signal.Signals(-code).name})"
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
