"""Child processes of the demo: run to the end, or killed on the way."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from aiockpt.cli.demo.events import Event, decode

_READ_BYTES = 1 << 16
_SHOWN_BYTES = 1 << 14


class ChildError(Exception):
    """A child process failed, or hung."""


def run_child(
    module: str, arguments: Sequence[str], on_event: Callable[[Event], bool], *, timeout_s: float = 120.0
) -> bool:
    """Run a module as a process until it ends, and pass each of its events to ``on_event``. Blocks.

    If ``on_event`` returns True, the process is killed with SIGKILL; so it is if the caller is interrupted or anything
    fails. Return whether ``on_event`` had it killed; False if the process had already ended by then.

    Raises:
        ChildError: the process failed by itself, or sent nothing for ``timeout_s``; with its standard error.
    """
    with tempfile.TemporaryFile() as errors, _start(module, arguments, errors) as process:
        killed = False
        try:
            for line in _lines(process, timeout_s):
                event = decode(line)
                if event is not None and on_event(event) and not killed:
                    process.kill()
                    killed = True
            code = process.wait(timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise ChildError(f"{module} was silent for {timeout_s:g} s\n{_tail(errors)}") from None
        finally:
            process.kill()
        if code != 0 and not killed:
            raise ChildError(f"{module} ended with exit code {code}\n{_tail(errors)}")
        return code != 0


def _start(module: str, arguments: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # CUDA's matrix products are reproducible only with a workspace of fixed size. A new session keeps Ctrl-C away
    # from the child: its parent ends it.
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        start_new_session=True,
    )


def _lines(process: subprocess.Popen[bytes], timeout_s: float) -> Iterator[bytes]:
    """Yield what a process prints until it closes its standard output; raise TimeoutError if it is silent so long."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    while select.select([fd], [], [], timeout_s)[0]:
        data = os.read(fd, _READ_BYTES)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    raise TimeoutError


def _tail(errors: IO[bytes]) -> str:
    """Return the end of the standard error."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _SHOWN_BYTES))
    return errors.read().decode(errors="replace").rstrip()
