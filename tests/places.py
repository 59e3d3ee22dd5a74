"""Paths in a server of objects, for tests that run on it as they do in a directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiockpt.storage
from aiockpt.storage.base import Storage
from aiockpt.storage.objects.cleaning import split_token
from aiockpt.storage.objects.commit import COMMIT_NAME, encode_commit
from aiockpt.storage.objects.lease import LEASE_NAME
from aiockpt.storage.objects.storage import ObjectListing
from tests.object_server import SCHEME
from tests.server_storage import storage_for_server

aiockpt.storage.register(SCHEME, storage_for_server)


def _placed(url: str, **_: Any) -> Storage:
    from tests.objects.buckets import PlacedStorage

    return PlacedStorage(url)


for _scheme in ("at-s3", "at-gs"):
    aiockpt.storage.register(_scheme, _placed)


class ServerPath(os.PathLike[str]):
    """A path with the methods of `pathlib.Path` that tests use. Changes are made to the objects themselves."""

    def __init__(self, url: str) -> None:
        self._storage = storage_of(url)
        self._url = self._storage.resolve(url)
        self.name = url.rpartition("/")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerPath, (self._url,)

    def __fspath__(self) -> str:
        return self._url

    __str__ = __repr__ = __fspath__

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> ServerPath:
        return ServerPath(f"{self._url}/{name}")

    @property
    def parent(self) -> ServerPath:
        return ServerPath(self._url.rpartition("/")[0])

    def exists(self) -> bool:
        return self._storage.stamp(self._url) is not None

    def is_file(self) -> bool:
        with self._storage.look(self._url) as listing:
            return listing.is_file

    def iterdir(self) -> Iterator[ServerPath]:
        try:
            with self._storage.look(self._url) as listing:
                found = [self / name for name in (*listing.top, *listing.folders)]
                # The objects of what was deleted stay for a while.
                return iter([path for path in found if self._storage.stamp(str(path)) is not None])
        except FileNotFoundError:
            return iter(())

    def glob(self, pattern: str) -> Iterator[ServerPath]:
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def read_bytes(self) -> bytes:
        with self._holder() as listing:
            return listing.fetch(self.name, 0, listing.files[self.name])

    def _holder(self) -> ObjectListing:
        """Return the listing that has this file: that of its directory, or its own if it is a checkpoint."""
        listing = self._storage.look(str(self.parent))
        return listing if self.name in listing.files else self._storage.look(self._url)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self.read_bytes()))

    def write_bytes(self, data: bytes) -> None:
        self._change(data)

    def unlink(self) -> None:
        self._change(None)

    def _change(self, data: bytes | None) -> None:
        """Replace or remove a file of a checkpoint; as an object, or in its commit object."""
        listing = self._holder()
        objects = self._storage.objects
        if self.name in listing.keys:
            key, _ = listing.keys[self.name]
            objects.delete([key]) if data is None else objects.put(key, data)
            return
        commit, _ = listing.documents[self.name]
        documents = {name: listing.fetch(name, 0, listing.files[name]) for name in commit.documents}
        documents[self.name] = data or b""
        if data is None:
            del documents[self.name]
        key = commit.key.removesuffix(COMMIT_NAME)
        objects.put(
            commit.key, encode_commit(commit.token, commit.begun, commit.files, documents, commit.replaces, key)
        )


def remove(path: Path | ServerPath) -> None:
    """Remove a checkpoint by other means than aiockpt."""
    if isinstance(path, ServerPath):
        path._storage.objects.remove(path._storage.key(str(path)))
    else:
        shutil.rmtree(path)


def storage_of(path: str | os.PathLike[str]) -> Storage:
    return aiockpt.storage.storage_for(path)[0]


def left_in(url: str) -> list[str]:
    """Return the objects of unfinished saves, and of those that were not removed, below a URL."""
    storage = storage_of(url)
    objects, start = storage.objects, storage.key(url)
    found = {start + key: facts for key, facts in objects.below(start).items() if not key.endswith(LEASE_NAME)}
    states = {key: objects.get(key)[1].decode().partition(" ")[0] for key in found if key.endswith("/state")}
    ended = {key.removesuffix("state") for key, state in states.items() if state in ("replaced", "aside")}
    for key in [key for key in found if key.endswith(f"/{COMMIT_NAME}") and not split_token(key)[0]]:
        ended.add(storage.record(f"{storage._root}/{key.removesuffix(f'/{COMMIT_NAME}')}").token)
        del found[key]
    hidden = [key for key in found if split_token(key)[0]]  # others are checkpoints of one object
    return [key for key in hidden if "/held/" in key or not key.startswith(tuple(ended))]
