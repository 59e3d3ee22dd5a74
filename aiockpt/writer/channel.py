"""Messages over a socket between two processes that trust each other."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from aiockpt.writer.messages import Message

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
        self._turn = anyio.Lock()
        self._buffer = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Give the descriptor, to see whether there is something to receive."""
        return self._socket.fileno()

    async def send(self, message: Message) -> None:
        """Send a message, whole: a cancellation comes through afterwards.

        Raises:
            OSError: the other end is gone.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with anyio.CancelScope(shield=True):
            async with self._turn:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self._socket, _LENGTH.pack(len(data)))
                await loop.sock_sendall(self._socket, data)

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
