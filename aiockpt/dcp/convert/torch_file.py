"""Writing a ``torch.save`` file whose tensors are elsewhere: its framing first, then the bytes, part by part.

``torch.save`` itself writes everything but the tensors' bytes, for tensors without memory behind them, under
``torch.serialization.skip_data``. It leaves room for each storage, in the order in which it met them.
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
from aiockpt.format.item.framing import CRC
from aiockpt.format.item.ziparchive import FramingError, data_offset, read_directory
from aiockpt.storage.local.belonging import why_not_a_checkpoint
from aiockpt.storage.local.commit import make_directories, sync_directory
from aiockpt.storage.local.temp_names import new_ticket
from aiockpt.storage.syscalls import allocate, rename_noreplace

if TYPE_CHECKING:
    from typing import Self

_PROTOCOL = 2  # that torch.save pickles with
_PART_BYTES = 8 << 20


class _StorageOrder(pickle.Pickler):
    """Pickles into nowhere, to learn the order in which ``torch.save`` meets the storages."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=_PROTOCOL)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
        if not isinstance(storage, torch.UntypedStorage):
            return None
        self.found.setdefault(storage._cdata, storage)
        return "storage"


@dataclass(frozen=True, slots=True)
class Room:
    """Where the bytes of a storage belong.

    Attributes:
        storage: the storage.
        offset: where its bytes begin in the file.
        nbytes: how many they are.
        crc_at: where their CRC-32 belongs.
    """

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    crc_at: tuple[int, int]


class TorchFileWriter:
    """A ``torch.save`` file in the making, under a hidden name beside its final one. All methods block.

    Args:
        path: the final name.
        overwrite: replace a file of torch.save or safetensors that is there, or a link to one, not what it leads to.
    """

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self._path = os.path.abspath(path)
        self._overwrite = overwrite
        self._hidden = os.path.join(os.path.dirname(self._path), new_ticket())
        self._fd = -1

    def open(self) -> Self:
        """Create the file.

        Raises:
            CheckpointExistsError: something is there that may not be replaced.
            WriteError: it can't be created.
        """
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

    def frame(self, value: Any) -> list[Room]:
        """Write all but the storages' bytes.

        Args:
            value: what the file is to hold; in host memory, whose bytes are not looked at.

        Returns:
            for each storage that has bytes, where they belong.

        Raises:
            WriteError: it can't be written.
        """
        order = _StorageOrder()
        order.dump(value)
        try:
            with os.fdopen(os.dup(self._fd), "r+b") as file, torch.serialization.skip_data():
                torch.save(value, file)
            length = os.fstat(self._fd).st_size
            allocate(self._fd, length)
        except OSError as exc:
            raise WriteError(f"can't write {self._path}: {exc}") from exc
        return self._rooms(list(order.found.values()), length)

    def _rooms(self, storages: list[torch.UntypedStorage], length: int) -> list[Room]:
        def fetch(offset: int, size: int) -> bytes:
            return os.pread(self._fd, size, offset)

        records = {record.name.partition("/")[2]: record for record in read_directory(length, fetch)}
        rooms = []
        for number, storage in enumerate(storages):
            record = records.get(f"data/{number}")
            if record is None or record.size != storage.nbytes():
                raise FramingError(f"torch {torch.__version__} writes storages in an order that is not known here")
            if record.size:
                offset = data_offset(record, fetch)
                rooms.append(Room(storage, offset, record.size, (offset + record.size + 4, record.crc_at)))
        return rooms

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write bytes at a place of the file.

        Raises:
            WriteError: with the cause chained.
        """
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as exc:
            raise WriteError(f"can't write {self._path} at offset {offset}: {exc}") from exc

    def seal(self, room: Room, crc: int) -> None:
        """Fill in the CRC-32 of a storage's bytes."""
        for at in room.crc_at:
            self.write(CRC.pack(crc), at)

    def crc_of(self, room: Room, crc: int, start: int) -> tuple[int, int]:
        """Go on computing the CRC-32 of what was written of a storage; give it, and where to go on.

        Args:
            room: the storage.
            crc: that of the bytes before ``start``.
            start: where to begin, in bytes from the storage's first.
        """
        stop = min(room.nbytes, start + _PART_BYTES)
        data = os.pread(self._fd, stop - start, room.offset + start)
        if len(data) != stop - start:
            raise WriteError(f"{self._path} was cut short while it was written")
        return crc32(data, crc), stop

    def publish(self) -> None:
        """Make the file durable, and give it its final name.

        Raises:
            CheckpointExistsError: a file has come to the name meanwhile.
            CommitError: with the cause chained.
        """
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
            raise CheckpointExistsError(f"{self._path} has appeared meanwhile; it was left as it is") from exc
        except OSError as exc:
            raise CommitError(f"can't publish {self._path}: {exc}") from exc

    def discard(self) -> None:
        """Remove what was written, unless it was published. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if os.path.lexists(self._hidden):
            os.unlink(self._hidden)
