"""The moments at which a save is cancelled, or its waiter goes away; gates hold the save there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.cancellation.stops import Stop, Writer, stop_before

CHUNK = 64 << 10
DRAIN_S = 20.0  # after a failed check nothing releases the held save
_TENSOR_BYTES = 2 * CHUNK + 40  # more than is copied at the call, and not a multiple of a chunk
_TENSORS = 3


@dataclass(frozen=True, slots=True)
class Moment:
    """A point at which a save is held.

    Attributes:
        chunks: size of the staging memory, in chunks.
        step: step of the storage before which it is held; "a thread": inside a write, with its memory; empty: an
            earlier save holds it.
        staged: whether it is staged by then.
        published: whether it is too late to cancel it.
    """

    chunks: int
    step: str = ""
    staged: bool = False
    published: bool = False


MOMENTS = {
    "captured": Moment(chunks=1),  # queued behind a save that is still being staged
    "pool": Moment(chunks=1),  # the only chunk belongs to a save that is being written
    "staging": Moment(chunks=1, step="write"),  # the only chunk is being written, and most is not copied yet
    "writing": Moment(chunks=16, step="write", staged=True),
    "inside a write": Moment(chunks=16, step="a thread", staged=True),
    "syncing": Moment(chunks=16, step="finish", staged=True),
    "committing": Moment(chunks=16, step="commit", staged=True, published=True),
}


@dataclass(slots=True)
class Held:
    """A save that is held at a moment.

    Attributes:
        save: its handle.
        state: the saved state.
        path: its destination.
        stop: stop that holds it, or the save ahead of it.
        front: the save ahead of it, if that one is held.
        front_state: state of the save ahead of it.
    """

    save: aiockpt.SaveHandle
    state: dict[str, torch.Tensor]
    path: Path
    stop: Stop
    front: aiockpt.SaveHandle | None = None
    front_state: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Names of the checkpoints published beside it."""
        return {"front"} if self.front is not None else set()


def state_of(seed: int, *, tensors: int = _TENSORS) -> dict[str, torch.Tensor]:
    """Make tensors whose elements are all distinct, across seeds too."""
    count = _TENSOR_BYTES // 4
    begins = [(seed * 97 + number) * 1_000_003 for number in range(tensors)]
    return {f"w{i}": torch.arange(begin, begin + count, dtype=torch.int32) for i, begin in enumerate(begins)}


def options_of(moment: Moment, writer: Writer) -> dict[str, Any]:
    """Return the options of a checkpointer whose save can be held at a moment."""
    sizes = {"chunk_bytes": CHUNK, "staging_bytes": moment.chunks * CHUNK, "io_threads": 2}
    return {**sizes, "writer": writer, "drain_timeout": DRAIN_S}


async def hold(
    submit: Callable[..., aiockpt.SaveHandle],
    moment: str,
    folder: Path,
    writer: Writer = "thread",
    *,
    seed: int = 1,
    overwrite: bool = False,
) -> Held:
    """Start a save, behind another one where that is needed, and wait until it is held at the moment.

    Args:
        submit: function that starts a save.
        moment: one of `MOMENTS`.
        folder: directory of the checkpoints "c" and "front".
        writer: kind of writer of the checkpointer.
        seed: seed of the state.
        overwrite: as in `save`.
    """
    at, state, path = MOMENTS[moment], state_of(seed), folder / "c"
    if at.step:
        stop = stop_before(at.step, writer, folder.parent)
        held = Held(submit(state, path, overwrite=overwrite, storage=stop.storage), state, path, stop)
        await stop.reached()
        if at.staged:
            await held.save.staged
        return held
    stop = stop_before("write", writer, folder.parent)
    before = state_of(seed + 50) if moment == "captured" else {"x": torch.arange(seed, seed + 1000)}
    front = submit(before, folder / "front", storage=stop.storage)
    await stop.reached()
    storage = _seen_to_begin() if moment == "pool" and writer == "thread" else None
    save = submit(state, path, overwrite=overwrite, storage=storage)
    if storage is not None:
        await storage.reached["begin"]  # by then it asks for its first chunk too
    elif moment == "pool":
        async for _ in save.progress():
            break
    return Held(save, state, path, stop, front, before)


def _seen_to_begin() -> GatedStorage:
    storage = GatedStorage(LocalStorage(), ["begin"])
    storage.open("begin")
    return storage
