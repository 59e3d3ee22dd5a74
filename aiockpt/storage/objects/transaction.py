"""A checkpoint that is being written to an object store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from aiockpt.core.threads import outlast, run_each
from aiockpt.errors import (
    AiockptError,
    CheckpointExistsError,
    CommitError,
    CommitUncertainError,
    DeleteError,
    RunLockedError,
    WriteError,
)
from aiockpt.format.manifest.manifest import FileFacts, decode_head, facts_in
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.storage.base import NO_DOCUMENTS, Document, FileSink, LookBudget, SharedTransaction, Stamp, Status
from aiockpt.storage.faults import errors
from aiockpt.storage.local.temp_dir import new_ticket, read_ticket, this_process
from aiockpt.storage.objects import cleaning
from aiockpt.storage.objects.cleaning import token_name
from aiockpt.storage.objects.client import REFUSALS, ConditionError, NotSentError, ObjectSink
from aiockpt.storage.objects.commit import COMMIT_NAME, FILES, Claim, Commit, Tomb, encode_commit
from aiockpt.storage.objects.reading import ObjectListing
from aiockpt.storage.objects.records import is_taken

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.objects.records import ObjectRecords

_ATTEMPTS = 8  # of a commit
_PAUSE_S = 0.05
_MOST_PAUSE_S = 2.0

_One = TypeVar("_One")
_Other = TypeVar("_Other")

logger = logging.getLogger("aiockpt")


async def entered(
    task: str, entering: Awaitable[SharedTransaction], leave: Callable[[], Awaitable[None]]
) -> SharedTransaction:
    """Return a transaction; leave it if this is cancelled, since the caller does not get it."""
    try:
        with errors(WriteError, task):
            return await entering
    except BaseException:
        with contextlib.suppress(AiockptError):  # the first error counts
            await leave()
        raise


async def _both(one: Awaitable[_One], other: Awaitable[_Other]) -> tuple[_One, _Other]:
    """Return the results of both, which run at the same time and to their ends; raise the error of the first."""
    found = await outlast(asyncio.gather(one, other, return_exceptions=True))
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]  # no errors


def _pause(attempt: int) -> None:
    time.sleep(min(_MOST_PAUSE_S, _PAUSE_S * 2**attempt))


@dataclass(eq=False, repr=False)
class ObjectTransaction(SharedTransaction):
    """A checkpoint that this process has begun, taken over or joined."""

    _storage: ObjectRecords
    _path: str
    ticket: str = ""
    _workers: Workers = field(kw_only=True)
    _overwrite: bool = False
    _joins: bool = False
    stamp: Stamp | None = None
    _seen: Commit | None = None  # of the path, when it was begun
    _sinks: list[ObjectSink] = field(default_factory=list)
    _keys: set[str] = field(default_factory=set)  # of the files of this process
    _single: ObjectSink | None = None  # of a checkpoint that is one object
    _is_held: bool = False
    _would_hide: bool = False  # an object of this very name
    _over: bool = False
    _is_sent: bool = False  # the commit object
    _may_appear: bool = False  # it may have been sent before this took part

    def __post_init__(self) -> None:
        found = read_ticket(self.ticket)
        if found is None or found.suffix:
            raise WriteError(f"{self.ticket!r} is no ticket of an unfinished checkpoint")
        self._objects = self._storage.objects
        self._key = self._storage.key(self._path)
        self._token = f"{self._key}{token_name(self.ticket)}/"
        self._state, self._held = f"{self._token}state", f"{self._token}held/{new_ticket()}"
        self._publish_state = f"publish {secrets.token_hex(8)}".encode()

    async def begin(self) -> SharedTransaction:
        """Take the token while it is found out whether the path is free."""
        (self._seen, self._would_hide), _ = await _both(
            self._workers.run(self._storage.free_for, self._path, overwrite=self._overwrite, own=self._token),
            self._workers.run(self._open),
        )
        return self

    def _open(self) -> None:
        ticket = read_ticket(self.ticket)
        if ticket is not None and ticket.owner != this_process():  # the ticket says that another one takes part
            self._is_held = True
            self._objects.put(self._held, b"")
        self.stamp = self._objects.put_surely(self._state, f"open {secrets.token_hex(8)}".encode(), "")
        self._storage.check_conditions(self._state)

    def enter(self, stamp: Stamp | None = None) -> SharedTransaction:
        """Take part in what was begun; blocks. Raise WriteError if it is gone, unless it is taken over."""
        self.stamp = stamp
        found = self._objects.get(self._state)
        if found is None and self._joins:
            raise WriteError(f"{self._token}, which rank 0 has begun for {self._path}, is not there: it was removed")
        if found is not None and self._joins and not found[1].startswith(b"open"):
            raise WriteError(f"the save of {self._path} that has written {self._token} has ended")
        if found is not None:
            self.stamp, self._may_appear = stamp or found[0].stamp, found[1].startswith(b"publish")
            if found[1].startswith(b"open") and found[0].stamp != self.stamp:
                raise WriteError(f"{self._token} is that of another save by now, so it can't be taken over")
            self._is_held = True
            self._objects.put(self._held, b"")
        if not self._joins:
            self._seen = self._storage.record(self._path, deleted=True)
        return self

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        with errors(WriteError, f"write {self._path}"):
            return await self._workers.run(function, *args)

    def _file(self, name: str) -> str:
        if self._would_hide:
            raise CheckpointExistsError(f"{self._path} is one object; delete it before, or save under another name")
        self._keys.add(key := f"{self._token}{FILES}{name}")
        return key

    async def create(self, name: str, nbytes: int | None) -> FileSink:
        if not name:
            return await self._create_single(nbytes)
        self._sinks.append(self._objects.sink(self._file(name), nbytes, self._workers))
        return self._sinks[-1]

    async def _create_single(self, nbytes: int | None) -> FileSink:
        """Begin the object of this very name; it appears in `commit`."""
        if self._joins:
            raise WriteError(f"{self._path} is one object, which one process writes; save to a directory")
        if self._seen is not None and self._seen.token:
            raise CheckpointExistsError(f"{self._path} has a checkpoint of several files; delete it before")
        try:
            if await self._run(self._storage.object_of, self._path) and not self._overwrite:
                raise is_taken(self._path)
        except DeleteError as exc:
            raise CheckpointExistsError(f"{exc}; save under another name") from None
        self._single = self._objects.sink(self._key[:-1], nbytes, self._workers, held=True)
        self._sinks.append(self._single)
        return self._single

    async def write_files(self, files: Mapping[str, Document]) -> None:
        for name, data in files.items():
            if not name:
                await super().write_files({name: data})
                continue
            await self._run(self._objects.put, self._file(name), data)

    async def adopt(self, path: str, files: Mapping[str, tuple[str, FileFacts]]) -> Collection[str]:
        """Copy objects of another checkpoint within the store, which never change, by the facts in its manifest."""
        if not self._objects.copies:
            return ()

        def look() -> Mapping[str, str]:
            its = self._storage.resolve(path)
            with ObjectListing(self._storage, its, LookBudget()) as listing:
                manifest = listing.fetch(MANIFEST_NAME, 0, listing.files.get(MANIFEST_NAME, 0))
                known = facts_in(decode_head(manifest) or {}) or {}
                return {name: listing.keys[name][0] for name, (_, facts) in files.items() if known.get(name) == facts}

        adopted = set[str]()

        async def take(name: str) -> None:
            new, facts = files[name]
            if await self._run(self._take, keys[name], self._file(new), facts.nbytes):
                adopted.add(name)

        try:
            keys = await self._workers.run(look)
        except (AiockptError, OSError, KeyError) as exc:
            logger.info("%s can't be shared with %s, which is written anew: %s", path, self._path, exc)
            return ()
        await run_each(take, list(keys), self._workers.count)
        return adopted

    def _take(self, key: str, own: str, nbytes: int) -> bool:
        """Copy an object; return whether it is there as a whole."""
        try:
            self._objects.copy(key, own)
        except OSError as exc:  # it was removed; the store can't copy it, as S3 not more than 5 GB at once
            logger.info("%s may not have been copied within the store: %s", key, exc)
        try:
            copied = self._objects.facts(own)
            if copied is not None and copied.size != nbytes:
                self._objects.delete([own])
        except OSError as exc:
            logger.info("it is not known whether %s was copied, so it is written anew: %s", key, exc)
            return False
        return copied is not None and copied.size == nbytes

    async def sizes(self) -> Mapping[str, int]:
        found = await self._run(self._objects.below, f"{self._token}{FILES}")
        return {name: facts.size for name, facts in found.items()}

    # --- the end ------------------------------------------------------------------------------------------

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        if self._single is not None:
            with errors(CommitError, f"publish {self._path}"):
                await outlast(self._publish_single(self._single))
            await self.release()
        elif not self._joins:
            # The files are listed meanwhile: a state that says "publish" is no obstacle to giving the save up.
            with errors(CommitError, f"publish {self._path}"):
                found, _ = await _both(self.sizes(), self._workers.run(self._to_publish))
            sizes = {name: size for name, size in found.items() if name not in documents}
            if not sizes and not documents:  # one object, whose parts have gone with the process that sent them
                raise CommitError(f"nothing was written for {self._path}; save again")
            with errors(CommitError, f"publish {self._path}"):
                await self._workers.run(self._publish, sizes, documents)
            await self.release()
        else:
            await self.write_files(documents)
            if await self.status() == "gone":  # else what this process has written since then would stay
                raise CommitError(f"{self._path} was given up by another process, which has removed {self._token}")
        self._over = True

    def _to_publish(self) -> None:
        """Replace the state; from then on nobody discards the files."""
        try:
            self._check_revoked()
            self._objects.put_surely(self._state, self._publish_state, str(self.stamp))
        except ConditionError as exc:
            raise CommitError(f"{self._path} was given up by another process; nothing was published") from exc

    async def _publish_single(self, sink: ObjectSink) -> None:
        """Make the object appear while nobody else may publish at the path."""
        key, run = self._key[:-1], self._workers.run
        await run(self._to_publish)
        tomb: Tomb = "put" if sink.is_conditional else "parts"
        replaces = self._overwrite or tomb == "put"
        claim = await run(self._storage.claim, self._path, tomb, self._check_revoked, replaces=replaces)
        is_settled = True
        try:
            before = await run(self._objects.facts, key)
            if before is not None and not self._overwrite:
                raise is_taken(self._path)
            only_if = before.stamp if before else ""
            try:
                self._check_revoked()
                await self._appear(sink, only_if, claim)
            except NotSentError as exc:
                raise CommitError(f"can't write {self._path}: {exc}") from exc
            except OSError as exc:
                await self._settle(key, sink, only_if, exc)
            with contextlib.suppress(OSError):  # it is cleaned
                await run(self._objects.delete, [self._state])
        except CommitUncertainError:
            is_settled, self._over = False, True  # nobody else may publish while it may still appear
            raise
        finally:
            try:
                if is_settled:
                    await run(self._storage.unpublish, claim.key, claim.stamp)
            except ConditionError:  # another process has it
                pass
            except OSError as exc:
                text = "%s can't be deleted: %s. Until then, or for %g s, other processes that save to %s wait"
                logger.warning(text, claim.key, exc, cleaning.IN_FLIGHT_S, self._path)

    async def _appear(self, sink: ObjectSink, only_if: Stamp, claim: Claim) -> None:
        """Send the last request. Meanwhile renew the claim; if that can't be done in time, call the request off."""
        appearing, renewed = asyncio.ensure_future(sink.appear(only_if)), time.monotonic()
        while not (await asyncio.wait([appearing], timeout=cleaning.RENEW_S))[0]:
            begun, problem = time.monotonic(), None
            try:
                await self._workers.run(self._storage.renew, claim)
                renewed = begun
            except OSError as exc:
                problem = exc
            is_lost = isinstance(problem, ConditionError)  # to another process
            if is_lost or time.monotonic() - renewed > cleaning.FENCE_S:
                await sink.stop()
                await asyncio.wait([appearing])
                appearing.cancelled() or appearing.exception()
                raise OSError(f"{claim.key} could not be renewed: {problem}") from problem
        await appearing

    async def _settle(self, key: str, sink: ObjectSink, before: Stamp, problem: OSError) -> None:
        """Find out whether an object has appeared in spite of an error: return if it has."""
        try:
            after = await self._workers.run(self._objects.facts, key)
        except OSError:
            after = None
        stamp = after.stamp if after else ""
        if isinstance(problem, ConditionError) and (after is None or stamp == before or after.size != sink.nbytes):
            raise is_taken(self._path) from problem
        if after is None or stamp == before:
            text = f"it is not known whether {self._path} was published: {problem}"
            raise CommitUncertainError(text) from problem
        if after.size != sink.nbytes:
            raise is_taken(self._path) from problem

    def _publish(self, files: Mapping[str, int], documents: Mapping[str, Document]) -> None:
        problem: OSError = ConditionError(f"{self._path} was replaced again and again by other processes")
        before, attempt, is_late, waiting = self._seen, 0, False, cleaning.Waiting(self._path)
        while attempt < _ATTEMPTS:
            if attempt:
                try:
                    before = self._storage.record(self._path, deleted=True)
                except OSError as exc:
                    problem, attempt = exc, attempt + 1
                    _pause(attempt)
                    continue
                if before is not None and before.token == self._token:
                    return self._retire(before.replaces)
                if isinstance(problem, PermissionError) and not is_late:  # nor will it ever appear
                    self._is_sent = False
                    raise problem
            self._check_revoked()
            if before is not None and before.token and not self._overwrite:
                self._is_sent = False  # or it was refused
                self._over = is_late  # it may come when nothing is there any more: it must find its files
                raise is_taken(self._path)
            if self._storage.is_going(before):  # it is deleted just now
                waiting.note()
                time.sleep(_PAUSE_S)
                attempt = attempt or 1
                continue
            replaces, stamp = (before.token, before.stamp) if before else ("", "")
            data = encode_commit(self._token, str(self.stamp), files, documents, replaces, self._key)
            self._is_sent = True
            try:
                self._objects.put(self._key + COMMIT_NAME, data, stamp)
                return self._retire(replaces)
            except ConditionError:  # another one was faster; or this one, and the answer was lost
                pass
            except OSError as exc:
                problem, is_late = exc, is_late or not isinstance(exc, REFUSALS)
                _pause(attempt)
            attempt += 1
        raise self._not_published(problem)

    def _not_published(self, problem: OSError) -> Exception:
        """Return why it was not published, or may have been."""
        if not self._is_sent:
            return problem
        self._over = True  # it may be the only good checkpoint
        text = f"it is not known whether {self._path} was published, so {self._token} stays: {problem}"
        error = CommitUncertainError(text)
        error.__cause__ = problem
        return error

    def _check_revoked(self) -> None:
        self._refuse_if_revoked(self._path)
        try:
            self._storage.check_lease(self._path)
        except RunLockedError as exc:
            raise CommitError(f"{self._path} was not published: {exc}") from exc

    def _retire(self, token: str) -> None:
        try:
            self._storage.retire(token)
        except OSError as exc:  # the checkpoint is published
            logger.warning("what %s has replaced can't be removed: %s", self._path, exc)

    async def abort(self) -> None:
        await asyncio.gather(*(sink.stop() for sink in self._sinks))
        over, self._over = self._over, True
        if not over and self._joins:  # the owner, which can't publish without them, removes those of all
            await self._run(self._objects.hasty.delete, self._keys)
        elif not over and self.stamp is not None:
            await self._run(self._discard)
        elif not over:  # its state may have been written all the same
            self._storage.give_up(self._token)
        await self.release()

    async def whole_files(self) -> Mapping[str, int]:
        return await self.sizes()  # an object appears when it is whole

    async def suspend(self) -> None:
        for sink in self._sinks:
            await sink.stop()
        await self.release()

    async def discard_all(self) -> None:
        await self.abort()
        await self._run(self._discard)

    def _discard(self) -> None:
        """Remove everything, unless another process is publishing it, or this one may have.

        Closing waits for this, so it soon gives up if the store is down; the next save, or `clean`, does the rest.
        """
        if self._may_appear:  # a request without an answer may arrive yet, and publish the files
            self._storage.give_up(self._token)
            return
        objects, discard = self._objects.hasty, f"discard {secrets.token_hex(8)}".encode()
        try:
            objects.put_surely(self._state, discard, str(self.stamp))
        except ConditionError as exc:
            _, state = objects.get(self._state) or (None, b"")
            if state.startswith(b"open"):  # another save has begun by this name
                return
            if state.startswith(b"publish") and (self._is_sent or state != self._publish_state):
                if self._joins or self._is_published():
                    return
                raise WriteError(f"{self._path} is just being published, so {self._token} stays") from exc
        except OSError:
            self._storage.give_up(self._token)
            raise
        objects.remove(self._token)

    def _is_published(self) -> bool:
        now = self._storage.record(self._path)
        return now is not None and (now.token, now.begun) == (self._token, self.stamp)

    async def status(self) -> Status:
        if await self._run(self._is_published):
            return "published"
        facts, state = await self._run(self._objects.get, self._state) or (None, b"")
        is_open = facts is not None and facts.stamp == self.stamp
        return "open" if is_open or state.startswith(b"publish") else "gone"

    async def finalize(self) -> None:
        self._over = True
        now = await self._run(self._storage.record, self._path)
        if now is not None and now.token == self._token:
            await self._workers.run(self._retire, now.replaces)
            await self._run(self._objects.remove, f"{self._token}held/")  # those of dead processes, too
        await self.release()

    async def release(self) -> None:
        held, self._is_held = self._is_held, False
        if held:
            with contextlib.suppress(OSError):  # it ends with the process at the latest
                await self._workers.run(self._objects.hasty.delete, [self._held])
