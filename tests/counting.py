"""A storage that counts reads."""

from __future__ import annotations

import threading

from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.base import Storage


class CountingStorage(WrapperStorage):
    """Records every read: file, offset, bytes."""

    def __init__(self, inner: Storage | None = None) -> None:
        super().__init__(inner or LocalStorage())
        self.reads: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        with self._lock:
            self.reads.append((name, offset, nbytes))

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.reads)
