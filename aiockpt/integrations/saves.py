"""The saves of a plug-in: frameworks copy, pickle and fork their plug-ins, and end them twice or never.

`SavesInFlight` is for frameworks that write the files of a checkpoint into a directory, which they replace and rotate
themselves: a plug-in asks at the framework's own points which saves are finished, and does what the framework does
after a save. `NamedSaves` is for those that save and remove paths, as if each call had done its work when it returns.
"""

from __future__ import annotations

import concurrent.futures
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
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from aiockpt.coordination.choose import is_distributed
from aiockpt.engine.facade import EngineAccess
from aiockpt.errors import AiockptError, CheckpointNotFoundError
from aiockpt.storage.local.belonging import why_not_a_checkpoint
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    import torch

    from aiockpt.core.futures import Completion
    from aiockpt.engine.transaction import SyncTransaction
    from aiockpt.saving.fence import StepGuard
    from aiockpt.saving.handle import SaveHandle

logger = logging.getLogger("aiockpt")

_REMOVED = "-removed"

IDLE_S = 5.0
"""So many seconds after the last call a plug-in's threads end, unless it saves with other ranks."""


class Lifetime:
    """A checkpointer that is made at its first use, and anew after `end`, after a fork, or for other ranks.

    Copies and pickles of it have the options alone. For any thread.

    Args:
        options: those of `SyncCheckpointer`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"idle_timeout": IDLE_S, **options}
        SyncCheckpointer(**self._options)  # so that a wrong option fails here; it has not started anything
        self._forget()

    def _forget(self) -> None:
        self._checkpointer: SyncCheckpointer | None = None
        self._made_for: object = None
        self._lock = threading.RLock()
        self._guards: dict[int, tuple[object, StepGuard]] = {}  # by the ids of the optimizers

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def checkpointer(self) -> SyncCheckpointer:
        """The checkpointer. With several ranks, all of them use it in the same order."""
        key = os.getpid(), id(dist.group.WORLD) if is_distributed() else None
        if isinstance(self._made_for, tuple) and self._made_for[0] != key[0]:
            Lifetime._forget(self)  # its lock may be held by a thread of the parent
        with self._lock:
            held = self._checkpointer
            if held is None or self._made_for != key or not held._engine.is_open:
                _close(held)
                held = self._checkpointer = SyncCheckpointer(**self._options)
                self._made_for = key
            return held

    @property
    def access(self) -> EngineAccess:
        """The engine of the checkpointer, for what it agrees on with the other ranks."""
        return EngineAccess(self.checkpointer)

    def guard(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Make the steps of these optimizers alone wait for the copies; return False if those of one can't."""
        wanted, is_complete = {id(optimizer): optimizer for optimizer in optimizers}, True
        for gone in self._guards.keys() - wanted:
            self._guards.pop(gone)[1].remove()
        for key in wanted.keys() - self._guards:
            try:
                self._guards[key] = wanted[key], self.checkpointer.guard(wanted[key])
            except TypeError:  # its steps call no hooks
                is_complete = False
        return is_complete

    def is_over(self, path: str, written: Completion[Any]) -> bool:
        """Return whether the save of a path has ended; with several ranks, when all of them know it."""
        access = self.access
        if access.world_size == 1:
            return written.done()
        return access.agree(f"whether {path} is written", written.done(), all).result()

    def end(self) -> None:
        """Stop guarding, finish the saves in flight and end all threads. Blocks; idempotent.

        Raises:
            AiockptError: the failure of a save that nobody has awaited.
        """
        self.guard(())
        with self._lock:
            held, self._checkpointer = self._checkpointer, None
        _close(held)


def _close(checkpointer: SyncCheckpointer | None) -> None:
    if checkpointer is not None and checkpointer._engine.is_open:
        checkpointer.close()


def missing(framework: str, extra: str, error: ImportError) -> NoReturn:
    """Raise an ImportError that says what to install."""
    raise ImportError(f"{framework} is not installed: pip install 'aiockpt[{extra}]'", name=framework) from error


# --- directories that a framework writes ---------------------------------------------------------------


@dataclass(eq=False)
class PendingSave:
    """A checkpoint that a framework writes, or that is in flight."""

    transaction: SyncTransaction  # where its parts are saved
    about: Any = None  # anything that the plug-in needs when it is written

    @property
    def path(self) -> str:
        """The path of the checkpoint, once it is written."""
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
def replaced(
    places: Sequence[tuple[str, str]],
    folder: str,
    take: Callable[[str, Any, Any], object],
    names: tuple[str, ...] = ("",),
) -> Iterator[None]:
    """Replace functions that write an object into a file, where they are loaded, for calls by this thread.

    Args:
        places: module and name of each.
        folder: only files of this directory are concerned.
        take: called instead with the name of the file, the object, and its ``metadata``.
        names: the beginnings of the names that are concerned.
    """
    thread = threading.get_ident()

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Not by the signature: others may have replaced the function too, by one of any arguments.
            given: dict[str, Any] = {**dict(zip(("obj", "f", "metadata"), args, strict=False)), **kwargs}
            obj, file = given.get("obj", given.get("tensors")), given.get("f", given.get("filename"))
            where, name = os.path.split(file) if isinstance(file, str | os.PathLike) else ("", "")
            if threading.get_ident() != thread or where != folder or not name.startswith(names):
                return original(*args, **kwargs)
            return take(name, obj, given.get("metadata"))

        return call

    with contextlib.ExitStack() as stack:
        for module, name in places:
            original = getattr(sys.modules.get(module), name, None)
            if original is not None:
                setattr(sys.modules[module], name, instead(original))
                stack.callback(setattr, sys.modules[module], name, original)
        yield


# --- names that a framework chooses --------------------------------------------------------------------


class NamedSaves(Lifetime):
    """Saves under names that a framework chooses, and removals that wait for them. For one thread.

    With several ranks, all of them call `save`, `raise_failure` and `end` in the same order.

    Args:
        options: those of `SyncCheckpointer`.

    Attributes:
        beside: whether saves run beside training. The plug-in sets it while it calls `fence` or has given
            ``optimizers``. If not, a save blocks until it is durable, and no thread stays.
        optimizers: returns the optimizers whose steps have to wait for the copies; called at each save.
        links: whether the framework keeps links beside the checkpoints, made in `link`.
    """

    def _forget(self) -> None:
        super()._forget()
        self._forget_saves()

    def _forget_saves(self) -> None:
        self.beside = self.links = False
        self._held: list[str] = []  # to be removed when no link names them
        self._to_link: list[str] = []
        self.optimizers: Callable[[], Sequence[torch.optim.Optimizer]] = tuple
        self._flying: deque[tuple[str, SaveHandle]] = deque()
        self._last: tuple[str, SaveHandle] | None = None
        self._removals: dict[str, Completion[None]] = {}
        self._due: deque[tuple[SaveHandle | None, Callable[[], object], Callable[[], object]]] = deque()

    # --- saving -------------------------------------------------------------------------------------------

    def save(self, state: Any, path: str, *, durable: bool = False, **options: Any) -> None:
        """Save a state under a name, and replace what is there. Returns at once if `beside`.

        Args:
            state: see `SyncCheckpointer.save`.
            path: where; see there.
            durable: block until it is durable in any case.
            options: other options of `SyncCheckpointer.save`.

        Raises:
            AiockptError: it can't be saved, or an earlier save has failed whose error nobody has got.
        """
        path = os.path.abspath(path)
        removal = self._removals.pop(path, None)
        if removal is not None:
            concurrent.futures.wait([removal])  # which would remove what is saved now
        if not self.beside:
            try:
                self.checkpointer.save(state, path, overwrite=True, **options)
            finally:
                self.end()
        elif durable:
            self.checkpointer.save(state, path, overwrite=True, **options)
        else:
            self._submit(state, path, options)

    def _submit(self, state: Any, path: str, options: dict[str, Any]) -> None:
        is_ordered = self.guard(self.optimizers())
        handle = self.checkpointer.submit(state, path, overwrite=True, **options)
        self._last = path, handle
        self._flying.append(self._last)
        if not is_ordered:
            handle.staged.result()

    def fence(self) -> None:
        """Make what changes the tensors from now on wait for the copies; see `SyncCheckpointer.fence`."""
        if self._flying:
            self.checkpointer.fence()

    def wait_for_copies(self) -> None:
        """Block until the save that was begun last is staged; raise its error."""
        if self._last is not None:
            self._last[1].staged.result()

    def in_flight(self, path: str) -> SaveHandle | None:
        """Return the save of a path that was begun last, if it may still be in flight; else it is durable."""
        path = os.path.abspath(path)
        return next((handle for flying, handle in reversed(self._flying) if flying == path), None)

    # --- removing -----------------------------------------------------------------------------------------

    def will_be(self, path: str) -> bool:
        """Return whether a save in flight is to write this path."""
        path = os.path.abspath(path)
        return any(flying == path and not handle.written.done() for flying, handle in self._flying)

    def remove(self, path: str) -> None:
        """Remove a checkpoint, when the save that was begun last is durable; if that fails, never. Does not block then.

        Without such a save it is removed at once. Does nothing if nothing is there, and none is being written.

        Raises:
            DeleteError: it is no checkpoint, or can't be removed.
        """
        path = os.path.abspath(path)
        if not os.path.lexists(path) and not self.will_be(path):
            return
        if self.links and (path in self._to_link or _is_linked(path)):
            self._held.append(path)
            return
        self._removals = {each: removal for each, removal in self._removals.items() if not removal.done()}
        if self._last is not None and self._last[0] == path:
            concurrent.futures.wait([self._last[1].written])
        elif self._last is not None:
            self._removals[path] = self.checkpointer.delete(path, after=self._last[1])
            return
        with SyncCheckpointer(process_group=None) as own:  # no other rank calls this
            try:
                own.delete(path)
            except CheckpointNotFoundError:
                return

    def link(self, path: str, make: Callable[[], object]) -> None:
        """Call what makes a link to a path as `then` does. What it has named before is removed only after that."""
        path = os.path.abspath(path)
        self._to_link.append(path)

        def forget() -> None:
            self._to_link.remove(path)

        def make_it() -> None:
            forget()
            make()
            held, self._held = self._held, []
            for each in held:
                self.remove(each)

        self.then(make_it, forget)

    # --- outcomes -----------------------------------------------------------------------------------------

    def then(self, function: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> None:
        """Call a function when the save that was begun last is durable: now, or in `raise_failure` or `end`.

        If the save fails, ``otherwise`` is called instead.
        """
        self._due.append((None if self._last is None else self._last[1], function, otherwise))
        self._do_due()

    def _do_due(self) -> None:
        while self._due and (self._due[0][0] is None or self._due[0][0].written.done()):
            handle, function, otherwise = self._due.popleft()
            is_durable = handle is None or handle.written._exception is None  # read by itself, it is not delivered
            (function if is_durable else otherwise)()

    def wait(self) -> None:
        """Block until no save is in flight. Raises no error of a save."""
        concurrent.futures.wait([handle.written for _, handle in self._flying])

    def raise_failure(self) -> None:
        """Raise the failure of a save that nobody has got, once. With several ranks, when all know of it."""
        failed: list[SaveHandle] = []
        while self._flying and self.is_over(self._flying[0][0], self._flying[0][1].written):
            _, handle = self._flying.popleft()
            failed += [handle] if handle.written._exception is not None else []
        self._do_due()
        if failed and (error := self.access.take_failure()) is not None:
            raise error

    def end(self) -> None:
        """Wait until every save is durable and what they replace is removed, and end all threads. Idempotent.

        Raises:
            AiockptError: the failure of a save that nobody has got.
        """
        self.wait()
        try:
            self._do_due()
        finally:
            self._forget_saves()
            super().end()

    def end_after(self, error: BaseException) -> None:
        """Do as `end` after an error that ends the program: a failure of a save becomes a note to that."""
        try:
            self.end()
        except AiockptError as exc:
            error.add_note(f"a checkpoint also failed: {exc}")


def _is_linked(path: str) -> bool:
    with os.scandir(os.path.dirname(path)) as entries:
        return any(each.is_symlink() and os.path.realpath(each.path) == os.path.realpath(path) for each in entries)
