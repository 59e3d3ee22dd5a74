"""The records of an object store: commits at its paths, claims, tombstones, and the cleaning of what is left."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from aiockpt.errors import AiockptError, CheckpointExistsError, DeleteError, SaveError
from aiockpt.format.layouts import recognise_file
from aiockpt.format.names import METADATA_NAME
from aiockpt.storage.base import RunLease, SharedStorage, Stamp, Traits
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.objects import cleaning
from aiockpt.storage.objects.cleaning import Action, decide, held_s, liveness_of, owners_of, split_token, ticket_of
from aiockpt.storage.objects.client import REFUSALS, ConditionError, ObjectClient, ObjectFacts
from aiockpt.storage.objects.commit import (
    COMMIT_NAME,
    TAIL_BYTES,
    TOMB_BYTES,
    Claim,
    Commit,
    Tomb,
    decode_commit,
    decode_tomb,
    encode_tomb,
    facts_bytes,
    original,
)
from aiockpt.storage.objects.lease import LEASE_NAME, ObjectLease

_NO_NAME = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, and what is no text
_MOST_FREE = 10_000  # paths that are remembered
_given_up: set[str] = set()  # tokens of this process, as URLs
_left: dict[str, _LeftTomb] = {}  # by the URL of the commit object
_ATTEMPTS = 8  # of a claim
_PAUSE_S = 0.05
_WHOLE_BYTES = 64 << 20  # of a document that is read at once
_MOST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _LeftTomb:
    """A tombstone that this process could not delete. It hinders this process no longer than it must.

    A request to delete it that had no answer may still arrive, and then deletes whatever is the commit object by then:
    nothing may need it that long, but a claim to replace an object may.
    """

    names: tuple[str, ...]  # its stamp, or the ticket that it may have got
    sent_s: float  # when that request was sent, by `time.monotonic`

    @property
    def may_arrive(self) -> bool:
        return time.monotonic() < self.sent_s + cleaning.IN_FLIGHT_S


class Documents:
    """The documents in commit objects. Those that were read are kept with the commit."""

    def __init__(self, objects: ObjectClient) -> None:
        self._objects = objects
        self._read: dict[tuple[str, Stamp, str], bytes] = {}

    def bytes_of(self, commit: Commit, name: str, offset: int, length: int) -> bytes:
        """Return bytes of a document; raise OSError, FileNotFoundError if the checkpoint was replaced."""
        at, stored, nbytes = commit.documents[name]
        is_moved = name == METADATA_NAME  # its bytes are not those that are stored
        if not is_moved and (stored > _WHOLE_BYTES or (at + offset >= commit.size - len(commit.tail))):
            return self._fetch(commit, at + offset, min(length, nbytes - offset))
        key = commit.key, commit.stamp, name
        if key not in self._read:
            data = self._fetch(commit, at, stored)
            folder = commit.token.removeprefix(commit.key.removesuffix(COMMIT_NAME))
            self._read = {key: original(data, folder) if is_moved else data}  # of one document at a time
        return self._read[key][offset : offset + length]

    def _fetch(self, commit: Commit, begin: int, length: int) -> bytes:
        known = begin - (commit.size - len(commit.tail))
        if known >= 0:
            return commit.tail[known : known + length]
        data = bytearray(length)
        try:
            count = self._objects.read(commit.key, [(begin, length)], memoryview(data), None, commit.stamp)
        except ConditionError as exc:
            raise FileNotFoundError(f"{commit.key} was replaced") from exc
        return bytes(data[:count])


class ObjectRecords(SharedStorage):
    """The commits of all paths, and the requests that change them; the lower half of `ObjectStorage`.

    Args:
        root: of the URLs, such as ``s3://bucket``.
        objects: the requests.
        grace_s: how long a checkpoint that was replaced or deleted can still be read by those that have it open, in
            seconds. After that the next save to its path, or `clean`, removes it.
        conditions: "on": a store that ignores conditions is refused. "off": it is used without them, so only one
            process at a time may write to a path, or delete.
    """

    def __init__(self, root: str, objects: ObjectClient, *, grace_s: float = 600.0, conditions: str = "on") -> None:
        if conditions not in ("on", "off"):
            raise ValueError(f"conditions is {conditions!r}; it must be 'on' or 'off'")
        if not isinstance(grace_s, int | float) or not grace_s >= 0:
            raise ValueError(f"grace_s is {grace_s!r}; it must be a number of seconds, at least 0")
        self._root, self._grace_s, self._conditions = root, grace_s, conditions
        self.objects = objects
        self.documents = Documents(objects)
        self._is_checked = conditions == "off"
        self._free: dict[str, None] = {}  # paths above others that are no checkpoints
        self.last_folder = ""  # the path that was looked at last that has folders, and is no checkpoint
        self._found_dead: dict[Stamp, float] = {}  # tombstones, and when their owners were
        self._may_delete = False  # as far as is known
        self._leases: WeakValueDictionary[str, ObjectLease] = WeakValueDictionary()  # by prefix

    @property
    def traits(self) -> Traits:  # type: ignore[override] # of the store
        # If it does not answer, a thread can't be interrupted.
        return Traits(adopts=self.objects.copies, removal_s=2.0)

    def resolve(self, path: str) -> str:
        names = [name for name in path.removeprefix(self._root).split("/") if name not in ("", ".")]
        if not f"{path}/".startswith(f"{self._root}/") or ".." in names or any(map(ticket_of, names)):
            raise AiockptError(f"{path} is no path of {self._root}")
        if _NO_NAME.search(path):
            raise AiockptError(f"{path!r} has characters that no name of an object has")
        return "/".join([self._root, *names])

    # --- objects; these block, and raise OSError --------------------------------------------------------------

    def key(self, path: str) -> str:
        """Return the prefix of the keys below a canonical path."""
        return "" if path == self._root else f"{path[len(self._root) + 1 :]}/"

    def record(self, path: str, *, deleted: bool = False) -> Commit | None:
        """Return the commit of a path; None if there is none. ``deleted``: even of one that is being deleted."""
        key = self.key(path)
        found = self.objects.tail(key + COMMIT_NAME, TAIL_BYTES)
        if found is None:
            return None
        facts, tail = found
        given: dict[str, Any] = {"key": key + COMMIT_NAME, "stamp": facts.stamp, "modified": facts.modified}
        if facts.size == TOMB_BYTES and (tomb := decode_tomb(tail, given)) is not None:
            return tomb if deleted else None
        needed = facts_bytes(tail)
        if needed is None:
            return None
        if needed > len(tail):
            facts, tail = self.objects.tail(key + COMMIT_NAME, needed) or (facts, b"")
            if facts.stamp != given["stamp"]:
                return self.record(path, deleted=deleted)
        return decode_commit(tail, facts.size, key, given)

    def is_gone(self, key: str, name: str, facts: ObjectFacts) -> bool:
        """Return whether an object is the commit of a checkpoint that is being deleted."""
        if name != COMMIT_NAME or facts.size != TOMB_BYTES:
            return False
        found = self.objects.get(key + name)
        return found is None or decode_tomb(found[1], {}) is not None

    def is_going(self, commit: Commit | None, *, replaces: bool = False) -> bool:
        """Return whether a tombstone is there that keeps others from publishing; see `held_s`.

        ``replaces``: an object, by a claim.
        """
        if commit is None or commit.tomb is None:
            return False
        left = _left.get(f"{self._root}/{commit.key}")
        if left is not None and (commit.stamp in left.names or commit.ticket in left.names):
            return not replaces and left.may_arrive
        written_s, dead_s = held_s(commit.tomb, liveness_of([commit.ticket]))
        if dead_s < math.inf:
            now_s = time.monotonic()
            dead_s -= now_s - self._found_dead.setdefault(commit.stamp, now_s)
        prefix = commit.key.removesuffix(COMMIT_NAME)
        return dead_s > 0 and self.objects.now(prefix) - commit.modified < written_s

    def above(self, path: str) -> tuple[Commit, str] | None:
        """Return the commit of a path above this one, and where this one is in that checkpoint."""
        at = path
        while at != self._root and (at := self.split(at)[0]) != self._root:
            found = self.record(at)
            if found is not None:
                return found, path[len(at) + 1 :]
        return None

    def free_for(self, path: str, *, overwrite: bool, own: str) -> tuple[Commit | None, bool]:
        """Remove what is left at a path; return what a save replaces, or raise CheckpointExistsError if it may not.

        ``own`` is the token of the save, whose objects may be there already. Also return whether there is an object of
        this very name: that costs a request, so it is known only of the first paths beside each other.
        """
        key = self.key(path)
        if not key:
            raise SaveError(f"{path} is all of the storage: save to a name below it")
        found = {name: facts for name, facts in self.objects.below(key).items() if not (key + name).startswith(own)}
        self._clean(key, found)
        now = self.record(path, deleted=True) if COMMIT_NAME in found else None
        if now is None and COMMIT_NAME in found and self.objects.facts(key + COMMIT_NAME) is not None:
            raise SaveError(f"{path} holds a checkpoint that aiockpt has not written; save under another name")
        others = [name for name in found if name not in (COMMIT_NAME, LEASE_NAME) and not split_token(name)[0]]
        if others:
            raise CheckpointExistsError(
                f"{path} has other objects below it, such as {self._root}/{key}{others[0]}, which no save replaces: "
                "save under another name, or remove them"
            )
        if now is not None and now.token and not overwrite:
            raise is_taken(path)
        above = self.split(path)[0]
        if above in self._free:
            return now, False
        if (found_above := self.above(path)) is not None:
            checkpoint = path.removesuffix(f"/{found_above[1]}")
            raise CheckpointExistsError(f"{path} is within the checkpoint {checkpoint}: save under another name")
        if self.objects.facts(key[:-1]) is not None:
            return now, True
        if len(self._free) < _MOST_FREE:
            self._free[above] = None
        return now, False

    def check_conditions(self, key: str) -> None:
        """Find out whether the store honours conditions, by an object that exists; once."""
        if self._is_checked:
            return
        for only_if in ("", "0"):
            with contextlib.suppress(ConditionError):
                self.objects.put(key, b"", only_if)
                raise SaveError(
                    f"{self._root} ignores conditions of writes, so two processes could write one checkpoint. Use a "
                    "store that has conditional writes; or pass storage_options={'conditions': 'off'}, and see to it "
                    "that only one process at a time writes there"
                )
        self._is_checked = True

    def claim(self, path: str, tomb: Tomb, check: Callable[[], None], *, replaces: bool = False) -> Claim:
        """Take the right to write the object of a path, as its deletion would.

        Until that is deleted, or void by `held_s`, nobody else publishes there. ``check`` is called while another
        process has it, and raises to give up. ``replaces``: an object that is there may be replaced.
        """
        key, waiting = self.key(path) + COMMIT_NAME, cleaning.Waiting(path)
        for attempt in itertools.count():
            check()
            now = self.record(path, deleted=True)
            if now is not None and now.token:
                raise is_taken(path)
            if not self.is_going(now, replaces=replaces):
                try:
                    data = encode_tomb(tomb, new_ticket())
                    return Claim(key, tomb, self.objects.put_surely(key, data, "" if now is None else now.stamp))
                except ConditionError:
                    if now is None and attempt > _ATTEMPTS:  # an object that others have written
                        raise
            else:
                waiting.note()
            time.sleep(min(_MOST_PAUSE_S, _PAUSE_S * (1 + attempt)))
        raise AssertionError("unreachable")

    def renew(self, claim: Claim) -> None:
        """Write a claim once more; raise ConditionError if another process has it."""
        put = self.objects.hasty.put_surely
        try:
            claim.stamp = put(claim.key, encode_tomb(claim.tomb, new_ticket()), claim.stamp)
        except ConditionError:
            left = _left.get(f"{self._root}/{claim.key}")
            if left is None or not left.may_arrive:
                raise
            claim.stamp = put(claim.key, encode_tomb(claim.tomb, new_ticket()), "")  # the late request has arrived

    def object_of(self, path: str) -> Stamp:
        """Return the stamp of the object of this very name, "" if there is none; raise if it is no checkpoint."""
        key = self.key(path)[:-1]
        facts = self.objects.facts(key)
        if facts is None:
            return ""

        def fetch(_: str, offset: int, length: int) -> bytes:
            data = bytearray(length)
            count = self.objects.read(key, [(offset, length)], memoryview(data), None, facts.stamp)
            return bytes(data[:count])

        if facts.size and not recognise_file("", facts.size, fetch).is_checkpoint:  # a name is no evidence here
            raise DeleteError(f"{path} is an object, but neither one of torch.save nor of safetensors")
        return facts.stamp

    def _delete_object(self, path: str) -> bool:
        """Delete the object of this very name; return whether there was one."""
        if not (stamp := self.object_of(path)):
            return False
        self._check_deletion(self.key(path))
        claim = self.claim(path, "delete", lambda: None)
        self.objects.drop(self.key(path)[:-1], stamp)
        self.unpublish(claim.key, claim.stamp)
        return True

    def _check_deletion(self, prefix: str) -> None:
        """Find out whether objects may be deleted, before there is a tombstone that would have to stay; once."""
        if not self._may_delete:
            self.objects.delete([f"{prefix}none"])
            self._may_delete = True

    def _delete_commit(self, commit: Commit) -> None:
        """Delete a checkpoint, if it is still the same; raise ConditionError."""
        try:
            self.unpublish(commit.key, commit.stamp)
        finally:
            try:
                self.retire(commit.token)
            except OSError:
                self.give_up(commit.token)
                raise

    def give_up(self, token: str) -> None:
        """Note that this process has stopped writing below a token: it is cleaned, though this process lives."""
        _given_up.add(f"{self._root}/{token}")

    def retire(self, token: str) -> None:
        """Let the objects of a token go when ``grace_s`` is over; at once if it is 0."""
        if token:
            self.objects.put(f"{token}state", b"replaced")
            if not self._grace_s:
                self.objects.remove(token)

    def clean_up(self, path: str, older_than_s: float | None = None) -> list[str]:
        """Do as `clean`, below a path."""
        key = self.key(path)
        return self._clean(key, self.objects.below(key), older_than_s)

    def _clean(self, above: str, found: dict[str, ObjectFacts], older_than_s: float | None = None) -> list[str]:
        left = self._judge_unfinished(above, found, older_than_s)
        for name, facts in found.items():  # of deletions, or claims, whose processes have died
            is_tomb = self.split("/" + name)[1] == COMMIT_NAME and facts.size == TOMB_BYTES
            if is_tomb and not split_token(above + name)[0]:
                self._clean_tomb(f"{self._root}/{(above + name).removesuffix(COMMIT_NAME)[:-1]}")
        removed = []
        for token, stamp, word, action in left:
            # Only now: it can't be published any more.
            now = self.record(f"{self._root}/{_path_key(token)[:-1]}")
            if now is not None and now.replaces == token and word == "publish":  # its publisher could not do so
                self.retire(token)
            elif action != "keep" and (now is None or now.token != token):
                with contextlib.suppress(ConditionError):  # it lives after all, and is being published
                    if action == "discard":
                        self.objects.put(f"{token}state", f"discard {secrets.token_hex(8)}".encode(), stamp)
                    self.objects.remove(token)
                    removed.append(f"{self._root}/{token[:-1]}")
        return removed

    def _judge_unfinished(
        self, above: str, found: Mapping[str, ObjectFacts], older_than_s: float | None
    ) -> list[tuple[str, Stamp, str, Action]]:
        """Return the tokens below a key that are not the checkpoint there: with the stamp and word of the state."""
        tokens: defaultdict[str, dict[str, ObjectFacts]] = defaultdict(dict)
        for name, facts in found.items():
            token, rest = split_token(above + name)
            if token:
                tokens[token][rest] = facts
        left: list[tuple[str, Stamp, str, Action]] = []
        beside = [_path_key(token) for token in tokens]
        now_s: float | None = None
        for token, objects in tokens.items():
            commit = found.get(f"{_path_key(token)}{COMMIT_NAME}"[len(above) :])
            if beside.count(_path_key(token)) == 1 and commit is not None and commit.size != TOMB_BYTES:
                continue  # the checkpoint that is there has no other
            now_s = self.objects.now(token) if now_s is None else now_s
            facts, state = self.objects.get(f"{token}state") or (ObjectFacts(0, "", now_s), b"")
            is_old = (
                older_than_s is not None and now_s - max(each.modified for each in objects.values()) >= older_than_s
            )
            word = state.decode().partition(" ")[0]
            owners = "dead" if f"{self._root}/{token}" in _given_up else owners_of(token, objects)
            action = decide(
                word,
                now_s - facts.modified,
                owners,
                is_old=is_old,
                grace_s=self._grace_s,
                in_flight_s=cleaning.IN_FLIGHT_S,
            )
            left.append((token, facts.stamp, word, action))
        return left

    def _clean_tomb(self, path: str) -> None:
        now = self.record(path, deleted=True)
        if now is not None and now.tomb is not None and not self.is_going(now):
            with contextlib.suppress(ConditionError):
                self.unpublish(now.key, now.stamp)

    def unpublish(self, key: str, stamp: Stamp) -> None:
        """Remove a commit object or a tombstone, if it has this stamp; raise ConditionError.

        Not every store has conditional deletion. So it is replaced by a tombstone, and from then on there is no
        checkpoint, and nobody publishes one until the tombstone is gone, or void by `held_s`.
        """
        url, ticket = f"{self._root}/{key}", new_ticket()
        left, tomb = _left.get(url), ""
        sent_s = -math.inf if left is None else left.sent_s
        try:
            tomb = self.objects.put_surely(key, encode_tomb("delete", ticket), stamp)
            if left is not None and left.may_arrive:  # what comes there next might be deleted by that request
                _left[url] = _LeftTomb((stamp, ticket), left.sent_s)
                return
            sent_s = time.monotonic()
            self.objects.drop(key, tomb)
        except OSError as exc:
            if isinstance(exc, ConditionError) and not tomb:  # another process has put something else there
                raise
            _left[url] = _LeftTomb((stamp, ticket), -math.inf if isinstance(exc, REFUSALS) else sent_s)
            raise
        _left.pop(url, None)

    # --- the lease of a run -----------------------------------------------------------------------------------

    def lease(self, directory: str) -> RunLease:
        found = self._leases[self.key(directory)] = ObjectLease(self.objects, self.key(directory), directory)
        return found

    def check_lease(self, path: str) -> None:
        """Raise RunLockedError if this process had the lease of a run that a path is in, and has lost it."""
        for prefix, lease in list(self._leases.items()):
            if self.key(path).startswith(prefix):
                lease.check_lately()


def is_taken(path: str) -> CheckpointExistsError:
    """Return the error of a path that may not be overwritten."""
    return CheckpointExistsError(f"{path} exists already; save under another name, or pass overwrite=True")


def _path_key(token: str) -> str:
    """Return the prefix of the keys of the path that a token belongs to."""
    return token[: token[:-1].rfind("/") + 1]
