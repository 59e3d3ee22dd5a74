"""Replicas of one disk's files on another one, with directories as the disks of hosts."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import aiockpt
import aiockpt.observers
from aiockpt.engine.facade import EngineAccess
from aiockpt.format.manifest.manifest import DiskFacts, with_disks
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.manager import mirror as mirroring
from aiockpt.manager.mirror import MirrorSettings, Tier
from aiockpt.manager.replicas import ReplicaCopies, ReplicaWatch, common_steps, replicas_of, sources_of
from aiockpt.manager.retention import Retention
from aiockpt.manager.scan import DEFAULT_NAMES, StepInfo, StepScanner
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.wrapper import WrapperStorage
from aiockpt.telemetry.observer import CallEvent
from tests.manager.gates import Gate
from tests.manager.runs import names, path_of, state_of
from tests.polling import until

OF_A, OF_B = "__0_0.distcp", "more.dat"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(mirroring, "_LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(mirroring, "_PATIENCE_S", 0.1)


class Heard(aiockpt.Observer):
    def __init__(self) -> None:
        self.events: list[tuple[CallEvent, Any]] = []

    def replicated(self, event: CallEvent, result: Any, backlog: Any) -> None:
        self.events.append((event, result))


class Hosts:
    """Two hosts, a and b, each with a disk: a directory with its files of each step, and the documents."""

    def __init__(self, root: Path, *observers: aiockpt.Observer) -> None:
        self.root, self.heard = root, Heard()
        self.ckpt = aiockpt.SyncCheckpointer(process_group=None, observers=[self.heard, *observers])
        self.opened: list[Any] = []
        self.damage: dict[str, dict[str, str]] = {"a": {}, "b": {}}  # by the host that has noted it
        self.held = [DiskFacts("a", "host-a", frozenset({OF_A})), DiskFacts("b", "host-b", frozenset({OF_B}))]

    def save(self, step: int) -> Any:
        """Save a step, whose second file is one that the user adds; return the handle."""
        whole = path_of(self.root / "whole", step)
        handle = self.ckpt.submit(state_of(step), whole, files={OF_B: os.urandom(100_000)}, overwrite=True)
        handle.written.result()
        manifest = (whole / MANIFEST_NAME).read_bytes()
        for host, lacks in (("a", OF_B), ("b", OF_A)):
            shutil.rmtree(path_of(self.root / host, step), ignore_errors=True)
            shutil.copytree(whole, path_of(self.root / host, step), ignore=shutil.ignore_patterns(lacks))
            (path_of(self.root / host, step) / MANIFEST_NAME).write_bytes(with_disks(manifest, self.held))
        return handle

    def delete(self, step: int) -> None:
        for host in "ab":
            shutil.rmtree(path_of(self.root / host, step))

    def tier(self, host: str, storage: Any = None) -> Tier:
        return Tier(storage or LocalStorage(), str(self.root / host), DEFAULT_NAMES, disk=host)

    def replicas(self, host: str, of: str) -> Path:
        return self.root / f"replicas-{host}" / of

    def copies(self, host: str, source: Tier, target: Any = None, **settings: Any) -> ReplicaCopies:
        made = ReplicaCopies(
            source,
            self.tier(host, target),
            str(self.root / f"replicas-{host}"),
            MirrorSettings(**settings),
            EngineAccess(self.ckpt).reports,
            self.damage[host],
            f"host-{source.disk}",
        )
        self.opened.append(made)
        return made

    def copy(self, copies: ReplicaCopies | None = None) -> ReplicaCopies:
        """Copy everything that the disk of host a has to host b; fail if that takes too long."""
        copies = copies or self.copies("b", self.tier("a"))
        copies.poke()
        left = copies.finish()
        if left is not None:
            left.result(60)
        return copies

    def close(self) -> None:
        for each in self.opened:
            (each.end if isinstance(each, Retention) else each.close)()
        self.ckpt.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


def found(directory: Path) -> list[tuple[int, str]]:
    infos = StepScanner(LocalStorage(), str(directory), is_part=True).scan()
    return [(info.step, info.save_id) for info in infos if info.state == "complete"]


# --- decisions ------------------------------------------------------------------------------------------


def test_each_disk_is_the_source_of_one_other() -> None:
    assert sources_of(["a", "b"]) == {"a": "b", "b": "a"}
    for size in range(2, 9):
        disks = [f"{(7 * number) % 10}d" for number in range(size)]
        sources = sources_of(disks)
        assert sources == sources_of(reversed(disks))
        assert sorted(sources.values()) == sorted(disks)
        assert all(disk != source for disk, source in sources.items())
        without = sources_of(disks[1:])
        assert sum(without[disk] != sources[disk] for disk in without) == (size > 1)  # little is copied anew


def test_steps_that_all_disks_have_replicas_of() -> None:
    def step(number: int, save_id: str = "x", state: Any = "complete") -> StepInfo:
        return StepInfo(number, f"/{number}", state, 10, save_id=save_id)

    one = [step(1), step(2), step(3), step(4)]
    other = [step(1), step(2, "y"), step(3, "x", "damaged")]
    assert [(info.step, info.nbytes) for info in common_steps([one, other])] == [(1, 20)]
    assert [info.step for info in common_steps([one])] == [1, 2, 3, 4]


# --- copies ---------------------------------------------------------------------------------------------


def test_files_of_a_disk_are_copied_and_no_others(hosts: Hosts) -> None:
    for step in (1, 2):
        hosts.save(step)
    hosts.copy()
    assert found(hosts.replicas("b", "a")) == found(hosts.root / "a")
    for step in (1, 2):
        copy, origin = path_of(hosts.replicas("b", "a"), step), path_of(hosts.root / "a", step)
        assert names(copy) == names(origin)
        assert OF_B not in names(copy)
        assert all((copy / name).read_bytes() == (origin / name).read_bytes() for name in names(origin))
    hosts.ckpt._engine.reports.end()
    assert [Path(event.path).name[-1] for event, _ in hosts.heard.events] == ["2", "1"]  # the newest first


def test_number_that_is_saved_again(hosts: Hosts) -> None:
    hosts.save(1)
    hosts.copy()
    hosts.save(1)
    before = found(hosts.replicas("b", "a"))
    hosts.copy(hosts.opened[0])
    assert before != found(hosts.replicas("b", "a")) == found(hosts.root / "a")


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_damaged_file_is_not_copied(hosts: Hosts, how: str, caplog: pytest.LogCaptureFixture) -> None:
    hosts.save(1)
    file = path_of(hosts.root / "a", 1) / OF_A
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.unlink()
    if how == "flipped":
        file.write_bytes(data)
    hosts.copy()
    assert found(hosts.replicas("b", "a")) == []
    assert "step 1 is not replicated, as it is damaged" in caplog.text
    hosts.save(2)
    hosts.copy(hosts.opened[0])
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [2]


def test_replicas_follow_the_retention_of_the_run(hosts: Hosts) -> None:
    for step in (1, 2):
        hosts.save(step)
    copies = hosts.copy()
    hosts.save(3)
    for step in (1, 2):
        hosts.delete(step)
    hosts.copy(copies)
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [3]


def test_nothing_is_deleted_before_the_newest_step_is_there(hosts: Hosts) -> None:
    hosts.save(1)
    hosts.copy()
    hosts.opened[0].close()
    shutil.rmtree(hosts.root / "a")  # a new disk, or one that is not mounted
    hosts.copy(hosts.copies("b", hosts.tier("a"))).close()
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [1]
    hosts.save(2)
    shutil.rmtree(path_of(hosts.root / "a", 1), ignore_errors=True)
    gate = Gate(LocalStorage(), str(hosts.root / "a"))
    gate.is_away = True
    copies = hosts.copies("b", hosts.tier("a", gate))
    hosts.copy(copies)  # gives up
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [1]
    gate.is_away = False
    copies.close()
    hosts.copy()
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [2]


def test_replicas_of_a_lost_disk_stay_as_long_as_the_run_has_the_step(hosts: Hosts) -> None:
    for step in (1, 2):
        hosts.save(step)
    hosts.copy()
    hosts.opened[0].close()
    shutil.copytree(hosts.root / "a", hosts.root / "c")  # of which this host has replicas from now on
    hosts.copy(hosts.copies("b", hosts.tier("c")))
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [1, 2]
    shutil.rmtree(path_of(hosts.root / "b", 1))
    hosts.copy(hosts.opened[1])
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["create", "write", "finish", "commit"])
def test_copy_that_was_interrupted_goes_on(hosts: Hosts, tmp_path: Path, where: str) -> None:
    """A part of a file that a killed process has copied is not trusted; a whole file is not copied again."""
    hosts.held[0] = DiskFacts("a", "host-a", frozenset({OF_A, OF_B}))
    hosts.save(1)
    (path_of(hosts.root / "whole", 1) / OF_B).replace(path_of(hosts.root / "a", 1) / OF_B)
    pid = os.fork()
    if not pid:
        try:
            _Kills(LocalStorage()).copy(tmp_path, where)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    directory = hosts.replicas("b", "a")
    assert found(directory) == []
    assert [name for name in names(directory) if not name.startswith(".")] == []
    gate = Gate(LocalStorage(), str(hosts.root / "a"))
    hosts.copy(hosts.copies("b", hosts.tier("a", gate)))
    assert found(directory) == found(hosts.root / "a")
    if where == "commit":  # they were whole
        assert {OF_A, OF_B}.isdisjoint(gate.reads)
    assert [name for name in names(directory) if name.startswith(".aiockpt-")] == []


class _Kills(WrapperStorage):
    """Kills its process at a step of the copy."""

    where = ""

    async def before(self, step: str, name: str) -> None:
        if step == self.where:
            os.kill(os.getpid(), signal.SIGKILL)

    def copy(self, root: Path, where: str) -> None:
        self.where, again = where, Hosts(root)
        again.copy(again.copies("b", again.tier("a"), self))


def test_nothing_to_copy_is_no_failure(hosts: Hosts) -> None:
    copies = hosts.copy(hosts.copies("b", hosts.tier("a"), locks=False))
    assert copies.backlog.error is None
    hosts.save(1)
    hosts.copy(copies)
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [1]


def test_metrics_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    observers = [aiockpt.observers.PrometheusObserver(registry), aiockpt.observers.LoggingObserver()]
    caplog.set_level(logging.INFO)
    with contextlib.closing(Hosts(tmp_path, *observers)) as hosts:
        hosts.save(1)
        file = path_of(hosts.root / "a", 1) / OF_A
        file.rename(file.with_name("away"))
        copies = hosts.copy()
        file.with_name("away").rename(file)
        hosts.save(2)
        hosts.copy(copies)
    value = registry.get_sample_value
    assert (value("aiockpt_replicas_total", {"outcome": "failed"}) or 0.0) >= 1.0
    assert value("aiockpt_replicas_total", {"outcome": "done"}) == 1.0
    copy = path_of(hosts.replicas("b", "a"), 2)
    assert value("aiockpt_replicated_bytes_total") == sum(each.stat().st_size for each in copy.iterdir())
    assert value("aiockpt_replica_backlog_steps") == 0.0
    assert f"replicated {copy}: " in caplog.text
    assert "was not replicated: " in caplog.text


def test_two_jobs_do_not_write_the_same_replicas(hosts: Hosts) -> None:
    hosts.save(1)
    one = hosts.copy()
    hosts.save(2)
    other = hosts.copies("b", hosts.tier("a"))
    hosts.copy(other)
    assert isinstance(other.backlog.error, aiockpt.RunLockedError)
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [1]
    hosts.copy(one)
    assert [step for step, _ in found(hosts.replicas("b", "a"))] == [1, 2]


# --- what all hosts have --------------------------------------------------------------------------------


class Watched:
    """A run of two disks that keeps one step, and the replicas of both."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        here = hosts.tier("a")  # it has the documents of all
        self.retention = Retention(here.new_scanner(), aiockpt.KeepLatest(1), None, LocalStorage())
        tiers = [
            replicas_of(hosts.tier(of), LocalStorage(), str(hosts.root / f"replicas-{host}"))
            for host, of in ("ab", "ba")
        ]
        reports = EngineAccess(hosts.ckpt).reports
        self.watch = ReplicaWatch(here, tiers[0], tiers, reports, self.retention, self.damage)
        self.retention.attach(self.watch)
        self.copies = [hosts.copies("a", hosts.tier("b")), hosts.copies("b", hosts.tier("a"))]
        hosts.opened += [self.watch, self.retention]

    def save(self, step: int) -> Any:
        """Save a step, and delete what is not kept; return its future."""
        handle = self.hosts.save(step)
        replicated = self.watch.promises.make(step, handle, 0.0)
        self.retention.follow(handle, step, prunes=True)
        self.retention.finished().result()
        return replicated

    def damage(self) -> dict[str, str]:
        return self.hosts.damage["a"] | self.hosts.damage["b"]

    def steps(self) -> list[int]:
        self.retention.finished().result()
        return [step for step, _ in found(self.hosts.root / "a")]


@pytest.fixture
def watched(hosts: Hosts) -> Watched:
    return Watched(hosts)


def test_step_is_replicated_when_both_disks_have_the_files_of_the_other(watched: Watched) -> None:
    replicated = watched.save(1)
    watched.hosts.copy(watched.copies[0])
    with pytest.raises(TimeoutError):
        replicated.result(0.1)
    assert watched.watch.backlog.steps == (1,)
    watched.hosts.copy(watched.copies[1])
    nbytes = sum(each.stat().st_size for each in watched.hosts.root.glob("replicas-*/*/*/*"))
    assert replicated.result(60).nbytes == nbytes
    assert watched.watch.backlog.steps == ()


def test_last_replicated_step_stays_until_a_later_one_is_replicated(watched: Watched) -> None:
    watched.save(1)
    for copies in watched.copies:
        watched.hosts.copy(copies)
    watched.save(2)
    assert watched.steps() == [1, 2]
    watched.save(3)
    assert watched.steps() == [1, 3]
    for copies in watched.copies:
        watched.hosts.copy(copies)
    replicated = watched.save(4)
    for copies in watched.copies:
        watched.hosts.copy(copies)
    assert replicated.result(60)
    until(lambda: watched.steps() == [4])


def test_nothing_is_deleted_before_it_is_known_what_is_replicated(watched: Watched) -> None:
    gate = Gate(LocalStorage(), str(watched.hosts.root / "replicas-a"))
    gate.is_away = True
    watched.watch._replicas = [replicas_of(watched.hosts.tier("b"), gate, gate.root)]
    for step in (1, 2, 3):
        watched.save(step)
    assert watched.steps() == [1, 2, 3]
    until(lambda: watched.watch.backlog.error is not None)
    gate.is_away = False
    until(lambda: len(watched.steps()) < 3)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "how"), [("a", "flipped"), ("b", "flipped"), ("b", "replaced"), ("b", "manifest")])
def test_step_that_a_disk_damages_before_it_is_copied_is_said_to_be_damaged(
    watched: Watched, how: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 learns it from the host that can't copy it; the next step is replicated."""
    replicated = watched.save(1)
    name = MANIFEST_NAME if how == "manifest" else {"a": OF_A, "b": OF_B}[host]
    file = path_of(watched.hosts.root / host, 1) / name
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[1000] ^= 1
    else:
        data[:300] = bytes(300)
    (watched.hosts.root / "new").write_bytes(data)
    (watched.hosts.root / "new").replace(file)  # at once, as it may be looked at just now
    for copies in watched.copies:
        watched.hosts.copy(copies)
    with pytest.raises(aiockpt.CorruptCheckpointError, match=rf"on host-{host}, .*{name}"):
        replicated.result(60)
    assert watched.watch.backlog.steps == ()
    assert f"step 1 is not replicated: on host-{host}" in caplog.text
    replicated = watched.save(2)
    for copies in watched.copies:
        watched.hosts.copy(copies)
    assert replicated.result(60)
    if how == "manifest":  # it is copied as soon as it is whole
        watched.hosts.save(1)
        for copies in watched.copies:
            watched.hosts.copy(copies)
        assert watched.damage() == {}


def test_save_that_is_not_replicated_fails_when_the_run_is_closed(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    replicated = watched.save(1)
    watched.watch.close()
    with pytest.raises(aiockpt.SaveError, match="step 1 is not replicated: the manager was closed before"):
        replicated.result(60)
