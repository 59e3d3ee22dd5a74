"""The disk of another host: requests, and servers that are dead, silent, strangers, or asked for what is outside."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

import aiockpt
from aiockpt.core.threads import Workers
from aiockpt.errors import AiockptError, CommitError, CommitUncertainError, WriteError
from aiockpt.storage.base import Storage
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.remote_disk import DiskEndpoint, RemoteDisk
from aiockpt.storage.remote_server import DiskServer
from aiockpt.storage.wrapper import WrapperStorage
from aiockpt.testing import GatedStorage, HangingStorage, StorageConformance
from aiockpt.testing.conformance.suite import metadata_of
from tests.polling import until
from tests.storage.relay import relay_to

DATA, MORE, METADATA = "__0_0.distcp", "__0_1.distcp", ".metadata"
CONTENTS = memoryview(os.urandom(3_000_001))
_LIMIT_S = 60


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiskServer]:
    """Serve the directory of the test."""
    server = DiskServer(LocalStorage(), [str(tmp_path)], hosts=["127.0.0.1"])
    yield server
    assert server.close()


@pytest.fixture
def disk(server: DiskServer) -> Iterator[RemoteDisk]:
    disk = RemoteDisk(server.endpoint, "node17")
    yield disk
    disk.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    group = Workers(8, "aiockpt-test")
    yield group
    group.close()


@pytest.mark.slow
class TestRemoteDisk(StorageConformance):
    """Over a socket."""

    leases = False

    @pytest.fixture(autouse=True)
    def served(self, disk: RemoteDisk) -> None:
        """Use the server of the test."""
        type(self).disk = disk

    disk: RemoteDisk

    def make_storage(self, tmp_path: Path) -> Storage:
        return self.disk


def moved(endpoint: DiskEndpoint, *addresses: tuple[str, int], **changed: Any) -> DiskEndpoint:
    """Return an endpoint with other addresses, or another secret."""
    return endpoint._replace(link=endpoint.link._replace(addresses=addresses or endpoint.link.addresses, **changed))


def hidden_in(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


async def save(disk: Storage, path: str, workers: Workers) -> None:
    """Save a checkpoint of a large file and a small one, or remove what was written of it."""
    transaction = await disk.begin(path, overwrite=False, workers=workers)
    try:
        sink = await transaction.create(DATA, len(CONTENTS))
        for at in range(0, len(CONTENTS), 1 << 20):
            await sink.write(CONTENTS[at : at + (1 << 20)])
        await sink.finish()
        await transaction.write_files({MORE: b"more"})
        await transaction.commit({METADATA: metadata_of("m")})
    except CommitUncertainError:
        raise
    except BaseException:
        with suppress(WriteError):
            await transaction.abort()
        raise


async def load(disk: Storage, path: str, workers: Workers) -> None:
    """Look at the directory of a checkpoint, and read the checkpoint."""
    with await workers.run(disk.look, disk.split(path)[0]) as listing:
        await workers.run(listing.list_below)
        assert await workers.run(listing.fetch, f"{disk.split(path)[1]}/{MORE}", 0, 9) == b"more"
    source = await disk.open(path, workers=workers)
    try:
        assert source.files == {DATA: len(CONTENTS), MORE: 4, METADATA: len(metadata_of("m"))}
        view = memoryview(bytearray(len(CONTENTS)))
        await workers.run(source.read_runs, DATA, [(5, 7), (2_000_000, 3)], view[:10])
        assert view[:10] == bytes(CONTENTS[5:12]) + bytes(CONTENTS[2_000_000:2_000_003])
        await workers.run(source.read, DATA, 0, view)
        assert view == CONTENTS
    finally:
        await workers.run(source.close)


# --- the network ------------------------------------------------------------------------------------------


@pytest.mark.kills
@pytest.mark.asyncio
async def test_cut_before_any_answer_leaves_all_or_nothing(
    server: DiskServer, workers: Workers, tmp_path: Path
) -> None:
    """Of a save, and of a load. The error names the host, and what comes after finds new connections."""
    path, ends = str(tmp_path / "c"), set[str]()
    with relay_to(server.endpoint.link.addresses[0]) as relay:
        disk = RemoteDisk(moved(server.endpoint, relay.address), "node17")
        for nth in range(1, 200):
            relay.passed, relay.cut_at = 0, nth
            try:
                await save(disk, path, workers)
                await load(disk, path, workers)
            except (OSError, AiockptError) as exc:
                assert "node17" in str(exc)
                ends.add(type(exc).__name__)
            was_cut, relay.cut_at = relay.cut_at is None, None
            until(lambda: not server.served)
            assert hidden_in(tmp_path) == []
            if (tmp_path / "c").exists():
                await load(disk, path, workers)
                await disk.delete(path, workers=workers)
            if not was_cut:
                break
        disk.close()
    assert not was_cut
    assert ends >= {"WriteError", "LoadError", "ConnectionError"}


def test_damage_on_the_way_is_found(server: DiskServer, workers: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    asyncio.run(save(LocalStorage(), path, workers))
    with relay_to(server.endpoint.link.addresses[0]) as relay:
        disk = RemoteDisk(moved(server.endpoint, relay.address), "node17")
        source = asyncio.run(disk.open(path, workers=workers))
        relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 4]) if len(data) > 1000 else data
        with pytest.raises(aiockpt.LoadError, match=r"node17 .* CRC-32 differs"):
            source.read_bytes(DATA, 0, len(CONTENTS))
        source.close()
        disk.close()


@pytest.mark.parametrize("case", ["no such port", "another network", "another secret"])
def test_server_that_cannot_be_reached_is_an_error_that_names_its_host(
    case: str, server: DiskServer, workers: Workers, tmp_path: Path
) -> None:
    endpoint, text = moved(server.endpoint, ("127.0.0.1", 1)), "Errno 111"
    if case == "another network":
        endpoint, text = moved(server.endpoint, namespace="another"), "another network only"
    elif case == "another secret":
        endpoint, text = moved(server.endpoint, secret=bytes(32)), "closed|reset|bytes|secret"
    disk, path = RemoteDisk(endpoint, "node17"), str(tmp_path / "c")
    for kind, call in (
        (aiockpt.LoadError, lambda: asyncio.run(disk.open(path, workers=workers))),
        (WriteError, lambda: asyncio.run(disk.begin(path, overwrite=False, workers=workers))),
        (aiockpt.DeleteError, lambda: asyncio.run(disk.delete(path, workers=workers))),
        (OSError, lambda: disk.look(path)),
    ):
        with pytest.raises(kind, match=f"host node17 does not answer .*{text}"):  # type: ignore[arg-type]
            call()
    assert disk.stamp(path) is None


class Silent:
    """Addresses at which connections are made, but nobody answers, as of a host that is frozen or has no power."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.listening.setblocking(False)
        self.address: tuple[str, int] = self.listening.getsockname()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()

    def asked(self) -> int:
        """Return how often it was connected to since the last call."""
        count = 0
        with suppress(BlockingIOError):
            while True:
                self.listening.accept()[0].close()
                count += 1
        return count


@pytest.mark.slow
def test_silent_host_is_not_asked_again_for_a_while(server: DiskServer, tmp_path: Path) -> None:
    with Silent() as silent:
        disk = RemoteDisk(moved(server.endpoint, silent.address), "node17", stall_s=0.5)
        for _ in range(20):
            with pytest.raises(
                OSError, match=r"host node17 does not answer .*nothing came from 127\.0\.0\.1 for 0\.5 s"
            ):
                disk.look(str(tmp_path))
            if silent.asked() == 0:
                break
        else:
            pytest.fail("each call has asked it")
        until(lambda: disk.stamp(str(tmp_path)) is None and silent.asked() == 1)  # it is, after that


def test_silent_host_that_is_back_is_asked_as_before(
    server: DiskServer, disk: RemoteDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Silent() as silent:
        monkeypatch.setattr(disk._client, "endpoint", moved(server.endpoint, silent.address))
        monkeypatch.setattr(disk._client, "stall_s", 0.2)
        with pytest.raises(ConnectionError, match="nothing came"):
            disk.look(str(tmp_path))
    monkeypatch.undo()
    until(lambda: disk.stamp(str(tmp_path)) is not None)
    with disk.look(str(tmp_path)) as listing:
        assert listing.folders == []


def test_addresses_are_tried_together(server: DiskServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent, such as of a network that is cut, holds up no other; of several that answer, one is used."""
    monkeypatch.setattr("aiockpt.storage.remote_disk.HELLO_S", 3600.0)
    (own,) = server.endpoint.link.addresses
    with Silent() as silent:
        disk = RemoteDisk(moved(server.endpoint, silent.address, ("127.0.0.1", 1), own, own), "node17", stall_s=3600.0)
        assert disk.stamp(str(tmp_path)) is not None
        disk.close()
    until(lambda: not server._threads or all(not thread.is_alive() for thread in server._threads))


# --- what is served ---------------------------------------------------------------------------------------


def test_paths_outside_are_refused(server: DiskServer, disk: RemoteDisk, workers: Workers, tmp_path: Path) -> None:
    beside = tmp_path.parent / f"{tmp_path.name}-2"
    for path in (str(beside / "c"), str(tmp_path / ".." / "c"), str(beside), "/etc", "/"):
        with pytest.raises(PermissionError, match="nothing else is served"):
            disk.look(path)
        with pytest.raises(aiockpt.LoadError, match="nothing else is served"):
            asyncio.run(disk.open(path, workers=workers))
        with pytest.raises(WriteError, match="nothing else is served"):
            asyncio.run(disk.begin(path, overwrite=True, workers=workers))
        with pytest.raises(aiockpt.DeleteError, match="nothing else is served"):
            asyncio.run(disk.delete(path, workers=workers))
        assert disk.stamp(path) is None
    with pytest.raises(aiockpt.DeleteError, match="nothing else is served"):  # the directory itself
        asyncio.run(disk.delete(str(tmp_path), workers=workers))
    assert not beside.exists()


@pytest.mark.asyncio
async def test_names_that_lead_out_are_refused(disk: RemoteDisk, workers: Workers, tmp_path: Path) -> None:
    transaction = await disk.begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    for name in ("../x", "/tmp/x", "a/../../x"):
        for call in (
            transaction.write_files({name: b"x"}),
            transaction.put_sidecar(name, b"x"),
            transaction.get_sidecar(name),
        ):
            with pytest.raises(WriteError, match="no name of a file within a checkpoint"):
                await call
        with pytest.raises(CommitError, match="no name of a file within a checkpoint"):
            await transaction.commit({name: b"x"})
    await transaction.commit({METADATA: metadata_of("m")})
    source = await disk.open(str(tmp_path / "c"), workers=workers)
    with pytest.raises(aiockpt.errors.UnsafeCheckpointError):
        await workers.run(source.read_bytes, "../x", 0, 1)
    await workers.run(source.close)
    with pytest.raises(OSError, match="no name of a file"), disk.look(str(tmp_path / "c")) as listing:
        listing.fetch("../../x", 0, 1)
    with pytest.raises(PermissionError):
        disk.set_aside(str(tmp_path / "c"), ["../x"])
    assert os.listdir(tmp_path) == ["c"]


# --- processes --------------------------------------------------------------------------------------------

SERVER = """
import os, pickle, signal, sys
from aiockpt.storage.local.storage import LocalStorage
from aiockpt.storage.remote_server import DiskServer
from aiockpt.storage.wrapper import WrapperStorage
class Killing(WrapperStorage):
    async def before(self, step, name):
        if step == sys.argv[2]: os.kill(os.getpid(), signal.SIGKILL)
    def before_read(self, name, offset, nbytes):
        if sys.argv[2] == "read": os.kill(os.getpid(), signal.SIGKILL)
server = DiskServer(Killing(LocalStorage()), [sys.argv[1]], hosts=["127.0.0.1"])
if sys.argv[2] == "fork" and not os.fork():
    os.read(0, 1), os._exit(0)
print(os.getpid(), pickle.dumps(server.endpoint).hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def served_apart(directory: Path, step: str, stall_s: float = 3600.0) -> Iterator[tuple[int, RemoteDisk]]:
    """Return the process of a server that kills itself before a step, and its disk."""
    command = [sys.executable, "-c", SERVER, str(directory), step]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, endpoint = process.stdout.readline().split()
        disk = RemoteDisk(pickle.loads(bytes.fromhex(endpoint)), "node17", stall_s=stall_s)
        try:
            yield int(pid), disk
        finally:
            disk.close()
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit", "open", "read", "delete", "abort"])
@pytest.mark.asyncio
async def test_server_that_is_killed(step: str, workers: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "c")

    async def use() -> None:
        if step == "abort":
            await (await disk.begin(path, overwrite=False, workers=workers)).abort()
        await save(disk, path, workers)
        await load(disk, path, workers)
        await disk.delete(path, workers=workers)

    with served_apart(tmp_path, step) as (_, disk):
        with pytest.raises(AiockptError, match="host node17 does not answer") as caught:
            await use()
        with pytest.raises(aiockpt.LoadError, match="host node17 does not answer"):
            await disk.open(path, workers=workers)
    kinds = {"commit": CommitUncertainError, "open": aiockpt.LoadError, "read": aiockpt.LoadError}
    assert isinstance(caught.value, kinds.get(step, aiockpt.DeleteError if step == "delete" else WriteError))
    await LocalStorage().clean(str(tmp_path), workers=workers)
    assert hidden_in(tmp_path) == []
    assert (tmp_path / "c").exists() == (step in ("open", "read", "delete"))


@pytest.mark.slow
def test_frozen_server_is_left_after_a_limit(workers: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    asyncio.run(save(LocalStorage(), path, workers))
    with served_apart(tmp_path, "", stall_s=1.0) as (pid, disk):
        source = asyncio.run(disk.open(path, workers=workers))
        transaction = asyncio.run(disk.begin(str(tmp_path / "d"), overwrite=False, workers=workers))
        os.kill(pid, signal.SIGSTOP)
        until(lambda: all(") T " in each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")))
        with pytest.raises(aiockpt.LoadError, match="host node17 does not answer"):
            source.read_bytes(DATA, 0, 100)
        with pytest.raises(aiockpt.LoadError, match="host node17 does not answer"):
            asyncio.run(disk.open(path, workers=workers))
        with pytest.raises(WriteError, match="host node17 does not answer"):
            asyncio.run(transaction.abort())
        os.kill(pid, signal.SIGCONT)
        until(lambda: disk.stamp(path) is not None)  # it was not asked again at once
        asyncio.run(load(disk, path, workers))
        source.close()
        until(lambda: hidden_in(tmp_path) == [])


def test_fork_of_a_server_does_not_keep_its_connections(workers: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    asyncio.run(save(LocalStorage(), path, workers))
    with served_apart(tmp_path, "fork") as (pid, disk):
        source = asyncio.run(disk.open(path, workers=workers))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aiockpt.LoadError, match="host node17 does not answer"):
            source.read_bytes(DATA, 0, 100)
        with pytest.raises(aiockpt.LoadError, match="host node17 does not answer"):
            asyncio.run(disk.open(path, workers=workers))
        source.close()


CLIENT = """
import asyncio, os, pickle, signal, sys
from aiockpt.core.threads import Workers
disk, workers = pickle.loads(bytes.fromhex(sys.argv[1])), Workers(4, "aiockpt-test")
async def main():
    path, how = sys.argv[2:]
    if how == "fork":
        source = await disk.open(path, workers=workers)
        child = os.fork()
        if not child:
            disk.stamp(path)
            os._exit(disk.stamp(path) is None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(source.read_bytes("__0_0.distcp", 0, 100)) == 100
        return
    transaction = await disk.begin(path, overwrite=False, workers=workers)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        sink = await transaction.create(name, 8000)
        await sink.write(memoryview(bytes(4096)))
        if name == "__0_0.distcp":
            await sink.write(memoryview(bytes(8000 - 4096)))
            await sink.finish()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def run_client(disk: RemoteDisk, path: str, how: str) -> int:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", CLIENT, pickle.dumps(disk).hex(), path, how]
    return subprocess.run(command, timeout=_LIMIT_S, check=False).returncode


@pytest.mark.slow
def test_what_a_killed_client_has_begun_is_removed(server: DiskServer, disk: RemoteDisk, tmp_path: Path) -> None:
    assert run_client(disk, str(tmp_path / "c"), "begin") == -signal.SIGKILL
    until(lambda: not server.served)
    assert hidden_in(tmp_path) == []


def test_forked_client_makes_connections_of_its_own(disk: RemoteDisk, workers: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    asyncio.run(save(disk, path, workers))
    assert run_client(disk, path, "fork") == 0


# --- commits ----------------------------------------------------------------------------------------------


class LateStorage(WrapperStorage):
    """Stops before a commit until it is revoked or the gate is opened, or else after it."""

    def __init__(self, step: str) -> None:
        gates = GatedStorage(LocalStorage(), [step])
        super().__init__(gates)
        self.step, self.gates = step, gates

    async def begin(self, path: str, **given: Any) -> Any:
        transaction = await super().begin(path, **given)
        commit, revoke = transaction.commit, transaction.revoke

        async def late(*documents: Any) -> None:
            await commit(*documents)
            await self.gates.before("finalize", path)

        def revoked() -> None:
            revoke()
            if self.step == "commit":
                self.gates.open("commit")

        transaction.commit, transaction.revoke = late, revoked  # type: ignore[method-assign]
        return transaction

    async def reached(self) -> None:
        await asyncio.to_thread(self.gates.reached[self.step].result, _LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "revoked"])
@pytest.mark.parametrize("step", ["commit", "finalize"], ids=["before", "after"])
@pytest.mark.asyncio
async def test_outcome_of_a_commit_without_an_answer_is_found(
    step: str, how: str, workers: Workers, tmp_path: Path
) -> None:
    """If the connection ends before it has published, it is given up; after that, it has succeeded."""
    storage, path = LateStorage(step), str(tmp_path / "c")
    server = DiskServer(storage, [str(tmp_path)], hosts=["127.0.0.1"])
    with relay_to(server.endpoint.link.addresses[0]) as relay:
        disk = RemoteDisk(moved(server.endpoint, relay.address), "node17")
        transaction = await disk.begin(path, overwrite=False, workers=workers)
        committing = asyncio.ensure_future(transaction.commit({METADATA: metadata_of("m")}))
        await storage.reached()
        if how == "cut":
            relay.cut()
        else:
            transaction.revoke()
        if step == "commit":
            with pytest.raises(CommitError, match="node17"):
                await committing
            await transaction.abort()
            assert os.listdir(tmp_path) == []
        else:
            storage.gates.open(step)
            await committing
            assert os.listdir(path) == [METADATA]
        disk.close()
    assert server.close()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_client_waits_for_a_server_that_works(workers: Workers, tmp_path: Path) -> None:
    """However long it takes: it is not silent."""
    storage, path = LateStorage("finalize"), str(tmp_path / "c")
    server = DiskServer(storage, [str(tmp_path)], hosts=["127.0.0.1"])
    with relay_to(server.endpoint.link.addresses[0]) as relay:
        disk = RemoteDisk(moved(server.endpoint, relay.address), "node17", stall_s=1.0)
        transaction = await disk.begin(path, overwrite=False, workers=workers)
        committing = asyncio.ensure_future(transaction.commit({METADATA: metadata_of("m")}))
        await storage.reached()
        before = relay.passed
        await asyncio.to_thread(until, lambda: relay.passed > before + 8)
        assert not committing.done()
        storage.gates.open("finalize")
        await committing
        disk.close()
    assert server.close()


# --- several at once, and ends ----------------------------------------------------------------------------


def test_threads_and_loops_share_a_disk(disk: RemoteDisk, workers: Workers, tmp_path: Path) -> None:
    asyncio.run(save(disk, str(tmp_path / "shared"), workers))
    source = asyncio.run(disk.open(str(tmp_path / "shared"), workers=workers))

    def use(number: int) -> None:
        for at in range(number, 3_000_000, 100_000):
            assert source.read_bytes(DATA, at, 70_000) == CONTENTS[at : at + 70_000]
        path = str(tmp_path / f"c-{number}")
        asyncio.run(save(disk, path, workers))
        asyncio.run(load(disk, path, workers))

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(use, range(12)))
    source.close()
    with pytest.raises(aiockpt.LoadError, match="was closed before"):
        source.read_bytes(DATA, 0, 1)


@pytest.mark.asyncio
async def test_close_ends_what_is_in_flight(workers: Workers, tmp_path: Path) -> None:
    """A copy that hangs is left behind after a limit, and removed when it goes on."""
    storage = HangingStorage(LocalStorage(), "write")
    server = DiskServer(storage, [str(tmp_path)], hosts=["127.0.0.1"])
    disk = RemoteDisk(server.endpoint, "node17")
    transaction = await disk.begin(str(tmp_path / "c"), overwrite=False, workers=workers)
    writing = asyncio.ensure_future(transaction.write_files({DATA: CONTENTS[:8192]}))
    await asyncio.to_thread(storage.reached.result, _LIMIT_S)
    assert not await asyncio.to_thread(server.close, 0.2)
    with pytest.raises(WriteError, match="host node17 does not answer"):
        await writing
    with pytest.raises(WriteError, match="host node17 does not answer"):
        await transaction.abort()
    storage.recover()
    assert await asyncio.to_thread(server.close, _LIMIT_S)
    assert await asyncio.to_thread(server.close)
    assert hidden_in(tmp_path) == []
    disk.close()


@pytest.mark.asyncio
async def test_connection_of_what_has_ended_serves_others(
    server: DiskServer, disk: RemoteDisk, workers: Workers, tmp_path: Path
) -> None:
    """A transaction ends with its release: until then its sidecar files may be removed."""
    path, opened = str(tmp_path / "c"), list[object]()
    for _ in range(3):
        transaction = await disk.begin(path, overwrite=True, workers=workers)
        await transaction.put_sidecar("part-1", b"x")
        await transaction.commit({METADATA: metadata_of("m")})
        await transaction.delete_sidecar("part-1")
        await transaction.release()
        await transaction.release()
        await transaction.abort()
        source = await disk.open(path, workers=workers)
        await workers.run(source.close)
        with await workers.run(disk.look, path) as listing:
            assert listing.files == {METADATA: len(metadata_of("m"))}
        opened += [transaction, source, listing]
    assert len(server._threads) == 1


def test_connection_that_is_not_used_is_ended(
    server: DiskServer, disk: RemoteDisk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("aiockpt.storage.remote_server.IDLE_S", 0.05)

    def alive() -> int:
        return sum(thread.is_alive() for thread in server._threads)

    with disk.look(str(tmp_path)) as listing:
        assert disk.stamp(str(tmp_path)) is not None
        assert len(server._threads) == 2
        until(lambda: alive() == 1)
        listing.list_below()
    until(lambda: alive() == 0)
    assert disk.stamp(str(tmp_path)) is not None


@pytest.mark.slow
def test_silent_client_is_left_after_a_limit(workers: Workers, tmp_path: Path) -> None:
    server = DiskServer(LocalStorage(), [str(tmp_path)], hosts=["127.0.0.1"], stall_s=0.2)
    disk = RemoteDisk(server.endpoint, "node17")
    transaction: Any = asyncio.run(disk.begin(str(tmp_path / "c"), overwrite=False, workers=workers))
    transaction._line.home._socket.sendall(b"half a message")
    until(lambda: not server.served)
    assert hidden_in(tmp_path) == []
    disk.close()
    assert server.close()
