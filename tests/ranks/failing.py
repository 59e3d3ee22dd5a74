"""Functions that ranks run in tests of failing saves: states, faults, saves and their outcomes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import aiockpt
from aiockpt.coordination import coordinator
from aiockpt.core.threads import Workers
from aiockpt.storage import WrapperStorage
from aiockpt.storage.base import NO_DOCUMENTS, Document, Storage, Transaction
from aiockpt.storage.wrapper import WrapperTransaction
from aiockpt.testing import FaultyStorage, GatedStorage
from tests.places import storage_of
from tests.ranks.world import RankFailure

SMALL: dict[str, Any] = {"chunk_bytes": 1 << 16, "staging_bytes": 1 << 18, "io_threads": 1}
"""Options with less staging memory than a rank's share of the state needs."""
WAIT_S = 60.0


def noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random numbers, different ones for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def own_tensor(rank: int, seed: int) -> torch.Tensor:
    """Return a tensor of one rank alone, larger than what is copied at the call and than `SMALL` staging memory."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-(1 << 31), 1 << 31, (131_000 + rank,), generator=generator, dtype=torch.int32)


def cut_tensor(size: int, seed: int) -> torch.Tensor:
    """Return the tensor that is sharded over all ranks."""
    return noise((5 * size - 1, 3001), 50 * seed + 1)


def whole_state(size: int, seed: int) -> dict[str, Any]:
    """Return the state that all ranks save together, as one process loads it."""
    return {
        "model": {"both": noise((40_011,), 50 * seed + 2), "bias": noise((7,), 50 * seed + 3)},
        "cut": cut_tensor(size, seed),
        "step": seed,
        "notes": ["seed", seed, {"list": [1, 2]}],
        "own": {f"of{rank}": own_tensor(rank, seed) for rank in range(size)},
    }


def state_of(rank: int, size: int, seed: int) -> dict[str, Any]:
    """Return one rank's part of `whole_state`, without communication: other ranks may be dead."""
    state = whole_state(size, seed)
    state["cut"] = _part_of(rank, size, state["cut"])
    state["own"] = {f"of{rank}": own_tensor(rank, seed)}
    return state


def _part_of(rank: int, size: int, whole: torch.Tensor) -> ShardedTensor:
    parts = whole.chunk(size)
    places = [
        ShardMetadata(
            shard_offsets=[sum(map(len, parts[:other])), 0],
            shard_sizes=list(part.shape),
            placement=f"rank:{other}/cpu",
        )
        for other, part in enumerate(parts)
    ]
    about = ShardedTensorMetadata(places, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata([Shard(parts[rank].clone(), places[rank])], about)


@dataclass(slots=True)
class Saving:
    """The arguments of a call of `save`, for a fault of `WRONG` to change."""

    rank: int
    size: int
    folder: Path
    state: dict[str, Any]
    path: Any
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of a save on one rank.

    Attributes:
        call: the error that the call raised.
        staged: the error of `staged`.
        written: the error of `written`.
        after_commit: the text of the post_commit hook's error.
        cancelled: the result of `cancel()`; None if this rank did not call it.
    """

    call: RankFailure | None = None
    staged: RankFailure | None = None
    written: RankFailure | None = None
    after_commit: str = ""
    cancelled: bool | None = None

    @property
    def error(self) -> RankFailure | None:
        """The error that the caller sees first."""
        return self.call or self.written


def die() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def expect_no_reason() -> None:
    """Shorten this process's wait for the reason why a link was closed: a killed rank leaves none."""
    coordinator.RECONNECT_S = 0.2


# --- faults of one rank -----------------------------------------------------------------------------


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


class Step(WrapperStorage):
    """Storage that calls a function before or after one step of a file or of the transaction."""

    def __init__(
        self, inner: Storage, step: str, act: Callable[[], object], name: str = "", *, after: bool = False
    ) -> None:
        super().__init__(inner)
        self._step, self._act, self._name, self._after = step, act, name, after

    async def before(self, step: str, name: str) -> None:
        if not self._after and step == self._step and name.endswith(self._name):
            self._act()

    async def begin(self, path: str, *, overwrite: bool, workers: Workers, ticket: str | None = None) -> Transaction:
        transaction = await WrapperStorage.begin(self, path, overwrite=overwrite, workers=workers, ticket=ticket)
        if self._after and self._step == "begin":
            self._act()
        return _Acting(self, transaction, path, self._act) if self._after and self._step == "commit" else transaction


class _Acting(WrapperTransaction):
    def __init__(self, storage: WrapperStorage, inner: Transaction, path: str, act: Callable[[], object]) -> None:
        super().__init__(storage, inner, path)
        self._act = act

    async def commit(self, documents: Mapping[str, Document] = NO_DOCUMENTS) -> None:
        await super().commit(documents)
        self._act()


class Elsewhere(WrapperStorage):
    """Storage that looks for rank 0's transaction in another place, as if the host had not mounted the file system."""

    async def join(self, path: str, ticket: str, *, workers: Workers) -> Transaction:
        return await self.inner.join(path + ".not-mounted/c", ticket, workers=workers)


class Stubborn(FaultyStorage):
    """Storage that fails to write, and then to abort."""

    async def before(self, step: str, name: str) -> None:
        await super().before(step, name)
        if step == "abort":
            raise aiockpt.WriteError(f"abort {name}: it is stuck")


def _raise(error: BaseException) -> None:
    raise error


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def _fault(step: str, saving: Saving) -> None:
    saving.options["storage"] = FaultyStorage(storage_of(saving.folder), step, _full())


def _document_fault(name: str, step: str, saving: Saving) -> None:
    error = aiockpt.WriteError(f"{step} {name}: {_full()}")
    error.__cause__ = _full()
    saving.options["storage"] = Step(storage_of(saving.folder), step, partial(_raise, error), name)


def _set(name: str, make: Callable[[Saving], Any], saving: Saving) -> None:
    saving.state[name] = make(saving)


def _option(name: str, value: Any, saving: Saving) -> None:
    saving.options[name] = value


def _partial(saving: Saving) -> Any:
    mesh = DeviceMesh("cpu", list(range(saving.size)))
    return DTensor.from_local(noise((4,), saving.rank), mesh, [Partial()])


def _elsewhere(saving: Saving) -> None:
    saving.options["storage"] = Elsewhere(storage_of(saving.folder))


def _stubborn(saving: Saving) -> None:
    saving.options["storage"] = Stubborn(storage_of(saving.folder), "write", _full())


def _other_path(saving: Saving) -> None:
    saving.path = saving.folder / "other"


def _no_path(saving: Saving) -> None:
    saving.path = 17


def _leave_out(saving: Saving) -> None:
    del saving.state["cut"]


def _lose_a_file(how: Callable[[Path], object], saving: Saving) -> None:
    """Spoil this rank's file before the commit, as if rank 0 saw another file system."""

    def spoil(path: str) -> None:
        (file,) = Path(path).parent.glob(f".aiockpt-*/__{saving.rank}_0.distcp")
        how(file)

    saving.options["pre_commit"] = spoil


def _shorten(file: Path) -> None:
    os.truncate(file, 17)


def _hook(name: str, saving: Saving) -> None:
    def hook(path: str) -> None:
        raise ZeroDivisionError("in the hook")

    saving.options[name] = hook


def _async_hook(name: str, saving: Saving) -> None:
    async def hook(path: str) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("in the hook")

    saving.options[name] = hook


WRONG: dict[str, Callable[[Saving], None]] = {
    "unpicklable": partial(_set, "bad", lambda _: [Unpicklable()]),
    "meta": partial(_set, "bad", lambda _: torch.empty(3, device="meta")),
    "partial": partial(_set, "bad", _partial),
    "metadata": partial(_option, "metadata", {"loss": torch.ones(2)}),
    "no path": _no_path,
    "format": partial(_option, "format", "pickle"),
    "shape": partial(_set, "model", lambda s: {**s.state["model"], "both": noise((40_012,), 1)}),
    "dtype": partial(_set, "model", lambda s: {**s.state["model"], "both": s.state["model"]["both"].double()}),
    "object": partial(_set, "model", lambda s: {**s.state["model"], "both": "text"}),
    "left out": _leave_out,
    "other path": _other_path,
    "overwrite": partial(_option, "overwrite", True),
    "elsewhere": _elsewhere,
    "file gone": partial(_lose_a_file, os.unlink),
    "file short": partial(_lose_a_file, _shorten),
    "hook": partial(_hook, "pre_commit"),
    "async hook": partial(_async_hook, "pre_commit"),
    "late hook": partial(_hook, "post_commit"),
    "late async hook": partial(_async_hook, "post_commit"),
    "stubborn": _stubborn,
    **{step: partial(_fault, step) for step in ("begin", "join", "create", "write", "finish", "commit")},
    **{
        f"{step} {name}": partial(_document_fault, name, step)
        for name in (".metadata", ".aiockpt.json")
        for step in ("create", "write", "finish")
    },
}


# --- saves ------------------------------------------------------------------------------------------


async def end_of(rank: int, save: aiockpt.SaveHandle) -> Ended:
    """Wait until a save has ended, and return its outcome."""
    await save.written.settled()
    staged, written = save.staged.exception(), save.written.exception()
    after = "" if written is not None else str(save.written.result().post_commit_error or "")
    failures = [None if error is None else RankFailure.of(rank, error) for error in (staged, written)]
    return Ended(None, *failures, after)


async def attempt(ckpt: aiockpt.AsyncCheckpointer, saving: Saving) -> Ended:
    """Save, and return the outcome."""
    try:
        save = ckpt.save(saving.state, saving.path, **saving.options)
    except Exception as exc:
        return Ended(RankFailure.of(saving.rank, exc))
    return await end_of(saving.rank, save)


async def save_with(
    rank: int, size: int, folder: Path, wrong: str, failing: int, common: dict[str, Any] | None = None
) -> Ended:
    """Save with something wrong on one rank, then save again with nothing wrong."""
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        saving = Saving(rank, size, folder, state_of(rank, size, 1), folder / "c", dict(common or {}))
        if rank == failing:
            WRONG[wrong](saving)
        ended = await attempt(ckpt, saving)
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


async def save_well(rank: int, size: int, path: Path, seed: int) -> None:
    """Save with nothing wrong."""
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        await ckpt.save(state_of(rank, size, seed), path)


async def save_over(rank: int, size: int, folder: Path, wrong: str, failing: int) -> Ended:
    """Overwrite a checkpoint with something wrong on one rank."""
    await save_well(rank, size, folder / "c", 3)
    return await save_with(rank, size, folder, wrong, failing, {"overwrite": True})


async def save_on_taken(rank: int, size: int, folder: Path) -> Ended:
    """Save to a path that exists, then to another one."""
    return await save_with(rank, size, folder, "", -1)


async def held(ckpt: aiockpt.AsyncCheckpointer, state: dict[str, Any], path: Path) -> tuple[Any, GatedStorage]:
    """Start a save that is held up before it creates its file; return when its staging memory is full."""
    storage = GatedStorage(storage_of(path), ["create"])
    save = ckpt.save(state, path, storage=storage)
    async for event in save.progress():
        if event.staged_bytes >= SMALL["staging_bytes"]:
            break
    return save, storage


async def change_while_saving(rank: int, size: int, folder: Path, how: str, failing: int) -> Ended:
    """Change or free a tensor on one rank while it is copied."""
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        state = state_of(rank, size, 1)
        if rank == failing:
            save, storage = await held(ckpt, state, folder / "c")
            if how == "change":
                state["own"][f"of{rank}"].bitwise_not_()
            else:
                for tensor in (state["own"][f"of{rank}"], state["model"]["both"], state["cut"].local_tensor()):
                    tensor.untyped_storage().resize_(0)
            storage.open("create")
        else:
            save = ckpt.save(state, folder / "c")
        ended = await end_of(rank, save)
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


async def fail_unseen(rank: int, size: int, folder: Path, seeing: int) -> tuple[Ended, str]:
    """Fail a save whose error only one rank retrieves, then save again."""
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        saving = Saving(rank, size, folder, state_of(rank, size, 1), folder / "c")
        if rank == size - 1:
            WRONG["write"](saving)
        save = ckpt.save(saving.state, saving.path, **saving.options)
        await save.written.settled()
        text = str(save.written.exception()) if rank == seeing else ""
        ended = await attempt(ckpt, Saving(rank, size, folder, state_of(rank, size, 3), folder / "again"))
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended, text


async def cancel_early(rank: int, size: int, folder: Path, failing: Sequence[int]) -> Ended:
    """Cancel on some ranks before the others have called `save`."""
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        if rank not in failing:
            dist.barrier()
        save = ckpt.save(state_of(rank, size, 1), folder / "c")
        asked = save.cancel() if rank in failing else None
        if rank in failing:
            dist.barrier()
        ended = await _cancelled_end(rank, save, asked)
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


async def cancel_while_planning(rank: int, size: int, folder: Path, failing: Sequence[int]) -> Ended:
    """Cancel on some ranks while rank 0 begins a save whose layout all know, behind one that is not over."""
    before, storage = (GatedStorage(storage_of(folder), [step] if rank == 0 else []) for step in ("commit", "begin"))
    async with aiockpt.AsyncCheckpointer(coordination_timeout=20.0, **SMALL) as ckpt:
        state = state_of(rank, size, 1)
        first = ckpt.save(state, folder / "first", storage=before)
        save = ckpt.save(state, folder / "c", storage=storage)
        if rank == 0:
            await storage.reached["begin"]
        dist.barrier()
        asked = save.cancel() if rank in failing else None
        dist.barrier()
        if rank == 0:
            storage.open("begin")
            before.open("commit")
        ended = await _cancelled_end(rank, save, asked)
        await first
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


async def cancel_while_copying(rank: int, size: int, folder: Path, failing: Sequence[int]) -> Ended:
    """Cancel on some ranks while these can neither copy nor write."""
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        asked = None
        if rank in failing:
            save, _ = await held(ckpt, state_of(rank, size, 1), folder / "c")
            asked = save.cancel()
        else:
            save = ckpt.save(state_of(rank, size, 1), folder / "c")
        ended = await _cancelled_end(rank, save, asked)
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


async def cancel_while_waiting(rank: int, size: int, folder: Path, failing: int, step: str) -> Ended:
    """Cancel too late: on a rank that has written its share, while another rank has not."""
    holding = 0 if step == "commit" else (failing + 1) % size
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        storage = GatedStorage(storage_of(folder), [step])
        options = {"storage": storage} if rank == holding else {}
        save = ckpt.save(state_of(rank, size, 1), folder / "c", **options)
        asked = None
        if rank == holding:
            await storage.reached[step]
        if rank == failing:
            async for event in save.progress():
                if event.phase == "written":
                    break
            asked = save.cancel()
        await asyncio.to_thread(dist.barrier)
        if rank == holding:
            storage.open(step)
        ended = await _cancelled_end(rank, save, asked)
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


async def _cancelled_end(rank: int, save: aiockpt.SaveHandle, asked: Any) -> Ended:
    ended = await end_of(rank, save)
    outcome = None if asked is None else await asked
    return Ended(ended.call, ended.staged, ended.written, ended.after_commit, outcome)


async def save_in_flight(rank: int, size: int, folder: Path, failing: int) -> list[tuple[Ended, list[str]]]:
    """Start three saves with different keys each; the first one fails on one rank."""
    order: list[str] = []
    async with aiockpt.AsyncCheckpointer(io_threads=2) as ckpt:
        saves = []
        gates = []
        for number in range(3):
            storage: Storage = storage_of(folder)
            if rank == failing and number == 0:
                storage = FaultyStorage(storage, "finish", _full())
            if (rank + number) % 3 == 0:  # each save is held up on other ranks than the one before
                storage = GatedStorage(storage, ["create"])
                gates.append(storage)
            state = state_of(rank, size, 4 + number)
            state["extra"] = {f"only{number}": noise((30_001,), number)}
            name = str(number)
            saves.append(ckpt.save(state, folder / name, storage=storage, post_commit=lambda p: order.append(p)))
            await saves[-1].staged.settled()
        for storage in gates:
            storage.open("create")
        ends = [(await end_of(rank, save), list(order)) for save in saves]
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ends


async def come_late(rank: int, size: int, folder: Path, late: int, step: str) -> Ended:
    """Save while one rank does not call in time, or is held up while it writes; then save again."""
    async with aiockpt.AsyncCheckpointer(coordination_timeout=2.0, **SMALL) as ckpt:
        await ckpt.save(state_of(rank, size, 3), folder / "before")
        storage = GatedStorage(storage_of(folder), ["create"])
        if step == "call":
            ended = Ended()
            if rank != late:
                ended = await attempt(ckpt, Saving(rank, size, folder, state_of(rank, size, 1), folder / "c"))
            await asyncio.to_thread(dist.barrier)
        else:
            options = {"storage": storage} if rank == late else {}
            save = ckpt.save(state_of(rank, size, 1), folder / "c", **options)
            if rank != late:
                ended = await end_of(rank, save)
            await asyncio.to_thread(dist.barrier)
            if rank == late:
                storage.open("create")
                ended = await end_of(rank, save)
            await asyncio.to_thread(dist.barrier)
        await ckpt.save(state_of(rank, size, 2), folder / "next")
    return ended


# --- deaths -----------------------------------------------------------------------------------------

DEATHS: dict[str, Callable[[Storage], Storage]] = {
    "join": lambda inner: Step(inner, "join", die),
    "begin": lambda inner: Step(inner, "begin", die),
    "create": lambda inner: Step(inner, "create", die),
    "write": lambda inner: Step(inner, "write", die),
    "finish": lambda inner: Step(inner, "finish", die),
    "commit": lambda inner: Step(inner, "commit", die),
    "committed": lambda inner: Step(inner, "commit", die, after=True),
}


async def survive(
    rank: int, size: int, folder: Path, moment: str, dying: int, before: bool, options: dict[str, Any]
) -> tuple[Ended, float]:
    """Save while one rank dies; return the outcome and the seconds that the save took."""
    expect_no_reason()
    loop = asyncio.get_running_loop()
    async with aiockpt.AsyncCheckpointer(**SMALL) as ckpt:
        if before:
            await ckpt.save(state_of(rank, size, 3), folder / "before")
        path = folder / ("before" if options.get("overwrite") else "c")
        saving = Saving(rank, size, folder, state_of(rank, size, 1), path, dict(options))
        if rank == dying:
            if moment == "call":
                die()
            saving.options["storage"] = DEATHS[moment](storage_of(folder))
        begun = loop.time()
        ended = await attempt(ckpt, saving)
    return ended, loop.time() - begun


async def go_on(rank: int, size: int, folder: Path, dead: int, store_path: str) -> None:
    """Save over a new group of the surviving ranks, then on each rank alone."""
    dist.destroy_process_group()
    left = [other for other in range(size) if other != dead]
    store = dist.FileStore(store_path, len(left))
    dist.init_process_group("gloo", store=store, rank=left.index(rank), world_size=len(left))
    await save_well(left.index(rank), len(left), folder / "next", 2)
    async with aiockpt.AsyncCheckpointer(process_group=None) as ckpt:
        await ckpt.save({"alone": noise((9,), rank)}, folder / f"alone{rank}")
