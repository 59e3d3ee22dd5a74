"""A server of objects in memory, as the model of an object store: flat keys, conditional puts, and no rename.

::

    python -m aiockpt.testing.server     # prints its URL; ends when its standard input is closed

Requests and replies are frames: the lengths of a JSON text and of a body, then both.

==========  =============================================  ===========================================================
``op``      arguments besides ``key``                      reply
==========  =============================================  ===========================================================
``put``     ``only_if``; the body, or ``upload, parts``    ``stamp``
``part``    ``upload, part``; the body                     nothing; the parts of an upload are in no list
``get``     ``ranges``: of offset, from the end if it is   facts: ``size``, ``stamp``, ``modified``; the bytes, fewer
            negative, and length; null: all; ``only_if``   where the object ends
``list``    ``delimiter``                                  ``objects`` whose keys begin with ``key``, with facts; and
                                                           ``prefixes``: what keys have up to the next delimiter
``delete``  ``only_if``                                    nothing
``drop``                                                   nothing; the uploads whose keys begin with ``key`` are gone
==========  =============================================  ===========================================================

``only_if`` is the stamp that the object must have, "" if there must be none, null if it does not matter. An ``error``
in a reply is "condition" or "absent". Times are in seconds, by the clock of the server.
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
    parts: Sequence[bytearray]
    stamp: str
    modified: float

    @property
    def facts(self) -> dict[str, Any]:
        return {"size": sum(map(len, self.parts)), "stamp": self.stamp, "modified": self.modified}

    def views(self, ranges: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield the bytes of ranges, without a copy."""
        for offset, length in ranges:
            begin, offset = 0, max(0, offset + self.facts["size"]) if offset < 0 else offset
            for part in self.parts:
                yield memoryview(part)[max(0, offset - begin) : max(0, offset + length - begin)]
                begin += len(part)


class ObjectServer:
    """The objects, and the connections to them. A client that dies leaves parts of uploads at most."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[tuple[str, str], dict[int, bytearray]] = {}
        self._stamps = map(str, itertools.count(1))

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                client, _ = await asyncio.get_running_loop().sock_accept(listening)
                client.setblocking(False)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tasks.create_task(self._talk(client))

    async def _talk(self, client: socket.socket) -> None:
        send = asyncio.get_running_loop().sock_sendall
        with client, contextlib.suppress(EOFError, OSError):
            while True:
                lengths = LENGTHS.unpack(await _received(client, LENGTHS.size))
                request, body = json.loads(await _received(client, lengths[0])), await _received(client, lengths[1])
                await asyncio.sleep(self._latency_s)
                reply = getattr(self, f"_{request.pop('op')}")(body=body, **request)
                views = reply.pop("views", ())
                text = json.dumps(reply).encode()
                await send(client, LENGTHS.pack(len(text), sum(map(len, views))) + text)
                for view in views:
                    await send(client, view)

    # --- requests: each happens at once ---------------------------------------------------------------------

    def _put(self, key: str, body: bytearray, only_if: str | None, upload: str = "", parts: int = 0) -> dict[str, Any]:
        if not self._is(key, only_if):
            return {"error": "condition"}
        sent = self._uploads.pop((key, upload), {}) if upload else {0: body}
        if upload and len(sent) != parts:
            return {"error": "absent"}
        made = self._objects[key] = _Object([sent[part] for part in sorted(sent)], next(self._stamps), time.time())
        return {"stamp": made.stamp}

    def _part(self, key: str, body: bytearray, upload: str, part: int) -> dict[str, Any]:
        self._uploads.setdefault((key, upload), {})[part] = body
        return {}

    def _get(
        self, key: str, body: bytearray, ranges: Sequence[tuple[int, int]] | None, only_if: str | None = None
    ) -> dict[str, Any]:
        if key not in self._objects:
            return {"error": "absent"}
        if not self._is(key, only_if):
            return {"error": "condition"}
        facts = self._objects[key].facts
        return {**facts, "views": [*self._objects[key].views([(0, facts["size"])] if ranges is None else ranges)]}

    def _list(self, key: str, body: bytearray, delimiter: str | None) -> dict[str, Any]:
        objects, prefixes = {}, set()
        for name in sorted(each for each in self._objects if each.startswith(key)):
            top, found, _ = name[len(key) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes.add(key + top + found)
            else:
                objects[name] = self._objects[name].facts
        return {"objects": objects, "prefixes": sorted(prefixes)}

    def _delete(self, key: str, body: bytearray, only_if: str | None) -> dict[str, Any]:
        if not self._is(key, only_if):
            return {"error": "condition"}
        self._objects.pop(key, None)
        return {}

    def _drop(self, key: str, body: bytearray) -> dict[str, Any]:
        self._uploads = {at: parts for at, parts in self._uploads.items() if not at[0].startswith(key)}
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
        serving = asyncio.ensure_future(ObjectServer(latency_s).serve(listening))
        print(f"{SCHEME}://127.0.0.1:{listening.getsockname()[1]}", flush=True)  # noqa: T201 - for its parent
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.buffer.read))
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()


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
