"""Histories of delta saves, compared with a model: what each checkpoint has to hold."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch
import torch.distributed.checkpoint as dcp

import aiockpt
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.wrapper import WrapperStorage
from tests.states import raw_bytes

State = dict[str, torch.Tensor]

CHUNK = 64 << 10
OPTIONS: dict[str, Any] = {"chunk_bytes": CHUNK, "staging_bytes": 16 * CHUNK, "io_threads": 2, "process_group": None}
BUCKET_BYTES = 40_000
"""For `MIN_BUCKET_BYTES`, so that small states have several files."""


def copied(state: State) -> State:
    return {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in state.items()}


def shared_files(path: Path) -> list[str]:
    """Return the names of the files that a checkpoint shares with others."""
    return sorted(each.name for each in path.iterdir() if each.stat().st_nlink > 1)


def load_by_stock(path: Path, state: State) -> State:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def check(path: Path, state: State, ckpt: aiockpt.SyncCheckpointer) -> None:
    """Assert that a checkpoint is this state, bit by bit, for aiockpt and for stock."""
    found = ckpt.load(path)
    assert list(found) == list(state)
    stock = load_by_stock(path, state)
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name
        assert raw_bytes(stock[name]) == raw_bytes(tensor), name
    ties = {(one, other) for one in state for other in state if state[one].data_ptr() == state[other].data_ptr()}
    same = {(one, other) for one in found for other in found if found[one].data_ptr() == found[other].data_ptr()}
    empty = {name for name, tensor in state.items() if not tensor.numel()}
    assert {each for each in ties if not empty & {*each}} == {each for each in same if not empty & {*each}}


class History:
    """Random changes, saves, deletions and restarts; the model knows what each checkpoint holds."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.model: dict[str, State] = {}
        self.reused = 0
        self.ckpt = aiockpt.SyncCheckpointer(**OPTIONS)
        self.state: State = {f"w{number}": self._tensor() for number in range(12)}
        self.changes: list[Callable[[str], object]] = [
            self._flip_bit, self._flip_bit, self._add, self._cast, self._reshape, self._transpose, self._rename,
            self._remove, self._tie, self._untie, self._gap,
        ]  # fmt: skip

    def close(self) -> None:
        self.ckpt.close()

    def step(self) -> None:
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 5])):
            self.random.choice(self.changes)(self.random.choice(list(self.state)))
        if self.random.random() < 0.2:
            self._restart()
        self._save()
        while self.model and (len(self.model) > 5 or self.random.random() < 0.2):
            name = self.random.choice(list(self.model))
            self.ckpt.delete(self.folder / name)
            del self.model[name]
        for name, state in self.model.items():
            check(self.folder / name, state, self.ckpt)
        left = sorted(each.name for each in self.folder.iterdir())
        assert left == sorted(self.model)

    def _save(self) -> None:
        names = [*self.model, "gone"]
        base = self.random.choice(["auto"] * 6 + [str(self.folder / self.random.choice(names)), None])
        options: dict[str, Any] = {} if base is None else {"base": aiockpt.Base(base, full_every=9)}
        replaces = bool(self.model) and self.random.random() < 0.2
        name = self.random.choice(list(self.model)) if replaces else f"c{self.random.randrange(10**9)}"
        result = self.ckpt.save(self.state, self.folder / name, overwrite=replaces, **options)
        assert result.nbytes == result.bytes_written + result.bytes_reused
        assert result.files.keys() == {each.name for each in (self.folder / name).iterdir()} - {".aiockpt.json"}
        self.reused += result.bytes_reused
        self.model[name] = _with_ties(self.state)

    def _restart(self) -> None:
        self.ckpt.close()
        self.ckpt = aiockpt.SyncCheckpointer(**OPTIONS)
        if self.model and self.random.random() < 0.7:
            self.ckpt.load(self.folder / self.random.choice(list(self.model)))

    # --- changes ------------------------------------------------------------------------------------

    def _tensor(self) -> torch.Tensor:
        size = self.random.choice([0, 1, 7, 500, 9_000, 40_000])
        return torch.randint(0, 2**31, (size,), dtype=torch.int32, generator=self.generator)

    def _flip_bit(self, name: str) -> None:
        tensor = self.state[name]
        if tensor.numel() and _is_plain(tensor):
            raw = tensor.view(-1).view(torch.uint8)
            raw[self.random.randrange(raw.numel())] ^= 1 << self.random.randrange(8)  # may become NaN, of any payload

    def _add(self, name: str) -> None:
        self.state[f"w{self.random.randrange(10**6)}"] = self._tensor()

    def _cast(self, name: str) -> None:
        tensor = self.state[name]
        if _is_plain(tensor):  # the same bytes, of another dtype
            self.state[name] = tensor.clone().view(self.random.choice([torch.int32, torch.float32, torch.uint32]))

    def _reshape(self, name: str) -> None:
        tensor = self.state[name]
        if tensor.is_contiguous():
            self.state[name] = tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.reshape(-1)

    def _transpose(self, name: str) -> None:
        tensor = self.state[name]
        if tensor.dim() == 1 and tensor.numel() % 4 == 0:  # the same bytes, of other strides
            self.state[name] = tensor.clone().view(4, -1)
        elif tensor.dim() == 2:
            self.state[name] = tensor.t()

    def _gap(self, name: str) -> None:
        self.state[name] = self.state[name].repeat_interleave(2, -1)[..., ::2]

    def _rename(self, name: str) -> None:
        self.state[f"w{self.random.randrange(10**6)}"] = self.state.pop(name)

    def _remove(self, name: str) -> None:
        if len(self.state) > 6:
            del self.state[name]

    def _tie(self, name: str) -> None:
        self.state[f"t{self.random.randrange(10**6)}"] = self.state[name]

    def _untie(self, name: str) -> None:
        self.state[name] = self.state[name].clone()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.stride()[-1:] == (1,)  # one element may have any stride


def _with_ties(state: State) -> State:
    """Copy a state, with its ties."""
    copies: dict[Any, torch.Tensor] = {}
    keys = {name: (each.data_ptr(), each.dtype, each.shape, each.stride()) for name, each in state.items()}
    return {name: copies.setdefault(keys[name], copied({"": tensor})[""]) for name, tensor in state.items()}


class Interrupted(WrapperStorage):
    """Calls a function once, before a step of a save, in a thread."""

    def __init__(self, step: str, call: Callable[[], object]) -> None:
        super().__init__(LocalStorage())
        self.step, self.call, self.calls = step, call, 0

    async def before(self, step: str, name: str) -> None:
        if step == self.step and not self.calls:
            self.calls += 1
            await anyio.to_thread.run_sync(self.call)


def as_user(run: Callable[[], object], user: int = 65_534) -> int:
    """Run a function in a child process that is not root; return its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgid(user)
                os.setuid(user)
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
