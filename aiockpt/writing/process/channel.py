"""Messages over a socket between two processes that trust each other."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pickle
import socket
import struct
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from aiockpt.writing.process.messages import Message

_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 1 << 20


class Channel:
    """One end. A message that was sent is in the kernel, which delivers it even if the sender dies.

    Attributes:
        ended: the other end has closed, and all that it sent was received.

    Args:
        end: a connected stream socket.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._outbox: list[bytes] = []
        self._posted = anyio.Event()
        self._sent = anyio.Event()
        self._broken: OSError | None = None
        self._buffer = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Give the descriptor, to see whether there is something to receive."""
        return self._socket.fileno()

    def post(self, message: Message) -> None:
        """Let a message be sent, after those that were posted before; does not wait.

        What comes together is sent at once: each call of the kernel lets go of the interpreter, and getting it back
        takes long beside a program that holds it.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outbox += (_LENGTH.pack(len(data)), data)
        self._posted.set()

    async def flush(self) -> None:
        """Wait until all that was posted is in the kernel.

        Raises:
            OSError: the other end is gone.
        """
        while self._outbox and self._broken is None:
            await self._sent.wait()
        if self._broken is not None:
            raise self._broken

    async def pump(self) -> None:
        """Send what is posted, until the other end is gone; as a task of its own."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._posted.wait()
                self._posted = anyio.Event()
                while self._outbox:
                    count = len(self._outbox)
                    await loop.sock_sendall(self._socket, b"".join(self._outbox))
                    del self._outbox[:count]
                sent, self._sent = self._sent, anyio.Event()
                sent.set()
        except OSError as exc:
            self._broken = exc
        finally:  # who waits is not to wait for ever
            self._broken = self._broken or OSError(errno.EPIPE, "nothing is sent any more")
            self._sent.set()

    async def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            EOFError: there are no more.
            OSError: the other end is gone.
        """
        (length,) = _LENGTH.unpack(await self._take(_LENGTH.size))
        return pickle.loads(await self._take(length))

    async def _take(self, nbytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._buffer) < nbytes:
            data = await loop.sock_recv(self._socket, _PIECE_BYTES)
            if not data:
                self.ended = True
                raise EOFError("the other end has closed")
            self._buffer += data
        taken = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        return taken

    def finish(self) -> None:
        """Let the other end know that nothing more comes, whoever else has this end open."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()
