"""Runs on the own disks of several hosts: real ranks, each of which sees the directories of its host only."""

from __future__ import annotations

import os
import re
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.manager.scan import scan
from tests.disks import HostDisk
from tests.manager.runs import DISK_NAME, names
from tests.manager.test_ranks import LIMITS, state_of, step_in
from tests.polling import until
from tests.ranks.world import RankFailure, World

RUN = "/run"


def opened(rank: int, hosts: list[str], folder: Path, **options: Any) -> aiockpt.SyncCheckpointManager:
    """Return the manager of a rank on one of some hosts, whose disks are directories in a folder."""
    root = folder / hosts[rank]
    root.mkdir(exist_ok=True)
    options = {"storage": HostDisk(root), "own_disks": True, **LIMITS, **options}
    return aiockpt.SyncCheckpointManager(RUN, **options)


def trains(rank: int, size: int, folder: Path, hosts: list[str], steps: list[int], options: dict[str, Any]) -> Any:
    with opened(rank, hosts, folder, **options) as run:
        for step in steps:
            run.save(step, state_of(rank, step), {"loss": float(-step)})
        run._retention.finished().result()
        if "mirror" in options and rank == 0:
            assert run._mirror is not None
            left = run._mirror.finish()
            assert left is None or left.result() is None
        return run.steps(), [info.state for info in run.infos()]


def restores(
    rank: int, size: int, folder: Path, hosts: list[str], ranks: int, options: dict[str, Any], step: Any = "latest"
) -> Any:
    """Restore the state that so many ranks have saved; return the step, the values, and what was repaired."""
    state = state_of(0, 0)
    for each in range(1, ranks):
        state |= state_of(each, 0)
    with opened(rank, hosts, folder, **options) as run, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        start = run.restore(state, step=step)
    if start is None:
        return None
    return start.step, [step_in(state, each) for each in range(ranks)], start.repaired


def test_two_hosts(world2: World, tmp_path: Path) -> None:
    """Each host has its own files and all documents; both list the same, and delete the same."""
    hosts = ["a", "b"]
    found = world2.results(trains, tmp_path, hosts, [1, 2, 3], {"keep": aiockpt.KeepLatest(2)})
    assert found == [([2, 3], ["complete"] * 2)] * 2
    for rank, host in enumerate(hosts):
        there = tmp_path / host / "run"
        assert names(there) == [DISK_NAME, "step-00000002", "step-00000003"]
        assert [each.name for each in sorted((there / "step-00000003").glob("*.distcp"))] == [f"__{rank}_0.distcp"]
    assert world2.results(restores, tmp_path, hosts, 2, {}) == [(3, [3, 3], ())] * 2
    assert world2.results(restores, tmp_path, hosts[::-1], 2, {}) == [(3, [3, 3], ())] * 2


@pytest.mark.slow
def test_other_numbers_of_ranks_and_hosts(world4: World, world2: World, tmp_path: Path) -> None:
    world4.results(trains, tmp_path, ["a", "a", "b", "c"], [1], {})
    for host, count in (("a", 2), ("b", 1), ("c", 1)):
        assert len(list((tmp_path / host / "run" / "step-00000001").glob("*.distcp"))) == count
    found = (1, [1] * 4, ())
    assert world4.results(restores, tmp_path, ["c", "b", "b", "a"], 4, {}) == [found] * 4
    assert world4.results(restores, tmp_path, ["new", "c", "a", "b"], 4, {}) == [found] * 4
    message = r"host .* \(disk [0-9a-f]{8}\) has 1 of its 4 files, and is not in this job"
    for hosts in (["a", "b"], ["c", "a"]):
        outcomes = world2.run(restores, tmp_path, hosts, 4, {})
        assert [each.kind for each in outcomes] == ["MissingHostError"] * 2
        assert all(re.search(message, each.text) for each in outcomes), outcomes
    assert all(names(tmp_path / host / "run") == [DISK_NAME, "step-00000001"] for host in "abc")
    assert world4.results(restores, tmp_path, ["a", "b", "c", "c"], 4, {}) == [found] * 4


@pytest.mark.slow
def test_replaced_host_reads_from_the_mirror(world2: World, tmp_path: Path) -> None:
    """The files of the lost disk come from the mirror, of its newest step; a later step is set aside."""
    mirror = {"mirror": str(tmp_path / "mirror")}
    world2.results(trains, tmp_path, ["a", "b"], [1, 2], mirror)
    assert [info.state for info in scan(tmp_path / "mirror")] == ["complete"] * 2
    world2.results(trains, tmp_path, ["a", "b"], [3], {})
    shutil.rmtree(tmp_path / "b")
    outcomes = world2.run(restores, tmp_path, ["a", "b"], 2, {})
    assert [each.kind for each in outcomes] == ["MissingHostError"] * 2
    found = world2.results(restores, tmp_path, ["a", "b"], 2, mirror)
    assert found == [(2, [2, 2], ("__1_0.distcp",))] * 2
    assert names(tmp_path / "a" / "run")[1:] == ["step-00000001", "step-00000002", "step-00000003.damaged"]
    assert world2.results(trains, tmp_path, ["b", "a"], [3], {})[0][0] == [3]
    assert world2.results(restores, tmp_path, ["a", "b"], 2, {}) == [(3, [3, 3], ())] * 2


@pytest.mark.slow
def test_lost_file_comes_from_the_mirror(world2: World, tmp_path: Path) -> None:
    mirror = {"mirror": str(tmp_path / "mirror")}
    world2.results(trains, tmp_path, ["a", "b"], [1, 2], mirror)
    (tmp_path / "b" / "run" / "step-00000002" / "__1_0.distcp").unlink()
    found = world2.results(restores, tmp_path, ["a", "b"], 2, mirror)
    assert found == [(2, [2, 2], ("__1_0.distcp",))] * 2
    assert all("step-00000002.damaged" in names(tmp_path / host / "run") for host in "ab")
    assert world2.results(restores, tmp_path, ["b", "a"], 2, {}) == [(1, [1, 1], ())] * 2


def saves_alone(rank: int, size: int, folder: Path, hosts: list[str], options: dict[str, Any]) -> None:
    with opened(rank, hosts, folder, **options) as run:
        run.save(1, state_of(rank, 1))


def test_disks_that_are_not_shared_need_the_option(world2: World, tmp_path: Path) -> None:
    """Without it a save fails, and names it; so does a restore of one host's part."""
    outcomes = world2.run(saves_alone, tmp_path, ["a", "b"], {"own_disks": False})
    assert all(each.kind in ("SaveError", "WriteError") and "own_disks=True" in each.text for each in outcomes)
    world2.results(saves_alone, tmp_path, ["a", "b"], {})
    with (
        aiockpt.SyncCheckpointManager(tmp_path / "b" / "run", process_group=None) as run,
        pytest.raises(aiockpt.MissingHostError, match=r"has 1 of its 2 files, .*own_disks=True"),
    ):
        run.restore(state_of(1, 0))
    assert "host" in scan(tmp_path / "a" / "run")[0].problem
    assert world2.results(restores, tmp_path, ["a", "b"], 2, {}) == [(1, [1, 1], ())] * 2


@pytest.mark.slow
def test_writer_processes(tmp_path: Path) -> None:
    with World(2, may_start=True) as world:
        world.results(saves_alone, tmp_path, ["a", "b"], {"writer": "process"})
        assert world.results(restores, tmp_path, ["a", "b"], 2, {}) == [(1, [1, 1], ())] * 2


class KillingDisk(HostDisk):
    """Kills its trainer right before or after a step of the save of step 2; of rank 0, when the trainer does that."""

    def __init__(self, root: Path, step: str, rank: int) -> None:
        super().__init__(root)
        self.step, self.rank, self.trainer = step, rank, os.getpid()

    async def before(self, step: str, name: str) -> None:
        is_here = self.rank or os.getpid() == self.trainer
        if is_here and step == self.step and name.endswith("step-00000002"):
            os.kill(self.trainer, signal.SIGKILL)


def dies(rank: int, size: int, folder: Path, hosts: list[str], victim: int, step: str, options: dict[str, Any]) -> Any:
    root = folder / hosts[rank]
    root.mkdir(exist_ok=True)
    storage = KillingDisk(root, step, rank) if rank == victim else HostDisk(root)
    with opened(rank, hosts, folder, storage=storage, **options) as run:
        run.save(1, state_of(rank, 1))
        run.save(2, state_of(rank, 2))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", ["begin", "join", "commit"])
def test_kill_leaves_the_step_before(tmp_path: Path, victim: int, step: str) -> None:
    """Of rank 0 or another one, as between the publications of two disks: nothing of the step is left on any disk."""
    if (victim, step) == (0, "join"):
        pytest.skip("rank 0 joins nothing")
    hosts = ["a", "b"]
    with World(2) as world:
        outcomes = world.run(dies, tmp_path, hosts, victim, step, {})
        assert isinstance(outcomes[victim], RankFailure)
        assert outcomes[victim].killed
        assert isinstance(outcomes[1 - victim], RankFailure)
    with World(2) as world:
        assert world.results(restores, tmp_path, hosts, 2, {}) == [(1, [1, 1], ())] * 2
        for host in hosts:
            assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001"]
        assert world.results(trains, tmp_path, hosts, [2], {})[0][0] == [1, 2]


@pytest.mark.parametrize(
    ("victim", "step"),
    [
        pytest.param(0, "commit", marks=pytest.mark.slow),  # between the publications of two disks
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((0, "begin"), (1, "join"), (1, "commit"))),
    ],
)
def test_kill_of_a_trainer_whose_writer_process_lives_on(tmp_path: Path, victim: int, step: str) -> None:
    """No rank is told that the step is written if it is not; what is left is removed when the run is opened again."""
    hosts = ["a", "b"]
    with World(2, may_start=True) as world:
        outcomes = world.run(dies, tmp_path, hosts, victim, step, {"writer": "process"})
        assert all(isinstance(each, RankFailure) for each in outcomes), outcomes
        assert outcomes[victim].killed
    with World(2) as world:
        assert world.results(restores, tmp_path, hosts, 2, {}) == [(1, [1, 1], ())] * 2
        for host in hosts:
            assert names(tmp_path / host / "run") == [DISK_NAME, "step-00000001"]
        assert world.results(trains, tmp_path, hosts, [2], {})[0][0] == [1, 2]


def test_fallback_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fallback_path and own_disks=True can't be used together"):
        aiockpt.SyncCheckpointManager(tmp_path / "run", own_disks=True, fallback_path=tmp_path / "spare")


async def trains_async(rank: int, size: int, folder: Path, hosts: list[str]) -> Any:
    root = folder / hosts[rank]
    root.mkdir(exist_ok=True)
    storage, found = HostDisk(root), []
    async with aiockpt.CheckpointManager(
        RUN, storage=storage, own_disks=True, mirror=str(folder / "mirror"), keep=aiockpt.KeepLatest(1), **LIMITS
    ) as run:
        assert await run.restore(state_of(rank, 0)) is None
        save = await run.save(1, state_of(rank, 1))
        await save.written
        if rank == 0:
            found.append((await save.mirrored).path)
        async with run.open(1) as reader:
            found.append(sorted(reader))
        state = state_of(rank, 0)
        async with aiockpt.CheckpointManager(RUN, storage=storage, own_disks=True, read_only=True, **LIMITS) as reading:
            start = await reading.restore(state)
            assert start is not None
            found.append((start.step, step_in(state, rank)))
    return found


@pytest.mark.slow
def test_async_managers_that_write_and_read(world2: World, tmp_path: Path) -> None:
    keys = ["both", "own0", "own1", "step"]
    first, second = world2.results(trains_async, tmp_path, ["a", "b"])
    assert first == [str(tmp_path / "mirror" / "step-00000001"), keys, (1, 1)]
    assert second == [keys, (1, 1)]
    assert [info.state for info in scan(tmp_path / "mirror")] == ["complete"]


def overwrites(rank: int, size: int, folder: Path, hosts: list[str], options: dict[str, Any]) -> Any:
    with opened(rank, hosts, folder, **options) as run:
        run.save(1, state_of(rank, 1))
        with pytest.raises(aiockpt.CheckpointExistsError):
            run.save(1, state_of(rank, 2))
        run.save(1, state_of(rank, 1), overwrite=True)
        run.save(2, state_of(rank, 2))
        state = state_of(rank, 0)
        start = run.restore(state, step=1, discard_later=True)
        assert start is not None
        return run.steps(), step_in(state, rank)


@pytest.mark.slow
def test_steps_are_overwritten_and_discarded_on_all_disks(world2: World, tmp_path: Path) -> None:
    assert world2.results(overwrites, tmp_path, ["a", "b"], {}) == [([1], 1)] * 2
    assert all(names(tmp_path / host / "run") == [DISK_NAME, "step-00000001"] for host in "ab")


def shares_one(rank: int, size: int, folder: Path) -> Any:
    with aiockpt.SyncCheckpointManager(folder, own_disks=True, **LIMITS) as run:
        run.save(1, state_of(rank, 1))
        state = state_of(rank, 0)
        assert run.restore(state) is not None
        assert run._disks is not None
        return step_in(state, rank), len(run._disks.storage.disks), run._disks._server is None


def test_directory_that_all_see_is_one_disk(world2: World, tmp_path: Path) -> None:
    """Nothing is served then, and a manager without the option reads the run."""
    assert world2.results(shares_one, tmp_path / "run") == [(1, 1, True)] * 2
    with aiockpt.SyncCheckpointManager(tmp_path / "run", process_group=None) as run:
        state = state_of(1, 0)
        assert run.restore(state) is not None
        assert step_in(state, 1) == 1


def leaves(rank: int, size: int, folder: Path, hosts: list[str], fails: bool) -> bool:
    """Close rank 1's manager while rank 0 still has connections to its disk; return whether it was closed by then."""
    mark, error = folder / "closed", ValueError("a fault of the program")
    with opened(rank, hosts, folder) as run:
        run.save(1, state_of(rank, 1))
        if rank == 1:
            try:
                with run:
                    if fails:
                        raise error
            except ValueError:
                pass
            mark.touch()
        elif fails:
            until(mark.exists)
            return True
        else:
            assert [info.state for info in run._scanner.scan()] == ["complete"]
            return mark.exists()
    return True


@pytest.mark.slow
def test_rank_that_fails_waits_for_no_other(world2: World, tmp_path: Path) -> None:
    assert world2.results(leaves, tmp_path, ["a", "b"], True) == [True, True]


@pytest.mark.slow
def test_disk_is_served_until_the_others_have_left_it(world2: World, tmp_path: Path) -> None:
    assert world2.results(leaves, tmp_path, ["a", "b"], False) == [False, True]
