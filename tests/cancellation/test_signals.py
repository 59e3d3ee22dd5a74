"""Programs that are interrupted or terminated: what is in flight is written first, or nothing of it is left."""

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
from tests.ranks.world import Loop, start_server
from tests.states import assert_same
from tests.writing.gates import Gate, ended, writers_of


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Start what children are forked from before file descriptors and children are counted."""
    start_server()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def assert_written(runs: Path, moment: str) -> None:
    """All that was in flight is there, and nothing else."""
    front = set() if MOMENTS[moment].step else {"front"}
    assert {entry.name for entry in runs.iterdir()} == {"c", *front}
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(state_of(1), ckpt.load(runs / "c"))
        assert all(ckpt.verify(runs / name).ok for name in front)


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
def test_ctrl_c_goes_to_who_awaits_and_the_save_is_finished(
    moment: str, loop: Loop, writer: Writer, runs: Path
) -> None:
    with Child(children.awaits, runs, moment, loop, writer) as child:
        child.says("held")
        child.signal(signal.SIGINT)
        child.says("cancelled")  # it leaves `async with`, which waits
        child.let_go()
        child.says("KeyboardInterrupt")
        assert child.ends() == 1
    assert_written(runs, moment)


@pytest.mark.parametrize(("moment", "loop"), [("staging", "asyncio"), ("writing", "uvloop"), ("committing", "asyncio")])
def test_a_second_ctrl_c_leaves_the_block_and_the_end_of_the_program_waits(moment: str, loop: Loop, runs: Path) -> None:
    with Child(children.awaits, runs, moment, loop) as child:
        child.says("held")
        child.signal(signal.SIGINT)
        child.says("cancelled")
        child.signal(signal.SIGINT)
        child.says("KeyboardInterrupt")
        assert not (runs / "c").exists()
        child.let_go()
        assert child.ends() == 1
    assert_written(runs, moment)


@pytest.mark.parametrize(
    ("moment", "writer"),
    [("captured", "thread"), ("inside a write", "thread"), ("committing", "process")],
)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_plain_program(moment: str, writer: Writer, times: int, runs: Path) -> None:
    """The first leaves the wait, and closing finishes the save; a second leaves closing, and the end waits."""
    with Child(children.blocks, runs, moment, writer=writer) as child:
        child.says("held")
        child.signal(signal.SIGINT)
        child.says("closing")
        if times == 2:
            child.signal(signal.SIGINT)
            child.says("KeyboardInterrupt")
            assert not (runs / "c").exists()
        child.let_go()
        if times == 1:
            child.says("KeyboardInterrupt")
        assert child.ends() == 1
    assert_written(runs, moment)


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
    """There is time enough until ``drain_timeout``."""
    with Child(program, runs, moment, loop, writer) as child:
        child.says("held")
        child.signal(signal.SIGTERM)
        child.says("cancelled" if program is children.is_terminated else "closing")
        child.let_go()
        if program is children.is_terminated:
            child.says("CancelledError")
        assert child.ends() == _EXIT_CODES[program][0]
    assert_written(runs, moment)


_EXIT_CODES = {children.is_terminated: (1, 1), children.closes: (0, 3), children.blocks: (143, 143)}


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
def test_when_the_time_is_over_nothing_is_left_and_the_process_ends(
    program: children.Program, moment: str, runs: Path
) -> None:
    with Child(program, runs, moment, drain_timeout=0.05) as child:
        child.says("held")
        child.signal(signal.SIGTERM)
        child.says("cancelled" if program is children.is_terminated else "closing")
        if program is children.is_terminated:
            child.says("CancelledError", _note(runs, moment))
        elif program is children.closes:
            child.says("gave up", True, True)
        assert child.ends() == _EXIT_CODES[program][1]
    assert list(runs.iterdir()) == []


def _note(runs: Path, moment: str) -> str:
    paths = [runs / "c"] if MOMENTS[moment].step else [runs / "front", runs / "c"]
    return (
        f"closing the checkpointer also failed: the save of {', '.join(map(str, paths))} was not done after "
        "drain_timeout = 0.05 s and was cancelled; nothing of it is left"
    )


@pytest.mark.parametrize("moment", ["staging", "committing"])
def test_sigterm_without_a_handler_kills_and_the_path_is_free(moment: str, runs: Path) -> None:
    with Child(children.awaits, runs, moment) as child:
        child.says("held")
        child.signal(signal.SIGTERM)
        assert child.ends() == -signal.SIGTERM
    assert not (runs / "c").exists()
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state_of(2), runs / "c")
        assert_same(state_of(2), ckpt.load(runs / "c"))
    for left in runs.glob(".aiockpt-*"):  # what the killed one had begun
        shutil.rmtree(left)


def test_sigterm_without_a_handler_kills_and_a_writer_process_goes_on(runs: Path) -> None:
    """What was staged is written by it, and it ends; see tests.writing for the other moments."""
    with Child(children.awaits, runs, "syncing", "uvloop", "process") as child:
        child.says("held")
        (writer,) = writers_of(child.pid)
        child.signal(signal.SIGTERM)
        assert child.ends() == -signal.SIGTERM
    (gate,) = runs.parent.glob("gate-*")
    Gate.of(gate).open()
    assert ended(writer.pid)
    assert_written(runs, "syncing")
