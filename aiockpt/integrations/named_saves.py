"""The saves of a framework that names its checkpoints itself, and removes one as soon as it has asked for a newer one.

Such a framework saves and removes paths, as if each call had done its work when it returns. Here the work is done
later, in an order in which no checkpoint is removed before the one that is to replace it is durable.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiockpt.errors import AiockptError, CheckpointNotFoundError
from aiockpt.integrations.lifetime import Lifetime
from aiockpt.sync_checkpointer import SyncCheckpointer

if TYPE_CHECKING:
    import torch

    from aiockpt.core.futures import Completion
    from aiockpt.saving.handle import SaveHandle


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
