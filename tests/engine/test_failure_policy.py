"""Training when a save fails, and a save when its disk fails or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import re
import threading
from pathlib import Path
from typing import Any, Literal

import anyio.lowlevel
import pytest
import torch

import aiockpt
from aiockpt.engine.requests import LoadRequest
from aiockpt.saving.pipeline import SavePipeline
from aiockpt.staging import cpu
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.local import sink
from aiockpt.testing import FaultyStorage, GatedStorage, HangingStorage
from tests.engine.test_busy import state_of
from tests.finders import names_in
from tests.states import assert_same
from tests.writing.gates import BrokenStorage

FULL = OSError(errno.ENOSPC, "No space left on device")


# --- on_failure ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_training_goes_on_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with aiockpt.AsyncCheckpointer(on_failure="warn") as ckpt:
        save = ckpt.save(state_of(1), tmp_path / "1", storage=FaultyStorage(LocalStorage(), "write", FULL))
        await save.staged
        with pytest.raises(aiockpt.WriteError, match="No space left"):  # `written` never succeeds without a checkpoint
            await save.written
        await ckpt.save(state_of(2), tmp_path / "2")
        unseen = ckpt.save(state_of(3), tmp_path / "3", storage=FaultyStorage(LocalStorage(), "begin", FULL))
        await unseen.staged
        await ckpt.ready()
        await ckpt.save(state_of(4), tmp_path / "4")
        found = ckpt.statistics()
        assert (found.written, found.failed) == (2, 2)
        assert [path for path, _ in found.failures] == [str(tmp_path / "1"), str(tmp_path / "3")]
        assert all("No space left" in str(error) for _, error in found.failures)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(messages) == 2
    assert all("a checkpoint was not written, training goes on" in text for text in messages)
    assert not any(record.exc_info for record in caplog.records if record.levelno > logging.DEBUG), "one line each"
    assert names_in(tmp_path) == ["2", "4"]


def test_a_synchronous_loop_goes_on_after_a_failure(tmp_path: Path) -> None:
    state = state_of(1)
    with aiockpt.SyncCheckpointer(on_failure="warn") as ckpt:
        failed = ckpt.save(state, tmp_path / "1", storage=FaultyStorage(LocalStorage(), "commit", FULL))
        assert isinstance(failed.error, aiockpt.CommitError)
        assert (failed.nbytes, dict(failed.files)) == (0, {})
        assert ckpt.save(state, tmp_path / "2").error is None
        with pytest.raises(aiockpt.SaveError, match="can't be pickled"):  # a mistake in the program
            ckpt.save({"f": lambda: None}, tmp_path / "3")
        with pytest.raises(aiockpt.CheckpointExistsError):
            ckpt.save(state, tmp_path / "2")
    assert names_in(tmp_path) == ["2"]


def test_a_torn_snapshot_does_not_end_training(tmp_path: Path) -> None:
    state = state_of(1)
    storage = GatedStorage(LocalStorage(), ["create"])
    with aiockpt.SyncCheckpointer(on_failure="warn", staging_bytes=1 << 18, chunk_bytes=1 << 18) as ckpt:
        save = ckpt.submit(state, tmp_path / "1", storage=storage)
        storage.reached["create"].result(60)
        state["w"].add_(1)
        storage.open("create")
        save.fence()
        save.staged.result(60)
        assert isinstance(save.written.exception(60), aiockpt.TornSnapshotError)
    assert names_in(tmp_path) == []


class Unreachable(LocalStorage):
    def check(self, path: str, *, overwrite: bool) -> None:
        raise aiockpt.WriteError(f"can't look at {path}: Input/output error")


def test_an_inaccessible_destination_is_a_failure_like_others(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.WriteError, match="can't look at"):
        ckpt.submit(state_of(1), tmp_path / "1", storage=Unreachable())
    with aiockpt.SyncCheckpointer(on_failure="warn") as ckpt:
        save = ckpt.submit(state_of(1), tmp_path / "1", storage=Unreachable())
        save.staged.result(60)
        assert isinstance(save.written.exception(60), aiockpt.WriteError)
        assert ckpt.statistics().failed == 1


# --- fallback_path ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
@pytest.mark.parametrize("when", ["before it is staged", "afterwards"])
@pytest.mark.parametrize("options", [{}, {"compress": "zstd"}, {"format": "safetensors"}], ids=str)
def test_a_save_goes_to_the_fallback_when_its_disk_fails(step: str, when: str, options: dict, tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(100_000) for number in range(6)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    gate = GatedStorage(LocalStorage(), ["begin"])
    fault = FaultyStorage(gate, step, FULL, nth=1)
    if when == "before it is staged":
        gate.open("begin")
    with aiockpt.SyncCheckpointer(fallback_path=tmp_path / "spare", chunk_bytes=1 << 18) as ckpt:
        save = ckpt.submit(state, tmp_path / "runs" / "a", storage=fault, **options)
        if when == "afterwards" and step != "begin":
            save.staged.result(60)
            for tensor in state.values():
                tensor.zero_()
        gate.open("begin")
        result = save.written.result(60)
        assert result.path == str(tmp_path / "spare" / "a")
        *_, last = save.progress()
        assert last.done_bytes == last.total_bytes
        assert "No space left" in str(result.fallback_error)
        assert_same(expected, ckpt.load(result.path))
        assert ckpt.verify(result.path).ok
        assert not (tmp_path / "runs" / "a").exists()
        again = ckpt.save(expected, tmp_path / "runs" / "b")
        assert (again.path, again.fallback_error) == (str(tmp_path / "runs" / "b"), None)
    assert names_in(tmp_path / "spare") == ["a"]


def test_after_a_fence_tensors_are_not_copied_again_for_the_fallback(tmp_path: Path) -> None:
    """After the fence the caller may change the tensors, so they can't be copied again for the fallback."""
    state = state_of(1)
    storage = GatedStorage(FaultyStorage(LocalStorage(), "create", FULL), ["create"])
    with aiockpt.SyncCheckpointer(fallback_path=tmp_path / "spare") as ckpt:
        save = ckpt.submit(state, tmp_path / "a", storage=storage)
        save.fence()
        state["w"].zero_()
        storage.open("create")
        error = save.written.exception(60)
        if error is None:  # it was staged by then, and its chunks were kept
            assert_same(state_of(1), ckpt.load(tmp_path / "spare" / "a"))
        else:
            assert "too late to save it to" in error.__notes__[0]


def test_a_staged_state_larger_than_memory_can_not_go_to_the_fallback(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), "commit", FULL)
    with aiockpt.SyncCheckpointer(
        fallback_path=tmp_path / "spare", staging_bytes=1 << 18, chunk_bytes=1 << 17, on_failure="warn"
    ) as ckpt:
        result = ckpt.save(state_of(1), tmp_path / "a", storage=storage)
        assert "too late" in result.error.__notes__[0]
        early = ckpt.save(state_of(2), tmp_path / "b", storage=FaultyStorage(LocalStorage(), "create", FULL))
        assert_same(state_of(2), ckpt.load(early.path))
    assert names_in(tmp_path) == ["spare"]
    assert names_in(tmp_path / "spare") == ["b"]


def test_both_errors_are_reported_when_the_fallback_fails_too(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), "write", FULL, times=100)
    (tmp_path / "spare" / "taken").mkdir(parents=True)
    with aiockpt.SyncCheckpointer(fallback_path=tmp_path / "spare") as ckpt:
        with pytest.raises(aiockpt.WriteError, match="No space left") as caught:
            ckpt.save(state_of(1), tmp_path / "a", storage=storage)
        assert any("nor could it be saved to" in note for note in caught.value.__notes__)
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(aiockpt.WriteError) as caught:
            ckpt.save(state_of(1), tmp_path / "taken", storage=FaultyStorage(LocalStorage(), "write", FULL))
        assert any("exists already" in note for note in caught.value.__notes__)
    assert names_in(tmp_path) == ["spare"]


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_a_writer_process_uses_the_fallback_too(step: str, tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(100_000) for number in range(6)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with aiockpt.SyncCheckpointer(
        fallback_path=lambda path: f"{path}-spare", writer="process", chunk_bytes=1 << 18
    ) as ckpt:
        save = ckpt.submit(state, tmp_path / "a", storage=BrokenStorage(step, "/a"))
        if step == "commit":
            save.staged.result(60)
            for tensor in state.values():
                tensor.zero_()
        assert save.written.result(60).path == str(tmp_path / "a-spare")
        assert_same(expected, ckpt.load(tmp_path / "a-spare"))
    assert names_in(tmp_path) == ["a-spare"]


# --- save_timeout ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_slow_save_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), ["write"])
    async with aiockpt.AsyncCheckpointer(save_timeout=0.2) as ckpt:
        save = ckpt.save(state_of(1), tmp_path / "1", storage=storage)
        behind = ckpt.save(state_of(2), tmp_path / "2")  # its timeout begins when the first save is over
        with pytest.raises(aiockpt.SaveTimeoutError, match=r"save_timeout = 0.2 s and was given up; nothing of it is"):
            await save.written
        await behind
        assert isinstance(save.written.exception(), TimeoutError)
        assert ckpt.statistics().failed == 1
        storage.open("write")
    assert names_in(tmp_path) == ["2"]


def test_a_timeout_while_the_metadata_is_written_leaves_nothing(tmp_path: Path) -> None:
    class Late(WrapperStorage):
        async def before(self, step: str, name: str) -> None:
            if step == "finish" and name.endswith(".metadata"):
                save._job.abort(aiockpt.SaveTimeoutError("too late"), though_copied=True)

    started = threading.Event()
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(
            state_of(1), tmp_path / "c", storage=Late(LocalStorage()), pre_commit=lambda _: started.wait(60) and None
        )
        started.set()
        with pytest.raises(aiockpt.SaveTimeoutError, match="too late"):
            save.written.result(60)
    assert names_in(tmp_path) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_thread_that_hangs_while_it_hashes_keeps_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values with gaps are copied to a chunk to be hashed; here it is the only one."""
    hangs, on, real = False, threading.Event(), cpu.copy_pieces

    def copy(*args: Any) -> Any:
        if hangs:
            on.wait(60)
        return real(*args)

    monkeypatch.setattr(cpu, "copy_pieces", copy)
    state = {"x": torch.arange(1_000_000.0)[::2], "y": torch.arange(300_000.0)}
    with aiockpt.SyncCheckpointer(chunk_bytes=1 << 20, staging_bytes=1 << 20, save_timeout=2) as ckpt:
        try:
            ckpt.save(state, tmp_path / "a", base="auto")
            hangs = True
            with pytest.raises(aiockpt.SaveTimeoutError, match="a thread of it hangs"):
                ckpt.save(state, tmp_path / "b", base="auto")
            hangs = False
            ckpt.save(state, tmp_path / "c")
            assert_same(state, ckpt.load(tmp_path / "c"))
        finally:
            on.set()
    assert names_in(tmp_path) == ["a", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["create", "write", "finish", "commit"])
@pytest.mark.asyncio
async def test_later_saves_go_on_when_one_hangs(step: str, tmp_path: Path) -> None:
    storage = HangingStorage(LocalStorage(), step)
    state = {f"w{number}": torch.randn(100_000) for number in range(6)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    ckpt = aiockpt.AsyncCheckpointer(save_timeout=1.5, staging_bytes=1 << 20, chunk_bytes=1 << 18)
    try:
        stuck = ckpt.save(state, tmp_path / "stuck", storage=storage)
        behind = ckpt.save(expected, tmp_path / "behind")
        with pytest.raises(aiockpt.SaveTimeoutError, match="a thread of it hangs in the storage"):
            await stuck.written
        await behind
        found = ckpt.statistics()
        assert (found.abandoned, found.failed, found.written) == (1, 1, 1)
        assert (found.quarantined_bytes > 0) == (step in ("create", "write"))  # after these steps it holds no memory
        with pytest.raises(aiockpt.CheckpointExistsError, match="in flight"):  # the stuck save may still publish there
            ckpt.save(expected, tmp_path / "stuck", overwrite=True)
        for number in range(3):
            await ckpt.save(expected, tmp_path / str(number))
            assert_same(expected, await ckpt.load(tmp_path / str(number)))
        assert ckpt.statistics().staging_bytes <= 2 << 20
    finally:
        storage.recover()
        await ckpt.aclose()
    found = ckpt.statistics()
    assert (found.abandoned, found.quarantined_bytes) == (0, 0)
    assert names_in(tmp_path) == ["0", "1", "2", "behind"]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_hanging_thread_keeps_its_own_bytes_to_the_end(tmp_path: Path) -> None:
    """Later saves go on, but do not reuse the memory that the thread holds."""
    storage = HangingStorage(LocalStorage(), "write")
    ckpt = aiockpt.AsyncCheckpointer(save_timeout=1.5, staging_bytes=1 << 18, chunk_bytes=1 << 17)
    stuck = ckpt.save({"w": torch.full((1 << 17,), 7, dtype=torch.uint8)}, tmp_path / "stuck", storage=storage)
    await storage.reached
    with pytest.raises(aiockpt.SaveTimeoutError):
        await stuck.written
    held = [lease.chunk for lease in _leases_of(stuck) if not lease.released]
    assert held
    before = [bytes(chunk.view) for chunk in held]
    assert any(b"\x07" * 4096 in data for data in before)
    for number in range(4):
        other = {"w": torch.full((1 << 17,), 100 + number, dtype=torch.uint8)}
        await ckpt.save(other, tmp_path / str(number))
    assert [bytes(chunk.view) for chunk in held] == before
    storage.recover()
    await ckpt.aclose()
    assert names_in(tmp_path) == ["0", "1", "2", "3"]


def _leases_of(save: aiockpt.SaveHandle) -> list:
    pipelines = (each for each in gc.get_objects() if isinstance(each, SavePipeline))
    return next(list(each._leases._out) for each in pipelines if each._job is save._job)


def test_a_failure_between_copied_and_staged_goes_to_the_fallback_too(tmp_path: Path) -> None:
    """With a writer process, a save waits between its last copy and `staged`."""
    state = {f"w{number}": torch.randn(300_000) for number in range(4)}
    with aiockpt.SyncCheckpointer(fallback_path=lambda path: f"{path}-spare", writer="process") as ckpt:
        for number in range(8):
            result = ckpt.save(state, tmp_path / f"a{number}", storage=BrokenStorage("begin", f"/a{number}"))
            assert result.path == str(tmp_path / f"a{number}-spare")


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_save_to_the_fallback_keeps_its_place_in_the_queue(writer, tmp_path: Path) -> None:
    order: list[str] = []
    with aiockpt.SyncCheckpointer(fallback_path=lambda path: f"{path}-spare", writer=writer) as ckpt:
        saves = [
            ckpt.submit(
                state_of(number),
                tmp_path / f"a{number}",
                storage=BrokenStorage("commit", "/a0"),
                post_commit=lambda path: order.append(Path(path).name),
            )
            for number in range(3)
        ]
        for save in saves:
            save.written.result(60)
    assert order == ["a0-spare", "a1", "a2"]


def test_nothing_is_overwritten_at_the_fallback(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(fallback_path=tmp_path / "spare") as ckpt:
        for run in ("a", "b"):
            fault = FaultyStorage(LocalStorage(), "write", FULL)
            if run == "a":
                first = ckpt.save(state_of(1), tmp_path / run / "last", storage=fault, overwrite=True)
            else:
                with pytest.raises(aiockpt.WriteError):
                    ckpt.save(state_of(2), tmp_path / run / "last", storage=fault, overwrite=True)
        assert_same(state_of(1), ckpt.load(first.path))


@pytest.mark.parametrize("step", ["begin", "create", "write", "finish"])
def test_a_cancellation_while_copies_are_checked_leaves_nothing(step: str, tmp_path: Path) -> None:
    storage = GatedStorage(LocalStorage(), [step])
    with aiockpt.SyncCheckpointer(chunk_bytes=1 << 18) as ckpt:
        save = ckpt.submit(state_of(1), tmp_path / "c", storage=storage)
        with save._job.consistency._lock:  # type: ignore[attr-defined]
            storage.reached[step].result(60)
            cancelled = save.cancel()
            ckpt._engine.call(lambda _: _turns(), "turns").result()
        storage.open(step)
        assert cancelled.result(60)
        with pytest.raises(aiockpt.SaveCancelledError):
            save.written.result(60)
    assert names_in(tmp_path) == []


async def _turns() -> None:
    """Wait for some iterations of the engine's loop."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


def test_closing_ends_even_if_a_load_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.engine.engine.CANCEL_GRACE_S", 0.3)
    storage = _HangsReading()
    ckpt = aiockpt.SyncCheckpointer(drain_timeout=0.1)
    ckpt.save(state_of(1), tmp_path / "c")
    call = ckpt._loader.load(LoadRequest(tmp_path / "c", storage=storage))()._call
    storage.reached.wait(60)
    ckpt.close()
    storage.works.set()
    call.completion.ended(60)
    ckpt._engine.loop.thread.join(60)
    assert not ckpt._engine.loop.thread.is_alive()


class _HangsReading(WrapperStorage):
    def __init__(self) -> None:
        super().__init__(LocalStorage())
        self.reached, self.works = threading.Event(), threading.Event()

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        self.reached.set()
        self.works.wait(60)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_slow_post_commit_hook_causes_no_timeout(tmp_path: Path) -> None:
    go = threading.Event()
    async with aiockpt.AsyncCheckpointer(save_timeout=1.5) as ckpt:
        save = ckpt.save(state_of(1), tmp_path / "c", post_commit=lambda _: go.wait(60))
        behind = ckpt.save(state_of(2), tmp_path / "d")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(save.written.settled())), 2.0)
        go.set()
        assert (await save).path == str(tmp_path / "c")
        await behind


# --- a full disk -------------------------------------------------------------------------------------


def test_a_full_disk_says_what_is_free_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(sink, "allocate", full)
    with aiockpt.SyncCheckpointer() as ckpt, pytest.raises(aiockpt.WriteError, match="No space left") as caught:
        ckpt.save({"x": torch.ones(1 << 20)}, tmp_path / "1")
    assert re.search(rf"\([0-9.]+ [KMGTi]*B are free in {tmp_path}\)$", str(caught.value)), caught.value


# --- with, instead of async with ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Checkpointer", "CheckpointManager"])
def test_plain_with_names_what_to_write_instead(tmp_path: Path, kind: str) -> None:
    given = aiockpt.AsyncCheckpointer() if kind == "Checkpointer" else aiockpt.CheckpointManager(tmp_path)
    words = rf"`async with {type(given).__name__}\(\.\.\.\)`, or use a Sync{kind}$"
    with pytest.raises(TypeError, match=words), given:  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_the_fallback_may_be_in_another_storage(
    writer: Literal["thread", "process"], server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()  # nothing can be made below it
    gone = "aiockpt-test://127.0.0.1:1/runs/b"
    with aiockpt.SyncCheckpointer(fallback_path=f"{server_url}/spare", writer=writer) as ckpt:
        result = ckpt.save({"x": torch.arange(5)}, tmp_path / "file" / "a")
        assert result.path == f"{server_url}/spare/a"
        assert_same({"x": torch.arange(5)}, ckpt.load(result.path))
    with aiockpt.SyncCheckpointer(fallback_path=tmp_path / "spare", writer=writer) as ckpt:
        result = ckpt.save({"x": torch.arange(6)}, gone)
        assert result.path == str(tmp_path / "spare" / "b")
        assert_same({"x": torch.arange(6)}, ckpt.load(result.path))
