"""Whole ``torch.save`` files: their structure, with the place of each tensor instead of its bytes.

The pickle in such a file is read by torch's own restricted unpickler, as ``torch.load(weights_only=True)``
does, but every storage is a stand-in without memory. So the structure holds *meta* tensors, each of which
leads back to the record of the file where its bytes are.

Source of the layout: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from aiockpt.errors import CorruptCheckpointError, LoadError, UnsafeCheckpointError
from aiockpt.format.index import ChunkEntry, TensorEntry, TensorItem
from aiockpt.format.item.objects import HARMLESS, _allow_list, _not_yet_allowed, is_shortage, permission_for
from aiockpt.format.pickle.guard import ForeignNameError, check_object_pickle
from aiockpt.format.pickle.machine import PickleError
from aiockpt.format.torch_file.archive import StandIns, open_archive
from aiockpt.format.torch_file.nesting_limits import is_too_much

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiockpt.format.torch_file.archive import StoredStorage

_UNPLACEABLE = {
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_wrapper_subclass": "a tensor subclass without storage",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that stores it as a NumPy array",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that stores it by way of the CPU",
    "_rebuild_xla_tensor": "an XLA tensor",
}


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """What a ``torch.save`` file holds.

    Attributes:
        name: the file.
        value: what was saved, of any type; its tensors are meta tensors, to be looked up by `entry`.
    """

    name: str
    value: Any
    _storages: Mapping[int, StoredStorage] = field(repr=False)

    def entry(self, tensor: torch.Tensor, key: str = "a tensor") -> TensorEntry:
        """Tell where the bytes of a tensor of ``value`` are.

        Args:
            tensor: a tensor or parameter of ``value``. Those that share a storage have the same place.
            key: its name, for messages.

        Raises:
            LoadError: it is no plain strided tensor, or the file holds no bytes of it.
            CorruptCheckpointError: it reaches out of its storage.
        """
        kind = _kind_of(tensor)
        if kind is not None:
            raise _unplaceable(self.name, key, kind)
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None:
            raise LoadError(
                f"{self.name}: {key} has no bytes of its own in the file, as a meta tensor has none; "
                "leave it out, or read the file with torch.load"
            )
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        end = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if min((*stride, offset), default=0) < 0 or (0 not in shape and end * tensor.dtype.itemsize > stored.nbytes):
            raise CorruptCheckpointError(
                f"{self.name}: {key} with sizes {list(shape)}, strides {list(stride)} and offset {offset} reaches out "
                f"of its storage of {stored.nbytes} bytes; the file is damaged"
            )
        item = TensorItem(
            dtype=tensor.dtype,
            shape=shape,
            stride=stride,
            storage_offset=offset,
            payload_offset=0,
            nbytes=stored.place.length,
            crc=stored.crc,
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )
        return TensorEntry(tensor.dtype, shape, (ChunkEntry((0,) * len(shape), shape, stored.place, item),))


def _kind_of(tensor: torch.Tensor) -> str | None:
    """Say what a tensor is, if it is not a plain one."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_nested or tensor.is_quantized:
        return "a nested tensor" if tensor.is_nested else "a quantized tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return None


def _unplaceable(name: str, key: str, kind: str) -> LoadError:
    return LoadError(
        f"{name}: {key} is {kind}, which is not stored as one run of bytes; read the file with torch.load, "
        "and save it again without, or as a plain tensor"
    )


class _TensorFinder(pickle.Pickler):
    """Pickles into nowhere, until it meets a tensor or a storage."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            raise _FoundError
        return NotImplemented


class _FoundError(Exception):
    pass


def holds_tensors(value: Any) -> bool:
    """Tell whether an object of ``TorchFile.value`` has a tensor or a storage somewhere inside.

    Such an object is no good by itself, for what it holds has no memory. One that can't be looked into counts
    as holding tensors.
    """
    try:
        _TensorFinder(io.BytesIO()).dump(value)
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception:  # a user's __reduce__ may raise anything
        return True
    return False


def read_torch_file(
    name: str,
    length: int,
    fetch: Callable[[int, int], bytes],
    *,
    safe_globals: Sequence[Any] = (),
    trust: bool = False,
) -> TorchFile:
    """Read the structure of a ``torch.save`` file, and none of the bytes of its tensors.

    Args:
        name: the file, which the places of the tensors will name.
        length: its length in bytes.
        fetch: gives the bytes at (offset, size) of the file.
        safe_globals: functions and classes that the pickle may use besides torch's own list.
        trust: unpickle anything, which runs whatever code the pickle asks for.

    Raises:
        UnsafeCheckpointError: the pickle needs something that was not allowed.
        CorruptCheckpointError: the file is damaged or cut short.
        LoadError: it is of a kind that can't be read in this way; the message names another.
    """
    archive = open_archive(name, length, fetch)
    stand_ins = StandIns(archive)
    data = archive.read("data.pkl")
    try:
        _check_functions(data)
        unpickle = _unpickle_trusting if trust else _unpickle_restricted
        value = unpickle(data, stand_ins, safe_globals)
    except LoadError:
        raise
    except Warning:  # an error only because the program makes errors of warnings
        raise
    except Exception as exc:  # a damaged pickle raises nearly anything, and so does a class that wants values
        if is_shortage(exc):
            raise LoadError(f"{name} can't be read now, for lack of memory or descriptors: {exc}") from exc
        permission = "" if trust else permission_for(data, archive.storage_bytes(), safe_globals)
        raise _explained(name, exc, permission, trust=trust, checked=bool(archive.records["data.pkl"].crc)) from exc
    finally:
        _forget_sparse_tensors()
    if is_too_much(value, len(data)):
        raise LoadError(
            f"{name} holds one container many times, which holds another many times, or itself; it has more parts than "
            "can be taken apart. If you trust the file, read it with torch.load."
        )
    return TorchFile(name, value, stand_ins.by_address())


class _UnplaceableError(Exception):
    """The pickle makes a tensor that no stand-in can be made for; the argument says of which kind."""


def _explained(name: str, exc: Exception, permission: str, *, trust: bool, checked: bool) -> LoadError:
    """Say what it means that unpickling failed, and what to do about it."""
    if isinstance(exc, _UnplaceableError):
        return _unplaceable(name, "something in it", str(exc))
    refused = isinstance(exc, pickle.UnpicklingError) and not trust and exc.__cause__ is None
    if permission and (refused or isinstance(exc, ForeignNameError)):
        return UnsafeCheckpointError(f"{name} needs {permission}")
    if isinstance(exc, PickleError):
        return UnsafeCheckpointError(
            f"the pickle in {name} was not read: {exc}, which is not what torch.save writes: it is damaged, or was "
            "changed; if you trust the file, pass trust=True."
        )
    if refused:
        reason = str(exc).partition("\n")[0]
        return UnsafeCheckpointError(
            f"{name} holds what torch's restricted unpickler can't read ({reason}). If you trust the file, pass "
            "trust=True."
        )
    if isinstance(exc, pickle.UnpicklingError) or not checked:
        return CorruptCheckpointError(f"the pickle in {name} is damaged: {type(exc).__name__}: {exc}")
    return LoadError(
        f"{name} can't be read without the values of its tensors ({type(exc).__name__}: {exc}); read it with torch.load"
    )


def _check_functions(data: bytes) -> None:
    for function, kind in _UNPLACEABLE.items():
        if f"ctorch._utils\n{function}\n".encode() in data:
            raise _UnplaceableError(kind)


def _unpickle_restricted(data: bytes, stand_ins: StandIns, safe_globals: Sequence[Any]) -> Any:
    try:
        kind: Any = importlib.import_module("torch._weights_only_unpickler").Unpickler
    except (ImportError, AttributeError) as exc:
        raise LoadError(
            f"torch {torch.__version__} keeps its restricted unpickler in a place that is not known here; "
            "use a version of torch from 2.6 to 2.13, or pass trust=True if you trust the file"
        ) from exc
    unpickler = kind(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = stand_ins.load
    # torch's allow-list is global to the process, so loads that extend it take turns.
    with _allow_list, torch.serialization.safe_globals(_not_yet_allowed((*HARMLESS, *safe_globals))):
        listed = [each if isinstance(each, tuple) else (each, "") for each in torch.serialization.get_safe_globals()]
        allowed = {name or f"{each.__module__}.{each.__qualname__}" for each, name in listed}
        check_object_pickle(data, stand_ins.archive.storage_bytes(), allowed)
        return unpickler.load()


class _TrustingUnpickler(pickle.Unpickler):
    """Unpickles anything, as ``torch.load(weights_only=False)`` does."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _UNPLACEABLE:
            raise _UnplaceableError(_UNPLACEABLE[name])
        if "Storage" in name:
            try:
                storage_type: Any = torch.serialization.StorageType
                return storage_type(name)
            except KeyError:
                pass
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)


def _unpickle_trusting(data: bytes, stand_ins: StandIns, _safe_globals: Sequence[Any]) -> Any:
    unpickler = _TrustingUnpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = stand_ins.load  # type: ignore[method-assign]
    return unpickler.load()


def _forget_sparse_tensors() -> None:
    """Take stand-ins off the list of sparse tensors that the next ``torch.load`` would look into."""
    get = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    pending = getattr(torch._utils, "_sparse_tensors_to_validate", []) if get is None else get()
    pending[:] = [tensor for tensor in pending if not tensor.is_meta]
