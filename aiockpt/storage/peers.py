"""The disks of other hosts of a job, which are read over TCP by two verbs. Nothing is written, and nothing unpickled.

====  ================================================  =========================================
verb  asks for                                          is answered with
====  ================================================  =========================================
LIST  a path                                            a JSON document: what is there
READ  a file of what was listed, and runs of its bytes  the bytes, fewer if it ends before
====  ================================================  =========================================

Both sides prove that they know a secret, as those of a `aiockpt.coordination.link`. Then a connection carries messages,
each with its CRC-32, as the wires of `aiockpt.coordination.wires`: a request, and its answer or an error.
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
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32

from aiockpt.coordination.link import (
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
from aiockpt.errors import NoThreadError, WriteError
from aiockpt.storage.base import Directories, Listing, LookBudget, Seen, Source, Storage, Transaction
from aiockpt.storage.remote import RemoteListing, open_remote

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

LIST, READ, ERROR = range(3)
STALL_S = 60.0
"""How long the other side may be silent within a message, or before its answer."""
SILENT_S = 30.0
"""How long a host that was silent is not asked again: each call to one without power would wait for its limit."""
_CONNECT_S = 5.0  # for each address
_PAUSE_S = 0.1  # when no connection can be accepted, as there are no descriptors
_MOST_DOCUMENT_BYTES = 1 << 28
_MOST_CONNECTIONS = 4096
_SILENCE = {None, errno.EAGAIN, errno.ETIMEDOUT, errno.EHOSTUNREACH}  # None: Python's own limit
_FACTS = "is_file", "files", "folders", "others", "changed_s", "stamp"

logger = logging.getLogger("aiockpt")

# A fork waits until an accepted socket is known, so that the child can close it. If it did not, the other side would
# not see the end of the parent.
_accepting = threading.Lock()
os.register_at_fork(before=_accepting.acquire, after_in_parent=_accepting.release, after_in_child=_accepting.release)


class PeerWire(Wire):
    """A connection that carries requests one way, and answers the other way."""

    def __init__(self, own: socket.socket, stall_s: float) -> None:
        own.settimeout(None)
        super().__init__(own, stall_s)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _wires.add(self)

    def prove(self, secret: bytes) -> None:
        """Exchange proofs that both sides know the secret; see `proof`."""
        proving, received = proof(secret, socket.gethostname()), b""
        with contextlib.suppress(StopIteration):
            while True:
                message, nbytes = proving.send(received or None)
                self._socket.sendall(message)
                data = bytearray(nbytes)
                self.fill(memoryview(data))
                received = bytes(data)

    def wait(self) -> None:
        """Wait for the next message, however long that takes, or for the end of the other side."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def put(self, kind: int, data: bytes) -> None:
        """Send a message."""
        self.send(kind, crc32(data), memoryview(data))

    def take(self, view: memoryview | None = None) -> tuple[int, memoryview]:
        """Receive a message, the bytes of a file into ``view``; return its kind and what has come."""
        kind, nbytes, check = self.head()
        if nbytes > (_MOST_DOCUMENT_BYTES if view is None or kind != READ else len(view)):
            raise LinkBrokenError("the other side sends more than it was asked for")
        data = memoryview(bytearray(nbytes)) if view is None or kind != READ else view[:nbytes]
        self.fill(data)
        if crc32(data) != check:
            raise LinkBrokenError("what has come is not what was sent: its CRC-32 differs")
        return kind, data

    def ask(self, kind: int, asked: object, view: memoryview | None = None) -> tuple[int, memoryview]:
        """Make a request, and `take` the answer. A connection over which that fails is closed."""
        try:
            self.put(kind, json.dumps(asked).encode())
            return self.take(view)
        except BaseException:
            self.close()  # what comes next would be the rest of this
            raise


_wires = called_in_children(PeerWire.close)


# --- the server ---------------------------------------------------------------------------------------------


class PeerServer:
    """Serves what is in a directory of a storage to the processes that get its `endpoint`, from threads of its own.

    ``hosts`` are the addresses to listen at; None: all by which other hosts reach this one. Raises OSError if it can't
    listen at one. End it with `close`.
    """

    def __init__(
        self, storage: Directories, directory: str, *, hosts: Sequence[str] | None = None, stall_s: float = STALL_S
    ) -> None:
        self._storage, self._directory, self._stall_s = storage, storage.resolve(directory), stall_s
        self._origin, self._closed = os.getpid(), threading.Event()
        self._threads: dict[threading.Thread, socket.socket] = {}  # one for each connection
        self._listening: dict[int, socket.socket] = {}  # by descriptor
        _servers.add(self)
        try:
            for host in hosts or addresses_of_this_host(None):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                made = socket.create_server((host, 0), family=family, backlog=1024)
                self._listening[made.fileno()] = made
                made.setblocking(False)
            addresses = [own.getsockname()[:2] for own in self._listening.values()]
            secret, name = secrets.token_bytes(32), socket.gethostname()
            self.endpoint = Endpoint(addresses, secret, network_namespace(), name, 0)
            self._acceptor = threading.Thread(target=self._accept, name="aiockpt-disk", daemon=True)
            start_thread(self._acceptor)
        except BaseException:
            self.leave()
            raise

    def _accept(self) -> None:
        poll = select.poll()
        for descriptor in self._listening:
            poll.register(descriptor, select.POLLIN)
        while not self._closed.is_set():
            for descriptor, _ in poll.poll():
                for ended in [thread for thread in self._threads if not thread.is_alive()]:
                    del self._threads[ended]
                try:
                    with _accepting:
                        own, _ = self._listening[descriptor].accept()
                        thread = threading.Thread(
                            target=self._serve, args=(own,), name="aiockpt-disk-connection", daemon=True
                        )
                        self._threads[thread] = own
                    if len(self._threads) > _MOST_CONNECTIONS:
                        raise NoThreadError(f"it would be one of more than {_MOST_CONNECTIONS} connections")
                    start_thread(thread)
                except NoThreadError as exc:
                    self._threads.pop(thread).close()  # which the other side finds
                    logger.warning("another process can't be served: %s", exc)
                except OSError:  # the other side has left already, this one is closed, or has too many descriptors
                    self._closed.wait(_PAUSE_S)

    def _serve(self, own: socket.socket) -> None:
        with contextlib.closing(own):
            try:
                wire = PeerWire(own, self._stall_s)
                wire.prove(self.endpoint.secret)
                while True:
                    wire.wait()
                    kind, asked = wire.take()
                    try:
                        answer = self._answer(kind, **json.loads(bytes(asked)))
                    except Exception as exc:  # of the disk, or of a storage of the user's
                        text = getattr(exc, "strerror", None) or f"{type(exc).__name__}: {exc}"
                        kind, answer = ERROR, json.dumps([getattr(exc, "errno", None) or 0, text]).encode()
                    wire.put(kind, answer)
            except (LinkBrokenError, OSError) as exc:
                logger.debug("a connection to the disk of this host has ended: %s", exc)

    def _answer(
        self, kind: int, path: str, below: bool, stamp: str = "", name: str = "", runs: Sequence[tuple[int, int]] = ()
    ) -> bytes:
        resolved, directory = self._storage.resolve(path), self._directory
        if resolved != directory and not resolved.startswith(self._storage.below(directory, "")):
            raise PermissionError(errno.EACCES, f"it is not in {directory}, and nothing else is served")
        with self._storage.look(resolved) as listing:
            if below:
                listing.list_below()
            if kind == LIST:
                return json.dumps({fact: getattr(listing, fact) for fact in _FACTS}).encode()
            if listing.stamp != stamp:
                raise FileNotFoundError(errno.ENOENT, "it was deleted or replaced meanwhile")
            if name not in listing.files:  # nor is a name looked at that leads out
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return b"".join(listing.fetch(name, offset, length) for offset, length in runs)

    def wait(self, timeout_s: float) -> None:
        """Wait until no other process is connected, for so long at most. Blocks."""
        deadline = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all connections; return whether all threads have ended in time. Blocks; idempotent."""
        if os.getpid() != self._origin:
            return True
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        for listening in self._listening.values():
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(timeout_s)
        for own in self._threads.values():
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        self.wait(deadline - time.monotonic())
        self.leave()
        return not any(thread.is_alive() for thread in (self._acceptor, *self._threads))

    def leave(self) -> None:
        """Close all, as in a forked child."""
        for own in (*self._listening.values(), *self._threads.values()):
            own.close()


_servers = called_in_children(PeerServer.leave)


# --- the client ---------------------------------------------------------------------------------------------


class PeerDisk(Storage):
    """The storage of another host, as its `PeerServer` shows it, for reading. Its paths are those of that host.

    Any threads may use it, and forked children too. A server that is dead, silent or can't be reached is an error of
    each call that names the host; the next call tries again.
    """

    def __init__(self, endpoint: Endpoint, host_name: str, *, stall_s: float = STALL_S) -> None:
        self.host_name = host_name
        self._endpoint, self._stall_s = endpoint, stall_s
        self._silent_until = 0.0
        self._idle: list[PeerWire] = []  # connections that wait for the next request
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

    def ask(self, kind: int, path: str, view: memoryview | None = None, **asked: object) -> memoryview:
        """Make a request; raise the OSError of the server, or ConnectionError if there is no answer. Blocks."""
        while True:
            kept = self._kept()
            try:
                if time.monotonic() < self._silent_until:
                    raise LinkBrokenError("it was silent, and is asked again in some seconds")
                wire = kept or self._connected()
                answer, data = wire.ask(kind, {"path": path, **asked}, view)
                break
            except (LinkBrokenError, OSError) as exc:
                cause = exc.__cause__ or exc
                is_silent = isinstance(cause, OSError) and cause.errno in _SILENCE
                if is_silent:
                    self._silent_until = time.monotonic() + min(SILENT_S, self._stall_s)
                if kept is None or is_silent:  # else the server, or a fork, has closed it meanwhile
                    raise ConnectionError(
                        f"host {self.host_name} does not answer to a look at {path} ({exc}): its process has ended or "
                        "is frozen, or the network between the hosts is cut"
                    ) from exc
        self._idle.append(wire)
        if answer == ERROR:
            number, text = json.loads(bytes(data))
            raise OSError(number, f"host {self.host_name}: {text}")  # Python makes the class of the number of it
        return data

    def _kept(self) -> PeerWire | None:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def _connected(self) -> PeerWire:
        """Connect to the first address that answers; raise OSError or LinkBrokenError if none does."""
        error: Exception = LinkBrokenError("it listens at addresses of another network only")
        for address in reachable(self._endpoint, network_namespace()):
            try:
                own = socket.create_connection(address, min(_CONNECT_S, self._stall_s))
            except OSError as exc:
                error = exc
                continue
            wire = PeerWire(own, self._stall_s)
            try:
                wire.prove(self._endpoint.secret)
            except (OSError, LinkBrokenError) as exc:
                wire.close()
                error = exc
            else:
                self._endpoint = self._endpoint._replace(addresses=[address])
                return wire
        raise error


def _close_all(idle: list[PeerWire]) -> None:
    with contextlib.suppress(IndexError):  # other threads take some as well
        while True:
            idle.pop().close()


class _PeerListing(RemoteListing):
    """The listing of a path of another host; ``shown``: the path in messages of a source, for which all is listed."""

    def __init__(self, disk: PeerDisk, path: str, shown: str | None = None) -> None:
        super().__init__(shown or path, LookBudget())
        self._disk, self._place = disk, path
        vars(self).update(self._listed(below=shown is not None))

    def _listed(self, *, below: bool) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(bytes(self._disk.ask(LIST, self._place, below=below)))
        return facts

    def list_below(self) -> None:
        if self.path == self._place:  # else they are here
            self.files = self._listed(below=True)["files"]

    def list_folder(self, name: str) -> None:
        """Do nothing: `list_below` lists all of them at once."""

    def read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> int:
        asked = {"stamp": self.stamp, "name": name, "runs": runs, "below": "/" in name}
        data = self._disk.ask(READ, self._place, view, **asked)
        if seen is not None:
            seen(data)
        return len(data)

    def is_replaced(self, exc: OSError) -> bool:
        return False  # what is gone is missing, whatever is there now
