"""The hooks `pre_commit` and `post_commit`, called right before and right after a checkpoint is published."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.testing import FaultyStorage, GatedStorage

STATE = {"w": torch.arange(50_000.0), "step": 3}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["function", "coroutine"])
async def test_hooks_are_called_with_the_path_before_and_after(tmp_path: Path, kind: str) -> None:
    seen: list[tuple[str, str, bool, int]] = []
    path = tmp_path / "c"

    def note(what: str, where: str) -> None:
        files = list(tmp_path.glob(".aiockpt-*/*.distcp"))
        seen.append((what, where, path.exists(), len(files)))

    async def before(where: str) -> None:
        await asyncio.sleep(0)
        note("before", where)

    async def after(where: str) -> None:
        await asyncio.sleep(0)
        note("after", where)

    async with aiockpt.AsyncCheckpointer() as ckpt:
        if kind == "coroutine":
            result = await ckpt.save(STATE, path, pre_commit=before, post_commit=after)
        else:
            result = await ckpt.save(
                STATE, path, pre_commit=lambda w: note("before", w), post_commit=lambda w: note("after", w)
            )
        assert result.post_commit_error is None
        assert seen == [("before", str(path), False, 1), ("after", str(path), True, 0)]
        assert torch.equal((await ckpt.load(path))["w"], STATE["w"])


@pytest.mark.asyncio
async def test_a_failing_pre_commit_hook_aborts_the_save(tmp_path: Path) -> None:
    async def fails(where: str) -> None:
        raise KeyError("registry")

    async with aiockpt.AsyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=r"the pre_commit hook of .*c failed: KeyError: 'registry'") as info:
            await ckpt.save(STATE, tmp_path / "c", pre_commit=fails)
        assert isinstance(info.value.__cause__, KeyError)
        assert not list(tmp_path.iterdir())
        await ckpt.save(STATE, tmp_path / "c")


@pytest.mark.asyncio
async def test_a_failing_post_commit_hook_undoes_nothing_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(where: str) -> None:
        raise ValueError("tracker")

    async with aiockpt.AsyncCheckpointer() as ckpt:
        with caplog.at_level(logging.ERROR, "aiockpt"):
            result = await ckpt.save(STATE, tmp_path / "c", post_commit=fails)
        assert isinstance(result.post_commit_error, aiockpt.SaveError)
        assert isinstance(result.post_commit_error.__cause__, ValueError)
        assert "is published all the same" in caplog.text
        assert torch.equal((await ckpt.load(tmp_path / "c"))["w"], STATE["w"])


@pytest.mark.asyncio
async def test_a_save_that_is_cancelled_while_its_hook_runs_leaves_nothing(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        handles: list[aiockpt.SaveHandle] = []
        handles.append(ckpt.save(STATE, tmp_path / "c", pre_commit=lambda _: handles[0].cancel() and None))
        with pytest.raises(aiockpt.SaveCancelledError):
            await handles[0]
        assert await handles[0].cancel()
        assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
async def test_system_exit_in_a_hook_is_reported_as_its_failure(tmp_path: Path) -> None:
    def ends(where: str) -> None:
        raise SystemExit(3)

    async with aiockpt.AsyncCheckpointer() as ckpt:
        result = await ckpt.save(STATE, tmp_path / "c", post_commit=ends)
        assert isinstance(result.post_commit_error.__cause__, SystemExit)
        with pytest.raises(aiockpt.SaveError, match=r"pre_commit hook of .* failed: SystemExit"):
            await ckpt.save(STATE, tmp_path / "d", pre_commit=ends)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


OWN = r"was called by the (pre|post)_commit hook of .*/c, which would wait for itself"

USES: dict[str, Any] = {
    "save": lambda ckpt, own, later, path: ckpt.save(STATE, f"{path}-2"),
    "submit": lambda ckpt, own, later, path: ckpt.submit(STATE, f"{path}-2"),
    "written": lambda ckpt, own, later, path: own.written.result(),
    "wait": lambda ckpt, own, later, path: concurrent.futures.wait([own.written]),
    "as_completed": lambda ckpt, own, later, path: list(concurrent.futures.as_completed([later.written])),
    "the next one": lambda ckpt, own, later, path: later.written.result(),
    "cancel": lambda ckpt, own, later, path: own.cancel().result(),
    "ready": lambda ckpt, own, later, path: ckpt.ready(),
    "close": lambda ckpt, own, later, path: ckpt.close(),
}


def _within(how: str, use: Callable[[], object]) -> Callable[[str], object]:
    """Make a hook that calls `use`: a function, or a coroutine function that calls it in a thread."""

    async def hook(path: str) -> None:
        await asyncio.to_thread(use)

    return hook if how == "thread" else lambda _: use()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "thread"])
@pytest.mark.parametrize("when", ["pre_commit", "post_commit"])
@pytest.mark.parametrize("what", USES)
def test_calls_that_would_wait_for_their_own_hook_are_refused(what: str, when: str, how: str, tmp_path: Path) -> None:
    path, given = tmp_path / "c", concurrent.futures.Future[tuple[aiockpt.SaveHandle, aiockpt.SaveHandle]]()
    gate = GatedStorage(LocalStorage(), ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        hook = _within(how, lambda: USES[what](ckpt, *given.result(60), str(path)))
        save = ckpt.submit(STATE, path, **{when: hook})
        later = ckpt.submit(STATE, tmp_path / "next", storage=gate)
        given.set_result((save, later))
        try:
            if when == "pre_commit":
                with pytest.raises(aiockpt.SaveError, match=f"the pre_commit hook of .* failed: SaveError: .*{OWN}"):
                    save.written.result(60)
            else:
                error = save.written.result(60).post_commit_error
                assert isinstance(error, aiockpt.SaveError)
                assert re.search(OWN, str(error))
        finally:
            gate.open("commit")
        later.written.result(60)
    assert {entry.name for entry in tmp_path.iterdir()} == {"next"} | ({"c"} if when == "post_commit" else set())


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["save", "load it", "written", "aclose"])
async def test_coroutine_hooks_that_would_wait_for_themselves_are_refused(what: str, tmp_path: Path) -> None:
    path, given = tmp_path / "c", concurrent.futures.Future[aiockpt.SaveHandle]()

    async def hook(where: str) -> None:
        save = given.result(60)
        if what == "load it":  # loads wait for no save
            assert torch.equal((await ckpt.load(where))["w"], STATE["w"])
        elif what == "save":
            await ckpt.save(STATE, f"{where}-2")
        else:
            await (save if what == "written" else ckpt.aclose())

    async with aiockpt.AsyncCheckpointer() as ckpt:
        given.set_result(ckpt.save(STATE, path, post_commit=hook))
        error = (await given.result()).post_commit_error
        assert error is None if what == "load it" else re.search(OWN, str(error))
        await ckpt.save(STATE, tmp_path / "d")


def test_a_hook_may_call_what_waits_for_no_save(tmp_path: Path) -> None:
    seen: list[object] = []

    def hook(path: str) -> None:
        seen.append(ckpt.verify(path).ok)
        seen.append(ckpt.load(path)["step"])
        with ckpt.open(path) as reader:
            seen.append(len(reader))
        ckpt.delete(tmp_path / "old")
        ckpt.prewarm(STATE)
        with aiockpt.SyncCheckpointer() as other:
            other.save(STATE, tmp_path / "copy")

    with aiockpt.SyncCheckpointer(io_threads=1) as ckpt:
        ckpt.save(STATE, tmp_path / "old")
        assert ckpt.save(STATE, tmp_path / "c", post_commit=hook).post_commit_error is None
    assert seen == [True, 3, 2]
    assert {entry.name for entry in tmp_path.iterdir()} == {"c", "copy"}


@pytest.mark.asyncio
@pytest.mark.both_loops
async def test_a_hook_may_post_a_save_to_a_loop(tmp_path: Path) -> None:
    """A callback posted to a loop inherits the hook's context variables, but does not run inside the hook."""
    loop, second = asyncio.get_running_loop(), asyncio.Event()
    saves: list[aiockpt.SaveHandle] = []

    def save_again() -> None:
        saves.append(ckpt.save(STATE, tmp_path / "d"))
        second.set()

    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(STATE, tmp_path / "c", post_commit=lambda _: loop.call_soon_threadsafe(save_again) and None)
        await second.wait()
        assert (await saves[0]).path == str(tmp_path / "d")


class _Uses:
    """An identity transform that uses a checkpointer while it encodes or decodes."""

    descriptor = "example.uses/1"

    def __init__(self) -> None:
        self.use: Callable[[], object] = lambda: None

    def encoder(self) -> _Uses:
        return self

    def decoder(self) -> _Uses:
        return self

    def update(self, data: memoryview, most: int = 0) -> bytes:
        self.use()
        return bytes(data)

    def finish(self, most: int = 0) -> bytes:
        return b""


class _Asks(WrapperStorage):
    """A storage that uses a checkpointer in the engine's loop and in loading threads."""

    def __init__(self) -> None:
        super().__init__(LocalStorage())
        self.use: Callable[[], object] = lambda: None

    async def before(self, step: str, name: str) -> None:
        self.use()

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        self.use()


@pytest.mark.parametrize("what", ["save", "load"])
def test_transforms_and_storages_that_would_wait_for_themselves_are_refused(what: str, tmp_path: Path) -> None:
    transform, storage = _Uses(), _Asks()
    with aiockpt.SyncCheckpointer(transforms=[transform]) as ckpt:
        ckpt.save(STATE, tmp_path / "c")

        def use() -> object:
            return ckpt.save(STATE, tmp_path / "d") if what == "save" else ckpt.load(tmp_path / "c")

        def assert_refused(again: Callable[[], object]) -> None:
            with pytest.raises(aiockpt.AiockptError) as caught:
                again()
            causes = [str(caught.value), str(caught.value.__cause__)]
            where = r"a thread that (loads|saves)|the thread of the checkpointer's own event loop"
            assert any(re.search(f"was called by ({where}), which would wait for itself", text) for text in causes)

        transform.use = use
        if what == "save":  # while a save encodes, the transform may wait for loads
            assert_refused(lambda: ckpt.save(STATE, tmp_path / "e"))
        assert_refused(lambda: ckpt.load(tmp_path / "c"))
        transform.use = lambda: None
        storage.use = use
        assert_refused(lambda: ckpt.save(STATE, tmp_path / "e", storage=storage))
        assert_refused(lambda: ckpt.load(tmp_path / "c", storage=storage))
        storage.use = lambda: None
        ckpt.save(STATE, tmp_path / "e", storage=storage)


def test_a_function_for_the_fallback_may_load(tmp_path: Path) -> None:
    """The function is called in the thread that calls `save`, before the save begins."""

    def fallback(path: str) -> str:
        assert ckpt.load(tmp_path / "c")["step"] == 3
        return f"{path}-spare"

    with aiockpt.SyncCheckpointer() as plain:
        plain.save(STATE, tmp_path / "c")
    with aiockpt.SyncCheckpointer(fallback_path=fallback) as ckpt:
        storage = FaultyStorage(LocalStorage(), "write", OSError(errno.ENOSPC, "full"))
        assert ckpt.save(STATE, tmp_path / "d", storage=storage).path == str(tmp_path / "d-spare")


def close_in_thread(ckpt: aiockpt.SyncCheckpointer, path: Path) -> threading.Thread:
    """Close a checkpointer in a thread; return the thread when closing has begun."""
    closer = threading.Thread(target=ckpt.close)
    closer.start()
    with pytest.raises(aiockpt.CheckpointerClosedError):
        while ckpt.verify(path).ok:
            pass
    return closer


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_hook_may_load_while_the_checkpointer_closes(kind: str, tmp_path: Path) -> None:
    closing = threading.Event()
    done: list[Any] = []

    def hook(where: str) -> None:
        assert closing.wait(60)
        done.append((ckpt.load(tmp_path / "old")["step"], ckpt.verify(tmp_path / "old").ok))

    async def coroutine(where: str) -> None:
        hook(where)

    ckpt = aiockpt.SyncCheckpointer()
    try:
        ckpt.save(STATE, tmp_path / "old")
        own = hook if kind == "function" else coroutine
        save = ckpt.submit(STATE, tmp_path / "c", pre_commit=own, post_commit=own)
        closer = close_in_thread(ckpt, tmp_path / "old")
    finally:
        closing.set()
    closer.join()
    assert save.written.result().post_commit_error is None
    assert done == [(3, True)] * 2
    with pytest.raises(aiockpt.CheckpointerClosedError):
        ckpt.load(tmp_path / "c")


def test_an_observer_may_verify_and_delete_while_the_checkpointer_closes(tmp_path: Path) -> None:
    closing = threading.Event()
    done: list[object] = []

    class Checks(aiockpt.Observer):
        def written(self, event: aiockpt.SaveEvent, result: aiockpt.SaveResult) -> None:
            assert closing.wait(60)
            done.append(ckpt.verify(event.path).ok)
            ckpt.delete(event.path)

    ckpt = aiockpt.SyncCheckpointer(observers=[Checks()])
    try:
        ckpt.save(STATE, tmp_path / "c")
        closer = close_in_thread(ckpt, tmp_path / "c")
    finally:
        closing.set()
    closer.join()
    assert done == [True]
    assert not (tmp_path / "c").exists()


@pytest.mark.asyncio
async def test_a_post_commit_hook_may_take_the_result(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def waits(path: str, result: aiockpt.SaveResult) -> None:
        seen.append((path, result))

    def optional(path: str, more: object = None) -> None:
        seen.append((path, more))

    async with aiockpt.AsyncCheckpointer() as ckpt:
        path = str(tmp_path / "c")
        for hook in (waits, lambda path, result: seen.append((path, result))):
            result = await ckpt.save(STATE, path, post_commit=hook, overwrite=True)
            (found,) = seen
            assert (found[0], found[1].path, found[1].nbytes) == (path, path, result.nbytes)
            assert isinstance(found[1], aiockpt.SaveResult)
            seen.clear()
        for plain in (optional, seen.append, lambda *paths: seen.append(paths)):
            await ckpt.save(STATE, path, post_commit=plain, overwrite=True)
    assert seen == [(path, None), path, (path,)]
