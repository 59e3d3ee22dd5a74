"""The disk of another host, whose checkpoints a `aiockpt.storage.remote_server.DiskServer` in a process there serves.

A request is a message with the name of a method and its arguments, maybe followed by bytes. Bytes are answered in
pieces, and then comes the result or the error; until then the server shows by heartbeats that it is at it. All messages
have a CRC-32. Connections are those of `aiockpt.coordination.wires`: both sides have proven that they know a secret
before anything is unpickled.

An open source, a listing and a transaction stand in the server as long as the connection that has opened them. So if
this process or its host dies, the server closes what it has read, and removes what it has not committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio
from isal.isal_zlib import crc32

from aiockpt.coordination.link import HELLO_S, Endpoint, LinkBrokenError, connect, network_namespace, reachable
from aiockpt.coordination.wires import Wire
from aiockpt.core.forks import ModuleLock
from aiockpt.core.threads import Workers, outlast
from aiockpt.errors import AiockptError, CommitError, CommitUncertainError, DeleteError, LoadError, WriteError
from aiockpt.storage.base import (
    Document,
    FileSink,
    LeaseFacts,
    Listing,
    LookBudget,
    Seen,
    SharedStorage,
    SharedTransaction,
    Source,
    Stamp,
    Status,
)
from aiockpt.storage.local.directories import LocalDirectories

STALL_S = 60.0
"""How long the other side may be silent within a message, or before its answer."""
PIECE_BYTES = 1 << 20
"""So much is sent at a time, so that its CRC finds it in the processor's cache."""
REQUEST, DATA, RESULT, ERROR, BEAT = range(5)
_MOST_IDLE = 8  # connections of a process
_MOST_MESSAGE_BYTES = 1 << 30  # besides data
_MOST_CAUSES = 8
_RANDOM_LETTERS = 16  # at the end of a ticket
_ASK_AGAIN_S = 0.05

_NOTHING = memoryview(b"")

_names = LocalDirectories()
_lock = ModuleLock()  # of the idle connections


class DiskEndpoint(NamedTuple):
    """What it takes to connect to a server of a disk. Whoever has it can write there."""

    link: Endpoint
    ticket: str  # one of the server's storage, with the name of its process


class Connection(Wire):
    """A connection that carries requests one way, and answers the other way."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come, nor has the other side left."""
        return not self._poll(0)

    def wait(self) -> None:
        """Wait until something comes, or the other side leaves."""
        self._poll(None)

    def _poll(self, timeout_ms: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def keep_alive(self) -> None:
        """Let the system find out whether the other side's host is dead, while this one only waits."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def put(self, kind: int, value: object) -> None:
        """Send an object; PicklingError before anything is sent."""
        data = pickle.dumps(value)
        self.send(kind, crc32(data), memoryview(data))

    def put_bytes(self, view: memoryview) -> None:
        """Send bytes, in pieces."""
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            self.send(DATA, crc32(piece), piece)

    def take(self, view: memoryview = _NOTHING, seen: Seen | None = None) -> tuple[int, Any]:
        """Receive bytes into ``view``, and then an object; return its kind and the object. It may be an ERROR early."""
        at = 0
        while True:
            head = self.head()
            if head.number == DATA:
                piece = view[at : at + head.nbytes]
                if len(piece) < head.nbytes:
                    raise LinkBrokenError("more bytes come than were asked for")
                self._checked(piece, head.check)
                at += head.nbytes
                if seen is not None:
                    seen(piece)
                continue
            if head.nbytes > _MOST_MESSAGE_BYTES or not REQUEST <= head.number <= BEAT:
                raise LinkBrokenError("the other side speaks another language")
            data = bytearray(head.nbytes)
            self._checked(memoryview(data), head.check)
            if head.number == RESULT and at < len(view):
                raise LinkBrokenError("fewer bytes come than were asked for")
            if head.number != BEAT:
                return head.number, pickle.loads(data)

    def take_bytes(self, view: memoryview) -> None:
        """Receive what the other side sends by `put_bytes`."""
        while view:
            head = self.head()
            if head.number != DATA or head.nbytes > len(view):
                raise LinkBrokenError("the other side speaks another language")
            self._checked(view[: head.nbytes], head.check)
            view = view[head.nbytes :]

    def _checked(self, view: memoryview, check: int) -> None:
        self.fill(view)
        if crc32(view) != check:
            raise LinkBrokenError("what has come is not what was sent: its CRC-32 differs")


def packed(error: BaseException) -> list[bytes]:
    """Return an error and its causes in the form in which they are sent."""
    chain: list[bytes] = []
    at: BaseException | None = error
    while at is not None and len(chain) < _MOST_CAUSES:
        try:
            data = pickle.dumps(at)
            pickle.loads(data)
        except Exception:  # whatever its class does
            data = pickle.dumps(AiockptError(f"{type(at).__name__}: {at}"))
        chain.append(data)
        at = at.__cause__
    return chain


def _unpacked(chain: list[bytes], host_name: str) -> BaseException:
    first, *causes = [pickle.loads(data) for data in chain]
    at: BaseException = first
    for cause in causes:
        at.__cause__ = cause
        at = cause
    if isinstance(first, OSError) and first.strerror:
        first.filename = host_name if first.filename is None else f"{host_name}:{first.filename}"
    elif first.args and isinstance(first.args[0], str):
        first.args = (f"host {host_name}: {first.args[0]}", *first.args[1:])
    assert isinstance(first, BaseException)
    return first


# --- the client -----------------------------------------------------------------------------------------


class _Held:
    """An object that stands in the server as long as the connection that has opened it."""

    def __init__(self, home: Connection, token: int) -> None:
        self.home, self.token = home, token
        self.drop = weakref.finalize(self, _drop, home, os.getpid())
        self.drop.atexit = False


def _drop(home: Connection, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same connection, which it must not end
        home.end()
    home.close()


class _Client:
    """Requests of any thread to one server, over connections that are kept for the next ones. They block."""

    def __init__(self, endpoint: DiskEndpoint, host_name: str, stall_s: float) -> None:
        self.endpoint, self.host_name, self.stall_s = endpoint, host_name, stall_s
        self._idle: dict[int, list[Connection]] = {}  # by process: a fork must not use its parent's
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def ask(
        self,
        method: str,
        *args: object,
        held: _Held | None = None,
        token: int = 0,
        data: memoryview | None = None,
        view: memoryview = _NOTHING,
        seen: Seen | None = None,
        failure: type[Exception] = WriteError,
    ) -> Any:
        """Return the result of a method of the storage, or of an object there.

        Args:
            method: its name.
            args: its arguments.
            held: the object; None: the storage.
            token: of an object that stands in the server with the other one, if it is that one's method.
            data: bytes that follow.
            view: where the bytes go that are answered.
            seen: see `Source.read`.
            failure: raised if there is no answer.
        """
        with self._errors(method, args, failure):
            is_home = held is not None and held.drop.alive and held.home.turn.acquire(blocking=False)
            wire = held.home if held is not None and is_home else self._taken()
            try:
                kind, value = self._asked(wire, (method, token or (held.token if held else 0), args), data, view, seen)
            except BaseException:
                wire.end()  # what comes next would be the rest of this
                if not is_home:
                    wire.close()
                raise
            finally:
                if is_home:
                    wire.turn.release()
            if not is_home:
                self.give(wire)
        return self._result(kind, value, failure)

    def open(self, method: str, *args: object, failure: type[Exception] = WriteError) -> tuple[_Held, Any]:
        """Return an object that a method of the storage opens, and what it says of it."""
        with self._errors(method, args, failure):
            wire = self._taken()
            try:
                kind, value = self._asked(wire, (method, 0, args), None, _NOTHING, None)
            except BaseException:
                wire.end()
                wire.close()
                raise
        if kind == ERROR:
            self.give(wire)
        token, facts = self._result(kind, value, failure)
        return _Held(wire, token), facts

    def close(self, held: _Held) -> None:
        """Close an object, without waiting for the server. Idempotent."""
        if held.drop.detach() is not None:
            try:
                held.home.put(REQUEST, ("close", held.token, ()))
            except LinkBrokenError:
                held.home.close()
            else:
                self.give(held.home)

    def give(self, wire: Connection) -> None:
        """Keep a connection that is not in use for the next request."""
        with _lock.held():
            idle = self._idle.setdefault(os.getpid(), [])
            idle.append(wire)
            surplus = idle[:-_MOST_IDLE]
            del idle[:-_MOST_IDLE]
        for each in surplus:
            _drop(each, os.getpid())

    def rest(self) -> None:
        """Close the connections that are not in use."""
        with _lock.held():
            _close_all(self._idle)

    def _result(self, kind: int, value: Any, failure: type[Exception]) -> Any:
        if kind != ERROR:
            return value
        error = _unpacked(value, self.host_name)
        if isinstance(error, OSError) and not isinstance(error, AiockptError) and not issubclass(failure, OSError):
            raise failure(str(error)) from error  # of the server, not of its storage
        raise error

    @staticmethod
    def _asked(
        wire: Connection, request: object, data: memoryview | None, view: memoryview, seen: Seen | None
    ) -> tuple[int, Any]:
        wire.put(REQUEST, request)
        if data is not None:
            wire.put_bytes(data)
        return wire.take(view, seen)

    @contextlib.contextmanager
    def _errors(self, method: str, args: Sequence[object], failure: type[Exception]) -> Iterator[None]:
        try:
            yield
        except LinkBrokenError as exc:
            what = " ".join([method.replace("_", " "), *(each for each in args[:1] if isinstance(each, str))])
            raise failure(
                f"host {self.host_name}, which was asked to {what}, does not answer ({exc}): its process has ended or "
                "is frozen, or the network between the hosts is cut"
            ) from exc

    def _taken(self) -> Connection:
        while True:
            with _lock.held():
                if os.getpid() not in self._idle:
                    _close_all(self._idle)  # of the parent, which goes on with them
                idle = self._idle.setdefault(os.getpid(), [])
                wire = idle.pop() if idle else None
            if wire is None:
                return self._connected()
            if wire.is_quiet:
                return wire
            wire.close()  # the other side has closed it

    def _connected(self) -> Connection:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # of this thread, for a moment
            wire = runner.run(self._reached())
        try:
            wire.take()  # before it, the server still reads ahead by its stream
        except BaseException:
            wire.close()
            raise
        return wire

    async def _reached(self) -> Connection:
        error: BaseException = LinkBrokenError("it listens at addresses of another network only")
        for host, port in reachable(self.endpoint.link, network_namespace()):
            try:
                async with asyncio.timeout(min(HELLO_S, self.stall_s)):
                    _, link = await connect(host, port, self.endpoint.link.secret, socket.gethostname())
                    return Connection(await link.detach(connected=True), self.stall_s)
            except TimeoutError:
                error = LinkBrokenError(f"nothing came from {host} for {min(HELLO_S, self.stall_s):.3g} s")
            except (OSError, LinkBrokenError) as exc:
                error = exc
        raise LinkBrokenError(str(error)) from error


def _close_all(idle: dict[int, list[Connection]]) -> None:
    for pid, wires in idle.items():
        while wires:
            _drop(wires.pop(), pid)


class RemoteDisk(SharedStorage):
    """The storage of another host, by the requests that its server answers. Its paths are those of that host.

    Any threads and loops may use it, and forked children too. A server that is dead, silent or can't be reached is an
    error of each call that names the host; the next call tries again.

    Args:
        endpoint: `DiskServer.endpoint`.
        host_name: the name of the host, for messages.
        stall_s: how long the server may be silent, in seconds. While it works, it is not.
    """

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

    def resolve(self, path: str) -> str:
        return _names.resolve(path)

    def below(self, path: str, name: str) -> str:
        return _names.below(path, name)

    def split(self, path: str) -> tuple[str, str]:
        return _names.split(path)

    def leftover(self, name: str) -> str | None:
        return _names.leftover(name)

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return _RemoteListing(self._client, path, budget or LookBudget())

    def stamp(self, path: str) -> Stamp | None:
        try:
            found: Stamp | None = self._client.ask("stamp", path, failure=ConnectionError)
        except OSError:
            return None
        return found

    def stamps(self, directory: str, count: int) -> Mapping[str, Stamp] | None:
        found: Mapping[str, Stamp] | None = self._client.ask("stamps", directory, count, failure=ConnectionError)
        return found

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        return str(self._client.ask("set_aside", path, list(names), failure=ConnectionError))

    def owner_of(self, directory: str) -> LeaseFacts | None:
        owner: LeaseFacts | None = self._client.ask("owner_of", directory, failure=ConnectionError)
        return owner

    def is_finishing(self, directory: str) -> bool:
        return bool(self._client.ask("is_finishing", directory, failure=ConnectionError))

    def link(self, path: str) -> str | None:
        found: str | None = self._client.ask("link", path, failure=ConnectionError)
        return found

    def new_ticket(self, path: str) -> str:
        """Choose a ticket with the name of the server's process: if that dies, what it has made is an orphan."""
        return self._client.endpoint.ticket[:-_RANDOM_LETTERS] + secrets.token_hex(_RANDOM_LETTERS // 2)

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        return await self._transaction("begin", path, ticket, overwrite, workers=workers)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        return await self._transaction("join", path, ticket, workers=workers)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        return await self._transaction("take_over", path, ticket, overwrite, stamp, workers=workers)

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        return await self._transaction("resume", path, save_id, workers=workers)

    async def _transaction(self, method: str, path: str, *args: object, workers: Workers) -> SharedTransaction:
        begun: list[_RemoteTransaction] = []

        def begin() -> None:
            held, facts = self._client.open(method, path, *args)
            begun.append(_RemoteTransaction(self, workers, held, path, facts))

        try:
            await workers.run(begin)
        except BaseException:
            for each in begun:  # the caller was cancelled, and gets none
                await (each.suspend() if method == "resume" else each.abort())
            raise
        return begun[0]

    async def delete(self, path: str, *, workers: Workers) -> None:
        await workers.run(partial(self._client.ask, "delete", path, failure=DeleteError))

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        removed: list[str] = await workers.run(
            partial(self._client.ask, "clean", directory, older_than_s, failure=DeleteError)
        )
        return removed

    async def open(self, path: str, *, workers: Workers) -> Source:
        opened: list[Source] = []
        try:
            await workers.run(lambda: opened.append(_RemoteSource(self._client, path)))
        except BaseException:
            for each in opened:
                await outlast(workers.run(each.close))
            raise
        return opened[0]


class _RemoteListing(Listing):
    def __init__(self, client: _Client, path: str, budget: LookBudget) -> None:
        self._client, self._budget = client, budget
        self._held, facts = client.open("look", path, budget.left, failure=ConnectionError)
        self.path, self.is_file, self.files, self.folders, self.others, self.changed_s, self.stamp = facts

    def list_below(self) -> None:
        self.files, self._budget.left = self._ask("list_below", self._budget.left)

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        found: bytes = self._ask("fetch", name, offset, length)
        return found

    def _ask(self, method: str, *args: object) -> Any:
        return self._client.ask(method, *args, held=self._held, failure=ConnectionError)

    def close(self) -> None:
        self._client.close(self._held)


class _RemoteSource(Source):
    is_remote = True

    def __init__(self, client: _Client, path: str) -> None:
        self._client, self._path = client, path
        self._held, (self._files, self.gap_bytes) = client.open("open", path, failure=LoadError)

    @property
    def files(self) -> Mapping[str, int]:
        return MappingProxyType(self._files)

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._read(name, [(offset, len(view))], view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read(name, list(runs), view, None)

    def _read(self, name: str, runs: list[tuple[int, int]], view: memoryview, seen: Seen | None) -> None:
        if not self._held.drop.alive:
            raise LoadError(f"{self._path} was closed before {name} was read")
        self._client.ask("read", name, runs, held=self._held, view=view, seen=seen, failure=LoadError)

    def close(self) -> None:
        self._client.close(self._held)


_NO_DOCUMENTS: Mapping[str, Document] = MappingProxyType({})


class _RemoteTransaction(SharedTransaction):
    def __init__(
        self, disk: RemoteDisk, workers: Workers, held: _Held, path: str, facts: tuple[str, Stamp | None]
    ) -> None:
        self._disk, self._client = disk, disk._client
        self._workers, self._held, self._path = workers, held, path
        self._ticket, self._stamp = facts
        self._is_revoked = self._is_committing = self._is_over = False

    @property
    def ticket(self) -> str:
        return self._ticket

    @property
    def stamp(self) -> Stamp | None:
        return self._stamp

    async def _ask(self, method: str, *args: object, failure: type[Exception] = WriteError, **given: Any) -> Any:
        return await self._workers.run(
            partial(self._client.ask, method, *args, held=self._held, failure=failure, **given)
        )

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        return _RemoteSink(self, await self._ask("create", name, nbytes))

    async def write_files(self, files: Mapping[str, Document]) -> None:
        await self._ask("write_files", _plain(files))

    async def commit(self, documents: Mapping[str, Document] = _NO_DOCUMENTS) -> None:
        if self._is_revoked:
            raise CommitError(f"{self._path} was given up before it was published")
        self._is_committing = True
        try:
            await self._ask("commit", _plain(documents), failure=CommitError)
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
            raise CommitUncertainError(
                f"{error}. It is not known whether {self._path} was published there: look at it later"
            ) from worse
        return status == "published"

    async def _settled(self) -> None:
        """Wait until the server has ended this transaction, as the connection has ended."""
        deadline = time.monotonic() + self._client.stall_s
        while await self._workers.run(self._client.ask, "is_held", self._held.token):
            if time.monotonic() > deadline:
                raise WriteError(f"host {self._client.host_name} still works for {self._path}")
            await anyio.sleep(_ASK_AGAIN_S)

    def revoke(self) -> None:
        """Let the server know by the end of the connection, on which it can't be sent anything now."""
        self._is_revoked = True
        if self._is_committing:
            self._held.home.end()

    async def abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            await outlast(self._end("abort"))

    async def suspend(self) -> None:
        if not self._is_over:
            self._is_over = True
            await outlast(self._end("suspend"))

    async def discard_all(self) -> None:
        self._is_over = True
        await outlast(self._end("discard_all"))

    async def _end(self, method: str) -> None:
        try:
            await self._ask(method)
        except WriteError as exc:
            if not _is_without_answer(exc):
                raise
            await self._settled()  # the server has done so by itself

    async def whole_files(self) -> Mapping[str, int]:
        found: Mapping[str, int] = await self._ask("whole_files")
        return found

    async def sizes(self) -> Mapping[str, int]:
        found: Mapping[str, int] = await self._ask("sizes")
        return found

    async def put_sidecar(self, name: str, data: bytes) -> None:
        await self._ask("put_sidecar", name, data)

    async def get_sidecar(self, name: str) -> bytes | None:
        found: bytes | None = await self._ask("get_sidecar", name)
        return found

    async def delete_sidecar(self, name: str) -> None:
        await self._ask("delete_sidecar", name)

    async def status(self) -> Status:
        found: Status = await self._ask("status")
        return found

    async def finalize(self) -> None:
        await self._ask("finalize")

    async def release(self) -> None:
        self._is_over = True
        await self._ask("release")


class _RemoteSink(FileSink):
    def __init__(self, transaction: _RemoteTransaction, token: int) -> None:
        self._transaction, self._token = transaction, token

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        await self._transaction._ask("write", len(view), data=view, token=self._token)
        free()

    async def finish(self) -> None:
        await self._transaction._ask("finish", token=self._token)


def _is_without_answer(error: BaseException) -> bool:
    return isinstance(error.__cause__, LinkBrokenError)


def _plain(files: Mapping[str, Document]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in files.items()}
