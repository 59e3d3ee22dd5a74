"""A server of objects in memory, as the model of an object store: flat keys, conditional puts, and no rename.

::

    python -m tests.object_server     # prints its URL; ends when its standard input is closed

A request, and a reply, is a JSON text and then a body: two messages of `multiprocessing.connection`.

==========  =============================================  ===========================================================
``op``      arguments besides ``key``                      reply
==========  =============================================  ===========================================================
``put``     ``only_if``; the body                          ``stamp``
``get``     ``ranges``: of offset, from the end if it is   facts: ``size``, ``stamp``, ``modified``; the bytes, fewer
            negative, and length; null: all; ``only_if``   where the object ends
``list``    ``delimiter``                                  ``objects`` whose keys begin with ``key``, with facts; and
                                                           ``prefixes``: what keys have up to the next delimiter
``delete``  ``only_if``                                    nothing
==========  =============================================  ===========================================================

``only_if`` is the stamp that the object must have, "" if there must be none, null if it does not matter. An ``error``
in a reply is "condition" or "absent". Times are in seconds, by the clock of the server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from typing import Any

SCHEME = "aiockpt-test"


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    stamp: str
    modified: float

    @property
    def facts(self) -> dict[str, Any]:
        return {"size": len(self.data), "stamp": self.stamp, "modified": self.modified}

    def parts(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        for offset, length in ranges:
            begin = max(0, offset + len(self.data)) if offset < 0 else offset
            yield self.data[begin : begin + length]


class ObjectServer:
    """The objects."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._turn = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._stamps = map(str, itertools.count(1))

    def serve(self, listening: Listener) -> None:
        """Accept connections, each in a thread of its own, as long as the process lives."""
        while True:
            threading.Thread(target=self._talk, args=(listening.accept(),), daemon=True).start()

    def _talk(self, client: Connection) -> None:
        with client, contextlib.suppress(EOFError, OSError):
            send_at_once(client)
            while True:
                request, body = json.loads(client.recv_bytes()), client.recv_bytes()
                time.sleep(self._latency_s)
                with self._turn:
                    reply = getattr(self, f"_{request.pop('op')}")(body=body, **request)
                data = reply.pop("data", b"")
                client.send_bytes(json.dumps(reply).encode())
                client.send_bytes(data)

    # --- requests: each happens at once ---------------------------------------------------------------------

    def _put(self, key: str, body: bytes, only_if: str | None) -> dict[str, Any]:
        if not self._is(key, only_if):
            return {"error": "condition"}
        made = self._objects[key] = _Object(body, next(self._stamps), time.time())
        return {"stamp": made.stamp}

    def _get(
        self, key: str, body: bytes, ranges: Sequence[tuple[int, int]] | None, only_if: str | None = None
    ) -> dict[str, Any]:
        if key not in self._objects:
            return {"error": "absent"}
        if not self._is(key, only_if):
            return {"error": "condition"}
        found = self._objects[key]
        return {**found.facts, "data": found.data if ranges is None else b"".join(found.parts(ranges))}

    def _list(self, key: str, body: bytes, delimiter: str | None) -> dict[str, Any]:
        objects, prefixes = {}, set()
        for name in sorted(each for each in self._objects if each.startswith(key)):
            top, found, _ = name[len(key) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes.add(key + top + found)
            else:
                objects[name] = self._objects[name].facts
        return {"objects": objects, "prefixes": sorted(prefixes)}

    def _delete(self, key: str, body: bytes, only_if: str | None) -> dict[str, Any]:
        if not self._is(key, only_if):
            return {"error": "condition"}
        self._objects.pop(key, None)
        return {}

    def _is(self, key: str, only_if: str | None) -> bool:
        found = self._objects.get(key)
        return only_if is None or only_if == ("" if found is None else found.stamp)


def send_at_once(connection: Connection, timeout_s: float = 0.0) -> None:
    """Send messages without waiting until those before have come; limit each wait for the other side, if not 0."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _main(latency_s: float) -> None:
    listening = Listener(("127.0.0.1", 0), backlog=128)
    threading.Thread(target=ObjectServer(latency_s).serve, args=(listening,), daemon=True).start()
    print(f"{SCHEME}://127.0.0.1:{listening.address[1]}", flush=True)  # noqa: T201 - for its parent
    sys.stdin.buffer.read()  # which ends with its parent


@contextlib.contextmanager
def start_server(*, latency_s: float = 0.0) -> Iterator[str]:
    """Run a server in a process of its own within the context; return its URL, below which all paths are free.

    ::

        with start_server() as url:
            aiockpt.save(state, f"{url}/run/step-1")

    Args:
        latency_s: how long each request takes, in seconds.
    """
    command = [sys.executable, "-P", __file__, str(latency_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = "" if process.stdout is None else process.stdout.readline().strip()
            if not url:
                raise RuntimeError("the server of objects could not be started; its standard error says why")
            yield url
        finally:
            process.kill()


if __name__ == "__main__":
    _main(float(sys.argv[1]) if sys.argv[1:] else 0.0)
