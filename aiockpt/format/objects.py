"""Objects that are not plain tensors: pickled by ``torch.save``, and read without trusting the pickle."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections import defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.errors import CorruptCheckpointError, SaveError, UnsafeCheckpointError
from aiockpt.format.pickle_guard import check_object_pickle
from aiockpt.format.pickle_machine import PickleError
from aiockpt.format.ziparchive import FramingError, read_archive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_IMMUTABLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
_allow_list = threading.Lock()

HARMLESS = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice),
    *(deque, defaultdict, date, datetime, time, timedelta, timezone),
)
"""Types of the standard library whose construction runs no code of the pickle's choice."""


def is_frozen(value: Any) -> bool:
    """Tell whether a value can't change, so that it may be serialised later."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and all(map(is_frozen, value)))


def encode_object(name: str, value: Any) -> bytes:
    """Pickle a value as ``torch.save`` does.

    Raises:
        SaveError: naming the key, when the value can't be pickled.
    """
    sink = io.BytesIO()
    try:
        torch.save(value, sink)
    except Exception as exc:  # a user's __reduce__ may raise anything
        raise SaveError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__} that can't be pickled: {exc}. "
            "Leave it out of the state dict, or put plain data in its place."
        ) from exc
    return sink.getvalue()


def decode_object(
    name: str, blob: bytes, *, safe_globals: Sequence[Any] = (), trust: bool = False, map_location: Any = None
) -> Any:
    """Unpickle a value that `encode_object` or DCP wrote.

    Args:
        name: the key, for messages.
        blob: the item's bytes.
        safe_globals: functions and classes that the pickle may use besides torch's own list.
        trust: unpickle anything, which runs whatever code the pickle asks for.
        map_location: as in ``torch.load``.

    Raises:
        UnsafeCheckpointError: the pickle needs something that was not allowed.
        CorruptCheckpointError: the bytes are not those that were written.
    """
    try:
        records = read_archive(blob)
    except FramingError as exc:
        raise CorruptCheckpointError(f"the object {name} is damaged: {exc}") from exc
    try:
        # torch's allow-list is global to the process, so loads that extend it take turns.
        with _allow_list, torch.serialization.safe_globals(_not_yet_allowed((*HARMLESS, *safe_globals))):
            if not trust:
                _check_pickle(records)
            with contextlib.nullcontext() if trust else _checked_sparse(blob):
                return torch.load(io.BytesIO(blob), map_location=map_location, weights_only=not trust)
    except PickleError as exc:
        raise UnsafeCheckpointError(
            f"the object {name} was not unpickled: {exc}. It is damaged or was made to harm; if you trust the "
            "checkpoint, pass trust=True."
        ) from exc
    except pickle.UnpicklingError as exc:
        if trust:
            raise CorruptCheckpointError(f"the object {name} can't be unpickled: {exc}") from exc
        raise UnsafeCheckpointError(_why_refused(name, str(exc))) from exc
    except Exception as exc:  # a damaged pickle raises nearly anything
        raise CorruptCheckpointError(f"the object {name} can't be unpickled: {type(exc).__name__}: {exc}") from exc


def _checked_sparse(blob: bytes) -> contextlib.AbstractContextManager[Any]:
    """Have torch look at the indices of sparse tensors, which it believes otherwise: they are addresses of memory."""
    if b"_rebuild_sparse_tensor" not in blob:
        return contextlib.nullcontext()
    checking: Any = torch.sparse.check_sparse_tensor_invariants
    return checking(enable=True)  # type: ignore[no-any-return]


def _check_pickle(records: Mapping[str, memoryview]) -> None:
    """Check that the pickle asks for nothing that its bytes can't justify, with torch's allow-list as it is now."""
    inner = {name.partition("/")[2]: data for name, data in records.items()}
    if "data.pkl" not in inner:
        raise PickleError("it has no data.pkl")
    storages = {name.removeprefix("data/"): len(data) for name, data in inner.items() if name.startswith("data/")}
    listed = [each if isinstance(each, tuple) else (each, "") for each in torch.serialization.get_safe_globals()]
    allowed = {name or f"{each.__module__}.{each.__qualname__}" for each, name in listed}
    check_object_pickle(bytes(inner["data.pkl"]), storages, allowed)


def _not_yet_allowed(wanted: Sequence[Any]) -> list[Any]:
    """Leave out what the process allows already: torch takes away, in the end, whatever it was given."""
    allowed = torch.serialization.get_safe_globals()
    return [each for each in wanted if each not in allowed]


def _why_refused(name: str, reason: str) -> str:
    """Say what torch's restricted unpickler did not like, and what to do about it."""
    wanted = (
        reason.partition("Unsupported global: GLOBAL ")[2].split(" ")[0] or reason.partition("GLOBAL ")[2].split(" ")[0]
    )
    if wanted:
        return (
            f"the object {name} needs {wanted}, which could run code. If you trust it, pass "
            f"safe_globals=[{wanted.rpartition('.')[2]}], or trust=True to allow everything."
        )
    detail = reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or reason.partition("\n")[0]
    return (
        f"the object {name} holds what torch's restricted unpickler can't read ({detail}). "
        "If you trust the checkpoint, pass trust=True."
    )
