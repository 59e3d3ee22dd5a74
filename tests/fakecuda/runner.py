"""Runs programs on the fake CUDA device, and checks what their checkpoints are.

A program is right by itself: its streams wait for one another, so its kernels have one order. A mirror of its state in
host memory changes in the same order. Every published checkpoint must equal the mirror at its `save()`. A save may fail
as torn only if the program has changed something before it was allowed to, and in other ways only with their cause.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.snapshot import consistency
from aiockpt.staging import runtime
from tests.fakecuda import device as fake
from tests.fakecuda.programs import KINDS, STREAMS, WAITS, Action, Program

WAIT_S = 60.0
HELD_S = 0.3
"""Copies are held no longer, as the program may wait for them in ways of its own."""


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
    overlapped: bool = False  # something was changed while it was copied
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
                torch.cuda.default_stream(f"cuda:{index}"),
                *(torch.cuda.Stream(f"cuda:{index}") for _ in range(STREAMS - 1)),
                torch.cuda.Stream(f"cuda:{index}"),  # only `_free_beside_a_fence` goes there
            ]
            for index in range(2)
        ]
        self._at = 0
        self._saves: list[_Save] = []
        self._published: list[_Save] = []
        self._freed: dict[int, tuple[_Entry, int]] = {}  # tensors without memory, and its size
        self._others: list[torch.Tensor] = []
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and what it must be
        self._copies_before = 0  # the last save
        self._timer: threading.Timer | None = None  # of what is held
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        program = self._program
        fake.reset()
        fake.set_seed(program.seed)
        fake.delay(**program.delays)
        try:
            # Operators that launch many kernels may take longer than 20 ms on a busy machine.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(consistency, "_OPERATOR_S", 1.0)
                fake.pose_as(program.kind, patch)
                if program.refuses:
                    fake.refuse(program.refuses, fake.NOT_SUPPORTED)
                    # The engine asks once in a process.
                    patch.setattr(runtime._driver(), "_copy_batch", runtime._driver()._copy_batch)
                with aiockpt.SyncCheckpointer(on_failure="warn", fsync=False, **program.options) as self._ckpt:
                    for action in program.actions:
                        if action.what not in WAITS:
                            self._regrow()
                        getattr(self, "_" + action.what.replace(" ", "_"))(action)
                        self._check_thread()
                    self._let_go()
                    for save in self._saves:
                        self._end_of(save)
            self._regrow()
            self._check_state()
            assert not (misuses := fake.misuses()), misuses
            assert not fake.locked(), "host memory is still locked"
        finally:
            self._let_go()
            for row in self._streams:
                torch.cuda.set_stream(row[0])
            torch.cuda.set_device(0)
            self._entries.clear()
            fake.reset()
        return self.counts

    # --- checks

    def _check_thread(self) -> None:
        """Nothing may change the current device and streams of the caller's thread."""
        assert torch.cuda.current_device() == 0
        for index, row in enumerate(self._streams):
            assert torch.cuda.current_stream(f"cuda:{index}") == row[self._at]

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
            self.counts["published, though overlapped"] += save.overlapped
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
        """Note that something is changed."""
        self._overlap()
        for save in self._saves:
            save.disturbed = save.disturbed or not save.fenced

    def _overlap(self) -> None:
        for save in self._saves:
            save.overlapped = save.overlapped or not save.handle.staged.done()

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
        fake.delay_launches(self._program.launch_us)
        for device in ("cuda:0", "cuda:1", "cpu"):
            some = [entry for entry in self._entries.values() if KINDS[entry.kind][2] == device]
            if some:
                torch._foreach_add_([entry.base for entry in some], action.value)
                torch._foreach_add_([entry.mirror for entry in some], action.value)
        fake.delay_launches(0)

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
            self._overlap()
            with self._ckpt.guard(optimizer, timeout=WAIT_S):
                optimizer.step()
            for entry in self._parameters():
                entry.mirror.sub_(1)

    def _step_on_all_streams(self, action: Action) -> None:
        """Change each tensor in one of the device's streams, all of them behind the current one."""
        self._disturb()
        for index, row in enumerate(self._streams):
            current = row[self._at]
            some = [entry for entry in self._entries.values() if entry.base.device == torch.device("cuda", index)]
            for number, entry in enumerate(some):
                stream = row[(number + action.which) % STREAMS]
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    entry.base.add_(action.value)
                entry.mirror.add_(action.value)
            for stream in row:
                current.wait_stream(stream)

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

    def _free_beside_a_fence(self, action: Action) -> None:
        """Free memory while only a stream that does not use it waits for the copies; something else gets it at once."""
        entry, before = self._chosen(action), self._at
        if entry.base.device.type == "cpu":
            return
        for row in self._streams:
            row[STREAMS].wait_stream(row[before])
            torch.cuda.set_stream(row[STREAMS])
        self._fence_all(action)
        for row in self._streams:
            torch.cuda.set_stream(row[before])
        torch.cuda.set_device(0)
        self._overlap()
        storage = entry.base.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        self._freed[id(entry)] = entry, nbytes
        self._others.append(torch.full((nbytes,), 7, dtype=torch.uint8, device=entry.base.device))
        self._compute(action)
        for row in self._streams:
            row[before].wait_stream(row[STREAMS])

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
        if entry.base.device != torch.device("cuda:0"):
            return
        graph = torch.cuda.CUDAGraph()
        self._disturb()  # the capture counts as a change
        self._let_go()  # it begins by a synchronisation
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            entry.base.add_(action.value)
            try:
                self._ckpt.submit(self._state(), self._directory / "captured")
            except aiockpt.SaveError as exc:
                refused = "captures a graph" in str(exc)
            else:
                refused = False
        assert refused, "a save during a capture was not refused"
        torch.cuda.set_device(0)
        self._fence_all(action)
        graph.replay()
        entry.mirror.add_(action.value)

    def _stream(self, action: Action) -> None:
        """Go on in another stream of each device."""
        before, self._at = self._at, action.which % STREAMS
        for row in self._streams:
            if self._at != before:
                row[self._at].wait_stream(row[before])
            torch.cuda.set_stream(row[self._at])
        torch.cuda.set_device(0)

    # --- saves

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: entry.shown(entry.base) for name, entry in self._entries.items()}

    def _save(self, action: Action) -> _Save:
        if action.value > 6:
            self._busy(action)  # so the copies wait in their stream
        self._copies_before = fake.tasks("to_host")
        handle = self._ckpt.submit(self._state(), self._directory / f"c{len(self._saves)}")
        expected = {name: entry.shown(entry.mirror).clone() for name, entry in self._entries.items()}
        save = _Save(handle, expected)
        self._saves.append(save)
        self.counts["saves"] += 1
        return save

    def _full_save(self, action: Action) -> None:
        """Save while the device has no memory to spare."""
        self._let_go()
        torch.cuda.synchronize()
        fake.refuse("tensor", fake.OUT_OF_MEMORY, after=action.value - 1, count=1 + action.which % 4)
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
            fake.refuse("tensor", 0)

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
        self._let_go()
        for save in self._some_saves(action):
            self._fenced(save, save.handle.staged.result)

    def _written(self, action: Action) -> None:
        self._let_go()
        for save in self._some_saves(action):
            self._end_of(save)
            save.fenced = True

    def _busy(self, action: Action) -> None:
        """Keep the current streams busy."""
        for index in range(2):
            fake.sleep(action.value * 1500, index)

    def _compute(self, action: Action) -> None:
        """Do something else, while the engine goes on."""
        time.sleep(action.value / 1000)

    def _hold(self, action: Action) -> None:
        """Hold all copies to the host."""
        self._let_go()
        fake.hold("to_host")
        self._timer = threading.Timer(HELD_S, fake.release, ["to_host"])
        self._timer.start()

    def _let_go(self, action: Action | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        fake.release("to_host")

    def _enqueued(self, action: Action) -> None:
        """Do something else until the copies of the last save are enqueued, or have no room."""
        until = time.monotonic() + HELD_S / 2
        while (
            fake.tasks("to_host") == self._copies_before
            and time.monotonic() < until
            and not self._saves[-1].handle.staged.done()
        ):
            time.sleep(0.001)
        time.sleep(0.003)

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
        found = self._ckpt.load(save.handle.path, map_location="cuda:0")
        for name in list(found):
            expected = save.expected[name].resolve_conj()
            tensor = found.pop(name)
            assert tensor.device == torch.device("cuda:0")
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
