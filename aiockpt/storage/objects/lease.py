"""The right to write to a run, as an object that names its owner and is written again and again.

A store has no locks, and the clocks of hosts differ. So the owner renews the object; another one may take it when its
process is known to be dead, or when it is old by the clock of the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict

from aiockpt.core.threads import start_thread, uninterrupted
from aiockpt.errors import NoThreadError, RunLockedError
from aiockpt.storage.base import LeaseFacts, RunLease, Stamp
from aiockpt.storage.local.lease import LockFacts, decode_facts
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.objects.cleaning import liveness_of
from aiockpt.storage.objects.client import ConditionError, ObjectClient

LEASE_NAME = ".aiockpt.lease"
RENEW_S = 30.0
STALE_S = 120.0
_RELEASE_S = 2.0  # for the store to answer when a manager is closed; after that a thread goes on waiting for it

logger = logging.getLogger("aiockpt")
_released: set[str] = set()  # tickets of this process that the store may still show


class ObjectLease(RunLease):
    """A lease that this process has taken. A thread renews it."""

    def __init__(self, objects: ObjectClient, prefix: str, directory: str) -> None:
        self._objects, self._prefix, self._directory = objects, prefix, directory
        self._key = prefix + LEASE_NAME
        self._pid, self._lock, self._ended = os.getpid(), threading.Lock(), threading.Event()
        self._facts = LockFacts(socket.gethostname(), self._pid, time.time(), new_ticket())
        found = _read(objects, self._key)
        if found is not None and not _is_free(objects, prefix, found):
            raise _locked(directory, found[0])
        try:
            self._stamp = self._put(objects, "" if found is None else found[1])
        except ConditionError as exc:  # another one was faster
            raise _locked(directory, None) from exc
        except OSError:  # it may have been taken all the same
            _released.add(self._facts.ticket)
            raise
        self._renewed_s = time.monotonic()
        # A daemon: a process that is ending anyway does not wait for it.
        renewing = weakref.ref(self), self._ended
        self._thread = threading.Thread(target=_renew, args=renewing, name="aiockpt-lease", daemon=True)
        uninterrupted(lambda: start_thread(self._thread))

    def _put(self, objects: ObjectClient, before: Stamp, ticket: str | None = None) -> Stamp:
        # The beat differs each time.
        facts = asdict(self._facts) | {"beat": secrets.token_hex(8)} | ({} if ticket is None else {"ticket": ticket})
        return objects.put_surely(self._key, json.dumps(facts).encode(), before)

    def _replace(self, ticket: str | None = None) -> None:
        begun = time.monotonic()
        try:
            self._stamp = self._put(self._objects.hasty, self._stamp, ticket)
        except ConditionError:
            found = _read(self._objects.hasty, self._key)
            if found is None or found[0].ticket != self._facts.ticket:
                raise
            # An earlier one has arrived, of which nothing could be found out.
            self._stamp = self._put(self._objects.hasty, found[1], ticket)
        self._renewed_s = begun

    def renew(self) -> None:
        """Show that this process lives."""
        with self._lock:
            try:
                if not self._ended.is_set():
                    self._replace()
            except ConditionError:
                self._ended.set()
                logger.exception("the lease of %s was taken by another process", self._directory)
            except OSError as exc:
                logger.warning("the lease of %s can't be renewed: %s", self._directory, exc)

    def check_lately(self) -> None:
        """Do as `check`, by a request only if the lease was not renewed for long: the process may have been stopped."""
        if self._pid != os.getpid():  # it was released
            return
        if time.monotonic() - self._renewed_s > STALE_S / 2:
            self.renew()
        if self._ended.is_set():
            raise RunLockedError(f"the lease of {self._directory} was taken by another process; make a new manager")

    def check(self) -> None:
        with self._lock:
            try:
                found = _read(self._objects, self._key)
            except OSError as exc:  # the save may succeed all the same
                logger.warning("the lease of %s can't be looked at: %s", self._directory, exc)
                return
            if found is not None and found[0].ticket == self._facts.ticket and not self._ended.is_set():
                return
        who = "removed" if found is None else f"taken by {found[0]}"
        raise RunLockedError(f"the lease of {self._directory} was {who}; nothing was saved. Make a new manager")

    def release(self) -> None:
        pid, self._pid = self._pid, 0
        if pid != os.getpid():
            return
        self._ended.set()
        _released.add(self._facts.ticket)
        freeing = threading.Thread(target=self._free, name="aiockpt-lease", daemon=True)
        try:
            uninterrupted(lambda: start_thread(freeing))
        except NoThreadError:
            if not sys.is_finalizing():
                self._free()
        else:
            freeing.join(_RELEASE_S)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(0.0 if freeing.is_alive() else None)

    def _free(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # it stays, and others wait for the end of this process
            self._replace(ticket="")

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.release()


def _renew(lease: weakref.ref[ObjectLease], ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        found = lease()
        if found is None:
            return
        found.renew()
        del found


def owner_of(objects: ObjectClient, prefix: str) -> LeaseFacts | None:
    """Return the owner of a run; None if it is free."""
    found = _read(objects, prefix + LEASE_NAME)
    return None if found is None or _is_free(objects, prefix, found) else found[0]


def _read(objects: ObjectClient, key: str) -> tuple[LockFacts, Stamp, float] | None:
    found = objects.get(key)
    facts = None if found is None else decode_facts(found[1])
    return None if found is None or facts is None else (facts, found[0].stamp, found[0].modified)


def _is_free(objects: ObjectClient, prefix: str, found: tuple[LockFacts, Stamp, float]) -> bool:
    facts, _, modified = found
    if not facts.ticket or facts.ticket in _released:
        return True
    state = liveness_of([facts.ticket])
    return state == "dead" or (state == "unknown" and objects.now(prefix) - modified > STALE_S)


def _locked(directory: str, owner: LockFacts | None) -> RunLockedError:
    remedy = "end that" if owner is None else owner.remedy
    error = f"the run {directory} is being written by {owner or 'another process'}: {remedy}, or pass read_only=True"
    return RunLockedError(error) if owner is None else RunLockedError(error, owner.host, owner.pid, owner.since)
