"""Runs of several hosts whose disks have replicas of each other: a directory is the disk of the ranks of one host."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.manager.replicas import ReplicaCopies
from aiockpt.manager.scan import DEFAULT_NAMES
from aiockpt.manager.tiers import REPLICAS_NAME
from tests.disks import HostDisk
from tests.manager.gates import Gate
from tests.manager.test_ranks import LIMITS, state_of, step_in
from tests.places import storage_of
from tests.polling import until
from tests.ranks.world import World

RUN = "/runs/a"


class Disks:
    """The disks of hosts: directories below one, of which each process sees that of its own host."""

    def __init__(self, root: Path, hosts: int) -> None:
        self.root, self.hosts = root, hosts

    def of_rank(self, rank: int, size: int) -> HostDisk:
        return HostDisk(self.root / f"host{rank * self.hosts // size}")

    def run_of(self, host: int) -> Path:
        return self.root / f"host{host}{RUN}"

    def step(self, host: int, step: int) -> Path:
        return self.run_of(host) / DEFAULT_NAMES.name_of(step)

    def replicas(self, host: int, under: str = f"{RUN}/{REPLICAS_NAME}") -> list[Path]:
        """Return the directories of the steps that a host has replicas of."""
        pattern = "*/step-*" if under.endswith(REPLICAS_NAME) else "*/*/step-*"
        return sorted((self.root / f"host{host}{under}").glob(pattern))

    def lose(self, host: int) -> None:
        """Replace a host by another one with an empty disk."""
        shutil.rmtree(self.root / f"host{host}")


def options_of(**options: Any) -> dict[str, Any]:
    return {"own_disks": True, "replicas": 1, "keep": aiockpt.KeepLatest(2), **LIMITS, **options}


async def trains(rank: int, size: int, disks: Disks, steps: list[int], options: dict[str, Any]) -> Any:
    storage = disks.of_rank(rank, size)
    async with aiockpt.CheckpointManager(RUN, storage=storage, **options_of(**options)) as run:
        for step in steps:
            save = await run.save(step, state_of(rank, step))
            await save.written
            if rank == 0:
                await save.replicated
                if "mirror" in options:
                    await save.mirrored
            else:
                with pytest.raises(aiockpt.AiockptError, match="only rank 0"):
                    save.replicated  # noqa: B018
        return None if run.replica_backlog is None else run.replica_backlog.newest


def restores(rank: int, size: int, disks: Disks, there: str = "", replica_directory: str | None = None) -> Any:
    """Restore; return the step, what is repaired, and how many payload bytes were read from the mirror."""
    gate = Gate(storage_of(there), there) if there else None
    given = options_of(mirror="gate://here" if there else None, replica_directory=replica_directory)
    state = state_of(rank, 0)
    with (
        aiockpt.SyncCheckpointManager(RUN, storage=disks.of_rank(rank, size), **given) as run,
        warnings.catch_warnings(record=True),
    ):
        warnings.simplefilter("always")
        start = run.restore(state)
    assert start is not None
    return start.step, step_in(state, rank), len(start.repaired), 0 if gate is None else gate.read_bytes


def flip(directory: Path) -> None:
    """Flip one bit of the largest data file."""
    file = max(directory.glob("*.distcp"), key=lambda each: each.stat().st_size)
    at = file.stat().st_size // 2
    with file.open("r+b") as opened:  # in place: it never is shorter
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def steps_of(paths: list[Path]) -> list[str]:
    return [path.name[-1] for path in paths]


def test_lost_host_is_restored_from_its_peer_before_the_mirror_is_asked(world4: World, tmp_path: Path) -> None:
    disks, there = Disks(tmp_path, 2), str(tmp_path / "mirror")
    assert world4.results(trains, disks, [1, 2, 3], {"mirror": there}) == [3, None, None, None]
    for host in (0, 1):
        assert "3" in steps_of(disks.replicas(host))
        (replica,) = [path for path in disks.replicas(host) if path.name.endswith("3")]
        other = disks.step(1 - host, 3)
        assert {path.name for path in replica.iterdir()} == {path.name for path in other.iterdir()}
    disks.lose(1)
    assert world4.results(restores, disks, there) == [(3, 3, 0, 0)] * 4


@pytest.mark.slow
def test_run_goes_on_after_a_host_was_replaced(world4: World, tmp_path: Path) -> None:
    """The replicas of the lost disk go when the run has no such step any more."""
    disks = Disks(tmp_path, 4)
    assert world4.results(trains, disks, [1, 2], {}) == [2, None, None, None]
    disks.lose(2)
    assert world4.results(restores, disks) == [(2, 2, 0, 0)] * 4
    assert world4.results(trains, disks, [3, 4, 5], {}) == [5, None, None, None]
    disks.lose(0)
    assert world4.results(restores, disks) == [(5, 5, 0, 0)] * 4
    left = [step for host in range(1, 4) for step in steps_of(disks.replicas(host))]
    assert not {"1", "2"} & set(left)


@pytest.mark.slow
@pytest.mark.parametrize("has_mirror", [False, True])
def test_damaged_replica_is_not_trusted(world2: World, tmp_path: Path, has_mirror: bool) -> None:
    disks, there = Disks(tmp_path, 2), str(tmp_path / "mirror") if has_mirror else ""
    world2.results(trains, disks, [1, 2], {"mirror": there} if has_mirror else {})
    flip(next(path for path in disks.replicas(0) if path.name.endswith("2")))
    disks.lose(1)
    found = world2.results(restores, disks, there)
    if has_mirror:
        assert [(step, loaded, repaired) for step, loaded, repaired, _ in found] == [(2, 2, 1)] * 2
    else:
        assert found == [(1, 1, 0, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_damaged_file_of_a_disk_is_read_from_its_replica(world2: World, tmp_path: Path, host: int) -> None:
    disks = Disks(tmp_path, 2)
    world2.results(trains, disks, [1, 2], {})
    flip(disks.step(host, 2))
    assert world2.results(restores, disks) == [(2, 2, 1, 0)] * 2
    flip(next(path for path in disks.replicas(1 - host) if path.name.endswith("2")))
    assert world2.results(restores, disks) == [(1, 1, 0, 0)] * 2


@pytest.mark.slow
def test_damage_of_disk_and_replica_is_read_from_the_mirror(world2: World, tmp_path: Path) -> None:
    disks, there = Disks(tmp_path, 2), str(tmp_path / "mirror")
    world2.results(trains, disks, [1, 2], {"mirror": there})
    flip(disks.step(0, 2))
    flip(next(path for path in disks.replicas(1) if path.name.endswith("2")))
    found = world2.results(restores, disks, there)
    assert [(step, loaded, repaired) for step, loaded, repaired, _ in found] == [(2, 2, 1)] * 2


@pytest.mark.slow
def test_replica_of_another_save_is_not_used(world2: World, tmp_path: Path) -> None:
    disks = Disks(tmp_path, 2)
    world2.results(trains, disks, [1, 2], {})
    (one, two) = disks.replicas(0)
    shutil.rmtree(two)
    shutil.copytree(one, two)
    disks.lose(1)
    assert world2.results(restores, disks) == [(1, 1, 0, 0)] * 2


@pytest.mark.slow
def test_replicas_in_memory(world2: World, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        disks = Disks(tmp_path, 2)
        for host in (0, 1):
            (tmp_path / f"host{host}").mkdir()
            (Path(memory) / str(host)).mkdir()
            (tmp_path / f"host{host}" / "memory").symlink_to(Path(memory) / str(host))
        world2.results(trains, disks, [1, 2], {"replica_directory": "/memory", "replica_bandwidth": 1e9})
        assert not (disks.run_of(0) / REPLICAS_NAME).exists()
        assert "2" in steps_of(disks.replicas(0, "/memory"))
        disks.lose(1)
        assert world2.results(restores, disks, "", "/memory") == [(2, 2, 0, 0)] * 2


# --- when it fails --------------------------------------------------------------------------------------


def opens(rank: int, size: int, disks: Disks, options: dict[str, Any]) -> Any:
    storage = disks.of_rank(rank, size)
    with aiockpt.SyncCheckpointManager(RUN, storage=storage, **options_of(**options)):
        return None


def test_one_host_has_no_peer(world2: World, tmp_path: Path) -> None:
    for failure in world2.run(opens, Disks(tmp_path, 1), {}):
        assert "all ranks of /runs/a have the same disk, and there is no other host" in failure.text
    assert world2.results(opens, Disks(tmp_path, 1), {"replicas": 0}) == [None, None]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": 2}, "replicas must be 0 or 1"),
        ({"replicas": 1}, "pass own_disks=True"),
        ({"replica_directory": "/dev/shm"}, "pass own_disks=True"),
        ({"replicas": 1, "own_disks": True, "replica_bandwidth": 0}, "replica_bandwidth must be positive"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        aiockpt.SyncCheckpointManager(tmp_path, **options)


class SlowDisk(HostDisk):
    """The disk of a host whose server does not answer reads of data until it is let go, or kills its host then."""

    def __init__(self, root: Path, kills: bool) -> None:
        super().__init__(root)
        self.kills, self.reads, self.let_go = kills, threading.Event(), threading.Event()

    def before_read(self, name: str, offset: int, nbytes: int) -> None:
        if name.endswith(".distcp"):
            self.reads.set()
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            self.let_go.wait()


def trains_beside_a_slow_peer(rank: int, size: int, disks: Disks, steps: list[int], keep: Any) -> Any:
    """Save steps; return those that there are as long as rank 0 has no replica of any, and whether the last one has."""
    storage: Any = disks.of_rank(rank, size)
    if rank == 1:
        storage = SlowDisk(Path(storage.root), kills=False)
    with aiockpt.SyncCheckpointManager(RUN, storage=storage, **options_of(keep=keep)) as run:
        saves = []
        for step in steps:
            saves.append(run.submit(step, state_of(rank, step)))
            saves[-1].written.result(60)
        run._retention.finished().result()
        there = run.steps()
        if rank == 1:
            assert storage.reads.wait(60)
            storage.let_go.set()
            return None
        is_done = saves[-1].replicated.done()
        saves[-1].replicated.result(60)
        return there, is_done


@pytest.mark.slow
def test_slow_peer_never_holds_training(world2: World, tmp_path: Path) -> None:
    disks = Disks(tmp_path, 2)
    assert world2.results(trains_beside_a_slow_peer, disks, [1, 2, 3], None)[0] == ([1, 2, 3], False)
    assert [steps_of(disks.replicas(host)) for host in (0, 1)] == [["1", "2", "3"]] * 2


@pytest.mark.slow
def test_last_replicated_step_is_kept(world2: World, tmp_path: Path) -> None:
    disks, keep = Disks(tmp_path, 2), aiockpt.KeepLatest(1)
    world2.results(trains, disks, [1], {"keep": keep})
    there, is_done = world2.results(trains_beside_a_slow_peer, disks, [2, 3, 4], keep)[0]
    assert not is_done
    assert {1, 4} <= set(there)


def trains_beside_a_disk_that_damages(rank: int, size: int, disks: Disks, host: int) -> str:
    """Save two steps; a host's disk damages its part of the first before it is copied. Return what rank 0 is told."""
    storage: Any = disks.of_rank(rank, size)
    if rank == host:
        storage = SlowDisk(Path(storage.root), kills=False)
    with aiockpt.SyncCheckpointManager(RUN, storage=storage, **options_of()) as run:
        save = run.submit(1, state_of(rank, 1))
        save.written.result(60)
        if rank == host:
            assert storage.reads.wait(60)
            flip(disks.step(host, 1))
            storage.let_go.set()
        text = ""
        if rank == 0:
            with pytest.raises(aiockpt.AiockptError) as caught:
                save.replicated.result(60)
            text = f"{type(caught.value).__name__}: {caught.value}"
        save = run.submit(2, state_of(rank, 2))
        save.written.result(60)
        if rank == 0:
            save.replicated.result(60)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_step_that_a_disk_damages_is_said_to_be_damaged(world2: World, tmp_path: Path, host: int) -> None:
    """Rank 0 learns it from the host that copies; the next step is replicated."""
    found = world2.results(trains_beside_a_disk_that_damages, Disks(tmp_path, 2), host)
    assert re.search(rf"CorruptCheckpointError: on host .*__{host}_0.distcp does not match its CRC", found[0])


def trains_until_its_peer_is_killed(rank: int, size: int, disks: Disks) -> Any:
    """Save a step; rank 1 is killed when rank 0 reads what it has written."""
    storage: Any = disks.of_rank(rank, size)
    if rank == 1:
        storage = SlowDisk(Path(storage.root), kills=True)
    with aiockpt.SyncCheckpointManager(RUN, storage=storage, **options_of(drain_timeout=1)) as run:
        save = run.submit(3, state_of(rank, 3))
        save.written.result(60)
        if rank == 1:
            threading.Event().wait()  # until it is killed
        (copies,) = [each for each in run._behind if isinstance(each, ReplicaCopies)]
        until(lambda: copies.backlog.error is not None)
    with pytest.raises(aiockpt.SaveError, match="step 3 is not replicated: the manager was closed before"):
        save.replicated.result(60)
    return str(copies.backlog.error)


@pytest.mark.slow
def test_kill_in_the_middle_of_a_copy_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 2)
    with World(2) as world:
        world.results(trains, disks, [1, 2], {})
        found = world.run(trains_until_its_peer_is_killed, disks)
    assert found[1].killed
    assert "does not answer" in found[0]
    assert "3" not in steps_of(disks.replicas(0))
    disks.lose(1)
    with World(2) as world:
        assert world.results(restores, disks) == [(2, 2, 0, 0)] * 2
    with aiockpt.SyncCheckpointer() as ckpt:  # of what nobody can go on with
        for directory in (disks.run_of(0) / REPLICAS_NAME).iterdir():
            ckpt.clean(directory, older_than_s=0)


@pytest.mark.slow
def test_copy_goes_on_in_the_next_job(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 2)
    with World(2) as world:
        world.run(trains_until_its_peer_is_killed, disks)
    with World(2) as world:
        world.results(trains, disks, [4], {})
    assert [steps_of(disks.replicas(host)) for host in (0, 1)] == [["3", "4"]] * 2
