"""Restores return the newest valid step, and never leave bytes of a damaged one in the target."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.kinds import body_of, sealed
from tests.manager.runs import (
    SIZE,
    empty,
    flip,
    is_untouched,
    names,
    path_of,
    state_of,
    step_in,
    tensors_of,
    truncate,
    unfinish,
)
from tests.places import remove


@pytest.fixture
def folder(anywhere: Path) -> Path:
    """A run with three steps."""
    with aiockpt.SyncCheckpointManager(anywhere / "run") as run:
        for step in (100, 200, 300):
            run.save(step, state_of(step), {"loss": 1 / step})
    return anywhere / "run"


LOCAL = pytest.mark.parametrize("anywhere", ["local"], indirect=True)
"""Of tests that damage or move files by means of the file system."""


def restored(folder: Path, state: Any, **options: Any) -> aiockpt.Restored | None:
    with aiockpt.SyncCheckpointManager(folder) as run:
        return run.restore(state, **options)


def test_more_damaged_steps_than_are_looked_at_first(tmp_path: Path) -> None:
    """All that are newer than the first whole one are passed over and renamed, however many there are."""
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        for step in range(1, 8):
            run.save(step, state_of(step))
    for step in range(2, 8):
        flip(tmp_path, step)
    state = empty()
    with pytest.warns(aiockpt.DamagedCheckpointWarning):
        found = restored(tmp_path, state)
    assert found is not None
    assert (found.step, step_in(state), [each.step for each in found.skipped]) == (1, 1, [7, 6, 5, 4, 3, 2])
    assert [name for name in names(tmp_path) if name.startswith("step-")] == [
        "step-00000001",
        *(f"step-0000000{step}.damaged" for step in range(2, 8)),
    ]


DAMAGE = {"flipped": flip, "truncated": truncate, "unfinished": unfinish}


@pytest.mark.parametrize("verify", ["auto", "before", "while"])
@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_damaged_step_is_skipped_and_renamed(folder: Path, harm: Any, verify: Any) -> None:
    harm(folder, 300)
    state = empty()
    with pytest.warns(aiockpt.DamagedCheckpointWarning, match="step 300") as caught:
        start = restored(folder, state, verify_when=verify)
    assert start is not None
    assert (start.step, step_in(state)) == (200, 200)
    (skipped,) = start.skipped
    assert (skipped.step, skipped.path) == (300, str(folder / "step-00000300.damaged"))
    assert skipped.reason
    assert caught[0].message.skipped == start.skipped  # type: ignore[union-attr]
    assert caught[0].filename == __file__
    assert str(caught[0].message).count(str(folder)) == 1, caught[0].message
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300.damaged"]


@pytest.mark.slow
@pytest.mark.parametrize("where", [0.3, 0.6, 0.98])
def test_flipped_bit_at_any_place_is_detected(folder: Path, where: float) -> None:
    flip(folder, 300, where=where)
    flip(folder, 200, where=where)
    state = empty()
    with pytest.warns(aiockpt.DamagedCheckpointWarning):
        start = restored(folder, state)
    assert start is not None
    assert (start.step, step_in(state), [each.step for each in start.skipped]) == (100, 100, [300, 200])


@pytest.mark.slow
def test_step_set_aside_can_be_saved_again(folder: Path) -> None:
    for expected in (".damaged", ".damaged-1", ".damaged-2"):
        flip(folder, 300)
        with pytest.warns(aiockpt.DamagedCheckpointWarning):
            start = restored(folder, empty())
        assert start is not None
        assert start.skipped[0].path.endswith(f"step-00000300{expected}")
        with aiockpt.SyncCheckpointManager(folder) as run:
            run.save(300, state_of(300))
            assert run.steps() == [100, 200, 300]


@pytest.mark.parametrize("verify", ["auto", "before"])
def test_only_step_damaged_raises_and_leaves_the_target_untouched(folder: Path, verify: Any) -> None:
    remove(path_of(folder, 100))
    remove(path_of(folder, 200))
    flip(folder, 300)
    state = empty()
    for _ in range(2):  # a second restore raises too, instead of starting from scratch silently
        with pytest.raises(aiockpt.CorruptCheckpointError, match=r"no step of .* can be restored: step 300"):
            restored(folder, state, verify_when=verify)
    assert is_untouched(state)
    assert names(folder) == ["step-00000300"]


def without(folder: Path, step: int) -> Path:
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    shutil.rmtree(path_of(copy, step))
    return copy


@LOCAL
def test_all_steps_damaged_raises_and_renames_nothing(folder: Path) -> None:
    for step in (100, 200, 300):
        flip(folder, step)
    state = empty()
    with pytest.raises(aiockpt.CorruptCheckpointError, match="so are 2 older ones"):
        restored(folder, state, verify_when="before")
    assert is_untouched(state)
    with pytest.raises(aiockpt.CorruptCheckpointError, match="so is the older one;"):
        restored(without(folder, 100), state, verify_when="before")
    with pytest.raises(aiockpt.CorruptCheckpointError, match="were filled by a load that failed"):
        restored(folder, state)
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


def test_newest_step_is_verified_first_if_an_older_one_lacks_a_tensor(anywhere: Path) -> None:
    """If the damaged step were loaded directly, the tensor that the older one lacks would keep its bytes."""
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        run.save(1, {"a": torch.ones(SIZE)})
        run.save(2, {"a": torch.full((SIZE,), 2.0), "b": torch.full((SIZE,), 2.0)})
        flip(anywhere, 2)
        state = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
        with pytest.warns(aiockpt.MissingKeysWarning), pytest.warns(aiockpt.DamagedCheckpointWarning):
            start = run.restore(state, strict=False)
    assert start is not None
    assert (start.step, state["a"].unique().tolist(), state["b"].unique().tolist()) == (1, [1.0], [0.0])


def test_newest_step_is_verified_first_if_an_older_one_has_other_shapes(anywhere: Path) -> None:
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        run.save(1, {"a": torch.ones(10)})
        run.save(2, {"a": torch.full((SIZE,), 2.0)})
        flip(anywhere, 2)
        state = {"a": torch.zeros(SIZE)}
        with pytest.raises(aiockpt.ShapeMismatchError):
            run.restore(state)
    assert state["a"].unique().tolist() == [0.0]
    assert names(anywhere) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["auto", "before"])
def test_requested_step_that_is_damaged_raises(folder: Path, verify: Any) -> None:
    flip(folder, 200)
    state = empty()
    with pytest.raises(aiockpt.CorruptCheckpointError):
        restored(folder, state, step=200, verify_when=verify)
    assert is_untouched(state)
    with pytest.raises(aiockpt.CheckpointNotFoundError, match="no step 250"):
        restored(folder, state, step=250)
    start = restored(folder, state, step=100, discard_later=False)
    assert start is not None
    assert step_in(state) == 100
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


def test_next_best_step_is_restored_if_the_best_is_damaged(folder: Path) -> None:
    flip(folder, 300)
    state = empty()
    with pytest.warns(aiockpt.DamagedCheckpointWarning):
        start = restored(folder, state, step="best", metric="loss")
    assert start is not None
    assert step_in(state) == 200


def test_reader_renames_nothing(folder: Path) -> None:
    flip(folder, 300)
    state = empty()
    with aiockpt.SyncCheckpointManager(folder, read_only=True) as run, pytest.warns(aiockpt.DamagedCheckpointWarning):
        start = run.restore(state)
    assert start is not None
    assert start.skipped[0].path == str(path_of(folder, 300))
    assert step_in(state) == 200
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


@LOCAL
@pytest.mark.parametrize("verify", ["auto", "before", "while"])
def test_io_error_marks_no_step_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch, verify: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", _failing(os.preadv))
        with pytest.raises(aiockpt.AiockptError) as caught:
            restored(folder, empty(), verify_when=verify)
    assert not isinstance(caught.value, aiockpt.CorruptCheckpointError)
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]
    start = restored(folder, empty())
    assert start is not None
    assert start.step == 300


def _failing(real: Any) -> Any:
    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".distcp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, *flags)

    return preadv


def test_mismatching_state_marks_no_step_damaged(folder: Path) -> None:
    state = empty()
    state["more"] = torch.zeros(3)
    with pytest.raises(aiockpt.MissingKeysError):
        restored(folder, state)
    state = empty()
    state["a"] = torch.zeros(3)
    with pytest.raises(aiockpt.ShapeMismatchError):
        restored(folder, state)
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


@LOCAL
def test_unreadable_older_step_does_not_block_the_newest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denying(real: Any) -> Any:
        def denied(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).startswith(str(path_of(folder, 200))):
                raise PermissionError(errno.EACCES, "denied", path)
            return real(path, *args, **options)

        return denied

    state = empty()
    with aiockpt.SyncCheckpointManager(folder) as run, monkeypatch.context() as patch:
        patch.setattr(os, "open", denying(os.open))
        patch.setattr(os, "scandir", denying(os.scandir))
        with pytest.raises(aiockpt.LoadError, match="denied"):
            run.restore(state, step=200)
        start = run.restore(state)
        assert start is not None
        assert (start.step, step_in(state), start.skipped) == (300, 300, ())
        flip(folder, 300)
        state = empty()
        with pytest.raises(aiockpt.LoadError, match="denied"):
            run.restore(state)
        with pytest.raises(aiockpt.AiockptError, match="denied"):
            run.restore(state, "best", metric="loss")
        assert is_untouched(state)
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


def test_empty_step_directory_is_skipped(tmp_path: Path) -> None:
    path_of(tmp_path, 7).mkdir()
    assert restored(tmp_path, empty()) is None
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        run.save(1, state_of(1))
    state = empty()
    with pytest.warns(aiockpt.DamagedCheckpointWarning, match="step 7"):
        start = restored(tmp_path, state)
    assert start is not None
    assert step_in(state) == 1
    assert names(tmp_path) == ["step-00000001", "step-00000007"]


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["auto", "before", "while"])
def test_step_of_a_later_format_version_is_not_marked_damaged(folder: Path, verify: Any) -> None:
    manifest = path_of(folder, 300) / ".aiockpt.json"
    body = body_of(manifest.read_bytes()).replace(b'"format_version": 1', b'"format_version": 9')
    manifest.write_bytes(sealed(body))
    with pytest.raises(aiockpt.LoadError, match="later version of aiockpt") as caught:
        restored(folder, empty(), verify_when=verify)
    assert not isinstance(caught.value, aiockpt.CorruptCheckpointError)
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


def test_options_of_load_are_passed_on(folder: Path) -> None:
    state = empty()
    state["more"] = torch.zeros(3)
    missing: list[str] = []
    with pytest.warns(aiockpt.MissingKeysWarning):
        start = restored(folder, state, strict=False, missing=missing)
    assert start is not None
    assert missing == ["more"]
    half = {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE)}
    start = restored(folder, half, keys=["a"])
    assert start is not None
    assert half["a"][0] == 300_000.0
    assert half["b"].unique().tolist() == [0.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": -1},
        {"step": "newest"},
        {"step": 1.5},
        {"verify_when": "no"},
        {"step": "best"},
        {"step": "best", "metric": 3},
    ],
)
def test_invalid_arguments_raise(folder: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        restored(folder, empty(), **arguments)


def test_live_objects_get_only_the_state_of_the_valid_step(anywhere: Path) -> None:
    model = torch.nn.Linear(100, 200)
    optim = torch.optim.AdamW(model.parameters())
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        for step in (1, 2):
            model(torch.ones(4, 100)).sum().backward()
            optim.step()
            run.save(step, {"model": model, "optim": optim})
            if step == 1:
                kept = {key: value.clone() for key, value in model.state_dict().items()}
        flip(anywhere, 2)
        with pytest.warns(aiockpt.DamagedCheckpointWarning):
            start = run.restore({"model": model, "optim": optim})
    assert start is not None
    assert start.step == 1
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    assert {float(each["step"]) for each in optim.state_dict()["state"].values()} == {1.0}


def test_step_deleted_during_the_search_is_skipped_silently(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = empty()
    with aiockpt.SyncCheckpointManager(folder) as run:
        found = [run._scanner.scan()]
        remove(path_of(folder, 300))
        real = run._scanner.scan
        monkeypatch.setattr(run._scanner, "scan", lambda **options: found.pop() if found else real(**options))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            start = run.restore(state)
    assert start is not None
    assert (start.step, start.skipped, step_in(state)) == (200, (), 200)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["open", "verify", "load"])
def test_reader_gets_the_newest_step_while_a_writer_deletes(
    anywhere: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Each step that the reader has listed is deleted before it is read, after a newer one was written."""
    state = empty()
    with (
        aiockpt.SyncCheckpointManager(anywhere, keep=aiockpt.KeepLatest(1)) as owner,
        aiockpt.SyncCheckpointManager(anywhere, read_only=True) as run,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        owner.save(1, state_of(1))
        left = [3, 2]

        def delete_and_call(method: str, call: Any, *args: Any, **options: Any) -> Any:
            if method == before and left:
                step = left.pop()
                owner.save(step, state_of(step))
                owner._retention.finished().result()
            return call(*args, **options)

        for name in ("load", "verify", "open"):
            monkeypatch.setattr(run.checkpointer, name, partial(delete_and_call, name, getattr(run.checkpointer, name)))
        start = run.restore(state)
    assert start is not None
    assert (start.step, start.skipped, step_in(state), names(anywhere)) == (3, (), 3, ["step-00000003"])


def test_what_is_returned_is_of_the_save_that_was_loaded(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the reader has listed is replaced before it is loaded."""
    state = empty()
    with (
        aiockpt.SyncCheckpointManager(anywhere) as owner,
        aiockpt.SyncCheckpointManager(anywhere, read_only=True) as run,
    ):
        owner.save(1, state_of(1), metrics={"n": 1})
        left, load = [3, 2], run.checkpointer.load

        def replace_and_load(*args: Any, **options: Any) -> Any:
            if left:
                n = left.pop()
                owner.save(1, state_of(n), metrics={"n": n}, overwrite=True)
            return load(*args, **options)

        monkeypatch.setattr(run.checkpointer, "load", replace_and_load)
        start = run.restore(state)
    assert start is not None
    assert (start.metrics, step_in(state), start.skipped) == ({"n": 3}, 3, ())


def test_search_gives_up_if_steps_are_deleted_faster_than_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with aiockpt.SyncCheckpointManager(folder) as run:
        found = run._scanner.scan()
        monkeypatch.setattr(run._scanner, "scan", lambda **_: found)
        remove(path_of(folder, 300))
        with pytest.raises(aiockpt.CheckpointNotFoundError, match="deleted faster than they could be read"):
            run.restore(empty())


def test_step_replaced_during_the_read_is_not_marked_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(folder, 300)
    state = empty()
    with aiockpt.SyncCheckpointManager(folder) as run:
        load = run.checkpointer.load

        def replace_after(*args: Any, **options: Any) -> None:
            try:
                load(*args, **options)
            except aiockpt.CorruptCheckpointError:
                run.save(300, state_of(300), overwrite=True)
                raise

        monkeypatch.setattr(run.checkpointer, "load", replace_after)
        start = run.restore(state)
    assert start is not None
    assert (start.step, start.skipped, step_in(state)) == (300, (), 300)
    assert names(folder) == ["step-00000100", "step-00000200", "step-00000300"]


def test_newest_step_is_verified_first_if_an_older_one_lacks_an_object(anywhere: Path) -> None:
    """Loading the older step raises, so it could not overwrite the tensors of the damaged one."""
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        run.save(1, {"a": torch.ones(SIZE)})
        run.save(2, {"a": torch.full((SIZE,), 2.0), "epoch": 2})
        flip(anywhere, 2)
        state = {"a": torch.zeros(SIZE), "epoch": 0}
        with pytest.raises(aiockpt.MissingKeysError):
            run.restore(state)
    assert (state["a"].unique().tolist(), state["epoch"]) == ([0.0], 0)


@LOCAL
def test_checkpoints_with_other_names_are_ignored(folder: Path) -> None:
    (folder / "step-00000300").rename(folder / "step-300")
    shutil.copytree(folder / "step-00000200", folder / "final")
    state = empty()
    start = restored(folder, state)
    assert start is not None
    assert start.step == 200
    assert len(tensors_of(state)) == 4


# --- steps after the restored one -----------------------------------------------------------------------------


def saved(folder: Path, *steps: int) -> None:
    with aiockpt.SyncCheckpointManager(folder) as run:
        for step in steps:
            run.save(step, state_of(step), {"loss": step})


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"step": 2}, {"step": "best", "metric": "loss", "mode": "min"}])
def test_restore_of_an_older_step_warns_at_once(anywhere: Path, choice: dict[str, Any]) -> None:
    saved(anywhere, 2, 3, 4)
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        with pytest.warns(UserWarning, match=r"step 2 of .*latest step, 4.*discard_later=True") as caught:
            start = run.restore(empty(), **choice)
        assert [each.filename for each in caught] == [__file__]
        assert start is not None
        assert start.step == 2
        assert run.restore(empty(), discard_later=False, **choice) == start
        run.restore(empty(), 4)
        run.restore(empty())
        assert run.steps() == [2, 3, 4]
    with aiockpt.SyncCheckpointManager(anywhere, read_only=True) as run:
        assert run.restore(empty(), **choice) == start  # nothing goes on from there
        with pytest.raises(ValueError, match="read_only=True"):
            run.restore(empty(), discard_later=True, **choice)


@pytest.mark.asyncio
async def test_later_steps_are_discarded(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    (tmp_path / "final").mkdir()
    (tmp_path / "step-00000009").mkdir()  # no checkpoint
    truncate(tmp_path, 4)
    held: Future[None] = Future()

    async def hold(_: str) -> None:
        await asyncio.wrap_future(held)

    async with aiockpt.CheckpointManager(tmp_path, keep=aiockpt.KeepLatest(1)) as run:
        run.pin(1)
        run.pin(2)
        await run.save(5, state_of(5), pre_commit=hold)  # in flight: it would be the latest step
        state = empty()
        restoring = asyncio.ensure_future(run.restore(state, 2, discard_later=True))
        asyncio.get_running_loop().call_soon(held.set_result, None)
        start = await restoring
        assert start is not None
        assert (start.step, step_in(state)) == (2, 2)
        assert run.steps() == [1, 2]
        await (await run.save(3, state_of(33)))
    assert names(tmp_path) == ["final", "step-00000001", "step-00000002", "step-00000003", "step-00000009"]
    (tmp_path / "step-00000009").rmdir()
    with aiockpt.SyncCheckpointManager(tmp_path) as again:
        assert again.restore(empty()).step == 3


def test_last_step_is_saved_anew_after_it_was_discarded(anywhere: Path) -> None:
    with aiockpt.SyncCheckpointManager(anywhere) as run:
        run.save(1, state_of(1))
        assert run.due(2, last=True)
        run.save(2, state_of(2))
        run.restore(empty(), 1, discard_later=True)
        assert run.due(2, last=True)
        run.save(2, state_of(22))
        assert run.steps() == [1, 2]


def test_failed_restore_discards_nothing(anywhere: Path) -> None:
    saved(anywhere, 1, 2)
    flip(anywhere, 1)
    with aiockpt.SyncCheckpointManager(anywhere) as run, pytest.raises(aiockpt.CorruptCheckpointError):
        run.restore(empty(), 1, discard_later=True)
    assert names(anywhere) == ["step-00000001", "step-00000002"]


def test_discarding_ends_at_the_step_that_stays(tmp_path: Path) -> None:
    """The newest goes first: what an interruption leaves is the run as it was up to one of the later steps."""
    saved(tmp_path, 1, 2, 3, 4)
    mine = path_of(tmp_path, 3) / "mine"
    mine.touch()
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        with pytest.raises(aiockpt.DeleteError, match=r"step 1 was restored, but step 3 .*mine"):
            run.restore(empty(), 1, discard_later=True)
        assert run.steps() == [1, 2, 3]
        mine.unlink()
        run.restore(empty(), 1, discard_later=True)
        assert run.steps() == [1]
