"""A store that goes down within a save, and refuses connections or answers nothing: nobody waits for it for ever."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch

import aiockpt
from benchmarks.harness import object_server
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects.buckets import Bucket
from tests.polling import until

_LIMIT_S = 120.0  # of a wait that must end, though the store answers nothing for longer
_PUBLISHING_S = 10.0  # until the store answers a commit


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    """Return a state of more than fits in the pool."""
    return {"x": torch.arange(30_000_000.0)}


OPTIONS = {"chunk_bytes": 5 << 20, "staging_bytes": 40 << 20, "drain_timeout": 1.0}


@pytest.fixture(autouse=True, scope="module")
def warm(_server: ObjectServer, large: dict[str, Any]) -> None:
    """Start what stays: the threads of obstore, and a pipe that the first cancelled save leaves."""
    with Bucket("s3://warm", _server.options("s3")).checkpointer(**OPTIONS) as ckpt:
        save = ckpt.submit(large, "s3://warm/c")
        until(lambda: any("partNumber" in line for line in _server.log))
        save.cancel().result()


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    """Return a server of its own for each test, which may be killed."""
    with object_server.start() as server:
        yield server


@pytest.fixture
def bucket(server: ObjectServer) -> Bucket:
    return Bucket("s3://b", server.options("s3"))


@pytest.fixture
def process(server: ObjectServer) -> Iterator[psutil.Process]:
    """Return the process of the server. One that was stopped goes on at the end of the test."""
    port = int(server.url.rpartition(":")[2])
    (found,) = (
        each for each in psutil.Process().children() if port in [at.laddr.port for at in each.net_connections()]
    )
    own = psutil.Process()
    before = own.num_fds()
    yield found
    found.send_signal(signal.SIGCONT)
    until(lambda: own.num_fds() <= before)  # threads of obstore close its connections
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt")])


def outcome(call: Callable[[], Any], limit_s: float = _LIMIT_S) -> Any:
    """Return the result of a call, or its error; fail if it takes too long."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as exc:
            found.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert found, "it hangs"
    return found[0]


def test_a_store_that_goes_away_in_an_upload_is_named(
    bucket: Bucket, server: ObjectServer, process: psutil.Process, large: dict[str, Any]
) -> None:
    options = bucket.options | {"retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=2)}}
    ckpt = aiockpt.SyncCheckpointer(storage_options=options, chunk_bytes=5 << 20, staging_bytes=40 << 20)
    save = ckpt.submit(large, bucket / "c")
    until(lambda: any("partNumber=2" in line for line in server.log))
    process.kill()
    error = outcome(save.written.result)
    assert isinstance(error, aiockpt.WriteError)
    assert re.search(f"{bucket / 'c'}/.*an upload has failed.*see retry_config in storage_options", str(error))
    outcome(ckpt.close)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["refuses", "hangs"])
@pytest.mark.parametrize(
    ("at", "what"),
    [("begin", "close"), ("begin", "timeout"), ("parts", "cancel"), ("parts", "close"), ("parts", "timeout")],
)
def test_nobody_waits_for_ever(
    at: str,
    what: str,
    how: signal.Signals,
    bucket: Bucket,
    server: ObjectServer,
    process: psutil.Process,
    large: dict[str, Any],
) -> None:
    ckpt = bucket.checkpointer(**OPTIONS, save_timeout=3.0 if what == "timeout" else None)
    if at == "begin":
        ckpt.save({"x": torch.arange(3)}, bucket / "a")
        process.send_signal(how)
    save = ckpt.submit(large, bucket / "c")
    if at == "parts":
        until(lambda: any("partNumber=2" in line for line in server.log))
        process.send_signal(how)
    if what == "cancel":
        assert outcome(save.cancel().result) is True
    if what == "close":
        error = outcome(ckpt.close)
        assert isinstance(error, aiockpt.SaveCancelledError) or (at == "begin" and how == signal.SIGKILL)
    expected: tuple[type[aiockpt.AiockptError], ...] = (aiockpt.SaveCancelledError,)
    if what == "timeout":
        expected = aiockpt.SaveTimeoutError, aiockpt.WriteError
    elif (at, how) == ("begin", signal.SIGKILL):  # it may have failed before
        expected = aiockpt.SaveCancelledError, aiockpt.WriteError
    assert isinstance(outcome(save.written.result), expected)
    outcome(ckpt.close)


@pytest.mark.parametrize("does", [True, False])
def test_closing_while_a_save_is_published(does: bool, bucket: Bucket, server: ObjectServer) -> None:
    """Whether it appears can't be known then; whatever appears is whole, and no further request is sent."""
    server.rules(Rule("PUT .*c/.metadata$", count=100, status=500, does=does, hang_s=_PUBLISHING_S))
    ckpt = Bucket(bucket.url, bucket.given | {"retry_config": {"max_retries": 0}}).checkpointer(**OPTIONS)
    save = ckpt.submit({"x": torch.arange(5)}, bucket / "c")
    until(lambda: any("c/.metadata" in line for line in server.log if line.startswith("PUT")))
    error = outcome(ckpt.close, _PUBLISHING_S - 1.0)
    assert isinstance(error, aiockpt.SaveCancelledError)
    assert "it is not known whether it was published" in str(error)
    assert isinstance(outcome(save.written.result), aiockpt.CommitUncertainError)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt-engine")])
    server.rules()
    with bucket.checkpointer() as other:
        assert (bucket.storage().record(bucket / "c") is not None) == does
        if does:
            assert torch.equal(other.load(bucket / "c")["x"], torch.arange(5))
        other.save({"x": torch.arange(6)}, bucket / "c", overwrite=True)
        assert torch.equal(other.load(bucket / "c")["x"], torch.arange(6))
    if does:  # else its objects stay while this process lives, whose request might come late
        assert bucket.dead() == []


def test_closing_a_manager_whose_store_hangs(
    bucket: Bucket, server: ObjectServer, process: psutil.Process, large: dict[str, Any]
) -> None:
    run = aiockpt.SyncCheckpointManager(bucket / "run", storage_options=bucket.options, **OPTIONS).__enter__()
    save = run.submit(1, large)
    until(lambda: any("partNumber=2" in line for line in server.log))
    process.send_signal(signal.SIGSTOP)
    assert isinstance(outcome(run.close), aiockpt.SaveCancelledError)
    assert isinstance(outcome(save.written.result), aiockpt.SaveCancelledError)


@pytest.mark.parametrize("what", ["cancel", "close", "timeout"])
@pytest.mark.parametrize("of", ["deletions", "lists"])
def test_discard_in_a_store_that_hangs_in(
    of: str, what: str, bucket: Bucket, server: ObjectServer, large: dict[str, Any]
) -> None:
    """It ends, and what it has left is removed by the next cleaning."""
    ckpt = bucket.checkpointer(**OPTIONS, save_timeout=3.0 if what == "timeout" else None)
    hanging = {"deletions": "(DELETE|POST .*[?]delete) ", "lists": "GET .*list-type"}[of]
    with bucket.checkpointer() as other:
        other.save({"x": torch.arange(3)}, bucket / "a")
    save = ckpt.submit(large, bucket / "c")
    until(lambda: any("partNumber=2" in line for line in server.log))
    server.rules(
        Rule("partNumber|uploadId|DELETE .*uploadId", count=10**6, status=503), Rule(hanging, 1, 10**6, hang_s=600.0)
    )
    if what == "cancel":
        assert outcome(save.cancel().result) is True
    if what == "close":
        assert isinstance(outcome(ckpt.close), aiockpt.SaveCancelledError)
    expected = aiockpt.SaveTimeoutError if what == "timeout" else aiockpt.SaveCancelledError
    assert isinstance(outcome(save.written.result), expected)
    outcome(ckpt.close)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt-engine")])
    server.rules()
    with bucket.checkpointer() as other:
        other.clean(bucket.url)
        assert bucket.dead() == []
        assert torch.equal(other.load(bucket / "a")["x"], torch.arange(3))


def test_what_a_failed_discard_has_left_is_removed_by_the_next_save(
    bucket: Bucket, server: ObjectServer, large: dict[str, Any]
) -> None:
    refusing = {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}}
    impatient = Bucket(bucket.url, bucket.given | refusing)
    with impatient.checkpointer(**OPTIONS) as ckpt:
        server.rules(Rule("POST .*uploadId", count=100, status=500), Rule("PUT .*/state$", 2, 1000, 500))
        with pytest.raises(aiockpt.SaveError, match="500"):
            ckpt.save(large, bucket / "run/c")
        server.rules()
        assert [key for key in bucket.dead() if key.endswith("/state")]
        ckpt.save({"y": torch.arange(3)}, bucket / "run/c")
        assert bucket.dead() == []
