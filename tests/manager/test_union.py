"""Restores from a run's directory and its mirror: the newest step of both, whole, from the nearest copy."""

from __future__ import annotations

import errno
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.manager.scan import scan
from aiockpt.testing import FaultyStorage
from tests.manager.gates import URL, Gate
from tests.manager.runs import empty, flip, is_untouched, names, path_of, state_of, step_in, truncate
from tests.places import ServerPath, remove, storage_of

Heard = list[warnings.WarningMessage]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(anywhere: Path | ServerPath) -> Any:
    return anywhere / "there"


@pytest.fixture
def gate(there: Any) -> Iterator[Gate]:
    made = Gate(storage_of(there), str(there))
    yield made
    made.is_away = False


@pytest.fixture
def run3(here: Path, there: Any) -> None:
    """Save and mirror three steps."""
    with aiockpt.SyncCheckpointManager(here, mirror=there) as run:
        for step in (1, 2, 3):
            run.submit(step, state_of(step), metrics={"loss": float(step)}).mirrored.result(60)


def restore(here: Path, mirror: Any, **options: Any) -> tuple[aiockpt.Restored | None, dict[str, Any]]:
    state = empty()
    manager = {name: options.pop(name) for name in ("read_only", "storage", "mirror_timeout") if name in options}
    with aiockpt.SyncCheckpointManager(here, mirror=mirror, **manager) as run:
        return run.restore(state, **options), state


def test_nearest_copy_is_taken(here: Path, gate: Gate, run3: None) -> None:
    found, state = restore(here, URL)
    assert found is not None
    assert (found.step, found.path, step_in(state)) == (3, str(path_of(here, 3)), 3)
    assert not [name for name in gate.reads if name.endswith(".distcp")]


@pytest.mark.parametrize("read_only", [False, True])
def test_empty_disk(here: Path, there: Any, run3: None, read_only: bool) -> None:
    """A replaced host has nothing: it goes on from the mirror, and so does the next one."""
    shutil.rmtree(here)
    found, state = restore(here, there, read_only=read_only)
    assert found is not None
    assert (found.step, found.path, step_in(state)) == (3, str(path_of(there, 3)), 3)
    assert found.metrics == {"loss": 3.0}
    assert found.skipped == ()
    with aiockpt.SyncCheckpointManager(here, mirror=there, keep=aiockpt.KeepLatest(1)) as run:
        assert run.restore(empty()).step == 3  # type: ignore[union-attr]
        run.submit(4, state_of(4)).mirrored.result(60)
    assert [info.step for info in scan(here)] == [info.step for info in scan(there)] == [4]


def test_mirror_has_a_later_step(here: Path, there: Any, run3: None) -> None:
    shutil.rmtree(path_of(here, 3))
    found, state = restore(here, there)
    assert found is not None
    assert (found.step, step_in(state)) == (3, 3)


def test_directory_has_a_later_step(here: Path, there: Any, run3: None) -> None:
    remove(path_of(there, 3))
    found, state = restore(here, there)
    assert found is not None
    assert (found.step, found.path, step_in(state)) == (3, str(path_of(here, 3)), 3)


def test_best_and_a_certain_step_are_those_of_both(here: Path, there: Any, run3: None) -> None:
    shutil.rmtree(path_of(here, 1))
    found, state = restore(here, there, step="best", metric="loss", discard_later=False)
    assert found is not None
    assert (found.step, step_in(state)) == (1, 1)
    found, state = restore(here, there, step=1, discard_later=False)
    assert found is not None
    assert (found.step, step_in(state)) == (1, 1)
    with pytest.raises(aiockpt.CheckpointNotFoundError, match=r"there is no step 7 in .*; there are: [0-9]"):
        restore(here, there, step=7)


class Broken(Gate):
    """The newest step can't be looked at."""

    def look(self, path: str, budget: Any = None) -> Any:
        if path.endswith("step-00000003"):
            raise OSError(errno.EIO, "Input/output error", path)
        return super().look(path, budget)

    async def before(self, step: str, name: str) -> None:
        if step == "open" and name.endswith("step-00000003"):
            raise aiockpt.LoadError(f"can't open {name}: Input/output error")


def test_step_of_the_mirror_that_can_not_be_read_is_discarded(here: Path, there: Any, run3: None) -> None:
    Broken(storage_of(there), str(there))
    found, _ = restore(here, URL, step=1, discard_later=True)
    assert found is not None
    assert [info.step for info in scan(here)] == [info.step for info in scan(there)] == [1]


def test_step_of_the_mirror_that_can_not_be_read(
    here: Path, there: Any, run3: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It hides no other; but a run without steps of its own is not restored from an older one without a word."""
    Broken(storage_of(there), str(there))
    for step in (1, 3):
        shutil.rmtree(path_of(here, step))
    found, state = restore(here, URL)
    assert found is not None
    assert (found.step, step_in(state)) == (2, 2)
    assert f"step 3 of the mirror {there} is left out: it can't be read" in caplog.text
    found, state = restore(here, URL, step=1, discard_later=False)
    assert found is not None
    assert (found.step, step_in(state)) == (1, 1)
    shutil.rmtree(here)
    with pytest.raises(aiockpt.LoadError, match="step-00000003"):
        restore(here, URL)


# --- damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["auto", "before", "while"])
def test_flipped_byte_is_repaired_from_the_mirror(here: Path, gate: Gate, run3: None, verify: Any) -> None:
    flip(here, 3)
    gate.reads.clear()
    with pytest.warns(aiockpt.DamagedCheckpointWarning, match=r"step 3, which is now step-00000003\.damaged"):
        found, state = restore(here, URL, verify_when=verify)
    assert found is not None
    assert (found.step, step_in(state), found.repaired) == (3, 3, ("layers.1",))
    item_bytes = state["a"].nbytes
    assert item_bytes <= gate.read_bytes < (3 if verify == "auto" else 2) * item_bytes + (1 << 20)
    assert [(each.step, Path(each.path).name) for each in found.skipped] == [(3, "step-00000003.damaged")]
    assert "step-00000003.damaged" in names(here)
    found, state = restore(here, URL)
    assert found is not None
    assert (found.step, step_in(state)) == (3, 3)


def test_only_damaged_files_are_read_from_the_mirror(here: Path, gate: Gate, run3: None) -> None:
    (path_of(here, 3) / "notes").write_bytes(b"")
    shutil.rmtree(path_of(here, 3))
    with aiockpt.SyncCheckpointManager(here, mirror=URL) as run:
        more = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
        run.submit(4, more, files={"extra": bytes(10)}).mirrored.result(60)
    data = bytearray((path_of(here, 4) / "extra").read_bytes())
    data[3] ^= 1
    (path_of(here, 4) / "extra").write_bytes(data)
    gate.reads.clear()
    with aiockpt.SyncCheckpointManager(here, mirror=URL) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run.restore({"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}, verify_when="before")
    assert found is not None
    assert (found.step, found.repaired) == (4, ("extra",))
    assert not [name for name in gate.reads if name.endswith(".distcp")]


@pytest.mark.parametrize("how", [truncate, lambda here, step: (path_of(here, step) / ".metadata").unlink()])
def test_step_that_lacks_bytes_comes_from_the_mirror(here: Path, there: Any, run3: None, how: Any) -> None:
    how(here, 3)
    with pytest.warns(aiockpt.DamagedCheckpointWarning):
        found, state = restore(here, there)
    assert found is not None
    assert (found.step, step_in(state)) == (3, 3)


def test_certain_step_is_repaired_too(here: Path, there: Any, run3: None) -> None:
    flip(here, 2)
    with pytest.warns(aiockpt.DamagedCheckpointWarning):
        found, state = restore(here, there, step=2, discard_later=False)
    assert found is not None
    assert (found.step, step_in(state)) == (2, 2)


@pytest.mark.filterwarnings("ignore::aiockpt.DamagedCheckpointWarning")
@pytest.mark.parametrize("verify", ["auto", "before"])
def test_damage_outside_of_items_as_well(here: Path, there: Any, run3: None, verify: Any) -> None:
    """Repaired, the step does not match the CRC of the file: all of it comes from the mirror."""
    flip(here, 3)
    file = path_of(here, 3) / "__0_0.distcp"
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path_of(here, 3)) as reader:
        ends = [chunk.offset + chunk.nbytes for info in reader.values() for chunk in getattr(info, "chunks", ())]
    data = bytearray(file.read_bytes())
    data[min(ends)] ^= 1  # behind the first tensor
    file.write_bytes(data)
    found, state = restore(here, there, verify_when=verify)
    assert found is not None
    assert (found.step, step_in(state), found.repaired) == (3, 3, ())
    assert [each.step for each in found.skipped] == [3]


def test_disk_that_fails_is_no_damage(here: Path, there: Any, run3: None) -> None:
    """A copy that can't be read is read from the mirror, and keeps its name."""
    storage = FaultyStorage(storage_of(here), "read", OSError(errno.EIO, "I/O error"), times=None)
    storage.before_read, real = _fail_data(storage.before_read), storage.before_read  # type: ignore[method-assign]
    assert real is not None
    with pytest.warns(aiockpt.DamagedCheckpointWarning, match="can't read"):
        found, state = restore(here, there, storage=storage, verify_when="while")
    assert found is not None
    assert (found.step, step_in(state)) == (3, 3)
    assert names(here) == ["step-00000001", "step-00000002", "step-00000003"]


def _fail_data(real: Any) -> Any:
    """Documents can be read."""
    return lambda name, *args: real(name, *args) if name.endswith(".distcp") else None


def test_both_damaged_goes_to_the_next_older(here: Path, there: Any, run3: None) -> None:
    flip(here, 3)
    flip(there, 3)
    with pytest.warns(aiockpt.DamagedCheckpointWarning) as heard:
        found, state = restore(here, there)
    assert len(heard) == 1
    assert found is not None
    assert (found.step, step_in(state)) == (2, 2)
    assert [each.step for each in found.skipped] == [3, 3]
    said = str(heard[0].message)
    assert "step 3, which is now step-00000003.damaged" in said
    assert f"step 3, of which {path_of(there, 3)} is passed over" in said
    assert "older" not in said.lower()


def test_all_damaged_raises(here: Path, there: Any, run3: None) -> None:
    for step in (1, 2, 3):
        flip(here, step)
        flip(there, step)
    state = empty()
    with (
        aiockpt.SyncCheckpointManager(here, mirror=there) as run,
        pytest.raises(aiockpt.CorruptCheckpointError, match=r"no step of .* can be restored"),
    ):
        run.restore(state, verify_when="before")
    assert is_untouched(state)


# --- a mirror that is away ----------------------------------------------------------------------------------


def test_mirror_that_is_away_is_left_out(here: Path, gate: Gate, run3: None, caplog: pytest.LogCaptureFixture) -> None:
    gate.is_away = True
    with aiockpt.SyncCheckpointManager(here, mirror=URL, read_only=True) as run:
        found = run.restore(state := empty())
    assert found is not None
    assert (found.step, step_in(state)) == (3, 3)
    assert "can't be read, so its steps are left out" in caplog.text


def test_empty_disk_and_a_mirror_that_is_away_is_no_new_run(here: Path, gate: Gate, run3: None) -> None:
    shutil.rmtree(here)
    gate.is_away = True
    with (
        aiockpt.SyncCheckpointManager(here, mirror=URL, read_only=True) as run,
        pytest.raises(aiockpt.LoadError, match=r"can't be read, and .* has no step that is whole"),
    ):
        run.restore(empty())


def test_mirror_that_hangs_is_left_out(here: Path, gate: Gate, run3: None, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the restore nor closing waits for it."""
    gate.hangs = threading.Event()
    with aiockpt.SyncCheckpointManager(here, mirror=aiockpt.Mirror(URL, timeout=0.05), read_only=True) as run:
        found = run.restore(empty())
    assert found is not None
    assert found.step == 3
    assert "its steps are left out: it did not answer within 0.05 s" in caplog.text
    gate.hangs.set()
    for thread in threading.enumerate():
        if thread.name == "aiockpt-mirror":
            thread.join(60)


def test_later_steps_stay_if_the_mirror_hangs(here: Path, gate: Gate, run3: None) -> None:
    with aiockpt.SyncCheckpointManager(here, mirror=aiockpt.Mirror(URL, timeout=0.05), drain_timeout=0.1) as run:
        run.restore(empty())
        idle = run._mirror.finish() if run._mirror is not None else None
        if idle is not None:
            idle.result(60)
        gate.hangs = threading.Event()
        outcome: list[BaseException] = []

        def restore_first() -> None:
            try:
                run.restore(empty(), step=1, discard_later=True)
            except aiockpt.AiockptError as exc:
                outcome.append(exc)

        thread = threading.Thread(target=restore_first)
        thread.start()
        thread.join(20)
        has_ended = not thread.is_alive()
        gate.hangs.set()
        thread.join(60)
        assert has_ended
        assert "step 1 was restored, but the mirror has later ones" in str(outcome)
    assert [info.step for info in scan(here)] == [1, 2, 3]
    for each in threading.enumerate():
        if each.name == "aiockpt-mirror":
            each.join(60)


def test_new_run_with_a_mirror(here: Path, there: Any) -> None:
    assert restore(here, there)[0] is None


# --- numbers that are used again --------------------------------------------------------------------------


def test_what_was_saved_later_under_a_number_counts(tmp_path: Path, there: Any) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with aiockpt.SyncCheckpointManager(old, mirror=there) as run:
        run.submit(4, state_of(4)).mirrored.result(60)
    with aiockpt.SyncCheckpointManager(old) as run:
        run.save(5, state_of(1) | {"step": 5})
    with aiockpt.SyncCheckpointManager(new, mirror=there) as run:
        assert run.restore(empty())
        run.submit(5, state_of(5)).mirrored.result(60)
    found, state = restore(old, there)
    assert found is not None
    assert (found.path, step_in(state)) == (str(path_of(there, 5)), 5)


def test_later_steps_are_discarded_in_both(here: Path, there: Any, run3: None) -> None:
    found, _ = restore(here, there, step=1, discard_later=True)
    assert found is not None
    assert [info.step for info in scan(here)] == [info.step for info in scan(there)] == [1]


def test_later_steps_stay_if_the_mirror_is_away(here: Path, gate: Gate, run3: None) -> None:
    state = empty()
    with aiockpt.SyncCheckpointManager(here, mirror=URL, drain_timeout=0.1) as run:
        gate.is_away = True
        with pytest.raises(aiockpt.DeleteError, match="step 1 was restored, but the mirror has later ones"):
            run.restore(state, step=1, discard_later=True)
        gate.is_away = False
    assert [info.step for info in scan(here)] == [1, 2, 3]
