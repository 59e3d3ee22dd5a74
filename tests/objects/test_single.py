"""Checkpoints that are one object, under the very name that was given: other programs read them as they are."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.storage.local.temp_dir import new_ticket, this_process
from aiockpt.storage.objects.cleaning import held_s
from aiockpt.storage.objects.commit import Tomb, encode_tomb
from aiockpt.testing import GatedStorage
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects import servers
from tests.objects.buckets import Bucket
from tests.objects.test_faults import ANSWERS, NEVER, version_in
from tests.polling import until
from tests.ranks.conftest import world2
from tests.ranks.world import RankFailure, World, _context

pytestmark = pytest.mark.usefixtures("forks")

__all__ = ["world2"]

PARTS = {"chunk_bytes": 5 << 20, "staging_bytes": 40 << 20}
"""Options by which 12 MB are sent in parts."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("client._PAUSE_S", "transaction._PAUSE_S", "records._PAUSE_S"):
        monkeypatch.setattr(f"aiockpt.storage.objects.{name}", 0.001)


def state_of(version: int, count: int = 1_500_000) -> dict[str, Any]:
    """Return a state of 12 MB by default, which is sent in parts if chunks are of 5 MiB."""
    return {"x": torch.arange(float(count)) + version, "version": torch.tensor(version)}


def bytes_at(bucket: Bucket, name: str) -> bytes:
    return bucket.storage().objects.get(name)[1]


def version_at(bucket: Bucket, name: str) -> int:
    """Return which version is at a name, which is whole; 0 if none is."""
    with bucket.checkpointer() as ckpt:
        try:
            state = ckpt.load(bucket / name)
        except aiockpt.CheckpointNotFoundError:
            return 0
        assert ckpt.verify(bucket / name).ok
    assert torch.equal(state["x"], state_of(int(state["version"]), len(state["x"]))["x"])
    return int(state["version"])


@pytest.mark.main
@pytest.mark.parametrize("count", [3, 1_500_000, 6_000_000], ids=["small", "a part", "parts"])
@pytest.mark.parametrize("name", ["m.safetensors", "run/m.pt"])
def test_the_object_is_what_other_programs_expect(name: str, count: int, bucket: Bucket) -> None:
    state = state_of(7, count)
    with bucket.checkpointer() as ckpt:
        result = ckpt.save(state, bucket / name)
        assert bucket.listed() == [name]
        data = bytes_at(bucket, name)
        assert dict(result.files) == {name.rpartition("/")[2]: len(data)}
        theirs = safetensors_load(data) if name.endswith(".safetensors") else torch.load(io.BytesIO(data))
        for loaded in (theirs, ckpt.load(bucket / name)):
            assert torch.equal(loaded["x"], state["x"])
            assert torch.equal(loaded["version"], state["version"])
        assert ckpt.verify(bucket / name).ok
        with ckpt.open(bucket / name) as reader:
            assert torch.equal(reader.read("x", slice(1, 3)), state["x"][1:3])
        with pytest.raises(aiockpt.CheckpointExistsError, match="overwrite=True"):
            ckpt.save(state, bucket / name)
        assert bytes_at(bucket, name) == data
        ckpt.save(state_of(8, count), bucket / name, overwrite=True)
        assert version_at(bucket, name) == 8
        assert bucket.listed() == [name]
        ckpt.delete(bucket / name)
        assert bucket.listed() == []
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            ckpt.delete(bucket / name)


@pytest.mark.parametrize("count", [3, 1_500_000, 6_000_000], ids=["small", "a part", "parts"])
@pytest.mark.parametrize("name", ["m.safetensors", "run/m.pt"])
def test_store_that_ignores_conditions(name: str, count: int, bucket: Bucket, server: ObjectServer) -> None:
    """It is refused, or used as it is: then what is there is looked at before."""
    server.rules(Rule(".", count=10**6, ignores_conditions=True))
    refused = pytest.raises(aiockpt.SaveError, match=r"ignores conditions of writes.*'conditions': 'off'")
    with bucket.checkpointer() as ckpt, refused:
        ckpt.save(state_of(1, count), bucket / name)
    assert bucket.listed() == []
    path, taken = bucket / name, pytest.raises(aiockpt.CheckpointExistsError, match="overwrite=True")
    with aiockpt.SyncCheckpointer(storage_options=bucket.options | {"conditions": "off"}) as ckpt:
        ckpt.save(state_of(1, count), path)
        with taken:
            ckpt.save(state_of(2, count), path)
        assert version_at(bucket, name) == 1
        ckpt.save(state_of(3, count), path, overwrite=True)
        assert version_at(bucket, name) == 3
        assert ckpt.verify(path).ok
        with ckpt.open(path) as reader:
            assert torch.equal(reader.read("x", slice(1, 3)), state_of(3, 3)["x"][1:3])
        assert bucket.listed() == [name]
        ckpt.delete(path)
    assert bucket.listed() == []


@pytest.mark.parametrize("does", [True, False])
@pytest.mark.parametrize("count", [3, 6_000_000], ids=["small", "parts"])
def test_lost_answers_of_a_store_that_ignores_conditions(
    count: int, does: bool, bucket: Bucket, server: ObjectServer
) -> None:
    path, options = bucket / "m.safetensors", bucket.options | {"conditions": "off"} | NEVER
    last = REQUESTS["complete"]
    ignoring = Rule(".", count=10**6, ignores_conditions=True)
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:
        server.rules(ignoring)
        ckpt.save(state_of(1, count), path)
        server.rules(Rule(last, status=500, does=does), ignoring)
        try:
            ckpt.save(state_of(2, count), path, overwrite=True)
            expected = {2}
        except aiockpt.CommitUncertainError:
            expected = {1, 2}
        server.rules(ignoring)
        assert version_at(bucket, "m.safetensors") in expected
        assert not does or expected == {2}
    server.clear()


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 3 << 20, 5 << 20, 16 << 20])
@pytest.mark.parametrize("count", [5 << 18, (5 << 18) - 100, 10 << 18, 3_000_000])
def test_parts_of_any_size(chunk_bytes: int, count: int, bucket: Bucket) -> None:
    with bucket.checkpointer(chunk_bytes=chunk_bytes, staging_bytes=8 * chunk_bytes) as ckpt:
        ckpt.save(state_of(1, count), bucket / "m.safetensors")
        ckpt.save(state_of(2, count), bucket / "m.pt")
    assert [version_at(bucket, name) for name in ("m.safetensors", "m.pt")] == [1, 2]


def test_a_file_of_a_slice_is_read_by_its_bytes(bucket: Bucket, server: ObjectServer) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(1), bucket / "m.safetensors")
        with ckpt.open(bucket / "m.safetensors") as reader:
            server.rules()
            reader.read("x", slice(1000, 2000))
            assert len(server.log) == 1


def test_writer_process(bucket: Bucket) -> None:
    with bucket.checkpointer(writer="process") as ckpt:
        for version in (1, 2):
            ckpt.save(state_of(version, 6_000_000), bucket / "m.safetensors", overwrite=True)
            assert version_at(bucket, "m.safetensors") == version
    assert bucket.listed() == ["m.safetensors"]


def test_objects_of_others(bucket: Bucket) -> None:
    """They are read, replaced and deleted if they are checkpoints, and left alone otherwise."""
    objects = bucket.storage().objects
    objects.put("theirs.safetensors", safetensors_save({"x": torch.arange(5.0), "version": torch.tensor(0)}))
    objects.put("notes.pt", b"these are notes")
    with bucket.checkpointer() as ckpt:
        assert torch.equal(ckpt.load(bucket / "theirs.safetensors")["x"], torch.arange(5.0))
        with pytest.raises(aiockpt.CheckpointExistsError, match=r"neither one of torch\.save nor of safetensors"):
            ckpt.save(state_of(1, 3), bucket / "notes.pt", overwrite=True)
        with pytest.raises(aiockpt.DeleteError, match=r"neither one of torch\.save nor of safetensors"):
            ckpt.delete(bucket / "notes.pt")
        ckpt.save(state_of(1, 3), bucket / "theirs.safetensors", overwrite=True)
        assert version_at(bucket, "theirs.safetensors") == 1
        ckpt.save(state_of(1, 3), bucket / "d", format="dcp")
        ckpt.delete(bucket / "theirs.safetensors")
    assert bytes_at(bucket, "notes.pt") == b"these are notes"


def test_sharded_export(bucket: Bucket) -> None:
    state = {f"layer.{at}": torch.arange(100_000.0) + at for at in range(8)}
    with bucket.checkpointer() as ckpt:
        ckpt.save(state, bucket / "export", format="safetensors", shard_bytes=1 << 20)
        assert ckpt.verify(bucket / "export").ok
        loaded = ckpt.load(bucket / "export")
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        with ckpt.open(bucket / "export") as reader:
            assert sorted(reader) == sorted(state)
        with pytest.raises(aiockpt.CheckpointExistsError):
            ckpt.save(state, bucket / "export", format="safetensors")
    assert len([key for key in bucket.listed() if key.endswith(".safetensors")]) == 4


def _save(rank: int, world_size: int, bucket: Bucket, name: str, format: str | None) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save({"x": torch.arange(5)}, bucket / name, **({} if format is None else {"format": format}))


@pytest.mark.parametrize(
    ("name", "format", "match"),
    [
        ("m.safetensors", None, "process_group=None on one rank"),
        ("export", "safetensors", "process_group=None on one rank"),
        ("m.pt", None, "written by one process"),
    ],
)
def test_several_ranks_are_refused_at_the_call(
    name: str, format: str | None, match: str, bucket: Bucket, world2: World
) -> None:
    for outcome in world2.run(_save, bucket, name, format):
        assert isinstance(outcome, RankFailure)
        assert match in outcome.text
    assert bucket.listed() == []


# --- faults -----------------------------------------------------------------------------------------------

REQUESTS = {
    "begin": "PUT .*/state$",
    "upload": "POST .*uploads",
    "part": "PUT .*partNumber=2",
    "claim": "PUT .*/.metadata$",
    "look": "HEAD .*/m.safetensors$",
    "complete": "POST .*uploadId|PUT .*/m.safetensors$",
    "release": "(DELETE|POST) .*/.metadata( |$)",
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, 1_500_000], ids=["whole", "parts"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("request_", REQUESTS)
def test_each_answer_of_each_request_ends_in_the_truth(
    request_: str,
    answer: str,
    count: int,
    bucket: Bucket,
    server: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = bucket / "m.safetensors"
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(1, count), path)
    server.rules(Rule(REQUESTS[request_], first=2 if request_ == "look" else 1, **ANSWERS[answer]))
    impatient = Bucket(bucket.url, bucket.given | NEVER)
    try:
        with impatient.checkpointer(**PARTS) as ckpt:
            ckpt.save(state_of(2, count), path, overwrite=True)
        expected = {2}
    except aiockpt.CommitUncertainError:
        assert request_ in ("look", "complete", "claim")
        expected = {1, 2}
    except aiockpt.SaveError as exc:
        assert "not-so-secret" not in str(exc)
        expected = {1}
    server.rules()
    assert version_at(bucket, "m.safetensors") in expected
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    with bucket.checkpointer() as ckpt:
        ckpt.save(state_of(3, count), path, overwrite=True)
        assert version_at(bucket, "m.safetensors") == 3
        ckpt.delete(path)
        ckpt.clean(bucket.url, older_than_s=0.0)
    # Of an uncertain save everything is kept while its process lives.
    assert [key for key in bucket.listed() if not key.endswith("/state")] == []
    if request_ == "upload":  # an upload of which the client did not hear
        server.clear()


@pytest.mark.parametrize("count", [1000, 1_500_000], ids=["whole", "parts"])
@pytest.mark.parametrize("answer", ["403", "409", "500", "dropped", "dropped but done", "late"])
@pytest.mark.parametrize("request_", ["bury", "release"])
def test_claim_that_can_not_be_removed_holds_up_no_further_save(
    request_: str, answer: str, count: int, bucket: Bucket, server: ObjectServer
) -> None:
    path, match = bucket / "m.safetensors", {**REQUESTS, "bury": REQUESTS["claim"]}[request_]
    how: dict[str, Any] = {"403": {"status": 403}, "late": {"late_s": 1.0}, **ANSWERS}[answer]
    impatient = Bucket(bucket.url, bucket.given | NEVER)
    with impatient.checkpointer(**PARTS) as ckpt:
        ckpt.save(state_of(1, count), path)
        server.rules(Rule(match, first=2 if request_ == "bury" else 1, **how))
        for version in (2, 3, 4):
            written = ckpt.submit(state_of(version, count), path, overwrite=True).written
            assert written.result(60).path == path
    assert version_at(bucket, "m.safetensors") == 4


def test_denied_request_is_sent_once_more(bucket: Bucket, server: ObjectServer) -> None:
    path = bucket / "m.safetensors"
    impatient = Bucket(bucket.url, bucket.given | NEVER)
    with impatient.checkpointer() as ckpt:
        ckpt.save(state_of(1, 3), path)
        server.rules(Rule(REQUESTS["release"], status=403))
        ckpt.save(state_of(2, 3), path, overwrite=True)
    assert bucket.listed() == ["m.safetensors"]


def check_race(
    path: str,
    count: int,
    one: aiockpt.SyncCheckpointer,
    other: aiockpt.SyncCheckpointer,
    threads: ThreadPoolExecutor,
) -> None:
    """Check that of two saves to a path exactly one is announced, and is what is there."""

    def save(ckpt: aiockpt.SyncCheckpointer, version: int) -> int:
        with contextlib.suppress(aiockpt.CheckpointExistsError):
            ckpt.save(state_of(version, count), path)
            return version
        return 0

    begun = [threads.submit(save, ckpt, version) for version, ckpt in ((1, one), (2, other))]
    winners = [each.result() for each in begun if each.result()]
    assert winners == [int(one.load(path)["version"])]


def test_of_two_writers_exactly_one_wins(bucket: Bucket) -> None:
    with bucket.checkpointer(**PARTS) as one, bucket.checkpointer(**PARTS) as other, ThreadPoolExecutor(2) as threads:
        for number in range(30):
            check_race(bucket / f"run/{number}.safetensors", 1_500_000, one, other, threads)
    assert sorted(bucket.listed()) == sorted(f"run/{number}.safetensors" for number in range(30))


def _work(bucket: Bucket, task: str, ready: Any) -> None:
    ready.recv()
    with bucket.checkpointer(**PARTS) as ckpt:
        if task == "delete":
            ckpt.delete(bucket / "m.safetensors")
        else:
            count = 1_500_000 if task == "save" else 3
            ckpt.save(state_of(2, count), bucket / ("m.pt" if task == "pt" else "m.safetensors"), overwrite=True)
    ready.send(2)


def _killed(bucket: Bucket, server: ObjectServer, task: str, rule: Callable[[int], Rule]) -> tuple[int, bool]:
    """Do a task in a process that may be killed; return its exit code, and whether it has announced its end."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_work, args=(bucket, task, theirs))
    process.start()
    theirs.close()
    server.rules(rule(process.pid or 0))
    ours.send("go")
    announced = False
    with contextlib.suppress(EOFError, ConnectionResetError):
        announced = ours.recv() == 2
    ours.close()
    process.join()
    server.rules()
    return process.exitcode or 0, announced


@pytest.mark.parametrize("task", ["save", "delete"])
def test_kill_at_each_request(task: str, bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    number = 1
    while True:
        number += 1  # each request, once it is done and once it is not
        with bucket.checkpointer() as ckpt:
            ckpt.save(state_of(1), bucket / "m.safetensors")
        at_number = lambda pid: Rule(".", first=number // 2, does=bool(number % 2), kill=pid)  # noqa: B023, E731
        code, announced = _killed(bucket, server, task, at_number)
        assert code in (0, -signal.SIGKILL)
        version = version_at(bucket, "m.safetensors")
        assert version in ({1, 2} if task == "save" else {0, 1})
        assert version == (2 if task == "save" else 0) or not announced
        with bucket.checkpointer() as ckpt:
            ckpt.clean(bucket.url, older_than_s=0.0)
        assert bucket.listed() == (["m.safetensors"] if version else [])
        server.clear()
        if code == 0:
            break
    assert number > 8


# --- servers of other authors -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[servers.ministack, servers.azurite], ids=["ministack", "azurite"])
def theirs(request: Any) -> Iterator[Bucket]:
    with request.param() as found:
        bucket = Bucket(*found)
        bucket.listed()  # the threads of obstore stay
        yield bucket


@pytest.mark.full
@pytest.mark.parametrize("conditions", ["on", "off"])
@pytest.mark.parametrize("count", [3, 1_500_000, 6_000_000], ids=["small", "a part", "parts"])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_servers_of_others(ending: str, count: int, conditions: str, theirs: Bucket) -> None:
    name, options = f"{uuid.uuid4().hex}.{ending}", theirs.options | {"conditions": conditions}
    path, taken = theirs / name, pytest.raises(aiockpt.CheckpointExistsError, match="overwrite=True")
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:
        for version in (1, 2):
            ckpt.save(state_of(version, count), path, overwrite=version == 2)
            data = bytes_at(theirs, name)
            read = safetensors_load(data) if ending == "safetensors" else torch.load(io.BytesIO(data))
            assert torch.equal(read["x"], state_of(version, count)["x"])
            assert version_at(theirs, name) == version
            with taken:
                ckpt.save(state_of(9, count), path)
        with ckpt.open(path) as reader:
            assert torch.equal(reader.read("x", slice(1, 3)), state_of(2, 3)["x"][1:3])
        assert theirs.listed() == [name]
        ckpt.delete(path)
        assert theirs.listed() == []


@pytest.mark.full
@pytest.mark.parametrize("count", [3, 1_500_000], ids=["one request", "parts"])
def test_of_two_writers_on_servers_of_others_exactly_one_wins(count: int, theirs: Bucket) -> None:
    with theirs.checkpointer(**PARTS) as one, theirs.checkpointer(**PARTS) as other, ThreadPoolExecutor(2) as threads:
        for number in range(10):
            check_race(theirs / f"run/{number}.safetensors", count, one, other, threads)
        for number in range(10):
            one.delete(theirs / f"run/{number}.safetensors")
    assert theirs.listed() == []


# --- claims -----------------------------------------------------------------------------------------------

CLAIM = "PUT .*/m.safetensors/.metadata$"
COMPLETE = "POST .*uploadId"


def ticket_of(owner: str) -> str:
    """Return the ticket of a process that is dead, lives, or is on another host."""
    here = this_process()
    assert here is not None
    other = {"dead": {"start": 1}, "alive": {}, "elsewhere": {"machine": "b" * 10, "space": "b" * 10}}[owner]
    return f".aiockpt-{replace(here, **other)}.{'0' * 16}"


@pytest.mark.parametrize("owner", ["dead", "alive", "elsewhere"])
@pytest.mark.parametrize("tomb", ["put", "parts", "delete"])
def test_how_long_a_tombstone_holds(tomb: Tomb, owner: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = bucket.storage()
    objects, path, key = storage.objects, bucket / "m.safetensors", "m.safetensors/.metadata"
    objects.put(key, encode_tomb(tomb, ticket_of(owner)))
    assert storage.record(path) is None
    begun = storage.record(path, deleted=True)
    assert storage.is_going(begun) == ((tomb, owner) != ("put", "dead"))
    if owner == "dead":  # long before it is void for others
        monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 10.0)
        until(lambda: not storage.is_going(begun))
        assert objects.now("") - begun.modified < held_s(tomb, "unknown")[0]
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    assert not storage.is_going(begun)
    storage.clean_up(bucket.url)
    assert bucket.listed() == []


def test_nobody_waits_for_a_small_file_of_a_killed_process(bucket: Bucket, server: ObjectServer) -> None:
    """Its request has a condition, so it fails if it comes late."""
    for number in (1, 2):
        rule = lambda pid: Rule("PUT .*/m.safetensors$", kill=pid)  # noqa: E731
        assert _killed(bucket, server, "small", rule) == (-signal.SIGKILL, False)
        assert "m.safetensors/.metadata" in bucket.listed()
        with bucket.checkpointer() as ckpt:
            ckpt.save(state_of(number, 3), bucket / "m.safetensors", overwrite=True)
        assert version_at(bucket, "m.safetensors") == number
        assert [key for key in bucket.listed() if "/.aiockpt" not in f"/{key}" and "aiockpt-" not in key] == [
            "m.safetensors"
        ]


def test_late_release_of_a_killed_process_removes_nothing_of_others(
    bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 30.0)
    rule = lambda pid: Rule(REQUESTS["release"], kill=pid, late_s=1.0)  # noqa: E731
    assert _killed(bucket, server, "pt", rule) == (-signal.SIGKILL, False)
    with bucket.checkpointer() as ckpt:
        assert int(ckpt.load(bucket / "m.pt")["version"]) == 2
        ckpt.delete(bucket / "m.pt")
        ckpt.save(state_of(3, 3), bucket / "m.pt", format="dcp")
        until(lambda: server.late > 0)
        assert int(ckpt.load(bucket / "m.pt")["version"]) == 3


def test_claim_is_renewed_as_long_as_the_store_takes_to_answer(
    bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.RENEW_S", 0.05)
    server.rules(Rule(COMPLETE, status=500, hang_s=1.0))
    with bucket.checkpointer(**PARTS) as ckpt:
        ckpt.save(state_of(1), bucket / "m.safetensors")
    renewed = [line for line in server.log if re.search(CLAIM, line)]
    assert len(renewed) > 2
    assert version_at(bucket, "m.safetensors") == 1
    assert bucket.listed() == ["m.safetensors"]


@pytest.mark.parametrize("how", ["lost", "late"])
def test_writer_whose_claim_is_not_renewed_calls_its_request_off(
    how: str, bucket: Bucket, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"cleaning.RENEW_S": 0.05, "cleaning.FENCE_S": 0.5, "obstore._STOP_S": 0.1}.items():
        monkeypatch.setattr(f"aiockpt.storage.objects.{name}", value)
    monkeypatch.setattr("aiockpt.storage.objects.obstore._HASTY_S", 1)
    refusals = [Rule(CLAIM, first=2, count=10**6, status=400)] if how == "late" else []
    server.rules(Rule(COMPLETE, count=10**6, status=500, hang_s=60.0), *refusals)
    with bucket.checkpointer(**PARTS) as ckpt:
        save = ckpt.submit(state_of(1), bucket / "m.safetensors")
        until(lambda: any(re.search(COMPLETE, line) for line in server.log))
        other = encode_tomb("delete", new_ticket())
        if how == "lost":
            bucket.storage().objects.put("m.safetensors/.metadata", other)
        with pytest.raises(aiockpt.CommitUncertainError, match=r"not known whether .* not be renewed"):
            save.written.result(60)
    assert how != "lost" or bytes_at(bucket, "m.safetensors/.metadata") == other
    assert "m.safetensors" not in bucket.listed()
    server.clear()  # with the upload that was given up


@pytest.mark.asyncio
async def test_copy_is_not_removed_while_it_may_still_be_published(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given up after a commit without an answer, whose request arrives late: the checkpoint that it makes is whole."""
    monkeypatch.setattr("aiockpt.storage.objects.transaction._PAUSE_S", 0.001)
    storage, path, save_id = bucket.storage(), bucket / "run/step-1", "0123456789abcdef"
    put, late = storage.objects.put, list[tuple[str, Any, Any]]()

    def put_late(key: str, data: Any, only_if: Any = None) -> str:
        if not key.endswith("/.metadata"):
            return put(key, data, only_if)
        late.append((key, data, only_if))
        raise OSError("no answer")

    workers = Workers(4, "aiockpt-test")
    try:
        copy = await storage.resume(path, save_id, workers=workers)
        await copy.write_files({"data": b"bytes"})
        with monkeypatch.context() as patch, pytest.raises(aiockpt.CommitError, match="not known"):
            patch.setattr(storage.objects, "put", put_late)
            await copy.commit({".metadata": b"metadata"})
        await copy.suspend()
        left = await storage.resume(path, save_id, workers=workers)
        await left.abort()
        await workers.run(put, *late[-1])
        source = await storage.open(path, workers=workers)
        assert await workers.run(source.read_bytes, "data", 0, 5) == b"bytes"
        source.close()
    finally:
        workers.close()


def test_checkpoint_that_appears_while_one_looks_is_read(bucket: Bucket, server: ObjectServer) -> None:
    """A deletion is going on when its commit is looked for; when what is there is listed, it is whole again."""
    path, key = bucket / "run/c", "run/c/.metadata"
    with bucket.checkpointer() as ckpt, ThreadPoolExecutor(1) as thread:
        # A wrapper commits files without documents, as an object that is no DCP metadata.
        ckpt.save(state_of(1), path, storage=GatedStorage(bucket.storage(), []))
        objects = bucket.storage().objects
        _, commit = objects.get(key)
        objects.put(key, encode_tomb("delete", new_ticket()))
        server.rules(Rule("GET .*list-type", hang_s=0.5))
        found = thread.submit(version_in, bucket, path)
        until(lambda: any("list-type" in line for line in server.log))
        objects.put(key, commit)
        assert found.result(30) == 1
