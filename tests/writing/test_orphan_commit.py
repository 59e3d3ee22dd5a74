"""Sidecar files not written by the other ranks' writers are never unpickled, accepted or waited for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aiockpt.core.threads import Workers
from aiockpt.errors import CommitError, WriteError
from aiockpt.planning.collective.messages import RankInventory, Written
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.local.temp_dir import spelled
from aiockpt.writing.collective_commit import WorldFacts
from aiockpt.writing.file_writer import FileWriter, WriterThreads
from aiockpt.writing.process.messages import Begin
from aiockpt.writing.process.orphan_commit import (
    OrphanCommit,
    RecoveryRecord,
    sign_sidecar,
    verify_sidecar,
)
from tests.fuzz.exploits import LIVE

SECRET = bytes(range(32))
NOTHING = Written({}, 0, {}, None, RankInventory([], [], [], [], []), token=7)
RIGHT = sign_sidecar(SECRET, 1, NOTHING)


@pytest.fixture
def workers():
    group = Workers(2, "aiockpt-test")
    yield group
    group.close()


async def keep(name: str) -> None:
    raise WriteError(f"can't remove {name}\x1b[2J: it belongs to somebody else")


async def commit(folder: Path, workers: Workers, leave: Callable[[Path], object], rank: int, delete=None) -> None:
    """Run the commit of one of two ranks' writers; ``leave`` makes the other's sidecar file."""
    storage, path = LocalStorage(), str(folder / "c")
    begun = await storage.begin(path, overwrite=False, workers=workers)
    joined = await storage.join(path, begun.ticket, workers=workers)
    joined.delete_sidecar = delete or joined.delete_sidecar
    leave(folder / spelled(f"{begun.ticket}-part-1"))
    facts = None if rank else WorldFacts(7, {}, {}, False, {}, 0.0)
    record = RecoveryRecord(rank, 2, SECRET, replace(NOTHING), facts)
    begin = Begin(0, path, b"", False, (), (), None, ticket=begun.ticket, joins=True)
    try:
        await OrphanCommit(begin, record, storage, joined, 0.02, workers).run(
            FileWriter((), (), (), WriterThreads(workers, workers))
        )
    finally:
        await joined.release()
        await begun.release()


@pytest.mark.asyncio
async def test_the_right_sidecar_is_accepted(workers, tmp_path: Path) -> None:
    await commit(tmp_path, workers, lambda sidecar: sidecar.write_bytes(RIGHT), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def _link(sidecar: Path) -> None:
    (sidecar.parent / "elsewhere").write_bytes(RIGHT)
    sidecar.symlink_to("elsewhere")


WRONG: dict[str, Callable[[Path], object]] = {
    "nothing": lambda sidecar: sidecar.touch(),
    "garbage": lambda sidecar: sidecar.write_bytes(bytes(range(256)) * 20),
    "cut short": lambda sidecar: sidecar.write_bytes(RIGHT[:-1]),
    "longer": lambda sidecar: sidecar.write_bytes(RIGHT + b"."),
    "a large hole": lambda sidecar: (sidecar.touch(), os.truncate(sidecar, 16 << 20)),
    "a link": _link,
    "a hard link": lambda sidecar: (
        _link(sidecar),
        sidecar.unlink(),
        (sidecar.parent / "elsewhere").write_bytes(b"x" * 99),
    ),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "of another save": lambda sidecar: sidecar.write_bytes(sign_sidecar(SECRET[::-1], 1, NOTHING)),
    "of another rank": lambda sidecar: sidecar.write_bytes(sign_sidecar(SECRET, 0, NOTHING)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", WRONG)
async def test_a_wrong_sidecar_is_ignored(kind: str, workers, tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="was not finished without the trainers"):
        await commit(tmp_path, workers, WRONG[kind], 0)
    assert {path.name for path in tmp_path.iterdir()} <= {"elsewhere"}


def test_nothing_is_unpickled_before_its_digest_is_verified(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for exploit in LIVE.values():
        program = exploit(f"touch {trace}")
        for data in (program, bytes(32) + program, RIGHT[:32] + program, RIGHT + program):
            assert verify_sidecar(SECRET, 1, data) is None
    assert not trace.exists()
    assert verify_sidecar(SECRET, 1, RIGHT) == NOTHING


@pytest.mark.asyncio
async def test_a_sidecar_that_exists_already_fails_the_commit(workers, tmp_path: Path) -> None:
    with pytest.raises(CommitError, match=r"can't write a sidecar file .* File exists"):
        await commit(tmp_path, workers, lambda sidecar: sidecar.write_bytes(RIGHT), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
async def test_sidecars_that_can_not_be_removed_do_not_fail_the_commit(workers, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING, "aiockpt")
    await commit(tmp_path, workers, lambda sidecar: sidecar.write_bytes(RIGHT), 0, keep)
    assert [record.getMessage() for record in caplog.records] == [
        f"beside {tmp_path / 'c'}: can't remove part-{rank}\\x1b[2J: it belongs to somebody else" for rank in (0, 1)
    ]
    assert (tmp_path / "c").is_dir()
    for sidecar in tmp_path.glob(".aiockpt-*"):
        sidecar.unlink()


@pytest.mark.asyncio
async def test_added_files_that_a_dead_trainer_has_begun_to_write_are_replaced(workers, tmp_path: Path) -> None:
    storage, path = LocalStorage(), str(tmp_path / "c")
    begun = await storage.begin(path, overwrite=False, workers=workers)
    await begun.write_files({"config.json": b"half"})
    joined = await storage.join(path, begun.ticket, workers=workers)
    facts = WorldFacts(7, {}, {"config.json": b"whole"}, False, {}, 0.0)
    begin = Begin(0, path, b"", False, (), (), None, ticket=begun.ticket, joins=True)
    (tmp_path / spelled(f"{begun.ticket}-part-1")).write_bytes(RIGHT)
    record = RecoveryRecord(0, 2, SECRET, replace(NOTHING), facts)
    writer = FileWriter((), (), (), WriterThreads(workers, workers))
    await OrphanCommit(begin, record, storage, joined, 5.0, workers).run(writer)
    await joined.release()
    await begun.release()
    assert (tmp_path / "c" / "config.json").read_bytes() == b"whole"
