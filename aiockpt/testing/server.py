"""A server of objects in memory, as the model of an object store: flat keys, conditional puts, and no rename.

::

    python -m aiockpt.testing.server     # prints its URL; ends when its standard input is closed

Requests and replies are frames: the lengths of a JSON text and of a body, then both.

==========  ==============================================  ==========================================================
``op``      arguments besides ``key``                       reply
==========  ==============================================  ==========================================================
``put``     ``only_if``; the body, or ``upload``, ``parts``  ``stamp``
``part``    ``upload``, ``part``; the body                  nothing: the parts of an upload are in no list
``get``     ``ranges``: of offset and length; null: all     the facts; as a body the bytes, fewer behind the end
``head``                                                    the facts: ``size``, ``stamp``, ``modified``
``list``    ``delimiter``                                   ``objects`` whose keys begin with ``key``, with their facts,
                                                            and ``prefixes``: what they have up to the next delimiter
``delete``  ``only_if``                                     nothing
``drop``                                                    nothing: the uploads whose keys begin with ``key`` are gone
==========  ==============================================  ==========================================================

``only_if`` is the stamp that the object must have, "" if there must be none, null if it does not matter. An ``error``
in a reply is "condition" or "absent". All replies have ``now``, the time of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SCHEME = "aiockpt-test"
LENGTHS = struct.Struct(">IQ")
"""The lengths of the JSON text and of the body, at the beginning of a frame."""


@dataclass(frozen=True, slots=True)
class _Object:
    parts: tuple[bytearray, ...]
    stamp: str
    modified: float

    @property
    def facts(self) -> dict[str, Any]:
        return {"size": sum(map(len, self.parts)), "stamp": self.stamp, "modified": self.modified}

    def views(self, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield the bytes of ranges, without a copy."""
        for offset, length in ranges:
            begin = 0
            for part in self.parts:
                view = memoryview(part)[max(0, offset - begin) : max(0, offset + length - begin)]
                if view:
                    yield view
                begin += len(part)


class ObjectServer:
    """The objects, and the connections to them. A client that dies leaves at most parts of uploads."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[tuple[str, str], dict[int, bytearray]] = {}
        self._puts = itertools.count(1)

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                client, _ = await asyncio.get_running_loop().sock_accept(listening)
                client.setblocking(False)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tasks.create_task(self._talk(client))

    async def _talk(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client, contextlib.suppress(EOFError, OSError):
            while True:
                lengths = LENGTHS.unpack(await _received(client, LENGTHS.size))
                request, body = json.loads(await _received(client, lengths[0])), await _received(client, lengths[1])
                await asyncio.sleep(self._latency_s)
                reply, views = self.answer(request.pop("op"), body, **request)
                text = json.dumps({**reply, "now": time.time()}).encode()
                await loop.sock_sendall(client, LENGTHS.pack(len(text), sum(map(len, views))) + text)
                for view in views:
                    await loop.sock_sendall(client, view)

    def answer(self, op: str, body: bytearray, **given: Any) -> tuple[dict[str, Any], list[memoryview]]:
        """Do what a request says, at once; return the reply and the pieces of its body."""
        if op == "get":
            return self._get(**given)
        reply: dict[str, Any] = getattr(self, f"_{op}")(body=body, **given)
        return reply, []

    def _get(self, key: str, ranges: list[tuple[int, int]] | None) -> tuple[dict[str, Any], list[memoryview]]:
        found = self._objects.get(key)
        if found is None:
            return {"error": "absent"}, []
        facts = found.facts
        return facts, list(found.views([(0, facts["size"])] if ranges is None else ranges))

    def _head(self, key: str, body: bytearray) -> dict[str, Any]:
        found = self._objects.get(key)
        return {"error": "absent"} if found is None else found.facts

    def _put(self, key: str, body: bytearray, only_if: str | None, upload: str = "", parts: int = 0) -> dict[str, Any]:
        if not self._is(key, only_if):
            return {"error": "condition"}
        data: tuple[bytearray, ...] = (body,)
        if upload:
            sent = self._uploads.pop((key, upload), {})
            if sorted(sent) != list(range(parts)):
                return {"error": "absent"}
            data = tuple(sent[number] for number in range(parts))
        self._objects[key] = _Object(data, f"{next(self._puts):x}", time.time())
        return {"stamp": self._objects[key].stamp}

    def _part(self, key: str, body: bytearray, upload: str, part: int) -> dict[str, Any]:
        self._uploads.setdefault((key, upload), {})[part] = body
        return {}

    def _list(self, key: str, body: bytearray, delimiter: str) -> dict[str, Any]:
        objects, prefixes = {}, set()
        for name in sorted(self._objects):
            if name.startswith(key):
                top, found, _ = name[len(key) :].partition(delimiter) if delimiter else (name, "", "")
                if found:
                    prefixes.add(key + top + delimiter)
                else:
                    objects[name] = self._objects[name].facts
        return {"objects": objects, "prefixes": sorted(prefixes)}

    def _delete(self, key: str, body: bytearray, only_if: str | None) -> dict[str, Any]:
        if not self._is(key, only_if):
            return {"error": "condition"}
        return {} if self._objects.pop(key, None) else {"error": "absent"}

    def _drop(self, key: str, body: bytearray) -> dict[str, Any]:
        for upload in [each for each in self._uploads if each[0].startswith(key)]:
            del self._uploads[upload]
        return {}

    def _is(self, key: str, only_if: str | None) -> bool:
        found = self._objects.get(key)
        return only_if is None or only_if == ("" if found is None else found.stamp)


async def _received(client: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = await asyncio.get_running_loop().sock_recv_into(client, view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


async def _main(latency_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        listening.setblocking(False)
        serving = asyncio.create_task(ObjectServer(latency_s).serve(listening))
        print(f"{SCHEME}://127.0.0.1:{listening.getsockname()[1]}", flush=True)  # noqa: T201 - for its parent
        reading = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
        await asyncio.wait([serving, reading], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


@contextlib.contextmanager
def start_server(*, latency_s: float = 0.0) -> Iterator[str]:
    """Run a server in a process of its own within the context; return its URL, below which all paths are free.

    ::

        with start_server() as url:
            aiockpt.save(state, f"{url}/run/step-1")

    Args:
        latency_s: how long each request takes, in seconds.
    """
    command = [sys.executable, "-m", "aiockpt.testing.server", str(latency_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = "" if process.stdout is None else process.stdout.readline().strip()
            if not url:
                raise RuntimeError("the server of objects could not be started; its standard error says why")
            yield url
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1]) if sys.argv[1:] else 0.0))
