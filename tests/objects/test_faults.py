"""Answers that are lost, refused or late, at every kind of request: each ends in the truth."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.testing import GatedStorage
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects.buckets import Bucket
from tests.ranks.world import _context

pytestmark = pytest.mark.usefixtures("forks")

NEVER = {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}}
"""Obstore asks once, so the protocol sees each answer."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("client._PAUSE_S", "transaction._PAUSE_S"):
        monkeypatch.setattr(f"aiockpt.storage.objects.{name}", 0.001)


def state_of(version: int) -> dict[str, Any]:
    """Return a state whose values all differ between versions, in one file of several parts."""
    return {"x": torch.arange(1_500_000.0) + version, "version": version}


def version_in(bucket: Bucket, path: str) -> int:
    """Return what is at a path; 0 if nothing. It is whole."""
    with bucket.checkpointer() as ckpt:
        try:
            state = ckpt.load(path)
        except aiockpt.CheckpointNotFoundError:
            return 0
        assert torch.equal(state["x"], state_of(state["version"])["x"])
        assert ckpt.verify(path).ok
    return int(state["version"])


# A kind of request of a save, in the order of a save.
REQUESTS = {
    "list": "GET .*list-type",
    "begin": "PUT .*/state$",
    "upload": "POST .*uploads",
    "part": "PUT .*partNumber=2",
    "complete": "POST .*uploadId",
    "publish": "PUT .*/state$",
    "commit": "PUT .*/.metadata$",
    "retire": "PUT .*/state$",
}
ANSWERS = {
    "400": {"status": 400},
    "409": {"status": 409},
    "412": {"status": 412},
    "409 but done": {"status": 409, "does": True},
    "500": {"status": 500},
    "500 but done": {"status": 500, "does": True},
    "503": {"status": 503, "count": 3},
    "dropped": {},
    "dropped but done": {"does": True},
    "late": {"does": True, "hang_s": 0.3},
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("request_", REQUESTS)
def test_each_answer_of_each_request_ends_in_the_truth(
    request_: str, answer: str, bucket: Bucket, server: ObjectServer
) -> None:
    path = bucket / "run/c"
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(1), path)
    first = {"begin": 1, "publish": 2, "retire": 3}.get(request_, 1)
    server.rules(Rule(REQUESTS[request_], first=first, **ANSWERS[answer]))
    impatient = Bucket(bucket.url, bucket.given | NEVER)
    try:
        with impatient.checkpointer(chunk_bytes=5 << 20, staging_bytes=40 << 20) as ckpt:  # so that it has parts
            ckpt.save(state_of(2), path, overwrite=True)
        expected = {2}
    except aiockpt.CommitUncertainError:
        expected = {1, 2}
    except aiockpt.SaveError as exc:
        assert "not-so-secret" not in str(exc)
        expected = {1}
    server.rules()
    assert version_in(bucket, path) in expected
    with bucket.checkpointer() as ckpt:
        ckpt.clean(bucket / "run", older_than_s=0.0)
        ckpt.save(state_of(3), path, overwrite=True)
        assert version_in(bucket, path) == 3
        ckpt.clean(bucket / "run", older_than_s=0.0)
        assert bucket.dead() == []
        ckpt.delete(path)
    assert bucket.listed() == []
    if request_ == "upload":  # an upload of which the client did not hear
        server.clear()


@pytest.mark.parametrize("does", [True, False])
def test_commit_of_which_nothing_can_be_known_keeps_everything(
    does: bool, bucket: Bucket, server: ObjectServer
) -> None:
    path = bucket / "run/c"
    server.rules(
        Rule("PUT .*/.metadata$", count=100, status=500, does=does), Rule("(GET|HEAD) .*/.metadata", 2, 100, 500)
    )
    impatient = Bucket(bucket.url, bucket.given | NEVER)
    with impatient.checkpointer() as ckpt, pytest.raises(aiockpt.CommitUncertainError, match="not known whether"):
        ckpt.save(state_of(1), path)
    server.rules()
    assert version_in(bucket, path) == does
    assert [key for key in bucket.listed() if key.endswith("__0_0.distcp")]
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(2), path, overwrite=True)
    assert version_in(bucket, path) == 2


def test_store_that_ignores_conditions_is_refused(bucket: Bucket, server: ObjectServer) -> None:
    server.rules(Rule(".", count=10**6, ignores_conditions=True))
    path = bucket / "run/c"
    refused = pytest.raises(aiockpt.SaveError, match=r"ignores conditions of writes.*'conditions': 'off'")
    with bucket.checkpointer() as ckpt, refused:
        ckpt.save(state_of(1), path)
    assert bucket.listed() == []
    with aiockpt.SyncCheckpointer(storage_options=bucket.options | {"conditions": "off"}) as ckpt:
        ckpt.save(state_of(1), path)
        with pytest.raises(aiockpt.CheckpointExistsError):
            ckpt.save(state_of(1), path)
        ckpt.save(state_of(2), path, overwrite=True)
    assert version_in(bucket, path) == 2


# --- requests that arrive twice, or late --------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it has not come in time"
        time.sleep(0.01)


@pytest.mark.parametrize("answer", [{}, {"status": 500}, {"status": 503}], ids=["dropped", "500", "503"])
def test_deletion_whose_answer_is_lost_spares_what_is_saved_meanwhile(
    answer: dict[str, Any], bucket: Bucket, server: ObjectServer
) -> None:
    path = bucket / "run/c"
    with bucket.checkpointer() as ckpt, bucket.checkpointer() as other, ThreadPoolExecutor(1) as threads:
        ckpt.save(state_of(1), path)
        server.rules(Rule("(DELETE|POST) .*/c/.metadata$", does=True, hang_s=2.0, **answer))
        deleting = threads.submit(ckpt.delete, path)
        until(lambda: "run/c/.metadata" not in bucket.listed())
        other.save(state_of(2), path)
        deleting.result()
    assert version_in(bucket, path) == 2


@pytest.mark.parametrize("status", [500, 503])
def test_deletion_that_is_refused_is_asked_for_again(status: int, bucket: Bucket, server: ObjectServer) -> None:
    path = bucket / "run/c"
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(1), path)
        server.rules(Rule("(DELETE|POST) .*/c/.metadata$", count=3, status=status))
        ckpt.delete(path)
    assert bucket.listed() == []


def test_deletion_of_which_nothing_is_known_keeps_the_path_for_a_while(
    bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 4.0)
    path = bucket / "run/c"
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(1), path)
        server.rules(Rule("(DELETE|POST) .*/c/.metadata$", late_s=2.0))
        with pytest.raises(aiockpt.DeleteError):
            ckpt.delete(path)
        assert version_in(bucket, path) == 0
        ckpt.save(state_of(2), path)
        until(lambda: server.late > 0)
        assert version_in(bucket, path) == 2
        assert bucket.dead() == []


@pytest.mark.parametrize("repeats", [0, 1])
def test_late_commit_finds_its_files(repeats: int, bucket: Bucket, server: ObjectServer) -> None:
    """It was in vain, as another process was faster; when its checkpoint is deleted, the late one appears."""
    path, commit = bucket / "run/c", "/run/c/.metadata$"
    first, second = (
        GatedStorage(bucket.storage(retry_config=retries), ["commit"])
        for retries in (NEVER["retry_config"] | {"max_retries": repeats}, {})
    )
    with bucket.checkpointer() as ckpt, bucket.checkpointer() as other:
        late = ckpt.submit(state_of(1), path, storage=first)
        won = other.submit(state_of(2), path, storage=second)
        for gates in (first, second):
            gates.reached["commit"].result(30)
        unanswered = Rule(f"(GET|HEAD) .*{commit}", count=10**6, status=400, hang_s=0.5)
        refused = Rule(f"PUT .*{commit}", first=2, count=repeats, status=500)
        server.rules(Rule(f"PUT .*{commit}", late_s=5.0), refused, unanswered)
        first.open("commit")
        until(lambda: len([line for line in server.log if re.search(f"PUT .*{commit}", line)]) > repeats)
        second.open("commit")
        won.written.result(30)
        server.rules()
        with pytest.raises(aiockpt.CheckpointExistsError):
            late.written.result(30)
        other.delete(path)
        until(lambda: version_in(bucket, path) == 1)


# --- races and kills ----------------------------------------------------------------------------------------


def test_of_two_writers_exactly_one_wins(bucket: Bucket) -> None:
    def save(ckpt: aiockpt.SyncCheckpointer, path: str, version: int) -> int:
        try:
            ckpt.save({"version": version}, path)
        except aiockpt.CheckpointExistsError:
            return 0
        return version

    with bucket.checkpointer() as one, bucket.checkpointer() as other, ThreadPoolExecutor(2) as threads:
        won: Counter[int] = Counter()
        for number in range(100):
            path = bucket / f"run/{number}"
            begun = [threads.submit(save, ckpt, path, version) for version, ckpt in ((1, one), (2, other))]
            winners = [each.result() for each in begun if each.result()]
            assert winners == [one.load(path)["version"]]
            won[winners[0]] += 1
    assert bucket.dead() == []


def _work(url: str, given: dict[str, Any], task: str, ready: Any) -> None:
    bucket = Bucket(url, given)
    path = bucket / "run/c"
    ready.recv()
    with bucket.checkpointer() as ckpt:
        if task == "delete":
            ckpt.delete(path)
        elif task == "clean":
            ckpt.clean(bucket / "run", older_than_s=0.0)
        elif task == "manage":
            keep = aiockpt.KeepLatest(1)
            with aiockpt.SyncCheckpointManager(bucket / "run", keep=keep, storage_options=bucket.options) as run:
                for step in (1, 2):
                    run.save(step, state_of(step))
                    ready.send(step)
        else:
            version = 1 if task == "first" else 2
            ckpt.save(state_of(version), path, overwrite=task != "save")
            ready.send(version)


def _in_a_process(
    bucket: Bucket, server: ObjectServer, task: str, rule: Callable[[int], Rule]
) -> tuple[int, list[int]]:
    """Do a task in a process that may be killed; return its exit code, and what it has announced."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_work, args=(bucket.url, bucket.given, task, theirs))
    process.start()
    theirs.close()
    server.rules(rule(process.pid or 0))
    ours.send("go")
    heard = []
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            heard.append(ours.recv())
    ours.close()
    process.join()
    server.rules()
    return process.exitcode or 0, heard


LONG = [pytest.param(task, marks=pytest.mark.full) for task in ("overwrite", "manage", "clean")]


@pytest.mark.parametrize("task", ["save", "delete", *LONG])
def test_kill_at_each_request(task: str, bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    number = 1
    while True:
        number += 1  # each request, once it is done and once it is not
        if task in ("overwrite", "delete", "clean"):
            assert _in_a_process(bucket, server, "first", lambda _: Rule("nothing")) == (0, [1])
        if task == "clean":
            at_commit = lambda pid: Rule("PUT .*/.metadata$", kill=pid)  # noqa: E731
            assert _in_a_process(bucket, server, "overwrite", at_commit) == (-signal.SIGKILL, [])
        at_number = lambda pid: Rule(".", first=number // 2, does=bool(number % 2), kill=pid)  # noqa: B023, E731
        code, heard = _in_a_process(bucket, server, task, at_number)
        assert code in (0, -signal.SIGKILL)
        check(task, bucket, heard, ended=code == 0)
        server.clear()
        if code == 0:
            break
    assert number > 10


def check(task: str, bucket: Bucket, heard: list[int], *, ended: bool) -> None:
    """Check that what was announced is there, and that what a killed process has left is removed, and no more."""
    path = bucket / "run/c"
    if task == "manage":
        found = {step: version_in(bucket, bucket / f"run/step-{step:08d}") for step in (1, 2)}
        assert all(version in (0, step) for step, version in found.items())
        assert found[max(heard, default=0) or 1] or not heard
    else:
        version = version_in(bucket, path)
        assert version in {"save": {0, 2}, "overwrite": {1, 2}, "delete": {0, 1}, "clean": {1}}[task]
        assert version == 2 or not heard
        assert version == 0 or not ended or task != "delete"
    with bucket.checkpointer() as ckpt:
        ckpt.clean(bucket / "run", older_than_s=0.0)
    dead = [key for key in bucket.dead() if not key.endswith(".lease")]
    assert dead == [], (task, heard)
