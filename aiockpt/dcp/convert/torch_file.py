"""Writes a ``torch.save`` file whose tensors are not in memory: its framing first, then the bytes, part by part.

Under ``torch.serialization.skip_data``, ``torch.save`` writes everything except the bytes of tensors, which need no
memory then. It reserves space for each storage, in the order in which it meets them.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from isal.isal_zlib import crc32

from aiockpt.errors import CheckpointExistsError, CommitError, WriteError
from aiockpt.format.item.ziparchive import CRC, FramingError, data_offset, read_directory
from aiockpt.storage.local.belonging import why_not_a_checkpoint
from aiockpt.storage.local.commit import make_directories, sync_directory
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.syscalls import allocate, rename_noreplace

if TYPE_CHECKING:
    from typing import Self

_PROTOCOL = 2  # that torch.save pickles with
_PART_BYTES = 8 << 20


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


@dataclass(frozen=True, slots=True)
class ReservedSpace:
    """The space of a storage in the file."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    crc_at: tuple[int, int]  # offsets of its CRC-32: in the data descriptor and in the central directory


class TorchFileWriter:
    """Writes a ``torch.save`` file under a hidden name beside its final path, and publishes it. All methods block."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self._path = os.path.abspath(path)
        self._overwrite = overwrite
        self._hidden = os.path.join(os.path.dirname(self._path), new_ticket())
        self._fd = -1

    def open(self) -> Self:
        """Create the hidden file; raise CheckpointExistsError if the path holds a file that may not be replaced."""
        if os.path.isdir(self._path):
            raise CheckpointExistsError(f"{self._path} is a directory; name the file to write")
        if not self._overwrite and os.path.lexists(self._path):
            raise CheckpointExistsError(f"{self._path} exists already; choose another name, or pass overwrite=True")
        try:
            found = why_not_a_checkpoint(self._path) if os.path.lexists(self._path) else None
            if found is not None:
                raise CheckpointExistsError(
                    f"{self._path} {found}; overwrite=True replaces checkpoints only. Choose another name."
                )
            make_directories(os.path.dirname(self._path), fsync=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
            self._fd = os.open(self._hidden, flags, 0o664)
        except CheckpointExistsError:
            raise
        except OSError as exc:
            raise WriteError(f"can't create {self._path}: {exc}") from exc
        return self

    def frame(self, value: Any) -> list[ReservedSpace]:
        """Write everything except the storages' bytes; return the space of each storage that has any."""
        order = _StorageOrder()
        order.dump(value)
        try:
            with os.fdopen(os.dup(self._fd), "r+b") as file, torch.serialization.skip_data():
                torch.save(value, file, pickle_module=_PickleModule)
            length = os.fstat(self._fd).st_size
            allocate(self._fd, length)
        except OSError as exc:
            raise WriteError(f"can't write {self._path}: {exc}") from exc
        return self._spaces(list(order.found.values()), length)

    def _spaces(self, storages: list[torch.UntypedStorage], length: int) -> list[ReservedSpace]:
        def fetch(offset: int, size: int) -> bytes:
            return os.pread(self._fd, size, offset)

        records = {record.name.partition("/")[2]: record for record in read_directory(length, fetch)}
        spaces = []
        for number, storage in enumerate(storages):
            record = records.get(f"data/{number}")
            if record is None or record.size != storage.nbytes():
                raise FramingError(f"torch {torch.__version__} writes storages in an unknown order")
            if record.size:
                offset = data_offset(record, fetch)
                spaces.append(ReservedSpace(storage, offset, record.size, (offset + record.size + 4, record.crc_at)))
        return spaces

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at an offset."""
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as exc:
            raise WriteError(f"can't write {self._path} at offset {offset}: {exc}") from exc

    def seal(self, space: ReservedSpace, crc: int) -> None:
        """Write the CRC-32 of a storage's bytes."""
        for at in space.crc_at:
            self.write(CRC.pack(crc), at)

    def crc_of(self, space: ReservedSpace, crc: int, start: int) -> tuple[int, int]:
        """Continue the CRC-32 of a storage from ``start``, reading back a part; return it, and the next start."""
        stop = min(space.nbytes, start + _PART_BYTES)
        data = os.pread(self._fd, stop - start, space.offset + start)
        if len(data) != stop - start:
            raise WriteError(f"{self._path} was cut short while it was written")
        return crc32(data, crc), stop

    def publish(self) -> None:
        """Make the file durable, and give it its final name."""
        try:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._overwrite:
                os.replace(self._hidden, self._path)
            else:
                rename_noreplace(self._hidden, self._path)
            sync_directory(os.path.dirname(self._path))
        except FileExistsError as exc:
            raise CheckpointExistsError(f"{self._path} has appeared meanwhile; it was not replaced") from exc
        except OSError as exc:
            raise CommitError(f"can't publish {self._path}: {exc}") from exc

    def discard(self) -> None:
        """Remove what was written, unless it was published. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if os.path.lexists(self._hidden):
            os.unlink(self._hidden)
