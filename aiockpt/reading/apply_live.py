"""What of a load is left to the caller's thread: giving live objects their states, and warning of what was missing."""

from __future__ import annotations

import inspect
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiockpt.errors import LoadError, MissingKeysWarning
from aiockpt.snapshot.live import refuse_awaitable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aiockpt.core.futures import Call
    from aiockpt.snapshot.live import LiveObject


@dataclass(eq=False, slots=True)
class Filled:
    """A state whose tensors are loaded.

    Attributes:
        path: the checkpoint.
        value: what the caller gets.
        gifts: the live objects, each with the state to give it.
        missing: the keys that the checkpoint lacks.
        strict: whether objects that can tell are to refuse keys they lack or don't know.
        unexpected: the keys that objects did not know.
    """

    path: str
    value: Any
    gifts: Sequence[tuple[LiveObject, Any]] = ()
    missing: Sequence[str] = ()
    strict: bool = True
    unexpected: Sequence[str] = ()

    def hand_over(self) -> None:
        """Call ``load_state_dict`` of each object, in this thread.

        Raises:
            LoadError: one failed; the message names it, and those that were given their states before.
        """
        done: list[str] = []
        for each, state in self.gifts:
            load: Callable[..., Any] = each.value.load_state_dict
            what = f"load_state_dict() of {each.described}"
            try:
                result = load(state) if self.strict or not _takes_strict(load) else load(state, strict=False)
                refuse_awaitable(result, what, LoadError)
            except Exception as exc:
                reason = str(exc) if isinstance(exc, LoadError) else f"{what} failed: {type(exc).__name__}: {exc}"
                before = f"{', '.join(done)} had been given theirs" if done else "no object had been given its state"
                raise LoadError(f"{self.path}: {reason}; {before}, and tensors were filled before that") from exc
            if not self.strict:
                self.missing = _with(self.missing, each.name, getattr(result, "missing_keys", ()))
                self.unexpected = _with(self.unexpected, each.name, getattr(result, "unexpected_keys", ()))
            done.append(each.name or type(each.value).__name__)

    def tell(self, missing: list[str] | None, stacklevel: int) -> None:
        """Warn of what was missing, and add it to the caller's list."""
        if missing is not None:
            missing.extend(self.missing)
        said = [
            f"{what} {_listed(names)}"
            for names, what in (
                (self.missing, f"lacks {len(self.missing)} of the keys asked for, which stay as they are:"),
                (self.unexpected, f"has {len(self.unexpected)} keys that the target does not know:"),
            )
            if names
        ]
        if said:
            warnings.warn(
                MissingKeysWarning(f"{self.path} {'; it '.join(said)}", tuple(self.missing), tuple(self.unexpected)),
                stacklevel=stacklevel + 1,
            )


class Loading:
    """One load of the facades: the engine's part, and then the caller's.

    Args:
        call: the engine's part, which gives what is left to do.
        missing: the caller's list of keys that were not there.
        conclude: tells the other ranks how the caller's part went; None without others.
        threads: has those that give objects their states at the moment.
    """

    def __init__(
        self,
        call: Call[Filled],
        missing: list[str] | None,
        conclude: Callable[[BaseException | None], Call[None] | None],
        threads: set[int],
    ) -> None:
        self._call = call
        self._missing = missing
        self._conclude = conclude
        self._threads = threads

    async def wait(self) -> Any:
        """Wait for the engine's part, then give objects their states in this task."""
        filled = await self._call.wait(self._drop)
        error = self._hand_over(filled)
        over = self._conclude(error)
        if over is not None:
            await over.wait()
        return self._told(filled, error)

    def result(self) -> Any:
        """Block for the engine's part, then give objects their states in this thread."""
        filled = self._call.result(self._drop)
        error = self._hand_over(filled)
        over = self._conclude(error)
        if over is not None:
            over.result()
        return self._told(filled, error)

    def _hand_over(self, filled: Filled) -> BaseException | None:
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            filled.hand_over()
        except BaseException as exc:  # raised again when the other ranks know
            return exc
        finally:
            self._threads.discard(thread)
        return None

    def _told(self, filled: Filled, error: BaseException | None) -> Any:
        if error is not None:
            raise error
        filled.tell(self._missing, stacklevel=4)
        return filled.value

    def _drop(self, _: Filled) -> None:
        """Tell the other ranks of a load whose result came too late for the caller."""
        self._conclude(LoadError("the load was cancelled before objects were given their states"))


def _takes_strict(load: Callable[..., Any]) -> bool:
    try:
        return "strict" in inspect.signature(load).parameters
    except (TypeError, ValueError):  # written in C
        return False


def _with(names: Sequence[str], prefix: str, more: object) -> list[str]:
    keys: Iterable[Any] = more if isinstance(more, list | tuple) else ()
    return list(dict.fromkeys([*names, *(f"{prefix}.{key}" if prefix else str(key) for key in keys)]))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
