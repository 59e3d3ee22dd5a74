"""Storages and programs with one crash bug each, which the kill matrix has to detect."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from aiockpt.core.threads import Workers
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import NO_DOCUMENTS, Document, Transaction
from aiockpt.storage.local.transaction import JoinedTransaction
from aiockpt.storage.wrapper import WrapperTransaction
from aiockpt.testing import FaultyStorage
from tests.crash.consequences import Kind
from tests.crash.scenarios import OPTIONS, Announce, Program, Scenario, checkpointer, save_one, state_of


class InPlace(LocalStorage):
    """A storage that removes the old checkpoint first, and writes directly to the final directory."""

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        path = self.resolve(path)
        if os.path.exists(path):
            shutil.rmtree(path)
        os.mkdir(path)
        return JoinedTransaction(self._policy, path, path, workers)


class OneByOne(WrapperStorage):
    """A storage that moves the finished files to the final directory one by one."""

    def __init__(self) -> None:
        super().__init__(LocalStorage())

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        inner = await self.inner.begin(path, overwrite=overwrite, workers=workers, ticket=ticket)
        return _Moving(self, inner, path)


class _Moving(WrapperTransaction):
    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await self.write_files(documents)
        final = self._inner._path
        hidden = os.path.join(os.path.dirname(final), self._inner.ticket)
        os.makedirs(final, exist_ok=True)
        for name in sorted(os.listdir(hidden), reverse=True):
            os.replace(os.path.join(hidden, name), os.path.join(final, name))
        os.rmdir(hidden)


class Nameless(LocalStorage):
    """A storage whose hidden directories do not name their owner, so that no later process recognises an orphan."""

    def new_ticket(self, path: str) -> str:
        return f".aiockpt-nobody-{os.urandom(4).hex()}"


class Careless(LocalStorage):
    """A storage that removes every hidden directory, also those of live processes."""

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        folder = Path(self.resolve(path)).parent
        for found in folder.glob(".aiockpt-*"):
            shutil.rmtree(found)
        return await super().begin(path, overwrite=overwrite, workers=workers, ticket=ticket)


def announce_early(folder: Path, announce: Announce) -> None:
    """Announce a save as written when it is only staged."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce)
        save = program.begin("c", 2, **OPTIONS)
        save.staged.result()
        announce("written c 2")
        save.written.result()


def delete_first(folder: Path, announce: Announce) -> None:
    """Remove the old checkpoint before saving the new one."""
    shutil.rmtree(folder / "c")
    save_one(folder, announce)


def litter(folder: Path, announce: Announce) -> None:
    """Keep a visible temporary file beside the checkpoint during the save."""
    (folder / "c.tmp").touch()
    save_one(folder, announce)
    (folder / "c.tmp").unlink()


def mix(folder: Path, announce: Announce) -> None:
    """Save a state that mixes two steps."""
    with checkpointer() as ckpt:
        announce("begin c 2")
        state = {"model": state_of("c", 1)["model"], "optim": state_of("c", 2)["optim"]}
        ckpt.save(state, folder / "c", overwrite=True, **OPTIONS)


def give_up(folder: Path, announce: Announce) -> None:
    """Fail if another process of the program was killed."""
    child = os.fork()
    if child == 0:
        (folder / "c").mkdir()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("I give up")


def _full() -> FaultyStorage:
    return FaultyStorage(LocalStorage(), "begin", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


BROKEN: dict[str, tuple[Scenario, Kind, int]] = {
    "in place": (Scenario(partial(save_one, storage=InPlace)), "broken", 3),
    "in place, overwrite": (Scenario(partial(save_one, storage=InPlace, overwrite=True), {"c": 1}), "lost", 5),
    "file by file": (Scenario(partial(save_one, storage=OneByOne, overwrite=True), {"c": 1}), "broken", 20),
    "mixed": (Scenario(mix, {"c": 1}), "mixed", 22),
    "announced early": (Scenario(announce_early), "lost", 10),
    "deleted first": (Scenario(delete_first, {"c": 1}), "lost", 6),
    "litter": (Scenario(litter), "stray", 3),
    "staged, not finished": (Scenario(save_one, whom="first", staged_is_promise=True), "lost", 12),
    "next run": (Scenario(save_one, storage=_full), "next run", 3),
    "given up": (Scenario(give_up, whom="caller"), "program", 0),
    "nameless": (Scenario(partial(save_one, storage=Nameless)), "leftover", 5),
}
"""The scenario of each bug, the kind of problem it causes, and the number of a call near which it appears."""
CARELESS = Scenario(save_one, storage=Careless)
