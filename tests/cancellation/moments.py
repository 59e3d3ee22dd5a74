"""The moments at which saves are called off, or left by who waits for them; each is held by gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aiockpt
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.testing import GatedStorage
from tests.cancellation.stops import Stop, Writer, stop_before

CHUNK = 64 << 10
DRAIN_S = 20.0  # after a failed check nobody lets go on what is held
_TENSOR_BYTES = 2 * CHUNK + 40  # more than is copied at the call; its end is in the midst of a chunk
_TENSORS = 3


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a save stands.

    Attributes:
        chunks: how much staging memory there is to be, in chunks.
        step: before which step of the storage it is held; "a thread": inside a write, with its memory; empty: it is
            held by an earlier save.
        staged: whether it is staged by then.
        published: whether it is too late to call it off.
    """

    chunks: int
    step: str = ""
    staged: bool = False
    published: bool = False


MOMENTS = {
    "captured": Moment(chunks=1),  # in line behind a save that is still being staged
    "pool": Moment(chunks=1),  # the only chunk is with a save that is being written
    "staging": Moment(chunks=1, step="write"),  # the only chunk is being written, and most is not copied yet
    "writing": Moment(chunks=16, step="write", staged=True),
    "inside a write": Moment(chunks=16, step="a thread", staged=True),
    "syncing": Moment(chunks=16, step="finish", staged=True),
    "committing": Moment(chunks=16, step="commit", staged=True, published=True),
}


@dataclass(slots=True)
class Held:
    """A save that stands at a moment.

    Attributes:
        save: its handle.
        state: what is being saved.
        path: where it goes.
        stop: what holds it, or the one before it.
        front: the one before it, if that is what holds it.
        front_state: what that one saves.
    """

    save: aiockpt.SaveHandle
    state: dict[str, torch.Tensor]
    path: Path
    stop: Stop
    front: aiockpt.SaveHandle | None = None
    front_state: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """What is published beside it, in the end."""
        return {"front"} if self.front is not None else set()


def state_of(seed: int, *, tensors: int = _TENSORS) -> dict[str, torch.Tensor]:
    """Make tensors, all different in every element, also from those of other seeds."""
    count = _TENSOR_BYTES // 4
    begins = [(seed * 97 + number) * 1_000_003 for number in range(tensors)]
    return {f"w{i}": torch.arange(begin, begin + count, dtype=torch.int32) for i, begin in enumerate(begins)}


def options_of(moment: Moment, writer: Writer) -> dict[str, Any]:
    """Give the options of a checkpointer in which a save can be held at a moment."""
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
    """Start a save, and another one before it where that is needed, and wait until it stands at the moment.

    Args:
        submit: starts a save.
        moment: one of `MOMENTS`.
        folder: where "c" is saved, and "front".
        writer: what the checkpointer has.
        seed: of the state.
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
        await storage.reached["begin"]  # when it asks for the first chunk as well
    elif moment == "pool":
        async for _ in save.progress():
            break
    return Held(save, state, path, stop, front, before)


def _seen_to_begin() -> GatedStorage:
    storage = GatedStorage(LocalStorage(), ["begin"])
    storage.open("begin")
    return storage
