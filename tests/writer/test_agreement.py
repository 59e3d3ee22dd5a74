"""Words that are not from the writers of the other ranks: never unpickled, never taken for theirs, not waited for."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aiockpt.core.threads import Workers
from aiockpt.errors import CommitError, WriteError
from aiockpt.planning.collective.messages import RankInventory, Written
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.writing.collective_commit import WorldFacts
from aiockpt.writing.process.messages import Begin
from aiockpt.writing.process.orphan_commit import Agreement
from aiockpt.writing.process.recovery_record import Leadership, RecoveryRecord, sealed, unsealed
from tests.fuzz.exploits import LIVE

SECRET = bytes(range(32))
NOTHING = Written({}, 0, {}, None, RankInventory([], [], [], [], []), token=7)
RIGHT = sealed(SECRET, 1, NOTHING)


@pytest.fixture
def workers():
    group = Workers(2, "aiockpt-test")
    yield group
    group.close()


async def keep(name: str) -> None:
    raise WriteError(f"can't remove {name}\x1b[2J: it belongs to somebody else")


async def settle(folder: Path, workers: Workers, leave: Callable[[Path], object], rank: int, take_back=None) -> None:
    """Let the writer of a rank agree with the other of two, whose word is what is left there."""
    storage, path = LocalStorage(), str(folder / "c")
    begun = await storage.begin(path, overwrite=False, workers=workers)
    joined = await storage.join(path, begun.ticket, workers=workers)
    joined.delete_sidecar = take_back or joined.delete_sidecar
    leave(folder / f"{begun.ticket}-part-1")
    lead = None if rank else Leadership(None, WorldFacts(7, {}, {}, 0.0), overwrite=False)
    parting = pickle.dumps(RecoveryRecord(rank, 2, SECRET, replace(NOTHING), lead))
    begin = Begin(0, path, b"", False, (), 0, None, (), begun.ticket, True, 0.0, None)
    try:
        await Agreement(begin, parting, storage, joined, 0.02, workers).settle({})
    finally:
        await joined.release()
        await begun.release()


@pytest.mark.asyncio
async def test_the_right_word_is_heard(workers, tmp_path: Path) -> None:
    await settle(tmp_path, workers, lambda word: word.write_bytes(RIGHT), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def _link(word: Path) -> None:
    (word.parent / "elsewhere").write_bytes(RIGHT)
    word.symlink_to("elsewhere")


WRONG: dict[str, Callable[[Path], object]] = {
    "nothing": lambda word: word.touch(),
    "garbage": lambda word: word.write_bytes(bytes(range(256)) * 20),
    "cut short": lambda word: word.write_bytes(RIGHT[:-1]),
    "longer": lambda word: word.write_bytes(RIGHT + b"."),
    "a large hole": lambda word: (word.touch(), os.truncate(word, 16 << 20)),
    "a link": _link,
    "a hard link": lambda word: (_link(word), word.unlink(), (word.parent / "elsewhere").write_bytes(b"x" * 99)),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "of another save": lambda word: word.write_bytes(sealed(SECRET[::-1], 1, NOTHING)),
    "of another rank": lambda word: word.write_bytes(sealed(SECRET, 0, NOTHING)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", WRONG)
async def test_a_wrong_word_is_no_word(kind: str, workers, tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="was not finished without the trainers"):
        await settle(tmp_path, workers, WRONG[kind], 0)
    assert {path.name for path in tmp_path.iterdir()} <= {"elsewhere"}


def test_nothing_is_unpickled_before_it_is_known_whose_it_is(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for exploit in LIVE.values():
        program = exploit(f"touch {trace}")
        for data in (program, bytes(32) + program, RIGHT[:32] + program, RIGHT + program):
            assert unsealed(SECRET, 1, data) is None
    assert not trace.exists()
    assert unsealed(SECRET, 1, RIGHT) == NOTHING


@pytest.mark.asyncio
async def test_a_word_that_somebody_has_left_before(workers, tmp_path: Path) -> None:
    with pytest.raises(CommitError, match=r"can't leave a word .* File exists"):
        await settle(tmp_path, workers, lambda word: word.write_bytes(RIGHT), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
async def test_words_that_can_not_be_removed_fail_nothing(workers, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.WARNING, "aiockpt")
    await settle(tmp_path, workers, lambda word: word.write_bytes(RIGHT), 0, keep)
    assert [record.getMessage() for record in caplog.records] == [
        f"beside {tmp_path / 'c'}: can't remove part-{rank}\\x1b[2J: it belongs to somebody else" for rank in (0, 1)
    ]
    assert (tmp_path / "c").is_dir()
    for word in tmp_path.glob(".aiockpt-*"):
        word.unlink()
