"""Interpreters that have already imported torch: programs start in milliseconds instead of seconds.

The fixtures ``python``, where aiockpt is imported too, and ``python_with_torch``, for tests of imports, are command
lines, to be followed by ``-c CODE``, ``-m MODULE`` or ``-u FILE``, and arguments. The command line runs a small client.
It sends its files, directory and environment to the server, which forks a process for the program; it forwards SIGINT
and SIGTERM, and ends as the program ends. A test that kills the program needs the program's own process ID: a kill of
the client would miss it.

The workers of a test run share the servers, and are themselves programs of one, which has imported most of what tests
import. So are the servers that ranks are forked from: the memory of all these imports is there once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

FOLDER = "AIOCKPT_TESTS_PYTHON"
PRELOAD = {
    "torch": ("torch",),
    "aiockpt": (
        "aiockpt.checkpointer",
        "aiockpt.cli.main",
        "aiockpt.manager.manager",
        "aiockpt.sync_checkpointer",
        "rich.progress",
        "rich.table",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
    ),
    "worker": (
        "aiohttp.web",
        "anyio._backends._asyncio",
        "aiockpt.dcp.format_utils",
        "aiockpt.testing",
        "benchmarks.harness.object_server",
        "cryptography.hazmat.primitives.ciphers.aead",
        "fsspec",
        "hypothesis.strategies",
        "psutil",
        "pytest_asyncio",
        "safetensors.torch",
        "sympy",
        "tests.cancellation.children",
        "tests.crash.scenarios",
        "tests.crash.zygote",
        "tests.ranks.failing",
        "tests.ranks.world",
        "tests.states",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.utils.serialization.config",
        "xdist.remote",
        "zstandard",
    ),
}
"""The servers, and what each imports before its programs: all that is imported by those before it, and these."""


_MOST_FILES = 200  # that a program inherits
_OPTIONS = ("-u", "-B", "-s", "-E", "-P", "-I")  # of an interpreter, which its server has settled


@contextlib.contextmanager
def started(*names: str) -> Iterator[str]:
    """Start the servers with such names, or find those of the test run; yield the folder that `command` needs."""
    import subprocess
    import tempfile

    if folder := os.environ.get(FOLDER):
        yield folder
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as listeners:
        fds = []
        for name in names:  # clients may connect before the servers have imported anything
            listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{name}")
            listener.listen()
            fds.append(listener.fileno())
        serving = [sys.executable, "-m", __name__, "serve", *map("{}={}".format, names, fds)]
        # The servers end when their standard input is closed.
        with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=fds):
            listeners.close()
            yield folder


@contextlib.contextmanager
def shared() -> Iterator[str]:
    """Start all servers; processes that are started meanwhile will find them."""
    with started(*PRELOAD) as folder:
        os.environ[FOLDER] = folder
        try:
            yield folder
        finally:
            del os.environ[FOLDER]


def command(folder: str, name: str) -> list[str]:
    """Return the command line of the client of a server."""
    return [sys.executable, "-SE", __file__, f"{folder}/{name}"]


@contextlib.contextmanager
def forking_forkserver() -> Iterator[None]:
    """If the test run has servers, the server of `multiprocessing` that is started meanwhile is a program of one."""
    import shlex
    from multiprocessing import spawn

    if not (folder := os.environ.get(FOLDER)):
        yield
        return
    program = f"{folder}/python-{os.getpid()}"  # multiprocessing has no place for more than a file
    with open(program, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.join(command(folder, "worker"))} "$@"\n')
    os.chmod(program, 0o700)
    before = spawn.get_executable()
    spawn.set_executable(program)
    try:
        yield
    finally:
        spawn.set_executable(before)


def ask(path: str, args: list[str]) -> int:
    """Ask the server to run a command with the files of this process; return its exit code."""
    numbers = [0, 1, 2, *_inherited()]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps([os.getcwd(), dict(os.environ), numbers, args]).encode()
        socket.send_fds(server, [b"."], numbers)
        server.sendall(request + b"\n")
        with server.makefile() as answers:
            pid = int(answers.readline())
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _: os.kill(pid, number))
            for number in numbers[3:]:
                os.close(number)
            if not (answer := answers.readline()):
                sys.exit("the server of this program has ended")  # as the test run has
            code = int(answer)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _inherited() -> list[int]:
    """Return the numbers of the open files that this process got from its parent, but for the standard ones."""
    numbers = []
    for number in sorted(map(int, os.listdir("/dev/fd"))):
        with contextlib.suppress(OSError):  # that of the directory, which is closed
            if number > 2 and os.get_inheritable(number):
                numbers.append(number)
    return numbers


def serve(listener: socket.socket) -> list[str]:
    """Accept commands until standard input ends; return each command in a forked process, which has to run it."""
    import fcntl
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the servers end after their programs
    with listener:
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                os._exit(0)
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, _MOST_FILES)
    with client.makefile() as lines:
        folder, environment, numbers, args = json.loads(lines.readline())
    if child := os.fork():
        for file in files:
            os.close(file)
        client.sendall(b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # the client was killed
            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    client.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    above = max(numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]  # out of the way of all numbers
    for file in files:
        os.close(file)
    for number, file in zip(numbers, moved, strict=True):
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
    args = serve(_forked_server(args))
    while args[0] in _OPTIONS:
        del args[0]
    with exiting_at_once():
        _run(*args)


def _forked_server(servers: list[str]) -> socket.socket:
    """Import what the servers need, each in a fork of the one before it; return the listener of each in its process."""
    import gc
    import importlib
    import threading

    listeners = {name: socket.socket(fileno=int(fd)) for name, _, fd in (text.partition("=") for text in servers)}
    for name in list(listeners):
        for module in PRELOAD[name]:
            with contextlib.suppress(ModuleNotFoundError):  # what only some of the tests need
                importlib.import_module(module)
        gc.collect()
        gc.freeze()  # else a collection in a fork would copy all memory pages
        assert threading.active_count() == 1, "a fork would lose a thread"
        listener = listeners.pop(name)
        if not listeners or os.fork():
            break
        listener.close()
    for other in listeners.values():
        other.close()
    return listener


def _run(option: str, *args: str) -> None:
    """Run a program as the interpreter's command line would."""
    import runpy
    import types

    if option == "-m":
        sys.argv = list(args)
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *args[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(args[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = [option, *args]
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    main()
