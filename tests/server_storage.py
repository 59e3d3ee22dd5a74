"""A storage in a server of objects: the protocol of object stores on the requests of `tests.object_server`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from aiockpt.errors import WriteError
from aiockpt.storage.faults import errors
from aiockpt.storage.objects.client import ConditionError, ObjectClient, ObjectFacts, ObjectSink
from aiockpt.storage.objects.storage import ObjectStorage
from tests.object_server import SCHEME, send_at_once

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Document, Seen, Stamp

_STEP_BYTES = 1 << 20  # seen at a time


class _Connections(threading.local):
    def __init__(self) -> None:
        self.of: dict[tuple[str, int, int], Connection] = {}


_thread = _Connections()


class ServerClient(ObjectClient):
    """Requests to a server, by a connection for each thread."""

    copies = True

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address, self._timeout_s = (host, port), timeout_s

    def ask(self, op: str, key: str, body: Document = b"", **given: Any) -> tuple[dict[str, Any], memoryview]:
        """Return the reply and its body; ``view`` and ``seen`` are as in `Source.read`."""
        place = (*self._address, os.getpid())  # a fork must not use its parent's connection
        view, seen = given.pop("view", None), given.pop("seen", None)
        connection = _thread.of.pop(place, None)  # after an error, what comes next may be the rest of an answer
        if connection is None:
            connection = Client(self._address)
            send_at_once(connection, self._timeout_s)
        try:
            connection.send_bytes(json.dumps({"op": op, "key": key, **given}).encode())
            connection.send_bytes(body)
            reply = json.loads(connection.recv_bytes())
            data = memoryview(connection.recv_bytes()) if view is None else view[: connection.recv_bytes_into(view)]
        except EOFError as exc:
            raise ConnectionResetError("the server has closed the connection") from exc
        except BlockingIOError as exc:
            raise TimeoutError(f"the server has not answered within {self._timeout_s:g} s") from exc
        if seen is not None:
            for at in range(0, len(data), _STEP_BYTES):
                seen(data[at : at + _STEP_BYTES])
        _thread.of[place] = connection
        if "error" in reply:
            kind = FileNotFoundError if reply["error"] == "absent" else ConditionError
            raise kind(f"the object {key} is gone, or another one")
        return reply, data

    def put(self, key: str, data: Document, only_if: Stamp | None = None) -> Stamp:
        return str(self.ask("put", key, data, only_if=only_if)[0]["stamp"])

    def get(self, key: str) -> tuple[ObjectFacts, bytes] | None:
        return self._got(key, ranges=None)

    def tail(self, key: str, nbytes: int) -> tuple[ObjectFacts, bytes] | None:
        return self._got(key, ranges=[(-nbytes, nbytes)])

    def _got(self, key: str, **given: Any) -> tuple[ObjectFacts, bytes] | None:
        with contextlib.suppress(FileNotFoundError):
            facts, data = self.ask("get", key, **given)
            return _facts(facts), data.tobytes()
        return None

    def read(
        self,
        key: str,
        runs: Sequence[tuple[int, int]],
        view: memoryview,
        seen: Seen | None = None,
        stamp: Stamp | None = None,
    ) -> int:
        return len(self.ask("get", key, view=view, seen=seen, ranges=runs, only_if=stamp)[1])

    def below(self, prefix: str, most: float = math.inf) -> dict[str, ObjectFacts]:
        return self._listed(prefix, None)[0]

    def tops(self, prefix: str) -> tuple[dict[str, ObjectFacts], list[str]]:
        return self._listed(prefix, "/")

    def _listed(self, prefix: str, delimiter: str | None) -> tuple[dict[str, ObjectFacts], list[str]]:
        reply, _ = self.ask("list", prefix, delimiter=delimiter)
        found = {key[len(prefix) :]: _facts(facts) for key, facts in reply["objects"].items()}
        return found, [name[len(prefix) : -1] for name in reply["prefixes"]]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.ask("delete", key, only_if=None)

    def copy(self, key: str, other: str) -> None:
        found = self.get(key)
        if found is None:
            raise FileNotFoundError(f"the object {key} is gone")
        self.put(other, found[1])

    def now(self, near: str) -> float:
        return time.time()  # the server is on this host

    def sink(self, key: str, nbytes: int | None, workers: Workers, *, held: bool = False) -> ObjectSink:
        return _Sink(self, key, workers, held=held)


def _facts(given: dict[str, Any]) -> ObjectFacts:
    return ObjectFacts(given["size"], given["stamp"], given["modified"])


class _Sink(ObjectSink):
    """A file that is sent when it is whole."""

    is_conditional = True

    def __init__(self, objects: ServerClient, key: str, workers: Workers, *, held: bool) -> None:
        self._objects, self._key, self._workers, self._held = objects, key, workers, held
        self._data = bytearray()

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        self._data += view
        self.nbytes += len(view)
        free()

    async def finish(self) -> None:
        if not self._held:
            with errors(WriteError, f"write {self._key}"):
                await self.appear(None)

    async def appear(self, only_if: Stamp | None) -> None:
        await self._workers.run(self._objects.put, self._key, self._data, only_if)

    async def stop(self) -> None:
        """Do nothing: nothing was sent."""


class ServerStorage(ObjectStorage):
    """Keeps checkpoints in a server that `start_server` has started. Its paths are URLs.

    Args:
        url: of the server, ``aiockpt-test://host:port``.
        grace_s: see `aiockpt.storage.objects.storage.ObjectStorage`.
        timeout_s: how long the server may take for anything, in seconds.
    """

    objects: ServerClient

    def __init__(self, url: str, *, grace_s: float = 600.0, timeout_s: float = 60.0) -> None:
        host, _, port = url.removeprefix(f"{SCHEME}://").rpartition(":")
        super().__init__(url, ServerClient(host, int(port), timeout_s), grace_s=grace_s)
        self._given = url, grace_s, timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        return storage_for_server, self._given


def storage_for_server(url: str, grace_s: float = 600.0, timeout_s: float = 60.0) -> ServerStorage:
    """Return the storage of the URLs of a server; see `ServerStorage`."""
    return ServerStorage(url, grace_s=grace_s, timeout_s=timeout_s)
