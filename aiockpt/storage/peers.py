"""The disks of other hosts of a job, which are read over TCP by two verbs. Nothing is written, and nothing unpickled.

====  ==============================  =======================================================================
verb  asks for                        is answered with
====  ==============================  =======================================================================
LIST  a path                          a JSON document: what is there. It stays open on the server until the
                                      connection lists something else, or ends
READ  a file of what was listed       the bytes, in pieces, and an empty document; or an error, a JSON document
      last, and runs of bytes of it
====  ==============================  =======================================================================

The connections are made, and prove a secret, as a `aiockpt.coordination.link`; then they carry messages, each with its
CRC-32, as the wires of `aiockpt.coordination.wires`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from isal.isal_zlib import crc32

from aiockpt.coordination.link import (
    HELLO_S,
    Endpoint,
    Link,
    LinkBrokenError,
    addresses_of_this_host,
    connect,
    listen,
    network_namespace,
    reachable,
)
from aiockpt.coordination.wires import Wire
from aiockpt.core.forks import called_in_children
from aiockpt.core.threads import in_thread, start_thread
from aiockpt.errors import NoThreadError, WriteError, printable_key
from aiockpt.storage.base import Directories, Listing, LookBudget, Seen, Source, Storage, Transaction
from aiockpt.storage.remote import RemoteListing, open_remote

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

T = TypeVar("T")

LIST, READ, DATA, ANSWER, ERROR = range(5)
STALL_S = 60.0
"""How long the other side may be silent within a message, or before its answer."""
IDLE_S = 30.0
"""How long a connection is kept for the next request; the server waits for it for twice as long, as for all."""
SILENT_S = 30.0
"""How long a host that was silent is not asked again: each call to one without power would wait for its limit."""
_PIECE_BYTES = 4 << 20  # read and sent at a time
_MOST_DOCUMENT_BYTES = 1 << 28
_MOST_IDLE = 8  # connections of a process to one server
_MOST_STRANGERS = 1024  # connections to one address whose other side has not proven anything yet
_FACTS = {"is_file": bool, "files": dict, "folders": list, "others": list, "changed_s": float, "stamp": str}
_UNREACHABLE = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH}

logger = logging.getLogger("aiockpt")


class PeerWire(Wire):
    """A connection that carries requests one way, and answers the other way.

    Attributes:
        idle_since: when its last request was answered, by time.monotonic().
        listed: what its server has open: the path, the stamp, and whether the files one level below were listed.
    """

    idle_since = 0.0
    listed: tuple[str, str, bool] | None = None

    def __init__(self, own: socket.socket, stall_s: float) -> None:
        super().__init__(own, stall_s)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _wires.add(self)

    def is_quiet(self, for_ms: float = 0) -> bool:
        """Return whether nothing comes, nor the other side leaves, within a time."""
        if self._socket.fileno() < 0:  # in a forked child
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(for_ms)

    def put(self, kind: int, document: object) -> None:
        """Send a document."""
        data = json.dumps(document).encode()
        self.send(kind, crc32(data), memoryview(data))

    def take(self, view: memoryview | None = None, seen: Seen | None = None) -> tuple[int, Any]:
        """Receive bytes into ``view``, all unless there was an error, and then a document; return its kind and it."""
        view = memoryview(b"") if view is None else view
        while True:
            kind, nbytes, check = self.head()
            if nbytes > (len(view) if kind == DATA else _MOST_DOCUMENT_BYTES) or (kind == DATA and not nbytes):
                raise LinkBrokenError("the other side sends more than it was asked for")
            piece = view[:nbytes] if kind == DATA else memoryview(bytearray(nbytes))
            self.fill(piece)
            if crc32(piece) != check:
                raise LinkBrokenError("what has come is not what was sent: its CRC-32 differs")
            if kind != DATA:
                break
            view = view[nbytes:]
            if seen is not None:
                seen(piece)
        if view and kind != ERROR:
            raise LinkBrokenError("the other side sends less than it was asked for")
        try:
            return kind, json.loads(bytes(piece))
        except (ValueError, RecursionError) as exc:
            raise _strange() from exc


_wires = called_in_children(PeerWire.close)  # else the other side would not see the end of the parent


def _strange() -> LinkBrokenError:
    return LinkBrokenError("the other side speaks another language")


# --- the server ---------------------------------------------------------------------------------------------


class PeerServer:
    """Serves what is in a directory of a storage to the processes that get its `endpoint`, from threads of its own.

    Making it raises OSError if there is no address to listen at. End it with `close`.

    Args:
        storage: what it serves.
        directory: a path must be this one, or below.
        hosts: the addresses to listen at; None: all by which other hosts reach this one.
        stall_s: how long another process may be silent within a message, in seconds.
    """

    def __init__(
        self, storage: Directories, directory: str, *, hosts: Sequence[str] | None = None, stall_s: float = STALL_S
    ) -> None:
        self._storage, self._directory, self._stall_s = storage, storage.resolve(directory), stall_s
        self._lock, self._origin, self._is_closed = threading.Lock(), os.getpid(), False
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._listening: list[socket.socket] = []
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        self._accepting = threading.Thread(target=self._accept, name="aiockpt-disk", daemon=True)
        try:
            for host in hosts or addresses_of_this_host(None):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listening.append(socket.create_server((host, 0), family=family, backlog=1024))
            addresses = [own.getsockname()[:2] for own in self._listening]
            secret, name = secrets.token_bytes(32), socket.gethostname()
            self.endpoint = Endpoint(addresses, secret, network_namespace(), name, 0)
            start_thread(self._accepting)
        except BaseException:
            self.leave()
            self._loop.close()
            raise
        _servers.add(self)

    def _accept(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._take_connections())

    async def _take_connections(self) -> None:
        tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them

        def join(_: str, link: Link) -> None:
            task = asyncio.ensure_future(self._join(link))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        with contextlib.ExitStack() as stack:
            for own in self._listening:
                server = await listen(
                    own, self.endpoint.secret, self.endpoint.host, join, most_strangers=_MOST_STRANGERS
                )
                stack.callback(server.close)
            await self._closed.wait()

    async def _join(self, link: Link) -> None:
        """Serve a connection in a thread."""
        try:
            async with asyncio.timeout(HELLO_S):
                own = await link.detach(connected=False)
        except (LinkBrokenError, OSError) as exc:
            logger.debug("a connection to the disk of this host has ended: %s", exc)
            return
        finally:
            link.close()
        thread = threading.Thread(target=self._serve, args=(own,), name="aiockpt-disk-connection", daemon=True)
        with self._lock:
            for ended in [thread for thread in self._connections if not thread.is_alive()]:
                del self._connections[ended]
            if not self._is_closed:
                try:
                    start_thread(thread)
                except NoThreadError as exc:
                    logger.warning("another process can't be served: %s", exc)
                else:
                    self._connections[thread] = own
                    return
        own.close()  # which the other side finds

    def _serve(self, own: socket.socket) -> None:
        with contextlib.closing(own), contextlib.ExitStack() as listed:
            try:
                wire, listing = PeerWire(own, self._stall_s), None
                wire.put(ANSWER, {})
                while True:
                    kind, asked = wire.take()
                    if kind not in (LIST, READ):
                        raise _strange()
                    with _reported(wire):
                        if kind == LIST:
                            listed.close()
                            listing = None
                            listing = listed.enter_context(self._look(asked))
                            wire.put(ANSWER, {name: getattr(listing, name) for name in _FACTS})
                        else:
                            _send(wire, listing, asked)
                            wire.put(ANSWER, {})
            except (LinkBrokenError, OSError) as exc:  # also if it is broken as soon as it is made
                logger.debug("a connection to the disk of this host has ended: %s", exc)

    def _look(self, asked: Mapping[str, Any]) -> Listing:
        """Return what is at a path; raise PermissionError if that may not be read."""
        path, directory, below = self._storage.resolve(str(asked["path"])), self._directory, bool(asked["below"])
        if path != directory and not path.startswith(self._storage.below(directory, "")):
            raise PermissionError(errno.EACCES, f"it is not in {directory}, and nothing else is served", path)
        listing = self._storage.look(path)
        if below:
            listing.list_below()
        return listing

    def wait(self, timeout_s: float) -> None:
        """Wait until no other process is connected, for so long at most. Blocks."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._connections)
        for thread in threads:
            thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all connections; return whether all threads have ended in time. Blocks; idempotent."""
        if os.getpid() != self._origin:
            return True
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for own in self._connections.values():
                with contextlib.suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._closed.set)
        threads = [self._accepting, *self._connections]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def leave(self) -> None:
        """Close all in a forked child: else others would wait for it when its parent is dead."""
        for own in (*self._listening, *self._connections.values()):
            own.close()


_servers = called_in_children(PeerServer.leave)


@contextlib.contextmanager
def _reported(wire: PeerWire) -> Iterator[None]:
    """Send an error to the other side; raise LinkBrokenError if it does not follow the protocol, or leaves."""
    try:
        yield
    except LinkBrokenError:
        raise
    except (KeyError, TypeError, ValueError) as exc:
        raise _strange() from exc
    except OSError as exc:
        text = f"{printable_key(str(exc.filename))}: {exc.strerror}" if exc.filename else str(exc)
        wire.put(ERROR, {"errno": exc.errno or 0, "text": text})
    except Exception as exc:  # of a storage of the user's
        wire.put(ERROR, {"errno": 0, "text": f"{type(exc).__name__}: {exc}"})


def _send(wire: PeerWire, listing: Listing | None, asked: Mapping[str, Any]) -> None:
    """Send runs of bytes of a file."""
    name, runs = str(asked["name"]), [(int(offset), int(length)) for offset, length in asked["runs"]]
    if listing is None or any(offset < 0 or length < 0 for offset, length in runs):
        raise _strange()
    if name not in listing.files:  # nor is a name looked at that leads out
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    for batch in _batches(runs):
        data = b"".join(listing.fetch(name, offset, length) for offset, length in batch)
        if len(data) < sum(length for _, length in batch):
            raise OSError(errno.ENODATA, "it ends before what is asked for", name)
        wire.send(DATA, crc32(data), memoryview(data))


def _batches(runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of bytes in portions of one message."""
    batch: list[tuple[int, int]] = []
    left = _PIECE_BYTES
    for offset, length in runs:
        while length:
            part = min(length, left)
            batch.append((offset, part))
            offset, length, left = offset + part, length - part, left - part
            if not left:
                yield batch
                batch, left = [], _PIECE_BYTES
    if batch:
        yield batch


# --- the client ---------------------------------------------------------------------------------------------


class PeerDisk(Storage):
    """The storage of another host, as its `PeerServer` shows it, for reading. Its paths are those of that host.

    Any threads may use it, and forked children too. A server that is dead, silent or can't be reached is an error of
    each call that names the host; the next call tries again.

    Args:
        endpoint: `PeerServer.endpoint`.
        host_name: the name of the host, for messages.
        stall_s: how long the server may be silent, in seconds.
    """

    def __init__(self, endpoint: Endpoint, host_name: str, *, stall_s: float = STALL_S) -> None:
        self.host_name = host_name
        self._endpoint, self._stall_s = endpoint, stall_s
        self._silent_until, self._silence = 0.0, ""
        self._idle: list[PeerWire] = []
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def __repr__(self) -> str:
        return f"PeerDisk({self.host_name})"

    def close(self) -> None:
        """Close the connections that are not in use; the next call makes new ones. Idempotent, does not block."""
        _close_all(self._idle)

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return _PeerListing(self, path)

    async def begin(self, path: str, *, overwrite: bool, workers: Workers) -> Transaction:
        raise WriteError(f"{path} of host {self.host_name} is written by the ranks of that host only")

    async def open(self, path: str, *, workers: Workers) -> Source:
        look = functools.partial(_PeerListing, self, path)
        source = await open_remote(look, f"{path} on host {self.host_name}", workers)
        source.gap_bytes, source.most_reads = Source.gap_bytes, Source.most_reads  # hosts of a job are near
        return source

    # --- requests; they block, and raise the OSError of the server, or ConnectionError if there is no answer ----

    def list(self, path: str, *, below: bool) -> dict[str, Any]:
        """Return what is at a path, as the attributes of a `Listing`; ``below``: with the files one level below."""
        return self._ask(path, functools.partial(self._list, path=path, below=below))

    def read(
        self,
        path: str,
        stamp: str,
        name: str,
        runs: Sequence[tuple[int, int]],
        view: memoryview,
        seen: Seen | None = None,
    ) -> None:
        """Read bytes of a file of what was listed; raise FileNotFoundError if that has been replaced."""
        wanted = path, stamp, "/" in name

        def read(wire: PeerWire) -> None:
            if wire.listed != wanted:
                self._list(wire, path=path, below="/" in name)
                if wire.listed != wanted:
                    what = f"host {self.host_name}: {path} was deleted or replaced meanwhile"
                    raise FileNotFoundError(errno.ENOENT, what)
            wire.put(READ, {"name": name, "runs": runs})
            self._answer(wire, view, seen)

        self._ask(f"{path}/{name}", read)

    def _list(self, wire: PeerWire, *, path: str, below: bool) -> dict[str, Any]:
        wire.listed = None
        wire.put(LIST, {"path": path, "below": below})
        found = _checked_facts(self._answer(wire))
        wire.listed = path, found["stamp"], below
        return found

    def _answer(self, wire: PeerWire, view: memoryview | None = None, seen: Seen | None = None) -> Any:
        kind, document = wire.take(view, seen)
        if kind == ANSWER:
            return document
        try:
            number, text = int(document["errno"]), str(document["text"])
        except (KeyError, TypeError, ValueError) as exc:
            raise _strange() from exc
        raise OSError(number, f"host {self.host_name}: {text}")  # Python makes the class of the number of it

    def _ask(self, what: str, request: Callable[[PeerWire], T]) -> T:
        """Make a request over a connection that is kept, or else a new one."""
        wire: PeerWire | None = None
        try:
            wire = self._taken(what)
            result = request(wire)
        except LinkBrokenError as exc:
            if wire is not None:
                wire.close()
            self._note(exc)
            raise self._no_answer(what, str(exc)) from exc
        except OSError:  # an answer
            if wire is not None:
                self._give(wire)
            raise
        except BaseException:
            if wire is not None:
                wire.close()  # what comes next would be the rest of this
            raise
        self._silence = ""
        self._give(wire)
        return result

    def _no_answer(self, what: str, why: str) -> ConnectionError:
        return ConnectionError(
            f"host {self.host_name} does not answer to a look at {what} ({why}): its process has ended or is frozen, "
            "or the network between the hosts is cut"
        )

    def _give(self, wire: PeerWire) -> None:
        wire.idle_since = time.monotonic()
        self._idle.append(wire)
        if len(self._idle) > _MOST_IDLE:
            with contextlib.suppress(IndexError):
                self._idle.pop(0).close()

    def _taken(self, what: str) -> PeerWire:
        with contextlib.suppress(IndexError):
            while True:
                wire = self._idle.pop()
                if time.monotonic() < wire.idle_since + IDLE_S and wire.is_quiet():
                    return wire
                wire.close()  # the other side has closed it, or is about to
        limit_s, now = min(HELLO_S, self._stall_s), time.monotonic()
        if now < self._silent_until:
            left_s = self._silent_until - now
            raise self._no_answer(what, f"{self._silence}; it is asked again in {left_s:.3g} s")
        if self._silence:  # this thread asks again, the others need not wait with it
            self._silent_until = now + limit_s
        own = in_thread(lambda: asyncio.run(_reach(self._endpoint, limit_s))).result()  # a loop may run in this one
        wire = PeerWire(own, self._stall_s)
        try:
            wire.take()  # sent when the server has left the stream, which reads ahead
        except BaseException:
            wire.close()
            raise
        return wire

    def _note(self, error: LinkBrokenError) -> None:
        """Ask no more for a while if nothing has come, as from a host without power: each call would take as long."""
        cause: BaseException | None = error
        while isinstance(cause, LinkBrokenError):
            cause = cause.__cause__
        if isinstance(cause, BlockingIOError | TimeoutError) or getattr(cause, "errno", None) in _UNREACHABLE:
            is_kernels = isinstance(cause, BlockingIOError)
            self._silence = f"nothing came for {self._stall_s:.3g} s" if is_kernels else str(error)
            self._silent_until = time.monotonic() + min(SILENT_S, self._stall_s)
            self.close()
        else:
            self._silent_until, self._silence = 0.0, ""


def _close_all(idle: list[PeerWire]) -> None:
    with contextlib.suppress(IndexError):  # other threads take some as well
        while True:
            idle.pop().close()


async def _reach(endpoint: Endpoint, limit_s: float) -> socket.socket:
    """Connect to the address that answers first; raise LinkBrokenError if none does in time, or proves itself."""
    addresses, name = reachable(endpoint, network_namespace()), socket.gethostname()
    error: BaseException = LinkBrokenError("it listens at addresses of another network only")
    tasks = [asyncio.ensure_future(connect(host, port, endpoint.secret, name)) for host, port in addresses]
    try:
        async with asyncio.timeout(limit_s):
            for first in asyncio.as_completed(tasks):
                try:
                    _, link = await first
                    return await link.detach(connected=True)
                except (OSError, LinkBrokenError) as exc:
                    error = exc
    except TimeoutError:
        error = TimeoutError(f"nothing came from {' and '.join(host for host, _ in addresses)} for {limit_s:.3g} s")
    finally:
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(made, BaseException):
                made[1].close()
    number = getattr(error, "errno", None)
    raise LinkBrokenError(os.strerror(number) if number else str(error)) from error


def _checked_facts(document: Any) -> dict[str, Any]:
    """Return the facts of a listing; raise LinkBrokenError if they are none, or a name leads out of it."""
    try:
        found = {name: document[name] for name in _FACTS}
        is_valid = all(isinstance(found[name], kind) for name, kind in _FACTS.items())
        names = [*found["files"], *found["folders"]]
        is_valid &= all(type(name) is str for name in names) and all(type(n) is int for n in found["files"].values())
    except (KeyError, TypeError, AttributeError) as exc:
        raise _strange() from exc
    if not is_valid:
        raise _strange()
    for name in names:
        if {"", "..", "."} & set(name.split("/")):
            raise LinkBrokenError(f"the other side has a file {printable_key(name)}, which leads out of the checkpoint")
    return found


class _PeerListing(RemoteListing):
    """The listing of a path of another host.

    Args:
        disk: that of the host.
        path: the path there.
        shown: the path in messages of a source; None: that of a listing alone.
    """

    def __init__(self, disk: PeerDisk, path: str, shown: str | None = None) -> None:
        super().__init__(shown or path, LookBudget())
        self._disk, self._place = disk, path
        vars(self).update(disk.list(path, below=shown is not None))

    def list_below(self) -> None:
        if self.path == self._place:  # else they are here
            self.files = self._disk.list(self._place, below=True)["files"]

    def list_folder(self, name: str) -> None:
        """Do nothing: `list_below` lists all of them at once."""

    def read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> int:
        try:
            self._disk.read(self._place, self.stamp, name, runs, view, seen)
        except OSError as exc:
            if exc.errno == errno.ENODATA:
                return 0
            raise
        return len(view)

    def is_replaced(self, exc: OSError) -> bool:
        return False  # what is gone is missing, whatever is there now
