"""A storage in a server of objects: the model of one that is no file system. See `aiockpt.testing.server`.

=====================================  =========================================================================
object                                 contents
=====================================  =========================================================================
``{path}/.commit``                     makes the checkpoint: its token, and its files with their sizes
``{path}/{token}/files/{name}``        a file; "single" for a checkpoint that is one file
``{path}/{token}/state``               "open", then what has won: "publish NONCE" or "discard"; see `decide`
``{path}/{token}/held/{ticket}``       a process that takes part, until it no longer does
``{path}/{token}/sidecars/{name}``     messages between the processes
``{run}/.lease``                       the manager that writes to a run
=====================================  =========================================================================

The token is the ticket of the transaction; no two saves share one. To publish, or to discard, a process replaces the
state that `begin` has written, if it still has that stamp: only one succeeds. Then the checkpoint appears by one
conditional put of its commit object. What was replaced or deleted is kept for ``grace_s`` seconds, for those that read
it; readers that are slower get a CheckpointNotFoundError.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from aiockpt.core.threads import outlast
from aiockpt.errors import (
    AiockptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    CorruptCheckpointError,
    DeleteError,
    LoadError,
    RunLockedError,
    WriteError,
)
from aiockpt.format.names import SINGLE_NAME
from aiockpt.storage.base import (
    Document,
    FileSink,
    LeaseFacts,
    Listing,
    LookBudget,
    RunLease,
    Seen,
    SharedStorage,
    SharedTransaction,
    Source,
    Stamp,
    Status,
    Traits,
)
from aiockpt.storage.local.temp_dir import Liveness, liveness, new_ticket, read_ticket, this_process
from aiockpt.testing.server import LENGTHS, SCHEME

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

_COMMIT, _LEASE = ".commit", ".lease"
_STEP_BYTES = 1 << 20  # read at a time, so that the CRC of it finds it in the processor's cache
_PARTS = 4  # of a file, on their way at once
_ATTEMPTS = 8  # of a commit
_PAUSE_S = 0.05
_IN_FLIGHT_S = 60.0  # no request of a dead process arrives later
_BEAT_S = 10.0
_STALE_S = 6 * _BEAT_S

logger = logging.getLogger("aiockpt")


# --- requests; these block ------------------------------------------------------------------------------


class ConditionError(OSError):
    """An object has another stamp than a request asks for."""


class _Connection:
    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self.pid = os.getpid()
        self._socket = socket.create_connection(address, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be made
            self._socket.close()

    def send(self, request: dict[str, Any], body: Document) -> None:
        text = json.dumps(request).encode()
        self._socket.sendall(LENGTHS.pack(len(text), len(body)) + text)
        self._socket.sendall(body)

    def receive(self) -> tuple[dict[str, Any], int]:
        """Return a reply, and the length of its body, which is to be received next."""
        lengths = LENGTHS.unpack(self.fill(memoryview(bytearray(LENGTHS.size))))
        return json.loads(self.fill(memoryview(bytearray(lengths[0]))).tobytes()), lengths[1]

    def fill(self, view: memoryview, seen: Seen | None = None) -> memoryview:
        for at in range(0, len(view), _STEP_BYTES):
            step = left = view[at : at + _STEP_BYTES]
            while left:
                count = self._socket.recv_into(left)
                if not count:
                    raise ConnectionResetError("the server has closed the connection")
                left = left[count:]
            if seen is not None:
                seen(step)
        return view


class _Connections(threading.local):
    def __init__(self) -> None:
        self.connections: dict[tuple[str, int], _Connection] = {}


_thread = _Connections()


class ObjectClient:
    """Requests to a server; each thread has a connection of its own. Methods raise OSError."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def ask(
        self,
        op: str,
        key: str,
        body: Document = b"",
        view: memoryview | None = None,
        seen: Seen | None = None,
        **given: Any,
    ) -> tuple[dict[str, Any], memoryview]:
        """Return the reply and its body, which is put into ``view`` if there is one."""
        # Taken out: after an error, what comes next may be the rest of a frame.
        connection = _thread.connections.pop(self._address, None)
        if connection is None or connection.pid != os.getpid():  # a fork shares its parent's
            connection = _Connection(self._address, self._timeout_s)
        connection.send({"op": op, "key": key, **given}, body)
        reply, nbytes = connection.receive()
        data = connection.fill(memoryview(bytearray(nbytes)) if view is None else view[:nbytes], seen)
        _thread.connections[self._address] = connection
        if reply.get("error") == "absent":
            raise FileNotFoundError(f"there is no object {key}")
        if "error" in reply:
            raise ConditionError(f"the object {key} is another one by now")
        return reply, data

    def put(self, key: str, data: Document, only_if: Stamp | None = None) -> Stamp:
        """Write an object; ``only_if`` it has this stamp, "" if there is none; return its stamp."""
        return str(self.ask("put", key, data, only_if=only_if)[0]["stamp"])

    def end(self, key: str, upload: str, parts: int) -> None:
        """Make an object of the parts of an upload."""
        self.ask("put", key, only_if=None, upload=upload, parts=parts)

    def get(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Return the facts of an object and its contents; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            reply, data = self.ask("get", key, ranges=None)
            return reply, data.tobytes()
        return None

    def delete(self, key: str, only_if: Stamp | None = None) -> None:
        """Delete an object, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.ask("delete", key, only_if=only_if)

    def objects(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Return the facts of all objects below a prefix, by the rest of their keys."""
        found = self.ask("list", prefix, delimiter="")[0]["objects"]
        return {key[len(prefix) :]: facts for key, facts in found.items()}

    def tops(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the names directly below a prefix: of objects, and of those that have objects below."""
        reply, _ = self.ask("list", prefix, delimiter="/")
        return [key[len(prefix) :] for key in reply["objects"]], [key[len(prefix) : -1] for key in reply["prefixes"]]

    def remove(self, prefix: str, last: str) -> None:
        """Delete everything below a prefix, one object at the end."""
        self.ask("drop", prefix)
        for name in sorted(self.objects(prefix), key=lambda name: (name == last, name)):
            self.delete(prefix + name)


@contextlib.contextmanager
def _errors(kind: type[AiockptError], task: str) -> Iterator[None]:
    try:
        yield
    except AiockptError:
        raise
    except OSError as exc:
        raise kind(f"can't {task}: {exc}") from exc


# --- saves ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Record:
    """The contents of a commit object."""

    token: str  # the prefix of the objects, to its "/"; of a checkpoint that was set aside, below its old path
    begun: Stamp  # the stamp of the transaction
    files: Mapping[str, int]
    replaces: str = ""  # the token of what it has replaced
    stamp: Stamp = field(default="", compare=False)  # of the commit object
    modified: float = 0.0

    @property
    def is_single_file(self) -> bool:
        return list(self.files) == [SINGLE_NAME]

    def encode(self) -> bytes:
        facts = {name: value for name, value in asdict(self).items() if name not in ("stamp", "modified")}
        return json.dumps(facts).encode()


Action = Literal["keep", "discard", "retire", "remove"]


def decide(state: str, age_s: float, owners: Liveness, *, is_old: bool, grace_s: float) -> Action:
    """Return what to do with the objects of a token that no commit object at its path names.

    =========  ===============================================================  ====================================
    state      means                                                            action
    =========  ===============================================================  ====================================
    open       it is being written                                              discard, if its processes are dead
    publish    it is just being published; or its publisher was killed, before  retire, if its processes are dead,
               or after another one has replaced it                             and no put is in flight any more
    discard    it was not published, and not all of it could be removed         remove
    replaced   it was replaced or deleted                                       remove, after ``grace_s`` seconds
    aside      a checkpoint of another name consists of it                      keep
    (none)     a process has written after it was removed                       remove, if its processes are dead
    =========  ===============================================================  ====================================

    Args:
        state: the first word of the state.
        age_s: since when it has that state, in seconds.
        owners: whether its processes live.
        is_old: it is so old that processes of which nothing is known count as dead.
        grace_s: how long readers may go on with what was replaced, in seconds.
    """
    is_left = owners == "dead" or (owners == "unknown" and is_old)
    if state == "replaced":
        return "remove" if age_s >= grace_s else "keep"
    if state == "publish":
        return "retire" if is_left and age_s >= _IN_FLIGHT_S else "keep"
    if state == "open":
        return "discard" if is_left else "keep"
    return "remove" if state == "discard" or (not state and is_left) else "keep"


class _Sink(FileSink):
    """A file, whose parts are sent by several threads."""

    def __init__(self, objects: ObjectClient, key: str, workers: Workers) -> None:
        self._objects, self._key, self._workers = objects, key, workers
        self._upload = secrets.token_hex(8)
        self._count = 0
        self._slots = asyncio.Semaphore(_PARTS)
        self._sending: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    async def write(self, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        await self._slots.acquire()
        self._raise()
        sending = asyncio.ensure_future(self._send(self._count, view, free))
        self._count += 1
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, number: int, view: memoryview, free: Callable[[], object]) -> None:
        try:
            await self._workers.run(self._objects.ask, "part", self._key, view, upload=self._upload, part=number)
        except BaseException as exc:  # raised by the next call
            self._error = self._error or exc
        else:
            free()
        finally:
            self._slots.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise WriteError(f"can't write {self._key}: {self._error}") from self._error

    async def finish(self) -> None:
        await self.stop()
        self._raise()
        with _errors(WriteError, f"write {self._key}"):
            await self._workers.run(self._objects.end, self._key, self._upload, self._count)

    async def stop(self) -> None:
        """Wait until no view is in use."""
        if self._sending:
            await outlast(asyncio.wait(self._sending))


class ServerTransaction(SharedTransaction):
    """A checkpoint that this process has begun, taken over or joined."""

    def __init__(
        self, storage: ServerStorage, path: str, ticket: str, workers: Workers, *, overwrite: bool, joins: bool
    ) -> None:
        self._storage, self._objects, self._workers = storage, storage.objects, workers
        self._path, self._ticket = path, ticket
        self._overwrite, self._joins = overwrite, joins
        self._token = f"{storage.key(path)}/{ticket}/"
        self._state = f"{self._token}state"
        self._held = f"{self._token}held/{new_ticket()}"
        self._nonce = secrets.token_hex(8)
        self._begun: Stamp | None = None
        self._sinks: list[_Sink] = []
        self._over = self._revoked = self._is_sent = False

    @property
    def ticket(self) -> str:
        return self._ticket

    @property
    def stamp(self) -> Stamp | None:
        return self._begun

    def begin(self) -> None:
        """Make the token; ConditionError if it is taken. Blocks."""
        self._begun = self._objects.put(self._state, b"open", "")
        self._objects.put(self._held, b"")

    def join(self, stamp: Stamp | None, *, must: bool) -> None:
        """Take part, if the token is there; raise WriteError if it ``must`` be. Blocks."""
        found = self._objects.get(self._state)
        self._begun = stamp or (None if found is None else found[0]["stamp"])
        if found is not None:
            self._objects.put(self._held, b"")
        elif must:
            raise WriteError(f"{self._token}, which rank 0 has begun for {self._path}, is not there: it was removed")

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        self._sinks.append(_Sink(self._objects, self._file(name), self._workers))
        return self._sinks[-1]

    async def write_files(self, files: Mapping[str, Document]) -> None:
        for name, data in files.items():
            with _errors(WriteError, f"write {name} of {self._path}"):
                await self._workers.run(self._objects.put, self._file(name), data)

    def _file(self, name: str) -> str:
        return f"{self._token}files/{name or SINGLE_NAME}"

    async def _run(self, task: str, function: Callable[..., Any], *args: Any) -> Any:
        with _errors(WriteError, f"{task} of {self._path}"):
            return await self._workers.run(function, *args)

    async def sizes(self) -> Mapping[str, int]:
        found = await self._run("list the files", self._objects.objects, f"{self._token}files/")
        return {name: facts["size"] for name, facts in found.items()}

    async def put_sidecar(self, name: str, data: bytes) -> None:
        await self._run("write a sidecar", self._objects.put, f"{self._token}sidecars/{name}", data)

    async def get_sidecar(self, name: str) -> bytes | None:
        found = await self._run("read a sidecar", self._objects.get, f"{self._token}sidecars/{name}")
        return None if found is None else found[1]

    async def delete_sidecar(self, name: str) -> None:
        await self._run("remove a sidecar", self._objects.delete, f"{self._token}sidecars/{name}")

    # --- the end ------------------------------------------------------------------------------------------

    async def commit(self, documents: Mapping[str, Document] = MappingProxyType({})) -> None:
        await self.write_files(documents)
        if self._joins:
            return
        files = await self.sizes()
        await self._workers.run(self._publish, files)
        self._over = True
        await self.release()

    def revoke(self) -> None:
        self._revoked = True

    def _publish(self, files: Mapping[str, int]) -> None:
        self._check_revoked()
        with _errors(CommitError, f"publish {self._path}"):
            try:
                self._objects.put(self._state, f"publish {self._nonce}".encode(), self._begun)
            except ConditionError as exc:
                raise CommitError(f"{self._path} was given up by another process; nothing was published") from exc
        problem: OSError | None = None
        for attempt in range(_ATTEMPTS):
            try:
                now = self._storage.record(self._path)
                if now is not None and now.token == self._token:
                    return
                self._check_revoked()
                if now is not None and not self._overwrite:
                    self._objects.put(self._state, b"discard")
                    raise CheckpointExistsError(f"{self._path} has appeared during the save; nothing was replaced")
                made = _Record(self._token, self._begun or "", files, "" if now is None else now.token)
                self._is_sent = True
                self._objects.put(self._storage.commit_key(self._path), made.encode(), "" if now is None else now.stamp)
            except ConditionError:  # another one was faster; or this one, whose answer was lost
                continue
            except AiockptError:
                raise
            except OSError as exc:
                problem = exc
                time.sleep(_PAUSE_S * 2**attempt)
            else:
                self._retire(made.replaces)
                return
        if self._is_sent:
            self._over = True  # it may be the only good checkpoint
            raise CommitError(
                f"it is not known whether {self._path} was published ({problem}): what was written stays there"
            ) from problem
        raise CommitError(f"can't publish {self._path}: {problem}") from problem

    def _check_revoked(self) -> None:
        if self._revoked:
            raise CommitError(f"{self._path} was given up before it was published")

    def _retire(self, token: str) -> None:
        try:
            self._storage.retire(token)
        except OSError as exc:  # the checkpoint is published
            logger.warning("what %s has replaced can't be removed: %s; clean() tries again", self._path, exc)

    async def abort(self) -> None:
        for sink in self._sinks:
            await sink.stop()
        if not self._over and not self._joins:
            self._over = True
            await self._run("remove what was written", self._discard)
        await self.release()

    async def discard_all(self) -> None:
        await self.abort()
        await self._run("remove what was written", self._discard)

    def _discard(self) -> None:
        """Remove everything, unless another process is publishing it."""
        try:
            self._objects.put(self._state, b"discard", self._begun)
        except ConditionError as exc:
            found = self._objects.get(self._state)
            word, _, nonce = ("" if found is None else found[1].decode()).partition(" ")
            if word == "publish" and (self._is_sent or nonce != self._nonce):
                if not self._joins and not self._is_published():
                    raise WriteError(f"it is just being published, so what was written stays in {self._token}") from exc
                return
        self._objects.remove(self._token, "state")

    def _is_published(self) -> bool:
        now = self._storage.record(self._path)
        return now is not None and (now.token, now.begun) == (self._token, self._begun)

    async def status(self) -> Status:
        status: Status = await self._run("look for the files", self._status)
        return status

    def _status(self) -> Status:
        if self._is_published():
            return "published"
        found = self._objects.get(self._state)
        is_open = found is not None and (found[0]["stamp"] == self._begun or found[1].startswith(b"publish"))
        return "open" if is_open else "gone"

    async def finalize(self) -> None:
        self._over = True
        now = await self._run("look for the files", self._storage.record, self._path)
        if now is not None and now.token == self._token and now.replaces:
            await self._workers.run(self._retire, now.replaces)
        await self.release()

    async def release(self) -> None:
        with contextlib.suppress(OSError):  # it ends with the process at the latest
            await self._workers.run(self._objects.delete, self._held)


# --- reading --------------------------------------------------------------------------------------------


class _ServerListing(Listing):
    """A checkpoint, or the names below a path."""

    def __init__(self, storage: ServerStorage, path: str, budget: LookBudget) -> None:
        self.path, self._storage, self._budget = path, storage, budget
        self.files, self.folders, self.others = {}, [], []
        self.keys: dict[str, str] = {}  # of the objects, by name
        self.record = storage.record(path)
        self.is_file = self.record is not None and self.record.is_single_file
        if self.record is not None:
            self._add(self.record, storage.split(path)[1] if self.is_file else "")
            self.stamp, self.changed_s = self.record.stamp, self.record.modified
        else:
            self._list()

    def _add(self, record: _Record, alone: str, above: str = "") -> None:
        for name, nbytes in record.files.items():
            self.files[above + (alone or name)] = nbytes
            self.keys[above + (alone or name)] = f"{record.token}files/{name}"

    def _list(self) -> None:
        names = self._storage.names(self.path)
        stamps = []
        self.changed_s = 0.0
        for name in names:
            below = self._storage.record(self._storage.below(self.path, name))
            if below is not None and below.is_single_file:
                self._add(below, name)
                stamps.append((name, below.stamp))
            else:
                self.folders.append(name)
            self.changed_s = max(self.changed_s, 0.0 if below is None else below.modified)
        self.stamp = repr(stamps)

    def list_below(self) -> None:
        for name in self.folders:
            below = None if self._budget.is_spent else self._storage.record(self._storage.below(self.path, name))
            if below is not None:
                self._budget.left -= len(below.files)
                self._add(below, "", f"{name}/")

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        if name not in self.keys:
            raise FileNotFoundError(f"{self.path} has no file {name}")
        return self._storage.objects.ask("get", self.keys[name], ranges=[(offset, max(0, length))])[1].tobytes()


class _ServerSource(Source):
    """A checkpoint. What has replaced it meanwhile is never read; after the storage's ``grace_s``, nothing is."""

    def __init__(self, listing: _ServerListing, storage: ServerStorage) -> None:
        self._listing, self._storage = listing, storage

    @property
    def files(self) -> Mapping[str, int]:
        return self._listing.files

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._read(name, [(offset, len(view))], view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read(name, runs, view)

    def _read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> None:
        path, nbytes = self._listing.path, self._listing.files.get(name)
        if nbytes is None:
            raise CorruptCheckpointError(f"{path} has no file {name}")
        for offset, length in runs:
            if offset + length > nbytes and length:
                raise CorruptCheckpointError(f"{path}/{name} has {nbytes} bytes, but {offset + length} are needed")
        with _errors(LoadError, f"read {path}/{name}"):
            try:
                self._storage.objects.ask("get", self._listing.keys[name], view=view, seen=seen, ranges=runs)
            except FileNotFoundError as exc:
                if self._storage.stamp(path) != self._listing.stamp:
                    raise CheckpointNotFoundError(f"{path} was replaced or deleted while it was read") from exc
                raise CorruptCheckpointError(f"{path}/{name} is missing: it was removed by other means") from exc

    def close(self) -> None:
        pass


# --- the lease of a run ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LeaseRecord(LeaseFacts):
    ticket: str


class ServerLease(RunLease):
    """An object that is written again and again as long as the process lives, for those on other hosts."""

    def __init__(self, storage: ServerStorage, directory: str, facts: _LeaseRecord, stamp: Stamp) -> None:
        self._storage, self._directory, self._facts, self._stamp = storage, directory, facts, stamp
        self._key = storage.lease_key(directory)
        self._pid = os.getpid()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="aiockpt-lease", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ends.wait(_BEAT_S):
            try:
                self._stamp = self._storage.objects.put(
                    self._key, json.dumps(asdict(self._facts)).encode(), self._stamp
                )
            except ConditionError:  # `check` finds out
                return
            except OSError as exc:
                logger.warning("the lease of %s can't be renewed: %s", self._directory, exc)

    def check(self) -> None:
        try:
            found = self._storage.lease_record(self._directory)
        except OSError as exc:  # the save may succeed all the same
            logger.warning("the lease of %s can't be looked at: %s", self._directory, exc)
            return
        if found is None or found[0] != self._facts:
            who = "removed" if found is None else f"taken by {found[0]}"
            raise RunLockedError(f"the lease of {self._directory} was {who}; nothing was saved. Make a new manager")

    def release(self) -> None:
        if self._ends.is_set() or os.getpid() != self._pid:
            return
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # it names a process that is dead soon
            self._storage.objects.delete(self._key, self._stamp)


# --- the storage ----------------------------------------------------------------------------------------


class ServerStorage(SharedStorage):
    """Keeps checkpoints in a server that `start_server` has started. Its paths are URLs.

    Args:
        url: of the server, ``aiockpt-test://host:port``.
        grace_s: how long a checkpoint that was replaced or deleted can still be read by those that have it open, in
            seconds. A later save to its path, or `clean`, removes it then.
        timeout_s: how long the server may take for anything, in seconds.
    """

    traits = Traits(single_files=True)

    def __init__(self, url: str, *, grace_s: float = 600.0, timeout_s: float = 60.0) -> None:
        host, _, port = url.removeprefix(f"{SCHEME}://").rpartition(":")
        self._url, self._grace_s, self._timeout_s = url, grace_s, timeout_s
        self.objects = ObjectClient((host, int(port)), timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return storage_for_server, (self._url, self._grace_s, self._timeout_s)

    # --- names --------------------------------------------------------------------------------------------

    def resolve(self, path: str) -> str:
        names = [name for name in path.removeprefix(self._url).split("/") if name not in ("", ".")]
        if not f"{path}/".startswith(f"{self._url}/") or ".." in names:
            raise AiockptError(f"{path} is no path of the server {self._url}")
        return "/".join([self._url, *names])

    def key(self, path: str) -> str:
        """Return the beginning of the keys of a canonical path."""
        return path[len(self._url) + 1 :]

    def _prefix(self, path: str) -> str:
        return f"{self.key(path)}/" if path != self._url else ""

    def commit_key(self, path: str) -> str:
        """Return the key of the commit object of a path."""
        return self._prefix(path) + _COMMIT

    def lease_key(self, directory: str) -> str:
        """Return the key of the lease of a run."""
        return self._prefix(directory) + _LEASE

    # --- objects; these block, and raise OSError --------------------------------------------------------------

    def record(self, path: str) -> _Record | None:
        """Return the commit object of a path; None if there is none."""
        found = self.objects.get(self.commit_key(path))
        if found is None:
            return None
        return _Record(**json.loads(found[1]), stamp=found[0]["stamp"], modified=found[0]["modified"])

    def names(self, path: str) -> list[str]:
        """Return the names directly below a path that have checkpoints; FileNotFoundError if nothing is there."""
        objects, below = self.objects.tops(self._prefix(path))
        found = [name for name in below if read_ticket(name) is None and self._has_any(self.below(path, name))]
        if not found and _LEASE not in objects:
            raise FileNotFoundError(f"nothing is at {path}")
        return found

    def _has_any(self, path: str) -> bool:
        objects, below = self.objects.tops(self._prefix(path))
        if not {_COMMIT, _LEASE}.isdisjoint(objects):
            return True
        return any(self._has_any(self.below(path, name)) for name in below if read_ticket(name) is None)

    def retire(self, token: str) -> None:
        """Let the objects of a token go when ``grace_s`` is over; at once if it is 0."""
        if token:
            self.objects.put(f"{token}state", b"replaced")
            if not self._grace_s:
                self.objects.remove(token, "state")

    def _owners(self, token: str, ticket: str) -> Liveness:
        """Return whether any process that takes part lives: the one of the ticket, if none has said so."""
        tickets = [*self.objects.objects(f"{token}held/")] or [ticket]
        found = {liveness(each.owner, this_process()) for name in tickets if (each := read_ticket(name)) is not None}
        return "alive" if "alive" in found else "unknown" if "unknown" in found else "dead"

    def _clean(self, path: str, older_than_s: float | None) -> list[str]:
        """Remove what is left below a path, except what its commit object names; return it."""
        left: list[tuple[str, Stamp, Action]] = []
        for ticket in filter(read_ticket, self.objects.tops(self._prefix(path))[1]):
            token = f"{self._prefix(path)}{ticket}/"
            with contextlib.suppress(FileNotFoundError):  # another one removes it
                left.append((token, *self._action(token, ticket, older_than_s)))
        now = self.record(path)  # only now: none of these can be published any more
        removed = []
        for token, stamp, action in left:
            if action == "keep" or (now is not None and token == now.token):
                continue
            if action == "retire":
                self.retire(token)
                continue
            with contextlib.suppress(ConditionError):  # it lives after all, and is being published
                if action == "discard":
                    self.objects.put(f"{token}state", b"discard", stamp)
                self.objects.remove(token, "state")
                removed.append(f"{self._url}/{token[:-1]}")
        return removed

    def _action(self, token: str, ticket: str, older_than_s: float | None) -> tuple[Stamp, Action]:
        reply, data = self.objects.get(f"{token}state") or ({"now": 0.0, "modified": 0.0, "stamp": ""}, b"")
        newest = max(facts["modified"] for facts in self.objects.objects(token).values())
        is_old = older_than_s is not None and reply["now"] - newest >= older_than_s
        age_s = reply["now"] - reply["modified"]
        state = data.decode().partition(" ")[0]
        owners = self._owners(token, ticket)
        return reply["stamp"], decide(state, age_s, owners, is_old=is_old, grace_s=self._grace_s)

    # --- checkpoints ----------------------------------------------------------------------------------------

    def new_ticket(self, path: str) -> str:
        return new_ticket()

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        path = self.resolve(path)
        begun = self._transaction(path, ticket or new_ticket(), workers, overwrite=overwrite)
        with _errors(WriteError, f"begin to write {path}"):
            await workers.run(self._make_way, path, overwrite)
            await workers.run(begun.begin)
        return begun

    def _make_way(self, path: str, overwrite: bool) -> None:
        self._clean(path, None)
        if not overwrite and self.record(path) is not None:
            raise CheckpointExistsError(f"{path} exists already; save under another name, or pass overwrite=True")

    def _transaction(
        self, path: str, ticket: str, workers: Workers, *, overwrite: bool = False, joins: bool = False
    ) -> ServerTransaction:
        found = read_ticket(ticket)
        if found is None or found.suffix:
            raise WriteError(f"{ticket!r} is no ticket of an unfinished checkpoint")
        return ServerTransaction(self, path, ticket, workers, overwrite=overwrite, joins=joins)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        path = self.resolve(path)
        joined = self._transaction(path, ticket, workers, joins=True)
        with _errors(WriteError, f"join the save of {path}"):
            await workers.run(lambda: joined.join(None, must=True))
        return joined

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        path = self.resolve(path)
        taken = self._transaction(path, ticket, workers, overwrite=overwrite)
        with _errors(WriteError, f"take over the save of {path}"):
            await workers.run(lambda: taken.join(stamp, must=False))
        return taken

    async def open(self, path: str, *, workers: Workers) -> Source:
        path = self.resolve(path)
        with _errors(LoadError, f"open {path}"):
            try:
                return await workers.run(self._open, path)
            except FileNotFoundError as exc:
                raise CheckpointNotFoundError(f"there is no checkpoint at {path}") from exc

    def _open(self, path: str) -> Source:
        listing = _ServerListing(self, path, LookBudget())
        listing.list_below()
        return _ServerSource(listing, self)

    async def delete(self, path: str, *, workers: Workers) -> None:
        path = self.resolve(path)
        with _errors(DeleteError, f"delete {path}"):
            await workers.run(self._delete, path)

    def _delete(self, path: str) -> None:
        while (now := self.record(path)) is not None:
            with contextlib.suppress(ConditionError):  # it was replaced just now
                self.objects.delete(self.commit_key(path), now.stamp)
                self.retire(now.token)
                return
        try:
            names = self.names(path)
        except FileNotFoundError as exc:
            raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc
        raise DeleteError(f"{path} is no checkpoint: below it are {len(names)} names; nothing was deleted")

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        directory = self.resolve(directory)
        with _errors(DeleteError, f"look for what killed processes have left in {directory}"):
            return await workers.run(self._clean_all, directory, older_than_s)

    def _clean_all(self, directory: str, older_than_s: float | None) -> list[str]:
        _, names = self.objects.tops(self._prefix(directory))
        paths = [self.below(directory, name) for name in names if read_ticket(name) is None]
        return [each for path in paths for each in self._clean(path, older_than_s)]

    # --- directories ------------------------------------------------------------------------------------------

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return _ServerListing(self, path, budget or LookBudget())

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        """Copy the commit object, which goes on naming the objects below the old path, and delete the old one."""
        now = self.record(path)
        if now is None:
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        for name in names:
            aside = self.below(self.split(path)[0], name)
            with contextlib.suppress(ConditionError):
                self.objects.put(self.commit_key(aside), now.encode(), "")
                self.objects.put(f"{now.token}state", b"aside")
                self.objects.delete(self.commit_key(path), now.stamp)
                return aside
        raise FileExistsError(f"each name for {path} is taken")

    def lease_record(self, directory: str) -> tuple[_LeaseRecord, dict[str, Any]] | None:
        """Return the contents of a lease and the facts of its object."""
        found = self.objects.get(self.lease_key(directory))
        return None if found is None else (_LeaseRecord(**json.loads(found[1])), found[0])

    def _is_left(self, record: _LeaseRecord, facts: dict[str, Any]) -> bool:
        ticket = read_ticket(record.ticket)
        owner = liveness(None if ticket is None else ticket.owner, this_process())
        return owner == "dead" or (owner == "unknown" and facts["now"] - facts["modified"] > _STALE_S)

    def lease(self, directory: str) -> RunLease:
        facts = _LeaseRecord(socket.gethostname(), os.getpid(), time.time(), new_ticket())
        found = self.lease_record(directory)
        if found is not None and not self._is_left(*found):
            raise _refusal(directory, found[0])
        try:
            only_if = "" if found is None else found[1]["stamp"]
            stamp = self.objects.put(self.lease_key(directory), json.dumps(asdict(facts)).encode(), only_if)
        except ConditionError as exc:  # another one was faster
            raise _refusal(directory, None) from exc
        return ServerLease(self, directory, facts, stamp)

    def owner_of(self, directory: str) -> LeaseFacts | None:
        found = self.lease_record(directory)
        return None if found is None or self._is_left(*found) else found[0]

    def is_finishing(self, directory: str) -> bool:
        for name in self.objects.tops(self._prefix(directory))[1]:
            prefix = self._prefix(self.below(directory, name))
            for ticket in filter(None, map(read_ticket, self.objects.tops(prefix)[1])):
                token = f"{prefix}{ticket.base}/"
                is_orphan = liveness(ticket.owner, this_process()) == "dead"
                if is_orphan and self.objects.objects(f"{token}held/") and self._owners(token, ticket.base) == "alive":
                    return True
        return False


def _refusal(directory: str, owner: LeaseFacts | None) -> RunLockedError:
    who = "another process that is taking it now" if owner is None else str(owner)
    error = f"the run {directory} is being written by {who}: end that program first, or only read with mode='read'"
    return RunLockedError(error) if owner is None else RunLockedError(error, owner.host, owner.pid, owner.since)


def storage_for_server(url: str, grace_s: float = 600.0, timeout_s: float = 60.0) -> ServerStorage:
    """Return the storage of the URLs of a server; see `ServerStorage`."""
    return ServerStorage(url, grace_s=grace_s, timeout_s=timeout_s)
