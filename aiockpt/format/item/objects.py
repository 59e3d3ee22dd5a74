"""Objects that are not plain tensors: pickled by ``torch.save``, and read without trusting the pickle."""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import pickle
import sys
import threading
from argparse import Namespace
from collections import Counter, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from isal.isal_zlib import crc32

from aiockpt.core.extent import freed_message, is_freed
from aiockpt.errors import CorruptCheckpointError, LoadError, SaveError, UnsafeCheckpointError
from aiockpt.format.item.harmless import HARMLESS_NAMES, UnknownMemberError, build_harmless, is_no_member
from aiockpt.format.item.item_check import ItemChecker
from aiockpt.format.item.torchzip import pickle_framing
from aiockpt.format.item.ziparchive import FramingError, read_archive
from aiockpt.format.pickle.guard import ForeignNameError, Needs, check_object_pickle, needs_of, torch_names
from aiockpt.format.pickle.machine import Machine, PickleError
from aiockpt.format.pickle.opcodes import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from aiockpt.format.item.ziparchive import Framing

_IMMUTABLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
_SCALARS = frozenset({int, float, bool, str, type(None)})
_SHORT_BYTES = 256
"""Pickles of scalars up to this size are framed and decoded here; a state dict may hold thousands."""
_SMALL_BYTES = 4096
_FOLLOWED_BYTES = 256 << 10
_framings: dict[int, Framing] = {}
_allow_list = threading.Lock()

HARMLESS = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice),
    *(deque, defaultdict, Counter, date, datetime, time, timedelta, timezone, Decimal),
    *(PurePosixPath, PureWindowsPath, PosixPath, Namespace, SimpleNamespace, io.BytesIO),
)
"""Types of the standard library whose construction runs no code of the pickle's choice."""


def is_frozen(value: Any) -> bool:
    """Tell whether a value can't change, so that it may be serialised later."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and all(map(is_frozen, value)))


class _CheckingPickler(pickle.Pickler):
    """Refuses tensors that reach out of their storage, for they can't be loaded, wherever in a value they are.

    Members of Enum classes are pickled by their names, in the form of Python's `enum.pickle_by_enum_name`.
    """

    by_name = True
    named: dict[Any, bool]
    """Each class and function that the pickle names, and the classes of other objects, which it need not name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_freed(value):
            raise _FreedError
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self.named[value] = True
        elif not isinstance(value, np.generic | np.ndarray | np.dtype):
            self.named.setdefault(type(value), False)
            if self.by_name and isinstance(value, enum.Enum) and _has_name(value):
                return getattr, (type(value), value._name_)
        return NotImplemented


def _has_name(member: enum.Enum) -> bool:
    """Whether a member is found by its name, and its class does not pickle it in a way of its own."""
    kind = type(member)
    name = str(getattr(member, "_name_", ""))  # no member's for combined flags
    return (
        kind.__reduce_ex__ in (enum.Enum.__reduce_ex__, enum.Flag.__reduce_ex__)
        and kind.__members__.get(name) is member
        and getattr(kind, name, None) is member
    )


class _FreedError(Exception):
    pass


def encode_object(name: str, value: Any, named: dict[Any, bool] | None = None) -> bytes:
    """Pickle a value as ``torch.save`` does.

    Args:
        name: the key, for messages.
        value: what to pickle.
        named: is given the classes and functions that it is made of, for `foreign_names`.

    Raises:
        SaveError: naming the key, when the value can't be pickled.
    """
    try:
        if type(value) in _SCALARS:
            data = pickle.dumps(value, torch.serialization.DEFAULT_PROTOCOL)
            if len(data) <= _SHORT_BYTES:
                framing = _framings.get(len(data))
                if framing is None:  # apart from an id made of all CRCs, it depends on the length alone
                    framing = _framings[len(data)] = pickle_framing(_saved(value), len(data))
                return b"".join((framing.prefix, data, framing.sealed_suffix(crc32(data))))
        return _saved(value, named)
    except _FreedError:
        raise SaveError(freed_message(name)) from None
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:  # a user's __reduce__ may raise anything
        if is_shortage(exc):
            raise SaveError(f"{name} can't be pickled now, for lack of memory or descriptors: {exc}") from exc
        raise SaveError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__} that can't be pickled: {exc}. "
            "Leave it out of the state dict, or put plain data in its place."
        ) from exc


def _saved(value: Any, named: dict[Any, bool] | None = None) -> bytes:
    named = {} if named is None else named
    data = _pickled(value, named, by_name=True)
    if named.get(getattr) and any(map(_is_of_torch, named)):
        named.clear()
        return _pickled(value, named, by_name=False)  # torch's restricted unpickler has no getattr
    return data


def _pickled(value: Any, named: dict[Any, bool], *, by_name: bool) -> bytes:
    sink = io.BytesIO()
    pickler = type("Pickler", (_CheckingPickler,), {"named": named, "by_name": by_name})
    torch.save(value, sink, pickle_module=SimpleNamespace(Pickler=pickler, __name__="pickle"))
    return sink.getvalue()


def _is_of_torch(each: Any) -> bool:
    """Whether a class or a function makes what only torch's unpickler reads."""
    module = getattr(each, "__module__", None) or ""
    return module.partition(".")[0] == "torch" and each not in (torch.dtype, torch.device, torch.Size)


class ScalarDecoder:
    """Decodes numbers, texts and None without ``torch.load``; most have the framing of one seen before."""

    def __init__(self) -> None:
        self._checker = ItemChecker()

    def decode(self, blob: memoryview) -> tuple[Any] | None:
        """Decode an item; None where it is anything else, or damaged: `decode_object` says what."""
        if len(blob) > _SMALL_BYTES:
            return None
        try:
            data = self._checker.object_pickle(blob)
            if data is None:
                return None
            value = Machine(data, _find_nothing, None, HANDLERS).run()
        except (FramingError, PickleError):
            return None
        return (value,) if type(value) in _SCALARS else None


def _find_nothing(module: str, name: str) -> Any:
    raise PickleError(f"{module}.{name} is no scalar")


def decode_object(
    name: str,
    blob: bytes,
    *,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    map_location: Any = None,
    member_of: type[enum.Enum] | None = None,
) -> Any:
    """Unpickle a value that `encode_object` or DCP wrote.

    Args:
        name: the key, for messages.
        blob: the item's bytes.
        safe_globals: functions and classes that the pickle may use besides torch's own list.
        trust: unpickle anything, which runs whatever code the pickle asks for.
        map_location: as in ``torch.load``.
        member_of: the Enum class of the member whose place the value takes, which is allowed for that alone.

    Raises:
        LoadError: an Enum class has no member of the stored name.
        UnsafeCheckpointError: the pickle needs something that was not allowed.
        CorruptCheckpointError: the bytes are not those that were written.
    """
    try:
        records = read_archive(blob)
    except FramingError as exc:
        raise CorruptCheckpointError(f"the object {name} is damaged: {exc}") from exc
    if not trust:
        try:
            data = _pickle_of(records)
            return build_harmless(data, _named((*safe_globals, *_enums(data, member_of))))
        except UnknownMemberError as exc:
            raise LoadError(f"the object {name} can't be made: {exc}") from None
        except PickleError:  # torch says why, or finds the tensors in it
            pass
    try:
        # torch's allow-list is global to the process, so loads that extend it take turns.
        with _allow_list, torch.serialization.safe_globals(_not_yet_allowed((*HARMLESS, *safe_globals))):
            if not trust:
                check_object_pickle(_pickle_of(records), _storages(records), _allowed_names())
            with contextlib.nullcontext() if trust else checked_sparse():
                return torch.load(io.BytesIO(blob), map_location=map_location, weights_only=not trust)
    except (pickle.UnpicklingError, ForeignNameError) as exc:
        if trust:
            raise CorruptCheckpointError(f"the object {name} can't be unpickled: {exc}") from exc
        raise UnsafeCheckpointError(f"the object {name} {why_refused(records, safe_globals, exc)}") from exc
    except PickleError as exc:
        raise UnsafeCheckpointError(
            f"the object {name} was not unpickled: {exc}, which is not what torch.save writes: it is damaged, or was "
            "changed; if you trust the checkpoint, pass trust=True."
        ) from exc
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:  # a damaged pickle raises nearly anything
        if is_shortage(exc):
            raise LoadError(f"the object {name} can't be unpickled now, for lack of resources: {exc}") from exc
        raise CorruptCheckpointError(f"the object {name} can't be unpickled: {type(exc).__name__}: {exc}") from exc


class _Collected(list[torch.Tensor]):
    """Sparse tensors as torch makes them; it takes the list for empty, so that it doesn't warn of a look into them."""

    def __bool__(self) -> bool:
        return False

    def clear(self) -> None:
        """Keep them: the look is still to come."""


@contextlib.contextmanager
def checked_sparse() -> Iterator[None]:
    """Look at the indices of sparse tensors that are loaded here, which are addresses of memory: torch believes them.

    Since 2.14 torch looks as well, with a warning that this takes time; whoever loads through us can't do without.
    """
    local: Any = getattr(torch.serialization, "_serialization_tls", None)
    holder, name = local, "sparse_tensors_to_validate"
    if not hasattr(holder, name):  # until 2.14 all threads share them
        holder, name = torch._utils, "_sparse_tensors_to_validate"
    before, made = getattr(holder, name, None), _Collected()
    if before is None:  # not where it is known to be; torch looks in its own way
        yield
        return
    setattr(holder, name, made)
    try:
        yield
    finally:
        setattr(holder, name, before)
    if len(made):
        before.extend(made)
        validate: Any = torch._utils._validate_loaded_sparse_tensors
        checking: Any = torch.sparse.check_sparse_tensor_invariants
        with checking(enable=True):
            validate()


def _pickle_of(records: Mapping[str, memoryview]) -> bytes:
    data = next((data for name, data in records.items() if name.partition("/")[2] == "data.pkl"), None)
    if data is None:
        raise PickleError("it has no data.pkl")
    return bytes(data)


def _storages(records: Mapping[str, memoryview]) -> dict[str, int]:
    """Return the bytes of each storage."""
    inner = {name.partition("/")[2]: len(data) for name, data in records.items()}
    return {name.removeprefix("data/"): size for name, size in inner.items() if name.startswith("data/")}


def _named(allowed: Iterable[Any]) -> dict[str, Any]:
    """Return functions and classes by their full names, as torch names them."""
    pairs = [each if isinstance(each, tuple) else (each, "") for each in allowed]
    return {name or f"{each.__module__}.{each.__qualname__}": each for each, name in pairs}


def _allowed_names() -> Collection[str]:
    """Return what torch's allow-list has now."""
    return _named(torch.serialization.get_safe_globals()).keys()


def _enums(data: bytes, member_of: type[enum.Enum] | None) -> list[Any]:
    """Return the Enum classes that are allowed besides ``safe_globals``: that of the target, those on torch's list."""
    found: list[Any] = [] if member_of is None else [member_of]
    if b"getattr" in data:  # torch does not read members by name
        with _allow_list:
            found += [each for each in torch.serialization.get_safe_globals() if isinstance(each, enum.EnumMeta)]
    return found


def _not_yet_allowed(wanted: Sequence[Any]) -> list[Any]:
    """Leave out what the process allows already: torch takes away, in the end, whatever it was given."""
    allowed = torch.serialization.get_safe_globals()
    return [each for each in wanted if each not in allowed]


def why_refused(records: Mapping[str, memoryview], safe_globals: Sequence[Any], error: Exception) -> str:
    """Return a text of what an object needs to be allowed, and what to do about it."""
    permission = permission_for(_pickle_of(records), _storages(records), safe_globals)
    if permission:
        return f"needs {permission}"
    reason = str(error)
    detail = reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or reason.partition("\n")[0]
    return (
        f"holds what torch's restricted unpickler can't read ({detail}). If you trust the checkpoint, pass trust=True."
    )


class Permission(NamedTuple):
    """What a load of an object has to be allowed.

    Attributes:
        names: the full names of the classes and functions that it has to be given.
        suffices: whether that is enough; else it takes ``trust=True``.
    """

    names: tuple[str, ...]
    suffices: bool


def permission_for(data: bytes, storages: Mapping[str, int], given: Sequence[Any] = ()) -> str:
    """Return a text of what to pass to a load of a pickle, given some of it; nothing if it needs nothing."""
    needed = _permission(data, storages, given)
    if not needed.names:
        return ""
    names = ", ".join(needed.names)
    if not needed.suffices:
        return f"{names}, which could run code. If you trust it, pass trust=True."
    more = " as well" if given else ""
    return f"{names}, which could run code. If you trust it, pass safe_globals=[{names}]{more}, or trust=True."


def foreign_names(named: Mapping[Any, bool]) -> dict[str, bool]:
    """Return the full names of those classes and functions of a value that are not plain data's, as `encode_object`."""
    names = {
        f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', '')}": is_named
        for each, is_named in named.items()
    }
    return {name: is_named for name, is_named in names.items() if name not in _PLAIN_NAMES}


def needed_for(blob: bytes, foreign: Mapping[str, bool]) -> Permission:
    """Return what a load of an object will have to be allowed.

    Args:
        blob: what `encode_object` made.
        foreign: its `foreign_names`. Pickles that take long to follow are judged by them alone.
    """
    records = read_archive(blob)
    data = _pickle_of(records)
    if len(data) <= _FOLLOWED_BYTES:
        return _permission(data, _storages(records))
    known = {*_allowed_names(), *torch_names()}
    if any(_may_have(name) for name, is_named in foreign.items() if is_named):
        known.add(_GETATTR)
    names = tuple(name for name, is_named in foreign.items() if is_named and name not in known)
    return Permission(names, suffices=_can_be_listed(names))


def _permission(data: bytes, storages: Mapping[str, int], given: Sequence[Any] = ()) -> Permission:
    known = _named((*HARMLESS, *given)).keys() | _allowed_names()
    needs = needs_of(data, storages, known | (set() if storages else HARMLESS_NAMES))
    if not all(_may_have(name, attribute) for name, attribute in needs.lookups):
        needs = needs._replace(names=tuple(dict.fromkeys((*needs.names, _GETATTR))))
    return Permission(needs.names, suffices=_suffices(needs))


def _may_have(name: str, member: str = "") -> bool:
    """Whether what has a full name may be an Enum class with a member; one in another class is not named by itself."""
    found = _lookup(name) if name else _OTHER
    if isinstance(found, enum.EnumMeta):
        return "." not in found.__qualname__ and not is_no_member(found, member)
    return found is None


def _suffices(needs: Needs) -> bool:
    """Whether it is enough to allow the names: what they stand for here makes what the pickle makes of it."""
    return (
        needs.is_complete
        and not (needs.fills and needs.has_storages)
        and all(isinstance(_lookup(name) or object, type) for name in needs.made & set(needs.names))
        and _can_be_listed(needs.names)
    )


def _can_be_listed(names: Sequence[str]) -> bool:
    """Whether classes and functions have the names that a list of them would give them, and torch takes them."""
    return not any(
        _lookup(name) is _OTHER or name.startswith(("builtins.", "posix.", "nt.", "os.", "sys.")) for name in names
    )


_GETATTR = "builtins.getattr"
_PLAIN_NAMES = (HARMLESS_NAMES | _named(HARMLESS).keys()) - {_GETATTR}
_OTHER = object()


def _lookup(name: str) -> Any:
    """Find what a full name stands for here; None if it is not imported, `_OTHER` if it has another name."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        if found is not None:
            for part in parts[cut:]:  # not by getattr, which may import what a module is to have
                found = getattr(found, "__dict__", {}).get(part)
            if not isinstance(found, type | FunctionType | BuiltinFunctionType):
                return _OTHER
            return found if f"{found.__module__}.{found.__qualname__}" == name else _OTHER
    return None


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that the machine lacks memory or descriptors, and nothing of the value."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
