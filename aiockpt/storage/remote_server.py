"""The server of a disk: other hosts of the job read and write the checkpoints of this one's storage through it.

It works in threads of its own, one for each connection, beside whatever else the process does. What a connection has
opened ends with it: a source is closed, and a transaction is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import mmap
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from isal.isal_zlib import crc32

from aiockpt.coordination.link import (
    Endpoint,
    Link,
    LinkBrokenError,
    addresses_of_this_host,
    listen,
    network_namespace,
)
from aiockpt.core.forks import called_in_children
from aiockpt.core.threads import Workers, new_event_loop, start_thread, uninterrupted
from aiockpt.errors import AiockptError, NoThreadError, printable_key
from aiockpt.storage.base import LookBudget, SharedStorage, SharedTransaction
from aiockpt.storage.remote_disk import (
    BEAT,
    ERROR,
    IDLE_S,
    RESULT,
    STALL_S,
    Connection,
    DiskEndpoint,
    DiskRequest,
    Handle,
    detached,
)

T = TypeVar("T")

_BEAT_S = 0.25
_READ_BYTES = 4 << 20  # read at a time
_SECRET_BYTES = 32
_THREADS = 8
# Methods of the storage: those of a directory or a checkpoint, and those that change what has to be below a directory.
_AT = {"look", "stamps", "owner_of", "is_finishing", "open", "clean"}
_BELOW = {"set_aside", "delete", "begin", "join", "take_over"}
_BLOCKING = {"stamps", "owner_of", "is_finishing"}
_SIDECARS = {"put_sidecar", "get_sidecar", "delete_sidecar"}
_ENDING = {"abort", "discard_all", "release"}
_PASSED_ON = _SIDECARS | _ENDING | {"sizes", "status", "finalize"}  # of a transaction

logger = logging.getLogger("aiockpt")


class DiskServer:
    """Serves what is in some directories of a storage to the processes that get its `endpoint`.

    Making it blocks for a moment; raises OSError if there is no address to listen at. End it with `close`.

    Args:
        storage: what it serves.
        directories: a path must be one of these, or below one.
        hosts: the addresses to listen at; None: all by which other hosts reach this one.
        stall_s: how long another process may be silent within a message, in seconds.
        damage: told to the processes that ask for it with `RemoteDisk.damage`.
    """

    def __init__(
        self,
        storage: SharedStorage,
        directories: Sequence[str],
        *,
        hosts: Sequence[str] | None = None,
        stall_s: float = STALL_S,
        damage: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.storage, self._stall_s, self.damage = storage, stall_s, damage
        self._directories = [storage.resolve(path) for path in directories]
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Connection] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.served: dict[int, _Served] = {}
        self.tokens = itertools.count(1)
        self.workers = Workers(_THREADS, "aiockpt-disk")
        self._loop = new_event_loop()
        self._looping = threading.Thread(target=self._loop.run_forever, name="aiockpt-disk-loop", daemon=True)
        try:
            uninterrupted(lambda: start_thread(self._looping))
            self._server, link = self.run(self._listen(hosts or addresses_of_this_host(None))).result()
        except BaseException:
            self._end(0.0)
            raise
        self.endpoint = DiskEndpoint(link, storage.new_ticket(self._directories[0]))
        _servers.add(self)

    async def _listen(self, hosts: Sequence[str]) -> tuple[asyncio.Server, Endpoint]:
        secret, name = secrets.token_bytes(_SECRET_BYTES), socket.gethostname()
        server = await listen(hosts, secret, name, self._joined)
        addresses = [each.getsockname()[:2] for each in server.sockets]
        return server, Endpoint(addresses, secret, network_namespace(), name, 0)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of the storage."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def place(self, path: str, *, below: bool) -> str:
        """Return a path that may be served; raise PermissionError for any other."""
        path = self.storage.resolve(path)
        if any(path.startswith(self.storage.below(each, "")) for each in self._directories):
            return path
        if not below and path in self._directories:
            return path
        where = " or ".join(self._directories)
        raise PermissionError(errno.EACCES, f"it is not below {where}, and nothing else is served", path)

    def _joined(self, hello: str, link: Link) -> None:
        async def serve() -> None:
            with contextlib.suppress(LinkBrokenError):
                self._start(await detached(link, self._stall_s, connected=False))

        task = asyncio.ensure_future(serve())
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _start(self, wire: Connection) -> None:
        with self._lock:
            if self._is_closed:
                wire.close()
                return
            for ended in [each for each in self._threads if not each.is_alive()]:
                del self._threads[ended]
            thread = threading.Thread(target=self._serve, args=(wire,), name="aiockpt-disk-connection", daemon=True)
            try:
                start_thread(thread)
            except NoThreadError as exc:  # the other end finds its connection closed
                logger.warning("another process can't be served: %s", exc)
                wire.close()
            else:
                self._threads[thread] = wire

    def _serve(self, wire: Connection) -> None:
        service = _Service(self, wire)
        try:
            service.run()
        except LinkBrokenError as exc:
            logger.debug("a connection to the disk of this host has ended: %s", exc)
        finally:
            service.end()
            wire.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until no other process is connected, for so long at most. Blocks."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all connections and threads; return whether they have ended in time: if not, try again. Blocks.

        What is not committed is removed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
        if self._loop.is_closed():
            return True
        self._loop.call_soon_threadsafe(self._stop_listening)
        for wire in self._threads.values():
            wire.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # What hangs still needs the loop and the workers.
        return not any(thread.is_alive() for thread in self._threads) and self._end(deadline - time.monotonic())

    def _stop_listening(self) -> None:
        self._server.close()
        for task in self._joining:
            task.cancel()

    def _end(self, timeout_s: float) -> bool:
        if not self.workers.end(max(1.0, timeout_s)):
            return False
        if self._looping.ident is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._looping.join(max(1.0, timeout_s))
        if self._looping.is_alive():
            return False
        self._loop.close()
        return True

    def leave(self) -> None:
        """Stop listening in a forked child: else others would wait for it when its parent is dead."""
        null = os.open(os.devnull, os.O_RDWR)
        for listening in self._server.sockets:
            os.dup2(null, listening.fileno())  # not closed: the loop, which is the parent's, may do so once more
        os.close(null)


_servers = called_in_children(DiskServer.leave)


@dataclass(eq=False)
class _Served:
    """An object that a client has opened here."""

    inner: Any
    end: Callable[[], Awaitable[object]] | None  # done if its connection ends
    budget: LookBudget = field(default_factory=LookBudget)  # of a listing
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def in_turn(self, work: Callable[[], Awaitable[object]]) -> None:
        """Write, or end it, when nothing is being written: a connection may write while another one has ended."""
        async with self._turn:
            await work()


class _Service:
    """The requests of one connection, one after the other. For its thread."""

    def __init__(self, server: DiskServer, wire: Connection) -> None:
        self._server, self._wire = server, wire
        self._storage, self._workers = server.storage, server.workers
        self._opened: list[int] = []
        self._memory: mmap.mmap | None = None  # kept, since new memory is slow at first

    def run(self) -> None:
        """Answer requests until nothing is open and none comes; raise LinkBrokenError if the client leaves."""
        self._wire.put(RESULT, None)
        while self._opened or not self._wire.is_quiet(2e3 * IDLE_S):
            self._wire.is_quiet(None)
            request = self._wire.take()[1]
            if not isinstance(request, DiskRequest):
                raise LinkBrokenError("the other side speaks another language")
            if request.method == "close":
                self._close(request.token)
                continue
            try:
                self._wire.put(RESULT, self._answer(request))
            except LinkBrokenError:
                raise
            except Exception as exc:
                self._wire.put(ERROR, _sendable(exc))

    def end(self) -> None:
        """Close what this connection has opened."""
        for token in [*self._opened]:
            self._close(token)

    def _answer(self, request: DiskRequest) -> Any:
        method, args, given, token = request
        own = getattr(self, f"_on_{method}", None)
        if not token and method in _AT | _BELOW:
            path = self._server.place(args[0], below=method in _BELOW)
            return self._of_storage(method, own, (path, *args[1:]), given)
        if method == "is_held":
            return args[0] in self._server.served
        if method == "damage":
            return dict(self._server.damage)
        served = self._server.served.get(token)
        if served is None:
            raise OSError("what was opened here has been closed, as the connection has ended")
        if own is not None:
            return own(served, *args)
        if method not in _PASSED_ON:
            raise AttributeError(method)
        if method in _SIDECARS:
            _inside(args[0])
        called = getattr(served.inner, method)
        if method not in _ENDING:
            return self._run(called(*args))
        self._run(served.in_turn(called))
        if method == "release":
            served.end = None
        return None

    def _of_storage(
        self, method: str, own: Callable[..., Any] | None, args: Sequence[Any], given: Mapping[str, Any]
    ) -> Any:
        if own is not None:
            return own(*args, **given)
        called = getattr(self._storage, method)
        if method in _BLOCKING:
            return self._call(called, *args)
        result = self._run(called(*args, workers=self._workers, **given))
        if not isinstance(result, SharedTransaction):
            return result
        return self._serve(_Served(result, result.abort), (result.ticket, result.stamp))

    # --- what stands here ---------------------------------------------------------------------------------

    def _serve(self, served: _Served, facts: object) -> Handle:
        token = next(self._server.tokens)
        self._server.served[token] = served
        self._opened.append(token)
        return Handle(token, facts)

    def _close(self, token: int) -> None:
        if token not in self._opened:  # it belongs to another connection
            return
        self._opened.remove(token)
        served = self._server.served[token]
        try:
            if served.end is not None:
                self._server.run(served.in_turn(served.end)).result()
        except (OSError, AiockptError) as exc:
            logger.warning("can't end what another host has left: %s", exc)
        del self._server.served[token]

    # --- waiting ------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        return self._wait(self._workers.submit(function, *args))

    def _run(self, coroutine: Coroutine[Any, Any, T], given_up: Callable[[], object] = lambda: None) -> T:
        return self._wait(self._server.run(coroutine), given_up)

    def _wait(self, future: Future[T], given_up: Callable[[], object] = lambda: None) -> T:
        """Wait, and show the client that this one does; ``given_up``: called if the client has left."""
        while not wait_for([future], _BEAT_S).done:
            if self._wire.is_quiet():
                with contextlib.suppress(LinkBrokenError):
                    self._wire.send(BEAT, crc32(b"."), memoryview(b"."))
            else:
                given_up()
        return future.result()

    # --- reading ------------------------------------------------------------------------------------------

    def _on_look(self, path: str, left: int) -> Handle:
        budget = LookBudget(left)
        found = self._call(self._storage.look, path, budget)
        names = ("path", "is_file", "files", "folders", "others", "changed_s", "stamp")
        served = _Served(found, partial(self._workers.run, found.close), budget)
        return self._serve(served, {name: getattr(found, name) for name in names})

    def _on_list_below(self, served: _Served, left: int) -> tuple[dict[str, int], int]:
        served.budget.left = left
        self._call(served.inner.list_below)
        return served.inner.files, served.budget.left

    def _on_fetch(self, served: _Served, name: str, offset: int, length: int) -> bytes:
        return bytes(self._call(served.inner.fetch, _inside(name), offset, length))

    def _on_open(self, path: str) -> Handle:
        source = self._run(self._storage.open(path, workers=self._workers))
        return self._serve(_Served(source, partial(self._workers.run, source.close)), dict(source.files))

    def _on_read(self, served: _Served, name: str, runs: Sequence[tuple[int, int]]) -> None:
        if self._memory is None:
            self._memory = mmap.mmap(-1, _READ_BYTES)
        for batch in _batches(runs):
            view = memoryview(self._memory)[: sum(length for _, length in batch)]
            if len(batch) == 1:
                served.inner.read(name, batch[0][0], view, self._wire.put_bytes)
            else:
                served.inner.read_runs(name, batch, view)
                self._wire.put_bytes(view)

    # --- writing ------------------------------------------------------------------------------------------

    def _on_set_aside(self, path: str, names: Sequence[str]) -> str:
        return self._call(self._storage.set_aside, path, [_inside(name) for name in names])

    def _on_write_files(self, served: _Served, files: dict[str, bytes]) -> None:
        inside = {_inside(name): data for name, data in files.items()}
        self._run(served.in_turn(partial(served.inner.write_files, inside)))

    def _on_commit(self, served: _Served, documents: dict[str, bytes]) -> None:
        committing = served.inner.commit({_inside(name): data for name, data in documents.items()})
        self._run(committing, served.inner.revoke)


def _inside(name: str) -> str:
    """Return the name of a file of a checkpoint; raise PermissionError if it leads out of it."""
    if not name or ".." in name.split("/") or name.startswith("/"):
        raise PermissionError(errno.EACCES, "it is no name of a file within a checkpoint", printable_key(name))
    return name


def _sendable(error: BaseException) -> tuple[BaseException, BaseException | None]:
    """Return an error and its cause, or what is said of them if they can't be sent."""
    with contextlib.suppress(Exception):  # whatever their classes do
        pickle.loads(pickle.dumps((error, error.__cause__)))
        return error, error.__cause__
    return AiockptError(f"{type(error).__name__}: {error}"), None


def _batches(runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of bytes in portions that fit into a buffer."""
    batch: list[tuple[int, int]] = []
    left = _READ_BYTES
    for offset, length in runs:
        while length:
            part = min(length, left)
            batch.append((offset, part))
            offset, length, left = offset + part, length - part, left - part
            if not left:
                yield batch
                batch, left = [], _READ_BYTES
    if batch:
        yield batch
