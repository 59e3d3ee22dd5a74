"""What is at a path of an object store: a checkpoint, objects that others have written, or what is below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiockpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from aiockpt.format.names import METADATA_NAME
from aiockpt.storage.base import Listing, LookBudget, Seen, Source, Stamp
from aiockpt.storage.objects.cleaning import ticket_of
from aiockpt.storage.objects.client import ConditionError, ObjectFacts
from aiockpt.storage.objects.commit import COMMIT_NAME, FILES, Commit, original
from aiockpt.storage.objects.lease import LEASE_NAME
from aiockpt.storage.objects.transaction import errors

if TYPE_CHECKING:
    from aiockpt.storage.objects.storage import ObjectStorage

_STEP_BYTES = 1 << 20
_WHOLE_BYTES = 64 << 20  # of a document that is read at once


class ObjectListing(Listing):
    """A checkpoint, or what is below a path."""

    def __init__(self, storage: ObjectStorage, path: str, budget: LookBudget) -> None:
        self.path, self.storage, self._budget = path, storage, budget
        self.files, self.folders, self.others = {}, [], []
        self.keys: dict[str, tuple[str, Stamp | None]] = {}  # of the files; and a stamp, if an object may be replaced
        self.documents: dict[str, tuple[Commit, str]] = {}  # the other files, and their names there
        self.is_file = False
        self.changed_s, self.stamp = 0.0, ""
        commit, inside = storage.record(path), ""
        is_found = commit is not None or ("." in storage.split(path)[1] and self._find_object())
        if not is_found and not self._list_objects(storage.key(path)):
            commit, inside = storage.above(path) or (None, "")
            if commit is None and not self._find_object():
                raise FileNotFoundError(f"nothing is at {path}")
        if commit is not None:
            self._add(commit, inside)
            if not self.files:
                raise FileNotFoundError(f"nothing is at {path}")
            self.folders = list(dict.fromkeys(name.partition("/")[0] for name in self.files if "/" in name))
            self.stamp, self.changed_s = commit.stamp, commit.modified

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
        if self.documents or self.is_file:  # of a checkpoint everything is known
            return
        for name in self.folders:
            if self._budget.is_spent:
                return
            path = self.storage.below(self.path, name)
            before, commit = len(self.files), self.storage.record(path)
            if commit is not None:
                self._add(commit, above=f"{name}/")
            else:
                self._list_objects(self.storage.key(path), f"{name}/")
            self._budget.left -= max(1, len(self.files) - before)

    def read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> int:
        """Fill a view with runs of a file's bytes; return how many there are. Raise OSError."""
        if name not in self.documents:
            key, stamp = self.keys.get(name, (name, None))
            return self.storage.objects.read(key, runs, view, seen, stamp)
        commit, own = self.documents[name]
        at = 0
        for offset, length in runs:
            data = memoryview(self.storage.document(commit, own, offset, length))
            view[at : at + len(data)] = data
            at += len(data)
        if seen is not None:
            for begin in range(0, at, _STEP_BYTES):
                seen(view[begin : min(at, begin + _STEP_BYTES)])
        return at

    def fetch(self, name: str, offset: int, length: int) -> bytes:
        data = bytearray(max(0, min(length, self.files.get(name, offset) - offset)))
        if name not in self.files:
            raise FileNotFoundError(f"{self.path}/{name} is not there")
        return bytes(data[: self.read(name, [(offset, len(data))], memoryview(data))]) if data else b""


class Documents:
    """The documents in commit objects. Those that were read are kept with the commit."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, Stamp, str], bytes] = {}

    def bytes_of(self, storage: ObjectStorage, commit: Commit, name: str, offset: int, length: int) -> bytes:
        """Return bytes of a document; raise OSError, FileNotFoundError if the checkpoint was replaced."""
        at, stored, nbytes = commit.documents[name]
        is_moved = name == METADATA_NAME  # its bytes are not those that are stored
        if not is_moved and (stored > _WHOLE_BYTES or (at + offset >= commit.size - len(commit.tail))):
            return self._fetch(storage, commit, at + offset, min(length, nbytes - offset))
        key = commit.key, commit.stamp, name
        if key not in self._read:
            data = self._fetch(storage, commit, at, stored)
            folder = commit.token.removeprefix(commit.key.removesuffix(COMMIT_NAME))
            self._read = {key: original(data, folder) if is_moved else data}  # of one document at a time
        return self._read[key][offset : offset + length]

    def _fetch(self, storage: ObjectStorage, commit: Commit, begin: int, length: int) -> bytes:
        known = begin - (commit.size - len(commit.tail))
        if known >= 0:
            return commit.tail[known : known + length]
        data = bytearray(length)
        try:
            count = storage.objects.read(commit.key, [(begin, length)], memoryview(data), None, commit.stamp)
        except ConditionError as exc:
            raise FileNotFoundError(f"{commit.key} was replaced") from exc
        return bytes(data[:count])


class ObjectSource(Source):
    """The files of a listing. What has replaced them meanwhile is never read."""

    gap_bytes = 1 << 20  # a request takes as long as so many bytes
    most_reads = 32  # each waits for an answer most of the time
    is_remote = True

    def __init__(self, listing: ObjectListing) -> None:
        self._listing, self._is_closed = listing, False

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
        with errors(LoadError, f"read {path}/{name}"):
            try:
                if self._listing.read(name, runs, view, seen) < len(view):
                    raise CorruptCheckpointError(f"{path}/{name} ends too early: it was truncated by other means")
            except (FileNotFoundError, ConditionError) as exc:
                if isinstance(exc, ConditionError) or self._listing.storage.stamp(path) != self._listing.stamp:
                    raise CheckpointNotFoundError(f"{path} was replaced or deleted while it was read") from exc
                raise CorruptCheckpointError(f"{path}/{name} is missing: it was removed by other means") from exc

    def close(self) -> None:
        self._is_closed = True
