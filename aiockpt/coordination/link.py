"""Links between ranks: a TCP connection to rank 0, which shows that the other side is alive, and to whom it belongs.

Both sides prove that they know a secret from the store of the process group (HMAC with SHA-256 over nonces, as in
`multiprocessing.connection`), before anything is unpickled. Then messages follow, each after its length. An empty one
is a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - of addresses, which the engine's thread would import
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

_LENGTH = struct.Struct("!Q")
_BEAT = _LENGTH.pack(0)
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_MOST_HELLO_BYTES = 4096  # of a side that has not proven anything yet
_BUFFER_BYTES = 1 << 20
HELLO_S = 20.0
"""Limit for the other side of a new connection to prove who it is."""


class LinkBrokenError(Exception):
    """The other side has closed the connection or is dead."""


@contextlib.contextmanager
def breaking() -> Iterator[None]:
    """Raise LinkBrokenError for what an operation on a connection raises if the other side is gone."""
    try:
        yield
    except (EOFError, OSError) as exc:
        raise LinkBrokenError(str(exc)) from exc


class Endpoint(NamedTuple):
    """The addresses at which rank 0 listens, and the secret that it takes to connect."""

    addresses: Sequence[tuple[str, int]]  # hosts as numbers, and ports; see `listen` for those without a port
    secret: bytes
    namespace: str  # of the network that the process sees: within it, addresses of loopback are enough
    host: str
    size: int  # the number of ranks


class _LinkReader(asyncio.StreamReader):
    """A stream that notes when the last byte came."""

    heard = 0.0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.heard = time.monotonic()
        super().feed_data(data)


class Link:
    """Messages to and from one other rank, in order. For the event loop's thread."""

    def __init__(self, reader: _LinkReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # so that `flush` waits for all bytes

    @property
    def heard(self) -> float:
        """The time of the last sign of life, by time.monotonic()."""
        return self._reader.heard

    async def receive(self) -> bytes:
        """Return the next message; raise LinkBrokenError if the other side is dead."""
        with breaking():
            while not (nbytes := _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]):
                pass
            return await self._reader.readexactly(nbytes)

    def send(self, message: bytes) -> None:
        """Begin to send; never waits, never raises: that the link is broken is seen by its reader."""
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(message)))
            self._writer.write(message)

    def beat(self) -> None:
        """Show that this rank is alive, unless other bytes are on their way anyhow."""
        if not self._writer.is_closing() and not self._writer.transport.get_write_buffer_size():
            self._writer.write(_BEAT)

    async def flush(self) -> None:
        """Wait until the system has all bytes; return as well if the link is broken."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def detach(self, *, connected: bool) -> socket.socket:
        """Return the connection as a blocking socket, for one that only sends to the side that has ``connected``.

        Both sides call it before the first message. Raises LinkBrokenError.
        """
        if not connected:  # the other side must not send before this one has left the stream, which reads ahead
            with breaking():
                await self._reader.readexactly(1)
        own = socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno()))
        self.close()
        own.setblocking(True)
        if connected:
            with breaking(), contextlib.ExitStack() as stack:
                stack.callback(own.close)
                own.sendall(b"\1")
                stack.pop_all()
        return own

    def close(self) -> None:
        """Close at once; idempotent."""
        self._writer.transport.abort()


async def listen(
    hosts: Sequence[str] | str, secret: bytes, name: str, joined: Callable[[str, Link], None]
) -> asyncio.Server:
    """Listen on these hosts, at ports that the system chooses; call ``joined`` with what each other side says it is.

    A text is the name of a socket within this host; see unix(7).
    """

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await _prove(reader, writer, secret, name)
        except BaseException as exc:  # also if the loop ends meanwhile
            writer.transport.abort()
            if isinstance(exc, LinkBrokenError | TimeoutError):
                return
            raise
        assert isinstance(reader, _LinkReader)
        joined(hello, Link(reader, writer))

    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(_LinkReader(_BUFFER_BYTES, loop), welcome, loop)

    if isinstance(hosts, str):
        return await loop.create_unix_server(protocol, hosts, backlog=1024)
    return await loop.create_server(protocol, list(hosts), 0, backlog=1024)  # all ranks come at once


async def connect(host: str, port: int, secret: bytes, name: str) -> tuple[str, Link]:
    """Connect, and return what the other side says it is; raise OSError, or LinkBrokenError if it proves nothing.

    Without a port, the host is the name of a socket within this host.
    """
    loop = asyncio.get_running_loop()
    reader = _LinkReader(_BUFFER_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    if port:
        transport, _ = await loop.create_connection(lambda: protocol, host, port)
    else:
        own = socket.socket(socket.AF_UNIX)
        try:
            own.setblocking(False)  # it connects at once, or not at all
            own.connect(host)
            # Not by its name, which libuv would end at the first zero, if it is one without a file.
            transport, _ = await loop.create_unix_connection(lambda: protocol, sock=own)
        except BaseException:
            own.close()
            raise
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        hello = await _prove(reader, writer, secret, name)
    except BaseException:
        transport.abort()
        raise
    return hello, Link(reader, writer)


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, name: str) -> str:
    """Exchange names; see `proof`."""
    proving, received = proof(secret, name), b""
    with breaking():
        try:
            while True:
                message, nbytes = proving.send(received or None)
                writer.write(message)
                received = await reader.readexactly(nbytes)
        except StopIteration as proven:
            return str(proven.value)


def proof(secret: bytes, name: str) -> Generator[tuple[bytes, int], bytes | None, str]:
    """Exchange names; yield what to send, and how many bytes to receive then; return the other side's name. Pure.

    Both sides do the same. Raises LinkBrokenError unless the other side knows the secret.
    """
    mine, own = secrets.token_bytes(_NONCE_BYTES), name.encode()
    theirs = (yield mine, _NONCE_BYTES) or b""
    if theirs == mine:
        raise LinkBrokenError("the other side repeats what this one sends")
    head = (yield _mac(secret, theirs, own) + _LENGTH.pack(len(own)) + own, _MAC_BYTES + _LENGTH.size) or b""
    (nbytes,) = _LENGTH.unpack(head[_MAC_BYTES:])
    if nbytes > _MOST_HELLO_BYTES:
        raise LinkBrokenError("the other side speaks another language")
    hello = ((yield b"", nbytes) if nbytes else b"") or b""
    if not hmac.compare_digest(head[:_MAC_BYTES], _mac(secret, mine, hello)):
        raise LinkBrokenError("the other side does not know the secret of this group")
    return hello.decode()


def _mac(secret: bytes, nonce: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, nonce + name, "sha256")


def check_descriptors(count: int) -> None:
    """Raise OSError if this process can't open so many more descriptors."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.socket(socket.AF_UNIX))


# --- addresses --------------------------------------------------------------------------------------


def addresses_of_this_host(towards: str | None) -> list[str]:
    """Return the addresses at which other ranks may reach this host, those of loopback last. May block for a while.

    If the variable GLOO_SOCKET_IFNAME names an interface, as for gloo's groups, it is that one's address alone. Else
    it is the one from which ``towards`` is reached, and those of the host's name. Raises OSError if there is no such
    interface.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if chosen:
        return [_address_of_interface(chosen)]
    hosts = [] if towards is None else _source_address(towards)
    with contextlib.suppress(OSError):
        hosts += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    # Not link-local ones (fe80::), which mean nothing without an interface of the other host.
    apart = [host for host in dict.fromkeys(hosts) if not is_loopback(host) and not host.startswith("fe80")]
    return [*filter(_is_own, apart), "127.0.0.1"]


def _is_own(address: str) -> bool:
    """Return whether this host has an address: its name may resolve to that of a router, or to one that is gone."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as exc:
        if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an address is reached from its own host alone."""
    return address.startswith(("127.", "\0")) or address == "::1"


def reachable(endpoint: Endpoint, namespace: str) -> list[tuple[str, int]]:
    """Return the addresses of rank 0 for a process in this namespace, the best one first. Pure."""
    is_near = endpoint.namespace == namespace
    addresses = [address for address in endpoint.addresses if is_near or not is_loopback(address[0])]
    return sorted(addresses, key=lambda address: is_loopback(address[0]) != is_near)


def network_namespace() -> str:
    """Return a name for the network that this process sees, the same for processes that share their loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _address_of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError as exc:
            there = ", ".join(interface for _, interface in socket.if_nameindex())
            text = f"GLOO_SOCKET_IFNAME is {name!r}, an interface that has no IPv4 address here; there are {there}"
            raise OSError(text) from exc
    return socket.inet_ntoa(answer[20:24])


def _source_address(towards: str) -> list[str]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return [str(probe.getsockname()[0])]
    return []
