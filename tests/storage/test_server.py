"""The storage in a server of objects: requests, the decision between publishing and discarding, and what is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.storage.local.temp_dir import new_ticket
from aiockpt.storage.objects.cleaning import decide, token_name
from aiockpt.storage.objects.client import ConditionError
from aiockpt.testing import GatedStorage
from tests.object_server import start_server
from tests.places import left_in
from tests.ranks.world import _context
from tests.server_storage import ServerClient, ServerStorage, storage_for_server

pytestmark = pytest.mark.usefixtures("forks")

STATE = {"x": torch.arange(100_000.0), "n": 3}


@pytest.fixture
def storage(server_url: str) -> ServerStorage:
    """A storage that keeps nothing of what was replaced or deleted."""
    return ServerStorage(server_url, grace_s=0.0)


@pytest.fixture
def objects(storage: ServerStorage) -> ServerClient:
    return storage.objects


@pytest.fixture
def path(server_url: str) -> str:
    return f"{server_url}/run/c"


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run a function in threads that begin at the same time; return the results, or the errors."""
    gate = threading.Barrier(count)

    def begin(number: int) -> Any:
        gate.wait()
        try:
            return work(number)
        except (OSError, aiockpt.AiockptError) as exc:
            return type(exc)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


# --- requests -----------------------------------------------------------------------------------------


def test_one_of_many_conditional_puts_succeeds(objects: ServerClient) -> None:
    for round_number in range(20):
        key = f"k{round_number}"
        for only_if in ("", objects.put(f"{key}-other", b"")):
            if only_if:
                only_if = objects.put(key, b"before")
            found = together(6, lambda number, key=key, only_if=only_if: objects.put(key, b"%d" % number, only_if))
            (winner,) = (number for number, each in enumerate(found) if each is not ConditionError)
            facts, data = objects.get(key)
            assert (data, facts.stamp) == (b"%d" % winner, found[winner])
    objects.remove("")


def test_ranges_are_read(objects: ServerClient) -> None:
    data = bytes(range(256)) * 50
    objects.put("o", data, "")
    runs = [(0, 5), (2990, 4020), (12_790, 100), (6999, 2), (20_000, 5), (0, 0)]
    assert objects.ask("get", "o", ranges=runs)[1] == b"".join(data[at : at + length] for at, length in runs)
    seen: list[bytes] = []
    view = memoryview(bytearray(len(data)))
    objects.ask("get", "o", ranges=None, view=view, seen=lambda piece: seen.append(bytes(piece)))
    assert bytes(view) == data == b"".join(seen)
    objects.delete(["o"])


def test_names_up_to_a_delimiter_are_listed(objects: ServerClient) -> None:
    for key in ("a/b/c", "a/b/d", "a/e", "ab"):
        objects.put(key, key.encode())
    found, prefixes = objects.tops("a/")
    assert (list(found), prefixes) == (["e"], ["b"])
    assert {key: facts.size for key, facts in objects.below("a/").items()} == {"b/c": 5, "b/d": 5, "e": 3}
    objects.remove("")


def test_client_that_dies_within_a_request_changes_nothing(server_url: str, objects: ServerClient) -> None:
    code = (
        "import os, struct, sys; from tests.server_storage import *\n"
        "objects = ServerStorage(sys.argv[1]).objects; objects.get('x')\n"
        "from tests.server_storage import _thread\n"
        '(connection,) = _thread.of.values(); text = b\'{"op": "put", "key": "x", "only_if": null}\'\n'
        "connection.send_bytes(text); os.write(connection.fileno(), struct.pack('!i', 1000) + bytes(999))\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, server_url], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert objects.below("") == {}


def test_server_ends_with_the_process_that_has_started_it() -> None:
    code = (
        "import os; from tests.object_server import start_server\n"
        "with start_server(latency_s=0.001) as url:\n"
        "    import psutil; print(psutil.Process().children()[0].pid, url, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, url = done.stdout.split()
    assert url.startswith("aiockpt-test://127.0.0.1:")
    try:
        fd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 60)[0], "the server goes on"
    finally:
        os.close(fd)


def test_requests_that_take_time() -> None:
    with start_server(latency_s=0.002) as url, aiockpt.SyncCheckpointer() as ckpt:
        storage = ServerStorage(url)
        ckpt.save(STATE, f"{url}/c", storage=storage)
        assert torch.equal(ckpt.load(f"{url}/c", storage=storage)["x"], STATE["x"])
    with pytest.raises(OSError):  # also ends this thread's connection
        storage.objects.get("x")


def test_storages_of_urls_need_no_torch() -> None:
    code = (
        "import sys; from tests.server_storage import storage_for_server\n"
        "made = storage_for_server('aiockpt-test://127.0.0.1:9', grace_s=1.0)\n"
        "import aiockpt; aiockpt.storage.register('aiockpt-test', lambda root, **given: made)\n"
        "assert aiockpt.storage.storage_for('aiockpt-test://127.0.0.1:9/a//b/') == (made, 'aiockpt-test://127.0.0.1:9/a/b')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "wrong", ["aiockpt-test://127.0.0.1:9/a/../b", "aiockpt-test://127.0.0.1:99/a", "/a", "file:///a"]
)
def test_other_paths_are_refused(wrong: str) -> None:
    with pytest.raises(aiockpt.AiockptError, match=r"is no path of aiockpt-test://127\.0\.0\.1:9$"):
        ServerStorage("aiockpt-test://127.0.0.1:9").resolve(wrong)


def test_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    url = "aiockpt-test://127.0.0.1:9/c"
    with aiockpt.SyncCheckpointer() as ckpt:
        storage = storage_for_server("aiockpt-test://127.0.0.1:9")
        with pytest.raises(aiockpt.SaveError, match=rf"can't begin to write {url}: .*refused"):
            ckpt.save(STATE, url, storage=storage)
        with pytest.raises(aiockpt.LoadError, match=rf"can't open {url}: .*refused"):
            ckpt.load(url, storage=storage)
        with pytest.raises(aiockpt.DeleteError, match=rf"can't delete {url}: .*refused"):
            ckpt.delete(url, storage=storage)


# --- publishing, and discarding -------------------------------------------------------------------------


async def _begun(storage: ServerStorage, path: str, workers: Workers, **given: Any) -> Any:
    transaction = await storage.begin(path, overwrite=given.pop("overwrite", False), workers=workers, **given)
    await transaction.write_files({"__0_0.distcp": b"data"})
    return transaction


@pytest.mark.asyncio
async def test_of_publishing_and_discarding_one_succeeds(storage: ServerStorage, path: str, workers: Workers) -> None:
    won: Counter[bool] = Counter()
    for number in range(40):
        owner = await _begun(storage, f"{path}{number}", workers)
        other = await storage.join(f"{path}{number}", owner.ticket, workers=workers)
        if number == 0:  # at least once each of them is first
            await other.discard_all()
        commit = asyncio.ensure_future(owner.commit({".metadata": b"m"}))
        if number == 1:
            await commit
        outcome, _ = await asyncio.gather(commit, other.discard_all(), return_exceptions=True)
        is_published = storage.record(f"{path}{number}") is not None
        assert is_published == (outcome is None)
        assert isinstance(outcome, aiockpt.errors.CommitError) or is_published
        assert await other.status() == ("published" if is_published else "gone")
        won[is_published] += 1
        await owner.abort()
        if is_published:
            assert storage.record(f"{path}{number}").sizes == {"__0_0.distcp": 4, ".metadata": 1}
    assert left_in(path.rpartition("/")[0]) == []
    assert len(won) == 2, won


@pytest.mark.asyncio
async def test_of_two_that_take_over_one_publishes(storage: ServerStorage, path: str, workers: Workers) -> None:
    owner = await _begun(storage, path, workers)
    taken = [
        await storage.take_over(path, owner.ticket, overwrite=False, workers=workers, stamp=owner.stamp)
        for _ in range(2)
    ]
    ends = await asyncio.gather(*(each.commit({".metadata": b"m"}) for each in taken), return_exceptions=True)
    assert sorted(str(type(end).__name__) for end in ends) == ["CommitError", "NoneType"]
    for each in (*taken, owner):
        await each.abort()
        assert await each.status() == "published"
        await each.release()
    assert left_in(path) == []


@pytest.mark.asyncio
async def test_of_many_saves_to_a_path_one_publishes(storage: ServerStorage, path: str, workers: Workers) -> None:
    saves = [await _begun(storage, path, workers) for _ in range(5)]
    ends = await asyncio.gather(*(each.commit({".metadata": b"m"}) for each in saves), return_exceptions=True)
    assert Counter(map(type, ends)) == {type(None): 1, aiockpt.CheckpointExistsError: 4}
    for each in saves:
        await each.abort()
    assert storage.record(path).token.endswith(f"/{token_name(saves[ends.index(None)].ticket)}/")
    assert left_in(path) == []


@pytest.mark.asyncio
async def test_all_that_overwrite_publish_and_the_last_one_stays(
    storage: ServerStorage, path: str, workers: Workers
) -> None:
    saves = [await _begun(storage, path, workers, overwrite=True) for _ in range(5)]
    await asyncio.gather(*(each.commit({".metadata": b"m"}) for each in saves))
    tokens = {key.split("/")[2] for key in storage.objects.below("") if key.count("/") > 2}
    assert len(tokens) == 1, "what was replaced is gone"


class Lossy(ServerClient):
    """Puts commit objects, or fails to, and loses the answers."""

    lost = 0
    does = True

    def put(self, key: str, data: Any, only_if: str | None = None) -> str:
        if key.endswith("/.metadata") and self.lost:
            self.lost -= 1
            if self.does:
                super().put(key, data, only_if)
            raise ConnectionResetError("the answer was lost")
        return super().put(key, data, only_if)


@pytest.fixture
def lossy(storage: ServerStorage, monkeypatch: pytest.MonkeyPatch) -> Lossy:
    client = Lossy(*storage.objects._address, 60.0)
    monkeypatch.setattr(storage, "objects", client)
    monkeypatch.setattr("aiockpt.storage.objects.transaction._PAUSE_S", 0.0)
    return client


@pytest.mark.asyncio
@pytest.mark.parametrize("does", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
async def test_commit_whose_answer_is_lost_has_happened_or_is_repeated(
    does: bool, overwrite: bool, lossy: Lossy, storage: ServerStorage, path: str, workers: Workers
) -> None:
    if overwrite:
        await (await _begun(storage, path, workers)).commit({".metadata": b"old"})
    lossy.lost, lossy.does = 3, does
    save = await _begun(storage, path, workers, overwrite=overwrite)
    await save.commit({".metadata": b"m"})
    await save.abort()
    assert storage.record(path).token.endswith(f"/{token_name(save.ticket)}/")
    assert (await storage.clean(path.rpartition("/")[0], workers=workers)) == []
    assert left_in(path) == []


@pytest.mark.asyncio
async def test_commit_of_which_nothing_is_known_keeps_what_was_written(
    lossy: Lossy, storage: ServerStorage, path: str, workers: Workers
) -> None:
    lossy.lost, lossy.does = 1000, False
    save = await _begun(storage, path, workers)
    with pytest.raises(aiockpt.errors.CommitError, match="it is not known whether"):
        await save.commit({".metadata": b"m"})
    await save.abort()
    assert (await save.sizes()) == {"__0_0.distcp": 4}
    await save.release()
    storage.objects.remove("")


@pytest.mark.asyncio
async def test_save_that_is_given_up_while_it_commits_is_not_published(
    storage: ServerStorage, path: str, workers: Workers
) -> None:
    save = await _begun(storage, path, workers)
    save.revoke()
    with pytest.raises(aiockpt.errors.CommitError, match="was given up before it was published"):
        await save.commit({".metadata": b"m"})
    await save.abort()
    assert storage.objects.below("") == {}


# --- readers of what is replaced or deleted ---------------------------------------------------------------


def test_reader_goes_on_until_what_it_reads_is_removed(server_url: str, path: str) -> None:
    patient, hasty = ServerStorage(server_url), ServerStorage(server_url, grace_s=0.0)
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, path, storage=patient)
        with ckpt.open(path, storage=patient) as reader:
            ckpt.save({"x": torch.zeros(3)}, path, storage=patient, overwrite=True)
            assert torch.equal(reader.read("x"), STATE["x"])
            assert ckpt.clean(f"{server_url}/run", storage=patient) == []
            assert torch.equal(reader.read("x"), STATE["x"])
            (removed,) = ckpt.clean(f"{server_url}/run", storage=hasty)
            assert removed.startswith(f"{path}/aiockpt-")
            with pytest.raises(aiockpt.CheckpointNotFoundError, match="was replaced or deleted while it was read"):
                reader.read("x")
        assert ckpt.load(path, storage=patient)["x"].tolist() == [0, 0, 0]


# --- what is left -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "age_s", "owners", "is_old", "expected"),
    [
        ("open", 1e9, "alive", True, "keep"),
        ("open", 0, "unknown", False, "keep"),
        ("open", 0, "unknown", True, "discard"),
        ("open", 0, "dead", False, "discard"),
        ("publish", 1e9, "alive", True, "keep"),
        ("publish", 59, "dead", False, "keep"),
        ("publish", 599, "dead", False, "keep"),
        ("publish", 601, "dead", False, "remove"),
        ("publish", 601, "unknown", False, "keep"),
        ("publish", 601, "unknown", True, "remove"),
        ("discard", 0, "alive", False, "remove"),
        ("replaced", 599, "dead", True, "keep"),
        ("replaced", 601, "alive", False, "remove"),
        ("aside", 1e9, "dead", True, "keep"),
        ("", 0, "alive", True, "keep"),
        ("", 0, "dead", False, "remove"),
    ],
)
def test_decision_about_what_no_commit_object_names(
    state: str, age_s: float, owners: Any, is_old: bool, expected: str
) -> None:
    assert decide(state, age_s, owners, is_old=is_old, grace_s=600.0, in_flight_s=60.0) == expected


def test_without_grace_a_put_that_may_be_in_flight_is_waited_for() -> None:
    ages = [decide("publish", age_s, "dead", is_old=False, grace_s=0.0, in_flight_s=60.0) for age_s in (0, 59, 61)]
    assert ages == ["keep", "keep", "remove"]


def test_save_of_a_killed_process_is_removed_by_the_next_one(
    storage: ServerStorage, server_url: str, path: str, python: list[str]
) -> None:
    code = (
        "import os, signal, sys, torch, aiockpt; from aiockpt.testing import FaultyStorage\n"
        "from tests.server_storage import ServerStorage\n"
        "class Killing(FaultyStorage):\n"
        "    async def before(self, step, name):\n"
        "        if step == 'commit': os.kill(os.getpid(), signal.SIGKILL)\n"
        "with aiockpt.SyncCheckpointer() as ckpt:\n"
        "    ckpt.save({'x': torch.ones(9)}, sys.argv[2], storage=Killing(ServerStorage(sys.argv[1])))"
    )
    for again in ("save", "clean"):
        done = subprocess.run([*python, "-c", code, server_url, path], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        assert [key for key in left_in(server_url) if key.endswith("__0_0.distcp")]
        with aiockpt.SyncCheckpointer() as ckpt:
            with pytest.raises(aiockpt.CheckpointNotFoundError):
                ckpt.load(path, storage=storage)
            if again == "save":
                ckpt.save(STATE, path, storage=storage)
                ckpt.delete(path, storage=storage)
            else:
                assert len(ckpt.clean(f"{server_url}/run", storage=storage)) == 1
        assert storage.objects.below("") == {}


class Killing(ServerClient):
    """Kills its process at a request."""

    def __init__(self, inner: ServerClient, nth: int) -> None:
        super().__init__(*inner._address, 60.0)
        self._left = nth

    def ask(self, op: str, key: str, *args: Any, **given: Any) -> Any:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().ask(op, key, *args, **given)


def _save_and_die(url: str, path: str, step: int, nth: int) -> None:
    storage = ServerStorage(url)
    storage.objects = Killing(storage.objects, nth)
    with aiockpt.SyncCheckpointer(io_threads=1) as ckpt:
        ckpt.save({"x": torch.full((9,), step), "step": step}, path, storage=storage, overwrite=True)


@pytest.mark.kills
def test_kill_before_any_request_leaves_one_whole_checkpoint(
    storage: ServerStorage, server_url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.storage.objects.cleaning.IN_FLIGHT_S", 0.0)
    there = 0
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"x": torch.full((9,), there), "step": there}, path, storage=storage)
        found = set()
        for nth in range(1, 100):
            process = _context.Process(target=_save_and_die, args=(server_url, path, nth, nth))
            process.start()
            process.join()
            loaded = ckpt.load(path, storage=storage)
            assert loaded["x"].tolist() == [loaded["step"]] * 9
            assert loaded["step"] in (there, nth)
            found.add(loaded["step"] == nth)
            there = loaded["step"]
            assert ckpt.verify(path, storage=storage).ok
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            ckpt.clean(f"{server_url}/run", storage=storage)
            left = {key.split("/")[2] for key in storage.objects.below("")}
            assert left == {".metadata", storage.record(path).token.split("/")[2]}
        assert (found, process.exitcode) == ({True, False}, 0)
        assert nth > 10
        ckpt.delete(path, storage=storage)
        ckpt.clean(f"{server_url}/run", storage=storage)  # what the last save has replaced
    assert storage.objects.below("") == {}


def test_what_a_living_process_writes_is_never_removed(storage: ServerStorage, server_url: str, path: str) -> None:
    gates = GatedStorage(storage, ["commit"])
    with aiockpt.SyncCheckpointer() as ckpt:
        save = ckpt.submit(STATE, path, storage=gates)
        gates.reached["commit"].result(60)
        assert ckpt.clean(f"{server_url}/run", storage=storage, older_than_s=0.0) == []
        gates.open("commit")
        save.written.result(60)
        assert ckpt.verify(path, storage=storage).ok


@pytest.mark.asyncio
async def test_ticket_is_taken_once(storage: ServerStorage, path: str, workers: Workers) -> None:
    ticket = storage.new_ticket(path)
    owner = await _begun(storage, path, workers, ticket=ticket)
    with pytest.raises(aiockpt.errors.WriteError, match="can't begin to write"):
        await storage.begin(path, overwrite=False, workers=workers, ticket=ticket)
    with pytest.raises(aiockpt.errors.WriteError, match="is not there"):
        await storage.join(path, new_ticket(), workers=workers)
    for wrong in ("../c", "state", f"{ticket}-part-1"):
        with pytest.raises(aiockpt.errors.WriteError, match="is no ticket"):
            await storage.join(path, wrong, workers=workers)
    stamp = owner.stamp
    await owner.abort()
    again = await storage.begin(path, overwrite=False, workers=workers, ticket=ticket)
    assert again.stamp != stamp
    assert (await owner.status(), await again.status()) == ("gone", "open")
    await again.abort()


# --- names ------------------------------------------------------------------------------------------------


def test_paths_within_a_checkpoint_and_above_others_are_refused(storage: ServerStorage, server_url: str) -> None:
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(STATE, f"{server_url}/a/b", storage=storage)
        for path in (f"{server_url}/a/b/c/d", f"{server_url}/a"):
            for overwrite in (False, True):
                with pytest.raises(aiockpt.CheckpointExistsError):
                    ckpt.save(STATE, path, storage=storage, overwrite=overwrite)
        with pytest.raises(aiockpt.DeleteError, match="is no checkpoint of aiockpt, but has b below it"):
            ckpt.delete(f"{server_url}/a", storage=storage)
        with pytest.raises(aiockpt.CheckpointNotFoundError, match="holds one: b; add this to the path"):
            ckpt.load(f"{server_url}/a", storage=storage)
        assert ckpt.verify(f"{server_url}/a/b", storage=storage).ok


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_checkpoints_of_a_transaction_are_found_by_their_names(
    writer: Any, storage: ServerStorage, server_url: str
) -> None:
    path = f"{server_url}/run/step-1"
    with aiockpt.SyncCheckpointer(process_group=None, writer=writer) as ckpt:
        with ckpt.transaction(path, storage=storage) as tx:
            tx.save({"w": torch.arange(5)}, "model")
            tx.save({"m": torch.arange(7)}, "optim")
        tx.written.result()
        assert ckpt.load(f"{path}/model", storage=storage)["w"].tolist() == [0, 1, 2, 3, 4]
        assert ckpt.load(f"{path}/optim", storage=storage)["m"].tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert ckpt.verify(path, storage=storage).ok
        with pytest.raises(aiockpt.CheckpointNotFoundError):
            ckpt.load(f"{path}/opti", storage=storage)
        with storage.look(path) as listing:
            assert listing.folders == ["model", "optim"]
        with storage.look(f"{server_url}/run") as listing:
            assert (listing.folders, listing.files) == (["step-1"], {})
