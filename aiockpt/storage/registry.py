"""The storage of a path: the file system, or for a URL the one that is registered for its scheme.

A package registers its storages by entry points of the group ``aiockpt.storages``, which have the scheme as their name
and lead to a factory::

    [project.entry-points."aiockpt.storages"]
    s3 = "mypackage:storage_for_bucket"
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from aiockpt.core.wording import a
from aiockpt.errors import AiockptError
from aiockpt.storage.base import Directories, Storage

GROUP = "aiockpt.storages"
"""The group of entry points."""

Factory: TypeAlias = Callable[..., Storage]
"""Takes the beginning of a URL, scheme and authority such as ``s3://bucket``, and the options; returns a storage."""

_FILE = "file"
_factories: dict[str, Factory] = {}
_installed: dict[str, Factory] = {}  # of entry points: to look for one reads the metadata of all installed packages
_defaults: dict[str, Any] = {}


def register(scheme: str, factory: Factory, *, replace: bool = False) -> None:
    """Use a storage for the URLs of a scheme; before those of entry points.

    ::

        aiockpt.storage.register("memory", lambda root, **options: MemoryStorage())

    Args:
        scheme: the text before ``://``.
        factory: called as ``factory("scheme://authority", **storage_options)`` at the first path of such a beginning,
            in the caller's thread: it must not block. The storage gets whole URLs as paths.
        replace: the scheme may have another factory, which is not used any more by new checkpointers.

    Raises:
        ValueError: this is no name of a scheme, or it has another factory.
    """
    if not scheme.isascii() or not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        raise ValueError(f"{scheme!r} is no name of a scheme, such as 's3'")
    if scheme == _FILE:
        raise ValueError("file:// is the file system; pass storage= to replace it")
    if scheme in _factories and not replace:
        raise ValueError(f"{scheme}:// has a storage already; pass replace=True to use another one")
    _factories[scheme] = factory


@contextlib.contextmanager
def default_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Use these options for URLs wherever none are given, in the whole process; for programs such as a command line."""
    _defaults.update(options)
    try:
        yield
    finally:
        _defaults.clear()


def scheme_of(path: str) -> str:
    """Return the scheme of a URL of a registered storage; empty for a path of the file system."""
    scheme, found, _ = path.partition("://")
    return scheme if found and scheme and "/" not in scheme and scheme != _FILE else ""


class Storages:
    """The storages of a checkpointer, for paths of all kinds. For any thread.

    Args:
        storage: that of all paths; None: by the path.
        local: that of paths of the file system.
        options: of the factories of other storages, unless a call has its own.
        refused: why no other storage than ``local`` may be used; empty if it may.
    """

    def __init__(
        self, storage: Storage | None, local: Storage, options: Mapping[str, Any] | None = None, refused: str = ""
    ) -> None:
        self._storage = storage
        self._local = local
        self._options = dict(options or _defaults)
        self._refused = refused
        self._made: dict[tuple[str, str], Storage] = {}
        self._lock = threading.Lock()

    @property
    def default(self) -> Storage:
        """The storage of all paths, or that of paths of the file system."""
        return self._storage or self._local

    def of(
        self,
        path: str | os.PathLike[str],
        storage: Storage | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Storage, str]:
        """Return the storage of a path or URL, and the canonical path in it. Does not block.

        ``storage`` and ``options`` are those of this call. Raise TypeError and ValueError for wrong arguments, and
        AiockptError if no storage is registered for the scheme, or it refuses the path.
        """
        text = text_of(path)
        if storage is not None and not isinstance(storage, Storage):
            raise TypeError(f"storage must be an aiockpt.storage.Storage, not {storage!r}")
        if storage is not None and options is not None:
            raise ValueError("storage_options are for URLs whose storage is looked up: leave them out beside storage=")
        storage = storage or self._storage
        if storage is None:
            storage = self._found(text, self._options if options is None else options)
        return storage, storage.resolve(text)

    def by_path(self, path: str | os.PathLike[str]) -> tuple[Storage, str]:
        """Do as `of` for a path that is not in the storage of all paths, if there is one."""
        storage = self._found(text_of(path), self._options)
        return storage, storage.resolve(text_of(path))

    def _found(self, path: str, options: Mapping[str, Any]) -> Storage:
        scheme = scheme_of(path)
        if not scheme:
            return self._local
        if self._refused:
            raise ValueError(f"{self._refused}, which is for the file system: leave it out to use {scheme}://")
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise TypeError("storage_options must be a dict whose keys are the names of options")
        root = scheme + "://" + path.partition("://")[2].partition("/")[0]
        with self._lock:
            key = root, repr(sorted(options.items()))
            if key not in self._made:
                self._made[key] = _factory_of(scheme, path)(root, **options)
        made = self._made[key]
        if not isinstance(made, Storage):
            raise TypeError(f"the factory of {scheme}:// has returned {made!r}, which is no aiockpt.storage.Storage")
        return made

    def printable(self, path: str | os.PathLike[str], storage: Storage | None = None) -> str:
        """Return the canonical path, or the text of a path that is refused; for messages."""
        try:
            return self.of(path, storage)[1]
        except (TypeError, ValueError, AiockptError):
            return str(path)


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a path as text; raise TypeError if it is bytes, and AiockptError for what `pathlib` makes of a URL."""
    text = path if isinstance(path, str) else path.__fspath__() if isinstance(path, os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"path must be text or an os.PathLike of text, not {a(type(path).__name__)}")
    scheme, found, rest = text.partition(":/")
    if found and not rest.startswith("/") and "/" not in scheme and _is_registered(scheme):
        raise AiockptError(
            f"{text} has lost a slash, as a URL does in pathlib.Path: write it as text, {scheme}://{rest}. "
            f"A directory of this name is ./{text}"
        )
    return text


def _is_registered(scheme: str) -> bool:
    return scheme in _factories or bool(entry_points(group=GROUP, name=scheme))


def _factory_of(scheme: str, path: str) -> Factory:
    if factory := _factories.get(scheme) or _installed.get(scheme):
        return factory
    for found in entry_points(group=GROUP, name=scheme):
        loaded: Factory = found.load()
        return _installed.setdefault(scheme, loaded)
    known = sorted({_FILE, *_factories, *(found.name for found in entry_points(group=GROUP))})
    raise AiockptError(
        f"{path}: no storage is registered for {scheme}://, but for {', '.join(f'{each}://' for each in known)}. "
        f"Install a package that has one, or register one by aiockpt.storage.register({scheme!r}, factory)"
    )


def directories_for(path: str | os.PathLike[str]) -> tuple[Directories, str]:
    """Return what can look at a path or URL, and the canonical path; for the file system without what writes there."""
    from aiockpt.storage.local.directories import LocalDirectories

    text = text_of(path)
    if scheme_of(text):
        return storage_for(text)
    local = LocalDirectories()
    return local, local.resolve(text)


def storage_for(path: str | os.PathLike[str], **options: Any) -> tuple[Storage, str]:
    """Return the storage of a path or URL, made with these options, and the canonical path in it. Does not block.

    ::

        storage, path = aiockpt.storage.storage_for("s3://bucket/run", region="eu-central-1")

    Raises:
        AiockptError: no storage is registered for the scheme, or it refuses the path.
    """
    from aiockpt.storage.local.storage import LocalStorage

    return Storages(None, LocalStorage(), options).of(path)
