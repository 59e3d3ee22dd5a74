"""A relay between a client and a server, which cuts, holds up or damages what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


class Relay:
    """Passes on what comes over connections to an address, until a number of pieces of the server's have passed.

    Attributes:
        passed: how many pieces the server has sent.
        cut_at: before this one all connections are cut; None: never. Then all is passed on again.
        change: applied to each piece of the server's.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.passed = 0
        self.cut_at: int | None = None
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60)
        self.cut()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        for each in [self._listening, *self._sockets]:
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._sockets += [near, far]
                for sides in ((near, far, False), (far, near, True)):
                    self._threads.append(threading.Thread(target=self._pass, args=sides))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    self.passed += 1
                    if self.passed == self.cut_at:
                        self.cut_at = None
                        self.cut()
                        return
                    data = self.change(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relay_to(target: tuple[str, int]) -> Iterator[Relay]:
    """Relay within the context."""
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
