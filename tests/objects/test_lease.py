"""The lease of a run: answers of its store that are lost, and processes that have lost it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.objects.lease import LEASE_NAME, ObjectLease
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects.buckets import Bucket
from tests.objects.test_faults import NEVER, until

STATE = {"x": torch.arange(5)}
PUT, GET = f"PUT .*{LEASE_NAME}$", f"GET .*{LEASE_NAME}$"


def lost(server: ObjectServer, *, does: bool) -> None:
    """Let the answer to the next put of the lease be lost, and nothing of it be found out."""
    server.rules(Rule(PUT, does=does), Rule(PUT, 1, 1000, 400), Rule(GET, 1, 1000, 400))


def taken(bucket: Bucket) -> bytes:
    """Let another process have the lease of the run; return its contents."""
    facts = {"host": "there", "pid": 7, "since": time.time(), "ticket": new_ticket(), "beat": "1"}
    data = json.dumps(facts).encode()
    bucket.storage().objects.put(f"run/{LEASE_NAME}", data)
    return data


@pytest.mark.parametrize("does", [True, False])
def test_renewal_of_which_nothing_is_known_loses_nothing(does: bool, bucket: Bucket, server: ObjectServer) -> None:
    lease = Bucket(bucket.url, bucket.given | NEVER).storage().lease(bucket / "run")
    assert isinstance(lease, ObjectLease)
    lost(server, does=does)
    lease.renew()
    server.rules()
    lease.check()
    lease.renew()
    lease.check()
    lease.release()
    bucket.storage().lease(bucket / "run").release()


@pytest.mark.parametrize("does", [True, False])
def test_a_process_takes_again_what_it_could_not_take_or_release(
    does: bool, bucket: Bucket, server: ObjectServer
) -> None:
    storage = Bucket(bucket.url, bucket.given | NEVER).storage()
    lost(server, does=does)
    with pytest.raises(OSError, match="400"):
        storage.lease(bucket / "run")
    server.rules()
    lease = storage.lease(bucket / "run")
    lost(server, does=does)
    lease.release()
    server.rules()
    lease = storage.lease(bucket / "run")
    with pytest.raises(aiockpt.RunLockedError):
        storage.lease(bucket / "run")
    lease.release()


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 1e9], ids=["stopped for long", "renewed lately"])
def test_lost_lease_publishes_and_deletes_nothing(
    after_s: float, bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is renewed before each step, or its thread has found out."""
    monkeypatch.setattr("aiockpt.storage.objects.lease.STALE_S", after_s)
    with aiockpt.SyncCheckpointManager(bucket / "run", storage_options=bucket.options) as run:
        run.save(1, STATE)
        server.rules(Rule("PUT .*/files/", status=503, hang_s=1.0))
        save = run.submit(2, STATE)
        until(lambda: any("/files/" in line for line in server.log))
        owner = taken(bucket)
        if after_s:
            _lease_of(run).renew()
        with pytest.raises(aiockpt.CommitError, match=r"not published.*was taken by another process"):
            save.written.result(30)
        assert run.steps() == [1]
        with pytest.raises(aiockpt.RunLockedError, match="was taken by another process"):
            run._retention._deleter.delete(run.path_of(1))
        with pytest.raises(aiockpt.RunLockedError):
            run.save(3, STATE)
    assert bucket.storage().objects.get(f"run/{LEASE_NAME}")[1] == owner
    assert bucket.dead() == [f"run/{LEASE_NAME}"]


def _lease_of(run: Any) -> ObjectLease:
    assert isinstance(run._run._lease, ObjectLease)
    return run._run._lease
