"""The disk of another host, whose checkpoints a `aiockpt.storage.remote_server.DiskServer` in a process there serves.

A request is a message with the name of a method and its arguments; bytes to be written follow. Bytes that were asked
for come in pieces, and then the result or the error; until then the server shows by heartbeats that it is at it. All
messages have a CRC-32. Connections are those of `aiockpt.coordination.wires`: both sides have proven that they know a
secret before anything is unpickled.

An open source, a listing and a transaction stand in the server as long as the connection that has opened them. So if
this process or its host dies, the server closes what it has read, and removes what it has not committed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio
from isal.isal_zlib import crc32

from aiockpt.coordination.link import HELLO_S, Endpoint, Link, LinkBrokenError, connect, network_namespace, reachable
from aiockpt.coordination.wires import Wire
from aiockpt.core.forks import ModuleLock, called_in_children
from aiockpt.core.threads import Workers, outlast
from aiockpt.errors import AiockptError, CommitError, CommitUncertainError, DeleteError, LoadError, WriteError
from aiockpt.storage.base import (
    NO_DOCUMENTS,
    Document,
    FileSink,
    Listing,
    LookBudget,
    Seen,
    SharedStorage,
    SharedTransaction,
    Source,
    Stamp,
    Traits,
)
from aiockpt.storage.local.directories import LocalDirectories

STALL_S = 60.0
"""How long the other side may be silent within a message, or before its answer."""
IDLE_S = 30.0
"""How long a connection is kept for the next request; the server keeps it for twice as long."""
SILENT_S = 30.0
"""How long a host that was silent is not asked again: each call to one without power would wait for its limit."""
REQUEST, DATA, RESULT, ERROR, BEAT = range(5)
_PIECE_BYTES = 1 << 20  # sent at a time, so that the CRC finds it in the processor's cache
_MOST_MESSAGE_BYTES = 1 << 30
_MOST_IDLE = 8  # connections of a process
_RANDOM_LETTERS = 16  # at the end of a ticket
_ASK_AGAIN_S = 0.05
_NEXT_ADDRESS_S = 0.25
_UNREACHABLE = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH}
_NOTHING = memoryview(b"")

_lock = ModuleLock(threading.RLock)  # of the idle connections


class DiskEndpoint(NamedTuple):
    """Addresses and secret of a server of a disk: a process that has them can write there."""

    link: Endpoint
    ticket: str  # one of the server's storage, with the name of its process


class DiskRequest(NamedTuple):
    """A method of the storage, or of what stands in the server under a number, and its arguments."""

    method: str
    args: Sequence[Any] = ()
    given: Mapping[str, Any] = {}
    token: int = 0


class Handle(NamedTuple):
    """The result of a request that opens something: its number, and what is to be known of it."""

    token: int
    facts: Any


class Connection(Wire):
    """A connection that carries requests one way, and answers the other way.

    Attributes:
        idle_since: when its last request was answered, by time.monotonic().
    """

    idle_since = 0.0

    def __init__(self, own: socket.socket, stall_s: float) -> None:
        super().__init__(own, stall_s)
        self._pid = os.getpid()
        _every.add(self)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a dead host ends a wait
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def is_quiet(self, for_ms: float | None = 0) -> bool:
        """Return whether nothing comes, nor the other side leaves, within a time; None: wait until one of them does."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(for_ms)

    def put(self, kind: int, value: object) -> None:
        """Send an object."""
        data = pickle.dumps(value)
        self.send(kind, crc32(data), memoryview(data))

    def put_bytes(self, view: memoryview) -> None:
        """Send bytes, in pieces; an object has to follow."""
        for at in range(0, len(view), _PIECE_BYTES):
            piece = view[at : at + _PIECE_BYTES]
            self.send(DATA, crc32(piece), piece)

    def take(self, view: memoryview = _NOTHING, seen: Seen | None = None) -> tuple[int, Any]:
        """Receive bytes into ``view``, all unless there was an error, and then an object; return its kind and it."""
        while True:
            kind, nbytes, check = self.head()
            if nbytes > (len(view) if kind == DATA else _MOST_MESSAGE_BYTES):
                raise LinkBrokenError("the other side sends more than it was asked for")
            piece = view[:nbytes] if kind == DATA else memoryview(bytearray(nbytes))
            self.fill(piece)
            if crc32(piece) != check:
                raise LinkBrokenError("what has come is not what was sent: its CRC-32 differs")
            if kind == DATA:
                view = view[nbytes:]
                if seen is not None:
                    seen(piece)
            elif kind != BEAT:
                if view and kind != ERROR:
                    raise LinkBrokenError("the other side sends less than it was asked for")
                return kind, pickle.loads(piece)

    def close(self) -> None:
        """Close the connection; a forked child leaves it to its parent. Idempotent."""
        if os.getpid() == self._pid:
            self.end()
        super().close()


_every = called_in_children(Connection.close)  # else the other side would not see the end of the parent


async def detached(link: Link, stall_s: float, *, connected: bool) -> Connection:
    """Return a link as a connection; see `Link.detach`."""
    try:
        own = await link.detach(connected=connected)
        try:
            return Connection(own, stall_s)
        except OSError as exc:  # it is broken already
            own.close()
            raise LinkBrokenError(str(exc)) from exc
    finally:
        link.close()


class _Lifeline:
    """An object in the server that lives as long as the connection that has opened it."""

    def __init__(self, home: Connection, opened: Handle) -> None:
        self.home, (self.token, self.facts) = home, opened
        self.drop = weakref.finalize(self, home.close)
        self.drop.atexit = False

    def take(self) -> bool:
        """Take the turn to use the connection, unless another thread has it or it is no longer the one of this."""
        if not self.home.turn.acquire(blocking=False):
            return False
        if not self.drop.alive:
            self.home.turn.release()
        return self.drop.alive


class _Client:
    """Requests of any thread to one server, over connections that are kept for the next ones. They block."""

    def __init__(self, endpoint: DiskEndpoint, host_name: str, stall_s: float) -> None:
        self.endpoint, self.host_name, self.stall_s = endpoint, host_name, stall_s
        self._silent_until, self._silence = 0.0, ""
        self._idle: dict[int, list[Connection]] = {}  # by process: a fork must not use its parent's
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def ask(
        self,
        failure: type[Exception],
        request: DiskRequest,
        line: _Lifeline | None = None,
        *,
        view: memoryview = _NOTHING,
        seen: Seen | None = None,
    ) -> Any:
        """Return the result of a request, or a `_Lifeline` for what it opens.

        Args:
            failure: raised if there is no answer; LinkBrokenError is the cause.
            request: the request.
            line: of what it is about; None: the storage.
            view: where the bytes go that are asked for.
            seen: see `Source.read`.
        """
        if line is not None:
            request = request._replace(token=line.token)
        is_home = line is not None and line.take()
        wire = line.home if line is not None and is_home else None
        try:
            wire = wire or self._taken()
            wire.put(REQUEST, request)
            kind, value = wire.take(view, seen)
        except BaseException as exc:
            if wire is not None:
                wire.end()  # what comes next would be the rest of this
                if not is_home:
                    wire.close()
            if isinstance(exc, LinkBrokenError):
                if _is_silence(exc) and wire is not None:
                    self._note_silence(f"nothing came for {self.stall_s:.3g} s")
                what = " ".join([request.method, *(each for each in request.args[:1] if isinstance(each, str))])
                raise failure(
                    f"host {self.host_name} does not answer to `{what}` ({exc}): its process has ended or is frozen, "
                    "or the network between the hosts is cut"
                ) from exc
            raise
        finally:
            if line is not None and is_home:
                line.home.turn.release()
        if isinstance(value, Handle):
            return _Lifeline(wire, value)
        if not is_home:
            self._give(wire)
        if kind == ERROR:
            raise self._error(value, failure)
        return value

    def close(self, line: _Lifeline) -> None:
        """Close what was opened, without waiting for the server. Idempotent."""
        with line.home.turn:
            if line.drop.detach() is None:
                return
            try:
                line.home.put(REQUEST, DiskRequest("close", token=line.token))
            except LinkBrokenError:
                line.home.close()
            else:
                self._give(line.home)

    def rest(self) -> None:
        """Close the connections that are not in use."""
        with _lock.held():
            _close_all(self._idle)

    def _error(self, sent: tuple[BaseException, BaseException | None], failure: type[Exception]) -> BaseException:
        """Return an error of the server with the name of its host."""
        error = sent[0]
        error.__cause__ = sent[1]
        if isinstance(error, OSError) and error.strerror:
            error.filename = self.host_name if error.filename is None else f"{self.host_name}:{error.filename}"
        elif error.args and isinstance(error.args[0], str):
            error.args = (f"host {self.host_name}: {error.args[0]}", *error.args[1:])
        if isinstance(error, OSError) and not isinstance(error, AiockptError) and not issubclass(failure, OSError):
            wrapped = failure(str(error))
            wrapped.__cause__ = error
            return wrapped
        return error

    def _give(self, wire: Connection) -> None:
        wire.idle_since = time.monotonic()
        with _lock.held():
            idle = self._idle.setdefault(os.getpid(), [])
            idle.append(wire)
            if len(idle) > _MOST_IDLE:
                idle.pop(0).close()

    def _taken(self) -> Connection:
        while True:
            with _lock.held():
                idle = self._idle.setdefault(os.getpid(), [])
                wire = idle.pop() if idle else None
            if wire is None:
                break
            if time.monotonic() < wire.idle_since + IDLE_S and wire.is_quiet():
                return wire
            wire.close()  # the other side has closed it, or is about to
        limit_s = min(HELLO_S, self.stall_s)
        with _lock.held():
            now = time.monotonic()
            if now < self._silent_until:
                raise LinkBrokenError(f"{self._silence}; it is asked again in {self._silent_until - now:.3g} s")
            if self._silence:  # this thread asks again, the others need not wait with it
                self._silent_until = now + limit_s
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # of this thread, for a moment
                wire = runner.run(self._connected(limit_s))
            try:
                wire.take()  # before it, the server still reads ahead by its stream
            except BaseException:
                wire.close()
                raise
        except LinkBrokenError as exc:
            self._silent_until, self._silence = 0.0, ""
            if _is_silence(exc):
                self._note_silence(str(exc))
            raise
        self._silent_until, self._silence = 0.0, ""
        return wire

    def _note_silence(self, text: str) -> None:
        with _lock.held():
            self._silent_until, self._silence = time.monotonic() + min(SILENT_S, self.stall_s), text
            _close_all(self._idle)  # each would be waited for as long

    async def _connected(self, limit_s: float) -> Connection:
        """Connect to the address that answers first; an address is tried a moment after the one that is better."""
        addresses = reachable(self.endpoint.link, network_namespace())
        error: BaseException = LinkBrokenError("it listens at addresses of another network only")
        found: Connection | None = None
        attempts = [asyncio.ensure_future(self._attempt(at, *each)) for at, each in enumerate(addresses)]
        try:
            async with asyncio.timeout(limit_s):
                for each in asyncio.as_completed(attempts):
                    try:
                        found = await each
                    except (OSError, LinkBrokenError) as exc:
                        error = exc
                    else:
                        return found
        except TimeoutError:
            hosts = " and ".join(host for host, _ in addresses)
            error = TimeoutError(f"nothing came from {hosts} for {limit_s:.3g} s")
        finally:
            for task in attempts:
                task.cancel()
            for other in await asyncio.gather(*attempts, return_exceptions=True):
                if isinstance(other, Connection) and other is not found:
                    other.close()
        raise LinkBrokenError(str(error)) from error

    async def _attempt(self, at: int, host: str, port: int) -> Connection:
        await asyncio.sleep(at * _NEXT_ADDRESS_S)
        _, link = await connect(host, port, self.endpoint.link.secret, socket.gethostname())
        return await detached(link, self.stall_s, connected=True)


def _is_silence(error: BaseException | None) -> bool:
    """Return whether nothing has come for a while, as from a host without power: asking again would take as long."""
    while isinstance(error, LinkBrokenError):
        error = error.__cause__
    is_late = isinstance(error, BlockingIOError | TimeoutError)  # the kernel's limit, or one of this program
    return is_late or getattr(error, "errno", None) in _UNREACHABLE


def _close_all(idle: dict[int, list[Connection]]) -> None:
    for wires in idle.values():
        while wires:
            wires.pop().close()


def _looked_up(method: str) -> Any:
    """Return a method of the storage that is one request."""

    def ask(self: RemoteDisk, *args: Any) -> Any:
        return self._client.ask(ConnectionError, DiskRequest(method, args))

    return ask


class RemoteDisk(LocalDirectories, SharedStorage):
    """The storage of another host, by the requests that its server answers. Its paths are those of that host.

    Any threads and loops may use it, and forked children too. A server that is dead, silent or can't be reached is an
    error of each call that names the host; the next call tries again.

    Args:
        endpoint: `DiskServer.endpoint`.
        host_name: the name of the host, for messages.
        stall_s: how long the server may be silent, in seconds. While it works, it is not.
    """

    traits = Traits(single_files=False)

    def __init__(self, endpoint: DiskEndpoint, host_name: str, *, stall_s: float = STALL_S) -> None:
        self.host_name = host_name
        self._client = _Client(endpoint, host_name, stall_s)

    def __repr__(self) -> str:
        return f"RemoteDisk({self.host_name})"

    def __reduce__(self) -> tuple[Any, ...]:
        client = self._client
        return partial(RemoteDisk, client.endpoint, client.host_name, stall_s=client.stall_s), ()

    def close(self) -> None:
        """Close the connections that are not in use; the next call makes new ones. Idempotent, does not block."""
        self._client.rest()

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return _DiskListing(self._client, path, budget or LookBudget())

    stamps = _looked_up("stamps")
    set_aside = _looked_up("set_aside")
    owner_of = _looked_up("owner_of")
    is_finishing = _looked_up("is_finishing")
    damage = _looked_up("damage")
    lease = SharedStorage.lease  # a run belongs to a manager of its own host
    link = SharedStorage.link

    def new_ticket(self, path: str) -> str:
        """Choose a ticket with the name of the server's process: if that dies, what it has made is an orphan."""
        return self._client.endpoint.ticket[:-_RANDOM_LETTERS] + secrets.token_hex(_RANDOM_LETTERS // 2)

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        return await self._begun(DiskRequest("begin", (path,), {"overwrite": overwrite, "ticket": ticket}), workers)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        return await self._begun(DiskRequest("join", (path, ticket)), workers)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        return await self._begun(
            DiskRequest("take_over", (path, ticket), {"overwrite": overwrite, "stamp": stamp}), workers
        )

    async def _begun(self, request: DiskRequest, workers: Workers) -> SharedTransaction:
        begun: list[_DiskTransaction] = []

        def begin() -> None:
            begun.append(_DiskTransaction(self, self._client.ask(WriteError, request), request.args[0], workers))

        try:
            await workers.run(begin)
        except BaseException:
            for each in begun:  # the caller was cancelled, and gets none
                await each.abort()
            raise
        return begun[0]

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await workers.run(_DiskSource, self._client, path)  # one that nobody gets is closed as garbage

    async def delete(self, path: str, *, workers: Workers) -> None:
        await workers.run(self._client.ask, DeleteError, DiskRequest("delete", (path,)))

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        request = DiskRequest("clean", (directory,), {"older_than_s": older_than_s})
        removed: list[str] = await workers.run(self._client.ask, DeleteError, request)
        return removed


class _DiskListing(Listing):
    def __init__(self, client: _Client, path: str, budget: LookBudget) -> None:
        self._client, self._budget = client, budget
        self._line = client.ask(ConnectionError, DiskRequest("look", (path,), {"left": budget.left}))
        vars(self).update(self._line.facts)

    def list_below(self) -> None:
        request = DiskRequest("list_below", (self._budget.left,))
        self.files, self._budget.left = self._client.ask(ConnectionError, request, self._line)

    def fetch(self, name: str, offset: int, length: int) -> Any:
        return self._client.ask(ConnectionError, DiskRequest("fetch", (name, offset, length)), self._line)

    def close(self) -> None:
        self._client.close(self._line)


class _DiskSource(Source):
    is_remote = True

    def __init__(self, client: _Client, path: str) -> None:
        self._client, self._path = client, path
        self._line = client.ask(LoadError, DiskRequest("open", (path,)))

    @property
    def files(self) -> Mapping[str, int]:
        return MappingProxyType(self._line.facts)

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._read(name, [(offset, len(view))], view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read(name, runs, view, None)

    def _read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None) -> None:
        if not self._line.drop.alive:
            raise LoadError(f"{self._path} was closed before {name} was read")
        self._client.ask(LoadError, DiskRequest("read", (name, runs)), self._line, view=view, seen=seen)

    def close(self) -> None:
        self._client.close(self._line)


def _asked(method: str) -> Any:
    """Return a method of a transaction that is one request."""

    async def ask(self: _DiskTransaction, *args: Any) -> Any:
        return await self._ask(DiskRequest(method, args))

    return ask


class _DiskTransaction(SharedTransaction):
    def __init__(self, disk: RemoteDisk, line: _Lifeline, path: str, workers: Workers) -> None:
        self._disk, self._line, self._path, self._workers = disk, line, path, workers
        self._ticket, self._stamp = line.facts
        self._is_committing = self._is_over = False

    async def _ask(self, request: DiskRequest, failure: type[Exception] = WriteError, **given: Any) -> Any:
        return await self._workers.run(partial(self._disk._client.ask, failure, request, self._line, **given))

    @property
    def ticket(self) -> str:
        return str(self._ticket)

    @property
    def stamp(self) -> Stamp | None:
        return None if self._stamp is None else str(self._stamp)

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        return _DiskSink(self, name)

    async def write_files(self, files: Mapping[str, Document]) -> None:
        await self._ask(DiskRequest("write_files", (_plain(files),)))

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        self._refuse_if_revoked(self._path)
        self._is_committing = True
        try:
            await self._ask(DiskRequest("commit", (_plain(documents),)), CommitError)
        except CommitError as exc:
            if not _is_without_answer(exc) or not await self._has_published(exc):
                raise
        finally:
            self._is_committing = False
        self._is_over = True

    async def _has_published(self, error: CommitError) -> bool:
        """Find out what has become of a commit without an answer; raise CommitUncertainError if that can't be."""
        try:
            await self._settled()
            transaction = await self._disk.take_over(
                self._path, self._ticket, overwrite=False, workers=self._workers, stamp=self._stamp
            )
            status = await transaction.status()
            await transaction.release()
        except (OSError, AiockptError) as worse:
            text = f"{error}. It is not known whether {self._path} was published there: look at it later"
            raise CommitUncertainError(text) from worse
        return status == "published"

    async def _settled(self) -> None:
        """Wait until the server has ended this transaction by itself, since the connection has ended."""
        deadline = time.monotonic() + self._disk._client.stall_s
        request = DiskRequest("is_held", (self._line.token,))
        while await self._workers.run(self._disk._client.ask, WriteError, request):
            if time.monotonic() > deadline:
                raise WriteError(f"host {self._disk.host_name} still works for {self._path}")
            await anyio.sleep(_ASK_AGAIN_S)

    def revoke(self) -> None:
        """End the connection, on which nothing can be sent now: so the server learns of it."""
        super().revoke()
        if self._is_committing:
            self._line.home.end()

    async def abort(self) -> None:
        await self._end("abort")

    async def discard_all(self) -> None:
        self._is_over = False  # what this process has committed belongs to what is discarded
        await self._end("discard_all")

    async def _end(self, method: str) -> None:
        if not self._is_over:
            self._is_over = True
            await outlast(self._ended(method))

    async def _ended(self, method: str) -> None:
        try:
            await self._ask(DiskRequest(method))
        except WriteError as exc:
            if not _is_without_answer(exc):
                raise
            await self._settled()

    async def release(self) -> None:
        self._is_over = True
        if self._line.drop.alive:
            await self._ask(DiskRequest("release"))
            await self._workers.run(self._disk._client.close, self._line)  # its connection serves others

    sizes = _asked("sizes")
    put_sidecar = _asked("put_sidecar")
    get_sidecar = _asked("get_sidecar")
    delete_sidecar = _asked("delete_sidecar")
    status = _asked("status")
    finalize = _asked("finalize")


class _DiskSink(FileSink):
    """A file that is sent as a whole: a save writes documents to another host's disk, and no others."""

    def __init__(self, transaction: _DiskTransaction, name: str) -> None:
        self._transaction, self._name, self._data = transaction, name, bytearray()

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        self._data += view
        free()

    async def finish(self) -> None:
        await self._transaction.write_files({self._name: self._data})


def _plain(files: Mapping[str, Document]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in files.items()}


def _is_without_answer(error: BaseException) -> bool:
    return isinstance(error.__cause__, LinkBrokenError)
