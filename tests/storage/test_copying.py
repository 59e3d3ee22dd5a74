"""Copies of committed checkpoints: whole or invisible, and no file is sent twice, wherever a copy is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiockpt
from aiockpt import MirrorResult
from aiockpt.core.threads import Workers
from aiockpt.format.manifest.manifest import save_id_of
from aiockpt.storage import LocalStorage, WrapperStorage, copying
from aiockpt.storage.base import Storage
from aiockpt.storage.copying import RateLimit, copy_checkpoint
from aiockpt.storage.local.temp_dir import RECORD, REPLACED, copy_ticket
from aiockpt.testing import FaultyStorage
from tests.places import ServerPath, storage_of
from tests.server_storage import ServerStorage

STATE = {f"t{number}": torch.arange(300_000.0) + number for number in range(4)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_CHUNK_BYTES", 1 << 20)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Return a checkpoint of several files."""
    path = tmp_path / "source"
    more = {f"notes-{number}": os.urandom(1_500_000) for number in range(3)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, path, files=more | {"empty": b""})
    return str(path)


def id_of(path: str) -> str:
    return save_id_of(Path(path, ".aiockpt.json").read_bytes())


async def copy(
    source: str, target: str, workers: Workers, storage: Storage | None = None, **options: Any
) -> MirrorResult:
    to = storage or storage_of(target)
    limit = options.pop("limit", RateLimit(None))
    return await copy_checkpoint(
        LocalStorage(), source, to, to.resolve(target), id_of(source), workers=workers, limit=limit, **options
    )


def is_whole(path: str | os.PathLike[str]) -> bool:
    with aiockpt.SyncCheckpointer() as ckpt:
        assert ckpt.verify(path).ok
        found = ckpt.load(path)
    return all(torch.equal(found[key], value) for key, value in STATE.items())


class CountingStorage(WrapperStorage):
    """Counts the files that are written to their ends, and stops before the n-th step."""

    def __init__(self, inner: Storage, last: float = float("inf"), scope: anyio.CancelScope | None = None) -> None:
        super().__init__(inner)
        self.finished: Counter[str] = Counter()
        self._steps, self._last, self._scope = itertools.count(1), last, scope

    async def before(self, step: str, name: str) -> None:
        if next(self._steps) == self._last:
            if self._scope is None:
                raise aiockpt.SaveError("stopped")
            self._scope.cancel()
            await anyio.lowlevel.checkpoint()
        if step == "finish":  # of the files, documents aside
            self.finished[name] += name not in (".metadata", ".aiockpt.json")


@pytest.mark.asyncio
async def test_copy_is_the_same_checkpoint(source: str, anywhere: Path | ServerPath, workers: Workers) -> None:
    target = str(anywhere / "copy")
    facts = await copy(source, target, workers)
    assert facts.nbytes == facts.sent_bytes == sum(each.stat().st_size for each in Path(source).iterdir())
    assert is_whole(target)
    with storage_of(target).look(target) as listing:
        manifest = listing.fetch(".aiockpt.json", 0, listing.files[".aiockpt.json"])
    assert save_id_of(manifest) == id_of(source)


@pytest.mark.asyncio
async def test_copy_replaces_another_checkpoint(source: str, anywhere: Path | ServerPath, workers: Workers) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"x": torch.ones(3)}, anywhere / "copy")
    await copy(source, str(anywhere / "copy"), workers)
    assert is_whole(anywhere / "copy")


@pytest.mark.asyncio
async def test_kill_between_two_renames(source: str, tmp_path: Path, workers: Workers) -> None:
    """On file systems that can't exchange two names: the copy is whole, but has not its name."""
    there, hidden = tmp_path / "there", tmp_path / "there" / copy_ticket(id_of(source))
    await copy(source, str(there / "new"), workers)
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save({"x": torch.ones(3)}, there / "copy")
    (there / "copy").rename(f"{hidden}{REPLACED}")
    (there / "new").rename(hidden)
    Path(f"{hidden}{RECORD}").write_text("copy")
    await copy(source, str(there / "copy"), workers)
    assert is_whole(there / "copy")
    assert os.listdir(there) == ["copy"]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_copy_over_a_copy_of_the_same_checkpoint(
    source: str, anywhere: Path | ServerPath, workers: Workers
) -> None:
    """As of one that was damaged: what is there is neither gone on with nor retired in place of what replaces it."""
    target = str(anywhere / "copy")
    storage = LocalStorage() if isinstance(anywhere, Path) else ServerStorage(anywhere._storage._root, grace_s=0.0)
    for _ in range(3):
        facts = await copy(source, target, workers, storage)
        assert facts.sent_bytes == facts.nbytes
        assert is_whole(target)
        await storage.clean(str(anywhere), older_than_s=0.0, workers=workers)
        assert is_whole(target)


@pytest.mark.kills
@pytest.mark.parametrize("cause", ["error", "cancellation"])
@pytest.mark.asyncio
async def test_interrupted_at_each_step_no_file_is_sent_twice(
    source: str, anywhere: Path | ServerPath, workers: Workers, cause: str
) -> None:
    sizes, found = {each.name: each.stat().st_size for each in Path(source).iterdir()}, []
    documents = {".metadata", ".aiockpt.json"}
    names = sizes.keys() - documents
    for last in itertools.count(1):
        target = str(anywhere / f"copy-{last}")
        with contextlib.suppress(aiockpt.SaveError), anyio.CancelScope() as scope:
            first = CountingStorage(storage_of(target), last, scope if cause == "cancellation" else None)
            await copy(source, target, workers, first)
            break
        assert storage_of(target).stamp(target) is None
        begun = await storage_of(target).resume(target, id_of(source), workers=workers)
        whole = await begun.whole_files()
        await begun.suspend()
        found.append(len(whole.keys() & names))
        again = CountingStorage(storage_of(target))
        facts = await copy(source, target, workers, again)
        assert is_whole(target)
        sent = {name for name, count in again.finished.items() if count}
        assert sent == names - whole.keys()
        assert facts.sent_bytes == sum(sizes[name] for name in sent | documents)
    assert last > 20
    assert (min(found), max(found)) == (0, len(names))


@pytest.mark.asyncio
async def test_damaged_source_is_not_copied(source: str, anywhere: Path | ServerPath, workers: Workers) -> None:
    file = next(Path(source).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    target = str(anywhere / "copy")
    with pytest.raises(aiockpt.CorruptCheckpointError, match=f"{file.name} does not match its CRC"):
        await copy(source, target, workers)
    assert storage_of(target).stamp(target) is None
    assert not list((anywhere).iterdir()) or anywhere != ServerPath
    file.unlink()
    with pytest.raises(aiockpt.CorruptCheckpointError, match="lacks"):
        await copy(source, target, workers)


@pytest.mark.asyncio
async def test_source_that_was_replaced_is_not_copied(source: str, tmp_path: Path, workers: Workers) -> None:
    to = LocalStorage()
    with pytest.raises(aiockpt.CheckpointNotFoundError, match="was replaced before it was copied"):
        await copy_checkpoint(to, source, to, str(tmp_path / "copy"), "0" * 16, workers=workers, limit=RateLimit(None))
    assert not (tmp_path / "copy").exists()


@pytest.mark.asyncio
async def test_check_decides_before_publishing(source: str, anywhere: Path | ServerPath, workers: Workers) -> None:
    def refuse() -> None:
        raise aiockpt.RunLockedError("taken")

    target = str(anywhere / "copy")
    with pytest.raises(aiockpt.RunLockedError):
        await copy(source, target, workers, check=refuse)
    assert storage_of(target).stamp(target) is None
    facts = await copy(source, target, workers)
    assert facts.sent_bytes == sum((Path(source) / name).stat().st_size for name in (".metadata", ".aiockpt.json"))
    assert is_whole(target)


@pytest.mark.asyncio
async def test_rate_limit_paces_the_bytes(source: str, tmp_path: Path, workers: Workers) -> None:
    limit = RateLimit(100 << 20)
    facts = await copy(source, str(tmp_path / "copy"), workers, limit=limit)
    slept: list[float] = []
    limit = RateLimit(2 << 20)
    assert limit.most_bytes == 1 << 20
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(3):
        await limit.take(1 << 18)
        slept.append(loop.time() - begun)
    assert slept[0] < slept[1] < slept[2]
    assert slept[2] >= 2 * (1 << 18) / (2 << 20) * 0.9
    assert facts.nbytes > 0


@pytest.mark.asyncio
async def test_copy_that_is_given_up_is_removed_when_it_is_old(
    source: str, anywhere: Path | ServerPath, workers: Workers
) -> None:
    target = str(anywhere / "copy")
    faulty = FaultyStorage(storage_of(target), "commit", OSError(errno.EIO, "I/O error"))
    with pytest.raises(aiockpt.SaveError):
        await copy(source, target, workers, faulty)
    storage = storage_of(target)
    assert await storage.clean(str(anywhere), workers=workers) == []
    assert await storage.clean(str(anywhere), older_than_s=0.0, workers=workers)
    await copy(source, target, workers)
    assert is_whole(target)


@pytest.mark.asyncio
async def test_one_at_a_time_goes_on_with_a_copy(tmp_path: Path, workers: Workers) -> None:
    """Else one would remove, and publish, files that the other is writing."""
    storage, target, save_id = LocalStorage(), str(tmp_path / "target"), "0123456789abcdef"
    first = await storage.resume(target, save_id, workers=workers)
    await first.create("__0_0.distcp", 10)
    with pytest.raises(aiockpt.WriteError, match="is being copied by another process"):
        await storage.resume(target, save_id, workers=workers)
    await first.suspend()
    second = await storage.resume(target, save_id, workers=workers)
    with pytest.raises(aiockpt.WriteError):
        await storage.resume(target, save_id, workers=workers)
    await second.abort()


@pytest.mark.asyncio
async def test_what_rots_while_nobody_copies_gets_into_no_other_copy(tmp_path: Path, workers: Workers) -> None:
    """What an earlier copy left whole was read by nobody since, so nobody vouches for it."""
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    async with aiockpt.AsyncCheckpointer() as ckpt:
        await ckpt.save(STATE, first, base="auto")
        await ckpt.save(STATE | {"more": torch.ones(5)}, second, base="auto")

    def stop() -> None:
        raise aiockpt.SaveError("stopped")

    there = tmp_path / "there"
    with pytest.raises(aiockpt.SaveError):
        await copy(first, str(there / "1"), workers, check=stop)
    for file in (there / copy_ticket(id_of(first))).glob("*.distcp"):
        with file.open("r+b") as opened:
            opened.seek(700)
            opened.write(b"\xff" * 16)
    storage = LocalStorage()
    await copy(first, str(there / "1"), workers, storage)
    await copy(second, str(there / "2"), workers, storage, base=str(there / "1"))
    assert is_whole(there / "2")
