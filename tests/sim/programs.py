"""Random programs that save while they train on the simulated device, and what their checkpoints must be.

A program is right by itself: its streams wait for one another, so its kernels have one order. A mirror of its state in
host memory changes in the same order. Every published checkpoint must equal the mirror at its `save()`. A save may fail
as torn only if the program has changed something before it was allowed to, and in other ways only with their cause.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import aiockpt
from aiockpt.snapshot import consistency
from tests.sim import device as sim

CHUNK = 64 << 10
WAIT_S = 60.0
STREAMS = 3  # of the program, on each device

# --- programs -------------------------------------------------------------------------------------

KINDS = {  # dtype, shape, device, and how the saved tensor lies in its memory
    "large": (torch.int32, (61_000,), "sim:0", ""),
    "larger": (torch.int32, (130, 1000), "sim:0", ""),
    "middle": (torch.int32, (20_000,), "sim:0", ""),
    "small": (torch.int32, (100,), "sim:0", ""),
    "strided": (torch.int32, (150, 300), "sim:0", "strided"),
    "transposed": (torch.int64, (100, 170), "sim:0", "transposed"),
    "conjugated": (torch.complex64, (9_000,), "sim:0", "conjugated"),
    "other device": (torch.int32, (30_000,), "sim:1", ""),
    "host": (torch.int32, (30_000,), "cpu", ""),
    "parameter": (torch.float32, (25_000,), "sim:0", ""),
    "matrix": (torch.float32, (200, 120), "sim:0", ""),
}


@dataclass(frozen=True)
class Action:
    """One line of a program."""

    what: str
    which: int = 0  # of the tensors, the saves or the streams there are, modulo their number
    value: int = 1


@dataclass(frozen=True)
class Program:
    """A program, and the device that it runs on."""

    seed: int  # of the delays
    delays: dict[str, int]  # by kind of task, in microseconds at most
    launch_us: int  # that each launch by an operator on many tensors takes at most
    locked: bool
    options: dict[str, Any]
    tensors: list[str]
    actions: list[Action]


CHANGES = [
    "add",
    "scale a part",
    "add to all",
    "copy",
    "step",
    "guarded step",
    "free",
    "replace",
    "load into",
    "replay",
]
WAITS = ["fence", "fence all", "staged", "written", "cancel", "compute"]
OTHERS = ["load", "use", "stream", "full save", "busy"]

_microseconds = st.sampled_from([0, 0, 100, 1000, 4000])


@st.composite
def _actions(draw: st.DrawFn) -> list[Action]:
    """Draw a few kinds of actions, which follow one another more often than if all kinds were in each program."""
    # The most dangerous ones more often.
    some = st.sampled_from([*CHANGES, *WAITS, *OTHERS, *["free", "add to all", "use"] * 3])
    kinds = draw(st.lists(some, min_size=1, max_size=4, unique=True))
    action = st.builds(Action, st.sampled_from(["save", *kinds]), st.integers(0, 11), st.integers(1, 9))
    # What is loaded must have been published.
    begin = [Action("save"), Action("written")] if not {"load", "use", "load into"}.isdisjoint(kinds) else []
    return begin + draw(st.lists(action, min_size=3, max_size=14))


programs = st.builds(
    Program,
    seed=st.integers(0, 2**32),
    delays=st.fixed_dictionaries(dict.fromkeys(("kernel", "to_host", "from_host", "register"), _microseconds)),
    launch_us=st.sampled_from([0, 1000, 20_000]),
    locked=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "chunk_bytes": st.sampled_from([CHUNK, 8 * CHUNK]),
            "staging_bytes": st.sampled_from([2 * CHUNK, 6 * CHUNK, 64 * CHUNK]),
            "validate": st.sampled_from(["versions", "versions", "hash"]),
            "max_in_flight": st.integers(1, 3),
        }
    ),
    tensors=st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=6),
    actions=_actions(),
)

_QUICK = {"staging_bytes": 64 * CHUNK, "chunk_bytes": 8 * CHUNK, "validate": "versions", "max_in_flight": 1}
KNOWN = {
    "an operator counts its changes late": Program(
        1, {}, 20_000, True, _QUICK, ["large", "larger", "matrix", "strided"], [Action("save"), Action("add to all")]
    ),
    "memory is freed under its copies": Program(
        1,
        {"to_host": 4000},
        0,
        True,
        _QUICK,
        ["large", "larger", "matrix"],
        [Action("busy", 0, 9), Action("save"), Action("compute", 0, 6), Action("free", 0, 3)],
    ),
    "a loaded tensor is dropped while it is read": Program(
        1,
        {"kernel": 4000},
        0,
        True,
        _QUICK,
        ["large", "larger", "middle"],
        [Action("save"), Action("written"), *[Action("busy", 0, 3), Action("use")] * 4],
    ),
    "small tensors are freed in another stream": Program(
        1,
        {"kernel": 4000},
        0,
        True,
        _QUICK,
        ["small", "matrix"],
        [Action("stream", 1), Action("busy", 0, 9), Action("save"), Action("free", 0)],
    ),
    "a capture before the first save": Program(
        1, {}, 0, True, _QUICK, ["large"], [Action("replay"), Action("save"), Action("fence"), Action("replay")]
    ),
}
"""Programs that have found something once."""

# --- running them ---------------------------------------------------------------------------------


@dataclass
class _Entry:
    """A tensor of the state, and its mirror in host memory."""

    kind: str
    base: torch.Tensor  # the memory of the tensor
    mirror: torch.Tensor

    @classmethod
    def of(cls, kind: str, value: int) -> _Entry:
        dtype, shape, device, _ = KINDS[kind]
        numel = torch.Size(shape).numel() * (2 if kind == "strided" else 1)
        values = (torch.arange(numel) % 1000 + value).to(dtype)
        return cls(kind, values.clone().to(device), values)

    def shown(self, memory: torch.Tensor) -> torch.Tensor:
        """Return what is saved of a memory."""
        _, shape, _, layout = KINDS[self.kind]
        if layout == "strided":
            return memory.view(shape[0], -1)[:, ::2]
        if layout == "transposed":
            return memory.view(shape[1], shape[0]).t()
        return memory.view(shape).conj() if layout == "conjugated" else memory.view(shape)


@dataclass
class _Save:
    handle: aiockpt.SaveHandle
    expected: dict[str, torch.Tensor]
    disturbed: bool = False  # something was changed before it was allowed
    fenced: bool = False
    excuses: tuple[type[BaseException], ...] = ()  # further errors that it may end with


class Runner:
    """Runs one program in a directory."""

    def __init__(self, program: Program, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self._entries = {f"t{number}": _Entry.of(kind, number) for number, kind in enumerate(program.tensors)}
        self._streams = [
            [
                torch.accelerator.current_stream(f"sim:{index}"),
                *(torch.Stream(f"sim:{index}") for _ in range(STREAMS - 1)),
            ]
            for index in range(2)
        ]
        self._at = 0
        self._saves: list[_Save] = []
        self._published: list[_Save] = []
        self._freed: dict[int, tuple[_Entry, int]] = {}  # tensors without memory, and its size
        self._others: list[torch.Tensor] = []
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and what it must be
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        program = self._program
        sim.reset()
        sim.set_seed(program.seed)
        sim.delay(**program.delays)
        try:
            # Operators that launch many kernels may take longer than 20 ms on a busy machine.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(consistency, "_OPERATOR_S", 1.0)
                if program.locked:
                    sim.lock_memory(patch)
                with aiockpt.SyncCheckpointer(on_failure="warn", fsync=False, **program.options) as self._ckpt:
                    for action in program.actions:
                        if action.what not in WAITS:
                            self._regrow()
                        getattr(self, "_" + action.what.replace(" ", "_"))(action)
                        self._check_thread()
                    for save in self._saves:
                        self._end_of(save)
            self._regrow()
            self._check_state()
            assert not sim.misuses(), sim.misuses()
            assert not sim.statistics()["registered"]
        finally:
            for row in self._streams:
                torch.accelerator.set_stream(row[0])
            torch.accelerator.set_device_index(0)
            self._entries.clear()
            sim.reset()
        return self.counts

    # --- checks

    def _check_thread(self) -> None:
        """Nothing may change the current device and streams of the caller's thread."""
        assert torch.accelerator.current_device_index() == 0
        for index, row in enumerate(self._streams):
            assert torch.accelerator.current_stream(f"sim:{index}") == row[self._at]

    def _check_state(self) -> None:
        for name, entry in self._entries.items():
            assert torch.equal(entry.base.cpu(), entry.mirror), f"{name}, {entry.kind}, of the program itself is wrong"
        for result, expected in self._results:
            assert torch.equal(result.cpu(), expected), "memory of a loaded tensor was reused while it was read"

    def _end_of(self, save: _Save) -> None:
        """Wait for the end of a save, and check its outcome; once."""
        if save in self._published:
            return
        error = save.handle.written.exception(WAIT_S)
        path = Path(save.handle.path)
        if error is None:
            self._published.append(save)
            self.counts["published"] += 1
            self.counts["published, though disturbed"] += save.disturbed
            found = self._ckpt.load(path)
            for name, expected in save.expected.items():
                same = torch.equal(found[name].resolve_conj(), expected.resolve_conj())
                assert same, f"{name}, {self._kind(name)}, in {path.name} is not as it was at save()"
            return
        assert not path.exists()
        self.counts[type(error).__name__] += 1
        if isinstance(error, aiockpt.TornSnapshotError):
            assert save.disturbed, f"a false alarm: {error}"
        else:
            assert isinstance(error, save.excuses), repr(error)

    def _kind(self, name: str) -> str:
        return self._program.tensors[int(name[1:])]

    # --- the program's state

    def _chosen(self, action: Action) -> _Entry:
        return list(self._entries.values())[action.which % len(self._entries)]

    def _disturb(self) -> None:
        for save in self._saves:
            save.disturbed = save.disturbed or not save.fenced

    def _add(self, action: Action) -> None:
        entry = self._chosen(action)
        self._disturb()
        entry.base.add_(action.value)
        entry.mirror.add_(action.value)

    def _scale_a_part(self, action: Action) -> None:
        entry = self._chosen(action)
        self._disturb()
        entry.base[::3].mul_(-1)
        entry.mirror[::3].mul_(-1)

    def _add_to_all(self, action: Action) -> None:
        """Change many tensors by one operator, which counts the changes when all kernels are launched."""
        self._disturb()
        sim.delay_launches(self._program.launch_us)
        for device in ("sim:0", "sim:1", "cpu"):
            some = [entry for entry in self._entries.values() if KINDS[entry.kind][2] == device]
            if some:
                torch._foreach_add_([entry.base for entry in some], action.value)
                torch._foreach_add_([entry.mirror for entry in some], action.value)
        sim.delay_launches(0)

    def _copy(self, action: Action) -> None:
        entry = self._chosen(action)
        self._disturb()
        entry.mirror.mul_(2).add_(action.value).remainder_(997) if not entry.mirror.is_complex() else entry.mirror.mul_(
            2
        )
        entry.base.copy_(entry.mirror)

    def _parameters(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.kind in ("parameter", "matrix")]

    def _stepped(self) -> torch.optim.Optimizer | None:
        parameters = self._parameters()
        if not parameters:
            return None
        for entry in parameters:
            entry.base.grad = torch.ones_like(entry.base)
        return torch.optim.SGD([entry.base for entry in parameters], lr=1.0)

    def _step(self, action: Action) -> None:
        optimizer = self._stepped()
        if optimizer is not None:
            self._disturb()
            optimizer.step()
            for entry in self._parameters():
                entry.mirror.sub_(1)

    def _guarded_step(self, action: Action) -> None:
        optimizer = self._stepped()
        if optimizer is not None:
            with self._ckpt.guard(optimizer, timeout=WAIT_S):
                optimizer.step()
            for entry in self._parameters():
                entry.mirror.sub_(1)

    def _free(self, action: Action) -> None:
        """Free the memory under a tensor, until the program wants it again; something else may get it meanwhile."""
        entry = self._chosen(action)
        if entry.base.device.type == "cpu":  # the engine reads it at once
            return
        self._disturb()
        for save in self._saves:
            save.excuses += (aiockpt.StageError,) if not save.fenced else ()
        if action.value > 3:
            self._compute(action)  # so that copies have been enqueued
        storage = entry.base.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        self._freed[id(entry)] = entry, nbytes
        if action.value % 2:
            self._others.append(torch.full((nbytes,), 7, dtype=torch.uint8, device=entry.base.device))

    def _regrow(self) -> None:
        for entry, nbytes in self._freed.values():
            entry.base.untyped_storage().resize_(nbytes)
            entry.base.fill_(3)
            entry.mirror.fill_(3)
        self._freed.clear()
        self._others.clear()

    def _replace(self, action: Action) -> None:
        """Drop a tensor, which no save sees as a change, and make another."""
        names = list(self._entries)
        name = names[action.which % len(names)]
        kind = self._entries[name].kind
        self._entries[name] = _Entry.of(kind, action.value)

    def _replay(self, action: Action) -> None:
        """Change a tensor by a graph, behind a fence: no counter would show it."""
        entry = self._chosen(action)
        if entry.base.device != torch.device("sim:0"):
            return
        graph = sim.Graph(torch.Stream("sim:0"))
        self._disturb()  # the capture counts as a change
        with graph.capture():
            entry.base.add_(action.value)
            with pytest.raises(aiockpt.SaveError, match="captures a graph"):
                self._ckpt.submit(self._state(), self._directory / "captured")
        torch.accelerator.set_device_index(0)
        self._fence_all(action)
        graph.replay()
        entry.mirror.add_(action.value)

    def _stream(self, action: Action) -> None:
        """Go on in another stream of each device."""
        before, self._at = self._at, action.which % STREAMS
        for row in self._streams:
            if self._at != before:
                row[self._at].wait_stream(row[before])
            torch.accelerator.set_stream(row[self._at])
        torch.accelerator.set_device_index(0)

    # --- saves

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: entry.shown(entry.base) for name, entry in self._entries.items()}

    def _save(self, action: Action) -> _Save:
        if action.value > 6:
            self._busy(action)  # so the copies wait in their stream
        handle = self._ckpt.submit(self._state(), self._directory / f"c{len(self._saves)}")
        expected = {name: entry.shown(entry.mirror).clone() for name, entry in self._entries.items()}
        save = _Save(handle, expected)
        self._saves.append(save)
        self.counts["saves"] += 1
        return save

    def _full_save(self, action: Action) -> None:
        """Save while the device has no memory to spare."""
        torch.accelerator.synchronize()
        sim.fail_allocations(action.value, 1 + action.which % 4)
        try:
            for each in self._saves:  # those in flight, too
                each.excuses = (aiockpt.SaveError,)
            save = self._save(action)
            save.excuses = (aiockpt.SaveError,)
            with contextlib.suppress(aiockpt.SaveError):
                save.handle.staged.result(WAIT_S)
            save.fenced = True
        except aiockpt.SaveError:
            self.counts["refused, for the device is full"] += 1
        finally:
            sim.fail_allocations(0, 0)

    def _some_saves(self, action: Action) -> Sequence[_Save]:
        return self._saves[-1 - action.which % len(self._saves) :][:1] if self._saves else []

    def _fence(self, action: Action) -> None:
        for save in self._some_saves(action):
            self._fenced(save, save.handle.fence)

    def _fence_all(self, action: Action) -> None:
        with contextlib.suppress(aiockpt.SaveError):
            self._ckpt.fence(WAIT_S)
        for save in self._saves:
            save.fenced = True

    def _fenced(self, save: _Save, wait: Any) -> None:
        try:
            wait(WAIT_S)
        except aiockpt.TornSnapshotError as exc:
            assert save.disturbed, f"a false alarm: {exc}"
        except aiockpt.SaveError as exc:
            assert isinstance(exc, save.excuses), repr(exc)
        save.fenced = True

    def _staged(self, action: Action) -> None:
        for save in self._some_saves(action):
            self._fenced(save, save.handle.staged.result)

    def _written(self, action: Action) -> None:
        for save in self._some_saves(action):
            self._end_of(save)
            save.fenced = True

    def _busy(self, action: Action) -> None:
        """Keep the current streams busy."""
        for index in range(2):
            sim.sleep(action.value * 1500, index)

    def _compute(self, action: Action) -> None:
        """Do something else, while the engine goes on."""
        time.sleep(action.value / 1000)

    def _cancel(self, action: Action) -> None:
        for save in self._some_saves(action):
            save.handle.cancel()
            save.excuses += (aiockpt.SaveCancelledError,)

    # --- loads

    def _loaded_save(self, action: Action) -> _Save | None:
        return self._published[action.which % len(self._published)] if self._published else None

    def _load(self, action: Action) -> None:
        """Load new tensors on the device, and keep them until the end."""
        for tensor, expected in self._new_tensors(action):
            self._results.append((tensor, expected))

    def _use(self, action: Action) -> None:
        """Load new tensors on the device, read them by a kernel, and drop them before it has run."""
        for tensor, expected in self._new_tensors(action):
            self._results.append((tensor + 0, expected))

    def _new_tensors(self, action: Action) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        save = self._loaded_save(action)
        if save is None:
            return
        found = self._ckpt.load(save.handle.path, map_location="sim:0")
        for name in list(found):
            expected = save.expected[name].resolve_conj()
            tensor = found.pop(name)
            assert tensor.device == torch.device("sim:0")
            yield tensor, expected

    def _load_into(self, action: Action) -> None:
        """Load in place, into the tensors of the state."""
        save = self._loaded_save(action)
        if save is None:
            return
        self._disturb()
        self._ckpt.load(save.handle.path, self._state())
        for name, entry in self._entries.items():
            entry.shown(entry.mirror).copy_(save.expected[name])


def run(program: Program, directory: Path) -> Counter[str]:
    """Run a program in a directory of its own, which is deleted unless a check fails."""
    directory.mkdir()
    counts = Runner(program, directory).run()
    shutil.rmtree(directory)
    return counts
