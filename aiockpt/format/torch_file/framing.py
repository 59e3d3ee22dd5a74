"""The framing of a ``torch.save`` file whose tensors are written later: everything except the bytes of its storages.

Under ``torch.serialization.skip_data``, ``torch.save`` writes everything except the bytes of tensors, which need no
memory then. It reserves space for each storage, in the order in which it meets them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from aiockpt.format.item.item_framing import CRC_IN_DESCRIPTOR, SparseFile, fill_crcs
from aiockpt.format.item.ziparchive import Framing, FramingError, Record, data_offset, read_directory

_PROTOCOL = 2  # that torch.save pickles with


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


def frame_archive(value: Any, later: Collection[int]) -> ArchiveFraming:
    """Frame a file whose payloads are the storages in ``later``, by their ``_cdata``; others are in the framing."""
    order, file = _StorageOrder(), SparseFile()
    order.dump(value)
    with torch.serialization.skip_data():
        torch.save(value, file, pickle_module=_PickleModule)
    records = {record.name.partition("/")[2]: record for record in read_directory(file.length, file.fetch)}
    payloads: list[tuple[torch.UntypedStorage, int, Record]] = []  # with the offset of each
    for number, storage in enumerate(order.found.values()):
        record = records.get(f"data/{number}")
        if record is None or record.size != storage.nbytes():
            raise FramingError(f"torch {torch.__version__} writes storages in an unknown order")
        if record.size and storage._cdata in later:
            payloads.append((storage, data_offset(records.pop(f"data/{number}"), file.fetch), record))
        elif record.size:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            file.store(data_offset(record, file.fetch), whole.cpu().numpy().data)
    fill_crcs(file, records.values())
    blocks = file.blocks()
    ends = [offset + record.size for _, offset, record in payloads]
    if [start for start, _ in blocks] != [0, *ends]:
        raise FramingError(f"torch {torch.__version__} places the bytes of storages in a way that is not known")
    head, *between = (bytes(block) for _, block in blocks)
    if not between:
        return ArchiveFraming(head, [], b"", [])
    last, tail = len(between) - 1, between[-1]
    suffixes = [(block, (CRC_IN_DESCRIPTOR,)) for block in between[:-1]]
    framings = [
        (storage, Framing(b"", suffix, crc_at, record.size))
        for (storage, _, record), (suffix, crc_at) in zip(payloads, [*suffixes, (b"", ())], strict=True)
    ]
    directory = [(record.crc_at - ends[-1], number) for number, (_, _, record) in enumerate(payloads)]
    return ArchiveFraming(head, framings, tail, [(CRC_IN_DESCRIPTOR, last), *directory])
