"""A storage for the mirrors of tests: it can be away, stop at a step, and notes what it is asked for."""

from __future__ import annotations

import threading
from typing import Any

import aiockpt
from aiockpt.storage import WrapperStorage
from aiockpt.storage.base import Storage

URL = "gate://here"


class Gate(WrapperStorage):
    """Passes on what is asked of `URL` to a directory in another storage."""

    def __init__(self, inner: Storage, root: str) -> None:
        super().__init__(inner)
        self.root, self.is_away, self.holds = root, False, ""
        self.waits: aiockpt.Completion[None] = aiockpt.Completion("waits")
        self.let_go: aiockpt.Completion[None] = aiockpt.Completion("let go")
        self.steps: list[tuple[str, str]] = []
        self.reads: list[str] = []
        self.read_bytes = 0
        self.hangs: threading.Event | None = None  # until it is set
        aiockpt.storage.register("gate", lambda root, **_: self, replace=True)

    def resolve(self, path: str) -> str:
        return self.inner.resolve(path.replace(URL, self.root, 1))

    async def before(self, step: str, name: str) -> None:
        self.steps.append((step, name))
        self._check()
        if step == self.holds:
            self.waits._settle(None)
            await self.let_go

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        self.reads.append(name)
        self.read_bytes += nbytes * name.endswith(".distcp")
        self._check()

    def _check(self) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        if self.is_away:
            raise ConnectionRefusedError(111, "Connection refused")

    def look(self, path: str, budget: Any = None) -> Any:
        self._check()
        return self.inner.look(path, budget)

    def stamps(self, directory: str, count: int) -> Any:
        self._check()
        return self.inner.stamps(directory, count)

    def lease(self, directory: str) -> Any:
        self._check()
        return self.inner.lease(directory)
