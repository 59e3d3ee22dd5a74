"""Ports: the protocols by which the parts of a manager know a checkpointer, and each other.

The methods of a checkpointer that a manager waits for: those of asyncio suspend, the others block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aiockpt.checkpointer import AsyncCheckpointer
    from aiockpt.engine.requests import StateDict
    from aiockpt.saving.handle import SaveHandle
    from aiockpt.storage.base import Storage
    from aiockpt.sync_checkpointer import SyncCheckpointer
    from aiockpt.telemetry.verification import VerifyReport


class MirrorPort(Protocol):
    """The mirror of a run, as the deletion of its steps sees it; see `MirrorCopier`."""

    @property
    def knows_held(self) -> bool:
        """Whether `held` has everything; until then no step must be deleted."""

    def held(self) -> set[int]:
        """Return the steps of the run that must not be deleted now."""

    def note_end(self, step: int, handle: SaveHandle, path: str = "") -> None:
        """Note that the save of a step has ended; ``path``: where it was written to instead."""


class CheckpointerPort(Protocol):
    """A checkpointer's methods that wait; see `AsyncCheckpointer`."""

    async def ready(self) -> None:
        """Wait until a save would not have to."""

    async def clean(self, directory: str, storage: Storage) -> None:
        """Remove what killed processes have left in a directory."""

    async def load(self, path: str, state_dict: StateDict, storage: Storage, options: Mapping[str, Any]) -> None:
        """Load a checkpoint into a state."""

    async def verify(self, path: str, storage: Storage) -> VerifyReport:
        """Check all of a checkpoint."""

    async def inspect(self, path: str, storage: Storage) -> Mapping[str, Any]:
        """Open a checkpoint, which checks its structure and the sizes of its files; return the info of each key."""


class WaitingPort:
    """That of a manager of asyncio."""

    def __init__(self, checkpointer: AsyncCheckpointer) -> None:
        self._checkpointer = checkpointer

    async def ready(self) -> None:
        await self._checkpointer.ready()

    async def clean(self, directory: str, storage: Storage) -> None:
        await self._checkpointer.clean(directory, storage=storage)

    async def load(self, path: str, state_dict: StateDict, storage: Storage, options: Mapping[str, Any]) -> None:
        await self._checkpointer.load(path, state_dict, storage=storage, **options)

    async def verify(self, path: str, storage: Storage) -> VerifyReport:
        return await self._checkpointer.verify(path, storage=storage)

    async def inspect(self, path: str, storage: Storage) -> Mapping[str, Any]:
        async with self._checkpointer.open(path, storage=storage) as reader:
            return dict(reader)


class BlockingPort:
    """That of a manager without asyncio."""

    def __init__(self, checkpointer: SyncCheckpointer) -> None:
        self._checkpointer = checkpointer

    async def ready(self) -> None:
        self._checkpointer.ready()

    async def clean(self, directory: str, storage: Storage) -> None:
        self._checkpointer.clean(directory, storage=storage)

    async def load(self, path: str, state_dict: StateDict, storage: Storage, options: Mapping[str, Any]) -> None:
        self._checkpointer.load(path, state_dict, storage=storage, **options)

    async def verify(self, path: str, storage: Storage) -> VerifyReport:
        return self._checkpointer.verify(path, storage=storage)

    async def inspect(self, path: str, storage: Storage) -> Mapping[str, Any]:
        with self._checkpointer.open(path, storage=storage) as reader:
            return dict(reader)
