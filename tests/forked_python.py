"""Interpreters that have already imported torch: programs start in milliseconds instead of seconds.

The fixtures ``python``, where aiockpt is imported too, and ``python_with_torch``, for tests of imports, are command
lines, to be followed by ``-c CODE``, ``-m MODULE`` or ``-u FILE``, and arguments. The command line runs a small client.
It sends its files, directory and environment to the server, which forks a process for the program; it forwards SIGINT
and SIGTERM, and ends as the program ends. A test that kills the program needs the program's own process ID: a kill of
the client would miss it. The workers of a test run share the servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

_FOLDER = "AIOCKPT_TESTS_PYTHON"
PRELOAD = (
    "aiockpt.checkpointer",
    "aiockpt.cli.main",
    "aiockpt.manager.manager",
    "aiockpt.sync_checkpointer",
    "rich.progress",
    "rich.table",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Start the servers, or find those of the test run; yield the folder that `command` needs."""
    import subprocess
    import tempfile

    if folder := os.environ.get(_FOLDER):
        yield folder
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as listeners:
        fds = []
        for name in ("torch", "aiockpt"):  # clients may connect before the servers have imported anything
            listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{name}")
            listener.listen()
            fds.append(listener.fileno())
        serving = [sys.executable, "-m", __name__, "serve", *map(str, fds)]
        # The servers end when their standard input is closed.
        with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=fds):
            listeners.close()
            yield folder


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Start servers that processes which are started meanwhile will find."""
    with started() as os.environ[_FOLDER]:
        yield
    del os.environ[_FOLDER]


def command(folder: str, name: str) -> list[str]:
    """Return the command line of the client of the server with ``aiockpt``, or with ``torch`` alone."""
    return [sys.executable, "-SE", __file__, f"{folder}/{name}"]


def ask(path: str, args: list[str]) -> int:
    """Ask the server to run a command with the files of this process; return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps([os.getcwd(), dict(os.environ), args]).encode()
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(request + b"\n")
        with server.makefile() as answers:
            pid = int(answers.readline())
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _: os.kill(pid, number))
            code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(listener: socket.socket) -> list[str]:
    """Accept commands until standard input ends; return each command in a forked process, which has to run it."""
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with listener:
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                os._exit(0)
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile() as lines:
        folder, environment, args = json.loads(lines.readline())
    if child := os.fork():
        client.sendall(b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    client.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return args


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """End the process after all that is done at exit, but before modules are freed, which would copy each page."""
    import atexit

    codes: list[int] = []

    @atexit.register  # before all others, so it runs last
    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):  # it is closed
                stream.flush()
        if codes:
            os._exit(codes[0])

    try:
        yield
        codes.append(0)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            codes.append((exc.code or 0) & 0xFF)
        else:
            codes.append(1)
        raise
    except Exception:
        codes.append(1)
        raise


def main() -> None:
    """Run the client, or the servers, whose forks run the programs."""
    path, *args = sys.argv[1:]
    if path != "serve":
        sys.exit(ask(path, args))
    import gc
    import importlib
    import runpy

    import torch  # noqa: F401

    listener, other = (socket.socket(fileno=int(fd)) for fd in args)
    if os.fork() == 0:
        listener, other = other, listener
        for name in PRELOAD:
            importlib.import_module(name)
    other.close()
    gc.freeze()
    option, what, *sys.argv[1:] = serve(listener)
    with exiting_at_once():
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif option == "-u":  # as torchrun starts its programs
            sys.argv[0] = what
            runpy.run_path(what, run_name="__main__")
        else:
            sys.argv[0] = "-c"
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
