"""The end of a load, in the caller's thread: `load_state_dict` of live objects, and warnings about missing keys."""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiockpt.core.dataclasses import dataclass
from aiockpt.core.parameters import outer_stacklevel
from aiockpt.core.spans import Span
from aiockpt.core.wording import some_of
from aiockpt.errors import LoadError, MissingKeysWarning
from aiockpt.reading.plain_loading import has_torchs_loading
from aiockpt.reading.read_plan import annotate
from aiockpt.snapshot.live import LiveObject, refuse_awaitable

if TYPE_CHECKING:
    from aiockpt.core.futures import Call
    from aiockpt.telemetry.progress import ReadReport


class Gift(NamedTuple):
    """A live object with the state that it is given."""

    live: LiveObject
    state: Any
    asked: Collection[str] | None = None  # the only names that the load was asked for; None: all

    def load(self, *, strict: bool) -> tuple[list[str], list[str]]:
        """Call ``load_state_dict``; return the names of keys that were missing, and of those that were unexpected."""
        live, value = self.live, self.live.value
        # A module that is given a part of its keys can't be strict itself.
        is_part = self.asked is not None and isinstance(value, torch.nn.Module) and has_torchs_loading(value)
        is_lenient = is_part or (not strict and _takes_strict(value.load_state_dict))
        result = value.load_state_dict(self.state, strict=False) if is_lenient else value.load_state_dict(self.state)
        refuse_awaitable(result, f"load_state_dict() of {live.described}", LoadError)
        missing = _names(live.name, getattr(result, "missing_keys", ()))
        unexpected = _names(live.name, getattr(result, "unexpected_keys", ()))
        if is_part:
            missing = [name for name in missing if name in (self.asked or ())]
            if strict and (missing or unexpected):
                raise LoadError(
                    f"load_state_dict() of {live.described} misses {some_of(missing, 10) or 'no key'}, and does not "
                    f"know {some_of(unexpected, 10) or 'any that it was not given'}"
                )
        return missing, unexpected


@dataclass(eq=False, slots=True)
class Filled:
    """The result of the engine's part of a load: all tensors are filled, live objects have yet to be given states."""

    path: str
    value: Any  # returned to the caller
    gifts: Sequence[Gift] = ()
    missing: Sequence[str] = ()  # keys that the checkpoint lacks
    strict: bool | Callable[[str], bool] = True  # passed on to `load_state_dict` if it takes it
    placed: tuple[str, ...] = ()  # the keys whose tensors were filled
    unexpected: Sequence[str] = ()  # keys that live objects did not know

    def hand_over(self) -> None:
        """Call ``load_state_dict`` of each object in this thread; a LoadError names the objects that succeeded."""
        done: list[str] = []
        missing, unexpected = dict.fromkeys(self.missing), dict.fromkeys(self.unexpected)
        for each in self.gifts:
            try:
                lacking, unknown = each.load(strict=self.strict is True)
                if callable(self.strict) and (needed := [name for name in lacking if self.strict(name)]):
                    raise LoadError(f"load_state_dict() of {each.live.described} misses {some_of(needed, 10)}")
            except Exception as exc:
                what = f"load_state_dict() of {each.live.described}"
                reason = str(exc) if isinstance(exc, LoadError) else f"{what} failed: {type(exc).__name__}: {exc}"
                before = (
                    f"{', '.join(done)} had been given theirs" if done else "no other object had been given its state"
                )
                error = LoadError(f"{self.path}: {reason}; {before}.")
                if self.placed:
                    annotate(error, len(self.placed), self.placed)
                raise error from exc
            if self.strict is not True:
                missing.update(dict.fromkeys(lacking))
                unexpected.update(dict.fromkeys(unknown))
            done.append(each.live.name or type(each.live.value).__name__)
        self.missing, self.unexpected = list(missing), list(unexpected)

    def warn(self, missing: list[str] | None) -> None:
        """Warn about missing and unexpected keys, and append the missing ones to the caller's list."""
        if missing is not None:
            missing.extend(self.missing)
        problems = [
            f"{what} {some_of(names, 10)}"
            for names, what in (
                (self.missing, f"lacks {len(self.missing)} of the keys asked for, which stay as they are:"),
                (self.unexpected, f"has {len(self.unexpected)} keys that the target does not know:"),
            )
            if names
        ]
        if problems:
            warnings.warn(
                MissingKeysWarning(
                    f"{self.path} {'; it '.join(problems)}", tuple(self.missing), tuple(self.unexpected)
                ),
                stacklevel=outer_stacklevel(),
            )


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """One load of the facades: the engine's part, then the caller's."""

    _call: Call[Filled]  # the engine's part
    _missing: list[str] | None  # the caller's list for missing keys
    _conclude: Callable[[BaseException | None], Call[None] | None]  # reports to the other ranks; None if there are none
    _threads: set[int]  # that are calling `load_state_dict`
    _report: ReadReport

    async def wait(self) -> Any:
        """Wait for the engine's part, then call `load_state_dict` in this task."""
        with self._report:
            filled = await self._call.wait(self._drop)
            error = self._hand_over(filled)
            over = self._conclude(error)
            if over is not None:
                await over.wait()
            return self._finish(filled, error)

    def result(self) -> Any:
        """Block for the engine's part, then call `load_state_dict` in this thread."""
        with self._report:
            filled = self._call.result(self._drop)
            error = self._hand_over(filled)
            over = self._conclude(error)
            if over is not None:
                over.result()
            return self._finish(filled, error)

    def _hand_over(self, filled: Filled) -> BaseException | None:
        thread, begin = threading.get_ident(), time.perf_counter()
        self._threads.add(thread)
        try:
            filled.hand_over()
        except BaseException as exc:  # raised by _finish, after the other ranks were notified
            return exc
        finally:
            self._threads.discard(thread)
            if filled.gifts:
                name = threading.current_thread().name
                self._report.spans.append(Span("load_state_dict", name, begin, time.perf_counter()))
        return None

    def _finish(self, filled: Filled, error: BaseException | None) -> Any:
        if error is not None:
            raise error
        filled.warn(self._missing)
        return filled.value

    def _drop(self, _: Filled) -> None:
        """Report a result that the cancelled caller no longer takes to the other ranks."""
        self._conclude(LoadError("the load was cancelled before objects were given their states"))


def _takes_strict(load: Callable[..., Any]) -> bool:
    try:
        return "strict" in inspect.signature(load).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return False


def _names(prefix: str, keys: object) -> list[str]:
    return [f"{prefix}.{key}" if prefix else str(key) for key in (keys if isinstance(keys, list | tuple) else ())]
