"""Mirrors in a bucket: killed at each request of an upload, they go on, and no object is sent twice."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.manager.scan import scan
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects.buckets import Bucket
from tests.ranks.world import _context

pytestmark = pytest.mark.usefixtures("forks")

STATE = {"x": torch.arange(5_000_000.0)}
_DATA = re.compile(r"(PUT|POST) /[^?]*/files/([^?/]+)(\?uploadId=[^&]*)?$")


def mirror(here: Path, bucket: Bucket, **options: Any) -> aiockpt.SyncCheckpointManager:
    return aiockpt.SyncCheckpointManager(here, mirror=bucket / "run", storage_options=bucket.options, **options)


def sent(log: list[str]) -> Counter[str]:
    """Return how often each file was sent as a whole."""
    return Counter(found[2] for line in log if (found := _DATA.match(line)) and not line.endswith("?uploads"))


def _mirrors(here: Path, url: str, given: dict[str, Any], ready: Any) -> None:
    ready.recv()
    with mirror(here, Bucket(url, given)):
        pass


def _killed(here: Path, bucket: Bucket, server: ObjectServer, number: int) -> tuple[bool, list[str]]:
    """Mirror in a process that is killed at a request, once it is done or before; return whether, and the log."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_mirrors, args=(here, bucket.url, bucket.given, theirs))
    process.start()
    theirs.close()
    does = bool(number % 2)
    server.rules(Rule(".", first=number // 2, does=does, kill=process.pid or 0))
    ours.send("go")
    process.join()
    ours.close()
    log = server.log
    server.rules()
    assert process.exitcode in (0, -signal.SIGKILL)
    is_killed = process.exitcode != 0
    if is_killed and not does:
        del log[number // 2 - 1]
    return is_killed, log


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])
def test_kill_at_each_request_of_an_upload(
    stride: int, tmp_path: Path, bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    here, number, is_killed = tmp_path / "here", 2, True
    with aiockpt.SyncCheckpointManager(here) as run:
        run.save(1, STATE, files={f"more-{each}": os.urandom(100_000) for each in range(3)})
    files = {each.name for each in (here / "step-00000001").iterdir()} - {".metadata", ".aiockpt.json"}
    while is_killed:
        is_killed, first = _killed(here, bucket, server, number)
        before = sent(first)
        with mirror(here, bucket):
            pass
        both = before + sent(server.log)
        assert both == dict.fromkeys(files, 1), (number, before)
        (info,) = scan(here)
        with bucket.checkpointer() as ckpt:
            assert ckpt.verify(bucket / "run/step-00000001").ok
            assert torch.equal(ckpt.load(bucket / "run/step-00000001")["x"], STATE["x"])
            ckpt.clean(bucket / "run", older_than_s=0.0)
        assert [key for key in bucket.dead() if not key.endswith(".lease")] == []
        assert info.save_id
        server.clear()
        server.rules()
        number += stride
    assert number > 30


def test_store_that_answers_late_or_not(tmp_path: Path, bucket: Bucket, server: ObjectServer) -> None:
    """An hour of errors at any request ends in the same mirror; training is not held."""
    here = tmp_path / "here"
    failed = threading.Event()

    class Heard(aiockpt.Observer):
        def mirrored(self, event: aiockpt.CallEvent, result: Any, backlog: Any) -> None:
            if event.error is not None:
                failed.set()

    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr("aiockpt.manager.mirror._FIRST_RETRY_S", 0.01)
        monkeypatch.setattr("aiockpt.manager.mirror._LONGEST_RETRY_S", 0.05)
        run = stack.enter_context(mirror(here, bucket, keep=aiockpt.KeepLatest(2), observers=[Heard()]))
        run.submit(1, STATE).mirrored.result(60)
        server.rules(Rule("(PUT|POST) .*/files/", count=10**6, status=400))
        save = run.submit(2, STATE)
        save.written.result(60)
        assert failed.wait(60)
        server.rules()
        save.mirrored.result(60)
        server.rules(Rule("PUT .*/.metadata$", count=2))  # the commit is done or not: no answer comes
        run.submit(3, STATE).mirrored.result(60)
        server.rules(Rule("PUT .*/.metadata$", count=1, does=True))
        run.submit(4, STATE).mirrored.result(60)
        server.rules()
    assert [info.step for info in scan(here)] == [3, 4]
    with aiockpt.SyncCheckpointManager(bucket / "run", read_only=True, storage_options=bucket.options) as reader:
        assert reader.steps() == [3, 4]


def test_bucket_that_does_not_exist(tmp_path: Path, server: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    """Closing gives up soon, and the error names the bucket."""
    bucket = Bucket("s3://no-bucket", server.options("s3"))
    with mirror(tmp_path / "here", bucket, drain_timeout=1e9) as run:
        run.submit(1, {"x": torch.ones(10)})
    assert "s3://no-bucket does not exist, or not at this endpoint: " in caplog.text
    assert "lacks step 1 of" in caplog.text
    assert caplog.text.count("can't be mirrored to") == 1


def test_requests_of_a_mirrored_step(tmp_path: Path, bucket: Bucket, server: ObjectServer) -> None:
    with mirror(tmp_path / "here", bucket) as run:
        run.submit(1, STATE).mirrored.result(60)
        run._mirror.finish() and run._mirror.finish().result(60)  # type: ignore[union-attr]
        server.rules()
        run.submit(2, {"x": torch.ones(10)}).mirrored.result(60)
    log = server.log
    assert len(log) <= 40, log
