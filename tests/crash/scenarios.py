"""The programs to kill: they save, and announce their saves with marks; see `tests.crash.promises`.

The states are small, but take two files, one of them large enough for direct I/O and several writes. Every tensor
encodes the step and the name of its checkpoint, so that a mix of two states is detected.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from aiockpt import SaveHandle, SyncCheckpointer
from aiockpt.errors import AiockptError
from aiockpt.format.names import SUFFIX
from aiockpt.storage.base import Storage
from tests.crash.lab.ptrace import refuse_rename_flags
from tests.ranks import failing
from tests.states import assert_same

Announce = Callable[[str], object]
Whom = Literal["all", "first", "caller", "others"]

CHUNK_BYTES = 512 << 10
OPTIONS: dict[str, Any] = {"separation_hint": "optim"}
PART = "part"
WAIT_S = 30.0


def state_of(name: str, step: int) -> dict[str, Any]:
    """Return the state to save under a name at a step; all its tensors depend on both."""
    key = sum(map(ord, name)) * 1000 + step
    numbers = torch.arange(180_000, dtype=torch.int64)
    return {
        "model": {"w": (numbers * 2_654_435_761 + key) % 2**31, "b": torch.full((7,), float(key)), "step": key},
        "optim": {"m": torch.arange(key, key + 1000, dtype=torch.int32), "n": torch.full((3, 5), key)},
    }


def tensors_of(name: str, step: int) -> dict[str, torch.Tensor]:
    """Return this state as a flat dict of tensors, as the safetensors format requires."""
    state = state_of(name, step)
    return {"w": state["model"]["w"], "b": state["model"]["b"], "m": state["optim"]["m"], "n": state["optim"]["n"]}


def partly_frozen(name: str, step: int) -> dict[str, Any]:
    """Return such a state, most bytes of which are the same for all names and steps."""
    return {**state_of(name, step), "frozen": torch.arange(400_000, dtype=torch.int64)}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A program, and the initial checkpoints of its directory.

    Attributes:
        run: the program; called with the directory and the function that announces.
        before: the initial checkpoints, and their steps.
        options: the options of every save.
        flat: True if the states are those of `tensors_of`.
        suffix: the suffix of the names of checkpoints.
        whom: the processes to kill.
        staged_is_promise: True if a staged save must survive when ``whom`` are killed.
        storage: returns the storage of the next run; None for the file system.
        frozen: True if the states are those of `partly_frozen`.
        together: True if steps from 2 on are transactions, of a checkpoint, a part of it and files.
        refused: True if the file system supports neither RENAME_EXCHANGE nor RENAME_NOREPLACE.
        crashed: True if an earlier program was killed in the directory, right before its save was published.
    """

    run: Callable[[Path, Announce], object]
    before: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    flat: bool = False
    suffix: str = ""
    whom: Whom = "all"
    staged_is_promise: bool = False
    storage: Callable[[], Storage] | None = None
    crashed: bool = False
    refused: bool = False
    together: bool = False
    frozen: bool = False

    def state(self, name: str, step: int) -> dict[str, Any]:
        """Return the state to save under a name at a step."""
        if self.frozen:
            return partly_frozen(name, step)
        return tensors_of(name, step) if self.flat else state_of(name, step)

    def is_state(self, found: Any, name: str, step: int) -> bool:
        """Return whether this is, bit by bit, the state that was saved under a name at a step."""
        wanted = self.state(name, step)
        if self.flat:  # a safetensors file has its own order of tensors
            wanted, found = dict(sorted(wanted.items())), dict(sorted(found.items()))
        try:
            assert_same(wanted, found)
        except AssertionError:
            return False
        return True

    def file(self, name: str) -> str:
        """Return the file name of a checkpoint: a name with the suffix."""
        return name.removesuffix(self.suffix) + self.suffix


@contextmanager
def checkpointer(**options: Any) -> Iterator[SyncCheckpointer]:
    options = {"process_group": None, "chunk_bytes": CHUNK_BYTES, "staging_bytes": 8 << 20, "io_threads": 2} | options
    with SyncCheckpointer(**options) as ckpt:
        yield ckpt


class Program:
    """A program that announces each of its saves and deletions."""

    def __init__(
        self,
        ckpt: SyncCheckpointer,
        folder: Path,
        announce: Announce,
        *,
        flat: bool = False,
        frozen: bool = False,
        cut: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.ckpt = ckpt
        self.folder = folder
        self.announce = announce
        self.state = partly_frozen if frozen else tensors_of if flat else state_of
        self.cut = cut  # returns this rank's part of a flat tensor

    def begin(self, name: str, step: int, **options: Any) -> SaveHandle:
        self.announce(f"begin {name} {step}")
        state = self.state(name, step)
        if self.cut is not None:
            state = {key: self.cut(tensor) for key, tensor in state.items()}
        return self.ckpt.submit(state, self.folder / name, **options)

    def end(self, save: SaveHandle, name: str, step: int) -> None:
        save.staged.result(WAIT_S)
        self.announce(f"staged {name} {step}")
        save.written.result(WAIT_S)
        self.announce(f"written {name} {step}")

    def save(self, name: str, step: int, **options: Any) -> None:
        self.end(self.begin(name, step, **options), name, step)

    def delete(self, name: str) -> None:
        self.announce(f"deleting {name}")
        self.ckpt.delete(self.folder / name)
        self.announce(f"deleted {name}")


def save_one(
    folder: Path,
    announce: Announce,
    name: str = "c",
    *,
    flat: bool = False,
    storage: Callable[[], Storage] | None = None,
    **options: Any,
) -> None:
    """Save once."""
    with checkpointer() as ckpt:
        options = options if flat else {**OPTIONS, **options}
        Program(ckpt, folder, announce, flat=flat).save(name, 2, storage=storage and storage(), **options)


def save_several(folder: Path, announce: Announce) -> None:
    """Save three checkpoints at once, one of them over an existing one."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce)
        wanted = [("a", 2, False), ("c", 3, True), ("b", 4, False)]
        saves = [program.begin(name, step, overwrite=replaces, **OPTIONS) for name, step, replaces in wanted]
        for save, (name, step, _) in zip(saves, wanted, strict=True):
            program.end(save, name, step)


def save_and_delete(folder: Path, announce: Announce) -> None:
    """Save, and delete older checkpoints during the save and after it."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce)
        save = program.begin("c", 3, **OPTIONS)
        program.delete("old-1")
        program.end(save, "c", 3)
        program.delete("old-2")


def save_deltas(folder: Path, announce: Announce) -> None:
    """Save what shares files with an older checkpoint, delete that one, and go on from there."""
    with checkpointer() as ckpt:
        program = Program(ckpt, folder, announce, frozen=True)
        program.save("c", 2, base=folder / "old")
        program.delete("old")
        program.save("d", 3, base="auto")
        save = program.begin("c", 4, base="auto", overwrite=True)
        program.end(save, "c", 4)
        assert save.written.result(0).bytes_reused > 0


def save_together(folder: Path, announce: Announce, *, writer: Literal["thread", "process"] = "thread") -> None:
    """Save a checkpoint, a part of it and files, all of which appear at once, over an existing checkpoint."""
    with checkpointer(writer=writer) as ckpt:
        announce("begin c 2")
        with ckpt.transaction(folder / "c", overwrite=True) as tx:
            tx.save(state_of("c", 2), **OPTIONS)
            tx.save(state_of("part of c", 2), PART, **OPTIONS)
            tx.add("config.json", b"{}")
            Path(tx.directory, "below").mkdir()
            Path(tx.directory, "below", "notes.txt").write_text("written by hand")
        Program(ckpt, folder, announce).end(tx.handle, "c", 2)


def save_by_process(folder: Path, announce: Announce) -> None:
    """Save twice through a writer process; if a save fails because the writer process was killed, save again."""
    with checkpointer(writer="process") as ckpt:
        program = Program(ckpt, folder, announce)
        for name, step, replaces in (("a", 2, False), ("c", 3, True)):
            try:
                program.save(name, step, overwrite=replaces, **OPTIONS)
            except AiockptError as exc:
                announce(f"failed {name} {type(exc).__name__}")
                program.save(name, step + 10, overwrite=True, **OPTIONS)


def save_by_ranks(
    folder: Path, announce: Announce, name: str = "c", *, coordination_timeout: float = WAIT_S, **options: Any
) -> None:
    """Save twice by two ranks to the same path; with options each rank holds some rows of flat tensors."""
    with tempfile.TemporaryDirectory() as meeting:
        other = os.fork()
        rank = int(other == 0)
        code = 1
        try:
            _save_as_rank(rank, Path(meeting), folder, announce, name, coordination_timeout, options)
            code = 0
        finally:
            if rank:
                os._exit(code)
        os.waitpid(other, 0)


def _save_as_rank(
    rank: int,
    meeting: Path,
    folder: Path,
    announce: Announce,
    name: str,
    coordination_timeout: float,
    options: dict[str, Any],
) -> None:
    failing.expect_no_reason()
    store = dist.FileStore(str(meeting / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    cut = partial(_rows, rank, init_device_mesh("cpu", (2,))) if options else None
    with checkpointer(process_group=dist.group.WORLD, coordination_timeout=coordination_timeout) as ckpt:
        program = Program(ckpt, folder, announce, flat=cut is not None, cut=cut)
        for step in (2, 3):
            try:
                program.save(name, step, overwrite=True, **options)
            except AiockptError as exc:
                announce(f"failed {name} {type(exc).__name__}")
                return


def _rows(rank: int, mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's rows of a tensor as a DTensor."""
    local = tensor.chunk(2)[rank].contiguous()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def save_refused(folder: Path, announce: Announce, run: Callable[..., object]) -> None:
    """Run a program as on a file system without rename flags."""
    refuse_rename_flags()
    run(folder, announce)


def _refused(run: Callable[..., object], before: Mapping[str, int], **options: Any) -> Scenario:
    return Scenario(partial(save_refused, run=run), before, refused=True, **options)


_FILE = f"c{SUFFIX}"
_FLAT: dict[str, Any] = {"flat": True}
_SAFE: dict[str, Any] = {"format": "safetensors"}
_TENSORS: dict[str, Any] = {**_FLAT, "options": _SAFE}

SCENARIOS: dict[str, Scenario] = {
    "first save": Scenario(save_one),
    "overwrite": Scenario(partial(save_one, overwrite=True), {"c": 1}),
    "after a crash": Scenario(partial(save_one, overwrite=True), {"c": 1}, crashed=True),
    "several in flight": Scenario(save_several, {"c": 1}),
    "deleting older ones": Scenario(save_and_delete, {"old-1": 1, "old-2": 2}),
    "writer process": Scenario(save_by_process, {"c": 1}),
    "writer process (trainer killed)": Scenario(save_by_process, {"c": 1}, whom="first", staged_is_promise=True),
    "writer process (writer killed)": Scenario(save_by_process, {"c": 1}, whom="others"),
    "two ranks": Scenario(save_by_ranks, {"c": 1}, options={}),
    "two ranks (one killed)": Scenario(
        partial(save_by_ranks, coordination_timeout=3.0), {"c": 1}, options={}, whom="caller"
    ),
    "two ranks, safetensors": Scenario(partial(save_by_ranks, shard_bytes=1 << 19, **_SAFE), {"c": 1}, **_TENSORS),
    "two ranks, compressed": Scenario(
        partial(save_by_ranks, compress="zstd", files={"config.json": b"{}"}), {"c": 1}, options={}, **_FLAT
    ),
    "two ranks, one safetensors file": Scenario(
        partial(save_by_ranks, name=_FILE, **_SAFE), {_FILE: 1}, suffix=SUFFIX, **_TENSORS
    ),
    "one safetensors file": Scenario(partial(save_one, name=_FILE, **_FLAT, **_SAFE), suffix=SUFFIX, **_TENSORS),
    "one safetensors file (overwrite)": Scenario(
        partial(save_one, name=_FILE, overwrite=True, **_FLAT, **_SAFE), {_FILE: 1}, suffix=SUFFIX, **_TENSORS
    ),
    "one torch.save file": Scenario(
        partial(save_one, name="c.pt", overwrite=True, **_FLAT), {"c.pt": 1}, {"format": "torch"}, suffix=".pt", **_FLAT
    ),
    "safetensors directory": Scenario(
        partial(save_one, overwrite=True, shard_bytes=1 << 19, **_FLAT, **_SAFE), {"c": 1}, **_TENSORS
    ),
    "overwrite in two steps": _refused(partial(save_one, overwrite=True), {"c": 1}),
    "two steps after a crash": _refused(partial(save_one, overwrite=True), {"c": 1}, crashed=True),
    "two steps, several in flight": _refused(save_several, {"c": 1}),
    "two steps, deleting older ones": _refused(save_and_delete, {"old-1": 1, "old-2": 2}),
    "two steps, writer process": _refused(save_by_process, {"c": 1}),
    "two steps, writer process (writer killed)": _refused(save_by_process, {"c": 1}, whom="others"),
    "two steps, two ranks": _refused(save_by_ranks, {"c": 1}, options={}),
    "two steps, one safetensors file": _refused(
        partial(save_one, name=_FILE, overwrite=True, **_FLAT, **_SAFE), {_FILE: 1}, suffix=SUFFIX, **_TENSORS
    ),
    "deltas": Scenario(save_deltas, {"old": 1}, {"base": "auto"}, frozen=True),
    "two steps, deltas": _refused(save_deltas, {"old": 1}, options={"base": "auto"}, frozen=True),
    "compressed": Scenario(partial(save_one, compress="zstd", overwrite=True), {"c": 1}),
    "together": Scenario(save_together, {"c": 1}, together=True),
    "together, first save": Scenario(save_together, together=True),
    "together, writer process": Scenario(partial(save_together, writer="process"), {"c": 1}, together=True),
    "two steps, together": _refused(save_together, {"c": 1}, together=True),
}


def prepare(scenario: Scenario, folder: Path) -> None:
    """Create the directory with its initial checkpoints."""
    folder.mkdir()
    with checkpointer() as ckpt:
        for name, step in scenario.before.items():
            ckpt.save(scenario.state(name, step), folder / name, **scenario.options)
    if scenario.crashed:
        child = os.fork()
        if child == 0:
            with checkpointer() as ckpt:
                ckpt.save(state_of("c", 9), folder / "c", overwrite=True, pre_commit=_die, **scenario.options)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert len(list(folder.glob(".*"))) == 1


def _die(_: str) -> None:
    failing.die()


def warm_up(folder: Path) -> None:
    """Run two of the programs once, so that everything is imported."""
    for number, scenario in enumerate(
        SCENARIOS[name] for name in ("compressed", "one safetensors file (overwrite)", "deltas")
    ):
        prepare(scenario, folder / str(number))
        scenario.run(folder / str(number), str)
        with checkpointer() as ckpt:
            for name in os.listdir(folder / str(number)):
                ckpt.load(folder / str(number) / name)
