"""The saves of a plug-in that are in flight, for frameworks that name, replace and rotate their directories themselves.

A framework calls back at its own points: at a save, after a step, at the end. There a plug-in asks which saves are
finished, does what the framework does after a save, and raises the failure of one where the framework expects errors.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError
from aiockpt.integrations.lifetime import Lifetime
from aiockpt.storage.local.belonging import why_not_a_checkpoint
from aiockpt.storage.local.storage import LocalStorage

if TYPE_CHECKING:
    import torch

    from aiockpt.engine.transaction import SyncTransaction

logger = logging.getLogger("aiockpt")

_REMOVED = "-removed"


@dataclass(eq=False)
class PendingSave:
    """A checkpoint that a framework writes, or that is in flight."""

    transaction: SyncTransaction  # where its parts are saved
    about: Any = None  # anything that the plug-in needs when it is written

    @property
    def path(self) -> str:
        """Where it will be."""
        return self.transaction.path


class SavesInFlight(Lifetime):
    """The transactions of a plug-in, in order. For one thread; with several ranks, all call the same methods.

    Args:
        options: those of `SyncCheckpointer`.
    """

    def _forget(self) -> None:
        super()._forget()
        self.open: SyncTransaction | None = None  # the transaction that the framework writes into just now
        self._warns = self._options.get("on_failure") == "warn"
        self._saves: deque[PendingSave] = deque()
        self._failure: BaseException | None = None
        self._seen: set[str] = set()

    @property
    def last(self) -> PendingSave | None:
        """The save that was begun last, if it was not finished yet."""
        return self._saves[-1] if self._saves else None

    def will_be(self, path: str) -> bool:
        """Return whether something is at a path, or will be there by a save in flight."""
        path = os.path.abspath(path)
        flying = [save.path for save in self._saves] + ([] if self.open is None else [self.open.path])
        return os.path.exists(path) or path in flying

    # --- a save -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(
        self, path: str, optimizers: Sequence[torch.optim.Optimizer], *, above: bool = False
    ) -> Iterator[PendingSave]:
        """Begin a transaction: ``with saves.writing(path, optimizers) as save:``. Replaces what is at the path.

        Steps of the optimizers wait for the copies from then on. Where they can't, leaving the block does.
        ``above``: the framework takes whatever is in that directory for a checkpoint; see `LocalStorage.above`.
        """
        default = self.checkpointer._storages.default
        storage = default.above() if above and isinstance(default, LocalStorage) else None
        with self.checkpointer.transaction(os.path.abspath(path), overwrite=True, storage=storage) as transaction:
            self.open, save = transaction, PendingSave(transaction)
            try:
                yield save
            finally:
                self.open = None
        self._saves.append(save)
        if not self.guard(optimizers):
            transaction.staged.result()

    # --- after it -----------------------------------------------------------------------------------------

    def finished(self, *, wait: bool = False) -> Iterator[PendingSave]:
        """Yield the saves that are written, in order, each once; keep the first failure for `raise_failure`.

        With several ranks, a save counts when all of them know it, as what follows may communicate.

        Args:
            wait: block until all are.
        """
        while self._saves and (wait or self.is_over(self._saves[0].path, self._saves[0].transaction.written)):
            save = self._saves.popleft()
            try:
                save.transaction.written.result()
            except AiockptError as exc:
                if self._warns:
                    logger.warning("%s was not written: %s", save.path, exc)
                else:
                    self._failure = self._failure or exc
                continue
            yield save

    def raise_failure(self) -> None:
        """Raise the failure of a finished save, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # --- directories --------------------------------------------------------------------------------------

    def settled(self, checkpoints: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """Return those that are no saves in flight: one may be there already; its turn comes when it is finished."""
        flying = {save.path for save in self._saves}
        return [each for each in checkpoints if each[1] not in flying]

    def clean(self, run: str) -> None:
        """Remove in the background what killed processes have left of directories that they removed; once."""
        if run not in self._seen:
            self._seen.add(run)
            for aside in glob.glob(os.path.join(glob.escape(run), f".*{_REMOVED}")):
                self._remove(aside)

    def make_room(self, path: str) -> None:
        """Remove what is at a path unless it is a checkpoint, which is replaced."""
        if os.path.lexists(path) and why_not_a_checkpoint(path) is not None:
            self.retire(os.path.abspath(path))

    def retire(self, path: str) -> None:
        """Remove a directory with all that is in it, in the background. None under its name is ever incomplete."""
        run, name = os.path.split(path)
        aside = os.path.join(run, f".{name}{_REMOVED}")
        shutil.rmtree(aside, ignore_errors=True)  # a removal that goes on finds nothing more
        try:
            os.rename(path, aside)
        except OSError as exc:
            logger.warning("%s can't be removed: %s", path, exc)
        else:
            self._remove(aside)

    def _remove(self, aside: str) -> None:
        self.access.call(lambda tools: tools.workers.run(shutil.rmtree, aside, True), f"removing {aside}")


def numbered(run: str, prefix: str) -> list[tuple[int, str]]:
    """Return number and path of each directory ``<prefix>N``, in the order of the numbers."""
    names = os.listdir(run) if os.path.isdir(run) else []
    found = ((re.fullmatch(rf"{re.escape(prefix)}([0-9]+)", name), os.path.join(run, name)) for name in names)
    return sorted((int(match[1]), path) for match, path in found if match and os.path.isdir(path))


def outdated(checkpoints: Sequence[tuple[int, str]], limit: int | None, *kept: str | None) -> list[str]:
    """Return the paths of the checkpoints that are too many, the oldest first.

    Args:
        checkpoints: number and path of each. They are as old as the file system says, or, where it seems to have no
            times, as their numbers.
        limit: how many to keep; None or 0: all.
        kept: paths of those that are kept in any case.
    """
    if not limit or limit < 0:
        return []
    times = {path: os.path.getmtime(path) for _, path in checkpoints}
    has_times = bool(times) and max(times.values()) - min(times.values()) >= 1
    ordered = sorted((times[path] if has_times else 0.0, number, path) for number, path in checkpoints)
    safe = {os.path.abspath(path) for path in kept if path}
    others = [path for _, _, path in ordered if os.path.abspath(path) not in safe]
    return others[: max(0, len(ordered) - max(limit, len(safe)))]


@contextlib.contextmanager
def replaced(places: Sequence[tuple[str, str]], take: Callable[..., bool]) -> Iterator[None]:
    """Replace functions of modules, where they are loaded, for calls by this thread.

    Args:
        places: module and name of each.
        take: called with the arguments of a call; returns whether it has done its work. If not, the function does.
    """
    thread = threading.get_ident()

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or not take(*args, **kwargs):
                return original(*args, **kwargs)
            return None

        return call

    with contextlib.ExitStack() as stack:
        for module, name in places:
            original = getattr(sys.modules.get(module), name, None)
            if original is not None:
                setattr(sys.modules[module], name, instead(original))
                stack.callback(setattr, sys.modules[module], name, original)
        yield
