"""Files that fsspec reads: ``hf://``, ``http://`` and others, to read only; extra ``aiockpt[fsspec]``.

fsspec's interface has no step that publishes atomically: its rename is a copy and a deletion, or not said to be more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError, SaveError
from aiockpt.storage.base import Listing, LookBudget, Seen, Source, Storage, Traits, Transaction
from aiockpt.storage.remote import RemoteListing, open_remote, put_into

try:
    import fsspec
    from fsspec.spec import AbstractFileSystem
except ImportError as exc:
    raise ImportError("this URL needs the package fsspec: pip install 'aiockpt[fsspec]'") from exc

if TYPE_CHECKING:
    from aiockpt.core.threads import Workers

_VERSIONS = ("ETag", "etag", "mtime", "created", "LastModified", "last_modified", "blob_id", "xet_hash", "updated")
_WEB = ("http", "https")
_ABSENT = (404, 410)  # HTTP's codes


class FsspecStorage(Storage):
    """Reads checkpoints where a file system of fsspec finds them; see `storage_for_url`."""

    traits = Traits(single_files=False)

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._given = url, dict(options)
        self.scheme = url.partition("://")[0]
        self._made: tuple[int, AbstractFileSystem] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStorage, self._given

    @property
    def files(self) -> Any:
        """The file system, made anew after a fork. Blocks for a moment at first."""
        if self._made is None or self._made[0] != os.getpid():
            try:
                made = fsspec.filesystem(self.scheme, skip_instance_cache=True, **self._given[1])
            except (ImportError, TypeError, ValueError) as exc:
                extra = ": pip install 'aiockpt[fsspec]'" if self.scheme in ("hf", *_WEB) else ""
                raise AiockptError(f"{self.scheme}:// can't be used by fsspec: {exc}{extra}") from exc
            self._made = os.getpid(), made
        return self._made[1]

    def resolve(self, path: str) -> str:
        scheme, found, rest = path.partition("://")
        if not found or scheme != self.scheme:
            raise AiockptError(f"{path} is no path of {self.scheme}://")
        return f"{scheme}://{rest.rstrip('/')}"

    def check(self, path: str, *, overwrite: bool) -> None:
        raise SaveError(
            f"{path}: what fsspec reads can't be written, since it has no atomic step; save to a directory, or to an "
            "object store (s3://, gs://, az://), and copy it from there"
        )

    async def begin(self, path: str, *, overwrite: bool, workers: Workers) -> Transaction:
        self.check(path, overwrite=overwrite)
        raise AssertionError("unreachable")

    async def open(self, path: str, *, workers: Workers) -> Source:
        return await open_remote(lambda path: FsspecListing(self, path, LookBudget()), self.resolve(path), workers)

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return FsspecListing(self, self.resolve(path), budget or LookBudget())


class FsspecListing(RemoteListing):
    """A directory, or a file."""

    def __init__(self, storage: FsspecStorage, path: str, budget: LookBudget) -> None:
        super().__init__(path, budget)
        self.storage = storage
        self.urls: dict[str, str] = {}  # of the files
        self._versions: list[str] = []
        found = self._list(path)
        self.is_file = [_name(each) for each in found] == [_name({"name": path})] and found[0]["type"] == "file"
        self._add(found)
        if not self.is_file and not self.files and not self.folders:
            raise FileNotFoundError(f"nothing is at {path}")
        self.stamp = repr(sorted(self._versions))

    def _list(self, path: str) -> list[dict[str, Any]]:
        """Return the facts of what is in a directory, or of a file alone; raise OSError."""
        files = self.storage.files
        try:
            files.invalidate_cache()
            if self.storage.scheme in _WEB:  # where a list is what a page has links to
                facts = files.info(path)
                if not str(facts.get("mimetype", "")).startswith("text/html"):
                    return [facts]
            return list(files.ls(path, detail=True))
        except FileNotFoundError as exc:
            reason = exc.__cause__
            if self.storage.scheme not in _WEB or reason is None or getattr(reason, "status", 0) in _ABSENT:
                raise
            raise OSError(f"{path} can't be read: {reason}") from exc  # fsspec makes that of each error of a server
        except (OSError, Warning):  # the latter only because the program makes errors of warnings
            raise
        except Exception as exc:  # each of them has errors of its own
            raise OSError(f"{type(exc).__name__}: {exc}") from exc

    def _add(self, found: Sequence[Mapping[str, Any]], above: str = "") -> None:
        for facts in found:
            name = _name(facts)
            if not name or "?" in name:
                continue
            if facts["type"] == "directory":
                if not above:
                    self.folders.append(name)
                continue
            size = facts.get("size")
            if size is None:  # not in the lists of a web server
                size = self.storage.files.info(facts["name"]).get("size")
            if size is None:
                raise OSError(f"{facts['name']}: its size is not known")
            self.files[above + name], self.urls[above + name] = int(size), str(facts["name"])
            self._versions.append(repr((name, size, [facts.get(each) for each in _VERSIONS])))

    def list_folder(self, name: str) -> None:
        self._add(self._list(self.storage.below(self.path, name)), f"{name}/")

    def is_replaced(self, exc: OSError) -> bool:
        return isinstance(exc, FileNotFoundError)

    def read(self, name: str, runs: Sequence[tuple[int, int]], view: memoryview, seen: Seen | None = None) -> int:
        url, files = self.urls[name], self.storage.files
        try:
            if files.async_impl and runs[1:]:
                starts, ends = zip(*((offset, offset + length) for offset, length in runs), strict=True)
                found = files.cat_ranges([url] * len(runs), list(starts), list(ends), on_error="raise")
            else:
                found = [self._read_one(url, offset, offset + length) for offset, length in runs]
        except (OSError, Warning):
            raise
        except Exception as exc:
            raise OSError(f"{type(exc).__name__}: {exc}") from exc
        at = 0
        for (offset, length), data in zip(runs, found, strict=True):
            if len(data) > length:
                raise OSError(f"{url} was sent as a whole, where {length} bytes at {offset} were asked for")
            if len(data) < length:
                break
            at += put_into(view[at:], data, seen)
        return at

    def _read_one(self, url: str, start: int, end: int) -> bytes:
        files = self.storage.files
        if files.async_impl or type(files).cat_file is not AbstractFileSystem.cat_file:
            return bytes(files.cat_file(url, start=start, end=end))
        with files.open(url, "rb", cache_type="none") as file:  # with its cache it would read ahead
            file.seek(start)
            return bytes(file.read(end - start))


def _name(facts: Mapping[str, Any]) -> str:
    return str(facts["name"]).rstrip("/").rpartition("/")[2]


def storage_for_url(url: str, **options: Any) -> FsspecStorage:
    """Return the storage of a URL that fsspec reads: the factory of its schemes. Does not block.

    To read another one of fsspec's, register it: ``aiockpt.storage.register("zip", storage_for_url)``.

    Args:
        url: the scheme and what is behind it.
        options: those of the file system, such as ``token`` of ``hf://``.
    """
    return FsspecStorage(url, options)
