"""Staging of one save: its chunks, which are always given back, and a stager for each device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import torch

from aiockpt.core.dataclasses import dataclass, field
from aiockpt.errors import AiockptError, StageError
from aiockpt.staging.base import Fill, LayoutMismatchError, Pending, Stager

if TYPE_CHECKING:
    from aiockpt.planning.planner import Layout
    from aiockpt.planning.snapshot import Snapshot
    from aiockpt.staging.pool import ChunkPool, Lease


@dataclass(frozen=True, slots=True, eq=False)
class StagingChunk:
    """A chunk for the payload of the bytes ``start`` to ``stop`` of a file, and the copies into it."""

    lease: Lease
    start: int
    stop: int
    pending: Pending


@dataclass(eq=False)
class Leases:
    """All leases of one save."""

    _pool: ChunkPool
    _out: list[Lease] = field(default_factory=list)
    pending: dict[Lease, Pending] = field(default_factory=dict)

    async def acquire(self) -> Lease:
        """Wait for a chunk."""
        lease = await self._pool.acquire()
        self._out.append(lease)
        return lease

    def acquire_nowait(self) -> Lease | None:
        """Return a chunk; None if `acquire` would wait."""
        lease = self._pool.acquire_nowait()
        if lease is not None:
            self._out.append(lease)
        return lease

    def quarantine(self) -> None:
        """Quarantine the leases: the threads that use their chunks may never return."""
        for lease in self._out:
            lease.quarantine()

    async def give_back(self) -> None:
        """Release the leases once nothing uses them any more. Not to be cancelled."""
        with anyio.CancelScope(shield=True):
            for lease in self._out:
                if not lease.released and lease in self.pending:
                    with contextlib.suppress(Exception):  # the failed copy has been reported where it was awaited
                        await self.pending[lease].wait()
                lease.release()
        self._out.clear()
        self.pending.clear()


class StagerRouter:
    """Sends pieces to the stager of the device that their tensors are on."""

    def __init__(self, layout: Layout, snapshot: Snapshot, stager_for: Callable[[torch.device], Stager]) -> None:
        self._layout = layout
        self._snapshot = snapshot
        devices = {spec.device for spec in layout.specs if spec is not None} or {torch.device("cpu")}
        self._by_device = {device: stager_for(device) for device in devices}

    @property
    def stagers(self) -> list[Stager]:
        """The stagers of all devices."""
        return list(self._by_device.values())

    @property
    def is_async(self) -> bool:
        """Whether copies may go on after they are issued."""
        return any(stager.is_async for stager in self._by_device.values())

    async def issue(self, fills: Sequence[Fill]) -> Sequence[Pending]:
        """Start to fill chunks; see `Stager.issue`."""
        try:
            if len(self._by_device) == 1:
                (stager,) = self._by_device.values()
                return await stager.issue(fills, self._snapshot, self._layout)
            return await self._issue_to_several(fills)
        except (LayoutMismatchError, AiockptError):
            raise
        except Warning:  # an error only because the program makes errors of warnings
            raise
        except Exception as exc:
            raise StageError(f"copying tensors into staging memory failed: {type(exc).__name__}: {exc}") from exc

    async def _issue_to_several(self, fills: Sequence[Fill]) -> Sequence[Pending]:
        specs = [self._layout.specs[piece.leaf] for fill in fills for piece in fill.pieces]
        devices = dict.fromkeys(spec.device for spec in specs if spec is not None)
        issued = [_JoinedCopies([]) for _ in fills]
        try:
            for device in devices:
                # Each stager gets all pieces: a packed copy covers the gaps between pieces, and has to know which gaps
                # hold pieces of another device.
                pending = await self._by_device[device].issue(fills, self._snapshot, self._layout)
                for joined, copies in zip(issued, pending, strict=True):
                    joined.pending.append(copies)
        except BaseException:
            with anyio.CancelScope(shield=True):  # the chunks go back: nothing may be on its way into them
                for joined in issued:
                    await joined.wait()
            raise
        return issued


@dataclass(eq=False)
class _JoinedCopies:
    """Several pending copies as one."""

    pending: list[Pending]

    async def wait(self) -> None:
        errors = []
        for copies in self.pending:  # all of them: the chunk may be given back after this
            try:
                await copies.wait()
            except Exception as exc:
                errors.append(exc)
        if errors:
            raise errors[0]
