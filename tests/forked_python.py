"""An interpreter that has already imported torch and aiockpt: programs start in milliseconds instead of seconds.

The fixture ``python`` of `tests.conftest` is its command line, to be followed by ``-c CODE`` or ``-m MODULE``, and
arguments. The command line runs a small client. It sends its files, directory and environment to the server, which
forks a process for the program; it forwards SIGINT and SIGTERM, and ends as the program ends. Not for tests of imports.
A test that kills the program needs the program's own process ID: a kill of the client would miss it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

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
def started() -> Iterator[list[str]]:
    """Start the server; yield the command line of its client."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        server = subprocess.Popen([sys.executable, "-m", __name__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with server:  # the server ends when its standard input is closed
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield [sys.executable, "-SE", __file__, path]


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


def serve(path: str) -> list[str]:
    """Accept commands until standard input ends; return each command in a forked process, which has to run it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.write(1, b"ready\n")
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


def main() -> None:
    """Run the client, or the server, whose forks run the programs."""
    path, *args = sys.argv[1:]
    if args:
        sys.exit(ask(path, args))
    import gc
    import importlib
    import runpy

    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    option, what, *sys.argv[1:] = serve(path)
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = "-c"
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
