"""Failures and kills in the rounds of a save to the own disks of hosts: all disks have a step, or it does not count."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.errors import AiockptError
from aiockpt.manager.scan import scan
from tests.disks import HostDisk
from tests.manager.runs import DISK_NAME, LOCK_NAME, names
from tests.manager.test_own_disks import RUN, opened, restores, trains
from tests.manager.test_ranks import state_of, step_in
from tests.ranks.world import RankFailure, World

HOSTS = ["a", "a", "b", "c"]  # ranks 0, 2 and 3 are the lowest ones of their hosts
STEP = "step-00000002"


class FaultyDisk(HostDisk):
    """Fails, or kills its process, before a step of a storage, at the n-th time for a name since it was armed."""

    def __init__(self, root: Path, step: str, name: str, times: int, *, kills: bool = False) -> None:
        super().__init__(root)
        self.step, self.name, self.times, self.kills = step, name, times, kills
        self.is_armed = False

    async def before(self, step: str, name: str) -> None:
        if not self.is_armed or step != self.step or not name.endswith(self.name):
            return
        self.times -= 1
        if self.times == 0:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "the disk is full")


def disk_of(rank: int, folder: Path, hosts: list[str], faults: dict[int, tuple[str, str, int]]) -> HostDisk:
    root = folder / hosts[rank]
    root.mkdir(exist_ok=True)
    return FaultyDisk(root, *faults[rank]) if rank in faults else HostDisk(root)


def fails(rank: int, size: int, folder: Path, faults: dict[int, tuple[str, str, int]], overwrite: bool = False) -> Any:
    """Save step 1, fail to save step 2, or to overwrite step 1; then save step 2 all the same, if that is not there."""
    storage = disk_of(rank, folder, HOSTS, faults)
    with opened(rank, HOSTS, folder, storage=storage) as run:
        run.save(1, state_of(rank, 1))
        if isinstance(storage, FaultyDisk):
            storage.is_armed = True
        try:
            run.save(1 if overwrite else 2, state_of(rank, 2), overwrite=overwrite)
        except AiockptError as exc:
            error = f"{type(exc).__name__}: {exc}"
        else:
            error = ""
        steps = run.steps()
        if not overwrite:
            assert run._disks is not None
            before = [name for name in names(folder / HOSTS[rank] / "run") if name != LOCK_NAME]
            before = before if run._disks.serves else []
            run.steps()  # all have looked
            run.save(2, state_of(rank, 3))
            return error, steps, before
        state: dict[str, Any] = {
            f"own{rank}": state_of(rank, 0)[f"own{rank}"],
            "both": state_of(0, 0)["both"],
            "step": 0,
        }
        assert run.restore(state) is not None
        return error, steps, [str(step_in(state, rank))]


FAULTS = [
    *((rank, "begin", STEP, 1) for rank in (0, 2, 3)),
    *((rank, "join", STEP, 1) for rank in (1, 2, 3)),
    *((rank, "create", ".distcp", 1) for rank in (0, 1, 2)),
    *((rank, "write", ".distcp", 1) for rank in (0, 3)),
    *((rank, "finish", ".distcp", 1) for rank in (1, 2)),
    *((rank, "commit", STEP, 1) for rank in (0, 1, 2, 3)),  # of rank 0, when all others have published
    *((rank, "commit", STEP, 2) for rank in (2, 3)),  # when it publishes, maybe after the other one
    *((rank, "create", ".aiockpt.json", 1) for rank in (0, 2, 3)),
    *((rank, "write", ".metadata", 1) for rank in (0, 3)),
    *((rank, "finish", ".metadata", 1) for rank in (2,)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault)))
def test_what_one_host_can_not_do_fails_the_save_on_all(
    world4: World, tmp_path: Path, fault: tuple[int, str, str, int]
) -> None:
    """Nothing of it is left on any disk, and the next save of the same step succeeds."""
    rank, *how = fault
    found = world4.results(fails, tmp_path, {rank: tuple(how)})
    for error, steps, left in found:
        assert "the disk is full" in error
        assert steps == [1]
        assert left in ([], [DISK_NAME, "step-00000001"])
    for host in "abc":
        assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001", STEP]
    assert world4.results(restores, tmp_path, HOSTS, 4, {}) == [(2, [3] * 4, ())] * 4


@pytest.mark.parametrize(
    "fault",
    [
        (2, "begin", "step-00000001", 1),
        (1, "write", ".distcp", 1),
        (3, "create", ".aiockpt.json", 1),
        (0, "finish", ".metadata", 1),
    ],
    ids=lambda fault: "-".join(map(str, fault)),
)
def test_what_is_to_be_replaced_stays_until_all_can_publish(
    world4: World, tmp_path: Path, fault: tuple[int, str, str, int]
) -> None:
    rank, *how = fault
    for error, steps, step in world4.results(fails, tmp_path, {rank: tuple(how)}, True):
        assert "the disk is full" in error
        assert (steps, step) == ([1], ["1"])


@pytest.mark.parametrize("faults", [{0: ("commit", STEP, 1), 2: ("delete", STEP, 1)}])
def test_part_that_can_not_be_taken_back_does_not_count(
    world4: World, tmp_path: Path, faults: dict[int, tuple[str, str, int]]
) -> None:
    """It holds up no further save of the step."""
    found = world4.results(fails, tmp_path, faults)
    assert all(steps == [1] for _, steps, _ in found)
    assert STEP in found[2][2]  # the part of host b
    assert STEP not in found[0][2] + found[3][2]
    assert world4.results(restores, tmp_path, HOSTS, 4, {}) == [(2, [3] * 4, ())] * 4


# --- kills ----------------------------------------------------------------------------------------------------


def dies(rank: int, size: int, folder: Path, victim: int, fault: tuple[str, str, int], saves: list[int]) -> Any:
    """Save steps of which one is the last that is kept; the victim is armed before the last save."""
    root = folder / HOSTS[rank]
    root.mkdir(exist_ok=True)
    storage = FaultyDisk(root, *fault, kills=True) if rank == victim else HostDisk(root)
    with opened(rank, HOSTS, folder, storage=storage, keep=aiockpt.KeepLatest(1)) as run:
        for step in saves:
            if isinstance(storage, FaultyDisk):
                storage.is_armed = step == saves[-1]
            run.save(step, state_of(rank, step))
        run._retention.finished().result()
        for _ in range(3):
            run.steps()
            assert run._disks is not None
            run._disks.storage.wait()


KILLS = [
    *((rank, "begin", STEP, 1) for rank in (0, 2)),
    (3, "join", STEP, 1),
    *((rank, "finish", ".distcp", 1) for rank in (0, 1, 2)),
    *((rank, "create", ".aiockpt.json", 1) for rank in (0, 3)),
    *((rank, "finish", ".metadata", 1) for rank in (0, 2)),
    (0, "commit", STEP, 1),
    (2, "commit", STEP, 2),
    (3, "commit", STEP, 2),
]


@pytest.mark.parametrize("fault", KILLS, ids=lambda fault: "-".join(map(str, fault)))
def test_kill_at_any_point_of_a_save(tmp_path: Path, fault: tuple[int, str, str, int]) -> None:
    """The next start has the step before, on all disks, and nothing else."""
    victim, *how = fault
    with World(4) as world:
        outcomes = world.run(dies, tmp_path, victim, tuple(how), [1, 2])
        assert isinstance(outcomes[victim], RankFailure)
        assert outcomes[victim].killed
    with World(4) as world:
        assert world.results(restores, tmp_path, HOSTS, 4, {}) == [(1, [1] * 4, ())] * 4
        for host in "abc":
            assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001"]
        assert world.results(trains, tmp_path, HOSTS, [2], {})[0][0] == [1, 2]


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_kill_while_a_step_is_deleted(tmp_path: Path, victim: int) -> None:
    """The one that is to be deleted is whole, or is gone: never a damaged one."""
    with World(4) as world:
        outcomes = world.run(dies, tmp_path, victim, ("delete", "step-00000001", 1), [1, 2])
        assert isinstance(outcomes[victim], RankFailure)
        assert outcomes[victim].killed
    with World(4) as world:
        found = world.results(trains, tmp_path, HOSTS, [3], {})
        steps, states = found[0]
        assert steps == ([1, 2, 3] if victim == 0 else [2, 3])
        assert set(states) == {"complete"}
        for host in "abc":
            assert names(tmp_path / host / "run")[1:] == [f"step-{step:08d}" for step in steps]


# --- deletions on hosts in another order ----------------------------------------------------------------------


def prunes(rank: int, size: int, folder: Path, hosts: list[str], saves: list[int]) -> list[int]:
    with opened(rank, hosts, folder, keep=aiockpt.KeepLatest(1)) as run:
        for step in saves:
            run.save(step, state_of(rank, step))
        run._retention.finished().result()
        run._finish(run._run.settle_disks())
        return run.steps()


def test_steps_that_count_by_another_hosts_disk_are_deleted(world2: World, tmp_path: Path) -> None:
    """What was saved with host a first, when rank 0 is on host b."""
    world2.results(trains, tmp_path, ["a", "b"], [1, 2], {})
    assert world2.results(prunes, tmp_path, ["b", "a"], [3, 4, 5]) == [[5]] * 2
    for host in "ab":
        assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000005"]


def discards(rank: int, size: int, folder: Path, hosts: list[str], faults: dict[int, tuple[str, str, int]]) -> Any:
    storage = disk_of(rank, folder, hosts, faults)
    with opened(rank, hosts, folder, storage=storage) as run:
        if isinstance(storage, FaultyDisk):
            storage.is_armed = True
        try:
            run.restore(state_of(rank, 0), step=1, discard_later=True)
        except aiockpt.DeleteError as exc:
            return str(exc)
        return run.steps()


def test_later_steps_are_discarded_on_all_disks_at_once(world2: World, tmp_path: Path) -> None:
    """When `restore` returns, all is done, whichever host a step counts by."""
    world2.results(trains, tmp_path, ["a", "b"], [1, 2], {})
    world2.results(trains, tmp_path, ["b", "a"], [3, 4], {})
    assert world2.results(discards, tmp_path, ["a", "b"], {}) == [[1]] * 2
    for host in "ab":
        assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001"]


@pytest.mark.parametrize("victim", [0, 1])
def test_step_that_can_not_be_discarded_is_an_error_on_all_ranks(world2: World, tmp_path: Path, victim: int) -> None:
    world2.results(trains, tmp_path, ["a", "b"], [1, 2, 3], {})
    found = world2.results(discards, tmp_path, ["a", "b"], {victim: ("delete", "step-00000002", 1)})
    assert all("the disk is full" in text for text in found), found
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        found = world2.results(discards, tmp_path, ["b", "a"], {})
    assert found == [[1]] * 2


def test_damaged_step_is_set_aside_on_all_disks(world2: World, tmp_path: Path) -> None:
    """Also if it counts by another host's disk than rank 0's."""
    world2.results(trains, tmp_path, ["b", "a"], [1, 2], {})
    next((tmp_path / "b" / "run" / STEP).glob("*.distcp")).unlink()
    assert world2.results(restores, tmp_path, ["a", "b"], 2, {}) == [(1, [1, 1], ())] * 2
    for host in "ab":
        assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001", f"{STEP}.damaged"]
    assert world2.results(trains, tmp_path, ["b", "a"], [2], {})[0][0] == [1, 2]
    for host in "ab":  # what was set aside is never cleaned away
        assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001", STEP, f"{STEP}.damaged"]


# --- disks that come back -------------------------------------------------------------------------------------


def overwrites(rank: int, size: int, folder: Path) -> None:
    with opened(rank, ["a", "b"], folder) as run:
        run.save(2, state_of(rank, 3), overwrite=True)


@pytest.mark.parametrize("host", ["a", "b"])
def test_disk_with_an_older_save_of_a_step_is_recognised(world2: World, tmp_path: Path, host: str) -> None:
    """Its files have the same names and sizes, and are never mixed with those of the later save."""
    world2.results(trains, tmp_path, ["a", "b"], [1, 2], {})
    shutil.copytree(tmp_path / host, tmp_path / "older")
    world2.results(overwrites, tmp_path)
    shutil.rmtree(tmp_path / host)
    (tmp_path / "older").rename(tmp_path / host)
    found = world2.results(restores, tmp_path, ["a", "b"], 2, {})
    assert found == [(1, [1, 1], ())] * 2


def test_disk_that_lacks_the_newest_steps_is_recognised(world2: World, tmp_path: Path) -> None:
    world2.results(trains, tmp_path, ["a", "b"], [1], {})
    shutil.copytree(tmp_path / "b", tmp_path / "older")
    world2.results(trains, tmp_path, ["a", "b"], [2], {})
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "older").rename(tmp_path / "b")
    assert world2.results(restores, tmp_path, ["a", "b"], 2, {}) == [(1, [1, 1], ())] * 2
    assert f"{STEP}.damaged" in names(tmp_path / "a" / "run")


def test_disk_with_a_step_that_was_deleted_meanwhile(world2: World, tmp_path: Path) -> None:
    world2.results(trains, tmp_path, ["a", "b"], [1, 2], {})
    shutil.copytree(tmp_path / "b", tmp_path / "older")
    world2.results(trains, tmp_path, ["a", "b"], [3], {"keep": aiockpt.KeepLatest(1)})
    shutil.copytree(tmp_path / "older", tmp_path / "b", dirs_exist_ok=True)
    assert world2.results(restores, tmp_path, ["a", "b"], 2, {}) == [(3, [3, 3], ())] * 2
    assert names(tmp_path / "b" / "run") == [DISK_NAME, "step-00000003"]


# --- locks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["a", "b"])
def test_run_is_locked_on_every_host(world2: World, tmp_path: Path, host: str) -> None:
    world2.results(trains, tmp_path, ["a", "b"], [1], {})
    lock = HostDisk(tmp_path / host).lease(RUN)
    outcomes = world2.run(trains, tmp_path, ["a", "b"], [2], {})
    assert [each.kind for each in outcomes] == ["RunLockedError"] * 2
    lock.check()
    lock.release()
    assert world2.results(trains, tmp_path, ["a", "b"], [2], {})[0][0] == [1, 2]


def test_reader_that_is_alone_removes_nothing(world2: World, tmp_path: Path) -> None:
    world2.results(trains, tmp_path, ["a", "b"], [1], {})
    shutil.rmtree(tmp_path / "a" / "run" / "step-00000001")  # as if rank 0 had not published
    storage = HostDisk(tmp_path / "b")
    assert [info.state for info in scan(RUN, storage)] == ["damaged"]
    assert world2.results(restores, tmp_path, ["a", "b"], 2, {"read_only": True}) == [None, None]
    assert names(tmp_path / "b" / "run") == [DISK_NAME, "step-00000001"]
