"""The server of a disk: other hosts of the job read and write the checkpoints of this one's storage through it.

It works in threads of its own, one for each connection, beside whatever else the process does. What a connection has
opened ends with it: a source is closed, and a transaction is aborted, or suspended if it can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import mmap
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, TypeVar

from isal.isal_zlib import crc32

from aiockpt.coordination.link import (
    Endpoint,
    Link,
    LinkBrokenError,
    addresses_of_this_host,
    listen,
    network_namespace,
)
from aiockpt.core.threads import Workers, new_event_loop
from aiockpt.errors import AiockptError, printable_key
from aiockpt.storage.base import FileSink, Listing, LookBudget, SharedStorage, SharedTransaction, Source
from aiockpt.storage.remote import (
    BEAT,
    ERROR,
    REQUEST,
    RESULT,
    STALL_S,
    Connection,
    DiskEndpoint,
    packed,
)

T = TypeVar("T")

_BEAT_S = 0.25
_READ_BYTES = 4 << 20  # read at a time
_SECRET_BYTES = 32
_THREADS = 8

logger = logging.getLogger("aiockpt")


class DiskServer:
    """Serves what is in some directories of a storage to the processes that get its `endpoint`.

    Making it blocks for a moment; raises OSError if there is no address to listen at. End it with `close`.

    Args:
        storage: what it serves.
        directories: a path must be one of these, or below one.
        hosts: the addresses to listen at; None: all by which other hosts reach this one.
        stall_s: how long another process may be silent within a message, in seconds.
    """

    def __init__(
        self,
        storage: SharedStorage,
        directories: Sequence[str],
        *,
        hosts: Sequence[str] | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self.storage, self.stall_s = storage, stall_s
        self._directories = [storage.resolve(path) for path in directories]
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Connection] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.tokens = itertools.count(1)
        self.held: dict[int, _Held] = {}
        self.workers = Workers(_THREADS, "aiockpt-disk")
        self._loop = new_event_loop()
        self._looping = threading.Thread(target=self._loop.run_forever, name="aiockpt-disk-loop", daemon=True)
        self._looping.start()
        try:
            hosts = addresses_of_this_host(None) if hosts is None else hosts
            self._server, link = self.run(self._listen(hosts)).result()
        except BaseException:
            self._end(0.0)
            raise
        self.endpoint = DiskEndpoint(link, storage.new_ticket(self._directories[0]))

    async def _listen(self, hosts: Sequence[str]) -> tuple[asyncio.Server, Endpoint]:
        secret, name = secrets.token_bytes(_SECRET_BYTES), socket.gethostname()
        server = await listen(hosts, secret, name, self._joined)
        addresses = [each.getsockname()[:2] for each in server.sockets]
        return server, Endpoint(addresses, secret, network_namespace(), name, 0)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of the storage."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _joined(self, hello: str, link: Link) -> None:
        async def serve() -> None:
            with contextlib.suppress(LinkBrokenError):
                self._start(Connection(await link.detach(connected=False), self.stall_s))

        task = asyncio.ensure_future(serve())
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _start(self, wire: Connection) -> None:
        with self._lock:
            if self._is_closed:
                wire.close()
                return
            for ended in [each for each in self._threads if not each.is_alive()]:
                del self._threads[ended]
            thread = threading.Thread(target=self._serve, args=(wire,), name="aiockpt-disk-connection", daemon=True)
            thread.start()
            self._threads[thread] = wire

    def _serve(self, wire: Connection) -> None:
        service = _Service(self, wire)
        try:
            service.run()
        except LinkBrokenError as exc:
            logger.debug("a connection to the disk of this host has ended: %s", exc)
        finally:
            service.end()
            wire.close()

    def place(self, path: str, *, below: bool) -> str:
        """Return a path that may be served; raise PermissionError for any other."""
        path = self.storage.resolve(path)
        if any(path.startswith(self.storage.below(each, "")) for each in self._directories):
            return path
        if not below and path in self._directories:
            return path
        where = " and ".join(self._directories)
        raise PermissionError(errno.EACCES, f"it is not below {where}, and nothing else is served", path)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all connections, then the threads; return whether they have ended in time. Idempotent. Blocks.

        What is not committed is removed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._is_closed:
                return True
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._stop_listening)
        with self._lock:
            threads = list(self._threads)
            for wire in self._threads.values():
                wire.end()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self._end(max(0.0, deadline - time.monotonic())) and not any(each.is_alive() for each in threads)

    def _stop_listening(self) -> None:
        self._server.close()
        for task in self._joining:
            task.cancel()

    def _end(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        has_ended = self.workers.end(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._looping.join(max(0.1, deadline - time.monotonic()))
        if self._looping.is_alive():
            return False
        self._loop.close()
        return has_ended


class _Held:
    """An object that stands here for a client."""

    def __init__(self, inner: Source | Listing | SharedTransaction | FileSink, workers: Workers) -> None:
        self.inner = inner
        self._workers = workers

    async def end(self) -> None:
        """Close it; its client is gone."""
        if isinstance(self.inner, Source | Listing):
            await self._workers.run(self.inner.close)


class _HeldListing(_Held):
    inner: Listing

    def __init__(self, inner: Listing, budget: LookBudget, workers: Workers) -> None:
        super().__init__(inner, workers)
        self.budget = budget


class _HeldTransaction(_Held):
    inner: SharedTransaction

    def __init__(self, inner: SharedTransaction, workers: Workers, *, can_resume: bool) -> None:
        super().__init__(inner, workers)
        self.can_resume = can_resume
        self.is_released = False
        self.sinks: dict[int, _HeldSink] = {}

    async def settled(self) -> None:
        """Wait until nothing is being written."""
        writing = [asyncio.wrap_future(sink.writing) for sink in self.sinks.values() if sink.writing is not None]
        await asyncio.gather(*writing, return_exceptions=True)

    async def end(self) -> None:
        await self.settled()
        if not self.is_released:
            await (self.inner.suspend() if self.can_resume else self.inner.abort())


class _HeldSink(_Held):
    """A file, whose bytes are written while the next ones come."""

    inner: FileSink

    def __init__(self, inner: FileSink, workers: Workers) -> None:
        super().__init__(inner, workers)
        self.writing: Future[None] | None = None
        self.free: list[mmap.mmap] = []


class _Service:
    """The requests of one connection, one after the other. For its thread."""

    def __init__(self, server: DiskServer, wire: Connection) -> None:
        self._server, self._wire = server, wire
        self._storage, self._workers = server.storage, server.workers
        self._opened: list[int] = []
        self._buffer: memoryview | None = None

    def run(self) -> None:
        """Answer requests until the client leaves; raise LinkBrokenError."""
        self._wire.keep_alive()
        self._wire.put(RESULT, None)
        while True:
            self._wire.wait()
            kind, (method, token, args) = self._wire.take()
            if kind != REQUEST or not isinstance(method, str):
                raise LinkBrokenError("the other side speaks another language")
            if method == "close":
                self._close(token)
                continue
            try:
                result = getattr(self, f"_on_{method}")(*((self._held(token),) if token else ()), *args)
            except LinkBrokenError:
                raise
            except Exception as exc:
                self._wire.put(ERROR, packed(exc))
            else:
                self._wire.put(RESULT, result)

    def end(self) -> None:
        """Close what this connection has opened."""
        for token in [*self._opened]:
            self._close(token)

    # --- objects that stand here --------------------------------------------------------------------------

    def _held(self, token: int) -> Any:
        try:
            return self._server.held[token]
        except KeyError:
            raise OSError("what was opened here has been closed, as the connection has ended") from None

    def _hold(self, held: _Held) -> int:
        token = next(self._server.tokens)
        self._server.held[token] = held
        if not isinstance(held, _HeldSink):  # that ends with its transaction
            self._opened.append(token)
        return token

    def _close(self, token: int) -> None:
        if token in self._opened:  # else it belongs to another connection
            self._opened.remove(token)
            held = self._server.held[token]
            try:
                self._server.run(held.end()).result()
            except (OSError, AiockptError) as exc:
                logger.warning("can't end what another host has left: %s", exc)
            for each in (token, *getattr(held, "sinks", ())):
                self._server.held.pop(each, None)

    # --- waiting ------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        return self._wait(self._workers.submit(function, *args))

    def _run(self, coroutine: Coroutine[Any, Any, T], given_up: Callable[[], object] = lambda: None) -> T:
        return self._wait(self._server.run(coroutine), given_up)

    def _wait(self, future: Future[T], given_up: Callable[[], object] = lambda: None) -> T:
        """Wait, and show the client that this one does; ``given_up``: called if the client has left."""
        while not wait_for([future], _BEAT_S).done:
            if self._wire.is_quiet:
                with contextlib.suppress(LinkBrokenError):
                    self._wire.send(BEAT, crc32(b"."), memoryview(b"."))
            else:
                given_up()
        return future.result()

    def _on_is_held(self, token: int) -> bool:
        return token in self._server.held

    # --- the storage --------------------------------------------------------------------------------------

    def _place(self, path: str) -> str:
        return self._server.place(path, below=False)

    def _place_below(self, path: str) -> str:
        return self._server.place(path, below=True)

    def _on_look(self, path: str, left: int) -> tuple[int, Any]:
        budget = LookBudget(left)
        listing = self._call(self._storage.look, self._place(path), budget)
        token = self._hold(_HeldListing(listing, budget, self._workers))
        entries = listing.files, listing.folders, listing.others
        return token, (listing.path, listing.is_file, *entries, listing.changed_s, listing.stamp)

    def _on_stamp(self, path: str) -> str | None:
        return self._call(self._storage.stamp, self._place(path))

    def _on_stamps(self, directory: str, count: int) -> dict[str, str] | None:
        found = self._call(self._storage.stamps, self._place(directory), count)
        return None if found is None else dict(found)

    def _on_set_aside(self, path: str, names: Sequence[str]) -> str:
        path = self._place_below(path)
        for name in names:
            self._place_below(self._storage.below(self._storage.split(path)[0], name))
        return self._call(self._storage.set_aside, path, names)

    def _on_owner_of(self, directory: str) -> object:
        return self._call(self._storage.owner_of, self._place(directory))

    def _on_is_finishing(self, directory: str) -> bool:
        return self._call(self._storage.is_finishing, self._place(directory))

    def _on_link(self, path: str) -> str | None:
        return self._call(self._storage.link, self._place(path))

    def _on_open(self, path: str) -> tuple[int, Any]:
        source = self._run(self._storage.open(self._place(path), workers=self._workers))
        return self._hold(_Held(source, self._workers)), (dict(source.files), source.gap_bytes)

    def _on_begin(self, path: str, ticket: str | None, overwrite: bool) -> tuple[int, Any]:
        path = self._place_below(path)
        return self._begun(self._storage.begin(path, overwrite=overwrite, workers=self._workers, ticket=ticket))

    def _on_join(self, path: str, ticket: str) -> tuple[int, Any]:
        return self._begun(self._storage.join(self._place_below(path), ticket, workers=self._workers))

    def _on_take_over(self, path: str, ticket: str, overwrite: bool, stamp: str | None) -> tuple[int, Any]:
        path = self._place_below(path)
        return self._begun(
            self._storage.take_over(path, ticket, overwrite=overwrite, workers=self._workers, stamp=stamp)
        )

    def _on_resume(self, path: str, save_id: str) -> tuple[int, Any]:
        resuming = self._storage.resume(self._place_below(path), save_id, workers=self._workers)
        return self._begun(resuming, can_resume=True)

    def _begun(self, beginning: Coroutine[Any, Any, Any], *, can_resume: bool = False) -> tuple[int, Any]:
        transaction = self._run(beginning)
        token = self._hold(_HeldTransaction(transaction, self._workers, can_resume=can_resume))
        return token, (transaction.ticket, transaction.stamp)

    def _on_delete(self, path: str) -> None:
        self._run(self._storage.delete(self._place_below(path), workers=self._workers))

    def _on_clean(self, directory: str, older_than_s: float | None) -> list[str]:
        cleaning = self._storage.clean(self._place(directory), older_than_s=older_than_s, workers=self._workers)
        return self._run(cleaning)

    # --- what is open -------------------------------------------------------------------------------------

    def _on_list_below(self, held: _HeldListing, left: int) -> tuple[Mapping[str, int], int]:
        held.budget.left = left
        self._call(held.inner.list_below)
        return held.inner.files, held.budget.left

    def _on_fetch(self, held: _HeldListing, name: str, offset: int, length: int) -> bytes:
        return self._call(held.inner.fetch, _inside(name), offset, length)

    def _on_read(self, held: _Held, name: str, runs: Sequence[tuple[int, int]]) -> None:
        source = held.inner
        assert isinstance(source, Source)
        for batch in _batches(runs):
            if self._buffer is None:
                self._buffer = memoryview(mmap.mmap(-1, _READ_BYTES))
            view = self._buffer[: sum(length for _, length in batch)]
            if len(batch) == 1:
                source.read(name, batch[0][0], view, self._wire.put_bytes)
            else:
                source.read_runs(name, batch, view)
                self._wire.put_bytes(view)

    # --- transactions -------------------------------------------------------------------------------------

    def _on_create(self, held: _HeldTransaction, name: str, nbytes: int | None) -> int:
        sink = self._run(held.inner.create(_inside(name, may_be_empty=True), nbytes))
        made = _HeldSink(sink, self._workers)
        token = self._hold(made)
        held.sinks[token] = made
        return token

    def _on_write(self, held: _HeldSink, nbytes: int) -> None:
        buffer = held.free.pop() if held.free else None
        if buffer is None or len(buffer) < nbytes:
            buffer = mmap.mmap(-1, max(nbytes, 1))
        view = memoryview(buffer)[:nbytes]
        self._wire.take_bytes(view)
        self._written(held)
        held.writing = self._server.run(held.inner.write(view, partial(held.free.append, buffer)))

    def _written(self, held: _HeldSink) -> None:
        """Wait for what was to be written before."""
        writing, held.writing = held.writing, None
        if writing is not None:
            self._wait(writing)

    def _on_finish(self, held: _HeldSink) -> None:
        self._written(held)
        self._run(held.inner.finish())
        held.free.clear()  # memory

    def _on_write_files(self, held: _HeldTransaction, files: Mapping[str, bytes]) -> None:
        self._run(held.inner.write_files({_inside(name): data for name, data in files.items()}))

    def _on_commit(self, held: _HeldTransaction, documents: Mapping[str, bytes]) -> None:
        committing = held.inner.commit({_inside(name): data for name, data in documents.items()})
        self._run(committing, held.inner.revoke)

    def _ending(self, held: _HeldTransaction, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def settle() -> None:
            await held.settled()
            await end()

        self._run(settle())

    def _on_abort(self, held: _HeldTransaction) -> None:
        self._ending(held, held.inner.abort)

    def _on_suspend(self, held: _HeldTransaction) -> None:
        self._ending(held, held.inner.suspend)

    def _on_discard_all(self, held: _HeldTransaction) -> None:
        self._ending(held, held.inner.discard_all)

    def _on_release(self, held: _HeldTransaction) -> None:
        self._ending(held, held.inner.release)
        held.is_released = True

    def _on_whole_files(self, held: _HeldTransaction) -> dict[str, int]:
        return dict(self._run(held.inner.whole_files()))

    def _on_sizes(self, held: _HeldTransaction) -> dict[str, int]:
        return dict(self._run(held.inner.sizes()))

    def _on_put_sidecar(self, held: _HeldTransaction, name: str, data: bytes) -> None:
        self._run(held.inner.put_sidecar(_inside(name), data))

    def _on_get_sidecar(self, held: _HeldTransaction, name: str) -> bytes | None:
        return self._run(held.inner.get_sidecar(_inside(name)))

    def _on_delete_sidecar(self, held: _HeldTransaction, name: str) -> None:
        self._run(held.inner.delete_sidecar(_inside(name)))

    def _on_status(self, held: _HeldTransaction) -> str:
        return self._run(held.inner.status())

    def _on_finalize(self, held: _HeldTransaction) -> None:
        self._run(held.inner.finalize())


def _inside(name: str, *, may_be_empty: bool = False) -> str:
    """Return the name of a file of a checkpoint; raise PermissionError if it leads out of it."""
    if ".." in name.split("/") or name.startswith("/") or not (name or may_be_empty):
        raise PermissionError(errno.EACCES, "it is no name of a file within a checkpoint", printable_key(name))
    return name


def _batches(runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of bytes in portions that fit into a buffer."""
    batch: list[tuple[int, int]] = []
    left = _READ_BYTES
    for offset, length in runs:
        while length:
            part = min(length, left)
            batch.append((offset, part))
            offset, length, left = offset + part, length - part, left - part
            if not left:
                yield batch
                batch, left = [], _READ_BYTES
    if batch:
        yield batch
