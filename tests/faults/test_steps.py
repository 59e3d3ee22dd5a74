"""A fault at any step of a save raises the right error, leaves nothing behind, and does not affect the next save."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest
import torch

import aiockpt
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import Storage
from aiockpt.testing import Chances, Fault, FaultyStorage, HangingStorage
from tests.faults.checks import assert_failed_rightly, assert_nothing_happened, names, os_error
from tests.polling import until
from tests.states import assert_same, large_state

KINDS = {"commit": aiockpt.CommitError}
OLD = {"old": torch.arange(17), "step": 1}


def _count_steps(tmp_path: Path, **options) -> dict[str, int]:
    """Return how often each step of a save occurs."""
    counted = FaultyStorage(LocalStorage(fsync=False))
    with aiockpt.SyncCheckpointer(fsync=False, chunk_bytes=1 << 16, staging_bytes=1 << 18) as ckpt:
        ckpt.save(large_state(5), tmp_path / "counted", storage=counted, **options)
    return dict(counted.seen)


def _prepare_path(folder: Path, name: str, *, overwrite: bool) -> tuple[Path, dict]:
    """Return the path of a save, and the checkpoints to keep if it fails; create the one to overwrite."""
    folder.mkdir()
    if not overwrite:
        return folder / name, {}
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        ckpt.save(OLD, folder / name, overwrite=True)
    return folder / name, {name: OLD}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "overwrite"), [(errno.ENOSPC, False), (errno.EIO, True)], ids=["first", "overwrite"]
)
def test_a_fault_at_each_step_fails_the_save(number: int, overwrite: bool, tmp_path: Path) -> None:
    seen = _count_steps(tmp_path)
    assert seen["write"] > 2 * seen["create"] > 4
    tried = 0
    with aiockpt.SyncCheckpointer(fsync=False, chunk_bytes=1 << 16, staging_bytes=1 << 18) as ckpt:
        for step in ("begin", "create", "write", "finish", "commit"):
            for nth in sorted({1, 2, seen[step] // 2 + 1, seen[step]} & set(range(1, seen[step] + 1))):
                path, kept = _prepare_path(tmp_path / f"{step}-{nth}", "c", overwrite=overwrite)
                fault = FaultyStorage(LocalStorage(fsync=False), step, os_error(number), nth=nth)
                handle = ckpt.submit(large_state(5), path, overwrite=overwrite, storage=fault)
                with pytest.raises(KINDS.get(step, aiockpt.WriteError)) as caught:
                    handle.written.result(timeout=60)
                assert_failed_rightly(caught.value, {number})
                assert fault.struck == {step: 1}
                assert names(path.parent) == sorted(kept)
                if kept:
                    assert_same(OLD, ckpt.load(path))
                ckpt.save(large_state(5), path, overwrite=overwrite)
                assert_same(large_state(5), ckpt.load(path))
                tried += 1
    assert tried >= 12


def test_a_fault_at_each_step_keeps_the_old_safetensors_file(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(fsync=False, chunk_bytes=1 << 18) as ckpt:
        for step in ("begin", "create", "write", "finish", "commit"):
            path = tmp_path / f"{step}.safetensors"
            ckpt.save({"old": torch.arange(17)}, path, format="safetensors")
            fault = FaultyStorage(LocalStorage(fsync=False), step, os_error(errno.EIO))
            with pytest.raises(KINDS.get(step, aiockpt.WriteError)) as caught:
                ckpt.save(large_state(2), path, format="safetensors", overwrite=True, storage=fault)
            assert_failed_rightly(caught.value, {errno.EIO})
            assert_same({"old": torch.arange(17)}, ckpt.load(path))
    assert len(names(tmp_path)) == 5


def test_a_failed_cleanup_is_noted_on_the_error_of_the_save(tmp_path: Path) -> None:
    faults = [Fault("write", os_error(errno.ENOSPC), nth=2), Fault("abort", os_error(errno.EIO))]
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        with pytest.raises(aiockpt.WriteError, match="No space left") as caught:
            ckpt.save(large_state(5), tmp_path / "c", storage=FaultyStorage(LocalStorage(fsync=False), faults=faults))
        assert "abort" in caught.value.__notes__[0]
        assert "Input/output error" in caught.value.__notes__[0]
    assert_nothing_happened(tmp_path, {})


@pytest.mark.parametrize("error", [MemoryError("no memory for this"), ValueError("a defect of the storage")])
def test_an_error_other_than_oserror_becomes_the_cause(error: Exception, tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        fault = FaultyStorage(LocalStorage(fsync=False), "write", error, nth=2)
        with pytest.raises(aiockpt.SaveError, match=str(error)) as caught:
            ckpt.save(large_state(5), tmp_path / "c", storage=fault)
        assert caught.value.__cause__ is error
    assert_nothing_happened(tmp_path, {})


def test_a_slow_disk_is_no_fault(tmp_path: Path) -> None:
    slow = [Fault(step, delay_s=0.002, times=None) for step in ("begin", "create", "write", "finish", "commit")]
    storage = FaultyStorage(LocalStorage(fsync=False), faults=slow)
    with aiockpt.SyncCheckpointer(fsync=False, chunk_bytes=1 << 17, staging_bytes=1 << 18) as ckpt:
        saves = [ckpt.submit(large_state(3), tmp_path / f"c{i}", storage=storage) for i in range(3)]
        for number, save in enumerate(saves):
            save.written.result(timeout=60)
            assert_same(large_state(3), ckpt.load(tmp_path / f"c{number}"))
    assert storage.seen["write"] > 30
    assert not storage.struck.total()


def test_chances_are_deterministic_for_a_seed() -> None:
    def drawn(seed: int) -> list[str]:
        storage = FaultyStorage(LocalStorage(), chances=Chances({"write": 0.3, "commit": 1.0}, seed=seed))
        return [anyio.run(answer, storage, step) for step in ("write", "begin", "commit") * 50]

    async def answer(storage: FaultyStorage, step: str) -> str:
        try:
            await storage.before(step, "name")
        except aiockpt.SaveError as exc:
            return repr(exc.__cause__)
        return "None"

    assert drawn(1) == drawn(1) != drawn(2)
    assert 20 < sum(answer != "None" for answer in drawn(1)[0::3]) + 10 < 40
    assert set(drawn(1)[1::3]) == {"None"}
    assert "None" not in drawn(1)[2::3]


def test_faults_at_random(tmp_path: Path) -> None:
    """Each checkpoint is either complete or not there."""
    chances = Chances({"begin": 0.05, "create": 0.05, "write": 0.02, "finish": 0.03, "commit": 0.1}, seed=11)
    storage = FaultyStorage(LocalStorage(fsync=False), chances=chances)
    failed, kept = 0, {}
    with aiockpt.SyncCheckpointer(fsync=False, chunk_bytes=1 << 17, staging_bytes=1 << 19) as ckpt:
        for number in range(40):
            state = {"step": number, "w": torch.arange(number, number + 100_000)}
            try:
                ckpt.save(state, tmp_path / str(number), storage=storage)
            except aiockpt.SaveError as exc:
                assert_failed_rightly(exc, set(chances.numbers))
                failed += 1
            else:
                kept[str(number)] = state
    assert failed > 5
    assert len(kept) > 5
    assert failed == storage.struck.total()
    assert_nothing_happened(tmp_path, kept)


def test_reads_that_fail_or_end_early(tmp_path: Path) -> None:
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        ckpt.save(large_state(3), tmp_path / "c")
        total = FaultyStorage(LocalStorage(fsync=False))
        ckpt.load(tmp_path / "c", storage=total)
        for nth in range(1, total.seen["read"] + 1):
            fails = FaultyStorage(LocalStorage(fsync=False), "read", os_error(errno.EIO), nth=nth)
            with pytest.raises(aiockpt.LoadError, match="Input/output error") as caught:
                ckpt.load(tmp_path / "c", storage=fails)
            assert isinstance(caught.value.__cause__, OSError)
            ends = FaultyStorage(LocalStorage(fsync=False), faults=[Fault("read", nth=nth, short_bytes=2)])
            with pytest.raises(aiockpt.CorruptCheckpointError, match="too early"):
                ckpt.load(tmp_path / "c", storage=ends)
            assert fails.struck == ends.struck == {"read": 1}
        with pytest.raises(aiockpt.LoadError, match="Stale"):
            ckpt.load(tmp_path / "c", storage=FaultyStorage(LocalStorage(fsync=False), "open", os_error(errno.ESTALE)))
        assert_same(large_state(3), ckpt.load(tmp_path / "c"))


class RecordedSteps(FaultyStorage):
    """A storage that records its steps in their order."""

    def __init__(self, inner: Storage, **options) -> None:
        super().__init__(inner, **options)
        self.steps: list[tuple[str, str]] = []

    async def before(self, step: str, name: str) -> None:
        self.steps.append((step, name))
        await super().before(step, name)


def test_a_fault_can_strike_one_file_only(tmp_path: Path) -> None:
    faults = [
        Fault("finish", os_error(errno.EIO), name=".metadata"),
        Fault("write", os_error(errno.EIO), name="nothing"),
    ]
    storage = RecordedSteps(LocalStorage(fsync=False), faults=faults)
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt, pytest.raises(aiockpt.WriteError, match=r"finish \.metadata"):
        ckpt.save(large_state(3), tmp_path / "c", storage=storage)
    assert storage.steps[-2:] == [("finish", ".metadata"), ("abort", str(tmp_path / "c"))]
    assert_nothing_happened(tmp_path, {})


@pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
def test_a_hanging_disk_blocks_saves_but_not_the_caller(step: str, tmp_path: Path) -> None:
    """Later saves queue up, and when the disk answers again, all are written."""
    storage = HangingStorage(LocalStorage(fsync=False), step)
    states = [{"number": number, **large_state(2)} for number in range(3)]
    with aiockpt.SyncCheckpointer(fsync=False) as ckpt:
        first = ckpt.submit(states[0], tmp_path / "0", storage=storage)
        storage.reached.result(60)
        first.staged.result(60)  # staging does not wait for the disk
        later = [ckpt.submit(states[number], tmp_path / str(number)) for number in (1, 2)]
        later[-1].staged.result(60)
        assert not first.written.done()
        assert not any(save.written.done() for save in later)
        storage.recover()
        for save in (first, *later):
            save.written.result(60)
    assert_nothing_happened(tmp_path, {str(number): state for number, state in enumerate(states)})


def test_closing_cancels_saves_on_a_hanging_disk_after_drain_timeout(tmp_path: Path) -> None:
    """The cancellation takes effect when the disk answers again."""
    storage = HangingStorage(LocalStorage(fsync=False), "write")
    ckpt = aiockpt.SyncCheckpointer(fsync=False, drain_timeout=0.01)
    save = ckpt.submit(large_state(2), tmp_path / "c", storage=storage)
    storage.reached.result(60)
    closed = ckpt._engine.close()
    until(lambda: save._job.cancel_asked)
    assert not save.written.done()
    storage.recover()
    with pytest.raises(aiockpt.SaveCancelledError, match=r"drain_timeout = 0\.01 s .*nothing of it is left"):
        closed.result(60)
    ckpt._engine.join()
    with pytest.raises(aiockpt.SaveCancelledError):
        save.written.result(60)
    assert names(tmp_path) == []
