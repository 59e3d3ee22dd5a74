"""Real ranks for tests: a world of processes that run functions together.

::

    async def saves(rank: int, world_size: int, path: Path) -> int:      # module level, so that a child finds it
        ...                                                              # plain functions do as well

    def test_saves(world4: World, tmp_path: Path) -> None:               # fixtures world2, world4, world8
        assert world4.results(saves, tmp_path) == [0, 1, 2, 3]           # raises what a rank raised
        outcomes = world4.run(fails, tmp_path)                           # a result or a RankFailure for each rank
        assert outcomes[1].kind == "WriteError"

    def test_one_dies() -> None:
        with World(2) as world:                                          # a test that kills makes its own world
            outcomes = world.run(kills_itself)                           # os.kill(os.getpid(), signal.SIGKILL)
            assert outcomes[1].killed

Each rank is a process with a gloo default group (`torch.distributed.init_process_group`). The same processes serve
every `run`, one after the other, so what a function leaves behind in its process stays there: close what you open.
The processes are forked from one server that has imported torch, so that a world of four takes under a second.
`run` ends when every rank has returned, raised or died; a rank that takes longer than ``timeout_s`` fails the test
with the stacks of all its threads. Warnings, and errors in ``__del__`` and in threads, fail the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import uvloop
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import forked_python

Loop = Literal["asyncio", "uvloop"]
Rendezvous = Literal["tcp", "file"]

PRELOAD = [
    "psutil",
    "pytest",
    "uvloop",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "anyio._backends._asyncio",
    "aiockpt.checkpointer",  # `import aiockpt` is lazy: each rank would import its parts again
    "aiockpt.sync_checkpointer",
    "aiockpt.manager.manager",
    "aiockpt.dcp.format_utils",
    "aiockpt.testing",
    "tests.ranks.failing",
    __name__,
]
"""Modules that the server imports once; otherwise each rank of each world would spend half a second on them."""
LOOPS: dict[Loop, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
_START_S = 60.0
_END_S = 20.0
_GRACE_S = 5.0  # for a rank to write its stacks after its own timeout

_context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the server that worlds are forked from, which lives as long as this process; idempotent."""
    # For its log, torch looks up the host name of the peer of each connection to a store. If the hosts file lacks that
    # name, torch asks a name server, and a slow one delays some of the connections by seconds.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    _context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()
    with forked_python.forking_forkserver():
        forkserver.ensure_running()


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a rank's mesh of a shape, the same for all runs: each mesh has threads that never stop waking up."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank failed in a `World.run`.

    Attributes:
        rank: the number of the rank in the world.
        kind: the name of the exception's class, or ``killed``.
        text: the exception's text.
        cause: class and text of its ``__cause__``, as ``ValueError: text``; empty without.
        trace: the traceback, for messages.
    """

    rank: int
    kind: str
    text: str
    cause: str = ""
    trace: str = field(default="", repr=False, compare=False)

    @property
    def killed(self) -> bool:
        """True if the process died, False if the function raised."""
        return self.kind == "killed"

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """Return a description of an exception that can be pickled."""
        cause = error.__cause__
        shown = "" if cause is None else f"{type(cause).__name__}: {cause}"
        return cls(rank, type(error).__name__, str(error), shown, "".join(traceback.format_exception(error)))


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    loop: Loop


class World:
    """A number of processes that form a gloo group.

    Args:
        size: the number of ranks.
        store: the store of the group: a TCP store served by rank 0, as with ``tcp://``, or a file.
        may_start: whether the ranks may start processes of their own, which `multiprocessing` forbids to daemons.
    """

    def __init__(self, size: int, *, store: Rendezvous = "tcp", may_start: bool = False) -> None:
        self.size = size
        self.store = store
        self.may_start = may_start

    def __enter__(self) -> Self:
        start_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            args = (rank, self.size, self.store, self._folder.name, theirs)
            process = _context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=not self.may_start)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._introduce()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end(kill=error is not None)

    @property
    def pids(self) -> list[int]:
        """The process ID of each rank."""
        return [process.pid or 0 for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90, loop: Loop = "asyncio") -> list[Any]:
        """Call ``function(rank, world_size, *args)`` on every living rank, and wait for all.

        Args:
            function: a function of a module's top level, plain or ``async def``.
            args: its arguments, the same for every rank; pickled.
            timeout_s: the limit for all ranks.
            loop: the event loop that runs an ``async def``.

        Returns:
            For each rank its result or a `RankFailure`.
        """
        if not self._pipes:
            raise AssertionError("this world has ended; see the first failure of this module")
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank was killed; _receive reports it
                pipe.send(_Call(function, args, timeout_s, loop))
        return self._collect(timeout_s)

    def results(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90, loop: Loop = "asyncio") -> Any:
        """Return the results of `run`; raise AssertionError if a rank failed."""
        outcomes = self.run(function, *args, timeout_s=timeout_s, loop=loop)
        failed = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
        if failed:
            raise AssertionError("\n".join(f"rank {f.rank}: {f.kind}: {f.text}\n{f.trace}" for f in failed))
        return outcomes

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL, as the OOM killer does, and wait until it has exited."""
        self._processes[rank].kill()
        self._processes[rank].join(_END_S)

    def _introduce(self) -> None:
        """Send the port of rank 0's store to the other ranks, and wait until the group has formed."""
        if self.store == "tcp":
            (port,) = self._collect(_START_S, self._pipes[:1])
            for pipe in self._pipes[1:]:
                pipe.send(port)
        met = self._collect(_START_S)
        if met != list(range(self.size)):
            raise AssertionError(f"the world did not form: {met}")

    def _collect(self, timeout_s: float, pipes: list[connection.Connection] | None = None) -> list[Any]:
        pending = list(enumerate(self._pipes if pipes is None else pipes))
        outcomes: list[Any] = [None] * len(pending)
        deadline = time.monotonic() + timeout_s + _GRACE_S
        while pending:
            ready = connection.wait([pipe for _, pipe in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank, _ in pending]
                self._end(kill=True, keep_folder=True)
                raise AssertionError(f"ranks {late} did not end within {timeout_s} s; their stacks:\n{self._stacks()}")
            for rank, pipe in [item for item in pending if item[1] in ready]:
                outcomes[rank] = self._receive(rank, pipe)
                pending.remove((rank, pipe))
        return outcomes

    def _receive(self, rank: int, pipe: connection.Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_END_S)
            return RankFailure(rank, "killed", f"exit code {self._processes[rank].exitcode}")

    def _stacks(self) -> str:
        files = sorted(Path(self._folder.name).glob("stacks-*"))
        text = "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)
        self._folder.cleanup()
        return text

    def _end(self, *, kill: bool, keep_folder: bool = False) -> None:
        for pipe in self._pipes:
            pipe.close()
        stuck = []
        for rank, process in enumerate(self._processes):
            if not kill:
                process.join(_END_S)
            if process.is_alive():
                stuck.append(rank)
                process.kill()
                process.join(_END_S)
            process.close()
        self._pipes, self._processes = [], []
        if keep_folder:
            return
        stacks = self._stacks()
        if stuck and not kill:
            raise AssertionError(f"ranks {stuck} did not exit when the world ended; their stacks:\n{stacks}")


def _serve(rank: int, size: int, store: Rendezvous, folder: str, pipe: connection.Connection) -> None:
    """Run a rank: join the group, then serve calls from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the test run ends its ranks
    gc.freeze()  # otherwise each collection would copy the memory pages that are shared with the server
    torch.set_num_threads(1)
    with Path(folder, f"stacks-{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(_START_S, file=stacks)
        _join_group(rank, size, store, folder, pipe)
        pipe.send(rank)
        while True:
            faulthandler.cancel_dump_traceback_later()
            try:
                call = pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            faulthandler.dump_traceback_later(call.timeout_s, file=stacks)
            _answer(rank, pipe, _outcome(rank, size, call))
        faulthandler.dump_traceback_later(_END_S - 1, file=stacks)
        dist.destroy_process_group()
        threads = [thread for thread in threading.enumerate() if not thread.daemon]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def _join_group(rank: int, size: int, store: Rendezvous, folder: str, pipe: connection.Connection) -> None:
    wait = timedelta(seconds=_START_S)
    if store == "file":
        shared: dist.Store = dist.FileStore(f"{folder}/store", size)
    elif rank == 0:
        serving = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        pipe.send(serving.port)
        shared = serving
    else:
        shared = dist.TCPStore("127.0.0.1", pipe.recv(), size, timeout=wait, wait_for_workers=False)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=wait)


def _answer(rank: int, pipe: connection.Connection, outcome: Any) -> None:
    try:
        pipe.send(outcome)
    except BrokenPipeError:
        pass  # the test is over
    except Exception as exc:  # the result can't be pickled
        pipe.send(RankFailure.of(rank, exc))


def _outcome(rank: int, size: int, call: _Call) -> Any:
    uncaught: list[RankFailure] = []

    def record(event: Any) -> None:
        error = event.exc_value or event.exc_type()
        uncaught.append(RankFailure.of(rank, error))

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = record, record
    try:
        outcome = _called(rank, size, call)
    except BaseException as exc:
        return RankFailure.of(rank, exc)
    finally:
        sys.unraisablehook, threading.excepthook = hooks
    return uncaught[0] if uncaught else outcome


def _called(rank: int, size: int, call: _Call) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)  # torch's own
        result = call.function(rank, size, *call.args)
        if not asyncio.iscoroutine(result):
            return result
        with asyncio.Runner(loop_factory=LOOPS[call.loop]) as runner:
            return runner.run(result)
