"""Checkpoints in an object store, whatever its requests are; see `aiockpt.storage.objects`."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, DeleteError, WriteError
from aiockpt.format.names import METADATA_NAME
from aiockpt.storage.base import LeaseFacts, LookBudget, SharedTransaction, Source, Stamp
from aiockpt.storage.faults import errors
from aiockpt.storage.local.temp_dir import copy_ticket, new_ticket
from aiockpt.storage.objects.cleaning import holders, liveness_of, split_token, ticket_of, token_name
from aiockpt.storage.objects.client import ConditionError, ObjectClient, ObjectFacts
from aiockpt.storage.objects.commit import COMMIT_NAME, FILES, Commit, original, with_token
from aiockpt.storage.objects.lease import LEASE_NAME, owner_of
from aiockpt.storage.objects.records import ObjectRecords
from aiockpt.storage.objects.transaction import ObjectTransaction, entered
from aiockpt.storage.remote import RemoteListing, open_remote, put_into

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers
    from aiockpt.storage.base import Seen

# --- reading ------------------------------------------------------------------------------------------


_WHOLE_BYTES = 64 << 20  # of a document that is read at once


class ObjectListing(RemoteListing):
    """A checkpoint, or what is below a path."""

    def __init__(self, storage: ObjectRecords, documents: Documents, path: str, budget: LookBudget) -> None:
        super().__init__(path, budget)
        self.storage, self._kept = storage, documents
        self.keys: dict[str, tuple[str, Stamp | None]] = {}  # of the files; and a stamp, if an object may be replaced
        self.documents: dict[str, tuple[Commit, str]] = {}  # the other files, and their names there
        # A run is looked at again and again. It was no checkpoint the last time, and the list says if it is one now.
        is_folder = path == storage.last_folder and self._list_objects(storage.key(path))
        commit, inside = None if is_folder else storage.record(path), ""
        is_found = is_folder or commit is not None or ("." in storage.split(path)[1] and self._find_object())
        if not is_found and not self._list_objects(storage.key(path)):
            commit, inside = storage.above(path) or (None, "")
            if commit is None and not self._find_object():
                raise FileNotFoundError(f"nothing is at {path}")
        if commit is None and COMMIT_NAME in self.files:  # of another's checkpoint; or it has appeared since
            commit = storage.record(path)
            if commit is not None:
                self.files.clear()
        if commit is not None:
            self._add(commit, inside)
            if not self.files:
                raise FileNotFoundError(f"nothing is at {path}")
            self.folders = list(dict.fromkeys(name.partition("/")[0] for name in self.files if "/" in name))
            self.stamp, self.changed_s = commit.stamp, commit.modified
        elif self.folders:
            storage.last_folder = path

    def _list_objects(self, key: str, above: str = "") -> bool:
        """Add what is directly below a key; return whether there is anything."""
        objects, prefixes = self.storage.objects.tops(key)
        folders = [name for name in prefixes if not ticket_of(name)]
        has_lease = objects.pop(LEASE_NAME, None) is not None
        files = {name: facts for name, facts in objects.items() if name and not self.storage.is_gone(key, name, facts)}
        for name, facts in files.items():
            self._put_object(above + name, key + name, facts)
        if not above:
            self.folders = folders
            self.stamp = repr(sorted((name, facts.stamp) for name, facts in files.items()))
        return bool(files or folders or has_lease)

    def _find_object(self) -> bool:
        """Add the object of this very name."""
        name = self.storage.split(self.path)[1]
        found = self.storage.objects.tail(key := self.storage.key(self.path)[:-1], 0) if name else None
        if found is not None:
            self.is_file = True
            self.stamp = found[0].stamp
            self._put_object(name, key, found[0])
        return self.is_file

    def _put_object(self, shown: str, key: str, facts: ObjectFacts) -> None:
        self.files[shown], self.keys[shown] = facts.size, (key, facts.stamp)
        self.changed_s = max(self.changed_s, facts.modified)

    def _add(self, commit: Commit, inside: str = "", above: str = "") -> None:
        """Add the files below a name in a checkpoint, or the file of that name."""
        for name, size in commit.sizes.items():
            if name == inside:
                self.is_file = True
                shown = self.storage.split(self.path)[1]
            elif not inside or name.startswith(f"{inside}/"):
                shown = above + name[len(inside) :].removeprefix("/")
            else:
                continue
            self.files[shown] = size
            if name in commit.documents:
                self.documents[shown] = commit, name
            else:
                self.keys[shown] = f"{commit.token}{FILES}{name}", None

    def list_below(self) -> None:
        if not self.documents:  # of a checkpoint everything is known
            super().list_below()

    def list_folder(self, name: str) -> None:
        path = self.storage.below(self.path, name)
        if (commit := self.storage.record(path)) is not None:
            self._add(commit, above=f"{name}/")
        else:
            self._list_objects(self.storage.key(path), f"{name}/")

    def is_replaced(self, exc: OSError) -> bool:
        if isinstance(exc, FileNotFoundError):
            return self.storage.stamp(self.path) != self.stamp
        return isinstance(exc, ConditionError)

    def read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> int:
        if name not in self.documents:
            key, stamp = self.keys.get(name, (name, None))
            return self.storage.objects.read(key, runs, view, seen, stamp)
        commit, own = self.documents[name]
        at = 0
        for offset, length in runs:
            at += put_into(view[at:], self._kept.bytes_of(commit, own, offset, length), seen)
        return at


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


# --- the storage --------------------------------------------------------------------------------------


class ObjectStorage(ObjectRecords):
    """Keeps checkpoints in an object store. Its paths are URLs.

    Args:
        root: of the URLs, such as ``s3://bucket``.
        objects: the requests.
        grace_s: how long a checkpoint that was replaced or deleted can still be read by those that have it open, in
            seconds. After that the next save to its path, or `clean`, removes it.
        conditions: "on": a store that ignores conditions is refused. "off": it is used without them, so only one
            process at a time may write to a path, or delete.
    """

    def __init__(self, root: str, objects: ObjectClient, *, grace_s: float = 600.0, conditions: str = "on") -> None:
        super().__init__(root, objects, grace_s=grace_s, conditions=conditions)
        self._documents = Documents(objects)

    # --- checkpoints ----------------------------------------------------------------------------------------

    def new_ticket(self, path: str) -> str:
        return new_ticket()

    async def begin(
        self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None
    ) -> SharedTransaction:
        path = self.resolve(path)
        begun = ObjectTransaction(self, path, ticket or new_ticket(), _workers=workers, _overwrite=overwrite)
        return await entered(f"begin to write {path}", begun.begin(), begun.abort)

    async def join(self, path: str, ticket: str, *, workers: Workers) -> SharedTransaction:
        joined = ObjectTransaction(self, self.resolve(path), ticket, _workers=workers, _joins=True)
        return await entered(f"join the save of {path}", workers.run(joined.enter), joined.release)

    async def take_over(
        self, path: str, ticket: str, *, overwrite: bool, workers: Workers, stamp: Stamp | None
    ) -> SharedTransaction:
        taken = ObjectTransaction(self, self.resolve(path), ticket, _workers=workers, _overwrite=overwrite)
        return await entered(f"take over the save of {path}", workers.run(taken.enter, stamp), taken.release)

    async def resume(self, path: str, save_id: str, *, workers: Workers) -> SharedTransaction:
        path = self.resolve(path)

        def find() -> tuple[str, bool]:
            """Return the ticket of a copy that is being written, or a new one, and whether it is there already."""
            now = self.record(path)
            for number in itertools.count():
                ticket = copy_ticket(save_id, number)
                token = f"{self.key(path)}{token_name(ticket)}/"
                found = self.objects.get(f"{token}state")
                # One that was replaced, or given up, may be removed at any time from now on.
                is_open = found is None or found[1].startswith((b"open", b"publish"))
                if is_open and (now is None or now.token != token):
                    return ticket, found is not None
            raise AssertionError("unreachable")

        with errors(WriteError, f"look for what was written of {path}"):
            ticket, is_there = await workers.run(find)
        if not is_there:
            return await self.begin(path, overwrite=True, workers=workers, ticket=ticket)
        return await self.take_over(path, ticket, overwrite=True, workers=workers, stamp=None)

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await open_remote(
            lambda path: ObjectListing(self, self._documents, path, LookBudget()), self.resolve(path), workers
        )

    async def delete(self, path: str, *, workers: Workers) -> None:
        path = self.resolve(path)

        def delete() -> None:
            self.check_lease(path)
            while (now := self.record(path)) is not None:
                self._check_deletion(now.token)
                with contextlib.suppress(ConditionError):  # it was replaced just now
                    self._delete_commit(now)
                    return
            if self._delete_object(path):
                return
            with self.look(path) as listing:
                names = ", ".join([*listing.folders, *listing.files])
            raise DeleteError(f"{path} is no checkpoint of aiockpt, but has {names} below it; nothing was deleted")

        with errors(DeleteError, f"delete {path}"):
            try:
                await workers.run(delete)
            except FileNotFoundError as exc:
                raise CheckpointNotFoundError(f"there is no checkpoint at {path} to delete") from exc

    async def clean(self, directory: str, *, older_than_s: float | None = None, workers: Workers) -> list[str]:
        with errors(DeleteError, f"look for what killed processes have left in {directory}"):
            return await workers.run(self.clean_up, self.resolve(directory), older_than_s)

    # --- directories ------------------------------------------------------------------------------------------

    def look(self, path: str, budget: LookBudget | None = None) -> ObjectListing:
        return ObjectListing(self, self._documents, path, budget or LookBudget())

    def stamps(self, directory: str, count: int) -> Mapping[str, Stamp]:
        # A list takes a request for 1,000 keys, a look one for a checkpoint: no more than a tenth of those.
        found = self.objects.below(self.key(directory), 100 * count)
        at = {name.removesuffix(f"/{COMMIT_NAME}"): facts.stamp for name, facts in found.items()}
        return {name: stamp for name, stamp in at.items() if "/" not in name and f"{name}/{COMMIT_NAME}" in found}

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        """Copy the commit object, which goes on naming the objects below the old path, and delete the old one."""
        now = self.record(path)
        found = None if now is None else self.objects.get(now.key)
        if now is None or found is None:
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        data = with_token(found[1], now.token)
        for aside in (self.below(self.split(path)[0], name) for name in names):
            with contextlib.suppress(ConditionError):
                self.objects.put_surely(self.key(aside) + COMMIT_NAME, data, "")
                break
        else:
            raise FileExistsError(f"each name for {path} is taken")
        self.objects.put(f"{now.token}state", b"aside")
        self.unpublish(now.key, found[0].stamp)
        return aside

    def owner_of(self, directory: str) -> LeaseFacts | None:
        return owner_of(self.objects, self.key(directory))

    def is_finishing(self, directory: str) -> bool:
        key, tokens = self.key(directory), defaultdict[str, list[str]](list)
        for name in self.objects.below(key):
            token, rest = split_token(key + name)
            tokens[token].append(rest)
        return any(
            liveness_of([ticket_of(token.split("/")[-2]) or ""]) == "dead" and liveness_of(holders(each)) == "alive"
            for token, each in tokens.items()
            if token
        )
