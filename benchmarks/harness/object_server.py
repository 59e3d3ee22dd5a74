"""An object store on this host that fails on demand: with the requests of S3, and of Google.

::

    python -m benchmarks.harness.object_server [LATENCY_S]     # prints its URL; ends when its standard input is closed

Objects are kept in memory; their ETags are made from their contents, as those of S3. What it has and what a client can
rely on: puts, copies, multipart uploads, conditions of puts (``If-Match``, ``If-None-Match``,
``x-goog-if-generation-match``), gets of ranges, lists of at most 1,000 keys, deletes. Signatures are not looked at.

Requests to ``/-/`` control it: ``rules`` takes the `Rule`s from now on, ``log`` returns what was asked since then,
``clear`` removes everything.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from typing import Any
from xml.sax.saxutils import escape, unescape

from isal.isal_zlib import crc32

_PAGE = 1000  # keys of a list
_STEP_BYTES = 1 << 20
_LEAST_PART_BYTES = 5 << 20  # of a part that is not the last


@dataclass(frozen=True)
class Rule:
    """What happens to some requests.

    Args:
        match: a regular expression of ``METHOD /bucket/key?query``; the parts of an upload have ``partNumber``. The
            deletion of several is followed by their keys.
        first: the number of the first request that matches and to which it happens, from 1.
        count: to how many.
        status: it is answered with this status, such as 409, 412, 500 or 503; 0: not at all, the connection is closed.
        does: it is done before that.
        kill: the process that is killed then; 0: none.
        hang_s: the answer takes so much longer, in seconds.
        late_s: the connection is closed, or the process killed, and so much later it is done after all, in seconds.
        ignores_conditions: it is done as if it had no conditions, and answered.
        code: the error code of the answer; empty: one that says the status.
        signed: only if the request is signed with this access key; empty: all.
    """

    match: str
    first: int = 1
    count: int = 1
    status: int = 0
    does: bool = False
    kill: int = 0
    hang_s: float = 0.0
    late_s: float = 0.0
    ignores_conditions: bool = False
    code: str = ""
    signed: str = ""


@dataclass(frozen=True)
class _Object:
    data: bytearray
    etag: str
    generation: int
    modified: float


@dataclass
class _Store:
    latency_s: float
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytearray]] = field(default_factory=dict)
    rules: list[tuple[Rule, Iterator[int]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    sent: int = 0  # bytes of answers
    late: int = 0  # requests that were done late
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, data: bytearray, headers: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        etag = f'"{crc32(data):08x}-{len(data)}"'
        with self.lock:
            found = self.objects.get(key)
            if not _holds(headers, found):
                return 412, {}
            made = self.objects[key] = _Object(data, etag, next(self.numbers), time.time())
        return 200, _facts(made)


def _holds(headers: Mapping[str, str], found: _Object | None) -> bool:
    """Return whether the conditions of a put hold."""
    if headers.get("if-none-match") == "*" and found is not None:
        return False
    if (etag := headers.get("if-match")) is not None and (found is None or found.etag != etag):
        return False
    generation = headers.get("x-goog-if-generation-match")
    return generation is None or int(generation) == (0 if found is None else found.generation)


def _keys(body: bytearray) -> list[str]:
    """Return the keys in a request to delete several objects."""
    return [unescape(found) for found in re.findall("<Key>(.*?)</Key>", body.decode())]


def _facts(found: _Object) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": formatdate(found.modified, usegmt=True),
        "x-goog-generation": str(found.generation),
    }


class _Talk(socketserver.BaseRequestHandler):
    """A connection, in a thread of its own."""

    request: socket.socket
    server: _Server

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, EOFError):
            rest = bytearray()
            while (rest := self._one(rest)) is not None:
                pass

    def _one(self, rest: bytearray) -> bytearray | None:
        """Answer a request, of which some bytes may have come; return those of the next, None at the end."""
        while (end := rest.find(b"\r\n\r\n")) < 0:
            piece = self.request.recv(1 << 16)
            if not piece:
                return None
            rest += piece
        first, *lines = bytes(rest[:end]).decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect"):
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray(int(headers.get("content-length", 0)))
        begun = rest[end + 4 : end + 4 + len(body)]
        body[: len(begun)] = begun
        view = memoryview(body)[len(begun) :]
        while view:
            count = self.request.recv_into(view[:_STEP_BYTES])
            if not count:
                raise EOFError
            view = view[count:]
        self._respond(method, target, headers, body)
        return rest[end + 4 + len(begun) :]

    def _respond(self, method: str, target: str, headers: Mapping[str, str], body: bytearray) -> None:
        store = self.server.store
        target = re.sub("^http://[^/]*", "", target)  # RFC 9112, 3.2.2: some clients send the whole URL
        path, _, query = target.partition("?")
        key, asked = urllib.parse.unquote(path)[1:], dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if key.startswith("-/"):
            self._answer(method, 200, {}, self._control(key[2:], body))
            return
        line = f"{method} /{key}" + (f"?{query}" if query else "")
        if "delete" in asked:
            line = " ".join([line, *_keys(body)])
        with store.lock:
            store.log.append(line)
            rules = [
                rule
                for rule, numbers in store.rules
                if re.search(rule.match, line)
                and rule.signed in headers.get("authorization", "")
                and rule.first <= next(numbers) < rule.first + rule.count
            ]
        if store.latency_s:
            time.sleep(store.latency_s)
        for rule in rules[:1]:
            if rule.ignores_conditions:
                headers = {name: value for name, value in headers.items() if "match" not in name}
                break
            if rule.does:
                self._do(method, key, asked, headers, body)
            if rule.kill:
                os.kill(rule.kill, signal.SIGKILL)
            if rule.late_s:
                self.request.shutdown(socket.SHUT_RDWR)
                time.sleep(rule.late_s)
                self._do(method, key, asked, headers, body)
                with store.lock:
                    store.late += 1
            time.sleep(rule.hang_s)
            if rule.status:
                self._answer(
                    method,
                    rule.status,
                    {},
                    f"<Error><Code>{rule.code or f'Scripted{rule.status}'}</Code></Error>".encode(),
                )
                return
            raise EOFError
        self._answer(method, *self._do(method, key, asked, headers, body))

    def _control(self, name: str, body: bytearray) -> bytes:
        store = self.server.store
        if name == "rules":
            with store.lock:
                store.rules = [(Rule(**each), itertools.count(1)) for each in json.loads(body)]
                store.log.clear()
                store.sent = store.late = 0
        if name == "clear":
            store.objects, store.uploads = {}, {}
        return json.dumps(
            {"log": store.log, "uploads": len(store.uploads), "sent": store.sent, "late": store.late}
        ).encode()

    def _answer(self, method: str, status: int, headers: Mapping[str, str], body: bytes | memoryview) -> None:
        given = {"Content-Length": str(len(body)), **headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.request.sendall(f"HTTP/1.1 {status} -\r\n{text}\r\n".encode())
        if method != "HEAD":
            with self.server.store.lock:
                self.server.store.sent += len(body)
            self.request.sendall(body)

    def _do(
        self, method: str, key: str, asked: Mapping[str, str], headers: Mapping[str, str], body: bytearray
    ) -> tuple[int, dict[str, str], bytes | memoryview]:
        store = self.server.store
        if key.startswith("no-bucket"):
            return 404, {}, _xml("Error", Code="NoSuchBucket")
        if source := headers.get("x-amz-copy-source") or headers.get("x-goog-copy-source"):
            found = store.objects.get(urllib.parse.unquote(source).lstrip("/"))
            if found is None:
                return 404, {}, _xml("Error", Code="NoSuchKey")
            status, facts = store.put(key, found.data, headers)
            return status, facts, _xml("CopyObjectResult", ETag=facts.get("ETag", ""))
        if method == "PUT" and "uploadId" in asked:
            if asked["uploadId"] not in store.uploads:
                return 404, {}, _xml("Error", Code="NoSuchUpload")
            store.uploads[asked["uploadId"]][int(asked["partNumber"])] = body
            return 200, {"ETag": f'"{len(body)}"'}, b""
        if method == "PUT":
            return *store.put(key, body, headers), b""
        if method == "POST" and "uploads" in asked:
            upload = f"u{next(store.numbers)}"
            store.uploads[upload] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", UploadId=upload)
        if method == "POST" and "uploadId" in asked:
            parts = store.uploads.pop(asked["uploadId"], None)
            if parts is None:
                return 404, {}, _xml("Error", Code="NoSuchUpload")
            if any(len(parts[number]) < _LEAST_PART_BYTES for number in sorted(parts)[:-1]):
                return 400, {}, _xml("Error", Code="EntityTooSmall")
            status, facts = store.put(key, bytearray().join(parts[number] for number in sorted(parts)), headers)
            return status, {}, _xml("CompleteMultipartUploadResult", ETag=facts.get("ETag", ""))
        if method == "POST" and "delete" in asked:
            keys = _keys(body)
            for each in keys:
                store.objects.pop(f"{key}/{each}", None)
            return 200, {}, _xml("DeleteResult", Deleted=[{"Key": each} for each in keys])
        if method == "DELETE" and "uploadId" in asked:
            return 204 if store.uploads.pop(asked["uploadId"], None) is not None else 404, {}, b""
        if method == "DELETE":
            return 204 if store.objects.pop(key, None) is not None else 404, {}, b""
        if "list-type" in asked or ("/" not in key and method == "GET"):
            return 200, {}, self._list(key + "/", asked)
        return self._get(key, headers)

    def _get(self, key: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes | memoryview]:
        found = self.server.store.objects.get(key)
        wanted = headers.get("x-goog-generation")
        if found is None or (wanted is not None and int(wanted) != found.generation):
            return 404, {}, _xml("Error", Code="NoSuchKey")
        if headers.get("if-match", found.etag) != found.etag:
            return 412, {}, b""
        size = len(found.data)
        given = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
        if given is None:
            return 200, _facts(found), memoryview(found.data)
        begin = int(given[1]) if given[1] else max(0, size - int(given[2]))
        end = min(size, int(given[2]) + 1) if given[1] and given[2] else size
        if begin >= size:
            return 416, {}, b""
        where = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        return 206, _facts(found) | where, memoryview(found.data)[begin:end]

    def _list(self, bucket: str, asked: Mapping[str, str]) -> bytes:
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        after = max(asked.get("start-after", ""), asked.get("continuation-token", ""))
        with self.server.store.lock:
            everything = [*self.server.store.objects.items()]
        objects = sorted((key[len(bucket) :], found) for key, found in everything if key.startswith(bucket))
        contents: list[dict[str, str]] = []
        prefixes: dict[str, None] = {}
        last = ""
        for key, found in objects:
            if not key.startswith(prefix) or key <= after or (after.endswith("/") and key.startswith(after)):
                continue
            if len(contents) + len(prefixes) == _PAGE and not (prefixes and key.startswith(next(reversed(prefixes)))):
                break
            top, is_below, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if is_below:
                last = prefix + top + delimiter
                prefixes[last] = None
                continue
            last = key
            facts = _facts(found)
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
            contents.append({"Key": key, "Size": str(len(found.data)), "LastModified": when, "ETag": facts["ETag"]})
        else:
            last = ""
        more = {"IsTruncated": "true", "NextContinuationToken": last} if last else {"IsTruncated": "false"}
        common = [{"Prefix": name} for name in prefixes]
        return _xml("ListBucketResult", Contents=contents, CommonPrefixes=common, **more)


def _xml(name: str, **given: str | list[dict[str, str]]) -> bytes:
    def text(name: str, value: str | Mapping[str, Any]) -> str:
        inner = escape(value) if isinstance(value, str) else "".join(text(*each) for each in value.items())
        return f"<{name}>{inner}</{name}>"

    inner = "".join(
        text(key, value) for key, values in given.items() for value in ([values] if isinstance(values, str) else values)
    )
    return f"<{name}>{inner}</{name}>".encode()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def __init__(self, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Talk)
        self.store = _Store(latency_s)


@dataclass(frozen=True)
class ObjectServer:
    """A server that runs; ``url`` is that of its root."""

    url: str

    def rules(self, *rules: Rule) -> None:
        """Set the rules, and forget the log."""
        self._ask("rules", json.dumps([asdict(rule) for rule in rules]))

    def clear(self) -> None:
        """Remove all objects and uploads."""
        self._ask("clear")

    @property
    def log(self) -> list[str]:
        """What was asked since the rules were set: ``METHOD /bucket/key?query``."""
        return list(self._ask("log")["log"])

    @property
    def sent(self) -> int:
        """The bytes of all answers since the rules were set."""
        return int(self._ask("log")["sent"])

    @property
    def late(self) -> int:
        """How many requests were done late since the rules were set; see `Rule`."""
        return int(self._ask("log")["late"])

    @property
    def uploads(self) -> int:
        """The number of multipart uploads that were neither completed nor aborted."""
        return int(self._ask("log")["uploads"])

    def _ask(self, name: str, body: str = "") -> dict[str, Any]:
        with contextlib.closing(http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)) as client:
            client.request("POST", f"/-/{name}", body)
            return dict(json.loads(client.getresponse().read()))

    def options(self, scheme: str) -> dict[str, Any]:
        """Return the ``storage_options`` with which it is used."""
        plain = {"client_options": {"allow_http": True}}
        if scheme == "s3":
            keys = {"access_key_id": "test", "secret_access_key": "not-so-secret"}
            return {"endpoint": self.url, "region": "us-east-1", **keys, **plain}
        account = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        return {"service_account_key": json.dumps({**account, "private_key_id": ""}), **plain}


@contextlib.contextmanager
def start(*, latency_s: float = 0.0) -> Iterator[ObjectServer]:
    """Run a server in a process of its own within the context. Each bucket is there."""
    command = [sys.executable, "-m", "benchmarks.harness.object_server", str(latency_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ObjectServer("" if process.stdout is None else process.stdout.readline().strip())
        finally:
            process.kill()


if __name__ == "__main__":
    with _Server(float(sys.argv[1]) if sys.argv[1:] else 0.0) as serving:
        print(f"http://127.0.0.1:{serving.server_address[1]}", flush=True)
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        sys.stdin.buffer.read()
