"""The framing of a ``torch.save`` file whose tensors are written later: everything except the bytes of its storages.

Under ``torch.serialization.skip_data``, ``torch.save`` writes everything except the bytes of tensors, which need no
memory then. It reserves space for each storage, in the order in which it meets them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import torch
from isal.isal_zlib import crc32

from aiockpt.format.item.item_framing import SparseFile
from aiockpt.format.item.ziparchive import CRC, Framing, FramingError, data_offset, read_directory

_PROTOCOL = 2  # that torch.save pickles with
_CRC_IN_DESCRIPTOR = 4  # the offset of the CRC-32 behind a record's bytes


@dataclass(frozen=True, slots=True)
class ReservedSpace:
    """The space of a storage in the file."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    crc_at: tuple[int, int]  # offsets of its CRC-32: in the data descriptor and in the central directory


class ArchiveFraming(NamedTuple):
    """The bytes around the payloads of a file."""

    head: bytes  # before the first payload
    framings: Sequence[tuple[torch.UntypedStorage, Framing]]  # of each payload, in the order of the file
    tail: bytes  # after the last payload, with zeros in place of the payloads' CRCs
    crc_at: Sequence[tuple[int, int]]  # where they belong in the tail, and the number of the payload


class _StorageOrder(pickle.Pickler):
    """Pickles to nowhere, to learn the order in which ``torch.save`` meets the storages."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=_PROTOCOL)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
        if not isinstance(storage, torch.UntypedStorage):
            return None
        self.found.setdefault(storage._cdata, storage)
        return "storage"


class _PickleModule:
    """The ``pickle_module`` of ``torch.save``, for quantized and nested tensors: torch refuses to skip their bytes."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, torch.Tensor) or not (obj.is_quantized or obj.is_nested):
                return NotImplemented
            # Only their reduction refuses. Their storages are written as others are, in the order of the dry run.
            state = torch.serialization._serialization_tls
            state.skip_data = False
            try:
                return obj.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
            finally:
                state.skip_data = True


def save_framing(value: Any, file: IO[bytes]) -> list[torch.UntypedStorage]:
    """Write a file without the bytes of its storages, over which it seeks; return the storages in their order."""
    order = _StorageOrder()
    order.dump(value)
    with torch.serialization.skip_data():
        torch.save(value, file, pickle_module=_PickleModule)
    return list(order.found.values())


def spaces_of(
    storages: Sequence[torch.UntypedStorage], length: int, fetch: Callable[[int, int], bytes]
) -> list[ReservedSpace]:
    """Return the space of each storage that has any; ``fetch`` returns the bytes at (offset, size) of the file."""
    records = {record.name.partition("/")[2]: record for record in read_directory(length, fetch)}
    spaces = []
    for number, storage in enumerate(storages):
        record = records.get(f"data/{number}")
        if record is None or record.size != storage.nbytes():
            raise FramingError(f"torch {torch.__version__} writes storages in an unknown order")
        if record.size:
            offset = data_offset(record, fetch)
            crc_at = offset + record.size + _CRC_IN_DESCRIPTOR, record.crc_at
            spaces.append(ReservedSpace(storage, offset, record.size, crc_at))
    return spaces


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage, copied if it is not in host memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy().data


def frame_archive(value: Any, later: Collection[int]) -> ArchiveFraming:
    """Frame a file whose payloads are the storages in ``later``, by their ``_cdata``; others are in the framing."""
    file = SparseFile()
    spaces = spaces_of(save_framing(value, file), file.length, file.fetch)
    payloads = [space for space in spaces if space.storage._cdata in later]
    for space in spaces:
        if space.storage._cdata not in later:
            file.store(space.offset, bytes_of(space.storage))
    # The records carry CRCs only if torch is set to compute them, and knows their bytes; here they always do.
    skipped = {space.crc_at[1] for space in payloads}
    for record in read_directory(file.length, file.fetch):
        if record.size and record.crc_at not in skipped:
            offset = data_offset(record, file.fetch)
            crc = CRC.pack(crc32(file.fetch(offset, record.size)))
            file.store(offset + record.size + _CRC_IN_DESCRIPTOR, crc)
            file.store(record.crc_at, crc)
    blocks = file.blocks()
    ends = [space.offset + space.nbytes for space in payloads]
    if [start for start, _ in blocks] != [0, *ends]:
        raise FramingError(f"torch {torch.__version__} places the bytes of storages in a way that is not known")
    head, *between = (bytes(block) for _, block in blocks)
    if not between:
        return ArchiveFraming(head, [], b"", [])
    last, tail = len(between) - 1, between[-1]
    suffixes = [(block, (_CRC_IN_DESCRIPTOR,)) for block in between[:-1]]
    framings = [
        (space.storage, Framing(b"", suffix, crc_at, space.nbytes))
        for space, (suffix, crc_at) in zip(payloads, [*suffixes, (b"", ())], strict=True)
    ]
    directory = [(space.crc_at[1] - ends[-1], number) for number, space in enumerate(payloads)]
    return ArchiveFraming(head, framings, tail, [(_CRC_IN_DESCRIPTOR, last), *directory])
