"""The disks of other hosts of a job, which are read over TCP by two verbs. Nothing is written, and nothing unpickled.

====  ==============================  =======================================================================
verb  asks for                        is answered with
====  ==============================  =======================================================================
LIST  a path                          a JSON document: what is there. It stays open on the server until the
                                      connection lists something else, or ends
READ  a file of what was listed       the bytes, in pieces, and an empty document; or an error, a JSON document
      last, and runs of bytes of it
====  ==============================  =======================================================================

Both sides prove that they know a secret first, as for a `aiockpt.coordination.link`; then messages follow, as over the
wires of `aiockpt.coordination.wires`, each with its CRC-32.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import select
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from isal.isal_zlib import crc32

from aiockpt.coordination.link import (
    HELLO_S,
    Endpoint,
    LinkBrokenError,
    addresses_of_this_host,
    network_namespace,
    proof,
    reachable,
)
from aiockpt.coordination.wires import Wire
from aiockpt.core.forks import called_in_children
from aiockpt.core.threads import start_thread
from aiockpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    NoThreadError,
    WriteError,
    printable_key,
)
from aiockpt.storage.base import Directories, Listing, LookBudget, Seen, Source, Storage, Transaction

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
_MOST_STRANGERS = 1024  # connections whose other side has not proven anything yet
_PAUSE_S = 1.0  # before the next connection is taken where there was no descriptor for one
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
        own.setblocking(True)
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

    def put_bytes(self, data: bytes) -> None:
        """Send a piece of a file."""
        self.send(DATA, crc32(data), memoryview(data))

    def take(self, view: memoryview | None = None, seen: Seen | None = None) -> tuple[int, Any]:
        """Receive bytes into ``view``, all unless there was an error, and then a document; return its kind and it."""
        view = memoryview(b"") if view is None else view
        while True:
            kind, nbytes, check = self.head()
            if nbytes > (len(view) if kind == DATA else _MOST_DOCUMENT_BYTES):
                raise LinkBrokenError("the other side sends more than it was asked for")
            piece = view[:nbytes] if kind == DATA else memoryview(bytearray(nbytes))
            self.fill(piece)
            if crc32(piece) != check:
                raise LinkBrokenError("what has come is not what was sent: its CRC-32 differs")
            if kind != DATA:
                break
            view = view[nbytes:]
            if seen is not None and nbytes:
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


def _prove(own: socket.socket, secret: bytes, name: str, deadline: float) -> None:
    """Raise LinkBrokenError unless the other side knows the secret. Blocks."""
    proving, received = proof(secret, name), b""
    try:
        while True:
            message, nbytes = proving.send(received or None)
            own.settimeout(max(1e-3, deadline - time.monotonic()))
            own.sendall(message)
            received = b""
            while len(received) < nbytes:
                own.settimeout(max(1e-3, deadline - time.monotonic()))  # of all of it: a byte may come now and then
                piece = own.recv(nbytes - len(received))
                if not piece:
                    raise LinkBrokenError("the other side has closed the connection")
                received += piece
    except StopIteration:
        return
    except OSError as exc:
        raise LinkBrokenError(str(exc)) from exc


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
        self._secret, self._name, self._origin = secrets.token_bytes(32), socket.gethostname(), os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._strangers = 0
        self._is_closed = False
        self._listening: list[socket.socket] = []
        self._awake, self._wake = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept, name="aiockpt-disk", daemon=True)
        try:
            for host in hosts or addresses_of_this_host(None):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listening.append(socket.create_server((host, 0), family=family, backlog=1024))
                self._listening[-1].setblocking(False)
            start_thread(self._accepting)
        except BaseException:
            self._close_listening()
            raise
        addresses = [each.getsockname()[:2] for each in self._listening]
        self.endpoint = Endpoint(addresses, self._secret, network_namespace(), self._name, 0)
        _servers.add(self)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in (self._awake, *self._listening):
                selector.register(listening, selectors.EVENT_READ)
            while not self._is_closed:
                for key, _ in selector.select():
                    if key.fileobj is not self._awake and isinstance(key.fileobj, socket.socket):
                        self._welcome(key.fileobj)

    def _welcome(self, listening: socket.socket) -> None:
        try:
            own, _ = listening.accept()
        except BlockingIOError:  # it has left already
            return
        except OSError as exc:
            logger.warning("the disk of this host can't be served to another process now: %s", exc)
            select.select([self._awake], [], [], _PAUSE_S)
            return
        thread = threading.Thread(target=self._serve, args=(own,), name="aiockpt-disk-connection", daemon=True)
        with self._lock:
            for ended in [each for each in self._connections if not each.is_alive()]:
                del self._connections[ended]
            is_taken = not self._is_closed and self._strangers < _MOST_STRANGERS
            if is_taken:
                try:
                    start_thread(thread)
                except NoThreadError as exc:
                    logger.warning("another process can't be served: %s", exc)
                else:
                    self._connections[thread] = own
                    self._strangers += 1
                    return
        own.close()  # which the other side finds

    def _serve(self, own: socket.socket) -> None:
        with contextlib.closing(own):
            try:
                try:
                    _prove(own, self._secret, self._name, time.monotonic() + HELLO_S)
                finally:
                    with self._lock:
                        self._strangers -= 1
                wire = PeerWire(own, self._stall_s)
                with contextlib.closing(_Service(self._storage, self._place, wire)) as service:
                    while True:
                        service.answer()
            except (LinkBrokenError, OSError) as exc:  # also if it is broken as soon as it is made
                logger.debug("a connection to the disk of this host has ended: %s", exc)

    def _place(self, path: str) -> str:
        """Return a path that may be read; raise PermissionError for any other."""
        path, directory = self._storage.resolve(path), self._directory
        if path != directory and not path.startswith(self._storage.below(directory, "")):
            raise PermissionError(errno.EACCES, f"it is not in {directory}, and nothing else is served", path)
        return path

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
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        threads = [self._accepting, *self._connections]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._accepting.is_alive():
            self._close_listening()
        return not any(thread.is_alive() for thread in threads)

    def _close_listening(self) -> None:
        for own in (*self._listening, self._awake, self._wake):
            own.close()

    def leave(self) -> None:
        """Close all in a forked child: else others would wait for it when its parent is dead."""
        self._close_listening()
        for own in self._connections.values():
            own.close()


_servers = called_in_children(PeerServer.leave)


class _Service:
    """The answers on one connection."""

    def __init__(self, storage: Directories, place: Callable[[str], str], wire: PeerWire) -> None:
        self._storage, self._place, self._wire = storage, place, wire
        self._listing: Listing | None = None

    def answer(self) -> None:
        """Answer a request; raise LinkBrokenError if the other side leaves, or does not follow the protocol."""
        kind, asked = self._wire.take()
        if kind not in (LIST, READ):
            raise _strange()
        try:
            answer = self._list(asked) if kind == LIST else self._read(asked)
        except LinkBrokenError:
            raise
        except (KeyError, TypeError, ValueError) as exc:
            raise _strange() from exc
        except OSError as exc:
            text = f"{printable_key(str(exc.filename))}: {exc.strerror}" if exc.filename else str(exc)
            self._wire.put(ERROR, {"errno": exc.errno or 0, "text": text})
        except Exception as exc:  # of a storage of the user's
            self._wire.put(ERROR, {"errno": 0, "text": f"{type(exc).__name__}: {exc}"})
        else:
            self._wire.put(ANSWER, answer)

    def close(self) -> None:
        listing, self._listing = self._listing, None
        if listing is not None:
            listing.close()

    def _list(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        path, below = str(asked["path"]), bool(asked["below"])
        self.close()
        self._listing = listing = self._storage.look(self._place(path))
        if below:
            listing.list_below()
        return {name: getattr(listing, name) for name in _FACTS}

    def _read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        name, runs = str(asked["name"]), [(int(offset), int(length)) for offset, length in asked["runs"]]
        listing = self._listing
        if listing is None or any(offset < 0 or length < 0 for offset, length in runs):
            raise _strange()
        if name not in listing.files:  # nor is a name looked at that leads out
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        for batch in _batches(runs):
            data = b"".join(listing.fetch(name, offset, length) for offset, length in batch)
            if len(data) < sum(length for _, length in batch):
                raise OSError(errno.ENODATA, "it ends before what is asked for", name)
            self._wire.put_bytes(data)
        return {}


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
        return await workers.run(_PeerSource, self, path)

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
        return _connect(self._endpoint, limit_s, self._stall_s)

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


def _connect(endpoint: Endpoint, limit_s: float, stall_s: float) -> PeerWire:
    """Connect to the address that answers first; raise LinkBrokenError if none does in time, or proves itself."""
    addresses, deadline = reachable(endpoint, network_namespace()), time.monotonic() + limit_s
    error: BaseException = LinkBrokenError("it listens at addresses of another network only")
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for host, port in addresses:
            own = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            own.setblocking(False)
            code = own.connect_ex((host, port))
            if code in (0, errno.EINPROGRESS):
                selector.register(own, selectors.EVENT_WRITE, own)
            else:
                error = OSError(code, os.strerror(code))
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                hosts = " and ".join(host for host, _ in addresses)
                error = TimeoutError(f"nothing came from {hosts} for {limit_s:.3g} s")
                break
            own = ready[0][0].data
            selector.unregister(own)
            try:
                if code := own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                _prove(own, endpoint.secret, socket.gethostname(), deadline)
                return PeerWire(socket.socket(fileno=os.dup(own.fileno())), stall_s)
            except (OSError, LinkBrokenError) as exc:
                error = exc
    raise LinkBrokenError(str(error)) from error


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


class _PeerListing(Listing):
    def __init__(self, disk: PeerDisk, path: str) -> None:
        self._disk, self.path = disk, path
        vars(self).update(disk.list(path, below=False))

    def list_below(self) -> None:
        self.files = self._disk.list(self.path, below=True)["files"]

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        data = bytearray(max(0, min(length, self.files.get(name, 0) - offset)))
        self._disk.read(self.path, self.stamp, name, [(offset, len(data))], memoryview(data))
        return bytes(data)


class _PeerSource(Source):
    is_remote = True

    def __init__(self, disk: PeerDisk, path: str) -> None:
        self._disk, self._path = disk, path
        try:
            found = disk.list(path, below=True)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise CheckpointNotFoundError(f"there is no checkpoint at {path} on host {disk.host_name}") from exc
        except OSError as exc:
            raise LoadError(f"{path} can't be opened: {exc}") from exc
        self._stamp, self._files = found["stamp"], found["files"]

    @property
    def files(self) -> Mapping[str, int]:
        return MappingProxyType(self._files)

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._read(name, [(offset, len(view))], view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read(name, runs, view)

    def _read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> None:
        where, files = f"{self._path}/{printable_key(name)}", self._files
        end = max((offset + length for offset, length in runs), default=0)
        if name not in files or end > files[name]:
            what = "is missing" if name not in files else f"ends before byte {end}"
            raise CorruptCheckpointError(f"{where} {what} on host {self._disk.host_name}")
        try:
            self._disk.read(self._path, self._stamp, name, runs, view, seen)
        except OSError as exc:
            is_gone = isinstance(exc, FileNotFoundError) or exc.errno == errno.ENODATA
            raise (CorruptCheckpointError if is_gone else LoadError)(f"{where} can't be read: {exc}") from exc

    def close(self) -> None:
        """Do nothing: what a server has open ends with its connection."""
