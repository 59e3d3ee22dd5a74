"""Names and directories of a file system: the part of its storage that is needed to look at checkpoints. Blocks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from urllib.parse import unquote

from aiockpt.errors import AiockptError
from aiockpt.storage.base import Directories, LeaseFacts, Listing, LookBudget, RunLease
from aiockpt.storage.local.entries import LocalListing
from aiockpt.storage.local.lease import is_finishing, owner_of, take
from aiockpt.storage.local.temp_dir import REPLACED, SWEPT, liveness, read_ticket, this_process

_FILE_SCHEME = "file://"


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a user's path, in which ``~`` is the home directory."""
    return os.path.abspath(os.path.expanduser(path))


class LocalDirectories(Directories):
    """Names and directories of a file system."""

    def resolve(self, path: str) -> str:
        if path.startswith(_FILE_SCHEME):
            host, slash, path = path.removeprefix(_FILE_SCHEME).partition("/")
            if host not in ("", "localhost") or not slash:
                raise AiockptError(f"file://{host}{slash}{path} names a host: write file:///path of this machine")
            path = unquote(slash + path)
        elif "://" in path:
            raise AiockptError(f"{path} is a URL: name a path of the file system")
        if not path:
            raise AiockptError("the path is empty; name a directory or a file")
        return absolute(path)

    def below(self, path: str, name: str) -> str:
        return os.path.join(path, name)

    def split(self, path: str) -> tuple[str, str]:
        return os.path.split(path)

    def look(self, path: str, budget: LookBudget | None = None) -> Listing:
        return LocalListing(path, budget)

    def link(self, path: str) -> str | None:
        return os.readlink(path) if os.path.islink(path) else None

    def leftover(self, name: str) -> str | None:
        ticket = read_ticket(name)
        if ticket is None:
            return None
        owner = ticket.owner
        doing, done = ("removing it", "was removing it") if ticket.suffix == SWEPT else ("saving", "was saving")
        if ticket.suffix == REPLACED:
            doing, done = "replacing it", "was replacing it"
        if owner is None:
            return "its process is not known here; remove it with aiockpt clean --older-than"
        match liveness(owner, this_process()):
            case "alive":
                return f"process {owner.pid} is {doing}"
            case "dead":
                return f"process {owner.pid}, which {done}, is dead; aiockpt clean removes it"
            case _:
                return f"process {owner.pid} of another machine or container; aiockpt clean --older-than removes it"

    def set_aside(self, path: str, names: Sequence[str]) -> str:
        for name in names:
            aside = os.path.join(os.path.dirname(path), name)
            if not os.path.lexists(aside):
                os.rename(path, aside)
                return aside
        raise FileExistsError(errno.EEXIST, "each name for it is taken", path)

    def lease(self, directory: str) -> RunLease:
        return take(directory)

    def owner_of(self, directory: str) -> LeaseFacts | None:
        return owner_of(directory)

    def identify(self, directory: str, *, make: bool) -> str | None:
        from aiockpt.storage.local.identity import identify  # needs anyio, which looking at directories does not

        return identify(directory, make=make)

    def is_finishing(self, directory: str) -> bool:
        return is_finishing(directory)
