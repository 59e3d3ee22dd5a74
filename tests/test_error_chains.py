"""Errors print on a screen: no exception group is among the causes and contexts of any, sync or async."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.dcp.format_utils import torch_save_to_dcp
from aiockpt.storage import LocalStorage
from aiockpt.testing import FaultyStorage
from tests.states import large_state

STATE = {"model": {"w": torch.ones(3), "b": torch.ones(70_000)}, "step": 7}
DISK = OSError(errno.EIO, "the disk has failed")


class _Calls:
    """The methods of a checkpointer, which return when all is done."""

    def __init__(self, *, is_async: bool, **options: Any) -> None:
        self._is_async, self._options = is_async, options

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self._is_async:
                with aiockpt.SyncCheckpointer(**self._options) as ckpt:
                    return getattr(ckpt, method)(*args, **options)
            return asyncio.run(self._called(method, args, options))

        return call

    async def _called(self, method: str, args: Any, options: Any) -> Any:
        async with aiockpt.AsyncCheckpointer(**self._options) as ckpt:
            result = getattr(ckpt, method)(*args, **options)
            return await result if inspect.isawaitable(result) else await result.written

    def read(self, path: Path, key: str) -> Any:
        if not self._is_async:
            with aiockpt.SyncCheckpointer(**self._options) as ckpt, ckpt.open(path) as reader:
                return reader.read(key)

        async def read() -> Any:
            async with aiockpt.AsyncCheckpointer(**self._options) as ckpt, ckpt.open(path) as reader:
                return await reader.read(key)

        return asyncio.run(read())

    def save_two(self, path: Path, state: Any) -> Any:
        """Save a state twice in one transaction."""
        if not self._is_async:
            with aiockpt.SyncCheckpointer(**self._options) as ckpt:
                with ckpt.transaction(path) as joint:
                    joint.save(state, "one")
                    joint.save(state, "two")
                return joint.written.result()

        async def save() -> Any:
            async with aiockpt.AsyncCheckpointer(**self._options) as ckpt:
                async with ckpt.transaction(path) as joint:
                    joint.save(state, "one")
                    joint.save(state, "two")
                return await joint.written

        return asyncio.run(save())

    def in_a_run(self, directory: Path, step: int | str, target: Any, **options: Any) -> Any:
        if not self._is_async:
            with aiockpt.SyncCheckpointManager(directory, **self._options) as run:
                return run.restore(target, step, **options)

        async def restore() -> Any:
            async with aiockpt.CheckpointManager(directory, **self._options) as run:
                return await run.restore(target, step, **options)

        return asyncio.run(restore())


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def calls(request: pytest.FixtureRequest) -> Callable[..., _Calls]:
    return lambda **options: _Calls(is_async=request.param, **options)


def _links(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        at = left.pop()
        if at is not None and id(at) not in seen:
            seen.add(id(at))
            yield at
            left += [at.__cause__, at.__context__]


def check(call: Callable[..., object], *args: Any, **options: Any) -> BaseException:
    """Call what must fail with one of our errors, and look at everything that a traceback would print."""
    with pytest.raises((aiockpt.AiockptError, KeyError)) as caught:
        call(*args, **options)
    assert [each for each in _links(caught.value) if isinstance(each, BaseExceptionGroup)] == []
    assert "Exception Group" not in "".join(traceback.format_exception(caught.value))
    return caught.value


def _damage(path: Path, size: int | None = None) -> None:
    """Change the bytes of a tensor, or cut a file."""
    with open(path, "r+b") as file:
        if size is not None:
            file.truncate(size)
            return
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["c", "c.safetensors", "c.pt"])
def test_loads(name: str, calls, tmp_path: Path) -> None:
    path, ckpt = tmp_path / name, calls()
    state = {"w": torch.ones(3), "b": torch.ones(70_000)}
    aiockpt.save(state, path)
    for target in ({"w": torch.ones(4)}, {"nothing": torch.ones(3)}, {"w": torch.ones(3), "x": torch.ones(1)}):
        check(ckpt.load, path, target)
    check(ckpt.load, path, keys="nothing.*")
    check(ckpt.read, path, "nothing")
    data = path / "__0_0.distcp" if path.is_dir() else path
    if name != "c.safetensors":  # which has no checksums
        _damage(data)
        check(ckpt.load, path)
        check(ckpt.load, path, state)
        check(ckpt.read, path, "b")
        check(ckpt.verify(path).raise_if_bad)
    _damage(data, 300)
    for call in (ckpt.load, lambda path: ckpt.read(path, "b"), lambda path: ckpt.verify(path).raise_if_bad()):
        check(call, path)
    for call in (ckpt.load, ckpt.verify, ckpt.delete, lambda path: ckpt.read(path, "b")):
        check(call, tmp_path / "nothing")


@pytest.mark.parametrize("step", ["open", "read"])
def test_loads_from_a_disk_that_fails(step: Any, calls, tmp_path: Path) -> None:
    aiockpt.save(large_state(), tmp_path / "c")
    ckpt = calls(storage=FaultyStorage(LocalStorage(), step, DISK, times=None))
    check(ckpt.load, tmp_path / "c")
    check(ckpt.load, tmp_path / "c", large_state())
    if step == "open":
        check(ckpt.verify, tmp_path / "c")


@pytest.mark.parametrize("name", ["c", "c.safetensors", "c.pt"])
@pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
def test_saves_to_a_disk_that_fails(step: Any, name: str, calls, tmp_path: Path) -> None:
    for options in ({}, {"fallback_path": tmp_path / "other"}):
        storage = FaultyStorage(LocalStorage(), step, DISK, times=None)
        check(calls(storage=storage, **options).save, large_state(), tmp_path / name)
    check(
        calls(storage=FaultyStorage(LocalStorage(), step, DISK, times=None)).save_two, tmp_path / "joint", large_state()
    )


def test_saves_that_are_refused_or_stopped(calls, tmp_path: Path) -> None:
    def stop(_path: str) -> None:
        raise ValueError("not this one")

    (tmp_path / "file").touch()
    check(calls().save, STATE, tmp_path / "hooked", pre_commit=stop)
    check(calls(writer="process").save, STATE, tmp_path / "hooked too", pre_commit=stop)
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        check(calls().save, STATE, path)
        check(calls().save_two, path, STATE)
    check(calls().save, {"a": lambda: None}, tmp_path / "c")


def test_runs_and_conversions(calls, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointManager(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, STATE)
    ckpt = calls()
    check(ckpt.in_a_run, tmp_path / "run", 9, {})
    check(ckpt.in_a_run, tmp_path / "run", 1, {"model": {"w": torch.ones(1)}})
    check(ckpt.in_a_run, tmp_path / "run", "latest", {"nothing": 1})
    for step in (1, 2):
        _damage(tmp_path / "run" / f"step-{step:08d}" / "__0_0.distcp")
    check(ckpt.in_a_run, tmp_path / "run", "latest", {"model": {"b": torch.ones(70_000)}}, verify_when="while")
    check(torch_save_to_dcp, tmp_path / "nothing.pt", tmp_path / "there")
    (tmp_path / "cut.pt").write_bytes(b"PK\3\4")
    check(torch_save_to_dcp, tmp_path / "cut.pt", tmp_path / "there")
