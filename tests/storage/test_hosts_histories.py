"""Random histories of the disks of several hosts, compared with a model: saves, kills, deletions, disks that are gone.

Whatever has happened, a checkpoint that is read has the files of one save and no others; one that was announced is read
as long as its disks are there, and is never cleaned away; one that was not is never seen beside its last disk.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.manager.scan import scan
from aiockpt.storage.hosts import Disk, HostDisks
from tests.disks import HostDisk, disks_in, read, union_of, write
from tests.examples import examples

RUN = "/run"
HOSTS = ["a", "b", "c"]

RANKS = st.lists(st.sampled_from(HOSTS), min_size=1, max_size=3)
STEPS = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("save"), STEPS, RANKS, st.integers(0, 4)),  # as many disks publish; the last one may be killed
    st.tuples(st.just("save"), STEPS, RANKS, st.just(4)),
    st.tuples(st.just("delete"), STEPS, st.integers(0, 4)),
    st.tuples(st.just("leave"), st.sampled_from(HOSTS)),
    st.tuples(st.just("return"), st.sampled_from(HOSTS)),
    st.tuples(st.just("replace"), st.sampled_from(HOSTS)),
    st.tuples(st.just("clean")),
)


@dataclass
class Save:
    """A save of the model."""

    files: dict[str, bytes]
    disks: list[str]  # ids, that of rank 0 first
    holders: set[str]  # ids of those that have files
    is_announced: bool
    is_deleted: bool = False


class History:
    def __init__(self, folder: Path, workers: Workers) -> None:
        self.folder, self.workers = folder, workers
        self.disks = disks_in(folder, *HOSTS)
        self.away: set[str] = set()
        self.saves: dict[int, list[Save]] = {}
        self.count = 0

    @property
    def here(self) -> dict[str, Disk]:
        return {host: disk for host, disk in self.disks.items() if host not in self.away}

    def path(self, step: int) -> str:
        return f"{RUN}/step-{step:08d}"

    def is_on(self, disk: Disk, step: int) -> bool:
        return Path(cast("HostDisk", disk.storage).place(self.path(step))).exists()

    async def save(self, step: int, ranks: list[str], published: int) -> None:
        ranks = [host for host in ranks if host not in self.away]
        job = list(dict.fromkeys(ranks))
        if not ranks or any(self.is_on(disk, step) for disk in self.here.values()):
            return
        self.count += 1
        files = await write(self.disks, ranks, self.path(step), f"save {self.count}", self.workers)
        for host in [*job[1:], job[0]][published:]:  # as if rank 0 had been killed before
            await self.disks[host].storage.delete(self.path(step), workers=self.workers)
        ids = [self.disks[host].id for host in job]
        save = Save(files, ids, set(ids), published >= len(job))
        self.saves.setdefault(step, []).append(save)

    async def delete(self, step: int, done: int) -> None:
        here = self.here
        if not here or step not in [info.step for info in scan(RUN, union_of(here, next(iter(here))))]:
            return
        union = union_of(here, next(iter(here)))
        order = union._in_order_of_removal(self.path(step))
        if done >= len(order):
            await union.delete(self.path(step), workers=self.workers)
        else:  # killed before the rest
            for disk in order[:done]:
                if self.is_on(disk, step):
                    await disk.storage.delete(self.path(step), workers=self.workers)
        if done:
            for save in self.saves.get(step, ()):
                save.is_deleted = True

    def replace(self, host: str) -> None:
        """Put an empty disk in place of one, which is gone with all that it has."""
        self.count += 1
        root = self.folder / f"{host}-{self.count}"
        root.mkdir()
        self.disks[host] = Disk(f"{host}-{self.count}", f"host-{host}", HostDisk(root))
        self.away.discard(host)

    async def run(self, event: tuple[Any, ...]) -> None:
        match event:
            case "save", step, ranks, published:
                await self.save(step, ranks, published)
            case "delete", step, done:
                await self.delete(step, done)
            case "leave", host:
                self.away.add(host)
            case "return", host:
                self.away.discard(host)
            case "replace", host:
                self.replace(host)
            case _ if self.here:
                await union_of(self.here, min(self.here)).clean(RUN, workers=self.workers)

    async def check(self) -> None:
        here = self.here
        for own in here:
            union = union_of(here, own)
            infos = {info.step: info for info in scan(RUN, union)}
            for step, saves in self.saves.items():
                await self.check_step(union, step, saves, infos)

    async def check_step(self, union: HostDisks, step: int, saves: list[Save], infos: dict[int, Any]) -> None:
        ids = {disk.id for disk in union.disks}
        try:
            found: dict[str, bytes] | None = await read(union, self.path(step), self.workers)
        except (aiockpt.CheckpointNotFoundError, aiockpt.CorruptCheckpointError, aiockpt.MissingHostError) as exc:
            found, error = None, exc
        if found is not None:
            assert found in [save.files for save in saves]
            assert infos[step].state == "complete"
        else:
            assert step not in infos or infos[step].state != "complete"
        last = saves[-1]
        if last.is_announced and not last.is_deleted:
            if last.holders <= ids:
                assert found == last.files
            elif last.holders & ids:
                assert isinstance(error, aiockpt.MissingHostError)
        elif not last.is_announced and last.disks[0] in ids and len(last.disks) > 1:
            assert found != last.files
            assert len(saves) > 1 or step not in infos


@examples(60, HealthCheck)
@given(st.lists(EVENTS, max_size=14))
def test_random_histories(events: list[tuple[Any, ...]]) -> None:
    workers = Workers(4, "tests")

    async def play(folder: Path) -> None:
        history = History(folder, workers)
        for event in events:
            await history.run(event)
            await history.check()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))
    workers.close()
