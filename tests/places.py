"""Paths in a server of objects, for tests that run on it as they do in a directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiockpt.storage
from aiockpt.storage.base import Storage
from aiockpt.storage.objects.cleaning import split_token
from aiockpt.storage.objects.commit import COMMIT_NAME
from aiockpt.storage.objects.lease import LEASE_NAME
from aiockpt.testing.server import SCHEME
from aiockpt.testing.server_storage import storage_for_server

if not entry_points(group="aiockpt.storages", name=SCHEME):  # the package was installed before it had this one
    aiockpt.storage.register(SCHEME, storage_for_server)


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

    @property
    def _key(self) -> str:
        """The key of a file of a checkpoint."""
        return self._storage.look(str(self.parent)).keys[self.name][0]

    def read_bytes(self) -> bytes:
        return self._storage.objects.get(self._key)[1]

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self.read_bytes()))

    def write_bytes(self, data: bytes) -> None:
        self._storage.objects.put(self._key, data)

    def unlink(self) -> None:
        self._storage.objects.delete(self._key)


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
    return [key for key in found if "/held/" in key or not key.startswith(tuple(ended))]
