"""Objects that are not plain tensors: pickled with ``torch.save``, and unpickled without trusting the pickle."""

from __future__ import annotations

import contextlib
import enum
import errno
import io
import pickle
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from isal.isal_zlib import crc32

from aiockpt.core.extent import freed_message, is_freed
from aiockpt.core.forks import ModuleLock
from aiockpt.errors import CorruptCheckpointError, LoadError, SaveError, UnsafeCheckpointError
from aiockpt.format.item.harmless import HARMLESS, HARMLESS_NAMES, UnknownMemberError, build_harmless, is_no_member
from aiockpt.format.item.item_framing import pickle_framing
from aiockpt.format.item.ziparchive import Framing, FramingError, read_archive
from aiockpt.format.pickle.guard import check_object_pickle, torch_globals
from aiockpt.format.pickle.machine import PickleError

_IMMUTABLE = frozenset({int, float, bool, complex, str, bytes, type(None)})
_SCALARS = frozenset({int, float, bool, str, type(None)})
# Pickles of scalars, and of lists of them, up to this size are framed here: `torch.save` is slow.
_SHORT_BYTES = 8 << 10
_INTERPRETED_BYTES = 256 << 10  # longer pickles take too long to interpret
_framings: dict[int, Framing] = {}  # of scalars, by length of the pickle
_allow_list_lock = ModuleLock()  # torch's allow-list is global to the process


def is_frozen(value: Any) -> bool:
    """Return whether a value is immutable, so that it may be serialised later."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and all(map(is_frozen, value)))


class _CheckingPickler(pickle.Pickler):
    """Refuses tensors that reach out of their storage, because they can't be loaded.

    With ``by_name``, Enum members are pickled by their names, in the form of Python's `enum.pickle_by_enum_name`.
    """

    by_name = True
    named: dict[Any, bool]  # classes and functions; True: the pickle names them, False: the class of another object
    met: dict[int, Any]  # the other objects, by id

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_freed(value):
            raise _FreedError(value)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self.named[value] = True
        elif not isinstance(value, np.generic | np.ndarray | np.dtype):
            self.named.setdefault(type(value), False)
            self.met[id(value)] = value
            if self.by_name and isinstance(value, enum.Enum) and _has_name(value):
                return getattr, (type(value), value._name_)
        return NotImplemented


def _has_name(member: enum.Enum) -> bool:
    """Return whether a member can be found by its name, and its class does not customise pickling."""
    kind = type(member)
    name = str(getattr(member, "_name_", ""))  # combined flags have no name of a member
    return (
        kind.__reduce_ex__ in (enum.Enum.__reduce_ex__, enum.Flag.__reduce_ex__)
        and kind.__members__.get(name) is member
        and getattr(kind, name, None) is member
    )


class _FreedError(Exception):
    pass


class TensorSeeker(pickle.Pickler):
    """Looks for tensors, arrays and objects with a state dict below others, by pickling these to nowhere.

    Nothing is asked for its values, which may be computed or resolved; what was looked at is not looked at again.
    """

    def __init__(self, *kinds: type) -> None:
        """Look for instances of these classes instead."""
        super().__init__(SimpleNamespace(write=len))
        self._kinds = kinds or (torch.Tensor, np.ndarray)
        self._method = "" if kinds else "state_dict"

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, self._kinds) or callable(getattr(type(value), self._method, None)):
            raise _FoundError
        return NotImplemented

    def finds(self, value: Any) -> bool:
        """Return whether there is one; True if the value can't be pickled, and so can't be one object."""
        try:
            self.dump(value)
        except Warning:  # the program turns warnings into errors
            raise
        except Exception:  # a user's __reduce__ may raise anything
            self.clear_memo()  # not all that is in it was looked at to the end
            return True
        return False


class _FoundError(Exception):
    pass


def encode_object(
    name: str, value: Any, named: dict[Any, bool] | None = None, met: dict[int, Any] | None = None
) -> bytes:
    """Pickle a value as ``torch.save`` does.

    ``named`` collects its classes and functions for `foreign_names`, ``met`` the objects in it by their ids.
    """
    try:
        if type(value) in _SCALARS or (type(value) is list and _SCALARS.issuperset(map(type, value))):
            data = pickle.dumps(value, torch.serialization.DEFAULT_PROTOCOL)
            if len(data) <= _SHORT_BYTES:
                framing = _framings.get(len(data))
                if framing is None:  # except for the id, it depends on the length alone
                    framing = _framings[len(data)] = pickle_framing(_saved(value), len(data))
                return b"".join((framing.prefix, data, framing.sealed_suffix(crc32(data))))
        return _saved(value, named, met)
    except _FreedError as exc:
        raise SaveError(freed_message(name, exc.args[0])) from None
    except Warning:  # the program turns warnings into errors
        raise
    except Exception as exc:  # a user's __reduce__ may raise anything
        if is_shortage(exc):
            raise SaveError(f"{name} can't be pickled now, for lack of memory or descriptors: {exc}") from exc
        raise SaveError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__} that can't be pickled: {exc}. "
            "Leave it out of the state dict, or put plain data in its place."
        ) from exc


def _saved(value: Any, named: dict[Any, bool] | None = None, met: dict[int, Any] | None = None) -> bytes:
    named, met = {} if named is None else named, {} if met is None else met
    data = _pickled(value, named, met, by_name=True)
    if named.get(getattr) and any(map(_needs_torch, named)):
        named.clear()
        return _pickled(value, named, met, by_name=False)  # torch's restricted unpickler has no getattr
    return data


def _pickled(value: Any, named: dict[Any, bool], met: dict[int, Any], *, by_name: bool) -> bytes:
    sink = io.BytesIO()
    # torch.save makes the pickler itself, so a class of its own is the only way to give it arguments. It also asks for
    # the module's name, to recognise dill.
    pickler = type("Pickler", (_CheckingPickler,), {"named": named, "met": met, "by_name": by_name})
    torch.save(value, sink, pickle_module=SimpleNamespace(Pickler=pickler, __name__="pickle"))
    return sink.getvalue()


def _needs_torch(each: Any) -> bool:
    """Return whether a pickle that names this class or function needs torch's unpickler."""
    module = getattr(each, "__module__", None) or ""
    return module.partition(".")[0] == "torch" and each not in (torch.dtype, torch.device, torch.Size)


def decode_object(
    name: str,
    blob: bytes,
    *,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
    map_location: Any = None,
    member_of: type[enum.Enum] | None = None,
) -> Any:
    """Unpickle a value that `encode_object` or DCP wrote; other arguments as in ``aiockpt.load``.

    ``member_of`` is the Enum class of the member that the value replaces: it is allowed for that reason alone.
    """
    try:
        records = read_archive(blob)
    except FramingError as exc:
        raise CorruptCheckpointError(f"the object {name} is damaged: {exc}") from exc
    if not trust and not _storages(records):
        try:
            data = _pickle_of(records)
            return build_harmless(data, named_globals((*safe_globals, *_enums(data, member_of))))
        except UnknownMemberError as exc:
            raise LoadError(f"the object {name} can't be made: {exc}") from None
        except PickleError:  # torch has the better message
            pass
    try:
        with extended_allow_list(safe_globals):
            if not trust:
                check_allowed(_pickle_of(records), _storages(records))
            with contextlib.nullcontext() if trust else checked_sparse():
                return _as_saved(
                    torch.load(io.BytesIO(blob), map_location=map_location, weights_only=not trust), records
                )
    except Warning:  # the program turns warnings into errors
        raise
    except Exception as exc:  # a damaged pickle raises nearly anything
        # An object that was refused has a pickle; one that is damaged may have none.
        is_refused = not trust and isinstance(exc, pickle.UnpicklingError)
        data = _pickle_of(records) if is_refused else b""
        raise unpickling_error(f"the object {name}", exc, data, _storages(records), safe_globals, trust=trust) from exc


def unpickling_error(
    what: str, exc: Exception, data: bytes, storages: Mapping[str, int], safe_globals: Sequence[Any], *, trust: bool
) -> LoadError:
    """Return the error for a failure of unpickling, with what to do about it."""
    if is_shortage(exc):
        return LoadError(f"{what} can't be unpickled now, for lack of memory or descriptors: {exc}")
    is_refused = isinstance(exc, pickle.UnpicklingError) and not trust and exc.__cause__ is None
    if is_refused:
        permission = permission_for(data, storages, safe_globals)
        if permission:
            return UnsafeCheckpointError(f"{what} needs {permission}")
    if isinstance(exc, PickleError):
        return UnsafeCheckpointError(
            f"{what} was not unpickled: {exc}, which is not what torch.save writes: it is damaged, or was changed; if "
            "you trust it, pass trust=True."
        )
    if is_refused:
        reason = str(exc)
        detail = reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or reason.partition("\n")[0]
        detail = detail.partition(". Please use")[0]  # its advice is for `torch.load`
        return UnsafeCheckpointError(
            f"{what} holds what torch's restricted unpickler can't read ({detail}). If you trust it, pass trust=True."
        )
    return CorruptCheckpointError(f"{what} can't be unpickled: {type(exc).__name__}: {exc}")


def check_allowed(data: bytes, storages: Mapping[str, int]) -> None:
    """Raise UnpicklingError if a pickle needs what torch's allow-list lacks, PickleError if it would cost too much."""
    needs = check_object_pickle(data, storages, allowed_names())
    if needs.names:
        raise pickle.UnpicklingError(f"{', '.join(needs.names)} is on no allow-list")
    if needs.error is not None:
        raise needs.error


def _as_saved(value: Any, records: Mapping[str, memoryview]) -> Any:
    """Return an untyped storage where torch makes a typed one of it."""
    if isinstance(value, torch.TypedStorage) and b"UntypedStorage" in _pickle_of(records):
        untyped: torch.UntypedStorage = value._untyped_storage
        return untyped
    return value


class _SparseTensors(list[torch.Tensor]):
    """torch's list of sparse tensors to validate. It looks empty to torch, which then does not warn about the time."""

    def __bool__(self) -> bool:
        return False

    def clear(self) -> None:
        """Keep the tensors: they are validated later."""


@contextlib.contextmanager
def checked_sparse() -> Iterator[None]:
    """Validate the indices of sparse tensors that are loaded inside: torch uses them as addresses unchecked.

    Since 2.14 torch validates them too, but warns that this takes time. Here the validation is not optional.
    """
    holder: Any = getattr(torch.serialization, "_serialization_tls", None)
    name = "sparse_tensors_to_validate"
    if not hasattr(holder, name):  # until 2.14 all threads share the list
        holder, name = torch._utils, "_sparse_tensors_to_validate"
    before, loaded = getattr(holder, name, None), _SparseTensors()
    if before is None:  # the list of an unknown version of torch, which validates in its own way
        yield
        return
    setattr(holder, name, loaded)
    try:
        yield
    finally:
        setattr(holder, name, before)
    if len(loaded):
        before.extend(loaded)
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
    """Return the size of each storage by its key."""
    inner = {name.partition("/")[2]: len(data) for name, data in records.items()}
    return {name.removeprefix("data/"): size for name, size in inner.items() if name.startswith("data/")}


def named_globals(allowed: Iterable[Any]) -> dict[str, Any]:
    """Return functions and classes by the full names that torch's allow-list uses."""
    pairs = [each if isinstance(each, tuple) else (each, "") for each in allowed]
    return {name or f"{each.__module__}.{each.__qualname__}": each for each, name in pairs}


def permitted(safe_globals: Sequence[Any]) -> dict[str, Any]:
    """Return ``safe_globals`` and what the program has put on torch's allow-list, by their full names."""
    with _allow_list_lock.held():
        return named_globals((*safe_globals, *torch.serialization.get_safe_globals()))


def allowed_names() -> Collection[str]:
    """Return the full names on torch's allow-list."""
    return named_globals(torch.serialization.get_safe_globals()).keys()


def _enums(data: bytes, member_of: type[enum.Enum] | None) -> list[Any]:
    """Return the Enum classes that are allowed besides ``safe_globals``: the target's, and those on torch's list."""
    found: list[Any] = [] if member_of is None else [member_of]
    if b"getattr" in data:  # torch does not read members by name
        with _allow_list_lock.held():
            found += [each for each in torch.serialization.get_safe_globals() if isinstance(each, enum.EnumMeta)]
    return found


@contextlib.contextmanager
def extended_allow_list(safe_globals: Sequence[Any]) -> Iterator[None]:
    """Add plain types and ``safe_globals`` to torch's allow-list; loads that do so take turns."""
    with _allow_list_lock.held():
        allowed = torch.serialization.get_safe_globals()
        # On exit torch removes all that it was given, even if the process had allowed it before.
        with torch.serialization.safe_globals([each for each in (*HARMLESS, *safe_globals) if each not in allowed]):
            yield


class Permission(NamedTuple):
    """The globals that a load of an object has to be allowed."""

    names: tuple[str, ...]  # full names for ``safe_globals``
    suffices: bool  # False: it takes ``trust=True``


def permission_for(data: bytes, storages: Mapping[str, int], given: Sequence[Any] = ()) -> str:
    """Return the globals that a pickle needs besides those given, and how to allow them; "" if it needs none."""
    needed = _permission(data, storages, given)
    if not needed.names:
        return ""
    names = ", ".join(needed.names)
    if not needed.suffices:
        return f"{names}, which could run code. If you trust it, pass trust=True."
    more = " as well" if given else ""
    return f"{names}, which could run code. If you trust it, pass safe_globals=[{names}]{more}, or trust=True."


def foreign_names(named: Mapping[Any, bool]) -> dict[str, bool]:
    """Return the full names of the classes and functions that `encode_object` collected, except plain data's."""
    names = {
        f"{getattr(each, '__module__', '')}.{getattr(each, '__qualname__', '')}": is_named
        for each, is_named in named.items()
    }
    return {name: is_named for name, is_named in names.items() if name not in _PLAIN_NAMES}


def needed_for(blob: bytes, foreign: Mapping[str, bool]) -> Permission:
    """Return what a load of an encoded object has to be allowed; long pickles are judged by `foreign_names` alone."""
    records = read_archive(blob)
    data = _pickle_of(records)
    if len(data) <= _INTERPRETED_BYTES:
        return _permission(data, _storages(records))
    known = {*allowed_names(), *torch_globals()}
    if any(_may_have(name) for name, is_named in foreign.items() if is_named):
        known.add(_GETATTR)
    names = tuple(name for name, is_named in foreign.items() if is_named and name not in known)
    return Permission(names, suffices=_can_be_listed(names))


def _permission(data: bytes, storages: Mapping[str, int], given: Sequence[Any] = ()) -> Permission:
    known = named_globals((*HARMLESS, *given)).keys() | allowed_names()
    needs = check_object_pickle(data, storages, known | (set() if storages else HARMLESS_NAMES))
    if not all(_may_have(name, attribute) for name, attribute in needs.lookups):
        needs.names[_GETATTR] = None
    return Permission(tuple(needs.names), suffices=needs.is_complete and _can_be_listed(needs.names))


def _may_have(name: str, member: str = "") -> bool:
    """Return whether a full name may be an Enum class with a member; nested classes have no global of their own."""
    found = _lookup(name) if name else _OTHER
    if isinstance(found, enum.EnumMeta):
        return "." not in found.__qualname__ and not is_no_member(found, member)
    return found is None


def _can_be_listed(names: Iterable[str]) -> bool:
    """Return whether an allow-list can hold these names, and torch accepts them on it."""
    return not any(
        _lookup(name) is _OTHER or name.startswith(("builtins.", "posix.", "nt.", "os.", "sys.")) for name in names
    )


_GETATTR = "builtins.getattr"
_PLAIN_NAMES = HARMLESS_NAMES - {_GETATTR}
_OTHER = object()


def _lookup(name: str) -> Any:
    """Find a class or function by its full name; None if it is not imported, `_OTHER` if its real name differs."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        if found is not None:
            for attribute in parts[cut:]:  # not by getattr, which may trigger a lazy import
                found = getattr(found, "__dict__", {}).get(attribute)
            if not isinstance(found, type | FunctionType | BuiltinFunctionType):
                return _OTHER
            return found if f"{found.__module__}.{found.__qualname__}" == name else _OTHER
    return None


def is_shortage(error: BaseException) -> bool:
    """Return whether an error is due to a lack of memory or descriptors, not to the value."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
