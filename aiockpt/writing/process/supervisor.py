"""The trainer's side of the writer process: starts it, exchanges messages with it, and replaces it when it has died.

A save takes a `WriterConnection` from the `WriterHost`; each connection owns one `WriterProcess`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from aiockpt.core.machine import python_program
from aiockpt.core.threads import DaemonThreads, Workers
from aiockpt.errors import WriteError, unwrapped
from aiockpt.writing.process.channel import Channel
from aiockpt.writing.process.messages import Hello, Log, Message, PackedImage, Ready, pack

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from aiockpt.options import ProcessWriter
    from aiockpt.planning.planner import Layout
    from aiockpt.writing.process.messages import FromWriter

    OnMessage = Callable[[FromWriter | WriteError], None]

_START_S = 120.0
_END_S = 30.0
_LAST_MESSAGES_S = 1.0
_STDERR_BYTES = 2000
_SOCKET_FD, _MEMORY_FD = 3, 4  # in the process
_FIRST_FREE_FD = 5  # a descriptor from here on is not overwritten by one that is moved to its number

logger = logging.getLogger("aiockpt")

# --- the process ---------------------------------------------------------------------------------------

# Not `-m`, nor anything that runs the trainer's own main module; isolated, so that no file beside the trainer's
# program passes for one of the modules that are imported. Descriptors that a C library of the trainer has opened
# without O_CLOEXEC are closed, and the working directory is left: this process may outlive the trainer, and would keep
# them in use.
_PROGRAM = f"""
import json, os, sys
try:
    most = max(map(int, os.listdir("/proc/self/fd")))
except OSError:
    most = 65536
os.closerange({_MEMORY_FD + 1}, most + 1)
os.chdir("/")
sys.path[:] = json.loads(sys.argv[1])
from aiockpt.writing.process.child import main
main(int(sys.argv[2]), {_SOCKET_FD}, {_MEMORY_FD})
"""


class WriterProcess:
    """A started process, this process's end of the socket to it, and its standard error."""

    def __init__(self, memory_fd: int) -> None:
        """Start it with the memory that both map; raise OSError if it can't be started."""
        self._exit_code: int | None = None
        self._reaped = False
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stderr_fd = -1
        try:
            with theirs, contextlib.ExitStack() as stack:
                # A file in memory: a pipe would have to be read all the time, as the process blocks when it is full.
                self._stderr_fd = os.memfd_create("aiockpt-writer-stderr", os.MFD_CLOEXEC)
                fds = [
                    fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
                    for fd in (theirs.fileno(), memory_fd, self._stderr_fd)
                ]
                for fd in fds:
                    stack.callback(os.close, fd)
                self.pid = _spawn(*fds)
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until it has ended. Blocks; for one thread."""
        try:
            _, status = os.waitpid(self.pid, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # the program itself waits for every child
            self._exit_code = None
        self._reaped = True

    def has_ended(self) -> bool:
        """Return whether it has ended, even if the thread in `wait` has not noticed it yet."""
        try:
            # WNOWAIT leaves the zombie to the thread in `wait`, which gets the exit code.
            return self._reaped or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the thread in `wait`, or the program, has waited for it
            return True

    def kill(self) -> None:
        """Kill it. From any thread."""
        if not self._reaped:  # else the pid may be that of another process
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def exit_text(self) -> str:
        """Return its exit code and the end of its standard error, for messages."""
        text = f"exit code {self._exit_code}"
        if self._exit_code is not None and self._exit_code < 0:
            with contextlib.suppress(ValueError):  # a signal without a name
                text = f"{text} ({signal.Signals(-self._exit_code).name})"
        size = os.fstat(self._stderr_fd).st_size
        data = os.pread(self._stderr_fd, _STDERR_BYTES, max(0, size - _STDERR_BYTES))
        stderr = data.decode(errors="replace").strip()
        return f"{text}; its stderr: {stderr}" if stderr else f"{text}, nothing on its stderr"

    def close(self) -> None:
        """Close the socket and the copy of its standard error. Idempotent."""
        self.end.close()
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
            self._stderr_fd = -1


def _spawn(socket_fd: int, memory_fd: int, stderr_fd: int) -> int:
    """Start the process; return its pid.

    Not with `subprocess`: that waits until a pipe is closed, which a process that the program forks at that moment
    would hold open for as long as it lives.
    """
    python = python_program()
    paths = json.dumps([_absolute(path) for path in sys.path if isinstance(path, str)])
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, stderr_fd, 2),
        (os.POSIX_SPAWN_DUP2, socket_fd, _SOCKET_FD),
        (os.POSIX_SPAWN_DUP2, memory_fd, _MEMORY_FD),
    ]
    argv = [python, "-I", "-c", _PROGRAM, paths, str(os.getpid())]
    try:  # a signal to the trainer's session or group, from Ctrl-C or a launcher, must not reach it
        return os.posix_spawn(python, argv, os.environ, file_actions=actions, setsid=True)
    except NotImplementedError:
        return os.posix_spawn(python, argv, os.environ, file_actions=actions, setpgroup=0)


def _absolute(path: str) -> str:
    with contextlib.suppress(OSError):  # the working directory was removed: then a relative path leads nowhere
        return os.path.abspath(path)
    return path


# --- the connection ------------------------------------------------------------------------------------


class WriterConnection:
    """Sends messages to one writer process, dispatches its messages to saves, and notices its death."""

    def __init__(self, process: WriterProcess, hello: Hello) -> None:
        self._process = process
        self._channel = Channel(process.end)
        self._saves: dict[int, OnMessage] = {}
        self._waiter = DaemonThreads(1, f"aiockpt-writer-{process.pid}")
        self._ready = anyio.Event()
        self._received_all = anyio.Event()
        self._closed = anyio.Event()
        self._error: WriteError | None = None
        self.layout: Layout | None = None  # whose images were sent last
        self.dead = False  # it has ended, or is about to
        self._channel.post(hello)

    def __repr__(self) -> str:
        return f"<writer process {self._process.pid}, {len(self._saves)} saves>"

    def register(self, number: int, on_message: OnMessage) -> None:
        """Pass on messages about a save, and a WriteError if the process dies; raise it if it has died."""
        if self._error is not None:
            raise self._error
        self._saves[number] = on_message

    def unregister(self, number: int) -> None:
        """Drop later messages about a save."""
        self._saves.pop(number, None)

    def post(self, message: Message) -> None:
        """Queue a message; if the process has died it is dropped, since its saves are notified separately."""
        self._channel.post(message)

    async def send(self, message: Message) -> None:
        """Send a message and wait until it is in the kernel, which delivers it even if this process dies."""
        self._channel.post(message)
        with contextlib.suppress(OSError):
            await self._channel.flush()

    def kill(self) -> None:
        """Kill the process. From any thread."""
        self._process.kill()

    async def aclose(self) -> None:
        """Wait until the process has finished its saves and ended. Idempotent."""
        self.dead = True
        with contextlib.suppress(OSError), anyio.move_on_after(_END_S):
            await self._channel.flush()  # before the end-of-file, behind which nothing can be sent
        self._channel.finish()
        with anyio.move_on_after(_END_S):
            await self._closed.wait()
        if not self._closed.is_set():
            logger.warning("the writer process %d did not end within %g s and was killed", self._process.pid, _END_S)
            self.kill()
            await self._closed.wait()

    def has_ended(self) -> bool:
        """Return whether it takes no more saves."""
        return self.dead or self._process.has_ended()

    async def supervise(self) -> None:
        """Serve the process until it ends."""
        how = "has died"
        try:
            await self._serve()
        except Exception as exc:  # a bug here, or there is no thread: the saves must be notified all the same
            logger.exception("supervising the writer process %d has failed", self._process.pid)
            how = f"was given up ({type(error := unwrapped(exc)).__name__}: {error})"
            self.kill()
            if not self._waiter.unfinished:  # no thread could be started to wait for it
                self._process.wait()
        finally:
            self.dead = True
            self._waiter.shutdown(wait=False)
            self._fail_saves(how)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.pump)
            tasks.start_soon(self._receive_all)
            tasks.start_soon(self._expect_ready)
            await loop.run_in_executor(self._waiter, self._process.wait)
            self.dead = True
            # Its last messages; with a limit, since a forked process may hold the other end open.
            with anyio.move_on_after(_LAST_MESSAGES_S):
                await self._received_all.wait()
            tasks.cancel_scope.cancel()
        self._waiter.end(_END_S)  # its only function has returned

    def _fail_saves(self, how: str) -> None:
        self._error = WriteError(
            f"the writer process {self._process.pid} {how} ({self._process.exit_text()}); the next save starts a new "
            "one"
        )
        self._process.close()
        saves, self._saves = self._saves, {}  # each unregisters itself when it is notified
        for on_message in saves.values():
            on_message(self._error)
        self._closed.set()

    async def _expect_ready(self) -> None:
        with anyio.move_on_after(_START_S):
            await self._ready.wait()
        if not self._ready.is_set():
            logger.error("the writer process %d did not start within %g s", self._process.pid, _START_S)
            self.kill()

    async def _receive_all(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = await self._channel.receive()
                if isinstance(message, Ready):
                    self._ready.set()
                elif isinstance(message, Log):
                    logger.log(message.level, "writer process %d: %s", self._process.pid, message.text)
                elif message.save in self._saves:
                    self._saves[message.save](message)
        self._ready.set()
        self._received_all.set()


# --- the host ------------------------------------------------------------------------------------------


class WriterHost:
    """Keeps one writer process running for the saves of an engine. For the engine's loop, except `kill`."""

    def __init__(self, options: ProcessWriter, chunk_bytes: int, io_threads: int, memory_fd: int) -> None:
        self._hello = Hello(chunk_bytes, io_threads, options.nice, options.ionice_numbers)
        self._memory_fd = memory_fd  # of the memory with the chunks, which the process maps too
        self._worker = Workers(1, "aiockpt-writer")
        self._starting = anyio.Lock()
        self._connection: WriterConnection | None = None
        self.save_numbers = itertools.count(1)
        self._layout: Layout | None = None
        self._images: Sequence[PackedImage] = ()
        self._tasks: TaskGroup | None = None

    def start(self, tasks: TaskGroup) -> None:
        """Start the process ahead of the first save, in the background."""
        self._tasks = tasks
        tasks.start_soon(self._start_ahead)

    async def _start_ahead(self) -> None:
        with contextlib.suppress(WriteError):  # the first save tries again, and raises it
            await self.connect()

    async def connect(self) -> WriterConnection:
        """Return the connection to the running process; start one if there is none.

        Raises WriteError if it can't be started.
        """
        async with self._starting:
            if self._connection is None or self._connection.has_ended():
                if self._tasks is None:
                    raise WriteError("no writer process is started any more: the checkpointer is being closed")
                try:
                    process = await self._worker.run(WriterProcess, self._memory_fd)
                except Warning:  # an error only because the program turns warnings into errors
                    raise
                except Exception as exc:  # from the system, or from what is in sys.path
                    raise WriteError(f"the writer process can't be started: {exc}") from exc
                self._connection = WriterConnection(process, self._hello)
                self._tasks.start_soon(self._connection.supervise)
            return self._connection

    async def images_for(self, connection: WriterConnection, layout: Layout) -> Sequence[PackedImage] | None:
        """Return a layout's images; None if the process was sent these last."""
        if layout is not self._layout:
            self._images = await self._worker.run(lambda: list(map(pack, layout.images)))
            self._layout = layout
        known, connection.layout = connection.layout, layout
        return None if known is layout else self._images

    def kill(self) -> None:
        """Kill the process: it is stuck. From any thread."""
        if self._connection is not None:
            self._connection.kill()

    async def aclose(self) -> None:
        """Wait until the process has finished its saves and ended. Idempotent."""
        async with self._starting:  # a process may just be starting
            connection, self._connection, self._tasks = self._connection, None, None
        if connection is not None:
            await connection.aclose()
        self._worker.close()
