"""A storage in a server of objects: the model of one that is no file system. See `aiockpt.testing.server`.

===================================  =============================================================================
object                               contents
===================================  =============================================================================
``{path}/.commit``                   makes the checkpoint: its token, and the sizes of its files
``{path}/{token}/files/{name}``      a file; "single" if the checkpoint is one file
``{path}/{token}/state``             "open" at first; see `decide`
``{path}/{token}/held/{ticket}``     a process that takes part, until it does no longer
``{path}/{token}/sidecars/{name}``   messages between the processes
``{run}/.lease``                     the manager that writes to a run
===================================  =============================================================================

A token is the ticket of a transaction. To publish, or to discard, a process replaces the state that `begin` has
written, if it still has that stamp: one succeeds. Then one conditional put of the commit object publishes. What it has
replaced, and what is deleted, stays for ``grace_s`` seconds for those that read it; then they get a
CheckpointNotFoundError.
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
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
from aiockpt.format.names import HIDDEN, SINGLE_NAME
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

logger = logging.getLogger("aiockpt")

Facts = dict[str, Any]  # of an object; see the server


# --- requests; these block, and raise OSError -----------------------------------------------------------


class ConditionError(OSError):
    """An object has another stamp than a request asks for."""


class _Socket(socket.socket):
    def __del__(self) -> None:
        self.close()


class _Connections(threading.local):
    def __init__(self) -> None:
        self.of: dict[tuple[str, int, int], _Socket] = {}


_thread = _Connections()


class ObjectClient:
    """Requests to a server, by a connection for each thread."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address, self._timeout_s = (host, port), timeout_s

    def ask(self, op: str, key: str, body: Document = b"", **given: Any) -> tuple[Facts, memoryview]:
        """Return the reply and its body; ``view`` and ``seen`` are as in `Source.read`."""
        place = (*self._address, os.getpid())  # a fork must not use its parent's connection
        view, seen = given.pop("view", None), given.pop("seen", None)
        connection = _thread.of.pop(place, None)  # after an error, what comes next may be the rest of a frame
        if connection is None:
            connection = _Socket()
            connection.settimeout(self._timeout_s)
            try:
                connection.connect(self._address)
            except OSError:
                connection.close()
                raise
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        text = json.dumps({"op": op, "key": key, **given}).encode()
        connection.sendall(LENGTHS.pack(len(text), len(body)) + text)
        connection.sendall(body)
        length, nbytes = LENGTHS.unpack(_fill(connection, memoryview(bytearray(LENGTHS.size))))
        reply = json.loads(_fill(connection, memoryview(bytearray(length))).tobytes())
        data = _fill(connection, memoryview(bytearray(nbytes)) if view is None else view[:nbytes], seen)
        _thread.of[place] = connection
        if "error" in reply:
            kind = FileNotFoundError if reply["error"] == "absent" else ConditionError
            raise kind(f"the object {key} is gone, or another one")
        return reply, data

    def put(self, key: str, data: Document, only_if: Stamp | None = None) -> Stamp:
        """Write an object; ``only_if`` the present one has this stamp, "" for none; return its stamp."""
        return str(self.ask("put", key, data, only_if=only_if)[0]["stamp"])

    def get(self, key: str) -> tuple[Facts, bytes] | None:
        """Return the facts and the bytes of an object; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            facts, data = self.ask("get", key, ranges=None)
            return facts, data.tobytes()
        return None

    def delete(self, key: str, only_if: Stamp | None = None) -> None:
        """Delete an object, if it exists."""
        self.ask("delete", key, only_if=only_if)

    def below(self, prefix: str) -> dict[str, Facts]:
        """Return the facts of all objects below a prefix, by the rest of their keys."""
        found = self.ask("list", prefix, delimiter=None)[0]["objects"]
        return {key[len(prefix) :]: facts for key, facts in found.items()}

    def remove(self, prefix: str, last: str = "state") -> None:
        """Delete everything below a prefix, one object as the last."""
        self.ask("drop", prefix)
        for name in sorted(self.below(prefix), key=lambda name: name == last):
            self.delete(prefix + name)


def _fill(connection: socket.socket, view: memoryview, seen: Seen | None = None) -> memoryview:
    for at in range(0, len(view), _STEP_BYTES):
        step = left = view[at : at + _STEP_BYTES]
        while left:
            if not (count := connection.recv_into(left)):
                raise ConnectionResetError("the server has closed the connection")
            left = left[count:]
        if seen is not None:
            seen(step)
    return view


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
    """A commit object."""

    token: str  # the prefix of the objects, up to its "/"
    begun: Stamp | None  # the stamp of the transaction
    files: Mapping[str, int]
    replaces: str  # the token of what it has replaced
    stamp: Stamp = ""
    modified: float = 0.0

    @property
    def is_file(self) -> bool:
        return list(self.files) == [SINGLE_NAME]

    @property
    def data(self) -> bytes:
        return json.dumps(asdict(self)).encode()


Action = Literal["keep", "discard", "remove"]


def decide(state: str, age_s: float, owners: Liveness, *, is_old: bool, grace_s: float) -> Action:
    """Return what `ServerStorage.clean` does with the objects of a token that its commit object does not name.

    ========  ============================================================  ==========================================
    state     means                                                         action
    ========  ============================================================  ==========================================
    open      it is being written                                           discard, if its processes are dead
    publish   it is being published, or its publisher was killed before     remove, if its processes are dead, and no
              that, or another one before it could note the replacement     put of theirs can be in flight any more
    discard   it was not published, and not all of it could be removed      remove
    replaced  it was replaced or deleted                                    remove, ``grace_s`` seconds after that
    aside     it was set aside, under another name                          keep
    (none)    a process has gone on writing after the removal               remove, if it is dead
    ========  ============================================================  ==========================================

    Args:
        state: the first word of the state.
        age_s: since when it has that state, in seconds.
        owners: whether its processes live.
        is_old: it is so old that processes of which nothing is known count as dead.
        grace_s: how long readers may go on with what was replaced, in seconds.
    """
    is_left = owners == "dead" or (owners == "unknown" and is_old)
    if state == "open":
        return "discard" if is_left else "keep"
    wait_s = {"publish": max(_IN_FLIGHT_S, grace_s), "replaced": grace_s}.get(state, 0.0)
    is_over = is_left if state in ("publish", "") else state != "aside"
    return "remove" if is_over and age_s >= wait_s else "keep"


async def _entered(
    task: str, entering: Awaitable[SharedTransaction], leave: Callable[[], Awaitable[None]]
) -> SharedTransaction:
    """Return a transaction; leave it if this is cancelled, since the caller does not get it."""
    try:
        with _errors(WriteError, task):
            return await entering
    except BaseException:
        with contextlib.suppress(AiockptError):  # the first error counts
            await leave()
        raise


class _Sink(FileSink):
    """A file whose parts are sent by several threads."""

    def __init__(self, objects: ObjectClient, key: str, workers: Workers) -> None:
        self._objects, self._key, self._workers = objects, key, workers
        self._upload, self._count = secrets.token_hex(8), 0
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

    async def _send(self, part: int, view: memoryview, free: Callable[[], object]) -> None:
        try:
            await self._ask("part", view, part=part)
        except BaseException as exc:  # raised by the next call
            self._error = self._error or exc
        else:
            free()
        finally:
            self._slots.release()

    async def _ask(self, op: str, view: Document, **given: Any) -> None:
        await self._workers.run(lambda: self._objects.ask(op, self._key, view, upload=self._upload, **given))

    def _raise(self) -> None:
        with _errors(WriteError, f"write {self._key}"):
            if self._error is not None:
                raise self._error

    async def finish(self) -> None:
        await self.stop()
        self._raise()
        with _errors(WriteError, f"write {self._key}"):
            await self._ask("put", b"", only_if=None, parts=self._count)

    async def stop(self) -> None:
        """Wait until no view is in use."""
        if self._sending:
            await outlast(asyncio.wait(self._sending))


@dataclass(eq=False, repr=False)
class ServerTransaction(SharedTransaction):
    """A checkpoint that this process has begun, taken over or joined."""

    _storage: ServerStorage
    _path: str
    ticket: str = ""
    _workers: Workers = field(kw_only=True)
    _overwrite: bool = False
    _joins: bool = False
    stamp: Stamp | None = None
    _sinks: list[_Sink] = field(default_factory=list)
    _keys: set[str] = field(default_factory=set)  # of the files of this process
    _over: bool = False
    _revoked: bool = False
    _is_sent: bool = False  # the commit object

    def __post_init__(self) -> None:
        found = read_ticket(self.ticket)
        if found is None or found.suffix:
            raise WriteError(f"{self.ticket!r} is no ticket of an unfinished checkpoint")
        self._objects = self._storage.objects
        self._token = f"{self._storage.key(self._path)}{self.ticket}/"
        self._state, self._held = f"{self._token}state", f"{self._token}held/{new_ticket()}"
        self._publish_state = f"publish {secrets.token_hex(8)}".encode()

    def enter(self, stamp: Stamp | None = None) -> SharedTransaction:
        """Take part in what was begun; blocks. Raise WriteError if it is gone, unless it is taken over."""
        self.stamp = stamp
        found = self._objects.get(self._state)
        if found is None and self._joins:
            raise WriteError(f"{self._token}, which rank 0 has begun for {self._path}, is not there: it was removed")
        if found is not None:
            self.stamp = stamp or found[0]["stamp"]
            if found[1] == b"open" and found[0]["stamp"] != self.stamp:
                raise WriteError(f"{self._token} is that of another save by now, so it can't be taken over")
            self._objects.put(self._held, b"")
        return self

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        with _errors(WriteError, f"write {self._path}"):
            return await self._workers.run(function, *args)

    def _file(self, name: str) -> str:
        self._keys.add(key := f"{self._token}files/{name or SINGLE_NAME}")
        return key

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        self._sinks.append(_Sink(self._objects, self._file(name), self._workers))
        return self._sinks[-1]

    async def write_files(self, files: Mapping[str, Document]) -> None:
        for name, data in files.items():
            await self._run(self._objects.put, self._file(name), data)

    async def sizes(self) -> Mapping[str, int]:
        found = await self._run(self._objects.below, f"{self._token}files/")
        return {name: facts["size"] for name, facts in found.items()}

    async def put_sidecar(self, name: str, data: bytes) -> None:
        await self._run(self._objects.put, f"{self._token}sidecars/{name}", data)

    async def get_sidecar(self, name: str) -> bytes | None:
        found = await self._run(self._objects.get, f"{self._token}sidecars/{name}")
        return None if found is None else found[1]

    async def delete_sidecar(self, name: str) -> None:
        await self._run(self._objects.delete, f"{self._token}sidecars/{name}")

    # --- the end ------------------------------------------------------------------------------------------

    async def commit(self, documents: Mapping[str, Document] = MappingProxyType({})) -> None:
        await self.write_files(documents)
        if not self._joins:
            with _errors(CommitError, f"publish {self._path}"):
                await self._workers.run(self._publish, await self.sizes())
            await self.release()
        elif await self.status() == "gone":  # else what this process has written since then would stay
            raise CommitError(f"{self._path} was given up by another process, which has removed {self._token}")
        self._over = True

    def revoke(self) -> None:
        self._revoked = True

    def _publish(self, files: Mapping[str, int]) -> None:
        problem: OSError = ConditionError(f"{self._path} was replaced again and again by other processes")
        try:
            self._check_revoked()
            self._objects.put(self._state, self._publish_state, str(self.stamp))
        except ConditionError as exc:
            raise CommitError(f"{self._path} was given up by another process; nothing was published") from exc
        for attempt in range(_ATTEMPTS):
            try:
                before = self._storage.record(self._path)
                if before is not None and before.token == self._token:
                    return self._retire(before)
                self._check_revoked()
                if before is not None and not self._overwrite:
                    self._is_sent = False  # or it was refused
                    raise _taken(self._path)
                made = _Record(self._token, self.stamp, files, "" if before is None else before.token)
                self._is_sent = True
                self._objects.put(self._storage.key(self._path) + _COMMIT, made.data, before.stamp if before else "")
            except ConditionError:  # another one was faster; or this one, and the answer was lost
                continue
            except AiockptError:
                raise
            except OSError as exc:
                problem = exc
                time.sleep(_PAUSE_S * 2**attempt)
            else:
                return self._retire(made)
        if self._is_sent:
            self._over = True  # it may be the only good checkpoint
            raise CommitError(f"it is not known whether {self._path} was published, so {self._token} stays: {problem}")
        raise problem

    def _check_revoked(self) -> None:
        if self._revoked:
            raise CommitError(f"{self._path} was given up before it was published")

    def _retire(self, made: _Record) -> None:
        try:
            self._storage.retire(made.replaces)
        except OSError as exc:  # the checkpoint is published
            logger.warning("what %s has replaced can't be removed: %s", self._path, exc)

    async def abort(self) -> None:
        for sink in self._sinks:
            await sink.stop()
        over, self._over = self._over, True
        if not over and self._joins:  # the owner, which can't publish without them, removes those of all
            for key in self._keys:
                await self._run(self._objects.delete, key)
        elif not over and self.stamp is not None:
            await self._run(self._discard)
        await self.release()

    async def discard_all(self) -> None:
        await self.abort()
        await self._run(self._discard)

    def _discard(self) -> None:
        """Remove everything, unless another process is publishing it, or this one may have."""
        try:
            self._objects.put(self._state, b"discard", str(self.stamp))
        except ConditionError as exc:
            _, state = self._objects.get(self._state) or ({}, b"")
            if state == b"open":  # another save has begun by this name
                return
            if state.startswith(b"publish") and (self._is_sent or state != self._publish_state):
                if self._joins or self._is_published():
                    return
                raise WriteError(f"{self._path} is just being published, so {self._token} stays") from exc
        self._objects.remove(self._token)

    def _is_published(self) -> bool:
        now = self._storage.record(self._path)
        return now is not None and (now.token, now.begun) == (self._token, self.stamp)

    async def status(self) -> Status:
        if await self._run(self._is_published):
            return "published"
        facts, state = await self._run(self._objects.get, self._state) or ({"stamp": ""}, b"")
        return "open" if facts["stamp"] == self.stamp or state.startswith(b"publish") else "gone"

    async def finalize(self) -> None:
        self._over = True
        now = await self._run(self._storage.record, self._path)
        if now is not None and now.token == self._token:
            await self._workers.run(self._retire, now)
            await self._run(self._objects.remove, f"{self._token}held/")  # those of dead processes, too
        await self.release()

    async def release(self) -> None:
        with contextlib.suppress(OSError):  # it ends with the process at the latest
            await self._workers.run(self._objects.delete, self._held)


# --- reading --------------------------------------------------------------------------------------------


class _ServerListing(Listing):
    """A checkpoint, or what is below a path."""

    def __init__(self, storage: ServerStorage, path: str, budget: LookBudget) -> None:
        self.path, self._storage, self._budget = path, storage, budget
        self.files, self.folders, self.others = {}, [], []
        self.keys: dict[str, str] = {}  # of the files
        self.is_file = False
        found = storage.find(path)
        if found is not None:
            record, inside = found
            self._add(record, inside)
            if not self.files:
                raise FileNotFoundError(f"nothing is at {path}")
            self.folders = list(dict.fromkeys(name.partition("/")[0] for name in self.files if "/" in name))
            self.stamp, self.changed_s = record.stamp, record.modified
            return
        entries = [(name, storage.record(storage.below(path, name))) for name in storage.names(path)]
        for name, entry in entries:
            if entry is not None and entry.is_file:
                self._put(name, entry, SINGLE_NAME)
            else:
                self.folders.append(name)
        self.changed_s = max((entry.modified for _, entry in entries if entry is not None), default=0.0)
        self.stamp = repr([(name, entry.stamp) for name, entry in entries if entry is not None and entry.is_file])

    def _add(self, record: _Record, inside: str = "", above: str = "") -> None:
        """Add the files below a name in a checkpoint, or the file of that name."""
        alone = SINGLE_NAME if record.is_file and not inside else inside
        for name in record.files:
            if name == alone:
                self.is_file = True
                self._put(self._storage.split(self.path)[1], record, name)
            elif not inside or name.startswith(f"{inside}/"):
                self._put(above + name[len(inside) :].removeprefix("/"), record, name)

    def _put(self, shown: str, record: _Record, name: str) -> None:
        self.files[shown], self.keys[shown] = record.files[name], f"{record.token}files/{name}"

    def list_below(self) -> None:
        for name in self.folders:
            below = None if self._budget.is_spent else self._storage.record(self._storage.below(self.path, name))
            if below is not None and not below.is_file:
                self._budget.left -= len(below.files)
                self._add(below, above=f"{name}/")

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        key = self.keys.get(name, name)
        return self._storage.objects.ask("get", key, ranges=[(offset, max(0, length))])[1].tobytes()


class _ServerSource(Source):
    """The files of a listing. What has replaced them meanwhile is never read."""

    def __init__(self, listing: _ServerListing, storage: ServerStorage) -> None:
        self._listing, self._storage, self._is_closed = listing, storage, False

    @property
    def files(self) -> Mapping[str, int]:
        return self._listing.files

    def read(self, name: str, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        self._read(name, [(offset, len(view))], view, seen)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview) -> None:
        self._read(name, runs, view)

    def _read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> None:
        path, nbytes = self._listing.path, self._listing.files.get(name)
        if self._is_closed:
            raise LoadError(f"{path}/{name} was closed before it was read")
        end = max((offset + length for offset, length in runs if length), default=0)
        if nbytes is None or end > nbytes:
            raise CorruptCheckpointError(f"{path}/{name} has {nbytes or 0} bytes, but {end} are needed")
        with _errors(LoadError, f"read {path}/{name}"):
            try:
                key, ask = self._listing.keys[name], self._storage.objects.ask
                if len(ask("get", key, view=view, seen=seen, ranges=runs)[1]) < len(view):
                    raise CorruptCheckpointError(f"{path}/{name} ends too early: it was truncated by other means")
            except FileNotFoundError as exc:
                if self._storage.stamp(path) != self._listing.stamp:
                    raise CheckpointNotFoundError(f"{path} was replaced or deleted while it was read") from exc
                raise CorruptCheckpointError(f"{path}/{name} is missing: it was removed by other means") from exc

    def close(self) -> None:
        self._is_closed = True


# --- the lease of a run ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ServerLeaseFacts(LeaseFacts):
    ticket: str


@dataclass(eq=False)
class ServerLease(RunLease):
    """An object that names its owner. It needs no heartbeat: all processes are on the host of the server."""

    _storage: ServerStorage
    _directory: str
    _stamp: Stamp
    _pid: int = field(default_factory=os.getpid)  # 0 when it was given up

    def check(self) -> None:
        try:
            found = self._storage.owner(self._directory)
        except OSError as exc:  # the save may succeed all the same
            logger.warning("the lease of %s can't be looked at: %s", self._directory, exc)
            return
        if found is None or found[1] != self._stamp:
            who = "removed" if found is None else f"taken by {found[0]}"
            raise RunLockedError(f"the lease of {self._directory} was {who}; nothing was saved. Make a new manager")

    def release(self) -> None:
        pid, self._pid = self._pid, 0
        if pid == os.getpid():
            with contextlib.suppress(OSError):  # it stays, and names a process that is dead soon
                self._storage.objects.delete(self._storage.key(self._directory) + _LEASE, self._stamp)

    def __del__(self) -> None:
        self.release()


# --- the storage ----------------------------------------------------------------------------------------


class ServerStorage(SharedStorage):
    """Keeps checkpoints in a server that `start_server` has started. Its paths are URLs.

    Args:
        url: of the server, ``aiockpt-test://host:port``.
        grace_s: how long a checkpoint that was replaced or deleted can still be read by those that have it open, in
            seconds. After that the next save to its path, or `clean`, removes it.
        timeout_s: how long the server may take for anything, in seconds.
    """

    def __init__(self, url: str, *, grace_s: float = 600.0, timeout_s: float = 60.0) -> None:
        host, _, port = url.removeprefix(f"{SCHEME}://").rpartition(":")
        self._url, self._grace_s, self._timeout_s = url, grace_s, timeout_s
        self.objects = ObjectClient(host, int(port), timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return storage_for_server, (self._url, self._grace_s, self._timeout_s)

    def resolve(self, path: str) -> str:
        names = [name for name in path.removeprefix(self._url).split("/") if name not in ("", ".")]
        if not f"{path}/".startswith(f"{self._url}/") or ".." in names:
            raise AiockptError(f"{path} is no path of the server {self._url}")
        return "/".join([self._url, *names])

    # --- objects; these block, and raise OSError --------------------------------------------------------------

    def key(self, path: str) -> str:
        """Return the prefix of the keys below a canonical path."""
        return "" if path == self._url else f"{path[len(self._url) + 1 :]}/"

    def record(self, path: str) -> _Record | None:
        """Return the commit object of a path; None if there is none."""
        facts, data = self.objects.get(self.key(path) + _COMMIT) or ({}, b"")
        return _Record(**json.loads(data) | {name: facts[name] for name in ("stamp", "modified")}) if data else None

    def find(self, path: str) -> tuple[_Record, str] | None:
        """Return the commit object of a path, or of one above, and where the path is in that checkpoint."""
        at = path
        while at != self._url:
            if (found := self.record(at)) is not None:
                return found, path[len(at) + 1 :]
            at = self.split(at)[0]
        return None

    def owner(self, directory: str) -> tuple[_ServerLeaseFacts, Stamp] | None:
        """Return the lease of a run, and its stamp."""
        facts, data = self.objects.get(self.key(directory) + _LEASE) or ({}, b"")
        return (_ServerLeaseFacts(**json.loads(data)), facts["stamp"]) if data else None

    def names(self, path: str) -> list[str]:
        """Return the names directly below a path that have checkpoints; FileNotFoundError if nothing is there."""
        objects, below = self._tops(path)
        found = [name for name in below if self._has_any(self.below(path, name))]
        if not found and _LEASE not in objects:
            raise FileNotFoundError(f"nothing is at {path}")
        return found

    def _has_any(self, path: str) -> bool:
        objects, below = self._tops(path)
        return bool({_COMMIT, _LEASE} & objects) or any(self._has_any(self.below(path, name)) for name in below)

    def _tops(self, path: str) -> tuple[set[str], list[str]]:
        """Return the names of the objects directly below a path, and of what has objects below, but tokens."""
        reply, _ = self.objects.ask("list", prefix := self.key(path), delimiter="/")
        names = [key[len(prefix) : -1] for key in reply["prefixes"]]
        return {key[len(prefix) :] for key in reply["objects"]}, [name for name in names if not read_ticket(name)]

    def _tokens(self, path: str) -> dict[str, dict[str, Facts]]:
        """Return the objects of each token below a path."""
        found: dict[str, dict[str, Facts]] = {}
        for key, facts in self.objects.below(self.key(path)).items():
            above, mark, rest = f"{self.key(path)}{key}".partition(f"/{HIDDEN}")
            if mark:
                ticket, _, name = rest.partition("/")
                found.setdefault(f"{above}{mark}{ticket}/", {})[name] = facts
        return found

    def retire(self, token: str) -> None:
        """Let the objects of a token go when ``grace_s`` is over; at once if it is 0."""
        if token:
            self.objects.put(f"{token}state", b"replaced")
            if not self._grace_s:
                self.objects.remove(token)

    def clean_up(self, path: str, older_than_s: float | None = None) -> list[str]:
        """Do as `clean`, below a path."""
        left: list[tuple[str, Stamp, str, Action]] = []
        for token, found in self._tokens(path).items():
            facts, state = self.objects.get(f"{token}state") or ({"stamp": "", "age": 0.0}, b"")
            is_old = older_than_s is not None and min(each["age"] for each in found.values()) >= older_than_s
            word = state.decode().partition(" ")[0]
            # Those that publish take part until that is over.
            owners = _liveness(_holders(found)) if word == "publish" else _owners(token, found)
            action = decide(word, facts["age"], owners, is_old=is_old, grace_s=self._grace_s)
            left.append((token, facts["stamp"], word, action))
        removed = []
        for token, stamp, word, action in left:
            # Only now: it can't be published any more.
            now = self.record(f"{self._url}/{token.rpartition(f'/{HIDDEN}')[0]}")
            if now is not None and now.replaces == token and word == "publish":  # its publisher could not do so
                self.retire(token)
            elif action != "keep" and (now is None or now.token != token):
                with contextlib.suppress(ConditionError):  # it lives after all, and is being published
                    if action == "discard":
                        self.objects.put(f"{token}state", b"discard", stamp)
                    self.objects.remove(token)
                    removed.append(f"{self._url}/{token[:-1]}")
        return removed

    # --- checkpoints ----------------------------------------------------------------------------------------

    def new_ticket(self, path: str) -> str:
        return new_ticket()

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        path = self.resolve(path)
        begun = ServerTransaction(self, path, ticket or new_ticket(), _workers=workers, _overwrite=overwrite)

        def begin() -> SharedTransaction:
            self.clean_up(path)
            found = self.find(path)
            if not (found and overwrite and not found[1]) and (found or self._has_any(path)):
                raise _taken(path)
            begun.stamp = self.objects.put(f"{self.key(path)}{begun.ticket}/state", b"open", "")
            return begun.enter(begun.stamp)

        return await _entered(f"begin to write {path}", workers.run(begin), begun.abort)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        joined = ServerTransaction(self, self.resolve(path), ticket, _workers=workers, _joins=True)
        return await _entered(f"join the save of {path}", workers.run(joined.enter), joined.release)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        taken = ServerTransaction(self, self.resolve(path), ticket, _workers=workers, _overwrite=overwrite)
        return await _entered(f"take over the save of {path}", workers.run(taken.enter, stamp), taken.release)

    async def open(self, path: str, *, workers: Workers) -> Source:
        path = self.resolve(path)

        def look() -> Source:
            listing = _ServerListing(self, path, LookBudget())
            listing.list_below()
            return _ServerSource(listing, self)

        with _errors(LoadError, f"open {path}"):
            try:
                return await workers.run(look)
            except FileNotFoundError as exc:
                raise CheckpointNotFoundError(f"there is no checkpoint at {path}") from exc

    async def delete(self, path: str, *, workers: Workers) -> None:
        path = self.resolve(path)

        def delete() -> None:
            while (now := self.record(path)) is not None:
                with contextlib.suppress(ConditionError):  # it was replaced just now
                    self.objects.delete(self.key(path) + _COMMIT, now.stamp)
                    self.retire(now.token)
                    return
            names = self.names(path)
            raise DeleteError(f"{path} is no checkpoint, but has {', '.join(names)} below it; nothing was deleted")

        with _errors(DeleteError, f"delete {path}"):
            try:
                await workers.run(delete)
            except FileNotFoundError as exc:
                raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        with _errors(DeleteError, f"look for what killed processes have left in {directory}"):
            return await workers.run(self.clean_up, self.resolve(directory), older_than_s)

    # --- directories ------------------------------------------------------------------------------------------

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return _ServerListing(self, path, budget or LookBudget())

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        """Copy the commit object, which goes on naming the objects below the old path, and delete the old one."""
        now = self.record(path)
        if now is None:
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        for aside in (self.below(self.split(path)[0], name) for name in names):
            with contextlib.suppress(ConditionError):
                self.objects.put(self.key(aside) + _COMMIT, now.data, "")
                break
        else:
            raise FileExistsError(f"each name for {path} is taken")
        self.objects.put(f"{now.token}state", b"aside")
        self.objects.delete(self.key(path) + _COMMIT, now.stamp)
        return aside

    def lease(self, directory: str) -> RunLease:
        found = self.owner(directory)
        if found is not None and _liveness([found[0].ticket]) != "dead":
            raise _locked(directory, found[0])
        mine = _ServerLeaseFacts(socket.gethostname(), os.getpid(), time.time(), new_ticket())
        try:
            key, before = self.key(directory) + _LEASE, "" if found is None else found[1]
            return ServerLease(self, directory, self.objects.put(key, json.dumps(asdict(mine)).encode(), before))
        except ConditionError as exc:  # another one was faster
            raise _locked(directory, None) from exc

    def owner_of(self, directory: str) -> LeaseFacts | None:
        found = self.owner(directory)
        return None if found is None or _liveness([found[0].ticket]) == "dead" else found[0]

    def is_finishing(self, directory: str) -> bool:
        tokens = self._tokens(directory).items()
        return any(
            _liveness([_ticket_of(token)]) == "dead" and _owners(token, each) == "alive" for token, each in tokens
        )


def _ticket_of(token: str) -> str:
    return token.split("/")[-2]


def _owners(token: str, found: Iterable[str]) -> Liveness:
    """Return whether a process lives that takes part; the one of the ticket, if none has said so."""
    return _liveness(_holders(found) or [_ticket_of(token)])


def _holders(found: Iterable[str]) -> list[str]:
    return [name.removeprefix("held/") for name in found if name.startswith("held/")]


def _liveness(tickets: Sequence[str]) -> Liveness:
    """Return whether one of several processes lives."""
    found = map(read_ticket, tickets)
    states = {liveness(None if each is None else each.owner, this_process()) for each in found}
    return "alive" if "alive" in states else "unknown" if "unknown" in states else "dead"


def _taken(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{path} exists already; save under another name, or pass overwrite=True")


def _locked(directory: str, owner: LeaseFacts | None) -> RunLockedError:
    error = f"the run {directory} is being written by {owner or 'another process'}: end that, or pass mode='read'"
    return RunLockedError(error) if owner is None else RunLockedError(error, owner.host, owner.pid, owner.since)


def storage_for_server(url: str, grace_s: float = 600.0, timeout_s: float = 60.0) -> ServerStorage:
    """Return the storage of the URLs of a server; see `ServerStorage`."""
    return ServerStorage(url, grace_s=grace_s, timeout_s=timeout_s)
