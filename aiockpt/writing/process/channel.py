"""Messages over a socket between two processes that trust each other."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pickle
import socket
import struct
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from aiockpt.writing.process.messages import Message

_LENGTH = struct.Struct("<Q")
_RECEIVE_BYTES = 1 << 20


class Channel:
    """One end of a stream socket. A sent message is in the kernel, which delivers it even if the sender dies."""

    # No stream of asyncio: after the sender's death that raises an error before it returns all that has come.

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._outbox: list[bytes] = []
        self._posted = anyio.Event()
        self._sent = anyio.Event()
        self._broken: OSError | None = None
        self._buffer = bytearray()
        self.ended = False  # the other end has closed, and all that it sent was received

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, message: Message) -> None:
        """Queue a message for `pump`; does not wait.

        Queued messages are sent in one system call: each call releases the GIL, and getting it back takes long while
        a training thread holds it.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outbox += (_LENGTH.pack(len(data)), data)
        self._posted.set()

    async def flush(self) -> None:
        """Wait until all posted messages are in the kernel; raise OSError if the other end is closed."""
        while self._outbox and self._broken is None:
            await self._sent.wait()
        if self._broken is not None:
            raise self._broken

    async def pump(self) -> None:
        """Send posted messages, until the other end is closed. Runs as a task."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._posted.wait()
                self._posted = anyio.Event()
                while self._outbox:
                    count = len(self._outbox)  # more may be posted while these are sent
                    await loop.sock_sendall(self._socket, b"".join(self._outbox))
                    del self._outbox[:count]
                sent, self._sent = self._sent, anyio.Event()
                sent.set()
        except OSError as exc:
            self._broken = exc
        finally:  # wake those that wait in flush()
            self._broken = self._broken or OSError(errno.EPIPE, "nothing is sent any more")
            self._sent.set()  # after `_broken`, which a waiter in flush() looks at when it wakes

    async def receive(self) -> Any:
        """Wait for the next message; raise EOFError at the end, OSError if the connection is broken."""
        (length,) = _LENGTH.unpack(await self._read(_LENGTH.size))
        return pickle.loads(await self._read(length))

    async def _read(self, nbytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._buffer) < nbytes:
            data = await loop.sock_recv(self._socket, _RECEIVE_BYTES)
            if not data:
                self.ended = True
                raise EOFError("the other end has closed")
            self._buffer += data
        taken = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return taken

    def finish(self) -> None:
        """Send end-of-file, even if a forked process has this end open too."""
        with contextlib.suppress(OSError):  # the other end is closed
            self._socket.shutdown(socket.SHUT_WR)
