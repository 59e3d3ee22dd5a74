"""A run and its mirror: copied behind, caught up with, never in the way of training."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

import aiockpt
import aiockpt.observers
from aiockpt import CallEvent
from aiockpt.manager import mirror as mirroring
from aiockpt.manager.scan import scan
from aiockpt.storage import LocalStorage, WrapperStorage
from tests.manager.gates import Gate
from tests.manager.runs import flip, names, state_of
from tests.places import ServerPath, left_in, storage_of
from tests.polling import until

STATE = {"x": torch.arange(10.0)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(mirroring, "_LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(mirroring, "_PATIENCE_S", 0.1)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def there(anywhere: Path | ServerPath) -> Path | ServerPath:
    return anywhere / "there"


@pytest.fixture
def gate(there: Path | ServerPath) -> Iterator[Gate]:
    """A gate before the mirror, whose URL is gate://here."""
    made = Gate(storage_of(there), str(there))
    yield made
    made.is_away, made.holds = False, ""


def run_of(here: Path, there: Any, *keep: aiockpt.KeepPolicy, **options: Any) -> aiockpt.SyncCheckpointManager:
    return aiockpt.SyncCheckpointManager(here, keep=list(keep) or None, mirror=there, **options)


def steps(directory: Any) -> list[int]:
    return [info.step for info in scan(directory) if info.state == "complete"]


@pytest.mark.slow
def test_steps_are_mirrored(here: Path, there: Any) -> None:
    with run_of(here, there) as run:
        for step in (1, 2, 3):
            save = run.submit(step, state_of(step), metrics={"loss": float(step)})
            result = save.mirrored.result(60)
            assert result.path.endswith(f"step-0000000{step}")
            assert result.nbytes == result.sent_bytes > 0
        backlog = run.mirror_backlog
        assert backlog is not None
        assert (backlog.steps, backlog.newest, backlog.error) == ((), 3, None)
        assert run._repr_html_().count("<td>complete</td>") == 6  # in both
    assert steps(here) == steps(there) == [1, 2, 3]
    assert [each.save_id for each in scan(here)] == [each.save_id for each in scan(there)]
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(there / "step-00000003").ok


@pytest.mark.asyncio
async def test_await_in_asyncio(here: Path, there: Any) -> None:
    async with aiockpt.CheckpointManager(here, mirror=there) as run:
        save = await run.save(1, STATE)
        await save.staged
        await save.written
        assert (await save.mirrored).path == str(there / "step-00000001")


def test_closing_finishes_the_mirror(here: Path, there: Any) -> None:
    with run_of(here, there) as run:
        for step in (1, 2, 3):
            run.submit(step, STATE)
    assert steps(there) == [1, 2, 3]


@pytest.mark.slow
def test_mirror_has_a_policy_of_its_own(here: Path, there: Any) -> None:
    keep = [aiockpt.KeepLatest(2)]
    with run_of(here, aiockpt.Mirror(there, keep=aiockpt.KeepEvery(3), every=aiockpt.EverySteps(1)), *keep) as run:
        for step in range(1, 9):
            run.submit(step, STATE).mirrored.result(60)
    assert steps(here) == [7, 8]
    assert steps(there) == [3, 6, 8]


def test_mirror_every(here: Path, there: Any) -> None:
    with run_of(here, aiockpt.Mirror(there, every=aiockpt.EverySteps(3))) as run:
        saves = {step: run.submit(step, STATE) for step in range(1, 8)}
        with pytest.raises(aiockpt.SaveSkippedError, match="step 2 is not mirrored: `every` of the mirror says so"):
            saves[2].mirrored.result(60)
        saves[6].mirrored.result(60)
        assert steps(there) == [3, 6]
    assert steps(there) == [3, 6, 7]


def test_newest_step_is_mirrored_when_the_run_is_closed(here: Path, there: Any) -> None:
    with run_of(here, aiockpt.Mirror(there, every=aiockpt.EverySteps(10))) as run:
        saves = [run.submit(step, STATE) for step in range(1, 6)]
        assert isinstance(saves[-1].mirrored.exception(60), aiockpt.SaveSkippedError)
        assert run._mirror is not None
        call = run._mirror._task._call
        assert call is None or call.completion.result(60) is None  # it copies nothing more
    assert steps(there) == [5]


def test_mirror_behind_leaves_out_what_is_not_kept(here: Path, there: Any, gate: Gate) -> None:
    """The step that is being copied stays until it is; of those that wait, what is deleted is left out."""
    gate.holds = "commit"
    with run_of(here, "gate://here", aiockpt.KeepLatest(1)) as run:
        first = run.submit(1, STATE)
        gate.waits.result(60)
        saves = [run.submit(step, STATE) for step in (2, 3, 4)]
        saves[-1].written.result()
        run._retention.finished().result()
        assert steps(here) == [1, 4]
        gate.let_go._settle(None)
        first.mirrored.result(60)
        with pytest.raises(aiockpt.SaveSkippedError, match="step 2 is not mirrored: the policies keep later ones"):
            saves[0].mirrored.result(60)
        saves[-1].mirrored.result(60)
    assert steps(here) == steps(there) == [4]


def test_what_was_copied_of_a_step_that_is_left_out_is_removed(here: Path, there: Any, gate: Gate) -> None:
    gate.holds = "commit"
    with run_of(here, "gate://here", aiockpt.KeepLatest(1)) as run:
        run.submit(1, STATE)
        gate.waits.result(60)
        gate.is_away = True
        gate.let_go._settle(None)
        run.save(2, STATE)
        run._retention.finished().result()
        gate.is_away, gate.holds = False, ""
        run.submit(3, STATE).mirrored.result(60)
    left = left_in(str(there)) if isinstance(there, ServerPath) else names(there)
    assert [name for name in left if name.startswith(".aiockpt-") or "/files/" in name] == []
    assert steps(there) == [3]


class Apart(Gate):
    """Holds the tensors, while the other files are copied."""

    async def before(self, step: str, name: str) -> None:
        await super().before("finish of tensors" if (step, name) == ("finish", "__0_0.distcp") else step, name)
        self._check()


def test_files_of_the_user_that_were_copied_of_a_step_that_is_left_out(here: Path, there: Any) -> None:
    gate, heard = Apart(storage_of(there), str(there)), Heard()
    gate.holds = "finish of tensors"
    with run_of(here, "gate://here", aiockpt.KeepLatest(1), observers=[heard]) as run:
        run.submit(1, STATE, files={"notes": b"of the user"})
        gate.waits.result(60)
        run.save(2, STATE)
        run._retention.finished().result()
        gate.is_away = True
        gate.let_go._settle(None)
        assert heard.first.wait(20)
        gate.holds, gate.is_away = "", False
        run.submit(3, STATE).mirrored.result(20)
    left = left_in(str(there)) if isinstance(there, ServerPath) else names(there)
    assert [name for name in left if name.startswith(".aiockpt-") or "/files/" in name] == []
    assert steps(there)[-1] == 3


def test_step_that_is_saved_again_while_it_is_copied(here: Path, there: Any, gate: Gate) -> None:
    """`mirrored` of the later save waits for its own copy, not for that of the earlier one."""
    gate.holds = "commit"
    with run_of(here, "gate://here") as run:
        first = run.submit(1, STATE)
        gate.waits.result(60)
        second = run.submit(1, {"x": torch.arange(10.0) + 1}, overwrite=True)
        second.written.result()
        run._retention.finished().result()
        with pytest.raises(aiockpt.SaveSkippedError, match="saved again"):
            first.mirrored.result(60)
        let_go = gate.let_go
        gate.waits, gate.let_go = aiockpt.Completion("waits"), aiockpt.Completion("let go")
        let_go._settle(None)
        gate.waits.result(60)  # the copy of the second begins to be published
        was_done = second.mirrored.done()
        gate.let_go._settle(None)
        assert not was_done
        second.mirrored.result(60)
        assert [info.save_id for info in scan(here)] == [info.save_id for info in scan(there)]


@pytest.mark.slow
def test_required_steps_stay_while_the_mirror_does_not_answer(here: Path, there: Any, gate: Gate) -> None:
    """Those of an earlier manager, too, though nobody knows yet what the mirror has."""
    with aiockpt.SyncCheckpointManager(here) as run:
        for step in (1, 2, 3):
            run.save(step, STATE)
    gate.hangs = threading.Event()
    mirror = aiockpt.Mirror("gate://here", keep=aiockpt.KeepEvery(1), required=True)
    with run_of(here, mirror, aiockpt.KeepLatest(1)) as run:
        save = run.submit(4, STATE)
        save.written.result()
        run._retention.finished().result()
        left = steps(here)
        gate.hangs.set()
        save.mirrored.result(60)
        assert left == [1, 2, 3, 4]
    assert steps(there) == [1, 2, 3, 4]
    assert steps(here) == [4]


def test_required_steps_stay_until_they_are_mirrored(here: Path, there: Any, gate: Gate) -> None:
    gate.holds = "commit"
    mirror = aiockpt.Mirror("gate://here", keep=aiockpt.KeepEvery(1), required=True)
    with run_of(here, mirror, aiockpt.KeepLatest(1)) as run:
        saves = [run.submit(step, STATE) for step in (1, 2, 3)]
        saves[-1].written.result()
        run._retention.finished().result()
        assert steps(here) == [1, 2, 3]
        gate.let_go._settle(None)
        for save in saves:
            save.mirrored.result(60)
    assert steps(there) == [1, 2, 3]
    assert steps(here) == [3]


def test_pinned_step_is_mirrored(here: Path, there: Any, gate: Gate) -> None:
    gate.holds = "commit"
    with run_of(here, "gate://here", aiockpt.KeepLatest(1)) as run:
        run.submit(1, STATE)
        gate.waits.result(60)
        run.pin(2)
        saves = [run.submit(step, STATE) for step in (2, 3, 4)]
        saves[-1].written.result()
        run._retention.finished().result()
        gate.let_go._settle(None)
        saves[0].mirrored.result(60)
    assert steps(there) == [2, 4]


# --- when it fails --------------------------------------------------------------------------------------


class Unreadable(WrapperStorage):
    """The disk fails to read the first step."""

    async def before(self, step: str, name: str) -> None:
        if step == "open" and name.endswith("step-00000001"):
            raise aiockpt.LoadError("can't read it: Input/output error")


def test_step_that_can_not_be_read_holds_up_no_other(here: Path, there: Any) -> None:
    with run_of(here, there, storage=Unreadable(LocalStorage())) as run:
        run.submit(1, STATE)
        for step in (2, 3):
            run.submit(step, STATE).mirrored.result(20)
        assert run.mirror_backlog is not None
        assert run.mirror_backlog.steps == (1,)
    assert steps(there) == [2, 3]


class Broken(Gate):
    """A step of the mirror can't be looked at."""

    def look(self, path: str, budget: Any = None) -> Any:
        if path.endswith("step-00000002") and self.is_away:
            raise OSError(5, "Input/output error", path)
        return super().look(path, budget)

    def _check(self) -> None:
        return


@pytest.mark.slow
def test_step_of_the_mirror_that_can_not_be_read_holds_up_no_other(here: Path, there: Any) -> None:
    gate = Broken(storage_of(there), str(there))
    with run_of(here, "gate://here") as run:
        for step in (1, 2, 3):
            run.submit(step, STATE).mirrored.result(60)
    before = scan(there)
    gate.is_away = True
    with run_of(here, "gate://here") as run:
        for step in (4, 5):
            run.submit(step, STATE).mirrored.result(20)
        assert _within(lambda: run.mirror_backlog is not None and run.mirror_backlog.error is not None)
        assert run.mirror_backlog is not None
        assert run.mirror_backlog.steps == (2,)
        assert "step-00000002 of the mirror: it can't be read" in str(run.mirror_backlog.error)
        gate.is_away = False
        assert _within(lambda: run.mirror_backlog is not None and run.mirror_backlog.steps == ())
    assert scan(there)[:3] == before  # it was whole, and was not replaced
    assert steps(there) == [1, 2, 3, 4, 5]


def test_step_that_is_pinned_while_the_mirror_deletes_others_stays(here: Path, there: Any, gate: Gate) -> None:
    with run_of(here, aiockpt.Mirror("gate://here", keep=aiockpt.KeepLatest(4)), aiockpt.KeepLatest(1)) as run:
        for step in (1, 2, 3, 4):
            run.submit(step, STATE).mirrored.result(60)
    gate.holds = "delete"
    with run_of(here, aiockpt.Mirror("gate://here", keep=aiockpt.KeepLatest(1)), aiockpt.KeepLatest(1)) as run:
        run.submit(5, STATE).mirrored.result(60)
        gate.waits.result(60)  # of the first
        run.pin(3)
        gate.let_go._settle(None)
    assert steps(there) == [3, 5]


def _within(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Wait until a condition holds; return whether it does in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.01)
    return True


class Heard(aiockpt.Observer):
    def __init__(self) -> None:
        self.events: list[tuple[CallEvent, Any, Any]] = []
        self.first = threading.Event()

    def mirrored(self, event: CallEvent, result: Any, backlog: Any) -> None:
        self.events.append((event, result, backlog))
        self.first.set()


def test_store_that_is_away_holds_nothing_and_is_caught_up_with(here: Path, there: Any, gate: Gate) -> None:
    heard = Heard()
    with run_of(here, "gate://here", aiockpt.KeepLatest(2), observers=[heard]) as run:
        run.submit(1, STATE).mirrored.result(60)
        gate.is_away = True
        saves = [run.submit(step, STATE) for step in range(2, 9)]
        for save in saves:
            save.written.result()
        run._retention.finished().result()
        assert steps(here) == [7, 8]
        with pytest.raises(TimeoutError):
            saves[-1].mirrored.result(0.1)
        assert run._repr_html_().count("<td>waits</td>") == 2
        backlog = run.mirror_backlog
        assert backlog is not None
        assert (backlog.steps, backlog.newest, type(backlog.error)) == ((7, 8), 1, ConnectionRefusedError)
        assert backlog.nbytes == sum(info.nbytes for info in scan(here))
        gate.is_away = False
        assert saves[-1].mirrored.result(60).nbytes
        assert run.mirror_backlog.steps == ()  # type: ignore[union-attr]
        assert run.mirror_backlog.error is None  # type: ignore[union-attr]
        with pytest.raises(aiockpt.SaveSkippedError):
            saves[0].mirrored.result(60)
    assert steps(there) == [7, 8]
    assert [result.path[-1] for _, result, _ in heard.events if result] == ["1", "7", "8"]


def test_metrics_show_the_backlog(here: Path, there: Any, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    observers = [aiockpt.observers.PrometheusObserver(registry), aiockpt.observers.LoggingObserver()]
    caplog.set_level(logging.INFO)
    with run_of(here, "gate://here", observers=observers, drain_timeout=0.1) as run:
        result = run.submit(1, STATE).mirrored.result(60)
        gate.is_away = True
        run.save(2, STATE)
    found = {name: registry.get_sample_value(f"aiockpt_mirror_{name}") for name in ("backlog_steps", "backlog_bytes")}
    assert found == {"backlog_steps": 1.0, "backlog_bytes": float(scan(here)[1].nbytes)}
    assert registry.get_sample_value("aiockpt_mirrors_total", {"outcome": "done"}) == 1.0
    assert (registry.get_sample_value("aiockpt_mirrors_total", {"outcome": "failed"}) or 0.0) >= 1.0
    assert registry.get_sample_value("aiockpt_mirrored_bytes_total") == result.nbytes
    assert (registry.get_sample_value("aiockpt_mirror_newest_timestamp_seconds") or 0.0) > 1e9
    assert f"mirrored {there / 'step-00000001'}: " in caplog.text
    assert "was not mirrored: [Errno 111]" in caplog.text


def test_closing_says_what_is_not_mirrored(
    here: Path, there: Any, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.is_away = True
    with run_of(here, "gate://here") as run:
        save = run.submit(1, STATE)
        save.written.result()
    with pytest.raises(aiockpt.SaveError, match="step 1 is not mirrored: the manager was closed"):
        save.mirrored.result(60)
    assert "lacks step 1 of" in caplog.text
    gate.is_away = False
    with run_of(here, "gate://here"):
        pass
    assert steps(there) == [1]


def test_closing_waits_no_longer_than_the_drain_timeout(here: Path, there: Any, gate: Gate) -> None:
    gate.holds = "commit"
    with run_of(here, "gate://here", drain_timeout=0.3) as run:
        save = run.submit(1, STATE)
        gate.waits.result(60)
    assert isinstance(save.mirrored.exception(0), aiockpt.SaveError)
    gate.holds = ""
    gate.steps.clear()
    with run_of(here, "gate://here"):
        pass
    assert steps(there) == [1]
    assert ("create", "__0_0.distcp") not in gate.steps  # it was whole


@pytest.mark.parametrize("fails", [True, False])
def test_closing_says_what_it_waits_for(
    here: Path, there: Any, gate: Gate, fails: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a Ctrl-C: without a word, the program would seem to hang."""
    monkeypatch.setattr("aiockpt.manager.base._QUIET_S", 0.0)
    gate.holds = "commit"

    def let_go() -> None:
        assert _within(lambda: "closing waits" in caplog.text)
        gate.let_go._settle(None)

    watching = threading.Thread(target=let_go)
    watching.start()
    try:
        with run_of(here, "gate://here", drain_timeout=100) as run:
            save = run.submit(1, STATE)
            gate.waits.result(60)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    watching.join()
    assert save.mirrored.result(0)
    text = rf"closing waits until step 1 of {here} is mirrored to \S+, for \d+ s at most; a second Ctrl-C ends that"
    assert len(re.findall(text, caplog.text)) == 1


def test_second_ctrl_c_ends_closing(here: Path, there: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.holds = "commit"
    with monkeypatch.context() as patched:
        patched.setattr("aiockpt.manager.base._QUIET_S", 0.0)
        patched.setattr(mirroring.MirrorCopier, "log_wait", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), run_of(here, "gate://here", drain_timeout=1e9) as run:
            save = run.submit(1, STATE)
            gate.waits.result(60)
            raise KeyboardInterrupt
    assert isinstance(save.mirrored.exception(0), aiockpt.SaveError)
    gate.holds = ""
    with run_of(here, "gate://here"):  # goes on
        pass
    assert steps(there) == [1]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_mirror_that_closing_cuts_off_is_no_unretrieved_error(here: Path, there: Any, gate: Gate) -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    gate.holds = "commit"
    async with aiockpt.CheckpointManager(here, mirror="gate://here", drain_timeout=0.3) as run:
        save = await run.save(1, STATE)
        await asyncio.wait_for(asyncio.wrap_future(gate.waits), 60)
    assert isinstance(save.mirrored.exception(0), aiockpt.SaveError)
    gc.collect()  # asyncio says so when the future goes
    await asyncio.sleep(0)
    assert heard == []
    gate.holds = ""
    async with aiockpt.CheckpointManager(here, mirror="gate://here"):
        pass
    assert steps(there) == [1]


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_does_not_wait_for_a_mirror_without_need(
    here: Path, there: Any, gate: Gate, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "_PATIENCE_S", 1e9)
    monkeypatch.setattr(mirroring, "_END_S", 0.1)
    monkeypatch.setattr("aiockpt.engine.engine.CANCEL_GRACE_S", 0.3)
    gate.is_away, gate.hangs = True, threading.Event() if hangs else None
    with run_of(here, aiockpt.Mirror("gate://here", timeout=0.1), drain_timeout=1e9) as run:
        with pytest.raises(aiockpt.LoadError, match="can't be read"):
            run.restore(dict(STATE))
        until(lambda: run._mirror and run._mirror._state.has_looked)
    if gate.hangs is not None:
        gate.hangs.set()
        for thread in threading.enumerate():
            if thread.name.startswith("aiockpt"):
                thread.join(20)


def test_closing_does_not_wait_long_for_a_mirror_that_can_not_be(
    here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "_PATIENCE_S", 1e9)
    (tmp_path / "file").write_bytes(b"")
    with run_of(here, tmp_path / "file" / "there", drain_timeout=1e9) as run:
        run.submit(1, STATE)
    assert "lacks step 1 of" in caplog.text
    assert "Not a directory" in caplog.text


def test_damaged_step_is_not_mirrored(here: Path, there: Any, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with run_of(here, "gate://here") as run:
        run.submit(1, state_of(1)).mirrored.result(60)
        gate.is_away = True
        save = run.submit(2, state_of(2))
        save.written.result()
        flip(here, 2)
        gate.is_away = False
        with pytest.raises(aiockpt.CorruptCheckpointError, match="does not match its CRC"):
            save.mirrored.result(60)
        assert run.submit(3, state_of(3)).mirrored.result(60)
    assert steps(there) == [1, 3]
    (record,) = [each for each in caplog.records if "step 2 is not mirrored, as it is damaged" in each.getMessage()]
    assert record.exc_info is None


def test_damage_that_is_found_before_the_end_of_the_save_is_noted(here: Path, there: Any) -> None:
    heard = Heard()
    with aiockpt.SyncCheckpointManager(here) as run:
        saved = run.submit(1, state_of(1))
    flip(here, 1)
    with run_of(here, there, observers=[heard]) as run:
        run.submit(2, STATE).mirrored.result(60)
        assert isinstance(heard.events[0][0].error, aiockpt.CorruptCheckpointError)
        assert run._mirror is not None
        mirrored = run._mirror.promises.make(1, saved, time.time())
        run._mirror.note_end(1, saved)
        assert isinstance(mirrored.exception(60), aiockpt.CorruptCheckpointError)


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_step_that_is_copied_and_deleted_before_the_end_of_the_save_is_noted(is_same, here: Path, there: Any) -> None:
    with run_of(here, aiockpt.Mirror(there, keep=aiockpt.KeepEvery(1)), aiockpt.KeepLatest(1)) as run:
        saved = run.submit(1, state_of(1))
        saved.mirrored.result(60)
        (info,) = scan(there)
        run.submit(2, STATE).mirrored.result(60)
        run._retention.finished().result()
        assert (steps(here), steps(there)) == ([2], [1, 2])
        assert run._mirror is not None
        mirrored = run._mirror.promises.make(1, saved, info.time if is_same else info.time + 1)
        run._mirror.note_end(1, saved)
        if is_same:
            assert mirrored.result(60).path == info.path
        else:
            assert isinstance(mirrored.exception(60), aiockpt.SaveSkippedError)


class Timed(Gate):
    """Its errors say how long a request has taken."""

    def _check(self) -> None:
        if self.is_away:
            self.steps.append(("fails", ""))
            raise OSError(f"no answer in {len(self.steps) * 1.5}{('ms', 's')[len(self.steps) % 2]} - refused")


def test_equal_errors_are_logged_once(here: Path, there: Any, caplog: pytest.LogCaptureFixture) -> None:
    gate, heard = Timed(storage_of(there), str(there)), Heard()
    gate.is_away = True
    with run_of(here, "gate://here", observers=[heard]) as run:
        save = run.submit(1, STATE)
        until(lambda: len(heard.events) >= 4)
        gate.is_away = False
        save.mirrored.result(60)
    assert caplog.text.count("can't be mirrored to") == 1


def test_mirror_that_is_removed_is_made_again(here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = tmp_path / "there"
    with run_of(here, there) as run:
        run.submit(1, STATE).mirrored.result(60)
        there.rename(tmp_path / "removed")  # at once, as it may be looked at just now
        run.submit(2, STATE).mirrored.result(60)
    assert steps(there)[-1] == 2
    assert f"the mirror {there}, or its lock, was removed" in caplog.text
    assert "nothing was saved" not in caplog.text


def test_failed_save_fails_mirrored_too(here: Path, there: Any) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("refused")

    with run_of(here, there, on_failure="warn") as run:
        save = run.submit(1, STATE, pre_commit=refuse)
        with pytest.raises(aiockpt.SaveError, match="refused"):
            save.mirrored.result(60)
        assert run.submit(2, STATE).mirrored.result(60)


def test_two_trainers_on_one_mirror(tmp_path: Path, there: Any) -> None:
    with run_of(tmp_path / "a", there) as one:
        one.submit(1, STATE).mirrored.result(60)
        with run_of(tmp_path / "b", there) as other:
            save = other.submit(2, STATE)
            save.written.result()
            with pytest.raises(aiockpt.RunLockedError):
                save.mirrored.result(60)
            assert one.submit(3, STATE).mirrored.result(60)
    assert steps(there) == [1, 3]


@pytest.mark.slow
def test_mirror_of_another_run_is_refused(here: Path, tmp_path: Path, there: Any) -> None:
    """Its steps would be replaced by those of equal numbers."""
    with run_of(here, there) as run:
        run.submit(1, state_of(1)).mirrored.result(60)
    with run_of(tmp_path / "other", there) as run:
        save = run.submit(1, state_of(2))
        with pytest.raises(aiockpt.RunLockedError, match=r"has step 1 of another run than .*pass another mirror="):
            save.mirrored.result(60)
        with pytest.raises(aiockpt.LoadError, match=r"another run .*Nothing was restored"):
            run.restore(state_of(0))
    assert scan(there)[0].save_id == scan(here)[0].save_id
    with run_of(here, there) as run:
        run.submit(2, state_of(2)).mirrored.result(60)
    with run_of(tmp_path / "other", tmp_path / "other-mirror") as run:
        run.submit(2, state_of(2)).mirrored.result(60)
    assert len({info.run_id for info in (*scan(here), *scan(there))}) == 1
    assert len({info.run_id for info in (*scan(tmp_path / "other"), *scan(tmp_path / "other-mirror"))}) == 1


@pytest.mark.slow
def test_run_that_goes_on_from_its_mirror_is_the_same_run(tmp_path: Path, there: Any) -> None:
    """On an empty disk, and then on the first one again."""
    with run_of(tmp_path / "old", there) as run:
        run.submit(1, state_of(1)).mirrored.result(60)
    with run_of(tmp_path / "new", there) as run:
        assert run.restore(state_of(0))
        run.submit(2, state_of(2)).mirrored.result(60)
    with run_of(tmp_path / "old", there) as run:
        found = run.restore(state_of(0))
        assert found is not None
        assert found.step == 2
        run.submit(3, state_of(3)).mirrored.result(60)
    assert steps(there) == [1, 2, 3]
    assert len({info.run_id for info in (*scan(tmp_path / "old"), *scan(there))}) == 1


def test_number_that_is_saved_again(here: Path, there: Any) -> None:
    with run_of(here, there) as run:
        run.submit(1, STATE).mirrored.result(60)
        first = scan(there)[0].save_id
        run.submit(1, {"x": torch.ones(5)}, overwrite=True).mirrored.result(60)
    assert scan(there)[0].save_id == scan(here)[0].save_id != first


@pytest.mark.parametrize("how", ["overwritten", "deleted"])
def test_step_that_is_replaced_while_it_is_copied_is_no_damage(
    here: Path, there: Any, gate: Gate, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate.holds = "create"
    with run_of(here, "gate://here") as run:
        first = run.submit(1, state_of(1))
        gate.waits.result(60)
        if how == "overwritten":
            second = run.submit(1, {"x": torch.ones(5)}, overwrite=True)
        else:
            run.checkpointer.delete(here / "step-00000001")
            second = run.submit(2, {"x": torch.ones(5)})
        second.written.result(60)
        gate.let_go._settle(None)
        second.mirrored.result(60)
        error = first.mirrored.exception(60)
    assert isinstance(error, aiockpt.SaveSkippedError) if how == "overwritten" else error is None
    assert [info.save_id for info in scan(there)][-1] == scan(here)[-1].save_id
    assert "damaged" not in caplog.text


def test_older_copy_of_a_number_does_not_replace_a_later_one(tmp_path: Path, there: Any) -> None:
    """A node comes back whose disk has a step of before the run went on elsewhere."""
    with run_of(tmp_path / "old", there) as run:
        run.submit(4, STATE).mirrored.result(60)
    with aiockpt.SyncCheckpointManager(tmp_path / "old") as run:
        run.save(5, STATE)
    with run_of(tmp_path / "new", there) as run:
        assert run.restore(dict(STATE))
        run.submit(5, {"x": torch.ones(5)}).mirrored.result(60)
    later = scan(there)[1].save_id
    with run_of(tmp_path / "old", there) as run:
        run.submit(6, STATE).mirrored.result(60)
    assert scan(there)[1].save_id == later
    assert steps(there) == [4, 5, 6]


def test_what_is_whole_is_left_alone_at_the_next_start(here: Path, there: Any, gate: Gate) -> None:
    with run_of(here, "gate://here") as run:
        run.submit(1, STATE).mirrored.result(60)
    gate.steps.clear()
    with run_of(here, "gate://here"):
        pass
    assert [step for step, _ in gate.steps if step not in ("clean", "open", "read")] == []


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one must not be in the other"):
        aiockpt.SyncCheckpointManager(tmp_path / "a", mirror=tmp_path / "a" / "b")
    with pytest.raises(ValueError, match="mirror_keep: these are for a mirror"):
        aiockpt.SyncCheckpointManager(tmp_path / "a", mirror_keep=aiockpt.KeepLatest(1))
    with aiockpt.SyncCheckpointer() as ckpt:
        handle = ckpt.submit(STATE, tmp_path / "c")
        with pytest.raises(aiockpt.AiockptError, match="has no `mirrored`"):
            handle.mirrored  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"bandwidth": 0}, ValueError, "bandwidth= of a mirror must be positive"),
        ({"timeout": 0}, ValueError, "timeout= of a mirror must be positive"),
        ({"every": 3}, TypeError, r"every= of a mirror must be a policy such as EverySteps\(100\), not 3"),
        ({"keep": 3}, TypeError, "keep"),
        ({"required": "no"}, TypeError, "required= of a mirror must be True or False, not 'no'"),
        ({"ephemeral": "no"}, TypeError, "ephemeral= of a mirror must be True or False"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], error: type[Exception], message: str, there: Any) -> None:
    with pytest.raises(error, match=message):
        aiockpt.Mirror(there, **settings)


FLAT = {
    "keep": aiockpt.KeepLatest(2),
    "every": aiockpt.EverySteps(3),
    "bandwidth": 4e6,
    "timeout": 3.0,
    "required": True,
    "ephemeral": True,
}


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("grouped", [False, True])
def test_flat_options_are_those_of_the_mirror_for_now(name: str, grouped: bool, tmp_path: Path) -> None:
    mirror: Any = aiockpt.Mirror(tmp_path / "b", timeout=7.0) if grouped else tmp_path / "b"
    options: Any = {"mirror": mirror, f"mirror_{name}": FLAT[name]}
    with pytest.warns(
        DeprecationWarning, match=rf"mirror_{name}: pass mirror=aiockpt.Mirror\(DIRECTORY, {name}="
    ) as warned:
        run = aiockpt.SyncCheckpointManager(tmp_path / "a", **options)
    assert warned[0].filename == __file__
    expected = aiockpt.Mirror(tmp_path / "b", **({"timeout": 7.0} if grouped else {}) | {name: FLAT[name]})  # type: ignore[arg-type]
    assert run._tiers.options == expected
    run.close()


@pytest.mark.parametrize("options", [{"format": "safetensors"}, {"compress": "zstd"}, {"files": {"notes.txt": b"a"}}])
def test_every_format_is_mirrored(here: Path, there: Any, options: dict[str, Any]) -> None:
    state = {f"t{number}": torch.randn(1000) for number in range(3)}
    with run_of(here, there) as run:
        run.submit(1, state, **options).mirrored.result(60)
        run.checkpointer.delete(here / "step-00000001")
        target = {key: torch.zeros(1000) for key in state}
        found = run.restore(target)
        assert found is not None
        assert found.path == str(there / "step-00000001")
        assert all(torch.equal(target[key], state[key]) for key in state)
        assert run.checkpointer.verify(there / "step-00000001").ok


def test_run_in_a_store_with_a_mirror_in_a_directory(tmp_path: Path, server_url: str) -> None:
    here, there = ServerPath(f"{server_url}/run"), tmp_path / "there"
    with run_of(here, there, aiockpt.KeepLatest(1)) as run:  # type: ignore[arg-type]
        for step in (1, 2):
            run.submit(step, STATE).mirrored.result(60)
    assert steps(here) == steps(there) == [2]


def test_notice_of_an_ephemeral_directory_includes_the_mirror(here: Path, there: Any) -> None:
    for is_ephemeral in (False, True):
        with run_of(here, aiockpt.Mirror(there, ephemeral=is_ephemeral)) as run:
            assert run._mirror is not None
            assert run._mirror.expected_s() == 0.0
            step = 2 + is_ephemeral
            run.submit(step, STATE).mirrored.result(60)
            (took_s,) = run._mirror._state.took_s
            assert took_s > 0
            assert run._mirror.expected_s() in (took_s, 2 * took_s)
            run._mirror._state.took_s.append(1000.0)
            run.request_last_save(grace_s=500)
            assert run.due(step + 10) is not is_ephemeral
            assert run.stopping


def test_closing_mirrors_the_newest_first(here: Path, there: Any, gate: Gate) -> None:
    gate.holds = "resume"
    run = run_of(here, "gate://here")
    for step in range(1, 5):
        run.save(step, STATE)
    gate.waits.result(60)
    closing = threading.Thread(target=run.close)
    closing.start()
    while not run._mirror._task.is_closing:  # type: ignore[union-attr]
        closing.join(0.01)
    gate.let_go._settle(None)
    closing.join(60)
    begun = [Path(name).name for step, name in gate.steps if step == "resume"]
    assert begun == [f"step-0000000{step}" for step in (1, 4, 3, 2)]


def test_garbage_collected_manager_leaves_no_thread_and_no_lock(here: Path, there: Any) -> None:
    ckpt = aiockpt.SyncCheckpointer()
    run = run_of(here, there, checkpointer=ckpt)
    run.submit(1, STATE).mirrored.result(60)
    run._retention.finished().result()
    threads = [each for each in threading.enumerate() if each.name.startswith(("aiockpt-mirror", "aiockpt-retention"))]
    assert len(threads) > 1
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        del run
        for thread in threads:
            while thread.is_alive():  # the engine may hold the last copy for a moment
                gc.collect()
                thread.join(0.01)
    assert [str(each.message)[:30] for each in heard] == ["unclosed manager with a mirror"]
    ckpt.close()
    with run_of(here, there) as again:
        assert again.submit(2, STATE).mirrored.result(60)


@pytest.mark.slow
def test_bandwidth(here: Path, there: Any) -> None:
    with run_of(here, aiockpt.Mirror(there, bandwidth=4e6)) as run:
        result = run.submit(1, {"x": torch.zeros(1_000_000)}).mirrored.result(60)
    assert result.mirrored_s > 0.5  # what is sent within a second goes at once


def test_steps_without_a_manifest_stay_where_they_are(here: Path, there: Any) -> None:
    """Nothing says which bytes are theirs."""
    with aiockpt.SyncCheckpointManager(here) as run:
        run.save(1, STATE)
    (here / "step-00000001" / ".aiockpt.json").unlink()
    with run_of(here, there) as run:
        run.submit(2, STATE).mirrored.result(60)
    assert steps(here) == [1, 2]
    assert steps(there) == [2]
