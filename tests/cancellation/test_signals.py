"""Interrupted and terminated programs: saves in flight are finished first, or leave nothing."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import aiockpt
from tests.cancellation import children
from tests.cancellation.children import Child
from tests.cancellation.moments import MOMENTS, state_of
from tests.cancellation.stops import Writer
from tests.ranks.world import Loop
from tests.states import assert_same
from tests.writing.gates import Gate, ended, writers_of

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def assert_written(runs: Path, moment: str) -> None:
    """Assert that the saves in flight were written, and nothing else."""
    front = set() if MOMENTS[moment].step else {"front"}
    assert {entry.name for entry in runs.iterdir()} == {"c", *front}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(state_of(1), ckpt.load(runs / "c"))
        assert all(ckpt.verify(runs / name).ok for name in front)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "loop", "writer"),
    [
        ("captured", "asyncio", "thread"),
        ("pool", "uvloop", "thread"),
        ("staging", "asyncio", "thread"),
        ("writing", "uvloop", "thread"),
        ("inside a write", "asyncio", "thread"),
        ("committing", "uvloop", "thread"),
        ("staging", "uvloop", "process"),
        ("writing", "asyncio", "process"),
    ],
)
def test_ctrl_c_cancels_the_waiting_task_and_the_save_is_finished(
    moment: str, loop: Loop, writer: Writer, runs: Path
) -> None:
    with Child(children.awaits, runs, moment, loop, writer) as child:
        child.expect("held")
        child.signal(signal.SIGINT)
        child.expect("cancelled")  # leaving `async with` waits for the save
        child.release()
        child.expect("KeyboardInterrupt")
        assert child.exit_code() == 1
    assert_written(runs, moment)


@pytest.mark.parametrize(("moment", "loop"), [("staging", "asyncio"), ("writing", "uvloop"), ("committing", "asyncio")])
def test_a_second_ctrl_c_leaves_the_block_and_the_exit_waits_for_the_save(moment: str, loop: Loop, runs: Path) -> None:
    with Child(children.awaits, runs, moment, loop) as child:
        child.expect("held")
        child.signal(signal.SIGINT)
        child.expect("cancelled")
        child.signal(signal.SIGINT)
        child.expect("KeyboardInterrupt")
        assert not (runs / "c").exists()
        child.release()
        assert child.exit_code() == 1
    assert_written(runs, moment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "writer"),
    [("captured", "thread"), ("inside a write", "thread"), ("committing", "process")],
)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_synchronous_program(moment: str, writer: Writer, times: int, runs: Path) -> None:
    """The first ends the wait, and closing finishes the save; a second ends closing, and the exit finishes the save."""
    with Child(children.blocks, runs, moment, writer=writer) as child:
        child.expect("held")
        child.signal(signal.SIGINT)
        child.expect("closing")
        if times == 2:
            child.signal(signal.SIGINT)
            child.expect("KeyboardInterrupt")
            assert not (runs / "c").exists()
        child.release()
        if times == 1:
            child.expect("KeyboardInterrupt")
        assert child.exit_code() == 1
    assert_written(runs, moment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "moment", "loop", "writer"),
    [
        (children.is_terminated, "captured", "uvloop", "thread"),
        (children.is_terminated, "committing", "asyncio", "thread"),
        (children.closes, "pool", "uvloop", "thread"),
        (children.closes, "syncing", "asyncio", "process"),
        (children.blocks, "staging", "asyncio", "thread"),
        (children.blocks, "writing", "asyncio", "process"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_sigterm_and_closing_finish_the_save(
    program: children.Program, moment: str, loop: Loop, writer: Writer, runs: Path
) -> None:
    """The save ends long before ``drain_timeout``."""
    with Child(program, runs, moment, loop, writer) as child:
        child.expect("held")
        child.signal(signal.SIGTERM)
        child.expect("cancelled" if program is children.is_terminated else "closing")
        child.release()
        if program is children.is_terminated:
            child.expect("CancelledError")
        assert child.exit_code() == _EXIT_CODES[program][0]
    assert_written(runs, moment)


_EXIT_CODES = {children.is_terminated: (1, 1), children.closes: (0, 3), children.blocks: (143, 143)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "moment"),
    [
        (children.is_terminated, "captured"),
        (children.is_terminated, "staging"),
        (children.is_terminated, "writing"),
        (children.closes, "pool"),
        (children.closes, "syncing"),
        (children.blocks, "staging"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_after_the_drain_timeout_nothing_is_left_and_the_process_ends(
    program: children.Program, moment: str, runs: Path
) -> None:
    with Child(program, runs, moment, drain_timeout=0.05) as child:
        child.expect("held")
        child.signal(signal.SIGTERM)
        child.expect("cancelled" if program is children.is_terminated else "closing")
        if program is children.is_terminated:
            child.expect("CancelledError", _note(runs, moment))
        elif program is children.closes:
            child.expect("gave up", True, True)
        assert child.exit_code() == _EXIT_CODES[program][1]
    assert list(runs.iterdir()) == []


def _note(runs: Path, moment: str) -> str:
    paths = [runs / "c"] if MOMENTS[moment].step else [runs / "front", runs / "c"]
    return (
        f"closing the checkpointer also failed: the save of {', '.join(map(str, paths))} was not done after "
        "drain_timeout = 0.05 s and was cancelled; nothing of it is left"
    )


@pytest.mark.parametrize("moment", ["staging", "committing"])
def test_sigterm_without_a_handler_kills_the_process_and_frees_the_path(moment: str, runs: Path) -> None:
    with Child(children.awaits, runs, moment) as child:
        child.expect("held")
        child.signal(signal.SIGTERM)
        assert child.exit_code() == -signal.SIGTERM
    assert not (runs / "c").exists()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state_of(2), runs / "c")
        assert_same(state_of(2), ckpt.load(runs / "c"))
    for left in runs.glob(".aiockpt-*"):  # of the killed process
        shutil.rmtree(left)


def test_a_writer_process_goes_on_when_sigterm_kills_the_trainer(runs: Path) -> None:
    """The writer process writes the staged save, then ends; see tests.writing for the other moments."""
    with Child(children.awaits, runs, "syncing", "uvloop", "process") as child:
        child.expect("held")
        (writer,) = writers_of(child.pid)
        child.signal(signal.SIGTERM)
        assert child.exit_code() == -signal.SIGTERM
    (gate,) = runs.parent.glob("gate-*")
    Gate.of(gate).open()
    assert ended(writer.pid)
    assert_written(runs, "syncing")
