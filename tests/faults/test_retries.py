"""Transient errors are retried a limited number of times; a step that may have taken effect is not repeated."""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import random
import resource
import threading
from pathlib import Path

import anyio
import pytest
import torch

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.storage import LocalStorage
from aiockpt.storage.faults import described
from aiockpt.storage.local import sink as local_sink
from aiockpt.storage.local.retries import (
    AMBIGUOUS,
    DEFAULT_RETRIES,
    NO_RETRIES,
    TRANSIENT,
    NotSyncedError,
    Repeater,
    check_retries,
    next_pause_s,
)
from aiockpt.storage.local.sink import LocalSink, NewFile
from aiockpt.testing import Fault, FaultyStorage
from tests.faults.checks import os_error
from tests.states import assert_same, large_state


class Recorded:
    """A `Repeater` that records its pauses instead of sleeping, with constant jitter."""

    def __init__(self, retries: aiockpt.Retries = DEFAULT_RETRIES) -> None:
        self.pauses: list[float] = []
        self.repeater = Repeater(retries, draw=lambda: 1.0, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


class Step:
    """A step that fails with each of these errors in turn, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.done = 0

    async def __call__(self) -> str:
        self.done += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"attempts": True},
        {"attempts": 2.0},
        {"first_s": -0.1},
        {"first_s": math.nan},
        {"factor": 0.5},
        {"most_s": math.inf},
        {"most_s": "5"},
    ],
    ids=str,
)
def test_invalid_retries_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        aiockpt.Retries(**wrong)


def test_retries_are_given_as_an_object_a_number_or_none() -> None:
    mine = aiockpt.Retries(attempts=9)
    assert check_retries(mine) is mine
    assert check_retries(None) == check_retries(0) == NO_RETRIES == aiockpt.Retries(attempts=1)
    assert check_retries(2) == aiockpt.Retries(attempts=3)
    for wrong in (-1, 1.5, True, "often"):
        with pytest.raises(ValueError, match="retries is"):
            aiockpt.SyncCheckpointer(retries=wrong)
    assert pickle.loads(pickle.dumps(LocalStorage(retries=mine)))._policy.repeater.retries == mine


def test_pauses_grow_up_to_the_longest() -> None:
    retries = aiockpt.Retries(first_s=0.1, factor=3.0, most_s=1.0)
    assert [retries.pause_s(failed, 1.0) for failed in (1, 2, 3, 4, 5000)] == pytest.approx([0.1, 0.3, 0.9, 1.0, 1.0])
    assert retries.pause_s(4, 0.0) == pytest.approx(0.5)
    assert aiockpt.Retries(first_s=0.0, factor=1e300).pause_s(9, 1.0) <= 5.0


def test_transient_error_numbers() -> None:
    passing = {
        number for number in errno.errorcode if next_pause_s(DEFAULT_RETRIES, os_error(number), 1, 1.0) is not None
    }
    assert passing == TRANSIENT
    assert TRANSIENT >= AMBIGUOUS > {errno.ESTALE, errno.ETIMEDOUT, errno.EINTR}
    assert {errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENOMEM} < TRANSIENT - AMBIGUOUS
    final = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EINVAL}
    assert not TRANSIENT & (final | {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EBADF})


@pytest.mark.parametrize(
    "error",
    [
        NotSyncedError(errno.EAGAIN, "the disk says later"),
        MemoryError("no memory"),
        OSError("without a number"),
        aiockpt.CheckpointExistsError("it is taken"),
        aiockpt.WriteError("of unknown cause"),
    ],
    ids=repr,
)
@pytest.mark.asyncio
async def test_permanent_errors_are_never_retried(error: Exception) -> None:
    recorded, step = Recorded(), Step(error)
    with pytest.raises(type(error)):
        await recorded.repeater.run("fail", step)
    assert (step.done, recorded.pauses) == (1, [])


@pytest.mark.asyncio
async def test_a_step_is_repeated_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    recorded, step = Recorded(), Step(os_error(errno.EAGAIN), os_error(errno.ESTALE))
    with caplog.at_level(logging.INFO, "aiockpt"):
        assert await recorded.repeater.run("write x at offset 7", step) == "done"
    assert recorded.pauses == pytest.approx([0.1, 0.2])
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "write x at offset 7: [Errno 11]" in caplog.messages[0]
    assert caplog.messages[1].endswith("trying again in 0.20 s (attempt 3 of 4)")


@pytest.mark.asyncio
async def test_pauses_do_not_draw_from_the_global_random_generator() -> None:
    before = random.getstate()
    repeater = Repeater(DEFAULT_RETRIES, sleep=Recorded()._sleep)
    assert await repeater.run("write", Step(os_error(errno.EBUSY))) == "done"
    assert random.getstate() == before


@pytest.mark.asyncio
async def test_the_last_error_has_the_number_of_attempts() -> None:
    recorded, step = Recorded(), Step(*(os_error(errno.EBUSY) for _ in range(9)))
    with pytest.raises(OSError, match="busy") as caught:
        await recorded.repeater.run("rename", step)
    assert (step.done, len(recorded.pauses)) == (4, 3)
    assert "busy (tried 4 times in " in described(caught.value, "")
    with pytest.raises(OSError, match="Input/output error") as caught:
        await recorded.repeater.run("rename", Step(os_error(errno.EIO)))
    assert described(caught.value, "") == str(caught.value)


@pytest.mark.asyncio
async def test_an_aiockpt_error_is_classified_by_its_cause() -> None:
    ours = aiockpt.CommitError("can't publish it")
    ours.__cause__ = os_error(errno.EBUSY)
    recorded, step = Recorded(), Step(ours)
    assert await recorded.repeater.run("publish", step) == "done"
    assert step.done == 2


@pytest.mark.parametrize(
    ("number", "answer", "done"),
    [
        (errno.ETIMEDOUT, True, 2),
        (errno.ETIMEDOUT, False, 1),
        (errno.ESTALE, os_error(errno.ESTALE), 1),
        (errno.EMFILE, False, 2),
    ],
)
@pytest.mark.asyncio
async def test_a_step_that_may_have_taken_effect_is_not_repeated(
    number: int, answer: bool | OSError, done: int
) -> None:
    async def undone() -> bool:
        if isinstance(answer, OSError):
            raise answer
        return answer

    recorded, step = Recorded(), Step(os_error(number))
    if done == 2:
        assert await recorded.repeater.run("create", step, undone=undone) == "done"
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            await recorded.repeater.run("create", step, undone=undone)
    assert step.done == done


@pytest.mark.asyncio
async def test_a_pause_can_be_cancelled() -> None:
    paused = anyio.Event()

    async def sleep(_: float) -> None:
        paused.set()
        await anyio.sleep_forever()

    step = Step(os_error(errno.EBUSY))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Repeater(DEFAULT_RETRIES, sleep=sleep).run, "write", step)
        await paused.wait()
        tasks.cancel_scope.cancel()
    assert step.done == 1


class Releases(logging.Handler):
    """A log handler that raises the limit of open files again at the first retry."""

    def __init__(self, limits: tuple[int, int]) -> None:
        super().__init__(logging.INFO)
        self._limits = limits
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


@pytest.fixture
def no_more_files(caplog: pytest.LogCaptureFixture):
    """Yield a function that leaves the process no free file descriptor until the first retry."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    releases = Releases(limits)
    logger = logging.getLogger("aiockpt")
    logger.addHandler(releases)
    caplog.set_level(logging.INFO, "aiockpt")

    def take() -> list[str]:
        with open(os.devnull, "rb") as last:
            free = last.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        return releases.messages

    yield take
    logger.removeHandler(releases)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Starved(FaultyStorage):
    """A storage that has no free file descriptor when it reaches a step."""

    def __init__(self, take, step: str) -> None:
        super().__init__(LocalStorage(retries=aiockpt.Retries(first_s=0.001)), faults=[Fault(step)])
        self._take = take
        self._step = step
        self.said: list[str] = []

    async def before(self, step: str, name: str) -> None:
        if step == self._step and not self.said:
            self.said = self._take()
        await super().before(step, name)


def test_a_save_continues_once_files_can_be_opened_again(no_more_files, tmp_path: Path) -> None:
    state = large_state(4)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.ones(1)}, tmp_path / "first")  # starts all threads
        storage = Starved(no_more_files, "create")
        ckpt.save(state, tmp_path / "c", storage=storage)
        assert "create" in storage.said[0]
        assert "Too many open files" in storage.said[0]
        assert_same(state, ckpt.load(tmp_path / "c"))


def test_without_retries_a_lack_of_descriptors_fails_the_save(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with aiockpt.SyncCheckpointer(retries=None) as ckpt:
        ckpt.save({"x": torch.ones(1)}, tmp_path / "first")
        with open(os.devnull, "rb") as last:
            free = last.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(aiockpt.SaveError, match="Too many open files") as caught:
                ckpt.save(large_state(2), tmp_path / "c")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EMFILE
        assert [path.name for path in tmp_path.iterdir()] == ["first"]
        ckpt.save(large_state(2), tmp_path / "c")
        assert_same(large_state(2), ckpt.load(tmp_path / "c"))


@pytest.mark.parametrize("created", [False, True])
def test_an_ambiguous_create_is_retried_only_if_no_file_is_there(
    created: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is there may belong to another process."""
    real, opened = os.open, []

    def answer(path, flags, *args, **kwargs) -> int:
        if not str(path).endswith(".distcp") or not flags & os.O_CREAT:
            return real(path, flags, *args, **kwargs)
        opened.append(flags)
        if created:
            os.close(real(path, flags, *args, **kwargs))
        if created or len(opened) == 1:
            raise os_error(errno.ESTALE)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", answer)
    with aiockpt.SyncCheckpointer(retries=aiockpt.Retries(first_s=0.001)) as ckpt:
        if created:
            with pytest.raises(aiockpt.WriteError, match=r"can't create .* Stale file handle"):
                ckpt.save({"x": torch.ones(3)}, tmp_path / "c")
            assert list(tmp_path.iterdir()) == []
        else:
            ckpt.save({"x": torch.ones(3)}, tmp_path / "c")
            assert_same({"x": torch.ones(3)}, ckpt.load(tmp_path / "c"))
    assert len(opened) == (1 if created else 2)


class MovedPosition(LocalSink):
    """A sink of which every second write moves the file position and fails, as on some file systems."""

    attempts = 0

    def _write_some(self, view: memoryview) -> int:
        self.attempts += 1
        if self.attempts % 2:
            os.lseek(self._file.fileno(), self._written + 12_288, os.SEEK_SET)
            raise os_error(errno.ETIMEDOUT)
        return super()._write_some(view)


@pytest.mark.asyncio
async def test_a_retried_write_continues_at_its_own_offset(tmp_path: Path) -> None:
    data, workers = bytes(range(256)) * 80, Workers(2, "aiockpt-test")
    try:
        path = str(tmp_path / "f")
        sink = MovedPosition(NewFile(path, path, False, workers, Recorded().repeater), len(data))
        await sink.open(direct=False)
        for start in range(0, len(data), 4096):
            await sink.write(memoryview(data)[start : start + 4096])
        await sink.finish()
    finally:
        workers.close()
    assert sink.attempts == 10
    assert (tmp_path / "f").read_bytes() == data


class RetryLogged(logging.Handler):
    """A log handler that sets an event at a retry."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "trying again" in record.getMessage():
            self.event.set()


def test_a_save_in_a_pause_before_a_retry_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """The cancellation ends the long pause at once, and frees the staging memory."""
    logged = RetryLogged()

    def busy(fd: int, nbytes: int) -> None:
        raise os_error(errno.EBUSY)

    logging.getLogger("aiockpt").addHandler(logged)
    caplog.set_level(logging.INFO, "aiockpt")
    monkeypatch.setattr(local_sink, "allocate", busy)
    try:
        with aiockpt.SyncCheckpointer(
            retries=aiockpt.Retries(first_s=9999, most_s=9999), staging_bytes=4 << 20
        ) as ckpt:
            save = ckpt.submit(large_state(3), tmp_path / "c")
            assert logged.event.wait(60)
            assert save.cancel().result(60)
            with pytest.raises(aiockpt.SaveCancelledError):
                save.written.result(60)
            assert list(tmp_path.iterdir()) == []
            monkeypatch.undo()
            ckpt.save(large_state(3), tmp_path / "c")
            assert_same(large_state(3), ckpt.load(tmp_path / "c"))
    finally:
        logging.getLogger("aiockpt").removeHandler(logged)
