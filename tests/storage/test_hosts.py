"""Checkpoints on the disks of several hosts, each a directory here: what all have together is one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.format.names import MANIFEST_NAME, METADATA_NAME
from aiockpt.manager.scan import scan
from aiockpt.storage import LocalStorage
from aiockpt.storage.base import Storage
from aiockpt.storage.hosts import Disk, HostChange, HostDisks
from aiockpt.testing import StorageConformance
from tests.disks import HostDisk, disks_in, read, settle, union_of, write


@pytest.mark.slow
class TestOneDisk(StorageConformance):
    """The disk of a job of one host."""

    def make_storage(self, tmp_path: Path) -> Storage:
        return HostDisks([Disk("a", "host", LocalStorage())], "a")


RUN = "/run"
STEP = "/run/step-00000001"


def names_in(disk: Disk, path: str = STEP) -> list[str]:
    folder = Path(cast("HostDisk", disk.storage).place(path))
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


@pytest.mark.asyncio
async def test_files_stay_on_their_hosts(tmp_path: Path, workers: Workers) -> None:
    """Each disk has the files of its own ranks and all documents; every host reads the same."""
    disks = disks_in(tmp_path, "a", "b", "c")
    files = await write(disks, ["a", "a", "b", "c"], STEP, "first", workers)
    for name, own in (("a", [0, 1]), ("b", [2]), ("c", [3])):
        assert names_in(disks[name]) == sorted([MANIFEST_NAME, METADATA_NAME, *(f"__{rank}_0.distcp" for rank in own)])
        union = union_of(disks, name)
        assert await read(union, STEP, workers) == files
        (info,) = scan(RUN, union)
        assert (info.state, info.nbytes > 0, union.missing(STEP)) == ("complete", True, ())
    assert len({info.save_id for name in disks for info in scan(RUN, union_of(disks, name))}) == 1


@pytest.mark.asyncio
async def test_missing_host_is_named(tmp_path: Path, workers: Workers) -> None:
    disks = disks_in(tmp_path, "a", "b", "c")
    await write(disks, ["a", "b", "c"], STEP, "first", workers)
    for own, *others in (("a", "c"), ("c", "a"), ("c",)):
        union = union_of(disks, own, own, *others)
        with pytest.raises(aiockpt.LoadError, match=r"host host-b \(disk b\) has 1.* of its 3 files") as caught:
            await read(union, STEP, workers)
        assert type(caught.value) is aiockpt.MissingHostError  # nothing takes it for damaged
        assert "__1_0.distcp" in union.missing(STEP)
        assert scan(RUN, union)[0].state == "damaged"
        assert await union.clean(RUN, workers=workers) == []
    assert len(names_in(disks["a"])) == 3


@pytest.mark.asyncio
async def test_lost_file_of_a_host_that_is_there(tmp_path: Path, workers: Workers) -> None:
    disks = disks_in(tmp_path, "a", "b")
    await write(disks, ["a", "b"], STEP, "first", workers)
    Path(cast("HostDisk", disks["b"].storage).place(STEP), "__1_0.distcp").unlink()
    union = union_of(disks, "a")
    with pytest.raises(aiockpt.CorruptCheckpointError, match=r"__1_0.distcp, which host host-b"):
        await read(union, STEP, workers)
    assert await union.clean(RUN, workers=workers) == []  # it was announced


@pytest.mark.asyncio
@pytest.mark.parametrize("own", ["a", "b"])
async def test_deletion_and_renaming_reach_all_disks(tmp_path: Path, workers: Workers, own: str) -> None:
    disks = disks_in(tmp_path, "a", "b", "c")
    union = union_of(disks, own)
    for step in (1, 2):
        await write(disks, ["a", "b", "c"], f"{RUN}/step-0000000{step}", "first", workers)
    await union.delete(STEP, workers=workers)
    with pytest.raises(aiockpt.CheckpointNotFoundError):
        await union.delete(STEP, workers=workers)
    assert [names_in(disk) for disk in disks.values()] == [[]] * 3
    Path(cast("HostDisk", disks["c"].storage).place(f"{RUN}/aside")).mkdir()
    assert union.set_aside(f"{RUN}/step-00000002", ["aside", "aside-2"]) == f"{RUN}/aside-2"
    await settle(union, workers)
    assert [len(names_in(disk, f"{RUN}/aside-2")) for disk in disks.values()] == [3] * 3
    with pytest.raises(OSError, match="taken"):
        union.set_aside(f"{RUN}/aside-2", ["aside"])


@pytest.mark.asyncio
@pytest.mark.parametrize("published", [("b",), ("b", "c"), ("c",)])
async def test_kill_between_the_publications_of_two_disks(
    tmp_path: Path, workers: Workers, published: tuple[str, ...]
) -> None:
    """Rank 0's disk is the last: without it the step was never announced, nothing shows it, and it is removed."""
    disks = disks_in(tmp_path, "a", "b", "c")
    files = await write(disks, ["a", "b", "c"], f"{RUN}/step-00000000", "before", workers)
    await write(disks, ["a", "b", "c"], STEP, "first", workers)
    for name in {*disks} - {*published}:
        await disks[name].storage.delete(STEP, workers=workers)
    for own in disks:
        union = union_of(disks, own)
        assert [info.step for info in scan(RUN, union)] == [0]
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            await read(union, STEP, workers)
        assert union.stamp(STEP) is None
    assert await union_of(disks, "b").clean(RUN, workers=workers) == [STEP]
    assert [names_in(disk) for disk in disks.values()] == [[]] * 3
    assert await read(union_of(disks, "c"), f"{RUN}/step-00000000", workers) == files


@pytest.mark.asyncio
async def test_part_of_an_earlier_save_is_never_mixed_in(tmp_path: Path, workers: Workers) -> None:
    """A host that was away has files of the same names and sizes, of a step that was deleted and saved again."""
    disks = disks_in(tmp_path, "a", "b", "c")
    await write(disks, ["a", "b"], STEP, "save 1", workers)
    await union_of(disks, "a", "a", "c").delete(STEP, workers=workers)
    files = await write(disks, ["a", "c"], STEP, "save 2", workers)
    for own in disks:
        union = union_of(disks, own)
        assert await read(union, STEP, workers) == files
        assert scan(RUN, union)[0].state == "complete"
    with pytest.raises(aiockpt.MissingHostError):
        await read(union_of(disks, "b", "b", "c"), STEP, workers)
    await union_of(disks, "b").delete(STEP, workers=workers)
    assert [names_in(disk) for disk in disks.values()] == [[]] * 3


# --- what each host changes on its own disk --------------------------------------------------------------------


def host_of(disks: dict[str, Disk], own: str) -> HostDisks:
    return HostDisks(list(disks.values()), own)


@pytest.mark.asyncio
async def test_disk_that_makes_a_checkpoint_count_is_the_first(tmp_path: Path, workers: Workers) -> None:
    """The others wait for it, however often they are asked; it is not asked again."""
    disks = disks_in(tmp_path, "a", "b", "c")
    await write(disks, ["b", "a", "c"], STEP, "save 1", workers)
    leader, first, other = (host_of(disks, name) for name in disks)
    await leader.delete(STEP, workers=workers)
    changes = leader.decided()
    assert leader.decided() == []
    for host in (leader, other):
        await workers.run(host.change, changes)
    assert all(names_in(disk) for disk in disks.values())
    await workers.run(first.change, changes)
    assert [bool(names_in(disk)) for disk in disks.values()] == [True, False, True]
    for host in (leader, other):
        done = host.accept([])
        assert done is not None
        host.wait()
        assert host.accept([]) is None
    assert [names_in(disk) for disk in disks.values()] == [[]] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("to", ["", "aside"])
async def test_order_that_comes_late_changes_no_later_save(tmp_path: Path, workers: Workers, to: str) -> None:
    """The part on the disk is of another save by now, which has the same path."""
    disks = disks_in(tmp_path, "a", "b")
    await write(disks, ["a", "b"], STEP, "save 1", workers)
    marks, _ = union_of(disks, "a")._seen(STEP)
    files = await write(disks, ["a", "b"], STEP, "save 2", workers, overwrite=True)
    late = [HostChange(path, set(marks.values()), to=to) for path in (STEP, "/run/step-00000009")]
    await workers.run(host_of(disks, "b").change, late)
    assert await read(union_of(disks, "a"), STEP, workers) == files
    assert names_in(disks["b"], "/run/aside") == []


class FailsOnce(HostDisk):
    has_failed = False

    async def before(self, step: str, name: str) -> None:
        if step == "delete" and not self.has_failed:
            self.has_failed = True
            raise OSError("the disk has failed")


@pytest.mark.asyncio
async def test_deletion_that_fails_is_tried_again(tmp_path: Path, workers: Workers) -> None:
    disks = disks_in(tmp_path, "a", "b")
    for step in (1, 2):
        await write(disks, ["a", "b"], f"{RUN}/step-0000000{step}", "save 1", workers)
    disks["b"] = Disk("b", "host-b", FailsOnce(tmp_path / "b"))
    leader, other = host_of(disks, "a"), host_of(disks, "b")
    for step in (1, 2):
        await leader.delete(f"{RUN}/step-0000000{step}", workers=workers)
    with pytest.raises(aiockpt.DeleteError, match="the disk has failed"):
        await workers.run(other.change, leader.decided())
    assert [bool(names_in(disks["b"], f"{RUN}/step-0000000{step}")) for step in (1, 2)] == [True, False]
    await workers.run(other.change, [])
    assert names_in(disks["b"]) == []
