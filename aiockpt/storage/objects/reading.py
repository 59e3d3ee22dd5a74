"""What is at a path of an object store: a checkpoint, objects that others have written, or what is below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiockpt.storage.objects.cleaning import ticket_of
from aiockpt.storage.objects.client import ConditionError, ObjectFacts
from aiockpt.storage.objects.commit import COMMIT_NAME, FILES, Commit
from aiockpt.storage.objects.lease import LEASE_NAME
from aiockpt.storage.remote import RemoteListing, put_into

if TYPE_CHECKING:
    from aiockpt.storage.base import LookBudget, Seen, Stamp
    from aiockpt.storage.objects.records import ObjectRecords


class ObjectListing(RemoteListing):
    """A checkpoint, or what is below a path."""

    def __init__(self, storage: ObjectRecords, path: str, budget: LookBudget) -> None:
        super().__init__(path, budget)
        self.storage = storage
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
            at += put_into(view[at:], self.storage.documents.bytes_of(commit, own, offset, length), seen)
        return at
