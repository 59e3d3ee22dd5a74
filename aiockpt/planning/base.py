"""The base of a delta save: where it is, and what is remembered of the last one. Without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiockpt.core.dataclasses import dataclass, field

if TYPE_CHECKING:
    from aiockpt.format.hashes import NewHash


class BaseMemory:
    """The memory of a checkpointer from save to save. For the engine's loop."""

    def __init__(self) -> None:
        self.path: str | None = None  # of the last checkpoint that it has written, or else restored
        self.calmed: frozenset[str] = frozenset()  # keys without a hash there that did not change at that save
        self.layout: Any = None  # of the last delta save
        self._has_written = False

    def restored(self, path: str) -> None:
        """Note a checkpoint that was loaded: it is the base until one is written."""
        if not self._has_written:
            self.path, self.calmed = path, frozenset()

    def written(self, path: str, calmed: frozenset[str]) -> None:
        """Note a checkpoint that was written."""
        self.path, self.calmed, self._has_written = path, calmed, True


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """How a save keeps hashes, and upon what it is based."""

    new_hash: NewHash
    memory: BaseMemory = field(repr=False)
    path: str | None = None  # of the base
    is_auto: bool = False  # the base is the one that the memory has
    full_every: int | None = None
