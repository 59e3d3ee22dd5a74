"""Killed trainers: a staged save of one process becomes a checkpoint, all others are removed, and the writer ends."""

from __future__ import annotations

import os
import signal
from multiprocessing import connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import aiockpt
from aiockpt.storage import LocalStorage, WrapperStorage
from aiockpt.storage.local import commit
from tests.places import ServerPath, left_in, storage_of
from tests.polling import until
from tests.ranks import failing
from tests.ranks.world import World, _context
from tests.states import assert_same, large_state
from tests.writing.gates import Gate, PipedStorage, ended, writers_of

pytestmark = pytest.mark.usefixtures("forks")


def _train(pipe: connection.Connection, gate: Path, folder: Path, step: str, moment: str, plan: str) -> None:
    """Save with a writer process that stops at a step, send its pid and that of a fork, and be killed."""
    storage = PipedStorage(gate, step, inner=storage_of(folder))
    options: dict[str, Any] = {"overwrite": plan == "overwrite", "storage": storage}
    if plan == "hook":
        options["pre_commit"] = lambda _: failing.die()
    room = 1 << 22 if moment == "staged" else 1 << 17
    ckpt = aiockpt.SyncCheckpointer(writer="process", chunk_bytes=1 << 16, staging_bytes=room)
    ckpt.prewarm(large_state(1))
    (writer,) = writers_of(os.getpid())
    forked = 0
    if plan == "fork" and (forked := os.fork()) == 0:  # the fork holds the trainer's end of the socket too
        signal.pause()
    if plan == "overwrite":
        ckpt.save(large_state(2), folder / "c")
    saves = [ckpt.submit(large_state(4), folder / "c", **options)]
    if plan == "two":
        saves.append(ckpt.submit(large_state(3), folder / "d"))
    if moment == "staged":
        for save in saves:
            save.staged.result(60)
    pipe.send((writer.pid, forked))
    if plan == "hook":
        saves[0].written.result(60)
    if moment != "staged":
        pipe.recv()
    failing.die()


class _Trainer:
    """A trainer, and the pids of its writer and of its fork."""

    def __init__(self, gate: Gate, folder: Path, *args: str) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_train, args=(theirs, gate.folder, folder, *args))
        self._process.start()
        theirs.close()
        self.writer, self.forked = self._pipe.recv()

    def go_on(self) -> None:
        self._pipe.send("go on")

    def wait(self) -> None:
        """Wait until the trainer has been killed."""
        self._process.join(60)
        assert self._process.exitcode == -signal.SIGKILL
        self._process.close()
        self._pipe.close()


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("own") / "gate")


def _contents(folder: Path | ServerPath) -> set[str]:
    """Return the names in a folder; of a server also what is left of unfinished saves."""
    return {entry.name for entry in folder.iterdir()} | set(_left(folder))


def _left(folder: Path | ServerPath) -> list[str]:
    return left_in(str(folder)) if isinstance(folder, ServerPath) else []


@pytest.mark.main
@pytest.mark.parametrize("plan", ["plain", "overwrite", "two", "fork"])
def test_staged_saves_are_committed(plan: str, gate: Gate, anywhere: Path) -> None:
    trainer = _Trainer(gate, anywhere, "write", "staged", plan)
    gate.wait()
    trainer.wait()
    assert _contents(anywhere) - {"c"} != set()  # hidden, not published
    assert storage_of(anywhere).is_finishing(str(anywhere))
    gate.open()
    assert ended(trainer.writer)
    if trainer.forked:
        os.kill(trainer.forked, signal.SIGKILL)
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(large_state(4), ckpt.load(anywhere / "c"))
        assert ckpt.verify(anywhere / "c").ok
        if plan == "two":
            assert_same(large_state(3), ckpt.load(anywhere / "d"))
    assert _contents(anywhere) == ({"c", "d"} if plan == "two" else {"c"})
    assert not storage_of(anywhere).is_finishing(str(anywhere))


@pytest.mark.main
def test_an_unstaged_save_is_removed(gate: Gate, anywhere: Path) -> None:
    trainer = _Trainer(gate, anywhere, "write", "before", "plain")
    gate.wait()
    trainer.go_on()
    trainer.wait()
    gate.open()
    assert ended(trainer.writer)
    assert _contents(anywhere) == set()


def test_a_save_whose_pre_commit_hook_did_not_return_is_removed(gate: Gate, anywhere: Path) -> None:
    trainer = _Trainer(gate, anywhere, "write", "staged", "hook")
    gate.wait()
    gate.open()
    trainer.wait()
    assert ended(trainer.writer)
    assert _contents(anywhere) == set()


# --- several ranks ----------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for gates, and for what processes tell."""
    return tmp_path_factory.mktemp("own")


def _save(rank: int, size: int, own: Path, folder: Path, dead: list[int], moment: str) -> Any:
    """Save; the ranks in ``dead`` are killed after staging or during it, with or without their writers."""
    failing.expect_no_reason()
    dies, told = rank in dead, lambda: (own / f"pid{rank}").exists() and (own / f"pid{rank}").read_text()
    room = 1 << 17 if dies and moment == "before" else 1 << 24
    with aiockpt.SyncCheckpointer(
        chunk_bytes=1 << 16, staging_bytes=room, io_threads=1, coordination_timeout=60, writer="process"
    ) as ckpt:
        if moment == "second":  # so that the next save reuses the plan
            ckpt.save(failing.state_of(rank, size, 1), folder / "first")
        if moment == "replacing":
            ckpt.save(failing.state_of(rank, size, 1), folder / "c")
            if dies:  # when the new one has replaced the old one, which still exists under its hidden name
                commit.remove = lambda *_, **__: (until(told), failing.die())
        # Hold the writes of a rank that is to be killed: it could have written, and reported, everything before.
        storage = None
        if dies and moment != "replacing":
            storage = Gate(own / f"gate{rank}").storage("write", inner=storage_of(folder))
        replaces = moment == "replacing"
        save = ckpt.submit(failing.state_of(rank, size, 2), folder / "c", storage=storage, overwrite=replaces)
        if not dies or moment != "before":
            save.staged.result(60)
        if storage is not None:
            Gate.of(own / f"gate{rank}").wait()
        (child,) = writers_of(os.getpid())
        (own / f"pid{rank}").write_text(str(child.pid))
        if dies:
            if moment == "writer":
                child.kill()
                child.wait(60)
            if moment != "replacing":
                failing.die()
        return save.written.result(60).tensors


def _run(own: Path, folder: Path, ranks: int, dead: list[int], moment: str) -> list[Any]:
    """Save with several ranks; wait until the writers of all have ended."""
    with World(ranks, may_start=True) as world:
        outcomes = world.run(_save, own, folder, dead, moment)
        for gate in own.glob("gate*") if moment != "writer" else ():  # no process is left at a gate
            Gate.of(gate).open()
        for rank in range(ranks):
            assert ended(int((own / f"pid{rank}").read_text()))
    for rank in dead:
        assert outcomes[rank].killed
    return [outcome for rank, outcome in enumerate(outcomes) if rank not in dead]


def _save_next(folder: Path) -> None:
    """Save once more, which removes what the dead have left."""
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save(large_state(1), folder / "next")
    assert _contents(folder) <= {"first", "c", "next"}


@pytest.mark.parametrize(
    ("anywhere", "ranks", "dead", "moment"),
    [
        ("local", 3, [1], "staged"),
        ("local", 2, [0], "second"),
        ("local", 2, [0, 1], "staged"),
        *(pytest.param("server", *each, marks=pytest.mark.full) for each in ((3, [1], "staged"), (2, [0], "second"))),
        *(
            pytest.param("local", *each, marks=pytest.mark.slow)
            for each in ((3, [1], "before"), (2, [0, 1], "before"), (3, [2], "writer"), (2, [0], "writer"))
        ),
    ],
    indirect=["anywhere"],
)
def test_of_several_ranks_nothing_is_published_if_a_trainer_dies(
    ranks: int, dead: list[int], moment: str, own: Path, anywhere: Path
) -> None:
    outcomes = _run(own, anywhere, ranks, dead, moment)
    # A rank may tell of its writer's death before its own.
    kinds = {"CoordinationError", "WriteError"} if moment == "writer" else {"CoordinationError"}
    assert {outcome.kind for outcome in outcomes} <= kinds, outcomes
    _save_next(anywhere)
    assert not (anywhere / "c").exists()


def test_what_rank_0_has_published_before_it_dies_stays(own: Path, tmp_path: Path) -> None:
    _run(own, tmp_path, 2, [0], "replacing")
    _save_next(tmp_path)
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(failing.whole_state(2, 2), ckpt.load(tmp_path / "c"))
        assert ckpt.verify(tmp_path / "c").ok


class KillsRank1(WrapperStorage):
    """Kills the trainer of rank 1 when rank 0 publishes; goes on when its writer process has ended too."""

    def __init__(self, own: Path) -> None:
        super().__init__(LocalStorage())
        self._own, self._trainer = own, os.getpid()

    async def before(self, step: str, name: str) -> None:
        if step == "commit" and os.getpid() == self._trainer:
            trainer, writer = map(int, (self._own / "pids").read_text().split())
            os.kill(trainer, signal.SIGKILL)
            assert await anyio.to_thread.run_sync(ended, writer)


def _save_while_rank_1_dies(rank: int, size: int, own: Path, folder: Path) -> int:
    failing.expect_no_reason()
    with aiockpt.SyncCheckpointer(writer="process", coordination_timeout=60) as ckpt:
        ckpt.save(failing.state_of(rank, size, 1), folder / "first")
        (child,) = writers_of(os.getpid())
        if rank == 1:
            (own / "pids").write_text(f"{os.getpid()} {child.pid}")
        storage = KillsRank1(own) if rank == 0 else None
        return ckpt.save(failing.state_of(rank, size, 2), folder / "c", storage=storage).tensors


def test_what_all_ranks_have_reported_is_published_though_one_dies(own: Path, tmp_path: Path) -> None:
    """The writer process of the dead rank removes nothing of it."""
    with World(2, may_start=True) as world:
        first, second = world.run(_save_while_rank_1_dies, own, tmp_path)
    assert second.killed
    assert isinstance(first, int), first
    with aiockpt.SyncCheckpointer() as ckpt:
        assert_same(failing.whole_state(2, 2), ckpt.load(tmp_path / "c"))
        assert ckpt.verify(tmp_path / "c").ok
